"""A body of 64 MiB: it arrives at both engines as it was, and the router's memory stays within a few times its size."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.router.failing import FailingEngine, check_answered, decodes, prefills
from tests.router.scripted import Client
from tests.router.stack import RouterProcess

pytestmark = pytest.mark.process

BODY_BYTES = 64 * 2**20
PEAK_MAX = 3
"""Times the body, the process itself counted."""


@contextlib.asynccontextmanager
async def running(die_with_parent: Callable[[], None]) -> AsyncIterator[tuple[RouterProcess, list[FailingEngine]]]:
    """A router process, and an engine of each role in this one."""
    engines = [FailingEngine("prefill", 1, prefills), FailingEngine("decode", 1, decodes)]
    flags = [f"--{role}={engine.url}" for role, engine in zip(("prefill", "decode"), engines, strict=True)]
    router = None
    try:
        for engine in engines:
            await engine.listen()
        router = RouterProcess.start(die_with_parent, *flags)
        yield router, engines
    finally:
        code = router.stop() if router is not None else 0
        for engine in engines:
            await engine.close()
    assert code == 0


def memory_bytes(pid: int, name: str) -> int:
    """``VmRSS``, or its peak ``VmHWM``."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


async def test_large_body_costs_a_few_times_its_size(die_with_parent: Callable[[], None]) -> None:
    prompt = "x" * BODY_BYTES
    async with running(die_with_parent) as (router, engines):
        pid = router.process.pid
        before = memory_bytes(pid, "VmRSS")
        client = Client(*await asyncio.open_connection("127.0.0.1", router.port))
        client.send(prompt=prompt, stream=False)
        check_answered(await client.reply(), "/v1/completions", stream=False)
        client.leave()
        peak = memory_bytes(pid, "VmHWM")
        for engine in engines:
            (sight,) = engine.sights
            assert json.loads(sight.body)["prompt"] == prompt
        assert peak <= PEAK_MAX * BODY_BYTES, f"{peak / BODY_BYTES:.2f} times the body"
        assert peak >= before + BODY_BYTES  # it was measured while the body was there
