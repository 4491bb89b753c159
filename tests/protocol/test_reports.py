"""Answers of /reports as the router reads them: the cache server's own shape, and entries and pages that are none."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.cache_server.reports import Reports
from antiphon.cache_server.status import report_of
from antiphon.core.errors import ProtocolError
from antiphon.protocol import cache as wire
from antiphon.protocol.reports import COUNT_MAX, ReportPage, TokenReport, decode_page

REPORT: dict[str, Any] = {
    "sequence": 1,
    "request": "cmpl-x-0-12345678",
    "engine": "prefill-0",
    "incarnation": "a",
    "num_prompt_tokens": 10,
    "device": 1,
    "l1": 2,
    "remote_prefill": 3,
    "l2": 0,
    "peer": 0,
    "computed": 4,
    "num_preemptions": 0,
    "finish": "finished",
    "at": 1.5,
    "namespace": "",
}


def page(*events: object, **fields: object) -> bytes:
    return json.dumps({"incarnation": "a", "next": 2, "num_lost": 0, "events": list(events)} | fields).encode()


def test_what_the_cache_server_shows_is_what_the_router_reads() -> None:
    reports = Reports()
    body = wire.Report("cmpl-é", "decode-0", "life", 10, 1, 2, 3, 4, 5, "aborted", b"", 6, 7)
    entry = report_of(reports.add(body))
    found, num_invalid = decode_page(page(entry))
    assert num_invalid == 0
    assert found.events == (TokenReport(1, "cmpl-é", "decode-0", "life", 10, 1, 2, 3, 4, 5, "aborted", "", 6, 7),)
    # Each field that the router reads is one that the server sends, under the same name.
    assert set(TokenReport.__struct_fields__) <= set(entry)
    assert {field.name for field in dataclasses.fields(reports.add(body))} == set(REPORT)


def test_a_page() -> None:
    found, num_invalid = decode_page(page(REPORT, next=7, num_lost=3, of_a_later_version=[1]))
    assert (found.incarnation, found.next_sequence, found.num_lost, len(found.events)) == ("a", 7, 3, 1)
    assert num_invalid == 0
    assert decode_page(page()) == (ReportPage(incarnation="a", next_sequence=2, num_lost=0, events=()), 0)


@pytest.mark.parametrize(
    "wrong",
    [
        REPORT | {"device": -1},
        REPORT | {"device": COUNT_MAX + 1},
        REPORT | {"device": 1.5},
        REPORT | {"device": "1"},
        REPORT | {"device": None},
        REPORT | {"computed": 10**40},
        REPORT | {"finish": "gone"},
        REPORT | {"request": "x" * 1001},
        REPORT | {"engine": 1},
        REPORT | {"sequence": -1},
        REPORT | {"namespace": "0" * 63},
        REPORT | {"namespace": "G" * 64},
        REPORT | {"namespace": "0" * 64 + "\n"},
        REPORT | {"namespace": None},
        {name: value for name, value in REPORT.items() if name != "l1"},
        {},
        [],
        None,
        "report",
    ],
)
def test_a_wrong_entry_costs_itself_alone(wrong: object) -> None:
    found, num_invalid = decode_page(page(REPORT, wrong, REPORT | {"sequence": 3}, next=4))
    assert [report.sequence for report in found.events] == [1, 3]
    assert found.next_sequence == 4
    assert num_invalid == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"events":' + b"[" * 100_000,
        page(incarnation=None),
        page(incarnation=""),
        page(incarnation="x" * 1001),
        page(next=0),
        page(next=2**63),
        page(next="2"),
        page(num_lost=-1),
        page(events=None),
        page(events={}),
        b'{"incarnation":"a","next":2,"num_lost":0}',
        b'{"next":2,"num_lost":0,"events":[]}',
    ],
)
def test_a_wrong_page_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="no answer of /reports"):
        decode_page(body)


@given(st.binary(max_size=200))
def test_bytes_are_a_page_or_an_error(body: bytes) -> None:
    try:
        found, num_invalid = decode_page(body)
    except ProtocolError:
        return
    assert found.next_sequence >= 1
    assert num_invalid >= 0
