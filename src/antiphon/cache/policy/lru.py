"""Least recently used: the chunk whose last lookup or store is longest ago goes first."""

from __future__ import annotations

from antiphon.cache.index import Chunk
from antiphon.cache.policy import IsEvictable
from antiphon.cache.policy.heap import ColdestFirst


class Lru:
    """One heap of all chunks."""

    name = "lru"

    def __init__(self, is_evictable: IsEvictable) -> None:
        self._order = ColdestFirst(is_evictable)

    def stored(self, chunk: Chunk) -> None:
        """Nothing to note: ``last_used`` says it."""

    def used(self, chunk: Chunk) -> None:
        """Nothing to note: ``last_used`` says it."""

    def offer(self, chunk: Chunk) -> None:
        """The chunk may be evicted from here on."""
        self._order.offer(chunk)

    def take(self) -> Chunk | None:
        """The coldest chunk."""
        return self._order.take()

    def removed(self, chunk: Chunk, *, is_evicted: bool) -> None:
        """Forgets the chunk."""
        self._order.discard(chunk)

    def resized(self, capacity_bytes: int) -> None:
        """The order does not depend on the size."""

    def validate(self, chunks: set[Chunk]) -> None:
        """Assert the invariants."""
        self._order.validate(chunks)
