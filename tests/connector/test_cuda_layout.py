"""Layouts that are understood, those that are not, and the plans of copies: arithmetic against a plain model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.connector.cuda_layout import Span, common_layout, cut, joined, paged_layout, slab_spans, tensor_blocks
from antiphon.core.errors import LayoutMismatch

SHAPE = (100, 8, 16, 256)


def test_the_two_layouts_are_told_by_their_strides() -> None:
    nhd = paged_layout(SHAPE, (32768, 256, 2048, 1), 2)
    hnd = paged_layout(SHAPE, (32768, 4096, 256, 1), 2)
    assert (nhd.name, nhd.strides) == ("NHD", (8192, 64, 512))
    assert (hnd.name, hnd.strides) == ("HND", (8192, 1024, 64))
    assert nhd.block_bytes == hnd.block_bytes == 8 * 16 * 512
    assert "NHD" in nhd.fingerprint("bfloat16", 32)
    assert nhd.fingerprint("bfloat16", 32) != hnd.fingerprint("bfloat16", 32)


def test_one_head_without_a_dimension_for_it() -> None:
    layout = paged_layout((10, 16, 576), (9216, 576, 1), 2)
    assert (layout.num_heads, layout.row_words, layout.strides[2]) == (1, 144, 144)


def test_blocks_of_all_layers_in_one_allocation() -> None:
    assert paged_layout(SHAPE, (32 * 32768, 256, 2048, 1), 2).strides[0] == 32 * 8192


def test_blocks_that_kernels_see_as_several() -> None:
    layout = paged_layout((200, 8, 16, 256), (32768, 256, 2048, 1), 2, 50)
    assert layout.blocks_per_table_block == 4
    assert layout.block_bytes == 4 * 8 * 16 * 512
    with pytest.raises(LayoutMismatch, match="multiple of 60"):
        paged_layout((200, 8, 16, 256), (32768, 256, 2048, 1), 2, 60)


@pytest.mark.parametrize(
    ("shape", "strides", "element_bytes", "reason"),
    [
        (SHAPE, (32768, 4096, 256, 2), 2, "does not keep the elements"),
        (SHAPE, (32768, 256, 4096, 1), 2, "neither HND nor NHD"),
        (SHAPE, (16384, 4096, 256, 1), 2, "overlap"),
        ((100, 8, 16, 6), (768, 96, 6, 1), 1, "whole words"),
        ((2, 100, 8, 16, 128), (1, 1, 1, 1, 1), 2, "is not"),
        ((100, 8), (8, 1), 2, "is not"),
    ],
)
def test_what_is_not_understood_is_refused(
    shape: tuple[int, ...], strides: tuple[int, ...], element_bytes: int, reason: str
) -> None:
    with pytest.raises(LayoutMismatch, match=reason):
        paged_layout(shape, strides, element_bytes)


def test_layers_that_differ_are_refused() -> None:
    one, other = paged_layout(SHAPE, (32768, 256, 2048, 1), 2), paged_layout(SHAPE, (32768, 4096, 256, 1), 2)
    assert common_layout([one, one]) == one
    with pytest.raises(LayoutMismatch, match="2 layouts"):
        common_layout([one, other])


def test_blocks_of_a_part_of_a_chunk() -> None:
    assert tensor_blocks((7, 9), 1, 4, 1) == [-1, 7, 9, -1]
    assert tensor_blocks((7, 9), 0, 2, 3) == [21, 22, 23, 27, 28, 29]
    assert tensor_blocks((), 0, 2, 2) == [-1] * 4
    with pytest.raises(AssertionError):
        tensor_blocks((1, 2, 3), 2, 4, 1)


@given(st.integers(0, 10_000), st.integers(1, 64), st.integers(1, 300))
def test_cuts_cover_a_span_and_cross_no_boundary(seed: int, piece: int, size: int) -> None:
    chance = random.Random(seed)
    origin = chance.randrange(1000)
    span = Span(chance.randrange(1000), origin + chance.randrange(1000), size)
    parts = list(cut(span, origin, piece))
    assert list(joined(parts)) == [span]
    assert all((p.address - origin) // piece == (p.address + p.num_bytes - 1 - origin) // piece for p in parts)


@given(st.lists(st.sampled_from(range(8)), unique=True), st.integers(1, 50))
def test_joined_spans_copy_the_same_bytes_in_the_fewest_runs(slabs: list[int], slab_bytes: int) -> None:
    slabs.sort()
    spans = list(joined(slab_spans(1000, 5000, slab_bytes, slabs)))
    copied = {span.place + n: span.address + n for span in spans for n in range(span.num_bytes)}
    assert copied == {1000 + s * slab_bytes + n: 5000 + s * slab_bytes + n for s in slabs for n in range(slab_bytes)}
    assert len(spans) == sum(slab - 1 not in slabs for slab in slabs)


def test_neighbours_in_one_place_only_stay_apart() -> None:
    spans = [Span(0, 100, 10), Span(10, 200, 10), Span(20, 210, 10)]
    assert list(joined(spans)) == [Span(0, 100, 10), Span(10, 200, 20)]
    assert list(joined([])) == []
