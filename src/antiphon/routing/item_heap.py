"""Items in an order that is fixed when they come, any of which may leave at any time."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from antiphon.routing.cold import ColdItem

SLACK = 32
"""Entries of items that have left are kept up to this many more than there are items."""


class ItemHeap:
    """Owns an order: least key first, and in turn among equals. Each call takes O(log n), spread over the calls."""

    __slots__ = ("_entries", "_numbers", "_turn")

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, ColdItem]] = []
        self._numbers: dict[ColdItem, int] = {}
        """Of the items that are here; an entry with another number is of one that has left."""
        self._turn = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, item: ColdItem) -> bool:
        return item in self._numbers

    def push(self, item: ColdItem, key: float) -> None:
        """Add an item that is not here."""
        assert item not in self._numbers
        self._turn += 1
        self._numbers[item] = self._turn
        heappush(self._entries, (key, self._turn, item))

    def remove(self, item: ColdItem) -> None:
        """Take an item out that is here."""
        del self._numbers[item]
        if len(self._entries) > 2 * len(self._numbers) + SLACK:
            self._entries = [entry for entry in self._entries if self._numbers.get(entry[2]) == entry[1]]
            heapify(self._entries)

    def first(self) -> ColdItem | None:
        """The item with the least key."""
        entries = self._entries
        while entries:
            _, number, item = entries[0]
            if self._numbers.get(item) == number:
                return item
            heappop(entries)
        return None

    def items(self) -> list[ColdItem]:
        """All that are here, as they came."""
        return list(self._numbers)

    def validate(self) -> None:
        """Assert the invariants."""
        alive = [entry for entry in self._entries if self._numbers.get(entry[2]) == entry[1]]
        assert len(alive) == len(self._numbers), "an item without an entry, or with two"
        assert len(self._entries) <= 2 * len(self._numbers) + SLACK + 1
