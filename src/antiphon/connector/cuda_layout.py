"""How a GPU engine lays its KV blocks out, and what of it lies where in a stored slab. Arithmetic only, no torch.

A layer's KV is a tensor ``[blocks, heads, tokens, elements]``, where the elements of a token and head are its K and
then its V (one latent vector with MLA). Its strides are the engine's business: heads outside tokens (``HND``) or inside
(``NHD``), blocks of all layers in one allocation or not. A stored chunk is ``[head][layer][token][element]`` always.

Always true: a layout that is not one of the known is refused, as copies of it could not be told to be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from antiphon.core.errors import LayoutMismatch

WORD_BYTES = 8
"""Copies move words: a row, and every stride, is a whole number of them."""


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """The tensors of all layers, which are alike but for their addresses. Strides are in words.

    Args:
        name: ``HND`` or ``NHD``.
        num_blocks: blocks as the tensor counts them.
        num_heads: KV heads of this rank.
        block_size_tokens: tokens of such a block.
        row_words: words of one token and head.
        strides: from block to block, head to head, token to token.
        blocks_per_table_block: blocks of the tensor for one block of vLLM's block table.
    """

    name: str
    num_blocks: int
    num_heads: int
    block_size_tokens: int
    row_words: int
    strides: tuple[int, int, int]
    blocks_per_table_block: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of vLLM's block table, in one layer."""
        tokens = self.block_size_tokens * self.blocks_per_table_block
        return self.num_heads * tokens * self.row_words * WORD_BYTES

    def fingerprint(self, dtype: str, num_layers: int) -> str:
        """For people: what the copies were made for."""
        shape = f"{num_layers}x[{self.num_blocks},{self.num_heads},{self.block_size_tokens},{self.row_words}w]"
        return f"cuda {self.name} {shape} {dtype} strides {self.strides}"


def paged_layout(
    shape: Sequence[int], strides: Sequence[int], element_bytes: int, table_blocks: int | None = None
) -> PagedLayout:
    """The layout of one layer's tensor.

    Args:
        shape: ``[blocks, heads, tokens, elements]``; ``[blocks, tokens, elements]`` for one head.
        strides: in elements.
        element_bytes: bytes of an element.
        table_blocks: blocks of vLLM's block table, where the tensor may have a multiple of them.

    Raises:
        LayoutMismatch: it is none of the known layouts.
    """
    shown = f"a KV tensor of shape {tuple(shape)} and strides {tuple(strides)}"
    if len(shape) == 3:
        shape = (shape[0], 1, *shape[1:])
        strides = (strides[0], shape[2] * strides[1], *strides[1:])
    if len(shape) != 4 or min(shape) < 1:
        raise LayoutMismatch(f"{shown} is not [blocks, heads, tokens, elements]")
    blocks, heads, tokens, elements = (int(size) for size in shape)
    if strides[3] != 1:
        raise LayoutMismatch(f"{shown} does not keep the elements of a token and head together")
    words = [int(stride) * element_bytes for stride in (*strides[:3], elements)]
    if any(stride % WORD_BYTES for stride in words):
        raise LayoutMismatch(f"{shown} is not made of whole words of {WORD_BYTES} bytes")
    block, head, token, row = (stride // WORD_BYTES for stride in words)
    if (head, token) == (tokens * row, row) or (heads == 1 and token == row):
        name = "HND"
    elif (head, token) == (row, heads * row):
        name = "NHD"
    else:
        raise LayoutMismatch(f"{shown} is neither HND nor NHD")
    if block < heads * tokens * row:
        raise LayoutMismatch(f"{shown} has blocks that overlap")
    fold, rest = divmod(blocks, table_blocks or blocks)
    if rest or fold < 1:
        raise LayoutMismatch(f"{shown} does not have a multiple of {table_blocks} blocks")
    return PagedLayout(name, blocks, heads, tokens, row, (block, head, token), fold)


def common_layout(layouts: Iterable[PagedLayout]) -> PagedLayout:
    """The layout that all layers have.

    Raises:
        LayoutMismatch: there is none.
    """
    found = set(layouts)
    if len(found) != 1:
        raise LayoutMismatch(f"the layers have {len(found)} layouts, where one is understood")
    return found.pop()


# ---- plans of copies -------------------------------------------------------------------------------------------------


def tensor_blocks(block_ids: Sequence[int], skip_blocks: int, blocks_per_chunk: int, fold: int) -> list[int]:
    """The tensor's blocks of a whole chunk, -1 for those that are left out.

    Args:
        block_ids: of vLLM's block table, from ``skip_blocks`` on.
        blocks_per_chunk: of vLLM's block table.
        fold: ``blocks_per_table_block``.
    """
    missing = blocks_per_chunk - skip_blocks - len(block_ids)
    assert missing >= 0, (block_ids, skip_blocks, blocks_per_chunk)
    table = [*(-1 for _ in range(skip_blocks)), *block_ids, *(-1 for _ in range(missing))]
    return [block * fold + place if block >= 0 else -1 for block in table for place in range(fold)]


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes next to each other in the arena and in staging memory alike.

    Args:
        place: byte offset in staging memory.
        address: in the arena.
    """

    place: int
    address: int
    num_bytes: int


def joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Spans, neighbours in both places made one: few large copies."""
    last: Span | None = None
    for span in spans:
        if (
            last is not None
            and last.place + last.num_bytes == span.place
            and last.address + last.num_bytes == span.address
        ):
            last = Span(last.place, last.address, last.num_bytes + span.num_bytes)
            continue
        if last is not None:
            yield last
        last = span
    if last is not None:
        yield last


def cut(span: Span, origin: int, piece_bytes: int) -> Iterator[Span]:
    """A span cut where pieces of memory that begin at ``origin`` meet: a copy must not lie across two of them."""
    place, address, left = span.place, span.address, span.num_bytes
    while left:
        number = min(left, piece_bytes - (address - origin) % piece_bytes)
        yield Span(place, address, number)
        place, address, left = place + number, address + number, left - number


def slab_spans(place: int, address: int, slab_bytes: int, slabs: Sequence[int]) -> Iterator[Span]:
    """Some of the slabs of a part that lies at ``address``, its copy at ``place``."""
    for slab in slabs:
        yield Span(place + slab * slab_bytes, address + slab * slab_bytes, slab_bytes)
