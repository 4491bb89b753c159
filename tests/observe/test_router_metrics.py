"""The router's series: names, labels, and text that a Prometheus parser reads."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.observe.fleet_metrics import EngineView, FleetMetrics, StageMetrics
from antiphon.observe.receipt import Receipt
from antiphon.observe.router_metrics import RouterMetrics

NAMES = {
    "requests",
    "path",
    "engine_requests",
    "engine_errors",
    "client_disconnects",
    "handovers_completed_after_disconnect",
    "stream_truncations",
    "pair_warmups",
    "active_requests",
    "client_connections",
    "key_refusals",
    "tenant_salt_refused",
    "held_tokens_expected",
    "held_tokens_found",
    "connect_seconds",
    "prefill_seconds",
    "handover_seconds",
    "time_to_first_token_seconds",
    "decode_seconds",
    "inter_token_seconds",
    "request_seconds",
}


def samples(metrics: RouterMetrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return found


def test_every_series_has_a_name_of_ours_and_an_explanation() -> None:
    families = list(text_string_to_metric_families(RouterMetrics().text().decode()))
    names = {family.name for family in families if not family.name.endswith("_created")}
    assert names == {f"antiphon_router_{name}" for name in NAMES}
    assert all(family.documentation for family in families)


def test_counters_count_by_label() -> None:
    metrics = RouterMetrics()
    metrics.requests.count("/v1/completions", "pd", "completed", 200)
    metrics.requests.count("/v1/completions", "pd", "completed", 200)
    metrics.requests.count("/v1/completions", "pd", "failed", 502)
    metrics.engine_error("prefill", "h:1", "lost")
    metrics.disconnected("decoding")
    view = EngineView("decode", "h:2", "down", is_usable=False, num_active=3, num_ejections=2)
    FleetMetrics(metrics.registry, {"retry_prefill": 4, "handover_failed": 1, "late_handle": 1}, lambda: [view])
    found = samples(metrics)
    labels = (("outcome", "completed"), ("path", "pd"), ("route", "/v1/completions"), ("status", "200"))
    assert found["antiphon_router_requests_total", labels] == 2
    failed = (("outcome", "failed"), ("path", "pd"), ("route", "/v1/completions"), ("status", "502"))
    assert found["antiphon_router_requests_total", failed] == 1
    error = (("engine", "h:1"), ("kind", "lost"), ("role", "prefill"))
    assert found["antiphon_router_engine_errors_total", error] == 1
    assert found["antiphon_router_client_disconnects_total", (("stage", "decoding"),)] == 1
    engine = (("engine", "h:2"), ("role", "decode"))
    assert found["antiphon_router_engine_up", engine] == 0
    assert found["antiphon_router_engine_active_requests", engine] == 3
    assert found["antiphon_router_engine_ejections_total", engine] == 2
    assert found["antiphon_router_engine_state", (*engine, ("state", "down"))] == 1
    assert found["antiphon_router_retries_total", (("kind", "prefill"),)] == 4
    assert found["antiphon_router_handovers_abandoned_total", ()] == 2


def test_expected_tokens_are_held_against_those_found() -> None:
    metrics = RouterMetrics()
    metrics.held("pd", 100, 40)
    metrics.held("pd", 100, 250)  # more than was expected of it: what was expected was there
    metrics.held("cached", 7, 0)
    found = samples(metrics)
    for path, numbers in {"pd": (200, 140), "cached": (7, 0)}.items():
        for name, number in zip(("expected", "found"), numbers, strict=True):
            assert found[f"antiphon_router_held_tokens_{name}_total", (("path", path),)] == number


def test_durations_fall_into_every_bucket_from_theirs_on() -> None:
    metrics = RouterMetrics()
    for seconds in (0.0004, 0.001, 0.0011, 7.0, 1000.0):
        metrics.request_seconds.observe(seconds)
    found = samples(metrics)
    name = "antiphon_router_request_seconds"
    buckets = {labels[0][1]: value for (key, labels), value in found.items() if key == f"{name}_bucket"}
    assert [buckets[le] for le in ("0.001", "0.0025", "5.0", "10.0", "300.0", "+Inf")] == [2, 3, 3, 4, 4, 5]
    assert found[f"{name}_count", ()] == 5
    assert found[f"{name}_sum", ()] == pytest.approx(1007.0025)


@pytest.mark.parametrize(
    ("outcome", "status", "num_events", "first_ms", "step_s"),
    [
        ("completed", 200, 12, 500.0, 0.05),
        ("completed", 200, 3, 900.0, 0.1),
        ("completed", 200, 2, 900.0, None),  # one token and the end
        ("completed", 200, 1, None, None),  # not a stream
        ("failed", 200, 12, 500.0, None),
        ("cancelled", None, 12, 500.0, None),
        ("completed", 400, 1, None, None),
    ],
)
def test_the_end_of_a_request(
    outcome: str, status: int | None, num_events: int, first_ms: float | None, step_s: float | None
) -> None:
    receipt = Receipt("1", "/v1/completions", 0.0)
    receipt.path, receipt.decode, receipt.outcome, receipt.status = "pd", "h:2", outcome, status
    receipt.num_events, receipt.first_token_ms = num_events, first_ms
    metrics = RouterMetrics()
    metrics.request_ended(receipt, 1.0, 0.75)
    found = samples(metrics)
    prefix = "antiphon_router"
    labels = {"route": "/v1/completions", "path": "pd", "outcome": outcome, "status": str(status or 0)}
    assert found[f"{prefix}_requests_total", tuple(sorted(labels.items()))] == 1
    assert found[f"{prefix}_request_seconds_sum", ()] == 1.0
    is_served = (outcome, status) == ("completed", 200)
    assert found[f"{prefix}_decode_seconds_sum", ()] == (0.75 if is_served else 0)
    assert found[f"{prefix}_inter_token_seconds_count", ()] == (step_s is not None)
    assert found[f"{prefix}_inter_token_seconds_sum", ()] == pytest.approx(step_s or 0)


def test_where_requests_are() -> None:
    metrics = RouterMetrics()
    stages = {"received": 1, "probing": 0, "connecting_decode": 2, "prefilling": 4, "streaming": 8}
    StageMetrics(metrics.registry, lambda: stages, {408: 3})
    found = samples(metrics)
    for stage, number in stages.items():
        assert found["antiphon_router_requests_in_stage", (("stage", stage),)] == number
    assert found["antiphon_router_queue_depth", ()] == 3
    assert found["antiphon_router_edge_refusals_total", (("status", "408"),)] == 3


def test_every_kind_of_retry_is_there_from_the_start() -> None:
    metrics = RouterMetrics()
    FleetMetrics(metrics.registry, {}, list)
    kinds = ("prefill", "prefill_again", "handover", "decode", "denied")
    assert [samples(metrics)["antiphon_router_retries_total", (("kind", kind),)] for kind in kinds] == [0] * 5


def test_two_routers_share_nothing() -> None:
    first, second = RouterMetrics(), RouterMetrics()
    first.truncations.inc()
    assert samples(second)["antiphon_router_stream_truncations_total", ()] == 0
