"""The crown of the connector's tests: random walks, in which every byte that is read or stored is checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.connector.harness import Harness
from tests.connector.walk import Walk

NUM_WALKS = 60
NUM_ACTIONS = 300


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_every_block_that_is_read_holds_the_kv_of_its_tokens(new_harness: Callable[..., Harness], seed: int) -> None:
    Walk(new_harness, seed).run(NUM_ACTIONS)


def test_walks_come_by_everything(new_harness: Callable[..., Harness]) -> None:
    """A walk that never loads, fails, preempts or aborts would prove nothing."""
    seen = Walk(new_harness, 0).seen
    for seed in range(100, 110):
        walk = Walk(new_harness, seed)
        walk.run(NUM_ACTIONS)
        seen += walk.seen
    for what, least in {
        "loads": 20,
        "failed loads": 3,
        "preemptions": 20,
        "FINISHED_STOPPED": 100,
        "FINISHED_ERROR": 1,
        "abort RUNNING": 10,
        "abort PREEMPTED": 2,
        "abort WAITING": 10,
        "abort WAITING_FOR_REMOTE_KVS": 2,
        "between step": 50,
    }.items():
        assert seen[what] >= least, f"{what}: {seen[what]} times in all walks"
