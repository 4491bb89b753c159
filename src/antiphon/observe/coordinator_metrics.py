"""The coordinator's metrics: every name once, and the page that is made of them at each scrape."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

CONTENT_TYPE: Final = b"text/plain; version=0.0.4; charset=utf-8"
PREFIX: Final = "antiphon_coordinator_"

GAUGES: Final = {
    "members": "Cache servers that are members.",
    "chunks": "Different chunks that members hold.",
    "placements": "Pairs of member and chunk.",
    "left_out": "Chunks of members that the directory had no room for.",
    "connections": "Connections of cache servers.",
}
COUNTERS: Final = {
    "locates": "Questions of members for holders.",
    "located_keys": "Chunks that these questions named.",
    "found_keys": "Chunks of them that another member held.",
    "resyncs": "Times that a member had to list its chunks again.",
    "expired": "Members whose heartbeat stayed away.",
    "joins": "Members that joined.",
    "refused": "Connections and calls that were refused.",
    "spans_sent": "Spans that the collector took.",
    "spans_dropped": "Spans that it did not take.",
}


def metrics_page(values: dict[str, int]) -> bytes:
    """The page. ``values``: one for each name of ``GAUGES`` and ``COUNTERS``."""
    assert values.keys() == GAUGES.keys() | COUNTERS.keys(), values.keys()
    registry = CollectorRegistry()
    registry.register(_Once(values))
    return generate_latest(registry)


class _Once:
    def __init__(self, values: dict[str, int]) -> None:
        self._values = values

    def collect(self) -> list[GaugeMetricFamily | CounterMetricFamily]:
        """The families, for the registry."""
        families: list[GaugeMetricFamily | CounterMetricFamily] = [
            GaugeMetricFamily(PREFIX + name, text, value=self._values[name]) for name, text in GAUGES.items()
        ]
        families += [
            CounterMetricFamily(PREFIX + name, text, value=self._values[name]) for name, text in COUNTERS.items()
        ]
        return families
