"""Spans and metrics of one process, on their way to an OTLP collector.

Spans are made after the fact: what is traced gets ids from :meth:`Tracing.begin` while it runs, and its span is given
to :meth:`Tracing.record` when it has ended. A thread of its own makes protocol buffers of it and sends them.

Always true:

- Nothing that is traced waits: what the collector does not take is kept up to ``SPANS_MAX`` spans; then it is dropped,
  and counted.
- A collector that is dead, hangs or never was costs what it does not take, one line in the log when it fails and one
  when it is back, and ``CLOSE_TIMEOUT_S`` at most at the end of the process.
- Spans and metrics do not depend on each other: one that takes either is sent that.
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
from urllib.parse import urlsplit

from antiphon.observe.trace_context import SpanContext, child_of

log = logging.getLogger("antiphon.tracing")

Value = str | bool | int | float
Attributes = Mapping[str, Value | None]
Kind = Literal["internal", "server", "client"]

SPANS_MAX: Final = 8_192
"""Spans that wait to be sent, some hundred bytes each: some seconds of a busy router."""
BATCH_SPANS: Final = 256
SEND_INTERVAL_S: Final = 1.0
"""How often what waits is sent; and for how long, before metrics get their turn."""
SETTLE_S: Final = 1.0
"""A span that waits for what is told of it afterwards (where its tokens came from) is sent no earlier."""
RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 4.0
"""How long a collector that failed is left alone: spans that it takes again are sent within 5 s."""
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
        """Send them; why that failed, or None. It may take some seconds. What cannot be sent at all is taken out of the
        list."""

    def send_metrics(self, page: bytes) -> str | None:
        """The same, for a page of Prometheus' text."""

    def close(self) -> None:
        """Break off what is being sent."""


class _Signal:
    """Whether the collector takes spans, or metrics: says so when that changes, and when to try again.

    Used on the thread that sends; others read ``reason``.

    Args:
        name: of what is sent.
    """

    def __init__(self, name: str) -> None:
        self.reason = ""
        """Why it takes none; empty while it takes them."""
        self.retry_s = RETRY_MIN_S
        self._name = name
        self._retry_at_s = 0.0

    def may_try(self) -> bool:
        """It is not left alone now."""
        return time.monotonic() >= self._retry_at_s

    def ended(self, reason: str | None, lost: str = "") -> None:
        """Something was sent, or was not, for this reason.

        Args:
            lost: what is said beside that it takes them again.
        """
        if reason is None:
            if self.reason:
                log.info("%s are taken again%s", self._name, lost)
            self.reason, self.retry_s, self._retry_at_s = "", RETRY_MIN_S, 0.0
            return
        if not self.reason:
            log.warning("%s are not taken and are dropped until they are: %s", self._name, reason)
        self.reason = reason
        self._retry_at_s = time.monotonic() + self.retry_s
        self.retry_s = min(2 * self.retry_s, RETRY_MAX_S)


def _bug(error: Exception) -> str:
    return f"internal error: {error!r}"


def _shown(url: str) -> str:
    """Scheme, host and port of an address: what else is in it may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


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
        self._settling: deque[tuple[float, Span]] = deque()
        """With when they were recorded, by ``time.monotonic``."""
        self._wake = threading.Event()
        self._is_closing = False
        self._spans = _Signal("spans")
        self._metrics = _Signal("metrics")
        self._metrics_interval_s = metrics_interval_s
        self._metrics_at_s = time.monotonic() + min(metrics_interval_s, SEND_INTERVAL_S)
        self._page: Callable[[], bytes | None] | None = None
        self.counts: Counter[str] = Counter({"sent": 0, "dropped": 0})
        """Spans, by what became of them. Written under the lock."""
        self._counting = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="antiphon-tracing", daemon=True)

    @classmethod
    def start(cls, options: TracingOptions) -> Tracing:
        """Begins to send. Raises ConfigError where OpenTelemetry is not installed."""
        from antiphon.observe.otlp import OtlpTarget

        tracing = cls(OtlpTarget(options), options.metrics_interval_s)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        log.info("spans and metrics go to %s (%s)", _shown(options.traces_url), options.protocol)
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
            self._count("dropped", 1)
            return
        if span.settles:
            self._settling.append((time.monotonic(), span))
        else:
            self._waiting.append(span)
        if len(self._waiting) >= BATCH_SPANS and not self._spans.reason and not self._wake.is_set():
            self._wake.set()

    def _count(self, outcome: str, num: int) -> None:
        with self._counting:
            self.counts[outcome] += num

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
            self._settle(time.monotonic() - (0.0 if is_last else SETTLE_S))
            self._send_spans(is_last=is_last)
            if is_last:
                self._target.close()
                return
            self._send_metrics()

    def _settle(self, until_s: float) -> None:
        settling = self._settling
        while settling and settling[0][0] <= until_s:
            self._waiting.append(settling.popleft()[1])

    def _send_spans(self, *, is_last: bool) -> None:
        """Send what waits, as far as the collector takes it; but for the last time for ``SEND_INTERVAL_S``."""
        if self._spans.reason if is_last else not self._spans.may_try():
            return
        until_s = time.monotonic() + SEND_INTERVAL_S
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(BATCH_SPANS, len(self._waiting)))]
            num = len(batch)
            try:
                reason = self._target.send_spans(batch)
            except Exception as error:  # supervised: a bug costs these spans, not the process that they tell of
                reason = _bug(error)
            num_sent = len(batch) if reason is None else 0
            self._count("sent", num_sent)
            self._count("dropped", num - num_sent)
            if num_sent or reason is not None:
                self._spans.ended(reason, f"; {self.counts['dropped']} were dropped so far")
            if reason is not None:
                return
            if not is_last and time.monotonic() >= until_s:
                if len(self._waiting) >= BATCH_SPANS:
                    self._wake.set()
                return

    def _send_metrics(self) -> None:
        now_s = time.monotonic()
        is_due = self._metrics_interval_s and now_s >= self._metrics_at_s and self._metrics.may_try()
        if self._page is None or not is_due or self._is_closing:
            return
        self._metrics_at_s = now_s + self._metrics_interval_s
        try:
            page = self._page()
            if page is None:
                return
            reason = self._target.send_metrics(page)
        except Exception as error:  # supervised: a bug costs these metrics, not the process that they tell of
            reason = _bug(error)
        self._metrics.ended(reason)


# ---- the span of the thread that runs --------------------------------------------------------------------------------


@dataclass(slots=True)
class ActiveSpan:
    """A span that has not ended, for those that are called on the way and have something to say about it.

    Args:
        has_parts: another process was given it as the parent of a span of its own, so that it must be sent.
    """

    context: SpanContext
    attributes: dict[str, Value | None] = field(default_factory=dict)
    has_parts: bool = False


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
