"""The deployment of the router: one replica, which runs ``antiphon router`` and keeps its list of engines.

Invariants: what the router is told of engines is told by this replica alone, from the machine that it runs on; an
engine is added when its replica says that it is ready, and removed when the replica leaves or is not heard of any more;
a router that starts again knows every engine after one beat of each. Where cache servers share, and nobody has named
another, their coordinator is held here too.

Requests do not pass through here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any
from weakref import WeakValueDictionary

from antiphon.config.key_files import read_key
from antiphon.config.resolve import this_machine
from antiphon.config.spec import Spec
from antiphon.core.errors import ProtocolError, UpstreamError
from antiphon.ray import inside
from antiphon.ray.coordinator import HeldCoordinator
from antiphon.ray.draining import RouterClient
from antiphon.ray.holder import PORTS_FREE_TIMEOUT_S, Holder, HolderOptions
from antiphon.ray.peers import check_secret_here, coordinator_beside_router
from antiphon.ray.plans import LOOPBACK, AppSettings, own_url, router_plan, spec_name
from antiphon.ray.replica import Tasks, check_holder, end_replica
from antiphon.ray.roster import BEAT_LOST_S, Entry, Roster, Verdict

log = logging.getLogger("ray.serve")
START_TIMEOUT_S = 120.0
"""A router starts in a second or two; a starved node takes longer."""
LOOK_S = BEAT_LOST_S / 10
REPLACED_DRAIN_S = 120.0
"""For the requests of engines whose place those of a later deployment take; their replicas leave in their own time."""
UNHEARD = (UpstreamError, ProtocolError)


class RouterReplica:
    """The one replica of the router. Its methods are called by the other replicas, through Serve's handles."""

    async def __init__(self, settings: AppSettings) -> None:  # type: ignore[misc]  # Serve awaits it
        self._roster = Roster()
        self._built_s, self._version = settings.built_s, settings.version
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._leaving: set[str] = set()
        self._num: Counter[str] = Counter()
        self._last_said = ""
        self._tasks = Tasks()
        self._is_stopping = False
        inside.keep_replica_near(is_published=settings.is_published)
        app, _ = inside.replica_identity()
        settings = settings.named(app)
        spec = settings.spec
        self._is_published = settings.is_published
        self._address = inside.node_address() if settings.is_published else LOOPBACK
        options = HolderOptions(
            deployment=spec_name(app),
            log_dir=inside.log_dir() / spec_name(app),
            start_timeout_s=START_TIMEOUT_S,
            stop_grace_s=spec.supervisor.stop_grace_s,
            # An application that is deployed again has the router before it, which ends its requests first.
            ports_free_timeout_s=PORTS_FREE_TIMEOUT_S + spec.supervisor.stop_grace_s,
        )
        self._holder = Holder(router_plan(settings, self._address, this_machine()), options, self._say)
        self._starting: asyncio.Task[Any] | None = asyncio.current_task()
        key_file = spec.router.admin_key_file
        key = None if key_file is None else read_key(key_file, "router.admin_key_file").decode()
        self._client = RouterClient(own_url(self._holder.plan.base_url, spec.router.host), key)
        self._coordinator: HeldCoordinator | None = None
        async with AsyncExitStack() as undo:
            self._coordinator = await self._start_coordinator(spec, options)
            if self._coordinator is not None:
                undo.push_async_callback(self._coordinator.stop)
                undo.push_async_callback(self._tasks.stop)
            await self._holder.start(on_end=self._on_end)
            undo.pop_all()
        self._starting = None
        self._tasks.start(self._watch_beats(), "the watch over the engines' beats")
        self._say(f"the router answers at {self._holder.plan.base_url} (log: {self._holder.log_path})")

    # --- for the other replicas ------------------------------------------------------------------------------------

    def where(self) -> dict[str, Any]:
        """Where the router is: ``url``, ``address``, ``node_id``, ``pid``, ``log``."""
        return {
            "url": self._holder.plan.base_url,
            "address": self._address,
            "node_id": inside.node_id(),
            "pid": self._holder.pid,
            "log": self._holder.log_path,
        }

    async def join(self, info: dict[str, Any], wait_s: float) -> dict[str, Any]:
        """Add an engine that is ready, and wait until it takes requests, its pairs warm.

        Returns:
            ``misfit``: why it can never be added; ``waits``: why it cannot be yet, so that it asks again; ``note``: why
            it may not take requests yet. All None when it does.
        """
        answer: dict[str, Any] = {"misfit": None, "waits": None, "note": None}
        verdict = await self._hear(info)
        if not verdict.fits:
            return answer | {"misfit": verdict.misfit, "waits": verdict.waits}
        try:
            await self._client.wait_open(info["role"], info["url"], wait_s)
        except UNHEARD as error:
            return answer | {"note": str(error)}
        return answer

    async def beat(self, info: dict[str, Any]) -> dict[str, Any]:
        """An engine is there. One that the router does not know is added. Returns :meth:`where`."""
        self._num["beats"] += 1
        await self._hear(info)
        return self.where()

    def _of_this_build(self, info: dict[str, Any]) -> dict[str, Any]:
        """An engine that Serve has kept from an earlier build of the same version is one of this build."""
        is_kept = bool(self._version) and info.get("version") == self._version
        return info | {"built_s": self._built_s} if is_kept else info

    async def _hear(self, info: dict[str, Any]) -> Verdict:
        now_s = time.monotonic()
        info = self._of_this_build(info)
        if not self._is_published and info["node_id"] != inside.node_id():
            return Verdict(misfit=f"it is on another node than the router, which listens on {self._address}")
        verdict = Verdict()
        if not self._roster.knows(info):
            verdict = self._roster.admit(info, self._built_s, now_s)
            for entry in verdict.replaced:
                self._say(f"{entry.info['name']} makes room for {info['name']}, which was deployed later")
                self._start_drain(entry.info, REPLACED_DRAIN_S)
            if not verdict.fits:
                self._say_once(f"{info['name']} is not added: {verdict.misfit or verdict.waits}")
                return verdict
        standing, replaced = self._roster.beat(info, now_s)
        if standing != "left":
            await self._register(info, replaced)
        return verdict

    async def _register(self, info: dict[str, Any], replaced: Entry | None) -> None:
        async with self._lock(info["url"]):
            entry = self._roster.entries.get(info["url"])
            if entry is None or entry.incarnation != info["incarnation"] or entry.is_registered:
                return
            try:
                if replaced is not None:
                    await self._client.remove(replaced.role, replaced.url, force=True)
                await self._client.register(entry.role, entry.url)
            except UNHEARD as error:
                self._say(f"{info['name']} cannot be added yet, and is tried again with its next beat: {error}")
                return
            entry.is_registered = True
        self._num["added"] += 1
        self._say(f"{info['name']} at {info['url']} is added")

    async def leave(self, info: dict[str, Any], drain_timeout_s: float) -> dict[str, Any]:
        """No new requests for an engine, from the first call on; it is removed when it has none, and at the latest
        ``drain_timeout_s`` after the first call. Answered at once: ask until it is gone.

        Returns:
            ``is_gone``: the router does not know the engine any more.
        """
        incarnation = info["incarnation"]
        if self._roster.leave(info) is not None:
            self._start_drain(info, drain_timeout_s)
        return {"is_gone": incarnation not in self._leaving}

    def engines(self) -> dict[str, Any]:
        """What is known: ``engines``, a list of what each replica said; ``counts``."""
        return {
            "router": self.where(),
            "engines": [entry.info for entry in self._roster.entries.values()],
            "counts": dict(self._num),
        }

    # --- for Serve -------------------------------------------------------------------------------------------------

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where the router is."""
        return self.where()

    async def check_health(self) -> None:
        """Raises RuntimeError unless the router answers."""
        await check_holder(self._holder)

    async def __del__(self) -> None:
        """Serve awaits it once: the router drains and ends."""
        if self._is_stopping:
            return
        self._is_stopping = True
        if self._starting is not None:
            self._starting.cancel()
        await self._tasks.stop()
        await self._holder.stop()
        if self._coordinator is not None:
            await self._coordinator.stop()

    # --- its own ---------------------------------------------------------------------------------------------------

    async def _start_coordinator(self, spec: Spec, options: HolderOptions) -> HeldCoordinator | None:
        """Of the nodes' cache servers, where they share and nobody has named another."""
        plan = coordinator_beside_router(spec, self._address, this_machine())
        if plan is None:
            return None
        check_secret_here(spec)
        coordinator = HeldCoordinator(plan, options, self._say, self._tasks)
        await coordinator.start()
        return coordinator

    async def _watch_beats(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for entry in self._roster.lost(time.monotonic()):
                await self._remove_lost(entry)

    async def _remove_lost(self, entry: Entry) -> None:
        async with self._lock(entry.url):
            back = self._roster.entries.get(entry.url)
            if back is not None and back.incarnation == entry.incarnation:
                return  # a late beat, and it is registered again
            self._num["lost"] += 1
            self._say(f"{entry.info['name']} is removed: its replica is gone")
            try:
                await self._client.remove(entry.role, entry.url, force=True)
            except UNHEARD as error:
                self._say(f"it could not be removed, and stays listed as down: {error}")
            back = self._roster.entries.get(entry.url)
            if back is not None:
                back.is_registered = False

    def _start_drain(self, info: dict[str, Any], drain_timeout_s: float) -> None:
        self._leaving.add(info["incarnation"])
        self._tasks.start(self._drain(info, drain_timeout_s), f"the drain of {info['name']}")

    async def _drain(self, info: dict[str, Any], drain_timeout_s: float) -> None:
        began_s = time.monotonic()
        try:
            async with self._lock(info["url"]):
                pass  # a registration that is on its way would come after the drain
            left = await self._client.leave(info["role"], info["url"], drain_timeout_s)
        finally:
            self._leaving.discard(info["incarnation"])
        self._num["left"] += 1
        self._say(f"{info['name']} has left after {time.monotonic() - began_s:.1f} s, {left.num_cut} requests cut")

    def _lock(self, url: str) -> asyncio.Lock:
        """What is told to the router of the engine at ``url``, one after the other."""
        return self._locks.setdefault(url, asyncio.Lock())

    def _on_end(self, reason: str) -> None:
        if not self._is_stopping:
            end_replica(reason)

    def _say_once(self, text: str) -> None:
        if text != self._last_said:
            self._last_said = text
            self._say(text)

    def _say(self, text: str) -> None:
        log.info("antiphon: %s", text)
