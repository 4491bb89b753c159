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
TRIES_MAX = 5
"""To reach an actor that may be ending: the next try starts another."""


class CacheActor:
    """The cache server of one node."""

    def __init__(self, app: str, plan: ProcessPlan, folder: str) -> None:
        self._app = app
        self._leases: dict[str, float] = {}
        self._idle_since_s = time.monotonic()
        self._start: asyncio.Task[None] | None = None
        self._reaper: asyncio.Task[None] | None = None
        options = HolderOptions(
            deployment=spec_name(app), log_dir=Path(folder), start_timeout_s=START_TIMEOUT_S, stop_grace_s=STOP_GRACE_S
        )
        self._holder = Holder(plan, options, lambda text: log.info("antiphon: %s", text))

    async def hold(self, name: str) -> str:
        """A lease for the engine ``name``; returns the server's admin URL when it is ready."""
        self._leases[name] = time.monotonic() + LEASE_S
        if self._start is None:
            self._start = asyncio.create_task(self._holder.start(on_end=self._on_end))
            self._reaper = asyncio.create_task(self._reap())
        await asyncio.shield(self._start)
        return self._holder.plan.base_url

    async def renew(self, name: str) -> None:
        """The engine ``name`` is still there."""
        self._leases[name] = time.monotonic() + LEASE_S

    async def release(self, name: str) -> None:
        """The engine ``name`` ends."""
        self._leases.pop(name, None)

    def pid(self) -> int | None:
        """Of the server."""
        return self._holder.pid

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            self._leases = {name: end_s for name, end_s in self._leases.items() if end_s > now_s}
            if self._leases:
                self._idle_since_s = now_s
            elif now_s - self._idle_since_s > LINGER_S:
                await self._holder.stop()
                inside.end_process(0)

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
    """

    def __init__(self, app: str, name: str, plan: ProcessPlan, folder: Path) -> None:
        self._app, self._name, self._plan, self._folder = app, name, plan, folder
        self._actor: Any = None

    async def take(self) -> str:
        """Start the server, or find it; returns its admin URL when it is ready.

        Raises:
            StartError: it does not start.
        """
        for left in reversed(range(TRIES_MAX)):
            self._actor = self._find()
            try:
                return str(await within(START_TIMEOUT_S, self._actor.hold.remote(self._name)))
            except (ray.exceptions.RayError, TimeoutError) as error:
                if not left:
                    raise StartError(f"the cache server of this node does not start: {error}") from error
                await asyncio.sleep(LOOK_S)
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
            .remote(self._app, self._plan, str(self._folder))
        )
