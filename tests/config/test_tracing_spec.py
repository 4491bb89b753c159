"""Where spans and metrics go: the address of a collector, and what each process of a deployment is told of it."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.config.compile import compile_spec
from antiphon.config.coordinator_spec import CoordinatorSpec
from antiphon.config.explain import explain
from antiphon.config.plan import ProcessPlan
from antiphon.config.router_spec import RouterSpec
from antiphon.config.spec import Spec
from antiphon.config.tracing_spec import otlp_of, otlp_urls
from tests.config.facts_for_tests import LAPTOP


@pytest.mark.parametrize(
    ("endpoint", "protocol", "expected"),
    [
        ("http://localhost:4317", "auto", ("grpc", "http://localhost:4317", "http://localhost:4317")),
        ("localhost:4317", "auto", ("grpc", "http://localhost:4317", "http://localhost:4317")),
        ("grpc://c", "auto", ("grpc", "http://c:4317", "http://c:4317")),
        ("https://c:4317/", "auto", ("grpc", "https://c:4317", "https://c:4317")),
        ("http://c:4318", "auto", ("http", "http://c:4318/v1/traces", "http://c:4318/v1/metrics")),
        ("http://c:4318", "grpc", ("grpc", "http://c:4318", "http://c:4318")),
        ("http://c:99", "http", ("http", "http://c:99/v1/traces", "http://c:99/v1/metrics")),
        ("http://c", "http", ("http", "http://c:4318/v1/traces", "http://c:4318/v1/metrics")),
        ("https://c/otlp/", "auto", ("http", "https://c/otlp/v1/traces", "https://c/otlp/v1/metrics")),
        ("http://c:9/v1/traces", "auto", ("http", "http://c:9/v1/traces", "http://c:9/v1/metrics")),
        ("[::1]:4317", "auto", ("grpc", "http://[::1]:4317", "http://[::1]:4317")),
    ],
)
def test_what_an_endpoint_means(endpoint: str, protocol: Any, expected: tuple[str, str, str]) -> None:
    assert otlp_urls(endpoint, protocol) == expected


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [
        ("", "auto"),
        ("http://", "auto"),
        ("ftp://c:4317", "auto"),
        ("http://c:port", "auto"),
        ("http://c:4317/x?y=1", "auto"),
        ("http://user@c:4317", "auto"),
        ("http://c d:4317", "auto"),
        ("http://c/path", "grpc"),
        ("grpc://c:4318", "http"),
    ],
)
def test_what_is_no_endpoint(endpoint: str, protocol: str) -> None:
    with pytest.raises(ValidationError):
        RouterSpec.model_validate({"enable_tracing": True, "otlp_endpoint": endpoint, "otlp_protocol": protocol})


@pytest.mark.parametrize(
    "endpoint",
    [
        *(
            "http://u:secret@h",
            "http://:secret@h",
            "u:secret@h:4317",
            "https://h/otlp?api-key=secret",
            "http://h/#secret",
        ),
        *("http://u:s/secret@h", "ftp://u:secret@h", "http://u:secret@h" + "x" * 3000),
    ],
)
def test_what_may_be_secret_in_an_address_is_refused_and_not_shown(endpoint: str) -> None:
    deployment = yaml.safe_load(DEPLOYMENT) | {"tracing": {"otlp_endpoint": endpoint}}
    flags = {"otlp_endpoint": endpoint}
    for model, values in (
        *((Spec, deployment), (RouterSpec, flags), (CoordinatorSpec, flags)),
        (CacheServerSpec, flags | {"instance_id": "x"}),
    ):
        with pytest.raises(ValidationError) as caught:
            model.model_validate(values)
        problems = explain(caught.value, model)
        assert any("OTEL_EXPORTER_OTLP_HEADERS" in problem.fix for problem in problems), problems
        assert "secret" not in f"{problems} {caught.value}"
    with pytest.raises(ValueError, match="OTEL_EXPORTER_OTLP_HEADERS") as raised:
        otlp_urls(endpoint, "http")
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("model", [RouterSpec, CoordinatorSpec])
def test_off_there_is_no_address(model: Any) -> None:
    assert otlp_of(model()) is None
    assert otlp_of(model(enable_tracing=True)) == otlp_urls("http://localhost:4317")


# ---- a deployment ----------------------------------------------------------------------------------------------------

DEPLOYMENT = """
model: {path: /m}
engine: {device: cpu}
cache: {enabled: true, peers: true}
"""


def plans_of(text: str) -> dict[str, ProcessPlan]:
    return {plan.name: plan for plan in compile_spec(Spec.model_validate(yaml.safe_load(DEPLOYMENT + text)), LAPTOP)}


def test_off_no_process_is_told_anything() -> None:
    for plan in plans_of("").values():
        words = " ".join(plan.argv) + " ".join(plan.env)
        assert "otlp" not in words.lower(), plan.name
        assert "tracing" not in words, plan.name


@pytest.mark.parametrize(
    ("text", "endpoint", "traces", "protocol"),
    [
        ("tracing: {enabled: true}", "http://localhost:4317", "http://localhost:4317", "grpc"),
        (
            "tracing: {enabled: true, otlp_endpoint: 'http://c:4318'}",
            "http://c:4318",
            "http://c:4318/v1/traces",
            "http/protobuf",
        ),
    ],
)
def test_every_process_sends_to_the_collector(text: str, endpoint: str, traces: str, protocol: str) -> None:
    plans = plans_of(text)
    own = {name for name in plans if not name.startswith(("prefill", "decode"))}
    assert own == {"router", "coordinator", "cache-prefill", "cache-decode"}
    for name in own:
        argv = plans[name].argv
        assert "--enable-tracing" in argv, name
    for name in own - {"router"}:
        argv = plans[name].argv
        assert argv[argv.index("--otlp-endpoint") + 1] == endpoint
        model = CoordinatorSpec if name == "coordinator" else CacheServerSpec
        assert "otlp_endpoint" in model.model_fields
    for pool in ("prefill", "decode"):
        plan = plans[f"{pool}-0"]
        assert plan.argv[plan.argv.index("--otlp-traces-endpoint") + 1] == traces
        assert plan.env["OTEL_SERVICE_NAME"] == f"antiphon-{pool}"
        assert plan.env["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"] == protocol


def test_what_an_engine_says_itself_wins() -> None:
    text = """
tracing: {enabled: true, sample_share: 0.5, metrics_interval_s: 60}
router: {trace_sample_share: 0.25}
prefill: {args: {otlp-traces-endpoint: "http://own:1"}, env: {OTEL_SERVICE_NAME: own}}
"""
    plans = plans_of(text)
    prefill = plans["prefill-0"]
    assert prefill.argv.count("--otlp-traces-endpoint") == 1
    assert "http://own:1" in prefill.argv
    assert prefill.env["OTEL_SERVICE_NAME"] == "own"
    router = plans["router"].argv
    assert router[router.index("--trace-sample-share") + 1] == "0.25"
    assert router[router.index("--otlp-metrics-interval-s") + 1] == "60.0"
    cache = plans["cache-decode"].argv
    assert cache[cache.index("--otlp-metrics-interval-s") + 1] == "60.0"
