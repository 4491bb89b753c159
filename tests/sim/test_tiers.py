"""The same oracle with tiers behind the arena: 200 seeds pass, all of it occurs, planted bugs are caught."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from antiphon.cache.machine import Cache
from antiphon.cli.main import main
from antiphon.sim.faults import TIER_FAULTS, SimulationOptions
from antiphon.sim.run import run_seed, run_seeds
from tests.sim.collected import Run, assert_caught, collect
from tests.sim.planted_tiers import BUGS, Plant

NUM_SEEDS = 200
OFTEN = 20
"""So often each kind of fault and outcome occurs in all seeds together, or it is as good as not tried."""

pytestmark = pytest.mark.timeout(900)  # 60 s of CPU time, on a machine that others use too


@pytest.fixture(scope="module")
def run() -> Run:
    """The seeds, run once for all tests here."""
    return collect(NUM_SEEDS, SimulationOptions.with_tiers(validate_every=10))


def test_all_seeds_pass(run: Run) -> None:
    assert not run.failures, run.failures[0]
    assert run.num_seeds == NUM_SEEDS


def test_everything_about_tiers_occurs(run: Run) -> None:
    rare = {
        *(f"fault {fault.value}" for fault in TIER_FAULTS),
        *(
            f"tier {job} {outcome}"
            for job in ("ask", "clear", "fetch", "list", "probe", "publish")
            for outcome in ("done", "failed")
        ),
        *(f"tier fetch {outcome}" for outcome in ("missing", "corrupt")),
        *(f"tier hangs in {job}" for job in ("ask", "clear", "fetch", "list", "probe", "publish")),
        "tier publish full",
        "breaker open",
        "breaker closed",
        "torn record",
        "tier evicts",
    }
    assert {name: run.seen[name] for name in rare if run.seen[name] < OFTEN} == {}
    assert min(run.seen[name] for name in ("onboarded", "promise with fetched chunks", "tier fetch done")) > 300


def test_a_seed_gives_the_same_trace_again() -> None:
    first, second = (run_seed(11, SimulationOptions.with_tiers()) for _ in range(2))
    assert first.digest == second.digest
    assert run_seed(11, SimulationOptions.with_tiers(validate_every=7)).digest == first.digest


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "validate", lambda self: None)
    bug(monkeypatch)
    *_, last = run_seeds(1, NUM_SEEDS, SimulationOptions.with_tiers())
    assert_caught(last, NUM_SEEDS)


def test_the_verb_runs_them() -> None:
    done = CliRunner().invoke(main, ["sim", "cache", "--seeds", "2", "--tiers"])
    assert done.exit_code == 0, done.output
    assert "2 seeds passed, from 1" in done.output
