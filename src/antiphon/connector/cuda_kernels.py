"""Gather and scatter as one Triton launch for any number of chunks, over all layers and heads.

The layers of an engine are allocations of their own, so that no tensor spans them: the kernel takes a table of their
addresses. One program moves one head of one layer of one chunk. What it must do is said by ``cuda_paged.PlainMover``.
"""

from __future__ import annotations

import torch
from vllm.triton_utils import tl, triton

from antiphon.connector.cuda_paged import PagedKv

WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    table,
    blocks,
    dense,
    num_layers,
    num_heads,
    blocks_per_chunk,
    stride_block,
    stride_head,
    stride_token,
    tokens,
    words,
    padded_tokens: tl.constexpr,
    padded_words: tl.constexpr,
    is_whole: tl.constexpr,
    is_gather: tl.constexpr,
):
    program = tl.program_id(0)
    layer = program % num_layers
    head = (program // num_layers) % num_heads
    chunk = program // (num_layers * num_heads)
    address = tl.multiple_of(tl.load(table + layer), 16)
    layer_start = address.to(tl.pointer_type(tl.int64)) + head.to(tl.int64) * stride_head
    block_words = tokens * words
    slab_start = dense + ((chunk * num_heads + head) * num_layers + layer).to(tl.int64) * (
        blocks_per_chunk * block_words
    )
    token = tl.arange(0, padded_tokens)[:, None]
    word = tl.arange(0, padded_words)[None, :]
    mask = (token < tokens) & (word < words)
    for place in range(blocks_per_chunk):
        block = tl.load(blocks + chunk * blocks_per_chunk + place).to(tl.int64)
        if block >= 0:
            paged = layer_start + block * stride_block + token * stride_token + word
            packed = slab_start + place * block_words + token * words + word
            if is_gather:
                if is_whole:
                    tl.store(packed, tl.load(paged))
                else:
                    tl.store(packed, tl.load(paged, mask=mask), mask=mask)
            else:
                if is_whole:
                    tl.store(paged, tl.load(packed))
                else:
                    tl.store(paged, tl.load(packed, mask=mask), mask=mask)


class TritonMover:
    """One launch for all layers.

    Args:
        paged: the engine's KV.
    """

    def __init__(self, paged: PagedKv) -> None:
        self._paged = paged
        addresses = [layer.data_ptr() for layer in paged.layers]
        assert all(address % 16 == 0 for address in addresses), "the layers are not aligned"
        self._table = torch.tensor(addresses, dtype=torch.int64, device=paged.device)

    def gather(self, dense: torch.Tensor, blocks: torch.Tensor) -> None:
        """As ``Mover.gather``."""
        self._launch(dense, blocks, is_gather=True)

    def scatter(self, dense: torch.Tensor, blocks: torch.Tensor) -> None:
        """As ``Mover.scatter``."""
        self._launch(dense, blocks, is_gather=False)

    def _launch(self, dense: torch.Tensor, blocks: torch.Tensor, *, is_gather: bool) -> None:
        layout, num_layers = self._paged.layout, self._paged.num_layers
        num_chunks, blocks_per_chunk = blocks.shape
        tokens, words = layout.block_size_tokens, layout.row_words
        padded_tokens, padded_words = triton.next_power_of_2(tokens), triton.next_power_of_2(words)
        _move[(num_chunks * layout.num_heads * num_layers,)](
            self._table,
            blocks,
            dense,
            num_layers,
            layout.num_heads,
            blocks_per_chunk,
            *layout.strides,
            tokens,
            words,
            padded_tokens=padded_tokens,
            padded_words=padded_words,
            is_whole=(tokens, words) == (padded_tokens, padded_words),
            is_gather=is_gather,
            num_warps=WARPS,
        )
