"""One set of processes for the whole folder: two prefill and two decode engines, and two routers before them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator

import pytest
import uvloop

from tests.engine.simulated_processes import EngineProcess
from tests.router.stack import RouterProcess, Stack, urls

ENGINE = {"prefill_overhead_ms": 1, "decode_token_ms": 1, "max_model_len": 20_000, "lease_s": 4}


@pytest.fixture(scope="session")
def processes(die_with_parent: Callable[[], None]) -> Iterator[Stack]:
    engines: list[EngineProcess] = []
    routers: list[RouterProcess] = []
    try:
        roles = ("prefill", "prefill", "decode", "decode")
        engines.extend(EngineProcess.start(die_with_parent, role=role, **ENGINE) for role in roles)
        flags = [*urls(engines[:2], "prefill"), *urls(engines[2:], "decode"), "--health-interval-s", "0.2"]
        quick = ["--prefill-timeout-s", "0.4", "--first-token-timeout-s", "0.4", "--idle-timeout-s", "0.4"]
        routers.append(RouterProcess.start(die_with_parent, *flags))
        routers.append(RouterProcess.start(die_with_parent, *flags, *quick, "--no-request-id-tag"))
        yield Stack(engines[:2], engines[2:], *routers)
    finally:
        codes = [router.stop() for router in routers]
        codes += [engine.stop() for engine in engines]
    assert codes == [0] * 6


@pytest.fixture
def stack(processes: Stack) -> Iterator[Stack]:
    """The shared processes, at rest before and after the test."""
    processes.clear()
    yield processes
    processes.clear()


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Routers in the test's own loop run on the loop that serves."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
def kept_garbage() -> Iterator[list[object]]:
    """What the collector finds is kept here."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield gc.garbage
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
