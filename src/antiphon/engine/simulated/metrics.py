"""The simulated engine's /metrics: vLLM's names, labels and units in Prometheus' text format.

Owns the histograms and the rendering; the counters belong to the engine. Written by hand, because a library would cost
more start-up time than the rest of the process. Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from antiphon.engine.simulated import sequence as records
from antiphon.engine.simulated.machine import SimulatedEngine

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_TOKEN_BUCKETS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_TRANSFER_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES_BUCKETS = tuple(float(2 ** (10 + step)) for step in range(1, 25, 2))


class Histogram:
    """Counts of observations at or below each bucket's border."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value


class EngineMetrics:
    """What happens to requests, observed from the engine's effects."""

    def __init__(self) -> None:
        self.first_token = Histogram(_FIRST_TOKEN_BUCKETS)
        self.per_token = Histogram(_PER_TOKEN_BUCKETS)
        self.whole = Histogram(_REQUEST_BUCKETS)
        self.queued = Histogram(_REQUEST_BUCKETS)
        self.prefill = Histogram(_REQUEST_BUCKETS)
        self.computed = Histogram(_TOKEN_BUCKETS)
        self.transfer_time = Histogram(_TRANSFER_BUCKETS)
        self.transfer_bytes = Histogram(_BYTES_BUCKETS)
        self.num_failed_notifications = 0

    def observe_token(self, event: records.Produced) -> None:
        """One token of a sequence."""
        sequence = event.sequence
        if event.position == 0:
            self.first_token.observe((event.at_ns - sequence.arrival_ns) / 1e9)
            self.queued.observe((sequence.started_ns - sequence.arrival_ns) / 1e9)
        if event.finish_reason is not None:
            self.whole.observe((event.at_ns - sequence.arrival_ns) / 1e9)
            self.prefill.observe((sequence.first_token_ns - sequence.started_ns) / 1e9)
            self.computed.observe(len(sequence.prompt) - sequence.num_cached_tokens - sequence.num_pulled_tokens)
            if event.position:
                self.per_token.observe((event.at_ns - sequence.first_token_ns) / 1e9 / event.position)

    def observe_release(self, event: records.NotifyRemote) -> None:
        """One notification to a prefill engine; without blocks nothing was pulled before it."""
        if event.num_bytes:
            self.transfer_time.observe(event.transfer_ns / 1e9)
            self.transfer_bytes.observe(event.num_bytes)

    def render(self, engine: SimulatedEngine) -> bytes:
        """The whole page."""
        labels = f'engine="0",model_name="{_escape(engine.options.model_name)}"'
        lines: list[str] = []
        for name, value in _gauges(engine):
            lines += _simple(name, "gauge", [(labels, value)])
        reasons = [("capacity", engine.num_waiting - engine.num_pulling), ("deferred", engine.num_pulling)]
        samples = [(f'{labels},reason="{reason}"', float(number)) for reason, number in reasons]
        lines += _simple("vllm:num_requests_waiting_by_reason", "gauge", samples)
        for name, value in self._counters(engine):
            lines += _simple(f"{name}_total", "counter", [(labels, value)])
        for name, label, values in _labelled_counters(engine):
            samples = [(f'{labels},{label}="{key}"', value) for key, value in values.items()]
            lines += _simple(f"{name}_total", "counter", samples)
        for name, histogram in self._histograms():
            lines += _histogram(name, labels, histogram)
        lines += _simple("vllm:cache_config_info", "gauge", [(_cache_labels(engine), 1)])
        return ("\n".join(lines) + "\n").encode()

    def _counters(self, engine: SimulatedEngine) -> list[tuple[str, float]]:
        counters = engine.counters
        return [
            ("vllm:prefix_cache_queries", counters.num_prefix_queries),
            ("vllm:prefix_cache_hits", counters.num_prefix_hits),
            ("vllm:external_prefix_cache_queries", counters.num_external_queries),
            ("vllm:external_prefix_cache_hits", counters.num_external_hits),
            ("vllm:num_preemptions", 0),
            ("vllm:prompt_tokens", counters.num_prompt_tokens),
            ("vllm:prompt_tokens_cached", counters.num_prefix_hits + counters.num_external_hits),
            ("vllm:generation_tokens", counters.num_generated_tokens),
            ("vllm:nixl_num_failed_transfers", counters.num_failed_transfers),
            ("vllm:nixl_num_failed_notifications", self.num_failed_notifications),
            ("vllm:nixl_num_kv_expired_reqs", counters.num_leases_expired),
            ("vllm:nixl_num_notifications_after_expiry", counters.num_late_notifications),
        ]

    def _histograms(self) -> list[tuple[str, Histogram]]:
        return [
            ("vllm:time_to_first_token_seconds", self.first_token),
            ("vllm:request_time_per_output_token_seconds", self.per_token),
            ("vllm:e2e_request_latency_seconds", self.whole),
            ("vllm:request_queue_time_seconds", self.queued),
            ("vllm:request_prefill_time_seconds", self.prefill),
            ("vllm:request_prefill_kv_computed_tokens", self.computed),
            ("vllm:nixl_xfer_time_seconds", self.transfer_time),
            ("vllm:nixl_bytes_transferred", self.transfer_bytes),
        ]


def _cache_labels(engine: SimulatedEngine) -> str:
    """Those of vLLM's ``cache_config_info`` that mean something here; it has no model's name."""
    spec = engine.options.spec
    values = {
        "block_size": spec.block_size_tokens,
        "cache_dtype": "auto",
        "enable_prefix_caching": True,
        "engine": 0,
        "kv_cache_size_tokens": spec.kv_blocks * spec.block_size_tokens,
        "num_gpu_blocks": spec.kv_blocks,
    }
    return ",".join(f'{name}="{value}"' for name, value in values.items())


def _gauges(engine: SimulatedEngine) -> list[tuple[str, float]]:
    return [
        ("vllm:num_requests_running", engine.num_running),
        ("vllm:num_requests_waiting", engine.num_waiting),
        ("vllm:kv_cache_usage_perc", engine.kv.num_used / engine.kv.num_blocks),
    ]


def _labelled_counters(engine: SimulatedEngine) -> list[tuple[str, str, dict[str, int]]]:
    counters = engine.counters
    sources = {
        "local_compute": counters.num_computed_tokens,
        "local_cache_hit": counters.num_prefix_hits,
        "external_kv_transfer": counters.num_external_hits,
    }
    cached = {"device": counters.num_prefix_hits, "p2p": counters.num_external_hits}
    return [
        ("vllm:request_success", "finished_reason", counters.finished),
        ("vllm:prompt_tokens_by_source", "source", sources),
        ("vllm:prompt_tokens_cached_by_source", "source", cached),
    ]


def _simple(name: str, kind: str, samples: Iterable[tuple[str, float]]) -> list[str]:
    family = name.removesuffix("_total")
    lines = [f"# HELP {name} {family} of the simulated engine.", f"# TYPE {name} {kind}"]
    return lines + [f"{name}{{{labels}}} {float(value)}" for labels, value in samples]


def _histogram(name: str, labels: str, histogram: Histogram) -> list[str]:
    lines = [f"# HELP {name} {name} of the simulated engine.", f"# TYPE {name} histogram"]
    count = 0
    for border, in_bucket in zip((*histogram.buckets, float("inf")), histogram.counts, strict=True):
        count += in_bucket
        shown = "+Inf" if border == float("inf") else str(border)
        lines.append(f'{name}_bucket{{{labels},le="{shown}"}} {float(count)}')
    return [*lines, f"{name}_count{{{labels}}} {float(count)}", f"{name}_sum{{{labels}}} {histogram.total}"]


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
