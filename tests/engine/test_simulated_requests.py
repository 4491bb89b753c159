"""Bodies of vLLM's API: what the simulated engine accepts, refuses and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.core.errors import RequestRefused
from antiphon.engine.simulated.faults import ARMED_MAX, FaultPlan
from antiphon.engine.simulated.requests import NATURAL_LENGTH_TOKENS, RequestReader, parse_body
from antiphon.engine.simulated.responses import ResponseNames, StreamShape, embeddings_body, models_body, whole_body
from antiphon.engine.simulated.sequence import RemoteKv, Sequence
from antiphon.engine.simulated.tokenizer import WORDS, SimulatedTokenizer

NAMES = ResponseNames("cmpl-R", "m", 1700000000)
READER = RequestReader("m", SimulatedTokenizer(4.0), 100)
MESSAGES = [{"role": "user", "content": "hello"}]
HANDLE = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "P1",
    "remote_request_id": "cmpl-R-0-1",
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_block_ids": [[3, 4]],
    "tp_size": 1,
    "remote_prefill_cached_tokens": 16,
}


def answered(prompt: list[int], output: list[int], reason: str | None = "length", **fields: Any) -> Sequence:
    return Sequence("r", prompt, len(output), output=output, finish_reason=reason, **fields)


def events(data: bytes) -> list[Any]:
    pieces = data.decode().split("\n\n")
    assert pieces.pop() == ""
    assert all(piece.startswith("data: ") for piece in pieces)
    return [piece[6:] if piece == "data: [DONE]" else json.loads(piece[6:]) for piece in pieces]


# ---- requests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "count"),
    [("one two three", [4]), (["a", "bcdefg"], [1, 2]), ([1, 2, 3], [3]), ([[1], [2, 3]], [1, 2])],
)
def test_every_form_of_prompt(prompt: Any, count: list[int]) -> None:
    request = READER.completion({"prompt": prompt})
    assert [len(tokens) for tokens in request.prompts] == count
    assert len(request.texts) == len(count)
    assert (request.max_tokens, request.stops_naturally, request.num_choices, request.stream) == (16, False, 1, False)


def test_token_prompts_echo_as_their_text() -> None:
    tokens = SimulatedTokenizer(4.0).encode("hello world")
    assert READER.completion({"prompt": tokens, "echo": True}).texts == ["hello world"]


def test_limits_of_an_answer() -> None:
    assert READER.completion({"prompt": "x", "max_tokens": None}).max_tokens == NATURAL_LENGTH_TOKENS
    assert READER.chat({"messages": MESSAGES}).stops_naturally
    assert READER.chat({"messages": MESSAGES, "max_tokens": 3}).max_tokens == 3
    assert READER.chat({"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 5}).max_tokens == 5
    clipped = READER.completion({"prompt": list(range(90)), "max_tokens": 500})
    assert (clipped.max_tokens, clipped.stops_naturally) == (10, False)


def test_chat_parts_and_tools_are_part_of_the_prompt() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert READER.chat({"messages": parts}).prompts == READER.chat({"messages": MESSAGES}).prompts
    tools = READER.chat({"messages": MESSAGES, "tools": [{"type": "function"}]})
    assert tools.prompts != READER.chat({"messages": MESSAGES}).prompts


def test_handles() -> None:
    request = READER.completion({"prompt": "x", "kv_transfer_params": HANDLE})
    assert request.remote == RemoteKv("P1", "cmpl-R-0-1", "127.0.0.1", 5600, (3, 4), 16)
    assert not request.hands_over
    assert not request.is_remote_unusable
    prefill = READER.completion({"prompt": "x", "kv_transfer_params": {"do_remote_decode": True, "remote_port": None}})
    assert prefill.hands_over
    assert prefill.remote is None
    plain = READER.completion({"prompt": "x", "kv_transfer_params": None})
    assert not plain.hands_over


@pytest.mark.parametrize(
    "change",
    [
        {"remote_engine_id": None},
        {"remote_block_ids": None},
        {"remote_block_ids": [[]]},
        {"remote_block_ids": [[1], [2]]},
        {"remote_block_ids": [["1"]]},
        {"remote_port": 0},
        {"remote_port": "5600"},
        {"remote_host": None},
        {"remote_request_id": 7},
    ],
)
def test_incomplete_handles_are_unusable(change: dict[str, Any]) -> None:
    request = READER.completion({"prompt": "x", "kv_transfer_params": HANDLE | change})
    assert request.remote is None
    assert request.is_remote_unusable


@pytest.mark.parametrize(
    ("body", "status", "kind", "param", "words"),
    [
        ({"model": "other"}, 404, "NotFoundError", "model", "The model `other` does not exist. Valid aliases: m."),
        ({"model": 7}, 400, "Bad Request", "body.model", "valid string"),
        ({}, 400, "Bad Request", "body.prompt", "valid string or list of token ids"),
        ({"prompt": 7}, 400, "Bad Request", "body.prompt", "valid string"),
        ({"prompt": [-1]}, 400, "Bad Request", "body.prompt", "valid string"),
        ({"prompt": [True]}, 400, "Bad Request", "body.prompt", "valid string"),
        ({"prompt": ["a", 1]}, 400, "Bad Request", "body.prompt", "valid string"),
        ({"prompt": ""}, 400, "BadRequestError", None, "The decoder prompt cannot be empty"),
        ({"prompt": [1] * 101}, 400, "BadRequestError", "input_tokens", "maximum context length is 100 tokens"),
        ({"prompt": [1] * 100}, 400, "BadRequestError", "max_tokens", "max_tokens must be at least 1, got 0."),
        ({"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens", "at least 1, got 0"),
        ({"prompt": "x", "max_tokens": "9"}, 400, "Bad Request", "body.max_tokens", "valid integer"),
        ({"prompt": "x", "stream": 1}, 400, "Bad Request", "body.stream", "valid boolean"),
        ({"prompt": "x", "n": 0}, 400, "BadRequestError", "n", "n must be between 1"),
        ({"prompt": "x", "logprobs": -2}, 400, "BadRequestError", "logprobs", "between 0 and 20"),
        ({"prompt": "x", "stream_options": {}}, 400, "BadRequestError", "stream_options", "only be defined when"),
        ({"prompt": "x", "kv_transfer_params": []}, 400, "Bad Request", "body.kv_transfer_params", "valid object"),
        ({"prompt": "x", "cache_salt": 5}, 400, "Bad Request", "body.cache_salt", "valid string"),
    ],
)
def test_refused_completions(body: dict[str, Any], status: int, kind: str, param: str | None, words: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        READER.completion(body)
    error = caught.value
    assert (error.status, error.kind, error.param) == (status, kind, param)
    assert words in error.message


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": []},
        {"messages": ["hi"]},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": MESSAGES, "max_completion_tokens": 0},
    ],
)
def test_refused_chats(body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused) as caught:
        READER.chat(body)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("content_type", "data", "words"),
    [
        (b"application/json", b"{", "json_invalid"),
        (b"application/json", b"[]", "Input should be an object"),
        (b"application/json", b"", "json_invalid"),
        (b"text/plain", b"{}", "Unsupported Media Type"),
        (None, b"{}", "Unsupported Media Type"),
    ],
)
def test_refused_bodies(content_type: bytes | None, data: bytes, words: str) -> None:
    with pytest.raises(RequestRefused, match=words) as caught:
        parse_body(content_type, data)
    assert caught.value.status == 400
    assert parse_body(b"Application/JSON; charset=utf-8", b'{"a":1}') == {"a": 1}


# ---- responses -------------------------------------------------------------------------------------------------------


def test_whole_completion_has_the_keys_of_vllm() -> None:
    request = READER.completion({"prompt": "hello"})
    body = json.loads(whole_body(request, NAMES, [answered(request.prompts[0], [0, 1])], None))
    assert list(body) == [
        "id", "object", "created", "model", "choices", "service_tier", "system_fingerprint", "usage",
        "kv_transfer_params", "ec_transfer_params", "metrics",
    ]  # fmt: skip
    assert list(body["choices"][0]) == [
        "index", "text", "logprobs", "finish_reason", "stop_reason", "token_ids", "prompt_logprobs",
        "prompt_token_ids", "routed_experts",
    ]  # fmt: skip
    assert body["choices"][0]["text"] == WORDS[0] + WORDS[1]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "total_tokens": 4,
        "completion_tokens": 2,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": None, "multimodal_tokens": None},
        "completion_tokens_details": None,
    }
    assert body["kv_transfer_params"] is None


def test_whole_chat_has_the_keys_of_vllm() -> None:
    request = READER.chat({"messages": MESSAGES, "n": 2})
    sequences = [answered(request.prompts[0], [n]) for n in range(2)]
    body = json.loads(whole_body(request, NAMES, sequences, {"remote_port": 1}))
    assert body["object"] == "chat.completion"
    assert [choice["message"]["content"] for choice in body["choices"]] == [WORDS[0], WORDS[1]]
    assert list(body["choices"][0]) == [
        "index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"
    ]  # fmt: skip
    assert body["kv_transfer_params"] == {"remote_port": 1}


def test_cached_tokens_are_those_of_the_prefill_engine_where_it_says() -> None:
    request = READER.completion({"prompt": "hello"})
    remote = RemoteKv("P", "r", "h", 1, (0,), 7)
    for sequence, expected in (
        (answered([1], [0], remote=remote, num_pulled_tokens=5), 7),
        (answered([1], [0], remote=remote._replace(num_cached_tokens=None), num_pulled_tokens=5), 5),
        (answered([1], [0], num_cached_tokens=3), 3),
    ):
        body = json.loads(whole_body(request, NAMES, [sequence], None))
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


def test_echo_and_logprobs() -> None:
    request = READER.completion({"prompt": "hello", "echo": True, "logprobs": 1, "return_token_ids": True})
    prompt = request.prompts[0]
    choice = json.loads(whole_body(request, NAMES, [answered(prompt, [5])], None))["choices"][0]
    assert choice["text"] == "hello" + WORDS[5]
    assert choice["logprobs"]["tokens"] == ["hell", "o", WORDS[5]]
    assert choice["logprobs"]["text_offset"] == [0, 4, 5]
    assert (choice["token_ids"], choice["prompt_token_ids"]) == ([5], prompt)
    only = READER.completion({"prompt": "hello", "echo": True, "max_tokens": 0})
    body = json.loads(whole_body(only, NAMES, [answered(prompt, [5])], None))
    assert body["choices"][0]["text"] == "hello"
    assert body["usage"]["completion_tokens"] == 0


def test_stream_of_a_completion() -> None:
    options = {"prompt": "hello", "stream": True, "stream_options": {"include_usage": True}}
    request = READER.completion(options)
    sequence = answered(request.prompts[0], [1, 2])
    shape = StreamShape(request, NAMES)
    assert shape.opening() == []
    first, last = (events(shape.token(0, sequence, n, reason))[0] for n, reason in ((0, None), (1, "length")))
    nulls = {"logprobs": None, "stop_reason": None, "prompt_token_ids": None, "token_ids": None}
    assert first["choices"] == [{"index": 0, "text": WORDS[1], "finish_reason": None} | nulls]
    assert last["choices"] == [{"index": 0, "text": WORDS[2], "finish_reason": "length"} | nulls]
    assert "system_fingerprint" not in last
    usage, done = events(shape.closing([sequence]))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_stream_of_a_chat() -> None:
    request = READER.chat({"messages": MESSAGES, "stream": True, "n": 2})
    sequence = answered(request.prompts[0], [1, 2])
    shape = StreamShape(request, NAMES)
    roles = [events(event)[0]["choices"][0] for event in shape.opening()]
    assert [(choice["index"], choice["delta"]) for choice in roles] == [
        (0, {"role": "assistant", "content": ""}),
        (1, {"role": "assistant", "content": ""}),
    ]
    (token,) = events(shape.token(1, sequence, 0, None))
    assert token["choices"][0] == {
        "index": 1, "delta": {"content": WORDS[1]}, "logprobs": None, "finish_reason": None, "token_ids": None,
    }  # fmt: skip
    (last,) = events(shape.token(1, sequence, 1, "stop"))
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["system_fingerprint"]
    assert events(shape.closing([sequence])) == ["[DONE]"]


@pytest.mark.parametrize(
    "extra",
    [
        {"return_token_ids": True},
        {"logprobs": 1},
        {"echo": True},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_encoded_events_carry_the_same_text_as_spliced_ones(extra: dict[str, Any]) -> None:
    plain = READER.completion({"prompt": "hello", "stream": True})
    rich = READER.completion({"prompt": "hello", "stream": True, **extra})
    sequence = answered(plain.prompts[0], [1, 2])
    texts = []
    for request in (plain, rich):
        shape = StreamShape(request, NAMES)
        texts.append([events(shape.token(0, sequence, n, None))[0]["choices"][0]["text"] for n in range(2)])
    assert texts[1] == (["hello" + texts[0][0], texts[0][1]] if "echo" in extra else texts[0])


def test_models_and_embeddings() -> None:
    models = json.loads(models_body("m", 100, 5))
    assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("m", 100)
    bodies = [json.loads(embeddings_body(NAMES, READER.embedding({"input": text}))) for text in ("a", "a", "b")]
    vectors = [body["data"][0]["embedding"] for body in bodies]
    assert vectors[0] == vectors[1] != vectors[2]


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_faults_are_taken_in_order_and_as_often_as_asked() -> None:
    plan = FaultPlan()
    plan.arm({"kind": "respond_500", "count": 2})
    plan.arm({"kind": "slow", "factor": 3, "count": None})
    plan.arm({"kind": "health_503"})
    kinds = [fault.kind for fault in (plan.take_inference() for _ in range(4)) if fault is not None]
    assert kinds == ["respond_500", "respond_500", "slow", "slow"]
    assert plan.take_health() is not None
    assert plan.take_health() is None
    plan.arm({"kind": "clear"})
    assert plan.take_inference() is None


@pytest.mark.parametrize(
    "body",
    [{}, {"kind": "nonsense"}, {"kind": "hang", "count": 0}, {"kind": "hang", "count": "1"},
     {"kind": "hang_mid_stream", "after_events": -1}, {"kind": "slow", "factor": "fast"}],
)  # fmt: skip
def test_malformed_faults_are_refused(body: dict[str, Any]) -> None:
    with pytest.raises(RequestRefused):
        FaultPlan().arm(body)


def test_armed_faults_are_bounded() -> None:
    plan = FaultPlan()
    for _ in range(ARMED_MAX):
        plan.arm({"kind": "hang"})
    with pytest.raises(RequestRefused, match="clear them first"):
        plan.arm({"kind": "hang"})
