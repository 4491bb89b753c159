"""A router that admits cold prompts by bytes, from outside: how many reach engines, in which order, and what is left.

A token has a megabyte of KV, and a prompt of a hundred tokens to compute is cold.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from antiphon.router.app import Router
from tests.router.scripted import (
    HANDLE,
    ScriptedEngine,
    Seen,
    Wire,
    connected,
    counted,
    newest,
    prefills,
    routing,
    streams,
    take_down,
    until,
)
from tests.router.served import (
    Gate,
    ask_as,
    check_idle,
    cold,
    crowd,
    engine,
    error_of,
    idle,
    post,
    prefills_at,
    streams_at,
)

COLD: dict[str, Any] = {"kv_bytes_per_token": 1_000_000, "cold_min_bytes": 100_000_000}
SLOW = COLD | {"transfer_bytes_per_s": 5e7}
"""A decode engine takes 333 MB in a third of a lease."""


def tokens(num: int) -> list[int]:
    """A prompt of so many tokens, which the router can count."""
    return [7] * num


class Clock:
    """A router's clock, which a test sets forward."""

    def __init__(self, router: Router) -> None:
        self.ahead_s = 0.0
        assert router.entry is not None
        router.entry.clock = self
        router.inference._desk.clock = self

    def __call__(self) -> float:
        return time.monotonic() + self.ahead_s


@contextlib.asynccontextmanager
async def gated(num: int, gate: Gate, **knobs: Any) -> AsyncIterator[tuple[Router, list[ScriptedEngine]]]:
    """A router before ``num`` prefill engines that answer when they are let, and one decode engine."""
    async with contextlib.AsyncExitStack() as stack:
        prefill = [await stack.enter_async_context(engine(prefills_at(gate))) for _ in range(num)]
        decode = await stack.enter_async_context(engine(streams))
        yield await stack.enter_async_context(routing(prefill, [decode], **(COLD | knobs))), prefill


def lengths(gate: Gate) -> list[int]:
    return [len(json.loads(seen.body)["prompt"]) for seen, _ in gate.standing]


# ---- before the prefill ----------------------------------------------------------------------------------------------


async def test_of_a_flood_only_so_many_are_at_engines_at_once_and_warm_ones_pass() -> None:
    gate = Gate()
    async with gated(4, gate) as (router, prefill), crowd(router) as flood, crowd(router) as warm:
        for _number in range(12):
            flood.ask(prompt=tokens(200))
        await until(lambda: cold(router).num_waiting == 9, "nine wait")
        await until(lambda: len(gate.standing) == 3, "three are at engines")
        assert sorted(len(each.seen) for each in prefill) == [0, 1, 1, 1], "one on each engine of the lane"
        (free,) = (each for each in prefill if not each.seen)
        for _number in range(3):
            warm.ask(prompt=tokens(20))
        await until(lambda: len(gate.standing) == 6, "the warm ones do not wait")
        assert len(free.seen) == 3, "and go where no cold one is"
        assert cold(router).counts["admitted_warm"] == 3
        for num_left in reversed(range(15)):
            await until(lambda: gate.standing, "one is at an engine")
            assert cold(router).num_cold <= 3
            gate.open_one()
            await until(lambda: router.inference.num_active == num_left, "it is done")  # noqa: B023
        assert [reply.status for reply in await flood.replies()] == [200] * 12
        assert [reply.status for reply in await warm.replies()] == [200] * 3
        assert gate.most <= 6
        await idle(router)


async def test_the_nearly_warm_go_first_and_nobody_waits_for_ever() -> None:
    gate = Gate()
    async with gated(1, gate) as (router, _), crowd(router) as clients:
        clock = Clock(router)
        clients.ask(prompt=tokens(100))
        await until(lambda: len(gate.standing) == 1, "one is at the engine")
        for number, num_tokens in enumerate((4000, 9000, 400)):
            clients.ask(prompt=tokens(num_tokens))
            await until(lambda: cold(router).num_waiting == number + 1, "it waits")  # noqa: B023
        clock.ahead_s += 11.0  # no more than that is a request passed by those that come after it
        clients.ask(prompt=tokens(100))
        await until(lambda: cold(router).num_waiting == 4, "four wait")
        order = []
        while router.inference.num_active:
            await until(lambda: gate.standing, "one is at the engine")
            order += lengths(gate)
            num_active = router.inference.num_active
            gate.open_one()
            await until(lambda: router.inference.num_active < num_active, "it is done")  # noqa: B023
        assert order == [100, 400, 4000, 9000, 100]
        assert {reply.status for reply in await clients.replies()} == {200}
        await idle(router)


async def test_a_full_queue_refuses() -> None:
    gate = Gate()
    async with gated(1, gate, cold_queue_max=2) as (router, _), crowd(router) as clients:
        for _number in range(3):
            clients.ask(prompt=tokens(200))
        await until(lambda: cold(router).num_waiting == 2, "two wait")
        refused = await ask_as(router, None, prompt=tokens(200))
        assert (refused.status, error_of(refused)["code"]) == (429, "cold_queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-antiphon-path"] == "pd"
        assert (newest(router)["status"], newest(router)["outcome"]) == (429, "failed")
        assert newest(router)["code"] == "cold_queue_full"
        gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 3
        await idle(router)


async def test_who_has_waited_too_long_is_told_when_to_come_back() -> None:
    gate = Gate()
    async with gated(1, gate, cold_queue_timeout_s=30) as (router, (prefill,)), crowd(router) as clients:
        clock = Clock(router)
        first = clients.ask(prompt=tokens(200))
        await until(lambda: len(gate.standing) == 1, "one is at the engine")
        late = [clients.ask(prompt=tokens(200)) for _ in range(3)]
        await until(lambda: cold(router).num_waiting == 3, "three wait")
        clock.ahead_s = 30.0
        for task in late:
            reply = await task
            assert (reply.status, error_of(reply)["code"]) == (503, "cold_queue_timeout")
            assert int(reply.headers["retry-after"]) >= 1
        gate.open()
        assert (await first).status == 200
        assert len(prefill.seen) == 1
        await idle(router)


async def test_clients_that_leave_while_they_wait_leave_nothing() -> None:
    gate = Gate()
    async with gated(1, gate) as (router, (prefill,)), crowd(router) as served:
        served.ask(prompt=tokens(200))
        await until(lambda: len(gate.standing) == 1, "one is at the engine")
        async with crowd(router) as waiting:
            for _number in range(5):
                waiting.ask(prompt=tokens(200))
            await until(lambda: cold(router).num_waiting == 5, "five wait")
        await until(lambda: router.inference.num_active == 1, "they have left")
        shown = cold(router)
        assert (shown.num_waiting, shown.waiting_body_bytes, shown.counts["left_waiting"]) == (0, 0, 5)
        gate.open()
        assert [reply.status for reply in await served.replies()] == [200]
        assert len(prefill.seen) == 1
        await idle(router)


async def test_a_client_that_leaves_in_its_prefill_makes_room() -> None:
    gate = Gate()
    async with gated(1, gate) as (router, (prefill,)), crowd(router) as waiting:
        assert not gate.num_arrived
        async with crowd(router) as first:
            first.ask(prompt=tokens(200))
            await until(lambda: len(gate.standing) == 1, "one is at the engine")
            waiting.ask(prompt=tokens(200))
            await until(lambda: cold(router).num_waiting == 1, "one waits")
        await until(lambda: len(prefill.seen) == 2, "it begins")
        gate.open()
        assert [reply.status for reply in await waiting.replies()] == [200]
        await idle(router)


async def test_a_router_that_stops_tells_those_who_wait() -> None:
    gate = Gate()
    async with gated(1, gate) as (router, (prefill,)), crowd(router) as clients:
        for _number in range(8):
            clients.ask(prompt=tokens(200))
        await until(lambda: cold(router).num_waiting == 7 and gate.standing, "seven wait")
        await router.stop(0.0)
        assert {error_of(reply)["code"] for reply in await clients.replies()} == {"stopping"}
        check_idle(router)
        assert len(prefill.seen) == 1


# ---- engines that fail -----------------------------------------------------------------------------------------------


async def fails(_: Seen, wire: Wire) -> None:
    wire.whole(b"{}", status=500)


async def test_a_prefill_that_fails_is_tried_on_another_engine() -> None:
    async with (
        engine(fails) as bad,
        engine(prefills) as good,
        engine(streams) as d,
        routing([bad, good], [d], **COLD) as router,
        crowd(router) as clients,
    ):
        for _number in range(6):
            clients.ask(prompt=tokens(200))
        assert [reply.status for reply in await clients.replies()] == [200] * 6
        assert bad.seen
        assert len(good.seen) == 6
        assert len({seen.body for seen in good.seen}) == 1
        await idle(router)


@pytest.mark.parametrize("fallback", ["fail", "local"])
async def test_without_a_prefill_engine_nobody_keeps_a_place(fallback: str) -> None:
    """Those who wait go on one after the other: to 503, or to the decode engine, where nothing is moved."""
    gate = Gate()
    async with (
        engine(fails) as p,
        engine(streams_at(gate)) as d,
        routing([p], [d], prefill_fallback=fallback, **COLD) as router,
        crowd(router) as clients,
    ):
        for _number in range(6):
            clients.ask(prompt=tokens(200))
        if fallback == "local":
            await until(lambda: len(gate.standing) == 6, "all are at the decode engine at once")
            shown = cold(router)
            assert (shown.num_cold, shown.num_waiting, shown.committed_bytes) == (0, 0, 0)
            gate.open()
        replies = await clients.replies()
        assert {reply.status for reply in replies} <= ({200} if fallback == "local" else {502, 503})
        await idle(router)


async def test_a_prefill_without_a_handle_gives_its_place_back() -> None:
    gate = Gate()

    async def hands_nothing_over(_: Seen, wire: Wire) -> None:
        wire.whole(b'{"usage":{"prompt_tokens":200}}')

    async with (
        engine(hands_nothing_over) as p,
        engine(streams_at(gate)) as d,
        routing([p], [d], **COLD) as router,
        crowd(router) as clients,
    ):
        for _number in range(4):
            clients.ask(prompt=tokens(200))
        await until(lambda: len(gate.standing) == 4, "the decode engine computes all four")
        assert (cold(router).num_cold, cold(router).committed_bytes) == (0, 0)
        gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 4
        await idle(router)


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 16_384), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
@pytest.mark.timeout(480)
@pytest.mark.parametrize("way", ["refused", "drained"])
async def test_two_thousand_that_fail_at_once_fail_one_after_the_other(way: str) -> None:
    """Each end makes room for the next one, which ends at once: more than the interpreter lets calls be nested. How
    long that takes on a busy machine is not judged, and nobody's patience ends before it."""
    gate, num, patience_s = Gate(), 2_000, 200.0
    patient = COLD | {"cold_queue_max": num, "cold_queue_timeout_s": 3600}
    async with contextlib.AsyncExitStack() as engines, engine(streams) as d:
        p = await engines.enter_async_context(engine(prefills_at(gate)))
        async with routing([p], [d], **patient) as router, contextlib.AsyncExitStack() as stack:
            clients = []
            for _number in range(num):
                client = await stack.enter_async_context(connected(router))
                post(client, {"prompt": tokens(200), "stream": True})
                clients.append(client)
            await until(lambda: cold(router).num_waiting == num - 1 and gate.standing, "all but one wait", patience_s)
            if way == "drained":
                router.fleet.prefill.drain(router.fleet.prefill.endpoints[0])
            await engines.aclose()
            await until(lambda: not router.inference.num_active, "all have failed", patience_s)
            for client in clients:
                reply = await client.reply()
                assert reply.status in (502, 503), reply
            await idle(router)
            assert len(p.seen) == 1


# ---- after the prefill -----------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def holding(gate: Gate, decode_gate: Gate) -> AsyncIterator[tuple[Router, ScriptedEngine, ScriptedEngine]]:
    """A router whose prefill engine finds prompts to be much longer than the router took them for, so that it is after
    the prefill that there is no room for two."""
    async with (
        engine(prefills_at(gate, num_tokens=300)) as p,
        engine(streams_at(decode_gate)) as d,
        routing([p], [d], cold_per_engine=2, **SLOW) as router,
    ):
        yield router, p, d


async def test_a_hold_ends_when_the_transfer_before_it_is_over() -> None:
    gate, decode_gate = Gate(), Gate()
    gate.open()
    async with holding(gate, decode_gate) as (router, p, d), crowd(router) as clients:
        for _number in range(2):
            clients.ask(prompt=tokens(120))
        await until(lambda: (cold(router).num_held, len(d.seen)) == (1, 1), "one is held, one is pulled")
        assert len(p.seen) == 2
        assert router.inference.num_by_stage()["connecting_decode"] == 1
        decode_gate.open_one()
        await until(lambda: len(d.seen) == 2, "it goes on")
        assert cold(router).counts["held"] == 1
        assert "held_overdue" not in cold(router).counts
        decode_gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 2
        await idle(router)


async def test_a_hold_ends_at_a_third_of_the_lease_whatever_is_under_way() -> None:
    """And no deadline of connecting ends it before."""
    gate, decode_gate = Gate(), Gate()
    gate.open()
    async with holding(gate, decode_gate) as (router, p, d), crowd(router) as clients:
        clock = Clock(router)
        for _number in range(2):
            clients.ask(prompt=tokens(120))
        await until(lambda: (cold(router).num_held, len(d.seen)) == (1, 1), "one is held, one is pulled")
        clock.ahead_s = 6.0  # three times what a connection may take
        (entry,) = (flight for flight in router.inference._desk.flights if flight.life.stage.value != "awaiting")
        looked = asyncio.Event()
        asyncio.get_running_loop().call_later(0.06, looked.set)  # the router has looked at deadlines, twice
        await looked.wait()
        assert (cold(router).num_held, len(d.seen)) == (1, 1)
        assert not entry.is_resolved
        clock.ahead_s = 6.8
        await until(lambda: len(d.seen) == 2, "it goes on")
        assert cold(router).counts["held_overdue"] == 1
        assert len(p.seen) == 2, "with the KV that it has"
        decode_gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 2
        await idle(router)


async def test_the_kv_of_a_client_that_leaves_while_it_is_held_is_pulled() -> None:
    gate, decode_gate = Gate(), Gate()
    async with holding(gate, decode_gate) as (router, _, d), crowd(router) as clients:
        clients.ask(prompt=tokens(120))
        await until(lambda: len(gate.standing) == 1, "one is computed")
        async with crowd(router) as leaving:
            leaving.ask(prompt=tokens(120))
            await until(lambda: len(gate.standing) == 2, "two are computed")
            gate.open_one()
            await until(lambda: len(decode_gate.standing) == 1, "one is pulled")
            gate.open()
            await until(lambda: cold(router).num_held == 1, "one is held")
        await until(lambda: counted(router, "client_disconnects_total", stage="connecting_decode") == 1, "it left")
        assert (cold(router).num_held, len(d.seen)) == (1, 1)
        decode_gate.open()
        assert [reply.status for reply in await clients.replies()] == [200]
        await idle(router)
        assert len(d.seen) == 2
        assert d.seen[1].params == HANDLE
        assert json.loads(d.seen[1].body)["max_tokens"] == 1
        assert counted(router, "handovers_completed_after_disconnect_total") == 1


async def test_a_router_that_stops_lets_go_of_who_is_held() -> None:
    gate, decode_gate = Gate(), Gate()
    gate.open()
    async with holding(gate, decode_gate) as (router, _, d), crowd(router) as clients:
        for _number in range(2):
            clients.ask(prompt=tokens(120))
        await until(lambda: (cold(router).num_held, len(d.seen)) == (1, 1), "one is held, one is pulled")
        await router.stop(0.0)
        assert [reply.status for reply in await clients.replies()] == [503] * 2
        check_idle(router)
        assert len(d.seen) == 1


async def test_a_decode_engine_that_is_gone_by_the_end_of_the_hold() -> None:
    """The same handle goes to another one."""
    gate, decode_gate = Gate(), Gate()
    gate.open()
    async with (
        engine(prefills_at(gate, num_tokens=300)) as p,
        engine(streams) as other,
        contextlib.AsyncExitStack() as stack,
    ):
        d = await stack.enter_async_context(engine(streams_at(decode_gate)))
        async with routing([p], [d, other], cold_per_engine=2, **SLOW) as router, crowd(router) as clients:
            gone, spare = router.fleet.decode.endpoints
            take_down(router, spare)
            for _number in range(2):
                clients.ask(prompt=tokens(120))
            await until(lambda: cold(router).num_held == 1, "one is held")
            router.fleet.decode.health_succeeded(spare, time.monotonic())
            await stack.aclose()
            replies = await clients.replies()
            assert [reply.status for reply in replies] == [200] * 2
            await idle(router)
            assert not gone.num_active
            assert len(other.seen) == 2


# ---- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_rate_is_measured_of_streams_alone(stream: bool) -> None:
    """An answer that is not streamed begins when it is complete: that says nothing of how long the transfer took."""
    gate, decode_gate = Gate(), Gate()
    gate.open()
    decode_gate.open()
    async with (
        engine(prefills_at(gate, num_tokens=200)) as p,
        engine(streams_at(decode_gate)) as d,
        routing([p], [d], **COLD) as router,
        crowd(router) as clients,
    ):
        clock = Clock(router)
        await ask_as(router, None, prompt=tokens(200), stream=stream)  # the first transfer of a pair has a handshake
        decode_gate.is_open = False
        clients.ask(prompt=tokens(200), stream=stream)
        await until(lambda: decode_gate.standing, "it is at the decode engine")
        clock.ahead_s = 2.0
        decode_gate.open()
        assert [reply.status for reply in await clients.replies()] == [200]
        rates = cold(router).rates
        assert (len(rates) == 1) == stream
        assert all(9e7 < rate < 1.1e8 for rate in rates.values()), "200 MB in two seconds"
        await idle(router)
