"""What a router shows of what waits in it and of what it knows: ``/status``, series, receipts, the access log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.problems import SpecError
from antiphon.config.router_spec import RouterSpec
from antiphon.config.tenant_files import auto_salt
from antiphon.router.access_log import entry
from antiphon.router.app import Router
from antiphon.routing.kv_index import StoredBlocks
from tests.router.scripted import HANDLE, Seen, Wire, ask, connected, counted, engine, newest, routing, streams, until
from tests.router.served import Gate, crowd, error_of, get_as, idle, post, prefills_at, tenants_file

TOKENS = list(range(64))
BLOCK = 16


async def get(router: Router, path: str) -> Any:
    """What an admin route answers who asks from this machine."""
    async with connected(router) as client:
        client.writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        reply = await client.reply()
        assert reply.status == 200, reply.body
        return json.loads(reply.body) if reply.headers["content-type"] == "application/json" else reply.body.decode()


def prefills_with(num_prompt: int, num_cached: int) -> Any:
    """A prefill engine's script: a handle, and what it says of the prompt."""
    usage = {"prompt_tokens": num_prompt, "prompt_tokens_details": {"cached_tokens": num_cached}}

    async def script(_: Seen, wire: Wire) -> None:
        wire.whole(json.dumps({"id": "x", "kv_transfer_params": HANDLE, "usage": usage}).encode())

    return script


def hold(router: Router, tokens: list[int]) -> None:
    """The decode engine has said that it holds these."""
    (endpoint,) = router.fleet.decode.endpoints
    names = list(range(len(tokens) // BLOCK))
    router.fleet.kv_index.store(endpoint, 0, StoredBlocks(names, None, tokens[: len(names) * BLOCK], BLOCK))


# ---- what there is not -----------------------------------------------------------------------------------------------


async def test_a_router_without_any_of_it_says_so() -> None:
    async with engine(streams) as d, routing([], [d]) as router:
        status = await get(router, "/status")
        assert status["cold_admission"]["is_on"] is False
        assert "kv_bytes_per_token" in status["cold_admission"]["why_off"]
        assert status["tenants"] is None
        assert status["whereabouts"] is None
        assert counted(router, "cold_admission_on") == 0
        assert router.metrics.registry.get_sample_value("antiphon_router_cold_waiting") is None


# ---- cold admission --------------------------------------------------------------------------------------------------


async def test_the_cold_queue_is_shown() -> None:
    gate = Gate()
    knobs = {"kv_bytes_per_token": 1000, "cold_min_bytes": 1000}
    async with (
        engine(prefills_at(gate, 40)) as p,
        engine(streams) as d,
        routing([p], [d], **knobs) as router,
        crowd(router) as clients,
    ):
        for _ in range(3):
            clients.ask(prompt=TOKENS)
        await until(lambda: counted(router, "cold_waiting") == 2 and gate.num_arrived == 1, "one prefills, two wait")
        shown = (await get(router, "/status"))["cold_admission"]
        assert (shown["is_on"], shown["num_waiting"], shown["num_cold"], shown["num_held"]) == (True, 2, 1, 0)
        assert shown["waiting_bytes"] == counted(router, "cold_waiting_bytes") == 2 * 64 * 1000
        assert shown["counts"]["admitted_at_once"] == 1
        assert shown["lane"] == [p.url]
        assert shown["decodes"][0]["url"] == d.url
        first_s = counted(router, "cold_oldest_wait_seconds")
        assert 0 < first_s < counted(router, "cold_oldest_wait_seconds")
        assert counted(router, "cold_admission_on") == counted(router, "cold_prefills") == 1
        assert counted(router, "cold_admitted_total", reason="at_once") == 1
        assert counted(router, "cold_committed_bytes") == 64 * 1000
        assert counted(router, "queue_depth") == 2, "no engine has them"
        gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 3
        await idle(router)
        assert counted(router, "cold_admitted_total", reason="from_queue") == 2
        assert counted(router, "cold_waiting") == 0
        assert (
            router.metrics.registry.get_sample_value("antiphon_router_cold_in_flight_bytes", {"engine": d.address}) == 0
        )


# ---- tenants ---------------------------------------------------------------------------------------------------------


async def test_tenants_are_shown_without_their_keys_and_salts(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(
        tmp_path, {"name": "a", "concurrent_max": 1}, {"name": "b", "cache_salt": "own", "queue_max": 0}
    )
    async with (
        engine(prefills_at(gate)) as p,
        engine(streams) as d,
        routing([p], [d], tenants_file=path) as router,
        crowd(router) as clients,
    ):
        for _ in range(2):
            clients.ask("sk-a")
        await until(lambda: counted(router, "tenant_waiting", tenant="a") == 1, "one waits for the other")
        one, other = (await get(router, "/status"))["tenants"]
        assert (one["name"], one["num_in_flight"], one["num_waiting"], one["num_admitted"]) == ("a", 1, 1, 1)
        assert (other["name"], other["num_in_flight"], other["num_waiting"]) == ("b", 0, 0)
        assert counted(router, "tenant_in_flight", tenant="a") == counted(router, "queue_depth") == 1
        gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 2
        await idle(router)
        assert counted(router, "tenant_admitted_total", tenant="a") == 2
        assert counted(router, "tenant_admitted_total", tenant="b") == 0
        assert counted(router, "tenant_wait_seconds_total", tenant="a") > 0
        assert counted(router, "tenant_admitted_tokens_total", tenant="a") > 0
        shown = [await get(router, "/status"), await get(router, "/receipts"), await get(router, "/metrics")]
        assert "a" in {receipt["tenant"] for receipt in shown[1]["receipts"]}
        for secret in ("sk-a", "sk-b", auto_salt("a"), auto_salt("b"), '"own"'):
            assert all(secret not in json.dumps(each) for each in shown)


async def test_a_salt_that_is_refused_is_counted_for_its_tenant(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, {"name": "a"}, {"name": "b", "may_salt": True})
    async with engine(streams) as d, routing([], [d], tenants_file=path) as router:
        for key, salt, code in (
            ("a", "x", "cache_salt_refused"),
            ("b", "", "invalid_cache_salt"),
            ("b", "x", None),
        ):
            async with connected(router) as client:
                post(client, {"prompt": "x", "stream": True, "cache_salt": salt}, f"sk-{key}")
                reply = await client.reply()
            assert (reply.status, error_of(reply)["code"] if code else None) == (400 if code else 200, code)
        assert counted(router, "tenant_salt_refused_total", tenant="a", code="cache_salt_refused") == 1
        assert counted(router, "tenant_salt_refused_total", tenant="b", code="invalid_cache_salt") == 1
        assert newest(router)["tenant"] == "b"
        assert {labels for name, labels in _series(router) if name.endswith("tenant_salt_refused_total")} == {
            (("code", "cache_salt_refused"), ("tenant", "a")),
            (("code", "invalid_cache_salt"), ("tenant", "b")),
        }


def _series(router: Router) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {
        (sample.name, tuple(sorted(sample.labels.items())))
        for family in router.metrics.registry.collect()
        for sample in family.samples
    }


async def test_tenants_do_not_read_what_is_for_operators(tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("sk-admin")
    path = tenants_file(tmp_path, {"name": "a"}, {"name": "b"})
    knobs = {"tenants_file": path, "admin_key_file": str(tmp_path / "admin")}
    async with engine(streams) as d, routing([], [d], **knobs) as router:
        async with connected(router) as client:
            post(client, {"prompt": "x", "stream": True}, "sk-a")
            receipt = (await client.reply()).headers["x-antiphon-receipt"]
        for route in ("/receipts", f"/receipts/{receipt}", "/metrics", "/status"):
            for key in (None, "sk-a", "sk-b"):
                reply = await get_as(router, route, key)
                assert (reply.status, error_of(reply)["code"]) == (401, "admin")
            assert (await get_as(router, route, "sk-admin")).status == 200


async def test_keys_of_clients_have_one_source(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("sk-1")
    path = tenants_file(tmp_path, {"name": "a"})
    spec = RouterSpec(decode=["http://127.0.0.1:9"], tenants_file=path, api_key_file=str(tmp_path / "keys"))
    with pytest.raises(SpecError, match="every key is a tenant's") as caught:
        Router(spec)
    (problem,) = caught.value.problems
    assert (problem.field, "api_key_files of a tenant" in problem.fix) == ("router.api_key_file", True)


# ---- what is held ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_held", "path", "reason"), [(48, "cached", "held_by_engine"), (32, "pd", "default")], ids=["enough", "too few"]
)
async def test_the_path_by_what_is_held_is_in_header_receipt_metric_and_log(
    num_held: int, path: str, reason: str
) -> None:
    async with (
        engine(prefills_with(64, 0)) as p,
        engine(streams) as d,
        routing([p], [d], local_max_tokens=16) as router,
    ):
        hold(router, TOKENS[:num_held])
        reply = await ask(router, prompt=TOKENS)
        assert (reply.headers["x-antiphon-path"], reply.headers["x-antiphon-reason"]) == (path, reason)
        receipt = newest(router)
        is_cached = path == "cached"
        assert (receipt["path"], receipt["reason"]) == (path, reason)
        assert receipt["num_held_tokens"] == (num_held if is_cached else None)
        assert (len(p.seen), len(d.seen)) == (0 if is_cached else 1, 1)
        assert counted(router, "path_total", path=path, reason=reason) == 1
        assert counted(router, "requests_total", route="/v1/completions", path=path, outcome="completed", status="200")
        line = entry(router.receipts.latest(1)[0])
        assert (line["path"], line["num_held_tokens"], line["tenant"]) == (path, num_held if is_cached else None, None)
        where = (await get(router, "/status"))["whereabouts"]
        assert where["kv_events"] is None, "no port for them"
        assert where["tokenize"]["asked"] == counted(router, "tokenize_total", result="asked") == 0


async def test_what_a_prefill_engine_was_expected_to_hold_is_held_against_what_it_had() -> None:
    async with (
        engine(prefills_with(100, 30)) as p,
        engine(streams) as d,
        routing([p], [d], policy="prefix_aware") as router,
    ):
        prompt = "one beginning " * 100
        assert (await ask(router, prompt=prompt)).status == 200
        assert newest(router)["num_held_tokens"] is None
        assert counted(router, "held_tokens_expected_total", path="pd") == 0
        assert (await ask(router, prompt=prompt)).status == 200
        expected = newest(router)["num_held_tokens"]
        assert isinstance(expected, int)
        assert expected > 30
        assert counted(router, "held_tokens_expected_total", path="pd") == expected
        assert counted(router, "held_tokens_found_total", path="pd") == 30


async def test_kv_aware_shows_what_it_hears_and_how_it_picks() -> None:
    async with engine(prefills_with(64, 0)) as p, engine(streams) as d, routing([p], [d], policy="kv_aware") as router:
        hold(router, TOKENS)
        assert (await ask(router, prompt=TOKENS)).status == 200
        where = (await get(router, "/status"))["whereabouts"]
        picks = where["kv_aware_picks"]
        for role in ("prefill", "decode"):
            for how in ("precise", "approximate"):
                assert counted(router, "kv_aware_picks_total", role=role, how=how) == picks[f"{role}_{how}"]
            assert picks[f"{role}_precise"] + picks[f"{role}_approximate"] == 1
        assert where["cache_servers"] == []


async def test_series_are_read_without_requests() -> None:
    async with engine(streams) as d, routing([], [d], policy="kv_aware", kv_bytes_per_token=1) as router:
        text = await get(router, "/metrics")
        assert "antiphon_router_cold_waiting 0.0" in text
        assert 'antiphon_router_tokenize_total{result="asked"} 0.0' in text
