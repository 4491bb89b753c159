"""The table of stages: what it allows happens, what it does not allow raises, and an outcome is final."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.routing.lifecycle import TRANSITIONS, RequestLife, Stage

OUTCOMES = {Stage.COMPLETED, Stage.FAILED, Stage.CANCELLED}
PAIRS = list(itertools.product(Stage, Stage))


@pytest.mark.parametrize(("before", "after"), PAIRS, ids=lambda stage: stage.value)
def test_every_pair_of_stages(before: Stage, after: Stage) -> None:
    life = RequestLife(0.0, before)
    if after in TRANSITIONS[before]:
        life.enter(after, 5.0)
        assert (life.stage, life.times) == (after, {after: 5.0})
        return
    with pytest.raises(AssertionError, match=f"from {before.value} to {after.value}"):
        life.enter(after, 5.0)
    assert (life.stage, life.times) == (before, {})


def test_the_table_is_whole() -> None:
    assert set(TRANSITIONS) == set(Stage)
    assert {stage for stage, after in TRANSITIONS.items() if not after} == OUTCOMES
    for stage in set(Stage) - OUTCOMES:
        assert {Stage.FAILED, Stage.CANCELLED} <= TRANSITIONS[stage], f"{stage.value} cannot fail or be cancelled"
        assert Stage.RECEIVED not in TRANSITIONS[stage]
    reachable = {Stage.RECEIVED}
    for _ in Stage:
        reachable |= {after for stage in reachable for after in TRANSITIONS[stage]}
    assert reachable == set(Stage)


def test_blocks_are_held_from_the_prefills_answer_to_the_decode_request() -> None:
    life = RequestLife(0.0)
    held = []
    for stage in (Stage.PREFILLING, Stage.HANDING_OVER, Stage.DECODING, Stage.COMPLETED):
        life.enter(stage, 1.0)
        held.append(life.holds_prefill_blocks)
    assert held == [False, True, False, False]


@given(st.lists(st.sampled_from(Stage), max_size=12))
def test_a_request_has_at_most_one_outcome(wanted: list[Stage]) -> None:
    life = RequestLife(0.0)
    for now, stage in enumerate(wanted):
        was_over = life.is_over
        try:
            life.enter(stage, float(now))
        except AssertionError:
            continue
        assert not was_over, "a stage after the outcome"
    assert sum(stage in OUTCOMES for stage in life.times) == int(life.is_over)
    assert list(life.times.values()) == sorted(life.times.values())
