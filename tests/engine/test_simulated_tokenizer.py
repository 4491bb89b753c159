"""The simulated tokenizer: deterministic, about as many tokens as promised, reversible, stable under growth."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.engine.simulated.tokenizer import (
    NUM_WORDS,
    TOKEN_ID_MAX,
    WORDS,
    SimulatedTokenizer,
    decode,
    decode_token,
    encode_group,
    render_chat,
)

texts = st.text(max_size=200)
sizes = st.sampled_from([0.25, 0.5, 1.0, 2.5, 3.0, 4.0, 4.5, 6.0])


def test_words_differ_and_have_five_letters() -> None:
    assert len(set(WORDS)) == NUM_WORDS
    assert {len(word) for word in WORDS} == {5}


@given(texts, sizes)
def test_text_comes_back(text: str, bytes_per_token: float) -> None:
    assert decode(SimulatedTokenizer(bytes_per_token).encode(text)) == text


@given(texts, st.sampled_from([0.25, 1.0, 4.0, 7.0, 64.0]))
def test_ids_are_in_range(text: str, bytes_per_token: float) -> None:
    ids = SimulatedTokenizer(bytes_per_token).encode(text)
    assert all(0 <= token <= TOKEN_ID_MAX for token in ids)


@given(st.integers(0, 500), sizes)
def test_number_of_tokens(num_bytes: int, bytes_per_token: float) -> None:
    # "xy" holds no word of the simulated model, so that every byte is grouped.
    text = ("xy" * num_bytes)[:num_bytes]
    count = len(SimulatedTokenizer(bytes_per_token).encode(text))
    assert (
        count == math.ceil(num_bytes / bytes_per_token)
        or abs(count - num_bytes / bytes_per_token) < 1 / bytes_per_token
    )


@given(texts, texts, sizes)
def test_a_longer_text_begins_with_the_same_tokens(text: str, more: str, bytes_per_token: float) -> None:
    tokenizer = SimulatedTokenizer(bytes_per_token)
    short, long = tokenizer.encode(text), tokenizer.encode(text + more)
    # Up to four letters at the end may become part of a word, and the last group may grow.
    sure = max(0, len(short) - 1 - math.ceil(4 / bytes_per_token))
    assert long[:sure] == short[:sure]


@given(texts, st.lists(st.integers(0, NUM_WORDS - 1), min_size=1, max_size=20))
def test_an_answer_sent_back_has_the_tokens_it_was_made_of(prompt: str, answer: list[int]) -> None:
    tokenizer = SimulatedTokenizer(4.0)
    prompt_tokens = tokenizer.encode(prompt + "\n")
    assert tokenizer.encode(prompt + "\n" + decode(answer)) == prompt_tokens + answer


@given(st.binary(max_size=6))
def test_groups_are_reversible_and_distinct_from_words(group: bytes) -> None:
    token = encode_group(group)
    assert token >= NUM_WORDS
    assert decode_token(token) == group


def test_long_groups_become_digests_that_differ() -> None:
    first, second = encode_group(b"a" * 7), encode_group(b"a" * 8)
    assert first != second
    assert decode_token(first) == b"<%d>" % first


@pytest.mark.parametrize("token", [NUM_WORDS, 123456, (7 + 1) << 48, (1 + 1) << 48 | 0x1FF, TOKEN_ID_MAX])
def test_ids_without_bytes_are_shown_as_numbers(token: int) -> None:
    assert decode_token(token) == b"<%d>" % token


def test_the_fast_path_equals_the_general_one() -> None:
    text = "The quick brown fox jumps über den faulen Hund. " * 5
    whole, general = SimulatedTokenizer(4.0), SimulatedTokenizer(4.0000001)
    assert whole.encode(text) == general.encode(text)


def test_chat_template() -> None:
    turns = [("system", "be kind"), ("user", "hi")]
    assert render_chat(turns, add_generation_prompt=True) == "<|system|>\nbe kind\n<|user|>\nhi\n<|assistant|>\n"
    assert render_chat(turns, add_generation_prompt=False) == "<|system|>\nbe kind\n<|user|>\nhi\n"
