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
from antiphon.protocol.apis import COMPLETIONS, Api
from antiphon.protocol.openai import JSON, KIND_BY_STATUS
from antiphon.routing.commands import EndStreamWithError, FailureCode, RespondError
from antiphon.routing.endpoint import Role
from antiphon.transport.http.server import Responder

RETRY_AFTER_S = 2

_KINDS: tuple[tuple[type[UpstreamError], str], ...] = (
    (ConnectFailed, "connect"),
    (UpstreamTimeout, "timeout"),
    (UpstreamGarbage, "garbage"),
    (UpstreamLost, "lost"),
)


_WORDS: dict[FailureCode, str] = {
    "no_prefill_engine": "no prefill engine is available",
    "no_decode_engine": "no decode engine is available",
    "own_limit": "the router has too many connections open",
    "prefill_overloaded": "the prefill engine is overloaded",
    "prefill_error": "the prefill engine failed with an internal error",
    "prefill_lost": "the prefill engine failed before it answered",
    "prefill_bad_answer": "the prefill engine gave an answer that cannot be used",
    "prefill_timeout": "the prefill engine did not answer in time",
    "decode_overloaded": "the decode engine is overloaded",
    "decode_error": "the decode engine failed with an internal error",
    "decode_lost": "the decode engine failed before it answered",
    "decode_bad_answer": "the decode engine gave an answer that cannot be used",
    "decode_timeout": "the decode engine did not answer in time",
    "handover_timeout": "no decode engine could be reached in time for the hand-over",
}


_QUEUE_WORDS: dict[str, str] = {
    "tenant_rate_limited": "this API key has sent more requests than its rate allows",
    "tenant_token_rate_limited": "this API key has used more tokens than its rate allows",
    "tenant_concurrency_limited": "this API key has too many requests in progress",
    "overloaded": "too many requests are in progress",
    "cold_queue_full": "too many long prompts wait already",
    "cold_queue_timeout": "the engines were too busy with long prompts to begin this one",
}


def refusal_for(command: RespondError) -> RequestRefused:
    """What the client is told."""
    return RequestRefused(
        _WORDS[command.code], status=command.status, kind=KIND_BY_STATUS[command.status], code=command.code
    )


def broken_off(command: EndStreamWithError) -> str:
    """What a client is told that has a part of its answer."""
    words = "stopped answering" if command.status == 504 else "failed"
    return f"the decode engine {words} before the answer was complete"


def unavailable(role: Role) -> RequestRefused:
    """No engine of a pool can be reached."""
    return refusal_for(RespondError(503, "no_prefill_engine" if role == "prefill" else "no_decode_engine"))


OWN_FIELDS = ("kv_transfer_params", "kv_cache_report_mode")
"""What vLLM takes out of a request's further arguments and no client may say: a handle, which may be another client's,
and whether the engine tells of each block that the request finds, over and over. As text, a handle ends the engine."""


def own_field_refused(field: str, param: str) -> RequestRefused:
    """A client names one of :data:`OWN_FIELDS`.

    Args:
        field: which.
        param: where in the body.
    """
    return RequestRefused(
        f"{field} is set by the router and cannot be sent by a client", code=f"{field}_refused", param=param
    )


def queue_refusal(status: int, code: str) -> RequestRefused:
    """A request that would have had to wait, or has waited, too long: for its tenant's limits or its admission.

    Args:
        code: of ``routing.tenants.CODES`` or ``routing.cold.REFUSALS``.
    """
    return RequestRefused(_QUEUE_WORDS[code], status=status, kind=KIND_BY_STATUS[status], code=code)


def stopping() -> RequestRefused:
    """The router stops, and its time to let requests finish is over."""
    return RequestRefused("the router is stopping", status=503, kind="service_unavailable", code="stopping")


def kind_of(error: UpstreamError) -> str:
    """The metric label of an engine's failure."""
    for cls, kind in _KINDS:
        if isinstance(error, cls):
            return kind
    return "other"


def send_refusal(
    responder: Responder,
    refusal: RequestRefused,
    lines: bytes = b"",
    retry_after_s: int | None = None,
    api: Api = COMPLETIONS,
) -> None:
    """Answer with an error in the API's shape, and further header fields as they are written; 429 and 503 say when to
    come back."""
    body = api.error_body(
        refusal.message, status=refusal.status, kind=refusal.kind, code=refusal.code, param=refusal.param
    )
    lines += b"content-type: %b\r\n" % JSON
    if refusal.status in (429, 503):
        lines += b"retry-after: %d\r\n" % (retry_after_s or RETRY_AFTER_S)
    responder.send(refusal.status, lines, body)
