"""What the router's series say of real requests; what each is, is in docs/metrics.md, which is made from them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.router.app import Router
from antiphon.router.reference import reference
from antiphon.routing.states import OUTCOMES, Stage
from tests.router.scripted import (
    DONE,
    EVENT,
    PREFILLED,
    Seen,
    Wire,
    ask,
    connected,
    counted,
    engine,
    prefills,
    routing,
    streams,
    until,
)

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
PAUSE_S = 0.02


async def pauses(_seen: Seen, wire: Wire) -> None:
    """A decode engine that takes a while for each of five events, and ends at once after the last."""
    wire.begin()
    for _ in range(5):
        await asyncio.sleep(PAUSE_S)
        wire.piece(EVENT)
    wire.piece(DONE)
    wire.end()


async def answers(_seen: Seen, wire: Wire) -> None:
    wire.whole(b'{"choices":[{"text":"x"}]}')


def by_stage(router: Router) -> dict[str, float]:
    return {
        stage.value: counted(router, "requests_in_stage", stage=stage.value) for stage in Stage if stage not in OUTCOMES
    }


def test_the_page_is_in_step_with_the_series() -> None:
    assert PAGE.read_text() == reference(), "run: python -m antiphon.router.reference > docs/metrics.md"


async def test_every_series_of_a_router_is_on_the_page() -> None:
    rows = {line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `antiphon_router_")}
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        assert (await ask(router)).status == 200
        families = [*text_string_to_metric_families(router.metrics.text().decode())]
    names = {f"{family.name}_total" if family.type == "counter" else family.name for family in families}
    assert {name for name in names if not name.endswith("_created")} == rows


async def test_time_between_tokens_is_the_mean_of_a_stream() -> None:
    async with engine(prefills) as p, engine(pauses) as d, routing([p], [d]) as router:
        assert (await ask(router)).status == 200
        assert counted(router, "inter_token_seconds_count") == 1
        assert 0.8 * PAUSE_S <= counted(router, "inter_token_seconds_sum") <= 10 * PAUSE_S
        assert counted(router, "decode_seconds_count") == 1
        assert counted(router, "decode_seconds_sum") >= 5 * PAUSE_S * 0.8
        assert counted(router, "decode_seconds_sum") < counted(router, "request_seconds_sum")
        assert counted(router, "time_to_first_token_seconds_count") == 1
        assert counted(router, "connect_seconds_count") == 2  # the health checks have connections of their own
        assert (await ask(router)).status == 200
        assert counted(router, "connect_seconds_count") == 2


async def test_what_is_no_stream_or_does_not_complete_has_no_time_between_tokens() -> None:
    async def cuts(_seen: Seen, wire: Wire) -> None:
        wire.begin()
        for _ in range(4):
            wire.piece(EVENT)
            await asyncio.sleep(0)
        wire.cut()

    async with engine(prefills) as p, engine(answers) as d, routing([p], [d]) as router:
        assert (await ask(router, stream=False)).status == 200
        assert counted(router, "inter_token_seconds_count") == 0
        assert counted(router, "decode_seconds_count") == 1
    async with engine(prefills) as p, engine(cuts) as d, routing([p], [d]) as router:
        assert (await ask(router)).status in (200, 502)
        assert counted(router, "inter_token_seconds_count") == counted(router, "decode_seconds_count") == 0


async def test_where_requests_are_and_how_many_wait() -> None:
    go_on = asyncio.Event()

    async def prefills_late(_seen: Seen, wire: Wire) -> None:
        await go_on.wait()
        wire.whole(PREFILLED)

    async with engine(prefills_late) as p, engine(streams) as d, routing([p], [d]) as router:
        idle = by_stage(router)
        assert set(idle.values()) == {0}
        async with connected(router) as one, connected(router) as two:
            one.send()
            two.send()
            await until(lambda: len(p.seen) == 2, "both are prefilling")
            assert by_stage(router) == idle | {"prefilling": 2}
            assert counted(router, "queue_depth") == 0, "an engine has them"
            go_on.set()
            assert ((await one.reply()).status, (await two.reply()).status) == (200, 200)
        await until(lambda: by_stage(router) == idle, "nothing is in progress")


@pytest.mark.interpreted  # it replaces a method of a pool
async def test_a_request_that_no_engine_has_waits() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router, connected(router) as client:
        pool = router.engines.pool(router.fleet.prefill.endpoints[0])
        may_connect = asyncio.Event()
        acquire = pool.acquire

        async def acquire_late() -> object:
            await may_connect.wait()
            return await acquire()

        pool.acquire = acquire_late  # type: ignore[method-assign,assignment]
        client.send()
        await until(lambda: counted(router, "queue_depth") == 1, "it waits for a connection")
        may_connect.set()
        assert (await client.reply()).status == 200
        assert counted(router, "queue_depth") == 0


async def test_what_the_edge_refuses_is_counted() -> None:
    async with engine(streams) as d, routing([], [d], header_count_max=8) as router:
        for data, status in (
            (b"nonsense\r\n\r\n", 400),
            (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 9 + b"\r\n", 431),
        ):
            async with connected(router) as client:
                client.writer.write(data)
                assert (await client.reply()).status == status
                assert counted(router, "edge_refusals_total", status=str(status)) == 1
        assert counted(router, "requests_total") == 0


async def test_a_request_that_is_prefilled_again_chose_its_path_once() -> None:
    async def fails_once(seen: Seen, wire: Wire) -> None:
        if len(d.seen) + len(e.seen) == 1:
            wire.whole(b"{}", status=500)
        else:
            await answers(seen, wire)

    async with engine(prefills) as p, engine(fails_once) as d, engine(fails_once) as e, routing([p], [d, e]) as router:
        assert (await ask(router, stream=False)).status == 200
        assert len(p.seen) == 2
        assert counted(router, "path_total", path="pd", reason="default") == 1
