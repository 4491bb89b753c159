"""Brings faults about in a world."""

from __future__ import annotations

from functools import partial

from antiphon.cache.events import Clear
from antiphon.sim.engine import Engine
from antiphon.sim.faults import Fault
from antiphon.sim.network import Process
from antiphon.sim.world import TENANTS, World

STOP_S = ((0.02, 0.3), (0.3, 1.0), (1.0, 5.0))
"""How long a process is stopped, each range as likely: shorter or longer than deadlines, quarantine and draining."""
SLOWNESS = (50.0, 600.0)
"""A slow link's delays are multiplied by a number between these: a round trip of about 10 to 120 ms."""
SLOW_S = (0.05, 1.0)
SERVER_RESTART_S = (0.01, 0.2)
PIN_S = (None, None, 0.05, 0.5, 2.0)
QUOTA_CHUNKS = (None, None, 0, 1, 2, 3, 5)
"""Quotas in chunks of the larger model."""
TIER_FAULT_S = (0.05, 2.0)
TIER_SLOWNESS = (5.0, 60.0)


def inject(world: World, fault: Fault, subject: str) -> None:
    """Brings one fault about, in the engine of the process ``subject`` or, if that is empty, anywhere.

    In vain where it does not apply: a server that is dead is not killed.
    """
    if world.timeline.is_calm:
        return
    world.timeline.count(f"fault {fault.value}")
    world.timeline.note(f"fault {fault.value}")
    if fault in (Fault.KILL_ENGINE, Fault.KILL_SCHEDULER, Fault.KILL_WORKER):
        _kill_engine(world, fault, subject)
    elif fault is Fault.KILL_SERVER:
        _kill_server(world)
    elif fault in (Fault.STOP_SCHEDULER, Fault.STOP_WORKER, Fault.STOP_SERVER):
        _stop(world, fault, subject)
    elif fault is Fault.CLOSE_CONNECTIONS:
        _close_connections(world, subject)
    elif fault is Fault.SLOW_LINK:
        _slow(world)
    elif fault is Fault.CLEAR:
        _clear(world)
    elif fault is Fault.PIN:
        _pin(world)
    elif fault is Fault.QUOTA:
        _set_quota(world)
    elif world.tiers:
        _hurt_tier(world, fault, subject)


def heal(world: World) -> None:
    """No more faults: what is stopped goes on, what is slow is fast."""
    world.timeline.is_calm = True
    for channel in world.channels:
        channel.slowness = 1.0
    for tier in world.tiers:
        tier.heal()
    for process in [world.server.process, *(process for engine in world.engines for process in engine.processes)]:
        if process.is_stopped:
            process.resume()
    server = world.server
    server.process.run(lambda: server.undo_control(world.quotas))


def _choose(world: World, subject: str) -> Engine:
    named = [engine for engine in world.engines if subject.startswith(f"{engine.options.name}#")]
    return named[0] if named else world.timeline.random.choice(world.engines)


def _kill_engine(world: World, fault: Fault, subject: str) -> None:
    engine = _choose(world, subject)
    scheduler, *workers = engine.processes
    if fault is Fault.KILL_ENGINE:
        engine.kill([scheduler, *workers])
    elif fault is Fault.KILL_SCHEDULER:
        engine.kill([scheduler])
    else:
        engine.kill([world.timeline.random.choice(workers)])


def _kill_server(world: World) -> None:
    timeline = world.timeline
    if world.server.process.is_alive:
        timeline.note(f"{world.server.process.name} is killed")
        world.server.process.kill()
        timeline.after(timeline.random.uniform(*SERVER_RESTART_S), world.start_server)


def _stop(world: World, fault: Fault, subject: str) -> None:
    chance = world.timeline.random
    engine = _choose(world, subject)
    scheduler, *workers = engine.processes
    if fault is Fault.STOP_SCHEDULER:
        process = scheduler
    elif fault is Fault.STOP_WORKER:
        process = chance.choice(workers)
    else:
        process = world.server.process
    if process.is_running:
        world.timeline.note(f"{process.name} is stopped")
        process.stop()
        world.timeline.after(chance.uniform(*chance.choice(STOP_S)), lambda: _continue(process))


def _continue(process: Process) -> None:
    if process.is_alive and process.is_stopped:
        process.timeline.note(f"{process.name} is continued")
        process.resume()


def _close_connections(world: World, subject: str) -> None:
    chance = world.timeline.random
    server = world.server
    peers = [peer for peer in server.peers.values() if not peer.is_closed]
    if not server.process.is_running or not peers:
        return
    own = [peer for peer in peers if peer.client == subject]
    schedulers = [peer for peer in peers if peer.client.endswith("/scheduler")]
    engine = [peer for peer in peers if peer.client.startswith(subject.partition("/")[0])]
    for peer in chance.choice((peers, engine, own, schedulers)) or [chance.choice(peers)]:
        server.close(peer)


def _slow(world: World) -> None:
    chance = world.timeline.random
    channels = [channel for channel in world.channels if not channel.is_ended]
    if not channels:
        return
    slow = channels if chance.random() < 0.3 else [chance.choice(channels)]
    slowness = chance.uniform(*SLOWNESS)
    for channel in slow:
        channel.slowness = slowness

    def fast() -> None:
        for channel in slow:
            channel.slowness = 1.0

    world.timeline.after(chance.uniform(*SLOW_S), fast)


def _clear(world: World) -> None:
    chance = world.timeline.random
    tenant = chance.choice((None, None, *TENANTS))
    model = chance.choice((None, None, *(engine.options.model.name for engine in world.engines)))
    event = Clear(tenant, model, spares_pinned=chance.random() < 0.5)
    server = world.server
    server.process.run(lambda: server.clear(event))


def _pin(world: World) -> None:
    chance = world.timeline.random
    server = world.server
    for _ in range(chance.randint(1, 3)):
        number, ttl_s, is_end = chance.random(), chance.choice(PIN_S), chance.random() < 0.2
        pinning, ending = partial(server.pin_some, number, ttl_s), partial(server.unpin_some, number)
        server.process.run(ending if is_end else pinning)


def _set_quota(world: World) -> None:
    chance = world.timeline.random
    tenant, num_chunks = chance.choice(TENANTS), chance.choice(QUOTA_CHUNKS)
    server = world.server
    server.process.run(
        lambda: server.set_quota(tenant, None if num_chunks is None else num_chunks * world.chunk_bytes_max)
    )


def _hurt_tier(world: World, fault: Fault, subject: str) -> None:
    """At its moment, the tier that is at work."""
    chance = world.timeline.random
    tier = max(world.tiers, key=lambda each: each.begun_at_s) if subject else chance.choice(world.tiers)
    if fault is Fault.TIER_FLIP:
        tier.flip()
        return
    faults = tier.faults
    if fault is Fault.TIER_DOWN:
        faults.is_down = True
    elif fault is Fault.TIER_HANG:
        faults.is_hung = True
    elif fault is Fault.TIER_FULL:
        faults.is_full = True
    else:
        faults.slowness = chance.uniform(*TIER_SLOWNESS)
    world.timeline.after(chance.uniform(*TIER_FAULT_S), tier.heal)
