"""The field that says which trace a call belongs to: calls of processes that do not know it are understood."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.core.errors import ProtocolError
from antiphon.protocol import cache, peers

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
KEY = b"k" * 32

CACHE_CALLS: list[cache.Body] = [
    cache.Lookup("r", b"n" * 32, "t", KEY, 1.0, 2.0, None, TRACEPARENT),
    cache.Reserve(b"n" * 32, "t", None, KEY, TRACEPARENT),
]
PEER_CALLS: list[peers.Message] = [
    peers.Lend(b"n" * 32, None, 10, 1, KEY, TRACEPARENT),
    peers.Locate(KEY, TRACEPARENT),
]


def without_last(framed: bytes, number: int = 1) -> bytes:
    """The payload of a frame as who does not know the last fields of its body sends it."""
    call_id, body = msgspec.msgpack.decode(framed[cache.LENGTH_BYTES :])
    return msgspec.msgpack.encode([call_id, body[:-number]])


@pytest.mark.parametrize("body", CACHE_CALLS, ids=lambda body: type(body).__name__)
def test_a_call_of_an_engine(body: cache.Lookup | cache.Reserve) -> None:
    framed = cache.frame(cache.Call(1, body))
    assert cache.decode_call(framed[cache.LENGTH_BYTES :]).body == body
    old = cache.decode_call(without_last(framed)).body
    assert old == msgspec.structs.replace(body, traceparent="")


@pytest.mark.parametrize("body", PEER_CALLS, ids=lambda body: type(body).__name__)
def test_a_call_of_a_peer(body: peers.Lend | peers.Locate) -> None:
    framed = peers.frame(1, body)
    assert peers.decode(framed[cache.LENGTH_BYTES :]).body == body
    old = peers.decode(without_last(framed, 2 if isinstance(body, peers.Lend) else 1)).body
    assert old == msgspec.structs.replace(body, traceparent="")


def test_a_long_one_of_a_peer_is_refused() -> None:
    with pytest.raises(ProtocolError):
        peers.decode(peers.frame(1, peers.Locate(KEY, "x" * 129))[cache.LENGTH_BYTES :])
