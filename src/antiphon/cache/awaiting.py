"""What lookups wait for that nobody has yet: chunks that a prefill engine has handed over and is still storing.

A prefill engine answers when its last step ends; its last chunks are copied after that. A lookup that was told so
(``HandedOver``) waits at the first chunk that is not there. Where the chunk is stored here, its commit wakes it. Where
another server has it, the tiers are asked again and again, after ``POLL_MIN_S`` to ``POLL_MAX_S``.

Always true:

- A lookup waits no longer than its deadline, and not for a chunk that is known not to come: its store, or that of some
  of its slabs, was refused or given up lately and nobody else has begun one, or the tier that was asked said so.
- A chunk that nobody has begun to store here is waited for ``UNSEEN_MAX_S`` at most; one that was stored in part, and
  that nobody is writing, twice as long.
- What is remembered of stores that were refused or given up is bounded, and forgotten after a while.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from antiphon.cache.events import Lookup, TicketId
from antiphon.cache.states import SlabState
from antiphon.core.chunks import ChunkKey

if TYPE_CHECKING:
    from antiphon.cache.onboarding import Onboardings, Waiter

POLL_MIN_S: Final = 0.005
POLL_MAX_S: Final = 0.05
"""Between two questions: a step of prefill takes longer, and a copy of a chunk some milliseconds."""
WAIT_MIN_S: Final = 0.25
"""For what was handed over, however fast the engine computes: what it computes again holds up its decoding."""
UNSEEN_MAX_S: Final = 1.0
"""An engine reserves within milliseconds after it has answered: one that has not in this time is gone."""
REFUSED_S: Final = 30.0
"""So long a chunk without room is not waited for: a lookup comes when the prefill has ended, which may take as long."""
NOT_COMING_MAX: Final = 4_096


@dataclass(slots=True, eq=False)
class Handover:
    """What was handed over of one lookup.

    Args:
        num_chunks: of its keys, from the first on.
        is_here: it is stored in this cache.
        pause_s: until the next look.
        awaited: the chunk that it waits for now.
        is_planned: a look is planned.
    """

    num_chunks: int
    is_here: bool
    pause_s: float
    awaited: ChunkKey | None = None
    is_planned: bool = False


class Awaiting:
    """The lookups that wait for stores of others, and the stores that were refused or given up lately.

    Args:
        onboardings: of the lookups.
    """

    def __init__(self, onboardings: Onboardings) -> None:
        self._onboardings = onboardings
        self._waiters: dict[ChunkKey, dict[TicketId, Waiter]] = {}
        self._looks: list[tuple[float, TicketId]] = []
        self._not_coming: dict[ChunkKey, float] = {}
        """What is not stored here, and until when that is remembered; what was noted last is last."""

    def handover_of(self, lookup: Lookup) -> Handover | None:
        """What is waited for, for a lookup that begins."""
        handed = lookup.handed_over
        if handed is None:
            return None
        if not handed.is_here and not any(tier.options.is_shared for tier in self._onboardings.tiers.tiers):
            return None  # nothing can bring it
        num_chunks = min(handed.num_chunks, len(lookup.keys))
        return Handover(num_chunks, handed.is_here, UNSEEN_MAX_S if handed.is_here else POLL_MIN_S)

    def awaits(self, waiter: Waiter) -> bool:
        """Whether the lookup waits for the chunk that it cannot order now; if so it is woken."""
        handover, place = waiter.handover, waiter.ordered
        if handover is None or place >= handover.num_chunks:
            return False
        key = waiter.lookup.keys[place]
        if handover.is_here and self.is_given_up(key):
            return False
        if handover.awaited != key:
            self._forget(waiter)
            handover.awaited = key
            self._waiters.setdefault(key, {})[waiter.ticket] = waiter
        if not handover.is_planned:
            handover.is_planned = True
            heapq.heappush(self._looks, (self._onboardings.books.now_s + handover.pause_s, waiter.ticket))
        return True

    def over(self, waiter: Waiter) -> None:
        """The lookup has its answer."""
        self._forget(waiter)

    def _forget(self, waiter: Waiter) -> None:
        handover = waiter.handover
        if handover is None or handover.awaited is None:
            return
        waiters = self._waiters[handover.awaited]
        del waiters[waiter.ticket]
        if not waiters:
            del self._waiters[handover.awaited]
        handover.awaited = None

    # ---- what happens ------------------------------------------------------------------------------------------------

    def stored(self, key: ChunkKey) -> None:
        """The chunk is readable."""
        self._not_coming.pop(key, None)
        for waiter in list(self._waiters.get(key, {}).values()):
            self._onboardings.go_on(waiter)

    def abandoned(self, key: ChunkKey) -> None:
        """A writer of the chunk has given its slabs up or died. A lookup that comes later than ``UNSEEN_MAX_S`` is of
        another hand-over."""
        self._give_up(key, UNSEEN_MAX_S)

    def refused(self, key: ChunkKey) -> None:
        """The chunk is not stored here, as there was no room."""
        self._give_up(key, REFUSED_S)

    def begun(self, key: ChunkKey) -> None:
        """A new store of the chunk has begun: what became of an earlier one is forgotten."""
        self._not_coming.pop(key, None)

    def is_given_up(self, key: ChunkKey) -> bool:
        """Whether the chunk was to be stored lately, and is not: there was no room, or a writer has given it up.
        False where somebody has begun to store it again, or the slabs that were given up."""
        books, until_s = self._onboardings.books, self._not_coming.get(key)
        if until_s is None or books.now_s >= until_s:
            return False
        chunk = books.index.chunks.get(key)
        return chunk is None or SlabState.ABSENT in chunk.slabs

    def is_being_stored(self, key: ChunkKey) -> bool:
        """Whether somebody is writing the chunk, or was a moment ago: of a chunk that is stored in part, another rank
        may be about to write the rest."""
        books = self._onboardings.books
        chunk = books.index.chunks.get(key)
        if chunk is None or self.is_given_up(key):
            return False
        return bool(chunk.writers) or chunk.is_complete or books.now_s - chunk.used_s < UNSEEN_MAX_S

    def _give_up(self, key: ChunkKey, for_s: float) -> None:
        self._not_coming.pop(key, None)
        self._not_coming[key] = self._onboardings.books.now_s + for_s
        if len(self._not_coming) > NOT_COMING_MAX:
            del self._not_coming[next(iter(self._not_coming))]
        for waiter in list(self._waiters.get(key, {}).values()):
            handover = waiter.handover
            assert handover is not None
            if handover.is_here:
                self._end(waiter, handover)

    def _end(self, waiter: Waiter, handover: Handover) -> None:
        """Nothing more of it is waited for."""
        handover.num_chunks = min(handover.num_chunks, waiter.ordered)
        self._forget(waiter)
        self._onboardings.go_on(waiter)

    def gone(self, waiter: Waiter, places: list[int]) -> None:
        """A tier knows that the chunks at these places do not come."""
        if waiter.handover is not None and places:
            waiter.handover.num_chunks = min(waiter.handover.num_chunks, *places)

    # ---- time --------------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Asks again where it is time."""
        now_s = self._onboardings.books.now_s
        while self._looks and self._looks[0][0] <= now_s:
            waiter = self._onboardings.waiters.get(heapq.heappop(self._looks)[1])
            handover = None if waiter is None else waiter.handover
            if waiter is None or handover is None:
                continue
            handover.is_planned = False
            if handover.awaited is None:
                continue
            if not handover.is_here:
                handover.pause_s = min(2 * handover.pause_s, POLL_MAX_S)
                if not waiter.num_asks:
                    self._onboardings.ask(waiter)
            elif not self.is_being_stored(handover.awaited):
                self._end(waiter, handover)
                continue
            self._onboardings.go_on(waiter)

    @property
    def next_look_s(self) -> float | None:
        """When a lookup is to be asked for again."""
        while self._looks and self._looks[0][1] not in self._onboardings.waiters:
            heapq.heappop(self._looks)
        return self._looks[0][0] if self._looks else None

    def validate(self) -> None:
        """Assert the invariants."""
        for key, waiters in self._waiters.items():
            assert waiters, "nobody waits for a key"
            for ticket, waiter in waiters.items():
                handover = waiter.handover
                assert self._onboardings.waiters.get(ticket) is waiter and handover is not None
                assert handover.awaited == key
        assert len(self._not_coming) <= NOT_COMING_MAX
