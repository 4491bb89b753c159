"""Gathers chunks out of the paged KV of all layers, and scatters them into it: plain PyTorch, the reference.

What a Triton kernel does in one launch (``cuda_kernels``) is done here layer by layer. It works on any device, so that
it is held against a plain model on a CPU, and the kernel against it on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from antiphon.connector.cuda_layout import PagedLayout, common_layout, paged_layout


class Mover(Protocol):
    """Moves chunks between the engine's blocks and dense memory, on the current stream."""

    def gather(self, dense: torch.Tensor, blocks: torch.Tensor) -> None:
        """Fills ``dense[chunk, head, layer, token, word]`` from the blocks of each chunk."""

    def scatter(self, dense: torch.Tensor, blocks: torch.Tensor) -> None:
        """Fills the blocks of each chunk from ``dense``; leaves out those that are -1."""


class PagedKv:
    """The KV of one rank, as words.

    Args:
        tensors: a layer each, in the order of the layers, as vLLM registers them.
        table_blocks: blocks of vLLM's block table.

    Raises:
        LayoutMismatch: the tensors are not understood, or not alike.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], table_blocks: int | None = None) -> None:
        assert tensors, "the engine has no KV tensors"
        self.layout: PagedLayout = common_layout(
            paged_layout(tensor.shape, tensor.stride(), tensor.element_size(), table_blocks) for tensor in tensors
        )
        self.layers = [self._words(tensor) for tensor in tensors]
        self.device = tensors[0].device
        self.dtype = f"{tensors[0].dtype}".removeprefix("torch.")

    def _words(self, tensor: torch.Tensor) -> torch.Tensor:
        """``[blocks, heads, tokens, words]``, over the same memory."""
        four = tensor if tensor.dim() == 4 else tensor.unsqueeze(1)
        return four.view(torch.int64)

    @property
    def num_layers(self) -> int:
        """Layers with KV."""
        return len(self.layers)

    def slab_words(self, chunk_size_tokens: int) -> int:
        """Words of one head's slab of a chunk."""
        return self.num_layers * chunk_size_tokens * self.layout.row_words

    def dense(self, memory: torch.Tensor, num_chunks: int, chunk_size_tokens: int) -> torch.Tensor:
        """The first chunks of staging memory (int64) as ``[chunk, head, layer, token, word]``."""
        layout = self.layout
        shape = (num_chunks, layout.num_heads, self.num_layers, chunk_size_tokens, layout.row_words)
        num_words = num_chunks * layout.num_heads * self.slab_words(chunk_size_tokens)
        return memory[:num_words].view(shape)

    def read_block(self, block_id: int) -> list[bytes]:
        """The bytes of a block of the block table, by layer, in the order ``[block, head, token, element]``."""
        first, fold = block_id * self.layout.blocks_per_table_block, self.layout.blocks_per_table_block
        return [layer[first : first + fold].cpu().contiguous().numpy().tobytes() for layer in self.layers]

    def write_block(self, block_id: int, content: Sequence[bytes]) -> None:
        """Overwrites a block, as ``read_block`` reads it."""
        first, fold = block_id * self.layout.blocks_per_table_block, self.layout.blocks_per_table_block
        for layer, data in zip(self.layers, content, strict=True):
            target = layer[first : first + fold]
            target.copy_(torch.frombuffer(bytearray(data), dtype=torch.int64).view(target.shape))

    def expected_slab(self, blocks: Sequence[int]) -> bytes:
        """The bytes of a chunk of these tensor blocks, by indexing: head by head, layer by layer."""
        parts = []
        on_cpu = [layer[list(blocks)].cpu() for layer in self.layers]
        for head in range(self.layout.num_heads):
            parts += [layer[:, head].contiguous().numpy().tobytes() for layer in on_cpu]
        return b"".join(parts)


class PlainMover:
    """One indexed copy a layer."""

    def __init__(self, paged: PagedKv) -> None:
        self._paged = paged

    def gather(self, dense: torch.Tensor, blocks: torch.Tensor) -> None:
        """As ``Mover.gather``."""
        view = self._by_block(dense, blocks)
        for number, layer in enumerate(self._paged.layers):
            found = layer[blocks.long().flatten()].view(*blocks.shape, *layer.shape[1:])
            view[:, :, number].copy_(found.permute(0, 2, 1, 3, 4))

    def scatter(self, dense: torch.Tensor, blocks: torch.Tensor) -> None:
        """As ``Mover.scatter``."""
        view = self._by_block(dense, blocks)
        chunk, place = (blocks >= 0).nonzero(as_tuple=True)
        ids = blocks.long()[chunk, place]
        for number, layer in enumerate(self._paged.layers):
            layer[ids] = view[chunk, :, number, place]

    def _by_block(self, dense: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """``[chunk, head, layer, block, token, word]``."""
        assert blocks.shape[0] == dense.shape[0], (blocks.shape, dense.shape)
        return dense.view(*dense.shape[:3], blocks.shape[1], self._paged.layout.block_size_tokens, dense.shape[4])
