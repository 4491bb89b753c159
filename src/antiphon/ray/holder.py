"""One process, held by a replica: started, watched and ended with everything that it started.

It is the supervisor's child and watchdog without its restarts, which Ray decides. Invariants: what is held has a
session of its own, and a watchdog knows it before it runs; when the replica ends, however it ends, the kernel ends the
process and the watchdog what is left of its session. It must be started in a thread that lives as long as the replica.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from antiphon.config.plan import ProcessPlan
from antiphon.core.errors import StartError
from antiphon.ray.detached import DetachedGuard
from antiphon.supervisor.child import Child, Surroundings, taken_port
from antiphon.supervisor.events import EventKind

PORTS_FREE_TIMEOUT_S = 15.0
"""How long the ports of the process of an earlier replica may stay taken: it is killed when its replica ends."""
POLL_S = 0.1
RAY_PREFIX = "RAY_"
NOT_INHERITED = ("PYTHONPATH", "OMP_NUM_THREADS")
"""What Ray sets for its own Python workers: paths of its packages, and threads by the CPUs that an actor reserves."""


@dataclass(frozen=True)
class HolderOptions:
    """What a holder is told beside its plan."""

    deployment: str
    log_dir: Path
    start_timeout_s: float
    stop_grace_s: float
    ports_free_timeout_s: float = PORTS_FREE_TIMEOUT_S


def unset_names(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The variables of a Ray worker that a process of ours must not see."""
    return tuple(name for name in environment if name.startswith(RAY_PREFIX) or name in NOT_INHERITED)


class Holder:
    """One process.

    Args:
        plan: which; its environment is that of this process without what Ray has put there.
        say: gets lines for the log of the replica; must not block.
    """

    def __init__(self, plan: ProcessPlan, options: HolderOptions, say: Callable[[str], None]) -> None:
        self.plan = replace(plan, unset_env=(*plan.unset_env, *unset_names(os.environ)))
        self.ended: str | None = None
        """Why it ended by itself; None while it has not."""
        self._say = say
        self._guard = DetachedGuard(
            options.deployment, options.log_dir / f"{plan.name}.watchdog.log", lambda text: say(f"notice: {text}")
        )
        self._kill_now = asyncio.Event()
        around = Surroundings(
            deployment=options.deployment,
            log_dir=options.log_dir,
            start_timeout_s=options.start_timeout_s,
            stop_grace_s=options.stop_grace_s,
            guard=self._guard,
            kill_now=self._kill_now,
            on_log=lambda _name, _line: None,
            on_event=self._on_event,
        )
        self._child = Child(self.plan, around)
        self._watch: asyncio.Task[None] | None = None
        self._on_end: Callable[[str], None] | None = None
        self._is_guarded = False
        self._stopping = asyncio.Lock()
        self._ports_free_timeout_s = options.ports_free_timeout_s

    @property
    def pid(self) -> int | None:
        """Of the process; None when there is none."""
        return self._child.record.pid

    @property
    def incarnation(self) -> str:
        """New at each start; empty before."""
        return self._child.record.incarnation or ""

    @property
    def log_path(self) -> str:
        """The log of the process."""
        return self._child.record.log_path

    async def start(self, on_end: Callable[[str], None] | None = None) -> None:
        """Start it and wait until it is ready.

        Args:
            on_end: called once with the reason if it ends by itself later.

        Raises:
            StartError: it did not become ready; nothing of it is left.
        """
        assert self._watch is None, "started already"
        self._on_end = on_end
        is_ready = False
        try:
            await self._wait_ports_free()
            await self._guard.start()
            self._is_guarded = True
            await self._child.start()
            is_ready = True
        finally:
            if not is_ready:
                await self.stop()
        self._watch = asyncio.create_task(self._wait_ended(), name=f"watch of {self.plan.name}")

    async def stop(self) -> None:
        """SIGTERM, the grace period, SIGKILL to what is left of its session. Nothing happens when nothing runs.

        Who calls it while it is being stopped waits for that: a start that is cancelled stops it, and so does the
        replica that cancels the start.
        """
        async with self._stopping:
            if self._watch is not None:
                self._watch.cancel()
                await asyncio.gather(self._watch, return_exceptions=True)
                self._watch = None
            await self._child.stop()
            if self._is_guarded:
                self._is_guarded = False
                await self._guard.stop()

    async def _wait_ended(self) -> None:
        reason = await self._child.wait_ended()
        self.ended = reason
        self._say(f"{self.plan.name} {reason}")
        if self._on_end is not None:
            self._on_end(reason)

    async def _wait_ports_free(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._ports_free_timeout_s
        while (taken := await asyncio.to_thread(taken_port, self.plan)) is not None:
            if asyncio.get_running_loop().time() >= deadline:
                use, port = taken
                raise StartError(
                    f"{self.plan.name}: port {port} ({use}) is in use by another process on this node",
                    field=f"antiphon.{self.plan.port_field(use)}",
                    remedy="stop what listens there (another application, perhaps), or write another port",
                )
            await asyncio.sleep(POLL_S)

    def _on_event(self, child: Child, kind: EventKind, text: str) -> None:
        if kind == "starting" and child.record.pid is not None:
            # It waits at its gate: what it starts later inherits what is set now.
            undo_ray_worker(child.record.pid, self._say)
        if kind != "exited":
            when = f" ({child.elapsed_s:.0f} s)" if kind == "phase" else ""
            self._say(f"{self.plan.name} {text}{when}")


def undo_ray_worker(pid: int, say: Callable[[str], None]) -> None:
    """Undo for ``pid`` that Ray runs its workers at low priority and has the kernel kill them first.

    Both need a privilege on most machines; where they fail it is said once, with what to set instead.
    """
    failed = []
    with suppress(ProcessLookupError):
        try:
            if os.getpriority(os.PRIO_PROCESS, pid) > 0:
                os.setpriority(os.PRIO_PROCESS, pid, 0)
        except PermissionError:
            failed.append("RAY_worker_niceness=0")
    try:
        with open(f"/proc/{pid}/oom_score_adj", "r+", encoding="ascii") as file:
            if int(file.read()) > 0:
                file.seek(0)
                file.write("0")
    except PermissionError:
        failed.append("RAY_worker_oom_score_adjustment=0")
    except OSError:
        pass  # it has ended, which its watcher reports
    if failed:
        say(f"notice: runs at the priority of Ray's workers; start Ray with {' '.join(failed)} to have the usual one")
