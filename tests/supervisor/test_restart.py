"""The restart budget: back-off, the limit in a window, recovery."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config.supervisor_spec import RestartSpec
from antiphon.supervisor.restart import RestartBudget


def test_delay_doubles_up_to_the_maximum_and_then_ends() -> None:
    budget = RestartBudget(RestartSpec(backoff_first_s=1, backoff_max_s=5, max_in_window=4, window_s=100))
    assert [budget.next_delay_s(float(now)) for now in range(5)] == [1, 2, 4, 5, None]
    assert budget.num_in_window == 4


def test_a_window_without_a_restart_begins_again() -> None:
    budget = RestartBudget(RestartSpec(backoff_first_s=1, backoff_max_s=30, max_in_window=2, window_s=10))
    assert [budget.next_delay_s(now) for now in (0.0, 1.0, 2.0)] == [1, 2, None]
    assert budget.next_delay_s(11.0) == 1


@pytest.mark.parametrize("spec", [RestartSpec(enabled=False), RestartSpec(max_in_window=0)])
def test_no_restart_where_none_is_allowed(spec: RestartSpec) -> None:
    assert RestartBudget(spec).next_delay_s(0.0) is None


@given(
    gaps_s=st.lists(st.floats(0, 50), max_size=60),
    first_s=st.floats(0.001, 10),
    max_in_window=st.integers(0, 5),
    window_s=st.floats(0.1, 60),
)
def test_never_more_than_the_limit_in_any_window(
    gaps_s: list[float], first_s: float, max_in_window: int, window_s: float
) -> None:
    spec = RestartSpec(
        backoff_first_s=first_s, backoff_max_s=max(10.0, first_s), max_in_window=max_in_window, window_s=window_s
    )
    budget = RestartBudget(spec)
    now_s, granted = 0.0, []
    for gap_s in gaps_s:
        now_s += gap_s
        delay_s = budget.next_delay_s(now_s)
        recent = [at for at in granted if now_s - at < window_s]
        assert (delay_s is None) == (len(recent) >= max_in_window)
        if delay_s is not None:
            assert delay_s == min(first_s * 2 ** len(recent), spec.backoff_max_s)
            granted.append(now_s)


def test_the_first_restart_of_a_window_may_be_sooner_than_the_policy_says() -> None:
    spec = RestartSpec(backoff_first_s=1, backoff_max_s=30, max_in_window=4, window_s=100)
    budget = RestartBudget(spec, first_s=0.2)
    assert [budget.next_delay_s(float(second)) for second in range(5)] == [0.2, 1, 2, 4, None]
    assert budget.next_delay_s(104.0) == 0.2
    # It never makes a wait longer, and grants no restart that the policy does not.
    assert RestartBudget(spec, first_s=5.0).next_delay_s(0.0) == 1
    assert RestartBudget(RestartSpec(enabled=False), first_s=0.2).next_delay_s(0.0) is None
