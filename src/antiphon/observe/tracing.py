"""Spans and metrics of one process, on their way to an OTLP collector.

Spans are made after the fact: what is traced gets ids from :meth:`Tracing.begin` while it runs, and its span is given
to :meth:`Tracing.record` when it has ended. A thread of its own makes protocol buffers of it and sends them.

Always true:

- Nothing that is traced waits: what the collector does not take is kept up to ``SPANS_MAX`` spans; then it is dropped,
  and counted.
- A collector that is dead, hangs or never was costs its spans, one line in the log when it fails and one when it is
  back, and ``CLOSE_TIMEOUT_S`` at most at the end of the process.
- Nothing of OpenTelemetry is imported before :meth:`Tracing.start`.

What the spans are of is decided by who records them; how metrics are read, by ``otlp_metrics``.
"""

from __future__ import annotations

import logging
import random
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from antiphon.observe.trace_context import SpanContext, child_of

log = logging.getLogger("antiphon.tracing")

Value = str | bool | int | float
Attributes = Mapping[str, Value | None]
Kind = Literal["internal", "server", "client"]

SPANS_MAX: Final = 8_192
"""Spans that wait to be sent, some hundred bytes each: some seconds of a busy router."""
BATCH_SPANS: Final = 256
SEND_INTERVAL_S: Final = 1.0
SETTLE_S: Final = 1.0
"""A span that waits for what is told of it afterwards (where its tokens came from) is sent no earlier."""
RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 4.0
"""How long a collector that failed is left alone: one that is back is used within 5 s."""
CLOSE_TIMEOUT_S: Final = 2.0
SWITCH_INTERVAL_S: Final = 0.0005
"""How long the thread that sends may keep others from running; Python's own 5 ms would be seen by requests."""


@dataclass(frozen=True)
class TracingOptions:
    """What is sent where.

    Args:
        service: name of the process's kind, ``service.name``.
        instance: of this process, ``service.instance.id``.
        protocol: ``grpc`` or ``http``, which is protocol buffers over HTTP.
        traces_url, metrics_url: of the collector.
        metrics_interval_s: how often metrics are sent, in seconds; 0: never.
    """

    service: str
    instance: str
    protocol: Literal["grpc", "http"]
    traces_url: str
    metrics_url: str
    metrics_interval_s: float = 15.0


def options_of(
    service: str, instance: str, urls: tuple[Literal["grpc", "http"], str, str] | None, metrics_interval_s: float
) -> TracingOptions | None:
    """The options of a process.

    Args:
        urls: protocol, address for spans, address for metrics; None where nothing is sent.
    """
    return None if urls is None else TracingOptions(service, instance, *urls, metrics_interval_s)


@dataclass(slots=True)
class Span:
    """One span that has ended.

    Args:
        name: of what it is; few different ones.
        context: its own.
        parent: that of what it is a part of.
        start_s, end_s: seconds since 1970.
        attributes: or what makes them, on the thread that sends, when they are wanted; None values are left out.
        error: what went wrong; None where nothing did.
        settles: it is sent ``SETTLE_S`` after its end at the earliest.
    """

    name: str
    context: SpanContext
    parent: SpanContext | None
    start_s: float
    end_s: float
    kind: Kind = "internal"
    attributes: Attributes | Callable[[], Attributes] = field(default_factory=dict)
    error: str | None = None
    settles: bool = False


class Target(Protocol):
    """What takes spans and metrics: :class:`~antiphon.observe.otlp.OtlpTarget`, or a test's."""

    def send_spans(self, spans: list[Span]) -> str | None:
        """Send them; why that failed, or None. It may take some seconds."""

    def send_metrics(self, page: bytes) -> str | None:
        """The same, for a page of Prometheus' text."""

    def close(self) -> None:
        """Break off what is being sent."""


class Tracing:
    """The spans and metrics of this process. Made by ``start``.

    Args:
        target: takes them.
        metrics_interval_s: 0: no metrics.
    """

    def __init__(self, target: Target, metrics_interval_s: float = 0.0) -> None:
        self._target = target
        self._chance = random.Random()
        self._waiting: deque[Span] = deque()
        self._settling: deque[Span] = deque()
        self._wake = threading.Event()
        self._is_closing = False
        self._failed = ""
        self._retry_s = RETRY_MIN_S
        self._retry_at_s = 0.0
        self._metrics_interval_s = metrics_interval_s
        self._metrics_at_s = time.monotonic() + min(metrics_interval_s, SEND_INTERVAL_S)
        self._page: Callable[[], bytes | None] | None = None
        self.counts: Counter[str] = Counter({"sent": 0, "dropped": 0})
        """Spans, by what became of them."""
        self._thread = threading.Thread(target=self._run, name="antiphon-tracing", daemon=True)

    @classmethod
    def start(cls, options: TracingOptions) -> Tracing:
        """Begins to send. Raises ConfigError where OpenTelemetry is not installed."""
        from antiphon.observe.otlp import OtlpTarget

        tracing = cls(OtlpTarget(options), options.metrics_interval_s)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        log.info("spans and metrics go to %s (%s)", options.traces_url, options.protocol)
        tracing.run()
        return tracing

    def run(self) -> None:
        """Start the thread."""
        self._thread.start()

    def measure(self, page: Callable[[], bytes | None]) -> None:
        """From now on the metrics of ``page`` are sent; it is called on the thread that sends, and may wait."""
        self._page = page

    # ---- for who is traced -------------------------------------------------------------------------------------------

    def begin(self, parent: SpanContext | None, *, is_sampled: bool = True) -> SpanContext:
        """Ids for what begins now: a part of ``parent``, or a new trace."""
        return child_of(parent, self._chance, is_sampled=is_sampled)

    def record(self, span: Span) -> None:
        """A span has ended. Of any thread; does not wait."""
        if not span.context.is_sampled:
            return
        if len(self._waiting) + len(self._settling) >= SPANS_MAX:
            self.counts["dropped"] += 1
            return
        (self._settling if span.settles else self._waiting).append(span)
        if len(self._waiting) >= BATCH_SPANS and not self._failed and not self._wake.is_set():
            self._wake.set()

    # ---- the thread --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Send what is left, within ``CLOSE_TIMEOUT_S``, and end."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(CLOSE_TIMEOUT_S / 2)
        if self._thread.is_alive():
            self._target.close()
            self._thread.join(CLOSE_TIMEOUT_S / 2)

    def _run(self) -> None:
        while True:
            self._wake.wait(SEND_INTERVAL_S)
            self._wake.clear()
            is_last = self._is_closing
            try:
                self._round(is_last=is_last)
            except Exception as error:  # supervised: a bug costs these spans, not the process that they tell of
                self._ended(f"internal error: {error!r}")
            if is_last:
                self._target.close()
                return

    def _round(self, *, is_last: bool) -> None:
        self._settle(time.time() - (0.0 if is_last else SETTLE_S))
        if is_last and self._failed:
            return
        if time.monotonic() < self._retry_at_s and not is_last:
            return
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH_SPANS, len(self._waiting)))]
            reason = self._target.send_spans(batch)
            self.counts["sent" if reason is None else "dropped"] += len(batch)
            self._ended(reason)
            if reason is not None:
                return
        now_s = time.monotonic()
        if self._page is not None and self._metrics_interval_s and (now_s >= self._metrics_at_s or is_last):
            self._metrics_at_s = now_s + self._metrics_interval_s
            page = None if is_last else self._page()
            if page is not None:
                self._ended(self._target.send_metrics(page))

    def _settle(self, until_s: float) -> None:
        settling = self._settling
        while settling and settling[0].end_s <= until_s:
            self._waiting.append(settling.popleft())

    def _ended(self, reason: str | None) -> None:
        """Something was sent, or was not, for this reason."""
        if reason is None:
            if self._failed:
                log.info("spans and metrics are taken again; %d spans were dropped so far", self.counts["dropped"])
            self._failed, self._retry_s, self._retry_at_s = "", RETRY_MIN_S, 0.0
            return
        if not self._failed:
            log.warning("spans and metrics are not taken and are dropped until they are: %s", reason)
        self._failed = reason
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)


# ---- the span of the thread that runs --------------------------------------------------------------------------------


@dataclass(slots=True)
class ActiveSpan:
    """A span that has not ended, for those that are called on the way and have something to say about it."""

    context: SpanContext
    attributes: dict[str, Value | None] = field(default_factory=dict)


_ACTIVE: ContextVar[ActiveSpan | None] = ContextVar("antiphon_span", default=None)


def active_span() -> ActiveSpan | None:
    """That of the thread or task that asks; None where nothing is traced."""
    return _ACTIVE.get()


def active_traceparent() -> str:
    """Its ``traceparent``, for a call to another process; empty where nothing is traced."""
    span = _ACTIVE.get()
    return "" if span is None else span.context.traceparent


@contextmanager
def activated(span: ActiveSpan) -> Iterator[None]:
    """Inside, ``span`` is the one that runs."""
    token = _ACTIVE.set(span)
    try:
        yield
    finally:
        _ACTIVE.reset(token)
