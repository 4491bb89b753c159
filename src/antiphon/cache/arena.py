"""The books of one arena: which bytes are whose. No bytes are touched here.

Regions are cut to fit (rounded up to the alignment) from the smallest hole that is large enough, and holes that touch
become one. Why not size classes or a buddy system: an arena nearly always holds chunks of one size, and for one size
cutting to fit wastes nothing and never fragments, where a buddy system wastes up to half of each region and size-class
pages strand the rest of each page. Where sizes differ, holes can become too small for the larger size; then the evictor
frees a contiguous window (``spans``), so that an allocation fails only if pinned regions leave no window of that size.

Always true:

- Regions and holes are disjoint, lie in the usable part, and add up to it. No two holes touch.
- Every allocation has a generation that no other one has, so that the handle of a freed region is known as stale.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

from antiphon.core.units import align_up


@dataclass(frozen=True, slots=True)
class RegionHandle:
    """A span of the arena, as given to one chunk.

    Args:
        offset_bytes: from the start of the arena.
        size_bytes: a multiple of the alignment; the chunk's slabs lie at its start, in order.
        generation: names this allocation for ever.
    """

    offset_bytes: int
    size_bytes: int
    generation: int

    @property
    def end_bytes(self) -> int:
        """Offset of the first byte after it."""
        return self.offset_bytes + self.size_bytes


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of the usable arena: a region, or a hole (``region`` is None)."""

    offset_bytes: int
    size_bytes: int
    region: RegionHandle | None


class Arena:
    """Allocates regions of one arena.

    Args:
        size_bytes: bytes of the whole arena, a multiple of the alignment.
        usable_bytes: bytes usable at the start, a multiple of the alignment.
        alignment_bytes: every region starts and ends at a multiple.
        first_generation: generation of the first allocation. Drawn at random by who starts the server, so that no
            handle of an earlier life is taken for one of this life.
    """

    __slots__ = (
        "_alignment_bytes",
        "_hole_ending",
        "_hole_sizes",
        "_holes",
        "_next_generation",
        "_regions",
        "size_bytes",
        "usable_bytes",
        "used_bytes",
    )

    def __init__(self, size_bytes: int, usable_bytes: int, alignment_bytes: int, first_generation: int) -> None:
        assert 0 <= usable_bytes <= size_bytes, (usable_bytes, size_bytes)
        assert size_bytes % alignment_bytes == 0, size_bytes
        self.size_bytes = size_bytes
        self.usable_bytes = 0
        self.used_bytes = 0
        self._alignment_bytes = alignment_bytes
        self._next_generation = first_generation
        self._regions: dict[int, RegionHandle] = {}
        self._holes: list[tuple[int, int]] = []  # (size, offset), sorted: the best fit is found by bisection
        self._hole_sizes: dict[int, int] = {}  # offset -> size
        self._hole_ending: dict[int, int] = {}  # end -> offset
        self.grow(usable_bytes)

    @property
    def free_bytes(self) -> int:
        """Bytes of all holes."""
        return self.usable_bytes - self.used_bytes

    @property
    def largest_hole_bytes(self) -> int:
        """The largest region that can be allocated at once."""
        return self._holes[-1][0] if self._holes else 0

    def region_bytes(self, size_bytes: int) -> int:
        """The bytes that an allocation of ``size_bytes`` takes."""
        return align_up(size_bytes, self._alignment_bytes)

    def grow(self, usable_bytes: int) -> None:
        """The first ``usable_bytes`` of the arena are usable from here on."""
        assert self.usable_bytes <= usable_bytes <= self.size_bytes, (self.usable_bytes, usable_bytes)
        assert usable_bytes % self._alignment_bytes == 0, usable_bytes
        added = usable_bytes - self.usable_bytes
        if added:
            offset = self.usable_bytes
            self.usable_bytes = usable_bytes
            self._add_hole(offset, added)

    def allocate(self, size_bytes: int) -> RegionHandle | None:
        """A region of at least ``size_bytes``, or None where no hole is large enough."""
        assert size_bytes > 0, size_bytes
        size_bytes = self.region_bytes(size_bytes)
        index = bisect_left(self._holes, (size_bytes, 0))
        if index == len(self._holes):
            return None
        hole_bytes, offset = self._holes[index]
        self._remove_hole(offset)
        if hole_bytes > size_bytes:
            self._add_hole(offset + size_bytes, hole_bytes - size_bytes)
        region = RegionHandle(offset, size_bytes, self._next_generation)
        self._next_generation += 1
        self._regions[offset] = region
        self.used_bytes += size_bytes
        return region

    def free(self, region: RegionHandle) -> None:
        """Gives a region back. Its handle is stale from here on."""
        assert self.is_current(region), f"{region} is not allocated"
        del self._regions[region.offset_bytes]
        self.used_bytes -= region.size_bytes
        self._add_hole(region.offset_bytes, region.size_bytes)

    def is_current(self, region: RegionHandle) -> bool:
        """Whether the handle names a region that is allocated."""
        return self._regions.get(region.offset_bytes) == region

    def span_if_freed_bytes(self, region: RegionHandle) -> int:
        """The size of the hole that freeing ``region`` would leave, its neighbours included."""
        before = self._hole_ending.get(region.offset_bytes, region.offset_bytes)
        return region.end_bytes - before + self._hole_sizes.get(region.end_bytes, 0)

    def spans(self) -> Iterator[Span]:
        """All regions and holes in the order of their offsets."""
        starts = sorted([*self._regions, *self._hole_sizes])
        for offset in starts:
            region = self._regions.get(offset)
            size_bytes = self._hole_sizes[offset] if region is None else region.size_bytes
            yield Span(offset, size_bytes, region)

    def _add_hole(self, offset: int, size_bytes: int) -> None:
        """Adds a hole, joined with the holes that touch it."""
        before = self._hole_ending.get(offset)
        if before is not None:
            size_bytes += self._remove_hole(before)
            offset = before
        if offset + size_bytes in self._hole_sizes:
            size_bytes += self._remove_hole(offset + size_bytes)
        insort(self._holes, (size_bytes, offset))
        self._hole_sizes[offset] = size_bytes
        self._hole_ending[offset + size_bytes] = offset

    def _remove_hole(self, offset: int) -> int:
        """Removes a hole. Returns its size."""
        size_bytes = self._hole_sizes.pop(offset)
        del self._hole_ending[offset + size_bytes]
        index = bisect_left(self._holes, (size_bytes, offset))
        assert self._holes[index] == (size_bytes, offset), "the holes are out of step"
        del self._holes[index]
        return size_bytes

    def validate(self) -> None:
        """Assert the invariants."""
        expected = 0
        used_bytes = 0
        was_hole = False
        for span in self.spans():
            assert span.offset_bytes == expected, f"a gap or an overlap at {expected}"
            assert span.size_bytes > 0, f"nothing at {expected}"
            assert span.offset_bytes % self._alignment_bytes == 0, f"{span} is not aligned"
            assert not (was_hole and span.region is None), f"two holes touch at {expected}"
            was_hole = span.region is None
            used_bytes += 0 if was_hole else span.size_bytes
            expected += span.size_bytes
        assert expected == self.usable_bytes, f"{expected} bytes accounted of {self.usable_bytes}"
        assert used_bytes == self.used_bytes, f"{used_bytes} bytes used, {self.used_bytes} counted"
        assert self.free_bytes == sum(self._hole_sizes.values())
        assert self._holes == sorted((size, offset) for offset, size in self._hole_sizes.items())
        assert self._hole_ending == {offset + size: offset for offset, size in self._hole_sizes.items()}
        generations = [region.generation for region in self._regions.values()]
        assert len(set(generations)) == len(generations), "two regions share a generation"
        assert all(generation < self._next_generation for generation in generations)
