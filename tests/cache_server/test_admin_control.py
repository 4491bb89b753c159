"""What an operator asks over HTTP: list, clear, pin, unpin, quota; and what is refused, with its code.

Against the real cache behind the stand-in of ``admin_standin``.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.cache.tier import Tier
from antiphon.cache.tier_key import TierKey, tag_of
from antiphon.cache.tier_options import TierOptions, TiersOptions
from antiphon.cache.tiers import Tiers
from antiphon.cache_server.admin import AdminServer
from antiphon.cache_server.probe import PROBE_NAME
from tests.cache_server.admin_standin import PAGE, Answer, StandIn, ask, get, key_of, namespace_of, post
from tests.cache_server.test_admin import samples


async def put(port: int, target: str, value: object) -> Answer:
    return await ask(port, "PUT", target, json.dumps(value).encode(), {"content-type": "application/json"})


async def pinned(port: int, *numbers: int, **more: object) -> Answer:
    return await post(port, "/pin", {"keys": b"".join(map(key_of, numbers)).hex()} | more)


def with_tiers(server: StandIn, *options: TierOptions) -> tuple[Tier, ...]:
    """Puts tiers behind the arena that nobody runs; they are listed and empty."""
    books = server.cache._books
    books.tiers = Tiers(books, TiersOptions(options), 1)
    for tier in books.tiers.tiers:
        tier.must_list, tier.is_complete = False, not tier.options.is_shared
    server.tiers = lambda: [(each, (0, 0, None)) for each in server.cache.tiers()]  # type: ignore[assignment, method-assign]
    return books.tiers.tiers


# ---- list ------------------------------------------------------------------------------------------------------------


async def test_namespaces_and_their_sums(server: StandIn, admin: AdminServer) -> None:
    engine = server.attach_engine()
    server.store(engine, 1, 2, 3, tenant="a")
    server.store(engine, 9, tenant="b")
    server.store(engine, 8, tenant=PROBE_NAME)
    assert server.lookup(engine, 1, 2, tenant="a").lease is not None
    await pinned(admin.port, 1)
    answer = (await get(admin.port, "/namespaces")).json
    first, second = answer["namespaces"]
    assert first == {
        "namespace": namespace_of("a").hex(),
        "model": "m",
        "tenant": "a",
        "in_tiers": {},
        "num_chunks": 3,
        "num_bytes": 3 * PAGE,
        "num_leased": 2,
        "num_pinned": 1,
    }
    assert (second["tenant"], second["num_chunks"], answer["num_left_out"]) == ("b", 1, 0)
    one = (await get(admin.port, "/namespaces?limit=1")).json
    assert ([each["tenant"] for each in one["namespaces"]], one["num_left_out"]) == (["a"], 1)
    only = (await get(admin.port, "/namespaces?tenant=b&model=m")).json["namespaces"]
    assert [each["tenant"] for each in only] == ["b"]


async def test_chunks_come_page_by_page(server: StandIn, admin: AdminServer) -> None:
    engine = server.attach_engine()
    (disk,) = with_tiers(server, TierOptions("disk"))
    server.store(engine, 1, 2, 3, tenant="a")
    server.store(engine, 9, tenant="b")
    disk.remember(TierKey(tag_of("a") + tag_of("m") + bytes(24)))
    chunks, after = [], 0
    while after is not None:
        page = (await get(admin.port, f"/chunks/facts?tenant=a&limit=2&after={after}")).json
        assert len(page["chunks"]) <= 2
        chunks += page["chunks"]
        after = page["after"]
    assert [(each["key"], each["position"]) for each in chunks] == [(key_of(n).hex(), n - 1) for n in (1, 2, 3)]
    first = chunks[0]
    assert (first["parent"], first["tenant"], first["num_bytes"], first["in_tiers"]) == (None, "a", PAGE, [])
    assert 0 <= first["unused_s"] <= first["age_s"] < 60
    assert (await get(admin.port, "/namespaces?tenant=a")).json["namespaces"][0]["in_tiers"] == {"disk": 1}


async def test_records_of_tiers_without_a_chunk_in_memory_are_counted(server: StandIn, admin: AdminServer) -> None:
    disk, *_ = with_tiers(server, TierOptions("disk"), TierOptions("pool", is_shared=True))
    names = [("a", "m", 0), ("a", "m", 1), ("a", "x", 0), ("b", "m", 0), (PROBE_NAME, "m", 0)]
    for tenant, model, number in names:
        disk.remember(TierKey(tag_of(tenant) + tag_of(model) + bytes(23) + bytes((number,))))
    for query, count in (("", 4), ("?tenant=a", 3), ("?model=m", 3), ("?tenant=a&model=m", 2)):
        answer = (await get(admin.port, f"/namespaces{query}")).json
        assert (answer["namespaces"], answer["in_tiers"]) == ([], {"disk": count, "pool": 0}), query


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("after=-1", "after"),
        ("x=1", "x"),
        ("tenant=" + "t" * 1001, "tenant"),
    ],
)
@pytest.mark.parametrize("path", ["/namespaces", "/chunks/facts"])
async def test_a_list_that_cannot_be_asked_for(admin: AdminServer, path: str, query: str, param: str) -> None:
    answer = await get(admin.port, f"{path}?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/namespaces?tenant=nobody", None),
        ("GET", "/chunks/facts?tenant=nobody", None),
        ("POST", "/clear", {"tenant": "nobody"}),
        ("POST", "/clear", {"tenant": "nobody", "model": "m"}),
    ],
)
async def test_a_tenant_that_nothing_has_is_said(
    server: StandIn, admin: AdminServer, method: str, path: str, body: dict[str, Any] | None
) -> None:
    server.store(server.attach_engine(), 1, tenant="a")
    answer = await (get(admin.port, path) if body is None else post(admin.port, path, body))
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "tenant_unknown", "tenant")
    assert "'nobody'" in answer.error["message"]
    assert server.cache.statistics().counters.num_cleared == 0


# ---- clear -----------------------------------------------------------------------------------------------------------


async def test_clear_of_a_model_that_nothing_has(server: StandIn, admin: AdminServer) -> None:
    server.store(server.attach_engine(), 1, tenant="a")
    answer = await post(admin.port, "/clear", {"tenant": "a", "model": "x"})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_unknown", "model")


async def test_clear_says_which_tiers_it_means(server: StandIn, admin: AdminServer) -> None:
    peer = TierOptions("peer", store="none", source="peer", is_shared=True)
    disk, *_ = with_tiers(server, TierOptions("disk"), peer)
    disk.remember(TierKey(tag_of("old") + tag_of("m") + bytes(24)))
    assert (await post(admin.port, "/clear", {"tenant": "nobody"})).status == 404
    answer = (await post(admin.port, "/clear", {"tenant": "old"})).json  # of an earlier life of the server
    assert (answer["num_chunks"], answer["is_known"], answer["has_peers"]) == (0, True, True)
    assert answer["tiers"] == [{"name": "disk", "is_shared": False, "can_list": True, "clears_pending": 1}]
    assert disk.is_hidden(TierKey(tag_of("old") + tag_of("m") + bytes(24)))


async def test_a_tier_that_cannot_be_listed_may_have_what_nobody_knows(server: StandIn, admin: AdminServer) -> None:
    with_tiers(server, TierOptions("pool", is_shared=True, can_list=False))
    answer = (await post(admin.port, "/clear", {"tenant": "nobody"})).json
    assert (answer["num_chunks"], answer["is_known"]) == (0, False)
    assert answer["tiers"] == [{"name": "pool", "is_shared": True, "can_list": False, "clears_pending": 1}]


async def test_clear_spares_what_is_pinned(server: StandIn, admin: AdminServer) -> None:
    engine = server.attach_engine()
    server.store(engine, 1, 2, tenant="a")
    server.store(engine, 9, tenant="b")
    await pinned(admin.port, 2)
    for body in ({}, {"tenant": "a"}, {"model": "m"}):
        answer = await post(admin.port, "/clear", body)
        assert (answer.status, answer.error["code"]) == (409, "chunks_pinned")
        assert "unpin them" in answer.error["message"]
    assert (await post(admin.port, "/clear", {"tenant": "b"})).json["num_chunks"] == 1
    answer = (await post(admin.port, "/clear", {"pinned": True})).json
    assert (answer["num_chunks"], answer["num_unpinned"], answer["freed_bytes"]) == (2, 1, 2 * PAGE)


# ---- pins ------------------------------------------------------------------------------------------------------------


async def test_pin_and_unpin(server: StandIn, admin: AdminServer) -> None:
    server.store(server.attach_engine(), 1, 2, 3, tenant="a")
    assert (await get(admin.port, "/pins")).json["pins"] == []
    answer = await pinned(admin.port, 2, ttl_s=60)
    assert (answer.status, answer.json) == (
        200,
        {
            "key": key_of(2).hex(),
            "num_chunks": 2,
            "num_named": 2,
            "num_bytes": 2 * PAGE,
            "pinned_bytes": 2 * PAGE,
            "pinned_bytes_max": 8 * PAGE,
        },
    )
    assert (await pinned(admin.port, 1, 2, 3, 4)).json["num_chunks"] == 3
    listed = (await get(admin.port, "/pins")).json
    first, second = listed["pins"]
    assert 0 < first.pop("ends_in_s") <= 60
    assert 0 <= first.pop("age_s") < 60
    names = {"key": key_of(2).hex(), "namespace": namespace_of("a").hex(), "model": "m", "tenant": "a"}
    assert first == names | {"num_chunks": 2, "num_tokens": 512, "num_bytes": 2 * PAGE}
    assert (second["key"], second["ends_in_s"], listed["pinned_bytes"]) == (key_of(3).hex(), None, 3 * PAGE)
    status = (await get(admin.port, "/status")).json["pins"]
    assert status == {"count": 2, "pinned_bytes": 3 * PAGE, "pinned_bytes_max": 8 * PAGE}
    figures = samples((await get(admin.port, "/metrics")).body)
    assert (figures["pins"], figures["pinned_bytes"]) == (2, 3 * PAGE)
    left = (await post(admin.port, "/unpin", {"key": key_of(3).hex()})).json
    assert left == {"num_pins": 1, "pinned_bytes": 2 * PAGE}
    assert (await post(admin.port, "/unpin", {})).json == {"num_pins": 1, "pinned_bytes": 0}


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("/pin", {"keys": key_of(7).hex()}, 404, "chunk_unknown"),
        ("/unpin", {"key": key_of(7).hex()}, 404, "chunk_unknown"),
        ("/pin", {"keys": (key_of(2) + key_of(1)).hex()}, 400, "invalid_request"),
        ("/pin", {"keys": key_of(9).hex()}, 409, "capacity_exceeded"),
        ("/pin", {}, 400, "invalid_request"),
        ("/pin", {"keys": ""}, 400, "invalid_request"),
        ("/pin", {"keys": "ab"}, 400, "invalid_request"),
        ("/pin", {"keys": "zz" * 32}, 400, "invalid_request"),
        ("/pin", {"keys": key_of(1).hex(), "ttl_s": 0}, 400, "invalid_request"),
        ("/pin", {"keys": key_of(1).hex(), "ttl_s": True}, 400, "invalid_request"),
        ("/pin", {"keys": key_of(1).hex(), "ttl_s": "5"}, 400, "invalid_request"),
        ("/unpin", {"key": "ab"}, 400, "invalid_request"),
        ("/unpin", {"keys": ""}, 400, "invalid_request"),
    ],
)
async def test_pins_that_are_refused(
    server: StandIn, admin: AdminServer, path: str, body: dict[str, Any], status: int, code: str
) -> None:
    engine = server.attach_engine()
    server.store(engine, 1, 2)
    server.store(engine, *range(101, 109), 9, tenant="b")
    answer = await post(admin.port, path, body)
    assert (answer.status, answer.error["code"]) == (status, code)
    assert server.cache.pins() == []


# ---- quotas ----------------------------------------------------------------------------------------------------------


async def test_quotas_are_shown_and_set(server: StandIn, admin: AdminServer) -> None:
    engine = server.attach_engine()
    for number in range(1, 5):
        server.store(engine, number, tenant="a")
    server.store(engine, 9, tenant="b")
    assert (await get(admin.port, "/quota")).json["quotas"] == [
        {"tenant": "a", "used_bytes": 4 * PAGE, "quota_bytes": None, "is_own": False},
        {"tenant": "b", "used_bytes": PAGE, "quota_bytes": None, "is_own": False},
    ]
    answer = await put(admin.port, "/quota", {"tenant": "a", "quota_bytes": 2 * PAGE})
    assert (answer.status, answer.json) == (
        200,
        {"tenant": "a", "quota_bytes": 2 * PAGE, "used_bytes": 2 * PAGE, "num_evicted": 2},
    )
    assert (
        (await put(admin.port, "/quota", {"tenant": "team 1", "quota_bytes": PAGE})).json["tenant"].startswith("salt-")
    )
    rows = (await get(admin.port, "/quota")).json["quotas"]
    assert [(row["quota_bytes"], row["is_own"]) for row in rows] == [(2 * PAGE, True), (PAGE, True), (None, False)]
    figures = samples((await get(admin.port, "/metrics")).body)
    assert figures["tenant_quota_bytes{tenant=a}"] == figures["tenant_used_bytes{tenant=a}"] == 2 * PAGE
    assert figures["removals_total{reason=evicted_for_quota}"] == 2
    assert (await put(admin.port, "/quota", {"tenant": "a", "quota_bytes": None})).json["quota_bytes"] is None
    again = await put(admin.port, "/quota", {"tenant": "a", "quota_bytes": None})
    assert (again.status, again.error["code"]) == (404, "quota_unknown")
    assert "'a' has no quota of its own" in again.error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "tenant"),
        ({"tenant": ""}, "tenant"),
        ({"tenant": "a"}, "quota_bytes"),
        ({"tenant": "a", "quota_bytes": -1}, "quota_bytes"),
        ({"tenant": "a", "quota_bytes": 1.5}, "quota_bytes"),
        ({"tenant": "a", "quota_bytes": True}, "quota_bytes"),
        ({"tenant": "a", "quota_bytes": 2**70}, "quota_bytes"),
        ({"tenant": "a", "gb": 1}, "gb"),
    ],
)
async def test_a_quota_that_is_none(admin: AdminServer, body: dict[str, Any], param: str) -> None:
    answer = await put(admin.port, "/quota", body)
    assert (answer.status, answer.error["param"]) == (400, param)


# ---- access ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/pin"), ("POST", "/unpin"), ("PUT", "/quota"), ("POST", "/clear")]
)
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "application/json", "origin": "http://evil.example"}, 403),
        ({"content-type": "application/json", "host": "evil.example"}, 403),
        ({"content-type": "application/json", "x-forwarded-for": "127.0.0.1"}, 403),
    ],
)
async def test_only_this_machine_and_no_web_page_changes_anything(
    admin: AdminServer, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    assert (await ask(admin.port, method, path, b"{}", headers)).status == status


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("/quota", "get, head, put"), ("/pin", "post"), ("/pins", "get, head"), ("/namespaces", "get, head")],
)
async def test_what_a_route_takes(admin: AdminServer, path: str, allowed: str) -> None:
    answer = await ask(admin.port, "DELETE", path)
    assert (answer.status, answer.headers["allow"]) == (405, allowed)
