"""Which chunk to evict next. A policy orders chunks; what may be evicted at all is decided by the index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.cache.index import Chunk

IsEvictable = Callable[[Chunk], bool]
"""Whether a chunk may be evicted: nothing protects it, and no later chunk of its prefix is in the index."""


class EvictionPolicy(Protocol):
    """Orders the chunks that may be evicted.

    Only chunks without a later chunk of their prefix in the index are offered, so that under every policy later chunks
    go before earlier ones. A chunk that was offered and is protected since is passed over, and offered again when it
    is free.
    """

    @property
    def name(self) -> str:
        """What ``eviction_policy`` calls it."""
        ...

    def stored(self, chunk: Chunk) -> None:
        """The chunk is new in the index."""
        ...

    def used(self, chunk: Chunk) -> None:
        """A lookup reported the chunk; ``last_used`` is up to date."""
        ...

    def offer(self, chunk: Chunk) -> None:
        """The chunk may be evicted from here on. May be said again without effect."""
        ...

    def take(self) -> Chunk | None:
        """The chunk to evict next, no longer offered; None where none may be evicted."""
        ...

    def removed(self, chunk: Chunk, *, is_evicted: bool) -> None:
        """The chunk left the index: evicted for room, or otherwise."""
        ...

    def resized(self, capacity_bytes: int) -> None:
        """The arena's usable bytes."""
        ...

    def validate(self, chunks: set[Chunk]) -> None:
        """Assert the invariants, given all chunks of the index."""
        ...
