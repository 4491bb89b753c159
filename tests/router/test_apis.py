"""Every API that vLLM serves: its streams end as its own clients expect, its errors have its own shape, and its counts
say what reuse saved."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import pytest

from antiphon.router.app import Router
from antiphon.router.routes import ROUTES
from tests.router.apis import (
    ALL,
    COMPLETIONS,
    GENERATE,
    MESSAGES,
    RESPONSES,
    Script,
    Spoken,
    chunk,
    error_of,
    named,
    prefills,
    send,
    send_bytes,
    streams,
)
from tests.router.scripted import (
    HANDLE,
    ScriptedEngine,
    Seen,
    Wire,
    ask,
    connected,
    counted,
    engine,
    newest,
    routing,
    until,
)

every_api = pytest.mark.parametrize("api", ALL, ids=lambda api: api.path)


@contextlib.asynccontextmanager
async def fleet(decode: Script, **knobs: object) -> AsyncIterator[tuple[Router, ScriptedEngine, ScriptedEngine]]:
    async with engine(prefills) as p, engine(decode) as d, routing([p], [d], **knobs) as router:
        yield router, p, d


# ---- streams ---------------------------------------------------------------------------------------------------------


@every_api
async def test_a_stream_arrives_byte_for_byte_and_is_complete(api: Spoken) -> None:
    async with fleet(streams(api)) as (router, p, d):
        reply = await send(router, api)
        assert (reply.status, reply.body, reply.is_cut) == (200, api.stream, False)
        receipt = newest(router)
        assert (receipt["outcome"], receipt["path"], receipt["reason"]) == ("completed", "pd", "default")
        (kept,) = router.receipts.latest(1)
        assert (kept.prompt_tokens, kept.cached_tokens) == (9, 4)
        assert d.seen[0].params == HANDLE
        assert p.seen[0].path == d.seen[0].path == api.path


@every_api
async def test_a_stream_is_over_at_its_end_although_the_connection_stays_open(api: Spoken) -> None:
    async def lingers(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(api.stream)
        await wire.until_closed()

    async with fleet(lingers) as (router, _, _):
        assert (await send(router, api)).body == api.stream
        assert newest(router)["outcome"] == "completed"


@every_api
async def test_a_stream_that_arrives_in_bits_is_complete(api: Spoken) -> None:
    bits = [api.stream[start : start + 11] for start in range(0, len(api.stream), 11)]
    async with fleet(streams(api, *bits)) as (router, _, _):
        assert (await send(router, api)).body == api.stream
        assert newest(router)["outcome"] == "completed"


@every_api
@pytest.mark.parametrize("end", ["cut", "early", "silent"])
async def test_a_stream_of_a_lost_engine_ends_as_its_clients_expect(api: Spoken, end: str) -> None:
    partial = api.words[1][:10]

    async def fails(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(api.preamble + api.words[0] + partial)
        await wire.writer.drain()
        if end == "cut":
            wire.cut()
        elif end == "early":
            wire.end()
        else:
            await wire.until_closed()

    async with fleet(fails, idle_timeout_s=0.2) as (router, _, _):
        reply = await send(router, api)
        assert not reply.is_cut
        assert reply.body.startswith(api.preamble + api.words[0])
        error = error_of(api, reply.body.removeprefix(api.preamble + api.words[0]))
        if api is RESPONSES:
            assert (error["type"], error["sequence_number"], error["code"]) == ("error", 3, "server_error")
        elif api is MESSAGES:
            assert error["error"]["type"] == ("timeout_error" if end == "silent" else "api_error")
        else:
            assert error["error"]["code"] == (504 if end == "silent" else 502)
        assert newest(router)["outcome"] == "failed"
        assert counted(router, "stream_truncations_total") == 1


@pytest.mark.parametrize("api", [each for each in ALL if each.error], ids=lambda api: api.path)
async def test_an_error_event_of_the_engine_is_passed_on_and_is_the_end(api: Spoken) -> None:
    async with fleet(streams(api, api.words[0], api.error)) as (router, _, _):
        reply = await send(router, api)
        assert reply.body == api.words[0] + api.error
        receipt = newest(router)
        assert receipt["outcome"] == "failed"
        assert "error event" in str(receipt["error"])


@pytest.mark.parametrize("api", [each for each in ALL if each.error], ids=lambda api: api.path)
async def test_a_stream_that_begins_with_an_error_is_tried_again(api: Spoken) -> None:
    num_asked = 0

    async def fails_once(seen: Seen, wire: Wire) -> None:
        nonlocal num_asked
        num_asked += 1
        await streams(api, api.error if num_asked == 1 else api.stream)(seen, wire)

    async with fleet(fails_once) as (router, _, _):
        assert (await send(router, api)).body == api.stream
        assert num_asked == 2


async def test_a_response_that_fails_before_its_first_token_is_tried_again() -> None:
    """vLLM writes the first two events of a response before its engine has done anything."""
    api, num_asked = RESPONSES, 0

    async def fails_once(seen: Seen, wire: Wire) -> None:
        nonlocal num_asked
        num_asked += 1
        if num_asked > 1:
            await streams(api)(seen, wire)
            return
        wire.begin()
        wire.piece(api.preamble)
        await wire.writer.drain()
        await asyncio.sleep(0.05)
        wire.cut()

    async with fleet(fails_once) as (router, p, d):
        reply = await send(router, api)
        assert (reply.status, reply.body) == (200, api.stream)
        assert (len(p.seen), len(d.seen)) == (2, 2)


async def test_a_response_without_a_first_token_has_a_deadline() -> None:
    async def hangs(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(RESPONSES.preamble)
        await wire.until_closed()

    async with fleet(hangs, first_token_timeout_s=0.2, idle_timeout_s=30.0) as (router, _, _):
        reply = await send(router, RESPONSES)
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (504, "decode_timeout")


async def test_a_response_whose_client_left_is_not_cancelled_before_its_engine_has_admitted_it() -> None:
    """Its first two events say nothing of that; until then nobody would free the prefill engine's blocks."""
    asked, left, was_cut = asyncio.Event(), asyncio.Event(), []

    async def decodes(_: Seen, wire: Wire) -> None:
        asked.set()
        await left.wait()
        wire.begin()
        wire.piece(RESPONSES.preamble)
        await wire.writer.drain()
        await asyncio.sleep(0.1)
        was_cut.append(wire.is_cut)
        wire.piece(RESPONSES.words[0])
        await wire.until_closed()

    async with fleet(decodes, abort_grace_s=30.0) as (router, _, d):
        async with connected(router) as client:
            client.send("/v1/responses", **RESPONSES.body)
            await asked.wait()
        await until(lambda: counted(router, "client_disconnects_total", stage="awaiting") == 1, "it has left")
        left.set()
        await until(lambda: d.num_left == 1, "the engine is told")
        assert was_cut == [False]
        await until(lambda: newest(router)["outcome"] == "cancelled", "it is over")


@pytest.mark.parametrize("api", [RESPONSES, MESSAGES], ids=lambda api: api.path)
async def test_a_text_that_looks_like_the_end_of_a_stream_is_text(api: Spoken) -> None:
    name = api.end.split(b"\n")[0].decode()
    text = named("content_block_delta", delta=f"\n\n{name}\ndata: x\n\nevent: error\ndata: [DONE]\n\n")
    async with fleet(streams(api, api.preamble, *api.words, text, api.end)) as (router, _, _):
        assert (await send(router, api)).body == api.preamble + b"".join(api.words) + text + api.end
        assert newest(router)["outcome"] == "completed"


async def test_a_last_event_that_is_passed_on_in_pieces_is_still_the_end() -> None:
    output = [{"content": "y" * 20_000_000}]
    end = named("response.completed", response={"output": output}, sequence_number=4)
    stream = RESPONSES.preamble + RESPONSES.words[0] + end

    async def writes_much(_: Seen, wire: Wire) -> None:
        wire.begin()
        for start in range(0, len(stream), 1_000_000):
            wire.piece(stream[start : start + 1_000_000])
            await wire.writer.drain()
        wire.end()

    async with fleet(writes_much) as (router, _, _):
        reply = await send(router, RESPONSES)
        assert len(reply.body) == len(stream)
        assert reply.body == stream
        assert newest(router)["outcome"] == "completed"


async def test_a_stream_that_is_lost_inside_an_event_that_is_passed_on_in_pieces_is_cut() -> None:
    """An error event within it could not be read."""

    async def dies(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(COMPLETIONS.words[0] + b'data: {"x":"')
        for _ in range(9):
            wire.piece(b"y" * 1_000_000)
            await wire.writer.drain()
        wire.cut()

    async with fleet(dies) as (router, _, _):
        reply = await send(router, COMPLETIONS)
        assert reply.is_cut
        assert reply.body.startswith(COMPLETIONS.words[0] + b'data: {"x":"yy')
        assert newest(router)["outcome"] == "failed"


# ---- errors ----------------------------------------------------------------------------------------------------------


@every_api
async def test_errors_of_the_router_have_the_apis_shape(api: Spoken) -> None:
    async def crashes(_: Seen, wire: Wire) -> None:
        wire.whole(b"{}", status=500)

    async with fleet(crashes) as (router, _, _):
        failed = await send(router, api)
        malformed = await send_bytes(router, api.path, b'{"stream": tru')
        forbidden = await send(router, api, kv_transfer_params={"do_remote_prefill": True})
    assert [each.status for each in (failed, malformed, forbidden)] == [502, 400, 400]
    for reply in (failed, malformed, forbidden):
        value = json.loads(reply.body)
        if api is MESSAGES:
            assert set(value) == {"type", "error"}
            assert set(value["error"]) == {"type", "message"}
        else:
            assert set(value["error"]) == {"message", "type", "param", "code"}


@every_api
async def test_a_refusal_of_the_prefill_engine_is_the_clients_answer(api: Spoken) -> None:
    said = b'{"type":"error","error":{"type":"BadRequestError" ,"message":"no"}}'

    async def refuses(_: Seen, wire: Wire) -> None:
        wire.whole(said, status=400)

    async with engine(refuses) as p, engine(streams(api)) as d, routing([p], [d]) as router:
        reply = await send(router, api)
        assert (reply.status, reply.body, d.seen) == (400, said, [])


# ---- counts ----------------------------------------------------------------------------------------------------------

WHOLE = {
    "/v1/responses": '{"output":[],"usage":{"input_tokens":9,"input_tokens_details":{"cached_tokens":%d},"x":1.10}}',
    "/v1/messages": '{"content":[],"usage":{"input_tokens":%d,"output_tokens":2,"cache_read_input_tokens":%d}}',
}
CHUNKS = '{"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":%d},"x":1.10}}'


def counts(path: str, cached: int) -> str:
    """An answer of nine prompt tokens, of which ``cached`` were cached."""
    return WHOLE[path] % (9 - cached, cached) if path == "/v1/messages" else WHOLE.get(path, CHUNKS) % cached


@every_api
async def test_cached_tokens_of_a_whole_answer_are_what_reuse_saved(api: Spoken) -> None:
    async def answers(seen: Seen, wire: Wire) -> None:
        wire.whole(counts(seen.path, 8).encode())

    async with fleet(answers) as (router, _, _):
        assert (await send(router, api, stream=False)).body.decode() == counts(api.path, 4)


@every_api
async def test_cached_tokens_of_a_large_answer_too(api: Spoken) -> None:
    filler = '{"filler":"' + "y" * 17_000_000 + '",'

    async def answers(seen: Seen, wire: Wire) -> None:
        data = (filler + counts(seen.path, 8)[1:]).encode()
        cut = len(data) - 30  # within the usage object
        wire.begin("application/json")
        for start in range(0, cut, 1_000_000):
            wire.piece(data[start : min(start + 1_000_000, cut)])
            await wire.writer.drain()
        wire.piece(data[cut:])
        wire.end()

    async with fleet(answers) as (router, _, _):
        reply = await send(router, api, stream=False)
        assert reply.body[len(filler) - 1 :].decode() == "," + counts(api.path, 4)[1:]
        assert len(reply.body) == len(filler) + len(counts(api.path, 4)) - 1


@every_api
@pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])
async def test_cached_tokens_of_every_event_that_counts_them(api: Spoken, together: bool) -> None:
    def events(cached: int) -> list[bytes]:
        value = json.loads(counts(api.path, cached))
        if api is RESPONSES:
            last = named("response.completed", response=value, sequence_number=4)
            return [api.preamble, *api.words, last]
        if api is MESSAGES:
            return [*api.words, named("message_delta", delta={}, usage=value["usage"]), api.end]
        return [chunk(value), *api.words, chunk(value), api.end]  # continuous_usage_stats, and the last one

    pieces = [b"".join(events(8))] if together else events(8)
    async with fleet(streams(api, *pieces)) as (router, _, _):
        assert (await send(router, api)).body == b"".join(events(4))


@every_api
async def test_counts_of_an_engine_that_served_alone_are_its_own(api: Spoken) -> None:
    async def answers(seen: Seen, wire: Wire) -> None:
        wire.whole(counts(seen.path, 8).encode())

    async with engine(answers) as d, routing([], [d]) as router:
        assert (await send(router, api, stream=False)).body.decode() == counts(api.path, 8)
        assert newest(router)["path"] == "local"


# ---- the further routes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(path for path, route in ROUTES.items() if not route.is_split))
async def test_what_one_engine_serves_alone_reaches_one_once_as_it_was_sent(path: str) -> None:
    body, answer = b'{ "input" :"\xc3\xa9", "x":1.10,"n":2}', b'{"x": 1.10}'

    async def answers(_: Seen, wire: Wire) -> None:
        wire.whole(answer)

    async with engine(prefills) as p, engine(answers) as d, engine(answers) as e, routing([p], [d, e]) as router:
        reply = await send_bytes(router, path, body)
        assert (reply.status, reply.body) == (200, answer)
        assert [seen.body for seen in d.seen + e.seen] == [body]
        assert p.seen == []
        assert (reply.headers["x-antiphon-path"], reply.headers["x-antiphon-reason"]) == ("local", "single_stage")


@pytest.mark.parametrize("path", ["/v1/audio/transcriptions", "/v1/audio/translations"])
async def test_a_form_is_passed_on_unread_and_its_answer_may_be_text(path: str) -> None:
    form = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n\x00\xff{"stream":\r\n--b--\r\n'

    async def transcribes(_: Seen, wire: Wire) -> None:
        wire.whole(b"1\n00:00 --> 00:01\nhello\n", content_type="text/plain; charset=utf-8")

    async with engine(transcribes) as d, routing([], [d]) as router:
        reply = await send_bytes(router, path, form, "multipart/form-data; boundary=b")
        assert (reply.status, reply.body) == (200, b"1\n00:00 --> 00:01\nhello\n")
        assert reply.headers["content-type"] == "text/plain; charset=utf-8"
        assert d.seen[0].body == form
        assert counted(router, "engine_errors_total", role="decode", engine=d.address, kind="garbage") == 0


async def test_a_transcription_is_streamed_to_its_end() -> None:
    stream = chunk({"object": "transcription.chunk", "choices": []}) + COMPLETIONS.end
    async with engine(streams(COMPLETIONS, stream)) as d, routing([], [d]) as router:
        reply = await send_bytes(router, "/v1/audio/transcriptions", b"--b--", "multipart/form-data; boundary=b")
        assert reply.body == stream
        assert newest(router)["outcome"] == "completed"


async def test_the_answer_that_is_kept_is_none_and_can_be_neither_got_nor_cancelled() -> None:
    async with fleet(streams(RESPONSES)) as (router, p, d):
        async with connected(router) as client:
            client.get("/v1/responses/resp_1")
            got = await client.reply()
        cancelled = await send_bytes(router, "/v1/responses/resp_1/cancel", b"{}")
        followed = await ask(router, "/v1/responses", input="x", previous_response_id="resp_1")
        later = await ask(router, "/v1/responses", input="x", background=True)
        assert [each.status for each in (got, cancelled, followed, later)] == [404, 404, 400, 400]
        for reply in (got, cancelled, followed, later):
            error = json.loads(reply.body)["error"]
            assert error["code"] == "stateful_response_refused"
            assert "whole conversation" in error["message"]
        assert p.seen == d.seen == []


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        *(("GET", api.path, "POST") for api in ALL),
        ("DELETE", "/tokenize", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("PUT", "/health", "GET, HEAD"),
        ("DELETE", "/metrics", "GET, HEAD"),
    ],
)
async def test_a_method_that_a_route_does_not_take_is_told_those_that_it_does(
    method: str, path: str, allowed: str
) -> None:
    async with fleet(streams(COMPLETIONS)) as (router, _, _), connected(router) as client:
        client.writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n".encode())
        reply = await client.reply()
        assert (reply.status, reply.headers["allow"]) == (405, allowed)


async def test_what_only_pythons_json_takes_is_left_for_the_engines_to_judge() -> None:
    body = rb'{"prompt":"\ud800","temperature":NaN,"max_tokens":5}'

    async def answers(_: Seen, wire: Wire) -> None:
        wire.whole(b"{}")

    async with fleet(answers) as (router, p, d):
        assert (await send_bytes(router, "/v1/completions", body)).status == 200
        assert p.seen[0].body.startswith(rb'{"prompt":"\ud800","temperature":NaN,"max_tokens":1')
        assert d.seen[0].body.startswith(body[:-1] + b',"kv_transfer_params":{')


async def test_sampling_parameters_with_too_many_keys_are_refused() -> None:
    many = {f"k{number}": number for number in range(2000)}
    async with fleet(streams(GENERATE)) as (router, p, _):
        reply = await send(router, GENERATE, sampling_params=many)
        assert (reply.status, json.loads(reply.body)["error"]["param"]) == (400, "sampling_params")
        assert p.seen == []


@pytest.mark.parametrize("number", [1, 2], ids=["pd", "local"])
@pytest.mark.parametrize("key", ["kv_transfer_params", "kv_transfer_param\\u0073"])
async def test_a_handle_of_the_clients_own_is_refused_where_engines_keep_it(key: str, number: int) -> None:
    """``extra_args`` is where vLLM itself puts the handle of a request."""
    handle = json.dumps(HANDLE)
    body = f'{{"token_ids":[1],"sampling_params":{{"n":{number},"extra_args":{{"a":1,"{key}":{handle}}}}}}}'
    async with fleet(streams(GENERATE)) as (router, p, d):
        reply = await send_bytes(router, GENERATE.path, body.encode())
        error = json.loads(reply.body)["error"]
        assert (reply.status, error["code"]) == (400, "kv_transfer_params_refused")
        assert error["param"] == "sampling_params.extra_args.kv_transfer_params"
        assert p.seen == d.seen == []
        assert (await send(router, GENERATE, sampling_params={"n": 2, "extra_args": {"a": 1}})).status == 200


@every_api
async def test_the_beginning_of_a_prompt_is_a_key_to_an_engine_in_every_api(api: Spoken) -> None:
    async with (
        engine(prefills) as p,
        engine(prefills) as q,
        engine(streams(api)) as d,
        routing([p, q], [d], policy="consistent_hash") as router,
    ):
        other = json.loads(json.dumps(api.body).replace('"x"', '"something else"').replace("[1, 2]", "[3, 4]"))
        for _ in range(4):
            await send(router, api)
            await send(router, api, **other)
        of_each = [{seen.body for seen in each.seen} for each in (p, q)]
        assert len(of_each[0] | of_each[1]) == 2
        assert not of_each[0] & of_each[1]
