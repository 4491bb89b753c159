"""What the cache holds, for people: namespaces with their sums, chunks, pins. Values only; nothing changes here.

Sums are kept where chunks change (``Binding``), so that they cost a look at each namespace and none at its chunks.
Chunks come a page at a time; a page costs a copy of the index's list of chunks, and a look at a bounded number of them.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from antiphon.cache.books import Books
from antiphon.cache.index import Binding, Chunk
from antiphon.cache.states import ChunkState
from antiphon.cache.tier import Tier
from antiphon.cache.tier_key import TAG_BYTES, Meaning, meaning_of, tag_of
from antiphon.core.chunks import ChunkKey
from antiphon.core.namespace import NamespaceDigest

LOOKED_AT_MAX: Final = 8_192
"""Chunks that one page looks at: some milliseconds."""

PEER_SOURCE: Final = "peer"
"""Source of the tier that is other servers' memory: what is there is theirs."""


@dataclass(frozen=True, slots=True)
class Selected:
    """What is asked for: of a tenant, a model, both, or, with neither, all; not that of the tenants ``but_not``."""

    tenant: str | None = None
    model: str | None = None
    but_not: frozenset[str] = frozenset()

    def has(self, binding: Binding) -> bool:
        """Whether the chunks of ``binding`` are meant."""
        is_meant = self.tenant in (None, binding.tenant) and self.model in (None, binding.model)
        return is_meant and binding.tenant not in self.but_not


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """The sums of one namespace.

    Args:
        num_chunks: chunks that lookups can report, and ``num_bytes`` their bytes.
        num_leased: chunks that leases protect, those that were cleared included.
        num_pinned: chunks that pins keep.
        in_tiers: for each tier, the records that it is known to have of this tenant and model, in all their namespaces.
    """

    namespace: NamespaceDigest
    model: str
    tenant: str
    num_chunks: int
    num_bytes: int
    num_leased: int
    num_pinned: int
    in_tiers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class NamespacesFound:
    """The largest namespaces.

    Args:
        num_left_out: smaller ones that were selected too.
        in_tiers: for each tier, the records that it is known to have of the selection, those in no namespace here too.
    """

    namespaces: tuple[NamespaceFacts, ...]
    num_left_out: int
    in_tiers: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class ChunkFacts:
    """One readable chunk. Times by the clock of the steps.

    Args:
        position: its place in its prefix, from 0; None where that is not known.
        in_tiers: names of the tiers that are known to have it.
    """

    key: ChunkKey
    parent: ChunkKey | None
    namespace: NamespaceDigest
    model: str
    tenant: str
    position: int | None
    num_bytes: int
    stored_s: float
    used_s: float
    num_leases: int
    num_pins: int
    in_tiers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FactsPage:
    """A stretch of the index. ``after``: what to ask for next; None where this is the last page."""

    chunks: tuple[ChunkFacts, ...]
    after: int | None


@dataclass(frozen=True, slots=True)
class PinFacts:
    """One pin. Times by the clock of the steps; ``until_s`` is None where it does not end by itself."""

    key: ChunkKey
    namespace: NamespaceDigest
    model: str
    tenant: str
    num_chunks: int
    num_bytes: int
    began_s: float
    until_s: float | None


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of two names.

    Args:
        unknown: ``tenant``, ``model``: those that nothing here has, neither in memory nor as far as a tier is known.
        unlisted: tiers that may have records of them all the same, since not all that they have is known.
    """

    unknown: tuple[str, ...]
    unlisted: tuple[str, ...]


def namespaces(books: Books, select: Selected, num_max: int) -> NamespacesFound:
    """At most ``num_max`` namespaces, those of the most bytes first."""
    found = [binding for binding in books.index.bindings.values() if select.has(binding)]
    largest = heapq.nlargest(num_max, found, key=lambda binding: (binding.readable_bytes, binding.namespace))
    in_tiers = tuple((tier.options.name, _num_in(tier, select)) for tier in _tiers(books))
    return NamespacesFound(tuple(_facts_of(books, each) for each in largest), len(found) - len(largest), in_tiers)


def _num_in(tier: Tier, select: Selected) -> int:
    """The selected records that the tier is known to have: a look at each pair of tenant and model."""
    tenant = b"" if select.tenant is None else tag_of(select.tenant)
    model = b"" if select.model is None else tag_of(select.model)
    but_not = {tag_of(name) for name in select.but_not}
    return sum(
        count
        for tags, count in tier.num_known_of.items()
        if tags.startswith(tenant) and tags.endswith(model) and tags[:TAG_BYTES] not in but_not
    )


def _facts_of(books: Books, binding: Binding) -> NamespaceFacts:
    tags = tag_of(binding.tenant) + tag_of(binding.model)
    in_tiers = tuple((tier.options.name, tier.num_known_of.get(tags, 0)) for tier in _tiers(books))
    names = (binding.namespace, binding.model, binding.tenant)
    sums = (binding.num_readable, binding.readable_bytes, binding.num_leased, binding.num_pinned)
    return NamespaceFacts(*names, *sums, in_tiers)


def facts_after(books: Books, select: Selected, after: int, num_max: int) -> FactsPage:
    """At most ``num_max`` selected chunks of later generations than ``after``; fewer do not mean that it is the last
    page."""
    assert num_max > 0
    chunks = list(books.index.chunks.values())
    first = bisect_right(chunks, after, key=_generation)
    found: list[ChunkFacts] = []
    meanings: dict[Binding, Meaning] = {}
    for chunk in islice(chunks, first, first + LOOKED_AT_MAX):
        after = chunk.region.generation
        if chunk.state is ChunkState.READABLE and select.has(chunk.binding):
            found.append(_chunk_facts(books, chunk, meanings))
            if len(found) == num_max:
                break
    is_last = not chunks or after >= _generation(chunks[-1])
    return FactsPage(tuple(found), None if is_last else after)


def _generation(chunk: Chunk) -> int:
    return chunk.region.generation


def _chunk_facts(books: Books, chunk: Chunk, meanings: dict[Binding, Meaning]) -> ChunkFacts:
    binding = chunk.binding
    in_tiers: tuple[str, ...] = ()
    if books.tiers is not None:
        if binding not in meanings:
            meanings[binding] = meaning_of(binding.namespace, binding.tenant, binding.model, binding.layout)
        key = meanings[binding].key_of(chunk.key)
        in_tiers = tuple(tier.options.name for tier in _tiers(books) if key in tier.known and not tier.is_hidden(key))
    names = (chunk.key, chunk.parent, binding.namespace, binding.model, binding.tenant)
    times = (chunk.stored_s, chunk.used_s)
    return ChunkFacts(
        *names, chunk.position, chunk.num_bytes, *times, chunk.num_leases, chunk.num_pins, in_tiers=in_tiers
    )


def pins(books: Books) -> list[PinFacts]:
    """Every pin that has not ended, the oldest first."""
    found = []
    for pin in books.pins.pins.values():
        binding = pin.chunks[0].binding
        names = (pin.key, binding.namespace, binding.model, binding.tenant)
        found.append(PinFacts(*names, len(pin.chunks), pin.num_bytes, pin.began_s, pin.until_s))
    return found


def known_of(books: Books, select: Selected) -> Known:
    """Whether anything here has the tenant and the model: chunks, an account, a quota, an engine, a tier's record."""
    unknown = []
    bindings = books.index.bindings.values()
    if select.tenant is not None:
        is_known = select.tenant in books.tenants.accounts or select.tenant in books.tenants.quotas
        is_known = is_known or any(binding.tenant == select.tenant for binding in bindings)
        if not (is_known or _is_in_a_tier(books, tag_of(select.tenant), 0)):
            unknown.append("tenant")
    if select.model is not None:
        is_known = any(binding.model == select.model for binding in bindings)
        is_known = is_known or any(each.model == select.model for each in books.connections.engines.values())
        if not (is_known or _is_in_a_tier(books, tag_of(select.model), TAG_BYTES)):
            unknown.append("model")
    unlisted = tuple(tier.options.name for tier in _tiers(books) if not tier.is_complete) if unknown else ()
    return Known(tuple(unknown), unlisted)


def _is_in_a_tier(books: Books, tag: bytes, place: int) -> bool:
    return any(tags[place : place + TAG_BYTES] == tag for tier in _tiers(books) for tags in tier.num_known_of)


def _tiers(books: Books) -> Iterator[Tier]:
    """Those of this server, or that it shares; not the memory of others."""
    for tier in () if books.tiers is None else books.tiers.tiers:
        if tier.options.source != PEER_SOURCE:
            yield tier
