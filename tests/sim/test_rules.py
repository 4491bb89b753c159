"""What hardly comes by chance, step by step: a promise that outlives every connection of its engine."""

from __future__ import annotations

import pytest

from antiphon.cache.events import Clear
from antiphon.sim import client
from antiphon.sim.client import DRAIN_QUIET_S, Promise
from antiphon.sim.engine import Job
from antiphon.sim.faults import SimulationOptions
from antiphon.sim.memory import QUARANTINE_S
from antiphon.sim.scheduler import Request, Scheduler
from antiphon.sim.timeline import CheckFailed
from antiphon.sim.world import World
from tests.sim.planted import promise_is_loaded_through_any_session

PROMPT = tuple(range(100, 109))
RECONNECT_S = DRAIN_QUIET_S + QUARANTINE_S + 0.5


def plain_world() -> World:
    """A world whose first engine has one rank and does not announce its copies; all processes are connected."""
    for seed in range(100):
        world = World(seed, SimulationOptions(faults=()))
        options = world.engines[0].options
        if options.num_ranks == 1 and not options.worker.announces_copies:
            world.timeline.is_calm = True
            world.timeline.run_until(1.0)
            return world
    raise AssertionError("no seed builds such a world")


def ask(world: World) -> Job:
    return world.ask(world.engines[0], "", PROMPT, 1)


def run_with_late_load(monkeypatch: pytest.MonkeyPatch) -> Job:
    """Just after a promise the server closes all connections and is cleared; the engine reconnects, then loads."""
    world = plain_world()
    timeline = world.timeline
    ask(world)
    timeline.run_until(timeline.now_s + 1.0)
    load = Scheduler._load

    def late(self: Scheduler, request: Request, promise: Promise) -> None:
        for peer in list(world.server.peers.values()):
            world.server.close(peer)
        world.server.clear(Clear())
        self.process.after(2 * RECONNECT_S, lambda: load(self, request, promise))

    monkeypatch.setattr(Scheduler, "_load", late)
    monkeypatch.setattr(client, "RECONNECT_S", (RECONNECT_S, RECONNECT_S))
    again = ask(world)
    timeline.run_until(timeline.now_s + 3 * RECONNECT_S)
    assert timeline.seen["promise"] == 1
    return again


def test_a_promise_is_not_loaded_through_a_session_that_came_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    again = run_with_late_load(monkeypatch)
    assert again.output is not None
    assert again.num_loaded == 0


def test_else_it_would_read_what_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    promise_is_loaded_through_any_session(monkeypatch)
    with pytest.raises(CheckFailed, match="its KV is wrong"):
        run_with_late_load(monkeypatch)


def test_a_promise_is_loaded_from_the_arena_of_a_server_that_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    world = plain_world()
    timeline = world.timeline
    ask(world)
    timeline.run_until(timeline.now_s + 1.0)
    load = Scheduler._load

    def after_the_death(self: Scheduler, request: Request, promise: Promise) -> None:
        world.server.process.kill()
        self.process.after(DRAIN_QUIET_S / 2, lambda: load(self, request, promise))

    monkeypatch.setattr(Scheduler, "_load", after_the_death)
    again = ask(world)
    timeline.run_until(timeline.now_s + 2.0)
    assert again.output is not None
    assert again.num_loaded == len(PROMPT) - 1
    assert timeline.seen["load from an ended session"] == 1
