"""Head-major slabs in staging memory, on streams whose order chance decides, against a plain model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch

from antiphon.connector import cuda_copy
from antiphon.connector.copier import Copying, Part
from antiphon.connector.copy import read_bytes, write_bytes
from antiphon.connector.cuda_copy import CudaCopier
from antiphon.connector.cuda_paged import PagedKv, PlainMover
from antiphon.connector.cuda_pinning import Pinning
from antiphon.connector.gate import run_gate
from antiphon.storage.arena import ArenaOwner
from tests.connector.fake_cuda import FakeDevice, FakePinDriver

HEADS, TOKENS, WIDTH, LAYERS = 2, 4, 8, 3
PER_CHUNK = 3
NUM_BLOCKS = 64
CHUNKS_IN_ARENA = 12
PIECE_BYTES = 16384


class Rank:
    """A rank's KV on a fake GPU, and an arena."""

    def __init__(self, seed: int, layout: str = "NHD", fold: int = 1) -> None:
        self.chance = random.Random(seed)
        torch.manual_seed(seed)
        shape = (NUM_BLOCKS * fold, TOKENS, HEADS, WIDTH)
        if layout == "HND":
            shape = (NUM_BLOCKS * fold, HEADS, TOKENS, WIDTH)
        self.tensors = [torch.randint(-9999, 9999, shape, dtype=torch.int32) for _ in range(LAYERS)]
        if layout == "NHD":
            self.tensors = [tensor.permute(0, 2, 1, 3) for tensor in self.tensors]
        self.device = FakeDevice(self.chance)
        self.driver = FakePinDriver()
        self.paged = PagedKv(self.tensors, NUM_BLOCKS)
        self.fold = fold
        self.copier = CudaCopier(
            self.paged, PER_CHUNK, PlainMover(self.paged), self.device, Pinning(self.driver, PIECE_BYTES)
        )
        self.owner = ArenaOwner.create(CHUNKS_IN_ARENA * self.copier.slab_bytes, "fake", "1")
        self.owner.populate(0, self.owner.data_bytes)
        self.copier.arena_mapped(self.owner.mapping)

    def address(self, place: int) -> int:
        return self.owner.mapping.address + place * self.copier.slab_bytes

    def slab(self, block_ids: tuple[int, ...]) -> bytes:
        """``[head][layer][token][element]``, one element after the other."""
        found = bytearray()
        for head in range(HEADS):
            for tensor in self.tensors:
                for block in block_ids:
                    for part in range(self.fold):
                        for token in range(TOKENS):
                            row = tensor[block * self.fold + part, head, token]
                            found += b"".join(int(one).to_bytes(4, "little", signed=True) for one in row)
        return bytes(found)

    def content(self) -> list[bytes]:
        return [tensor.contiguous().numpy().tobytes() for tensor in self.tensors]

    def blocks(self, number: int) -> tuple[int, ...]:
        return tuple(self.chance.sample(range(1, NUM_BLOCKS), number))

    def close(self) -> None:
        self.device.run_all()
        self.owner.close()


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Two chunks at once."""
    fold = request.getfixturevalue("layout")[1] if "layout" in request.fixturenames else 1
    monkeypatch.setattr(cuda_copy, "STAGING_BYTES", 2 * HEADS * LAYERS * PER_CHUNK * TOKENS * WIDTH * 4 * fold)


@pytest.fixture(params=[("NHD", 1), ("HND", 1), ("NHD", 2)], ids=["NHD", "HND", "folded"])
def layout(request: pytest.FixtureRequest) -> tuple[str, int]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def rank(layout: tuple[str, int]) -> Iterator[Rank]:
    made = Rank(1, *layout)
    yield made
    made.close()


def test_a_slab_is_in_the_order_of_the_format(rank: Rank) -> None:
    blocks = (5, 2, 9)
    rank.copier.store(rank.address(0), blocks)
    assert read_bytes(rank.address(0), rank.copier.slab_bytes) == rank.slab(blocks)
    assert rank.copier.expected_slab(blocks) == rank.slab(blocks)


@pytest.mark.parametrize("seed", range(25))
def test_loads_and_stores_in_any_order_of_the_streams(seed: int, layout: tuple[str, int]) -> None:
    """Against a model in which each is done at once: later stores of loaded blocks see what was loaded."""
    rank = Rank(seed, *layout)
    arena: dict[int, bytes] = {}
    for place in range(CHUNKS_IN_ARENA):
        arena[place] = rank.chance.randbytes(rank.copier.slab_bytes)
        write_bytes(rank.address(place), arena[place])
    model = [tensor.clone() for tensor in rank.tensors]
    free = list(range(1, NUM_BLOCKS))
    rank.chance.shuffle(free)
    begun: list[Copying] = []
    loads = [rank.chance.randint(1, 5) for _ in range(2)]
    for number in loads:
        parts = []
        for place in rank.chance.sample(range(6), number):
            skip = rank.chance.randrange(PER_CHUNK)
            blocks = tuple(free.pop() for _ in range(rank.chance.randint(1, PER_CHUNK - skip)))
            parts.append(Part(rank.address(place), blocks, skip))
            fill(model, rank.fold, arena[place], blocks, skip)
        begun.append(rank.copier.begin_load(parts, rank.copier.mark()))
        for _ in range(rank.chance.randrange(4)):
            rank.device.run_some()
    stored: dict[int, tuple[int, ...]] = {}
    for place in range(6, 11):
        stored[place] = tuple(free.pop() for _ in range(PER_CHUNK))
    for first in range(6, 11, 2):
        parts = [Part(rank.address(place), stored[place]) for place in range(first, min(first + 2, 11))]
        begun.append(rank.copier.begin_store(parts, rank.copier.mark()))
    for copying in rank.chance.sample(begun, len(begun)):
        copying.wait()
        assert copying.is_done
    assert all(torch.equal(tensor, one) for tensor, one in zip(rank.tensors, model, strict=True))
    for place in range(CHUNKS_IN_ARENA):
        expected = rank.slab(stored[place]) if place in stored else arena[place]
        assert read_bytes(rank.address(place), rank.copier.slab_bytes) == expected
    rank.close()


def fill(model: list[torch.Tensor], fold: int, slab: bytes, blocks: tuple[int, ...], skip: int) -> None:
    """What a load does to the blocks."""
    words = torch.frombuffer(bytearray(slab), dtype=torch.int32)
    dense = words.view(HEADS, LAYERS, PER_CHUNK, fold, TOKENS, WIDTH)
    for place, block in enumerate(blocks, start=skip):
        for layer, tensor in enumerate(model):
            tensor[block * fold : (block + 1) * fold] = dense[:, layer, place].permute(1, 0, 2, 3)


@pytest.mark.parametrize("seed", range(10))
def test_a_store_follows_the_forward_that_fills_its_blocks(seed: int) -> None:
    rank = Rank(seed)
    blocks = (3, 4, 5)

    def forward() -> None:
        for tensor in rank.tensors:
            tensor[list(blocks)] += 1

    expected = [tensor.clone() for tensor in rank.tensors]
    for tensor in expected:
        tensor[list(blocks)] += 1
    rank.device.run(rank.device.compute, forward)
    copying = rank.copier.begin_store([Part(rank.address(0), blocks)], rank.copier.mark())
    copying.wait()
    rank.device.run_all()
    assert all(torch.equal(tensor, one) for tensor, one in zip(rank.tensors, expected, strict=True))
    assert read_bytes(rank.address(0), rank.copier.slab_bytes) == rank.slab(blocks)
    rank.close()


@pytest.mark.parametrize("seed", range(10))
def test_a_load_follows_the_compute_that_was_launched_before(seed: int) -> None:
    """A step in flight still writes to a block that was freed."""
    rank = Rank(seed)
    slab = rank.chance.randbytes(rank.copier.slab_bytes)
    write_bytes(rank.address(2), slab)
    for tensor in rank.tensors:
        rank.device.run(rank.device.compute, partial(tensor[7].fill_, 1))
    rank.copier.begin_load([Part(rank.address(2), (7, 8, 9))], rank.copier.mark()).wait()
    assert rank.slab((7, 8, 9)) == slab
    rank.close()


@pytest.mark.parametrize("seed", range(10))
def test_what_is_launched_after_hold_compute_waits_for_the_gather(seed: int) -> None:
    rank = Rank(seed)
    rank.copier.hold_compute()  # nothing was begun
    expected = rank.slab((1, 2, 3))
    copying = rank.copier.begin_store([Part(rank.address(0), (1, 2, 3))], rank.copier.mark())
    rank.copier.hold_compute()
    for tensor in rank.tensors:
        rank.device.run(rank.device.compute, partial(tensor.fill_, 0))
    copying.wait()
    assert read_bytes(rank.address(0), rank.copier.slab_bytes) == expected
    rank.close()


def test_only_granted_slabs_are_written(rank: Rank) -> None:
    before = bytes(rank.copier.slab_bytes)
    head_bytes = rank.copier.slab_bytes // HEADS
    rank.copier.begin_store([Part(rank.address(0), (1, 2, 3), 0, (1,))], rank.copier.mark()).wait()
    found = read_bytes(rank.address(0), rank.copier.slab_bytes)
    assert found[:head_bytes] == before[:head_bytes]
    assert found[head_bytes:] == rank.slab((1, 2, 3))[head_bytes:]


def test_neighbours_cross_the_bus_in_one_copy_except_where_pieces_meet(rank: Rank) -> None:
    size = rank.copier.slab_bytes
    rank.device.copied_bytes.clear()
    parts = [Part(rank.address(place), rank.blocks(PER_CHUNK)) for place in (0, 1)]
    rank.copier.begin_load(parts, None).wait()
    assert rank.device.copied_bytes == [2 * size]
    rank.device.copied_bytes.clear()
    across = next(place for place in range(CHUNKS_IN_ARENA) if place * size // PIECE_BYTES != ((place + 1) * size - 1) // PIECE_BYTES)  # fmt: skip  # noqa: E501
    rank.copier.begin_load([Part(rank.address(across), rank.blocks(PER_CHUNK))], None).wait()
    assert sum(rank.device.copied_bytes) == size
    assert len(rank.device.copied_bytes) > 1
    assert all(address in rank.driver.registered for _, address in rank.driver.calls)


def test_blocks_that_do_not_exist_are_refused(rank: Rank) -> None:
    before = rank.content()
    with pytest.raises(AssertionError):
        rank.copier.begin_load([Part(rank.address(0), (1, NUM_BLOCKS))], None)
    with pytest.raises(AssertionError):
        rank.copier.begin_load([Part(rank.address(0), (1, 2, 3), 1)], None)
    rank.device.run_all()
    assert rank.content() == before


@pytest.mark.parametrize("fails_after", range(6))
def test_what_was_begun_has_ended_before_a_failure_is_told(fails_after: int) -> None:
    rank = Rank(fails_after)
    rank.device.fails_after = fails_after
    with pytest.raises(RuntimeError, match="a launch failed"):
        rank.copier.begin_load([Part(rank.address(place), rank.blocks(3)) for place in range(6)], rank.copier.mark())
    rank.device.fails_after = None
    busy = [stream.work for stream in rank.device.streams[1:3]]
    assert not any(busy)
    rank.close()


def test_the_gate_passes_and_gives_the_blocks_their_bytes_back(rank: Rank) -> None:
    before = rank.content()
    result = run_gate(rank.copier, None, 0)
    assert result.has_passed, result.detail
    assert rank.content() == before


def test_the_gate_sees_slabs_in_another_order(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that are each other's inverse, and still not the format: another engine would read nonsense."""
    gather, scatter = PlainMover.gather, PlainMover.scatter

    def backwards(dense: torch.Tensor) -> torch.Tensor:
        return dense.flip(3)

    def wrong_gather(self: PlainMover, dense: torch.Tensor, blocks: torch.Tensor) -> None:
        gather(self, dense, blocks)
        dense.copy_(backwards(dense))

    def wrong_scatter(self: PlainMover, dense: torch.Tensor, blocks: torch.Tensor) -> None:
        scatter(self, backwards(dense), blocks)

    monkeypatch.setattr(PlainMover, "gather", wrong_gather)
    monkeypatch.setattr(PlainMover, "scatter", wrong_scatter)
    before = rank.content()
    result = run_gate(rank.copier, None, 0)
    assert not result.has_passed
    assert "is not [kv_head][layer][token][k|v]" in result.detail
    assert rank.content() == before


def test_closing_gives_the_arena_back_also_before_the_engine_has_started() -> None:
    rank = Rank(1)
    rank.copier.store(rank.address(0), (1, 2, 3))
    (arena,) = rank.copier.pinning._arenas.values()
    rank.close()
    assert rank.driver.registered
    rank.copier.close()
    assert arena.wait_unmapped(10)
    assert not rank.driver.registered
