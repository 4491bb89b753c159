"""The APIs that go through prefill and decode, as tests speak them: a request, the events of a stream, how it ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from antiphon.router.app import Router
from tests.router.scripted import DONE, HANDLE, Reply, Seen, Wire, connected

Script = Callable[[Seen, Wire], Awaitable[None]]


@dataclass(frozen=True)
class Spoken:
    """One API.

    ``preamble`` is what vLLM writes before its engine has done anything; ``words`` are events with a part of the
    answer, ``end`` what a complete stream ends with, and ``error`` the event by which vLLM itself says that it failed.
    """

    path: str
    body: dict[str, Any]
    preamble: bytes
    words: tuple[bytes, ...]
    end: bytes
    error: bytes

    @property
    def stream(self) -> bytes:
        """A complete one."""
        return self.preamble + b"".join(self.words) + self.end


def chunk(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def named(name: str, **value: Any) -> bytes:
    return f"event: {name}\ndata: {json.dumps({'type': name} | value)}\n\n".encode()


ERROR = chunk({"error": {"message": "Internal server error", "type": "InternalServerError", "code": 500}})
COMPLETIONS = Spoken(
    "/v1/completions",
    {"prompt": "x", "max_tokens": 5},
    b"",
    tuple(chunk({"id": "x", "choices": [{"index": 0, "text": word}]}) for word in ("a", "b")),
    DONE,
    ERROR + DONE,
)
CHAT = Spoken(
    "/v1/chat/completions",
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    b"",
    tuple(chunk({"id": "x", "choices": [{"index": 0, "delta": {"content": word}}]}) for word in ("a", "b")),
    DONE,
    ERROR + DONE,
)
GENERATE = Spoken(
    "/inference/v1/generate",
    {"token_ids": [1, 2], "sampling_params": {"max_tokens": 5}},
    b"",
    tuple(chunk({"request_id": "x", "choices": [{"index": 0, "token_ids": [token]}]}) for token in (7, 8)),
    DONE,
    ERROR + DONE,
)
RESPONSES = Spoken(
    "/v1/responses",
    {"input": "x", "max_output_tokens": 5},
    named("response.created", response={"status": "in_progress"}, sequence_number=0)
    + named("response.in_progress", response={"status": "in_progress"}, sequence_number=1),
    tuple(
        named("response.output_text.delta", delta=word, sequence_number=2 + index)
        for index, word in enumerate(("a", "b"))
    ),
    named("response.completed", response={"status": "completed", "usage": None}, sequence_number=4),
    b"",
)
MESSAGES = Spoken(
    "/v1/messages",
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
    b"",
    (
        named("message_start", message={"id": "x", "usage": {"input_tokens": 3, "output_tokens": 0}}),
        named("content_block_delta", index=0, delta={"type": "text_delta", "text": "a"}),
    ),
    named("message_stop"),
    named("error", error={"type": "internal_error", "message": "Internal server error"}),
)
ALL = (COMPLETIONS, CHAT, GENERATE, RESPONSES, MESSAGES)
"""Every one."""

USAGE = {
    "/v1/responses": {"input_tokens": 9, "output_tokens": 1, "input_tokens_details": {"cached_tokens": 4}},
    "/v1/messages": {"input_tokens": 5, "output_tokens": 1, "cache_read_input_tokens": 4},
}
CHUNK_USAGE = {"prompt_tokens": 9, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}


async def prefills(seen: Seen, wire: Wire) -> None:
    """A prefill engine: nine prompt tokens, of which it had four."""
    usage = USAGE.get(seen.path, CHUNK_USAGE)
    wire.whole(json.dumps({"id": "p", "usage": usage, "kv_transfer_params": HANDLE}).encode())


def error_of(api: Spoken, stream: bytes) -> dict[str, Any]:
    """The error at the end of a stream that the router broke off, whose form is checked."""
    if api.end == DONE:
        assert stream.endswith(DONE)
        stream = stream.removesuffix(DONE)
        prefix = b"data: "
    else:
        assert DONE not in stream
        prefix = b"event: error\ndata: "
    *_, event, rest = stream.split(b"\n\n")
    assert rest == b""
    assert event.startswith(prefix), event
    value: dict[str, Any] = json.loads(event.removeprefix(prefix))
    assert value["error"]["message"]
    return value


async def send(router: Router, api: Spoken, **fields: Any) -> Reply:
    """One streamed request, unless ``stream`` says otherwise, of exactly these fields."""
    body = json.dumps(api.body | {"stream": True} | fields).encode()
    return await send_bytes(router, api.path, body)


async def send_bytes(router: Router, path: str, body: bytes, content_type: str = "application/json") -> Reply:
    async with connected(router) as client:
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        client.writer.write(head.encode() + body)
        return await client.reply()


def streams(api: Spoken, *pieces: bytes) -> Script:
    async def script(_: Seen, wire: Wire) -> None:
        wire.begin()
        for piece in pieces or (api.preamble, *api.words, api.end):
            if piece:
                wire.piece(piece)
                await wire.writer.drain()
                await asyncio.sleep(0.01)
        wire.end()

    return script
