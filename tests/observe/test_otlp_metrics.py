"""A page of Prometheus' text in the form of OTLP: no number is lost, and none is made up."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import AggregationTemporality, Gauge, Histogram, Metric, Sum
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client import Gauge as PromGauge
from prometheus_client import Histogram as PromHistogram

from antiphon.observe.otlp_metrics import metrics_of
from antiphon.observe.reference import router_series
from antiphon.observe.router_metrics import RouterMetrics

SENDER = (Resource({"service.name": "s"}), InstrumentationScope("antiphon"))


def converted(page: bytes | str) -> dict[str, Metric]:
    text = page if isinstance(page, str) else page.decode()
    data = metrics_of(text, SENDER, 5, 9)
    assert encode_metrics(data).SerializeToString(), "it can be sent"
    (resource,) = data.resource_metrics
    (scope,) = resource.scope_metrics
    return {metric.name: metric for metric in scope.metrics}


labels = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)


@given(st.dictionaries(labels, st.floats(0, 1e15), min_size=1, max_size=5))
def test_a_counter_is_a_sum_that_only_grows(values: dict[str, float]) -> None:
    registry = CollectorRegistry()
    counter = Counter("c", "What it says.", ["who"], registry=registry)
    for who, value in values.items():
        counter.labels(who).inc(value)
    metric = converted(generate_latest(registry))["c"]
    assert isinstance(metric.data, Sum)
    assert metric.data.is_monotonic
    assert metric.data.aggregation_temporality is AggregationTemporality.CUMULATIVE
    assert metric.description == "What it says."
    found = {point.attributes["who"]: point.value for point in metric.data.data_points if point.attributes}
    assert found == values
    assert {(point.start_time_unix_nano, point.time_unix_nano) for point in metric.data.data_points} == {(5, 9)}


@given(st.floats())
def test_a_gauge_keeps_its_value_and_what_is_no_number_is_left_out(value: float) -> None:
    registry = CollectorRegistry()
    PromGauge("g_bytes", "x", registry=registry).set(value)
    found = converted(generate_latest(registry))
    if math.isfinite(value):
        data = found["g_bytes"].data
        assert isinstance(data, Gauge)
        assert data.data_points[0].value == value
        assert found["g_bytes"].unit == "By"
    else:
        assert found == {}


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 100)), max_size=40))
def test_a_histogram_keeps_its_buckets(observed: list[tuple[str, float]]) -> None:
    bounds = [0.1, 1.0, 10.0]
    registry = CollectorRegistry()
    histogram = PromHistogram("h_seconds", "x", ["who"], buckets=bounds, registry=registry)
    for who, value in observed:
        histogram.labels(who).observe(value)
    found = converted(generate_latest(registry))
    names = {who for who, _ in observed}
    assert bool(names) == ("h_seconds" in found)
    if not names:
        return
    data = found["h_seconds"].data
    assert isinstance(data, Histogram)
    assert found["h_seconds"].unit == "s"
    assert {point.attributes["who"] for point in data.data_points if point.attributes} == names
    for point in data.data_points:
        assert point.attributes is not None
        mine = [value for who, value in observed if who == point.attributes["who"]]
        edges = [*bounds, math.inf]
        expected = [
            sum(low < value <= high for value in mine) for low, high in zip([-1.0, *edges], edges, strict=False)
        ]
        assert list(point.bucket_counts) == expected
        assert list(point.explicit_bounds) == bounds
        assert point.count == len(mine)
        assert math.isclose(point.sum, sum(mine), abs_tol=1e-6)


def test_every_series_of_a_router_is_known() -> None:
    metrics = RouterMetrics()
    metrics.time_to_first_token_seconds.observe(0.25)
    metrics.paths.count("pd", "default")
    found = converted(metrics.text())
    assert {"antiphon_router_active_requests", "antiphon_router_time_to_first_token_seconds"} <= found.keys()
    known = {series.name.removesuffix("_total") for series in router_series()}
    assert found.keys() <= known


def test_a_histogram_without_its_last_bucket_is_left_out() -> None:
    assert converted('# TYPE h histogram\nh_bucket{le="1"} 3\nh_sum 2\nh_count 3\n') == {}
    assert converted('# TYPE h histogram\nh_bucket{le="1"} 3\nh_bucket{le="+Inf"} 2\nh_sum 2\nh_count 2\n') == {}
