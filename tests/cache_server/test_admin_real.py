"""The admin side of the real server: in one process with it, and as the process that people start.

The client here is the probe's connection: small, and without a thread.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from antiphon.cache_server import probe as probe_module
from antiphon.cache_server.admin import AdminServer, start_admin
from antiphon.cache_server.admin_poll import WAITING_MAX
from antiphon.cache_server.admin_view import ServerView
from antiphon.cache_server.probe_connection import ProbeConnection
from antiphon.cache_server.server import CacheServer
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.protocol import cache as wire
from tests.cache_server.admin_process import MIB, NAMESPACE, Process, engine_at, keys, started, store
from tests.cache_server.admin_standin import get, post, until
from tests.cache_server.test_admin import samples


@dataclass
class Served:
    server: CacheServer
    admin: AdminServer


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    spec = CacheServerSpec(port=0, http_port=0, l1_size_gb=0.0042, instance_id="t", runtime_dir=str(tmp_path / "run"))
    server = await CacheServer.start(spec)
    admin = await start_admin(server, "127.0.0.1", 0)
    yield Served(server, admin)
    await admin.close()
    await server.close()


async def populated(server: CacheServer) -> None:
    await until(lambda: server.population.is_complete)


def view_of(server: CacheServer) -> ServerView:
    """The type checker holds the server against what the admin side asks of it."""
    return server


async def test_figures_of_a_server_in_use(served: Served) -> None:
    server, port = view_of(served.server), served.admin.port
    await populated(served.server)
    async with engine_at(server.socket_path, MIB) as engine:
        assert await store(engine, 1, 2, 3) == ("write",) * 3
        assert await store(engine, 1) == ("resident",)
        found = await engine.call(wire.Lookup("r", NAMESPACE, "", keys(1, 9)), wire.Found)
        assert found.lease is not None
        await engine.call(wire.EngineNote("failed", "byte 3 differs"), wire.Noted)
        await engine.call(wire.Report("r", "P", "life", 600, 0, 256, 0, 344, 0, "finished"), wire.Noted)
        health = await get(port, "/healthz")
        assert (health.status, health.json["populated_ratio"], health.json["probe"]["detail"]) == (200, 1.0, None)
        status = (await get(port, "/status")).json
        assert (status["instance"], status["incarnation"]) == ("t", server.incarnation)
        l1 = status["storage_manager"]["l1_manager"]
        assert (l1["total_object_count"], l1["memory_used_bytes"], l1["read_locked_count"]) == (3, 3 * MIB, 1)
        reported = {"device": 0, "l1": 256, "l2": 0, "peer": 0, "remote_prefill": 0, "computed": 344}
        assert status["tokens"] == {"lookup": 512, "hit": 256, "reported": reported}
        process = {"role": "worker-0", "pid": os.getpid(), "gate": "failed", "detail": "byte 3 differs"}
        names = {"engine": "P", "incarnation": "life", "model": "m"}
        assert status["engines"] == [names | {"processes": [process], "leased_bytes": MIB}]
        leases = (await get(port, "/leases")).json["leases"]
        assert [(each["lease"], each["request"], each["num_bytes"]) for each in leases] == [(found.lease, "r", MIB)]
        figures = samples((await get(port, "/metrics")).body)
        wanted = {
            "objects": 3,
            "leases{state=held}": 1,
            "stores_total{verdict=write}": 3,
            "stores_total{verdict=resident}": 1,
            "hit_tokens_total": 256,
            "lookup_tokens_total": 512,
            "reported_tokens_total{source=computed}": 344,
            "engines": 1,
            "connections": 1,
            "calls_total{call=Report}": 1,
            "call_seconds_count{call=Report}": 1,
        }
        assert {name: figures[name] for name in wanted} == wanted
        events = (await get(port, "/events")).json["events"]
        assert [event["key"] for event in events] == [keys(number).hex() for number in (1, 2, 3)]
        cleared = (await post(port, "/clear", {"model": "m"})).json
        assert (cleared["num_chunks"], cleared["freed_bytes"], cleared["held_bytes"]) == (3, 2 * MIB, MIB)


async def test_the_probe_under_load_leaves_no_trace(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "PROBE_FRESH_S", 0.0)
    port = served.admin.port
    await populated(served.server)
    async with engine_at(served.server.socket_path, MIB) as engine:

        async def churn() -> None:
            for number in range(60):  # twenty times what fits: each store evicts
                assert await store(engine, number) == ("write",)

        churning = asyncio.create_task(churn())
        num_probes = 0
        while not churning.done():
            health = await get(port, "/healthz")
            assert (health.status, health.json["reason"]) == (200, None)
            l1 = (await get(port, "/status")).json["storage_manager"]["l1_manager"]
            assert l1["total_object_count"] <= 4
            assert l1["memory_used_bytes"] % MIB == 0
            num_probes += 1
        await churning
        assert num_probes > 3
        figures = samples((await get(port, "/metrics")).body)
        assert figures["stored_chunks_total"] == figures["stores_total{verdict=write}"] == 60
        assert figures["objects"] + figures["removals_total{reason=evicted}"] == 60
        assert figures["removals_total{reason=cleared}"] == figures["lookups_total"] == 0


async def test_polls_of_the_real_logs(served: Served) -> None:
    port, incarnation = served.admin.port, served.server.incarnation
    await populated(served.server)
    async with engine_at(served.server.socket_path, MIB) as engine:
        events = asyncio.create_task(get(port, f"/events?since=1&wait_s=20&incarnation={incarnation}"))
        reports = asyncio.create_task(get(port, f"/reports?since=1&wait_s=20&incarnation={incarnation}"))
        await until(lambda: served.admin._polls.num_waiting == 2)
        await engine.call(wire.Report("r", "P", "life", 1, 0, 0, 0, 1, 0, "finished"), wire.Noted)
        assert [each["request"] for each in (await reports).json["events"]] == ["r"]
        await store(engine, 5)
        assert [each["kind"] for each in (await events).json["events"]] == ["stored"]
        beyond = (await get(port, "/events?since=99&wait_s=20")).json
        assert (beyond["incarnation"], [each["sequence"] for each in beyond["events"]]) == (incarnation, [1])


async def test_a_socket_that_is_gone_is_unhealthy(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "PROBE_FRESH_S", 0.0)
    port = served.admin.port
    assert (await get(port, "/healthz")).status == 200
    Path(served.server.socket_path).unlink()
    assert (await get(port, "/healthz")).status == 200  # the kept connection still works, and so do engines'
    monkeypatch.setattr(ProbeConnection, "is_open", False)
    answer = await get(port, "/healthz")
    assert (answer.status, answer.json["probe"]["step"]) == (503, "connect")


# ---- as a process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def process(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[Process]:
    with started(tmp_path, die_with_parent) as process:
        yield process


@pytest.mark.process
def test_a_process_is_healthy_and_ends_in_time(process: Process) -> None:
    status, health = process.ask("/healthz")
    assert (status, health["status"]) == (200, "ok")
    assert process.ask("/readiness") == (200, {"status": "ready"})
    status, answer = process.ask("/status")
    assert (status, answer["is_healthy"], answer["engines"]) == (200, True, [])
    process.child.terminate()
    began_s = time.monotonic()
    assert process.child.wait(timeout=10) == 0
    assert time.monotonic() - began_s < 2
    assert not Path(process.socket_path).exists()


@pytest.mark.process
async def test_a_process_ends_in_time_while_askers_wait(process: Process) -> None:
    async def wait() -> int:
        while (answer := await get(process.port, "/reports?wait_s=30")).status == 503:
            pass  # the one below had the place
        return answer.status

    asked = [asyncio.create_task(wait()) for _ in range(WAITING_MAX)]
    async with asyncio.timeout(10):  # one more is refused once all of them wait
        while (answer := await get(process.port, "/reports?wait_s=0.01")).status == 200:
            assert answer.json["events"] == []
    assert (answer.status, answer.error["code"]) == (503, "too_many_waiting")
    process.child.terminate()
    began_s = time.monotonic()
    assert await asyncio.to_thread(process.child.wait, 10) == 0
    assert time.monotonic() - began_s < 2
    assert {await each for each in asked} == {200}
