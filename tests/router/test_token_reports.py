"""Receipts say where each prompt token came from, as the engines report it through cache servers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon.cache_server.admin import start_admin
from antiphon.observe.receipt import Receipt, ReceiptRing
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.protocol import cache as wire
from antiphon.router import log_follower, token_reports
from antiphon.router.app import Router
from antiphon.router.headers import engine_request_id, leg_of
from tests.cache_server.admin_standin import standing_in
from tests.router.scripted import (
    Client,
    ScriptedEngine,
    Seen,
    Wire,
    ask,
    connected,
    counted,
    engine,
    prefills,
    routing,
    until,
)
from tests.router.scripted import streams as streams
from tests.router.scripted_cache_server import ScriptedCacheServer, cache_server
from tests.router.stack import Stack, quiet_ports

ID = "0123456789abcdef0123456789abcdef"


# ---- ids -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", ["cmpl-{}-0-1a2b3c4d", "chatcmpl-{}-1a2b3c4d", "1_chatcmpl-{}-1a2b3c4d", "{}"])
@pytest.mark.parametrize("address", ["127.0.0.1:8001", "[::1]:80", f"a_b-{ID[::-1]}.example:8001", f"{ID[::-1]}:1"])
@pytest.mark.parametrize("is_tagged", [True, False])
def test_the_leg_is_in_the_id(around: str, address: str, is_tagged: bool) -> None:
    prefill = engine_request_id(ID, address, None, tagged=is_tagged)
    decode = engine_request_id(ID, address, "10.0.0.1:8101", tagged=is_tagged)
    alone = engine_request_id(ID, None, "10.0.0.1:8101", tagged=is_tagged)
    assert leg_of(around.format(prefill)) == (ID, "prefill")
    assert leg_of(around.format(decode)) == (ID, "decode")
    assert leg_of(around.format(alone)) == (ID, "decode")


@pytest.mark.parametrize("request_id", ["", "cmpl-x", f"cmpl-free-{ID}-0-1a2b3c4d", f"cmpl-{ID}0", f"x{ID}", ID[:31]])
def test_other_ids_are_not_ours(request_id: str) -> None:
    assert leg_of(request_id) is None


@pytest.mark.process
def test_engines_are_sent_ids_that_tell_the_legs_apart(stack: Stack) -> None:
    for router in (stack.router, stack.quick):
        answer = router.complete("x")
        for role in ("prefill", "decode"):
            sent = stack.last(answer.headers[f"x-antiphon-{role}"])[0]["x-request-id"]
            assert leg_of(f"cmpl-{sent}-0-1a2b3c4d") == (answer.headers["x-antiphon-receipt"], role)


def send_get(client: Client, path: str) -> None:
    """A GET that asks the router by its own address, as admin routes want it."""
    client.writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())


# ---- one deployment, in this process ---------------------------------------------------------------------------------


@dataclass
class World:
    """Engines, cache servers and a router."""

    router: Router
    servers: list[ScriptedCacheServer]

    @property
    def latest(self) -> Receipt:
        return self.router.receipts.latest(1)[0]

    def report(self, role: str, receipt: Receipt | None = None, server: int = 0, **counts: object) -> None:
        """The engine of a leg reports; by default of a prompt of three tokens, two of them from the cache server."""
        receipt = receipt or self.latest
        decode = receipt.decode if role == "decode" else None
        request = engine_request_id(receipt.id, receipt.prefill, decode, tagged=True)
        default: dict[str, object] = {"remote_prefill" if role == "decode" else "l1": 2, "computed": 1}
        self.servers[server].report(f"cmpl-{request}-0-1a2b3c4d", 3, **(counts or default))

    def count(self, name: str, **labels: str) -> float:
        return counted(self.router, name, **labels)

    async def read(self, receipt: Receipt | None = None, wait_s: float | str | None = 5) -> dict[str, Any]:
        """GET of a receipt: its ``tokens``."""
        receipt_id = (receipt or self.latest).id
        status, answer = await self.get(f"/receipts/{receipt_id}" + ("" if wait_s is None else f"?wait_s={wait_s}"))
        assert status == 200, answer
        tokens: dict[str, Any] = answer["tokens"]
        return tokens

    async def get(self, path: str) -> tuple[int, Any]:
        async with connected(self.router) as client:
            send_get(client, path)
            reply = await client.reply()
            return reply.status, json.loads(reply.body)

    def status(self, server: int = 0) -> dict[str, Any]:
        return self.router.reports.status()[server]


@contextlib.asynccontextmanager
async def world(
    num_servers: int = 1,
    prefill: Callable[[Seen, Wire], Any] = prefills,
    decode: Callable[[Seen, Wire], Any] = streams,
    urls: Callable[[list[ScriptedCacheServer]], list[str]] = lambda servers: [server.url for server in servers],
    **knobs: object,
) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as held:
        servers = [await held.enter_async_context(cache_server()) for _ in range(num_servers)]
        engines: list[ScriptedEngine] = [await held.enter_async_context(engine(each)) for each in (prefill, decode)]
        made = routing(engines[:1], engines[1:], cache_servers=urls(servers), **knobs)
        found = World(await held.enter_async_context(made), servers)
        await until(lambda: all(server.polls for server in servers), "the router asks for reports")
        yield found


@pytest.fixture
def _settles_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_reports, "SETTLE_S", 0.1)
    monkeypatch.setattr(token_reports, "SWEEP_INTERVAL_S", 0.02)


settles_soon = pytest.mark.usefixtures("_settles_soon")


@pytest.mark.parametrize(("told", "num_found"), [(1, 1), (3, 2), (0, 0)])
async def test_what_a_decode_engine_was_expected_to_hold(told: int, num_found: int) -> None:
    async with world() as made:
        assert (await ask(made.router, n=2)).status == 200  # any request that a decode engine serves alone
        receipt = made.latest
        receipt.path, receipt.reason, receipt.num_held_tokens = "cached", "held_by_engine", 2
        made.report("decode", device=told // 2, l1=told - told // 2, computed=3 - told)
        assert (await made.read())["state"] == "complete"
        await until(lambda: made.count("held_tokens_expected_total", path="cached") == 2, "it is counted")
        assert made.count("held_tokens_found_total", path="cached") == num_found


async def test_both_reports_after_the_end() -> None:
    async with world() as made:
        assert (await ask(made.router)).status == 200
        assert (await made.read(wait_s=None))["state"] == "waiting"
        made.report("prefill", engine="prefill-0", l1=2, computed=1)
        made.report("decode", engine="decode-0", remote_prefill=2, computed=1)
        tokens = await made.read()
        assert tokens["prompt"] == 3
        assert tokens["by_source"] == {"device": 0, "l1": 2, "computed": 1}
        assert (tokens["state"], tokens["missing"], tokens["sum_ok"]) == ("complete", [], True)
        assert tokens["reported_by"] == "cache_server"
        assert (tokens["prefill"]["engine"], tokens["prefill"]["l1"]) == ("prefill-0", 2)
        assert (tokens["decode"]["engine"], tokens["decode"]["remote_prefill"]) == ("decode-0", 2)
        assert made.count("prompt_tokens_total", source="l1") == 2
        assert made.count("prompt_tokens_total", source="computed") == 1
        assert made.count("token_reports_total", result="matched") == 2
        assert made.count("token_sums_wrong_total") == 0
        status, listed = await made.get("/receipts")
        assert (status, listed["receipts"][0]["tokens"]) == (200, tokens)


async def test_reports_before_the_end() -> None:
    has_arrived = asyncio.Event()

    async def decode(seen: Seen, wire: Wire) -> None:
        made.report("prefill")
        made.report("decode")
        await has_arrived.wait()
        await streams(seen, wire)

    async with world(decode=decode) as made:
        asked = asyncio.create_task(ask(made.router))
        await until(lambda: made.count("token_reports_total", result="matched") == 2, "both reports are there")
        early = await made.read(wait_s=None)
        assert (early["state"], early["by_source"]) == ("waiting", {"device": 0, "l1": 2, "computed": 1})
        assert made.count("prompt_tokens_total", source="l1") == 0
        has_arrived.set()
        await asked
        assert (await made.read())["state"] == "complete"
        await until(lambda: made.count("prompt_tokens_total", source="l1") == 2, "the sweep counts them")
        assert made.latest.reported is not None
        assert made.latest.reported.is_settled


@settles_soon
async def test_what_is_not_reported_is_unknown_and_may_still_come() -> None:
    async with world() as made:
        await ask(made.router)
        tokens = await made.read()
        assert tokens["by_source"] == {"unknown": 3}
        assert (tokens["prompt"], tokens["sum_ok"], tokens["reported_by"]) == (3, None, None)
        assert (tokens["state"], tokens["missing"]) == ("incomplete", ["prefill", "decode"])
        assert made.count("prompt_tokens_total", source="unknown") == 3
        assert made.count("token_reports_missing_total", leg="prefill") == 1
        assert made.count("token_reports_missing_total", leg="decode") == 1
        made.report("decode")
        await until(lambda: made.count("token_reports_total", result="late") == 1, "a late report is there")
        tokens = await made.read()
        assert tokens["by_source"] == {"device": 0, "l1": 0, "computed": 1, "unknown": 2}
        assert (tokens["state"], tokens["missing"]) == ("incomplete", ["prefill"])
        made.report("prefill")
        await until(lambda: made.count("token_reports_total", result="late") == 2, "the other one too")
        tokens = await made.read()
        assert (tokens["state"], tokens["by_source"]) == ("complete", {"device": 0, "l1": 2, "computed": 1})
        # What was counted stays counted.
        assert made.count("prompt_tokens_total", source="unknown") == 3
        assert made.count("prompt_tokens_total", source="l1") == 0


async def test_the_wait_is_over_two_seconds_after_the_end() -> None:
    async with world() as made:
        await ask(made.router)
        began_s = time.monotonic()
        tokens = await made.read(wait_s=5)
        assert 1.8 < time.monotonic() - began_s < 4
        assert tokens["state"] == "incomplete"


async def test_a_reader_waits_as_long_as_it_asks() -> None:
    async with world() as made:
        await ask(made.router)
        began_s = time.monotonic()
        assert (await made.read(wait_s=0.2))["state"] == "waiting"
        assert 0.15 < time.monotonic() - began_s < 1.5
        reading = asyncio.create_task(made.read(wait_s=5))
        await until(lambda: made.router.reports._num_readers == 1, "somebody waits")
        made.report("prefill")
        made.report("decode")
        assert (await reading)["state"] == "complete"
        assert made.router.reports._num_readers == 0


@pytest.mark.parametrize("wait_s", ["-1", "5.1", "nan", "inf", "x", ""])
async def test_a_wait_that_is_no_wait(wait_s: str) -> None:
    async with world() as made:
        await ask(made.router)
        status, answer = await made.get(f"/receipts/{made.latest.id}?wait_s={wait_s}")
        assert (status, answer["error"]["param"]) == (400, "wait_s")


async def test_readers_are_limited_and_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_reports, "READERS_MAX", 1)
    async with world() as made:
        await ask(made.router)
        async with connected(made.router) as client:
            send_get(client, f"/receipts/{made.latest.id}?wait_s=5")
            await until(lambda: made.router.reports._num_readers == 1, "somebody waits")
            status, answer = await made.get(f"/receipts/{made.latest.id}?wait_s=5")
            assert (status, answer["error"]["code"]) == (503, "too_many_waiting")
            assert (await made.read(wait_s=None))["state"] == "waiting"
        await until(lambda: made.router.reports._num_readers == 0, "who left does not wait")


async def test_readers_do_not_hold_the_router_up() -> None:
    async with world(drain_timeout_s=5.0) as made:
        await ask(made.router)
        reading = asyncio.create_task(made.read(wait_s=5))
        await until(lambda: made.router.reports._num_readers == 1, "somebody waits")
        began_s = time.monotonic()
        await made.router.stop()
        assert (await reading)["state"] == "waiting"
        assert time.monotonic() - began_s < 1.5


# ---- which reports are waited for ------------------------------------------------------------------------------------


async def test_an_engine_alone() -> None:
    async with world() as made:
        await ask(made.router, n=1, echo=True)
        assert made.latest.path == "local"
        made.report("decode", device=1, l1=1, computed=1)
        tokens = await made.read()
        assert (tokens["prompt"], tokens["by_source"]) == (3, {"device": 1, "l1": 1, "computed": 1})
        assert (tokens["state"], tokens["prefill"]) == ("complete", None)


@settles_soon
async def test_several_requests_of_one_engine_add_up() -> None:
    async with world() as made:
        await ask(made.router, prompt=["a", "b"])
        assert made.latest.reason == "prompt_list"
        for number in (0, 1):
            made.servers[0].report(f"cmpl-{made.latest.id}-{number}-1a2b3c4d", 3, computed=3 - number, device=number)
        await until(lambda: made.count("token_reports_total", result="matched") == 2, "both reports are there")
        tokens = await made.read()
        assert (tokens["prompt"], tokens["by_source"]) == (6, {"device": 1, "l1": 0, "computed": 5})
        assert (tokens["state"], tokens["sum_ok"], tokens["decode"]["num_requests"]) == ("complete", True, 2)


async def test_no_report_is_waited_for_where_no_prompt_was_computed() -> None:
    async def refuses(_: Seen, wire: Wire) -> None:
        wire.whole(b'{"error":{}}', status=400)

    async with world(prefill=refuses) as made:
        assert (await ask(made.router)).status == 400
        tokens = await made.read()
        assert (tokens["state"], tokens["by_source"], tokens["prompt"]) == ("complete", {}, None)
        await ask(made.router, "/tokenize")
        assert (await made.read())["state"] == "complete"
        await until(lambda: made.latest.reported is not None, "the sweep has seen it")
        assert made.count("token_reports_missing_total", leg="decode") == 0


@settles_soon
async def test_a_prefill_without_a_decode() -> None:
    """The decode engine was never asked: the prefill engine's report is all there is."""

    async def garbage(_: Seen, wire: Wire) -> None:
        wire.whole(b"{")

    async with world(prefill=garbage) as made:
        assert (await ask(made.router)).status == 502
        made.report("prefill")
        tokens = await made.read()
        assert (tokens["by_source"], tokens["state"]) == ({"device": 0, "l1": 2, "computed": 1}, "complete")


@settles_soon
async def test_a_sum_that_is_wrong_is_shown_and_counted_once() -> None:
    async with world() as made:
        await ask(made.router)
        made.report("prefill", l1=2, computed=2)
        made.report("decode")
        tokens = await made.read()
        assert (tokens["sum_ok"], tokens["state"]) == (False, "complete")
        assert made.count("token_sums_wrong_total") == 1
        made.report("decode")
        await until(lambda: made.count("token_reports_total", result="late") == 1, "it comes twice")
        assert made.count("token_sums_wrong_total") == 1


async def test_reports_of_others_are_dropped() -> None:
    async with world() as made:
        await ask(made.router)
        made.servers[0].report(f"cmpl-{ID}-0-1a2b3c4d", 3, computed=3)
        made.servers[0].report(f"cmpl-free-{made.latest.id}-0-1a2b3c4d", 3, computed=3)
        made.servers[0].report("cmpl-x", 3, computed=3)
        await until(lambda: made.count("token_reports_total", result="not_ours") == 3, "all are read")
        assert made.latest.reported is None


async def test_without_a_cache_server_the_usage_is_shown() -> None:
    async with world(0) as made:
        before = len(asyncio.all_tasks())
        made.router.reports.start()
        assert len(asyncio.all_tasks()) == before
        await ask(made.router)
        made.latest.cached_tokens = 2
        assert await made.read() == {"prompt": 3, "by_source": {"device": 2, "computed": 1}, "reported_by": "usage"}
        assert (await made.get("/status"))[1]["cache_servers"] == []


@pytest.mark.parametrize("receipts_max", [0, 1])
async def test_receipts_that_are_gone(receipts_max: int) -> None:
    async with world(receipts_max=receipts_max) as made:
        await ask(made.router)
        first = made.router.receipts.latest(1)
        await asyncio.sleep(2 * token_reports.SWEEP_INTERVAL_S)
        await ask(made.router)
        for receipt in first:  # closed, out of the ring, and still in the sweep's hands
            assert made.router.receipts.get(receipt.id) is None
            made.report("prefill", receipt)
            made.report("decode", receipt)
            await until(lambda: made.count("prompt_tokens_total", source="l1") == 2, "they are counted")
        assert made.count("token_reports_total", result="not_ours") == 0


def test_the_sweep_holds_a_limited_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_reports, "OPEN_MAX", 3)
    ring = ReceiptRing(100)
    reports = token_reports.TokenReports([], 1.0, ring, RouterMetrics())
    made = [Receipt(f"{number:032x}", "/v1/completions", 1.5) for number in range(10)]
    for receipt in made:
        receipt.decode, receipt.reason = "d:1", "echo"
        ring.add(receipt)
    reports.sweep(0.0)
    assert list(reports._running) == [receipt.id for receipt in made[-3:]]
    reports._running.clear()
    for receipt in made:
        receipt.outcome, receipt.status = "completed", 200
        reports._running[receipt.id] = receipt
    reports.sweep(0.25)
    assert list(reports._ended) == [receipt.id for receipt in made[-3:]]
    assert [receipt.reported is not None for receipt in made] == [True] * 7 + [False] * 3
    reports.sweep(0.25 + token_reports.SETTLE_S)
    assert not reports._running
    assert not reports._ended
    assert reports._metrics.missing == {"decode": 10}


# ---- the servers -----------------------------------------------------------------------------------------------------


async def test_two_servers() -> None:
    async with world(2) as made:
        await ask(made.router)
        made.report("prefill", server=0)
        made.report("decode", server=1)
        assert (await made.read())["by_source"] == {"device": 0, "l1": 2, "computed": 1}
        status, answer = await made.get("/status")
        assert status == 200
        assert [server["url"] for server in answer["cache_servers"]] == [server.url for server in made.servers]
        assert [server["is_up"] for server in answer["cache_servers"]] == [True, True]


async def test_one_server_under_two_addresses_counts_once() -> None:
    def urls(servers: list[ScriptedCacheServer]) -> list[str]:
        url = servers[0].url
        return [url, url, url.replace("127.0.0.1", "localhost")]

    async with world(urls=urls) as made:
        assert len(made.router.reports.status()) == 2
        await until(lambda: made.servers[0].num_waiting == 2, "both wait")
        await ask(made.router)
        made.report("prefill")
        made.report("decode")
        await until(lambda: [made.status(each)["num_reports"] for each in (0, 1)] == [2, 2], "both read them")
        assert (await made.read())["sum_ok"] is True
        assert made.count("token_reports_total", result="matched") == 2
        same = [made.status(each)["same_as"] for each in (0, 1)]
        owner = made.status(same.index(None))["url"]
        assert set(same) == {None, owner}


async def test_a_restart_begins_a_new_life() -> None:
    async with world() as made:
        server = made.servers[0]
        await ask(made.router)
        made.report("prefill")
        await until(lambda: made.status()["num_reports"] == 1, "it is read")
        server.restart()
        made.report("decode")
        assert (await made.read())["state"] == "complete"
        status = made.status()
        assert (status["incarnation"], status["num_lives"], status["num_reports"]) == (server.incarnation, 2, 2)
        await until(lambda: server.polls[-1].get("incarnation") == server.incarnation, "it goes on in the new life")
        assert server.polls[-1]["since"] == "2"


async def test_lost_reports_are_counted_but_not_those_of_before() -> None:
    async with world() as made:
        server = made.servers[0]
        server.num_lost = 7
        await until(lambda: server.num_waiting == 1, "it waits")
        server.restart()
        await until(lambda: made.status()["num_lives"] == 2, "a new life")
        assert made.status()["num_lost"] == 7
    async with cache_server() as server:
        server.num_lost = 5
        async with engine(streams) as decode, routing([], [decode], cache_servers=[server.url]) as router:
            await until(lambda: router.reports.status()[0]["is_up"], "the first answer")
            assert router.reports.status()[0]["num_lost"] == 0


def garbage_page(**fields: object) -> bytes:
    return json.dumps({"incarnation": "another", "next": 1, "num_lost": 0, "events": []} | fields).encode()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"{"), "no answer of /reports"),
        ((200, b"[]"), "no answer of /reports"),
        ((200, garbage_page(next=0)), "no answer of /reports"),
        ((200, garbage_page(events=[1, 2, 3])), "is next"),
        ((500, b"out of order"), "500: out of order"),
        ((403, b'{"error":1}'), '403: {"error":1}'),
    ],
)
async def test_garbage_is_said_and_gone_past(answer: tuple[int, bytes], said: str) -> None:
    async with world() as made:
        server = made.servers[0]
        await until(lambda: made.status()["is_up"] and server.num_waiting == 1, "it is up, and waits")
        server.answers = [answer] * 2
        server.report("x", 1)
        await until(lambda: not made.status()["is_up"], "it is not taken to be up")
        assert said in made.status()["detail"]
        assert made.count("cache_server_up", server=server.url) == 0
        await until(lambda: made.status()["is_up"], "it is asked again")
        assert made.status()["detail"] is None
        assert made.count("cache_server_up", server=server.url) == 1
        await ask(made.router)
        made.report("prefill")
        made.report("decode")
        assert (await made.read())["state"] == "complete"


async def test_a_wrong_entry_does_not_hold_the_others_up() -> None:
    async with world() as made:
        await ask(made.router)
        made.report("prefill", l1=-1)
        made.report("prefill", sequence=900)
        made.report("prefill")
        made.report("decode")
        assert (await made.read())["by_source"] == {"device": 0, "l1": 2, "computed": 1}
        assert made.status()["num_invalid"] == 2
        assert made.count("token_reports_total", result="invalid") == 2


async def test_a_server_that_answers_at_once_is_not_asked_without_end() -> None:
    async with world() as made:
        server = made.servers[0]
        await until(lambda: server.num_waiting == 1, "it waits")
        server.answers = [(200, garbage_page(incarnation=server.incarnation))] * 1000
        server.wake()
        before = len(server.polls)
        await asyncio.sleep(0.5)
        assert 2 <= len(server.polls) - before <= 7


async def test_many_reports_are_read_in_few_polls() -> None:
    async with world() as made:
        server = made.servers[0]
        await until(lambda: server.num_waiting == 1, "it waits")
        before = len(server.polls)
        for number in range(300):
            server.report(f"x{number}", 1, computed=1)
            await asyncio.sleep(0.001)
        await until(lambda: made.status()["num_reports"] == 300, "all are read")
        assert len(server.polls) - before < 40


async def test_a_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follower, "ANSWER_TIMEOUT_S", 0.1)
    async with world() as made:
        server = made.servers[0]
        await until(lambda: server.num_waiting == 1, "it waits")
        server.is_hanging = True
        server.wake()
        monkeypatch.setattr(log_follower, "WAIT_S", 0.1)
        await until(lambda: not made.status()["is_up"], "it is found out")
        assert "no answer within" in made.status()["detail"]
        server.is_hanging = False
        await until(lambda: made.status()["is_up"], "it is back")


async def test_a_server_that_is_away_and_comes() -> None:
    server = ScriptedCacheServer()
    server.port = quiet_ports(1)
    async with (
        engine(prefills) as prefill,
        engine(streams) as decode,
        routing([prefill], [decode], cache_servers=[server.url]) as router,
    ):
        made = World(router, [server])
        await until(lambda: made.status()["detail"] != "not asked yet", "it was asked")
        assert made.status()["is_up"] is False
        assert "no connection" in made.status()["detail"]
        assert (await ask(router)).status == 200
        try:
            await server.listen()
            made.report("prefill")
            made.report("decode")
            await until(lambda: made.status()["is_up"], "it is found")
            await server.close()
            await until(lambda: not made.status()["is_up"], "it is gone")
            await server.listen()
            await until(lambda: made.status()["is_up"], "it is back")
            assert made.status()["num_reports"] == 2
            assert (await made.read())["state"] == "complete"
        finally:
            await server.close()


async def test_namespaces_are_handed_on_with_the_receipt_and_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    async with world() as made:
        monkeypatch.setattr(made.router.reports, "_on_namespace", lambda *seen: found.append(seen))
        await ask(made.router)
        made.report("prefill", computed=3, namespace="ab" * 32)
        made.report("decode", computed=3, namespace="")
        made.servers[0].report("cmpl-of-another-router", 3, computed=3, namespace="cd" * 32)
        made.report("decode", computed=3, namespace="ef" * 32)
        await until(lambda: len(found) == 2, "two of the four are ours and name one")
        url = made.servers[0].url
        assert found == [(made.latest, "prefill", url, b"\xab" * 32), (made.latest, "decode", url, b"\xef" * 32)]


async def test_the_real_admin_side_of_a_cache_server(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as server:
        admin = await start_admin(server, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{admin.port}"
        async with (
            engine(prefills) as prefill,
            engine(streams) as decode,
            routing([prefill], [decode], cache_servers=[url]) as router,
        ):
            made = World(router, [])
            await until(lambda: made.status()["is_up"], "it answers")
            assert made.status()["incarnation"] == server.incarnation
            await ask(router)
            receipt = made.latest
            for address, counts in ((None, (0, 2, 0, 1)), (receipt.decode, (0, 0, 2, 1))):
                request = engine_request_id(receipt.id, receipt.prefill, address, tagged=True)
                server.reports.add(wire.Report(f"cmpl-{request}-0-1a2b3c4d", "e", "life", 3, *counts, 0, "finished"))
            assert (await made.read())["by_source"] == {"device": 0, "l1": 2, "computed": 1}
        await admin.close()
