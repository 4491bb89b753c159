"""The flood: with admission warm requests do not feel it, without it they do; and a useless admission is seen."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from antiphon.cli.sim import sim
from antiphon.routing.cold import AdmissionOptions
from antiphon.sim.fleet_engine import H200_8B
from antiphon.sim.fleet_flood import (
    COLD,
    WARM,
    FloodOptions,
    FloodResult,
    FloodRun,
    FloodSimulation,
    flood_arrivals,
    run_flood,
)
from antiphon.sim.fleet_run import FleetOptions

SCALE = 16
MODEL = H200_8B.scaled(SCALE)
FLOOD = FloodOptions(num_cold=40, window_s=60.0, num_beginnings=24)
WARM_P99_MAX = 1.5
"""Over its value without a flood."""


@pytest.fixture(scope="module")
def results() -> list[FloodResult]:
    return run_flood(FloodRun(4, 4, MODEL), FLOOD, lambda _: None)


def warm_p99(result: FloodResult) -> float:
    return result.result.quantile_s(0.99, WARM)


def test_with_admission_warm_requests_do_not_feel_the_flood(results: list[FloodResult]) -> None:
    unloaded, off, on = results
    assert warm_p99(on) <= WARM_P99_MAX * warm_p99(unloaded)
    assert warm_p99(off) > 10 * warm_p99(unloaded), "the flood does no harm, so that nothing is shown"


def test_every_cold_prompt_is_served(results: list[FloodResult]) -> None:
    _, off, on = results
    assert on.num_refused == off.num_refused == 0
    assert len(on.result.first_token_s[COLD]) == len(off.result.first_token_s[COLD]) == FLOOD.num_cold
    assert max(on.result.first_token_s[COLD]) < FLOOD.window_s, "measured for less than the flood lasts"
    assert len({len(one.result.first_token_s[WARM]) for one in results}) == 1


def test_an_admission_that_admits_all_is_seen(results: list[FloodResult]) -> None:
    arrivals = flood_arrivals(FLOOD, SCALE, 1, has_flood=True)
    useless = AdmissionOptions(kv_bytes_per_token=MODEL.kv_bytes, warm_bytes=1 << 40)
    simulation = FloodSimulation(FleetOptions(4, 4, MODEL, "kv_aware"), arrivals, useless)
    assert simulation.run().quantile_s(0.99, WARM) > WARM_P99_MAX * warm_p99(results[0])


def test_what_waits_too_long_is_refused_and_the_books_balance() -> None:
    arrivals = flood_arrivals(FLOOD, SCALE, 1, has_flood=True)
    strict = AdmissionOptions(kv_bytes_per_token=MODEL.kv_bytes, queue_s=5.0)
    simulation = FloodSimulation(FleetOptions(4, 4, MODEL, "kv_aware"), arrivals, strict)
    result = simulation.run()
    simulation.validate()
    assert 0 < simulation.num_refused < FLOOD.num_cold
    assert simulation.num_refused + len(result.first_token_s[COLD]) == FLOOD.num_cold
    assert simulation.policies.prefill.num_active == simulation.policies.decode.num_active == 0


def test_the_command_prints_the_runs_that_are_asked_for() -> None:
    done = CliRunner().invoke(sim, ["flood", "--on", "--prompts", "2", "--scale", "32"])
    assert done.exit_code == 0, done.output
    assert "flood, admission on" in done.output
    assert "admission off" not in done.output
