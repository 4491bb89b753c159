"""The official client with tools and JSON schemas, streamed and whole: it makes the same objects of the router's
answers as of the engine's own, and the engine gets the same request."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from tests.router.failing import FailingEngine, Fleet, Sight, fleet
from tests.router.scripted import Wire

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a place – today",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "degrees": {"type": "number", "minimum": -273.15}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
]
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "tree",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "height_m": {"type": "number", "exclusiveMaximum": 115.9}},
            "required": ["name", "height_m"],
        },
    },
}
ARGUMENTS = '{"place": "Île-de-France", "degrees": 0.30000000000000004}'
CONTENT = '{"name": "Séquoia \\u2192 \\"Hyperion\\"", "height_m": 115.92}'
HISTORY = [
    {"role": "system", "content": "Use the tools."},
    {"role": "user", "content": [{"type": "text", "text": "What is the weather?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "It rains."},
]
ASKED: dict[str, Any] = {"model": "m", "messages": HISTORY, "max_completion_tokens": 64, "seed": 2**53 + 1}
WAYS: dict[str, dict[str, Any]] = {
    "tools": {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": True, "temperature": 0.7, "top_p": 0.95},
    "schema": {"response_format": SCHEMA, "temperature": 0, "logit_bias": {"17": -1.5}},
    "vllm": {"extra_body": {"structured_outputs": {"choice": ["a", "b"]}, "top_k": 20, "min_p": 0.05}},
}
HEAD = {"id": "chatcmpl-1", "created": 1700000000, "model": "m", "system_fingerprint": "vllm"}
USAGE = {"prompt_tokens": 40, "completion_tokens": 7, "total_tokens": 47}


def call(index: int, name: str | None, arguments: str) -> dict[str, Any]:
    """One part of a tool call, as vLLM streams it: the name first, then pieces of the arguments."""
    named = {"id": f"chatcmpl-tool-{index}", "type": "function"} if name else {}
    function = {"name": name, "arguments": arguments} if name else {"arguments": arguments}
    return named | {"index": index, "function": function}


def deltas(body: dict[str, Any]) -> list[dict[str, Any]]:
    """What the model says, in pieces."""
    if "tools" not in body:
        return [
            {"reasoning": "Hm. "},
            *({"content": CONTENT[start : start + 9]} for start in range(0, len(CONTENT), 9)),
        ]
    calls = []
    for index in range(2):
        calls.append(call(index, "weather", ""))
        calls += [call(index, None, ARGUMENTS[start : start + 11]) for start in range(0, len(ARGUMENTS), 11)]
    return [{"tool_calls": [each]} for each in calls]


async def streams(sight: Sight, wire: Wire, body: dict[str, Any]) -> None:
    finish = "tool_calls" if "tools" in body else "stop"
    chunk = HEAD | {"object": "chat.completion.chunk"}
    pieces = [{"role": "assistant", "content": ""}, *deltas(body), {}]
    wire.begin()
    for number, delta in enumerate(pieces):
        choice = {"index": 0, "delta": delta, "logprobs": None, "token_ids": None}
        choice["finish_reason"] = finish if number == len(pieces) - 1 else None
        wire.piece(f"data: {json.dumps(chunk | {'choices': [choice]}, ensure_ascii=False)}\n\n".encode())
        await wire.writer.drain()
    if (body.get("stream_options") or {}).get("include_usage"):
        wire.piece(f"data: {json.dumps(chunk | {'choices': [], 'usage': USAGE})}\n\n".encode())
    wire.piece(b"data: [DONE]\n\n")
    wire.end()


async def decodes(sight: Sight, wire: Wire) -> None:
    """Answers as vLLM's chat route does."""
    body = sight.json
    if body.get("stream"):
        await streams(sight, wire, body)
        return
    message: dict[str, Any] = {"role": "assistant", "content": CONTENT, "refusal": None, "reasoning": None}
    if "tools" in body:
        function = {"name": "weather", "arguments": ARGUMENTS}
        message |= {"content": None, "tool_calls": [{"id": "tool-0", "type": "function", "function": function}]}
    finish = "tool_calls" if "tools" in body else "stop"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    answer = HEAD | {"object": "chat.completion", "choices": [choice], "usage": USAGE, "kv_transfer_params": None}
    wire.whole(json.dumps(answer, ensure_ascii=False).encode())


@contextlib.asynccontextmanager
async def two_clients() -> AsyncIterator[tuple[Fleet, openai.AsyncOpenAI, openai.AsyncOpenAI]]:
    """A client of the router, and one of the decode engine alone."""
    async with fleet(1, 1) as engines:
        engines.decode[0].script = decodes
        bases = (f"http://127.0.0.1:{engines.router.spec.port}/v1", f"{engines.decode[0].url}/v1")
        async with contextlib.AsyncExitStack() as held:
            clients = [openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) for base in bases]
            for client in clients:
                await held.enter_async_context(client)
            yield engines, *clients


def check_same_request(d: FailingEngine, p: FailingEngine) -> None:
    """The engine got from the router what it got from the client itself, and the prefill engine all but the limits."""
    routed, alone = (sight.json for sight in d.sights[-2:])
    assert routed.pop("kv_transfer_params")["do_remote_prefill"] is True
    assert routed == alone
    assert d.sights[-2].body.startswith(d.sights[-1].body[:-1])
    prefill = p.sights[-1].json
    ours = {"kv_transfer_params", "max_tokens", "min_tokens", "max_completion_tokens", "stream", "stream_options", "n"}
    assert {key: value for key, value in prefill.items() if key not in ours} == {
        key: value for key, value in alone.items() if key not in ours
    }
    assert (prefill["max_tokens"], prefill["max_completion_tokens"], prefill["stream"]) == (1, 1, False)


@pytest.mark.parametrize("way", WAYS)
async def test_whole_answer_is_the_same_object(way: str) -> None:
    async with two_clients() as (engines, routed, alone):
        answers = [await client.chat.completions.create(**ASKED, **WAYS[way]) for client in (routed, alone)]
        assert without_id(answers[0].model_dump()) == without_id(answers[1].model_dump())
        check_same_request(engines.decode[0], engines.prefill[0])
        message = answers[0].choices[0].message
        if way == "tools":
            assert message.tool_calls is not None
            assert json.loads(message.tool_calls[0].function.arguments) == json.loads(ARGUMENTS)
        else:
            assert json.loads(message.content or "")["height_m"] == 115.92


@pytest.mark.parametrize("usage", [False, True], ids=["no usage", "usage"])
@pytest.mark.parametrize("way", WAYS)
async def test_streamed_answer_is_the_same_objects(way: str, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    async with two_clients() as (engines, routed, alone):
        seen: list[list[ChatCompletionChunk]] = []
        for client in (routed, alone):
            async with await client.chat.completions.create(**ASKED, **WAYS[way], **options, stream=True) as stream:
                seen.append([chunk async for chunk in stream])
        assert [without_id(chunk.model_dump()) for chunk in seen[0]] == [
            without_id(chunk.model_dump()) for chunk in seen[1]
        ]
        check_same_request(engines.decode[0], engines.prefill[0])
        assert bool(seen[0][-1].usage) is usage
        if way == "tools":
            assert arguments_of(seen[0]) == {0: ARGUMENTS, 1: ARGUMENTS}
        else:
            said = [chunk.choices[0].delta.content or "" for chunk in seen[0] if chunk.choices]
            assert "".join(said) == CONTENT


async def test_helper_that_gathers_a_stream_and_parses_it() -> None:
    """``client.chat.completions.stream``: it knows tools and schemas, and is strict about what it is sent."""
    async with two_clients() as (_, routed, alone):
        gathered = []
        for client in (routed, alone):
            async with client.chat.completions.stream(**ASKED, tools=TOOLS) as stream:
                kinds = [event.type async for event in stream]
                gathered.append((kinds, without_id((await stream.get_final_completion()).model_dump())))
        assert gathered[0] == gathered[1]
        calls = gathered[0][1]["choices"][0]["message"]["tool_calls"]
        assert [each["function"]["parsed_arguments"] for each in calls] == [json.loads(ARGUMENTS)] * 2


async def test_refusal_of_a_schema_is_the_engines_own() -> None:
    """The prefill engine judges it first; its words reach the client as the exception that the engine alone raises."""

    async def refuses(_: Sight, wire: Wire) -> None:
        error = {
            "message": "Invalid json_schema: é",
            "type": "BadRequestError",
            "param": "response_format",
            "code": 400,
        }
        wire.whole(json.dumps({"error": error}).encode(), status=400)

    async with two_clients() as (engines, routed, alone):
        engines.prefill[0].script = engines.decode[0].script = refuses
        raised = []
        for client in (routed, alone):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(**ASKED, **WAYS["schema"], stream=True)
            raised.append((caught.value.status_code, caught.value.param, caught.value.body))
        assert raised[0] == raised[1]
        assert len(engines.decode[0].sights) == 1  # that of the client alone


def arguments_of(chunks: list[ChatCompletionChunk]) -> dict[int, str]:
    """The arguments of each tool call, put together."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            for part in choice.delta.tool_calls or []:
                found[part.index] = found.get(part.index, "") + (part.function.arguments or "" if part.function else "")
    return found


def without_id(shown: dict[str, Any]) -> dict[str, Any]:
    """``id`` is the engine's, and the same here; what is left out is only what each client measured itself."""
    return {key: value for key, value in shown.items() if key != "_request_id"}
