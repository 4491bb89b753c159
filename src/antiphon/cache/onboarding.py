"""Lookups that wait for chunks of tiers, and the fetches that bring them into the arena.

Always true:

- What a waiting lookup has in one piece from the first chunk on is held in the arena: it stays until its answer, which
  leases it.
- A chunk is fetched once, whoever waits for it, into a region of its own that nobody else is given before the job has
  really ended. It becomes readable only after its bytes were checked.
- A lookup is answered at its deadline at the latest, with what is readable in one piece then. A fetch that is under way
  goes on, and what it brings is kept.
- A chunk that was handed over is waited for although nobody has it yet: until it is stored, it is known not to come, or
  the deadline (``awaiting``).
- What waiting lookups hold stays within a share of the arena, and within what their engine may lease.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from antiphon.cache import reading, room
from antiphon.cache.awaiting import WAIT_MIN_S, Awaiting, Handover
from antiphon.cache.connections import Connection
from antiphon.cache.effects import Onboarded, Onboarding, Removal
from antiphon.cache.events import ConnectionId, Lookup, TicketId, TierDone
from antiphon.cache.index import Binding, Chunk
from antiphon.cache.states import ChunkState, SlabState
from antiphon.cache.tier import Running, Tier
from antiphon.cache.tier_jobs import JobKind, Outcome
from antiphon.cache.tier_key import Meaning, TierKey, meaning_of
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import CacheError

if TYPE_CHECKING:
    from antiphon.cache.tiers import Tiers

FETCHER: Final = ConnectionId(-1)
"""Stands for the tiers among the writers of a chunk."""

PREFILL_SHARE: Final = 0.8
"""A lookup waits no longer than this share of the time that computing the same tokens would take."""


@dataclass(slots=True, eq=False)
class Waiter:
    """A lookup that waits.

    Args:
        held: chunks that it holds, by their place in its prefix.
        position: chunks from the first on that it has in one piece.
        ordered: chunks from the first on that are held or being fetched.
        end: no chunk from this place on comes.
        num_asks: questions to tiers without an answer.
        num_bytes: bytes that it holds or has ordered, those that its engine has leased anyway left out.
        sources: places of the chunks that came from a tier, by the source's name.
        handover: what was handed over of it; None where nothing was.
    """

    ticket: TicketId
    lookup: Lookup
    connection: Connection
    meaning: Meaning
    deadline_s: float
    held: list[Chunk] = field(default_factory=list)
    position: int = 0
    ordered: int = 0
    end: int = 0
    num_asks: int = 0
    num_bytes: int = 0
    sources: dict[int, str] = field(default_factory=dict)
    handover: Handover | None = None
    is_over: bool = False


@dataclass(slots=True, eq=False)
class Fetch:
    """A chunk on its way into the arena.

    Args:
        waiter: who asked for it first: whose tenant and model it is.
        place: of the chunk in that lookup.
        tried: numbers of the tiers that it was not found in.
        waiters: who waits for it, and the chunk's place there.
        chunk: its region, from the beginning of the job on.
    """

    waiter: Waiter
    place: int
    key: ChunkKey
    tier_key: TierKey
    tried: set[int] = field(default_factory=set)
    waiters: list[tuple[Waiter, int]] = field(default_factory=list)
    chunk: Chunk | None = None


@dataclass(slots=True, eq=False)
class Ask:
    """A question to a tier: which of these keys of a lookup are there? ``places``: of the keys in the lookup."""

    waiter: Waiter
    keys: tuple[TierKey, ...]
    places: tuple[int, ...]


class Onboardings:
    """All waiting lookups, and all fetches."""

    def __init__(self, tiers: Tiers, first_ticket: int) -> None:
        self.tiers = tiers
        self.books = tiers.books
        self.waiters: dict[TicketId, Waiter] = {}
        self.fetches: dict[ChunkKey, Fetch] = {}
        """What waits to be fetched, or is being fetched; not what is overdue."""
        self.held_bytes = 0
        """Of all waiters, a chunk once for each."""
        self.awaiting = Awaiting(self)
        self._next_ticket = first_ticket
        self._deadlines: list[tuple[float, TicketId]] = []

    # ---- a lookup comes ----------------------------------------------------------------------------------------------

    def begin(self, lookup: Lookup, connection: Connection, prefix: list[Chunk]) -> Onboarding | None:
        """The first answer to a lookup that finds ``prefix`` in the arena; None where nothing more can come."""
        engine = connection.engine
        has_leases = len(engine.leases) < self.books.options.leases_per_engine_max
        if len(self.waiters) >= self.tiers.options.onboards_max or not has_leases:
            return None
        meaning = meaning_of(lookup.namespace, lookup.tenant, engine.model, engine.layout)
        num_max = self._num_expected(lookup, meaning, len(prefix))
        handover = self.awaiting.handover_of(lookup)
        if handover is not None:
            num_max = max(num_max, handover.num_chunks)
        if num_max == len(prefix) or lookup.tenant in self.tiers.options.private_tenants:
            return None
        chunk_size_tokens = self.books.options.chunk_size_tokens
        wait_s = min(lookup.onboard_s, self.tiers.options.onboard_max_s)
        if lookup.prefill_tokens_per_s > 0:
            num_tokens = (num_max - len(prefix)) * chunk_size_tokens
            wait_min_s = 0.0 if handover is None else WAIT_MIN_S
            wait_s = min(wait_s, max(wait_min_s, PREFILL_SHARE * num_tokens / lookup.prefill_tokens_per_s))
        ticket = TicketId(self._next_ticket)
        self._next_ticket += 1
        deadline_s = self.books.now_s + wait_s
        waiter = Waiter(ticket, lookup, connection, meaning, deadline_s, end=len(lookup.keys), handover=handover)
        self.waiters[ticket] = waiter
        heapq.heappush(self._deadlines, (waiter.deadline_s, ticket))
        for chunk in prefix:
            self._hold(waiter, chunk)
        waiter.position = waiter.ordered = len(prefix)
        self.ask(waiter)
        self._order(waiter)
        if waiter.position >= waiter.end:  # no share is left for it
            self._let_go(waiter)
            return None
        return Onboarding(ticket, len(prefix) * chunk_size_tokens, num_max * chunk_size_tokens, wait_s)

    def _num_expected(self, lookup: Lookup, meaning: Meaning, first: int) -> int:
        """Chunks that the prefix has if all comes that may; those that a tier is asked for may all be there."""
        if any(tier.must_be_asked for tier in self.tiers.tiers):
            return len(lookup.keys)
        for place in range(first, len(lookup.keys)):
            key = lookup.keys[place]
            if key in self.fetches or self.is_readable(key):
                continue
            tier_key = meaning.key_of(key)
            if not any(tier.holds(tier_key) for tier in self.tiers.tiers):
                return place
        return len(lookup.keys)

    def is_readable(self, key: ChunkKey) -> bool:
        """Whether the chunk is in the arena."""
        chunk = self.books.index.chunks.get(key)
        return chunk is not None and chunk.state is ChunkState.READABLE

    def ask(self, waiter: Waiter) -> None:
        """Asks the tiers that must be asked, for what lies behind the piece that is there."""
        first = waiter.position
        last = min(len(waiter.lookup.keys), first + self.tiers.options.ask_keys_max)
        keys = [(waiter.meaning.key_of(waiter.lookup.keys[place]), place) for place in range(first, last)]
        for tier in self.tiers.tiers:
            asked = [(key, place) for key, place in keys if key not in tier.known] if tier.must_be_asked else []
            if asked:
                its_keys, its_places = zip(*asked, strict=True)
                tier.waiting.asks.append(Ask(waiter, its_keys, its_places))
                waiter.num_asks += 1

    # ---- a lookup goes on --------------------------------------------------------------------------------------------

    def _order(self, waiter: Waiter) -> None:
        """Holds or orders the next chunks, a bounded number ahead."""
        keys, books = waiter.lookup.keys, self.books
        while waiter.ordered < min(waiter.end, waiter.position + self.tiers.options.ahead_max):
            key = keys[waiter.ordered]
            chunk = books.index.chunks.get(key)
            if not self._has_share(waiter, chunk):
                waiter.end = waiter.ordered
            elif chunk is not None and chunk.state is ChunkState.READABLE:
                self._hold(waiter, chunk)
                waiter.ordered += 1
            elif key in self.fetches:
                self._join(waiter, self.fetches[key])
            elif not self._order_one(waiter, key):
                if self.awaiting.awaits(waiter) or waiter.num_asks:
                    return
                waiter.end = waiter.ordered

    def _has_share(self, waiter: Waiter, chunk: Chunk | None) -> bool:
        """Whether the lookup may hold one more chunk."""
        engine, books = waiter.connection.engine, self.books
        if chunk is not None and chunk in engine.leased:
            return True
        num_bytes = books.arena.region_bytes(engine.layout.chunk_bytes)
        share_bytes = int(books.arena.size_bytes * self.tiers.options.onboard_share_max)
        if self.held_bytes + num_bytes > share_bytes:
            return False
        return engine.leased_bytes + waiter.num_bytes + num_bytes <= books.options.leased_bytes_max

    def _order_one(self, waiter: Waiter, key: ChunkKey) -> bool:
        """Orders a chunk from the fastest tier that has it. Returns whether one has."""
        tier_key = waiter.meaning.key_of(key)
        tier = self._tier_for(tier_key, frozenset())
        if tier is None or key in self.books.index.chunks:
            return False  # nobody has it, or an engine is writing it right now
        fetch = Fetch(waiter, waiter.ordered, key, tier_key)
        self.fetches[key] = fetch
        tier.waiting.fetches.append(fetch)
        self._join(waiter, fetch)
        return True

    def _tier_for(self, key: TierKey, tried: frozenset[int] | set[int]) -> Tier | None:
        return next((tier for tier in self.tiers.tiers if tier.number not in tried and tier.holds(key)), None)

    def _join(self, waiter: Waiter, fetch: Fetch) -> None:
        fetch.waiters.append((waiter, waiter.ordered))
        num_bytes = self.books.arena.region_bytes(waiter.connection.engine.layout.chunk_bytes)
        waiter.num_bytes += num_bytes
        self.held_bytes += num_bytes
        waiter.ordered += 1

    def _hold(self, waiter: Waiter, chunk: Chunk) -> None:
        waiter.held.append(chunk)
        if chunk not in waiter.connection.engine.leased:
            waiter.num_bytes += chunk.num_bytes
            self.held_bytes += chunk.num_bytes
        self.books.hold(chunk)

    def go_on(self, waiter: Waiter) -> None:
        """Something that the lookup waits for has happened: it is answered, or waits on."""
        if waiter.is_over:
            return
        keys = waiter.lookup.keys
        num_ordered = -1
        while num_ordered != waiter.ordered:  # what is ordered may be there already
            num_ordered = waiter.ordered
            while waiter.position < waiter.ordered and self.is_readable(keys[waiter.position]):
                waiter.position += 1
            self._order(waiter)
        if waiter.position >= waiter.end:
            self.finish(waiter)

    def finish(self, waiter: Waiter) -> None:
        """Answers with what is readable in one piece."""
        found = reading.found_at_last(self.books, waiter.lookup, waiter.connection, waiter.sources)
        self.books.notices.append(Onboarded(waiter.ticket, waiter.connection.id, found))
        self._let_go(waiter)

    def cancel(self, connection: Connection) -> None:
        """The connection has ended: nobody would know of a lease."""
        for waiter in [each for each in self.waiters.values() if each.connection is connection]:
            self._let_go(waiter)

    def _let_go(self, waiter: Waiter) -> None:
        waiter.is_over = True
        del self.waiters[waiter.ticket]
        self.awaiting.over(waiter)
        self.held_bytes -= waiter.num_bytes
        for chunk in reversed(waiter.held):
            self.books.unhold(chunk)
        waiter.held.clear()

    def end_overdue(self) -> None:
        """Answers the lookups whose deadline has passed, and asks again for what was handed over."""
        while self._deadlines and self._deadlines[0][0] <= self.books.now_s:
            waiter = self.waiters.get(heapq.heappop(self._deadlines)[1])
            if waiter is not None:
                self.finish(waiter)
        self.awaiting.look()

    @property
    def next_deadline_s(self) -> float | None:
        """When the next lookup must be answered, or asked for again."""
        while self._deadlines and self._deadlines[0][1] not in self.waiters:
            heapq.heappop(self._deadlines)
        look_s = self.awaiting.next_look_s
        if self._deadlines and (look_s is None or self._deadlines[0][0] < look_s):
            return self._deadlines[0][0]
        return look_s

    # ---- fetches -----------------------------------------------------------------------------------------------------

    def pump(self, tier: Tier) -> None:
        """Begins what may run now."""
        waiting = tier.waiting
        is_closed = tier.breaker.is_closed
        while waiting.asks and (not is_closed or tier.has_slot(JobKind.ASK)):
            ask = waiting.asks.popleft()
            if is_closed and not ask.waiter.is_over:
                self.tiers.start(tier, self.tiers.plain_job(tier, JobKind.ASK, ask.keys), ask)
            else:
                ask.waiter.num_asks -= 1
                self.go_on(ask.waiter)
        while waiting.fetches and (not is_closed or tier.has_slot(JobKind.FETCH)):
            fetch = waiting.fetches.popleft()
            if all(waiter.is_over for waiter, _ in fetch.waiters):
                del self.fetches[fetch.key]
            elif not is_closed or tier.is_hidden(fetch.tier_key):
                self._try_elsewhere(fetch, tier)
            elif self._make_room(fetch):
                assert fetch.chunk is not None
                job = self.tiers.record_job(tier, JobKind.FETCH, fetch.tier_key, fetch.chunk)
                self.tiers.start(tier, job, fetch)
            else:
                self._give_up(fetch)

    def _make_room(self, fetch: Fetch) -> bool:
        """A region for the chunk, reserved whole. Returns whether there is one."""
        books, waiter = self.books, fetch.waiter
        lookup, engine = waiter.lookup, waiter.connection.engine
        if fetch.key in books.index.chunks:
            return False  # an engine has begun to store it
        try:
            binding = books.binding_of(lookup.namespace, lookup.tenant, waiter.connection)
            if binding is None:
                account = books.tenants.open(lookup.tenant)
                binding = Binding(lookup.namespace, lookup.tenant, account, engine.model, engine.layout)
            region = room.allocate(books, engine.layout.chunk_bytes, binding.account)
        except CacheError:
            return False
        parent = lookup.keys[fetch.place - 1] if fetch.place else None
        chunk = fetch.chunk = books.add(fetch.key, parent, binding, region)
        slabs = tuple(range(engine.layout.num_slabs))
        chunk.set_slabs(slabs, SlabState.RESERVED)
        chunk.writers[FETCHER] = slabs
        books.recount(chunk)
        return True

    def fetched(self, tier: Tier, running: Running, outcome: Outcome) -> None:
        """A fetch has really ended."""
        fetch = running.subject
        assert isinstance(fetch, Fetch)
        chunk, books = fetch.chunk, self.books
        assert chunk is not None
        if running.is_overdue:
            del chunk.writers[FETCHER]
            books.settle(chunk)
            return
        del chunk.writers[FETCHER]
        if outcome is not Outcome.DONE:
            self._failed(tier, fetch, chunk, outcome)
            return
        counts = tier.counts
        counts.num_fetched += 1
        counts.fetched_bytes += chunk.num_bytes
        counts.fetch_s += books.now_s - running.began_s
        if not chunk.is_indexed:  # cleared meanwhile
            books.settle(chunk)
            self._give_up(fetch)
            return
        chunk.set_slabs(tuple(range(len(chunk.slabs))), SlabState.COMMITTED)
        chunk.last_used = books.step_number
        books.make_readable(chunk)
        del self.fetches[fetch.key]
        waiters = [(waiter, place) for waiter, place in fetch.waiters if not waiter.is_over]
        for waiter, place in waiters:
            waiter.held.append(chunk)
            waiter.sources[place] = tier.options.source
            books.hold(chunk)
        books.settle(chunk)
        self.tiers.was_fetched(chunk, tier)
        for waiter, _ in waiters:
            self.go_on(waiter)
        self.awaiting.stored(chunk.key)

    def _failed(self, tier: Tier, fetch: Fetch, chunk: Chunk, outcome: Outcome) -> None:
        """The job has ended without the chunk: its region goes, and the next tier is tried."""
        self._drop(chunk)
        fetch.chunk = None
        tier.counts.num_missing += outcome is Outcome.MISSING
        tier.counts.num_corrupt += outcome is Outcome.CORRUPT
        if outcome is not Outcome.FAILED:
            tier.forget(fetch.tier_key)
        self._try_elsewhere(fetch, tier)

    def _drop(self, chunk: Chunk) -> None:
        """Nothing was written that counts."""
        if chunk.is_indexed:
            chunk.set_slabs(tuple(range(len(chunk.slabs))), SlabState.ABSENT)
            self.books.drop(chunk, Removal.ABANDONED)
        else:
            self.books.settle(chunk)

    def overdue(self, running: Running) -> None:
        """A fetch has no answer in time: its region is held for as long as the job runs, and the chunk may be stored
        or fetched elsewhere."""
        fetch = running.subject
        assert isinstance(fetch, Fetch)
        assert fetch.chunk is not None
        if fetch.chunk.is_indexed:
            self.books.retire(fetch.chunk, Removal.ABANDONED)
        again = Fetch(fetch.waiter, fetch.place, fetch.key, fetch.tier_key, fetch.tried, fetch.waiters)
        if self.fetches.get(fetch.key) is fetch:
            self.fetches[fetch.key] = again
            self._try_elsewhere(again, self.tiers.tiers[running.job.tier])

    def _try_elsewhere(self, fetch: Fetch, tier: Tier) -> None:
        fetch.tried.add(tier.number)
        following = self._tier_for(fetch.tier_key, fetch.tried)
        if following is None:
            self._give_up(fetch)
        else:
            following.waiting.fetches.append(fetch)

    def _give_up(self, fetch: Fetch) -> None:
        """The chunk does not come: who waits for it gets what lies before it."""
        if self.fetches.get(fetch.key) is fetch:
            del self.fetches[fetch.key]
        for waiter, place in fetch.waiters:
            waiter.end = min(waiter.end, place)
            self.go_on(waiter)

    def asked(self, tier: Tier, running: Running, event: TierDone) -> None:
        """A question has really ended."""
        ask = running.subject
        outcome, found = event.outcome, event.found
        assert isinstance(ask, Ask)
        if outcome is Outcome.DONE:
            for key, is_there in zip(ask.keys, found, strict=True):
                tier.counts.num_asked_keys += 1
                if is_there:
                    tier.remember(key)
                else:
                    tier.forget(key)
                    tier.counts.num_missing += ask.waiter.handover is None  # it is asked for again and again
            if event.gone:
                self.awaiting.gone(
                    ask.waiter, [place for place, is_gone in zip(ask.places, event.gone, strict=True) if is_gone]
                )
        if not running.is_overdue:
            ask.waiter.num_asks -= 1
            self.go_on(ask.waiter)

    def ask_overdue(self, running: Running) -> None:
        """A question has no answer in time."""
        ask = running.subject
        assert isinstance(ask, Ask)
        ask.waiter.num_asks -= 1
        self.go_on(ask.waiter)
