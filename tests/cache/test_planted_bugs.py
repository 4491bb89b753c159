"""Each planted bug is caught within a bounded number of examples, by the plain model and its memory alone.

In scope: that the state machine reaches and recognises these mistakes. ``Cache.validate`` is off here: it would find
many of them by itself, and a simulation relies on the answers as much as on it. Examples are not shrunk, and are the
same in each run.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from antiphon.cache import index, leases
from antiphon.cache.states import TRANSITIONS, State, assert_listed
from tests.cache.planted import BUGS, Plant
from tests.cache.state_machine import CacheMachine

EXAMPLES_MAX = 600
"""The rarest needs about 100: which examples come depends on the constants in the code."""

BOUNDED = settings(
    max_examples=EXAMPLES_MAX,
    stateful_step_count=60,
    phases=[Phase.generate],
    derandomize=True,
    database=None,
    print_blob=False,
    suppress_health_check=[HealthCheck.too_slow],  # the machine is shared
)


class ModelOnly(CacheMachine):
    checks_invariants = False


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(ModelOnly, settings=BOUNDED)


def test_examples_pass_without_a_bug_and_take_every_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[tuple[State, State]] = Counter()

    def counting(old: State, new: State) -> None:
        assert_listed(old, new)
        taken[old, new] += 1

    monkeypatch.setattr(index, "assert_listed", counting)
    monkeypatch.setattr(leases, "assert_listed", counting)
    for is_first in (True, False, False, False):  # the first ones suffice; a changed rule may need others
        run_state_machine_as_test(
            ModelOnly, settings=settings(BOUNDED, max_examples=EXAMPLES_MAX // 3, derandomize=is_first)
        )
        if TRANSITIONS.keys() == taken.keys():
            break
    assert TRANSITIONS.keys() - taken.keys() == set()
