"""Bugs to plant for the length of a test: in the directory, in what is lent, and in what a pull believes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import pytest

from antiphon.cache import lending
from antiphon.cache.index import Chunk
from antiphon.cache.lending import Shelf, Wanted
from antiphon.cache.tier_key import Meaning, TierKey, meaning_of
from antiphon.cache_server.peer_lending import Lender
from antiphon.cache_server.peer_pull import Action, Ended, Verify, Whereabouts, pull
from antiphon.coordinator.directory import Directory, Member
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


def bytes_are_committed_without_their_digest(patch: pytest.MonkeyPatch) -> None:
    def believing(
        where: Whereabouts, key: bytes, wanted: Wanted, clock: Callable[[], float]
    ) -> Generator[Action, Ended, bool]:
        real = pull(where, key, wanted, clock)
        ended: Ended = None
        while True:
            try:
                action = real.send(ended)
            except StopIteration as stop:
                return bool(stop.value)
            ended = True if isinstance(action, Verify) else (yield action)

    patch.setattr(peers_pulls, "pull", believing)


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


BUGS: list[Plant] = [
    directory_is_not_fenced_by_incarnation,
    bytes_of_another_layout_are_lent,
    bytes_are_committed_without_their_digest,
    lost_changes_are_not_told,
    loans_outlive_their_connection,
    removed_chunks_stay_on_the_shelf,
]
