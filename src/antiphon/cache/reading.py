"""Lookups and the leases that they give.

What a lookup reports is leased before the answer leaves, so that it cannot be evicted between the answer and the copy.
What is not readable in one contiguous piece from the first chunk is not reported.
"""

from __future__ import annotations

from collections.abc import Mapping

from antiphon.cache.books import Books
from antiphon.cache.connections import Connection, Engine
from antiphon.cache.effects import Found, LeaseNoted, Onboarding
from antiphon.cache.events import CopyBegan, CopyEnded, Lookup, Release
from antiphon.cache.index import Chunk
from antiphon.cache.leases import Lease
from antiphon.cache.states import ChunkState, LeaseState
from antiphon.core.errors import CacheError


def lookup(books: Books, event: Lookup) -> Found | Onboarding:
    """Answers ``Lookup``: the contiguous readable prefix, leased; or that more of it may come from a tier.

    Raises:
        ConnectionUnknown: the caller is not attached.
        ProtocolError: too many keys.
        LayoutMismatch: the namespace or a key means something else here.
    """
    connection = books.connections.get(event.connection)
    books.check_keys(event.keys)
    books.binding_of(event.namespace, event.tenant, connection)
    prefix = _readable_prefix(books, event)
    if books.tiers is not None and event.onboard_s > 0 and len(prefix) < len(event.keys):
        onboarding = books.tiers.onboardings.begin(event, connection, prefix)
        if onboarding is not None:
            return onboarding
    return _leased(books, event, connection, prefix)


def found_at_last(books: Books, event: Lookup, connection: Connection, sources: Mapping[int, str]) -> Found:
    """The final answer to a lookup that has waited for tiers.

    Args:
        sources: places of the chunks that came meanwhile, with the name of their source.
    """
    try:
        prefix = _readable_prefix(books, event)
    except CacheError:  # the key was stored with another meaning meanwhile
        prefix = []
    found = _leased(books, event, connection, prefix)
    places: dict[str, list[int]] = {}
    for place in sorted(place for place in sources if place < len(found.regions)):
        places.setdefault(sources[place], []).append(place)
    fetched = tuple((source, tuple(its_places)) for source, its_places in places.items())
    return Found(found.lease, found.regions, found.num_tokens, found.num_chunks_capped, fetched)


def _leased(books: Books, event: Lookup, connection: Connection, prefix: list[Chunk]) -> Found:
    counts = books.tenants.counts_of(event.tenant)
    books.counters.num_lookups += 1
    num_capped = len(prefix) - _num_leasable(books, prefix, connection.engine)
    if num_capped:
        books.counters.num_capped_lookups += 1
        del prefix[-num_capped:]
    chunk_size_tokens = books.options.chunk_size_tokens
    counts.hit_tokens += len(prefix) * chunk_size_tokens
    counts.miss_tokens += (len(event.keys) - len(prefix)) * chunk_size_tokens
    if not prefix:
        return Found(None, (), 0, num_capped)
    for chunk in prefix:
        books.lease(chunk)
    lease = books.leases.open(connection, event.request, tuple(prefix), books.now_s)
    regions = tuple(chunk.region for chunk in prefix)
    return Found(lease.id, regions, len(prefix) * chunk_size_tokens, num_capped)


def _readable_prefix(books: Books, event: Lookup) -> list[Chunk]:
    prefix = []
    for key in event.keys:
        chunk = books.chunk_of(key, event.namespace)
        if chunk is None or chunk.state is not ChunkState.READABLE:
            break
        prefix.append(chunk)
    return prefix


def _num_leasable(books: Books, prefix: list[Chunk], engine: Engine) -> int:
    """How many chunks of ``prefix`` fit under the engine's caps; what it has leased already costs no more bytes."""
    if len(engine.leases) >= books.options.leases_per_engine_max:
        return 0
    left_bytes = books.options.leased_bytes_max - engine.leased_bytes
    for index, chunk in enumerate(prefix):
        if chunk not in engine.leased:
            left_bytes -= chunk.num_bytes
            if left_bytes < 0:
                return index
    return len(prefix)


def release(books: Books, event: Release) -> LeaseNoted:
    """Answers ``Release``.

    Raises:
        ConnectionUnknown: the caller is not attached.
        LeaseUnknown: there is no such lease, or it was released before.
        NotOwner: it belongs to another engine or request.
    """
    connection = books.connections.get(event.connection)
    return _noted(books, books.leases.release(event.lease, connection, event.request, books.now_s))


def copy_began(books: Books, event: CopyBegan) -> LeaseNoted:
    """Answers ``CopyBegan``.

    Raises:
        ConnectionUnknown: the caller is not attached.
        LeaseUnknown: there is no such lease, or it was released.
        NotOwner: it belongs to another engine.
    """
    return _noted(books, books.leases.copy_began(event.lease, books.connections.get(event.connection)))


def copy_ended(books: Books, event: CopyEnded) -> LeaseNoted:
    """Answers ``CopyEnded``.

    Raises:
        ConnectionUnknown: the caller is not attached.
        LeaseUnknown: there is no such lease, or no copy of it was announced.
        NotOwner: it belongs to another engine.
    """
    return _noted(books, books.leases.copy_ended(event.lease, books.connections.get(event.connection), books.now_s))


def _noted(books: Books, lease: Lease) -> LeaseNoted:
    if lease.state is LeaseState.ENDED:
        books.end_lease(lease)
    return LeaseNoted(lease.id, lease.state)
