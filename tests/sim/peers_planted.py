"""Bugs to plant for the length of a test: in the directory, in what is lent, in what a pull believes, and in what a
lookup waits for."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from antiphon.cache import lending
from antiphon.cache.awaiting import Awaiting
from antiphon.cache.events import ConnectionId
from antiphon.cache.index import Chunk
from antiphon.cache.lending import Loan, Shelf, Wanted
from antiphon.cache.onboarding import Onboardings
from antiphon.cache.tier_key import Meaning, TierKey, meaning_of
from antiphon.cache_server import peer_lending
from antiphon.cache_server.peer_expected import Expectations
from antiphon.cache_server.peer_lending import Lender
from antiphon.cache_server.peer_pull import Action, Ended, LoanEnded, Verify, Whereabouts, pull
from antiphon.coordinator.directory import Directory, Member
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import StaleHandle
from antiphon.core.namespace import NamespaceDigest
from antiphon.sim import peers_pulls, peers_server

Plant = Callable[[pytest.MonkeyPatch], None]


def directory_is_not_fenced_by_incarnation(patch: pytest.MonkeyPatch) -> None:
    names: dict[tuple[int, int], str] = {}
    join = Directory.join

    def joining(self: Directory, instance: str, *rest: Any) -> int:
        session = join(self, instance, *rest)
        names[id(self), session] = instance
        return session

    def by_name(self: Directory, session: int) -> Member:
        member = self._members.get(names.get((id(self), session), ""))
        if member is None:
            raise StaleHandle("nobody of that name")
        return member

    patch.setattr(Directory, "join", joining)
    patch.setattr(Directory, "_current", by_name)


def bytes_of_another_layout_are_lent(patch: pytest.MonkeyPatch) -> None:
    def whatever_the_layout(namespace: NamespaceDigest, tenant: str, model: str, layout: ChunkLayout) -> Meaning:
        return meaning_of(namespace, tenant, model, ChunkLayout(1, layout.chunk_bytes))

    def is_as_long(chunk: Chunk, wanted: Wanted) -> bool:
        return chunk.binding.layout.chunk_bytes == wanted.num_bytes

    patch.setattr(lending, "meaning_of", whatever_the_layout)
    patch.setattr(peers_server, "meaning_of", whatever_the_layout)
    patch.setattr(lending, "is_meant", is_as_long)


def _hears(patch: pytest.MonkeyPatch, heard: Callable[[Action, Ended], Ended]) -> None:
    """Every pull takes ``heard`` of an action for how that ended."""

    def mishearing(
        where: Whereabouts, key: bytes, wanted: Wanted, clock: Callable[[], float]
    ) -> Generator[Action, Ended, bool]:
        real = pull(where, key, wanted, clock)
        ended: Ended = None
        while True:
            try:
                action = real.send(ended)
            except StopIteration as stop:
                return bool(stop.value)
            ended = heard(action, (yield action))

    patch.setattr(peers_pulls, "pull", mishearing)


def bytes_are_committed_without_their_digest(patch: pytest.MonkeyPatch) -> None:
    _hears(patch, lambda action, ended: True if isinstance(action, Verify) else ended)


def bytes_of_a_lost_loan_are_held_against_the_holder(patch: pytest.MonkeyPatch) -> None:
    _hears(patch, lambda action, ended: False if isinstance(ended, LoanEnded) else ended)


def lost_changes_are_not_told(patch: pytest.MonkeyPatch) -> None:
    changes_since = Shelf.changes_since

    def skipping(self: Shelf, sequence: int, num_max: int) -> Sequence[tuple[bool, TierKey]] | None:
        changes = changes_since(self, sequence, num_max)
        return changes if changes is not None else [(False, TierKey(bytes(32)))] * min(3, self.next_sequence - sequence)

    patch.setattr(Shelf, "changes_since", skipping)


def loans_outlive_their_connection(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Lender, "detach", lambda self, connection: None)


def removed_chunks_stay_on_the_shelf(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shelf, "_removed", lambda self, key: None)


def what_nobody_stores_is_expected_for_ever(patch: pytest.MonkeyPatch) -> None:
    answered = Expectations.answered

    def hoping(self: Expectations, chunks: Any, states: Sequence[str], now_s: float) -> list[bytes]:
        return answered(self, chunks, ["reserved" if state == "unseen" else state for state in states], now_s)

    patch.setattr(Expectations, "answered", hoping)


def servers_that_do_not_answer_are_waited_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Expectations, "lost", lambda self, chunks: None)


def lookups_outlive_their_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Onboardings, "end_overdue", lambda self: self.awaiting.look())


def commits_wake_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Awaiting, "stored", lambda self, key: None)


def deaths_of_writers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Who looks a moment later takes the chunk for one that is about to be stored."""
    patch.setattr(Awaiting, "is_given_up", lambda self, key: False)


def what_one_rank_gave_up_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    """A chunk that another rank has stored its part of counts as one that is being stored."""
    abandoned, is_given_up = Awaiting.abandoned, Awaiting.is_given_up

    def is_indexed(self: Awaiting, key: ChunkKey) -> bool:
        return key in self._onboardings.books.index.chunks

    def abandoning(self: Awaiting, key: ChunkKey) -> None:
        if not is_indexed(self, key):
            abandoned(self, key)

    patch.setattr(Awaiting, "abandoned", abandoning)
    patch.setattr(Awaiting, "is_given_up", lambda self, key: is_given_up(self, key) and not is_indexed(self, key))
    patch.setattr(Awaiting, "is_being_stored", is_indexed)


def open_questions_hold_up_what_is_stored_here(patch: pytest.MonkeyPatch) -> None:
    """A lookup takes notice of a store here only once no tier is asked any more."""
    awaits = Awaiting.awaits
    patch.setattr(Awaiting, "awaits", lambda self, waiter: not waiter.num_asks and awaits(self, waiter))


def reserved_chunks_are_handed_over(patch: pytest.MonkeyPatch) -> None:
    def as_readable(shelf: Shelf, tier_key: TierKey, key: ChunkKey) -> str:
        return "readable" if key in shelf._cache._books.index.chunks else "unseen"

    def whatever_its_state(shelf: Shelf, borrower: ConnectionId, key: TierKey, wanted: Wanted) -> Loan | None:
        books = shelf._cache._books
        chunk = next((each for each in books.index.chunks.values() if shelf._key_of(each) == key), None)
        if chunk is None or not lending.is_meant(chunk, wanted):
            return None
        books.lease(chunk)
        lease = books.leases.open(books.connections.get(borrower), key.hex(), (chunk,), books.now_s)
        return Loan(lease.id, chunk.region, wanted.num_bytes)

    patch.setattr(peer_lending, "held_state", as_readable)
    patch.setattr(peer_lending, "lend", whatever_its_state)


BUGS: list[Plant] = [
    directory_is_not_fenced_by_incarnation,
    bytes_of_another_layout_are_lent,
    bytes_are_committed_without_their_digest,
    bytes_of_a_lost_loan_are_held_against_the_holder,
    lost_changes_are_not_told,
    loans_outlive_their_connection,
    removed_chunks_stay_on_the_shelf,
    what_nobody_stores_is_expected_for_ever,
    servers_that_do_not_answer_are_waited_for,
    lookups_outlive_their_deadline,
    commits_wake_nobody,
    deaths_of_writers_are_forgotten,
    what_one_rank_gave_up_is_waited_for,
    open_questions_hold_up_what_is_stored_here,
    reserved_chunks_are_handed_over,
]
