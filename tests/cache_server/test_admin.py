"""The admin side over HTTP: what each route answers, and what is refused.

Against the real cache behind the stand-in of ``admin_standin``; ``test_admin_real`` asks the real server.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon import __version__
from antiphon.cache.events import Clear
from antiphon.cache_server import probe as probe_module
from antiphon.cache_server.admin import AdminServer, start_admin
from antiphon.core.tenants import tenant_of
from antiphon.protocol import cache as wire
from tests.cache_server.admin_standin import PAGE, Hang, StandIn, ask, get, post

GETS = (
    *("/healthz", "/readiness", "/status", "/metrics", "/events", "/chunks", "/reports", "/leases"),
    *("/namespaces", "/chunks/facts", "/pins"),
)


def samples(text: bytes) -> dict[str, float]:
    """Series as in a query, ``name{label=value}``, without the prefix."""
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[sample.name.removeprefix("antiphon_cache_") + (f"{{{labels}}}" if labels else "")] = sample.value
    return found


# ---- health ----------------------------------------------------------------------------------------------------------


async def test_health(server: StandIn, admin: AdminServer) -> None:
    answer = await get(admin.port, "/healthz")
    assert answer.status == 200
    health = answer.json
    assert (health["status"], health["reason"], health["populated_ratio"]) == ("ok", None, 1.0)
    assert health["loops"] == {"calls": True, "ticks": True}
    assert (health["probe"]["is_ok"], health["probe"]["step"]) == (True, "clear")
    assert 0 < health["probe"]["took_ms"] < 1000
    assert server.calls[-1] == "Clear"


async def test_metrics_are_not_sent_while_a_probe_runs(server: StandIn, admin: AdminServer) -> None:
    """Its chunk would be counted, and then not: a counter that goes down."""
    seen: list[bytes | None] = []

    def look(answer: wire.Answered) -> wire.Answered:
        seen.append(admin.page_to_send())
        return answer

    server.faults["Commit"] = look
    await get(admin.port, "/healthz")
    assert seen == [None]
    assert admin.page_to_send() == admin.page()


async def test_health_of_a_server_that_hangs(
    server: StandIn, admin: AdminServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe_module, "PROBE_TIMEOUT_S", 0.1)

    def hang(_: wire.Answered) -> wire.Answered:
        raise Hang

    server.faults["Reserve"] = hang
    answers = await asyncio.gather(*(get(admin.port, "/healthz") for _ in range(10)))
    assert [answer.status for answer in answers] == [503] * 10
    assert answers[0].json["reason"] == "the self-probe failed at reserve: no answer within 0.1 s"
    assert server.calls.count("Reserve") == 1
    status = (await get(admin.port, "/status")).json
    assert (status["is_healthy"], status["reason"]) == (False, answers[0].json["reason"])


async def test_health_with_a_dead_loop(server: StandIn, admin: AdminServer) -> None:
    server.loops["ticks"] = False
    answer = await get(admin.port, "/healthz")
    assert answer.status == 503
    assert "a loop of the server has ended: ticks" in answer.json["reason"]
    assert answer.json["probe"]["is_ok"] is True


async def test_readiness(admin: AdminServer) -> None:
    answer = await get(admin.port, "/readiness")
    assert (answer.status, answer.json) == (200, {"status": "ready"})


# ---- status, metrics, leases -----------------------------------------------------------------------------------------


async def test_status_of_an_empty_server(server: StandIn, admin: AdminServer) -> None:
    status = (await get(admin.port, "/status")).json
    uptime_s = status.pop("uptime_s")
    assert 0 <= uptime_s < 60
    assert status == {
        "is_healthy": True,
        "reason": None,
        "instance": "stand-in",
        "incarnation": "abcd1234",
        "version": __version__,
        "chunk_size_tokens": 256,
        "eviction_policy": "lru",
        "storage_manager": {
            "l1_manager": {
                "is_healthy": True,
                "detail": None,
                "total_object_count": 0,
                "memory_used_bytes": 0,
                "memory_total_bytes": 16 * PAGE,
                "memory_usable_bytes": 16 * PAGE,
                "memory_usage_ratio": 0.0,
                "read_locked_count": 0,
                "write_locked_count": 0,
            }
        },
        "tokens": {
            "lookup": 0,
            "hit": 0,
            "reported": {"device": 0, "l1": 0, "l2": 0, "peer": 0, "remote_prefill": 0, "computed": 0},
        },
        "reports": {"count": 0, "prompt_tokens": 0, "mismatched": 0, "aborted": 0},
        "leases": {"count": 0, "by_state": {}, "leased_bytes": 0, "oldest_age_s": 0.0},
        "pins": {"count": 0, "pinned_bytes": 0, "pinned_bytes_max": 8 * PAGE},
        "handoffs": {"here": 1},
        "engines": [],
        "tenants": {},
    }


def used(server: StandIn) -> None:
    """Three chunks of one tenant and one of another, a lookup of two and a half, a report."""
    engine = server.attach_engine()
    server.store(engine, 1, 2, 3, tenant="a")
    server.store(engine, 9, tenant="b")
    assert server.lookup(engine, 1, 2, 7, tenant="a").lease is not None
    server.reports.add(wire.Report("r", "P", "life", 600, 0, 512, 0, 88, 0, "finished"))
    server.reports.add(wire.Report("s", "P", "life", 600, 1, 2, 3, 4, 0, "finished"))


async def test_status_of_a_server_in_use(server: StandIn, admin: AdminServer) -> None:
    used(server)
    status = (await get(admin.port, "/status")).json
    l1 = status["storage_manager"]["l1_manager"]
    assert (l1["total_object_count"], l1["memory_used_bytes"], l1["read_locked_count"]) == (4, 4 * PAGE, 2)
    assert l1["memory_usage_ratio"] == 0.25
    reported = {"device": 1, "l1": 514, "l2": 0, "peer": 0, "remote_prefill": 3, "computed": 92}
    assert status["tokens"] == {"lookup": 768, "hit": 512, "reported": reported}
    assert status["reports"] == {"count": 2, "prompt_tokens": 1200, "mismatched": 1, "aborted": 0}
    assert (status["leases"]["count"], status["leases"]["by_state"]) == (1, {"held": 1})
    assert status["leases"]["leased_bytes"] == 2 * PAGE
    assert [each["engine"] for each in status["engines"]] == ["P"]
    assert status["engines"][0]["processes"] == [{"role": "worker-0", "pid": 1, "gate": "passed", "detail": ""}]
    tokens = {"hit": 512, "miss": 256, "stored": 768, "evicted": 0, "refused": 0}
    assert status["tenants"]["a"] == {"used_bytes": 3 * PAGE, "quota_bytes": None, "tokens": tokens}
    assert status["tenants"].keys() == {"a", "b"}


async def test_the_probe_is_not_seen(server: StandIn, admin: AdminServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_module, "PROBE_FRESH_S", 0.0)
    used(server)
    before = samples((await get(admin.port, "/metrics")).body)
    targets = ["/healthz", "/status", "/metrics"]
    answers = []
    for _ in range(10):
        answers += await asyncio.gather(*(get(admin.port, target) for target in targets))
    assert {answer.status for answer in answers} == {200}
    for answer in answers[1::3]:
        assert answer.json["storage_manager"]["l1_manager"]["total_object_count"] == 4
        assert answer.json["tokens"]["lookup"] == 768
    assert server.calls.count("Commit") > 1
    pages = [samples(answer.body) for answer in answers[2::3]] + [samples((await get(admin.port, "/metrics")).body)]
    for page in pages:
        changed = {name for name in page if page[name] != before.get(name)}
        assert {name.partition("{")[0] for name in changed} <= {
            "calls_total",
            "call_seconds_bucket",
            "call_seconds_count",
            "call_seconds_sum",
            "probes_total",
            "largest_hole_bytes",
        }
    events = (await get(admin.port, "/events")).json["events"]
    assert len(events) == 4
    assert (await get(admin.port, "/leases")).json["count"] == 1


async def test_metrics_reconcile(server: StandIn, admin: AdminServer) -> None:
    used(server)
    answer = await get(admin.port, "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = samples(answer.body)
    wanted: dict[str, float] = {
        f"info{{incarnation=abcd1234,instance=stand-in,version={__version__}}}": 1,
        "objects": 4,
        "chunks{state=readable}": 4,
        "used_bytes": 4 * PAGE,
        "usable_bytes": 16 * PAGE,
        "arena_bytes": 16 * PAGE,
        "populated_ratio": 1,
        "largest_hole_bytes": 12 * PAGE,
        "leases{state=held}": 1,
        "leased_bytes": 2 * PAGE,
        "reserved_bytes": 0,
        "engines": 1,
        "connections": 1,
        "lookups_total": 1,
        "lookup_tokens_total": 768,
        "hit_tokens_total": 512,
        "stores_total{verdict=write}": 4,
        "stores_total{verdict=refused}": 0,
        "stored_chunks_total": 4,
        "stored_bytes_total": 4 * PAGE,
        "removals_total{reason=evicted}": 0,
        "reported_tokens_total{source=l1}": 514,
        "alarms_total{kind=report_mismatch}": 1,
        "alarms_total{kind=lease}": 0,
        "probes_total{result=ok}": 0,
    }
    assert {name: found[name] for name in wanted} == wanted


async def test_metrics_of_calls(server: StandIn, admin: AdminServer) -> None:
    assert (await get(admin.port, "/healthz")).status == 200
    server.call_counts["Lookup", "layout_mismatch"] += 2
    server.control(Clear())
    found = samples((await get(admin.port, "/metrics")).body)
    assert found["calls_total{call=Lookup}"] == 3
    assert found["refused_calls_total{code=layout_mismatch}"] == 2
    assert found["call_seconds_count{call=Reserve}"] == found["call_seconds_bucket{call=Reserve,le=+Inf}"] == 1
    assert found["call_seconds_sum{call=Reserve}"] > 0
    assert found["probes_total{result=ok}"] == 1


async def test_leases(server: StandIn, admin: AdminServer) -> None:
    engine = server.attach_engine()
    server.store(engine, 1, 2)
    first = server.lookup(engine, 1, 2, request="first").lease
    second = server.lookup(engine, 1, request="second").lease
    answer = (await get(admin.port, "/leases")).json
    assert (answer["incarnation"], answer["count"], answer["num_left_out"]) == ("abcd1234", 2, 0)
    shown = [(each["lease"], each["request"], each["state"], each["num_chunks"]) for each in answer["leases"]]
    assert shown == [(first, "first", "held", 2), (second, "second", "held", 1)]
    assert answer["leases"][0] | {"age_s": 0} == {
        "lease": first,
        "engine": "P",
        "incarnation": "life",
        "request": "first",
        "state": "held",
        "age_s": 0,
        "num_bytes": 2 * PAGE,
        "num_chunks": 2,
    }


CLEARED = {
    "num_chunks": 0,
    "freed_bytes": 0,
    "held_bytes": 0,
    "num_unpinned": 0,
    "tiers": [],
    "is_known": True,
    "has_peers": False,
}


# ---- clear -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "left"),
    [({}, 0), ({"tenant": "a"}, 1), ({"tenant": "b", "model": None}, 3), ({"model": "m"}, 0)],
)
async def test_clear(server: StandIn, admin: AdminServer, body: dict[str, Any], left: int) -> None:
    engine = server.attach_engine()
    server.store(engine, 1, 2, 3, tenant="a")
    server.store(engine, 9, tenant="b")
    answer = await post(admin.port, "/clear", body)
    num = 4 - left
    assert (answer.status, answer.json) == (200, CLEARED | {"num_chunks": num, "freed_bytes": num * PAGE})
    status = (await get(admin.port, "/status")).json
    assert status["storage_manager"]["l1_manager"]["total_object_count"] == left


async def test_clear_takes_the_salt_of_a_tenant(server: StandIn, admin: AdminServer) -> None:
    engine = server.attach_engine()
    for number, salt in enumerate(("team 1", "")):
        server.store(engine, number, tenant=tenant_of(salt))
    assert (await post(admin.port, "/clear", {"tenant": "team 1"})).json["num_chunks"] == 1
    assert (await post(admin.port, "/clear", {"tenant": "default"})).json["num_chunks"] == 1


async def test_clear_of_what_is_leased(server: StandIn, admin: AdminServer) -> None:
    engine = server.attach_engine()
    server.store(engine, 1)
    assert server.lookup(engine, 1).lease is not None
    answer = await post(admin.port, "/clear", {})
    assert answer.json == CLEARED | {"num_chunks": 1, "held_bytes": PAGE}


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        (b"", "not valid JSON", None),
        (b"{", "not valid JSON", None),
        (b"\xff", "not valid JSON", None),
        (b"[" * 60_000, "not valid JSON", None),
        (b"[]", "must be a JSON object", None),
        (b"null", "must be a JSON object", None),
        (b'{"tenants": "a"}', "no field 'tenants'", "tenants"),
        (b'{"tenant": 1}', "tenant must be text", "tenant"),
        (b'{"model": ["m"]}', "model must be text", "model"),
        (json.dumps({"tenant": "x" * 1001}).encode(), "at most 1000 characters", "tenant"),
    ],
)
async def test_clear_refuses_and_changes_nothing(
    server: StandIn, admin: AdminServer, body: bytes, message: str, param: str | None
) -> None:
    server.store(server.attach_engine(), 1)
    answer = await ask(admin.port, "POST", "/clear", body, {"content-type": "application/json; charset=utf-8"})
    assert (answer.status, answer.error["param"]) == (400, param)
    assert message in answer.error["message"]
    assert server.cache.statistics().counters.num_cleared == 0


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"content-type": "text/plain"}, 415, "content_type"),
        ({}, 415, "content_type"),
        ({"content-type": "application/json", "origin": "http://evil.example"}, 403, "origin_not_allowed"),
        ({"content-type": "application/json", "host": "evil.example"}, 403, "admin_only_on_loopback"),
    ],
)
async def test_a_web_page_cannot_clear(
    server: StandIn, admin: AdminServer, headers: dict[str, str], status: int, code: str
) -> None:
    server.store(server.attach_engine(), 1)
    answer = await ask(admin.port, "POST", "/clear", b"{}", headers)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert server.cache.statistics().counters.num_cleared == 0


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/health", "/status/", "//status", "/clear/x", "/../status"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_unknown_route(admin: AdminServer, method: str, path: str) -> None:
    answer = await ask(admin.port, method, path)
    assert (answer.status, answer.error["code"]) == (404, "route_not_found")
    assert "/healthz" in answer.error["message"]


@pytest.mark.parametrize("path", [*GETS, "/clear"])
async def test_wrong_method_says_which_is_right(admin: AdminServer, path: str) -> None:
    for method in ("PUT", "DELETE", "OPTIONS", "GET" if path == "/clear" else "POST"):
        answer = await ask(admin.port, method, path)
        assert (answer.status, answer.error["code"]) == (405, "method_not_allowed")
        assert answer.headers["allow"] == ("post" if path == "/clear" else "get, head")


@pytest.mark.parametrize("path", GETS)
async def test_head_has_no_body(admin: AdminServer, path: str) -> None:
    answer = await ask(admin.port, "HEAD", path)
    assert (answer.status, answer.body) == (200, b"")
    assert int(answer.headers["content-length"]) > 0


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8090", "", "127.0.0.1.evil.example", "[::1", "10.0.0.1"]
)
@pytest.mark.parametrize("path", GETS)
async def test_another_name_is_refused(admin: AdminServer, path: str, host: str) -> None:
    answer = await get(admin.port, path, host=host)
    assert (answer.status, answer.error["code"]) == (403, "admin_only_on_loopback")


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "[::1]:8090"])
async def test_a_name_of_this_machine_is_answered(admin: AdminServer, host: str) -> None:
    assert (await get(admin.port, "/status", host=host)).status == 200


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
async def test_a_proxy_is_refused(admin: AdminServer, header: str) -> None:
    assert (await get(admin.port, "/status", **{header: "127.0.0.1"})).status == 403


@pytest.mark.parametrize("path", ["/status", "/leases"])
async def test_a_parameter_that_nobody_reads_is_refused(admin: AdminServer, path: str) -> None:
    answer = await get(admin.port, f"{path}?x=1")
    assert (answer.status, answer.error["param"]) == (400, "x")


async def test_a_body_that_is_too_large(admin: AdminServer) -> None:
    answer = await ask(admin.port, "POST", "/clear", b" " * 70_000, {"content-type": "application/json"})
    assert answer.status == 413


async def test_the_port_is_taken(server: StandIn, admin: AdminServer) -> None:
    with pytest.raises(OSError, match="address already in use"):
        await start_admin(server, "127.0.0.1", admin.port)
