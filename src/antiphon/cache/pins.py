"""Pins: prefixes that an operator keeps in the arena, whatever room is needed for.

Always true:

- A pinned chunk is readable, its prefix is pinned with it, and nothing evicts it. Its bytes count once, however many
  pins keep it, and all of them together stay within the bound.
- A pin ends by ``Unpin``, by its time, or with a ``Clear`` of its chunks; nothing of it outlives the server.

It knows nothing of what a pin's end does to eviction (``books``), nor how a prefix is found (``control``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon.cache.index import Chunk
from antiphon.core.chunks import ChunkKey


@dataclass(slots=True, eq=False)
class Pin:
    """One prefix that is kept.

    Args:
        chunks: from the first of the sequence on.
        num_bytes: of all of them.
        number: of the pin, for the order of those that end at one time.
        until_s: when it ends; None where it does not end by itself.
    """

    chunks: tuple[Chunk, ...]
    num_bytes: int
    number: int
    began_s: float
    until_s: float | None

    @property
    def key(self) -> ChunkKey:
        """Names it: the key of its last chunk."""
        return self.chunks[-1].key


class Pins:
    """The pins that have not ended.

    Args:
        num_pins_max: at once.
        num_bytes_max: of the chunks that they keep.
    """

    __slots__ = ("_ends", "_num_added", "num_bytes_max", "num_pins_max", "pinned_bytes", "pins")

    def __init__(self, num_pins_max: int, num_bytes_max: int) -> None:
        self.num_pins_max = num_pins_max
        self.num_bytes_max = num_bytes_max
        self.pinned_bytes = 0
        self.pins: dict[ChunkKey, Pin] = {}
        """By name, the oldest first."""
        self._ends: list[tuple[float, int, Pin]] = []  # a heap; of pins that ended before their time, twice as many
        self._num_added = 0

    def add(self, chunks: tuple[Chunk, ...], now_s: float, until_s: float | None) -> Pin:
        """A new pin. The caller has checked the bounds, and recounts the chunks."""
        self._num_added += 1
        pin = Pin(chunks, sum(chunk.num_bytes for chunk in chunks), self._num_added, now_s, until_s)
        assert pin.key not in self.pins, "two pins of one name"
        self.pins[pin.key] = pin
        for chunk in chunks:
            if not chunk.num_pins:
                chunk.binding.num_pinned += 1
                self.pinned_bytes += chunk.num_bytes
            chunk.num_pins += 1
        if until_s is not None:
            if len(self._ends) >= 2 * self.num_pins_max:
                self._ends = [item for item in self._ends if self.pins.get(item[2].key) is item[2]]
                heapq.heapify(self._ends)
            heapq.heappush(self._ends, (until_s, pin.number, pin))
        return pin

    def remove(self, pin: Pin) -> None:
        """The pin has ended. The caller settles its chunks."""
        assert self.pins.get(pin.key) is pin, "a pin ended twice"
        del self.pins[pin.key]
        for chunk in pin.chunks:
            assert chunk.num_pins > 0, "a chunk is pinned less often than pins keep it"
            chunk.num_pins -= 1
            if not chunk.num_pins:
                chunk.binding.num_pinned -= 1
                self.pinned_bytes -= chunk.num_bytes

    def added_bytes(self, chunks: tuple[Chunk, ...]) -> int:
        """Bytes of ``chunks`` that no pin keeps."""
        return sum(chunk.num_bytes for chunk in chunks if not chunk.num_pins)

    @property
    def next_end_s(self) -> float | None:
        """When the next pin ends by its time, or would have; None where none does."""
        return self._ends[0][0] if self._ends else None

    def overdue(self, now_s: float) -> Iterator[Pin]:
        """Yields the pins whose time is over; the caller ends each."""
        while self._ends and self._ends[0][0] <= now_s:
            pin = heapq.heappop(self._ends)[2]
            if self.pins.get(pin.key) is pin:
                yield pin

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self.pins) <= self.num_pins_max
        assert self.pinned_bytes <= self.num_bytes_max
        assert len(self._ends) <= 2 * self.num_pins_max
        waiting = {number for _, number, pin in self._ends if self.pins.get(pin.key) is pin}
        timed = {pin.number for pin in self.pins.values() if pin.until_s is not None}
        assert waiting == timed, "a pin would not end by its time"
        for key, pin in self.pins.items():
            assert pin.key == key
            assert pin.num_bytes == sum(chunk.num_bytes for chunk in pin.chunks)
            parents = [None, *(chunk.key for chunk in pin.chunks[:-1])]
            assert [chunk.parent for chunk in pin.chunks] == parents, "a pin is not one prefix"
