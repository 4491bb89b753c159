"""The connector's class against recorded hooks of the oldest and the newest vLLM that it knows."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from antiphon.connector import compat, identity
from tests.connector.hooks import VERSIONS, problems, records

CONNECTOR = "AntiphonConnector"
RECORDS = records()


def connector_source() -> str:
    spec = find_spec("antiphon.connector")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return (Path(spec.submodule_search_locations[0]) / "vllm_connector.py").read_text()


def test_the_records_are_of_the_versions_that_are_supported() -> None:
    for version, bound in zip(VERSIONS, (compat.OLDEST, compat.NEWEST), strict=True):
        record = RECORDS[version]
        assert record["version"].startswith(f"{version}.")
        assert compat.minor_version(record["version"]) == bound
        assert len(record["hooks"]) > 30
        assert sum(len(calls) for calls in record["calls"].values()) > 60
        assert record["constructor_calls"] == [3]
        assert [item["name"] for item in record["factory"]["register_connector"]["parameters"]] == [
            *("name", "module_path", "class_name")
        ]


def test_the_connector_fits_both_versions() -> None:
    assert problems(connector_source(), CONNECTOR, RECORDS) == []


FITTING = """
class Fake:
    def __init__(self, vllm_config, role, kv_cache_config): self.mine = 1
    def start_load_kv(self, forward_context, **kwargs): ...
    def wait_for_layer_load(self, layer_name): ...
    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...
    def wait_for_save(self): ...
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...
    def update_state_after_alloc(self, request, blocks, num_external_tokens): ...
    def build_connector_meta(self, scheduler_output): ...
    def request_finished_all_groups(self, request, block_ids): ...
    def get_finished(self, finished_req_ids): ...
    @property
    def requires_kv_delivery(self): ...
    @classmethod
    def get_required_kvcache_layout(cls, vllm_config): ...
"""


def test_a_class_that_fits_has_no_problem() -> None:
    assert problems(FITTING, "Fake", RECORDS) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("    def wait_for_save(self): ...\n", "", "0.26: wait_for_save is abstract, and not there"),
        ("def get_finished(", "def get_finish(", "get_finish: no version of vLLM has this hook"),
        ("forward_context, **kwargs", "forward_context", r"0.32: start_load_kv lacks \*\*kwargs"),
        ("request, blocks, num_external_tokens", "request, blocks", "lacks the parameter num_external_tokens"),
        ("request, block_ids", "request, blocks", "calls its parameter 2 blocks, where vLLM has block_ids"),
        ("self, finished_req_ids", "self, finished_req_ids, more", "requires more, which vLLM does not give"),
        ("self, finished_req_ids", "self", "0.26: get_finished is called in .*: 1 arguments, where 0 are taken"),
        ("    @property\n", "", "0.32: requires_kv_delivery is a method, where vLLM has a property"),
        ("    @classmethod\n", "", "get_required_kvcache_layout is a method, where vLLM has a classmethod"),
        ("self.mine = 1", "self._role = 1", "0.26: _role belongs to vLLM's base class"),
        ("kv_cache_config): self", "cache_config): self", "__init__ calls its parameter 3 cache_config"),
        ("def wait_for_save(self", "def wait_for_save(self, *, now", "requires now, which vLLM does not give"),
    ],
)
def test_what_does_not_fit_is_found(old: str, new: str, problem: str) -> None:
    assert FITTING.count(old) == 1
    found = problems(FITTING.replace(old, new), "Fake", RECORDS)
    assert found
    assert any(re.search(problem, item) for item in found), found


# ---- fields ----------------------------------------------------------------------------------------------------------


def fields_of(protocol: type) -> set[str]:
    """Names that a Protocol asks for."""
    return set(inspect.get_annotations(protocol)) | {
        name for name, value in vars(protocol).items() if isinstance(value, property)
    }


def attributes_read(module: Any, names: dict[str, str]) -> dict[str, set[str]]:
    """For each variable of ``names``: attributes that the module's source reads of it, by the name of its class."""
    found: dict[str, set[str]] = {kind: set() for kind in names.values()}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in names:
            found[names[node.value.id]].add(node.attr)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_fields_that_are_read_exist(version: str) -> None:
    fields = {name: set(names) for name, names in RECORDS[version]["fields"].items()}
    read = {
        "Request": fields_of(compat.RequestFields),
        "MultiModalFeatureSpec": fields_of(compat.Feature),
        "PlaceholderRange": fields_of(compat.Placeholder),
        "LoRARequest": fields_of(compat.Adapter),
        "RequestStatus": set(compat.ENDED_EARLY),
    }
    variables = {"scheduler_output": "SchedulerOutput", "cached": "CachedRequestData", "new": "NewRequestData"}
    read |= attributes_read(compat, variables)
    for name, names in read.items():
        assert names
        assert names <= fields[name], f"{name} of vLLM {version} has no {names - fields[name]}"
    spec = attributes_read(identity, {"spec": "spec"})["spec"]
    specs = fields["KVCacheSpec"] | fields["AttentionSpec"] | fields["FullAttentionSpec"]
    assert {"block_size", "num_kv_heads", "head_size", "dtype", "page_size_bytes"} <= spec
    assert spec <= specs
    assert {"kv_connector_extra_config", "engine_id"} <= fields["KVTransferConfig"]
    assert {"finished_recving", "invalid_block_ids", "kv_connector_worker_meta"} <= fields["KVConnectorOutput"]
    assert {"prompt_logprobs"} <= fields["SamplingParams"]


# ---- the real one ----------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_installed_vllm_takes_the_connector(tmp_path: Path) -> None:
    program = Path(__file__).with_name("real_vllm.py")
    done = subprocess.run(
        [sys.executable, f"{program}", f"{tmp_path}"],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("isa") in {"amx", "vec", "neon", "rvv", "vxe", "vsx"}
    assert found.pop("isa_of_small_blocks") in {"vec16", "neon"}
    assert json.loads(found["positional"].pop("rope_parameters"))["rope_theta"] == 5000.0
    assert found == {
        "is_known": True,
        "is_same": True,
        "is_registered_again": False,
        "is_connector": True,
        "abstract": [],
        "takes_kv_cache_config": True,
        "source": "host",
        "engine": ["prefill-0", "0123456789ab"],
        "model": ["tiny", ["dummy", "dtype=bfloat16"], "bfloat16"],
        "positional": {"max_position_embeddings": "512"},
        "slab_bytes": 2 * 256 * 2 * 32 * 2,
        "notices": [],
        "tenant": "team",
        "bypass": "prompt_logprobs need every prompt token computed",
        "tokens": [1, 2, 3],
        "has_ended_early": False,
        "tensors": None,
        "unsupported": None,
    }
