"""The official client against the router: what most people will use."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.router.scripted import until
from tests.router.stack import Stack, total, wait_for

pytestmark = pytest.mark.process

MESSAGES = [{"role": "user", "content": "Name a tree."}]


@pytest.fixture
def client(stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{stack.router.port}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def lone(stack: Stack) -> Iterator[openai.OpenAI]:
    """A client of one decode engine, without a router."""
    with openai.OpenAI(base_url=f"http://127.0.0.1:{stack.decode[1].port}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_completion(client: openai.OpenAI, lone: openai.OpenAI) -> None:
    asked = {"model": "m", "prompt": "Once upon a time", "max_tokens": 20}
    answer = client.completions.create(**asked)
    assert answer.choices[0].text == lone.completions.create(**asked).choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.id.startswith("cmpl-___prefill_addr_127.0.0.1:")


def test_streamed_completion(client: openai.OpenAI, lone: openai.OpenAI) -> None:
    asked = {"model": "m", "prompt": "Once upon a time", "max_tokens": 20}
    with client.completions.create(**asked, stream=True) as stream:
        texts = [chunk.choices[0].text for chunk in stream]
    assert len(texts) == 20
    assert "".join(texts) == lone.completions.create(**asked).choices[0].text


def test_chat(client: openai.OpenAI, lone: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_completion_tokens=9)
    expected = lone.chat.completions.create(model="m", messages=MESSAGES, max_completion_tokens=9)
    assert answer.choices[0].message.content == expected.choices[0].message.content


def test_streamed_chat_with_usage(client: openai.OpenAI, lone: openai.OpenAI) -> None:
    asked = {"model": "m", "messages": MESSAGES, "max_completion_tokens": 9}
    with client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == lone.chat.completions.create(**asked).choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert chunks[0].id.startswith("chatcmpl-___prefill_addr_127.0.0.1:")


def test_receipt_can_be_found_from_the_raw_response(stack: Stack, client: openai.OpenAI) -> None:
    raw = client.completions.with_raw_response.create(model="m", prompt="x", max_tokens=2)
    receipt = stack.router.closed_receipt(raw.headers["x-antiphon-receipt"])
    assert receipt["outcome"] == "completed"
    assert receipt["prefill"] in raw.parse().id


def test_models_and_embeddings(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert len(client.embeddings.create(model="m", input=["a", "b"]).data) == 2


def test_errors_are_the_clients_own_exceptions(stack: Stack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="m", prompt="x", extra_body={"kv_transfer_params": {"do_remote_prefill": True}})
    assert caught.value.param == "kv_transfer_params"
    assert caught.value.code == "kv_transfer_params_refused"
    stack.fault("prefill", "respond_503")
    with pytest.raises(openai.InternalServerError) as overloaded:
        client.completions.create(model="m", prompt="x")
    assert (overloaded.value.status_code, overloaded.value.code) == (503, "prefill_overloaded")


def test_error_in_the_middle_of_a_stream_is_raised(stack: Stack, client: openai.OpenAI) -> None:
    stack.fault("decode", "cut_mid_stream", after_events=3)
    texts = []
    with (
        pytest.raises(openai.APIError, match="the decode engine failed"),
        client.completions.create(model="m", prompt="x", max_tokens=9, stream=True) as stream,
    ):
        texts.extend(chunk.choices[0].text for chunk in stream)
    assert len(texts) <= 3


@pytest.fixture
async def async_client(stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{stack.router.port}/v1", api_key="none", max_retries=0
    ) as made:
        yield made


async def test_many_at_once(async_client: openai.AsyncOpenAI, lone: openai.OpenAI) -> None:
    prompts = [f"number {number}" for number in range(12)]
    answers = await asyncio.gather(
        *(async_client.completions.create(model="m", prompt=prompt, max_tokens=7) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.choices[0].text == lone.completions.create(model="m", prompt=prompt, max_tokens=7).choices[0].text


async def test_abort(stack: Stack, async_client: openai.AsyncOpenAI) -> None:
    name = "requests_total"
    before = total(stack.router.metrics(), name, "outcome=cancelled")
    stack.fault("decode", "slow", factor=20)
    stream = await async_client.completions.create(model="m", prompt="x", max_tokens=1000, stream=True)
    async for _ in stream:
        break
    await stream.close()
    waiting = asyncio.create_task(async_client.completions.create(model="m", prompt="y", max_tokens=1000))
    await until(lambda: sum(engine.state()["running"] for engine in stack.decode), "the second one runs")
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    wait_for(lambda: total(stack.router.metrics(), name, "outcome=cancelled") == before + 2, "both were cancelled")
    stack.settle()
