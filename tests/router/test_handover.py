"""Between the prefill's answer and the decode request: clients that leave, engines out of reach, deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Iterator

import pytest

from antiphon.router.app import Router
from tests.router.scripted import (
    DONE,
    EVENT,
    HANDLE,
    PREFILLED,
    ScriptedEngine,
    Seen,
    Wire,
    ask,
    connected,
    counted,
    engine,
    newest,
    prefills,
    routing,
    streams,
    take_for_ready,
    until,
)
from tests.router.stack import Stack


async def answers(seen: Seen, wire: Wire) -> None:
    """A decode engine that streams if it is asked to."""
    if json.loads(seen.body)["stream"]:
        await streams(seen, wire)
    else:
        wire.whole(b'{"choices":[{"text":"x"}]}')


@contextlib.contextmanager
def black_hole() -> Iterator[ScriptedEngine]:
    """An address at which connections are neither made nor refused: a listener whose queue is full."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield ScriptedEngine(answers, listener.getsockname()[1])


@contextlib.asynccontextmanager
async def hole_first(**knobs: object) -> AsyncIterator[tuple[Router, ScriptedEngine, ScriptedEngine]]:
    """A router whose first decode engine cannot be reached although it is taken to be usable; P, and the second D."""
    knobs = {"connect_timeout_s": 0.4} | knobs
    with black_hole() as hole:
        async with engine(prefills) as p, engine(answers) as d, routing([p], [hole, d], **knobs) as router:
            take_for_ready(router, router.fleet.decode.endpoints[0])
            router.fleet.decode.picker.pick(router.fleet.decode.ready, 0.0, None)  # it is the next one's turn
            yield router, p, d


async def test_engine_that_cannot_be_reached_is_passed_over_and_the_handle_goes_to_the_next() -> None:
    async with hole_first() as (router, p, d):
        reply = await ask(router)
        assert (reply.status, reply.body) == (200, EVENT * 3 + DONE)
        assert (len(p.seen), len(d.seen)) == (1, 1)
        assert d.seen[0].params == HANDLE
        assert router.fleet.decode.num_usable == 1
        assert reply.headers["x-antiphon-decode"] == d.address


async def test_client_that_leaves_before_the_decode_request_still_has_its_kv_pulled() -> None:
    async with hole_first() as (router, p, d), connected(router) as client:
        client.send(max_tokens=500, stream_options={"include_usage": True})
        await until(lambda: p.seen and newest(router)["prefill_ms"], "the prefill has answered")
        client.leave()
        await until(lambda: newest(router)["outcome"], "the request is over")
        assert newest(router)["outcome"] == "cancelled"
        (drain,) = d.seen
        asked = json.loads(drain.body)
        assert asked["kv_transfer_params"] == HANDLE
        assert (asked["max_tokens"], asked["stream"], asked["stream_options"]) == (1, False, None)
        assert counted(router, "client_disconnects_total", stage="connecting_decode") == 1
        assert counted(router, "handovers_completed_after_disconnect_total") == 1
        assert counted(router, "handovers_abandoned_total") == 0
        assert [endpoint.num_active for endpoint in router.fleet.all()] == [0, 0, 0]


@pytest.mark.parametrize("failure", ["status", "lost", "hang"])
async def test_kv_that_could_not_be_pulled_for_a_client_that_left_is_counted(failure: str) -> None:
    async def fails(seen: Seen, wire: Wire) -> None:
        if failure == "status":
            wire.whole(b"{}", status=503)
        elif failure == "lost":
            wire.cut()
        else:
            await wire.until_closed()

    async with hole_first(handover_timeout_s=1.0) as (router, p, d), connected(router) as client:
        d.script = fails
        client.send()
        await until(lambda: p.seen and newest(router)["prefill_ms"], "the prefill has answered")
        client.leave()
        await until(lambda: newest(router)["outcome"], "the request is over")
        assert newest(router)["outcome"] == "cancelled"
        assert counted(router, "handovers_abandoned_total") == 1
        assert counted(router, "handovers_completed_after_disconnect_total") == 0


async def test_handle_is_not_sent_after_its_deadline() -> None:
    """Past the lease the prefill engine's blocks hold other people's KV, and a pull reads it with no error."""
    async with hole_first(handover_timeout_s=0.2, connect_timeout_s=0.6) as (router, p, d):
        reply = await ask(router)
        assert (reply.status, reply.body) == (200, EVENT * 3 + DONE)
        assert (len(p.seen), len(d.seen)) == (2, 1)  # a fresh prefill, whose handle was sent
        assert counted(router, "handovers_abandoned_total") == 1
        assert [endpoint.num_active for endpoint in router.fleet.all()] == [0, 0, 0]


async def test_lease_that_runs_out_twice_is_a_timeout() -> None:
    with black_hole() as hole:
        knobs = {"handover_timeout_s": 0.2, "connect_timeout_s": 0.6}
        async with engine(prefills) as p, routing([p], [hole], **knobs) as router:
            take_for_ready(router, router.fleet.decode.endpoints[0])
            reply = await ask(router)
            assert reply.status == 504
            error = json.loads(reply.body)["error"]
            assert (error["type"], error["code"]) == ("timeout_error", "handover_timeout")
            assert newest(router)["outcome"] == "failed"
            assert [endpoint.num_active for endpoint in router.fleet.all()] == [0, 0]


async def test_no_decode_engine_is_left_for_a_handle() -> None:
    async with engine(answers) as gone:
        pass
    async with engine(prefills) as p, routing([p], [gone]) as router:
        take_for_ready(router, router.fleet.decode.endpoints[0])
        reply = await ask(router)
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert json.loads(reply.body)["error"]["code"] == "no_decode_engine"
        assert len(p.seen) == 1
        assert counted(router, "handovers_abandoned_total") == 1
        # From here on it is known to be down, and the next request costs no prefill.
        assert (await ask(router)).status == 503
        assert len(p.seen) == 1


async def test_client_that_leaves_before_the_first_token_is_held_until_the_engine_has_answered() -> None:
    release = asyncio.Event()

    async def late(seen: Seen, wire: Wire) -> None:
        wire.is_idle = False
        await release.wait()
        await streams(seen, wire)

    async with engine(prefills) as p, engine(late) as d, routing([p], [d], abort_grace_s=30.0) as router:
        async with connected(router) as client:
            client.send()
            await until(lambda: d.seen, "the decode engine was asked")
        await until(lambda: counted(router, "client_disconnects_total", stage="awaiting") == 1, "it was noticed")
        await asyncio.sleep(0)
        assert d.num_left == 0
        assert newest(router)["outcome"] is None
        release.set()
        await until(lambda: newest(router)["outcome"], "the request is over")
        assert newest(router)["outcome"] == "cancelled"
        assert counted(router, "handovers_completed_after_disconnect_total") == 1


async def test_grace_has_an_end() -> None:
    async def hangs(_: Seen, wire: Wire) -> None:
        await wire.until_closed()

    async with engine(prefills) as p, engine(hangs) as d, routing([p], [d], abort_grace_s=0.3) as router:
        async with connected(router) as client:
            client.send()
            await until(lambda: d.seen, "the decode engine was asked")
        await until(lambda: d.num_left == 1, "its connection is closed")
        await until(lambda: newest(router)["outcome"], "the request is over")
        assert newest(router)["outcome"] == "cancelled"
        assert router.fleet.decode.endpoints[0].num_active == 0


async def test_without_a_handle_a_client_that_leaves_is_let_go_at_once() -> None:
    async def hangs(_: Seen, wire: Wire) -> None:
        await wire.until_closed()

    async with engine(hangs) as d, routing([], [d], abort_grace_s=30.0) as router:
        async with connected(router) as client:
            client.send()
            await until(lambda: d.seen, "the decode engine was asked")
        await until(lambda: d.num_left == 1, "its connection is closed")
        assert newest(router)["outcome"] == "cancelled"


async def test_answer_and_leaving_client_in_the_same_moment() -> None:
    """However the two fall together, each request ends once and no engine's counter is off."""
    chance = asyncio.Event()

    async def at_once(_: Seen, wire: Wire) -> None:
        wire.whole(PREFILLED)
        chance.set()

    async with engine(at_once) as p, engine(answers) as d, routing([p], [d], abort_grace_s=0.2) as router:
        for number in range(40):
            chance.clear()
            async with connected(router) as client:
                client.send(stream=bool(number % 2))
                await chance.wait()
                for _ in range(number % 8):
                    await asyncio.sleep(0)
        await until(lambda: router.inference.num_active == 0, "no request in progress")
        outcomes = [receipt.outcome for receipt in router.receipts.latest(40)]
        assert len(outcomes) == 40
        assert set(outcomes) <= {"cancelled", "completed"}
        assert [endpoint.num_active for endpoint in router.fleet.all()] == [0, 0]
        # Whoever had prefilled was handed over, for the client or for nobody.
        assert len(d.seen) <= len(p.seen)
        assert (await ask(router)).body == EVENT * 3 + DONE


@pytest.mark.process
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_kv_that_cannot_be_loaded(stack: Stack, stream: bool) -> None:
    """The engine that the handle names is gone: the decode engine fails the request, as vLLM by default."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        handle = HANDLE | {"remote_host": "127.0.0.1", "remote_port": unused.getsockname()[1]}

    async def names_a_dead_engine(_: Seen, wire: Wire) -> None:
        wire.whole(json.dumps({"kv_transfer_params": handle}).encode())

    d = ScriptedEngine(answers, stack.decode[0].port)
    async with engine(names_a_dead_engine) as p, routing([p], [d]) as router:
        reply = await ask(router, prompt="words that no engine has cached", stream=stream)
        assert reply.status == 502
        assert json.loads(reply.body)["error"]["code"] == "decode_error"
        assert len(p.seen) == 2  # a fresh prefill, once
        receipt = newest(router)
        assert receipt["outcome"] == "failed"
        assert str(receipt["error"]).startswith("the decode engine ")
