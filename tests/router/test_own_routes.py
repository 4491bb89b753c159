"""What the router answers itself: health, readiness, models, metrics, receipts, status; and what it does not serve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.router.scripted import (
    Seen,
    Wire,
    ask,
    connected,
    engine,
    prefills,
    routing,
    streams,
    take_down,
    until,
)
from tests.router.stack import RouterProcess, Stack, address_of, metrics_of, total, urls

pytestmark = pytest.mark.process


def test_health_and_readiness(stack: Stack) -> None:
    assert stack.router.ask("GET", "/health").json == {"status": "ok"}
    assert stack.router.ask("GET", "/liveness").json == {"status": "ok"}
    ready = stack.router.ask("GET", "/readiness")
    pools = {"prefill": {"usable": 2, "total": 2}, "decode": {"usable": 2, "total": 2}}
    assert (ready.status, ready.json) == (200, {"status": "ready"} | pools)


def test_models_are_the_engines(stack: Stack) -> None:
    answer = stack.router.ask("GET", "/v1/models")
    assert answer.status == 200
    assert [model["id"] for model in answer.json["data"]] == ["m"]


@pytest.mark.parametrize(
    "path", ["/", "/v1/nothing", "/metrics/x", "/receiptsx", "/add_worker?url=x", "/simulated/state", "//health"]
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_unknown_route(stack: Stack, method: str, path: str) -> None:
    before = stack.requests()
    answer = stack.router.ask(method, path, b"{}")
    assert answer.status == 404
    assert (answer.error["type"], answer.error["code"]) in (
        ("invalid_request_error", "route_not_found"),
        ("not_found_error", "route_not_found"),
    )
    assert stack.requests() == before


async def test_a_target_that_names_its_host_is_its_route() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router, connected(router) as client:
        client.send("http://somewhere/v1/completions")
        assert (await client.reply()).headers["x-antiphon-path"] == "pd"
        for each in (p, d):
            assert [seen.path for seen in each.seen] == ["/v1/completions"]
            assert b"somewhere" not in each.heads[-1]
        client.get("/status")  # of the host x
        assert (await client.reply()).status == 403
        client.get(f"http://127.0.0.1:{router.spec.port}/status")
        assert (await client.reply()).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/completions"),
        ("PUT", "/v1/chat/completions"),
        ("DELETE", "/v1/embeddings"),
        ("POST", "/health"),
        ("POST", "/metrics"),
        ("POST", "/receipts/x"),
        ("PATCH", "/v1/models"),
    ],
)
def test_wrong_method(stack: Stack, method: str, path: str) -> None:
    answer = stack.router.ask(method, path, b"{}")
    assert answer.status == 405
    assert method in answer.error["message"]


def test_body_that_is_too_large(stack: Stack, die_with_parent: Callable[[], None]) -> None:
    router = RouterProcess.start(die_with_parent, *urls(stack.decode, "decode"), "--body-max-bytes", "2000")
    try:
        assert router.complete("x" * 1000).status == 200
        before = stack.requests()
        answer = router.complete("x" * 3000)
        assert answer.status == 413
        assert "2000" in answer.error["message"]
        assert stack.requests() == before
    finally:
        assert router.stop() == 0


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_reconcile_with_what_was_sent(stack: Stack) -> None:
    router = stack.router
    before = router.metrics()
    for number in range(6):
        assert router.complete(f"{number}", stream=bool(number % 2)).status == 200
    assert router.complete("x", n=2).status == 200
    assert router.complete("x", model="another").status == 404
    assert router.ask("POST", "/v1/completions", b"{").status == 400
    assert router.ask("POST", "/v1/embeddings", {"input": "x"}).status == 200
    after = router.metrics()

    def grown(name: str, *labels: str) -> float:
        return total(after, name, *labels) - total(before, name, *labels)

    assert grown("requests_total") == 10
    assert grown("requests_total", "route=/v1/completions", "path=pd", "outcome=completed", "status=200") == 6
    assert grown("requests_total", "path=local", "status=200") == 2
    assert grown("requests_total", "status=404", "outcome=completed") == 1
    assert grown("requests_total", "status=400", "outcome=failed", "path=none") == 1
    assert grown("path_total", "path=pd", "reason=default") == 6
    assert grown("path_total", "path=local", "reason=n") == 1
    assert grown("path_total", "path=local", "reason=single_stage") == 1
    assert grown("engine_requests_total", "role=prefill") == 7
    assert grown("engine_requests_total", "role=decode") == 8
    assert grown("prefill_seconds_count") == 7
    assert grown("handover_seconds_count") == 3  # streams only
    assert grown("time_to_first_token_seconds_count") == 3
    assert grown("request_seconds_count") == 10
    assert grown("engine_errors_total") == grown("stream_truncations_total") == 0
    for gauge in ("active_requests", "engine_active_requests"):
        assert total(after, gauge) == 0
    for each in stack.engines:
        assert total(after, "engine_up", f"engine={address_of(each)}") == 1


def test_status_shows_the_engines(stack: Stack) -> None:
    status = stack.router.ask("GET", "/status").json
    assert [each["url"] for each in status["engines"]] == [f"http://{address_of(each)}" for each in stack.engines]
    assert {each["state"] for each in status["engines"]} == {"ready"}
    assert status["active"] == 0


# ---- access ----------------------------------------------------------------------------------------------------------

ADMIN = ("/metrics", "/status", "/receipts", "/receipts/0123")


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded", "X-Real-IP"])
@pytest.mark.parametrize("path", ADMIN)
def test_a_proxy_on_this_machine_does_not_open_what_is_for_this_machine(stack: Stack, path: str, header: str) -> None:
    answer = stack.router.ask("GET", path, headers={header: "127.0.0.1"})
    assert answer.status == 403
    assert answer.error["type"] == "permission_error"
    assert stack.router.ask("GET", "/health", headers={header: "10.0.0.1"}).status == 200


def test_receipt_that_does_not_exist(stack: Stack) -> None:
    answer = stack.router.ask("GET", "/receipts/0123")
    assert (answer.status, answer.error["code"]) == (404, "receipt_not_found")


def test_receipts_are_kept_up_to_a_number(stack: Stack, die_with_parent: Callable[[], None]) -> None:
    router = RouterProcess.start(die_with_parent, *urls(stack.decode, "decode"), "--receipts-max", "3")
    try:
        ids = [router.complete("x", 1).headers["x-antiphon-receipt"] for _ in range(5)]
        found = [router.ask("GET", f"/receipts/{each}").status for each in ids]
        assert found == [404, 404, 200, 200, 200]
        assert [each["id"] for each in router.ask("GET", "/receipts").json["receipts"]] == ids[:1:-1]
    finally:
        assert router.stop() == 0


@pytest.fixture
def keyed(stack: Stack, die_with_parent: Callable[[], None], tmp_path: Path) -> RouterProcess:
    """A router with an admin key, to be stopped by the test."""
    (tmp_path / "key").write_text("  s3cret-é\n")
    return RouterProcess.start(
        die_with_parent, *urls(stack.decode, "decode"), "--admin-key-file", str(tmp_path / "key")
    )


def test_admin_key(keyed: RouterProcess) -> None:
    try:
        right = "Bearer s3cret-é".encode().decode("latin-1")
        for path in ADMIN:
            assert keyed.ask("GET", path).status == 401
            for wrong in ("Bearer wrong", "Bearer ", "Bearer", "s3cret", "Basic s3cret", right + "x"):
                answer = keyed.ask("GET", path, headers={"Authorization": wrong})
                assert (answer.status, answer.error["type"]) == (401, "authentication_error")
            expected = 404 if path.endswith("0123") else 200
            for accepted in (right, right.replace("Bearer", "bearer")):
                answer = keyed.ask("GET", path, headers={"Authorization": accepted, "X-Forwarded-For": "10.0.0.1"})
                assert answer.status == expected
        assert keyed.complete("x").status == 200
        assert keyed.ask("GET", "/v1/models").status == 200
    finally:
        assert keyed.stop() == 0


# ---- engines that are down -------------------------------------------------------------------------------------------


async def models(seen: Seen, wire: Wire) -> None:
    """A decode engine that also knows its models."""
    if seen.path == "/v1/models":
        wire.whole(b'{"object":"list","data":[]}')
    else:
        await streams(seen, wire)


async def test_models_while_one_engine_is_down() -> None:
    async with (
        engine(models) as dead,
        engine(models) as alive,
        engine(models) as p,
        routing([p], [dead, alive]) as router,
        connected(router) as client,
    ):
        take_down(router, router.fleet.decode.endpoints[0])
        client.get("/v1/models")
        assert (await client.reply()).status == 200
        assert (len(dead.seen), len(alive.seen)) == (0, 1)


async def test_models_while_every_engine_is_gone() -> None:
    async with engine(models) as gone:
        pass
    async with routing([gone], [gone]) as router, connected(router) as client:
        client.get("/v1/models")
        reply = await client.reply()
        assert reply.status == 503
        assert json.loads(reply.body)["error"]["type"] == "service_unavailable"


async def test_models_while_no_further_connection_may_be_opened() -> None:
    """Our own limit says nothing of the engine's health."""

    async def holds(seen: Seen, wire: Wire) -> None:
        await wire.until_closed()

    async with engine(holds) as d, routing([], [d], upstream_connections_max=1) as router, connected(router) as first:
        first.send()
        await until(lambda: d.seen, "the only connection is in use")
        async with connected(router) as client:
            client.get("/v1/models")
            assert (await client.reply()).status == 503
            client.send()
            assert (await client.reply()).status == 503
        assert router.fleet.decode.num_usable == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_pool_that_is_gone_is_said_before_any_work(role: str) -> None:
    async with engine(models) as gone:
        pass
    async with engine(prefills) as here:
        pools = ([gone], [here]) if role == "prefill" else ([here], [gone])
        async with routing(*pools) as router, connected(router) as client:
            reply = await ask(router)
            assert (reply.status, reply.headers["retry-after"]) == (503, "1")
            error = json.loads(reply.body)["error"]
            assert (error["type"], error["code"]) == ("service_unavailable", f"no_{role}_engine")
            assert here.seen == []
            client.get("/readiness")
            reply = await client.reply()
            assert reply.status == 503
            answer = json.loads(reply.body)
            assert answer["status"] == "not_ready"
            assert answer["reason"] == f"no {role} engine is available"
            assert answer[role] == {"usable": 0, "total": 1}


async def test_engine_that_only_seems_down_is_tried_where_there_is_no_other() -> None:
    async with engine(prefills) as p, engine(models) as d, routing([p], [d]) as router:
        for endpoint in router.fleet.all():
            take_down(router, endpoint)
        assert (await ask(router)).status == 200
        assert [endpoint.state.value for endpoint in router.fleet.all()] == ["ready", "ready"]


async def test_readiness_without_a_prefill_pool_is_that_of_the_decode_pool() -> None:
    async with engine(models) as d, routing([], [d]) as router, connected(router) as client:
        client.get("/readiness")
        assert json.loads((await client.reply()).body)["status"] == "ready"
        assert (await ask(router)).headers["x-antiphon-reason"] == "no_prefill_pool"


async def test_readiness_while_the_router_stops() -> None:
    async with engine(models) as d, routing([], [d]) as router, connected(router) as client:
        router.admin.is_draining = True
        client.get("/readiness")
        reply = await client.reply()
        assert (reply.status, json.loads(reply.body)["reason"]) == (503, "the router is stopping")


async def test_metrics_of_two_routers_do_not_mix(stack: Stack) -> None:
    assert metrics_of(stack.quick.port) != metrics_of(stack.router.port)
