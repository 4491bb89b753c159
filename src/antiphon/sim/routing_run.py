"""Runs seeds of the routing simulation, in two phases each, and says how to run a failed one again.

Safety: requests and faults; whatever is done and answered must be right. Liveness: no more faults; every request must
end, every counter and lease be gone, every engine come back, and ordinary requests succeed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from antiphon.routing.states import OUTCOMES, Stage
from antiphon.sim.routing_values import LEASE_S, RoutingFault
from antiphon.sim.routing_world import RoutingSimulationOptions, RoutingWorld
from antiphon.sim.seeds import SeedResult, run_consecutive
from antiphon.sim.timeline import CheckFailed

SAFETY_S = 3.0
"""Virtual seconds in which requests arrive and faults occur."""
NUM_REQUESTS = (30, 80)
NUM_BURSTS = 3
BURST_S = 0.1
NUM_FAULTS = (2, 12)
STORM_SHARE = 0.35
"""Of other faults that come over more than one engine, or with another one."""
MOMENT_SHARE = 0.4
"""Of faults that strike when a request has entered a stage."""
MOMENT_NUMBER_MAX = 25
PAIRS = (
    (RoutingFault.UNREACHABLE, RoutingFault.KILL),
    (RoutingFault.UNREACHABLE, RoutingFault.FLAP),
    (RoutingFault.STALE_CONNECTION, RoutingFault.KILL),
    (RoutingFault.RESET, RoutingFault.KILL),
)
"""Over the decode engines, and over the prefill engine that holds the KV: worse together."""
PAIR_SHARE = 0.15
NUM_LEAVES = (0, 6)
LEAVE_NUMBER_MAX = 15
STAGES = tuple(stage for stage in Stage if stage not in OUTCOMES and stage is not Stage.RECEIVED)
LIVENESS_S_MAX = 15.0
"""Virtual seconds after the last fault within which every request must end: more than all its deadlines together."""
QUIET_S = LEASE_S + 0.5
NUM_RECOVERY = 24
RECOVERY_S = 0.1
"""Between two of the requests that bring engines back."""


def run_routing_seed(seed: int, options: RoutingSimulationOptions) -> SeedResult:
    """Runs one seed to its end or its first failure."""
    world = RoutingWorld(seed, options)
    timeline = world.timeline
    failure = None
    try:
        _safety(world)
        _liveness(world)
    except AssertionError as error:
        failure = f"{type(error).__name__}: {error}"
    for name, number in world.fleet.counts.items():
        timeline.seen[f"decided {name}"] += number
    return SeedResult(seed, timeline.digest(), tuple(timeline.trace), failure, timeline.seen)


def run_routing_seeds(first: int, num_seeds: int, options: RoutingSimulationOptions) -> Iterator[SeedResult]:
    """Runs consecutive seeds; the last result is the first failure, if one fails."""
    return run_consecutive(lambda seed: run_routing_seed(seed, options), first, num_seeds)


def _safety(world: RoutingWorld) -> None:
    """Requests and faults."""
    timeline = world.timeline
    chance = timeline.random
    bursts_s = [chance.uniform(0, SAFETY_S - BURST_S) for _ in range(NUM_BURSTS)]
    for _ in range(chance.randint(*NUM_REQUESTS)):
        is_in_burst = chance.random() < 0.5
        at_s = chance.choice(bursts_s) + chance.uniform(0, BURST_S) if is_in_burst else chance.uniform(0, SAFETY_S)
        timeline.after(at_s, lambda: _ask(world))
    faults = [fault for fault in world.options.faults if fault is not RoutingFault.CLIENTS_LEAVE]
    for _ in range(chance.randint(*NUM_FAULTS) if faults else 0):
        _arm(world, faults, chance.choice((*bursts_s, chance.uniform(0, SAFETY_S))))
    if RoutingFault.CLIENTS_LEAVE in world.options.faults:
        for _ in range(chance.randint(*NUM_LEAVES)):
            world.leave_at(chance.choice(STAGES), chance.randint(1, LEAVE_NUMBER_MAX))
    timeline.run_until(SAFETY_S)


def _ask(world: RoutingWorld) -> None:
    world.ask()


def _arm(world: RoutingWorld, faults: Sequence[RoutingFault], at_s: float) -> None:
    """Has a fault come over an engine, a pool or all, two faults together, or one over a request at a bad moment."""
    timeline = world.timeline
    chance = timeline.random
    engines = list(world.engines.values())
    if chance.random() < PAIR_SHARE:
        number = chance.randint(1, MOMENT_NUMBER_MAX)
        pair = tuple(fault for fault in chance.choice(PAIRS) if fault in faults)
        if len(pair) == 2:
            timeline.when(f"stage {Stage.PREFILLING.value}", number, lambda: _strike_decode(world, pair[0]))
            timeline.when(f"stage {Stage.CONNECTING_DECODE.value}", number, lambda: _strike(world, pair))
        return
    first, second = chance.choice(faults), chance.choice(faults)
    if chance.random() < MOMENT_SHARE:
        stage, number = chance.choice(STAGES), chance.randint(1, MOMENT_NUMBER_MAX)
        timeline.when(f"stage {stage.value}", number, lambda: _strike(world, (first, second)))
        return
    victims = [(first, chance.choice(engines))]
    if chance.random() < STORM_SHARE:
        kind = chance.random()
        if kind < 0.5:
            victims = [(first, other) for other in engines if other.role == victims[0][1].role]
        elif kind < 0.7:
            victims = [(first, other) for other in engines]
        else:
            victims.append((second, chance.choice(engines)))
    for fault, victim in victims:
        delay_s = at_s + chance.choice((0.0, 0.01, 0.05)) * chance.random()
        timeline.after(delay_s, lambda fault=fault, victim=victim: world.inject(fault, victim))  # type: ignore[misc]


def _strike(world: RoutingWorld, faults: Sequence[RoutingFault]) -> None:
    """Faults come over the engines that a request depends on, soon."""
    timeline = world.timeline
    ride = world.shell.rides.get(timeline.subject)
    for fault, name in zip(faults, ride.engines if ride is not None else [], strict=False):
        delay_s = timeline.random.choice((0.0, 0.0, 0.005, 0.05))
        timeline.after(delay_s, lambda fault=fault, name=name: world.inject(fault, world.find(name)))  # type: ignore[misc]


def _strike_decode(world: RoutingWorld, fault: RoutingFault) -> None:
    """A fault comes over every decode engine."""
    for engine in world.engines.values():
        if engine.role == "decode":
            world.inject(fault, engine)


def _liveness(world: RoutingWorld) -> None:
    """Everything must come to its end, and every engine back."""
    timeline = world.timeline
    timeline.note("no more faults")
    world.heal()
    _finish(world, "no request goes on")
    timeline.run_until(timeline.now_s + QUIET_S)
    _check_idle(world)
    for _ in range(NUM_RECOVERY):
        world.ask(is_plain=True)
        timeline.run_until(timeline.now_s + RECOVERY_S)
    _finish(world, "a request of the recovery does not end")
    first = len(world.clients)
    for _ in world.engines:
        world.ask(is_plain=True)
        _finish(world, "an ordinary request does not end")
    for client in world.clients[first:]:
        if client.ends != ["complete"]:
            raise CheckFailed(f"{client.name} asks when all is well and gets: {client.ends}")
    world.oracle.check_ready()
    timeline.run_until(timeline.now_s + QUIET_S)
    _check_idle(world)


def _finish(world: RoutingWorld, complaint: str) -> None:
    """Lets all requests end."""
    timeline, rides = world.timeline, world.shell.rides

    def is_done() -> bool:
        return not rides

    if not is_done() and not timeline.run_until(timeline.now_s + LIVENESS_S_MAX, is_done):
        left = ", ".join(f"{name} ({ride.life.stage.value})" for name, ride in rides.items())
        raise CheckFailed(f"{complaint}: {left} have not ended after {LIVENESS_S_MAX:.0f} s")


def _check_idle(world: RoutingWorld) -> None:
    world.fleet.validate()
    world.oracle.check_idle()
    for engine in world.engines.values():
        stranded = world.oracle.handed.keys() & engine.expired if world.options.is_calm else None
        if stranded:
            raise CheckFailed(f"{len(stranded)} prefills of {engine.name} were handed over and never pulled")
        if engine.holds:
            raise CheckFailed(f"{engine.name} holds the blocks of {len(engine.holds)} prefills after every lease")
        if engine.works:
            raise CheckFailed(f"{engine.name} still has {engine.works[0].ask.id}, which has ended")
