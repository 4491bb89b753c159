"""The form of a chunk, and which slabs a rank holds."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.chunks_layout import ChunkLayout, head_major_layout, slabs_of_rank
from antiphon.core.namespace import ModelIdentity
from antiphon.core.units import MIB, align_up

LLAMA_8B = ModelIdentity("llama", "rev", "bfloat16", "", "full", 32, 8, 128)


def test_an_8b_model_has_eight_slabs_of_four_mebibytes() -> None:
    layout = head_major_layout(LLAMA_8B, chunk_size_tokens=256, element_bytes=2)
    assert layout == ChunkLayout(num_slabs=8, slab_bytes=4 * MIB)
    assert layout.chunk_bytes == 32 * MIB


def test_mla_has_one_slab() -> None:
    mla = dataclasses.replace(LLAMA_8B, attention_kind="mla", num_kv_heads=1, head_size=576)
    assert head_major_layout(mla, 256, 2) == ChunkLayout(1, 32 * 256 * 576 * 2)


def test_an_empty_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slab"):
        ChunkLayout(0, 1)


@given(st.sampled_from([(8, 1), (8, 2), (8, 4), (8, 8), (3, 3), (6, 2), (1, 1)]))
def test_ranks_share_the_slabs_without_overlap(shape: tuple[int, int]) -> None:
    num_slabs, num_ranks = shape
    held = [slab for rank in range(num_ranks) for slab in slabs_of_rank(num_slabs, rank, num_ranks)]
    assert held == list(range(num_slabs))


def test_more_ranks_than_heads_repeat_heads() -> None:
    assert [list(slabs_of_rank(2, rank, 4)) for rank in range(4)] == [[0], [0], [1], [1]]


@pytest.mark.parametrize(("num_slabs", "rank", "num_ranks"), [(3, 0, 2), (8, 2, 2), (8, -1, 2)])
def test_uneven_shards_are_refused(num_slabs: int, rank: int, num_ranks: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        slabs_of_rank(num_slabs, rank, num_ranks)


@given(st.integers(0, 10**9), st.integers(1, 10**6))
def test_alignment_adds_less_than_one_unit(size_bytes: int, alignment_bytes: int) -> None:
    aligned = align_up(size_bytes, alignment_bytes)
    assert aligned % alignment_bytes == 0
    assert 0 <= aligned - size_bytes < alignment_bytes
