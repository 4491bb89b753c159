"""Processes as the kernel reports them: identity, life, and the members of a session.

A process is identified by its pid **and** its start time (in clock ticks since boot): a pid alone may have been reused.
A process belongs to a child of the supervisor when it is in the child's session, or when its environment carries the
child's marker (a grandchild that made a session of its own).

Standard library only: the watchdog imports it. It does not decide when to kill.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass

MARKER_VARIABLE = "ANTIPHON_PROCESS"
"""Environment variable of every process that the supervisor starts: ``deployment/process/incarnation``."""


@dataclass(frozen=True)
class ProcessStat:
    """What ``/proc/PID/stat`` says."""

    pid: int
    state: str
    """One letter: R running, S sleeping, D waiting for a device, T stopped, Z ended and not reaped, X gone."""
    ppid: int
    session: int
    start_ticks: int

    @property
    def is_running(self) -> bool:
        """False once the process has ended, reaped or not."""
        return self.state not in ("Z", "X", "x")


@dataclass(frozen=True)
class Session:
    """A session that the supervisor started; ``sid`` is the pid of its leader."""

    sid: int
    start_ticks: int
    """Start time of the leader: no member started earlier."""
    marker: str
    """Value of ``ANTIPHON_PROCESS`` in the members' environment."""


def read_stat(pid: int) -> ProcessStat | None:
    """The process with this pid, or None when there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            raw = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name is in parentheses and may itself contain parentheses and blanks.
    fields = raw[raw.rindex(b")") + 2 :].split()
    return ProcessStat(pid, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def start_ticks_of(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot, or None when it is not running."""
    stat = read_stat(pid)
    return stat.start_ticks if stat is not None and stat.is_running else None


def is_same_process(pid: int, start_ticks: int) -> bool:
    """Whether the process that had this pid and start time is still running."""
    return start_ticks_of(pid) == start_ticks


def boot_id() -> str:
    """Identifies this boot of the host: pids and start times of another boot mean nothing. Empty where unknown."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def marker_of(pid: int) -> str | None:
    """Value of ``ANTIPHON_PROCESS`` in the environment of this process; None where it is not set, or cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            variables = file.read().split(b"\0")
    except OSError:
        # Another user's process, or one that has just ended: not ours.
        return None
    prefix = f"{MARKER_VARIABLE}=".encode()
    return next((item[len(prefix) :].decode(errors="replace") for item in variables if item.startswith(prefix)), None)


def members(sessions: list[Session]) -> list[ProcessStat]:
    """Every running process of these sessions, wherever it has been reparented to; never the caller itself."""
    if not sessions:
        return []
    # A leader with another start time is a stranger that was given the same pid, and so is its whole session.
    leaders = {session.sid: read_stat(session.sid) for session in sessions}
    by_sid = {
        session.sid: session
        for session in sessions
        if (leader := leaders[session.sid]) is None or leader.start_ticks == session.start_ticks
    }
    markers = {session.marker for session in sessions}
    oldest = min(session.start_ticks for session in sessions)
    found: list[ProcessStat] = []
    for entry in os.listdir("/proc"):
        stat = read_stat(int(entry)) if entry.isdigit() else None
        if stat is None or not stat.is_running or stat.start_ticks < oldest or stat.pid == os.getpid():
            continue
        session = by_sid.get(stat.session)
        if (session is not None and stat.start_ticks >= session.start_ticks) or marker_of(stat.pid) in markers:
            found.append(stat)
    return found


def send(stat: ProcessStat, number: signal.Signals) -> None:
    """Signal this very process; nothing happens when it has ended, even if its pid was reused."""
    if not is_same_process(stat.pid, stat.start_ticks):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.kill(stat.pid, number)


def reap_orphans(sessions: list[Session], pids: set[int]) -> None:
    """Reap those ended children of the caller that are in ``sessions`` or in ``pids``, the sessions' leaders excepted.

    A child subreaper is given its descendants' orphans, and nobody else waits for them.
    """
    sids = {session.sid for session in sessions}
    own = os.getpid()
    for entry in os.listdir("/proc"):
        stat = read_stat(int(entry)) if entry.isdigit() else None
        if stat is None or stat.is_running or stat.ppid != own or stat.pid in sids:
            continue
        if stat.session in sids or stat.pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(stat.pid, os.WNOHANG)
