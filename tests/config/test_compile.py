"""The compiler: each process's command line and environment, placement and defaults.

Out of scope: whether it works on a host (test_checks.py), and the text form (tests/cli/test_config_render.py).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config.compile import compile_spec
from antiphon.config.load import load_spec
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import SpecError
from antiphon.config.resolve import Machine
from antiphon.config.router_spec import RouterSpec
from antiphon.core.ids import INCARNATION_PLACEHOLDER
from tests.config.facts_for_tests import GPU_HOST, LAPTOP, compiled_from


def plans_of(sets: dict[str, Any], machine: Machine = LAPTOP) -> dict[str, ProcessPlan]:
    return {plan.name: plan for plan in compiled_from(sets, machine).plans}


def flags(plan: ProcessPlan) -> dict[str, list[str]]:
    """``--flag`` to the values that follow it."""
    found: dict[str, list[str]] = {}
    for arg in plan.argv:
        if arg.startswith("--"):
            found[arg] = []
        elif found:
            found[list(found)[-1]].append(arg)
    return found


def test_vllm_on_cpu_as_it_is_known_to_work() -> None:
    sets = {"engine.device": "cpu", "model.dtype": "float32", "model.max_model_len": 4096, "cache.enabled": False}
    plan = plans_of(sets)["prefill-0"]
    assert plan.argv[:3] == (sys.executable, "-m", "vllm.entrypoints.openai.api_server")
    found = flags(plan)
    transfer = json.loads(found.pop("--kv-transfer-config")[0])
    assert found == {
        "--model": ["/models/tiny"],
        "--served-model-name": ["tiny"],
        "--host": ["127.0.0.1"],
        "--port": ["8001"],
        "--dtype": ["float32"],
        "--max-model-len": ["4096"],
        "--kv-cache-memory-bytes": ["400000000"],
        "--enforce-eager": [],
        "--enable-prompt-tokens-details": [],
    }
    assert transfer == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "engine_id": f"prefill-0-{INCARNATION_PLACEHOLDER}",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30},
    }
    assert plan.env == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "VLLM_HOST_IP": "127.0.0.1",
        "UCX_NET_DEVICES": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_CUMEM_ENABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "2",
        "ANTIPHON_NIXL_PROGRESS_THREAD": "0",
        "ANTIPHON_SPIN_WAIT": "0",
        "TORCHDYNAMO_DISABLE": "1",
    }
    assert plan.unset_env == ("VLLM_CPU_KVCACHE_SPACE",)
    assert (plan.base_url, plan.ready_path, plan.model_name) == ("http://127.0.0.1:8001", "/health", "tiny")
    assert plan.ports == {"http": 8001, "side_channel": 5600}


def test_vllm_on_cuda() -> None:
    plans = plans_of(
        {
            "model.path": "org/big",
            "prefill.replicas": 2,
            "prefill.tensor_parallel_size": 2,
            "prefill.devices": [0, 1, 2, 3],
            "decode.devices": ["GPU-ab"],
            "decode.kv_memory_bytes": "10GB",
            "handoff.kv_load_failure_policy": "recompute",
            "cache.enabled": False,
        },
        GPU_HOST,
    )
    prefill, decode = plans["prefill-1"], plans["decode-0"]
    assert prefill.env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert decode.env["CUDA_VISIBLE_DEVICES"] == "GPU-ab"
    assert flags(prefill)["--tensor-parallel-size"] == ["2"]
    assert flags(prefill)["--gpu-memory-utilization"] == ["0.9"]
    assert flags(decode)["--kv-cache-memory-bytes"] == ["10000000000"]
    for plan in (prefill, decode):
        assert not {"--enforce-eager", "--block-size", "--kv-cache-dtype", "--max-model-len"} & flags(plan).keys()
        transfer = json.loads(flags(plan)["--kv-transfer-config"][0])
        assert (transfer["kv_buffer_device"], transfer["kv_load_failure_policy"]) == ("cuda", "recompute")
        assert (
            not {"HF_HUB_OFFLINE", "OMP_NUM_THREADS", "ANTIPHON_NIXL_PROGRESS_THREAD", "ANTIPHON_SPIN_WAIT"}
            & plan.env.keys()
        )
        assert plan.unset_env == ()
    assert "--gpu-memory-utilization" not in flags(decode)


def test_every_knob_of_an_engine_reaches_its_command_line() -> None:
    plan = plans_of(
        {
            "model.served_name": "m",
            "model.load_format": "dummy",
            "engine.device": "cpu",
            "engine.python": "/opt/v/bin/python",
            "engine.block_size_tokens": 64,
            "engine.kv_cache_dtype": "fp8",
            "engine.kv_memory_bytes": "2GiB",
            "engine.enforce_eager": False,
            "engine.threads": 3,
            "engine.nixl_progress_thread": True,
            "engine.spin_wait": True,
            "engine.max_num_seqs": 16,
            "engine.dev_mode": True,
            "engine.args": {"seed": 1, "trust_remote_code": True, "no-thing": False, "lora": ["a", "b"], "j": {"x": 1}},
            "engine.env": {"UCX_NET_DEVICES": "eth0", "VLLM_USE_FLASHINFER_SAMPLER": "0"},
            "decode.hosts": ["192.0.2.7"],
        }
    )["decode-0"]
    found = flags(plan)
    assert plan.argv[0] == "/opt/v/bin/python"
    expected = {
        "--served-model-name": ["m"],
        "--load-format": ["dummy"],
        "--block-size": ["64"],
        "--kv-cache-dtype": ["fp8"],
        "--kv-cache-memory-bytes": [str(2**31)],
        "--max-num-seqs": ["16"],
        "--seed": ["1"],
        "--trust-remote-code": [],
        "--lora": ["a", "b"],
        "--j": ['{"x":1}'],
        "--host": ["0.0.0.0"],
    }
    assert expected.items() <= found.items()
    assert not {"--enforce-eager", "--no-thing"} & found.keys()
    assert plan.env["UCX_NET_DEVICES"] == "eth0"
    assert plan.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert plan.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert plan.env["OMP_NUM_THREADS"] == "3"
    assert "ANTIPHON_NIXL_PROGRESS_THREAD" not in plan.env
    # Other machines are to reach it: what is opened beside its own ports is left to UCX, vLLM and the user.
    assert not {"VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & plan.env.keys()
    assert "ANTIPHON_SPIN_WAIT" not in plan.env
    assert plan.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "192.0.2.7"


def test_replicas_go_round_the_hosts_and_count_ports_up_on_each() -> None:
    plans = plans_of({"engine.device": "cpu", "prefill.replicas": 3, "prefill.hosts": ["10.0.0.1", "10.0.0.2"]})
    placed = {name: (plan.host, *plan.ports.values()) for name, plan in plans.items() if plan.role == "prefill"}
    assert placed == {
        "prefill-0": ("10.0.0.1", 8001, 5600),
        "prefill-1": ("10.0.0.2", 8001, 5600),
        "prefill-2": ("10.0.0.1", 8002, 5601),
    }
    assert [plans[f"prefill-{i}"].env["OMP_NUM_THREADS"] for i in range(3)] == ["2", "4", "2"]
    assert plans["prefill-0"].argv[plans["prefill-0"].argv.index("--host") + 1] == "0.0.0.0"


@given(
    st.integers(1, 8),
    st.integers(1, 8),
    st.lists(st.sampled_from(["127.0.0.1", "10.0.0.1", "10.0.0.2"]), min_size=1, max_size=3, unique=True),
)
def test_placement_never_gives_a_port_twice(num_prefill: int, num_decode: int, hosts: list[str]) -> None:
    plans = plans_of(
        {"prefill.replicas": num_prefill, "decode.replicas": num_decode, "prefill.hosts": hosts, "decode.hosts": hosts}
    )
    taken = [(plan.host, port) for plan in plans.values() for port in plan.ports.values()]
    assert len(taken) == len(set(taken))
    roles = [plan.role for plan in plans.values() if plan.role != "cache_server"]
    assert roles == ["prefill"] * num_prefill + ["decode"] * num_decode + ["router"]


def test_simulated_engine() -> None:
    plans = plans_of(
        {
            "engine.kind": "simulated",
            "model.max_model_len": 2048,
            "handoff.lease_s": 12,
            "handoff.kv_load_failure_policy": "recompute",
            "engine.max_num_seqs": 9,
            "decode.bind": "0.0.0.0",
            "engine.block_size_tokens": 32,
            "decode.simulated.decode_token_ms": 0.5,
            "decode.simulated.block_size_tokens": 32,
        }
    )
    decode = plans["decode-0"]
    assert decode.argv[:4] == (sys.executable, "-m", "antiphon", "sim-engine")
    assert flags(decode) == {
        "--host": ["0.0.0.0"],
        "--port": ["8101"],
        "--role": ["decode"],
        "--model-name": ["tiny"],
        "--engine-id": [f"decode-0-{INCARNATION_PLACEHOLDER}"],
        "--side-channel-host": ["127.0.0.1"],
        "--side-channel-port": ["5700"],
        "--max-num-seqs": ["9"],
        "--kv-load-failure-policy": ["recompute"],
        "--decode-token-ms": ["0.5"],
        "--block-size-tokens": ["32"],
        "--lease-s": ["12.0"],
        "--max-model-len": ["2048"],
    }
    assert (decode.kind, decode.env, decode.unset_env) == ("simulated", {}, ())


def test_router_command_line_is_that_of_vllm_router_by_default() -> None:
    plan = plans_of({"engine.device": "cpu", "prefill.replicas": 2, "cache.enabled": False})["router"]
    assert plan.argv == (
        *(sys.executable, "-m", "antiphon", "router", "--policy", "round_robin", "--vllm-pd-disaggregation"),
        *("--prefill", "http://127.0.0.1:8001", "--prefill", "http://127.0.0.1:8002"),
        *("--decode", "http://127.0.0.1:8101", "--host", "127.0.0.1", "--port", "30000"),
    )
    assert (plan.base_url, plan.ready_path) == ("http://127.0.0.1:30000", "/readiness")


def test_router_knobs_that_are_not_defaults_follow() -> None:
    argv = plans_of(
        {"router.vllm_pd_disaggregation": False, "router.request_id_tag": False, "router.access_log": True}
        | {"router.idle_timeout_s": 5, "handoff.lease_s": 9, "router.host": "0.0.0.0", "prefill.hosts": ["10.0.0.1"]}
    )["router"]
    assert argv.argv[-6:] == (
        *("--idle-timeout-s", "5.0", "--handover-timeout-s", "4.5"),
        *("--no-request-id-tag", "--access-log"),
    )
    assert "--no-vllm-pd-disaggregation" in argv.argv
    assert argv.base_url == "http://10.0.0.1:30000"


def test_key_files_go_to_those_who_read_them() -> None:
    keys = {"api_key_file": "/k/clients", "worker_api_key_file": "~/worker", "admin_key_file": "/k/admin"}
    sets = {"engine.device": "cpu"} | {f"router.{name}": path for name, path in keys.items()}
    plans = plans_of(sets | {"decode.env": {"VLLM_API_KEY": "own"}})
    router = flags(plans["router"])
    assert [router[f"--{name.replace('_', '-')}"] for name in keys] == [[path] for path in keys.values()]
    assert plans["prefill-0"].env_files == {"VLLM_API_KEY": str(Path("~/worker").expanduser())}
    assert (plans["decode-0"].env_files, plans["decode-0"].env["VLLM_API_KEY"]) == ({}, "own")
    assert plans["router"].env_files == {}
    assert plans_of({"engine.device": "cpu"})["prefill-0"].env_files == {}


def test_ipv6_hosts_get_brackets() -> None:
    plans = plans_of({"engine.device": "cpu", "prefill.hosts": ["fd00::1"]})
    assert plans["prefill-0"].base_url == "http://[fd00::1]:8001"
    router = plans["router"].argv
    assert RouterSpec(prefill=[router[router.index("--prefill") + 1]]).prefill == ["http://[fd00::1]:8001"]


def test_each_start_is_a_new_incarnation() -> None:
    plan = plans_of({"engine.device": "cpu"})["prefill-0"]
    first, second = plan.born("aaa"), plan.born("bbb")
    assert '"engine_id":"prefill-0-aaa"' in first.argv[-1]
    assert '"engine_id":"prefill-0-bbb"' in second.argv[-1]
    assert INCARNATION_PLACEHOLDER not in " ".join(first.argv)


def test_a_local_folder_without_slashes_at_its_start_is_offline_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "tiny").mkdir(parents=True)
    assert "HF_HUB_OFFLINE" not in plans_of({"model.path": "org/tiny"})["prefill-0"].env
    monkeypatch.chdir(tmp_path)
    assert plans_of({"model.path": "org/tiny"})["prefill-0"].env["HF_HUB_OFFLINE"] == "1"


def test_compile_spec_raises_what_cannot_be_expressed() -> None:
    spec = load_spec(None, {"model.path": "a/b", "decode.kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}})
    with pytest.raises(SpecError, match="hands none from prefill to decode"):
        compile_spec(spec, LAPTOP)
    assert len(compile_spec(load_spec(None, {"model.path": "a/b"}), LAPTOP)) == 5


def test_libraries_that_the_install_brought_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/lib")
    (tmp_path / "native").mkdir()
    plan = plans_of({"engine.python": f"{tmp_path}/bin/python"})["prefill-0"]
    assert plan.env["LD_LIBRARY_PATH"] == f"{tmp_path}/native:/opt/lib"
    (tmp_path / "native").rmdir()
    assert "LD_LIBRARY_PATH" not in plans_of({"engine.python": f"{tmp_path}/bin/python"})["prefill-0"].env
