"""Answers of vLLM's further APIs, as vLLM 0.32 writes them: responses, messages, tokens in and out.

Owns the shapes; decides nothing. Pure: the time is an argument. What ends the stream of a failed request differs:
an error event, of a message and of tokens; nothing, of a response, since vLLM cannot write its error as an event of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from antiphon.engine.simulated import responses
from antiphon.engine.simulated.requests import GenerationRequest
from antiphon.engine.simulated.responses import Json, ResponseNames, count_usage, num_cached
from antiphon.engine.simulated.sequence import Sequence
from antiphon.engine.simulated.tokenizer import WORDS
from antiphon.protocol.json import encode
from antiphon.protocol.openai import DONE_EVENT


class Stream(Protocol):
    """The events of one streamed answer."""

    begins_at_once: bool
    """Before the engine has done anything."""

    def opening(self) -> list[bytes]:
        """The events before the first token."""

    def token(self, index: int, sequence: Sequence, position: int, finish_reason: str | None) -> bytes:
        """The events of one token."""

    def closing(self, sequences: list[Sequence]) -> bytes:
        """The end of a stream that is complete."""

    def failure(self) -> bytes:
        """The end of a stream whose KV could not be loaded; nothing where the connection is cut."""


def stream_of(request: GenerationRequest, names: ResponseNames) -> Stream:
    """The stream that a request asks for."""
    if request.kind == "response":
        return _ResponseStream(request, names)
    if request.kind == "message":
        return _MessageStream(request, names)
    if request.kind == "generate":
        return _TokenStream(request, names)
    return responses.StreamShape(request, names)


def whole_of(
    request: GenerationRequest, names: ResponseNames, sequences: list[Sequence], handover: Json | None
) -> bytes:
    """The body of an answer that is not streamed."""
    write = _WHOLE.get(request.kind, responses.whole_body)
    return write(request, names, sequences, handover)


def _text(sequence: Sequence) -> str:
    return "".join([WORDS[token] for token in sequence.output])


def _named(name: str, value: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode({"type": name} | value))


# -- responses -----------------------------------------------------------------------------------------------------


def _response(request: GenerationRequest, names: ResponseNames, sequences: list[Sequence] | None) -> Json:
    status, output, usage = "in_progress", [], None
    if sequences is not None:
        sequence = sequences[0]
        status = "incomplete" if sequence.finish_reason == "length" else "completed"
        output, num_prompt, num_output = [_item(sequence)], len(sequence.prompt), len(sequence.output)
        usage = {
            "input_tokens": num_prompt,
            "input_tokens_details": {
                "cached_tokens": num_cached(sequence),
                "cache_write_tokens": 0,
                "input_tokens_per_turn": [],
                "cached_tokens_per_turn": [],
            },
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0, "tool_output_tokens": 0},
            "total_tokens": num_prompt + num_output,
        }
    return {
        "id": names.response_id,
        "created_at": names.created_s,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": None,
        "metadata": None,
        "model": names.model_name,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": request.max_tokens,
        "service_tier": "auto",
        "status": status,
        "truncation": "disabled",
        "usage": usage,
        "user": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
    }


def _item(sequence: Sequence) -> Json:
    part: Json = {"annotations": [], "text": _text(sequence), "type": "output_text", "logprobs": None}
    return {"id": "msg_simulated", "content": [part], "role": "assistant", "status": "completed", "type": "message"}


def _whole_response(
    request: GenerationRequest, names: ResponseNames, sequences: list[Sequence], handover: Json | None
) -> bytes:
    return encode(_response(request, names, sequences) | {"kv_transfer_params": handover})


class _ResponseStream:
    begins_at_once = True

    def __init__(self, request: GenerationRequest, names: ResponseNames) -> None:
        self._request, self._names = request, names
        self._number = -1

    def _event(self, name: str, value: Json) -> bytes:
        self._number += 1
        return _named(name, value | {"sequence_number": self._number})

    def opening(self) -> list[bytes]:
        response = _response(self._request, self._names, None)
        return [self._event(f"response.{name}", {"response": response}) for name in ("created", "in_progress")]

    def token(self, index: int, sequence: Sequence, position: int, finish_reason: str | None) -> bytes:
        place = {"item_id": "msg_simulated", "output_index": 0, "content_index": 0}
        events = b""
        if position == 0:
            item = {"id": "msg_simulated", "content": [], "role": "assistant", "status": "in_progress"}
            part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
            events += self._event("response.output_item.added", {"output_index": 0, "item": item | {"type": "message"}})
            events += self._event("response.content_part.added", place | {"part": part})
        delta = WORDS[sequence.output[position]]
        return events + self._event("response.output_text.delta", place | {"delta": delta, "logprobs": []})

    def closing(self, sequences: list[Sequence]) -> bytes:
        place = {"item_id": "msg_simulated", "output_index": 0, "content_index": 0}
        item = _item(sequences[0])
        text = item["content"][0]["text"]
        events = self._event("response.output_text.done", place | {"text": text, "logprobs": []})
        events += self._event("response.content_part.done", place | {"part": item["content"][0]})
        events += self._event("response.output_item.done", {"output_index": 0, "item": item})
        response = _response(self._request, self._names, sequences)
        return events + self._event("response.completed", {"response": response})

    def failure(self) -> bytes:
        return b""


# -- messages ------------------------------------------------------------------------------------------------------


def _message_usage(sequence: Sequence) -> Json:
    cached = num_cached(sequence)
    return {
        "input_tokens": len(sequence.prompt) - cached,
        "output_tokens": len(sequence.output),
        "cache_read_input_tokens": cached,
    }


def _stop_reason(sequence: Sequence) -> str:
    return "max_tokens" if sequence.finish_reason == "length" else "end_turn"


def _whole_message(
    request: GenerationRequest, names: ResponseNames, sequences: list[Sequence], handover: Json | None
) -> bytes:
    sequence = sequences[0]
    body: Json = {
        "id": names.response_id,
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": _text(sequence)}],
        "model": names.model_name,
        "stop_reason": _stop_reason(sequence),
        "usage": _message_usage(sequence),
    }
    return encode(body | ({"kv_transfer_params": handover} if handover is not None else {}))


class _MessageStream:
    begins_at_once = False

    def __init__(self, request: GenerationRequest, names: ResponseNames) -> None:
        self._request, self._names = request, names

    def opening(self) -> list[bytes]:
        message: Json = {"id": self._names.response_id, "type": "message", "role": "assistant", "content": []}
        message |= {"model": self._names.model_name, "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": len(self._request.prompts[0]), "output_tokens": 0}
        block = {"type": "text", "text": ""}
        return [
            _named("message_start", {"message": message | {"usage": usage}}),
            _named("content_block_start", {"index": 0, "content_block": block}),
        ]

    def token(self, index: int, sequence: Sequence, position: int, finish_reason: str | None) -> bytes:
        delta = {"type": "text_delta", "text": WORDS[sequence.output[position]]}
        return _named("content_block_delta", {"index": 0, "delta": delta})

    def closing(self, sequences: list[Sequence]) -> bytes:
        delta = {"stop_reason": _stop_reason(sequences[0]), "stop_sequence": None}
        events = _named("content_block_stop", {"index": 0})
        events += _named("message_delta", {"delta": delta, "usage": _message_usage(sequences[0])})
        return events + _named("message_stop", {})

    def failure(self) -> bytes:
        return _named("error", {"error": {"type": "internal_error", "message": "Internal server error"}})


# -- tokens in, tokens out -----------------------------------------------------------------------------------------


def _token_choice(index: int, tokens: list[int], finish_reason: str | None) -> Json:
    choice: Json = {"index": index, "finish_reason": finish_reason, "stop_reason": None, "token_ids": tokens}
    return choice | {"routed_experts": None, "sampling_mask": None, "weight_versions": None, "logprobs": None}


def _whole_tokens(
    request: GenerationRequest, names: ResponseNames, sequences: list[Sequence], handover: Json | None
) -> bytes:
    body: Json = {"request_id": names.response_id, "model": names.model_name, "created": names.created_s}
    body |= {"usage": count_usage(request, sequences), "prompt_logprobs": None, "prompt_token_ids": None}
    body |= {"metrics": None, "kv_transfer_params": handover, "ec_transfer_params": None, "output_mode": "tokens"}
    choices = [_token_choice(index, each.output, each.finish_reason) for index, each in enumerate(sequences)]
    return encode(body | {"choices": choices})


class _TokenStream:
    begins_at_once = False

    def __init__(self, request: GenerationRequest, names: ResponseNames) -> None:
        self._request, self._names = request, names

    def _event(self, usage: Json | None, choices: list[Json]) -> bytes:
        head: Json = {"request_id": self._names.response_id, "usage": usage, "output_mode": "tokens"}
        return b"data: " + encode(head | {"choices": choices}) + b"\n\n"

    def opening(self) -> list[bytes]:
        return []

    def token(self, index: int, sequence: Sequence, position: int, finish_reason: str | None) -> bytes:
        return self._event(None, [_token_choice(index, [sequence.output[position]], finish_reason)])

    def closing(self, sequences: list[Sequence]) -> bytes:
        if not self._request.include_usage:
            return DONE_EVENT
        return self._event(count_usage(self._request, sequences), []) + DONE_EVENT

    def failure(self) -> bytes:
        return responses.StreamShape.failure()


_Write = Callable[[GenerationRequest, ResponseNames, list[Sequence], Json | None], bytes]
_WHOLE: dict[str, _Write] = {
    "response": _whole_response,
    "message": _whole_message,
    "generate": _whole_tokens,
}
