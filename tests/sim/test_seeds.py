"""200 seeds pass, and what the simulation is for really occurs in them: it must not go blind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from antiphon.cache import index, leases
from antiphon.cache.effects import CommitOutcome, Removal, Verdict
from antiphon.cache.states import TRANSITIONS, State, assert_listed
from antiphon.sim.faults import ALL_FAULTS, Fault, SimulationOptions
from antiphon.sim.run import run_seed, run_seeds
from tests.sim.collected import Run, collect

NUM_SEEDS = 200

pytestmark = pytest.mark.timeout(900)  # 25 s of CPU time, on a machine that others use too


@pytest.fixture(scope="module")
def transitions() -> Counter[tuple[State, State]]:
    """Those of ``run``."""
    return Counter()


@pytest.fixture(scope="module")
def run(transitions: Counter[tuple[State, State]]) -> Run:
    """The seeds, run once for all tests here."""

    def counting(old: State, new: State) -> None:
        assert_listed(old, new)
        transitions[old, new] += 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index, "assert_listed", counting)
        patch.setattr(leases, "assert_listed", counting)
        return collect(NUM_SEEDS, SimulationOptions())


def test_all_seeds_pass(run: Run) -> None:
    assert not run.failures, run.failures[0]
    assert run.num_seeds == NUM_SEEDS


def test_every_fault_occurs(run: Run) -> None:
    missing = [fault.value for fault in ALL_FAULTS if run.seen[f"fault {fault.value}"] < 10]
    assert missing == []
    assert min(run.seen[f"abort {stage}"] for stage in ("asking", "ready", "loading", "running")) > 10
    assert run.seen["preemption"] > 100


def test_every_answer_of_the_cache_occurs(run: Run) -> None:
    expected = {
        *(f"verdict {verdict.value}" for verdict in Verdict),
        *(f"commit {outcome.value}" for outcome in CommitOutcome),
        *(f"removal {removal.value}" for removal in Removal),
        *(f"refusal {name}" for name in ("CapacityExceeded", "QuotaExceeded")),
        *(f"refused {name}" for name in ("LeaseUnknown", "StaleHandle")),
        *(f"notice {name}" for name in ("ChunkStored", "LeaseAlarm", "ReservationAlarm")),
    }
    assert expected - run.seen.keys() == set()


def test_every_transition_of_the_cache_occurs(run: Run, transitions: Counter[tuple[State, State]]) -> None:
    assert run.num_seeds == NUM_SEEDS
    assert TRANSITIONS.keys() - transitions.keys() == set()


def test_every_rule_of_a_client_is_needed(run: Run) -> None:
    expected = {
        "no answer in time",
        "lookup left out",
        *(f"late {name}" for name in ("Found", "Reserved", "LeaseNoted", "Refused")),
        "session given up",
        "release sent again",
        "late commit",
        "load from an ended session",
        "load without a session",
        "load failed",
        "blocks held for a copy",
        "write by a dead process",
    }
    assert expected - run.seen.keys() == set()
    assert run.seen["answer with loaded KV"] > run.seen["answer without loaded KV"] / 10
    assert run.seen["load from an ended session"] > 50


def test_a_seed_gives_the_same_trace_again() -> None:
    first, second = (run_seed(11, SimulationOptions()) for _ in range(2))
    assert first.trace == second.trace
    assert first.digest == second.digest
    assert run_seed(12, SimulationOptions()).digest != first.digest


def test_validating_less_often_changes_nothing() -> None:
    assert run_seed(13, SimulationOptions(validate_every=7)).digest == run_seed(13, SimulationOptions()).digest


def test_without_faults_nothing_is_late_or_lost_for_long() -> None:
    result = run_seed(15, SimulationOptions(faults=()))
    assert result.failure is None
    assert not any(name.startswith("fault") for name in result.seen)
    assert result.seen["load failed"] == 0


def test_only_the_faults_asked_for_occur() -> None:
    for result in run_seeds(1, 5, SimulationOptions(faults=(Fault.KILL_SERVER, Fault.ABORT))):
        occurred = {name for name in result.seen if name.startswith("fault")}
        assert occurred <= {"fault kill-server", "fault abort"}


@pytest.mark.process
@pytest.mark.parametrize("hash_seed", ["0", "12345"])
def test_another_process_gives_the_same_trace(hash_seed: str) -> None:
    code = (
        "from antiphon.sim.faults import SimulationOptions as O\n"
        "from antiphon.sim.run import run_seed\n"
        "print(*(run_seed(seed, O()).digest for seed in (11, 12, 13)))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.split() == [run_seed(seed, SimulationOptions()).digest for seed in (11, 12, 13)]
