"""What a replica starts: the compiler's plan for one engine at the place that it was given; a router without any."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from antiphon.config.problems import SpecError
from antiphon.ray.plans import AppSettings, EnginePlace, engine_plan, own_url, router_plan, spec_name
from tests.ray.configs import GPU_HOST, LAPTOP, Change, mapped_from

PLACE = EnginePlace("r1", "127.0.0.1", 9001, 9101, 9201, "127.0.0.1")
SIMULATED: Change = ("antiphon.engine.kind", "simulated")


def settings(*changes: Change) -> AppSettings:
    found = mapped_from(*changes)
    return AppSettings.of(found.spec, found.pools)


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


@pytest.mark.parametrize("pool", ["prefill", "decode"])
def test_an_engine_is_at_its_place_under_its_own_name(pool: Any) -> None:
    made = engine_plan(settings(), pool, PLACE, LAPTOP)
    plan = made.plan.born("abc")
    assert (plan.name, plan.base_url, plan.role) == (f"{pool}-r1", "http://127.0.0.1:9001", pool)
    assert (flag(plan.argv, "--host"), flag(plan.argv, "--port")) == ("127.0.0.1", "9001")
    assert plan.env["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "9101"
    transfer = json.dumps(json.loads(flag(plan.argv, "--kv-transfer-config")))
    assert f'"engine_id": "{pool}-r1-abc"' in transfer
    assert f"{pool}-0-" not in transfer
    assert made.shape["model"] == flag(plan.argv, "--served-model-name")


def test_the_simulated_engine_is_the_specs() -> None:
    plan = engine_plan(settings(SIMULATED), "decode", PLACE, LAPTOP).plan.born("abc")
    assert flag(plan.argv, "--engine-id") == "decode-r1-abc"
    assert flag(plan.argv, "--side-channel-port") == "9101"


def test_the_interpreter_is_that_of_the_node_unless_it_is_written() -> None:
    written = settings(("antiphon.engine.python", "/opt/vllm/bin/python"))
    assert engine_plan(written, "decode", PLACE, LAPTOP).plan.argv[0] == "/opt/vllm/bin/python"
    elsewhere = settings()
    decode = elsewhere.spec.decode
    assert "python" not in decode.model_fields_set
    filled_in = decode.model_construct(decode.model_fields_set, **(dict(decode) | {"python": "/not/here"}))
    spec = elsewhere.spec.model_copy(update={"decode": filled_in})
    assert engine_plan(replace(elsewhere, spec=spec), "decode", PLACE, LAPTOP).plan.argv[0] != "/not/here"


def test_cache_servers_are_the_nodes_and_the_router_reads_their_reports() -> None:
    with_cache = settings(("antiphon.cache", {"shared": True, "port": 9300, "http_port": 9400}))
    servers = [engine_plan(with_cache, pool, PLACE, LAPTOP).server_plan for pool in ("prefill", "decode")]
    assert servers[0] == servers[1]
    assert servers[0] is not None
    assert servers[0].ports == {"calls": 9300, "http": 9400}
    router = router_plan(with_cache, "127.0.0.1", LAPTOP)
    assert flag(router.argv, "--cache-server") == servers[0].base_url
    assert engine_plan(settings(SIMULATED), "decode", PLACE, LAPTOP).server_plan is None


def test_the_router_starts_with_nobody() -> None:
    plan = router_plan(settings(("antiphon.router", {"port": 9500, "policy": "least_load"})), "127.0.0.1", LAPTOP)
    assert plan.base_url == "http://127.0.0.1:9500"
    assert plan.ready_path == "/health"
    assert "--allow-empty" in plan.argv
    assert not {"--prefill", "--decode"} & set(plan.argv)
    assert flag(plan.argv, "--policy") == "least_load"


def test_an_engine_has_the_gpus_that_ray_gives_it() -> None:
    """Also where Ray is told not to set the variable in its workers."""
    both = settings(("both.engine_kwargs.tensor_parallel_size", 2), ("both.accelerator_type", "H200"))
    made = engine_plan(both, "decode", replace(PLACE, devices=("4", "6")), GPU_HOST)
    assert made.plan.env["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert flag(made.plan.argv, "--tensor-parallel-size") == "2"
    assert "CUDA_VISIBLE_DEVICES" not in engine_plan(settings(), "decode", PLACE, LAPTOP).plan.env


def test_what_is_named_on_a_node_is_the_applications_own() -> None:
    """Two applications on one node have cache servers, and their sockets, beside each other."""
    cache: Change = ("antiphon.cache", {"shared": True})
    argv = [engine_plan(settings(cache).named(app), "decode", PLACE, LAPTOP).server_plan for app in ("a", "b")]
    assert argv[0] is not None
    assert argv[1] is not None
    assert flag(argv[0].argv, "--instance-id") != flag(argv[1].argv, "--instance-id")
    written = settings(cache, ("antiphon.name", "mine"))
    assert written.named("a") == written


def test_a_published_router_is_reached_at_the_address_of_its_node() -> None:
    published = settings(("antiphon.router", {"host": "0.0.0.0", "public_without_key": True}))
    assert published.is_published
    assert not settings().is_published
    plan = router_plan(published, "192.0.2.4", LAPTOP)
    assert (plan.base_url, flag(plan.argv, "--host")) == ("http://192.0.2.4:30000", "0.0.0.0")
    assert own_url(plan.base_url, "0.0.0.0") == "http://127.0.0.1:30000"
    assert own_url(plan.base_url, "192.0.2.4") == plan.base_url
    far = replace(PLACE, address="192.0.2.5", router_host="192.0.2.4")
    assert engine_plan(published, "decode", far, LAPTOP).plan.base_url == "http://192.0.2.5:9001"
    events = {"policy": "kv_aware", "host": "0.0.0.0", "kv_events_port": 9600}
    with pytest.raises(SpecError, match="kv_events_host"):
        engine_plan(settings(SIMULATED, ("antiphon.router", events)), "decode", far, LAPTOP)
    heard = settings(SIMULATED, ("antiphon.router", events | {"kv_events_host": "0.0.0.0"}))
    assert flag(engine_plan(heard, "decode", far, LAPTOP).plan.argv, "--kv-events-endpoint") == "tcp://192.0.2.4:9600"


@pytest.mark.parametrize(
    ("app", "name"),
    [("pd", "pd"), ("My App_2", "my-app-2"), ("--", "antiphon"), ("x" * 40, "x" * 32), ("日本", "antiphon")],
)
def test_an_application_has_a_name_that_a_spec_may_have(app: str, name: str) -> None:
    assert spec_name(app) == name


def test_what_cannot_be_compiled_is_refused() -> None:
    wrong = settings()
    spec = wrong.spec.model_copy(
        update={"decode": wrong.spec.decode.model_copy(update={"kv_transfer_config": {"kv_connector": "Nobody"}})}
    )
    with pytest.raises(SpecError, match="Nobody"):
        engine_plan(replace(wrong, spec=spec), "decode", PLACE, LAPTOP)
