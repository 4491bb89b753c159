"""Whole blocks, layer by layer, in the order of the chunk; neighbours in one copy."""

from __future__ import annotations

import ctypes
import random

import pytest

from antiphon.connector import copy
from antiphon.connector.copy import BlockCopier, layer_blocks
from tests.connector.fakes import FakeTensor

NUM_BLOCKS = 12
BLOCK_BYTES = (32, 48)
PER_CHUNK = 3


@pytest.fixture
def tensors() -> list[FakeTensor]:
    chance = random.Random(1)
    made = [FakeTensor(NUM_BLOCKS, size) for size in BLOCK_BYTES]
    for tensor in made:
        tensor.view[:] = chance.randbytes(len(tensor.view))
    return made


def slab_of(copier: BlockCopier) -> tuple[ctypes.Array[ctypes.c_ubyte], int]:
    """A slab with a guard of eight bytes on each side, and its address."""
    memory = (ctypes.c_ubyte * (copier.slab_bytes + 16))()
    return memory, ctypes.addressof(memory) + 8


@pytest.mark.parametrize("block_ids", [(4, 5, 6), (6, 5, 4), (1, 9, 10), (11, 1, 2), (7, 2, 8)])
def test_a_chunk_goes_out_and_comes_back(tensors: list[FakeTensor], block_ids: tuple[int, ...]) -> None:
    copier = BlockCopier(layer_blocks(tensors), PER_CHUNK)
    memory, address = slab_of(copier)
    copier.store(address, block_ids)
    expected = b"".join(bytes(tensor.block(block)) for tensor in tensors for block in block_ids)
    assert bytes(memory) == bytes(8) + expected + bytes(8)

    targets = (3, 0, 11) if 0 not in block_ids else (3, 10, 11)
    others = {block: [bytes(t.block(block)) for t in tensors] for block in range(NUM_BLOCKS) if block not in targets}
    wanted = [[bytes(tensor.block(block)) for tensor in tensors] for block in block_ids]
    copier.load(address, 0, targets)
    assert [[bytes(tensor.block(block)) for tensor in tensors] for block in targets] == wanted
    assert all([bytes(tensor.block(block)) for tensor in tensors] == was for block, was in others.items())


@pytest.mark.parametrize(("skip", "number"), [(0, 1), (1, 1), (2, 1), (1, 2), (0, 2), (3, 0)])
def test_a_part_of_a_chunk_is_loaded(tensors: list[FakeTensor], skip: int, number: int) -> None:
    copier = BlockCopier(layer_blocks(tensors), PER_CHUNK)
    _memory, address = slab_of(copier)
    source = (4, 5, 9)
    copier.store(address, source)
    targets = (7, 1)[:number]
    before = [bytes(tensor.view) for tensor in tensors]
    copier.load(address, skip, targets)
    for tensor, was in zip(tensors, before, strict=True):
        for place, target in enumerate(targets, start=skip):
            assert tensor.block(target) == was[source[place] * tensor.block_bytes :][: tensor.block_bytes]
        untouched = [block for block in range(NUM_BLOCKS) if block not in targets]
        assert all(tensor.block(b) == was[b * tensor.block_bytes :][: tensor.block_bytes] for b in untouched)


def test_neighbours_are_one_copy(tensors: list[FakeTensor], monkeypatch: pytest.MonkeyPatch) -> None:
    copier = BlockCopier(layer_blocks(tensors), PER_CHUNK)
    _memory, address = slab_of(copier)
    sizes: list[int] = []
    monkeypatch.setattr(copy, "copy_bytes", lambda _to, _from, num_bytes: sizes.append(num_bytes))
    copier.store(address, (4, 5, 6))
    assert sizes == [PER_CHUNK * size for size in BLOCK_BYTES]
    sizes.clear()
    copier.store(address, (4, 6, 7))
    assert sizes == [number * size for size in BLOCK_BYTES for number in (1, 2)]


def test_blocks_that_do_not_exist_are_refused(tensors: list[FakeTensor]) -> None:
    copier = BlockCopier(layer_blocks(tensors), PER_CHUNK)
    memory, address = slab_of(copier)
    before = [bytes(tensor.view) for tensor in tensors]
    for block_ids in ((1, 2, NUM_BLOCKS), (-1, 2, 3), (1, 2)):
        with pytest.raises(AssertionError):
            copier.store(address, block_ids)
    for skip, block_ids in ((0, (1, 2, 3, 4)), (2, (1, 2)), (0, (NUM_BLOCKS,))):
        with pytest.raises(AssertionError):
            copier.load(address, skip, block_ids)
    assert bytes(memory) == bytes(len(memory))
    assert [bytes(tensor.view) for tensor in tensors] == before


def test_tensors_that_cannot_be_copied_as_blocks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no KV tensors"):
        layer_blocks([])
    with pytest.raises(ValueError, match="different numbers of blocks"):
        layer_blocks([FakeTensor(4, 32), FakeTensor(5, 32)])
    strided = FakeTensor(4, 32)
    monkeypatch.setattr(strided, "is_contiguous", lambda: False)
    with pytest.raises(ValueError, match=r"shape \(4, 32\) is not contiguous"):
        layer_blocks([FakeTensor(4, 32), strided])
