"""All readable chunks, a page at a time: for observers that have lost events, or have just come.

Always true: a chunk that is readable from the first page to the last is in one of them. What changes meanwhile is told
by the events from the first page's ``next_sequence`` on, which make of the pages what is true. Nothing is kept between
two pages.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import islice

from antiphon.cache.index import Binding, Chunk, Index
from antiphon.cache.states import ChunkState
from antiphon.core.chunks import ChunkKey
from antiphon.core.namespace import NamespaceDigest


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Readable chunks of one namespace, in the order in which their room was given."""

    namespace: NamespaceDigest
    model: str
    tenant: str
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class ChunkPage:
    """A stretch of the index.

    Args:
        groups: by namespace.
        after: what to ask for next; None where this is the last page.
        next_sequence: number of the first event after this page.
    """

    groups: tuple[ChunkGroup, ...]
    after: int | None
    next_sequence: int


def page_of(index: Index, after: int, num_chunks_max: int, next_sequence: int) -> ChunkPage:
    """At most ``num_chunks_max`` chunks after the one of generation ``after``; 0 begins.

    A copy of the index's list of chunks, and then in proportion to the page: some milliseconds at a million chunks.
    """
    assert num_chunks_max > 0
    chunks = list(index.chunks.values())  # in the order of their generations: a chunk is added when it gets its room
    first = bisect_right(chunks, after, key=_generation)
    keys: dict[Binding, list[ChunkKey]] = {}
    last = after
    for chunk in islice(chunks, first, first + num_chunks_max):
        last = chunk.region.generation
        if chunk.state is ChunkState.READABLE:
            keys.setdefault(chunk.binding, []).append(chunk.key)
    groups = tuple(ChunkGroup(each.namespace, each.model, each.tenant, tuple(found)) for each, found in keys.items())
    is_last = first + num_chunks_max >= len(chunks)
    return ChunkPage(groups, None if is_last else last, next_sequence)


def _generation(chunk: Chunk) -> int:
    return chunk.region.generation
