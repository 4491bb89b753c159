"""What a client is told when its request cannot be served: one place for the words and the status codes.

Messages never contain an engine's address: the receipt and the log do.
"""

from __future__ import annotations

from antiphon.core.errors import (
    ConnectFailed,
    RequestRefused,
    UpstreamError,
    UpstreamGarbage,
    UpstreamLost,
    UpstreamTimeout,
)
from antiphon.protocol.openai import JSON, error_body
from antiphon.routing.registry import Role
from antiphon.transport.http.server import Responder

RETRY_AFTER_S = 2

_KINDS: tuple[tuple[type[UpstreamError], str], ...] = (
    (ConnectFailed, "connect"),
    (UpstreamTimeout, "timeout"),
    (UpstreamGarbage, "garbage"),
    (UpstreamLost, "lost"),
)


def unavailable(role: Role) -> RequestRefused:
    """No engine of a pool can be reached."""
    return RequestRefused(
        f"no {role} engine is available", status=503, kind="service_unavailable", code=f"no_{role}_engine"
    )


def handover_timeout() -> RequestRefused:
    """No decode engine could be reached while the prefill's KV was certain to be there."""
    return RequestRefused(
        "no decode engine could be reached in time for the hand-over",
        status=504,
        kind="timeout_error",
        code="handover_timeout",
    )


def stopping() -> RequestRefused:
    """The router stops, and its time to let requests finish is over."""
    return RequestRefused("the router is stopping", status=503, kind="service_unavailable", code="stopping")


def kind_of(error: UpstreamError) -> str:
    """The metric label of an engine's failure."""
    for cls, kind in _KINDS:
        if isinstance(error, cls):
            return kind
    return "other"


def refusal_of(error: UpstreamError, role: Role) -> RequestRefused:
    """What the client is told when an engine failed before any part of an answer was sent."""
    if isinstance(error, UpstreamTimeout):
        return RequestRefused(
            f"the {role} engine did not answer in time", status=504, kind="timeout_error", code=f"{role}_timeout"
        )
    if isinstance(error, UpstreamGarbage):
        return RequestRefused(
            f"the {role} engine gave an answer that cannot be used",
            status=502,
            kind="upstream_error",
            code=f"{role}_bad_answer",
        )
    return RequestRefused(
        f"the {role} engine failed before it answered", status=502, kind="upstream_error", code=f"{role}_lost"
    )


def status_refusal(status: int, role: Role) -> RequestRefused:
    """What the client is told when an engine answered with a 5xx: 503 stays 503, anything else is 502."""
    if status == 503:
        return RequestRefused(
            f"the {role} engine is overloaded", status=503, kind="service_unavailable", code=f"{role}_overloaded"
        )
    return RequestRefused(
        f"the {role} engine failed with an internal error", status=502, kind="upstream_error", code=f"{role}_error"
    )


def send_refusal(responder: Responder, refusal: RequestRefused, lines: bytes = b"") -> None:
    """Answer with an OpenAI-shaped error, and further header fields as they are written; 429 and 503 say when to come
    back."""
    body = error_body(refusal.message, status=refusal.status, kind=refusal.kind, code=refusal.code, param=refusal.param)
    lines += b"content-type: %b\r\n" % JSON
    if refusal.status in (429, 503):
        lines += b"retry-after: %d\r\n" % RETRY_AFTER_S
    responder.send(refusal.status, lines, body)
