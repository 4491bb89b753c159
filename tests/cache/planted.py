"""Bugs to plant: each replaces one decision of the cache by a wrong one, for the length of a test.

A bug is planted where the decision is made, so that most assertions around it see the same wrong world and do not give
it away by looking twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from antiphon.cache import control, reading, room, storing
from antiphon.cache.arena import RegionHandle
from antiphon.cache.books import Books
from antiphon.cache.connections import Connection, Reservation
from antiphon.cache.effects import Grant, LeaseNoted, Removal, Verdict
from antiphon.cache.events import Lookup, Release
from antiphon.cache.index import Chunk, Index
from antiphon.cache.leases import Lease, Leases
from antiphon.cache.pins import Pin, Pins
from antiphon.cache.states import ChunkState, LeaseState, SlabState
from antiphon.cache.tenants import Account
from antiphon.core.chunks import ChunkChain
from antiphon.core.errors import StaleHandle

Plant = Callable[[pytest.MonkeyPatch], None]


def evict_ignores_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Chunk, "is_idle", property(lambda self: self.is_indexed and not (self.num_step_holds or self.writers))
    )


def readable_before_all_slabs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chunk, "is_complete", property(lambda self: self.has_commits))


def hash_without_namespace(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ChunkChain, "_seed", lambda self: bytes(32))


def stale_generation_accepted(patch: pytest.MonkeyPatch) -> None:
    def by_offset(connection: Connection, regions: Sequence[RegionHandle]) -> list[Reservation]:
        at = {reservation.region.offset_bytes: reservation for reservation in connection.reservations.values()}
        missing = [region for region in regions if region.offset_bytes not in at]
        if missing:
            raise StaleHandle("nothing is reserved there")
        return [at[region.offset_bytes] for region in regions]

    patch.setattr(storing, "_reservations", by_offset)


def abort_forgets_to_free(patch: pytest.MonkeyPatch) -> None:
    drop = Books.drop

    def forgetful(self: Books, chunk: Chunk, removal: Removal) -> None:
        if removal is not Removal.ABANDONED:
            drop(self, chunk, removal)

    patch.setattr(Books, "drop", forgetful)


def connection_end_forgets_leases(patch: pytest.MonkeyPatch) -> None:
    def nothing(self: Leases, connection: Connection, now_s: float) -> Iterator[Lease]:
        yield from ()

    patch.setattr(Leases, "connection_ended", nothing)


def quota_not_counted_on_overwrite(patch: pytest.MonkeyPatch) -> None:
    """A chunk that was stored before, and is stored again, costs its tenant nothing."""
    add, free = Books.add, Books.free

    def adding(self: Books, key: Any, *rest: Any) -> Chunk:
        seen = self.__dict__.setdefault("seen", set())
        chunk = add(self, key, *rest)
        if key in seen:
            self.__dict__.setdefault("uncounted", set()).add(chunk)
            chunk.binding.account.used_bytes -= chunk.num_bytes
        seen.add(key)
        return chunk

    def freeing(self: Books, chunk: Chunk) -> None:
        if chunk in self.__dict__.get("uncounted", ()):
            chunk.binding.account.used_bytes += chunk.num_bytes
        free(self, chunk)

    patch.setattr(Books, "add", adding)
    patch.setattr(Books, "free", freeing)


def reservation_called_resident(patch: pytest.MonkeyPatch) -> None:
    verdict_of = storing._verdict

    def hasty(*args: Any) -> Verdict:
        verdict = verdict_of(*args)
        return Verdict.RESIDENT if verdict is Verdict.BEING_WRITTEN else verdict

    patch.setattr(storing, "_verdict", hasty)


def prefixes_go_from_their_beginning(patch: pytest.MonkeyPatch) -> None:
    def first_ones_only(self: Index, chunk: Chunk) -> bool:
        return chunk.is_idle and chunk.parent not in self.chunks

    remove = Index.remove

    def offering_children(self: Index, chunk: Chunk) -> Chunk | None:
        remove(self, chunk)
        return next((other for other in self.chunks.values() if other.parent == chunk.key), None)

    patch.setattr(Index, "is_evictable", first_ones_only)
    patch.setattr(Index, "remove", offering_children)


def second_release_frees_again(patch: pytest.MonkeyPatch) -> None:
    """A lease that has ended is remembered, and its second release takes the protection of others away."""
    end_lease, release = Books.end_lease, reading.release

    def remembering(self: Books, lease: Lease) -> None:
        self.__dict__.setdefault("ended", {})[lease.id] = lease
        end_lease(self, lease)

    def releasing(books: Books, event: Release) -> LeaseNoted:
        lease = books.__dict__.get("ended", {}).get(event.lease)
        if lease is None:
            return release(books, event)
        for chunk in lease.chunks:
            chunk.num_leases = max(0, chunk.num_leases - 1)
        return LeaseNoted(lease.id, LeaseState.ENDED)

    patch.setattr(Books, "end_lease", remembering)
    patch.setattr(reading, "release", releasing)


def release_does_not_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    release = Leases.release

    def at_once(self: Leases, lease_id: Any, connection: Connection, request: str, now_s: float) -> Lease:
        self.of_engine(lease_id, connection).copies.clear()
        return release(self, lease_id, connection, request, now_s)

    patch.setattr(Leases, "release", at_once)


def dead_writers_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    settle = Books.settle

    def at_once(self: Books, chunk: Chunk) -> None:
        chunk.quiet_at_s = 0.0
        settle(self, chunk)

    patch.setattr(Books, "settle", at_once)


def lookup_jumps_over_a_hole(patch: pytest.MonkeyPatch) -> None:
    def all_readable(books: Books, event: Lookup) -> list[Chunk]:
        found = (books.index.chunks.get(key) for key in event.keys)
        return [chunk for chunk in found if chunk is not None and chunk.state is ChunkState.READABLE]

    patch.setattr(reading, "_readable_prefix", all_readable)


def slab_granted_twice(patch: pytest.MonkeyPatch) -> None:
    """A second writer is granted slabs that another has reserved."""
    verdict_of = storing._verdict

    def generous(books: Books, answer: Any, key: Any, parent: Any) -> Verdict:
        verdict = verdict_of(books, answer, key, parent)
        if verdict is not Verdict.BEING_WRITTEN:
            return verdict
        chunk = books.index.chunks[key]
        slabs = answer.connection.slabs
        answer.grants.append(Grant(key, chunk.region, tuple(s for s in slabs if chunk.slabs[s] is SlabState.RESERVED)))
        return Verdict.WRITE

    patch.setattr(storing, "_verdict", generous)


def window_ignores_writers(patch: pytest.MonkeyPatch) -> None:
    """Room for a larger chunk is made over what is being written."""
    coldest = room.coldest_window

    def blind(books: Books, size_bytes: int) -> list[Chunk] | None:
        writers = {chunk: chunk.writers for chunk in books.chunk_at.values() if chunk.writers}
        for chunk in writers:
            chunk.writers = {}
        try:
            return coldest(books, size_bytes)
        finally:
            for chunk, its_writers in writers.items():
                chunk.writers = its_writers

    patch.setattr(room, "coldest_window", blind)


def evict_ignores_pin(patch: pytest.MonkeyPatch) -> None:
    def is_idle(self: Chunk) -> bool:
        return self.is_indexed and not (self.num_leases or self.num_step_holds or self.writers)

    patch.setattr(Chunk, "is_idle", property(is_idle))


def quota_forgets_pins(patch: pytest.MonkeyPatch) -> None:
    """A tenant's own room is made over what is pinned."""
    evict = room.evict_own

    def blind(books: Books, account: Account, left_bytes: int) -> None:
        pinned = {chunk: chunk.num_pins for chunk in books.chunk_at.values() if chunk.num_pins}
        for chunk in pinned:
            chunk.num_pins = 0
            books.offer(chunk)
        evict(books, account, left_bytes)
        for chunk, num_pins in pinned.items():
            chunk.num_pins = num_pins

    patch.setattr(room, "evict_own", blind)


def end_of_one_pin_ends_all_of_its_chunks(patch: pytest.MonkeyPatch) -> None:
    remove = Pins.remove

    def removing(self: Pins, pin: Pin) -> None:
        for chunk in pin.chunks:
            chunk.num_pins = 1
        remove(self, pin)

    patch.setattr(Pins, "remove", removing)


def pin_does_not_end_by_its_time(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Pins, "overdue", lambda self, now_s: iter(()))


def lowered_quota_evicts_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(control, "_shrink", lambda books, account: 0)


def new_quota_knows_no_earlier_chunks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Books, "order_by_account", lambda self, account: None)


BUGS: tuple[Plant, ...] = (
    evict_ignores_pin,
    quota_forgets_pins,
    end_of_one_pin_ends_all_of_its_chunks,
    pin_does_not_end_by_its_time,
    lowered_quota_evicts_nothing,
    new_quota_knows_no_earlier_chunks,
    evict_ignores_lease,
    readable_before_all_slabs,
    hash_without_namespace,
    stale_generation_accepted,
    abort_forgets_to_free,
    connection_end_forgets_leases,
    quota_not_counted_on_overwrite,
    reservation_called_resident,
    prefixes_go_from_their_beginning,
    second_release_frees_again,
    release_does_not_wait_for_copies,
    dead_writers_are_not_waited_for,
    lookup_jumps_over_a_hole,
    slab_granted_twice,
    window_ignores_writers,
)
