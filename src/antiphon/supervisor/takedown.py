"""Taking a deployment down from outside: ask its supervisor to stop, wait, and say what remains.

It signals only processes that it has identified by pid and start time. It kills nothing while the supervisor lives:
that is the supervisor's work; what a dead supervisor left behind, it ends.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from antiphon.core.errors import StartError
from antiphon.protocol.state import DeploymentState
from antiphon.supervisor import procfs, store
from antiphon.supervisor.report import is_supervisor_alive, sessions_of
from antiphon.supervisor.watchdog import KILL_DEADLINE_S, TERM_GRACE_S, end_sessions

POLL_S = 0.1
TELL_S = 2.0
SLACK_S = 15.0
"""Added to the grace periods of the router and of the engines: that of the cache servers, killing and reaping."""


@dataclass(frozen=True)
class TakedownResult:
    """What :func:`take_down` found and left."""

    was_up: bool
    is_supervisor_alive: bool
    remaining_pids: tuple[int, ...]
    is_put_away: bool = False
    """Nothing ran any more, though nobody had stopped it: its state now says that it is stopped."""

    @property
    def is_down(self) -> bool:
        """Whether nothing of the deployment runs any more."""
        return not self.is_supervisor_alive and not self.remaining_pids


def default_timeout_s(state: DeploymentState) -> float:
    """How long a clean stop may take: the router's grace, the engines' grace, and some slack."""
    return 2 * state.stop_grace_s + SLACK_S


def take_down(folder: Path, on_progress: Callable[[str], None], *, timeout_s: float | None = None) -> TakedownResult:
    """Stop the deployment whose state is in ``folder``; blocks until it is down or ``timeout_s`` has passed.

    Raises ProtocolError when the state file cannot be understood.
    """
    state = store.read_state(folder)
    if state is None:
        return TakedownResult(was_up=False, is_supervisor_alive=False, remaining_pids=())
    if is_supervisor_alive(state):
        _stop_supervisor(folder, state, on_progress, default_timeout_s(state) if timeout_s is None else timeout_s)
        was_up = True
    else:
        left = procfs.members(sessions_of(state))
        was_up = bool(left)
        if left:
            on_progress(f"the supervisor is gone; ending {len(left)} processes that it left behind")
            end_sessions(sessions_of(state), term_grace_s=TERM_GRACE_S, deadline_s=KILL_DEADLINE_S)
    latest = store.read_state(folder) or state
    remaining = {stat.pid for stat in procfs.members(sessions_of(state) + sessions_of(latest))}
    is_written = False
    if not remaining and latest.stopped_at is None and not is_supervisor_alive(latest):
        is_written = _write_stopped(folder)
    is_alive = is_supervisor_alive(latest)
    return TakedownResult(was_up, is_alive, tuple(sorted(remaining)), is_put_away=is_written and not was_up)


def _write_stopped(folder: Path) -> bool:
    """Say for a supervisor that died that everything is stopped, so that nobody is told of its death again.

    Returns whether it was written: not where another supervisor holds the folder, or the folder cannot be written.
    """
    lock = store.DeploymentLock(folder)
    try:
        lock.acquire()
    except StartError:
        return False
    try:
        state = store.read_state(folder)
        if state is None or is_supervisor_alive(state) or procfs.members(sessions_of(state)):
            return False
        for record in state.processes:
            record.state, record.pid, record.start_ticks = "stopped", None, None
        state.stopped_at, state.is_stopping = time.time(), False
        with suppress(OSError):
            store.write_state(folder, state)
            return True
        return False
    finally:
        lock.release()


def _stop_supervisor(
    folder: Path, state: DeploymentState, on_progress: Callable[[str], None], timeout_s: float
) -> None:
    supervisor = procfs.read_stat(state.supervisor_pid)
    if supervisor is None or supervisor.start_ticks != state.supervisor_start_ticks:
        return
    on_progress(f"stopping (supervisor pid {state.supervisor_pid})")
    procfs.send(supervisor, signal.SIGTERM)
    started = told = time.monotonic()
    while time.monotonic() - started < timeout_s:
        latest = store.read_state(folder) or state
        if not is_supervisor_alive(latest):
            return
        time.sleep(POLL_S)
        if time.monotonic() - told >= TELL_S:
            told = time.monotonic()
            names = [record.name for record in latest.processes if record.state not in ("stopped", "failed")]
            on_progress(f"waiting for {', '.join(names) or 'the supervisor'} ({told - started:.0f} s)")
