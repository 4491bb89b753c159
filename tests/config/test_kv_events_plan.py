"""Who is told to tell the router of its KV: ports, addresses, and what cannot work about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.cli.sim_engine import sim_engine
from antiphon.config.checks import run_checks
from antiphon.config.plan import ProcessPlan
from antiphon.config.router_spec import RouterSpec
from tests.config.facts_for_tests import LAPTOP, compiled_from, facts_of

AWARE = {"engine.device": "cpu", "cache.enabled": False, "router.policy": "kv_aware"}
ELSEWHERE = AWARE | {"engine.device": "cuda", "prefill.hosts": ["192.0.2.10"], "decode.hosts": ["192.0.2.20"]}
ELSEWHERE |= {"router.host": "192.0.2.10", "router.public_without_key": True}


def plans_of(sets: dict[str, Any]) -> dict[str, ProcessPlan]:
    return {plan.name: plan for plan in compiled_from(sets, LAPTOP).plans}


def told(plan: ProcessPlan) -> dict[str, Any] | None:
    """What an engine is told of KV events."""
    if "--kv-events-config" not in plan.argv:
        return None
    config: dict[str, Any] = json.loads(plan.argv[plan.argv.index("--kv-events-config") + 1])
    return config


def value(plan: ProcessPlan, flag: str) -> str | None:
    return plan.argv[plan.argv.index(flag) + 1] if flag in plan.argv else None


def found(sets: dict[str, Any]) -> list[tuple[str, str]]:
    compiled = compiled_from(sets, LAPTOP)
    return [(problem.field, problem.message) for problem in run_checks(compiled, facts_of(compiled)).problems]


@pytest.mark.parametrize(
    "wanting",
    [
        {"router.policy": "kv_aware"},
        {"router.policy": "least_load", "router.prefill_policy": "kv_aware"},
        {"router.policy": "round_robin", "router.decode_policy": "kv_aware"},
        {"router.policy": "prefix_aware", "router.local_max_tokens": 256},
    ],
    ids=["both", "prefill", "decode", "local"],
)
def test_engines_tell_a_router_that_goes_by_it(wanting: dict[str, Any]) -> None:
    plans = plans_of(AWARE | wanting | {"prefill.replicas": 2})
    assert plans["router"].ports == {"http": 30000, "kv_events": 30100}
    assert value(plans["router"], "--kv-events-port") == "30100"
    assert plans["prefill-1"].ports == {"http": 8002, "side_channel": 5601, "kv_replay": 5801}
    assert told(plans["prefill-1"]) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://127.0.0.1:30100",
        "topic": "kv@http://127.0.0.1:8002@5801",
        "replay_endpoint": "tcp://127.0.0.1:5801",
        "buffer_steps": 10000,
    }
    assert plans["decode-0"].ports["kv_replay"] == 5900


@pytest.mark.parametrize("policy", ["round_robin", "prefix_aware", "consistent_hash"])
def test_engines_tell_nobody_else(policy: str) -> None:
    plans = plans_of(AWARE | {"router.policy": policy})
    assert plans["router"].ports == {"http": 30000}
    assert told(plans["prefill-0"]) is told(plans["decode-0"]) is None
    assert plans["decode-0"].ports == {"http": 8101, "side_channel": 5700}
    assert "--kv-events-port" not in plans["router"].argv


def test_a_port_that_nobody_uses_is_said() -> None:
    compiled = compiled_from(AWARE | {"router.policy": "random", "router.kv_events_port": 5557})
    assert [notice.field for notice in compiled.notices if "kv_events" in notice.field] == ["router.kv_events_port"]
    assert compiled.plans[-1].ports == {"http": 30000}


def test_simulated_engines_are_told_by_flags() -> None:
    plan = plans_of(AWARE | {"engine.kind": "simulated"})["decode-0"]
    assert value(plan, "--kv-events-endpoint") == "tcp://127.0.0.1:30100"
    assert value(plan, "--kv-events-topic") == "kv@http://127.0.0.1:8101@5900"
    assert value(plan, "--kv-events-replay-endpoint") == "tcp://127.0.0.1:5900"
    known = {option for parameter in sim_engine.params for option in parameter.opts}
    assert {arg for arg in plan.argv if arg.startswith("--")} <= known


def test_data_parallel_ranks_have_ports_of_their_own() -> None:
    plans = plans_of(AWARE | {"engine.args": {"data-parallel-size": 2}, "prefill.replicas": 2})
    assert plans["router"].ports == {"http": 30000, "kv_events": 30100, "kv_events_1": 30101}
    assert value(plans["router"], "--kv-events-ranks") == "2"
    replays = [[plans[f"prefill-{n}"].ports[use] for use in ("kv_replay", "kv_replay_1")] for n in (0, 1)]
    assert replays == [[5800, 5801], [5802, 5803]]
    ((field, message),) = found(AWARE | {"engine.args": {"data-parallel-size": 2}, "prefill.kv_replay_port": 5899})
    assert field == "decode.kv_replay_port"
    assert message.startswith("port 5900 on 127.0.0.1 is already the kv replay 1 port of prefill-0")


def test_ports_clash_as_others_do() -> None:
    assert found(AWARE | {"router.kv_events_port": 8001}) == [
        ("router.kv_events_port", "port 8001 on 127.0.0.1 is already the http port of prefill-0 (prefill.port)")
    ]
    (problem,) = found(AWARE | {"prefill.kv_replay_port": 65535, "prefill.replicas": 2})
    assert problem == ("prefill.kv_replay_port", "prefill-1 on 127.0.0.1 would get port 65536")
    assert plans_of(AWARE | {"router.port": 65500})["router"].ports == {"http": 65500, "kv_events": 65400}
    compiled = compiled_from(AWARE)
    report = run_checks(compiled, facts_of(compiled, ports_in_use=frozenset({30100, 5800})))
    assert [problem.field for problem in report.problems] == ["prefill.kv_replay_port", "router.kv_events_port"]


def test_engines_of_other_hosts_must_reach_the_router() -> None:
    ((field, message),) = found(ELSEWHERE)
    assert field == "router.kv_events_host"
    assert message == "KV events are heard at 127.0.0.1, which engines on 192.0.2.20 do not reach"
    for heard, at in (("192.0.2.10", "192.0.2.10"), ("0.0.0.0", "192.0.2.10"), ("router.example", None)):
        sets = ELSEWHERE | {"router.kv_events_host": heard}
        assert [field for field, _ in found(sets)] == ([] if at else ["router.kv_events_host"])
        if at is not None:
            config = told(plans_of(sets)["decode-0"])
            assert config is not None
            assert config["endpoint"] == f"tcp://{at}:30100"
            assert config["replay_endpoint"] == "tcp://*:5900"
            assert config["topic"] == "kv@http://192.0.2.20:8101@5900"
    notices = compiled_from(ELSEWHERE | {"router.kv_events_host": "0.0.0.0"}).notices
    assert any(notice.field == "router.kv_events_host" for notice in notices)


def test_a_router_on_loopback_that_listens_everywhere_cannot_be_named() -> None:
    sets = ELSEWHERE | {"router.host": "127.0.0.1", "router.kv_events_host": "0.0.0.0"}
    assert "router.kv_events_host" in [field for field, _ in found(sets)]


def test_vllm_connects_to_ipv4_only() -> None:
    sets = AWARE | {"router.kv_events_host": "::1"}
    assert [field for field, _ in found(sets)] == ["router.kv_events_host"]
    assert told(plans_of(sets)["decode-0"]) is None
    sets = AWARE | {"decode.hosts": ["::1"]}
    assert found(sets) == []
    config = told(plans_of(sets)["decode-0"])
    assert config is not None
    assert "replay_endpoint" not in config
    assert config["topic"] == "kv@http://[::1]:8101"
    assert "decode.kv_replay_port" in [notice.field for notice in compiled_from(sets).notices]


def test_names_of_hosts() -> None:
    config = told(plans_of(AWARE | {"prefill.hosts": ["localhost"]})["prefill-0"])
    assert config is not None
    assert config["replay_endpoint"] == "tcp://127.0.0.1:5800", "ZMQ binds addresses and no names"
    assert [f for f, _ in found(AWARE | {"prefill.bind": "node7"})] == ["prefill.bind"]


@pytest.mark.parametrize("name", ["kv-events-config", "no-enable-prefix-caching"])
def test_arguments_that_take_the_events_away(name: str) -> None:
    sets = AWARE | {"engine.args": {name: True}}
    assert [field for field, _ in found(sets)] == [f"prefill.args.{name}", f"decode.args.{name}"]
    assert found(sets | {"router.policy": "round_robin"}) == []
    assert found(AWARE | {"engine.args": {"no-enable-prefix-caching": False}}) == []


# ---- the KV of a token -----------------------------------------------------------------------------------------------

LLAMA = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "bfloat16"}))
    return str(tmp_path)


def kv_bytes(model: str, **sets: Any) -> str | None:
    named = {name.replace("__", "."): value for name, value in sets.items()}
    return value(plans_of(AWARE | {"model.path": model} | named)["router"], "--kv-bytes-per-token")


def test_the_router_is_told_the_kv_of_a_token(model: str) -> None:
    assert kv_bytes(model) == str(2 * 32 * 8 * 128 * 2)
    assert kv_bytes(model, model__dtype="float32") == str(2 * 32 * 8 * 128 * 4)
    assert kv_bytes(model, engine__kv_cache_dtype="fp8") == str(2 * 32 * 8 * 128)
    assert kv_bytes(model, router__policy="round_robin") == str(2 * 32 * 8 * 128 * 2)
    (notice,) = [n for n in compiled_from({"model.path": model}).notices if n.field == "router.kv_bytes_per_token"]
    assert "2048 tokens" in notice.message


@pytest.mark.parametrize(("longest", "waits"), [(4096, True), (2049, True), (2048, False), (1024, False)])
def test_no_prompt_is_said_to_wait_that_no_request_may_have(model: str, longest: int, waits: bool) -> None:
    compiled = compiled_from({"model.path": model, "model.max_model_len": longest})
    (notice,) = [n for n in compiled.notices if n.field == "router.kv_bytes_per_token"]
    assert ("prompts of 2048 tokens or more" in notice.message) is waits
    expected = f"no prompt waits for another: one would at 2048 tokens, and a request has at most {longest}"
    assert (expected in notice.message) is not waits


def test_what_is_written_or_not_known_stays(model: str) -> None:
    assert kv_bytes(model, router__kv_bytes_per_token=7) == "7"
    assert kv_bytes(model, router__kv_bytes_per_token=0) is None
    assert kv_bytes(model, engine__kind="simulated") is None
    assert kv_bytes("organisation/model") is None
    assert RouterSpec().kv_bytes_per_token == 0
