"""Ends what a measurement started, whatever ends the measurement itself; run as a process of its own.

Its standard input is a pipe of the measurement. Lines there: ``session N`` for a session that was started, ``gone N``
for one that has ended, ``folder PATH`` for a temporary folder, and ``end``. Then, or when the pipe is closed, be it by
SIGKILL of the measurement, every process of the sessions left is killed and the folders are removed. Standard library
only.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from pathlib import Path

KILL_FOR_S = 10.0


def members(sessions: set[int]) -> list[int]:
    """Processes of these sessions that are alive."""
    found = []
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) in sessions and fields[0] not in "ZX":
            found.append(int(path.name))
    return found


def kill(sessions: set[int], number: int) -> None:
    """Sends a signal to each process of these sessions."""
    for process in members(sessions):
        try:
            os.kill(process, number)
        except OSError:
            pass  # it has ended


def main() -> None:
    """Until the pipe is closed."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sessions: set[int] = set()
    folders = []
    for line in sys.stdin:
        kind, _, value = line.rstrip("\n").partition(" ")
        if kind == "end":
            break
        if kind == "session":
            sessions.add(int(value))
        elif kind == "gone":
            sessions.discard(int(value))
        else:
            folders.append(value)
    until_s = time.monotonic() + KILL_FOR_S
    while sessions and members(sessions) and time.monotonic() < until_s:
        kill(sessions, signal.SIGKILL)
        time.sleep(0.05)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
