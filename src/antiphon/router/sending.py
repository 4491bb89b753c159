"""What a request sends to engines: ids, heads, and bodies in as few pieces as is cheap."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from antiphon.protocol.body import Buffer
from antiphon.router.headers import engine_request_id
from antiphon.router.keys import EngineAccess
from antiphon.routing.commands import CompleteHandover
from antiphon.routing.endpoint import Endpoint
from antiphon.transport.http.message import HttpRequest

if TYPE_CHECKING:
    from antiphon.router.flight import Flight

_JOIN_MAX_BYTES: Final = 16_384
"""A request up to this size is written as one piece, which costs less than several."""


def decode_id(flight: Flight, endpoint: Endpoint, request_id: str) -> str:
    """The id that a decode engine is sent, which names the prefill engine that it pulls from."""
    receipt = flight.receipt
    receipt.decode = endpoint.address
    prefill = receipt.prefill if flight.life.handle is not None or receipt.path == "pd" else None
    return engine_request_id(request_id, prefill, endpoint.address, tagged=flight.desk.is_tagged)


def engine_head(request: HttpRequest, access: EngineAccess) -> bytes:
    """The head of what a client's request becomes, as far as it is the same for each engine: made once for all requests
    of a connection that have the same one."""
    model = request.model
    head = model.passed_on if model is not None else None
    if head is None:
        target = request.target.encode("latin-1")
        head = b"POST %b HTTP/1.1\r\n%b" % (target, access.forwarded_lines(request))
        if model is not None:
            model.passed_on = head
    return head


def buffers_of(flight: Flight, endpoint: Endpoint, request_id: str, pieces: list[Buffer]) -> list[Buffer]:
    """A request to an engine: its head and the pieces of its body."""
    length = 0
    for piece in pieces:
        length += len(piece)
    trace = flight.trace
    line = "" if trace is None else trace.line
    fields = f"host: {endpoint.address}\r\nx-request-id: {request_id}\r\n{line}content-length: {length}\r\n\r\n"
    if length <= _JOIN_MAX_BYTES:
        return [b"".join([flight.head, fields.encode("latin-1"), *pieces])]
    return [flight.head + fields.encode("latin-1"), *pieces]


def drain_request(flight: Flight, command: CompleteHandover) -> list[Buffer]:
    """The request whose only use is that the KV is pulled.

    Where an engine pulled it before, this one reads other data: the salt keeps that from ever being found again.
    """
    params, endpoint = command.handle.value, command.endpoint
    assert isinstance(params, bytes)
    fields = flight.api.handoff.drain_fields(flight.body, params)
    if command.is_salted:
        fields["cache_salt"] = b'"antiphon-free-%b"' % flight.receipt.id.encode()
        request_id = f"free-{command.request_id}"
    else:
        request_id = decode_id(flight, endpoint, command.request_id)
    return buffers_of(flight, endpoint, request_id, flight.body.splice(fields))
