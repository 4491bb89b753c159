"""The log files of the children: opening, rotation, limits, and following what is written.

A child writes straight to its file (opened for appending), not through a pipe of the supervisor: a supervisor that is
stopped, slow or dead neither blocks a child nor loses its last lines. The supervisor follows the file by polling its
size.

Invariants: a file is at most ``RUN_BYTES_MAX`` plus what is written within one poll, and at most ``NUM_KEPT`` older
ones are kept. Cutting a file that a child is writing copies it first; lines written between the end of the copy and the
cut (microseconds) are lost, and all of it where the copy cannot be made (a full disk). A fault of the file system is
told once and ends nothing: the follower tries again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

ROTATE_AT_START_BYTES = 8 * 1024 * 1024
"""A file larger than this is put aside before a process starts; a smaller one is appended to, so that the reason of an
earlier end stays beside the new start."""
RUN_BYTES_MAX = 64 * 1024 * 1024
"""A running process's file is put aside at this size, so that a process that repeats an error cannot fill the disk."""
NUM_KEPT = 3
"""Older files kept: at most (NUM_KEPT + 1) x RUN_BYTES_MAX = 256 MiB a process."""
TAIL_BYTES = 256 * 1024
"""How much of the end of a log is read to explain a failure."""
FOLLOW_POLL_S = 0.1
BACKLOG_BYTES_MAX = 4 * 1024 * 1024
"""The follower skips ahead when it is this far behind; the file has everything."""
CUT_RETRY_S = 60.0
"""After a file could not be emptied: a copy of it each poll would keep the disk busy."""
_READ_BYTES = 128 * 1024
_LINE_BYTES_MAX = 16 * 1024


def _kept_path(path: Path, index: int) -> Path:
    return path.with_name(f"{path.name}.{index}")


def _shift(path: Path) -> None:
    """Make room for ``path.1``; the oldest goes."""
    for index in range(NUM_KEPT, 0, -1):
        source = _kept_path(path, index)
        if index == NUM_KEPT:
            source.unlink(missing_ok=True)
        elif source.exists():
            source.replace(_kept_path(path, index + 1))


def open_log(path: Path, *, rotate_bytes: int = ROTATE_AT_START_BYTES) -> int:
    """A descriptor that appends to ``path``, readable by the owner only (prompts may be logged).

    A file larger than ``rotate_bytes`` is put aside first.

    Raises OSError when the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if path.exists() and path.stat().st_size > rotate_bytes:
        _shift(path)
        path.replace(_kept_path(path, 1))
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def cut_log(path: Path) -> OSError | None:
    """Put the content of a file that is being written aside, and empty it. Blocks.

    Returns the fault for which it was emptied without being put aside. Raises OSError when it could not be emptied.
    """
    fault = None
    kept = _kept_path(path, 1)
    try:
        _shift(path)
        shutil.copyfile(path, kept)
        os.chmod(kept, 0o600)
    except OSError as error:
        fault = error
        # Half a copy would hold what little space is left.
        with suppress(OSError):
            kept.unlink(missing_ok=True)
    os.truncate(path, 0)
    return fault


def tail_lines(path: Path, *, start: int, bytes_max: int = TAIL_BYTES) -> list[str]:
    """The last lines of ``path`` written after offset ``start``; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            # A file that was cut in this run begins at zero again.
            first = max(start if start <= size else 0, size - bytes_max)
            file.seek(first)
            raw = file.read(bytes_max)
    except OSError:
        return []
    lines = raw.decode("utf-8", errors="replace").splitlines()
    return lines[1:] if first > start and lines else lines


class LogFollower:
    """Calls ``on_line`` for each line appended to a file, from the loop of the supervisor.

    ``on_trouble`` is called with the first fault of the file system, and not again.
    """

    def __init__(
        self,
        path: Path,
        on_line: Callable[[str], None],
        *,
        start: int,
        on_trouble: Callable[[str], None],
        bytes_max: int = RUN_BYTES_MAX,
    ) -> None:
        self._path = path
        self._on_line = on_line
        self._on_trouble = on_trouble
        self._has_told_trouble = False
        self._offset = start
        self._bytes_max = bytes_max
        self._next_cut_s = 0.0
        self._partial = b""
        self.num_skipped_bytes = 0
        """Bytes that were not handed to ``on_line`` because the follower was too far behind."""
        self.num_cuts = 0

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            await self.poll()
            await asyncio.sleep(FOLLOW_POLL_S)

    async def poll(self) -> None:
        """Hand over what has been appended since the last call; put the file aside when it has grown too large."""
        try:
            size = os.stat(self._path).st_size
        except FileNotFoundError:
            # Somebody removed the log; the child writes to the nameless file, and there is nothing to follow.
            return
        except OSError as error:
            self._tell("followed", error)
            return
        if size < self._offset:
            self._offset = 0
        if size - self._offset > BACKLOG_BYTES_MAX:
            skipped_to = size - _READ_BYTES
            self.num_skipped_bytes += skipped_to - self._offset
            self._offset, self._partial = skipped_to, b""
        while self._offset < size and (part := self._read()):
            self._offset += len(part)
            self._take(part)
            await asyncio.sleep(0)
        if size > self._bytes_max and time.monotonic() >= self._next_cut_s:
            await self._cut()

    def _read(self) -> bytes:
        """The next bytes; none where they cannot be read."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                return file.read(_READ_BYTES)
        except OSError as error:
            self._tell("read", error)
            return b""

    async def _cut(self) -> None:
        try:
            fault = await asyncio.to_thread(cut_log, self._path)
        except OSError as error:
            self._next_cut_s = time.monotonic() + CUT_RETRY_S
            self._tell("emptied", error)
            return
        self._offset = 0
        self.num_cuts += 1
        if fault is not None:
            self._tell("put aside, and was emptied", fault)

    def _tell(self, what: str, error: OSError) -> None:
        if not self._has_told_trouble:
            self._has_told_trouble = True
            self._on_trouble(f"its log {self._path} cannot be {what}: {error.strerror or error}")

    def _take(self, part: bytes) -> None:
        *lines, rest = (self._partial + part).split(b"\n")
        if len(rest) > _LINE_BYTES_MAX:
            lines.append(rest)
            rest = b""
        self._partial = rest
        for line in lines:
            # A progress bar overwrites its line: only the last state of it is of interest.
            text = line.rstrip(b"\r").rpartition(b"\r")[2][:_LINE_BYTES_MAX].decode("utf-8", errors="replace")
            if text.strip():
                self._on_line(text)
