"""Tokens from bytes: the ratio finds a model's own, and nothing that clients send leads it astray."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from antiphon.routing.token_estimate import MODELS_MAX, RATIO_FIRST, RATIO_MAX, RATIO_MIN, TokenEstimate


def test_it_begins_at_four_bytes_a_token() -> None:
    estimate = TokenEstimate()
    assert [estimate.num_tokens(b"m", num) for num in (0, 1, 4, 5, 4000)] == [0, 1, 1, 2, 1000]


def test_it_finds_the_ratio_of_each_model_with_an_overhead_for_each_prompt() -> None:
    estimate, chance = TokenEstimate(), Random(1)
    for _ in range(300):
        for model, ratio in ((b"english", 4.6), (b"chinese", 2.1)):
            num_bytes = int(chance.lognormvariate(8, 1.2))
            estimate.observe(model, num_bytes, int(num_bytes / (ratio * chance.uniform(0.9, 1.1))) + 25)
    for model, ratio in ((b"english", 4.6), (b"chinese", 2.1)):
        assert abs(estimate.num_tokens(model, 40_000) * ratio / 40_000 - 1) < 0.08
    assert estimate.num_tokens(b"another", 4000) == 1000


def test_it_follows_a_change() -> None:
    estimate = TokenEstimate()
    for _ in range(500):
        estimate.observe(b"m", 8000, 2000)
    for _ in range(200):
        estimate.observe(b"m", 8000, 4000)
    assert abs(estimate.bytes_per_token(b"m") - 2) < 0.1


def test_tiny_prompts_and_images_teach_nothing() -> None:
    estimate = TokenEstimate()
    for _ in range(1000):
        estimate.observe(b"m", 60, 45)
        estimate.observe(b"m", 1_000_000, 800)
        estimate.observe(b"m", 5000, 0)
        estimate.observe(b"m", 2000, 1_000_000)
    assert estimate.bytes_per_token(b"m") == RATIO_FIRST
    assert estimate.num_models == 0


def test_one_prompt_moves_a_known_ratio_by_little() -> None:
    estimate = TokenEstimate()
    for _ in range(100):
        estimate.observe(b"m", 8000, 2000)
    before = estimate.bytes_per_token(b"m")
    estimate.observe(b"m", 2_000_000, 130_000)
    assert before < estimate.bytes_per_token(b"m") < 1.04 * before


def test_models_are_bounded_and_those_in_use_stay() -> None:
    estimate = TokenEstimate()
    for number in range(3 * MODELS_MAX):
        estimate.observe(b"kept", 8000, 4000)
        estimate.observe(b"%d" % number, 8000, 2500)
    assert estimate.num_models == MODELS_MAX
    assert estimate.bytes_per_token(b"kept") < 2.1


@given(st.lists(st.tuples(st.integers(0, 10**7), st.integers(0, 10**7)), max_size=100))
def test_the_ratio_stays_within_its_bounds(observed: list[tuple[int, int]]) -> None:
    estimate = TokenEstimate()
    for num_bytes, num_tokens in observed:
        estimate.observe(b"m", num_bytes, num_tokens)
        assert RATIO_MIN <= estimate.bytes_per_token(b"m") <= RATIO_MAX
        assert (estimate.num_tokens(b"m", num_bytes) > 0) == (num_bytes > 0)
