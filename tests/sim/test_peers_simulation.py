"""Servers that share through a coordinator: seeds pass, are the same each time, and catch each planted bug."""

from __future__ import annotations

from collections import Counter

import pytest

from antiphon.sim.peers_run import run_peers_seed, run_peers_seeds
from tests.sim.collected import assert_caught
from tests.sim.peers_planted import BUGS, Plant

NUM_SEEDS = 200
OFTEN = 20
"""So often everything occurs in all seeds together."""

pytestmark = pytest.mark.timeout(600)


def test_seeds_pass_and_go_everywhere() -> None:
    seen: Counter[str] = Counter()
    num = 0
    for result in run_peers_seeds(1, NUM_SEEDS):
        assert result.failure is None, "\n".join(result.failure_lines())
        seen += result.seen
        num += 1
    assert num == NUM_SEEDS
    names = ["pulled", "hit", "timeout", "expired", "lost coordinator", "listing", "events"]
    names += [f"fault {kind}" for kind in ("part", "storm", "kill", "stop", "coordinator", "stop coordinator")]
    names += ["read flipped", "read stalled", "loan lost", "bytes of a lost loan"]
    names += ["hand-over whole", "hand-over in part", "hand-over left", "hand-over without room"]
    names += ["writer died", "rank failed"]
    names += ["held readable", "held reserved", "held unseen", "held refused", "not told how far"]
    assert {name: seen[name] for name in names if seen[name] < OFTEN} == {}


def test_a_seed_gives_the_same_trace_twice() -> None:
    assert run_peers_seed(7).digest == run_peers_seed(7).digest != run_peers_seed(8).digest


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    *_, last = run_peers_seeds(1, NUM_SEEDS)
    assert_caught(last, NUM_SEEDS)
