"""Decode engines are asked for their free KV beside their requests, and what they do not say is not known.

Out of scope: what admission makes of it (tests/routing/test_admission.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.engine.simulated.machine import EngineOptions, SimulatedEngine
from antiphon.engine.simulated.metrics import EngineMetrics
from antiphon.router.app import Router
from antiphon.router.free_kv import FreeKv, FreeKvOptions, free_tokens
from antiphon.routing.admission import ColdAdmission
from antiphon.routing.cold import AdmissionOptions
from tests.router.scripted import Seen, Wire, endpoints, engine, prefills, routing, take_down, take_for_ready, until

TOKEN_BYTES = 1000


def page(used: list[float], **labels: str) -> bytes:
    """What vLLM shows with so many data-parallel ranks, beside other series."""
    registry = CollectorRegistry()
    Gauge("vllm:num_requests_running", "Busy.", ["engine"], registry=registry).labels(engine="0").set(3)
    usage = Gauge("vllm:kv_cache_usage_perc", "Used.", ["model_name", "engine"], registry=registry)
    info = Gauge("vllm:cache_config_info", "Config.", [*labels, "engine"], registry=registry)
    for rank, share in enumerate(used):
        usage.labels(model_name='a "model"} 0.9', engine=str(rank)).set(share)
        info.labels(**labels, engine=str(rank)).set(1)
    return generate_latest(registry)


@pytest.mark.parametrize(
    ("used", "labels", "free"),
    [
        ([0.25], {"kv_cache_size_tokens": "4000", "num_gpu_blocks": "999", "block_size": "16"}, 3000),
        ([0.25], {"kv_cache_size_tokens": "None", "num_gpu_blocks": "100", "block_size": "16"}, 1200),
        ([0.0, 0.5], {"num_gpu_blocks": "200", "block_size": "16"}, 2400),
        ([0.0, 0.5], {"kv_cache_size_tokens": "1600"}, 2400),
        ([1.0], {"kv_cache_size_tokens": "1600"}, 0),
        ([0.5], {"num_gpu_blocks": "None", "block_size": "16"}, None),
        ([0.5], {"num_gpu_blocks": "100"}, None),
        ([0.5], {"kv_cache_size_tokens": "9" * 5000}, None),
        ([1.5], {"kv_cache_size_tokens": "1600"}, None),
        ([float("nan")], {"kv_cache_size_tokens": "1600"}, None),
        ([], {"kv_cache_size_tokens": "1600"}, None),
    ],
)
def test_what_a_page_says(used: list[float], labels: dict[str, str], free: int | None) -> None:
    assert free_tokens(page(used, **labels)) == free


@given(st.binary(), st.integers(0, 200))
def test_a_page_that_is_none_says_nothing(noise: bytes, cut: int) -> None:
    assert free_tokens(noise) is None
    whole = page([0.5], kv_cache_size_tokens="1600")
    assert free_tokens(whole[: len(whole) - cut] + noise) in (None, 800)


def test_the_simulated_engine_shows_what_vllm_shows() -> None:
    machine = SimulatedEngine(EngineOptions(SimulatedSpec(kv_blocks=100, block_size_tokens=16), "m", 8, "fail"))
    assert free_tokens(EngineMetrics().render(machine)) == 1600
    machine.kv.acquire(machine.kv.allocate(25))
    assert free_tokens(EngineMetrics().render(machine)) == 1200


def test_vllm_has_these_names() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    root = Path(spec.origin).parent
    loggers = (root / "v1/metrics/loggers.py").read_text()
    cache = (root / "config/cache.py").read_text()
    assert '"vllm:kv_cache_usage_perc"' in loggers
    assert '"vllm:cache_config_info"' in loggers
    assert "    kv_cache_size_tokens: int" in cache
    assert "    num_gpu_blocks: int" in cache


class Told(ColdAdmission):
    """Remembers what it is told."""

    def __init__(self) -> None:
        super().__init__(AdmissionOptions(kv_bytes_per_token=TOKEN_BYTES))
        self.free: dict[str, int | None] = {}

    def free_kv(self, endpoint: object, num_bytes: int | None) -> None:
        self.free[endpoint.address] = num_bytes  # type: ignore[attr-defined]


def asking(router: Router, told: Told, timeout_s: float = 5.0) -> FreeKv:
    options = FreeKvOptions(timeout_s=timeout_s, asked_max=2, page_max_bytes=10_000)
    return FreeKv(router.fleet, told, TOKEN_BYTES, [(b"authorization", b"Bearer worker")], options)


@pytest.mark.interpreted  # compiled classes take only what is theirs
async def test_a_round_asks_every_decode_engine_that_is_ready_and_no_other() -> None:
    async def says(seen: Seen, wire: Wire) -> None:
        wire.whole(page([0.5], kv_cache_size_tokens="1600"))

    async def fails(seen: Seen, wire: Wire) -> None:
        wire.whole(b"", status=500)

    async def hangs(seen: Seen, wire: Wire) -> None:
        await wire.until_closed()

    async def floods(seen: Seen, wire: Wire) -> None:
        wire.whole(page([0.5], kv_cache_size_tokens="1600") + b"x" * 10_000)

    async with (
        engine(prefills) as p,
        engine(says) as a,
        engine(fails) as b,
        engine(hangs) as c,
        engine(floods) as d,
        engine(says) as down,
        routing([p], [a, b, c, d, down]) as router,
    ):
        for endpoint in endpoints(router):
            if endpoint.address == down.address:
                take_down(router, endpoint)
            else:
                take_for_ready(router, endpoint)
        told = Told()
        free_kv = asking(router, told, timeout_s=0.3)
        await free_kv.ask_all()
        assert told.free == {a.address: 800 * TOKEN_BYTES, b.address: None, c.address: None, d.address: None}
        assert p.seen == down.seen == []
        assert [seen.path for seen in a.seen] == ["/metrics"]
        assert b"authorization: Bearer worker" in a.heads[-1]
        await free_kv.ask_all()
        assert len(a.seen) == 2
        await free_kv.stop()


@pytest.mark.interpreted  # compiled classes take only what is theirs
async def test_what_an_earlier_life_said_does_not_count() -> None:
    async def says(seen: Seen, wire: Wire) -> None:
        (endpoint,) = router.fleet.decode.endpoints
        endpoint.life += 1
        wire.whole(page([0.5], kv_cache_size_tokens="1600"))

    async with engine(prefills) as p, engine(says) as d, routing([p], [d]) as router:
        for endpoint in endpoints(router):
            take_for_ready(router, endpoint)
        told = Told()
        free_kv = asking(router, told)
        await free_kv.ask_all()
        assert len(d.seen) == 1
        assert told.free == {}
        await free_kv.stop()


@pytest.mark.interpreted  # compiled classes take only what is theirs
async def test_an_end_that_comes_with_a_bug_is_an_end() -> None:
    """A group of tasks raises what failed in it, and not the cancel that came meanwhile."""
    begun, gate = asyncio.Event(), asyncio.Event()

    class Failing(FreeKv):
        async def _ask(self, endpoint: object) -> None:
            begun.set()
            await gate.wait()
            raise RuntimeError("bug")

    async with engine(prefills) as p, engine(prefills) as d, routing([p], [d]) as router:
        for endpoint in endpoints(router):
            take_for_ready(router, endpoint)
        free_kv = Failing(router.fleet, Told(), TOKEN_BYTES, [], FreeKvOptions(asked_max=1))
        free_kv.start()
        await begun.wait()
        gate.set()
        await asyncio.sleep(0)
        async with asyncio.timeout(10):
            await free_kv.stop()
        assert free_kv._task is None or free_kv._task.done()


async def test_it_asks_only_where_admission_is_on() -> None:
    async def says(seen: Seen, wire: Wire) -> None:
        wire.whole(page([0.5], kv_cache_size_tokens="1600"))

    async with engine(prefills) as p, engine(says) as d:
        async with routing([p], [d]) as router:
            assert router.free_kv is None
        async with routing([p], [d], kv_bytes_per_token=TOKEN_BYTES) as router:
            assert router.cold is not None
            cold = router.cold

            def shown() -> list[int | None]:
                return [load.free_kv_bytes for load in cold.statistics(0.0).decodes]

            await until(lambda: shown() == [800 * TOKEN_BYTES], "the free KV is known")
        assert {seen.path for seen in d.seen} == {"/metrics"}
