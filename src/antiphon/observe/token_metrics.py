"""The router's metrics of token reports: every name once. Plain numbers, made into series when they are read.

A request's tokens are counted once, when its reports are all there or are waited for no more; what comes later changes
its receipt and not these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


class TokenMetrics:
    """The series of one router.

    Args:
        registry: where they are read.
        servers_up: whether each cache server that is followed answers, by its URL; asked when the series are read.
    """

    def __init__(self, registry: CollectorRegistry, servers_up: Callable[[], Mapping[str, bool]]) -> None:
        self._servers_up = servers_up
        self.by_source: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self.reports: Counter[str] = Counter()
        self.num_sums_wrong = 0
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The series, for a registry."""
        yield _counter(
            "prompt_tokens",
            "Prompt tokens by where the system had them from: device (an engine's own cache), l1 (a cache server), "
            "l2 (a tier behind it), peer (another cache server), computed, unknown (not reported).",
            "source",
            self.by_source,
        )
        yield _counter(
            "token_reports_missing",
            "Completed requests of which an engine's report did not come within 2 s of their end, by leg.",
            "leg",
            self.missing,
        )
        yield _counter(
            "token_reports",
            "Reports read from cache servers: matched, late (after 2 s), not_ours (no receipt has that id), invalid.",
            "result",
            self.reports,
        )
        wrong = CounterMetricFamily(
            "antiphon_router_token_sums_wrong", "Requests whose reports do not add up to the tokens of their prompt."
        )
        wrong.add_metric([], self.num_sums_wrong)
        yield wrong
        up = GaugeMetricFamily(
            "antiphon_router_cache_server_up", "1 while a cache server answers with its reports.", labels=["server"]
        )
        for url, is_up in self._servers_up().items():
            up.add_metric([url], is_up)
        yield up


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"antiphon_router_{name}", text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
