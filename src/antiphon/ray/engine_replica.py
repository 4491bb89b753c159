"""The deployment of a pool: each replica runs one engine, and tells the router of it.

Invariants: a replica that Serve calls running has an engine that answers, is known to the router and warm; the ports of
an engine are its own; a replica that leaves has its engine drained first; an engine that ends takes its replica with
it, and the other way round.

Requests do not pass through here: the router speaks to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import TYPE_CHECKING, Any

from antiphon.config.kv_events import hears_kv_events
from antiphon.config.resolve import this_machine
from antiphon.config.spec import Pool
from antiphon.core.errors import StartError
from antiphon.ray import inside
from antiphon.ray.autoscaling import RUNNING, WAITING
from antiphon.ray.cache_actor import CacheLease
from antiphon.ray.engine_stats import StatsReader
from antiphon.ray.holder import Holder, HolderOptions
from antiphon.ray.peers import check_secret_here, coordinator_url, starts_coordinator
from antiphon.ray.plans import LOOPBACK, AppSettings, EnginePlace, engine_plan, spec_name
from antiphon.ray.ports import PortClaims
from antiphon.ray.replica import Tasks, check_holder, end_replica, within
from antiphon.ray.roster import BEAT_S

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

log = logging.getLogger("ray.serve")
ROUTER_TIMEOUT_S = 120.0
"""How long a replica waits for the router's replica, which starts beside it."""
BEAT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 4.0
"""Of a router's replica that is there; of one that ends too, with the application, nothing is heard."""
LEAVE_LOOK_S = 0.25
LEAVE_TRIES_MAX = 2
"""Questions in a row that the router's replica may leave unanswered before an engine leaves without it."""
JOIN_AGAIN_S = 1.0
JOIN_MARGIN_S = 30.0
"""Beside the time that the router may take to warm pairs."""
LEAVE_MARGIN_S = 15.0
"""Beside the drain: for questions to a router that may be gone."""


class EngineReplica:
    """One engine of ``pool``.

    Args:
        settings: of the application.
        pool: prefill or decode.
        router: handle of the router's deployment.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: AppSettings, pool: Pool, router: DeploymentHandle[Any]
    ) -> None:
        self._pool, self._router = pool, router
        self._claims = PortClaims()
        self._tasks = Tasks()
        self._holder: Holder | None = None
        self._cache: CacheLease | None = None
        self._stats: StatsReader | None = None
        self._info: dict[str, Any] = {}
        self._is_leaving = False
        self._starting: asyncio.Task[Any] | None = asyncio.current_task()
        self._app, replica = inside.replica_identity()
        self._settings = settings.named(self._app)
        self._name = f"{pool}-{replica}"
        inside.keep_replica_near(is_published=settings.is_published)
        is_started = False
        try:
            await self._start(replica)
            is_started = True
        finally:
            self._starting = None
            if not is_started:
                await self._stop_processes()

    async def _start(self, replica: str) -> None:
        spec, pool = self._settings.spec, self._pool
        for path in self._settings.pools[pool].files:
            if not os.access(path, os.R_OK):
                self._say(f"{path} cannot be read on this node; what it said where the application was built is used")
        where = await self._where()
        address = self._address(where)
        place = self._place(replica, address, where["address"])
        made = engine_plan(self._settings, pool, place, this_machine())
        folder = inside.log_dir() / spec_name(self._app)
        if made.server_plan is not None:
            check_secret_here(spec)
            self._cache = CacheLease(self._app, self._name, made.server_plan, folder, self._settings.built_s)
            await self._cache.take()
        options = HolderOptions(
            deployment=spec_name(self._app),
            log_dir=folder,
            start_timeout_s=spec.supervisor.start_timeout_s,
            stop_grace_s=spec.supervisor.stop_grace_s,
        )
        self._holder = holder = Holder(made.plan, options, self._say)
        await holder.start(on_end=self._on_end)
        self._info = {
            "name": self._name,
            "role": pool,
            "url": made.plan.base_url,
            "engine_id": f"{self._name}-{holder.incarnation}",
            "incarnation": holder.incarnation,
            "side_channel": {"host": address, "port": place.side_channel_port},
            "node_id": inside.node_id(),
            "pid": holder.pid,
            "log": holder.log_path,
            "devices": list(place.devices),
            "shape": made.shape,
            "built_s": self._settings.built_s,
            "version": self._settings.version,
        }
        self._router_address = where["address"]
        self._stats = StatsReader(made.plan.base_url)
        await self._join()
        self._tasks.start(self._beat(), "the beats to the router")
        if self._cache is not None:
            self._tasks.start(self._keep_cache(self._cache), "the lease on the cache server")

    async def _where(self) -> dict[str, Any]:
        """Where the router is, once it has started.

        Raises:
            StartError: its replica does not answer.
        """
        self._say(f"{self._name} waits for the router")
        try:
            return dict(await within(ROUTER_TIMEOUT_S, self._router.where.remote()))
        except TimeoutError as error:
            raise StartError(
                f"{self._name}: the router's replica has not started for {ROUTER_TIMEOUT_S:g} s",
                remedy="look at the deployment router first: `serve status` says what keeps it",
            ) from error

    def _address(self, where: dict[str, Any]) -> str:
        """Where the engine listens: loopback, unless the router is published.

        Raises:
            StartError: the router could not reach it there.
        """
        if self._settings.is_published:
            return inside.node_address()
        if where["node_id"] != inside.node_id():
            raise StartError(
                f"this node is not that of the router, which listens on {where['address']} and reaches its own only",
                field="antiphon.router.host",
                remedy="write an address by which the nodes reach each other, or 0.0.0.0, and keys (docs/security.md)",
            )
        return LOOPBACK

    def _place(self, replica: str, address: str, router_host: str) -> EnginePlace:
        pool = self._settings.spec.pool(self._pool)
        width = max(1, pool.tensor_parallel_size)
        return EnginePlace(
            replica=replica,
            address=address,
            port=self._claims.take(address, pool.port),
            side_channel_port=self._claims.take(address, pool.side_channel_port, width),
            kv_replay_port=self._claims.take(address, pool.kv_replay_port, width),
            router_host=router_host,
            devices=inside.gpus(),
            coordinator_url=coordinator_url(self._settings.spec, router_host),
        )

    async def _join(self) -> None:
        """Have the router know the engine, and wait until it is warm. A router that is being replaced is asked again:
        an engine that has started is worth more than its first answer.

        Raises:
            StartError: it does not fit those that are there, or there is no router for too long.
        """
        loop = asyncio.get_running_loop()
        wait_s = self._settings.spec.router.warm_timeout_s
        lost_s = loop.time() + ROUTER_TIMEOUT_S + wait_s
        waits_until_s = loop.time() + self._settings.spec.supervisor.start_timeout_s
        heard: str | None = None
        while True:
            try:
                said = await within(wait_s + JOIN_MARGIN_S, self._router.join.remote(self._info, wait_s))
            except Exception as error:  # supervised: the router's replica may be gone in any way; Serve starts another
                if loop.time() >= lost_s:
                    raise StartError(f"{self._name} cannot join the router: {error!r}") from error
                self._say(f"{self._name} joins again, since the router's replica did not answer: {error!r}")
                await asyncio.sleep(JOIN_AGAIN_S)
                continue
            if said["misfit"] is not None:
                raise StartError(f"{self._name} cannot hand over: {said['misfit']}", remedy="make both configs agree")
            if said["waits"] is None:
                break
            if loop.time() >= waits_until_s:
                raise StartError(f"{self._name} could not be added: {said['waits']}")
            if said["waits"] != heard:
                heard = said["waits"]
                self._say(f"{self._name} waits: {heard}")
            lost_s = loop.time() + ROUTER_TIMEOUT_S + wait_s
            await asyncio.sleep(JOIN_AGAIN_S)
        note = "" if said["note"] is None else f", but does not take requests yet: {said['note']}"
        self._say(f"{self._name} is known to the router{note}")

    # --- for Serve, and for who asks through its handles --------------------------------------------------------------

    def info(self) -> dict[str, Any]:
        """What this engine is: ``name``, ``role``, ``url``, ``engine_id``, ``incarnation``, ``side_channel``,
        ``node_id``, ``pid``, ``log``, ``devices``, ``shape``, ``built_s``, ``version``."""
        return self._info

    def record_replica_metadata(self) -> dict[str, Any]:
        """As :meth:`info`: Serve asks once, when the replica is constructed."""
        return self._info

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What its pool is scaled by, from the engine's metrics."""
        return {} if self._stats is None else await self._stats.read()

    async def check_health(self) -> None:
        """Raises RuntimeError unless the engine answers."""
        await check_holder(self._holder)

    async def __del__(self) -> None:
        """Serve awaits it once: the engine is drained, then ends."""
        if self._is_leaving:
            return
        self._is_leaving = True
        if self._starting is not None:
            self._starting.cancel()
        await self._tasks.stop()
        if self._info:
            await self._leave()
        await self._stop_processes()

    # --- its own ---------------------------------------------------------------------------------------------------

    async def _leave(self) -> None:
        """Drain the engine, by the router; without one, wait until the engine itself has no requests."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._settings.pools[self._pool].drain_timeout_s
        num_failed = 0
        while loop.time() < deadline_s + LEAVE_MARGIN_S and num_failed < LEAVE_TRIES_MAX:
            left_s = max(0.0, deadline_s - loop.time())
            try:
                said = await within(ANSWER_TIMEOUT_S, self._router.leave.remote(self._info, left_s))
            except Exception as error:  # supervised: it may be gone in any way; the engine ends anyhow
                num_failed += 1
                self._say(f"{self._name} leaves without the router's word so far: {type(error).__name__}")
            else:
                num_failed = 0
                if said["is_gone"]:
                    return
            await asyncio.sleep(LEAVE_LOOK_S)
        while loop.time() < deadline_s:
            if not await self._is_busy():
                return
            await asyncio.sleep(LEAVE_LOOK_S)

    async def _is_busy(self) -> bool:
        stats = {} if self._stats is None else await self._stats.read()
        return stats.get(RUNNING, 0) + stats.get(WAITING, 0) > 0

    async def _stop_processes(self) -> None:
        if self._holder is not None:
            await self._holder.stop()
        if self._cache is not None:
            await self._cache.give_up()
        self._claims.close()

    async def _beat(self) -> None:
        is_heard = True
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                where = await within(BEAT_TIMEOUT_S, self._router.beat.remote(self._info))
            except Exception as error:  # supervised: a router that starts again is told by the next beat
                if is_heard:
                    self._say(f"the router's replica does not answer: {error!r}")
                is_heard = False
            else:
                is_heard = True
                self._check_moved(where)

    def _check_moved(self, where: dict[str, Any]) -> None:
        """A router that starts again may do so on another node. One on loopback reaches its own node only; and an
        engine is told at its start where its KV events go, a cache server where its coordinator is."""
        if not self._settings.is_published and where["node_id"] != inside.node_id():
            end_replica("would not be reached any more: the router is on another node now, and on loopback")
        if where["address"] == self._router_address:
            return
        self._router_address = where["address"]
        if hears_kv_events(self._settings.spec.router):
            self._say(
                f"notice: the router is at {self._router_address} now, and does not hear of the KV of {self._name}, "
                "which tells it to where the router was; deploy the application again, or end this replica, which is "
                "replaced"
            )
        if self._cache is not None and starts_coordinator(self._settings.spec):
            self._say(
                f"notice: the coordinator is at {self._router_address} now, with the router, and the cache server of "
                "this node goes on asking where it was: it shares nothing until the application is deployed again; "
                "antiphon.cache.coordinator_url names one that stays where it is"
            )

    async def _keep_cache(self, lease: CacheLease) -> None:
        """Beside the beats, which a cache server that takes long to start must not hold up."""
        while True:
            await asyncio.sleep(BEAT_S)
            await lease.renew()

    def _on_end(self, reason: str) -> None:
        if not self._is_leaving:
            end_replica(reason)

    def _say(self, text: str) -> None:
        log.info("antiphon: %s", text)
