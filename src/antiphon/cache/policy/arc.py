"""Adaptive replacement (Megiddo and Modha, 2003), over chunks without children: resists scans.

Chunks are RECENT (stored, not looked up since) or FREQUENT (looked up since, or stored again soon after an eviction).
A scan, a stream of prompts that nobody repeats, passes through RECENT only. How many bytes RECENT may hold is learned
from ghosts, the keys of evicted chunks: a store of a RECENT ghost says that RECENT was too small, of a FREQUENT ghost
that it was too large.

Differences from the paper, both measured (docs/cache.md): victims are chunks without children, so that a prefix goes
from its end; ghosts may stand for twice the arena, since chains of chunks come and go together and one arena's worth
of ghosts is forgotten within one burst.

Always true: the bytes counted by segment are those of the chunks in it; ghosts stand for at most ``ghost_bytes_max``
bytes; the target lies from 0 to the capacity.
"""

from __future__ import annotations

from enum import Enum

from antiphon.cache.index import Chunk
from antiphon.cache.policy import IsEvictable
from antiphon.cache.policy.heap import ColdestFirst
from antiphon.core.chunks import ChunkKey


class Segment(Enum):
    """Where a chunk is."""

    RECENT = "recent"
    FREQUENT = "frequent"

    @property
    def other(self) -> Segment:
        """The segment that this is not."""
        return Segment.FREQUENT if self is Segment.RECENT else Segment.RECENT


class Ghosts:
    """Keys of evicted chunks with the bytes they stood for, oldest first."""

    __slots__ = ("_bytes_of", "num_bytes")

    def __init__(self) -> None:
        self._bytes_of: dict[ChunkKey, int] = {}
        self.num_bytes = 0

    def add(self, key: ChunkKey, num_bytes: int) -> None:
        """Remembers a key as the newest."""
        self.forget(key)
        self._bytes_of[key] = num_bytes
        self.num_bytes += num_bytes

    def forget(self, key: ChunkKey) -> bool:
        """Forgets a key. Returns whether it was known."""
        num_bytes = self._bytes_of.pop(key, None)
        self.num_bytes -= num_bytes or 0
        return num_bytes is not None

    def forget_oldest(self) -> None:
        """Forgets the key that was remembered longest ago."""
        self.forget(next(iter(self._bytes_of)))

    def validate(self) -> None:
        """Assert the invariants."""
        assert self.num_bytes == sum(self._bytes_of.values())


class Arc:
    """Two heaps, two lists of ghosts, and the target that moves between them.

    Args:
        is_evictable: whether a chunk may be evicted.
        ghost_share_max: bytes that ghosts may stand for, as a share of the capacity.
    """

    name = "arc"

    def __init__(self, is_evictable: IsEvictable, ghost_share_max: float) -> None:
        self._heaps = {segment: ColdestFirst(is_evictable) for segment in Segment}
        self._num_bytes = dict.fromkeys(Segment, 0)
        self._ghosts = {segment: Ghosts() for segment in Segment}
        self._segment: dict[Chunk, Segment] = {}
        self._ghost_share_max = ghost_share_max
        self._capacity_bytes = 0
        self.recent_target_bytes = 0.0
        """Past so many bytes RECENT gives the next victim."""

    @property
    def ghost_bytes_max(self) -> int:
        """Bytes that both lists of ghosts may stand for."""
        return int(self._ghost_share_max * self._capacity_bytes)

    def resized(self, capacity_bytes: int) -> None:
        """The target keeps its share of the capacity; it begins at half."""
        share = self.recent_target_bytes / self._capacity_bytes if self._capacity_bytes else 0.5
        self._capacity_bytes = capacity_bytes
        self.recent_target_bytes = share * capacity_bytes
        self._bound_ghosts()

    def stored(self, chunk: Chunk) -> None:
        """New chunks are RECENT, unless they were evicted not long ago."""
        segment = Segment.RECENT
        for ghost_segment, ghosts in self._ghosts.items():
            ratio = max(1.0, self._ghosts[ghost_segment.other].num_bytes / max(1, ghosts.num_bytes))
            if ghosts.forget(chunk.key):
                step_bytes = ratio * chunk.num_bytes
                self._move_target(step_bytes if ghost_segment is Segment.RECENT else -step_bytes)
                segment = Segment.FREQUENT
        self._segment[chunk] = segment
        self._num_bytes[segment] += chunk.num_bytes

    def used(self, chunk: Chunk) -> None:
        """A chunk that is looked up becomes FREQUENT."""
        if self._segment[chunk] is Segment.RECENT:
            self._segment[chunk] = Segment.FREQUENT
            self._num_bytes[Segment.RECENT] -= chunk.num_bytes
            self._num_bytes[Segment.FREQUENT] += chunk.num_bytes
            if chunk in self._heaps[Segment.RECENT]:
                self._heaps[Segment.RECENT].discard(chunk)
                self._heaps[Segment.FREQUENT].offer(chunk)

    def offer(self, chunk: Chunk) -> None:
        """The chunk may be evicted from here on."""
        self._heaps[self._segment[chunk]].offer(chunk)

    def take(self) -> Chunk | None:
        """The coldest chunk of the segment that holds more than its share; of the other where that has none."""
        is_recent_full = self._num_bytes[Segment.RECENT] > self.recent_target_bytes
        segment = Segment.RECENT if is_recent_full else Segment.FREQUENT
        return self._heaps[segment].take() or self._heaps[segment.other].take()

    def removed(self, chunk: Chunk, *, is_evicted: bool) -> None:
        """Forgets the chunk, and remembers its key if it was evicted."""
        segment = self._segment.pop(chunk)
        self._heaps[segment].discard(chunk)
        self._num_bytes[segment] -= chunk.num_bytes
        if is_evicted:
            self._ghosts[segment].add(chunk.key, chunk.num_bytes)
            self._bound_ghosts()

    def _move_target(self, by_bytes: float) -> None:
        # The target is a share of the capacity by definition: past its ends it would mean nothing.
        self.recent_target_bytes = min(float(self._capacity_bytes), max(0.0, self.recent_target_bytes + by_bytes))

    def _bound_ghosts(self) -> None:
        while sum(ghosts.num_bytes for ghosts in self._ghosts.values()) > self.ghost_bytes_max:
            max(self._ghosts.values(), key=lambda ghosts: ghosts.num_bytes).forget_oldest()

    def validate(self, chunks: set[Chunk]) -> None:
        """Assert the invariants."""
        assert self._segment.keys() == chunks, "the segments are not the index"
        for segment, heap in self._heaps.items():
            members = {chunk for chunk, its_segment in self._segment.items() if its_segment is segment}
            heap.validate(members)
            assert self._num_bytes[segment] == sum(chunk.num_bytes for chunk in members)
        for ghosts in self._ghosts.values():
            ghosts.validate()
        assert sum(ghosts.num_bytes for ghosts in self._ghosts.values()) <= self.ghost_bytes_max
        assert 0 <= self.recent_target_bytes <= self._capacity_bytes
