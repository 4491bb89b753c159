"""What became of a router's spans, as a series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily


class SpanMetrics:
    """The series of one router.

    Args:
        registry: shows it.
        counts: by outcome, at each scrape.
    """

    def __init__(self, registry: CollectorRegistry, counts: Callable[[], Mapping[str, int]]) -> None:
        self._counts = counts
        registry.register(self)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The series, for a registry."""
        text = "Spans, by outcome: sent to the collector; dropped, since it took none."
        family = CounterMetricFamily("antiphon_router_spans", text, labels=["outcome"])
        for outcome, count in self._counts().items():
            family.add_metric([outcome], count)
        yield family
