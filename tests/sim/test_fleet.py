"""Simulated fleets: the books balance, a seed replays, and each claim about a policy fails for a bad one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from math import inf
from pathlib import Path

import pytest
from click.testing import CliRunner

from antiphon.cli.sim import sim
from antiphon.routing.ask import Ask
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.pickers import Picker
from antiphon.sim.fleet_compare import CompareOptions, arrivals_of, cold_load, run_policies
from antiphon.sim.fleet_engine import H200_8B
from antiphon.sim.fleet_oracle import bound_hit_rate
from antiphon.sim.fleet_policies import NAMES
from antiphon.sim.fleet_report import share_of_oracle
from antiphon.sim.fleet_run import FleetOptions, FleetResult, FleetSimulation
from antiphon.sim.fleet_trace import BLOCK_TOKENS, Arrival

SCALE = 16
MODEL = H200_8B.scaled(SCALE)
SMALL = CompareOptions(4, 4, MODEL, NAMES, requests=1500)
HOT = replace(SMALL, workload="hot-prefix", rate_scale=20.0)

ORACLE_SHARE_MIN = 0.95
SKEW_MAX = 1.5
"""The most that an engine may have over the mean, under a hot prefix."""


def simulation(options: CompareOptions, policy: str, picker: Callable[[], Picker] | None = None) -> FleetSimulation:
    arrivals, _ = arrivals_of(options)
    fleet = FleetOptions(options.prefill, options.decode, options.model, policy, seed=options.seed)
    one = FleetSimulation(fleet, [(arrival, "") for arrival in arrivals])
    if picker is not None:
        one.policies.prefill.picker, one.policies.decode.picker = picker(), picker()
    return one


class Pinning:
    """A planted policy: the engine that was picked first, for ever."""

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        return candidates[0]

    def set_members(self, endpoints: list[Endpoint]) -> None: ...

    def set_ready(self, endpoint: Endpoint) -> None: ...

    def load_changed(self, endpoint: Endpoint, before: int) -> None: ...


def digest(result: FleetResult) -> str:
    return sha256(repr(result).encode()).hexdigest()


# ---- the books -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", NAMES)
def test_every_token_is_held_or_computed_and_no_engine_holds_more_than_it_has(policy: str) -> None:
    one = simulation(replace(SMALL, requests=400), policy)
    one.timeline.after(10.0, one.validate)
    one.timeline.after(40.0, one.validate)
    result = one.run()
    one.validate()
    arrivals = [arrival for arrival, _ in one._arrivals]
    assert result.num_tokens == sum(arrival.num_tokens for arrival in arrivals)
    assert result.num_hit + sum(engine.num_computed for engine in one.prefills.values()) == result.num_tokens
    assert sum(result.shares) == sum(result.decode_shares) == len(result.first_token_s[""]) == 400
    assert 0 <= result.hit_rate <= bound_hit_rate(arrivals, SCALE, None) + 1e-9
    assert 0 < result.num_pulled <= result.num_tokens
    assert min(result.first_token_s[""]) > H200_8B.front_s * 2
    for pool in (one.policies.prefill, one.policies.decode):
        assert pool.num_active == 0
        assert all(endpoint.num_uncached_tokens == 0 for endpoint in pool.endpoints)
    for engine in (*one.prefills.values(), *one.decodes.values()):
        assert engine.blocks.num_used == 0


def test_the_index_agrees_with_the_engines_once_all_events_are_there() -> None:
    one = simulation(replace(SMALL, requests=300), "kv_aware")
    one.run()
    one.timeline.run_until(inf)
    index = one.policies.index
    assert index is not None
    for endpoint, engine in (*one.prefills.items(), *one.decodes.items()):
        assert index.num_blocks(endpoint) == engine.blocks.num_held > 0


def test_events_come_late_and_not_before() -> None:
    """With events that take longer than the run, the index is empty: so what kv_aware knows, it knows by events."""
    deaf = replace(SMALL, requests=100, model=replace(MODEL, event_s=1e6))
    one = simulation(deaf, "kv_aware")
    one.run()
    assert one.policies.index is not None
    assert all(one.policies.index.num_blocks(endpoint) == 0 for endpoint in one.prefills)


def test_a_seed_replays() -> None:
    small = replace(SMALL, requests=200)
    one, again, other = (simulation(options, "kv_aware").run() for options in (small, small, replace(small, seed=2)))
    assert digest(one) == digest(again) != digest(other)


@pytest.mark.parametrize("policy", ["kv_aware", "prefix_aware"])
def test_results_are_the_same_in_every_process(policy: str) -> None:
    program = (
        "from dataclasses import replace; from tests.sim.test_fleet import SMALL, digest, simulation\n"
        f"print(digest(simulation(replace(SMALL, requests=150), '{policy}').run()))"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([".", *sys.path])},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {digest(simulation(replace(SMALL, requests=150), policy).run()) + "\n"}


# ---- what policies are worth -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chats() -> dict[str, FleetResult]:
    options = replace(SMALL, policies=("round_robin", "least_load", "prefix_aware", "kv_aware", "oracle"))
    arrivals, _ = arrivals_of(options)
    assert cold_load(options, arrivals) == pytest.approx(0.8)
    return {result.policy: result for result in run_policies(options, arrivals)}


def test_kv_aware_hits_nearly_what_an_oracle_hits_and_a_blind_policy_does_not(chats: dict[str, FleetResult]) -> None:
    results = list(chats.values())
    shares = {policy: share_of_oracle(result, results) or 0.0 for policy, result in chats.items()}
    assert shares["kv_aware"] >= ORACLE_SHARE_MIN
    for policy in ("round_robin", "least_load"):
        assert shares[policy] < 0.8, "the check passes a policy that knows nothing"


def test_aware_policies_are_faster_than_blind_ones(chats: dict[str, FleetResult]) -> None:
    for policy in ("prefix_aware", "kv_aware"):
        for share in (0.5, 0.99):
            assert chats[policy].quantile_s(share) < chats["least_load"].quantile_s(share)


def skews(result: FleetResult) -> tuple[float, float, float]:
    return result.skew, result.work_skew, result.decode_skew


@pytest.mark.parametrize("rate_scale", [2.0, 20.0, 26.0])
def test_a_hot_prefix_pins_no_engine(rate_scale: float) -> None:
    hot = replace(HOT, rate_scale=rate_scale)
    for policy in ("prefix_aware", "kv_aware", "oracle"):
        result = simulation(hot, policy).run()
        assert max(skews(result)) <= SKEW_MAX, policy
        assert result.hit_rate > 0.8


def test_a_policy_that_pins_is_seen() -> None:
    small = replace(HOT, requests=300, rate_scale=1.0)
    assert min(skews(simulation(small, "kv_aware", Pinning).run())) > SKEW_MAX
    assert simulation(replace(HOT, rate_scale=2.0), "consistent_hash").run().skew > SKEW_MAX


def test_the_bound_without_load_is_a_plain_count() -> None:
    arrivals = [Arrival(float(at), 2 * BLOCK_TOKENS + 1, 1, (1 + at % 2, 10 + at)) for at in range(6)]
    everything = 4 * 2 * BLOCK_TOKENS / (6 * (2 * BLOCK_TOKENS + 1))
    assert bound_hit_rate(arrivals, SCALE, None) == bound_hit_rate(arrivals, SCALE, 4) == pytest.approx(everything)
    assert bound_hit_rate(arrivals, SCALE, 2) == 0


# ---- the command -----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_line_for_each_policy() -> None:
    done = CliRunner().invoke(
        sim, ["fleet", "--requests", "120", "--scale", "32", "--policies", "round_robin,kv_aware"]
    )
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["policy", "round_robin", "kv_aware"]
    assert "120 requests of chats" in lines[0]


def test_the_command_says_what_is_wrong() -> None:
    done = CliRunner().invoke(sim, ["fleet", "--policies", "best"])
    assert done.exit_code == 2
    assert "'best' is none of" in done.output


def test_the_command_reads_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    requests = [(100 * number, [0, 1 + number % 3, 10 + number]) for number in range(30)]
    rows = [{"timestamp": at_ms, "input_length": 1100, "output_length": 20, "hash_ids": ids} for at_ms, ids in requests]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["fleet", "--trace", str(path), "--policies", "kv_aware", "--rate-scale", "1"]
    done = CliRunner().invoke(sim, command)
    assert done.exit_code == 0, done.output
    assert "30 requests of trace.jsonl" in done.output
    path.write_text(path.read_text() + "no\n")
    broken = CliRunner().invoke(sim, command)
    assert broken.exit_code == 1
    assert "line 31" in broken.output
