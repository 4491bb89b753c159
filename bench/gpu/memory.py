"""Memory that a machine has only once somebody has asked for it: taken, and given back at once.

A virtual machine may begin with a part of its memory and get the rest as it is used. A cache server refuses an arena
that is larger than what is free, and so would not start there. Not for a machine that others use: where memory does not
grow, nearly all that is free is taken for ``GROW_S``. Where enough is free nothing is done. Standard library only.

    python3 bench/gpu/memory.py GB
"""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

PIECE_BYTES = 256 << 20
MARGIN_BYTES = 2 << 30
"""More than a cache server leaves to others, so that it is not refused by a little."""
LOW_BYTES = 1 << 30
"""With less free than that nothing more is taken: the machine gets a moment to grow."""
GROW_S, LIMIT_S = 3.0, 90.0
MADV_POPULATE_WRITE = 23


def free_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """What the kernel says could be taken now."""
    found = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    return int(found["MemAvailable"].split()[0]) << 10


def make_room(num_bytes: int) -> float:
    """Returns when so much is free, or the machine grows no more; the seconds that it took. Raises nothing.

    In a process of its own, which the kernel would end first.
    """
    began_s = time.monotonic()
    if free_bytes() < num_bytes + MARGIN_BYTES:
        argv = [sys.executable, __file__, f"{num_bytes / 1e9}"]
        try:
            subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, timeout=LIMIT_S + 10)
        except (OSError, subprocess.TimeoutExpired):
            pass  # the cache server says what is missing
    return time.monotonic() - began_s


def fill(num_bytes: int) -> int:
    """Takes memory until what is free and what it has would be enough. Returns what it took."""
    taken: list[mmap.mmap] = []
    until_s, grown_s = time.monotonic() + LIMIT_S, time.monotonic()
    while free_bytes() + len(taken) * PIECE_BYTES < num_bytes + MARGIN_BYTES and time.monotonic() < until_s:
        if free_bytes() < LOW_BYTES + PIECE_BYTES:
            if time.monotonic() - grown_s > GROW_S:
                break
            time.sleep(0.05)
            continue
        piece = mmap.mmap(-1, PIECE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        piece.madvise(MADV_POPULATE_WRITE)
        taken.append(piece)
        grown_s = time.monotonic()
    return len(taken) * PIECE_BYTES


def main() -> None:
    """Fills, says how it went, and ends."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    before, began_s = free_bytes() / 1e9, time.monotonic()
    took = fill(int(float(sys.argv[1]) * 1e9)) / 1e9
    sys.stdout.write(f"  {before:.0f} GB were free; {took:.0f} GB taken in {time.monotonic() - began_s:.0f} s\n")
    sys.stdout.flush()
    os._exit(0)  # at once, with all that it has


if __name__ == "__main__":
    main()
