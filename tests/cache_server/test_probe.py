"""The self-probe: it goes the whole way, leaves nothing, shares its result, and says where it failed.

Run against the real cache and arena behind a small server of the tests, so that faults can be planted between them.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from antiphon.cache.effects import Cleared
from antiphon.cache.events import Clear
from antiphon.cache.states import ChunkState
from antiphon.cache_server import probe as probe_module
from antiphon.cache_server.probe import PROBE_NAME, Probe, ProbeResult
from antiphon.protocol import cache as wire
from tests.cache_server.admin_standin import PAGE, Fault, Hang, HangUp, StandIn, standing_in, until

WHOLE_WAY = ["Hello", "Attach", "Reserve", "Commit", "Lookup", "Release", "Clear"]


async def probed(server: StandIn) -> ProbeResult:
    probe = Probe(server.socket_path)
    try:
        return await probe.result()
    finally:
        await probe.close()


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def _always_fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question makes a new probe."""
    monkeypatch.setattr(probe_module, "PROBE_FRESH_S", 0.0)


async def test_goes_the_whole_way_and_leaves_nothing(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        result = await probed(server)
        assert (result.is_ok, result.step, result.detail) == (True, "clear", None)
        assert 0 < result.took_s < 1
        assert server.calls == WHOLE_WAY
        statistics = server.cache.statistics()
        assert statistics.free_bytes == statistics.usable_bytes
        assert not any(statistics.num_leases.values())
        assert statistics.hit_tokens == 256
        server.cache.validate()


async def test_a_result_is_shared_and_kept_for_a_while(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        probe = Probe(server.socket_path)
        results = await asyncio.gather(*(probe.result() for _ in range(20)))
        results.append(await probe.result())
        assert all(result is results[0] for result in results)
        assert server.calls == WHOLE_WAY
        await probe.close()


@pytest.mark.usefixtures("_always_fresh")
async def test_the_connection_is_kept(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        probe = Probe(server.socket_path)
        for _ in range(5):
            assert (await probe.result()).is_ok
        assert server.num_connections == 1
        assert server.calls == WHOLE_WAY + WHOLE_WAY[2:] * 4
        assert (probe.tally.num_ok, probe.tally.num_stored, probe.tally.num_readable) == (5, 5, 0)
        await probe.close()


async def test_an_asker_that_leaves_does_not_end_the_probe_of_others(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        probe = Probe(server.socket_path)
        leaver, stayer = asyncio.create_task(probe.result()), asyncio.create_task(probe.result())
        await asyncio.sleep(0)
        leaver.cancel()
        assert (await stayer).is_ok
        await asyncio.wait({leaver})
        assert leaver.cancelled()
        await probe.close()


def refuses(_: wire.Answered) -> wire.Answered:
    return wire.Failure("cache_error", "because of the test")


def answers(body: wire.Answered) -> Fault:
    return lambda _: body


def hangs(_: wire.Answered) -> wire.Answered:
    raise Hang


def hangs_up(_: wire.Answered) -> wire.Answered:
    raise HangUp


FAULTS: list[tuple[str, Fault, str, str]] = [
    ("Hello", refuses, "hello", "because of the test"),
    ("Attach", refuses, "attach", "because of the test"),
    ("Reserve", refuses, "reserve", "because of the test"),
    ("Reserve", answers(wire.Reserved(("resident",), (), None)), "reserve", "resident"),
    ("Reserve", answers(wire.Reserved(("refused",), (), ("layout_mismatch", "x"))), "reserve", "layout_mismatch"),
    (
        "Reserve",
        answers(wire.Reserved(("write",), (wire.Grant(0, wire.Region(1 << 40, PAGE, 1), (0,)),), None)),
        "write",
        "does not lie in the arena",
    ),
    ("Commit", hangs_up, "commit", "closed the connection"),
    ("Commit", answers(wire.Committed(("partial",))), "commit", "partial"),
    ("Lookup", answers(wire.Found(None, (), 0, 0)), "lookup", "2 times in a row"),
    ("Lookup", answers(wire.Found(None, (), 0, 1)), "lookup", "cap on leases"),
    ("Lookup", lambda _: b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1", "lookup", "no answer of protocol"),
    ("Lookup", lambda _: b"\xff\xff\xff\xff", "lookup", "limit"),
    ("Release", answers(wire.Noted()), "release", "answered by Noted"),
    ("Clear", refuses, "clear", "because of the test"),
]


@pytest.mark.usefixtures("_always_fresh")
@pytest.mark.parametrize(("call", "fault", "step", "detail"), FAULTS)
async def test_a_fault_is_named_and_the_next_probe_connects_again(
    tmp_path: Path, call: str, fault: Fault, step: str, detail: str
) -> None:
    async with standing_in(tmp_path) as server:
        probe = Probe(server.socket_path)
        before = num_fds()
        server.faults[call] = fault
        result = await probe.result()
        assert (result.is_ok, result.step) == (False, step)
        assert result.detail is not None
        assert detail in result.detail
        server.faults.clear()
        # What a failed probe leaves is gone after the next one, but for the quarantine of its bytes.
        assert (await probe.result()).is_ok
        assert (server.num_connections, probe.tally.num_failed, probe.tally.num_ok) == (2, 1, 1)
        assert server.cache.statistics().num_chunks[ChunkState.READABLE] == 0
        await probe.close()
        await until(lambda: num_fds() <= before)  # the server's end of a closed connection is closed a moment later
        server.cache.validate()


async def test_bytes_that_changed_are_seen(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:

        def flip(answer: wire.Answered) -> wire.Answered:
            assert isinstance(answer, wire.Found)
            server.corrupt(answer.regions[0].offset + 17)
            return answer

        server.faults["Lookup"] = flip
        result = await probed(server)
        assert (result.is_ok, result.step) == (False, "read")
        assert result.detail == "the bytes that were read are not those that were written"


@pytest.mark.parametrize("call", WHOLE_WAY)
async def test_a_server_that_hangs_fails_the_probe_in_time(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "PROBE_TIMEOUT_S", 0.1)
    async with standing_in(tmp_path) as server:
        server.faults[call] = hangs
        result = await probed(server)
        assert (result.is_ok, result.step, result.detail) == (False, call.lower(), "no answer within 0.1 s")
        assert 0.09 < result.took_s < 1  # a loop may wake a hair early


async def test_nobody_listens(tmp_path: Path) -> None:
    probe = Probe(str(tmp_path / "nobody.sock"))
    result = await probe.result()
    assert (result.is_ok, result.step) == (False, "connect")
    assert "nobody.sock cannot be connected to: No such file" in str(result.detail)
    await probe.close()


async def test_closing_ends_a_probe_that_waits(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        server.faults["Commit"] = hangs
        probe = Probe(server.socket_path)
        asked = asyncio.create_task(probe.result())
        await until(lambda: "Commit" in server.calls)
        await probe.close()
        await asyncio.wait({asked})
        assert asked.cancelled()


# ---- room ------------------------------------------------------------------------------------------------------------


async def test_no_room_is_not_unhealthy(tmp_path: Path) -> None:
    async with standing_in(tmp_path, num_pages=2) as server:
        engine = server.attach_engine()
        server.store(engine, 1)
        assert server.lookup(engine, 1).lease is not None  # as much as one engine may lease
        other = server.attach_engine("D", 101)
        server.store(other, 2)
        assert server.lookup(other, 2).lease is not None
        result = await probed(server)
        assert (result.is_ok, result.step) == (True, "reserve")
        assert "not stored, for lack of room: no room for 4096 bytes" in str(result.detail)
        assert server.cache.statistics().num_chunks[ChunkState.READABLE] == 2


async def test_before_the_first_byte_is_populated(tmp_path: Path) -> None:
    async with standing_in(tmp_path, usable_pages=0) as server:
        result = await probed(server)
        assert result.is_ok
        assert "lack of room" in str(result.detail)


@pytest.mark.usefixtures("_always_fresh")
async def test_where_a_hole_is_nothing_is_evicted(tmp_path: Path) -> None:
    async with standing_in(tmp_path, num_pages=4) as server:
        engine = server.attach_engine()
        server.store(engine, 1, 2, 3)
        probe = Probe(server.socket_path)
        for _ in range(10):
            assert (await probe.result()).is_ok
        statistics = server.cache.statistics()
        assert (statistics.counters.num_evicted, statistics.num_chunks[ChunkState.READABLE]) == (0, 3)
        await probe.close()


@pytest.mark.usefixtures("_always_fresh")
async def test_without_a_hole_one_chunk_goes_however_often_it_is_asked(tmp_path: Path) -> None:
    async with standing_in(tmp_path, num_pages=4) as server:
        engine = server.attach_engine()
        server.store(engine, 1, 2, 3, 4)
        probe = Probe(server.socket_path)
        for _ in range(10):
            assert (await probe.result()).is_ok
        statistics = server.cache.statistics()
        assert (statistics.counters.num_evicted, statistics.num_chunks[ChunkState.READABLE]) == (1, 3)
        await probe.close()


async def test_a_chunk_that_somebody_clears_is_tried_again(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:

        def clear_once(answer: wire.Answered) -> wire.Answered:
            del server.faults["Commit"]
            assert server.control(Clear()) == Cleared(1, PAGE, 0)
            return answer

        server.faults["Commit"] = clear_once
        result = await probed(server)
        assert (result.is_ok, result.step) == (True, "clear")
        assert server.calls.count("Reserve") == 2


async def test_the_probe_is_an_engine_of_its_own_name(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        probe = Probe(server.socket_path)
        assert (await probe.result()).is_ok
        assert [engine.engine for engine in server.engines()] == [PROBE_NAME]
        await probe.close()
