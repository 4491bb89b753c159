"""The router's metrics of its engines and of what routing decided, read from where these are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_ABANDONED = ("handover_abandoned", "handover_failed", "late_handle")
_RETRY = "retry_"
_RETRY_KINDS = ("prefill", "prefill_again", "handover", "decode", "denied")
_WAITING = frozenset(("received", "probing", "connecting_prefill", "backing_off", "connecting_decode"))
"""Stages in which no engine has the request."""


class EngineView(NamedTuple):
    """What is known of one engine."""

    role: str
    address: str
    state: str
    is_usable: bool
    num_active: int
    num_ejections: int


class FleetMetrics:
    """The series of one router.

    Args:
        registry: where they are read.
        counts: what requests' lives have decided, by the names of ``Fleet.counts``.
        engines: all engines; asked when the series are read.
    """

    def __init__(
        self, registry: CollectorRegistry, counts: Mapping[str, int], engines: Callable[[], Iterable[EngineView]]
    ) -> None:
        self._counts = counts
        self._engines = engines
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The series, for a registry."""
        engine = ["role", "engine"]
        up = GaugeMetricFamily(_name("engine_up"), "1 while an engine is taken to be usable.", labels=engine)
        state = GaugeMetricFamily(
            _name("engine_state"), "1 for the state that an engine is in.", labels=[*engine, "state"]
        )
        active = GaugeMetricFamily(_name("engine_active_requests"), "Requests in flight at an engine.", labels=engine)
        ejections = CounterMetricFamily(
            _name("engine_ejections"), "How often an engine went from ready to suspect or down.", labels=engine
        )
        for view in self._engines():
            labels = [view.role, view.address]
            up.add_metric(labels, view.is_usable)
            state.add_metric([*labels, view.state], 1)
            active.add_metric(labels, view.num_active)
            ejections.add_metric(labels, view.num_ejections)
        yield from (up, state, active, ejections)
        counts = self._counts
        retries = CounterMetricFamily(
            _name("retries"),
            "Requests tried again, by what: prefill (another engine), prefill_again (the only one), handover (a fresh "
            "prefill), decode; denied: the budget was spent.",
            labels=["kind"],
        )
        numbers = dict.fromkeys(_RETRY_KINDS, 0)
        numbers |= {name.removeprefix(_RETRY): number for name, number in counts.items() if name.startswith(_RETRY)}
        for kind, number in numbers.items():
            retries.add_metric([kind], number)
        yield retries
        yield _counter(
            "handovers_abandoned",
            "Prefills that answered and whose KV was not pulled: held until the prefill engine's lease ends.",
            sum(counts.get(name, 0) for name in _ABANDONED),
        )
        yield _counter(
            "handovers_completed_for_nobody",
            "Hand-overs completed by a request of one token, so that the prefill engine frees its blocks.",
            counts.get("handover_completed", 0),
        )
        yield _counter("late_events", "Events of attempts that were over.", counts.get("late_event", 0))


class StageMetrics:
    """Where the requests in progress are, and what did not become one.

    Args:
        registry: where the series are read.
        stages: the number of requests in each stage, those without one included; asked when the series are read.
        refused: requests that the HTTP edge refused, by status.
    """

    def __init__(
        self, registry: CollectorRegistry, stages: Callable[[], Mapping[str, int]], refused: Mapping[int, int]
    ) -> None:
        self._stages = stages
        self._refused = refused
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The series, for a registry."""
        by_stage = GaugeMetricFamily(_name("requests_in_stage"), "Requests in progress, by stage.", labels=["stage"])
        waiting = GaugeMetricFamily(
            _name("queue_depth"),
            "Requests that no engine has: they wait for a connection, for an engine to come back, for their tenant's "
            "turn, or as cold prompts for their admission. Engines queue what they are sent.",
        )
        stages = self._stages()
        for stage, number in stages.items():
            by_stage.add_metric([stage], number)
        waiting.add_metric([], sum(number for stage, number in stages.items() if stage in _WAITING))
        refused = CounterMetricFamily(
            _name("edge_refusals"),
            "Requests that were not read, by status: 400 malformed, 408 slow, 413 and 431 too large, 429 too many sent "
            "ahead, 503 no memory for it, or no room for its connection.",
            labels=["status"],
        )
        for status, number in self._refused.items():
            refused.add_metric([str(status)], number)
        yield from (by_stage, waiting, refused)


def _name(name: str) -> str:
    return f"antiphon_router_{name}"


def _counter(name: str, text: str, value: int) -> CounterMetricFamily:
    family = CounterMetricFamily(_name(name), text)
    family.add_metric([], value)
    return family
