"""What a model's ``config.json`` tells of its KV: known kinds exactly, unknown ones not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.checks import run_checks
from antiphon.config.facts import gather_facts
from antiphon.config.model_facts import ModelFacts
from antiphon.config.model_shape import kv_values_per_token, longest_request_tokens
from tests.config.facts_for_tests import compiled_from, facts_of

SMALL = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (SMALL, 2 * 30 * 3 * 64),
        (SMALL | {"head_dim": 128}, 2 * 30 * 3 * 128),
        ({key: value for key, value in SMALL.items() if key != "num_key_value_heads"}, 2 * 30 * 9 * 64),
        ({"text_config": SMALL, "num_hidden_layers": 1}, 2 * 30 * 3 * 64),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61 * 576),
        ({"num_hidden_layers": 61, "kv_lora_rank": 512}, None),
        (SMALL | {"layer_types": ["full_attention", "sliding_attention"]}, 2 * 30 * 3 * 64),
        (SMALL | {"layer_types": ["full_attention", "linear_attention"]}, None),
        (SMALL | {"attn_layer_period": 8}, None),
        (SMALL | {"num_hidden_layers": "30"}, None),
        ({"n_layer": 12, "n_head": 12}, None),
        ({}, None),
    ],
)
def test_kv_of_a_token(config: dict[str, Any], values: int | None) -> None:
    assert kv_values_per_token(config) == values


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 8192}, 8192),
        ({"max_position_embeddings": 8192, "rope_scaling": {"factor": 4.0}}, 32768),
        ({"max_position_embeddings": 8192, "rope_parameters": {"rope_theta": 1e4}}, 8192),
        ({"text_config": {"max_position_embeddings": 100}}, 100),
        ({}, None),
    ],
)
def test_longest_request(config: dict[str, Any], tokens: int | None) -> None:
    assert longest_request_tokens(config) == tokens


@pytest.mark.parametrize(
    ("saved", "dtype", "cache_dtype", "value_bytes"),
    [
        ("bfloat16", "auto", "auto", 2),
        ("float32", "auto", "auto", 2),
        ("bfloat16", "float32", "auto", 4),
        ("bfloat16", "float32", "bfloat16", 2),
        ("bfloat16", "auto", "fp8_e4m3", 1),
        ("bfloat16", "auto", "unheard_of", None),
        (None, "auto", "auto", None),
    ],
)
def test_bytes_of_a_token(saved: str | None, dtype: str, cache_dtype: str, value_bytes: int | None) -> None:
    model = ModelFacts(saved_dtype=saved, kv_values_per_token=100)
    assert model.kv_token_bytes(dtype, cache_dtype) == (None if value_bytes is None else 100 * value_bytes)
    assert replace(model, kv_values_per_token=None).kv_token_bytes(dtype, cache_dtype) is None


def test_a_folder_is_read(tmp_path: Path) -> None:
    text = json.dumps(SMALL | {"max_position_embeddings": 8192, "torch_dtype": "bfloat16"})
    (tmp_path / "config.json").write_text(text)
    model = gather_facts(compiled_from({"model.path": str(tmp_path), "engine.device": "cpu"})).model
    assert (model.kv_values_per_token, model.longest_request_tokens) == (11520, 8192)
    (tmp_path / "config.json").write_text("[]")
    model = gather_facts(compiled_from({"model.path": str(tmp_path), "engine.device": "cpu"})).model
    assert (model.kv_values_per_token, model.longest_request_tokens) == (None, None)


def found(sets: dict[str, Any], **model: Any) -> tuple[list[str], list[str]]:
    compiled = compiled_from({"engine.device": "cpu", "engine.kv_memory_bytes": 10**9, **sets})
    facts = ModelFacts(is_folder=True, saved_dtype="bfloat16", **model)
    report = run_checks(compiled, facts_of(compiled, model=facts))
    return [item.field for item in report.problems], [item.field for item in report.notices if "chunks" in item.message]


def test_a_server_holds_eight_chunks_at_the_least_and_few_are_pointed_out() -> None:
    chunk = 4000 * 2 * 256
    for num_bytes, expected in (
        (8 * chunk - 1, (["cache.l1_size_bytes"], [])),
        (8 * chunk, ([], ["cache.l1_size_bytes"])),
        (64 * chunk - 1, ([], ["cache.l1_size_bytes"])),
        (64 * chunk, ([], [])),
    ):
        assert found({"cache.l1_size_bytes": num_bytes}, kv_values_per_token=4000) == expected
    assert found({"cache.l1_size_bytes": 10**6}) == ([], [])
    assert found({"cache.l1_size_bytes": 10**6, "cache.enabled": False}, kv_values_per_token=4000) == ([], [])


def test_the_longest_request_fills_a_chunk() -> None:
    big = {"cache.l1_size_bytes": 10**9}
    for length, problems in ((256, ["cache.chunk_size_tokens"]), (257, [])):
        assert found(big | {"model.max_model_len": length})[0] == problems
        assert found(big, longest_request_tokens=length)[0] == problems
        assert found(big | {"model.max_model_len": length}, longest_request_tokens=8192)[0] == problems
        assert found(big | {"model.max_model_len": length, "cache.enabled": False})[0] == []


def test_a_running_deployment_is_held_against_all_the_memory() -> None:
    compiled = compiled_from({"engine.device": "cpu", "engine.kv_memory_bytes": 10**9, "cache.enabled": False})
    running = {plan.name: frozenset(plan.ports.values()) for plan in compiled.plans}
    for total, problems in ((4_540_000_000, 0), (4_539_999_999, 1)):
        facts = facts_of(compiled, mem_available_bytes=0, mem_total_bytes=total, running=running)
        for is_running in (False, True):
            report = run_checks(compiled, facts, is_running=is_running)
            assert len(report.problems) == problems
            assert all("is all that this host has" in problem.message for problem in report.problems)
    total = gather_facts(compiled).mem_total_bytes
    assert total is not None
    assert 10**8 < total < 10**15
