"""The router's metrics: every name once, with what it counts.

What every request touches is tallied in plain numbers; the rest are the client library's own counters.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from antiphon.observe.receipt import Receipt
from antiphon.observe.tally import Durations, Tally

_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

_NOT_STEPS = 2
"""Pieces of a stream that no step of the engine precedes: the first one, and the last, which ends it."""

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"


class RouterMetrics:
    """One router's series."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.labels: dict[str, tuple[str, ...]] = {}
        """The labels of each series that has any, by its name without ``_total``."""
        self.requests = self._tally(
            "requests", "Requests that ended, by HTTP status.", "route", "path", "outcome", "status"
        )
        self.paths = self._tally("path", "Path choices (pd, local, cached) by reason.", "path", "reason")
        self.held_expected = self._tally(
            "held_tokens_expected",
            "Prompt tokens that the picked engine was expected to hold, by path, where it then told what it had: pd "
            "(the prefill engine, in its answer) or cached (the decode engine, in its token report).",
            "path",
        )
        self.held_found = self._tally(
            "held_tokens_found", "Tokens of held_tokens_expected that the engine had, or its cache server.", "path"
        )
        self.engine_requests = self._tally("engine_requests", "Requests sent to an engine.", "role", "engine")
        self._engine_errors = self._tally(
            "engine_errors", "Engine failures: connect, lost, timeout, garbage, status.", "role", "engine", "kind"
        )
        self._disconnects = self._counter(
            "client_disconnects", "Clients that left before their answer was complete, by stage.", "stage"
        )
        self.key_refusals = self._tally(
            "key_refusals", "Requests refused with 401: missing_api_key, invalid_api_key.", "code"
        )
        self.salt_refusals = self._tally(
            "tenant_salt_refused",
            "Requests refused since they would leave their tenant's KV: cache_salt_refused, invalid_cache_salt, "
            "route_not_isolated.",
            "tenant",
            "code",
        )
        self.handovers_after_disconnect = self._counter(
            "handovers_completed_after_disconnect",
            "Hand-overs completed for a client that had left, so that the prefill engine frees its blocks.",
        )
        self.truncations = self._counter(
            "stream_truncations", "Streams that ended with an error event because the engine did not finish them."
        )
        self.pair_warmups = self._counter(
            "pair_warmups", "Requests of the router's own that warm a pair of engines: warmed, failed.", "outcome"
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
        self.inter_token_seconds = self._seconds(
            "inter_token",
            "Mean time between the pieces of a stream that completed, from the first to the last; each stream counts "
            "once.",
            _STEP_SECONDS,
        )
        self.decode_seconds = self._seconds(
            "decode",
            "From a prefill's answer, or the request where there was none, to the end of the decode engine's answer: "
            "requests that completed.",
        )
        self.connect_seconds = self._seconds("connect", "Making a new connection to an engine.")
        self.request_seconds = self._seconds("request", "From a whole request to the end of its answer.")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        self.labels[f"antiphon_router_{name}"] = labels
        return Counter(f"antiphon_router_{name}_total", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"antiphon_router_{name}", text, labels, registry=self.registry)

    def _tally(self, name: str, text: str, *labels: str) -> Tally:
        self.labels[f"antiphon_router_{name}"] = labels
        return Tally(self.registry, f"antiphon_router_{name}_total", text, labels)

    def _seconds(self, name: str, text: str, bounds: Sequence[float] = _SECONDS) -> Durations:
        return Durations(self.registry, f"antiphon_router_{name}_seconds", text, bounds)

    def request_ended(self, receipt: Receipt, seconds: float, decode_s: float) -> None:
        """Count a request whose receipt is complete.

        Args:
            seconds: since the request was here.
            decode_s: since its prefill answered, or since it was here.
        """
        outcome = receipt.outcome or ""
        self.requests.count(receipt.route, receipt.path or "none", outcome, receipt.status or 0)
        self.request_seconds.observe(seconds)
        if outcome == "completed" and receipt.status == 200 and receipt.decode is not None:
            self.decode_seconds.observe(decode_s)
            first_ms, num_steps = receipt.first_token_ms, receipt.num_events - _NOT_STEPS
            if first_ms is not None and num_steps > 0:
                self.inter_token_seconds.observe((seconds - first_ms / 1000) / num_steps)

    def held(self, path: str, num_expected: int, num_found: int) -> None:
        """An engine has told how much it had of a prompt of which it was expected to hold ``num_expected`` tokens."""
        self.held_expected.add(num_expected, path)
        self.held_found.add(min(num_found, num_expected), path)

    def engine_error(self, role: str, engine: str, kind: str) -> None:
        """Count a failure of an engine."""
        self._engine_errors.count(role, engine, kind)

    def forget_engine(self, role: str, engine: str) -> None:
        """It was removed: its series end, so that engines that come and go do not add up."""
        self._engine_errors.forget(role, engine)
        self.engine_requests.forget(role, engine)

    def disconnected(self, stage: str) -> None:
        """Count a client that left."""
        self._disconnects.labels(stage).inc()

    def text(self) -> bytes:
        """All series in the Prometheus text format."""
        return generate_latest(self.registry)
