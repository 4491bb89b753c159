"""Memory of this machine, asked in one way by the defaults and by the checks."""

from __future__ import annotations

import re
from pathlib import Path


def mem_available_bytes(*, meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that can be had without swapping, inside the limit of the control group where there is one."""
    available = _number_of(meminfo.read_text(), r"MemAvailable:\s+(\d+) kB") * 1024
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        stat = (cgroup / "memory.stat").read_text()
    except (OSError, ValueError):
        return available
    if not limit.isdigit():
        return available
    # What the kernel gives back under pressure counts as used: a container that has read its weights looks full.
    used -= _number_of(stat, r"inactive_file (\d+)") + _number_of(stat, r"slab_reclaimable (\d+)")
    return min(available, max(0, int(limit) - max(0, used)))


def _number_of(text: str, line: str) -> int:
    """The number in the line of ``text`` that matches, 0 where there is none."""
    match = re.search(rf"^{line}$", text, re.MULTILINE)
    return int(match.group(1)) if match else 0
