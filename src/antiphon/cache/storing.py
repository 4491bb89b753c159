"""The two-phase store: reserve, copy (by the caller), commit or abort.

``reserve`` answers for each chunk what is true now, and gives the caller the slabs that it should write; a chunk's
region is allocated whole by its first writer, so that ranks never wait for each other's room. Until all slabs are
committed no lookup reports the chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from antiphon.cache import room
from antiphon.cache.arena import RegionHandle
from antiphon.cache.books import Books
from antiphon.cache.connections import Connection, Reservation
from antiphon.cache.effects import Aborted, CommitOutcome, Committed, Grant, Removal, Reserved, Verdict
from antiphon.cache.events import Abort, Commit, Reserve
from antiphon.cache.index import Binding, Chunk
from antiphon.cache.states import ChunkState, SlabState
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import CacheError, CapacityExceeded, ProtocolError, QuotaExceeded, StaleHandle


@dataclass(slots=True)
class _Answer:
    """The answer to one ``Reserve`` as it grows."""

    connection: Connection
    binding: Binding
    verdicts: list[Verdict] = field(default_factory=list)
    grants: list[Grant] = field(default_factory=list)
    refusal: CacheError | None = None


def reserve(books: Books, event: Reserve) -> Reserved:
    """Answers ``Reserve``.

    Raises:
        ConnectionUnknown: the caller is not attached.
        ProtocolError: too many keys, or the caller writes no slabs.
        LayoutMismatch: the namespace or a key means something else here.
    """
    connection = books.connections.get(event.connection)
    books.check_keys(event.keys)
    if not connection.slabs:
        raise ProtocolError(f"connection {connection.id} attached without slabs, so that it can store nothing")
    binding = books.binding_of(event.namespace, event.tenant, connection)
    named = event.keys if event.parent is None else (event.parent, *event.keys)
    held = [chunk for key in named if (chunk := books.chunk_of(key, event.namespace)) is not None]
    if binding is None:
        account = books.tenants.open(event.tenant)
        binding = Binding(event.namespace, event.tenant, account, connection.engine.model, connection.engine.layout)
    answer = _Answer(connection, binding)
    # The call's own chunks stay while room is made, so that a verdict is still true when the answer leaves.
    for chunk in held:
        chunk.num_step_holds += 1
        books.recount(chunk)
    parent = event.parent
    for key in event.keys:
        answer.verdicts.append(_verdict(books, answer, key, parent))
        parent = key
    for chunk in held:
        chunk.num_step_holds -= 1
        books.settle(chunk)
    return Reserved(tuple(answer.verdicts), tuple(answer.grants), answer.refusal)


def _verdict(books: Books, answer: _Answer, key: ChunkKey, parent: ChunkKey | None) -> Verdict:
    """What is true of one chunk, after reserving what the caller should write of it."""
    chunk = books.index.chunks.get(key)
    if chunk is not None and chunk.state is ChunkState.READABLE:
        chunk.last_used = books.step_number
        chunk.used_s = books.now_s
        return Verdict.RESIDENT
    states = {slab: SlabState.ABSENT if chunk is None else chunk.slabs[slab] for slab in answer.connection.slabs}
    missing = tuple(slab for slab, state in states.items() if state is SlabState.ABSENT)
    if chunk is not None and answer.connection.id in chunk.writers:
        return Verdict.BEING_WRITTEN  # by itself: what another writer gave up meanwhile waits for its commit
    if not missing:
        return Verdict.BEING_WRITTEN if SlabState.RESERVED in states.values() else Verdict.PARTIAL
    try:
        _check_reserved_share(books, answer, len(missing))
        if chunk is None:
            chunk = _new_chunk(books, answer, key, parent)
    except (CapacityExceeded, QuotaExceeded) as error:
        answer.refusal = answer.refusal or error
        answer.binding.account.counts.refused_tokens += books.options.chunk_size_tokens
        books.counters.num_refused_chunks += 1
        if books.tiers is not None:
            books.tiers.refused(key)
        return Verdict.REFUSED
    answer.grants.append(_grant(books, answer.connection, chunk, missing))
    return Verdict.WRITE


def _check_reserved_share(books: Books, answer: _Answer, num_slabs: int) -> None:
    connection = answer.connection
    if connection.reserved_bytes + num_slabs * answer.binding.layout.slab_bytes > books.options.reserved_bytes_max:
        raise CapacityExceeded(
            f"connection {connection.id} has reserved {connection.reserved_bytes} bytes and not committed them; it may "
            f"reserve {books.options.reserved_bytes_max}",
            remedy="commit or abort what was reserved",
        )


def _new_chunk(books: Books, answer: _Answer, key: ChunkKey, parent: ChunkKey | None) -> Chunk:
    """A chunk in new room. After one refusal no more room is made: what follows in the prefix would be out of reach."""
    if answer.refusal is not None:
        raise answer.refusal
    region = room.allocate(books, answer.binding.layout.chunk_bytes, answer.binding.account)
    if books.tiers is not None:
        books.tiers.begun(key)
    return books.add(key, parent, answer.binding, region)


def _grant(books: Books, connection: Connection, chunk: Chunk, slabs: tuple[int, ...]) -> Grant:
    assert connection.id not in chunk.writers, "a connection has two reservations of one chunk"
    chunk.set_slabs(slabs, SlabState.RESERVED)
    chunk.last_used = books.step_number
    chunk.writers[connection.id] = slabs
    books.recount(chunk)
    num_bytes = len(slabs) * chunk.binding.layout.slab_bytes
    reservation = Reservation(connection, chunk, chunk.region, slabs, num_bytes, books.now_s)
    connection.reservations[chunk.region.generation] = reservation
    connection.reserved_bytes += num_bytes
    books.unalarmed[reservation] = None
    return Grant(chunk.key, chunk.region, slabs)


def commit(books: Books, event: Commit) -> Committed:
    """Answers ``Commit``.

    Raises:
        ConnectionUnknown: the caller is not attached.
        StaleHandle: a region is not reserved by this connection, or named twice.
    """
    connection = books.connections.get(event.connection)
    outcomes = []
    for reservation in _reservations(connection, event.regions):
        _end_reservation(books, reservation)
        outcomes.append(_commit_one(books, reservation))
    return Committed(tuple(outcomes))


def _commit_one(books: Books, reservation: Reservation) -> CommitOutcome:
    chunk = reservation.chunk
    if not chunk.is_indexed:
        books.settle(chunk)
        return CommitOutcome.DROPPED
    chunk.set_slabs(reservation.slabs, SlabState.COMMITTED)
    chunk.last_used = books.step_number
    chunk.used_s = books.now_s
    if chunk.is_complete:
        books.make_readable(chunk)
        if books.tiers is not None:
            books.tiers.stored(chunk)
    books.settle(chunk)
    return CommitOutcome.READABLE if chunk.state is ChunkState.READABLE else CommitOutcome.PARTIAL


def abort(books: Books, event: Abort) -> Aborted:
    """Answers ``Abort``.

    Raises:
        ConnectionUnknown: the caller is not attached.
        StaleHandle: a region is not reserved by this connection, or named twice.
    """
    connection = books.connections.get(event.connection)
    for reservation in _reservations(connection, event.regions):
        _end_reservation(books, reservation)
        chunk = reservation.chunk
        is_indexed = chunk.is_indexed
        if is_indexed:
            chunk.set_slabs(reservation.slabs, SlabState.ABSENT)
        if chunk.is_idle and not chunk.has_commits:
            books.drop(chunk, Removal.ABANDONED)
        else:
            books.settle(chunk)
        if is_indexed:  # else somebody may be storing it anew
            _tell_abandoned(books, chunk)
    return Aborted(len(event.regions))


def abandon(books: Books, connection: Connection) -> int:
    """The connection has ended: its chunks are dropped, their bytes quarantined. Returns the number of reservations.

    The whole chunk goes, with what other ranks committed of it: a dead writer may still be writing to the region, so
    that it cannot be written again before the quarantine is over, while a new region can be at once.
    """
    reservations = list(connection.reservations.values())
    for reservation in reservations:
        _end_reservation(books, reservation)
        chunk = reservation.chunk
        chunk.quiet_at_s = books.now_s + books.options.quarantine_s
        if chunk.is_indexed:
            books.retire(chunk, Removal.ABANDONED)
            _tell_abandoned(books, chunk)
        else:
            books.settle(chunk)
    return len(reservations)


def _tell_abandoned(books: Books, chunk: Chunk) -> None:
    """Some of the chunk's slabs, or all, are not written any more."""
    if books.tiers is not None:
        books.tiers.abandoned(chunk.key)


def _reservations(connection: Connection, regions: Sequence[RegionHandle]) -> list[Reservation]:
    """The connection's reservations of ``regions``: all, or an error."""
    found = []
    for region in regions:
        reservation = connection.reservations.get(region.generation)
        if reservation is None or reservation.region != region:
            raise StaleHandle(
                f"connection {connection.id} holds no reservation of region {region.offset_bytes} in generation "
                f"{region.generation}",
                remedy="drop the copy, and reserve again",
            )
        found.append(reservation)
    if len({id(reservation) for reservation in found}) != len(found):
        raise StaleHandle("a region is named twice in one call", remedy="name each region once")
    return found


def _end_reservation(books: Books, reservation: Reservation) -> None:
    """The connection writes to the region no more. The caller says what becomes of the slabs."""
    connection = reservation.writer
    del connection.reservations[reservation.region.generation]
    connection.reserved_bytes -= reservation.num_bytes
    del reservation.chunk.writers[connection.id]
    books.unalarmed.pop(reservation, None)
