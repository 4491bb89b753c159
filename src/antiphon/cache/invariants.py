"""What must hold between any two steps, over all of the cache's state. Tests and the simulation assert it each step."""

from __future__ import annotations

from collections import Counter

from antiphon.cache.books import Books
from antiphon.cache.index import Binding, Chunk
from antiphon.cache.onboarding import FETCHER, Fetch
from antiphon.cache.states import ChunkState, SlabState
from antiphon.cache.tier import Publication
from antiphon.cache.tier_key import TAG_BYTES


def validate(books: Books) -> None:
    """Assert every invariant. Takes time in proportion to all chunks and leases."""
    books.arena.validate()
    books.connections.validate()
    books.leases.validate()
    books.pins.validate()
    books.log.validate()
    books.tenants.validate()
    _validate_index(books)
    for chunk in books.chunk_at.values():
        _validate_chunk(books, chunk)
    _validate_protections(books)
    _validate_sums(books)
    _validate_order(books)


def _validate_index(books: Books) -> None:
    index = books.index
    assert set(index.chunks.values()) == {chunk for chunk in books.chunk_at.values() if chunk.is_indexed}
    num_children: dict[bytes, int] = {}
    for key, chunk in index.chunks.items():
        assert chunk.key == key
        assert index.bindings.get(chunk.binding.namespace) is chunk.binding, "a chunk's namespace is not bound"
        if chunk.parent is not None:
            num_children[chunk.parent] = num_children.get(chunk.parent, 0) + 1
    assert index.num_children == num_children, "children are miscounted"


def _validate_chunk(books: Books, chunk: Chunk) -> None:
    assert books.arena.is_current(chunk.region), "a chunk's region is stale"
    assert chunk.num_bytes >= chunk.binding.layout.chunk_bytes
    assert len(chunk.slabs) == chunk.binding.layout.num_slabs
    assert chunk.num_step_holds == 0, "a pin outlived its step"
    assert chunk.state is not ChunkState.FREED
    if chunk.is_indexed:
        reserved = sorted(slab for slabs in chunk.writers.values() for slab in slabs)
        assert reserved == [slab for slab, state in enumerate(chunk.slabs) if state is SlabState.RESERVED]
        assert (chunk.state is ChunkState.READABLE) == chunk.is_complete, "readable and not complete, or the reverse"
        assert chunk.writers or chunk.has_commits, "a chunk of which nobody wrote anything"
    if chunk.num_pins:
        assert chunk.state is ChunkState.READABLE, "a pinned chunk is not readable"
        assert not books.index.is_evictable(chunk), "a pinned chunk may be evicted"
    if chunk.state is ChunkState.INCOMPLETE:
        assert chunk.num_leases == 0, "a chunk is leased that is not readable"
    if chunk.state is ChunkState.RETIRED:
        assert chunk.num_leases or chunk.writers or chunk.num_holds, "a retired chunk waits for nothing"
    if chunk.state is ChunkState.QUARANTINED:
        assert not chunk.num_leases
        assert not chunk.writers
        assert not chunk.num_holds
        assert chunk.quiet_at_s > books.now_s, "a quarantine is over, and its bytes are held"


def _validate_protections(books: Books) -> None:
    """Leases and reservations name chunks whose bytes they protect, and the chunks count them right."""
    num_leases: dict[Chunk, int] = {}
    for lease in books.leases.active.values():
        for chunk in lease.chunks:
            num_leases[chunk] = num_leases.get(chunk, 0) + 1
            assert books.chunk_at.get(chunk.region.offset_bytes) is chunk, "a leased chunk has lost its bytes"
    writers: dict[Chunk, dict[int, tuple[int, ...]]] = {}
    for connection in books.connections.connections.values():
        for generation, reservation in connection.reservations.items():
            chunk = reservation.chunk
            assert reservation.writer is connection
            assert generation == reservation.region.generation == chunk.region.generation
            assert books.chunk_at.get(chunk.region.offset_bytes) is chunk, "a reserved chunk has lost its bytes"
            writers.setdefault(chunk, {})[connection.id] = reservation.slabs
    holds = _add_tiers(books, writers)
    pins = Counter(chunk for pin in books.pins.pins.values() for chunk in pin.chunks)
    assert books.pins.pinned_bytes == sum(chunk.num_bytes for chunk in pins), "pinned bytes do not add up"
    for chunk in pins:
        assert books.chunk_at.get(chunk.region.offset_bytes) is chunk, "a pinned chunk has lost its bytes"
    for chunk in [*holds, *writers]:
        assert books.chunk_at.get(chunk.region.offset_bytes) is chunk, "a job or lookup holds a chunk without bytes"
    for chunk in books.chunk_at.values():
        assert chunk.num_holds == holds[chunk], "holds are miscounted"
        assert chunk.num_pins == pins[chunk], "pins are miscounted"
        assert chunk.num_leases == num_leases.get(chunk, 0), "leases are miscounted"
        assert chunk.writers == writers.get(chunk, {}), "writers are miscounted"


def _add_tiers(books: Books, writers: dict[Chunk, dict[int, tuple[int, ...]]]) -> Counter[Chunk]:
    """What jobs of tiers and waiting lookups hold; adds the fetches to ``writers``."""
    holds: Counter[Chunk] = Counter()
    if books.tiers is None:
        return holds
    for tier in books.tiers.tiers:
        queued_bytes = 0
        subjects = [running.subject for running in tier.running.values()]
        for subject in [*subjects, *tier.waiting.publications.values()]:
            if isinstance(subject, Publication):
                queued_bytes += subject.chunk.num_bytes
                holds[subject.chunk] += subject.is_held
            elif isinstance(subject, Fetch) and subject.chunk is not None:
                writers.setdefault(subject.chunk, {})[FETCHER] = tuple(range(len(subject.chunk.slabs)))
        assert queued_bytes == tier.queued_bytes <= tier.options.queue_bytes_max, "publications are miscounted"
        assert all(chunk.state is ChunkState.READABLE for chunk in (*tier.waiting.publications, *tier.waiting.dirty))
        assert len(tier.known) <= tier.options.known_max
        assert tier.num_known_of == Counter(key[: 2 * TAG_BYTES] for key in tier.known), "known records are miscounted"
    onboardings = books.tiers.onboardings
    for waiter in onboardings.waiters.values():
        holds.update(waiter.held)
        assert books.connections.connections.get(waiter.connection.id) is waiter.connection, "nobody waits for a lookup"
        assert waiter.position < waiter.end, "a lookup waits for nothing"
    onboardings.awaiting.validate()
    assert onboardings.held_bytes == sum(waiter.num_bytes for waiter in onboardings.waiters.values())
    for key, fetch in onboardings.fetches.items():
        assert fetch.key == key
        assert fetch.chunk is None or fetch.chunk.writers, "a fetch has a region and no job"
    return holds


def _validate_sums(books: Books) -> None:
    assert books.arena.used_bytes == sum(chunk.num_bytes for chunk in books.chunk_at.values()), "bytes without a chunk"
    by_account: dict[str, int] = {}
    by_namespace: dict[bytes, list[Chunk]] = {}
    for state in ChunkState:
        members = [chunk for chunk in books.chunk_at.values() if chunk.state is state]
        assert books.num_chunks[state] == len(members), f"{state.value} chunks are miscounted"
        assert books.num_bytes[state] == sum(chunk.num_bytes for chunk in members), (
            f"{state.value} bytes are miscounted"
        )
    assert books.idle_bytes == sum(chunk.num_bytes for chunk in books.chunk_at.values() if chunk.is_idle)
    assert books.arena.free_bytes + sum(books.num_bytes.values()) == books.arena.usable_bytes
    for chunk in books.chunk_at.values():
        binding = chunk.binding
        by_account[binding.account.name] = by_account.get(binding.account.name, 0) + chunk.num_bytes
        by_namespace.setdefault(binding.namespace, []).append(chunk)
    for name, account in books.tenants.accounts.items():
        assert account.used_bytes == by_account.pop(name, 0), f"the bytes of tenant {name} are miscounted"
    assert not by_account, "a chunk belongs to a tenant without an account"
    for namespace, binding in books.index.bindings.items():
        _validate_binding(binding, by_namespace.pop(namespace, []))
    assert not by_namespace, "a chunk's namespace is not bound"
    counters = books.counters
    num_left = counters.num_stored - counters.num_readable_removed
    assert num_left == books.num_chunks[ChunkState.READABLE], (
        "chunks stored and removed do not add up to those readable"
    )
    num_told = counters.num_stored + counters.num_readable_removed
    assert num_told == books.log.next_sequence - 1, "observers were not told of every chunk stored and removed"


def _validate_binding(binding: Binding, chunks: list[Chunk]) -> None:
    assert binding.num_chunks == len(chunks) > 0, "a namespace is bound without chunks"
    assert all(chunk.binding is binding for chunk in chunks)
    assert binding.used_bytes == sum(chunk.num_bytes for chunk in chunks)
    readable = [chunk for chunk in chunks if chunk.state is ChunkState.READABLE]
    assert binding.num_readable == len(readable), "a namespace's readable chunks are miscounted"
    assert binding.readable_bytes == sum(chunk.num_bytes for chunk in readable)
    assert binding.num_leased == sum(chunk.num_leases > 0 for chunk in chunks), "its leased chunks are miscounted"
    assert binding.num_pinned == sum(chunk.num_pins > 0 for chunk in chunks), "its pinned chunks are miscounted"


def _validate_order(books: Books) -> None:
    chunks = set(books.index.chunks.values())
    books.policy.validate(chunks)
    limited = [each for each in books.tenants.accounts.values() if each.quota_bytes is not None and each.used_bytes]
    assert books.quota_orders.keys() == set(limited), "an account with a quota has no order, or one without has"
    for account, order in books.quota_orders.items():
        own = {chunk for chunk in chunks if chunk.binding.account is account}
        order.validate(own)
        missing = [chunk for chunk in own if books.index.is_evictable(chunk) and chunk not in order]
        assert not missing, f"tenant {account.name} has chunks that its quota cannot evict"
