"""Events and listings of chunks as the router reads them, and what is none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.core.errors import ProtocolError
from antiphon.protocol.chunk_events import ChunkEvent, decode_events, decode_listing

KEY = "0123456789abcdef" * 4
EVENT: dict[str, Any] = {"sequence": 3, "kind": "stored", "namespace": "00" * 32, "key": KEY, "parent": None}
LISTING: dict[str, Any] = {"incarnation": "a", "next": 5, "after": None, "chunk_size_tokens": 256, "chunks": []}


def page(*events: object, **fields: object) -> bytes:
    return json.dumps({"incarnation": "a", "next": 9, "num_lost": 0, "events": list(events)} | fields).encode()


def test_events_and_what_a_later_version_adds() -> None:
    found, num_invalid = decode_events(page(EVENT, EVENT | {"sequence": 4, "kind": "moved", "to": 1}))
    assert found.events == (ChunkEvent(3, "stored", KEY), ChunkEvent(4, "moved", KEY))
    assert num_invalid == 0


@pytest.mark.parametrize(
    "wrong",
    [
        EVENT | {"key": KEY[:-1]},
        EVENT | {"key": KEY + "00"},
        EVENT | {"key": KEY + "\n"},
        EVENT | {"key": KEY.upper()},
        EVENT | {"key": None},
        EVENT | {"sequence": -1},
        EVENT | {"kind": 1},
        {},
        None,
    ],
)
def test_a_wrong_event_costs_itself_alone(wrong: object) -> None:
    found, num_invalid = decode_events(page(EVENT, wrong))
    assert ([event.sequence for event in found.events], num_invalid) == ([3], 1)


def test_a_listing() -> None:
    groups = [{"namespace": "00", "keys": KEY + "f" * 64}, {"keys": ""}, {"keys": "0" * 64, "of_later": 1}]
    found = decode_listing(json.dumps(LISTING | {"after": 7, "chunks": groups}).encode())
    assert found.keys() == [bytes.fromhex(KEY), b"\xff" * 32, bytes(32)]
    assert (found.incarnation, found.next_sequence, found.after, found.chunk_size_tokens) == ("a", 5, 7, 256)
    assert decode_listing(json.dumps(LISTING).encode()).keys() == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"null",
        *(
            json.dumps(LISTING | wrong).encode()
            for wrong in (
                {"incarnation": ""},
                {"next": 0},
                {"after": -1},
                {"chunk_size_tokens": 0},
                {"chunks": None},
                {"chunks": [{}]},
                {"chunks": [{"keys": KEY[:-2]}]},
                {"chunks": [{"keys": "x" * 64}]},
            )
        ),
        json.dumps({name: value for name, value in LISTING.items() if name != "after"}).encode(),
    ],
)
def test_what_is_no_listing(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="no answer of /chunks"):
        decode_listing(body)
