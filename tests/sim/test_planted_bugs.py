"""Each planted bug is caught within a bounded number of seeds, by a wrong output or by what is left at the end.

``Cache.validate`` is off here, and each bug is tried on the same seeds.
"""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from antiphon.cache.machine import Cache
from antiphon.cli.main import main
from antiphon.sim.faults import SimulationOptions
from antiphon.sim.run import describe_failure, run_seeds
from antiphon.sim.seeds import TRACE_LINES_SHOWN
from tests.sim.collected import assert_caught
from tests.sim.planted import BUGS, Plant, commit_comes_before_the_copy_ended

NUM_SEEDS_MAX = 200

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cache, "validate", lambda self: None)
    bug(monkeypatch)
    *_, last = run_seeds(1, NUM_SEEDS_MAX, SimulationOptions())
    assert_caught(last, NUM_SEEDS_MAX)


def test_a_failure_says_how_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    commit_comes_before_the_copy_ended(monkeypatch)
    options = SimulationOptions(validate_every=3)
    *_, last = run_seeds(1, NUM_SEEDS_MAX, options)
    assert last.failure is not None
    lines = describe_failure(last, options).splitlines()
    assert len(lines) == TRACE_LINES_SHOWN + 2
    assert lines[-2] == f"seed {last.seed} failed: {last.failure}"
    command = f"antiphon sim cache --first-seed {last.seed} --seeds 1 --validate-every 3 --trace"
    assert lines[-1] == f"run it again: {command}"
    again = CliRunner().invoke(main, command.split()[1:])
    assert again.exit_code == 1
    assert again.output.startswith(last.trace[0])
    assert again.output.splitlines()[-2:] == lines[-2:]


def test_the_verb_runs_seeds() -> None:
    done = CliRunner().invoke(main, ["sim", "cache", "--seeds", "2", "--faults", "kill-server,abort"])
    assert done.exit_code == 0, done.output
    assert "2 seeds passed, from 1" in done.output
    assert CliRunner().invoke(main, ["sim", "cache", "--faults", "flood"]).exit_code == 2
