"""Chunk keys: a chain over full chunks, equal exactly for equal beginnings in an equal namespace."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.chunks import ChunkChain, MultimodalItem, chunk_keys, pack_tokens
from antiphon.core.namespace import ModelIdentity, Namespace, NamespaceDigest, encode_value

SIZE = 4
SEED = Namespace(ModelIdentity("demo", "rev", "bfloat16", "", "full", 2, 2, 8), SIZE).digest()
OTHER_SEED = NamespaceDigest(bytes(32))

token_ids = st.integers(0, 2**31 - 1)
sequences = st.lists(token_ids, max_size=5 * SIZE)


def test_key_is_the_documented_hash() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    item = MultimodalItem("image", 5, 2)
    first = hashlib.sha256(SEED + array("i", tokens[:4]).tobytes()).digest()
    second = hashlib.sha256(first + array("i", tokens[4:]).tobytes() + encode_value(((1, 2, "image"),))).digest()
    assert chunk_keys(SEED, tokens, SIZE, [item]) == [first, second]


def test_a_tail_has_no_key() -> None:
    assert chunk_keys(SEED, [1, 2, 3], SIZE) == []
    assert len(chunk_keys(SEED, range(9), SIZE)) == 2


def test_forms_of_tokens_agree() -> None:
    tokens = list(range(100_000, 100_000 + 3 * SIZE))
    packed = array("i", tokens)
    forms: list[Any] = [tokens, tuple(tokens), packed, array("q", tokens), memoryview(packed), packed.tobytes()]
    assert len({tuple(chunk_keys(SEED, form, SIZE)) for form in [*forms, bytearray(packed.tobytes())]}) == 1


@pytest.mark.parametrize("tokens", [[2**31], [1.5], ["a"], [None], b"abc", memoryview(array("q", [1])), -1])
def test_what_is_no_token_is_refused(tokens: Any) -> None:
    with pytest.raises(ValueError, match="token"):
        pack_tokens(tokens)


def test_a_refused_extension_changes_nothing() -> None:
    chain = ChunkChain(SEED, SIZE)
    chain.extend([1, 2, 3])
    with pytest.raises(ValueError, match="32 bits"):
        chain.extend([4, 2**40])
    assert (chain.num_tokens, chain.keys) == (3, [])
    assert chain.extend([4]) == chunk_keys(SEED, [1, 2, 3, 4], SIZE)


def test_senseless_chains_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        ChunkChain(NamespaceDigest(b"short"), SIZE)
    with pytest.raises(ValueError, match="at least one token"):
        ChunkChain(SEED, 0)
    with pytest.raises(ValueError, match="at least one token"):
        MultimodalItem("image", 0, 0)


@given(sequences, st.lists(st.integers(0, 7), max_size=12))
def test_one_pass_in_pieces_gives_the_same_keys(tokens: list[int], cuts: list[int]) -> None:
    chain = ChunkChain(SEED, SIZE)
    given_back = []
    position = 0
    for cut in [*cuts, len(tokens)]:
        given_back += chain.extend(tokens[position : position + cut])
        position += cut
    assert chain.keys == given_back == chunk_keys(SEED, tokens, SIZE)
    assert chain.num_tokens == len(tokens)


@given(sequences, sequences)
def test_keys_are_equal_exactly_while_the_beginnings_are(one: list[int], other: list[int]) -> None:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    keys, other_keys = chunk_keys(SEED, one, SIZE), chunk_keys(SEED, other, SIZE)
    for index, (key, other_key) in enumerate(zip(keys, other_keys, strict=False)):
        assert (key == other_key) == ((index + 1) * SIZE <= shared)
    assert len(set(keys)) == len(keys)


@given(st.lists(token_ids, min_size=SIZE, max_size=5 * SIZE))
def test_namespaces_share_no_key(tokens: list[int]) -> None:
    assert not set(chunk_keys(SEED, tokens, SIZE)) & set(chunk_keys(OTHER_SEED, tokens, SIZE))


# ---- multimodal items ------------------------------------------------------------------------------------------------

TOKENS = [7] * (4 * SIZE)


def first_difference(one: list[MultimodalItem], other: list[MultimodalItem]) -> int:
    """The first chunk whose keys differ; the number of chunks if none does."""
    pairs = zip(chunk_keys(SEED, TOKENS, SIZE, one), chunk_keys(SEED, TOKENS, SIZE, other), strict=True)
    return next((index for index, (key, other_key) in enumerate(pairs) if key != other_key), len(TOKENS) // SIZE)


def test_an_item_enters_at_the_chunk_where_it_begins() -> None:
    assert first_difference([], [MultimodalItem("cat", 6, 5)]) == 1
    assert first_difference([MultimodalItem("cat", 9, 2)], [MultimodalItem("dog", 9, 2)]) == 2
    assert first_difference([MultimodalItem("cat", 9, 2)], [MultimodalItem("cat", 10, 2)]) == 2
    assert first_difference([MultimodalItem("cat", 9, 2)], [MultimodalItem("cat", 9, 3)]) == 2


def test_order_in_which_items_are_listed_has_no_meaning() -> None:
    items = [MultimodalItem("cat", 1, 2), MultimodalItem("dog", 9, 2), MultimodalItem("cow", 3, 1)]
    assert first_difference(items, items[::-1]) == len(TOKENS) // SIZE


def test_an_item_past_the_last_full_chunk_changes_nothing_yet() -> None:
    assert first_difference([], [MultimodalItem("cat", len(TOKENS), 3)]) == len(TOKENS) // SIZE


@given(st.lists(st.tuples(st.text(max_size=3), st.integers(0, 3)), max_size=3, unique=True))
def test_items_of_one_chunk_do_not_run_together(placed: list[tuple[str, int]]) -> None:
    items = [MultimodalItem(name, position, 1) for name, position in placed]
    merged = [MultimodalItem("".join(name for name, _ in sorted(placed)), 0, 1)] if len(placed) > 1 else []
    assert not merged or first_difference(items, merged) == 0
