"""A router with tenants, from outside: who may ask, whose salt engines get, whose turn it is, and what is left."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.tenant_files import auto_salt
from antiphon.router.app import Router
from antiphon.router.routes import ROUTES
from antiphon.router.tenants import combined_salt
from tests.router import apis
from tests.router.scripted import ScriptedEngine, Seen, Wire, connected, counted, newest, routing, until
from tests.router.served import (
    Crowd,
    Gate,
    ask_as,
    check_idle,
    crowd,
    engine,
    error_of,
    get_as,
    idle,
    post,
    prefills_at,
    streams_at,
    tenant,
    tenants_file,
)

Served = tuple[Router, ScriptedEngine, ScriptedEngine]


def salts(engine: ScriptedEngine) -> list[Any]:
    return [json.loads(seen.body).get("cache_salt") for seen in engine.seen]


def each(path: str) -> apis.Spoken:
    return next(api for api in apis.ALL if api.path == path)


@contextlib.asynccontextmanager
async def serving(folder: Path, *tenants: dict[str, Any], knobs: Any = None, **bounds: Any) -> AsyncIterator[Served]:
    """A router with these tenants before engines that answer at once."""
    path = tenants_file(folder, *tenants, **bounds)
    async with (
        engine(answers) as p,
        engine(answers) as d,
        routing([p], [d], tenants_file=path, **knobs or {}) as router,
    ):
        yield router, p, d


async def answers(seen: Seen, wire: Wire) -> None:
    """Either engine: a handle to who asks for one, else the answer that its API has."""
    body = json.loads(seen.body) if seen.body[:1] == b"{" else {}
    if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
        await apis.prefills(seen, wire)
    elif body.get("stream"):
        await apis.streams(each(seen.path))(seen, wire)
    else:
        wire.whole(b'{"object":"list","data":[]}')


# ---- who may ask -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ROUTES)
async def test_without_a_key_that_is_known_nobody_reaches_an_engine(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, {"name": "a"}, {"name": "b"}) as (router, p, d):
        for key, code in ((None, "missing_api_key"), ("sk-x", "invalid_api_key"), ("sk-", "invalid_api_key")):
            before = counted(router, "key_refusals_total", code=code)
            async with connected(router) as client:
                post(client, {"prompt": "x"}, key, path)
                reply = await client.reply()
            assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert counted(router, "key_refusals_total", code=code) == before + 1
        assert not p.seen
        assert not d.seen
        await idle(router)


async def test_health_is_for_everybody_and_models_for_tenants(tmp_path: Path) -> None:
    async with serving(tmp_path, {"name": "a"}) as (router, p, d):
        for path in ("/health", "/liveness", "/readiness"):
            assert (await get_as(router, path)).status == 200
        assert (await get_as(router, "/v1/models")).status == 401
        assert (await get_as(router, "/v1/models", "sk-a")).status == 200
        assert b"sk-a" not in b"".join(p.heads + d.heads)


@pytest.mark.parametrize("api", apis.ALL, ids=lambda api: api.path)
async def test_no_key_of_a_tenant_reaches_an_engine(tmp_path: Path, api: apis.Spoken) -> None:
    async with serving(tmp_path, {"name": "a"}) as (router, p, d):
        for header in ("", "x-api-key: sk-a\r\n", "x-api-key: sk-other\r\n"):
            async with connected(router) as client:
                post(client, api.body | {"stream": True}, "sk-a", api.path, header)
                assert (await client.reply()).status == 200
        async with connected(router) as client:
            post(client, api.body | {"stream": True}, None, api.path, "x-api-key: sk-a\r\n")
            assert (await client.reply()).status == 200
        assert len(p.seen) == len(d.seen) == 4
        sent = b"".join([*p.heads, *d.heads, *(seen.body for seen in p.seen + d.seen)])
        assert b"sk-" not in sent
        assert b"authorization" not in sent.lower()


# ---- the salt --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("api", apis.ALL, ids=lambda api: api.path)
async def test_prefill_and_decode_get_the_tenants_own_salt(tmp_path: Path, api: apis.Spoken) -> None:
    async with serving(tmp_path, {"name": "a"}, {"name": "b", "cache_salt": "own"}) as (router, p, d):
        for key in ("sk-a", "sk-b"):
            reply = await ask_as(router, key, api)
            assert (reply.status, reply.body) == (200, api.stream)
            assert newest(router)["path"] == "pd"
        assert salts(p) == salts(d) == [auto_salt("a"), "own"]
        bodies = [json.loads(seen.body) for seen in d.seen]
        for body in bodies:
            del body["cache_salt"], body["kv_transfer_params"]
        assert bodies[0] == bodies[1] == api.body | {"stream": True}
        await idle(router)


@pytest.mark.parametrize("api", apis.ALL, ids=lambda api: api.path)
async def test_a_decode_engine_alone_gets_it_too(tmp_path: Path, api: apis.Spoken) -> None:
    knobs = {"vllm_pd_disaggregation": False}
    async with serving(tmp_path, {"name": "a"}, {"name": "c", "cache_salt": "none"}, knobs=knobs) as (router, p, d):
        for key in ("sk-a", "sk-c"):
            assert (await ask_as(router, key, api)).body == api.stream
        assert salts(d) == [auto_salt("a"), None]
        assert not p.seen
        assert counted(router, "path_total", path="local", reason="disabled") == 2
        await idle(router)


@pytest.mark.parametrize("api", apis.ALL, ids=lambda api: api.path)
async def test_the_request_that_only_pulls_gets_it_too(tmp_path: Path, api: apis.Spoken) -> None:
    """The client leaves when the prefill has answered in part."""
    go_on = asyncio.Event()

    async def prefills_slowly(seen: Seen, wire: Wire) -> None:
        wire.begin("application/json")
        wire.piece(b'{"id":"x",')
        await go_on.wait()
        wire.piece(b'"kv_transfer_params":%b}' % json.dumps(apis.HANDLE).encode())
        wire.end()

    path = tenants_file(tmp_path, {"name": "a"})
    async with engine(prefills_slowly) as p, engine(answers) as d, routing([p], [d], tenants_file=path) as router:
        async with connected(router) as client:
            post(client, api.body | {"stream": True}, "sk-a", api.path)
            await until(lambda: p.seen, "the prefill runs")
            (flight,) = router.inference._desk.flights
            await until(lambda: getattr(flight.exchange, "has_head", False), "its head is here")
        await until(lambda: flight.life.client_left, "the client has left")
        go_on.set()
        await idle(router)
        assert salts(p) == salts(d) == [auto_salt("a")]
        assert d.seen[0].params == apis.HANDLE


async def test_what_is_freed_after_a_refusal_has_a_salt_that_nobody_finds(tmp_path: Path) -> None:
    async def refuses(seen: Seen, wire: Wire) -> None:
        wire.whole(b'{"error":{"message":"no"}}', status=400)

    path = tenants_file(tmp_path, {"name": "a"})
    async with engine(answers) as p, engine(refuses) as d, routing([p], [d], tenants_file=path) as router:
        assert (await ask_as(router, "sk-a")).status == 400
        await idle(router)
        first, freeing = salts(d)
        assert first == auto_salt("a")
        assert freeing.startswith("antiphon-free-"), "other data may be read under it"


@pytest.mark.parametrize("api", apis.ALL, ids=lambda api: api.path)
async def test_a_salt_of_the_clients_own(tmp_path: Path, api: apis.Spoken) -> None:
    tenants = ({"name": "a"}, {"name": "b", "may_salt": True}, {"name": "c", "cache_salt": "none"})
    async with serving(tmp_path, *tenants) as (router, p, d):
        for key in ("sk-a", "sk-c"):
            reply = await ask_as(router, key, api, cache_salt="mine")
            assert reply.status == 400
            assert b"cache_salt is set by the router" in reply.body
            assert newest(router)["outcome"] == "failed"
        assert not p.seen
        assert not d.seen
        assert (await ask_as(router, "sk-b", api, cache_salt="mine")).status == 200
        assert (await ask_as(router, "sk-a", api, cache_salt=None)).status == 200
        assert salts(p) == salts(d) == [combined_salt(auto_salt("b"), "mine"), auto_salt("a")]
        await idle(router)


async def test_routes_of_one_stage(tmp_path: Path) -> None:
    """Where KV is computed it has the tenant's salt; where it could not be kept apart, the route is closed."""
    tenants = ({"name": "a"}, {"name": "c", "cache_salt": "none"})
    async with serving(tmp_path, *tenants) as (router, _, d):

        async def ask(path: str, key: str, body: bytes) -> Any:
            async with connected(router) as client:
                post(client, body, key, path)
                return await client.reply()

        assert (await ask("/v1/embeddings", "sk-a", b'{"input":"x"}')).status == 200
        assert (await ask("/tokenize", "sk-a", b'{"prompt":"x"}')).status == 200
        assert [seen.body for seen in d.seen] == [
            b'{"input":"x","cache_salt":"%b"}' % auto_salt("a").encode(),
            b'{"prompt":"x"}',
        ]
        for path in ("/v1/audio/transcriptions", "/v1/audio/translations", "/v2/embed"):
            refused = await ask(path, "sk-a", b"not JSON" if "audio" in path else b"{}")
            assert (refused.status, error_of(refused)["code"]) == (403, "route_not_isolated")
        assert len(d.seen) == 2
        assert (await ask("/v1/audio/transcriptions", "sk-c", b"not JSON")).status == 200
        assert d.seen[-1].body == b"not JSON"
        assert tenant(router, "a").num_admitted == 2
        assert tenant(router, "c").num_admitted == 1
        await idle(router)


# ---- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        ({"requests_per_s": 0.01}, "tenant_rate_limited"),
        ({"tokens_per_s": 0.01, "tokens_burst": 1}, "tenant_token_rate_limited"),
    ],
)
async def test_a_rate_that_would_keep_it_waiting_too_long(tmp_path: Path, limit: dict[str, Any], code: str) -> None:
    async with serving(tmp_path, {"name": "a", **limit}, {"name": "b"}) as (router, p, d):
        assert (await ask_as(router, "sk-a")).status == 200
        refused = await ask_as(router, "sk-a")
        assert (refused.status, error_of(refused)["code"]) == (429, code)
        assert newest(router)["code"] == code
        assert int(refused.headers["retry-after"]) > 30
        assert (await ask_as(router, "sk-b")).status == 200
        assert len(p.seen) == len(d.seen) == 2
        assert tenant(router, "a").refused[code] == 1
        await idle(router)


async def test_a_rate_that_lets_it_go_on_soon(tmp_path: Path) -> None:
    async with serving(tmp_path, {"name": "a", "requests_per_s": 20, "burst": 1}) as (router, p, _):
        async with crowd(router) as clients:
            for _number in range(4):
                clients.ask("sk-a")
            await until(lambda: router.tenants is not None and router.tenants.num_waiting, "some wait")
            assert [reply.status for reply in await clients.replies()] == [200] * 4
        assert len(p.seen) == 4
        assert tenant(router, "a").waited_s > 0.1
        await idle(router)


async def test_more_in_flight_than_a_tenant_may_have_wait_and_then_are_refused(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(tmp_path, {"name": "a", "concurrent_max": 1, "queue_max": 1}, {"name": "b"})
    async with (
        engine(answers) as p,
        engine(streams_at(gate)) as d,
        routing([p], [d], tenants_file=path) as router,
        crowd(router) as clients,
    ):
        clients.ask("sk-a")
        await until(lambda: len(gate.standing) == 1, "one is served")
        clients.ask("sk-a")
        await until(lambda: tenant(router, "a").num_waiting == 1, "one waits")
        refused = await ask_as(router, "sk-a")
        assert (refused.status, error_of(refused)["code"]) == (429, "tenant_concurrency_limited")
        assert int(refused.headers["retry-after"]) >= 1
        clients.ask("sk-b")
        await until(lambda: len(gate.standing) == 2, "another tenant is not held up")
        assert len(p.seen) == 2
        gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 3
        assert gate.most == 2
        await idle(router)


async def test_who_has_waited_too_long_is_told_when_to_come_back(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(tmp_path, {"name": "a"}, {"name": "b", "concurrent_max": 1}, in_flight_max=2, wait_max_s=0.1)
    async with (
        engine(answers) as p,
        engine(streams_at(gate)) as d,
        routing([p], [d], tenants_file=path) as router,
        crowd(router) as clients,
    ):
        first = clients.ask("sk-b")
        await until(lambda: len(gate.standing) == 1, "one is served")
        own = await ask_as(router, "sk-b")
        assert (own.status, error_of(own)["code"]) == (429, "tenant_concurrency_limited")
        second = clients.ask("sk-a")
        await until(lambda: len(gate.standing) == 2, "two are served")
        for _number in range(2):
            late = await ask_as(router, "sk-a")
            assert (late.status, error_of(late)["code"]) == (503, "overloaded")
            assert int(late.headers["retry-after"]) >= 1
            shown = newest(router)
            assert (shown["status"], shown["outcome"], shown["prefill"]) == (503, "failed", None)
        gate.open()
        assert [(await each).status for each in (first, second)] == [200, 200]
        assert len(p.seen) == 2
        await idle(router)


# ---- shares ----------------------------------------------------------------------------------------------------------

NUM_FINISHED = 240


async def shares(router: Router, gate: Gate, clients: Crowd, asked: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Tokens of finished answers by tenant, as parts of all, while each tenant always has ten requests in the router
    and the decode engine ends one at a time."""
    finished: Counter[str] = Counter()
    pending: dict[asyncio.Task[Any], str] = {}
    for _number in range(10):
        for name, fields in asked.items():
            pending[clients.ask(f"sk-{name}", **fields)] = name
    assert router.tenants is not None
    await until(lambda: router.tenants is not None and router.tenants.num_waiting == 16, "all but four wait")
    for _number in range(NUM_FINISHED):
        await until(lambda: len(gate.standing) == 4, "as many are served as may be")
        gate.open_one()
        done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            name = pending.pop(task)
            clients.tasks.discard(task)
            assert task.result().status == 200
            finished[name] += asked[name]["max_tokens"] + 3
            pending[clients.ask(f"sk-{name}", **asked[name])] = name
        router.tenants.validate()
    return {name: number / finished.total() for name, number in finished.items()}


@pytest.mark.parametrize(
    ("weights", "asked"),
    [
        ((1, 1), ({"max_tokens": 8}, {"max_tokens": 8})),
        ((3, 1), ({"max_tokens": 8}, {"max_tokens": 8})),
        ((1, 1), ({"max_tokens": 40}, {"max_tokens": 5})),
        ((3, 1), ({"max_tokens": 5}, {"max_tokens": 20})),
        ((1, 1), ({"max_tokens": 20}, {"max_tokens": 20, "stream": False})),
    ],
    ids=["equal", "weighted", "unequal_answers", "weighted_unequal_answers", "one_does_not_stream"],
)
async def test_under_overload_finished_work_is_shared_by_weight(
    tmp_path: Path, weights: tuple[int, int], asked: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    gate, open_gate = Gate(), Gate()
    open_gate.open()
    tenants = [{"name": name, "weight": weight} for name, weight in zip("ab", weights, strict=True)]
    path = tenants_file(tmp_path, *tenants, in_flight_max=4)
    async with (
        engine(prefills_at(open_gate)) as p,
        engine(streams_at(gate)) as d,
        routing([p], [d], tenants_file=path) as router,
        crowd(router) as clients,
    ):
        found = await shares(router, gate, clients, dict(zip("ab", asked, strict=True)))
        assert found["a"] == pytest.approx(weights[0] / sum(weights), rel=0.1)
        gate.open()
        await clients.leave()
        await idle(router)


async def test_what_an_idle_tenant_leaves_goes_to_the_other(tmp_path: Path) -> None:
    gate, open_gate = Gate(), Gate()
    open_gate.open()
    path = tenants_file(tmp_path, {"name": "a"}, {"name": "b", "weight": 100}, in_flight_max=4)
    async with (
        engine(prefills_at(open_gate)) as p,
        engine(streams_at(gate)) as d,
        routing([p], [d], tenants_file=path) as router,
        crowd(router) as clients,
    ):
        for _number in range(8):
            clients.ask("sk-a")
        await until(lambda: len(gate.standing) == 4, "as many as may be are served")
        gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 8
        await idle(router)


# ---- who leaves ------------------------------------------------------------------------------------------------------


async def test_clients_that_leave_while_they_wait_leave_nothing(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(tmp_path, {"name": "a", "concurrent_max": 1}, {"name": "b"}, in_flight_max=2)
    async with (
        engine(answers) as p,
        engine(streams_at(gate)) as d,
        routing([p], [d], tenants_file=path) as router,
        crowd(router) as served,
    ):
        served.ask("sk-a")
        served.ask("sk-b")
        await until(lambda: len(gate.standing) == 2, "two are served")
        async with crowd(router) as waiting:
            for name in "abababab":
                waiting.ask(f"sk-{name}")
            await until(lambda: router.tenants is not None and router.tenants.num_waiting == 8, "eight wait")
            assert router.inference.num_by_stage()["received"] == 8
        await until(lambda: router.inference.num_active == 2, "they have left")
        assert (tenant(router, "a").num_left_waiting, tenant(router, "b").num_left_waiting) == (4, 4)
        assert counted(router, "client_disconnects_total", stage="received") == 8
        assert len(p.seen) == 2
        gate.open()
        assert [reply.status for reply in await served.replies()] == [200, 200]
        await idle(router)


async def test_a_client_that_leaves_makes_room_for_the_next(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(tmp_path, {"name": "a"}, in_flight_max=1)
    async with (
        engine(prefills_at(gate)) as p,
        engine(answers) as d,
        routing([p], [d], tenants_file=path) as router,
        crowd(router) as waiting,
    ):
        async with crowd(router) as first:
            first.ask("sk-a")
            await until(lambda: len(gate.standing) == 1, "one is served")
            waiting.ask("sk-a")
            await until(lambda: tenant(router, "a").num_waiting == 1, "one waits")
        await until(lambda: len(p.seen) == 2, "the other one begins")
        gate.open()
        assert [reply.status for reply in await waiting.replies()] == [200]
        await idle(router)


async def test_a_router_that_stops_tells_those_who_wait(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(tmp_path, {"name": "a"}, in_flight_max=1)
    async with (
        engine(prefills_at(gate)) as p,
        engine(answers) as d,
        routing([p], [d], tenants_file=path) as router,
        crowd(router) as clients,
    ):
        for _number in range(20):
            clients.ask("sk-a")
        await until(lambda: router.tenants is not None and router.tenants.num_waiting == 19, "nineteen wait")
        assert await router.stop(0.0) >= 20
        replies = await clients.replies()
        assert [reply.status for reply in replies] == [503] * 20
        assert {error_of(reply)["code"] for reply in replies} == {"stopping"}
        check_idle(router)
        assert len(p.seen) == 1, "those who waited were not begun to be cut"
