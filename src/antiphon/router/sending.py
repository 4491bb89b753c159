"""What a request sends to engines: ids, heads, and bodies in as few pieces as is cheap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from antiphon.protocol.body import Buffer
from antiphon.router.headers import engine_request_id
from antiphon.routing.commands import CompleteHandover
from antiphon.routing.endpoint import Endpoint

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


def buffers_of(flight: Flight, endpoint: Endpoint, request_id: str, pieces: Sequence[Buffer]) -> list[Buffer]:
    """A request to an engine: its head and the pieces of its body."""
    length = sum(map(len, pieces))
    fields = f"host: {endpoint.address}\r\nx-request-id: {request_id}\r\ncontent-length: {length}\r\n\r\n"
    head = flight.head + fields.encode("latin-1")
    return [b"".join([head, *pieces])] if length <= _JOIN_MAX_BYTES else [head, *pieces]


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
