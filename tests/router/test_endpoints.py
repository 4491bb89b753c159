"""Engines added, drained and removed at run time, by HTTP, on both roles."""

from __future__ import annotations

import asyncio
import json

import pytest

from antiphon.router.app import Router
from antiphon.routing.options import ENDPOINTS_MAX
from tests.router.scripted import (
    EVENT,
    WAIT_S,
    Client,
    Reply,
    Seen,
    Wire,
    ask,
    connected,
    engine,
    newest,
    prefills,
    routing,
    streams,
    until,
)

NOBODY = "http://127.0.0.1:1"


async def send(
    router: Router, method: str, path: str = "/endpoints", body: object = None, headers: str = ""
) -> tuple[int, dict[str, object]]:
    """One request on a connection of its own: status and JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    async with connected(router) as client:
        host = f"127.0.0.1:{router.spec.port}"
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n{headers}content-length: {len(data)}\r\n\r\n"
        client.writer.write(head.encode() + data)
        reply = await client.reply()
    return reply.status, json.loads(reply.body)


async def listed(router: Router) -> list[tuple[object, object, object]]:
    status, answer = await send(router, "GET")
    assert status == 200
    rows = answer["endpoints"]
    assert isinstance(rows, list)
    return [(row["role"], row["url"], row["state"]) for row in rows]


def code_of(answer: dict[str, object]) -> object:
    error = answer["error"]
    assert isinstance(error, dict)
    assert set(error) == {"message", "type", "param", "code"}
    return error["code"]


class Holding:
    """A decode engine's script: one event, and the rest when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.num_begun = 0

    async def __call__(self, _: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(EVENT)
        self.num_begun += 1
        await self.go_on.wait()
        wire.piece(b"data: [DONE]\n\n")
        wire.end()


# ---- list and add ----------------------------------------------------------------------------------------------------


async def test_list_shows_every_engine() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        status, answer = await send(router, "GET")
        assert status == 200
        assert answer["prefill"] == answer["decode"] == {"usable": 1, "total": 1}
        rows = answer["endpoints"]
        assert isinstance(rows, list)
        first = {name: rows[0][name] for name in ("role", "url", "state", "cause", "active_requests", "is_warming")}
        wanted = {"role": "prefill", "url": p.url, "state": "ready", "cause": None}
        assert first == wanted | {"active_requests": 0, "is_warming": False}
        assert rows[1]["role"] == "decode"
        assert (await send(router, "GET", "/list_workers")) == (200, {"urls": [p.url, d.url]})


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_added_engine_gets_requests(role: str) -> None:
    script = prefills if role == "prefill" else streams
    async with (
        engine(prefills) as p,
        engine(streams) as d,
        engine(script) as e,
        routing([p], [d], health_interval_s=0.05) as router,
    ):
        status, answer = await send(router, "POST", body={"role": role, "url": f"{e.url}/"})
        assert (status, answer["is_new"]) == (201, True)
        await until(lambda: len(router.fleet.decode.ready) + len(router.fleet.prefill.ready) == 3, "it is ready")
        assert [(await ask(router)).status for _ in range(4)] == [200] * 4
        assert len(e.seen) == 2, "round robin"
        status, answer = await send(router, "POST", body={"role": role, "url": e.url})
        assert (status, answer["is_new"]) == (200, False)
        status, answer = await send(router, "POST", body={"role": role, "url": f"HTTP{e.url[4:]}"})
        assert (status, answer["is_new"]) == (200, False), "another spelling of the same"
        assert len(await listed(router)) == 3


async def test_engine_of_both_roles_and_several_of_a_host() -> None:
    async with engine(prefills) as p, engine(streams) as d, engine(streams) as e, routing([p], [d]) as router:
        assert (await send(router, "POST", body={"role": "decode", "url": p.url}))[0] == 201
        assert (await send(router, "POST", body={"role": "decode", "url": e.url}))[0] == 201
        assert [row[:2] for row in await listed(router)] == [
            ("prefill", p.url),
            ("decode", d.url),
            ("decode", p.url),
            ("decode", e.url),
        ]
        assert (await send(router, "DELETE", body={"role": "decode", "url": p.url}))[0] == 200
        assert [row[:2] for row in await listed(router)] == [("prefill", p.url), ("decode", d.url), ("decode", e.url)]


async def test_pool_has_a_limit() -> None:
    async with engine(streams) as d, routing([], [d]) as router:
        for number in range(1, ENDPOINTS_MAX):
            router.fleet.decode.add(f"http://h:{number}")
        status, answer = await send(router, "POST", body={"role": "decode", "url": NOBODY})
        assert (status, code_of(answer)) == (409, "too_many_endpoints")
        assert (await send(router, "POST", body={"role": "decode", "url": d.url}))[0] == 200, "it is there"
        assert len(router.fleet.decode.endpoints) == ENDPOINTS_MAX == 1024
        for endpoint in router.fleet.decode.endpoints[1:]:
            router.fleet.decode.remove(endpoint)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("POST", "/endpoints", {"role": "worker", "url": NOBODY}, 400, "invalid_role"),
        ("POST", "/endpoints", {"url": NOBODY}, 400, "invalid_role"),
        ("POST", "/endpoints", {"role": ["decode"], "url": NOBODY}, 400, "invalid_role"),
        ("POST", "/endpoints", {"role": "decode"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": 7}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "h:1"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "https://h:1"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "http://h"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "http://h:0"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "http://h:70000"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "http://u:p@h:1"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "http://h:1/v1"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "http://h:1\r\nx: y"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "http://[::1:8"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": "http://a..b:8"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": f"http://{'a' * 64}.example:8"}, 400, "invalid_url"),
        ("POST", "/endpoints", {"role": "decode", "url": NOBODY, "weight": 2}, 400, "invalid_request"),
        ("POST", "/endpoints", {"action": "stop", "role": "decode", "url": NOBODY}, 400, "invalid_action"),
        ("POST", "/endpoints", b"{", 400, "invalid_json"),
        ("POST", "/endpoints", [1], 400, "invalid_json"),
        ("POST", "/endpoints", b" " * 70_000, 413, "request_too_large"),
        ("POST", "/endpoints", None, 400, "invalid_role"),
        ("POST", "/endpoints/drain", {"role": "decode", "url": NOBODY}, 404, "endpoint_not_found"),
        ("DELETE", "/endpoints", {"role": "prefill", "url": NOBODY}, 404, "endpoint_not_found"),
        ("DELETE", "/endpoints", {"role": "decode", "url": "DECODE", "allow_empty": 1}, 400, "invalid_request"),
        ("DELETE", "/endpoints?role=decode&url", None, 400, "invalid_request"),
        ("POST", "/remove_worker?url=http://127.0.0.1:1", None, 404, "endpoint_not_found"),
        ("PUT", "/endpoints", {}, 405, "method_not_allowed"),
        ("GET", "/endpoints/drain", None, 405, "method_not_allowed"),
        ("POST", "/add_worker?url=http://h:1", None, 404, "route_not_found"),
    ],
)
async def test_bad_input_changes_nothing(method: str, path: str, body: object, status: int, code: str) -> None:
    async with engine(streams) as d, routing([], [d]) as router:
        if isinstance(body, dict) and body.get("url") == "DECODE":
            body = body | {"url": d.url}
        got, answer = await send(router, method, path, body)
        assert (got, code_of(answer)) == (status, code)
        assert await listed(router) == [("decode", d.url, "ready")]


async def test_who_may_change_the_pools() -> None:
    async with engine(streams) as d, routing([], [d]) as router:
        new = {"role": "decode", "url": NOBODY}
        for headers in ("x-forwarded-for: 10.0.0.1\r\n", "origin: http://evil.example\r\n", "origin: null\r\n"):
            status, _ = await send(router, "POST", body=new, headers=headers)
            assert status == 403, headers
        assert len(await listed(router)) == 1
        own = f"origin: http://127.0.0.1:{router.spec.port}\r\n"
        assert (await send(router, "POST", body=new, headers=own))[0] == 201


async def test_admin_key_opens_the_routes(tmp_path_factory: pytest.TempPathFactory) -> None:
    key = tmp_path_factory.mktemp("key") / "key"
    key.write_text("secret\n")
    async with engine(streams) as d, routing([], [d], admin_key_file=str(key)) as router:
        assert (await send(router, "GET"))[0] == 401
        assert (await send(router, "DELETE", body={"role": "decode", "url": d.url}))[0] == 401
        assert (await send(router, "GET", headers="authorization: Bearer secret\r\n"))[0] == 200


# ---- drain and remove ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [{}, {"action": "drain"}])
async def test_draining_lets_requests_end_and_takes_no_new_ones(body: dict[str, str]) -> None:
    holding = Holding()
    async with engine(holding) as d, engine(streams) as e, routing([], [d, e]) as router:
        async with connected(router) as client:
            await begin(router, client, holding)
            path = "/endpoints" if body else "/endpoints/drain"
            status, answer = await send(router, "POST", path, body | {"role": "decode", "url": d.url})
            assert status == 200
            assert answer["is_pool_empty"] is False
            assert ("decode", d.url, "draining") in await listed(router)
            assert [(await ask(router)).status for _ in range(4)] == [200] * 4
            assert (holding.num_begun, len(e.seen)) == (1, 4)
            holding.go_on.set()
            reply = await client.reply()
            assert (reply.status, reply.body.endswith(b"data: [DONE]\n\n")) == (200, True)
        assert ("decode", d.url, "draining") in await listed(router), "it was not removed"
        assert (await send(router, "POST", body={"role": "decode", "url": d.url}))[0] == 200
        assert ("decode", d.url, "unknown") in await listed(router), "it is open again"


async def begin(router: Router, client: Client, holding: Holding) -> None:
    """A request that the first engine holds."""
    client.send()
    await until(lambda: holding.num_begun, "the engine has begun")
    assert router.fleet.decode.endpoints[0].num_active == 1


async def test_removing_waits_for_the_last_request() -> None:
    holding = Holding()
    async with engine(holding) as d, engine(streams) as e, routing([], [d, e]) as router:
        async with connected(router) as client:
            await begin(router, client, holding)
            status, answer = await send(router, "DELETE", f"/endpoints?role=decode&url={d.url}")
            assert (status, answer["is_removed"]) == (202, False)
            row = answer["endpoint"]
            assert isinstance(row, dict)
            assert (row["is_leaving"], row["active_requests"]) == (True, 1)
            assert (await ask(router)).status == 200
            holding.go_on.set()
            assert (await client.reply()).body.endswith(b"data: [DONE]\n\n")
        assert await listed(router) == [("decode", e.url, "ready")]
        assert (await send(router, "DELETE", body={"role": "decode", "url": d.url}))[0] == 404
        assert all(endpoint.url == e.url for endpoint in router.engines._pools), "its connections are forgotten"
        text = router.metrics.text().decode()
        assert (d.address in text, e.address in text) == (False, True), "its series have ended"


async def test_removing_by_force_cuts_and_tries_again_elsewhere() -> None:
    silent = asyncio.Event()

    async def waits(_: Seen, wire: Wire) -> None:
        silent.set()
        await wire.until_closed()

    async with engine(waits) as p, engine(prefills) as q, engine(streams) as d, routing([p, q], [d]) as router:
        async with connected(router) as client:
            client.send()
            await silent.wait()
            status, answer = await send(router, "DELETE", body={"role": "prefill", "url": p.url, "force": True})
            assert (status, answer["is_removed"], answer["num_cut"]) == (200, True, 1)
            assert (await client.reply()).status == 200
            assert newest(router)["prefill"] == q.address
        await until(lambda: p.num_left == 1, "its connection is closed")
        assert p.address not in router.metrics.text().decode(), "its series have ended"
        assert [row[1] for row in await listed(router)] == [q.url, d.url]


async def test_removing_by_force_ends_a_stream_truthfully() -> None:
    holding = Holding()
    async with engine(holding) as d, engine(streams) as e, routing([], [d, e]) as router, connected(router) as client:
        await begin(router, client, holding)
        body = {"role": "decode", "url": d.url, "force": True}
        assert (await send(router, "DELETE", body=body))[0] == 200
        reply = await client.reply()
        assert not reply.is_cut
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b'"error"' in reply.body
        assert router.fleet.decode.num_active == 0


async def test_engine_that_was_cut_can_be_added_again() -> None:
    holding = Holding()
    async with engine(holding) as d, engine(streams) as e, routing([], [d, e], health_interval_s=0.05) as router:
        async with connected(router) as client:
            await begin(router, client, holding)
            assert (await send(router, "DELETE", body={"role": "decode", "url": d.url, "force": True}))[0] == 200
            await client.reply()
        holding.go_on.set()
        assert (await send(router, "POST", body={"role": "decode", "url": d.url}))[0] == 201
        await until(lambda: len(router.fleet.decode.ready) == 2, "it is ready")
        assert [(await ask(router)).status for _ in range(4)] == [200] * 4
        assert holding.num_begun == 3


async def test_engine_that_was_cut_can_be_added_again_while_a_request_still_connects() -> None:
    async with engine(streams) as d, engine(streams) as e, routing([], [d, e]) as router:
        pool = router.fleet.decode
        endpoint = pool.endpoints[0]
        trial = pool.begin(endpoint)  # a request that cannot be cut, since it has no connection yet
        body = {"role": "decode", "url": d.url}
        status, answer = await send(router, "DELETE", body=body | {"force": True})
        assert (status, answer["is_removed"]) == (202, False)
        status, answer = await send(router, "POST", body=body)
        assert (status, answer["is_new"]) == (200, False)
        pool.end(endpoint, trial)
        assert [(await ask(router)).status for _ in range(4)] == [200] * 4
        assert len(d.seen) > 0, "over new connections"


async def test_last_decode_engine_goes_only_knowingly() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        last = {"role": "decode", "url": d.url}
        for method, path in (("DELETE", "/endpoints"), ("POST", "/endpoints/drain")):
            status, answer = await send(router, method, path, last)
            assert (status, code_of(answer)) == (409, "last_endpoint")
        assert (await ask(router)).status == 200
        num_prefills = len(p.seen)
        status, answer = await send(router, "DELETE", body=last | {"allow_empty": True})
        assert (status, answer["is_removed"], answer["is_pool_empty"]) == (200, True, True)
        assert "503" in str(answer["warning"])
        reply = await ask(router)
        assert (reply.status, json.loads(reply.body)["error"]["code"]) == (503, "no_decode_engine")
        assert len(p.seen) == num_prefills, "no work is done for nothing"
        assert (await get(router, "/readiness")).status == 503
        assert (await send(router, "POST", body=last))[0] == 201
        assert (await ask(router)).status == 200


async def test_without_prefill_engines_decode_engines_prefill() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        last = {"role": "prefill", "url": p.url, "allow_empty": True}
        assert (await send(router, "POST", "/endpoints/drain", last))[1]["is_pool_empty"] is True
        reply = await ask(router)
        assert (reply.status, reply.headers["x-antiphon-reason"]) == (200, "no_prefill_pool")
        assert (await get(router, "/readiness")).status == 200
        assert (await send(router, "DELETE", body=last))[0] == 200
        assert (await ask(router)).headers["x-antiphon-reason"] == "no_prefill_pool"
        assert p.seen == []


@pytest.mark.parametrize(("fallback", "status"), [("fail", 503), ("local", 200)])
async def test_where_engines_come_and_go_an_empty_prefill_pool_is_one_that_fails(fallback: str, status: int) -> None:
    options = {"allow_empty": True, "prefill_fallback": fallback}
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], **options) as router:
        last = {"role": "prefill", "url": p.url, "allow_empty": True}
        assert (await send(router, "DELETE", body=last))[0] == 200
        reply = await ask(router)
        assert reply.status == status
        assert (await get(router, "/readiness")).status == 503
        assert len(d.seen) == (status == 200)
        assert (await send(router, "POST", body={"role": "prefill", "url": p.url}))[0] == 201
        assert (await ask(router)).headers["x-antiphon-path"] == "pd"


async def get(router: Router, path: str) -> Reply:
    async with connected(router) as client:
        client.get(path)
        return await client.reply()


async def test_remove_worker_is_vllm_routers_name_for_it() -> None:
    async with engine(prefills) as p, engine(streams) as d, engine(streams) as e, routing([p], [d, e]) as router:
        assert (await send(router, "POST", body={"role": "prefill", "url": d.url}))[0] == 201
        status, answer = await send(router, "POST", f"/remove_worker?url={d.url}")
        assert status == 200
        assert isinstance(answer["removed"], list)
        assert [row["endpoint"]["role"] for row in answer["removed"]] == ["prefill", "decode"]
        assert [row[1] for row in await listed(router)] == [p.url, e.url]
        status, answer = await send(router, "POST", f"/remove_worker?url={e.url}")
        assert (status, code_of(answer)) == (409, "last_endpoint")
        assert (await send(router, "POST", f"/remove_worker?url={e.url}&allow_empty=true"))[0] == 200


async def test_engine_goes_while_models_are_asked() -> None:
    asked = asyncio.Event()

    async def waits(seen: Seen, wire: Wire) -> None:
        if seen.path == "/v1/models":
            asked.set()
            await wire.until_closed()

    async def models(_: Seen, wire: Wire) -> None:
        wire.whole(b'{"data":[{"id":"m"}]}')

    async with (
        engine(models) as p,
        engine(waits) as d,
        engine(waits) as e,
        routing([p], [d, e]) as router,
        connected(router) as client,
    ):
        client.get("/v1/models")
        await asyncio.wait_for(asked.wait(), WAIT_S)
        for url in (e.url, d.url):
            body = {"role": "decode", "url": url, "allow_empty": True}
            assert (await send(router, "DELETE", body=body))[0] == 200
        assert json.loads((await client.reply()).body)["data"][0]["id"] == "m"
