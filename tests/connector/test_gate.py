"""The gate passes where copies are right, fails where they are not, and never stands on bytes that others may write."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from antiphon.client.options import ClientOptions
from antiphon.connector.copy import BlockCopier, layer_blocks
from antiphon.connector.gate import TENANT, run_gate
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import CallTimeout
from antiphon.protocol import cache as calls
from tests.connector.blocks import BLOCK_BYTES, CHUNK_SIZE, SLAB_BYTES
from tests.connector.fakes import FakeClock, FakeServer, FakeSession, FakeTensor

PER_CHUNK = 2
NUM_BLOCKS = 2 * PER_CHUNK + 1


class Rank:
    """The blocks of one worker."""

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        chance = random.Random(2)
        self.tensors = [FakeTensor(num_blocks, BLOCK_BYTES) for _ in range(2)]
        for tensor in self.tensors:
            tensor.view[:] = chance.randbytes(len(tensor.view))
        self.copier = BlockCopier(layer_blocks(self.tensors), PER_CHUNK)
        self.before = self.content()

    def content(self) -> list[bytes]:
        return [bytes(tensor.view) for tensor in self.tensors]


servers: list[FakeServer] = []


@pytest.fixture(autouse=True)
def _no_arena_is_left() -> Iterator[None]:
    yield
    while servers:
        servers.pop().close()


def new_session(num_slabs: int = 1, num_chunks: int = 4, slab: int = 0) -> FakeSession:
    layout = ChunkLayout(num_slabs, SLAB_BYTES, "opaque")
    server = FakeServer(layout, CHUNK_SIZE, num_chunks, FakeClock())
    servers.append(server)
    options = ClientOptions(
        host="", port=1, role=f"worker-{slab}", engine="engine", incarnation="1", model="model", layout=layout,
        chunk_size_tokens=CHUNK_SIZE, slabs=(slab,), needs_arena=True,
    )  # fmt: skip
    return FakeSession(server, options)


def assert_clean(session: FakeSession) -> None:
    assert not session.server.cache.leases()
    assert session.server.reserved_bytes == 0
    assert sum(session.server.cache.statistics().num_chunks.values()) == 0, "the gate's chunk is left"


def test_it_goes_through_the_server() -> None:
    rank, session = Rank(), new_session()
    result = run_gate(rank.copier, session, 0)  # type: ignore[arg-type]
    assert result.has_passed
    assert result.detail == "through fake: 2 blocks of 2 layers came back bit for bit"
    assert session.server.num_calls == {"Reserve": 1, "Commit": 1, "Lookup": 1, "Release": 1, "Clear": 1}
    assert rank.content() == rank.before
    assert_clean(session)


@pytest.mark.parametrize("slab", [0, 1])
def test_a_rank_proves_its_own_slab(slab: int) -> None:
    rank, session = Rank(), new_session(num_slabs=2, slab=slab)
    result = run_gate(rank.copier, session, slab)  # type: ignore[arg-type]
    assert result.has_passed
    assert result.detail.startswith("through fake")
    assert rank.content() == rank.before
    assert_clean(session)


def test_it_runs_without_a_server() -> None:
    rank = Rank()
    result = run_gate(rank.copier, None, 0)
    assert result.has_passed
    assert result.detail == "without a server: 2 blocks of 2 layers came back bit for bit"
    assert rank.content() == rank.before


def test_too_few_blocks_prove_nothing() -> None:
    rank = Rank(NUM_BLOCKS - 1)
    result = run_gate(rank.copier, None, 0)
    assert not result.has_passed
    assert result.detail == "4 KV blocks are too few to prove a copy of 2"
    assert rank.content() == rank.before


class ShiftedLoad(BlockCopier):
    def load(self, slab_address: int, skip_blocks: int, block_ids: Sequence[int]) -> None:
        super().load(slab_address, skip_blocks, tuple(reversed(block_ids)))


class HalfStore(BlockCopier):
    def store(self, slab_address: int, block_ids: Sequence[int]) -> None:
        super().store(slab_address, (block_ids[0],) * len(block_ids))


class NoLoad(BlockCopier):
    def load(self, slab_address: int, skip_blocks: int, block_ids: Sequence[int]) -> None:
        pass


@pytest.mark.parametrize("has_server", [True, False])
@pytest.mark.parametrize("kind", [ShiftedLoad, HalfStore, NoLoad])
def test_wrong_copies_fail(kind: type[BlockCopier], has_server: bool) -> None:
    rank = Rank()
    session = new_session() if has_server else None
    result = run_gate(kind(rank.copier.layers, PER_CHUNK), session, 0)  # type: ignore[arg-type]
    assert not result.has_passed
    assert "of which it is a copy" in result.detail
    assert rank.content() == rank.before


class LoseTheWayBack(BlockCopier):
    """The second load, out of the leased region, does nothing."""

    num_loads = 0

    def load(self, slab_address: int, skip_blocks: int, block_ids: Sequence[int]) -> None:
        self.num_loads += 1
        if self.num_loads == 1:
            super().load(slab_address, skip_blocks, block_ids)


def test_what_was_loaded_before_the_commit_does_not_stand_for_what_was_found() -> None:
    rank, session = Rank(), new_session()
    result = run_gate(LoseTheWayBack(rank.copier.layers, PER_CHUNK), session, 0)  # type: ignore[arg-type]
    assert not result.has_passed


def test_a_full_server_is_gone_round() -> None:
    rank, session = Rank(), new_session(num_chunks=1)
    keys, namespace = b"k" * 32, b"n" * 32
    reserved = session.call(calls.Reserve(namespace, "other", None, keys))
    assert isinstance(reserved, calls.Reserved)
    assert run_gate(rank.copier, session, 0).detail.startswith("without a server")  # type: ignore[arg-type]
    assert rank.content() == rank.before


@pytest.mark.parametrize("kind", [calls.Reserve, calls.Commit, calls.Lookup, calls.Release, calls.Clear])
def test_a_server_that_fails_on_the_way_does_not_turn_reuse_off(
    monkeypatch: pytest.MonkeyPatch, kind: type[calls.Body]
) -> None:
    rank, session = Rank(), new_session()
    answer = session.call

    def call(body: calls.Body, timeout_s: float | None = None) -> calls.Answered:
        if isinstance(body, kind):
            raise CallTimeout("the cache server did not answer")
        return answer(body, timeout_s)

    monkeypatch.setattr(session, "call", call)
    result = run_gate(rank.copier, session, 0)  # type: ignore[arg-type]
    assert result.has_passed, result.detail
    assert result.detail.startswith("without a server")
    assert rank.content() == rank.before


@pytest.mark.parametrize("kind", [calls.Commit, calls.Lookup, calls.Clear])
@pytest.mark.parametrize("num_slabs", [1, 2])
def test_a_server_that_fails_on_the_way_is_left_without_reservation_and_lease(
    monkeypatch: pytest.MonkeyPatch, kind: type[calls.Body], num_slabs: int
) -> None:
    rank, session = Rank(), new_session(num_slabs=num_slabs)
    answer, num_failed = session.call, 0

    def call(body: calls.Body, timeout_s: float | None = None) -> calls.Answered:
        nonlocal num_failed
        if isinstance(body, kind) and not num_failed:
            num_failed += 1
            raise CallTimeout("the cache server did not answer")
        return answer(body, timeout_s)

    monkeypatch.setattr(session, "call", call)
    assert run_gate(rank.copier, session, 0).has_passed  # type: ignore[arg-type]
    assert session.server.reserved_bytes == 0
    assert not session.server.cache.leases()


@pytest.mark.parametrize("num_slabs", [1, 2])
def test_a_bug_in_a_copy_leaves_no_reservation(num_slabs: int) -> None:
    class Broken(BlockCopier):
        def store(self, slab_address: int, block_ids: Sequence[int]) -> None:
            raise RuntimeError("a bug")

    rank, session = Rank(), new_session(num_slabs=num_slabs)
    with pytest.raises(RuntimeError):
        run_gate(Broken(rank.copier.layers, PER_CHUNK), session, 0)  # type: ignore[arg-type]
    assert session.server.reserved_bytes == 0
    assert rank.content() == rank.before


@pytest.mark.parametrize("after", [calls.Reserve, calls.Commit])
@pytest.mark.parametrize("num_slabs", [1, 2])
def test_the_gate_of_another_engine_may_clear_and_overwrite(
    monkeypatch: pytest.MonkeyPatch, after: type[calls.Body], num_slabs: int
) -> None:
    """All gates share a tenant. What is cleared in between is not read: by then it may be somebody else's."""
    rank, session = Rank(), new_session(num_slabs=num_slabs)
    answer = session.call

    def overwrite() -> None:
        session.server.answer(session.connection, calls.Clear(tenant=TENANT))
        if session.server.reserved_bytes == 0:
            view = session.server.owner.mapping.view(0, session.server.owner.mapping.data_bytes)
            view[:] = random.Random(3).randbytes(len(view))

    def call(body: calls.Body, timeout_s: float | None = None) -> calls.Answered:
        found = answer(body, timeout_s)
        if isinstance(body, after):
            overwrite()
        return found

    monkeypatch.setattr(session, "call", call)
    result = run_gate(rank.copier, session, 0)  # type: ignore[arg-type]
    assert result.has_passed, result.detail
    assert rank.content() == rank.before
    assert_clean(session)


def test_blocks_get_their_bytes_back_after_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank()
    fail: Callable[..., None] = lambda *_arguments: (_ for _ in ()).throw(RuntimeError("a bug"))  # noqa: E731
    monkeypatch.setattr(rank.copier, "load", fail)
    with pytest.raises(RuntimeError):
        run_gate(rank.copier, None, 0)
    assert rank.content() == rank.before
