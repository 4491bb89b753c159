"""The builder's own checks: what concerns the whole application. Nothing is started."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve", reason="needs Ray")

import antiphon
from antiphon.config.compile import compile_all
from antiphon.config.problems import SpecError
from antiphon.config.resolve import this_machine
from antiphon.ray import app as builder
from antiphon.ray import build_pd_openai_app, inside
from tests.ray.configs import Change, pd_config

ROUTER = "antiphon.router"


def problems(*changes: Change) -> dict[str, str]:
    with pytest.raises(SpecError) as caught:
        build_pd_openai_app(pd_config(*changes))
    return {problem.field: f"{problem.message} -> {problem.fix}" for problem in caught.value.problems}


def deployed(app: Any) -> dict[str, Any]:
    """The options of each deployment, by name."""
    found: dict[str, Any] = {}
    waiting = [app._bound_deployment]
    while waiting:
        each = waiting.pop()
        found[each.name] = each
        waiting += [arg._bound_deployment for arg in each.init_args if hasattr(arg, "_bound_deployment")]
    return found


def test_a_public_router_without_keys_is_refused() -> None:
    found = problems((f"{ROUTER}.host", "0.0.0.0"))
    assert "no client needs a key" in found[f"{ROUTER}.host"]
    found = problems((f"{ROUTER}", {"host": "192.0.2.1", "public_without_key": True}))
    assert "takes no engines without it" in found[f"{ROUTER}.admin_key_file"]


def test_engines_that_anybody_reaches_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "key"
    key.write_text("secret-key")
    key.chmod(0o600)
    public = {"host": "0.0.0.0", "api_key_file": str(key), "admin_key_file": str(key)}
    build_pd_openai_app(pd_config((ROUTER, public)))
    said = capsys.readouterr().err
    assert "worker_api_key_file: is missing" in said
    assert "secret-key" not in said
    build_pd_openai_app(pd_config((ROUTER, public | {"worker_api_key_file": str(key)})))
    assert "worker_api_key_file: is missing" not in capsys.readouterr().err


def test_servers_that_share_need_a_secret_and_a_coordinator_that_all_reach(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_pd_openai_app(pd_config(("antiphon.cache", {"peers": True})))
    assert "antiphon.cache.peers: true, but the router is on loopback" in capsys.readouterr().err
    build_pd_openai_app(pd_config(("antiphon.cache", {"peers": True, "shared": False})))
    assert "antiphon.cache.peers: true: the cache servers of the nodes share" in capsys.readouterr().err
    public: Change = (ROUTER, {"host": "0.0.0.0", "public_without_key": True})
    found = problems(public, ("antiphon.cache", {"peers": True, "coordinator_url": "127.0.0.1:6655"}))
    assert "copy it to every node" in found["antiphon.cache.cluster_secret_file"]
    assert "its own node only" in found["antiphon.cache.coordinator_url"]
    secret = tmp_path / "secret"
    secret.write_text("s" * 64)
    named = {"peers": True, "coordinator_url": "192.0.2.1:6655", "cluster_secret_file": str(secret)}
    (own, *_) = deployed(build_pd_openai_app(pd_config(public, ("antiphon.cache", named))))["decode"].init_args
    assert own.spec.cache.shared, "one server on each node"
    assert "s" * 64 not in capsys.readouterr().err


def test_an_engine_reserves_what_is_written() -> None:
    app = build_pd_openai_app(
        pd_config(
            ("prefill_config.accelerator_type", "H200"),
            ("both.engine_kwargs", {"tensor_parallel_size": 2}),
            ("decode_config.placement_group_config", {"bundle_per_worker": {"GPU": 1, "CPU": 3}}),
            ("decode_config.deployment_config.ray_actor_options", {"resources": {"rack": 1}, "memory": 1e9}),
        )
    )
    found = {name: each.ray_actor_options for name, each in deployed(app).items()}
    assert (found["prefill"]["num_gpus"], found["prefill"]["accelerator_type"]) == (2, "H200")
    assert (found["decode"]["num_gpus"], found["decode"]["num_cpus"]) == (2, 6)
    assert (found["decode"]["memory"], found["decode"]["resources"]) == (1e9, {"rack": 1})
    assert (found["router"]["num_cpus"], found["ingress"]["num_cpus"]) == (0, 0)


@pytest.mark.parametrize("num_gpus", [0, 8])
def test_gpus_of_another_node_count(monkeypatch: pytest.MonkeyPatch, num_gpus: int) -> None:
    """``serve deploy`` builds on the head of the cluster, which often has none."""
    cluster = SimpleNamespace(is_initialized=lambda: True, cluster_resources=lambda: {"GPU": num_gpus, "CPU": 64})
    monkeypatch.setattr(builder, "ray", cluster)
    found = deployed(build_pd_openai_app(pd_config()))["decode"].ray_actor_options
    assert found.get("num_gpus", 0) == (1 if num_gpus else 0)


def test_how_long_an_engine_may_take_to_start_can_be_written() -> None:
    app = build_pd_openai_app(pd_config(("antiphon.supervisor", {"start_timeout_s": 3000, "stop_grace_s": 90})))
    (settings, *_) = deployed(app)["decode"].init_args
    assert settings.spec.supervisor.start_timeout_s == 3000
    assert settings.built_s > 0
    assert deployed(app)["router"]._deployment_config.graceful_shutdown_timeout_s > 90


def scaled(num_ingress: int = 1, **values: Any) -> tuple[Change, ...]:
    """With the interval that is Serve's own: it warns of any other."""
    own = {"min_replicas": 1, "max_replicas": 4, "metrics_interval_s": 10} | values
    number = {"num_replicas": num_ingress}
    return ("both.deployment_config", {"autoscaling_config": own}), ("ingress_deployment_config", number)


OTHER_SCALE = scaled(2, min_replicas=2, max_replicas=5, target_ongoing_requests=3, upscale_delay_s=7)


def given(app: Any) -> dict[str, list[Any]]:
    """What the replicas of each deployment are given, but for handles."""
    return {
        name: [arg for arg in each.init_args if not hasattr(arg, "_bound_deployment")]
        for name, each in deployed(app).items()
    }


def versions(*changes: Change) -> set[str | None]:
    """What Serve takes for the versions of the deployments of a file that it builds."""
    found = set()
    for each in deployed(build_pd_openai_app(pd_config(*changes))).values():
        config = copy.deepcopy(each._deployment_config)
        config.version = "serve's own"
        found.add(type(config).from_proto_bytes(config.to_proto_bytes()).version)
    return found


def test_replicas_are_not_told_how_many_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder.time, "time", lambda: 5.0)
    before, after = build_pd_openai_app(pd_config()), build_pd_openai_app(pd_config(*OTHER_SCALE))
    assert given(before) == given(after)
    assert deployed(after)["decode"]._deployment_config.autoscaling_config.max_replicas == 5


def test_a_file_that_scales_otherwise_is_no_other_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inside, "is_built_from_file", lambda: True)
    (version,) = versions(*scaled())
    assert version != "serve's own"
    assert versions(*OTHER_SCALE) == {version}
    for path, value in {
        "both.engine_kwargs": {"max_num_seqs": 7},
        "decode_config.deployment_config.graceful_shutdown_timeout_s": 7,
        "decode_config.deployment_config.autoscaling_config.look_back_period_s": 70,
        "decode_config.deployment_config.autoscaling_config.max_replicas": 1,
        "antiphon.router": {"policy": "round_robin"},
        "antiphon.supervisor": {"stop_grace_s": 7},
    }.items():
        (other,) = versions(*scaled(), (path, value))
        assert other not in (version, "serve's own"), path


def test_code_and_packages_are_part_of_a_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inside, "is_built_from_file", lambda: True)
    seen = versions()
    (tmp_path / "vllm-9.9.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    seen |= versions()
    (tmp_path / "more.py").write_text("")
    monkeypatch.setattr(antiphon, "__path__", [*antiphon.__path__, str(tmp_path)])
    seen |= versions()
    assert len(seen) == 3


def test_other_keys_are_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(inside, "is_built_from_file", lambda: True)
    path = tmp_path / "key"
    named: Change = ("antiphon.router", {"worker_api_key_file": str(path)})
    seen = []
    for text in ("a" * 32, "b" * 32):
        path.write_text(text)
        os.utime(path, ns=(len(seen), len(seen)))
        seen += [versions(named), versions(named)]
    assert seen[0] == seen[1]
    assert seen[2] == seen[3]
    assert seen[0] != seen[2]


def test_what_a_program_deploys_is_a_version_of_its_own() -> None:
    assert versions() == {"serve's own"}


def test_a_ray_that_keeps_versions_elsewhere_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deployment = SimpleNamespace(_deployment_config=SimpleNamespace())
    assert inside.with_version(deployment, "v") is deployment
    assert "a deploy replaces every engine" in caplog.text


@pytest.mark.parametrize(
    ("changes", "has_server"),
    [((), False), ((("antiphon.cache.shared", True),), True), ((("antiphon.cache.port", 7000),), True)],
)
def test_what_ray_fills_in_starts_no_cache_server(changes: tuple[Change, ...], has_server: bool) -> None:
    """Beside simulated engines one starts only where a key of ``cache`` is written."""
    app = build_pd_openai_app(pd_config(("antiphon.engine.kind", "simulated"), *changes))
    (settings, *_) = deployed(app)["decode"].init_args
    assert settings.spec.cache.shared
    assert bool(compile_all(settings.spec, this_machine()).servers) == has_server
