"""What differs between the APIs that vLLM serves: how a prefill is asked for, what ends a stream, how errors look, and
where the cached tokens are counted.

An :class:`Api` is looked up once for each request, and never changed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from antiphon.protocol import handoff, openai, usage
from antiphon.protocol.body import Buffer

_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    502: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_SEQUENCE_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d+)')


class ErrorBody(Protocol):
    """Writes the body of an answer that is an error."""

    def __call__(
        self, message: str, *, status: int, kind: str | None, code: str | None, param: str | None
    ) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Api:
    """One API.

    Args:
        handoff: how its requests become a prefill.
        error_body: writes an error that is the whole answer.
        error_events: writes the end of a stream that cannot go on, from a message, a status, and what the client got
            last.
        set_cached_tokens: see ``usage``.
        cached_tokens_key: what an answer must contain to be given to it.
        end: what a complete stream ends with, byte for byte; None where only the last event's name is known.
        end_names: what the last event of a complete stream may begin with.
        first_error: what a stream begins with that holds nothing but an error.
        preamble: what the events begin with that say nothing of the answer yet: vLLM writes them before it has begun.
        answers_json: whether an answer that is no stream is JSON.
    """

    handoff: handoff.Handoff
    error_body: ErrorBody = openai.error_body
    error_events: Callable[[str, int, bytes], bytes] = openai.error_events
    set_cached_tokens: Callable[[Buffer, int | None], bytes] = usage.with_cached_tokens
    cached_tokens_key: bytes = usage.HAS_CACHED_TOKENS
    end: bytes | None = openai.DONE_EVENT
    end_names: tuple[bytes, ...] = ()
    first_error: bytes = b'data: {"error"'
    preamble: tuple[bytes, ...] = ()
    answers_json: bool = True


def anthropic_error_body(
    message: str, *, status: int, kind: str | None = None, code: str | None = None, param: str | None = None
) -> bytes:
    """An error as Anthropic's clients read it; it has no place for a code or a field."""
    error = {"type": _ANTHROPIC_KINDS.get(status, "invalid_request_error"), "message": message}
    return json.dumps({"type": "error", "error": error}).encode()


def anthropic_error_events(message: str, status: int, last: bytes = b"") -> bytes:
    """The end of a stream of a message: an error event is the last one."""
    return b"event: error\ndata: " + anthropic_error_body(message, status=status) + b"\n\n"


def response_error_events(message: str, status: int, last: bytes = b"") -> bytes:
    """The end of a stream of a response: an error event, numbered after the event before it.

    Clients read its fields at the top; OpenAI's own stops at an ``error`` object.
    """
    numbers = _SEQUENCE_NUMBER.findall(last[last.rfind(b"\n\n", 0, -2) + 1 :])
    fields: dict[str, object] = {"type": "error", "code": "server_error", "message": message, "param": None}
    fields["sequence_number"] = int(numbers[-1]) + 1 if numbers and len(numbers[-1]) < 10 else 0
    fields |= openai.error_object(message, status=status, code="server_error")
    return b"event: error\ndata: " + json.dumps(fields).encode() + b"\n\n"


COMPLETIONS = Api(handoff.COMPLETION)
"""Completions and chats; and whatever one engine serves alone, whose errors look the same."""

ANY = Api(handoff.COMPLETION, answers_json=False)
"""The same, where an answer may be text."""

GENERATE = Api(handoff.GENERATE)

RESPONSES = Api(
    handoff.RESPONSE,
    error_events=response_error_events,
    set_cached_tokens=usage.with_cached_tokens_at_end,
    end=None,
    end_names=(b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n"),
    first_error=b"event: error\n",
    preamble=(b"event: response.created\n", b"event: response.in_progress\n"),
)

MESSAGES = Api(
    handoff.MESSAGE,
    error_body=anthropic_error_body,
    error_events=anthropic_error_events,
    set_cached_tokens=usage.with_cache_read,
    cached_tokens_key=usage.HAS_CACHE_READ,
    end=None,
    end_names=(b"event: message_stop\n",),
    first_error=b"event: error\n",
)
