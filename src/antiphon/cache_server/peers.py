"""Sharing with other cache servers: the parts, put together, and the thread that they run on.

Owns that thread and its event loop, the listening socket, the membership, the serving side, the NIXL agent and the
store that the tier plan reads from (``store``). The cache is touched on its own thread only.

Always true: nothing here keeps the cache's thread waiting; when it cannot work, lookups miss, and ``status`` says why.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import antiphon.transport.loop as transport_loop
from antiphon.cache.effects import Reply
from antiphon.cache.events import Event
from antiphon.cache.lending import Shelf
from antiphon.cache.machine import Cache
from antiphon.cache.tier_key import TierKey
from antiphon.cache.tier_options import TierOptions
from antiphon.cache_server.peer_feed import Feed
from antiphon.cache_server.peer_lending import Lender
from antiphon.cache_server.peer_links import PeerLinks
from antiphon.cache_server.peer_membership import Membership
from antiphon.cache_server.peer_room import READS_MAX
from antiphon.cache_server.peer_serving import PeerSelf, PeerServing
from antiphon.cache_server.peer_store import TIER_NAME, PeerStore
from antiphon.cache_server.peer_threads import CacheThread
from antiphon.cache_server.waiting import Waiters
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.config.cluster import cluster_secret, host_port_of, host_port_text
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import ConfigError, PeerUnavailable
from antiphon.observe.tracing import Tracing, active_span
from antiphon.protocol.cache_handoff import HandoffKey
from antiphon.protocol.peers import Holder, Located
from antiphon.storage.arena import ArenaMapping
from antiphon.transport.listening import listen_tcp
from antiphon.transport.nixl_agent import NixlAgent

log = logging.getLogger("antiphon.peers")

LENT_SHARE_MAX: Final = 0.25
"""Share of the arena that one peer may have leased: it reads a chunk in some milliseconds."""
CLOSE_TIMEOUT_S: Final = 1.0
"""For the thread; the whole process has 2 s."""


def peer_tier() -> TierOptions:
    """How the tier plan uses the store: the last tier, which is only read. The deadlines of the store are shorter than
    that of the plan, but for a peer that hangs during a read."""
    return TierOptions(
        name=TIER_NAME,
        store="none",
        source="peer",
        is_shared=True,
        fetches_max=READS_MAX,
        timeout_s=4.0,
        retry_max_s=1.0,
    )


def wants_peers(spec: CacheServerSpec) -> bool:
    """Whether the server shares with others.

    Raises:
        ConfigError: half of what that takes is given, or an address is not loopback and there is no secret.
    """
    if spec.coordinator_url is None and spec.p2p_advertise_url is None:
        if spec.cluster_secret_file is not None or spec.p2p_host is not None:
            field = "cluster_secret_file" if spec.cluster_secret_file is not None else "p2p_host"
            raise ConfigError(
                "nothing is shared with other cache servers",
                field=field,
                remedy="add --coordinator-url and --p2p-advertise-url, or leave it out",
            )
        return False
    if spec.p2p_advertise_url is None:
        raise ConfigError(
            "other cache servers are not told where this one is",
            field="coordinator_url",
            remedy="add --p2p-advertise-url HOST:PORT, an address of this machine that they reach",
        )
    if spec.coordinator_url is None:
        raise ConfigError(
            "there is no coordinator to tell it to",
            field="p2p_advertise_url",
            remedy="add --coordinator-url HOST:PORT, where antiphon coordinator runs",
        )
    _secret_of(spec)
    return True


def _secret_of(spec: CacheServerSpec) -> bytes:
    assert spec.coordinator_url is not None
    assert spec.p2p_advertise_url is not None
    hosts = [host_port_of(spec.p2p_advertise_url)[0], host_port_of(spec.coordinator_url)[0]]
    hosts += [spec.p2p_host] if spec.p2p_host is not None else []
    return cluster_secret(spec.cluster_secret_file, spec.runtime_dir, hosts)


@dataclass(frozen=True)
class PeersParts:
    """What of the server the peers use.

    Args:
        instance, incarnation: its name and life.
        cache: read on the cache's thread alone.
        step: gives the cache an event there.
        waiters: who waits for the cache's events.
        arena: its memory, mapped until ``Peers.close`` has returned True.
        private_tenants: whose chunks stay here.
        tracing: None where nothing is traced.
    """

    instance: str
    incarnation: str
    cache: Cache
    step: Callable[[Event], Reply]
    waiters: Waiters
    arena: ArenaMapping
    private_tenants: frozenset[str] = frozenset()
    tracing: Tracing | None = None


class Peers:
    """What one server shares. Made by ``start``.

    Args:
        spec: says with whom.
        parts: of the server.
        secret: of the cluster.
    """

    def __init__(self, spec: CacheServerSpec, parts: PeersParts, secret: bytes) -> None:
        assert spec.coordinator_url is not None
        assert spec.p2p_advertise_url is not None
        self._spec = spec
        self._parts = parts
        myself = PeerSelf(parts.instance, parts.incarnation, secret)
        host, port = host_port_of(spec.p2p_advertise_url)
        self._sock = listen_tcp(
            spec.p2p_host or host,
            port,
            port_flag="--p2p-advertise-url",
            host_flag="--p2p-host" if spec.p2p_host is not None else "--p2p-advertise-url",
        )
        self.url = host_port_text(host, port or self._sock.getsockname()[1])
        """Where peers reach this server."""
        self.shelf = Shelf(parts.cache, parts.private_tenants)
        cap_bytes = int(parts.arena.data_bytes * LENT_SHARE_MAX)
        self.lender = Lender(parts.step, self.shelf, spec.chunk_size, max(cap_bytes, 1 << 26))
        self._links = PeerLinks(myself)
        self.store = PeerStore(self._locate, self._links, (parts.arena.address, parts.arena.data_bytes))
        cache_thread = CacheThread(asyncio.get_running_loop())
        self._cache_thread = cache_thread
        self._serving = PeerServing(myself, self.lender, cache_thread, parts.arena)
        self._serving.tracing = parts.tracing
        self.shelf.on_stored = self._serving.digests.stored
        self.store.on_pulled = self._serving.digests.pulled
        urls = (spec.coordinator_url, self.url)
        self._membership = Membership(myself, urls, lambda: Feed(self.shelf), self._wait_for_changes, cache_thread)
        self._agent: NixlAgent | None = None
        self._agent_error = "" if spec.p2p_transport != "tcp" else "switched off by --p2p-transport tcp"
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._is_running = threading.Event()
        self._thread = threading.Thread(target=self._run, name="antiphon-peers", daemon=True)

    @classmethod
    def start(cls, spec: CacheServerSpec, parts: PeersParts) -> Peers:
        """Listens, and joins in the background. Called on the cache's thread, whose loop runs.

        Raises:
            ConfigError: see ``wants_peers``.
            StartError: the address cannot be listened on.
        """
        peers = cls(spec, parts, _secret_of(spec))
        peers._thread.start()
        return peers

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            transport_loop.run(self._main())
        except Exception:  # supervised: the cache goes on without its peers; the log and the status say so
            log.exception("sharing with peers has ended by a bug; this server goes on alone")
        finally:
            self._is_running.set()
            self._sock.close()

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._is_running.set()
        self._serving.listen(self._sock)
        starting = asyncio.create_task(self._start_agent())
        member = asyncio.create_task(self._membership.run())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            # Neither ends by itself but by a bug, which is raised here.
            done, _ = await asyncio.wait((member, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (starting, member, stopping):
                task.cancel()
            await asyncio.gather(starting, member, stopping, return_exceptions=True)
            await self._serving.close()

    async def _start_agent(self) -> None:
        if self._spec.p2p_transport == "tcp":
            return
        arena = self._parts.arena
        try:
            agent = await asyncio.to_thread(NixlAgent.start, arena.address, arena.data_bytes)
        except PeerUnavailable as error:
            self._agent_error = error.message
            level = logging.ERROR if self._spec.p2p_transport == "nixl" else logging.WARNING
            log.log(level, "KV goes to and from peers over TCP: %s", error.message)
            return
        self._agent = self._serving.agent = self._links.agent = agent

    def expect(self, key: HandoffKey, chunks: Sequence[tuple[TierKey, ChunkKey]], wait_s: float) -> None:
        """An engine of another server has handed these chunks over: that server is asked for them, whatever the
        coordinator knows."""
        if not key.address:
            return
        holder = Holder(key.server, key.incarnation, key.address)
        self.store.expect(holder, chunks, wait_s)

    async def _wait_for_changes(self, timeout_s: float) -> None:
        """Until the cache has an event that the shelf has not taken up."""
        await self._cache_thread.wait_for(self._parts.waiters.wait(self.shelf.read_to, timeout_s))

    def _locate(self, keys: list[bytes], timeout_s: float) -> Located | None:
        """Asks the coordinator, from a thread of the tier."""
        loop = self._loop
        if loop is None or not self._membership.is_member:
            return None
        asking = self._membership.ask(keys, timeout_s, active_span())
        try:
            future = asyncio.run_coroutine_threadsafe(asking, loop)
        except RuntimeError:
            asking.close()
            return None
        try:
            return future.result(2 * timeout_s)
        except (TimeoutError, concurrent.futures.CancelledError):  # the second where that loop ends
            future.cancel()
            return None

    # ---- what it shows -----------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def counts(self) -> dict[str, int]:
        """Totals since the start, by name."""
        agent = self._agent
        pulls = self.store.where.counts
        return {
            "pulled": pulls["pulled"],
            "absent": pulls["absent"],
            "late": pulls["late"],
            "failed": pulls["failed"],
            "corrupt": pulls["corrupt"],
            "breakers_opened": pulls["breakers_opened"],
            "nixl_reads": agent.counts["reads"] if agent else 0,
            "nixl_bytes": agent.counts["bytes"] if agent else 0,
            "nixl_failed": agent.counts["failed"] if agent else 0,
            "nixl_expired": agent.counts["expired"] if agent else 0,
            "lent": self.lender.num_lent,
            "capped": self.lender.num_capped,
            "sent_bytes": self._serving.counts["sent_bytes"],
            "refused": self._serving.counts["refused"],
            "joins": self._membership.num_joins,
            "listings": self._membership.num_listings,
        }

    def status(self) -> dict[str, object]:
        """For ``/status``."""
        membership = self._membership
        return {
            "is_member": membership.is_member,
            "is_listed": membership.is_listed,
            "reason": membership.reason or None,
            "coordinator_url": self._spec.coordinator_url,
            "url": self.url,
            "nixl": "in use" if self._agent is not None else self._agent_error or "starting",
            "num_connections": self._serving.num_connections,
            "num_loans": self.lender.num_loans,
            "num_undigested": self._serving.digests.num_waiting,
            "lent_bytes": self.lender.lent_bytes(),
            "breakers": self.store.breakers(),
            "counts": self.counts(),
        }

    def close(self) -> bool:
        """Leaves, ends the thread and the agent; returns whether the arena may be unmapped. Called on the cache's
        thread; the store's calls have ended before."""
        self.store.close()
        if self._is_running.wait(CLOSE_TIMEOUT_S) and self._loop is not None and self._stopping is not None:
            try:
                self._loop.call_soon_threadsafe(self._stopping.set)
            except RuntimeError:
                pass  # it has ended by itself
        self._thread.join(CLOSE_TIMEOUT_S)
        is_quiet = self._agent is None or self._agent.close()
        return is_quiet and not self._thread.is_alive()
