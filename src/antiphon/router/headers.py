"""Header fields in both directions: what goes on to an engine, what goes back to the client.

Fields that concern one connection are dropped (RFC 9110), and so are those that the router sets itself. A client's
``x-request-id`` is echoed to it and not passed on: engines get an id of ours, unique for each attempt.
"""

from __future__ import annotations

import re
from typing import Final

from antiphon.observe.receipt import Receipt
from antiphon.observe.token_sources import Leg
from antiphon.transport.http.message import HOP_BY_HOP, HttpRequest, HttpResponse, field_lines

NOT_FORWARDED: Final = HOP_BY_HOP | {b"host", b"content-length", b"accept-encoding", b"expect", b"x-request-id"}
"""Fields of a client that no engine gets."""
_NOT_RETURNED: Final = HOP_BY_HOP | {b"content-length", b"server", b"x-request-id"}


def forwarded_headers(request: HttpRequest, dropped: frozenset[bytes] = NOT_FORWARDED) -> list[tuple[bytes, bytes]]:
    """The client's fields that an engine gets, as they came: all but those ``dropped``, W3C trace context among them.

    ``accept-encoding`` is left out: events are read on their way back.
    """
    if b"connection" in request.first:
        values = [value for name, value in request.headers if name == b"connection"]
        dropped = dropped | {name.strip().lower() for name in b",".join(values).split(b",")}
    return [field for field in request.headers if field[0] not in dropped]


def returned_lines(headers: list[tuple[bytes, bytes]]) -> bytes:
    """An engine's fields that the client gets, as they are written."""
    return field_lines([field for field in headers if field[0] not in _NOT_RETURNED])


def retry_after_s(response: HttpResponse) -> int | None:
    """The whole seconds that an engine asks to be left alone; None where it names none."""
    text = response.header(b"retry-after")
    return int(text) if text is not None and text.isdigit() and len(text) < 6 else None


def engine_request_id(token: str, prefill: str | None, decode: str | None, *, tagged: bool) -> str:
    """The ``x-request-id`` for an engine, unique for each request and stage; vLLM builds the response ``id`` from it.

    ``tagged`` puts the addresses in, in the form that vllm-router gives them.
    """
    if prefill is None:
        return token
    if decode is None:
        return f"___prefill_addr_{prefill}_{token}" if tagged else f"prefill-{token}"
    return f"___prefill_addr_{prefill}___decode_addr_{decode}_{token}" if tagged else token


_TAGGED_ID = re.compile(r"___prefill_addr_.*:\d+_([0-9a-f]{32})(?![0-9a-f])", re.DOTALL)
_PLAIN_ID = re.compile(r"(?:^|[-_])(prefill-|free-)?([0-9a-f]{32})(?![0-9a-f])")


def leg_of(request: str) -> tuple[str, Leg] | None:
    """The token and the stage of an ``engine_request_id`` within an engine's own id of a request, which has more around
    it (``cmpl-…-0-1a2b3c4d``); None where there is none, or the request only frees what another one left."""
    found = _TAGGED_ID.search(request)
    if found is not None:
        return found[1], "decode" if "___decode_addr_" in request[: found.start(1)] else "prefill"
    found = _PLAIN_ID.search(request)
    if found is None or found[1] == "free-":
        return None
    return found[2], "prefill" if found[1] else "decode"


def answer_lines(receipt: Receipt) -> bytes:
    """The fields that the router adds to every answer on an inference route, as they are written: what is known when
    they leave."""
    shown = receipt.client_request_id or receipt.id
    pieces = ["x-request-id: ", shown, "\r\nx-antiphon-receipt: ", receipt.id]
    if receipt.path:
        pieces.extend(["\r\nx-antiphon-path: ", receipt.path, "\r\nx-antiphon-reason: ", receipt.reason])
    if receipt.prefill is not None:
        pieces.extend(["\r\nx-antiphon-prefill: ", receipt.prefill])
    if receipt.decode is not None:
        pieces.extend(["\r\nx-antiphon-decode: ", receipt.decode])
    if receipt.prefill_ms is not None:
        tenths = int(receipt.prefill_ms * 10 + 0.5)  # the formatting of a float costs several times as much
        pieces.append(f"\r\nx-antiphon-prefill-ms: {tenths // 10}.{tenths % 10}")
    pieces.append("\r\n")
    return "".join(pieces).encode("latin-1")
