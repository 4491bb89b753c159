"""The router's metrics: every name once, with what it counts.

What every request touches is tallied in plain numbers; the rest are the client library's own counters.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from antiphon.observe.tally import Durations, Tally

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class RouterMetrics:
    """One router's series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._tally(
            "requests", "Requests that ended, by HTTP status.", "route", "path", "outcome", "status"
        )
        self.paths = self._tally("path", "Path choices (pd, local) by reason.", "path", "reason")
        self.engine_requests = self._tally("engine_requests", "Requests sent to an engine.", "role", "engine")
        self._engine_errors = self._counter(
            "engine_errors", "Engine failures: connect, lost, timeout, garbage, status.", "role", "engine", "kind"
        )
        self._disconnects = self._counter(
            "client_disconnects", "Clients that left before their answer was complete, by stage.", "stage"
        )
        self.handovers_after_disconnect = self._counter(
            "handovers_completed_after_disconnect",
            "Hand-overs completed for a client that had left, so that the prefill engine frees its blocks.",
        )
        self.truncations = self._counter(
            "stream_truncations", "Streams that ended with an error event because the engine did not finish them."
        )
        self.active = self._gauge("active_requests", "Requests in progress.")
        self.connections = self._gauge("client_connections", "Open client connections.")
        self.prefill_seconds = self._seconds("prefill", "From sending a request to a prefill engine to its answer.")
        self.handover_seconds = self._seconds(
            "handover", "From a prefill's answer to the first token from the decode engine (streams)."
        )
        self.time_to_first_token_seconds = self._seconds(
            "time_to_first_token", "From a whole request to the first piece of a streamed answer."
        )
        self.request_seconds = self._seconds("request", "From a whole request to the end of its answer.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"antiphon_router_{name}_total", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"antiphon_router_{name}", text, labels, registry=self.registry)

    def _tally(self, name: str, text: str, *labels: str) -> Tally:
        return Tally(self.registry, f"antiphon_router_{name}_total", text, labels)

    def _seconds(self, name: str, text: str) -> Durations:
        return Durations(self.registry, f"antiphon_router_{name}_seconds", text, _SECONDS)

    def engine_error(self, role: str, engine: str, kind: str) -> None:
        """Count a failure of an engine."""
        self._engine_errors.labels(role, engine, kind).inc()

    def disconnected(self, stage: str) -> None:
        """Count a client that left."""
        self._disconnects.labels(stage).inc()

    def text(self) -> bytes:
        """All series in the Prometheus text format."""
        return generate_latest(self.registry)
