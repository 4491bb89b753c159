"""The official client against real engines: what it gets through the router is what the decode engine alone gives it.

Goal: chat, completions, tool calls and answers by a schema, streamed and whole, are equal with and without the router,
and a hundred clients that leave, at any moment, leave nothing behind. Method: the same greedy request to the router and
to the decode engine, whose own prefix cache a salt keeps out of it. A grammar makes the model write its tool calls:
what so small a model wants to call is not the point.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.real.deployment import LEASE_S, Deployment, wait_for

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(400)]

PLACES = ["Paris", "Rome"]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "About a place",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string", "enum": PLACES}},
                "required": ["place"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "population")
]
NAMED = {"type": "function", "function": {"name": "population"}}
SCHEMA: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "tree",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "kind": {"type": "string", "enum": ["oak", "fir"]},
                "is_old": {"type": "boolean"},
            },
            "required": ["kind", "is_old"],
            "additionalProperties": False,
        },
    },
}
WAYS: dict[str, dict[str, Any]] = {
    "text": {"stop": ["\n\n\n"], "max_tokens": 12},
    "any tool": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "one tool": {"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False},
    "maybe a tool": {"tools": TOOLS, "tool_choice": "auto", "max_tokens": 12},
    "schema": {"response_format": SCHEMA},
    "choice": {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
}
"""Ways to ask; at most 60 tokens where nothing is said."""
QUESTION = "What is the weather in Paris, and how old is the oak?"
NUM_LEAVING = 100
NUM_AT_ONCE = 6


@contextlib.asynccontextmanager
async def client_of(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as found:
        yield found


@pytest.fixture
async def routed(deployment: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(deployment.url) as found:
        yield found


@pytest.fixture
async def alone(deployment: Deployment) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(deployment.decode_url) as found:
        yield found


def asked(way: str, salt: str) -> dict[str, Any]:
    """The arguments of a chat request; another ``salt`` shares no KV with it."""
    fields = {"max_tokens": 60} | WAYS[way]
    extra = fields.pop("extra_body", {}) | {"cache_salt": salt}
    messages = [{"role": "system", "content": f"You answer ({way})."}, {"role": "user", "content": QUESTION}]
    return {"model": "smollm2", "messages": messages, "temperature": 0, "seed": 1, "extra_body": extra} | fields


def check_way(way: str, calls: list[tuple[str, str]], content: str) -> None:
    """The answer is what was asked for."""
    if way in ("any tool", "one tool"):
        ((name, arguments),) = calls
        assert name in (["weather", "population"] if way == "any tool" else ["population"])
        assert json.loads(arguments)["place"] in PLACES
    elif way == "schema":
        tree = json.loads(content)
        assert tree.keys() == {"kind", "is_old"}
        assert tree["kind"] in ("oak", "fir")
        assert isinstance(tree["is_old"], bool)
    elif way == "choice":
        assert content in ("yes", "no")
    else:
        assert content or calls


def calls_of(answer: ChatCompletion) -> list[tuple[str, str]]:
    found = []
    for call in answer.choices[0].message.tool_calls or []:
        assert call.type == "function"
        found.append((call.function.name, call.function.arguments))
    return found


def gathered(chunks: list[ChatCompletionChunk]) -> tuple[list[tuple[str, str]], str, str | None]:
    """Tool calls, text and finish reason of a stream. How tokens are put together to chunks depends on the moment."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    content, finish = "", None
    for choice in [choice for chunk in chunks for choice in chunk.choices]:
        content += choice.delta.content or ""
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or []:
            assert call.function is not None
            names[call.index] = names.get(call.index, "") + (call.function.name or "")
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return [(names[index], arguments[index]) for index in sorted(names)], content, finish


@pytest.mark.parametrize("way", WAYS)
async def test_whole_answer_is_that_of_the_engine_alone(
    deployment: Deployment, routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI, way: str
) -> None:
    raw = await routed.chat.completions.with_raw_response.create(**asked(way, f"routed whole {way}"))
    assert raw.headers["x-antiphon-path"] == "pd"
    answer = raw.parse()
    other = await alone.chat.completions.create(**asked(way, f"alone whole {way}"))
    shown = [
        (calls_of(each), each.choices[0].message.content, each.choices[0].finish_reason) for each in (answer, other)
    ]
    assert shown[0] == shown[1]
    check_way(way, calls_of(answer), answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert other.usage is not None
    assert answer.usage.prompt_tokens == other.usage.prompt_tokens
    assert answer.usage.completion_tokens == other.usage.completion_tokens
    receipt = await asyncio.to_thread(deployment.receipt, raw.headers["x-antiphon-receipt"])
    assert (receipt["outcome"], receipt["tokens"]["prompt"]) == ("completed", answer.usage.prompt_tokens)


@pytest.mark.parametrize("way", WAYS)
async def test_streamed_answer_is_that_of_the_engine_alone(
    routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI, way: str
) -> None:
    seen: list[list[ChatCompletionChunk]] = []
    for client, salt in ((routed, f"routed stream {way}"), (alone, f"alone stream {way}")):
        options: dict[str, Any] = asked(way, salt) | {"stream_options": {"include_usage": True}}
        async with await client.chat.completions.create(**options, stream=True) as stream:
            seen.append([chunk async for chunk in stream])
    assert gathered(seen[0]) == gathered(seen[1])
    calls, content, _ = gathered(seen[0])
    check_way(way, calls, content)
    usages = [chunks[-1].usage for chunks in seen]
    assert usages[0] is not None
    assert usages[1] is not None
    assert usages[0].completion_tokens == usages[1].completion_tokens > 0
    assert len({chunk.id for chunk in seen[0]}) == 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_completion_is_that_of_the_engine_alone(
    routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI, stream: bool
) -> None:
    texts = []
    for client, salt in ((routed, f"routed {stream}"), (alone, f"alone {stream}")):
        fields: dict[str, Any] = {"model": "smollm2", "prompt": "The river and the stone", "max_tokens": 12}
        fields |= {"temperature": 0, "extra_body": {"cache_salt": salt}}
        if stream:
            async with await client.completions.create(**fields, stream=True) as chunks:
                texts.append("".join([chunk.choices[0].text async for chunk in chunks]))
        else:
            texts.append((await client.completions.create(**fields)).choices[0].text)
    assert texts[0] == texts[1]
    assert texts[0].strip()


REFUSED: dict[str, dict[str, Any]] = {
    "tool choice without tools": {"tool_choice": "required"},
    "a tool that is not there": {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "nope"}}},
    "a schema that is none": {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
}


@pytest.mark.parametrize("what", REFUSED)
async def test_refusal_is_that_of_the_engine_alone(
    routed: openai.AsyncOpenAI, alone: openai.AsyncOpenAI, what: str
) -> None:
    raised = []
    for client in (routed, alone):
        fields: dict[str, Any] = {"model": "smollm2", "messages": [{"role": "user", "content": QUESTION}]}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**fields, **REFUSED[what])
        raised.append((caught.value.status_code, caught.value.body))
    assert raised[0] == raised[1]
    assert 400 <= raised[0][0] < 500


# ---- clients that leave ----------------------------------------------------------------------------------------------


async def leave_after(deployment: Deployment, delay_s: float, body: dict[str, Any]) -> None:
    """Send a request and close the connection after ``delay_s``, wherever it is then."""
    host, port = "127.0.0.1", deployment.ports["router"]
    reader, writer = await asyncio.open_connection(host, port)
    raw = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(raw) + raw)
    try:
        async with asyncio.timeout(delay_s):
            while await reader.read(65536):
                pass
    except TimeoutError:
        pass
    writer.transport.abort()


async def test_nothing_is_left_of_a_hundred_clients_that_left(deployment: Deployment) -> None:
    rng = random.Random(7)
    words = ("river", "stone", "bread", "cloud", "winter", "garden")
    expired_before = deployment.prefill_metrics().num_nixl_expired
    assert expired_before is not None
    disconnects_before = deployment.router_metric("antiphon_router_client_disconnects_total")
    gate = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(index: int) -> None:
        prompt = " ".join([str(5000 + index), *rng.choices(words, k=rng.choice((6, 60, 130, 260)))])
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 24, "stream": rng.random() < 0.5}
        # Most of it is over within a second; the first milliseconds are those of the prefill.
        delay_s = rng.uniform(0.0, 0.3) if index % 3 == 0 else rng.uniform(0.0, 2.0)
        async with gate:
            await leave_after(deployment, delay_s, body)

    await asyncio.gather(*(one(index) for index in range(NUM_LEAVING)))
    left = deployment.router_metric("antiphon_router_client_disconnects_total") - disconnects_before
    assert left >= 0.6 * NUM_LEAVING

    def is_free() -> bool:
        return deployment.prefill_metrics().kv_usage == 0

    # Prefills that ended just as their cancellation arrived are held until the lease ends.
    wait_for(is_free, "the prefill engine's KV is free within a lease", LEASE_S + 10)
    expired = (deployment.prefill_metrics().num_nixl_expired or 0) - expired_before
    assert expired <= 0.06 * NUM_LEAVING, f"{expired} of {NUM_LEAVING} were held until the lease ended"
    wait_for(lambda: deployment.decode_metrics().kv_usage == 0, "the decode engine's KV is free", 10)
    gauges = ("antiphon_router_active_requests", "antiphon_router_engine_active_requests")
    wait_for(lambda: not any(map(deployment.router_metric, gauges)), "nothing is in progress at the router", 5)
    status = deployment.status()
    assert [status[name]["num_running"] for name in ("prefill-0", "decode-0")] == [0, 0]
