"""A heap of chunks that may be evicted, coldest first.

Using a chunk does not touch the heap: an item whose chunk was used since is put back in its new place when it comes
up. So a lookup costs nothing here, and each eviction about log n.

Always true: a chunk that is offered has exactly one item that counts; the heap holds at most twice as many items as
chunks are offered, and a constant.
"""

from __future__ import annotations

import heapq

from antiphon.cache.index import Chunk
from antiphon.cache.policy import IsEvictable

SLACK_ITEMS = 64


class ColdestFirst:
    """Chunks by ``last_used``."""

    __slots__ = ("_heap", "_is_evictable", "_items", "_num_pushed")

    def __init__(self, is_evictable: IsEvictable) -> None:
        self._is_evictable = is_evictable
        self._heap: list[tuple[int, int, Chunk]] = []
        self._items: dict[Chunk, int] = {}  # chunk -> the number of its item that counts
        self._num_pushed = 0

    def __contains__(self, chunk: Chunk) -> bool:
        return chunk in self._items

    def offer(self, chunk: Chunk) -> None:
        """Adds the chunk, if it is not here."""
        if chunk not in self._items:
            self._push(chunk)

    def discard(self, chunk: Chunk) -> None:
        """Removes the chunk, if it is here."""
        if self._items.pop(chunk, None) is not None and len(self._heap) > 2 * len(self._items) + SLACK_ITEMS:
            self._heap = [
                (last_used, number, item) for last_used, number, item in self._heap if self._counts(item, number)
            ]
            heapq.heapify(self._heap)

    def take(self) -> Chunk | None:
        """Removes and returns the coldest chunk that may be evicted; None where there is none."""
        while self._heap:
            last_used, number, chunk = heapq.heappop(self._heap)
            if not self._counts(chunk, number):
                continue
            del self._items[chunk]
            if not self._is_evictable(chunk):
                continue
            if last_used != chunk.last_used:
                self._push(chunk)
                continue
            return chunk
        return None

    def _push(self, chunk: Chunk) -> None:
        self._num_pushed += 1
        self._items[chunk] = self._num_pushed
        heapq.heappush(self._heap, (chunk.last_used, self._num_pushed, chunk))

    def _counts(self, chunk: Chunk, number: int) -> bool:
        return self._items.get(chunk) == number

    def validate(self, chunks: set[Chunk]) -> None:
        """Assert the invariants, given all chunks of the index."""
        assert self._items.keys() <= chunks, "a chunk is offered that is not in the index"
        counted = [chunk for _, number, chunk in self._heap if self._counts(chunk, number)]
        assert len(counted) == len(self._items), "an offered chunk has no item, or two"
        assert len(self._heap) <= 2 * len(self._items) + SLACK_ITEMS, "the heap holds too many dead items"
        assert all(last_used <= chunk.last_used for last_used, _, chunk in self._heap)
