"""What a killed engine leaves in /dev/shm: seen while it lives, removed when it can be told for sure to be its own.

vLLM's processes talk through named shared memory, hundreds of megabytes of which stay when they are killed. A segment
is removed only if all of this holds: its name is one that Python, torch or UCX makes up; a process of the dead engine
had it mapped; it belongs to this user and is no older than that life; it is the same file still; and no living process
has it mapped. A process of this user whose mappings may not be read counts as one that has, unless it is older than
the engine: the names are random and told to an engine's own processes only. Anything in doubt stays. The supervisor
alone does this: where it was killed itself, segments stay.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from antiphon.supervisor import procfs

_FOLDER = "/dev/shm/"
_NAME = re.compile(r"psm_[0-9a-f]{8}|torch_\d+_\d+_\d+|ucx_shm_posix_[0-9a-zA-Z_]+")
_CLOCK_SLACK_S = 1.0
"""File times are those of the last timer tick."""


@dataclass(frozen=True)
class Segment:
    """One file in /dev/shm, as it was seen mapped."""

    path: str
    device: int
    inode: int
    num_bytes: int
    """Bytes that it occupies."""
    start_ticks: int
    """When the engine that had it mapped was started."""


def mapped_segments(session: procfs.Session, since_s: float) -> frozenset[Segment]:
    """The segments that processes of ``session`` have mapped and that were made since ``since_s``, Unix seconds."""
    paths: set[str] = set()
    for member in procfs.members([session]):
        with suppress(PermissionError):
            paths |= _mapped_paths(member.pid)
    made_up = {path for path in paths if _NAME.fullmatch(path.removeprefix(_FOLDER))}
    return frozenset(
        Segment(path, stat.st_dev, stat.st_ino, stat.st_blocks * 512, session.start_ticks)
        for path in made_up
        if (stat := _own_file(path)) is not None and stat.st_ctime >= since_s - _CLOCK_SLACK_S
    )


def remove_unused(segments: Iterable[Segment]) -> list[Segment]:
    """Remove those of ``segments`` that no living process has mapped; returns them. Blocks for some milliseconds."""
    same = [segment for segment in segments if _is_same_file(segment)]
    in_use = _paths_in_use(min(segment.start_ticks for segment in same)) if same else None
    if in_use is None:
        return []
    removed = []
    for segment in same:
        if segment.path not in in_use:
            try:
                os.unlink(segment.path)
            except OSError:
                continue  # removed by another, or not ours to remove
            removed.append(segment)
    return removed


def _own_file(path: str) -> os.stat_result | None:
    """The file at ``path`` if it is this user's."""
    try:
        stat = os.lstat(path)
    except OSError:
        return None
    return stat if stat.st_uid == os.geteuid() else None


def _is_same_file(segment: Segment) -> bool:
    stat = _own_file(segment.path)
    return stat is not None and (stat.st_dev, stat.st_ino) == (segment.device, segment.inode)


def _paths_in_use(start_ticks: int) -> set[str] | None:
    """What living processes have mapped below /dev/shm; None where one that may matter cannot be looked at."""
    found: set[str] = set()
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            found |= _mapped_paths(int(entry))
        except PermissionError:
            if _may_matter(int(entry), start_ticks):
                return None
    return found


def _mapped_paths(pid: int) -> set[str]:
    """Files below /dev/shm that a process has mapped; none when it has ended. Raises PermissionError."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line for line in file if _FOLDER in line]
    except (FileNotFoundError, ProcessLookupError):
        return set()
    return {line.rstrip("\n").split(maxsplit=5)[5] for line in lines}


def _may_matter(pid: int, start_ticks: int) -> bool:
    """Whether a process is of this user and no older than the engine."""
    stat = procfs.read_stat(pid)
    try:
        is_own = os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except OSError:
        return False
    return is_own and stat is not None and stat.start_ticks >= start_ticks
