"""Responses, messages, tokens in and out: what the simulated engine accepts, refuses and answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.core.errors import RequestRefused
from antiphon.engine.simulated.further_requests import read_generate, read_message, read_response
from antiphon.engine.simulated.further_responses import stream_of, whole_of
from antiphon.engine.simulated.requests import NATURAL_LENGTH_TOKENS, GenerationRequest, RequestReader
from antiphon.engine.simulated.responses import ResponseNames
from antiphon.engine.simulated.sequence import RemoteKv, Sequence
from antiphon.engine.simulated.tokenizer import SimulatedTokenizer

READER = RequestReader("m", SimulatedTokenizer(4.0), 1000)
NAMES = ResponseNames("R", "m", 1700000000)
TURN = [{"role": "user", "content": "hello"}]
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
REMOTE = RemoteKv("P1", "r", "127.0.0.1", 1, (1,), 2)


def answered(request: GenerationRequest, **fields: Any) -> Sequence:
    return Sequence("r", request.prompts[0], 2, output=[5, 6], finish_reason="length", **fields)


def test_a_response_is_a_chat() -> None:
    chat = READER.chat({"messages": [{"role": "system", "content": "be"}, *TURN], "max_completion_tokens": 7})
    for given in ("hello", TURN, [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}]):
        made = read_response(READER, {"input": given, "instructions": "be", "max_output_tokens": 7, "n": 3})
        assert (made.kind, made.prompts, made.max_tokens, made.num_choices) == ("response", chat.prompts, 7, 1)
    assert read_response(READER, {"input": "x"}).max_tokens == NATURAL_LENGTH_TOKENS
    items = [{"type": "function_call", "name": "f"}, {"type": "function_call_output", "output": "1"}]
    assert read_response(READER, {"input": items}).prompts != read_response(READER, {"input": items[:1]}).prompts


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 400), ({"input": 7}, 400), ({"input": "x", "previous_response_id": "r"}, 404), ({"input": ""}, 200)],
)
def test_what_no_response_is_made_of(body: dict[str, Any], status: int) -> None:
    if status == 200:
        assert read_response(READER, body).kind == "response"
        return
    with pytest.raises(RequestRefused) as caught:
        read_response(READER, body)
    assert caught.value.status == status


def test_a_message_is_a_chat_with_a_limit() -> None:
    chat = READER.chat({"messages": [{"role": "system", "content": "be"}, *TURN]})
    made = read_message(READER, {"messages": TURN, "system": "be", "max_tokens": 7, "stream": True})
    assert (made.kind, made.prompts, made.max_tokens, made.stream) == ("message", chat.prompts, 7, True)
    for limit in (None, 0, "7", True):
        with pytest.raises(RequestRefused):
            read_message(READER, {"messages": TURN, "max_tokens": limit})


def test_a_thinking_budget_is_held_against_the_limit_except_in_a_prefill() -> None:
    body = {"messages": TURN, "max_tokens": 1, "thinking": {"type": "enabled", "budget_tokens": 5}}
    assert read_message(READER, body | {"kv_transfer_params": PREFILL}).hands_over
    for params in (None, {"do_remote_prefill": True}):
        with pytest.raises(RequestRefused, match="budget_tokens"):
            read_message(READER, body | {"kv_transfer_params": params})


def test_tokens_are_taken_as_they_are() -> None:
    made = read_generate(READER, {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "n": 2}})
    assert (made.kind, made.prompts, made.max_tokens, made.num_choices) == ("generate", [[1, 2, 3]], 4, 2)
    for body in (
        {"token_ids": [1]},
        {"token_ids": "x", "sampling_params": {}},
        {"token_ids": [[1]], "sampling_params": {}},
    ):
        with pytest.raises(RequestRefused):
            read_generate(READER, body)


def test_whole_answers_carry_the_handle_and_what_the_prefill_engine_had_cached() -> None:
    response = read_response(READER, {"input": "hello world"})
    message = read_message(READER, {"messages": TURN, "max_tokens": 2})
    tokens = read_generate(READER, {"token_ids": [1, 2, 3], "sampling_params": {}})
    for request in (response, message, tokens):
        sequence = answered(request, remote=REMOTE)
        body = json.loads(whole_of(request, NAMES, [sequence], {"do_remote_prefill": True}))
        assert body["kv_transfer_params"] == {"do_remote_prefill": True}
        usage, num_prompt = body["usage"], len(sequence.prompt)
        if request is message:
            assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - 2, 2)
            assert "kv_transfer_params" not in json.loads(whole_of(request, NAMES, [sequence], None))
        elif request is response:
            assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (num_prompt, 2)
            assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        else:
            assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (3, 2)
            assert body["choices"][0]["token_ids"] == [5, 6]


def test_streams_end_as_vllms_do() -> None:
    requests = {
        b"response.completed": read_response(READER, {"input": "hello", "stream": True}),
        b"message_stop": read_message(READER, {"messages": TURN, "max_tokens": 2, "stream": True}),
        b"[DONE]": read_generate(READER, {"token_ids": [1], "sampling_params": {}, "stream": True}),
    }
    for end, request in requests.items():
        stream, sequence = stream_of(request, NAMES), answered(request)
        events = b"".join(stream.opening()) + stream.token(0, sequence, 0, None)
        events += stream.token(0, sequence, 1, "length") + stream.closing([sequence])
        *_, last, rest = events.split(b"\n\n")
        assert rest == b""
        assert end in last
        assert stream.begins_at_once is (end == b"response.completed")
        assert (stream.failure() == b"") is (end == b"response.completed")
