"""How much memory this process may still take: of the machine, and of the control groups that it runs in.

Page cache and kernel memory that a control group can drop count as free, as the kernel counts them for the machine: a
container that has read its weights looks full. The defaults, the checks before a start and the servers ask here, so
that they agree. It is a snapshot: others take memory at the same time, so that who fills memory asks again before each
piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

KEPT_FREE_BYTES = 256 << 20
"""What a cache server leaves to everything else of the memory that is free."""

_Files = tuple[str, str, tuple[str, ...]]
"""Files of a limit and of what is used, and the fields of ``memory.stat`` that can be dropped."""
_V2_FILES: _Files = ("memory.max", "memory.current", ("inactive_file", "slab_reclaimable"))
_V1_FILES: _Files = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file",))


def available_memory_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process may still take without swapping: the least of the machine and its control groups.

    Args:
        proc: where the process file system is mounted.
        cgroups: where the control groups are mounted.
    """
    return min([_machine_bytes(proc), *_cgroups_left_bytes(proc, cgroups)])


def _machine_bytes(proc: Path) -> int:
    fields = dict(line.split(":", 1) for line in (proc / "meminfo").read_text().splitlines() if ":" in line)
    return int(fields["MemAvailable"].split()[0]) * 1024


def _cgroups_left_bytes(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group of this process, and each that contains it, leaves."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots, files = [cgroups, cgroups / "unified"], _V2_FILES
        elif "memory" in controllers.split(","):
            roots, files = [cgroups / "memory"], _V1_FILES
        else:
            continue
        own = PurePosixPath(path)
        for root in roots:
            # In a container the path may name a group of the host that is not visible: then its root is the container.
            for group in [own, *own.parents]:
                left_bytes = _left_bytes(root / str(group).lstrip("/"), *files)
                if left_bytes is not None:
                    yield left_bytes


def _left_bytes(folder: Path, limit_file: str, usage_file: str, droppable: tuple[str, ...]) -> int | None:
    """What one control group leaves, or None where it has no limit or is not there."""
    try:
        limit_bytes = int((folder / limit_file).read_text())
        usage_bytes = int((folder / usage_file).read_text())
        fields = dict(line.split(" ", 1) for line in (folder / "memory.stat").read_text().splitlines())
        dropped_bytes = sum(int(fields.get(name, "0")) for name in droppable)
    except (OSError, ValueError):
        return None  # no such group, or the word "max"
    return max(0, limit_bytes - max(0, usage_bytes - dropped_bytes))
