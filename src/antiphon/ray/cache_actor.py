"""One cache server a node: an actor that the first engine of the node starts, and that ends with the last.

Engines hold a lease on it and renew it with their beats. Invariants: one actor for a server and a node; the server runs
while a lease does; without one, the actor ends its server and itself after ``LINGER_S``, in which an engine that is
replaced finds the KV of its predecessor.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from antiphon.config.plan import ProcessPlan
from antiphon.core.errors import StartError
from antiphon.ray import inside
from antiphon.ray.holder import Holder, HolderOptions
from antiphon.ray.plans import spec_name
from antiphon.ray.replica import within

log = logging.getLogger("ray.serve")
NAMESPACE = "antiphon"
LEASE_S = 60.0
"""Renewed every two seconds; an engine that is killed is replaced by one that takes a lease before it starts."""
LINGER_S = 5.0
LOOK_S = 0.5
START_TIMEOUT_S = 120.0
STOP_GRACE_S = 5.0
FAILED_LINGER_S = 0.2
AGAIN_S = 1.0
"""More than ``FAILED_LINGER_S``: the next try is not to find the actor that has failed."""
TRIES_MAX = 5
"""To reach an actor that may be ending: the next try starts another."""


class CacheActor:
    """The cache server of one node."""

    def __init__(self, app: str, folder: str) -> None:
        self._app, self._folder = app, Path(folder)
        self._leases: dict[str, float] = {}
        self._idle_since_s = time.monotonic()
        self._plan: ProcessPlan | None = None
        self._built_s = 0.0
        self._holder: Holder | None = None
        self._start: asyncio.Task[None] | None = None
        self._reaper: asyncio.Task[None] | None = None

    async def hold(self, name: str, plan: ProcessPlan, built_s: float) -> str:
        """A lease for the engine ``name``; returns the server's admin URL when it is ready.

        Args:
            plan: the server that the engine needs.
            built_s: when its application was built. A later build whose server is another one replaces the server.

        Raises:
            StartError: it does not start; the actor ends, so that the next try is a new one.
        """
        self._leases[name] = time.monotonic() + LEASE_S
        if self._reaper is None:
            self._reaper = asyncio.create_task(self._reap())
        if self._start is None or (built_s > self._built_s and plan != self._plan):
            self._plan, self._built_s = plan, built_s
            self._start = asyncio.create_task(self._replace(self._start, plan))
        try:
            await asyncio.shield(self._start)
        except StartError:
            self._leases.pop(name, None)
            self._end_soon(FAILED_LINGER_S)
            raise
        assert self._plan is not None
        return self._plan.base_url

    async def _replace(self, before: asyncio.Task[None] | None, plan: ProcessPlan) -> None:
        if before is not None:
            await asyncio.gather(before, return_exceptions=True)
        if self._holder is not None:
            log.info("antiphon: another cache server replaces the one of an earlier deployment")
            await self._holder.stop()
        options = HolderOptions(
            deployment=spec_name(self._app),
            log_dir=self._folder,
            start_timeout_s=START_TIMEOUT_S,
            stop_grace_s=STOP_GRACE_S,
        )
        self._holder = Holder(plan, options, lambda text: log.info("antiphon: %s", text))
        await self._holder.start(on_end=self._on_end)

    async def renew(self, name: str) -> None:
        """The engine ``name`` is still there."""
        self._leases[name] = time.monotonic() + LEASE_S

    async def release(self, name: str) -> None:
        """The engine ``name`` ends."""
        self._leases.pop(name, None)

    def pid(self) -> int | None:
        """Of the server."""
        return None if self._holder is None else self._holder.pid

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            self._leases = {name: end_s for name, end_s in self._leases.items() if end_s > now_s}
            if self._leases:
                self._idle_since_s = now_s
            elif now_s - self._idle_since_s > LINGER_S:
                if self._holder is not None:
                    await self._holder.stop()
                inside.end_process(0)

    def _end_soon(self, after_s: float) -> None:
        """End the process, once the answer that says why is on its way."""
        asyncio.get_running_loop().call_later(after_s, inside.end_process)

    def _on_end(self, reason: str) -> None:
        """The server has ended by itself: so does the actor, and the next beat of an engine starts another."""
        log.error("antiphon: the cache server %s", reason)
        inside.end_process()


class CacheLease:
    """An engine's lease on the cache server of its node.

    Args:
        app: name of the application.
        name: of the engine.
        plan: the server.
        folder: for its log.
        built_s: when the application was built.
    """

    def __init__(self, app: str, name: str, plan: ProcessPlan, folder: Path, built_s: float = 0.0) -> None:
        self._app, self._name, self._plan, self._folder = app, name, plan, folder
        self._built_s = built_s
        self._actor: Any = None

    async def take(self) -> str:
        """Start the server, or find it; returns its admin URL when it is ready.

        Raises:
            StartError: it does not start.
        """
        for left in reversed(range(TRIES_MAX)):
            self._actor = self._find()
            try:
                return str(
                    await within(START_TIMEOUT_S, self._actor.hold.remote(self._name, self._plan, self._built_s))
                )
            except (ray.exceptions.RayError, TimeoutError) as error:
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                if not left:
                    raise StartError(f"the cache server of this node does not start: {cause}") from error
                log.info("antiphon: the cache server of this node is asked for again: %s", cause)
                await asyncio.sleep(AGAIN_S)
        raise AssertionError("unreachable")

    async def renew(self) -> None:
        """Keep the lease; a server that has ended is started again."""
        try:
            await within(START_TIMEOUT_S, self._actor.renew.remote(self._name))
        except (ray.exceptions.RayError, TimeoutError):
            try:
                await self.take()
            except StartError as error:
                log.warning("antiphon: %s goes on without its cache server: %s", self._name, error)

    async def give_up(self) -> None:
        """The engine ends."""
        if self._actor is not None:
            try:
                await within(STOP_GRACE_S, self._actor.release.remote(self._name))
            except (ray.exceptions.RayError, TimeoutError) as error:
                log.info("antiphon: the cache server's actor is gone: %r", error)

    def _find(self) -> Any:
        node = inside.node_id()
        return (
            ray.remote(CacheActor)
            .options(
                name=f"{self._app}:{self._plan.name}:{node}",
                namespace=NAMESPACE,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=0,
                max_concurrency=256,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            )
            .remote(self._app, str(self._folder))
        )
