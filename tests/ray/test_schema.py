"""The schema takes what Ray's takes, and says of everything else what was meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.config.problems import SpecError
from antiphon.core.errors import ConfigError
from antiphon.ray import LLMConfig, PDServingArgs
from antiphon.ray.schema import parse
from tests.ray.configs import MODEL, Change, mapped_from, pd_config, refused, said

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}


def python_config() -> LLMConfig:
    """As in the Python example of Ray's documentation."""
    return LLMConfig(
        model_loading_config={"model_id": MODEL},
        engine_kwargs={"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
    )


def test_objects_and_mappings_mean_the_same() -> None:
    objects = parse({"prefill_config": python_config(), "decode_config": python_config()})
    mappings = parse(pd_config(("both.engine_kwargs.kv_transfer_config", NIXL)))
    assert objects.model_dump() == mappings.model_dump()
    assert isinstance(objects, PDServingArgs)
    assert parse(objects) is objects


def test_a_config_may_be_the_name_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "prefill.yaml").write_text(f"model_loading_config: {{model_id: {MODEL}}}\naccelerator_type: L4\n")
    values = {**pd_config(), "prefill_config": "prefill.yaml"}
    assert parse(values, tmp_path).prefill_config.accelerator_type == "L4"
    with pytest.raises(SpecError, match=r"prefill_config: .*absent\.yaml: cannot be read"):
        parse({**values, "prefill_config": "absent.yaml"}, tmp_path)


@pytest.mark.parametrize(
    ("change", "field", "words"),
    [
        (("prefil_config", {}), "prefil_config", "did you mean prefill_config?"),
        (("prefill_config.modle_loading_config", {}), None, "did you mean prefill_config.model_loading_config?"),
        (("both.model_loading_config.modelid", "x"), None, ".model_loading_config.model_id?"),
        (("decode_config.engine_kwarg", {}), None, "did you mean decode_config.engine_kwargs?"),
        (("decode_config.deployment_config.autoscaling", {}), None, "deployment_config.autoscaling_config?"),
        (
            ("decode_config.deployment_config.autoscaling_config.min_replica", 2),
            None,
            "did you mean decode_config.deployment_config.autoscaling_config.min_replicas?",
        ),
        (("decode_config.runtime_env.env_var", {}), None, "did you mean decode_config.runtime_env.env_vars?"),
        (("decode_config.accelerator_typ", "L4"), None, "did you mean decode_config.accelerator_type?"),
        (("decode_config.placement_group_config.bundle", []), None, "placement_group_config.bundles?"),
        (("decode_config.experimental_configs.KV_EVENT_PORT_BASE", 1), None, "KV_EVENTS_PORT_BASE?"),
        (("decode_config.min_replicas", 2), None, "deployment_config.autoscaling_config.min_replicas?"),
        (("zzz", 1), "zzz", "known here: prefill_config, decode_config"),
    ],
)
def test_an_unknown_key_names_the_nearest(change: Change, field: str | None, words: str) -> None:
    found = refused(change)
    path = field or change[0].replace("both", "prefill_config")
    assert "is not a known key" in found[path]
    assert words in found[path]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("prefill_config.deployment_config.autoscaling_config.min_replicas", 0), "at least 1"),
        (("prefill_config.deployment_config.autoscaling_config.max_replicas", "x"), "must be a whole number"),
        (("prefill_config.llm_engine", "SGLang"), "is not one of vLLM"),
        (("prefill_config.placement_group_config.strategy", "SPREAD"), "is not one of PACK, STRICT_PACK"),
        (("prefill_config.model_loading_config", {}), "is required"),
        (("prefill_config.runtime_env.env_vars", {"A": True}), "must be text"),
    ],
)
def test_a_wrong_value_is_named(change: Change, words: str) -> None:
    found = refused(change)
    assert len(found) == 1
    ((field, text),) = found.items()
    assert field.startswith(change[0])
    assert words in text


def test_a_pd_config_is_a_mapping() -> None:
    with pytest.raises(SpecError, match="is a list, not a mapping"):
        parse([python_config(), python_config()])


def test_every_problem_is_said_at_once() -> None:
    assert len(refused(("x", 1), ("y", 2), ("prefill_config.z", 3))) == 3


def test_python_objects_raise_the_typed_error() -> None:
    with pytest.raises(ConfigError, match=r"did you mean engine_kwargs\?"):
        LLMConfig(model_loading_config={"model_id": MODEL}, engine_kwarg={})
    with pytest.raises(SpecError, match="model_loading_config: is required"):
        LLMConfig()


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("deployment_config.max_ongoing_requests", 5, "is ignored: requests do not pass through Serve's handles"),
        ("deployment_config.autoscaling_config.aggregation_function", "max", "the mean"),
        ("experimental_configs.stream_batching_interval_ms", 0, "as they come"),
        ("experimental_configs._prewarm_prefill_decode", True, "router.warm_pairs"),
        ("log_engine_metrics", False, "always"),
    ],
)
def test_an_ignored_key_is_said(key: str, value: Any, words: str) -> None:
    assert words in said(mapped_from((f"decode_config.{key}", value)))[f"decode_config.{key}"]


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("decode_config.lora_config", "not in this version -> remove it"),
        ("decode_config.server_cls", "not a class"),
        ("decode_config.deployment_config.request_router_config", "antiphon.router.policy"),
        ("decode_config.deployment_config.placement_group_bundles", "write placement_group_config.bundles"),
        ("decode_config.deployment_config.ray_actor_options.runtime_env", "write it as runtime_env"),
        ("ingress_cls_config", "forwards to the router"),
    ],
)
def test_a_refused_key_says_why(key: str, words: str) -> None:
    assert words in refused((key, {"a": 1}))[key]
    assert said(mapped_from((key, None))), "null asks for nothing"
