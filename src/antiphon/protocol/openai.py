"""OpenAI-shaped messages: error bodies, and the request that a reader is shown to try by hand.

Owns the shape and nothing else; who raises an error decides its words, and words never contain internal addresses.
"""

from __future__ import annotations

import json

JSON = b"application/json"
EVENT_STREAM = b"text/event-stream"
DONE_EVENT = b"data: [DONE]\n\n"

KIND_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    500: "internal_error",
    502: "upstream_error",
    503: "service_unavailable",
    504: "timeout_error",
}


def error_object(
    message: str, *, status: int, kind: str | None = None, code: str | None = None, param: str | None = None
) -> dict[str, object]:
    """The ``error`` object of an OpenAI answer, as a dict ready for JSON.

    ``code`` defaults to the HTTP status, as vLLM does it.
    """
    return {
        "error": {
            "message": message,
            "type": kind or KIND_BY_STATUS.get(status, "internal_error"),
            "param": param,
            "code": code if code is not None else status,
        }
    }


def error_body(
    message: str, *, status: int, kind: str | None = None, code: str | None = None, param: str | None = None
) -> bytes:
    """The same as UTF-8 JSON."""
    return json.dumps(error_object(message, status=status, kind=kind, code=code, param=param)).encode()


def error_events(message: str, status: int, last: bytes = b"") -> bytes:
    """The end of a stream that cannot go on: one error event, then ``[DONE]``.

    ``last``, what the client got last, makes no difference here.
    """
    return b"data: " + error_body(message, status=status) + b"\n\n" + DONE_EVENT


def curl_line(base_url: str, model: str) -> str:
    """A shell command that asks for one short completion."""
    fields = {"model": model, "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    body = json.dumps(fields, separators=(",", ":"))
    return f"curl -s {base_url}/v1/completions -H \"Content-Type: application/json\" -d '{body}'"
