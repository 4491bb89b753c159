"""What differs between the APIs: the shape of errors, and how a stream that cannot go on ends."""

from __future__ import annotations

import json

import pytest

from antiphon.protocol.apis import COMPLETIONS, GENERATE, MESSAGES, RESPONSES, Api
from antiphon.protocol.openai import DONE_EVENT

NO_WORDS = {"kind": None, "code": None, "param": None}


@pytest.mark.parametrize("api", [COMPLETIONS, GENERATE, RESPONSES], ids=["completions", "generate", "responses"])
def test_openais_errors(api: Api) -> None:
    body = api.error_body("no", status=400, kind="invalid_request_error", code="x", param="p")
    assert json.loads(body) == {"error": {"message": "no", "type": "invalid_request_error", "param": "p", "code": "x"}}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
def test_anthropics_errors(status: int, kind: str) -> None:
    body = MESSAGES.error_body("no", status=status, **NO_WORDS)
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "no"}}


@pytest.mark.parametrize("api", [COMPLETIONS, GENERATE], ids=["completions", "generate"])
def test_a_stream_of_chunks_ends_with_an_error_and_done(api: Api) -> None:
    error, rest = api.error_events("lost", 502, b"data: {}\n\n").split(b"\n\n", 1)
    assert json.loads(error.removeprefix(b"data: "))["error"]["message"] == "lost"
    assert rest == DONE_EVENT


def test_a_stream_of_a_message_ends_with_an_error_event() -> None:
    event, rest = MESSAGES.error_events("lost", 502, b"").split(b"\n\n")
    name, data = event.split(b"\n")
    assert (name, rest) == (b"event: error", b"")
    value = json.loads(data.removeprefix(b"data: "))
    assert value == {"type": "error", "error": {"type": "api_error", "message": "lost"}}


@pytest.mark.parametrize(
    ("last", "number"),
    [
        (b"", 0),
        (b'event: a\ndata: {"type":"a"}\n\n', 0),
        (b'event: a\ndata: {"sequence_number":6}\n\nevent: b\ndata: {"sequence_number": 7,"type":"b"}\n\n', 8),
        (b'event: a\ndata: {"item":{"sequence_number":99},"sequence_number":3,"type":"a"}\n\n', 4),
        (b'event: a\ndata: {"delta":"\\"sequence_number\\":99","sequence_number":3}\n\n', 4),
        (b'event: a\ndata: {"sequence_number":' + b"9" * 5000 + b"}\n\n", 0),
    ],
)
def test_a_stream_of_a_response_ends_with_an_error_event_that_has_the_next_number(last: bytes, number: int) -> None:
    name, data = RESPONSES.error_events("lost", 502, last).removesuffix(b"\n\n").split(b"\n")
    value = json.loads(data.removeprefix(b"data: "))
    assert name == b"event: error"
    assert value["type"] == "error"
    assert (value["sequence_number"], value["message"], value["code"]) == (number, "lost", "server_error")
    assert value["error"]["message"] == "lost"
