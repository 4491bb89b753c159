"""The series of cold-transfer admission, tenants and what is where: read when asked, empty where there is none."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from antiphon.observe.aware_metrics import AwareMetrics, ColdView, TenantView, WhereView

Labels = tuple[tuple[str, str], ...]

COLD = ColdView(
    num_waiting=3,
    waiting_bytes=5_000,
    oldest_wait_s=1.5,
    num_held=2,
    num_cold=1,
    committed_bytes=7_000,
    budget_bytes=9_000,
    counts={"admitted_warm": 4, "refused_cold_queue_full": 5, "left_waiting": 6, "held": 7, "held_overdue": 8},
    in_flight_bytes={"d:1": 100, "d:2": 0},
    free_kv_bytes={"d:2": 5},
    rates={("p:1", "d:1"): 2.5e9},
)
WHERE = WhereView(
    events={"messages": 10, "gaps": 1, "restarts": 2, "replays": 3, "forgotten": 4, "strangers": 5, "unreadable": 0},
    blocks={"p:1": 12},
    tokenize={"hits": 1, "asked": 2, "late": 3, "failed": 4, "bytes": 999},
    chunks={"http://c:1": 6},
    picks={("prefill", "precise"): 8, ("prefill", "approximate"): 9},
)
TENANTS = [
    TenantView("a", 1, 2, 3, {"overloaded": 4, "tenant_rate_limited": 0}, 500, 6.5),
    TenantView("b", 0, 0, 0, {"overloaded": 0, "tenant_rate_limited": 0}, 0, 0.0),
]


def samples(registry: CollectorRegistry) -> dict[tuple[str, Labels], float]:
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        assert family.documentation
        for sample in family.samples:
            if not sample.name.endswith("_created"):
                found[sample.name.removeprefix("antiphon_router_"), tuple(sorted(sample.labels.items()))] = sample.value
    return found


def names(registry: CollectorRegistry) -> set[str]:
    return {family.name for family in text_string_to_metric_families(generate_latest(registry).decode())}


def test_everything_is_shown_by_its_name() -> None:
    registry = CollectorRegistry()
    AwareMetrics(registry, lambda: COLD, lambda: TENANTS, lambda: WHERE)
    found = samples(registry)
    assert {name: value for (name, labels), value in found.items() if not labels} == {
        "cold_admission_on": 1,
        "cold_waiting": 3,
        "cold_waiting_bytes": 5_000,
        "cold_oldest_wait_seconds": 1.5,
        "cold_held": 2,
        "cold_prefills": 1,
        "cold_committed_bytes": 7_000,
        "cold_budget_bytes": 9_000,
        "cold_left_total": 6,
        "cold_holds_total": 7,
        "cold_holds_overdue_total": 8,
        "kv_event_messages_total": 10,
        "kv_event_gaps_total": 1,
        "kv_event_restarts_total": 2,
        "kv_event_replays_total": 3,
        "kv_event_forgotten_total": 4,
        "tokenize_late_total": 3,
        "tokenize_failed_total": 4,
    }
    assert {key: value for key, value in found.items() if key[1] and key[0][:6] != "tenant"} == {
        ("cold_admitted_total", (("reason", "warm"),)): 4,
        ("cold_refused_total", (("code", "cold_queue_full"),)): 5,
        ("cold_in_flight_bytes", (("engine", "d:1"),)): 100,
        ("cold_in_flight_bytes", (("engine", "d:2"),)): 0,
        ("cold_free_kv_bytes", (("engine", "d:2"),)): 5,
        ("transfer_bytes_per_second", (("decode", "d:1"), ("prefill", "p:1"))): 2.5e9,
        ("kv_event_messages_unused_total", (("reason", "strangers"),)): 5,
        ("kv_event_messages_unused_total", (("reason", "unreadable"),)): 0,
        ("kv_blocks", (("engine", "p:1"),)): 12,
        ("tokenize_total", (("result", "hits"),)): 1,
        ("tokenize_total", (("result", "asked"),)): 2,
        ("cache_server_chunks", (("server", "http://c:1"),)): 6,
        ("kv_aware_picks_total", (("how", "precise"), ("role", "prefill"))): 8,
        ("kv_aware_picks_total", (("how", "approximate"), ("role", "prefill"))): 9,
    }
    own = (("tenant", "a"),)
    assert [
        found[f"tenant_{name}", own]
        for name in ("in_flight", "waiting", "admitted_total", "admitted_tokens_total", "wait_seconds_total")
    ] == [1, 2, 3, 500, 6.5]
    assert found["tenant_refused_total", (("code", "overloaded"), *own)] == 4
    assert {labels for name, labels in found if name == "tenant_in_flight"} == {own, (("tenant", "b"),)}


def test_without_any_of_it_the_series_are_there_without_values() -> None:
    full, empty = CollectorRegistry(), CollectorRegistry()
    AwareMetrics(full, lambda: COLD, lambda: TENANTS, lambda: WHERE)
    AwareMetrics(empty, lambda: None, list, lambda: None)
    assert names(empty) == names(full)
    assert samples(empty) == {("cold_admission_on", ()): 0}


def test_an_unknown_budget_is_no_budget_of_zero() -> None:
    registry = CollectorRegistry()
    AwareMetrics(registry, lambda: COLD._replace(budget_bytes=None), list, lambda: None)
    assert ("cold_budget_bytes", ()) not in samples(registry)


def test_values_are_those_of_the_moment() -> None:
    registry, views = CollectorRegistry(), [COLD, COLD._replace(num_waiting=0)]
    AwareMetrics(registry, lambda: views.pop(0), list, lambda: None)
    assert [samples(registry)["cold_waiting", ()] for _ in range(2)] == [3, 0]
