"""The cache server's metrics: every name once, with its kind, labels and what it says.

A page is filled at each scrape from what the server knows anyway, so that nothing is counted twice and a scrape that
nobody makes costs nothing. A page that lacks a metric, or has one of another name, is a bug and an assertion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"

PREFIX: Final = "antiphon_cache_"

CALL_SECONDS_BOUNDS: Final = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 1.0)
"""Upper bounds of the buckets of ``CALL_SECONDS``: a call takes some 20 us, one of 16384 keys a few milliseconds."""

Kind = Literal["gauge", "counter", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    Args:
        stem: its name without ``PREFIX`` and without the ``_total`` of a counter.
        text: what it says, for people.
    """

    stem: str
    kind: Kind
    text: str
    labels: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name that a query uses."""
        return f"{PREFIX}{self.stem}{'_total' if self.kind == 'counter' else ''}"


INFO = Metric("info", "gauge", "1; its labels say which server this is.", ("instance", "incarnation", "version"))
START_TIME_SECONDS = Metric("start_time_seconds", "gauge", "When the server started, seconds since 1970.")
OBJECTS = Metric("objects", "gauge", "Chunks that a lookup can report.")
CHUNKS = Metric("chunks", "gauge", "Chunks that hold bytes, by state.", ("state",))
USED_BYTES = Metric("used_bytes", "gauge", "Bytes of the arena that chunks hold, in every state.")
USABLE_BYTES = Metric("usable_bytes", "gauge", "Bytes of the arena that are populated.")
ARENA_BYTES = Metric("arena_bytes", "gauge", "Bytes of the whole arena.")
POPULATED_RATIO = Metric("populated_ratio", "gauge", "Populated share of the arena, 0 to 1.")
LARGEST_HOLE_BYTES = Metric("largest_hole_bytes", "gauge", "The largest chunk that fits without evicting another.")
LEASES = Metric("leases", "gauge", "Leases that have not ended, by state.", ("state",))
LEASED_BYTES = Metric("leased_bytes", "gauge", "Bytes that leases protect, a chunk once for each engine.")
RESERVED_BYTES = Metric("reserved_bytes", "gauge", "Bytes that are reserved and not committed.")
PINS = Metric("pins", "gauge", "Pins that have not ended.")
PINNED_BYTES = Metric("pinned_bytes", "gauge", "Bytes that pins keep, a chunk once.")
TENANT_QUOTA_BYTES = Metric(
    "tenant_quota_bytes", "gauge", "Bytes that a tenant with a quota of its own may occupy.", ("tenant",)
)
TENANT_USED_BYTES = Metric("tenant_used_bytes", "gauge", "Bytes that such a tenant occupies.", ("tenant",))
ENGINES = Metric("engines", "gauge", "Engines that are attached, or hold a lease.")
CONNECTIONS = Metric("connections", "gauge", "Connections of engines that are attached.")
LOOKUPS = Metric("lookups", "counter", "Lookups that were answered.")
LOOKUP_TOKENS = Metric("lookup_tokens", "counter", "Tokens that lookups asked for, whole chunks.")
HIT_TOKENS = Metric("hit_tokens", "counter", "Tokens that lookups found and leased.")
CAPPED_LOOKUPS = Metric("capped_lookups", "counter", "Lookups shortened because the engine's leases are at their cap.")
STORES = Metric("stores", "counter", "Chunks that stores asked about, by the verdict of Reserve.", ("verdict",))
STORED_CHUNKS = Metric("stored_chunks", "counter", "Chunks that became readable.")
STORED_BYTES = Metric("stored_bytes", "counter", "Bytes of the chunks that became readable.")
REMOVALS = Metric("removals", "counter", "Chunks that left the index, by reason.", ("reason",))
CALLS = Metric("calls", "counter", "Calls that were answered.", ("call",))
CALL_SECONDS = Metric("call_seconds", "histogram", "From a call that was read to its answer.", ("call",))
REFUSED_CALLS = Metric("refused_calls", "counter", "Calls that were refused, by error code.", ("code",))
REPORTED_TOKENS = Metric("reported_tokens", "counter", "Prompt tokens that engines reported, by source.", ("source",))
ALARMS = Metric("alarms", "counter", "Alarms: old leases and reservations, reports that do not add up.", ("kind",))
SPANS = Metric("spans", "counter", "Spans, by outcome: sent to the collector, or dropped.", ("outcome",))
PROBES = Metric("probes", "counter", "Self-probes of the health check, by result.", ("result",))

TIER_BREAKER = Metric("tier_breaker", "gauge", "1 for the state that the tier's breaker is in.", ("tier", "state"))
TIER_OPENED = Metric("tier_breaker_opened", "counter", "Times that the tier's breaker opened.", ("tier",))
TIER_CHUNKS = Metric("tier_chunks", "gauge", "Chunks that are known to be in the tier.", ("tier",))
TIER_HELD_BYTES = Metric("tier_held_bytes", "gauge", "Bytes in the tier, as far as this server knows.", ("tier",))
TIER_QUEUE_BYTES = Metric(
    "tier_queue_bytes", "gauge", "Bytes that wait to be published to the tier, or are being published.", ("tier",)
)
TIER_JOBS = Metric("tier_jobs", "gauge", "Calls to the tier that have not ended.", ("tier",))
TIER_FETCHES = Metric(
    "tier_fetches", "counter", "Chunks that the tier was asked for: hit, miss, corrupt.", ("tier", "result")
)
TIER_FETCHED_BYTES = Metric("tier_fetched_bytes", "counter", "Bytes read from the tier, checked.", ("tier",))
TIER_FETCH_SECONDS = Metric("tier_fetch_seconds", "counter", "Time in reads that brought a chunk.", ("tier",))
TIER_PUBLICATIONS = Metric(
    "tier_publications",
    "counter",
    "Chunks for the tier: published, refused (the queue was full), lost (evicted before), full (the tier was).",
    ("tier", "result"),
)
TIER_PUBLISHED_BYTES = Metric("tier_published_bytes", "counter", "Bytes published to the tier.", ("tier",))
TIER_PUBLISH_SECONDS = Metric("tier_publish_seconds", "counter", "Time in publications that ended well.", ("tier",))
TIER_FAILURES = Metric(
    "tier_failures", "counter", "Calls to the tier that failed, or had no answer in time.", ("tier", "kind")
)
PEER_MEMBER = Metric("peer_member", "gauge", "1 while this server is a member of a cluster; absent where it has none.")
PEER_EVENTS = Metric(
    "peer_events", "counter", "What happened between this server and its peers (docs/peers.md).", ("event",)
)

METRICS: Final[tuple[Metric, ...]] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
"""Every metric, in the order above."""

_Labels = tuple[str, ...]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Durations:
    """Calls by how long they took.

    Args:
        counts: one a bucket of ``CALL_SECONDS_BOUNDS``, and one for what took longer; not cumulative.
        sum_s: all of them together, in seconds.
    """

    counts: Sequence[int]
    sum_s: float


class MetricsPage:
    """One scrape: every metric is set once for each combination of its labels, then ``text`` is read."""

    def __init__(self) -> None:
        self._values: dict[Metric, dict[_Labels, float]] = {}
        self._durations: dict[Metric, dict[_Labels, Durations]] = {}

    def set(self, metric: Metric, value: float, *labels: str) -> None:
        """The value of a gauge or a counter."""
        assert metric.kind != "histogram", metric.stem
        self._add(self._values, metric, value, labels)

    def set_labeled(self, metric: Metric, values: dict[tuple[str, ...], float]) -> None:
        """The values of a metric by all its labels; with none, the metric is there without series."""
        self._values.setdefault(metric, {})
        for labels, value in values.items():
            self.set(metric, value, *labels)

    def set_all(self, metric: Metric, values: dict[str, float] | dict[str, int]) -> None:
        """The values of a metric with one label, by that label; with none, the metric is there without series."""
        self._values.setdefault(metric, {})
        for label, value in values.items():
            self.set(metric, value, label)

    def set_durations(self, metric: Metric, durations: dict[str, Durations]) -> None:
        """The values of a histogram with one label, by that label."""
        assert metric.kind == "histogram", metric.stem
        self._durations.setdefault(metric, {})
        for label, value in durations.items():
            assert len(value.counts) == len(CALL_SECONDS_BOUNDS) + 1, label
            self._add(self._durations, metric, value, (label,))

    @staticmethod
    def _add(page: dict[Metric, dict[_Labels, T]], metric: Metric, value: T, labels: _Labels) -> None:
        assert len(labels) == len(metric.labels), f"{metric.stem} has the labels {metric.labels}, not {labels}"
        series = page.setdefault(metric, {})
        assert labels not in series, f"{metric.stem}{labels} is set twice"
        series[labels] = value

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        """The families, for a registry."""
        for metric in METRICS:
            if metric.kind == "histogram":
                yield self._histogram(metric)
                continue
            kind = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = kind(PREFIX + metric.stem, metric.text, labels=metric.labels)
            for labels, value in sorted(self._values[metric].items()):
                family.add_metric(labels, value)
            yield family

    def _histogram(self, metric: Metric) -> HistogramMetricFamily:
        bounds = [*map(floatToGoString, CALL_SECONDS_BOUNDS), "+Inf"]
        family = HistogramMetricFamily(PREFIX + metric.stem, metric.text, labels=metric.labels)
        for labels, durations in sorted(self._durations[metric].items()):
            buckets = list(zip(bounds, accumulate(durations.counts), strict=True))
            family.add_metric(labels, buckets, durations.sum_s)
        return family

    def text(self) -> bytes:
        """The page in the Prometheus text format."""
        missing = [metric.stem for metric in METRICS if metric not in self._values and metric not in self._durations]
        assert not missing, f"metrics without a value: {', '.join(missing)}"
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry)


def metrics_table() -> str:
    """The table of the documentation."""
    rows = ["| metric | kind | labels | what it says |", "|---|---|---|---|"]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.text} |")
    return "\n".join(rows)
