"""One life of a cache server with peers: the real cache, shelf, lender, feed and pull, with an arena of bytes.

Its engines are not simulated: chunks are stored and wanted at random. What is wanted is read here if it is readable,
and else pulled; whatever is readable afterwards must be, byte for byte, what an engine of this server's layout would
have computed. Bytes of a peer are read out of its arena as they are at that moment, in two halves, as a network card
would: leases are what keeps them right, and the digest is what notices where they do not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import Attached, Committed, Found, Onboarded, Refused, Reply, Reserved
from antiphon.cache.events import (
    Abort,
    Attach,
    Clear,
    Commit,
    ConnectionId,
    EngineId,
    Event,
    Lookup,
    Release,
    Reserve,
    Tick,
    TicketId,
)
from antiphon.cache.lending import Shelf
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.states import ChunkState
from antiphon.cache.tier_jobs import TierJob
from antiphon.cache.tier_key import TierKey, meaning_of
from antiphon.cache.tier_options import TierOptions, TiersOptions
from antiphon.cache_server.peer_expected import Expectations
from antiphon.cache_server.peer_feed import Feed
from antiphon.cache_server.peer_lending import FIRST_BORROWER, Lender
from antiphon.cache_server.peer_pull import Whereabouts
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import peers as wire
from antiphon.sim.network import Process
from antiphon.sim.peers_member import Connect, SimMember
from antiphon.sim.timeline import CheckFailed, Timeline

CHUNK_BYTES = 32
ENGINE = ConnectionId(1)
NAMESPACE = NamespaceDigest(hashlib.sha256(b"simulated").digest())
QUARANTINE_S = 0.05
PEER_TIER = TierOptions("peer", store="none", source="peer", is_shared=True, promotion_hits=0, timeout_s=3.0)
TIERS = TiersOptions((PEER_TIER,), onboard_max_s=9.0)
WRITE_S = 0.002

R = TypeVar("R")


def content_of(key: bytes, layout: ChunkLayout) -> bytes:
    """What a chunk holds: it differs by key and by layout."""
    return hashlib.sha256(f"{layout.num_slabs}{layout.fingerprint}".encode() + key).digest()[:CHUNK_BYTES]


def digest_of(data: bytes) -> bytes:
    """What the holder tells of a chunk; any digest of 16 bytes does."""
    return hashlib.blake2b(data, digest_size=wire.DIGEST_BYTES).digest()


class SimServer:
    """One life.

    Args:
        timeline: virtual time.
        host: name of the server, the same in each life.
        incarnation: of this life.
        layout: of its engines' chunks, ``CHUNK_BYTES`` in all.
        num_chunks: that its arena holds.
    """

    def __init__(self, timeline: Timeline, host: str, incarnation: str, layout: ChunkLayout, num_chunks: int) -> None:
        self.timeline = timeline
        self.host = host
        self.incarnation = incarnation
        self.layout = layout
        self._meaning = meaning_of(NAMESPACE, "t", "m", layout)
        self.process = Process(timeline, f"{host}#{incarnation}")
        self.memory = bytearray(num_chunks * CHUNK_BYTES)
        options = CacheOptions(
            arena_bytes=len(self.memory),
            alignment_bytes=CHUNK_BYTES,
            quarantine_s=QUARANTINE_S,
            reserved_share_max=1.0,
            event_log_max=timeline.random.choice((4, 64)),
        )
        self.cache = Cache(options, first_id=timeline.random.getrandbits(40), tiers=TIERS)
        self._next_event = 1
        """Number of the next event in the cache's log."""
        self.member: SimMember | None = None
        self._jobs: list[TierJob] = []
        self._run: Callable[[TierJob], None] = self._jobs.append
        self.on_onboarded: dict[TicketId, Callable[[Found], None]] = {}
        """Who is told of the answer to a lookup that waits."""
        self.early: dict[TicketId, Found] = {}
        """Answers that came within the step that began to wait."""
        self.num_stops = 0
        attach = Attach(
            ENGINE, EngineId("e", "i"), "m", options.chunk_size_tokens, layout, tuple(range(layout.num_slabs))
        )
        self.reply(attach, Attached)
        self.shelf = Shelf(self.cache, num_changes_max=timeline.random.choice((4, 64)))
        self.lender = Lender(self.step, self.shelf, options.chunk_size_tokens, 4 * CHUNK_BYTES)
        self.where = Whereabouts(keys_max=16, ttl_s=1.0)
        self.expected = Expectations()
        self._num_borrowers = 0
        self._tick_due_s = float("inf")

    def join(self, connect: Connect) -> None:
        """Becomes a member, and stays one."""
        self.member = SimMember(self.timeline, self.process, connect, lambda: Feed(self.shelf, 3, 3))

    def serve_tier(self, run: Callable[[TierJob], None]) -> None:
        """From now on its tier does jobs, those that wait already among them."""
        self._run = run
        for job in self._jobs:
            run(job)

    def stop(self) -> None:
        """SIGSTOP."""
        self.num_stops += 1
        if self.member is not None:
            self.member.wake()
        self.process.stop()

    def step(self, event: Event) -> Reply:
        """One step of the cache. Who waits for an answer that it brings is told after it."""
        reply, *notices = self.cache.step(event, self.timeline.now_s)
        if self.cache._books.log.next_sequence != self._next_event:
            self._next_event = self.cache._books.log.next_sequence
            if self.member is not None:
                self.member.wake()
        due_s = self.cache.next_deadline_s
        if due_s is not None and due_s < self._tick_due_s:
            self._tick_due_s = due_s
            self.process.after(max(0.0, due_s - self.timeline.now_s) + 1e-6, self._tick)
        for notice in notices:
            if isinstance(notice, TierJob):
                self._run(notice)
            elif isinstance(notice, Onboarded):
                self._onboarded(notice)
        return reply  # type: ignore[return-value]  # the first effect is the reply

    def _onboarded(self, notice: Onboarded) -> None:
        answered = self.on_onboarded.pop(notice.ticket, None)
        if answered is None:
            self.early[notice.ticket] = notice.found
        else:
            answered(notice.found)

    def _tick(self) -> None:
        self._tick_due_s = float("inf")
        self.step(Tick())

    def reply(self, event: Event, kind: type[R]) -> R:
        """The reply, which must be a ``kind``."""
        reply = self.step(event)
        assert isinstance(reply, kind), reply
        return reply

    # ---- what its engines do -----------------------------------------------------------------------------------------

    def tier_key_of(self, key: ChunkKey) -> TierKey:
        """As the plan names the chunk in tiers."""
        return self._meaning.key_of(key)

    def reserve(self, key: ChunkKey) -> RegionHandle | None:
        """Room for a chunk, None where it is here or there is none."""
        reply = self.step(Reserve(ENGINE, NAMESPACE, "t", None, (key,)))
        if isinstance(reply, Refused):
            return None
        assert isinstance(reply, Reserved), reply
        return reply.grants[0].region if reply.grants else None

    def store(self, key: ChunkKey) -> None:
        """An engine computes a chunk and stores it."""
        region = self.reserve(key)
        if region is None:
            return
        self.write(region, b"\xee" * CHUNK_BYTES)

        def ready() -> None:
            self.write(region, content_of(key, self.layout))
            self.commit(region)

        self.process.after(self.timeline.random.random() * WRITE_S, ready)

    def write(self, region: RegionHandle, data: bytes) -> None:
        """Bytes into a reserved region."""
        self.memory[region.offset_bytes : region.offset_bytes + CHUNK_BYTES] = data

    def commit(self, region: RegionHandle) -> None:
        """The region is complete."""
        self.reply(Commit(ENGINE, (region,)), Committed)

    def abort(self, region: RegionHandle) -> None:
        """The region stays empty."""
        self.step(Abort(ENGINE, (region,)))

    def read(self, key: ChunkKey) -> bool:
        """An engine loads a chunk, if it is here; raises CheckFailed where its bytes are wrong."""
        found = self.reply(Lookup(ENGINE, "r", NAMESPACE, "t", (key,)), Found)
        if found.lease is None:
            return False
        offset = found.regions[0].offset_bytes
        data = bytes(self.memory[offset : offset + CHUNK_BYTES])
        self.step(Release(ENGINE, "r", found.lease))
        if data != content_of(key, self.layout):
            raise CheckFailed(f"{self.process.name} holds wrong bytes for chunk {key.hex()[:8]}")
        return True

    def is_readable(self, key: ChunkKey) -> bool:
        """Whether an engine could load the chunk."""
        chunk = self.cache._books.index.chunks.get(key)
        return chunk is not None and chunk.state is ChunkState.READABLE

    def clear(self) -> None:
        """Somebody clears the cache."""
        self.step(Clear())

    # ---- what its peers do -------------------------------------------------------------------------------------------

    def borrower(self, host: str, incarnation: str) -> ConnectionId:
        """A connection of a peer that has shown the secret."""
        connection = ConnectionId(FIRST_BORROWER + self._num_borrowers)
        self._num_borrowers += 1
        self.lender.attach(connection, host, incarnation)
        return connection

    def digest_at(self, offset: int) -> bytes:
        """Of a leased chunk."""
        return digest_of(bytes(self.memory[offset : offset + CHUNK_BYTES]))

    def check_idle(self) -> None:
        """No loan, lease, reservation or lookup that waits is left."""
        self.step(Tick())
        if self.on_onboarded or self.early:
            raise CheckFailed(f"{self.process.name}: {len(self.on_onboarded)} lookups wait, {len(self.early)} are lost")
        if self.lender.num_loans or self.lender.lent_bytes() or self.cache.leases():
            raise CheckFailed(f"{self.process.name} has {self.lender.num_loans} loans, {self.cache.leases()}")
        self.shelf.follow()
        self.shelf.validate()
        self.cache.validate()
