"""Sends spans and metrics to an OTLP collector with OpenTelemetry's exporters. Imported where something is sent alone.

Owns the two exporters, and their words of a failure: what they log themselves is not shown, since ``tracing``
says it once. Headers, certificates and the like are read from the exporters' own environment
(``OTEL_EXPORTER_OTLP_…``). Used by one thread.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

from antiphon import __version__
from antiphon.core.errors import ConfigError
from antiphon.core.quiet_log import QuietLog

try:
    from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext as OtelContext
    from opentelemetry.trace import SpanKind, Status, StatusCode, TraceFlags
except ImportError as error:
    raise ConfigError(
        f"traces need OpenTelemetry: {error}",
        field="enable_tracing",
        remedy="install opentelemetry-sdk and opentelemetry-exporter-otlp, or leave --enable-tracing out",
    ) from error

from antiphon.observe.otlp_metrics import metrics_of
from antiphon.observe.trace_context import SpanContext
from antiphon.observe.tracing import Span, TracingOptions

log = logging.getLogger("antiphon.tracing")

SEND_TIMEOUT_S: Final = 2.0
_EXPORTER_LOGS: Final = "opentelemetry.exporter"
_KINDS: Final = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_SAMPLED: Final = TraceFlags(TraceFlags.SAMPLED)
_NS: Final = 1e9


class _FirstWords(logging.Handler):
    """Keeps what an exporter said first of a failure: that names the cause."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = self.text or record.getMessage()[:500]


class OtlpTarget:
    """The collector.

    Args:
        options: where it is, and who sends.
    """

    def __init__(self, options: TracingOptions) -> None:
        self._words = _FirstWords()
        self._quiet = QuietLog(log)
        quiet = logging.getLogger(_EXPORTER_LOGS)
        quiet.handlers, quiet.propagate = [self._words], False
        self._resource = Resource(
            {"service.name": options.service, "service.instance.id": options.instance, "service.version": __version__}
        )
        self._scope = InstrumentationScope("antiphon", __version__)
        self._began_ns = time.time_ns()
        self._spans, self._metrics = _exporters(options)

    def send_spans(self, spans: list[Span]) -> str | None:
        """Send them; why that failed, or None. What cannot be made is said in the log and taken out of the list."""
        made: list[ReadableSpan] = []
        good: list[Span] = []
        for span in spans:
            try:
                made.append(self._made(span))
            except Exception as error:  # supervised: a bug costs its span, and not those that are sent with it
                self._quiet.error("span", f"a span {span.name!r} cannot be made", error)
            else:
                good.append(span)
        spans[:] = good
        if not made:
            return None
        return self._reason(self._spans.export(made) is SpanExportResult.SUCCESS)

    def send_metrics(self, page: bytes) -> str | None:
        """Send what a page of Prometheus' text says; why that failed, or None."""
        made = metrics_of(page.decode(), (self._resource, self._scope), self._began_ns, time.time_ns())
        result = self._metrics.export(made, timeout_millis=SEND_TIMEOUT_S * 1000)
        return self._reason(result is MetricExportResult.SUCCESS)

    def close(self) -> None:
        """Break off what is being sent."""
        self._spans.shutdown()
        self._metrics.shutdown()

    def _reason(self, is_sent: bool) -> str | None:
        words, self._words.text = self._words.text, ""
        return None if is_sent else words or f"no answer within {SEND_TIMEOUT_S:g} s"

    def _made(self, span: Span) -> ReadableSpan:
        told = span.attributes() if callable(span.attributes) else span.attributes
        attributes = {name: value for name, value in told.items() if value is not None}
        return ReadableSpan(
            name=_text(span.name),
            context=_context(span.context, is_remote=False),
            parent=None if span.parent is None else _context(span.parent, is_remote=span.kind == "server"),
            resource=self._resource,
            attributes=attributes,
            kind=_KINDS[span.kind],
            instrumentation_scope=self._scope,
            status=Status() if span.error is None else Status(StatusCode.ERROR, _text(span.error)),
            start_time=round(span.start_s * _NS),
            end_time=round(max(span.start_s, span.end_s) * _NS),
        )


def _text(text: str) -> str:
    """As protocol buffers take it: bytes that are no text may have come into it from a file's name."""
    return text.encode("utf-8", "replace").decode()


def _context(context: SpanContext, *, is_remote: bool) -> OtelContext:
    return OtelContext(context.trace_id, context.span_id, is_remote, _SAMPLED)


def _exporters(options: TracingOptions) -> tuple[SpanExporter, MetricExporter]:
    spans: Any
    metrics: Any
    if options.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter as GrpcMetrics
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpans

        spans, metrics = GrpcSpans, GrpcMetrics
    else:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter as HttpMetrics
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpans

        spans, metrics = HttpSpans, HttpMetrics
    return (
        spans(endpoint=options.traces_url, timeout=SEND_TIMEOUT_S),
        metrics(endpoint=options.metrics_url, timeout=SEND_TIMEOUT_S),
    )
