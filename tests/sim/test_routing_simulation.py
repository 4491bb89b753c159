"""The routing simulation: seeds pass, replay byte for byte, and reach everything; planted bugs are caught."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from antiphon.routing import commands, events, life, machine, pool
from antiphon.routing.policies import POLICIES
from antiphon.routing.states import TRANSITIONS, EndpointState, Stage, State, assert_listed
from antiphon.sim.routing_run import run_routing_seed, run_routing_seeds
from antiphon.sim.routing_values import ALL_ROUTING_FAULTS, RoutingFault
from antiphon.sim.routing_world import RoutingSimulationOptions, RoutingWorld
from antiphon.sim.seeds import SeedResult
from tests.sim.routing_planted import BUGS, CALM_BUGS, Plant, no_validation

NUM_SEEDS = 200
SEEDS_PER_TEST = 50
EVERYTHING = RoutingSimulationOptions(validate_every=8)
ONLY_LEAVING = RoutingSimulationOptions(faults=(RoutingFault.CLIENTS_LEAVE,), validate_every=8)

NUM_COVERAGE_SEEDS = 400
SCRIPTED = {
    (Stage.PROBING, Stage.CONNECTING_DECODE),
    (Stage.BACKING_OFF, Stage.CONNECTING_DECODE),
    (Stage.CONNECTING_DECODE, Stage.PROBING),
}
"""Two faults within a few milliseconds, seldom met: tests/routing/test_life.py takes them."""


def passing(results: list[SeedResult]) -> None:
    assert results[-1].failure is None, "\n".join(results[-1].failure_lines())


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_seeds_pass(first: int) -> None:
    results = list(run_routing_seeds(first, SEEDS_PER_TEST, EVERYTHING))
    passing(results)
    assert len(results) == SEEDS_PER_TEST


def test_where_clients_only_leave_every_kv_that_was_handed_over_is_pulled() -> None:
    results = list(run_routing_seeds(0, SEEDS_PER_TEST, ONLY_LEAVING))
    passing(results)
    seen: Counter[str] = sum((result.seen for result in results), Counter())
    assert seen["decided handover_completed"] > 0
    assert seen["finish failed"] == 0


def test_a_seed_replays_byte_for_byte() -> None:
    one, again, other = (run_routing_seed(seed, EVERYTHING) for seed in (3, 3, 4))
    assert one.trace == again.trace
    assert one.digest == again.digest != other.digest


def test_digests_are_the_same_in_every_process() -> None:
    """Another digest means that the simulation has changed, or depends on the process: on hashes, or on a clock."""
    program = (
        "from antiphon.sim.routing_run import run_routing_seed\n"
        "from antiphon.sim.routing_world import RoutingSimulationOptions\n"
        "print(run_routing_seed(11, RoutingSimulationOptions(validate_every=8)).digest)"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {run_routing_seed(11, EVERYTHING).digest + "\n"}


def test_everything_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Counter[tuple[State, State]] = Counter()
    handled: Counter[tuple[Stage, type[object]]] = Counter()

    def counting(old: State, new: State) -> None:
        assert_listed(old, new)
        taken[old, new] += 1

    def watched(stage: Stage, kind: type[object], function: machine.Handler) -> machine.Handler:
        def handle(one: life.Life, event: events.Event) -> None:
            handled[stage, kind] += 1
            function(one, event)

        return handle

    monkeypatch.setattr(pool, "assert_listed", counting)
    monkeypatch.setattr(life, "assert_listed", counting)
    for stage, row in machine.TABLE.items():
        for kind, function in list(row.items()):
            monkeypatch.setitem(row, kind, watched(stage, kind, function))
    seen: Counter[str] = Counter()
    for result in run_routing_seeds(0, NUM_COVERAGE_SEEDS, RoutingSimulationOptions(validate_every=1000)):
        seen += result.seen
    assert TRANSITIONS.keys() - taken.keys() <= SCRIPTED
    assert {(stage, kind) for stage, row in machine.TABLE.items() for kind in row} == handled.keys()
    wanted = [f"fault {fault.value}" for fault in ALL_ROUTING_FAULTS]
    wanted += [f"command {kind.__name__}" for kind in commands.Command.__args__]  # type: ignore[attr-defined]
    wanted += [f"event {kind.__name__}" for kind in events.ENGINE_EVENTS]
    wanted += [f"error {code}" for code in commands.FailureCode.__args__]  # type: ignore[attr-defined]
    wanted += ["trial", "load failed", "lease expired", "stale connection", "salted read of freed blocks"]
    wanted += [f"left in {stage.value}" for stage in Stage if machine.TABLE[stage]]
    assert [name for name in wanted if not seen[name]] == []


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    no_validation(monkeypatch)
    bug(monkeypatch)
    assert caught(RoutingSimulationOptions(validate_every=1000))


@pytest.mark.parametrize("bug", CALM_BUGS, ids=lambda bug: bug.__name__)
def test_planted_bug_is_caught_where_clients_only_leave(bug: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    no_validation(monkeypatch)
    bug(monkeypatch)
    assert caught(ONLY_LEAVING)


def caught(options: RoutingSimulationOptions) -> bool:
    """Whether the oracle, and not an assertion of ``routing``, finds something within the seeds."""
    failures = (run_routing_seed(seed, options).failure for seed in range(NUM_SEEDS))
    return any(failure is not None and failure.startswith("CheckFailed") for failure in failures)


@pytest.mark.parametrize("num_decode", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_killed_prefill_engine_costs_no_client_an_error(policy: str, num_decode: int) -> None:
    options = RoutingSimulationOptions(faults=(), num_prefill=2, num_decode=num_decode, policy=policy, retry_floor=50.0)
    world = RoutingWorld(7, options)
    timeline = world.timeline
    for index in range(300):
        timeline.after(index * 0.005, lambda: [world.ask(is_plain=True)])  # type: ignore[arg-type,return-value]
    timeline.after(0.5, world.engines["p0"].kill)
    timeline.run_until(1.0)
    assert any(endpoint.state is EndpointState.DOWN for endpoint in world.fleet.prefill.endpoints)
    timeline.after(0.0, world.engines["p0"].start)
    assert timeline.run_until(20.0, lambda: timeline.now_s > 2 and not world.shell.rides)
    assert len(world.clients) == 300
    assert [client.ends for client in world.clients if client.ends != ["complete"]] == []
    assert world.fleet.counts["retry_prefill"] > 0
    assert all(endpoint.state is EndpointState.READY for endpoint in world.fleet.all())


def test_a_killed_decode_engine_truncates_no_stream_in_silence() -> None:
    options = RoutingSimulationOptions(faults=(), num_prefill=2, num_decode=2, policy="round_robin", retry_floor=50.0)
    world = RoutingWorld(7, options)
    timeline = world.timeline
    for index in range(300):
        timeline.after(index * 0.005, lambda: [world.ask(is_plain=True)])  # type: ignore[arg-type,return-value]
    timeline.after(0.5, world.engines["d0"].kill)
    timeline.after(1.0, world.engines["d0"].start)
    assert timeline.run_until(20.0, lambda: timeline.now_s > 2 and not world.shell.rides)
    ends = Counter(end for client in world.clients for end in client.ends)
    assert ends.keys() == {"complete", "stream error decode_lost"}
    assert ends.total() == len(world.clients) == 300
