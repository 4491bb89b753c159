"""The cache agrees with the plain model under both policies."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.cache.state_machine import ArcMachine, CacheMachine


@pytest.mark.parametrize("machine", [CacheMachine, ArcMachine], ids=["lru", "arc"])
def test_cache_agrees_with_the_model(machine: type[CacheMachine]) -> None:
    # The machine is shared: a slow example says nothing.
    chosen = settings(max_examples=100, stateful_step_count=60, suppress_health_check=[HealthCheck.too_slow])
    run_state_machine_as_test(machine, settings=chosen)
