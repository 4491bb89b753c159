"""The cache server: its sockets, its arena and its cache, as one object.

What the admin routes show is asked here, on the same event loop. Nothing but this object's parts changes the cache.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from pathlib import Path

from antiphon import __version__
from antiphon.cache.effects import ArenaResized, Refused, Reply, TierNoted
from antiphon.cache.events import ArenaGrew, Clear, Pin, SetQuota, TierDone, Unpin
from antiphon.cache.listing import ChunkPage
from antiphon.cache.log import LogPage
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.statistics import Statistics
from antiphon.cache.tiers import TierStatistics
from antiphon.cache_server import views
from antiphon.cache_server.calls import Calls
from antiphon.cache_server.driver import CacheDriver
from antiphon.cache_server.metrics import CallTallies
from antiphon.cache_server.peer_lending import PEER_PREFIX
from antiphon.cache_server.peers import Peers, PeersParts, peer_tier, wants_peers
from antiphon.cache_server.population import Population
from antiphon.cache_server.preflight import check_memory
from antiphon.cache_server.probe import PROBE_NAME
from antiphon.cache_server.reports import Reports
from antiphon.cache_server.sockets import RuntimeFolder
from antiphon.cache_server.tier_runner import TierRunner
from antiphon.cache_server.tier_setup import open_stores, tiers_options
from antiphon.cache_server.traces import ServerTraces
from antiphon.cache_server.views import EngineView, LeaseView, ReportPage, TokenTotals
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.core.errors import CapacityExceeded, ConfigError
from antiphon.core.ids import new_incarnation
from antiphon.core.quiet_log import QuietLog
from antiphon.observe.tracing import Tracing
from antiphon.protocol.cache import PROTOCOL_VERSION, Welcome
from antiphon.storage.arena import HEADER_BYTES, ArenaOwner
from antiphon.storage.tier import TierStore
from antiphon.transport.frames_server import FrameLimits, FrameServer
from antiphon.transport.listening import listen_tcp

log = logging.getLogger("antiphon.cache_server")

_QUIET_LINES = 10
"""Lines of one kind that peers may cause before the rest is left out: a whole engine attaches in less."""
_LOOP_STALL_S = 5.0
"""A loop that has not looked at its deadlines for so long is taken for stuck; it does so four times a second."""


class CacheServer:
    """One cache server. Made by ``start``.

    Args:
        spec: its command line.
        tracing: where its spans go; None where nothing is traced.
    """

    def __init__(self, spec: CacheServerSpec, tracing: Tracing | None = None) -> None:
        self.spec = spec
        self._tracing = tracing
        self.version = __version__
        self.incarnation = new_incarnation()
        self.started_at = time.time()
        """Seconds since 1970."""
        self.instance = ""
        self.port = 0
        self.socket_path = ""
        self.tallies = CallTallies()
        self._reports = Reports()
        self._quiet = QuietLog(log, num_lines=_QUIET_LINES)
        self._exit = contextlib.ExitStack()
        self._stores: list[TierStore] = []
        self._runner: TierRunner | None = None
        self._peers: Peers | None = None
        self._may_unmap = True

    @classmethod
    async def start(
        cls, spec: CacheServerSpec, limits: FrameLimits | None = None, tracing: Tracing | None = None
    ) -> CacheServer:
        """A server that listens. Its arena is populated in the background from here on.

        Raises:
            ConfigError: the arena is larger than the free memory, or the runtime folder or a tier cannot be used.
            StartError: a port or the name is taken.
        """
        server = cls(spec, tracing)
        with contextlib.ExitStack() as undo:
            undo.push(server._exit)
            server._open(limits or FrameLimits())
            undo.pop_all()
        return server

    def _open(self, limits: FrameLimits) -> None:
        spec = self.spec
        has_peers = wants_peers(spec)
        tcp = self._exit.enter_context(listen_tcp(spec.host, spec.port))
        self.port = tcp.getsockname()[1]
        self.instance = spec.instance_id or f"port-{self.port}"
        check_memory(spec, self.instance)
        folder = RuntimeFolder.open(Path(spec.runtime_dir), self.instance)
        self._exit.callback(folder.close)
        unix, self.socket_path = folder.listen(self.incarnation)
        self._exit.enter_context(unix)
        try:
            self._arena = ArenaOwner.create(spec.l1_size_bytes, self.instance, self.incarnation)
        except CapacityExceeded as error:
            raise ConfigError(error.message, field="l1_size_gb", remedy=error.remedy) from error
        self._exit.callback(self._close_arena)
        tiers = spec.tiers
        self._stores = open_stores(tiers)
        further = (peer_tier(),) if has_peers else ()
        plan = tiers_options(tiers, spec.onboard_max_s, further)
        options = CacheOptions(
            arena_bytes=self._arena.data_bytes,
            usable_bytes=0,
            chunk_size_tokens=spec.chunk_size,
            eviction_policy=spec.eviction_policy.lower(),
            quota_bytes=spec.quota_bytes,
            default_quota_bytes=spec.default_quota_bytes,
            own_tenants=frozenset({PROBE_NAME}),
        )
        # At random, so that no handle of an earlier life is valid in this one.
        cache = Cache(options, first_id=1 + secrets.randbits(48), tiers=plan)
        self._driver = CacheDriver(cache, self.tallies, self._quiet)
        self._exit.callback(self._driver.close)
        if has_peers:
            self._share(cache, plan.private_tenants)
        limits_of = [(tier.num_threads, tier.known_max) for tier in plan.tiers]
        self._runner = TierRunner(self._stores, limits_of, self._arena.mapping, self._tier_done)
        self._driver.on_job = self._runner.run
        self._exit.callback(self._runner.close)
        self._calls = Calls(
            self._driver, self._reports, self._welcome(), self._arena.fd, tallies=self.tallies, quiet=self._quiet
        )
        if self._peers is not None:
            self._calls.expect = self._peers.expect
        if self._tracing is not None:
            self._calls.traces = self._runner.traces = ServerTraces(self._tracing, self.instance, spec.chunk_size)
            self.tallies.spans = self._tracing.counts
        self._population = Population(self._arena, self._grew)
        self._exit.callback(self._population.stop)
        self._frames = FrameServer(self._calls, limits, frozenset((os.geteuid(), 0)))
        self._exit.callback(self._frames.close)
        self._frames.listen(tcp)
        self._frames.listen(unix)
        self._population.start()

    def _welcome(self) -> Welcome:
        return Welcome(
            version=PROTOCOL_VERSION,
            instance=self.instance,
            incarnation=self.incarnation,
            socket_path=self.socket_path,
            chunk_size_tokens=self.spec.chunk_size,
            arena_bytes=HEADER_BYTES + self._arena.data_bytes,
            data_offset_bytes=HEADER_BYTES,
            peer_address="" if self._peers is None else self._peers.url,
        )

    def _share(self, cache: Cache, private_tenants: frozenset[str]) -> None:
        """With other cache servers: their chunks are the last tier."""
        driver = self._driver
        parts = PeersParts(
            *(self.instance, self.incarnation, cache, driver.step, driver.waiters, self._arena.mapping),
            *(private_tenants, self._tracing),
        )
        self._peers = Peers.start(self.spec, parts)
        self._stores.append(self._peers.store)
        self._exit.callback(self._close_peers)

    def _close_peers(self) -> None:
        assert self._peers is not None
        self._may_unmap = self._peers.close()

    def _tier_done(self, event: TierDone) -> None:
        reply = self._driver.step(event)
        assert isinstance(reply, TierNoted), reply

    def _close_arena(self) -> None:
        """A call to a tier or a peer that does not end keeps the mapping; both end with the process."""
        if not self._may_unmap:
            log.warning("the arena is not unmapped: a peer may be using it")
            return
        try:
            self._arena.close()
        except BufferError as error:
            log.warning("the arena is not unmapped: %s", error)

    def _grew(self, usable_bytes: int) -> None:
        reply = self._driver.step(ArenaGrew(usable_bytes))
        assert isinstance(reply, ArenaResized), reply

    async def close(self) -> None:
        """Stops listening, closes every connection, and removes the unix socket. Engines keep what they have mapped."""
        self._exit.close()

    # ---- what it shows -----------------------------------------------------------------------------------------------

    @property
    def population(self) -> views.Population:
        """How much of the arena has its memory."""
        usable_bytes = self._driver.cache.statistics().usable_bytes
        return views.Population(usable_bytes, self._arena.data_bytes, self._population.error)

    @property
    def token_totals(self) -> TokenTotals:
        """Sums over all token reports."""
        return self._reports.totals

    @property
    def call_counts(self) -> Counter[tuple[str, str]]:
        """Calls answered, by name (``Lookup``) and outcome (``ok`` or an error code)."""
        return self._calls.counts

    @property
    def handoffs(self) -> Counter[str]:
        """Lookups of what a prefill engine has handed over: stored ``here``, ``elsewhere``, or of ``other_meaning``."""
        return self._calls.handoffs

    @property
    def num_connections(self) -> int:
        """Open connections, attached or not."""
        return self._frames.num_connections

    def statistics(self) -> Statistics:
        """The cache in numbers."""
        return self._driver.cache.statistics()

    def engines(self) -> list[EngineView]:
        """Every engine that is attached or has leases."""
        return [
            EngineView(
                facts.engine.name,
                facts.engine.incarnation,
                facts.model,
                self._calls.processes(facts.engine),
                facts.leased_bytes,
            )
            for facts in self._driver.cache.engines()
            if not facts.engine.name.startswith(PEER_PREFIX)
        ]

    def tiers(self) -> list[tuple[TierStatistics, tuple[int, int, int | None]]]:
        """Each tier behind the arena, the fastest first: what the plan counts, and what its store holds (records,
        bytes, most bytes)."""
        usages = [] if self._runner is None else self._runner.usages()
        return list(zip(self._driver.cache.tiers(), usages, strict=True))

    @property
    def peers(self) -> dict[str, object] | None:
        """What is shared with other cache servers, for people; None where nothing is."""
        return None if self._peers is None else self._peers.status()

    def leases(self) -> list[LeaseView]:
        """Every lease that has not ended, oldest first."""
        now_s = self._driver.now_s
        return [
            LeaseView(
                lease=facts.lease,
                engine=facts.engine.name,
                incarnation=facts.engine.incarnation,
                request=facts.request,
                state=facts.state.value,
                age_s=now_s - facts.began_s,
                num_bytes=facts.num_bytes,
                num_chunks=facts.num_chunks,
            )
            for facts in self._driver.cache.leases()
        ]

    def events_since(self, sequence: int, num_events_max: int) -> LogPage:
        """What was stored and removed, from event number ``sequence`` on (the first is 1).

        Raises:
            ValueError: ``sequence`` is beyond the log.
        """
        return self._driver.cache.events_since(sequence, num_events_max)

    def chunks_after(self, generation: int, num_chunks_max: int) -> ChunkPage:
        """The readable chunks of later generations than this one, a page of them; 0 begins."""
        return self._driver.cache.chunks_after(generation, num_chunks_max)

    def reports_since(self, sequence: int, num_reports_max: int) -> ReportPage:
        """Token reports from number ``sequence`` on (the first is 1).

        Raises:
            ValueError: ``sequence`` is beyond what was reported.
        """
        return self._reports.since(sequence, num_reports_max)

    async def wait_events(self, sequence: int, timeout_s: float) -> bool:
        """Whether event number ``sequence`` exists; waits for it up to ``timeout_s``."""
        return await self._driver.waiters.wait(sequence, timeout_s)

    async def wait_reports(self, sequence: int, timeout_s: float) -> bool:
        """Whether report number ``sequence`` exists; waits for it up to ``timeout_s``."""
        return await self._reports.waiters.wait(sequence, timeout_s)

    @property
    def cache(self) -> Cache:
        """To be read; ``control`` changes it."""
        return self._driver.cache

    @property
    def now_s(self) -> float:
        """By the clock of the cache's steps."""
        return self._driver.now_s

    def control(self, event: Clear | Pin | Unpin | SetQuota) -> Reply:
        """What an operator asks for.

        Raises:
            AntiphonError: it is refused, and nothing has changed.
        """
        reply = self._driver.step(event)
        if isinstance(reply, Refused):
            raise reply.error
        return reply

    def loops_alive(self) -> dict[str, bool]:
        """What must be alive for this server to work, by name."""
        is_turning = self._frames.loop.time() - self._frames.swept_at_s < _LOOP_STALL_S
        return {"calls": self._frames.is_listening and is_turning, "population": self._population.is_alive}
