"""What a pd_config means: each key's way to the spec and to the replicas, and each refusal."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.config.compile import compile_all
from antiphon.config.spec import Spec
from antiphon.ray.mapping import mapped
from antiphon.ray.serve_file import read_serve_file
from tests.ray.configs import DATA, GPU_HOST, LAPTOP, MODEL, Change, mapped_from, refused, said

SCALING = "deployment_config.autoscaling_config"
KWARGS, ENV = "decode_config.engine_kwargs", "decode_config.runtime_env.env_vars"
TRANSFER = f"{KWARGS}.kv_transfer_config"
NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def at(spec: Spec, path: str) -> Any:
    place: Any = spec
    for part in path.split("."):
        place = place[part] if isinstance(place, dict) else getattr(place, part)
    return place


def test_the_first_file_works() -> None:
    application = read_serve_file(DATA / "nixl.yaml")
    found = mapped(application.args, name=application.name, folder=application.folder, machine=LAPTOP)
    assert (found.spec.name, found.spec.model.served, found.spec.model.path) == ("pd-disaggregation-nixl", MODEL, MODEL)
    numbers = {
        pool: (each.min_replicas, each.initial_replicas, each.max_replicas) for pool, each in found.pools.items()
    }
    assert numbers == {"prefill": (2, 2, 4), "decode": (6, 6, 10)}
    assert (found.spec.prefill.replicas, found.spec.decode.replicas) == (2, 6)
    compiled = compile_all(found.spec, LAPTOP)
    assert compiled.problems == ()
    transfers = {pool: transfer.config for pool, transfer in compiled.transfers.items()}
    assert {(pool, each["kv_connector"], each["kv_role"]) for pool, each in transfers.items()} == {
        ("prefill", "NixlConnector", "kv_producer"),
        ("decode", "NixlConnector", "kv_consumer"),
    }
    assert said(found)["prefill_config.engine_kwargs.kv_transfer_config.engine_id"].startswith("'engine1' is replaced")


def test_minimum_and_maximum_alone_scale() -> None:
    found = mapped_from((f"both.{SCALING}", {"min_replicas": 1, "max_replicas": 3}), (f"{KWARGS}.max_num_seqs", 16))
    prefill, decode = found.pools["prefill"].targets, found.pools["decode"].targets
    assert (prefill.uncached_tokens, prefill.first_token_s, prefill.kv_usage) == (16384, 2.0, None)
    assert (decode.kv_usage, decode.ongoing_requests, decode.first_token_s) == (0.8, 12.0, None)
    notices = said(found)
    assert {f"prefill_config.{SCALING}.target_uncached_tokens", f"decode_config.{SCALING}.target_kv_usage"} <= set(
        notices
    )
    fixed = said(mapped_from((f"both.{SCALING}", {"min_replicas": 2, "max_replicas": 2})))
    assert not any("target" in field for field in fixed)


def test_written_targets_are_the_only_ones() -> None:
    scaling = {"min_replicas": 1, "max_replicas": 3, "target_ongoing_requests": 4}
    targets = mapped_from((f"both.{SCALING}", scaling)).pools["prefill"].targets
    assert (targets.ongoing_requests, targets.uncached_tokens) == (4, None)


@pytest.mark.parametrize(
    ("change", "path", "value"),
    [
        (("both.model_loading_config.model_source", "/models/x"), "model.path", "/models/x"),
        (("both.model_loading_config.tokenizer_source", "/t"), "prefill.args.tokenizer", "/t"),
        (("both.engine_kwargs.dtype", "float32"), "model.dtype", "float32"),
        (("both.engine_kwargs.max_model_len", 4096), "model.max_model_len", 4096),
        (("both.engine_kwargs.load_format", "dummy"), "model.load_format", "dummy"),
        ((f"{KWARGS}.tensor_parallel_size", 2), "decode.tensor_parallel_size", 2),
        ((f"{KWARGS}.block_size", 32), "decode.block_size_tokens", 32),
        ((f"{KWARGS}.kv_cache_dtype", "fp8"), "decode.kv_cache_dtype", "fp8"),
        ((f"{KWARGS}.kv_cache_memory_bytes", 10**9), "decode.kv_memory_bytes", 10**9),
        ((f"{KWARGS}.gpu_memory_utilization", 0.5), "decode.gpu_memory_utilization", 0.5),
        ((f"{KWARGS}.enforce_eager", False), "decode.enforce_eager", False),
        ((f"{KWARGS}.max_num_seqs", 8), "decode.max_num_seqs", 8),
        ((TRANSFER, NIXL), "decode.kv_transfer_config", NIXL),
        ((f"{KWARGS}.enable_prefix_caching", False), "decode.args.no-enable-prefix-caching", True),
        ((f"{KWARGS}.seed", 1), "decode.args.seed", 1),
        ((KWARGS, {"--swap-space": 2}), "decode.args.swap-space", 2),
        (
            (KWARGS, {"compilation_config.mode": 1}),
            "decode.args",
            {"compilation-config.mode": 1},
        ),
        ((ENV, {"HF_HOME": "/h"}), "decode.env.HF_HOME", "/h"),
        ((ENV, {"A.B": 1}), "decode.env", {"A.B": "1"}),
        (("decode_config.accelerator_type", "L4"), "decode.device", "cuda"),
        (("decode_config.accelerator_config", {"kind": "gpu"}), "decode.device", "cuda"),
        (("decode_config.experimental_configs.NIXL_SIDE_CHANNEL_PORT_BASE", 22000), "decode.side_channel_port", 22000),
        (("decode_config.deployment_config.num_replicas", 3), "decode.replicas", 3),
        ((f"decode_config.{SCALING}", {"max_replicas": 5, "initial_replicas": 2}), "decode.replicas", 2),
        (("antiphon.router.policy", "least_load"), "router.policy", "least_load"),
        (("antiphon.engine.kind", "simulated"), "prefill.kind", "simulated"),
        (("antiphon.decode.simulated", {"decode_token_ms": 3}), "decode.simulated.decode_token_ms", 3),
        (("antiphon.engine.args", {"seed": 2}), "prefill.args.seed", 2),
        (("antiphon.decode.threads", 3), "decode.threads", 3),
        (("antiphon.engine.threads", 2), "decode.threads", 2),
        (("antiphon.cache.quota_bytes", {"a": "2MB"}), "cache.quota_bytes.a", 2_000_000),
        (("antiphon.name", "mine"), "name", "mine"),
    ],
)
def test_each_key_reaches_the_spec(change: Change, path: str, value: Any) -> None:
    assert at(mapped_from(change).spec, path) == value


def test_each_key_reaches_the_replicas() -> None:
    found = mapped_from(
        ("decode_config.accelerator_type", "L4"),
        (f"{KWARGS}.tensor_parallel_size", 2),
        (
            "decode_config.placement_group_config",
            {"bundle_per_worker": {"GPU": 1, "CPU": 4}, "strategy": "STRICT_PACK"},
        ),
        ("decode_config.deployment_config.ray_actor_options", {"memory": 1e9, "label_selector": {"zone": "a"}}),
        ("decode_config.deployment_config.graceful_shutdown_timeout_s", 60),
        ("decode_config.deployment_config.health_check_period_s", 5),
        ("decode_config.deployment_config.max_replicas_per_node", 1),
        (f"decode_config.{SCALING}", {"upscale_delay_s": 1, "downscale_delay_s": 2, "look_back_period_s": 3}),
        (f"decode_config.{SCALING}.upscale_smoothing_factor", 0.5),
        ("decode_config.runtime_env", {"working_dir": "s3://b/w.zip", "env_vars": {"A": "1"}}),
        ("ingress_deployment_config", {"num_replicas": 2, "ray_actor_options": {"num_cpus": 1}}),
    )
    decode = found.pools["decode"]
    assert decode.resources == {"GPU": 2, "CPU": 8, "memory": 1e9}
    assert (decode.accelerator_type, decode.labels, decode.max_replicas_per_node) == ("L4", {"zone": "a"}, 1)
    assert (decode.drain_timeout_s, decode.health_interval_s) == (60, 5)
    assert (decode.upscale_delay_s, decode.downscale_delay_s, decode.look_back_s) == (1, 2, 3)
    assert (decode.upscaling_factor, decode.downscaling_factor) == (0.5, 1.0)
    assert decode.runtime_env == {"working_dir": "s3://b/w.zip"}
    assert (found.ingress.min_replicas, found.ingress.resources) == (2, {"CPU": 1})
    assert found.pools["prefill"].resources == {"CPU": 0.5}
    assert mapped_from(("proxy_deployment_config.num_replicas", 3)).ingress.max_replicas == 3
    assert mapped_from(("decode_config.deployment_config.num_replicas", "auto")).pools["decode"].max_replicas == 100


def test_without_gpus_the_defaults_of_a_cpu_are_filled_in_and_said() -> None:
    found = mapped_from()
    decode = found.spec.decode
    assert (decode.device, decode.enforce_eager, decode.kv_memory_bytes, decode.threads) == (
        "cpu",
        True,
        400_000_000,
        1,
    )
    assert found.pools["decode"].resources == {"CPU": 0.5}
    for field in (
        *("", ".placement_group_config", ".engine_kwargs.enforce_eager", ".engine_kwargs.kv_cache_memory_bytes"),
    ):
        assert f"decode_config{field}" in said(found)
    assert "antiphon.decode.threads" in said(found)
    written = mapped_from(
        ("both.placement_group_config.bundles", [{"CPU": 3}]),
        ("both.engine_kwargs", {"enforce_eager": True, "kv_cache_memory_bytes": 10**9}),
        ("antiphon.engine.threads", 2),
    )
    assert said(written) == {}
    assert mapped_from(("antiphon.decode.threads", 3)).pools["decode"].resources == {"CPU": 3}
    assert (written.spec.decode.threads, written.pools["decode"].resources) == (2, {"CPU": 3})


def test_with_gpus_nothing_is_filled_in() -> None:
    found = mapped_from(machine=GPU_HOST)
    assert said(found) == {}
    assert (found.spec.decode.device, found.spec.decode.enforce_eager) == ("auto", None)
    assert found.pools["decode"].resources == {"CPU": 1, "GPU": 1}
    on_cpu = mapped_from(("antiphon.engine.device", "cpu"), machine=GPU_HOST)
    assert (on_cpu.spec.decode.device, on_cpu.pools["decode"].resources) == ("cpu", {"CPU": 0.5})
    simulated = mapped_from(("antiphon.engine.kind", "simulated"), machine=GPU_HOST)
    assert (simulated.pools["decode"].resources, said(simulated)) == ({"CPU": 0.1}, {})


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        (
            [("decode_config.model_loading_config.model_id", "other")],
            "decode_config.model_loading_config.model_id",
            "prefill_config",
        ),
        (
            [("both.model_loading_config.model_source", "s3://b/m")],
            "prefill_config.model_loading_config.model_source",
            "every node",
        ),
        (
            [(f"{KWARGS}.dtype", "float16")],
            f"{KWARGS}.dtype",
            "in prefill_config too",
        ),
        (
            [("prefill_config.engine_kwargs.dtype", "float16"), (f"{KWARGS}.dtype", "float32")],
            f"{KWARGS}.dtype",
            "'float32', but prefill_config.engine_kwargs.dtype has 'float16'",
        ),
        ([(f"{KWARGS}.model", "x")], None, "model_id"),
        (
            [(f"{KWARGS}.served_model_name", "x")],
            f"{KWARGS}.served_model_name",
            "model_id",
        ),
        ([(f"{KWARGS}.port", 1)], None, "free port"),
        (
            [(f"{KWARGS}.pipeline_parallel_size", 2)],
            f"{KWARGS}.pipeline_parallel_size",
            "tensor_parallel_size",
        ),
        (
            [(f"{KWARGS}.data_parallel_size", 2)],
            f"{KWARGS}.data_parallel_size",
            "more replicas",
        ),
        (
            [(f"{KWARGS}.distributed_executor_backend", "ray")],
            f"{KWARGS}.distributed_executor_backend",
            "write mp",
        ),
        ([(f"{KWARGS}.max_num_seqs", 0)], None, "at least 1"),
        (
            [(f"{KWARGS}.tensor_parallel_size", "x")],
            f"{KWARGS}.tensor_parallel_size",
            "whole number",
        ),
        (
            [(TRANSFER, {"kv_connector": "NixlConector"})],
            f"{TRANSFER}.kv_connector",
            "did you mean NixlConnector?",
        ),
        (
            [
                (
                    TRANSFER,
                    {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
                )
            ],
            f"{TRANSFER}.kv_role",
            "kv_consumer",
        ),
        (
            [(TRANSFER, {"kv_connector": "MooncakeConnector"})],
            f"{TRANSFER}.kv_connector",
            "not a connector of this version",
        ),
        (
            [(f"decode_config.{SCALING}", {"min_replicas": 4, "max_replicas": 2})],
            f"decode_config.{SCALING}.max_replicas",
            "below",
        ),
        (
            [(f"decode_config.{SCALING}", {"min_replicas": 2, "initial_replicas": 5, "max_replicas": 4})],
            f"decode_config.{SCALING}.initial_replicas",
            "not between",
        ),
        (
            [("decode_config.deployment_config.num_replicas", 0)],
            "decode_config.deployment_config.num_replicas",
            "1 to 1024",
        ),
        (
            [("decode_config.deployment_config", {"num_replicas": 2, "autoscaling_config": {"max_replicas": 3}})],
            "decode_config.deployment_config.num_replicas",
            "keep one of them",
        ),
        (
            [(f"prefill_config.{SCALING}.target_kv_usage", 0.5)],
            f"prefill_config.{SCALING}.target_kv_usage",
            "target_first_token_s",
        ),
        (
            [(f"decode_config.{SCALING}.target_first_token_s", 1)],
            f"decode_config.{SCALING}.target_first_token_s",
            "target_kv_usage",
        ),
        (
            [("decode_config.placement_group_config", {"bundles": [{"GPU": 1}], "bundle_per_worker": {"GPU": 1}})],
            "decode_config.placement_group_config",
            "keep one",
        ),
        (
            [("decode_config.placement_group_config.bundles", [{"GPU": 2}])],
            "decode_config.placement_group_config",
            "make them equal",
        ),
        (
            [
                ("decode_config.placement_group_config.bundles", [{"CPU": 2}]),
                ("decode_config.deployment_config.ray_actor_options.num_cpus", 1),
            ],
            "decode_config.deployment_config.ray_actor_options",
            "in one of the two",
        ),
        (
            [("ingress_deployment_config.num_replicas", 1), ("proxy_deployment_config.num_replicas", 1)],
            "proxy_deployment_config",
            "keep ingress_deployment_config",
        ),
        ([("antiphon.supervisor.state_dir", "/x")], None, "Ray knows"),
        ([("antiphon.prefill.hosts", ["a"])], None, "Ray places"),
        ([("antiphon.decode.replicas", 2)], None, "autoscaling_config"),
        ([("antiphon.router.prot", 1)], None, "did you mean router.port?"),
        ([("decode_config.model_loading_config.model_id", "other")], None, "make them equal"),
        ([("antiphon.model.path", "other")], "prefill_config.model_loading_config.model_id", "antiphon.model.path"),
        ([("antiphon.decode", 5)], None, "not a mapping"),
        (
            [(ENV, {"LMCACHE_CHUNK_SIZE": "1"})],
            f"{ENV}.LMCACHE_CHUNK_SIZE",
            "chunk_size",
        ),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(changes: list[Change], field: str | None, words: str) -> None:
    found = refused(*changes)
    assert words in found[field or changes[-1][0]], found


def test_arguments_that_change_nothing() -> None:
    found = mapped_from(
        ("both.engine_kwargs", {"pipeline_parallel_size": 1, "enable_prompt_tokens_details": True, "seed": None})
    )
    assert found.spec.prefill.args == {}
    assert "always given" in said(found)[f"{KWARGS}.enable_prompt_tokens_details"]


def test_one_notice_where_nixl_stands_alone() -> None:
    key = TRANSFER
    assert "leave it out" in said(mapped_from(("both.engine_kwargs.kv_transfer_config", NIXL)))[key]
    both = [{"kv_connector": "NixlConnector"}, {"kv_connector": "LMCacheConnectorV1"}]
    multi = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": both}}
    found = mapped_from(("both.engine_kwargs.kv_transfer_config", multi))
    assert key not in said(found)
    assert [plan.role for plan in compile_all(found.spec, LAPTOP).plans].count("cache_server") == 2


def test_a_transfer_config_may_be_json() -> None:
    found = mapped_from(("both.engine_kwargs.kv_transfer_config", json.dumps(NIXL)))
    assert found.spec.decode.kv_transfer_config == NIXL
    message = refused(("both.engine_kwargs.kv_transfer_config", "{nixl"))
    assert "is not JSON" in message[TRANSFER]
