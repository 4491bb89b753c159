"""Bugs to plant for the length of a test: in the real cache, in the shell of its server, and in the rules of a client.

Each replaces one decision by a wrong one, where it is made. ``Cache.validate`` is off while they are tried
(``test_planted_bugs``), so that what catches them is an output, or what is left at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest

from antiphon.cache import reading, storing
from antiphon.cache.arena import RegionHandle
from antiphon.cache.books import Books
from antiphon.cache.connections import Connection, Reservation
from antiphon.cache.effects import Reply, Reserved
from antiphon.cache.events import Lookup
from antiphon.cache.index import Chunk
from antiphon.cache.leases import Lease, Leases
from antiphon.cache.states import ChunkState, LeaseState
from antiphon.core.chunks import ChunkChain, ChunkKey
from antiphon.core.errors import StaleHandle
from antiphon.sim.client import CacheClient, Pending, Promise, Session
from antiphon.sim.scheduler import Request, Scheduler, Table
from antiphon.sim.server import Peer, Server
from antiphon.sim.worker import LoadOrder, StoreOrder, Worker
from tests.cache.planted import (
    connection_end_forgets_leases,
    evict_ignores_pin,
    lookup_jumps_over_a_hole,
    quota_forgets_pins,
    release_does_not_wait_for_copies,
)

Plant = Callable[[pytest.MonkeyPatch], None]


# ---- in the cache ----------------------------------------------------------------------------------------------------


def leased_chunk_is_evicted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        Chunk, "is_idle", property(lambda self: self.is_indexed and not (self.num_step_holds or self.writers))
    )


def chunk_being_written_is_evicted(patch: pytest.MonkeyPatch) -> None:
    def is_idle(self: Chunk) -> bool:
        return self.is_indexed and not (self.num_step_holds or self.num_leases)

    patch.setattr(Chunk, "is_idle", property(is_idle))


def cleared_chunk_is_freed_under_its_lease(patch: pytest.MonkeyPatch) -> None:
    settle = Books.settle

    def settling(self: Books, chunk: Chunk) -> None:
        settle(self, chunk)
        if chunk.state is ChunkState.RETIRED and not chunk.writers:
            self.free(chunk)

    def ending(self: Books, lease: Lease) -> None:
        for chunk in lease.chunks:
            chunk.num_leases -= 1
            if chunk.is_indexed:
                settle(self, chunk)
        self.connections.forget_engine_if_gone(lease.engine)

    patch.setattr(Books, "settle", settling)
    patch.setattr(Books, "end_lease", ending)


def dead_writer_is_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    settle = Books.settle

    def at_once(self: Books, chunk: Chunk) -> None:
        chunk.quiet_at_s = 0.0
        settle(self, chunk)

    patch.setattr(Books, "settle", at_once)


def generation_is_not_checked(patch: pytest.MonkeyPatch) -> None:
    def by_offset(connection: Connection, regions: Sequence[RegionHandle]) -> list[Reservation]:
        at = {reservation.region.offset_bytes: reservation for reservation in connection.reservations.values()}
        if any(region.offset_bytes not in at for region in regions):
            raise StaleHandle("nothing is reserved there")
        return [at[region.offset_bytes] for region in regions]

    patch.setattr(storing, "_reservations", by_offset)


def chunk_is_readable_before_all_slabs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Chunk, "is_complete", property(lambda self: self.has_commits))


def reserved_chunk_is_readable(patch: pytest.MonkeyPatch) -> None:
    def prefix_of(books: Books, event: Lookup) -> list[Chunk]:
        prefix = []
        for key in event.keys:
            chunk = books.index.chunks.get(key)
            if chunk is None:
                break
            prefix.append(chunk)
        return prefix

    patch.setattr(reading, "_readable_prefix", prefix_of)


def namespace_is_not_in_the_key(patch: pytest.MonkeyPatch) -> None:
    """Nor does the cache look at the namespace of what it finds."""
    patch.setattr(ChunkChain, "_seed", lambda self: bytes(32))
    patch.setattr(Books, "chunk_of", lambda self, key, namespace: self.index.chunks.get(key))


def parent_is_not_in_the_key(patch: pytest.MonkeyPatch) -> None:
    extend = ChunkChain.extend

    def alone(self: ChunkChain, tokens: Any) -> list[ChunkKey]:
        keys: list[ChunkKey] = []
        for token in tokens:
            keys += extend(self, (token,))
            if len(self.keys) and not self._tail:
                self._last = self._seed()
        return keys

    patch.setattr(ChunkChain, "extend", alone)


def lease_ends_with_its_schedulers_connection(patch: pytest.MonkeyPatch) -> None:
    ended = Leases.connection_ended

    def ending(self: Leases, connection: Connection, now_s: float) -> Iterator[Lease]:
        yield from ended(self, connection, now_s)
        for lease in list(self.active.values()):
            if lease.state is LeaseState.ORPHANED:
                lease.copies.clear()
                self._settle(lease, now_s)
                yield lease

    patch.setattr(Leases, "connection_ended", ending)


# ---- in the shell of the server --------------------------------------------------------------------------------------


def own_close_counts_as_the_peers_end(patch: pytest.MonkeyPatch) -> None:
    close = Server.close

    def detaching(self: Server, peer: Peer) -> None:
        close(self, peer)
        self.detach(peer)

    patch.setattr(Server, "close", detaching)


# ---- in the rules of a client ----------------------------------------------------------------------------------------


def late_answers_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheClient, "_undo", lambda self, session, pending, reply: None)


def late_found_is_dropped(patch: pytest.MonkeyPatch) -> None:
    undo = CacheClient._undo

    def undoing(self: CacheClient, session: Session, pending: Pending, reply: Reply) -> None:
        if isinstance(reply, Reserved):
            undo(self, session, pending, reply)

    patch.setattr(CacheClient, "_undo", undoing)


def session_given_up_is_not_read_on(patch: pytest.MonkeyPatch) -> None:
    undo = CacheClient._undo

    def undoing(self: CacheClient, session: Session, pending: Pending, reply: Reply) -> None:
        if session.is_open:
            undo(self, session, pending, reply)

    patch.setattr(CacheClient, "_undo", undoing)


def lost_release_is_not_sent_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CacheClient, "_pay", lambda self, session: self._owed.clear())


def arena_is_unmapped_at_the_end_of_its_connection(patch: pytest.MonkeyPatch) -> None:
    """The mapping goes although loads from it are promised and running."""
    patch.setattr(Session, "is_drained", lambda self, now_s: True)
    ended = CacheClient._ended

    def ending(self: CacheClient, session: Session, why: str) -> None:
        ended(self, session, why)
        self.close_drained(session)

    patch.setattr(CacheClient, "_ended", ending)
    patch.setattr(Session, "covers", lambda self, promise: self.incarnation == promise.incarnation)
    patch.setattr(CacheClient, "unhold", lambda self, session: None)


def promise_is_loaded_through_any_session(patch: pytest.MonkeyPatch) -> None:
    """Also through one of the same life of the server that came after the promise.

    Not among ``BUGS``: it takes an engine that was without any connection for longer than draining and quarantine, and
    a promise older than that, which hardly comes by chance (``test_rules``).
    """

    def covers(self: Session, promise: Promise) -> bool:
        return not self.is_closed and self.incarnation == promise.incarnation

    patch.setattr(Session, "covers", covers)


def promise_is_loaded_from_another_life(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Session, "covers", lambda self, promise: not self.is_closed and self.is_open)


def commit_comes_before_the_copy_ended(patch: pytest.MonkeyPatch) -> None:
    copy_out = Worker._copy_out

    def hasty(self: Worker, order: StoreOrder, session: Session, reserved: Reserved) -> None:
        self._commit(session, tuple(grant.region for grant in reserved.grants))
        copy_out(self, order, session, reserved)

    patch.setattr(Worker, "_copy_out", hasty)
    commit = Worker._commit
    committed: set[tuple[Worker, tuple[RegionHandle, ...]]] = set()

    def once(self: Worker, session: Session, regions: tuple[RegionHandle, ...]) -> None:
        if (self, regions) not in committed:
            committed.add((self, regions))
            commit(self, session, regions)

    patch.setattr(Worker, "_commit", once)


def release_comes_before_the_copy_ended(patch: pytest.MonkeyPatch) -> None:
    load = Scheduler._load

    def hasty(self: Scheduler, request: Request, promise: Promise) -> None:
        load(self, request, promise)
        self._release(request)

    patch.setattr(Scheduler, "_load", hasty)


def load_is_reported_before_it_ended(patch: pytest.MonkeyPatch) -> None:
    copy_in = Worker._copy_in

    def hasty(self: Worker, order: LoadOrder, session: Session, on_end: Callable[[], None]) -> None:
        self._report(order, True)
        copy_in(self, replace(order, report=lambda is_ok: None), session, on_end)

    patch.setattr(Worker, "_copy_in", hasty)


def blocks_are_freed_under_a_copy(patch: pytest.MonkeyPatch) -> None:
    """Those of requests that finished, were preempted or aborted."""

    def drop(self: Scheduler, table: Table) -> None:
        table.is_dropped = True
        self.free += table.blocks
        table.blocks = list(table.blocks)

    def copy_ended(self: Scheduler, table: Table) -> None:
        table.num_copies -= 1

    patch.setattr(Scheduler, "_drop", drop)
    patch.setattr(Scheduler, "_copy_ended", copy_ended)


BUGS: tuple[Plant, ...] = (
    quota_forgets_pins,
    evict_ignores_pin,
    leased_chunk_is_evicted,
    chunk_being_written_is_evicted,
    cleared_chunk_is_freed_under_its_lease,
    dead_writer_is_not_waited_for,
    generation_is_not_checked,
    chunk_is_readable_before_all_slabs,
    reserved_chunk_is_readable,
    lookup_jumps_over_a_hole,
    namespace_is_not_in_the_key,
    parent_is_not_in_the_key,
    release_does_not_wait_for_copies,
    lease_ends_with_its_schedulers_connection,
    connection_end_forgets_leases,
    own_close_counts_as_the_peers_end,
    late_answers_are_dropped,
    late_found_is_dropped,
    session_given_up_is_not_read_on,
    lost_release_is_not_sent_again,
    arena_is_unmapped_at_the_end_of_its_connection,
    promise_is_loaded_from_another_life,
    commit_comes_before_the_copy_ended,
    release_comes_before_the_copy_ended,
    load_is_reported_before_it_ended,
    blocks_are_freed_under_a_copy,
)
