"""Engines that flap, come back, are taken out of service or have failed for long: they are used less while they fail,
and again as soon as they do not, and no pool is ever without an engine that may be tried."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from tests.router.failing import (
    COMPLETIONS,
    FailingEngine,
    Fleet,
    Sight,
    check_answered,
    eventually,
    fleet,
    resets,
    responds,
    streams_then,
)
from tests.router.scripted import DONE, Wire, connected, until


async def is_used(engines: Fleet, engine: FailingEngine, num_sights: int) -> bool:
    """Ask once more, which must be answered; whether the engine has seen more than ``num_sights`` requests by then."""
    check_answered(await engines.ask(), COMPLETIONS, stream=False)
    return len(engine.sights) > num_sights


def is_probed(engine: FailingEngine, num: int) -> bool:
    """Whether it has had so many health checks."""
    return engine.num_probes >= num


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_flapping_engine_costs_no_client_anything_and_is_asked_less(role: str) -> None:
    """It fails every other request that it gets."""
    async with fleet() as engines:
        flapping, steady = engines.pool(role)
        well = flapping.script

        async def flaps(sight: Sight, wire: Wire) -> None:
            await (resets if len(flapping.sights) % 2 else well)(sight, wire)

        flapping.script = flaps
        for number in range(40):
            stream = bool(number % 2)
            check_answered(await engines.ask(stream=stream), COMPLETIONS, stream=stream)
        assert len(flapping.sights) < len(steady.sights)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engine_that_comes_and_goes_is_used_while_it_is_there(role: str) -> None:
    async with fleet(health_interval_s=0.05) as engines:
        engine = engines.pool(role)[0]
        for _ in range(3):
            engine.refuse()
            for number in range(4):
                stream = bool(number % 2)
                check_answered(await engines.ask(stream=stream), COMPLETIONS, stream=stream)
            await engine.listen()
            is_back = partial(is_used, engines, engine, len(engine.sights))
            await eventually(is_back, "it is used again")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_engine_that_says_it_is_not_healthy_gets_nothing_new(role: str) -> None:
    """What an engine does that is taken out of service: it answers 503 to health checks and goes on serving."""
    async with fleet(health_interval_s=0.05) as engines:
        engine = engines.pool(role)[0]
        engine.is_healthy = False

        async def is_down() -> bool:
            return (await engines.states(role))[engine.name] == "down"

        await eventually(is_down, "the health checks have taken it out")
        num_before = len(engine.sights)
        for _ in range(6):
            check_answered(await engines.ask(), COMPLETIONS, stream=False)
        assert len(engine.sights) <= num_before + 1  # one request may try it
        engine.is_healthy = True
        await eventually(lambda: is_used(engines, engine, num_before + 1), "it is used again")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_no_pool_is_ever_emptied_by_errors(role: str) -> None:
    """All of its engines have failed many times: the first request after their recovery is answered."""
    async with fleet() as engines:
        healthy = [engine.script for engine in engines.pool(role)]
        engines.always(role, responds(500))
        for _ in range(20):
            assert (await engines.ask()).status in (502, 503)
        for engine, script in zip(engines.pool(role), healthy, strict=True):
            engine.script = script
        check_answered(await engines.ask(), COMPLETIONS, stream=False)


async def test_stream_in_progress_outlives_health_checks_and_is_counted_throughout() -> None:
    async with fleet(1, 1, health_interval_s=0.03) as engines, connected(engines.router) as client:
        (d,) = engines.decode
        release = asyncio.Event()

        async def waits(_: Sight, wire: Wire) -> None:
            await release.wait()
            wire.piece(DONE)
            wire.end()

        d.script = streams_then(2, waits)
        engines.send(client, stream=True)
        await until(lambda: d.sights, "it is asked")
        for goal in (5, 10, 15):
            await until(partial(is_probed, d, goal), "some health checks")
            assert await engines.samples("engine_active_requests", 'role="decode"') == 1
        release.set()
        assert (await client.reply()).body.endswith(DONE)
        await engines.wait_idle()
