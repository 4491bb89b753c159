"""What is read from an engine's metrics: pages that vLLM's logger wrote, and the simulated engine against itself."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.core.errors import ProtocolError
from antiphon.engine.simulated.machine import EngineOptions, SimulatedEngine
from antiphon.engine.simulated.metrics import EngineMetrics as SimulatedMetrics
from antiphon.engine.simulated.sequence import Effect, Produced, RemoteKv, Sequence
from antiphon.engine.vllm import parse_metrics
from antiphon.ray import autoscaling as names
from antiphon.ray.autoscaling import STATISTICS, load_of
from antiphon.ray.engine_stats import METRICS, WAITING_BY_REASON, StatsReader, engine_stats
from tests.ray.configs import DATA

VERSIONS = ("0.26", "0.32")


def page(version: str) -> str:
    """What vLLM's ``PrometheusStatLogger`` of that version shows after one step: 3 run, 5 wait for room and 2 for
    something else; first tokens after 0.5 and 1.5 s; one request ended, with 500 of 800 prompt tokens computed."""
    return (DATA / f"metrics_vllm_{version}.txt").read_text()


@pytest.mark.parametrize("version", VERSIONS)
def test_pages_of_vllm(version: str) -> None:
    assert engine_stats(parse_metrics(page(version))) == {
        names.RUNNING: 3,
        names.WAITING: 5,
        names.DEFERRED: 2,
        names.KV_USAGE: 0.25,
        names.FIRST_TOKENS: 2,
        names.FIRST_TOKEN_S: 2,
        names.PREFILLS: 1,
        names.PREFILL_S: 0.75,
        names.COMPUTED_TOKENS: 500,
    }


def test_the_installed_vllm_has_the_names() -> None:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("needs vLLM")
    source = (Path(spec.submodule_search_locations[0]) / "v1" / "metrics" / "loggers.py").read_text()
    for name in (*METRICS, WAITING_BY_REASON):
        base = name.removesuffix("_sum").removesuffix("_count")
        assert f'"{base}"' in source, f"vLLM has no metric {base}"


@pytest.mark.parametrize("missing", METRICS)
def test_a_missing_metric_is_an_error_and_no_idle_engine(missing: str) -> None:
    text = "\n".join(line for line in page("0.32").splitlines() if not line.startswith(missing + "{"))
    with pytest.raises(ProtocolError, match=missing):
        engine_stats(parse_metrics(text))


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1"])
def test_a_wrong_value_is_an_error(value: str) -> None:
    text = page("0.32").replace(
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25', f"vllm:kv_cache_usage_perc {value}"
    )
    with pytest.raises(ProtocolError, match="kv_cache_usage_perc"):
        engine_stats(parse_metrics(text))


def test_without_reasons_all_wait_for_room() -> None:
    text = "\n".join(line for line in page("0.26").splitlines() if WAITING_BY_REASON not in line)
    stats = engine_stats(parse_metrics(text))
    assert (stats[names.WAITING], stats[names.DEFERRED]) == (7, 0)


def test_ranks_are_added_up_but_for_their_share_of_kv() -> None:
    second = (
        page("0.32")
        .replace('engine="0"', 'engine="1"')
        .replace(
            'kv_cache_usage_perc{engine="1",model_name="m"} 0.25', 'kv_cache_usage_perc{engine="1",model_name="m"} 0.75'
        )
    )
    stats = engine_stats(parse_metrics(page("0.32") + second))
    assert (stats[names.RUNNING], stats[names.KV_USAGE]) == (6, 0.5)


async def test_an_engine_that_does_not_answer_has_no_statistics(
    free_port: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader = StatsReader(f"http://127.0.0.1:{free_port}")
    assert await reader.read() == {}
    assert await reader.read() == {}
    assert len([text for text in caplog.messages if "is unknown" in text]) == 1


# ---- the simulated engine says the truth -----------------------------------------------------------------------------


class World:
    """A simulated engine and its page, by a clock of whole seconds."""

    def __init__(self, **sizes: float) -> None:
        spec = SimulatedSpec(prefill_overhead_ms=0, prefill_tokens_per_s=1000, decode_token_ms=1000, **sizes)
        self.engine = SimulatedEngine(EngineOptions(spec, "m", max_num_seqs=4))
        self.metrics = SimulatedMetrics()
        self.reports: dict[str, list[tuple[float, float]]] = {name: [] for name in STATISTICS}

    def submit(self, at_s: float, sequence: Sequence) -> None:
        self.observe(self.engine.submit(sequence, round(at_s * 1e9)))

    def advance(self, at_s: float) -> dict[str, float]:
        self.observe(self.engine.advance(round(at_s * 1e9)))
        stats = engine_stats(parse_metrics(self.metrics.render(self.engine).decode()))
        for name, value in stats.items():
            self.reports[name].append((at_s, value))
        return stats

    def observe(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Produced):
                self.metrics.observe_token(effect)


def test_simulated_prefill() -> None:
    """Prompts of thousands of tokens, one prefill at a time, a thousand tokens a second; the last is cached in part."""
    world = World()
    for index, num_tokens in enumerate((1000, 3000, 2000)):
        prompt = [index * 10_000 + token for token in range(num_tokens)]
        world.submit(0, Sequence(str(index), prompt, 1, hands_over=True))
    stats = world.advance(0.5)
    assert (stats[names.RUNNING], stats[names.WAITING], stats[names.PREFILLS]) == (1, 2, 0)
    stats = world.advance(4.5)
    assert (stats[names.RUNNING], stats[names.WAITING], stats[names.PREFILLS]) == (1, 0, 2)
    assert stats[names.FIRST_TOKEN_S] == pytest.approx(1 + 4), "waiting included"
    assert stats[names.PREFILL_S] == pytest.approx(1 + 3), "waiting not included"
    assert stats[names.COMPUTED_TOKENS] == 4000
    again = [20_000 + token for token in range(2000)]
    world.advance(7)
    world.submit(7, Sequence("again", again, 1, hands_over=True))
    stats = world.advance(9)
    num_cached = 2000 - (stats[names.COMPUTED_TOKENS] - 6000)
    assert num_cached == world.engine.counters.num_prefix_hits > 1900
    load = load_of("prefill", world.reports, 30)
    assert load is not None
    assert load.num_first_tokens == 4
    assert load.waited_s == pytest.approx(1 + 4)


def test_simulated_decode() -> None:
    """Pulls that are under way are deferred, and sequences past max_num_seqs wait for room."""
    world = World(kv_blocks=100)
    remote = RemoteKv("e", "p", "127.0.0.1", 1, tuple(range(2)))
    pulling = Sequence("pulled", list(range(32)), 4, remote=remote)
    world.submit(0, pulling)
    for number in range(5):
        world.submit(0, Sequence(str(number), [number] * 32, 64))
    stats = world.advance(0.5)
    assert stats[names.DEFERRED] == world.engine.num_pulling == 1
    assert stats[names.RUNNING] == world.engine.num_running
    assert stats[names.WAITING] == world.engine.num_waiting - 1 > 0
    assert stats[names.KV_USAGE] == world.engine.kv.num_used / 100
