"""A new pair does its handshake with a request of the router's own before it serves a client."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from antiphon.router import warming
from antiphon.router.app import Router
from antiphon.routing.endpoint import Endpoint
from tests.router.scripted import (
    EVENT,
    PREFILLED,
    Seen,
    Wire,
    ask,
    counted,
    engine,
    routing,
    take_down,
    take_for_ready,
    until,
)
from tests.router.test_endpoints import send

MODELS = json.dumps({"data": [{"id": "base", "max_model_len": 4096}, {"id": "lora"}]}).encode()


@dataclass
class Model:
    """An engine's script: it names its model, and answers warm-ups and clients. ``fails`` makes warm-ups fail."""

    handle: bytes = PREFILLED
    models: bytes = MODELS
    fails: Callable[[Wire], Awaitable[None]] | None = None
    warm_ups: list[dict[str, object]] = field(default_factory=list)
    num_clients: int = 0
    num_at_once: int = 0
    most_at_once: int = 0

    async def __call__(self, seen: Seen, wire: Wire) -> None:
        if seen.path == "/v1/models":
            wire.whole(self.models)
            return
        body = json.loads(seen.body)
        if body["prompt"] == "x":
            self.num_clients += 1
            if body["stream"]:
                wire.begin()
                wire.piece(EVENT + b"data: [DONE]\n\n")
                wire.end()
            else:
                wire.whole(self.handle)
            return
        self.warm_ups.append(body)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            if self.fails is not None:
                await self.fails(wire)
            else:
                await asyncio.sleep(0)
                wire.whole(self.handle)
        finally:
            self.num_at_once -= 1


async def hangs(wire: Wire) -> None:
    await wire.until_closed()


async def fails(wire: Wire) -> None:
    wire.whole(b'{"error":{}}', status=500)


async def refuses(wire: Wire) -> None:
    wire.whole(b'{"error":{}}', status=400)


async def add(router: Router, role: str, url: str) -> Endpoint:
    status, answer = await send(router, "POST", body={"role": role, "url": url})
    assert status == 201
    row = answer["endpoint"]
    assert isinstance(row, dict)
    assert (row["state"], row["is_warming"]) == ("unknown", True)
    endpoint = router.fleet.pool("prefill" if role == "prefill" else "decode").find(url)
    assert endpoint is not None
    return endpoint


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_added_engine_is_warmed_with_every_partner_before_it_takes_requests(role: str) -> None:
    p, q, d, e = (Model() for _ in range(4))
    async with engine(p) as one, engine(q) as two, engine(d) as three, engine(e) as four:
        pools = ([one], [three, four]) if role == "prefill" else ([one, two], [three])
        new, script, partners = (two, q, (d, e)) if role == "prefill" else (four, e, (p, q))
        async with routing(*pools, warm_pairs=True) as router:
            script.fails = hangs
            endpoint = await add(router, role, new.url)
            await until(lambda: script.warm_ups, "it is being warmed")
            assert [(await ask(router)).status for _ in range(6)] == [200] * 6
            assert script.num_clients == 0, "it is not picked"
            assert not any("draining" in line for line in (await metrics_text(router)).splitlines() if line[-1] == "1")
            await send(router, "DELETE", body={"role": role, "url": new.url})
            script.fails = None
            script.warm_ups.clear()
            for partner in partners:
                partner.warm_ups.clear()
            endpoint = await add(router, role, new.url)
            await until(lambda: endpoint.state.value == "ready", "it is warm, and answers")
            assert [len(partner.warm_ups) for partner in partners] == [1, 1]
            assert len(script.warm_ups) == 2
            assert counted(router, "pair_warmups_total", outcome="warmed") == 2
            assert [(await ask(router)).status for _ in range(4)] == [200] * 4
            assert script.num_clients == 2


async def metrics_text(router: Router) -> str:
    return router.metrics.text().decode()


async def test_what_a_warm_up_sends() -> None:
    p, d, e = Model(), Model(), Model()
    async with engine(p) as one, engine(d) as two, engine(e) as three, routing([one], [two], warm_pairs=True) as router:
        endpoint = await add(router, "decode", three.url)
        await until(lambda: endpoint.state.value == "ready", "it is warm")
        (prefill,), (decode,) = p.warm_ups, e.warm_ups
        assert prefill.pop("kv_transfer_params")["do_remote_decode"] is True  # type: ignore[index]
        assert decode.pop("kv_transfer_params") == json.loads(PREFILLED)["kv_transfer_params"]
        assert prefill == decode
        prompt, salt = decode.pop("prompt"), decode.pop("cache_salt")
        assert isinstance(prompt, list)
        assert len(prompt) == 144
        assert str(salt).startswith("antiphon-warm-")
        wanted = {"model": "base", "max_tokens": 1, "min_tokens": 1, "stream": False, "temperature": 0}
        assert decode == wanted
        assert d.warm_ups == [], "only the new pair is warmed"
        assert router.receipts.latest(10) == []
        assert "antiphon_router_engine_requests_total{" not in await metrics_text(router)


async def test_prompt_fits_a_short_model() -> None:
    p, d, e = Model(), Model(), Model(models=json.dumps({"data": [{"id": "m", "max_model_len": 20}]}).encode())
    async with engine(p) as one, engine(d) as two, engine(e) as three, routing([one], [two], warm_pairs=True) as router:
        await add(router, "decode", three.url)
        await until(lambda: e.warm_ups, "it is warmed")
        assert isinstance(e.warm_ups[0]["prompt"], list)
        assert len(e.warm_ups[0]["prompt"]) == 10


@pytest.mark.parametrize(
    ("prefill", "decode", "num_tries"),
    [
        (Model(fails=fails), Model(), 2),
        (Model(fails=refuses), Model(), 1),
        (Model(handle=b'{"usage":{}}'), Model(), 1),
        (Model(handle=b"garbage"), Model(), 2),
        (Model(), Model(fails=fails), 2),
        (Model(), Model(fails=refuses), 1),
    ],
    ids=["prefill-500", "prefill-400", "no-handle", "garbage", "decode-500", "decode-400"],
)
async def test_failure_is_said_and_the_engine_takes_requests(
    prefill: Model, decode: Model, num_tries: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        engine(prefill) as p,
        engine(Model()) as d,
        engine(decode) as e,
        routing([p], [d], warm_pairs=True, health_interval_s=0.05) as router,
    ):
        endpoint = await add(router, "decode", e.url)
        await until(lambda: endpoint.state.value == "ready", "it takes requests all the same")
        assert counted(router, "pair_warmups_total", outcome="failed") == num_tries
        assert len(prefill.warm_ups) == num_tries
        assert f"warming prefill engine {p.address} with decode engine {e.address} failed" in caplog.text
        assert not router.fleet.pairs.is_warm(router.fleet.prefill.endpoints[0], endpoint)


async def test_deadline_opens_it_in_any_case(caplog: pytest.LogCaptureFixture) -> None:
    p, e = Model(fails=hangs), Model()
    async with engine(p) as one, engine(Model()) as two, engine(e) as three:
        knobs = {"warm_pairs": True, "warm_timeout_s": 0.3, "health_interval_s": 0.05}
        async with routing([one], [two], **knobs) as router:
            endpoint = await add(router, "decode", three.url)
            await until(lambda: endpoint.state.value == "ready", "it takes requests")
            assert f"decode engine {three.address} is not warm after 0.3 s" in caplog.text
            await until(lambda: one.num_left == 1, "the warm-up was cut")


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_full_partners_do_not_keep_it_from_requests(
    role: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They would, for as long as their queues are, exactly when an engine more is needed."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(warming, "PATIENCE_S", 0.05)
    gate = asyncio.Event()

    async def waits(wire: Wire) -> None:
        await gate.wait()
        wire.whole(PREFILLED)

    full = {"prefill": "decode", "decode": "prefill"}[role]
    models = {each: Model(fails=waits if each == full else None) for each in ("prefill", "decode")}
    async with (
        engine(models["prefill"]) as p,
        engine(models["decode"]) as d,
        engine(Model()) as new,
        routing([p], [d], warm_pairs=True, health_interval_s=0.05) as router,
    ):
        endpoint = await add(router, role, new.url)
        await until(lambda: endpoint.state.value == "ready", "it takes requests")
        (partner,) = router.fleet.pool(full).endpoints
        assert models[full].num_at_once == 1
        assert f"{role} engine {new.address} takes requests before its pairs are warm" in caplog.text
        gate.set()
        pair = (endpoint, partner) if role == "prefill" else (partner, endpoint)
        await until(lambda: router.fleet.pairs.is_warm(*pair), "its pair is warm")
        assert counted(router, "pair_warmups_total", outcome="failed") == 0


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_an_engine_that_does_not_do_its_own_part_is_held(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "PATIENCE_S", 0.01)
    looks = 0
    waits_for = warming.Warming._waits_for

    def look(self: warming.Warming, *args: Any) -> bool:
        nonlocal looks
        looks += 1
        return waits_for(self, *args)

    monkeypatch.setattr(warming.Warming, "_waits_for", look)
    async with (
        engine(Model()) as p,
        engine(Model()) as d,
        engine(Model(fails=hangs)) as new,
        routing([p], [d], warm_pairs=True) as router,
    ):
        endpoint = await add(router, role, new.url)
        await until(lambda: looks >= 5, "it was looked at, again and again")
        assert endpoint.is_held


async def test_engine_that_is_not_up_yet_is_waited_for() -> None:
    async with engine(Model()) as gone:
        pass
    async with engine(Model()) as p, engine(Model()) as d, routing([p], [d], warm_pairs=True) as router:
        endpoint = await add(router, "decode", gone.url)
        await until(lambda: endpoint in router.warming._lives, "its warming has begun")
        assert endpoint.is_held
        late = Model()
        tasks: list[asyncio.Task[None]] = []
        gone.script = late
        server = await asyncio.start_server(
            lambda reader, writer: tasks.append(asyncio.ensure_future(gone.serve(reader, writer))),
            "127.0.0.1",
            gone.port,
        )
        try:
            await until(lambda: endpoint.state.value == "ready", "it was warmed when it came up")
            assert len(late.warm_ups) == 1
        finally:
            server.close()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_engine_that_never_comes_up_is_opened_and_seen_to_be_down() -> None:
    async with engine(Model()) as gone:
        pass
    knobs = {"warm_pairs": True, "warm_timeout_s": 0.2, "health_interval_s": 0.05}
    async with engine(Model()) as p, engine(Model()) as d, routing([p], [d], **knobs) as router:
        endpoint = await add(router, "decode", gone.url)
        await until(lambda: endpoint.state.value == "down", "health checks have found it")
        assert [(await ask(router)).status for _ in range(4)] == [200] * 4


async def test_adding_it_again_does_not_open_it_early() -> None:
    e = Model(fails=hangs)
    async with (
        engine(Model()) as p,
        engine(Model()) as d,
        engine(e) as new,
        routing([p], [d], warm_pairs=True) as router,
    ):
        endpoint = await add(router, "decode", new.url)
        status, answer = await send(router, "POST", body={"role": "decode", "url": new.url})
        assert (status, answer["is_new"]) == (200, False)
        assert endpoint.is_held
        assert [(await ask(router)).status for _ in range(4)] == [200] * 4
        assert e.num_clients == 0


@pytest.mark.parametrize("action", ["drain", "remove"])
async def test_operator_ends_a_warming(action: str) -> None:
    e = Model(fails=hangs)
    async with (
        engine(Model()) as p,
        engine(Model()) as d,
        engine(e) as new,
        routing([p], [d], warm_pairs=True, warm_timeout_s=0.3) as router,
    ):
        endpoint = await add(router, "decode", new.url)
        await until(lambda: e.warm_ups, "it is being warmed")
        body = {"role": "decode", "url": new.url}
        method, path = ("POST", "/endpoints/drain") if action == "drain" else ("DELETE", "/endpoints")
        assert (await send(router, method, path, body))[0] == 200
        await until(lambda: not router.warming._workers, "the warming is over")
        assert endpoint.state.value == ("draining" if action == "drain" else "removed")
        assert not endpoint.is_held
        router.fleet.validate()


async def test_nothing_to_warm_with_opens_at_once() -> None:
    async with engine(Model()) as d, engine(Model()) as e, routing([], [d], warm_pairs=True) as router:
        endpoint = await add(router, "decode", e.url)
        await until(lambda: not endpoint.is_held, "it takes requests")
        assert (await ask(router)).status == 200


async def test_off_switch() -> None:
    e = Model()
    async with engine(Model()) as p, engine(Model()) as d, engine(e) as new, routing([p], [d]) as router:
        _, answer = await send(router, "POST", body={"role": "decode", "url": new.url})
        row = answer["endpoint"]
        assert isinstance(row, dict)
        assert (row["state"], row["is_warming"]) == ("unknown", False)
        assert [(await ask(router)).status for _ in range(4)] == [200] * 4
        assert (e.warm_ups, e.num_clients) == ([], 2)


async def test_warm_ups_at_once_are_few() -> None:
    p = Model()
    async with engine(p) as one, engine(Model()) as two, routing([one], [two], warm_pairs=True) as router:
        models = [Model() for _ in range(12)]
        stack = [engine(model) for model in models]
        made = [await each.__aenter__() for each in stack]
        try:
            added = [await add(router, "decode", each.url) for each in made]
            assert len(router.warming._workers) <= warming.ENDPOINTS_AT_ONCE
            await until(lambda: all(each.state.value == "ready" for each in added), "all are warm")
        finally:
            for each in stack:
                await each.__aexit__(None, None, None)
        assert len(p.warm_ups) == 12
        assert 1 <= p.most_at_once <= warming.ENDPOINTS_AT_ONCE
        assert not router.warming._workers
        assert not router.warming._waiting


async def test_engine_that_comes_back_is_warmed_beside_its_traffic() -> None:
    p, q, d = Model(), Model(), Model()
    async with (
        engine(p) as one,
        engine(q) as two,
        engine(d) as three,
        routing([one, two], [three], warm_pairs=True) as router,
    ):
        back = router.fleet.prefill.endpoints[0]
        assert (p.warm_ups, d.warm_ups) == ([], []), "known at the start"
        take_down(router, back)
        take_for_ready(router, back)
        await until(lambda: router.fleet.pairs.is_warm(back, router.fleet.decode.endpoints[0]), "it is warm")
        assert back.state.value == "ready"
        assert (len(p.warm_ups), len(q.warm_ups), len(d.warm_ups)) == (1, 0, 1)
        take_down(router, back)
        take_for_ready(router, back)
        await until(lambda: len(p.warm_ups) == 2, "once for each life")


async def test_engine_that_names_another_life_is_warmed_with_the_others() -> None:
    p, d, e = Model(), Model(), Model()
    async with (
        engine(p) as one,
        engine(d) as two,
        engine(e) as three,
        routing([one], [two, three], warm_pairs=True) as router,
    ):
        assert (await ask(router)).status == 200
        p.handle = PREFILLED.replace(b'"remote_engine_id": "e"', b'"remote_engine_id": "f"')
        assert (await ask(router)).status == 200
        await until(lambda: d.warm_ups, "the pair that this request did not use is warmed")
        prefill = router.fleet.prefill.endpoints[0]
        await until(
            lambda: all(router.fleet.pairs.is_warm(prefill, one) for one in router.fleet.decode.endpoints), "all"
        )
        assert len(p.warm_ups) <= 2


async def test_pairs_of_the_start_are_warmed_where_that_is_wanted() -> None:
    p, q, d, e = (Model() for _ in range(4))
    async with (
        engine(p) as one,
        engine(q) as two,
        engine(d) as three,
        engine(e) as four,
        routing([one, two], [three, four], warm_pairs=True, warm_pairs_at_start=True) as router,
    ):
        assert len(router.fleet.prefill.ready) == 2, "they take requests at once"
        pairs = [(x, y) for x in router.fleet.prefill.endpoints for y in router.fleet.decode.endpoints]
        await until(lambda: all(router.fleet.pairs.is_warm(*pair) for pair in pairs), "all four are warm")
        await until(lambda: not router.warming._workers, "it is over")
        assert [len(each.warm_ups) for each in (p, q, d, e)] == [2, 2, 2, 2]


async def test_router_stops_while_it_warms() -> None:
    p = Model(fails=hangs)
    async with engine(p) as one, engine(Model()) as two, engine(Model()) as three:
        async with routing([one], [two], warm_pairs=True) as router:
            await add(router, "decode", three.url)
            await until(lambda: p.warm_ups, "it is warming")
        assert not router.warming._workers
        assert one.num_left == 1
