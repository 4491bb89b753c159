"""The further APIs over simulated engines that hand KV over: the official client reads responses, a reader of named
events reads messages, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.router.stack import Answer, Stack, ask, raw_request, sent, wait_for

pytestmark = pytest.mark.process

TEXT = "The quick brown fox jumps over the lazy dog. " * 20
MESSAGE = {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 9}
TOKENS = {"token_ids": list(range(100, 200)), "sampling_params": {"max_tokens": 9}}


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{stack.router.port}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def lone(stack: Stack) -> Iterator[openai.OpenAI]:
    """A client of one decode engine, without a router."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{stack.decode[1].port}/v1", api_key="none", max_retries=0) as made:
        yield made


def named_events(answer: Answer) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream whose events have names; each must be whole."""
    *pieces, rest = answer.body.decode().split("\n\n")
    assert rest == ""
    found = []
    for piece in pieces:
        name, data = piece.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == value["type"] for name, value in found)
    return found


def count_handovers(stack: Stack) -> int:
    total: int = sum(engine.state()["num_transfers"] for engine in stack.decode)
    return total


def test_response(stack: Stack, client: openai.OpenAI, lone: openai.OpenAI) -> None:
    before = count_handovers(stack)
    asked: dict[str, Any] = {"model": "m", "input": TEXT, "instructions": "Be brief.", "max_output_tokens": 9}
    answer = client.responses.create(**asked)
    assert answer.output_text == lone.responses.create(**asked).output_text
    assert answer.id.startswith("resp_")
    assert answer.usage is not None
    assert answer.usage.output_tokens == 9
    assert count_handovers(stack) == before + 1


def test_streamed_response(client: openai.OpenAI, lone: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "m", "input": [{"role": "user", "content": TEXT}], "max_output_tokens": 9}
    with client.responses.create(**asked, stream=True) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == lone.responses.create(**asked).output_text


def test_streamed_response_that_is_cut_raises(stack: Stack, client: openai.OpenAI) -> None:
    stack.fault("decode", "cut_mid_stream", after_events=6)
    seen = []

    def read() -> None:
        with client.responses.create(model="m", input=TEXT, max_output_tokens=50, stream=True) as stream:
            seen.extend(event.type for event in stream)

    with pytest.raises(openai.APIError, match="before the answer was complete"):
        read()
    assert "response.output_text.delta" in seen
    assert "response.completed" not in seen


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_message(stack: Stack, stream: bool) -> None:
    before = count_handovers(stack)
    answer = stack.router.ask("POST", "/v1/messages", MESSAGE | {"stream": stream})
    expected = ask(stack.decode[1].port, "POST", "/v1/messages", MESSAGE).json["content"][0]["text"]
    if not stream:
        assert answer.json["content"][0]["text"] == expected
        usage = answer.json["usage"]
    else:
        events = named_events(answer)
        assert [events[0][0], events[-1][0]] == ["message_start", "message_stop"]
        text = "".join(value["delta"]["text"] for name, value in events if name == "content_block_delta")
        assert text == expected
        usage = events[-2][1]["usage"]
    assert usage["output_tokens"] == 9
    assert count_handovers(stack) == before + 1
    receipt = stack.router.receipt(answer)
    assert (receipt["outcome"], receipt["path"]) == ("completed", "pd")


def test_message_that_is_cut_ends_with_an_error_event(stack: Stack) -> None:
    stack.fault("decode", "cut_mid_stream", after_events=5)
    answer = stack.router.ask("POST", "/v1/messages", MESSAGE | {"stream": True})
    assert not answer.is_cut
    *_, (name, value) = named_events(answer)
    assert (name, value["error"]["type"]) == ("error", "api_error")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_tokens(stack: Stack, stream: bool) -> None:
    asked = TOKENS | {"stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    answer = stack.router.ask("POST", "/inference/v1/generate", asked)
    expected = ask(stack.decode[1].port, "POST", "/inference/v1/generate", TOKENS).json["choices"][0]["token_ids"]
    if stream:
        *chunks, last, done = answer.events
        assert [chunk["choices"][0]["token_ids"][0] for chunk in chunks] == expected
        assert (done, last["usage"]["completion_tokens"]) == ("[DONE]", 9)
    else:
        assert answer.json["choices"][0]["token_ids"] == expected


ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": TEXT, "max_output_tokens": 9}),
    ("/v1/messages", MESSAGE | {"thinking": {"type": "enabled", "budget_tokens": 8}}),
    ("/inference/v1/generate", TOKENS),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=[path for path, _ in ASKED])
def test_what_reuse_saved_is_what_the_prefill_engine_had(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """Asked again of the same engines: all but the last block is cached, and the decode engine's count is not told."""
    for engine in stack.engines:
        engine.json("POST", "/reset_prefix_cache")
    cached = []
    for _ in range(4):
        answer = stack.router.ask("POST", path, body)
        usage = answer.json["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        cached.append(details.get("cached_tokens", usage.get("cache_read_input_tokens")))
        total = usage.get("prompt_tokens", usage.get("input_tokens"))
        total += usage.get("cache_read_input_tokens", 0)
        assert total == stack.router.receipt(answer)["tokens"]["prompt"]
    assert cached[:2] == [0, 0]  # one of each of the two prefill engines
    assert cached[2] == cached[3] > 90


@pytest.mark.parametrize(("path", "body"), ASKED, ids=[path for path, _ in ASKED])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_strands_nothing(stack: Stack, path: str, body: dict[str, Any], stream: bool) -> None:
    """While the decode engine works: a response's stream has begun there before the engine admits it."""
    before = count_handovers(stack)
    stack.fault("decode", "slow", factor=200)
    with sent(stack.router.port, raw_request(path, body | {"stream": stream})):
        wait_for(lambda: any(engine.state()["in_flight"] for engine in stack.decode), "decode has it")
    assert wait_for(lambda: count_handovers(stack) > before, "the KV is pulled")
    stack.settle()
