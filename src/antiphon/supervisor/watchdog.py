"""The watchdog process: when the supervisor ends, however it ends, nothing that it started stays.

It reads the supervisor's pipe, one line a change (``add SID START_TICKS MARKER``, ``drop SID``), and at end of file,
which the kernel delivers even after SIGKILL of the supervisor, it ends every process of the sessions that are still
listed: SIGTERM, a short grace, SIGKILL until none is left. Then it ends itself.

Standard library only. It ignores SIGINT, SIGTERM and SIGHUP, because a terminal sends them to it as well; it ends with
its pipe. It starts nothing and restarts nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time

from antiphon.supervisor import procfs

TERM_GRACE_S = 1.5
"""Between SIGTERM and SIGKILL: long enough for Python's resource tracker to remove shared memory."""
KILL_DEADLINE_S = 30.0
"""A process in an uninterruptible wait (a device, a dead file server) can outlive SIGKILL; give up on it after this."""
POLL_S = 0.05
READY_LINE = b"ready\n"
_PR_SET_NAME = 15


def apply_line(sessions: dict[int, procfs.Session], line: str) -> None:
    """Apply one line of the pipe to the listed sessions. A line that is not understood is a bug of the supervisor."""
    verb, _, rest = line.strip().partition(" ")
    if verb == "add":
        sid, ticks, marker = rest.split(" ", 2)
        sessions[int(sid)] = procfs.Session(int(sid), int(ticks), marker)
    else:
        assert verb == "drop", line
        sessions.pop(int(rest), None)


def end_sessions(sessions: list[procfs.Session], *, term_grace_s: float, deadline_s: float) -> list[int]:
    """End every member of ``sessions``; blocks. Returns the pids that could not be ended within the deadline.

    Members that were reparented to the caller (a child subreaper) are reaped; the leaders are left to who started them.
    """
    started = time.monotonic()
    seen: set[int] = set()
    for stat in procfs.members(sessions):
        procfs.send(stat, signal.SIGTERM)
        # A stopped process handles SIGTERM only once it continues.
        procfs.send(stat, signal.SIGCONT)
    while True:
        left = procfs.members(sessions)
        seen |= {stat.pid for stat in left}
        elapsed_s = time.monotonic() - started
        if not left or elapsed_s > deadline_s:
            procfs.reap_orphans(sessions, seen)
            return [stat.pid for stat in left]
        if elapsed_s >= term_grace_s:
            for stat in left:
                procfs.send(stat, signal.SIGKILL)
        time.sleep(POLL_S)


def main() -> int:
    """Run until the end of file of standard input, then clean up. Returns 1 when something could not be ended."""
    parser = argparse.ArgumentParser(prog="antiphon-watchdog")
    parser.add_argument("--deployment", required=True, help="only shown in the process list")
    parser.add_argument("--supervisor", required=True, type=int, help="only shown in the process list")
    parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"antiphon-watch", 0, 0, 0)
    os.chdir("/")
    sessions: dict[int, procfs.Session] = {}
    os.write(sys.stdout.fileno(), READY_LINE)
    for line in sys.stdin:
        # The supervisor may die in the middle of a line; what is incomplete names no session yet.
        if line.endswith("\n"):
            apply_line(sessions, line)
    left = end_sessions(list(sessions.values()), term_grace_s=TERM_GRACE_S, deadline_s=KILL_DEADLINE_S)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
