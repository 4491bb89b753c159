"""The log of what was stored and removed, for observers (routers, directories). Bounded and numbered.

Numbers begin at 1 and have no gap. An observer that reads too late is told how many events it has lost, and must read
the whole index again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from antiphon.cache.effects import ChunkRemoved, ChunkStored


@dataclass(frozen=True, slots=True)
class LogPage:
    """A stretch of the log.

    Args:
        events: in order of their numbers.
        next_sequence: what to ask for next.
        num_lost: events that were asked for and are no longer kept.
    """

    events: tuple[ChunkStored | ChunkRemoved, ...]
    next_sequence: int
    num_lost: int


class EventLog:
    """Keeps the last ``num_events_max`` events."""

    __slots__ = ("_events", "next_sequence")

    def __init__(self, num_events_max: int) -> None:
        self._events: deque[ChunkStored | ChunkRemoved] = deque(maxlen=num_events_max)
        self.next_sequence = 1

    @property
    def first_sequence(self) -> int:
        """Number of the oldest event that is kept; ``next_sequence`` where none is."""
        return self.next_sequence - len(self._events)

    def append(self, event: ChunkStored | ChunkRemoved) -> None:
        """Adds an event, whose number must be ``next_sequence``."""
        assert event.sequence == self.next_sequence, (event.sequence, self.next_sequence)
        self._events.append(event)
        self.next_sequence += 1

    def since(self, sequence: int, num_events_max: int) -> LogPage:
        """At most ``num_events_max`` events from number ``sequence`` on.

        Raises:
            ValueError: ``sequence`` is beyond what was ever written, so that the asker means another life of this
                server.
        """
        if not 1 <= sequence <= self.next_sequence:
            raise ValueError(f"event numbers go from 1 to {self.next_sequence}, not {sequence}")
        first = max(sequence, self.first_sequence)
        last = min(first + num_events_max, self.next_sequence)
        base = self.first_sequence
        events = tuple(self._events[number - base] for number in range(first, last))
        return LogPage(events, last, first - sequence)

    def validate(self) -> None:
        """Assert the invariants."""
        numbers = [event.sequence for event in self._events]
        assert numbers == list(range(self.first_sequence, self.next_sequence)), "the log has a gap"
