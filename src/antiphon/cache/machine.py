"""The cache: one event in, its reply and what else happened out. No socket, clock, thread or chance.

    cache = Cache(CacheOptions(arena_bytes=2 * GIB), first_id=random_48_bits)
    reply, *notices = cache.step(Lookup(...), now_s)

Always true:

- Every event has exactly one reply. ``Refused`` means that nothing was changed by the call.
- A chunk is reported only when all its slabs are committed, and only in one piece from the first chunk on; what is
  reported is leased.
- Bytes are given to another chunk only when no lease, no writer and no quarantine is on them.
- A handle or lease of an earlier life, or of a chunk that is gone, is refused.

It does not hash, copy, or know what the bytes are. One thread drives it; it takes no locks.
"""

from __future__ import annotations

from antiphon.cache import control, inspection, invariants, reading, statistics, storing
from antiphon.cache.arena import RegionHandle
from antiphon.cache.books import Books
from antiphon.cache.effects import (
    ArenaResized,
    Attached,
    Detached,
    Effect,
    Refused,
    Reply,
    Ticked,
    TierNoted,
)
from antiphon.cache.events import (
    Abort,
    ArenaGrew,
    Attach,
    Clear,
    Commit,
    CopyBegan,
    CopyEnded,
    Detach,
    Event,
    Lookup,
    Pin,
    Release,
    Reserve,
    SetQuota,
    Tick,
    TierDone,
    Unpin,
)
from antiphon.cache.inspection import FactsPage, Known, NamespacesFound, PinFacts, Selected
from antiphon.cache.listing import ChunkPage, page_of
from antiphon.cache.log import LogPage
from antiphon.cache.options import CacheOptions
from antiphon.cache.policy.choose import MakePolicy, choose_policy
from antiphon.cache.states import LeaseState
from antiphon.cache.statistics import EngineFacts, LeaseFacts, Statistics
from antiphon.cache.tier_options import TiersOptions
from antiphon.cache.tiers import Tiers, TierStatistics
from antiphon.core.errors import AntiphonError, ProtocolError


class Cache:
    """The state machine.

    Args:
        options: the bounds.
        first_id: first generation of regions and first lease id. Whoever starts the server draws it at random, so that
            no handle of an earlier life of the server is valid in this one.
        make_policy: gives the eviction policy; who compares policies passes another.
        tiers: what lies behind the arena; None where nothing does.
    """

    def __init__(
        self,
        options: CacheOptions,
        first_id: int = 1,
        make_policy: MakePolicy = choose_policy,
        tiers: TiersOptions | None = None,
    ) -> None:
        self._books = Books(options, first_id, make_policy)
        if tiers is not None:
            self._books.tiers = Tiers(self._books, tiers, first_id)

    def step(self, event: Event, now_s: float) -> list[Effect]:
        """Handles one event at time ``now_s`` (seconds, never less than before).

        Returns:
            The reply, then notices: first what the time has brought, then what the event has caused.
        """
        books = self._books
        books.step_number += 1
        books.notices = []
        books.advance(now_s)
        try:
            reply = self._reply(event)
        except AntiphonError as error:
            books.counters.num_refused_calls += 1
            reply = Refused(error)
        if books.tiers is not None:
            books.tiers.pump()
        return [reply, *books.notices]

    def _reply(self, event: Event) -> Reply:
        books = self._books
        match event:
            case Lookup():
                return reading.lookup(books, event)
            case Release():
                return reading.release(books, event)
            case CopyBegan():
                return reading.copy_began(books, event)
            case CopyEnded():
                return reading.copy_ended(books, event)
            case Reserve():
                return storing.reserve(books, event)
            case Commit():
                return storing.commit(books, event)
            case Abort():
                return storing.abort(books, event)
            case Attach():
                books.connections.attach(event)
                return Attached(books.arena.size_bytes, books.arena.usable_bytes)
            case Detach():
                return self._detach(event)
            case Clear():
                return control.clear(books, event)
            case Pin():
                return control.pin(books, event)
            case Unpin():
                return control.unpin(books, event)
            case SetQuota():
                return control.set_quota(books, event)
            case TierDone():
                return self._tier_done(event)
            case ArenaGrew():
                return self._grow(event)
            case Tick():
                return Ticked(books.next_deadline_s)

    def _detach(self, event: Detach) -> Detached:
        books = self._books
        connection = books.connections.get(event.connection)
        if books.tiers is not None:
            books.tiers.onboardings.cancel(connection)
        num_reservations = storing.abandon(books, connection)
        del books.connections.connections[connection.id]
        connection.engine.connections.discard(connection.id)
        num_quarantined = 0
        for lease in books.leases.connection_ended(connection, books.now_s):
            if lease.state is LeaseState.ENDED:
                books.end_lease(lease)
            else:
                num_quarantined += 1
        if books.connections.engines.get(connection.engine.id) is connection.engine:
            books.connections.forget_engine_if_gone(connection.engine)
        return Detached(num_reservations, num_quarantined)

    def _tier_done(self, event: TierDone) -> TierNoted:
        if self._books.tiers is None:
            raise ProtocolError("there are no tiers")
        self._books.tiers.done(event)
        return TierNoted()

    def _grow(self, event: ArenaGrew) -> ArenaResized:
        books = self._books
        arena = books.arena
        usable_bytes = event.usable_bytes
        if not arena.usable_bytes <= usable_bytes <= arena.size_bytes or usable_bytes % books.options.alignment_bytes:
            raise ProtocolError(
                f"the arena grows from {arena.usable_bytes} to at most {arena.size_bytes} bytes in steps of "
                f"{books.options.alignment_bytes}, not to {usable_bytes}"
            )
        arena.grow(usable_bytes)
        books.policy.resized(usable_bytes)
        return ArenaResized(usable_bytes)

    def events_since(self, sequence: int, num_events_max: int) -> LogPage:
        """What was stored and removed from event number ``sequence`` on (the first is 1), for observers.

        Raises:
            ValueError: ``sequence`` lies beyond the log, so that the asker means another life of this server.
        """
        return self._books.log.since(sequence, num_events_max)

    def chunks_after(self, generation: int, num_chunks_max: int) -> ChunkPage:
        """The readable chunks of later generations than this one, a page of them; 0 begins."""
        books = self._books
        return page_of(books.index, generation, num_chunks_max, books.log.next_sequence)

    def chunk_facts(self, select: Selected, after: int, num_chunks_max: int) -> FactsPage:
        """The readable chunks of later generations than ``after``, each with what is known of it; 0 begins."""
        return inspection.facts_after(self._books, select, after, num_chunks_max)

    def namespaces(self, select: Selected, num_max: int) -> NamespacesFound:
        """The namespaces that have chunks, those of the most bytes first."""
        return inspection.namespaces(self._books, select, num_max)

    def pins(self) -> list[PinFacts]:
        """Every pin that has not ended, the oldest first."""
        return inspection.pins(self._books)

    def quotas(self) -> dict[str, int]:
        """The tenants that have a quota of their own, and its bytes."""
        return dict(self._books.tenants.quotas)

    def known_of(self, select: Selected) -> Known:
        """Whether anything here has the tenant and the model."""
        return inspection.known_of(self._books, select)

    def regions(self) -> list[RegionHandle]:
        """Every region that a chunk holds, whatever its state; all other bytes may be given away."""
        return [chunk.region for chunk in self._books.chunk_at.values()]

    def statistics(self) -> Statistics:
        """A snapshot in numbers."""
        return statistics.take(self._books)

    def tiers(self) -> list[TierStatistics]:
        """Each tier in numbers, the fastest first."""
        return [] if self._books.tiers is None else self._books.tiers.statistics()

    def leases(self) -> list[LeaseFacts]:
        """Every lease that has not ended, oldest first."""
        return statistics.leases(self._books)

    def engines(self) -> list[EngineFacts]:
        """Every engine that is known, in the order in which they came."""
        return statistics.engines(self._books)

    @property
    def next_deadline_s(self) -> float | None:
        """When a ``Tick`` is due: an end of a quarantine, an alarm, a tier; None where nothing waits for time."""
        return self._books.next_deadline_s

    def validate(self) -> None:
        """Assert every invariant; in proportion to all chunks and leases."""
        invariants.validate(self._books)
