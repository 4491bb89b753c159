"""One child process: start, readiness, end, and everything of its session.

States (``ProcessState.state``): ``starting`` → ``ready`` → (``restarting`` → ``starting``)* → ``stopped`` or
``failed``.

Invariants: at most one life at a time; each life has a new incarnation, its own session, and is listed with the guard
before it runs; after :meth:`stop` and after a failed :meth:`start` no member of the session is left, or it is said
which.

It does not decide whether to start again: the supervisor does.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.config.hosts import is_port_taken
from antiphon.config.key_files import read_key
from antiphon.config.masking import masked
from antiphon.config.plan import BEHIND_ENGINES, ProcessPlan
from antiphon.config.units import format_bytes
from antiphon.core.errors import ConfigError, StartError
from antiphon.core.ids import new_incarnation
from antiphon.engine import vllm
from antiphon.protocol.state import ProcessPhase, ProcessState
from antiphon.supervisor import launch, procfs, shared_memory
from antiphon.supervisor.events import EventKind
from antiphon.supervisor.guard import Guard
from antiphon.supervisor.logs import LogFollower, open_log, tail_lines
from antiphon.supervisor.watchdog import KILL_DEADLINE_S, TERM_GRACE_S, end_sessions

READY_POLL_S = 0.2
UNREADY_GRACE_S = 3.0
"""What a process that is still starting gets to end by itself."""
READY_PROBE_TIMEOUT_S = 5.0
FATAL_SETTLE_S = 3.0
"""After a fatal log line: the process usually ends by itself within this, and completes its traceback."""
CACHE_STOP_GRACE_S = 5.0
"""A cache server or coordinator holds no request: it ends within 2 s, and what is not stored yet may be lost."""
PORT_FREE_TIMEOUT_S = 5.0
"""How long a restart waits for the ports of the life before; a first start does not wait."""

OUTSIDE_SIGNALS = frozenset(
    {signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
)
"""Signals that somebody else sends: the log of the process cannot say why, unlike that of one that crashed."""
LOG_SAYS = ". Its log says:"
LAST_LINES = ". Its last log lines:"


@dataclass(frozen=True)
class Surroundings:
    """What every child of one supervisor shares."""

    deployment: str
    log_dir: Path
    start_timeout_s: float
    stop_grace_s: float
    guard: Guard
    kill_now: asyncio.Event
    """Set: no grace any more."""
    on_log: Callable[[str, str], None]
    on_event: Callable[[Child, EventKind, str], None]
    """Called for each change; the child's ``record`` has been changed before."""


class Child:
    """One process of the plan through all its lives."""

    def __init__(self, plan: ProcessPlan, around: Surroundings) -> None:
        self.plan = plan
        self.phase = "starting"
        self.record = ProcessState(
            name=plan.name,
            role=plan.role,
            kind=plan.kind,
            state="stopped",
            ports=dict(plan.ports),
            base_url=plan.base_url,
            log_path=str(around.log_dir / f"{plan.name}.log"),
        )
        self._around = around
        self._log_path = around.log_dir / f"{plan.name}.log"
        self._run_start = 0
        self._started_s = time.monotonic()
        self._process: Process | None = None
        self._session: procfs.Session | None = None
        self._exit: asyncio.Task[int] | None = None
        self._fatal: asyncio.Future[str] | None = None
        self._follower: LogFollower | None = None
        self._follow: asyncio.Task[None] | None = None
        self._segments: frozenset[shared_memory.Segment] = frozenset()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this life began."""
        return time.monotonic() - self._started_s

    async def start(self) -> None:
        """Begin a life and wait until it is ready.

        Raises:
            StartError: it ended, failed, or passed its deadline; nothing of it is left. A cancelled start leaves the
                process to :meth:`stop`.
        """
        assert self._process is None, f"{self.plan.name} has a life already"
        self._started_s = time.monotonic()
        self.phase = "starting"
        self._set_state("starting")
        try:
            await self._wait_ports_free()
            await self._spawn(new_incarnation())
            await self._wait_ready()
            await self._note_segments()
        except StartError as error:
            self.record.last_exit = headline(error.message)
            await self._clear(TERM_GRACE_S)
            raise
        self.record.ready_at = time.time()
        self._set_state("ready")
        self._around.on_event(self, "ready", f"ready after {self.elapsed_s:.1f} s")

    async def wait_ended(self) -> str:
        """Wait until a ready process ends or fails; clears its session. Returns why, the useful log lines included."""
        assert self._exit is not None and self._fatal is not None
        await self._wait_exit_or_fatal(None)
        reason = await self._explain()
        self.record.last_exit = headline(reason)
        await self._clear(TERM_GRACE_S)
        return reason

    async def stop(self) -> None:
        """End this life: SIGTERM to the process, ``stop_grace_s``, then SIGKILL to its session.

        One that is not ready yet has no requests to finish and may not hear SIGTERM before it is: it gets little time.
        """
        how = "stopped"
        is_serving = self.record.state == "ready"
        grace_s = self._around.stop_grace_s
        if not is_serving:
            grace_s = min(grace_s, UNREADY_GRACE_S)
        elif self.plan.kind in BEHIND_ENGINES:
            grace_s = min(grace_s, CACHE_STOP_GRACE_S)
        if self._process is not None and self._session is not None and self._exit is not None:
            await self._note_segments()
            asked_s = time.monotonic()
            leader = procfs.read_stat(self._process.pid)
            if leader is not None and not self._exit.done():
                procfs.send(leader, signal.SIGTERM)
                procfs.send(leader, signal.SIGCONT)
                await self._wait_exit_or_kill(grace_s)
            is_graceful = self._exit.done()
            if is_graceful:
                self.record.last_exit = describe_exit(self._exit.result())
            else:
                self.record.last_exit = f"killed after {time.monotonic() - asked_s:.3g} s"
                how = f"stopped: {self.record.last_exit}"
            await self._clear(TERM_GRACE_S if is_graceful and not self._around.kill_now.is_set() else 0.0)
        if self.record.state != "failed":
            self._set_state("stopped")
            self._around.on_event(self, "stopped", how)

    def mark(self, state: ProcessPhase) -> None:
        """Record a decision of the supervisor: ``restarting`` or ``failed``."""
        assert self._process is None, f"{self.plan.name} still has a life"
        self._set_state(state)

    # --- one life --------------------------------------------------------------------------------------------------

    def _set_state(self, state: ProcessPhase) -> None:
        self.record.state = state
        if state != "ready":
            self.record.ready_at = None

    async def _wait_exit_or_fatal(self, timeout_s: float | None) -> None:
        assert self._exit is not None and self._fatal is not None
        waits: set[asyncio.Future[Any]] = {self._exit, self._fatal}
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)

    async def _wait_exit_or_kill(self, timeout_s: float) -> None:
        assert self._exit is not None
        kill = asyncio.create_task(self._around.kill_now.wait())
        try:
            waits: set[asyncio.Future[Any]] = {self._exit, kill}
            await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            kill.cancel()

    async def _wait_ports_free(self) -> None:
        deadline = time.monotonic() + (PORT_FREE_TIMEOUT_S if self.record.incarnation else 0.0)
        while (taken := await asyncio.to_thread(taken_port, self.plan)) is not None:
            if time.monotonic() >= deadline:
                use, port = taken
                raise StartError(
                    f"{self.plan.name}: port {port} ({use}) is in use by another process",
                    remedy=f"find it with: ss -ltnp 'sport = :{port}'; stop it, or choose another port in the spec",
                )
            await asyncio.sleep(READY_POLL_S)

    async def _spawn(self, incarnation: str) -> None:
        plan = self.plan.born(incarnation)
        marker = f"{self._around.deployment}/{plan.name}/{incarnation}"
        env = {key: value for key, value in os.environ.items() if key not in plan.unset_env}
        env |= _keys_of(plan) | plan.env | {procfs.MARKER_VARIABLE: marker}
        try:
            log_fd = open_log(self._log_path)
        except OSError as error:
            raise StartError(
                f"{plan.name}: its log {self._log_path} cannot be written: {error.strerror}",
                field="supervisor.log_dir",
                remedy="choose a folder that this user can write",
            ) from error
        try:
            started = time.strftime("%Y-%m-%d %H:%M:%S %z")
            banner = f"--- antiphon: {started} starting {marker}: {shlex.join(masked(plan).argv)}\n"
            os.write(log_fd, banner.encode())
            self._run_start = os.fstat(log_fd).st_size
            # -I -S: neither the user's environment nor site-packages can change or slow down the first program.
            command = (sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *plan.argv)
            process = await asyncio.create_subprocess_exec(
                *command, stdin=PIPE, stdout=log_fd, stderr=log_fd, env=env, start_new_session=True
            )
        except OSError as error:
            raise StartError(f"{plan.name} could not be started: {error}") from error
        finally:
            os.close(log_fd)
        self._process = process
        self._exit = asyncio.create_task(process.wait(), name=f"exit of {plan.name}")
        self._fatal = asyncio.get_running_loop().create_future()
        self._follower = LogFollower(
            self._log_path,
            self._take_line,
            start=self._run_start,
            on_trouble=lambda text: self._around.on_event(self, "notice", text),
        )
        self._follow = asyncio.create_task(self._follower.run(), name=f"log of {plan.name}")
        self.record.pid, self.record.incarnation, self.record.started_at = process.pid, incarnation, time.time()
        # The process waits at its gate, so that its start time can be read before it can end.
        stat = procfs.read_stat(process.pid)
        if stat is not None:
            self.record.start_ticks = stat.start_ticks
            self._session = procfs.Session(process.pid, stat.start_ticks, marker)
            self._around.guard.add(self._session)
        self._around.on_event(self, "starting", f"started (pid {process.pid})")
        assert process.stdin is not None
        process.stdin.write(b"g")
        process.stdin.close()

    def _take_line(self, line: str) -> None:
        self._around.on_log(self.plan.name, line)
        is_ready = self.record.state == "ready"
        if self._fatal is not None and not self._fatal.done():
            reason = vllm.fatal_in(line, is_ready=is_ready)
            if reason is not None:
                self._fatal.set_result(reason)
        phase = None if is_ready else vllm.phase_of(line)
        if phase is not None and phase != self.phase:
            self.phase = phase
            self._around.on_event(self, "phase", phase)

    async def _wait_ready(self) -> None:
        assert self._exit is not None and self._fatal is not None
        deadline = self._started_s + self._around.start_timeout_s
        while not self._exit.done() and not self._fatal.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise StartError(
                    f"{self.plan.name} was not ready within {self._around.start_timeout_s:g} s; it was "
                    f"{self.phase!r}{LAST_LINES}\n{self._indented(self._useful_lines())}",
                    remedy=f"raise supervisor.start_timeout_s, or read {self._log_path}",
                )
            url, path = self.plan.base_url, self.plan.ready_path
            if await vllm.is_ready(url, path, timeout_s=min(READY_PROBE_TIMEOUT_S, left_s)) and not self._exit.done():
                return
            await self._wait_exit_or_fatal(READY_POLL_S)
        reason = await self._explain()
        raise StartError(
            f"{self.plan.name} {reason}", remedy=vllm.remedy_for(reason.splitlines()) or f"read {self._log_path}"
        )

    async def _explain(self) -> str:
        """Why the process ended or cannot go on; completes the log first."""
        assert self._exit is not None and self._fatal is not None
        if not self._exit.done():
            await asyncio.wait({self._exit}, timeout=FATAL_SETTLE_S)
        await self._finish_log()
        reason = self._fatal.result() if self._fatal.done() else ""
        ended = describe_exit(self._exit.result()) if self._exit.done() else "failed and does not end by itself"
        first = f"{ended}: {reason}" if reason else ended
        if not reason and self._exit.done() and -self._exit.result() in OUTSIDE_SIGNALS:
            return f"{first}\n    log: {self._log_path}"
        lines = self._useful_lines()
        return f"{first}{LOG_SAYS}\n{self._indented(lines)}" if lines else f"{first}. Its log is empty."

    def _useful_lines(self) -> list[str]:
        return vllm.last_useful_lines(tail_lines(self._log_path, start=self._run_start))

    @staticmethod
    def _indented(lines: list[str]) -> str:
        return "\n".join(f"    {line}" for line in lines)

    async def _finish_log(self) -> None:
        if self._follow is not None and self._follower is not None:
            self._follow.cancel()
            await asyncio.gather(self._follow, return_exceptions=True)
            await self._follower.poll()
            self._follow = None

    async def _note_segments(self) -> None:
        """Remember the shared memory that an engine has, while it lives."""
        if self.plan.kind == "vllm" and self._session is not None and self.record.started_at is not None:
            session, since_s = self._session, self.record.started_at
            self._segments |= await asyncio.to_thread(shared_memory.mapped_segments, session, since_s)

    async def _remove_segments(self) -> None:
        segments, self._segments = self._segments, frozenset()
        removed = await asyncio.to_thread(shared_memory.remove_unused, segments) if segments else []
        if removed:
            size = format_bytes(sum(segment.num_bytes for segment in removed))
            text = f"removed {len(removed)} segments of shared memory that it had left, {size}"
            self._around.on_event(self, "notice", text)

    async def _clear(self, term_grace_s: float) -> None:
        """End what is left of the session, the leader included, and forget this life."""
        if self._process is None:
            return
        if self._session is not None:
            sessions = [self._session]
            left = await asyncio.to_thread(
                end_sessions, sessions, term_grace_s=term_grace_s, deadline_s=term_grace_s + KILL_DEADLINE_S
            )
            if left:
                pids = ", ".join(map(str, left))
                self._around.on_event(self, "notice", f"could not end pid {pids}: the kernel holds it")
            else:
                self._around.guard.drop(self._session)
                await self._remove_segments()
        if self._exit is not None:
            await asyncio.wait({self._exit}, timeout=KILL_DEADLINE_S)
        await self._finish_log()
        self._process = self._session = self._exit = self._fatal = self._follower = None
        self.record.pid = self.record.start_ticks = None


def _keys_of(plan: ProcessPlan) -> dict[str, str]:
    """The variables whose values are in files, which are read at each start."""
    try:
        return {name: os.fsdecode(read_key(path, f"{plan.name}: {name}")) for name, path in plan.env_files.items()}
    except ConfigError as error:
        raise StartError(
            f"{plan.name} could not be started: {error.message}", field=error.field, remedy=error.remedy
        ) from error


def headline(reason: str) -> str:
    """The first line of why a process ended, without the phrase that leads over to the lines below it."""
    return reason.splitlines()[0].removesuffix(LOG_SAYS).removesuffix(LAST_LINES)


def describe_exit(returncode: int) -> str:
    """What an exit status means, in words that continue ``prefill-0 …``."""
    if returncode == launch.EXIT_CANNOT_EXECUTE:
        return "could not be executed (exit code 127)"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (by the kernel for lack of memory, or by a person)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def taken_port(plan: ProcessPlan) -> tuple[str, int] | None:
    """The first port of the plan that something listens on already, with its use; None when all are free."""
    return next(((use, port) for use, port in plan.ports.items() if is_port_taken(plan.listens_on(use), port)), None)
