"""Runs seeds, in two phases each, and says how to run a failed one again.

Safety: requests and faults; whatever is answered must be right. Liveness: no more faults; every request must end, a
repeated prompt must be loaded from the cache, and then no lease, reservation, quarantine or held block may be left.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from antiphon.sim.engine import Engine, Job
from antiphon.sim.faults import ALL_FAULTS, Fault, SimulationOptions
from antiphon.sim.injection import heal, inject
from antiphon.sim.seeds import SeedResult, run_consecutive
from antiphon.sim.timeline import CheckFailed
from antiphon.sim.values import CHUNK_SIZE_TOKENS
from antiphon.sim.world import TENANTS, World

SAFETY_S = 2.5
"""Virtual seconds in which requests arrive and faults occur."""
NUM_REQUESTS = (16, 34)
NUM_BURSTS = 3
BURST_S = 0.15
NUM_FAULTS = (3, 9)
STORMS = (
    ("promise", (Fault.STOP_SCHEDULER, Fault.KILL_SERVER)),
    ("promise", (Fault.STOP_SCHEDULER, Fault.CLOSE_CONNECTIONS)),
    ("lookup", (Fault.STOP_SERVER, Fault.SLOW_LINK)),
    ("lookup", (Fault.STOP_SERVER, Fault.CLOSE_CONNECTIONS)),
    ("load begins", (Fault.STOP_WORKER, Fault.CLEAR)),
    ("load begins", (Fault.CLEAR, Fault.CLOSE_CONNECTIONS)),
    ("load begins", (Fault.CLOSE_CONNECTIONS, Fault.KILL_SERVER, Fault.STOP_WORKER)),
    ("store begins", (Fault.STOP_WORKER, Fault.CLOSE_CONNECTIONS)),
    ("store begins", (Fault.CLEAR, Fault.CLOSE_CONNECTIONS, Fault.STOP_WORKER)),
    ("store begins", (Fault.KILL_WORKER, Fault.SLOW_LINK)),
    ("store begins", (Fault.KILL_ENGINE, Fault.CLEAR)),
)
"""Faults that are worse together, and their moment; the first comes at once, the others soon after it."""
CONTROL = (
    ("store begins", (Fault.PIN, Fault.QUOTA)),
    ("load begins", (Fault.PIN, Fault.QUOTA, Fault.PIN)),
    (None, (Fault.PIN, Fault.CLEAR, Fault.PIN, Fault.QUOTA)),
    (None, (Fault.QUOTA,)),
    (None, (Fault.PIN,)),
)
"""What an operator does, besides the faults, and when."""
NUM_CONTROLS = (0, 4)
SOON_S = (0.0, 0.001, 0.01, 0.05)
"""Faults come at most this long after their moment."""
MOMENTS = ("lookup", "promise", "load begins", "store begins", None, None, None, None)
"""When a single fault comes: at any time, or just after a lookup is sent, a promise arrives or a copy begins, where it
is likely to hurt."""
MOMENT_MAX = 20
RARE_MOMENTS = {"ask begins": 8, "fetch begins": 3, "clear begins": 1, "list begins": 1}
"""Those that do not occur ``MOMENT_MAX`` times in a seed, and may be over soon: the first fault comes at once."""
TIER_STORMS = (
    ("publish begins", (Fault.CLEAR,)),
    ("publish begins", (Fault.KILL_SERVER,)),
    ("publish begins", (Fault.TIER_SLOW, Fault.KILL_SERVER)),
    ("publish begins", (Fault.TIER_HANG, Fault.CLEAR)),
    ("ask begins", (Fault.TIER_HANG,)),
    ("ask begins", (Fault.TIER_FLIP,)),
    ("onboarding", (Fault.TIER_FLIP, Fault.TIER_HANG)),
    ("list begins", (Fault.TIER_HANG,)),
    ("list begins", (Fault.TIER_DOWN, Fault.KILL_SERVER)),
    ("clear begins", (Fault.TIER_HANG,)),
    ("fetch begins", (Fault.CLEAR,)),
    ("fetch begins", (Fault.TIER_HANG,)),
    ("fetch begins", (Fault.TIER_HANG, Fault.CLEAR)),
    ("fetch begins", (Fault.TIER_HANG, Fault.ABORT)),
    ("fetch begins", (Fault.TIER_FLIP, Fault.TIER_SLOW)),
    ("onboarding", (Fault.STOP_SCHEDULER, Fault.CLOSE_CONNECTIONS)),
    ("onboarding", (Fault.KILL_SCHEDULER, Fault.TIER_DOWN)),
    ("onboarding", (Fault.KILL_SERVER,)),
    (None, (Fault.KILL_SERVER, Fault.TIER_FLIP)),
    (None, (Fault.KILL_SERVER,)),
)
"""As ``STORMS``, where there are tiers."""
AGAIN_SHARE = 0.5
"""Of the requests, where there are tiers, that repeat an earlier prompt, if there is one: what was evicted comes
back."""
RESTART_SHARE = 0.7
RESTART_S = (0.5, 1.5)
"""In most seeds with tiers the server restarts in the middle: what follows comes from the tiers, under faults."""
LIVENESS_S_MAX = 60.0
"""Virtual seconds after the last fault within which every request must end: many times what the slowest needs."""
QUIET_S = 9.0
"""Virtual seconds after which nothing may be left: longer than the slowest copy, draining and quarantine together."""
NUM_REREAD = 8


def run_seed(seed: int, options: SimulationOptions) -> SeedResult:
    """Runs one seed to its end or its first failure."""
    world = World(seed, options)
    failure = None
    try:
        _safety(world)
        _liveness(world)
    except Exception as error:  # supervised: whatever the simulated code raises is this seed's failure, told with it
        place = traceback.extract_tb(error.__traceback__)[-1]
        failure = f"{type(error).__name__}: {error} ({place.name}, line {place.lineno} of {Path(place.filename).name})"
    timeline = world.timeline
    return SeedResult(seed, timeline.digest(), tuple(timeline.trace), failure, timeline.seen)


def run_seeds(first: int, num_seeds: int, options: SimulationOptions) -> Iterator[SeedResult]:
    """Runs consecutive seeds; the last result is the first failure, if one fails."""
    return run_consecutive(lambda seed: run_seed(seed, options), first, num_seeds)


def describe_failure(result: SeedResult, options: SimulationOptions) -> str:
    """The seed, what went wrong, how to run it again, and the end of the trace."""
    usual = SimulationOptions.with_tiers().faults if options.has_tiers else ALL_FAULTS
    tiers = " --tiers" if options.has_tiers else ""
    faults = "" if options.faults == usual else f" --faults {','.join(f.value for f in options.faults) or 'none'}"
    every = "" if options.validate_every == 1 else f" --validate-every {options.validate_every}"
    return "\n".join(
        [
            *result.failure_lines(),
            f"run it again: antiphon sim cache --first-seed {result.seed} --seeds 1{tiers}{faults}{every} --trace",
        ]
    )


def _safety(world: World) -> None:
    """Requests and faults."""
    timeline = world.timeline
    chance = timeline.random
    bursts_s = [chance.uniform(0, SAFETY_S - BURST_S) for _ in range(NUM_BURSTS)]
    for _ in range(chance.randint(*NUM_REQUESTS)):
        is_in_burst = chance.random() < 0.6
        at_s = chance.choice(bursts_s) + chance.uniform(0, BURST_S) if is_in_burst else chance.uniform(0, SAFETY_S)
        is_again = bool(world.tiers) and chance.random() < AGAIN_SHARE
        timeline.after(at_s, world.ask_again if is_again else world.ask_something)
    faults = [fault for fault in world.options.faults if fault not in (Fault.ABORT, Fault.PIN, Fault.QUOTA)]
    for _ in range(chance.randint(*NUM_FAULTS) if faults else 0):
        if chance.random() < 0.5:
            storms = STORMS + TIER_STORMS if world.tiers else STORMS
            moment, storm = chance.choice(storms)
            _arm(world, moment, tuple(fault for fault in storm if fault in faults))
        else:
            _arm(world, chance.choice(MOMENTS), (chance.choice(faults),))
    for _ in range(chance.randint(*NUM_CONTROLS)):
        moment, controls = chance.choice(CONTROL)
        _arm(world, moment, tuple(control for control in controls if control in world.options.faults))
    if world.tiers and Fault.KILL_SERVER in faults and chance.random() < RESTART_SHARE:
        timeline.after(chance.uniform(*RESTART_S), partial(inject, world, Fault.KILL_SERVER, ""))
    timeline.run_until(SAFETY_S)


def _arm(world: World, moment: str | None, faults: tuple[Fault, ...]) -> None:
    """Has faults come together when ``moment`` has occurred some number of times; without one, at any time."""
    timeline = world.timeline
    chance = timeline.random

    def soon() -> None:
        subject = "" if moment is None else timeline.subject
        for number, fault in enumerate(faults):
            is_at_once = number == 0 and (len(faults) > 1 or moment in RARE_MOMENTS)
            delay_s = 0.0 if is_at_once else chance.choice(SOON_S) * chance.random()
            timeline.after(delay_s, partial(inject, world, fault, subject))

    if moment is None:
        timeline.after(chance.uniform(0, SAFETY_S), soon)
    else:
        timeline.when(moment, chance.randint(1, RARE_MOMENTS.get(moment, MOMENT_MAX)), soon)


def _liveness(world: World) -> None:
    """Everything must come to its end, and reuse back."""
    timeline = world.timeline
    timeline.note("no more faults")
    heal(world)
    _finish(world, "no request goes on")
    timeline.run_until(timeline.now_s + QUIET_S)
    _check_idle(world)
    _repeat_earlier(world)
    timeline.run_until(timeline.now_s + QUIET_S)
    for engine in world.engines:
        _repeat_prompt(world, engine)
    timeline.run_until(timeline.now_s + QUIET_S)
    _check_idle(world)
    if world.tiers:
        _repeat_after_restart(world)


def _finish(world: World, complaint: str) -> None:
    """Lets all requests end."""
    timeline = world.timeline

    def is_done() -> bool:
        return not any(engine.jobs for engine in world.engines)

    if not is_done() and not timeline.run_until(timeline.now_s + LIVENESS_S_MAX, is_done):
        left = [name for engine in world.engines for name in engine.jobs]
        raise CheckFailed(f"{complaint}: {', '.join(left)} have not ended after {LIVENESS_S_MAX:.0f} s")


def _check_idle(world: World) -> None:
    world.server.check_idle()
    for engine in world.engines:
        engine.check_idle()


def _repeat_earlier(world: World) -> None:
    """What is stored is read once more: some of the earlier prompts, on engines of their model."""
    chance = world.timeline.random
    for engine in world.engines:
        asked = [job for job in world.jobs if job.model == engine.options.model.name]
        for job in chance.sample(asked, min(NUM_REREAD, len(asked))):
            world.ask(engine, job.tenant, job.prompt, 1)
    _finish(world, "no repeated request goes on")


def _repeat_prompt(world: World, engine: Engine) -> None:
    """A prompt of two chunks and a token, twice: the second time both chunks are loaded."""
    timeline = world.timeline
    chance = timeline.random
    tenant = chance.choice(TENANTS)
    prompt = tuple(chance.randrange(1000) for _ in range(2 * CHUNK_SIZE_TOKENS + 1))
    again: Job | None = None
    for _ in range(2):
        again = world.ask(engine, tenant, prompt, 1)
        _finish(world, "the repeated prompt does not end")
        timeline.run_until(timeline.now_s + QUIET_S)
    assert again is not None
    if again.num_loaded != 2 * CHUNK_SIZE_TOKENS:
        raise CheckFailed(f"{again.name} repeats a prompt, and {again.num_loaded} tokens of it were loaded, not 8")


def _repeat_after_restart(world: World) -> None:
    """A prompt of two chunks and a token, a restart of the server, and the prompt again: it is loaded from a tier."""
    timeline = world.timeline
    engine = max(world.engines, key=lambda each: each.options.onboard_s)
    tenant = next(tenant for tenant in TENANTS if not world.is_private(tenant))
    prompt = tuple(timeline.random.randrange(1000) for _ in range(2 * CHUNK_SIZE_TOKENS + 1))
    world.ask(engine, tenant, prompt, 1)
    _finish(world, "the prompt before the restart does not end")
    timeline.run_until(timeline.now_s + QUIET_S)
    world.server.process.kill()
    world.start_server()
    timeline.run_until(timeline.now_s + QUIET_S)
    again = world.ask(engine, tenant, prompt, 1)
    _finish(world, "the prompt after the restart does not end")
    timeline.run_until(timeline.now_s + QUIET_S)
    _check_idle(world)
    can_wait = engine.options.onboard_s >= 1.0 and not engine.options.prefill_tokens_per_s
    if can_wait and again.num_loaded != 2 * CHUNK_SIZE_TOKENS and world.can_ask_for_two:
        raise CheckFailed(f"{again.name} repeats a prompt after a restart, and {again.num_loaded} tokens were loaded")
