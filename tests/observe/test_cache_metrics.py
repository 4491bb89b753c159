"""The cache server's metrics: names, completeness, text that a Prometheus parser reads, and the documented table."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.observe import cache_metrics as names
from antiphon.observe.cache_metrics import CALL_SECONDS_BOUNDS, METRICS, Durations, Metric, MetricsPage, metrics_table

DOCUMENT = Path(__file__).parents[2] / "docs" / "cache.md"
BEGIN, END = "<!-- metrics: begin -->", "<!-- metrics: end -->"
NUM_BUCKETS = len(CALL_SECONDS_BOUNDS) + 1


def filled(*, without: Metric | None = None) -> MetricsPage:
    """A page where every metric has one series, of value 1."""
    page = MetricsPage()
    for metric in METRICS:
        if metric is without:
            continue
        if metric.kind == "histogram":
            page.set_durations(metric, {"Lookup": Durations([1] * NUM_BUCKETS, 0.5)})
        else:
            page.set(metric, 1, *("x" for _ in metric.labels))
    return page


def test_a_parser_reads_every_metric_by_its_name() -> None:
    families = {family.name: family for family in text_string_to_metric_families(filled().text().decode())}
    assert families.keys() == {f"antiphon_cache_{metric.stem}" for metric in METRICS}
    for metric in METRICS:
        family = families[f"antiphon_cache_{metric.stem}"]
        assert (family.type, family.documentation) == (metric.kind, metric.text)
        if metric.kind != "histogram":
            assert [sample.name for sample in family.samples] == [metric.name]
            assert tuple(sorted(family.samples[0].labels)) == tuple(sorted(metric.labels))


def test_a_histogram_adds_up() -> None:
    page = filled(without=names.CALL_SECONDS)
    page.set_durations(names.CALL_SECONDS, {"Lookup": Durations(range(NUM_BUCKETS), 1.5)})
    lines = page.text().decode().splitlines()
    num = sum(range(NUM_BUCKETS))
    assert f'antiphon_cache_call_seconds_bucket{{call="Lookup",le="+Inf"}} {num:.1f}' in lines
    assert f'antiphon_cache_call_seconds_count{{call="Lookup"}} {num:.1f}' in lines
    assert 'antiphon_cache_call_seconds_sum{call="Lookup"} 1.5' in lines
    assert 'antiphon_cache_call_seconds_bucket{call="Lookup",le="0.0001"} 1.0' in lines


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.stem)
def test_a_metric_that_is_not_set_is_a_bug(metric: Metric) -> None:
    with pytest.raises(AssertionError, match=f"without a value: {metric.stem}$"):
        filled(without=metric).text()


def test_a_metric_set_twice_or_with_other_labels_is_a_bug() -> None:
    page = MetricsPage()
    page.set(names.OBJECTS, 1)
    with pytest.raises(AssertionError, match="set twice"):
        page.set(names.OBJECTS, 2)
    with pytest.raises(AssertionError, match="has the labels"):
        page.set(names.LEASES, 2)


def test_a_metric_without_series_is_still_there() -> None:
    page = filled(without=names.REFUSED_CALLS)
    page.set_all(names.REFUSED_CALLS, {})
    assert "# TYPE antiphon_cache_refused_calls_total counter" in page.text().decode().splitlines()


def test_labels_of_clients_are_escaped() -> None:
    page = filled(without=names.INFO)
    page.set(names.INFO, 1, 'a"b\n', "c", "d")
    found = [family for family in text_string_to_metric_families(page.text().decode()) if family.name.endswith("_info")]
    assert found[0].samples[0].labels["instance"] == 'a"b\n'


def test_document_shows_the_table_of_the_code() -> None:
    text = DOCUMENT.read_text()
    shown = text[text.index(BEGIN) + len(BEGIN) : text.index(END)]
    assert shown.strip() == metrics_table().strip(), (
        "replace what stands between the marks by the output of: "
        'python -c "from antiphon.observe.cache_metrics import metrics_table; print(metrics_table())"'
    )


def test_names_are_of_the_usual_form() -> None:
    for metric in METRICS:
        assert metric.name.startswith("antiphon_cache_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert not metric.stem.endswith("_total")
    assert len({metric.stem for metric in METRICS}) == len(METRICS)
