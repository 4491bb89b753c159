"""Every way in which one engine fails while another is there, or all of a pool fail: what the client gets, and what the
engines were sent for it. The rows are those of the failure matrix in docs/routing.md; ``test_failure_index.py`` says
which test holds which row.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.router.failing import (
    BODIES,
    CHAT,
    COMPLETIONS,
    Fleet,
    Script,
    Sight,
    answers_no_json,
    babbles,
    check_answered,
    check_ended_with_error,
    check_refused,
    cuts,
    eventually,
    fleet,
    hangs,
    prefills_without_a_handle,
    resets,
    responds,
    streams_then,
)
from tests.router.scripted import Wire, until

QUICK: dict[str, Any] = {"prefill_timeout_s": 0.5, "first_token_timeout_s": 0.5, "idle_timeout_s": 0.5}


def deadlines(fault: Script) -> dict[str, Any]:
    """Short ones where they are waited for; elsewhere a machine that stands still for a moment must not matter."""
    return QUICK if fault is hangs else {}


both = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
each_path = pytest.mark.parametrize("path", BODIES)


async def is_answered(engines: Fleet) -> bool:
    return (await engines.ask()).status == 200


async def check_recovers(engines: Fleet) -> None:
    """The engines are well again: so is the answer, though no health check has run."""
    check_answered(await engines.ask(), COMPLETIONS, stream=False)


# ---- prefill ---------------------------------------------------------------------------------------------------------

PREFILL_FAULTS = [
    pytest.param(resets, 502, "prefill_lost", "lost", id="reset"),
    pytest.param(cuts, 502, "prefill_lost", "lost", id="cut"),
    pytest.param(responds(500), 502, "prefill_error", "status", id="500"),
    pytest.param(responds(503, "retry-after: 7"), 503, "prefill_overloaded", "status", id="503"),
    pytest.param(responds(429, "retry-after: 7"), 429, "prefill_overloaded", "", id="429"),
    pytest.param(babbles, 502, "prefill_bad_answer", "garbage", id="no-http"),
    pytest.param(answers_no_json, 502, "prefill_bad_answer", "garbage", id="no-json"),
    pytest.param(hangs, 504, "prefill_timeout", "timeout", id="hang"),
]
"""What an engine does, status and code where all of them do it, and as which of its errors that is counted, if any."""
each_prefill_fault = pytest.mark.parametrize(("fault", "status", "code", "kind"), PREFILL_FAULTS)


@both
@each_path
@each_prefill_fault
async def test_prefill_fails_once_and_another_answers_under_a_fresh_id(
    fault: Script, status: int, code: str, kind: str, path: str, stream: bool
) -> None:
    async with fleet(**deadlines(fault)) as engines:
        engines.once("prefill", fault)
        reply = await engines.ask(path, stream=stream)
        check_answered(reply, path, stream=stream)
        first, second = engines.sights("prefill")
        assert first.engine is not second.engine
        assert first.token != second.token
        (decode,) = engines.sights("decode")
        handle = decode.json["kv_transfer_params"]
        assert handle["remote_request_id"].endswith((first.request_id, second.request_id))
        receipt = await engines.receipt(reply)
        assert (receipt["outcome"], receipt["path"]) == ("completed", "pd")
        assert receipt["prefill"] == f"127.0.0.1:{handle['remote_port']}"
        num_errors = await engines.samples("engine_errors_total", 'role="prefill"', f'kind="{kind}"')
        assert num_errors == await engines.samples("engine_errors_total") == (1 if kind else 0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_overload_without_a_time_to_come_again_gets_one(role: str) -> None:
    async with fleet() as engines:
        engines.always(role, responds(429))
        reply = await engines.ask()
        check_refused(reply, 429, f"{role}_overloaded")
        assert reply.headers["retry-after"] == "1"


@both
@each_prefill_fault
async def test_every_prefill_fails(fault: Script, status: int, code: str, kind: str, stream: bool) -> None:
    async with fleet(**deadlines(fault)) as engines:
        healthy = [engine.script for engine in engines.prefill]
        engines.always("prefill", fault)
        reply = await engines.ask(stream=stream)
        check_refused(reply, status, code)
        assert engines.num_sights("decode") == 0
        assert {sight.engine.name for sight in engines.sights("prefill")} == {"P1", "P2"}
        assert engines.num_sights("prefill") <= 3
        if status in (429, 503):
            assert reply.headers["retry-after"] == "7"
        receipt = await engines.receipt(reply)
        assert (receipt["outcome"], receipt["status"], receipt["decode"]) == ("failed", status, None)
        assert receipt["error"]
        assert receipt["prefill"] in {engine.address for engine in engines.prefill}
        for engine, script in zip(engines.prefill, healthy, strict=True):
            engine.script = script
        await check_recovers(engines)


async def test_prefill_refuses_the_connection_and_another_answers_at_no_cost() -> None:
    async with fleet() as engines:
        engines.prefill[0].refuse()
        for number in range(8):
            stream = bool(number % 2)
            check_answered(await engines.ask(stream=stream), COMPLETIONS, stream=stream)
        assert [len(engine.sights) for engine in engines.prefill] == [0, 8]
        assert (await engines.states("prefill"))["P1"] == "down"


@pytest.mark.parametrize("is_known", [False, True], ids=["unknown", "known"])
async def test_every_prefill_refuses(is_known: bool) -> None:
    async with fleet() as engines:
        for engine in engines.prefill:
            engine.refuse()
        if is_known:
            await engines.ask()
        check_refused(await engines.ask(), 503, "no_prefill_engine")
        check_refused(await engines.ask(CHAT, stream=True), 503, "no_prefill_engine")
        assert engines.num_sights("decode") == 0
        for engine in engines.prefill:
            await engine.listen()
        # The next request that may try one finds it: a first try waits for about half a second.
        await eventually(lambda: is_answered(engines), "a request finds one", 5.0)


@both
async def test_decode_prefills_where_that_is_allowed(stream: bool) -> None:
    async with fleet(prefill_fallback="local") as engines:
        for engine in engines.prefill:
            engine.refuse()
        reply = await engines.ask(stream=stream)
        check_answered(reply, COMPLETIONS, stream=stream)
        assert reply.headers["x-antiphon-path"] == "local"
        (sight,) = engines.sights("decode")
        assert "kv_transfer_params" not in sight.json
        assert (await engines.receipt(reply))["prefill"] is None


@both
@pytest.mark.parametrize("status", [400, 404, 422])
async def test_prefill_refuses_the_request(status: int, stream: bool) -> None:
    async with fleet() as engines:
        engines.always("prefill", responds(status))
        for _ in range(30):
            reply = await engines.ask(stream=stream)
            assert reply.status == status
            assert json.loads(reply.body)["error"]["message"] == f"said {status} by an engine"
        assert engines.num_sights("decode") == 0
        assert engines.num_sights("prefill") == 30
        # The client was at fault, thirty times: no engine was.
        assert set((await engines.states("prefill")).values()) == {"ready"}


async def test_prefill_returns_no_handle() -> None:
    async with fleet() as engines:
        engines.once("prefill", prefills_without_a_handle)
        reply = await engines.ask()
        check_answered(reply, COMPLETIONS, stream=False)
        assert reply.headers["x-antiphon-reason"] == "no_handle"
        assert await engines.samples("path_total", 'path="pd"', 'reason="no_handle"') == 1
        (sight,) = engines.sights("decode")
        assert "kv_transfer_params" not in sight.json
        receipt = await engines.receipt(reply)
        assert receipt["outcome"] == "completed"
        assert "no kv_transfer_params" in receipt["error"]


async def test_hanging_prefill_engine_holds_up_its_own_requests_only_and_is_left_alone() -> None:
    async with fleet(prefill_timeout_s=0.6) as engines:
        engines.prefill[0].script = hangs
        began = asyncio.get_running_loop().time()
        replies = await asyncio.gather(*(engines.ask(stream=bool(number % 2)) for number in range(8)))
        assert [reply.status for reply in replies] == [200] * 8
        assert asyncio.get_running_loop().time() - began < 3.0
        num_hung = len(engines.prefill[0].sights)
        assert num_hung == 4  # in turn
        for _ in range(6):
            reply = await engines.ask()
            assert reply.headers["x-antiphon-prefill"] == engines.prefill[1].address
        # Tried again at times, by one request.
        assert len(engines.prefill[0].sights) <= num_hung + 2
        assert (await engines.states("prefill"))["P1"] in ("suspect", "down")


async def test_prefill_failures_never_turn_into_local_prefills() -> None:
    """A decode engine that computed the prompts of a failing pool would be the next to fail."""
    async with fleet() as engines:
        engines.always("prefill", responds(500))
        for _ in range(5):
            reply = await engines.ask()
            assert reply.status in (502, 503)
        assert engines.num_sights("decode") == 0
        assert await engines.samples("path_total", 'path="local"') == 0


# ---- the hand-over ---------------------------------------------------------------------------------------------------


async def test_old_handles_of_a_restarted_prefill_engine_are_not_sent() -> None:
    """Requests hold handles of its first life while their decode engine takes no connection; it restarts meanwhile."""
    async with fleet(1, 2, connect_timeout_s=1.5) as engines:
        p, (hole, d) = engines.prefill[0], engines.decode
        hole.swallow()
        waiting = [asyncio.create_task(engines.ask()) for _ in range(4)]
        await until(lambda: len(p.sights) == 4, "all have prefilled")
        await until(lambda: sum(task.done() for task in waiting) == 2, "those of the other decode engine are answered")
        assert len(d.sights) == 2
        await p.restart()
        check_answered(await engines.ask(), COMPLETIONS, stream=False)  # from its prefill the router knows
        for answer in await asyncio.gather(*waiting):
            check_answered(answer, COMPLETIONS, stream=False)
        assert len(d.sights) == 5
        assert all(str(sight.handle).startswith("P1-life-2") for sight in d.sights[2:])


async def test_lease_that_runs_out_costs_a_fresh_prefill() -> None:
    async with fleet(1, 2, connect_timeout_s=5.0, handover_timeout_s=1.0) as engines:
        hole, d = engines.decode
        hole.swallow()
        replies = await asyncio.gather(engines.ask(), engines.ask(stream=True))
        check_answered(replies[0], COMPLETIONS, stream=False)
        check_answered(replies[1], COMPLETIONS, stream=True)
        assert len(engines.prefill[0].sights) == 3  # one had to be computed again
        assert len(d.sights) == 2
        handles = [sight.handle for sight in d.sights]
        assert len(set(handles)) == 2
        assert engines.prefill[0].sights[2].request_id in str(handles[1])


# ---- decode ----------------------------------------------------------------------------------------------------------


async def test_decode_refuses_the_connection_and_another_gets_the_same_handle() -> None:
    async with fleet() as engines:
        engines.decode[0].refuse()
        for number in range(8):
            stream = bool(number % 2)
            check_answered(await engines.ask(stream=stream), COMPLETIONS, stream=stream)
        assert [len(engine.sights) for engine in engines.decode] == [0, 8]
        assert engines.num_sights("prefill") == 8  # nothing was computed twice
        sent = {sight.request_id for sight in engines.sights("prefill")}
        assert all(any(str(pull.handle).endswith(each) for each in sent) for pull in engines.sights("decode"))


async def test_decode_that_takes_no_connection_is_passed_over_with_the_same_handle() -> None:
    async with fleet(connect_timeout_s=0.3) as engines:
        engines.decode[0].swallow()
        replies = await asyncio.gather(*(engines.ask() for _ in range(4)))
        assert [reply.status for reply in replies] == [200] * 4
        assert engines.num_sights("prefill") == 4


async def test_every_decode_engine_refuses() -> None:
    """Found out at the cost of one prefill at most; from then on a connection is tried before any work."""
    async with fleet() as engines:
        for engine in engines.decode:
            engine.refuse()
        check_refused(await engines.ask(), 503, "no_decode_engine")
        assert engines.num_sights("prefill") <= 1
        num_prefills = engines.num_sights("prefill")
        for stream in (False, True):
            check_refused(await engines.ask(stream=stream), 503, "no_decode_engine")
        assert engines.num_sights("prefill") == num_prefills
        for engine in engines.decode:
            await engine.listen()
        await eventually(lambda: is_answered(engines), "a request finds one", 5.0)


async def test_both_pools_refuse() -> None:
    async with fleet() as engines:
        for engine in engines.engines:
            engine.refuse()
        for _ in range(3):
            reply = await engines.ask()
            check_refused(reply, 503, json.loads(reply.body)["error"]["code"])
            assert json.loads(reply.body)["error"]["code"] in ("no_prefill_engine", "no_decode_engine")
        ready = await engines.get("/readiness")
        assert ready.status == 503


async def test_connection_that_was_closed_while_idle_is_no_failure() -> None:
    """Each engine closes its idle connections at the moment that the next request comes."""
    async with fleet(1, 1) as engines:
        for number in range(10):
            stream = bool(number % 2)
            check_answered(await engines.ask(stream=stream), COMPLETIONS, stream=stream)
            for engine in engines.engines:
                engine.cut_idle()
        states = await engines.states("prefill") | await engines.states("decode")
        assert set(states.values()) == {"ready"}


DECODE_FAULTS = [
    pytest.param(resets, 502, "decode_lost", "lost", id="reset"),
    pytest.param(cuts, 502, "decode_lost", "lost", id="cut"),
    pytest.param(responds(500), 502, "decode_error", "status", id="500"),
    pytest.param(responds(503, "retry-after: 7"), 503, "decode_overloaded", "status", id="503"),
    pytest.param(responds(429, "retry-after: 7"), 429, "decode_overloaded", "", id="429"),
    pytest.param(babbles, 502, "decode_bad_answer", "garbage", id="no-http"),
]
each_decode_fault = pytest.mark.parametrize(("fault", "status", "code", "kind"), DECODE_FAULTS)


@both
@each_path
@each_decode_fault
async def test_decode_fails_once_before_its_first_byte_and_a_fresh_prefill_serves(
    fault: Script, status: int, code: str, kind: str, path: str, stream: bool
) -> None:
    """It had the request, so it may have pulled: the old handle goes nowhere."""
    async with fleet(**deadlines(fault)) as engines:
        engines.once("decode", fault)
        reply = await engines.ask(path, stream=stream)
        check_answered(reply, path, stream=stream)
        assert engines.num_sights("prefill") == 2
        first, second = engines.sights("prefill")
        assert first.token != second.token
        lost, answered = engines.sights("decode")
        assert lost.engine is not answered.engine
        assert lost.handle
        assert answered.handle
        assert lost.handle != answered.handle
        assert lost.token != answered.token
        assert (await engines.receipt(reply))["outcome"] == "completed"
        num_errors = await engines.samples("engine_errors_total", 'role="decode"', f'kind="{kind}"')
        assert num_errors == await engines.samples("engine_errors_total") == (1 if kind else 0)


@both
@each_decode_fault
async def test_every_decode_engine_fails_before_its_first_byte(
    fault: Script, status: int, code: str, kind: str, stream: bool
) -> None:
    async with fleet(**deadlines(fault)) as engines:
        healthy = [engine.script for engine in engines.decode]
        engines.always("decode", fault)
        reply = await engines.ask(stream=stream)
        check_refused(reply, status, code)
        assert engines.num_sights("prefill") == engines.num_sights("decode") == 2  # a fresh prefill, once
        if status in (429, 503):
            assert reply.headers["retry-after"] == "7"
        receipt = await engines.receipt(reply)
        assert (receipt["outcome"], receipt["status"]) == ("failed", status)
        assert receipt["error"]
        assert receipt["decode"] in {engine.address for engine in engines.decode}
        for engine, script in zip(engines.decode, healthy, strict=True):
            engine.script = script
        await check_recovers(engines)


@pytest.mark.parametrize("fault", [resets, responds(500)], ids=["reset", "500"])
async def test_only_decode_engine_fails_once_and_gets_a_fresh_prefill(fault: Script) -> None:
    async with fleet(1, 1) as engines:
        engines.once("decode", fault)
        check_answered(await engines.ask(stream=True), COMPLETIONS, stream=True)
        assert len({sight.handle for sight in engines.sights("decode")}) == 2


@both
async def test_decode_hangs_before_its_first_byte_and_is_left_alone(stream: bool) -> None:
    async with fleet(first_token_timeout_s=0.5) as engines:
        engines.decode[0].script = hangs
        began = asyncio.get_running_loop().time()
        replies = await asyncio.gather(*(engines.ask(stream=stream) for _ in range(4)))
        assert asyncio.get_running_loop().time() - began < 3.0
        assert sorted(reply.status for reply in replies) == [200, 200, 504, 504]
        for reply in replies:
            if reply.status == 504:
                check_refused(reply, 504, "decode_timeout")
        assert (await engines.states("decode"))["D1"] in ("suspect", "down")
        again = [await engines.ask(stream=stream) for _ in range(4)]
        assert [reply.status for reply in again] == [200] * 4


@pytest.mark.parametrize("end", [resets, hangs], ids=["reset", "silence"])
async def test_head_of_a_stream_is_no_first_byte(end: Script) -> None:
    """The client was told nothing yet: a lost engine is made good, and a silent one is told by a status."""
    async with fleet(1, 2, **deadlines(end)) as engines:
        engines.once("decode", streams_then(0, end))
        reply = await engines.ask(stream=True)
        if end is resets:
            check_answered(reply, COMPLETIONS, stream=True)
            assert engines.num_sights("prefill") == engines.num_sights("decode") == 2
        else:
            check_refused(reply, 504, "decode_timeout")


async def test_prefill_falls_silent_in_the_middle_of_its_answer() -> None:
    async def begins(sight: Sight, wire: Wire) -> None:
        wire.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{")
        await hangs(sight, wire)

    async with fleet(**QUICK) as engines:
        engines.once("prefill", begins)
        check_answered(await engines.ask(), COMPLETIONS, stream=False)
        assert {sight.engine.name for sight in engines.sights("prefill")} == {"P1", "P2"}
        engines.once("prefill", begins, begins, begins)
        check_refused(await engines.ask(), 504, "prefill_timeout")


@each_path
@pytest.mark.parametrize(("end", "status"), [(resets, 502), (hangs, 504)], ids=["reset", "silence"])
async def test_decode_fails_after_its_first_byte_and_nothing_is_tried_again(
    end: Script, status: int, path: str
) -> None:
    async with fleet(idle_timeout_s=0.4) as engines:
        engines.once("decode", streams_then(2, end))
        reply = await engines.ask(path, stream=True)
        check_ended_with_error(reply, path, len(reply.body.split(b"\n\n")) - 3, status)
        assert engines.num_sights("prefill") == engines.num_sights("decode") == 1
        assert await engines.samples("stream_truncations_total") == 1
        assert (await engines.receipt(reply))["outcome"] == "failed"


@each_path
async def test_whole_answer_of_a_decode_engine_that_is_no_json_is_passed_on_and_counted(path: str) -> None:
    """The client may know better what it is; no retry, since the engine has answered."""

    async def answers_html(_: Sight, wire: Wire) -> None:
        wire.whole(b"<html>oops")

    async with fleet() as engines:
        engines.once("decode", answers_html)
        reply = await engines.ask(path)
        assert (reply.status, reply.body) == (200, b"<html>oops")
        assert engines.num_sights("prefill") == engines.num_sights("decode") == 1
        assert await engines.samples("engine_errors_total", 'role="decode"', 'kind="garbage"') == 1
        check_answered(await engines.ask(path), path, stream=False)
        assert await engines.samples("engine_errors_total") == 1


@both
async def test_refusal_by_a_decode_engine_keeps_its_status_and_words(stream: bool) -> None:
    """It comes before any head was sent, so that a stream is refused too; the KV is freed by a request of one token."""
    async with fleet() as engines:
        engines.once("decode", responds(422))
        reply = await engines.ask(stream=stream)
        assert (reply.status, reply.headers["content-type"]) == (422, "application/json")
        assert json.loads(reply.body)["error"]["message"] == "said 422 by an engine"
        await until(lambda: engines.num_sights("decode") == 2, "the KV is freed")
        freeing = engines.sights("decode")
        assert {sight.handle for sight in freeing} == {freeing[0].handle}
        assert sorted(sight.json["max_tokens"] for sight in freeing) == [1, 5]
        assert set((await engines.states("decode")).values()) == {"ready"}
