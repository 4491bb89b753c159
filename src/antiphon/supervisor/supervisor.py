"""The supervisor: the processes of a deployment that belong to this host, from their start to their end.

Owns the order (cache servers, their coordinator and engines at once, the router when they are ready; the router stops
first, the cache servers and their coordinator last), the restarts, the state file and the lock. Invariants: one
supervisor for a deployment on a host; when :meth:`Supervisor.start` raises and when :meth:`Supervisor.stop` has
returned, nothing that was started is left; when the supervisor itself is killed, the watchdog sees to that.

It must be started and stopped in one thread, which must outlive it: the kernel ends the children with that thread.
It does not compile or check the spec, and it does not print except through the console that it is given.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from antiphon.config.plan import BEHIND_ENGINES, ProcessPlan
from antiphon.config.supervisor_spec import SupervisorSpec
from antiphon.core.errors import StartError
from antiphon.protocol.state import DeploymentState, ProcessState
from antiphon.supervisor import procfs, store
from antiphon.supervisor.child import Child, Surroundings
from antiphon.supervisor.console import Console
from antiphon.supervisor.events import EventKind, OnEvent, SupervisorEvent
from antiphon.supervisor.guard import Guard
from antiphon.supervisor.report import sessions_of
from antiphon.supervisor.restart import RestartBudget
from antiphon.supervisor.watchdog import KILL_DEADLINE_S, TERM_GRACE_S, end_sessions

CACHE_FIRST_RESTART_S = 0.2
"""A cache server that ends is back in a moment: every prompt is computed meanwhile, and engines wait for none of it."""
HEARTBEAT_S = 10.0
"""While something starts, at least one line in this time."""
_PR_SET_CHILD_SUBREAPER = 36


class StartCancelled(StartError):
    """A stop was requested before every process was ready."""


class Supervisor:
    """Starts, watches, restarts and stops processes. Use it as an async context manager, or call start and stop.

    Args:
        plans: the processes of this host, with unique names.
        spec: deadlines, restart policy and folders.
        name: the deployment's name: one at a time on a host.
        console: where lines go; None: nowhere.
        on_event: called for each change, from the loop; must not block.
    """

    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        spec: SupervisorSpec,
        name: str,
        console: Console | None = None,
        *,
        on_event: OnEvent | None = None,
    ) -> None:
        names = [plan.name for plan in plans]
        assert len(set(names)) == len(names), names
        self._spec = spec
        self._name = name
        self._console = console
        self._on_event = on_event
        self._folder = store.deployment_dir(spec.state_dir, name)
        self._lock = store.DeploymentLock(self._folder)
        log_dir = Path(spec.log_dir_of(name)).expanduser()
        self._guard = Guard(name, log_dir / "watchdog.log", lambda text: self._emit("notice", "", text))
        self._stop_requested = asyncio.Event()
        self._kill_now = asyncio.Event()
        self._nothing_left = asyncio.Event()
        around = Surroundings(
            deployment=name,
            log_dir=log_dir,
            start_timeout_s=spec.start_timeout_s,
            stop_grace_s=spec.stop_grace_s,
            guard=self._guard,
            kill_now=self._kill_now,
            on_log=self._take_log,
            on_event=self._take_child_event,
        )
        self._children = [Child(plan, around) for plan in plans]
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._started_s = time.monotonic()
        self._started_at = time.time()
        self._is_up = False
        self._is_stopping = False

    # --- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start everything and wait until it is ready.

        Raises:
            StartError: the deployment is up already, or a process did not become ready. Everything has been stopped.
            StartCancelled: :meth:`request_stop` was called meanwhile. Everything has been stopped.
        """
        self._lock.acquire()
        self._is_up = True
        self._started_s, self._started_at = time.monotonic(), time.time()
        is_started = False
        try:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            await self._end_leftovers()
            await self._guard.start()
            self._write_state()
            routers, engines, caches = self._groups()
            # An engine needs no cache server in order to start, and a cache server no coordinator: it joins as soon as
            # there is one.
            await self._start_all([*caches, *engines])
            await self._start_all(routers)
            is_started = True
        finally:
            if not is_started:
                await self.stop()

    async def run_until_stopped(self) -> None:
        """Wait for :meth:`request_stop`, or until every process has failed for good; then stop.

        Raises StartError when every process has failed.
        """
        waits = [asyncio.create_task(event.wait()) for event in (self._stop_requested, self._nothing_left)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await self.stop()
        if self._nothing_left.is_set() and not self._stop_requested.is_set():
            raise StartError("every process has failed and may not be restarted any more", remedy="read their logs")

    async def stop(self) -> None:
        """Stop the router, then engines, what is behind them, and the watchdog; nothing happens when nothing runs."""
        if not self._is_up:
            return
        self._is_stopping = True
        lives = list(self._lives.values())
        for life in lives:
            life.cancel()
        outcomes = await asyncio.gather(*lives, return_exceptions=True)
        self._write_state()
        for group in self._groups():
            await asyncio.gather(*(child.stop() for child in group))
        await self._guard.stop()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        self._is_up = False
        self._write_state()
        self._lock.release()
        self._emit("stopped", "", "everything is stopped")
        for outcome in outcomes:
            # A life ends by cancellation; anything else is a bug, and is shown once everything is stopped.
            if isinstance(outcome, Exception):
                raise outcome

    def request_stop(self) -> None:
        """Ask for a clean stop; a second call ends the grace periods at once. For signal handlers of the loop."""
        if self._stop_requested.is_set():
            self._emit("stopping", "", "killing at once")
            self._kill_now.set()
            return
        self._emit(
            "stopping",
            "",
            "stopping: the router drains, then the engines and what is behind them (once more to kill at once)",
        )
        self._stop_requested.set()

    def handle_signals(self) -> Callable[[], None]:
        """Let SIGINT, SIGTERM and SIGHUP request a stop (main thread only); returns what undoes it.

        An ignored SIGHUP stays ignored: that is how ``nohup`` asks a program to outlive its terminal.
        """
        loop = asyncio.get_running_loop()
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        for number in numbers:
            loop.add_signal_handler(number, self.request_stop)

        def undo() -> None:
            for number in numbers:
                loop.remove_signal_handler(number)

        return undo

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- what it knows -----------------------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        """Where the state file and the lock are."""
        return self._folder

    def records(self) -> list[ProcessState]:
        """The processes as they are at this moment (live records: do not change them)."""
        return [child.record for child in self._children]

    def statistics(self) -> dict[str, int]:
        """Processes by state (``num_ready`` …), ``num_restarts``, and the watchdog's pid (0 when it does not run)."""
        states = [child.record.state for child in self._children]
        counts = {
            f"num_{state}": states.count(state) for state in ("starting", "ready", "restarting", "failed", "stopped")
        }
        restarts = sum(child.record.restarts for child in self._children)
        return counts | {"num_restarts": restarts, "watchdog_pid": self._guard.pid or 0}

    def _groups(self) -> tuple[list[Child], list[Child], list[Child]]:
        """Routers, engines, and cache servers with their coordinator: the order in which they stop."""
        routers = [child for child in self._children if child.plan.kind == "router"]
        caches = [child for child in self._children if child.plan.kind in BEHIND_ENGINES]
        return routers, [child for child in self._children if child not in (*routers, *caches)], caches

    # --- starting and restarting -----------------------------------------------------------------------------------

    async def _end_leftovers(self) -> None:
        """End what an earlier supervisor of this deployment left, which takes the death of its watchdog as well."""
        previous = store.load_previous(self._folder)
        sessions = [] if previous is None else sessions_of(previous)
        left = procfs.members(sessions)
        if left:
            self._emit("notice", "", f"ending {len(left)} processes that an earlier run left behind")
            await asyncio.to_thread(end_sessions, sessions, term_grace_s=TERM_GRACE_S, deadline_s=KILL_DEADLINE_S)

    async def _start_all(self, children: list[Child]) -> None:
        """Start ``children`` at once; from its first readiness on, each has a life that restarts it."""
        starts = {asyncio.create_task(child.start(), name=f"start of {child.plan.name}"): child for child in children}
        stop = asyncio.create_task(self._stop_requested.wait())
        heartbeat = asyncio.create_task(self._heartbeat())
        pending: set[asyncio.Task[None]] = set(starts)
        try:
            while pending:
                done, _ = await asyncio.wait({*pending, stop}, return_when=asyncio.FIRST_COMPLETED)
                if stop in done:
                    raise StartCancelled("a stop was requested before every process was ready")
                for start in pending & done:
                    start.result()
                    self._begin_life(starts[start])
                pending -= done
        finally:
            for task in (*starts, stop, heartbeat):
                task.cancel()
            await asyncio.gather(*starts, stop, heartbeat, return_exceptions=True)

    def _begin_life(self, child: Child) -> None:
        life = asyncio.create_task(self._live(child), name=f"life of {child.plan.name}")
        life.add_done_callback(self._stop_on_bug)
        self._lives[child.plan.name] = life

    def _stop_on_bug(self, life: asyncio.Task[None]) -> None:
        if not life.cancelled() and life.exception() is not None and not self._is_stopping:
            self._emit("notice", "", f"stopping, because the supervisor has a bug: {life.exception()!r}")
            self._stop_requested.set()

    async def _live(self, child: Child) -> None:
        """Watch a ready child; start it again as often as the budget allows; then leave it failed."""
        is_cache = child.plan.kind in BEHIND_ENGINES
        budget = RestartBudget(self._spec.restart, first_s=CACHE_FIRST_RESTART_S if is_cache else None)
        while True:
            reason = await child.wait_ended()
            self._emit("exited", child.plan.name, reason)
            while True:
                delay_s = budget.next_delay_s(time.monotonic())
                if delay_s is None:
                    self._give_up(child, budget)
                    return
                child.mark("restarting")
                self._write_state()
                self._emit("restarting", child.plan.name, f"restarting in {delay_s:g} s")
                await asyncio.sleep(delay_s)
                child.record.restarts += 1
                try:
                    await child.start()
                except StartError as error:
                    self._emit("exited", child.plan.name, str(error).removeprefix(f"{child.plan.name} "))
                    continue
                break

    def _give_up(self, child: Child, budget: RestartBudget) -> None:
        child.mark("failed")
        self._write_state()
        why = "restarts are off"
        if self._spec.restart.enabled:
            why = f"{budget.num_in_window} restarts within {self._spec.restart.window_s:g} s did not help"
        same_role = [other for other in self._children if other.plan.role == child.plan.role]
        is_pool_lost = all(other.record.state == "failed" for other in same_role)
        lost = f"; no {child.plan.role} process is left on this host" if is_pool_lost else ""
        self._emit("failed", child.plan.name, f"failed for good: {why}{lost}")
        # What is behind the engines serves nobody alone.
        serving = [other for other in self._children if other.plan.kind not in BEHIND_ENGINES] or self._children
        if all(other.record.state == "failed" for other in serving):
            self._nothing_left.set()

    async def _heartbeat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            waiting = [child for child in self._children if child.record.state == "starting"]
            if waiting:
                text = ", ".join(f"{child.plan.name} {child.phase} ({child.elapsed_s:.0f} s)" for child in waiting)
                self._emit("waiting", "", text)

    # --- telling -----------------------------------------------------------------------------------------------------

    def _take_log(self, name: str, line: str) -> None:
        if self._console is not None:
            self._console.log_line(name, line)

    def _take_child_event(self, child: Child, kind: EventKind, text: str) -> None:
        if kind != "phase":
            self._write_state()
        self._emit(kind, child.plan.name, text, child.elapsed_s)

    def _emit(self, kind: EventKind, process: str, text: str, elapsed_s: float | None = None) -> None:
        elapsed_s = time.monotonic() - self._started_s if elapsed_s is None else elapsed_s
        if self._console is not None:
            who = f"{process} " if process else ""
            when = f" ({elapsed_s:.0f} s)" if kind == "phase" else ""
            self._console.say(f"{who}{text}{when}")
        if self._on_event is not None:
            self._on_event(SupervisorEvent(kind, process, text, elapsed_s))

    def _write_state(self) -> None:
        own_ticks = procfs.start_ticks_of(os.getpid())
        assert own_ticks is not None
        state = DeploymentState(
            name=self._name,
            boot_id=procfs.boot_id(),
            supervisor_pid=os.getpid(),
            supervisor_start_ticks=own_ticks,
            started_at=self._started_at,
            stop_grace_s=self._spec.stop_grace_s,
            is_stopping=self._is_stopping,
            stopped_at=None if self._is_up else time.time(),
            processes=self.records(),
        )
        try:
            store.write_state(self._folder, state)
        except OSError as error:
            # A full disk must not end a deployment that serves; status then shows the last state that was written.
            self._emit("notice", "", f"the state file cannot be written: {error.strerror}")
