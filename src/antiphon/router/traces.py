"""Spans of a router's requests: the request, its stages at engines, and the hand-over between them.

Owns which stage of a request is under way. It is told what happens (events) and what is done about it (commands), as
the request's life is and says; the spans are given away when the request has ended.

Always true: an engine gets the ``traceparent`` of the stage that it works for, so that what it and its cache server
record is a part of that; of a request that is not sampled it gets the client's own, or one that says so. A mistake here
costs the trace, and never the request.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from antiphon.core.quiet_log import QuietLog
from antiphon.observe.receipt import Receipt
from antiphon.observe.trace_context import SpanContext, parse_traceparent
from antiphon.observe.tracing import Kind, Span, Tracing, Value
from antiphon.routing.commands import (
    CancelUpstream,
    Command,
    CompleteHandover,
    ConnectDecode,
    ConnectPrefill,
    SendDecode,
)
from antiphon.routing.events import (
    ClientLeft,
    ConnectRefused,
    Deadline,
    DecodeRefused,
    Event,
    FirstByte,
    PrefillAnswered,
    Received,
    StreamEnded,
    UpstreamLost,
)

log = logging.getLogger("antiphon.router")

QUEUED_MIN_S: Final = 0.001
"""A request that begins sooner has not waited."""
SPANS_PER_REQUEST_MAX: Final = 64
"""Retries are bounded by a budget; this is for a request that has all of it."""

ShowReceipt = Callable[[Receipt], Mapping[str, object]]


@dataclass(slots=True)
class _Stage:
    """What is under way at an engine."""

    name: str
    engine: str
    attempt: int
    context: SpanContext
    began_s: float
    is_drain: bool = False


class RouterTraces:
    """The spans of one router.

    Args:
        tracing: takes them.
        sample_share: of the requests that bring no trace of their own.
        chance: 0 up to 1.
        show: a receipt as people see it, with its tokens by source.
    """

    def __init__(self, tracing: Tracing, sample_share: float, chance: Callable[[], float], show: ShowReceipt) -> None:
        self.tracing = tracing
        self.show = show
        self.quiet = QuietLog(log)
        self._sample_share = sample_share
        self._chance = chance

    def begin(self, receipt: Receipt, began_s: float) -> RequestTrace:
        """A request has come; its receipt has the trace that the client named, and gets one if it named none.

        Args:
            began_s: by the clock that events are told with.
        """
        parent = parse_traceparent(receipt.traceparent)
        if parent is not None:
            is_sampled = parent.is_sampled
        else:
            is_sampled = self._sample_share >= 1 or self._chance() < self._sample_share
        context = self.tracing.begin(parent, is_sampled=is_sampled)
        passed_on = receipt.traceparent if parent is not None and not is_sampled else context.traceparent
        if parent is None:
            receipt.traceparent = context.traceparent
        return RequestTrace(self, context, parent, time.time() - began_s, f"traceparent: {passed_on}\r\n")


class RequestTrace:
    """One request that is traced, or passes on that it is not.

    Args:
        traces: shared.
        context: of its span.
        parent: the client's.
        offset_s: what added to the router's clock gives seconds since 1970.
        line: the header field for engines while no stage has one of its own.
    """

    def __init__(
        self, traces: RouterTraces, context: SpanContext, parent: SpanContext | None, offset_s: float, line: str
    ) -> None:
        self.context = context
        self.line = line
        """The header field of what is sent to an engine now."""
        self.model = ""
        self._traces = traces
        self._parent = parent
        self._offset_s = offset_s
        self._is_on = context.is_sampled
        self._stage: _Stage | None = None
        self._spans: list[Span] = []
        self._handed_over: tuple[SpanContext, float] | None = None
        self._sent_s = 0.0
        self._num_stages: Counter[str] = Counter()
        self._last: Event | None = None

    def stepped(self, event: Event, commands: Iterable[Command], now_s: float, receipt: Receipt) -> None:
        """Something has happened, and this is going to be done about it."""
        if self._is_on:
            try:
                self._told(event, now_s, receipt)
                for command in commands:
                    self._commanded(command, now_s)
            except Exception as error:  # supervised: a bug costs the trace, and not the request that it tells of
                self._give_up(error)

    def close(self, receipt: Receipt, began_s: float, now_s: float) -> None:
        """The request has ended."""
        if self._is_on:
            try:
                self._close(receipt, began_s, now_s)
            except Exception as error:  # supervised: a bug costs the trace, and not the request that it tells of
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_on = False
        self._traces.quiet.error("trace", "a request's trace is given up after an internal error", error)

    # ---- what happens ------------------------------------------------------------------------------------------------

    def _told(self, event: Event, now_s: float, receipt: Receipt) -> None:
        stage = self._stage
        if stage is not None and getattr(event, "attempt", stage.attempt) != stage.attempt:
            return  # of an attempt that is over
        self._last = event
        match event:
            case Received():
                waited_s = now_s - (receipt.created_unix_s - self._offset_s)
                if waited_s >= QUEUED_MIN_S:
                    self._add("queue", self._begin(), now_s - waited_s, now_s)
            case PrefillAnswered():
                is_good = event.status == 200
                self._end_stage(now_s, None if is_good else f"status {event.status}")
                if is_good and event.handle is not None:
                    self._handed_over = (self._begin(), now_s)
            case FirstByte():
                self._end_handover(now_s, "first_token" if receipt.stream else "first_byte")
            case ConnectRefused():
                self._end_stage(now_s, receipt.error or "no connection")
            case DecodeRefused():
                self._end_stage(now_s, f"status {event.status}")
            case UpstreamLost():
                self._end_stage(now_s, receipt.error or "the engine's connection ended")
            case StreamEnded():
                self._end_handover(self._sent_s or now_s, "sent")  # of a whole answer, its beginning is not seen
                is_good = event.is_complete and not event.has_error
                self._end_stage(now_s, None if is_good else receipt.error or "the answer is not complete")

    def _commanded(self, command: Command, now_s: float) -> None:
        match command:
            case ConnectPrefill():
                self._begin_stage("prefill", command, now_s)
            case ConnectDecode():
                self._begin_stage("decode", command, now_s)
            case SendDecode():
                self._sent_s = now_s
            case CompleteHandover():
                self._sent_s = now_s
                if self._stage is not None:
                    self._stage.is_drain = True
            case CancelUpstream():
                reason = "cancelled"
                if isinstance(self._last, Deadline):
                    reason = "no answer in time"
                elif isinstance(self._last, ClientLeft):
                    reason = "the client left"
                self._end_stage(now_s, reason)

    # ---- parts -------------------------------------------------------------------------------------------------------

    def _begin(self) -> SpanContext:
        return self._traces.tracing.begin(self.context)

    def _begin_stage(self, name: str, command: ConnectPrefill | ConnectDecode, now_s: float) -> None:
        self._end_stage(now_s, "given up")
        context = self._begin()
        self._num_stages[name] += 1
        self._stage = _Stage(name, command.endpoint.address, command.attempt, context, now_s)
        self.line = f"traceparent: {context.traceparent}\r\n"

    def _end_stage(self, now_s: float, error: str | None) -> None:
        stage, self._stage = self._stage, None
        if stage is not None:
            num = self._num_stages[stage.name]
            told: dict[str, Value | None] = {"antiphon.engine": stage.engine, "antiphon.attempt": num}
            if stage.is_drain:
                told["antiphon.answer_wanted"] = False
            self._add(stage.name, stage.context, stage.began_s, now_s, ("client", told, error))

    def _end_handover(self, now_s: float, ends_at: str) -> None:
        handed_over, self._handed_over = self._handed_over, None
        if handed_over is not None:
            context, began_s = handed_over
            self._add("hand-over", context, began_s, now_s, ("internal", {"antiphon.ends_at": ends_at}, None))

    def _add(
        self,
        name: str,
        context: SpanContext,
        began_s: float,
        now_s: float,
        told: tuple[Kind, Mapping[str, Value | None], str | None] = ("internal", {}, None),
    ) -> None:
        if len(self._spans) < SPANS_PER_REQUEST_MAX:
            times = (self._offset_s + began_s, self._offset_s + now_s)
            kind, attributes, error = told
            self._spans.append(Span(name, context, self.context, *times, kind, attributes, error))

    def _close(self, receipt: Receipt, began_s: float, now_s: float) -> None:
        error = receipt.error if receipt.outcome != "completed" else None
        self._end_handover(now_s, "end")
        self._end_stage(now_s, error or receipt.outcome)
        record = self._traces.tracing.record
        for span in self._spans:
            record(span)
        times = (self._offset_s + began_s, self._offset_s + now_s)
        whole = Span(f"POST {receipt.route}", self.context, self._parent, *times, "server", settles=True)
        whole.error = (error or receipt.outcome) if receipt.outcome != "completed" else None
        whole.attributes = lambda: self._attributes(receipt)
        record(whole)
        self._spans = []

    def _attributes(self, receipt: Receipt) -> dict[str, Value | None]:
        """What is known of the whole request when its span is sent. On the thread that sends."""
        told: dict[str, Value | None] = {
            "http.request.method": "POST",
            "http.route": receipt.route,
            "http.response.status_code": receipt.status,
            "gen_ai.request.model": self.model or None,
            "gen_ai.usage.input_tokens": receipt.prompt_tokens,
            "antiphon.receipt": receipt.id,
            "antiphon.path": receipt.path or None,
            "antiphon.reason": receipt.reason or None,
            "antiphon.outcome": receipt.outcome,
            "antiphon.handoff": receipt.handoff,
            "antiphon.stream": receipt.stream,
            "antiphon.tenant": receipt.tenant,
            "antiphon.prefill": receipt.prefill,
            "antiphon.decode": receipt.decode,
            "antiphon.code": receipt.code,
            "antiphon.first_token_ms": receipt.first_token_ms,
        }
        tokens = self._traces.show(receipt).get("tokens")
        by_source = tokens.get("by_source") if isinstance(tokens, dict) else None
        for source, num in by_source.items() if isinstance(by_source, dict) else ():
            told[f"antiphon.tokens.{source}"] = num
        return told
