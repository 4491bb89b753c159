"""Every series of a router as plain values, for the page that is made of them (``docs/metrics.md``)."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from prometheus_client.core import Metric

from antiphon.observe.aware_metrics import AwareMetrics, ColdView, TenantView, WhereView
from antiphon.observe.fleet_metrics import EngineView, FleetMetrics, StageMetrics
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.observe.span_metrics import SpanMetrics
from antiphon.observe.token_metrics import TokenMetrics


class Series(NamedTuple):
    """One series, as Prometheus names it."""

    name: str
    kind: str
    labels: list[str]
    text: str


def router_series() -> list[Series]:
    """Every series of a router, by name."""
    metrics = RouterMetrics()
    view = EngineView("decode", "host:port", "ready", is_usable=True, num_active=0, num_ejections=0)
    FleetMetrics(metrics.registry, {}, lambda: [view])
    StageMetrics(metrics.registry, lambda: {"received": 0}, {400: 1})
    cold = ColdView(0, 0, 0.0, 0, 0, 0, 0, {"admitted_x": 0, "refused_x": 0}, {"d": 0}, {"d": 0}, {("p", "d"): 0.0})
    tenant = TenantView("t", 0, 0, 0, {"x": 0}, 0, 0.0)
    where = WhereView({"dropped": 0}, {"d": 0}, {"hits": 0}, {"url": 0}, {("decode", "precise"): 0})
    AwareMetrics(metrics.registry, lambda: cold, lambda: [tenant], lambda: where)
    SpanMetrics(metrics.registry, lambda: {"sent": 0})
    tokens = TokenMetrics(metrics.registry, lambda: {"url": True})
    for counter in (tokens.by_source, tokens.missing, tokens.reports):
        counter.update(Counter(example=1))
    rows = []
    for family in metrics.registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = metrics.labels.get(family.name) or _labels_of(family)
        rows.append(Series(name, family.type, list(labels), family.documentation))
    return sorted(rows)


def _labels_of(family: Metric) -> list[str]:
    return [] if family.type == "histogram" or not family.samples else list(family.samples[0].labels)
