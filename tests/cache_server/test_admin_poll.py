"""Long polls: numbers, limits, waits that end, and what an asker of another life is told."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from antiphon.cache_server import admin_poll
from antiphon.cache_server import probe as probe_module
from antiphon.cache_server.admin import AdminServer, start_admin
from antiphon.protocol import cache as wire
from tests.cache_server.admin_standin import PAGE, StandIn, get, key_of, namespace_of, post, until

BOTH = pytest.mark.parametrize("route", ["/events", "/reports"])


def report(number: int) -> wire.Report:
    return wire.Report(f"r{number}", "P", "life", 10, 1, 2, 3, 4, 0, "finished")


def grow(server: StandIn, route: str, number: int) -> None:
    """One more entry of the log behind ``route``."""
    if route == "/reports":
        server.reports.add(report(number))
    else:
        server.store(server.attach_engine(f"e{number}", 1000 + number), number)


async def waiting(admin: AdminServer, num: int) -> None:
    await until(lambda: admin._polls.num_waiting == num)


async def test_events_are_what_was_stored_and_removed(server: StandIn, admin: AdminServer) -> None:
    server.store(server.attach_engine(), 1, 2, tenant="a")
    await post(admin.port, "/clear", {})
    answer = (await get(admin.port, "/events")).json
    assert all(abs(event.pop("at") - time.time()) < 60 for event in answer["events"])
    names = {"namespace": namespace_of("a").hex(), "model": "m", "tenant": "a", "num_bytes": PAGE}
    first, second = key_of(1).hex(), key_of(2).hex()
    assert answer["events"][:2] == [
        {"sequence": 1, "kind": "stored", "key": first, "parent": None} | names,
        {"sequence": 2, "kind": "stored", "key": second, "parent": first} | names,
    ]
    removed = {"kind": "removed", "reason": "cleared"} | names
    assert sorted(answer["events"][2:], key=lambda event: event["key"]) == [
        {"sequence": answer["events"][2:][keys.index(key)]["sequence"], "key": key} | removed
        for keys in [[event["key"] for event in answer["events"][2:]]]
        for key in (first, second)
    ]
    assert (answer["incarnation"], answer["next"], answer["num_lost"]) == ("abcd1234", 5, 0)


async def test_reports_are_what_engines_said(server: StandIn, admin: AdminServer) -> None:
    server.reports.add(report(1))
    answer = (await get(admin.port, "/reports?since=0")).json
    at = answer["events"][0].pop("at")
    assert abs(at - time.time()) < 60
    assert answer == {
        "incarnation": "abcd1234",
        "next": 2,
        "num_lost": 0,
        "events": [
            {
                "sequence": 1,
                "request": "r1",
                "engine": "P",
                "incarnation": "life",
                "num_prompt_tokens": 10,
                "device": 1,
                "l1": 2,
                "remote_prefill": 3,
                "l2": 0,
                "peer": 0,
                "computed": 4,
                "num_preemptions": 0,
                "finish": "finished",
                "namespace": "",
            }
        ],
    }


@BOTH
async def test_going_on_from_next_sees_each_entry_once(server: StandIn, admin: AdminServer, route: str) -> None:
    since, seen = 1, []
    for number in range(1, 6):
        grow(server, route, number)
        answer = (await get(admin.port, f"{route}?since={since}&incarnation=abcd1234")).json
        since = answer["next"]
        seen += [event["sequence"] for event in answer["events"]]
    assert (seen, since) == ([1, 2, 3, 4, 5], 6)
    again = (await get(admin.port, f"{route}?since={since}")).json
    assert (again["events"], again["next"], again["num_lost"]) == ([], 6, 0)


async def test_an_answer_has_at_most_a_thousand(server: StandIn, admin: AdminServer) -> None:
    for number in range(2500):
        server.reports.add(report(number))
    since, sizes = 1, []
    while since <= 2500:
        answer = (await get(admin.port, f"/reports?since={since}&wait_s=5")).json
        sizes.append(len(answer["events"]))
        since = answer["next"]
    assert sizes == [1000, 1000, 500]


@BOTH
async def test_a_poll_waits_for_the_next_entry(server: StandIn, admin: AdminServer, route: str) -> None:
    asked = asyncio.create_task(get(admin.port, f"{route}?since=1&wait_s=20"))
    await waiting(admin, 1)
    grow(server, route, 1)
    answer = (await asked).json
    assert ([event["sequence"] for event in answer["events"]], answer["next"]) == ([1], 2)
    await waiting(admin, 0)


@BOTH
async def test_a_wait_ends_at_its_time(admin: AdminServer, route: str) -> None:
    began_s = time.monotonic()
    answer = await get(admin.port, f"{route}?wait_s=0.2")
    assert 0.19 < time.monotonic() - began_s < 5  # a loop may wake a hair early
    assert (answer.status, answer.json["events"], answer.json["next"]) == (200, [], 1)


async def test_events_of_the_probe_do_not_end_a_wait(
    server: StandIn, admin: AdminServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "PROBE_FRESH_S", 0.0)
    asked = asyncio.create_task(get(admin.port, "/events?wait_s=20"))
    await waiting(admin, 1)
    for _ in range(3):
        assert (await get(admin.port, "/healthz")).status == 200
    assert not asked.done()
    grow(server, "/events", 1)
    answer = (await asked).json
    assert ([event["sequence"] for event in answer["events"]], answer["next"]) == ([7], 8)


@BOTH
@pytest.mark.parametrize("query", ["since=7&wait_s=20", "since=2&wait_s=20&incarnation=other"])
async def test_another_life_begins_anew(server: StandIn, admin: AdminServer, route: str, query: str) -> None:
    empty = (await get(admin.port, f"{route}?{query}")).json  # at once: who asks must learn it
    assert (empty["incarnation"], empty["next"], empty["events"]) == ("abcd1234", 1, [])
    grow(server, route, 1)
    answer = (await get(admin.port, f"{route}?{query}")).json
    assert ([event["sequence"] for event in answer["events"]], answer["next"]) == ([1], 2)


async def test_what_is_lost_is_counted(server: StandIn, admin: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.reports, "_ring", type(server.reports._ring)(maxlen=3))
    for number in range(10):
        server.reports.add(report(number))
    answer = (await get(admin.port, "/reports?since=2&wait_s=5")).json
    assert (answer["num_lost"], [event["sequence"] for event in answer["events"]]) == (6, [8, 9, 10])
    restarted = (await get(admin.port, "/reports?since=9&incarnation=other")).json
    assert (restarted["num_lost"], restarted["next"]) == (7, 11)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("since=-1", "since"),
        ("since=x", "since"),
        ("since=1.5", "since"),
        ("since=", "since"),
        ("since=٣", "since"),
        (f"since={2**63}", "since"),
        (f"since={'9' * 5000}", "since"),
        ("wait_s=31", "wait_s"),
        ("wait_s=-0.1", "wait_s"),
        ("wait_s=nan", "wait_s"),
        ("wait_s=inf", "wait_s"),
        ("wait_s=x", "wait_s"),
        ("since=1&since=2", "since"),
        ("sinse=1", "sinse"),
        ("&".join("a=1" for _ in range(50)), None),
    ],
)
@BOTH
async def test_a_query_that_makes_no_sense(admin: AdminServer, route: str, query: str, param: str | None) -> None:
    from urllib.parse import quote

    answer = await get(admin.port, f"{route}?{quote(query, safe='=&')}")
    assert (answer.status, answer.error["param"]) == (400, param)


async def test_askers_that_wait_are_limited(
    server: StandIn, admin: AdminServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admin_poll, "WAITING_MAX", 3)
    asked: list[asyncio.Task[Any]] = [asyncio.create_task(get(admin.port, "/reports?wait_s=20")) for _ in range(3)]
    await waiting(admin, 3)
    refused = await get(admin.port, "/events?wait_s=20")
    assert (refused.status, refused.error["code"]) == (503, "too_many_waiting")
    assert refused.headers["retry-after"] == "1"
    assert (await get(admin.port, "/reports")).status == 200  # who does not wait is answered
    server.reports.add(report(1))
    assert [(await each).status for each in asked] == [200] * 3
    await waiting(admin, 0)


async def test_an_asker_that_leaves_frees_its_place(admin: AdminServer) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", admin.port)
    writer.write(b"GET /reports?wait_s=30 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
    await waiting(admin, 1)
    writer.close()
    await writer.wait_closed()
    await waiting(admin, 0)


async def test_closing_answers_who_waits(server: StandIn) -> None:
    admin = await start_admin(server, "127.0.0.1", 0)
    asked = asyncio.create_task(get(admin.port, "/reports?wait_s=30"))
    await waiting(admin, 1)
    began_s = time.monotonic()
    await admin.close()
    answer = await asked
    assert (answer.status, answer.json["events"]) == (200, [])
    assert time.monotonic() - began_s < 1
