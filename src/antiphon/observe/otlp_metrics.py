"""A process's own metrics, as it shows them to Prometheus, in the form that OTLP takes.

Counters become sums that only grow, counted since the process began; gauges and untyped series gauges; histograms keep
their buckets. Names and labels are those of the page, without the ``_total`` of counters, which backends add again.
Values that are no numbers are left out. Imported where something is sent alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Final

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client.core import Metric as Family
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
_UNITS: Final = {"_seconds": "s", "_bytes": "By"}
_NOT_KNOWN: Any = None
"""The smallest and the largest value: OTLP can leave them out, and the exporter does."""


def metrics_of(page: str, sender: tuple[Resource, InstrumentationScope], began_ns: int, now_ns: int) -> MetricsData:
    """What ``page`` says, in Prometheus' text format.

    Args:
        sender: whose metrics these are.
        began_ns, now_ns: since when counters count, and when the page was made: nanoseconds since 1970.
    """
    times = (began_ns, now_ns)
    made = [metric for family in text_string_to_metric_families(page) if (metric := _metric(family, times)) is not None]
    resource, scope = sender
    return MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, made, "")], "")])


def _metric(family: Family, times: tuple[int, int]) -> Metric | None:
    data: Sum | Gauge | Histogram
    if family.name.endswith("_created"):
        return None  # when a counter began, which its points say themselves
    if family.type == "counter":
        data = Sum(_points(family.samples, times), _CUMULATIVE, is_monotonic=True)
    elif family.type == "histogram":
        data = Histogram(_histogram_points(family.samples, times), _CUMULATIVE)
    elif family.type in ("gauge", "unknown", "untyped"):
        data = Gauge(_points(family.samples, times))
    else:
        return None
    if not data.data_points:
        return None
    unit = next((unit for suffix, unit in _UNITS.items() if family.name.endswith(suffix)), "")
    return Metric(family.name, family.documentation, unit, data)


def _points(samples: Iterable[Sample], times: tuple[int, int]) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(dict(sample.labels), *times, _number(sample.value))
        for sample in samples
        if math.isfinite(sample.value)
    ]


def _number(value: float) -> int | float:
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def _histogram_points(samples: Iterable[Sample], times: tuple[int, int]) -> list[HistogramDataPoint]:
    """One point for each combination of labels. A bucket of the page counts what the smaller ones count, too."""
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, int]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        labels = tuple(sorted((name, value) for name, value in sample.labels.items() if name != "le"))
        if sample.name.endswith("_bucket"):
            buckets.setdefault(labels, []).append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            sums[labels] = sample.value
    points = []
    for labels, counted in buckets.items():
        counted.sort()
        if not math.isinf(counted[-1][0]):
            continue  # without the last bucket the number of all is not known
        counts = [count - before for (_, count), before in zip(counted, [0, *(c for _, c in counted)], strict=False)]
        bounds = [bound for bound, _ in counted[:-1]]
        total = sums.get(labels, 0.0)
        if min(counts) < 0 or not math.isfinite(total):
            continue
        num = counted[-1][1]
        point = HistogramDataPoint(dict(labels), *times, num, total, counts, bounds, _NOT_KNOWN, _NOT_KNOWN)
        points.append(point)
    return points
