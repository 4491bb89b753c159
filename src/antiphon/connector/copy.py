"""Copies between an engine's KV blocks and the arena, on a CPU host: whole blocks, as opaque bytes.

A CPU engine packs the K and V of a block for its instruction set, so that nothing smaller than a block has a meaning
here. A chunk's slab is ``[layer][block of the chunk][bytes of a block]``. Copies run without the GIL.

It does not know requests, keys or leases; who calls it makes sure that nobody writes what it reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.connector.copier import DONE, Copying, Mark, Part
from antiphon.storage.arena import ArenaMapping, copy_bytes


class KvTensor(Protocol):
    """What is asked of a layer's KV tensor (``torch.Tensor``), blocks outermost."""

    @property
    def shape(self) -> Sequence[int]:
        """Elements by dimension; the first is the number of blocks."""

    def data_ptr(self) -> int:
        """Address of the first element."""

    def stride(self, dim: int) -> int:
        """Elements from one index of ``dim`` to the next."""

    def element_size(self) -> int:
        """Bytes of an element."""

    def is_contiguous(self) -> bool:
        """Whether the elements lie next to each other in order."""


@dataclass(frozen=True, slots=True)
class LayerBlocks:
    """Where a layer's blocks are: block ``i`` is at ``address + i * block_bytes``."""

    address: int
    block_bytes: int
    num_blocks: int


def layer_blocks(tensors: Sequence[KvTensor]) -> tuple[LayerBlocks, ...]:
    """The layers of an engine, in the order given.

    Raises:
        ValueError: a tensor's blocks are not whole runs of bytes next to each other.
    """
    layers = []
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(f"a KV tensor of shape {tuple(tensor.shape)} is not contiguous")
        block_bytes = tensor.stride(0) * tensor.element_size()
        layers.append(LayerBlocks(tensor.data_ptr(), block_bytes, int(tensor.shape[0])))
    if not layers:
        raise ValueError("the engine has no KV tensors")
    if len({layer.num_blocks for layer in layers}) > 1:
        raise ValueError("the layers have different numbers of blocks")
    return tuple(layers)


def read_bytes(address: int, num_bytes: int) -> bytes:
    """The bytes at an address of this process."""
    return ctypes.string_at(address, num_bytes)


def write_bytes(address: int, data: bytes) -> None:
    """Writes ``data`` to an address of this process."""
    ctypes.memmove(address, data, len(data))


class BlockCopier:
    """Copies chunks of one engine.

    Args:
        layers: the engine's layers.
        blocks_per_chunk: blocks of one chunk.
    """

    num_chunks_at_once = 1
    """Who must wait for a store waits for one chunk."""
    num_batches_in_step = 0

    def __init__(self, layers: tuple[LayerBlocks, ...], blocks_per_chunk: int) -> None:
        self.layers = layers
        self.blocks_per_chunk = blocks_per_chunk
        self.slab_bytes = sum(layer.block_bytes for layer in layers) * blocks_per_chunk

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine."""
        return self.layers[0].num_blocks

    @property
    def block_bytes(self) -> Sequence[int]:
        """Bytes of a block, by layer."""
        return [layer.block_bytes for layer in self.layers]

    def can_begin_in_step(self, parts: Sequence[Part]) -> bool:
        """The copy itself would be waited for."""
        return False

    def prepare(self, parts: Sequence[Part]) -> None:
        """Any memory will do."""

    def mark(self) -> Mark | None:
        """A CPU engine's compute is done when it returns."""
        return None

    def begin_load(self, parts: Iterable[Part], after: Mark | None) -> Copying:
        """Done when it returns."""
        for part in parts:
            self.load(part.address, part.skip_blocks, part.block_ids)
        return DONE

    def begin_store(self, parts: Iterable[Part], after: Mark | None) -> Copying:
        """Done when it returns."""
        for part in parts:
            self.store(part.address, part.block_ids)
        return DONE

    def hold_compute(self) -> None:
        """Nothing is begun that is not done."""

    def arena_mapped(self, arena: ArenaMapping) -> None:
        """Any memory will do."""

    def engine_started(self) -> None:
        """Nothing runs in the background."""

    def close(self) -> None:
        """Nothing runs in the background."""

    def expected_slab(self, block_ids: Sequence[int]) -> bytes | None:
        """The bytes are opaque."""
        return None

    def read_block(self, block_id: int) -> list[bytes]:
        """The bytes of a block, by layer."""
        return [read_bytes(layer.address + block_id * layer.block_bytes, layer.block_bytes) for layer in self.layers]

    def write_block(self, block_id: int, content: Sequence[bytes]) -> None:
        """Overwrites a block."""
        for layer, data in zip(self.layers, content, strict=True):
            write_bytes(layer.address + block_id * layer.block_bytes, data)

    def store(self, slab_address: int, block_ids: Sequence[int]) -> None:
        """Copies a whole chunk, ``blocks_per_chunk`` block ids, to a slab."""
        assert len(block_ids) == self.blocks_per_chunk, block_ids
        for layer, slab, first, number, begin in self._runs(slab_address, 0, block_ids):
            copy_bytes(slab + begin, layer.address + first * layer.block_bytes, number * layer.block_bytes)

    def load(self, slab_address: int, skip_blocks: int, block_ids: Sequence[int]) -> None:
        """Copies the blocks of a slab from ``skip_blocks`` on into ``block_ids``, as many as there are ids."""
        assert skip_blocks + len(block_ids) <= self.blocks_per_chunk, (skip_blocks, block_ids)
        for layer, slab, first, number, begin in self._runs(slab_address, skip_blocks, block_ids):
            copy_bytes(layer.address + first * layer.block_bytes, slab + begin, number * layer.block_bytes)

    def _runs(
        self, slab_address: int, skip_blocks: int, block_ids: Sequence[int]
    ) -> list[tuple[LayerBlocks, int, int, int, int]]:
        """Runs of neighbours: layer, address of its part of the slab, first block id, number of blocks, byte offset."""
        neighbours: list[tuple[int, int, int]] = []  # (first block id, number, place in the chunk)
        for place, block_id in enumerate(block_ids, start=skip_blocks):
            assert 0 <= block_id < self.num_blocks, block_id
            if neighbours and neighbours[-1][0] + neighbours[-1][1] == block_id:
                first, number, begin = neighbours[-1]
                neighbours[-1] = (first, number + 1, begin)
            else:
                neighbours.append((block_id, 1, place))
        runs = []
        slab = slab_address
        for layer in self.layers:
            runs += [(layer, slab, first, number, place * layer.block_bytes) for first, number, place in neighbours]
            slab += layer.block_bytes * self.blocks_per_chunk
        return runs
