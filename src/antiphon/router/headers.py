"""Header fields in both directions: what goes on to an engine, what goes back to the client.

Fields that concern one connection are dropped (RFC 9110), and so are those that the router sets itself. A client's
``x-request-id`` is echoed to it and not passed on: engines get an id of ours, unique for each attempt.
"""

from __future__ import annotations

from antiphon.observe.receipt import Receipt
from antiphon.transport.http.message import HOP_BY_HOP, HttpRequest

_NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id"}
_NOT_RETURNED = HOP_BY_HOP | {b"content-length", b"server", b"x-request-id"}


def forwarded_headers(request: HttpRequest) -> list[tuple[bytes, bytes]]:
    """The client's fields that an engine gets. ``accept-encoding`` is left out: events are read on their way back."""
    dropped = _NOT_FORWARDED
    named = request.header(b"connection")
    if named is not None:
        dropped = dropped | {name.strip().lower() for name in named.split(b",")}
    return [field for field in request.headers if field[0] not in dropped]


def returned_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """An engine's fields that the client gets."""
    return [field for field in headers if field[0] not in _NOT_RETURNED]


def engine_request_id(token: str, prefill: str | None, decode: str | None, *, tagged: bool) -> bytes:
    """The ``x-request-id`` for an engine, unique for each request and stage; vLLM builds the response ``id`` from it.

    ``tagged`` puts the addresses in, in the form that vllm-router gives them.
    """
    if not tagged or prefill is None:
        return token.encode()
    if decode is None:
        return f"___prefill_addr_{prefill}_{token}".encode()
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{token}".encode()


def answer_headers(receipt: Receipt) -> list[tuple[bytes, bytes]]:
    """The fields that the router adds to every answer on an inference route: what is known when they leave."""
    fields = [
        (b"x-request-id", (receipt.client_request_id or receipt.id).encode("latin-1")),
        (b"x-antiphon-receipt", receipt.id.encode()),
    ]
    if receipt.path:
        fields.append((b"x-antiphon-path", receipt.path.encode()))
        fields.append((b"x-antiphon-reason", receipt.reason.encode()))
    if receipt.prefill is not None:
        fields.append((b"x-antiphon-prefill", receipt.prefill.encode()))
    if receipt.decode is not None:
        fields.append((b"x-antiphon-decode", receipt.decode.encode()))
    if receipt.prefill_ms is not None:
        fields.append((b"x-antiphon-prefill-ms", b"%.1f" % receipt.prefill_ms))
    return fields
