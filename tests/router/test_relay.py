"""What the relay does with engines that behave oddly, and with clients that read slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from antiphon.router.app import Router
from tests.router.scripted import (
    DONE,
    EVENT,
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
    until,
)

Script = Callable[[Seen, Wire], Awaitable[None]]


@contextlib.asynccontextmanager
async def pair(
    decode: Script, prefill: Script = prefills, **knobs: object
) -> AsyncIterator[tuple[Router, ScriptedEngine]]:
    """A router before one prefill engine and one decode engine, which is returned too."""
    async with engine(prefill) as p, engine(decode) as d, routing([p], [d], **knobs) as router:
        yield router, d


# ---- the end of a stream ---------------------------------------------------------------------------------------------


async def test_events_arrive_whole_however_they_were_cut() -> None:
    data = EVENT * 5 + DONE

    async def in_bits(_: Seen, wire: Wire) -> None:
        wire.begin()
        for start in range(0, len(data), 7):
            wire.piece(data[start : start + 7])
            await wire.writer.drain()
            await asyncio.sleep(0)
        wire.end()

    async with pair(in_bits) as (router, _):
        reply = await ask(router)
        assert (reply.status, reply.body, reply.is_cut) == (200, data, False)
        assert newest(router)["outcome"] == "completed"


async def test_partial_event_of_a_lost_engine_is_dropped_and_the_error_can_be_read() -> None:
    async def dies(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(EVENT + EVENT[:20])
        await wire.writer.drain()
        wire.cut()

    async with pair(dies) as (router, _):
        reply = await ask(router)
        assert not reply.is_cut
        first, error, done, rest = reply.body.split(b"\n\n")
        assert (first + b"\n\n", done + b"\n\n", rest) == (EVENT, DONE, b"")
        assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == 502
        assert counted(router, "stream_truncations_total") == 1


@pytest.mark.parametrize("tail", [b"", EVENT[:20]], ids=["whole", "partial"])
async def test_stream_that_ends_without_done_is_no_complete_answer(tail: bytes) -> None:
    async def forgets(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(EVENT + tail)
        wire.end()

    async with pair(forgets) as (router, _):
        reply = await ask(router)
        assert reply.body.startswith(EVENT + b'data: {"error"')
        assert reply.body.endswith(b"\n\n" + DONE)
        assert newest(router)["outcome"] == "failed"


async def test_empty_stream_is_a_bad_gateway() -> None:
    async def says_nothing(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.end()

    async with pair(says_nothing) as (router, _):
        reply = await ask(router)
        assert reply.status == 502
        assert json.loads(reply.body)["error"]["code"] == "decode_lost"


async def test_engine_lost_after_done_has_answered() -> None:
    """What follows [DONE] is only the end of the framing."""

    async def dies_late(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(EVENT + DONE)
        await wire.writer.drain()
        wire.cut()

    async with pair(dies_late) as (router, _):
        reply = await ask(router)
        assert (reply.body, reply.is_cut) == (EVENT + DONE, False)
        assert newest(router)["outcome"] == "completed"
        assert counted(router, "stream_truncations_total") == 0


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
async def test_error_event_of_the_engine_is_passed_on_and_the_receipt_tells(apart: bool) -> None:
    """vLLM ends a stream whose KV could not be loaded with an error event and [DONE]: the answer is not complete."""
    error = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n'

    before = EVENT * 2

    async def fails(_: Seen, wire: Wire) -> None:
        wire.begin()
        for piece in (before, error, DONE) if apart else (before + error + DONE,):
            wire.piece(piece)
            await wire.writer.drain()
            await asyncio.sleep(0.02)
        wire.end()

    async with pair(fails) as (router, d):
        reply = await ask(router)
        assert reply.body == before + error + DONE
        receipt = newest(router)
        assert receipt["outcome"] == "failed"
        assert "error event" in str(receipt["error"])
        assert counted(router, "engine_errors_total", role="decode", engine=d.address, kind="status") == 1


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
async def test_stream_that_begins_with_an_error_event_is_no_answer_and_is_tried_again(apart: bool) -> None:
    error = b'data: {"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}}\n\n'
    num_asked = 0

    async def fails_once(seen: Seen, wire: Wire) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            await streams(seen, wire)
            return
        wire.begin()
        for piece in (error, DONE) if apart else (error + DONE,):
            wire.piece(piece)
            await wire.writer.drain()
            await asyncio.sleep(0.02)
        wire.end()

    async with pair(fails_once) as (router, d):
        reply = await ask(router)
        assert (reply.status, reply.body) == (200, EVENT * 3 + DONE)
        assert newest(router)["outcome"] == "completed"
        assert counted(router, "engine_errors_total", role="decode", engine=d.address, kind="status") == 1
        assert counted(router, "retries_total", kind="handover") == 1


async def test_stream_that_begins_with_a_refusal_is_the_clients_answer_with_its_status() -> None:
    error = b'data: {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}\n\n'

    async def refuses(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(error + DONE)
        wire.end()

    async with pair(refuses) as (router, _):
        reply = await ask(router)
        assert (reply.status, json.loads(reply.body)["error"]["message"]) == (400, "too long")


async def test_stream_ends_at_done_although_the_engine_keeps_its_connection_open() -> None:
    async def lingers(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(EVENT + DONE)
        await wire.until_closed()

    async with pair(lingers) as (router, d):
        assert (await ask(router)).body == EVENT + DONE
        assert newest(router)["outcome"] == "completed"
        assert router.fleet.decode.num_active == 0
        await until(lambda: d.num_left == 1, "the engine's connection is closed in the end")


async def test_text_that_looks_like_an_error_event_is_text() -> None:
    text = json.dumps({"choices": [{"index": 0, "text": 'data: {"error": 1}\n\ndata: {"error": 2}'}], "error": None})

    async def quotes(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(f"data: {text}\n\n".encode() + DONE)
        wire.end()

    async with pair(quotes) as (router, _):
        assert (await ask(router)).status == 200
        assert newest(router)["outcome"] == "completed"


# ---- answers that are no stream --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_error_of_an_engine_that_is_no_json_becomes_json(status: int) -> None:
    async def crashes(_: Seen, wire: Wire) -> None:
        wire.whole(b"Internal Server Error at 10.1.2.3:8000", status=status, content_type="text/plain; charset=utf-8")

    async with pair(crashes) as (router, _):
        reply = await ask(router, stream=False)
        assert reply.status == (503 if status == 503 else 502)
        error = json.loads(reply.body)["error"]
        assert error["type"] == ("service_unavailable" if status == 503 else "upstream_error")
        assert b"10.1.2.3" not in reply.body
        assert newest(router)["outcome"] == "failed"


async def test_answer_larger_than_is_kept_goes_through_as_it_comes() -> None:
    piece = b"x" * 1_000_000

    async def writes_much(_: Seen, wire: Wire) -> None:
        wire.begin("application/json")
        for _ in range(20):
            wire.piece(piece)
            await wire.writer.drain()
        wire.end()

    async with pair(writes_much) as (router, _):
        reply = await ask(router, stream=False)
        assert (reply.status, len(reply.body), reply.is_cut) == (200, 20_000_000, False)
        assert newest(router)["outcome"] == "completed"


async def test_large_answer_that_is_cut_is_cut_for_the_client() -> None:
    async def dies(_: Seen, wire: Wire) -> None:
        wire.begin("application/json")
        for _ in range(18):
            wire.piece(b"x" * 1_000_000)
            await wire.writer.drain()
        wire.cut()

    async with pair(dies) as (router, _):
        reply = await ask(router, stream=False)
        assert reply.is_cut
        assert newest(router)["outcome"] == "failed"


# ---- deadlines -------------------------------------------------------------------------------------------------------


async def test_silence_after_the_first_token_is_noticed_in_time_although_the_first_was_late() -> None:
    """The first token comes after one idle time-out, which is allowed; the silence after it is not."""
    first_after_s, idle_timeout_s = 0.4, 0.3

    async def late_then_silent(_: Seen, wire: Wire) -> None:
        await asyncio.sleep(first_after_s)
        wire.begin()
        wire.piece(EVENT)
        await wire.until_closed()

    async with pair(late_then_silent, first_token_timeout_s=30.0, idle_timeout_s=idle_timeout_s) as (router, _):
        began = asyncio.get_running_loop().time()
        reply = await ask(router)
        assert reply.body.startswith(EVENT + b'data: {"error"')
        assert json.loads(reply.body.split(b"\n\n")[1][6:])["error"]["code"] == 504
        assert asyncio.get_running_loop().time() - began < 5.0


async def test_first_token_may_take_longer_than_the_gap_between_two() -> None:
    async def late(seen: Seen, wire: Wire) -> None:
        await asyncio.sleep(0.5)
        await streams(seen, wire)

    async with pair(late, first_token_timeout_s=30.0, idle_timeout_s=0.2) as (router, _):
        assert (await ask(router)).body == EVENT * 3 + DONE


# ---- slow readers ----------------------------------------------------------------------------------------------------


async def test_connection_of_a_large_answer_to_a_slow_reader_serves_the_next_request() -> None:
    """The answer is complete at once for the engine's connection; what stalls is the client, afterwards."""
    large = json.dumps({"choices": [{"text": "x" * 12_000_000}]}).encode()

    async def answers(seen: Seen, wire: Wire) -> None:
        if b"large" in seen.body:
            wire.whole(large)
        else:
            await streams(seen, wire)

    async with pair(answers, first_token_timeout_s=3.0) as (router, d), connected(router) as slow:
        slow.send(prompt="large", stream=False)
        await until(lambda: len(d.seen) == 1 and newest(router)["outcome"] == "completed", "the large answer")
        # On the same connection to the engine, which is idle and fresh.
        reply = await ask(router)
        assert (reply.status, reply.body) == (200, EVENT * 3 + DONE)
        assert len((await slow.reply()).body) == len(large)


async def at_rest(value: Callable[[], int]) -> None:
    """Wait until a number has not changed for a while: the kernel's buffers and ours are full."""
    before, num_equal = -1, 0
    while num_equal < 10:
        await asyncio.sleep(0.03)
        num_equal = num_equal + 1 if value() == before else 0
        before = value()


async def test_engine_is_paused_while_its_client_reads_nothing() -> None:
    written = 0
    big = b"data: " + b"y" * 100_000 + b"\n\n"

    async def floods(_: Seen, wire: Wire) -> None:
        nonlocal written
        wire.begin()
        for _ in range(300):
            wire.piece(big)
            await wire.writer.drain()
            written += 1
        wire.piece(DONE)
        wire.end()

    async with pair(floods) as (router, _), connected(router) as slow:
        slow.send()
        await until(lambda: written > 0, "the first pieces")
        await at_rest(lambda: written)
        assert written < 200  # 20 MB: socket buffers of four ends, and ours of 256 KiB
        reply = await slow.reply()
        assert (len(reply.body), reply.is_cut) == (300 * len(big) + len(DONE), False)
        assert newest(router)["outcome"] == "completed"


async def test_engine_is_paused_from_the_start_where_the_client_is_behind_already() -> None:
    """The second of two pipelined requests begins on a connection that is full of the first one's answer."""
    written = 0

    async def answers(seen: Seen, wire: Wire) -> None:
        nonlocal written
        if b"large" in seen.body:
            wire.whole(b'"' + b"x" * 12_000_000 + b'"')
            return
        wire.begin()
        for _ in range(300):
            wire.piece(b"data: " + b"y" * 100_000 + b"\n\n")
            await wire.writer.drain()
            written += 1
        wire.piece(DONE)
        wire.end()

    async with pair(answers) as (router, d), connected(router) as slow:
        slow.send(prompt="large", stream=False)
        slow.send()
        await until(lambda: len(d.seen) == 2, "the second request")
        await until(lambda: written > 0, "the first pieces")
        await at_rest(lambda: written)
        assert written < 200
        assert len((await slow.reply()).body) == 12_000_002
        assert (await slow.reply()).body.endswith(DONE)


async def test_client_that_is_behind_is_not_taken_for_an_engine_that_is_late() -> None:
    """The engine of the second pipelined request answers at once; what its client has not read is the first answer."""

    async def answers(seen: Seen, wire: Wire) -> None:
        if b"large" in seen.body:
            wire.whole(b'"' + b"x" * 12_000_000 + b'"')
        else:
            await streams(seen, wire)

    async with pair(answers, first_token_timeout_s=0.4) as (router, d), connected(router) as slow:
        slow.send(prompt="large", stream=False)
        slow.send()
        await until(lambda: len(d.seen) == 2, "the second request")
        await until(
            lambda: newest(router)["first_token_ms"] or newest(router)["outcome"], "its first token, or its end"
        )
        assert len((await slow.reply()).body) == 12_000_002
        reply = await slow.reply()
        assert (reply.status, reply.body) == (200, EVENT * 3 + DONE)
        assert counted(router, "engine_errors_total", role="decode", engine=d.address, kind="timeout") == 0
        assert router.fleet.decode.endpoints[0].num_failures == 0


async def test_client_that_stops_reading_for_good_is_cut_and_the_engine_let_go() -> None:
    async def floods(_: Seen, wire: Wire) -> None:
        wire.begin()
        while True:
            wire.piece(b"data: " + b"y" * 100_000 + b"\n\n")
            await wire.writer.drain()

    async with pair(floods, idle_timeout_s=0.5) as (router, d), connected(router) as slow:
        slow.send()
        await until(lambda: d.num_left == 1, "the engine's connection is closed")
        assert newest(router)["outcome"] == "cancelled"
        assert router.fleet.decode.endpoints[0].num_active == 0
