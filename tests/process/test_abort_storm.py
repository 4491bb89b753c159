"""Thousands of clients that leave at random moments: afterwards every gauge is zero and no engine holds any KV.

``ANTIPHON_NUM_ABORTS`` says how many; ``make soak`` sets it to 10,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.simulated_processes import EngineProcess
from tests.router.stack import NOTHING_HELD, RouterProcess, Stack, ask, leases_of, raw_request, total, urls, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]

NUM_ABORTS = int(os.environ.get("ANTIPHON_NUM_ABORTS", "400"))
NUM_CLIENTS = 24
FIRST_BYTE_S = 20.0
LEASE_S = 5
ENGINE = {"prefill_overhead_ms": 2, "decode_token_ms": 5, "max_model_len": 20_000, "lease_s": LEASE_S}
BUSY = ("active", "in_flight", "queue", "waiting", "pending", "running", "depth")
"""Gauges whose names say that they count what is under way."""
IDLE_CONNECTIONS_MAX = 4 * NUM_CLIENTS
STAYING_EVERY = 50
GROWTH_MAX_BYTES = 32 * 2**20
"""Of the router's memory: the receipts that are kept, and buffers."""


@pytest.fixture
def stack(die_with_parent: Callable[[], None]) -> Iterator[Stack]:
    engines: list[EngineProcess] = []
    routers: list[RouterProcess] = []
    try:
        roles = ("prefill", "prefill", "decode", "decode")
        engines.extend(EngineProcess.start(die_with_parent, role=role, **ENGINE) for role in roles)
        flags = [*urls(engines[:2], "prefill"), *urls(engines[2:], "decode"), "--handover-timeout-s", "3"]
        routers.append(RouterProcess.start(die_with_parent, *flags, "--abort-grace-s", "0.2"))
        yield Stack(engines[:2], engines[2:], routers[0], routers[0])
    finally:
        codes = [router.stop() for router in routers] + [engine.stop() for engine in engines]
    assert codes == [0] * 5


def request(number: int, chance: Random) -> bytes:
    """One of all kinds: streamed and whole, completion and chat, split and local, short and long."""
    prompt = f"{chance.random()} " * chance.choice((1, 10, 60))
    # A stream is left in its middle; a whole answer comes before long, so that it can be left while it is written.
    is_stream = bool(number % 3)
    body: dict[str, Any] = {"max_tokens": chance.choice((1, 8, 100 if is_stream else 20)), "stream": is_stream}
    if number % 2:
        body["prompt"] = prompt
        if number % 10 == 1:
            body["n"] = 2
        return raw_request("/v1/completions", body)
    return raw_request("/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]})


async def abort(port: int, data: bytes, chance: Random) -> str:
    """Send a request, or a part of it, and leave at a random moment: what the client had seen by then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        is_partial = chance.random() < 0.05
        writer.write(data[: chance.randrange(1, len(data))] if is_partial else data)
        seen = b""
        if not is_partial and chance.random() < 0.4:  # in the answer, as far as it has come
            seen = await asyncio.wait_for(reader.read(65_536), FIRST_BYTE_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(chance.choice((0.0, chance.random() * 0.01, chance.random() * 0.1))):
                while piece := await reader.read(65_536):
                    seen += piece
        way = chance.random()
        if way < 0.3:
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
        elif way < 0.4:
            writer.write_eof()
            await asyncio.sleep(chance.random() * 0.02)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    if is_partial:
        return "partial"
    return "answer" if seen else "nothing"


async def storm(stack: Stack, num: int) -> Counter[str]:
    """``num`` aborted requests by clients at a time, and a few among them that stay and must be answered rightly."""
    seen: Counter[str] = Counter()
    numbers = iter(range(num))
    loop = asyncio.get_running_loop()

    async def client(seed: int) -> None:
        chance = Random(seed)
        for number in numbers:
            seen[await abort(stack.router.port, request(number, chance), chance)] += 1
            if number % STAYING_EVERY == 0:
                await loop.run_in_executor(None, check_served, stack, f"who stays: {number}")
                seen["stayed"] += 1

    async with asyncio.TaskGroup() as group:
        for seed in range(NUM_CLIENTS):
            group.create_task(client(seed))
    return seen


def check_served(stack: Stack, prompt: str) -> None:
    """Nothing that others do changes an answer."""
    body = {"prompt": prompt, "max_tokens": 6}
    answer = ask(stack.router.port, "POST", "/v1/completions", body | {"stream": True})
    assert answer.status == 200, answer.body
    assert answer.text == stack.decode[0].text(prompt, 6)


def busy_gauges(port: int) -> dict[str, float]:
    """Every gauge that counts what is under way, by name and labels."""
    found = {}
    for family in text_string_to_metric_families(ask(port, "GET", "/metrics").body.decode()):
        if family.type == "gauge" and any(word in family.name for word in BUSY):
            found.update({f"{sample.name}{sample.labels}": sample.value for sample in family.samples})
    return found


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


async def test_nothing_is_left_after_a_storm_of_aborts(stack: Stack) -> None:
    router = stack.router
    pid = router.process.pid
    loop = asyncio.get_running_loop()
    check_served(stack, "before")
    before, descriptors, resident, leases = (
        router.metrics(),
        num_descriptors(pid),
        resident_bytes(pid),
        leases_of(stack),
    )
    began_s = loop.time()
    seen = await storm(stack, NUM_ABORTS)
    storm_s = loop.time() - began_s
    assert sum(seen.values()) - seen["stayed"] == NUM_ABORTS
    assert min(seen["nothing"], seen["answer"], seen["partial"], seen["stayed"]) >= NUM_ABORTS // 60, seen

    gauges = busy_gauges(router.port)
    # One for all requests, and one for each engine.
    assert len([name for name in gauges if "active_requests" in name]) == 1 + len(stack.engines), gauges
    wait_for(lambda: not any(busy_gauges(router.port).values()), "every gauge is zero", 10.0)
    for engine in stack.engines:
        # At the latest when the leases of prefills whose requests were cancelled in that very moment have run out.
        state = engine.wait_state(LEASE_S + 10.0, **NOTHING_HELD)
        assert state["requests"] > 0

    after = router.metrics()

    def grown(name: str, *labels: str) -> float:
        return total(after, name, *labels) - total(before, name, *labels)

    assert total(after, "client_connections") <= 1  # the one that asks
    assert grown("requests_total") <= NUM_ABORTS + seen["stayed"]
    assert grown("requests_total", "outcome=cancelled") >= seen["nothing"] // 2
    assert grown("requests_total", "outcome=cancelled") <= grown("client_disconnects_total")
    assert grown("requests_total", "outcome=failed") <= seen["partial"]
    # A prefill that ends just as its cancellation arrives is held for a lease of its own: the router never got its
    # handle. Every handle that it got was pulled.
    leases = leases_of(stack) - leases
    assert leases["expired"] <= leases["granted"] - grown("path_total", "path=pd", "reason=default")
    assert grown("handovers_abandoned_total") == 0
    assert num_descriptors(pid) <= descriptors + IDLE_CONNECTIONS_MAX
    growth = resident_bytes(pid) - resident
    assert growth <= GROWTH_MAX_BYTES
    check_served(stack, "after")
    shown = {"seconds": round(storm_s, 1), "leases expired": leases["expired"], "MiB more": round(growth / 2**20, 1)}
    stages = ("received", "prefilling", "connecting_decode", "awaiting", "streaming")
    left = {stage: int(grown("client_disconnects_total", f"stage={stage}")) for stage in stages}
    print(json.dumps(shown | {"seen": seen, "left in": left}))
