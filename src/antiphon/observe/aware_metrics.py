"""The router's metrics of what it does beyond the form of a request: cold-transfer admission, tenants, and what is
where. Read from where these are kept, when they are asked for: nothing here is touched by a request.

A router without one of these has its series too, without values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_ADMITTED = "admitted_"
_REFUSED = "refused_"


class ColdView(NamedTuple):
    """Cold-transfer admission at a moment: bytes, seconds, and bytes a second.

    Args:
        num_waiting, waiting_bytes, oldest_wait_s: the queue before the prefill.
        num_held: requests that wait after their prefill has answered.
        num_cold: cold prompts on the prefill engines.
        committed_bytes, budget_bytes: of cold requests that are admitted and not pulled yet; None: no budget is known.
        counts: decisions ever, as ``routing.cold.AdmissionStatistics`` names them.
        in_flight_bytes: by ``host:port`` of decode engines.
        free_kv_bytes: the same, of those that have told.
        rates: by ``host:port`` of the prefill and the decode engine.
    """

    num_waiting: int
    waiting_bytes: int
    oldest_wait_s: float
    num_held: int
    num_cold: int
    committed_bytes: int
    budget_bytes: int | None
    counts: Mapping[str, int]
    in_flight_bytes: Mapping[str, int]
    free_kv_bytes: Mapping[str, int]
    rates: Mapping[tuple[str, str], float]


class TenantView(NamedTuple):
    """One tenant at a moment.

    Args:
        refused: by code.
        num_tokens: of its requests that have ended.
        waited_s: of its requests that were admitted.
    """

    name: str
    num_in_flight: int
    num_waiting: int
    num_admitted: int
    refused: Mapping[str, int]
    num_tokens: int
    waited_s: float


class WhereView(NamedTuple):
    """What is known of what is where, at a moment.

    Args:
        events: counts of KV events, as ``router.kv_events.KvEvents.statistics`` names them.
        blocks: by ``host:port`` of engines.
        tokenize: counts of questions, as ``router.tokenizing.Tokenizing.statistics`` names them.
        chunks: by URL of cache servers.
        picks: of kv_aware, by role and ``precise`` (by what engines said) or ``approximate`` (as prefix_aware).
    """

    events: Mapping[str, int]
    blocks: Mapping[str, int]
    tokenize: Mapping[str, int]
    chunks: Mapping[str, int]
    picks: Mapping[tuple[str, str], int]


class AwareMetrics:
    """The series of one router.

    Args:
        registry: where they are read.
        cold: None where nothing is admitted by bytes; asked when the series are read, as are the others.
        tenants: none where there are no tenants.
        where: None where nothing is looked up.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        cold: Callable[[], ColdView | None],
        tenants: Callable[[], Sequence[TenantView]],
        where: Callable[[], WhereView | None],
    ) -> None:
        self._cold = cold
        self._tenants = tenants
        self._where = where
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """The series, for a registry."""
        yield from _cold_series(self._cold())
        yield from _tenant_series(self._tenants())
        yield from _where_series(self._where())


def _cold_series(cold: ColdView | None) -> Iterator[Metric]:
    is_on = cold is not None
    yield _gauge("cold_admission_on", "1 where large cold prompts are admitted by bytes.", int(is_on))
    waiting = cold.num_waiting if cold else None
    yield _gauge("cold_waiting", "Cold requests that wait before their prefill.", waiting)
    text = "KV bytes that waiting cold requests have to have computed."
    yield _gauge("cold_waiting_bytes", text, cold.waiting_bytes if cold else None)
    text = "How long the cold request that came first has waited."
    yield _gauge("cold_oldest_wait_seconds", text, cold.oldest_wait_s if cold else None)
    text = "Requests that wait after their prefill has answered, for room at their decode engine."
    yield _gauge("cold_held", text, cold.num_held if cold else None)
    yield _gauge("cold_prefills", "Cold prompts on the prefill engines.", cold.num_cold if cold else None)
    text = "KV bytes of cold requests that are admitted and not pulled yet."
    yield _gauge("cold_committed_bytes", text, cold.committed_bytes if cold else None)
    text = "The most that cold_committed_bytes may be; none while the decode engines are not known."
    yield _gauge("cold_budget_bytes", text, cold.budget_bytes if cold else None)
    counts = cold.counts if cold else {}
    yield _counters(
        "cold_admitted",
        "Requests admitted to a prefill: warm, at_once, from_queue.",
        "reason",
        {name.removeprefix(_ADMITTED): number for name, number in counts.items() if name.startswith(_ADMITTED)},
    )
    yield _counters(
        "cold_refused",
        "Cold requests refused: cold_queue_full (429), cold_queue_timeout (503).",
        "code",
        {name.removeprefix(_REFUSED): number for name, number in counts.items() if name.startswith(_REFUSED)},
    )
    yield _counter(
        "cold_left",
        "Clients that left while their cold request waited.",
        counts.get("left_waiting", 0) if cold else None,
    )
    text = "Requests that had to wait after their prefill had answered."
    yield _counter("cold_holds", text, counts.get("held", 0) if cold else None)
    text = "Requests that waited so for a third of the lease, and went without room."
    yield _counter("cold_holds_overdue", text, counts.get("held_overdue", 0) if cold else None)
    in_flight = GaugeMetricFamily(
        _name("cold_in_flight_bytes"), "KV bytes on their way to a decode engine.", labels=["engine"]
    )
    for engine, number in (cold.in_flight_bytes if cold else {}).items():
        in_flight.add_metric([engine], number)
    free = GaugeMetricFamily(
        _name("cold_free_kv_bytes"), "Free KV memory of a decode engine, less what is on its way.", labels=["engine"]
    )
    for engine, number in (cold.free_kv_bytes if cold else {}).items():
        free.add_metric([engine], number)
    rates = GaugeMetricFamily(
        _name("transfer_bytes_per_second"), "Measured rate of a pair of engines.", labels=["prefill", "decode"]
    )
    for pair, rate in (cold.rates if cold else {}).items():
        rates.add_metric(list(pair), rate)
    yield from (in_flight, free, rates)


def _tenant_series(tenants: Sequence[TenantView]) -> Iterator[Metric]:
    label = ["tenant"]
    in_flight = GaugeMetricFamily(_name("tenant_in_flight"), "Requests of a tenant in flight.", labels=label)
    waiting = GaugeMetricFamily(
        _name("tenant_waiting"), "Requests of a tenant that wait for a limit or their turn.", labels=label
    )
    admitted = CounterMetricFamily(_name("tenant_admitted"), "Requests of a tenant admitted.", labels=label)
    refused = CounterMetricFamily(
        _name("tenant_refused"),
        "Requests of a tenant refused by a limit: tenant_rate_limited, tenant_token_rate_limited, "
        "tenant_concurrency_limited, overloaded.",
        labels=["tenant", "code"],
    )
    tokens = CounterMetricFamily(
        _name("tenant_admitted_tokens"),
        "Tokens of a tenant's requests that have ended, prompts and answers; estimated where no engine told.",
        labels=label,
    )
    waited = CounterMetricFamily(
        _name("tenant_wait_seconds"), "Seconds that requests of a tenant waited until they were admitted.", labels=label
    )
    for view in tenants:
        own = [view.name]
        in_flight.add_metric(own, view.num_in_flight)
        waiting.add_metric(own, view.num_waiting)
        admitted.add_metric(own, view.num_admitted)
        tokens.add_metric(own, view.num_tokens)
        waited.add_metric(own, view.waited_s)
        for code, number in view.refused.items():
            refused.add_metric([view.name, code], number)
    yield from (in_flight, waiting, admitted, refused, tokens, waited)


def _where_series(where: WhereView | None) -> Iterator[Metric]:
    events = where.events if where else {}

    def told(name: str) -> int | None:
        return events.get(name)

    yield _counter("kv_event_messages", "Messages with KV events that came.", told("messages"))
    text = "Times that messages of an engine were missing."
    yield _counter("kv_event_gaps", text, told("gaps"))
    text = "Times that an engine was seen to have restarted."
    yield _counter("kv_event_restarts", text, told("restarts"))
    yield _counter("kv_event_replays", "Replays: engines asked for the messages that were missing.", told("replays"))
    text = "Replays that did not bring all of it in time, and those not asked for since too many were under way."
    yield _counter("kv_event_replays_failed", text, told("replays_failed"))
    text = "Times that all that was known of an engine was dropped: it restarted, or what was missing did not come."
    yield _counter("kv_event_forgotten", text, told("forgotten"))
    yield _counters(
        "kv_event_messages_unused",
        "Messages that taught nothing: unreadable, strangers (of no engine of ours), dropped (came before).",
        "reason",
        {name: events[name] for name in ("unreadable", "strangers", "dropped") if name in events},
    )
    blocks = GaugeMetricFamily(_name("kv_blocks"), "KV blocks that an engine is known to hold.", labels=["engine"])
    for engine, number in (where.blocks if where else {}).items():
        blocks.add_metric([engine], number)
    yield blocks
    tokenize = where.tokenize if where else {}
    yield _counters(
        "tokenize",
        "Prompts whose tokens were wanted: hits (known), asked (of an engine), shared (asked already), not_asked (too "
        "long, too many at once, or the engine had failed).",
        "result",
        {name: tokenize[name] for name in ("hits", "asked", "shared", "not_asked") if name in tokenize},
    )
    yield _counter("tokenize_late", "Tokens that came when no request waited for them any more.", tokenize.get("late"))
    yield _counter("tokenize_failed", "Questions for tokens that an engine did not answer.", tokenize.get("failed"))
    chunks = GaugeMetricFamily(
        _name("cache_server_chunks"), "Chunks that a cache server is known to hold.", labels=["server"]
    )
    for url, number in (where.chunks if where else {}).items():
        chunks.add_metric([url], number)
    picks = CounterMetricFamily(
        _name("kv_aware_picks"),
        "Engines that kv_aware picked: precise, by what they say that they hold; approximate, by what they were sent.",
        labels=["role", "how"],
    )
    for labels, number in (where.picks if where else {}).items():
        picks.add_metric(list(labels), number)
    yield from (chunks, picks)


def _name(name: str) -> str:
    return f"antiphon_router_{name}"


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    family = GaugeMetricFamily(_name(name), text)
    if value is not None:
        family.add_metric([], value)
    return family


def _counter(name: str, text: str, value: int | None) -> CounterMetricFamily:
    family = CounterMetricFamily(_name(name), text)
    if value is not None:
        family.add_metric([], value)
    return family


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(_name(name), text, labels=[label])
    for value, number in values.items():
        family.add_metric([value], number)
    return family
