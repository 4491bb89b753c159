"""All readable chunks by pages, while chunks come and go: with the events after the first page, what is true."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import ChunkStored, Reserved
from antiphon.cache.events import Abort, Attach, Clear, Commit, ConnectionId, EngineId, Reserve
from antiphon.cache.listing import ChunkPage
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.states import ChunkState
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest

PAGE = 4096
WRITER = ConnectionId(1)


def key_of(number: int) -> ChunkKey:
    return ChunkKey(bytes([number]) * 32)


class Store:
    """A cache of ``num_chunks`` with one writer."""

    def __init__(self, num_chunks: int = 6) -> None:
        self.cache = Cache(CacheOptions(arena_bytes=num_chunks * PAGE), first_id=1 << 40)
        self.open: list[RegionHandle] = []
        self.cache.step(Attach(WRITER, EngineId("e", "i"), "m", 256, ChunkLayout(1, PAGE), (0,)), 0.0)

    def reserve(self, number: int, tenant: str = "a") -> tuple[RegionHandle, ...]:
        event = Reserve(WRITER, NamespaceDigest(tenant.encode() * 32), tenant, None, (key_of(number),))
        reply = self.cache.step(event, 0.0)[0]
        assert isinstance(reply, Reserved)
        return tuple(grant.region for grant in reply.grants)

    def store(self, number: int, tenant: str = "a") -> None:
        self.cache.step(Commit(WRITER, self.reserve(number, tenant)), 0.0)

    @property
    def readable(self) -> set[tuple[ChunkKey, int]]:
        """Keys, and generations: a chunk that is evicted and stored again is another one."""
        chunks = self.cache._books.index.chunks.values()
        return {(chunk.key, chunk.region.generation) for chunk in chunks if chunk.state is ChunkState.READABLE}


def listed(page: ChunkPage) -> list[ChunkKey]:
    return [key for group in page.groups for key in group.keys]


def test_pages_by_namespace_without_what_is_being_written() -> None:
    made = Store()
    empty = made.cache.chunks_after(0, 2)
    assert (empty.groups, empty.after, empty.next_sequence) == ((), None, 1)
    made.store(1)
    made.store(2, "b")
    made.reserve(3)
    made.store(4)
    first = made.cache.chunks_after(0, 3)
    assert [(group.tenant, group.model, group.keys) for group in first.groups] == [
        ("a", "m", (key_of(1),)),
        ("b", "m", (key_of(2),)),
    ]
    assert first.groups[0].namespace == b"a" * 32
    assert first.next_sequence == 4
    assert first.after is not None
    last = made.cache.chunks_after(first.after, 3)
    assert (listed(last), last.after) == ([key_of(4)], None)
    assert made.cache.chunks_after(0, 4).after is None


STEPS = st.lists(st.tuples(st.sampled_from("sssrxc"), st.integers(0, 9)), max_size=25)


@given(STEPS, st.lists(STEPS, max_size=6), st.integers(1, 4))
def test_pages_and_events_together(
    before: list[tuple[str, int]], during: list[list[tuple[str, int]]], size: int
) -> None:
    made = Store()

    def do(steps: list[tuple[str, int]]) -> None:
        for kind, number in steps:
            if kind == "s":
                made.store(number)
            elif kind == "r":
                made.open += made.reserve(number)
            elif kind == "x" and made.open:
                made.cache.step(Abort(WRITER, (made.open.pop(),)), 0.0)
            elif kind == "c" and number == 0:
                made.cache.step(Clear(), 0.0)

    do(before)
    page = made.cache.chunks_after(0, size)
    since = page.next_sequence
    found = listed(page)
    unchanged = made.readable
    while page.after is not None:
        do(during.pop() if during else [])
        unchanged &= made.readable
        page = made.cache.chunks_after(page.after, size)
        found += listed(page)
    assert all(key in found for key, _ in unchanged)
    held = set(found)
    for event in made.cache.events_since(since, 1_000).events:
        (held.add if isinstance(event, ChunkStored) else held.discard)(event.key)
    assert held == {key for key, _ in made.readable}
