"""Checks as functions of a spec and stated facts: what the golden files do not show.

In scope: whose facts count (local processes only), limits at their edge, and that a clean report means no clash.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config.checks import run_checks
from antiphon.config.facts import InterpreterFacts
from antiphon.config.model_facts import ModelFacts
from antiphon.config.problems import Problem
from antiphon.core.memory import KEPT_FREE_BYTES
from tests.config.facts_for_tests import GPU_HOST, LAPTOP, compiled_from, facts_of

CPU = {"engine.device": "cpu", "engine.kv_memory_bytes": 10**9, "cache.enabled": False}
CACHED = CPU | {"cache.enabled": True, "cache.l1_size_bytes": 2 * 10**9}


def fields(sets: dict[str, Any], *, machine: Any = LAPTOP, is_running: bool = False, **facts: Any) -> list[str]:
    compiled = compiled_from(sets, machine)
    report = run_checks(compiled, facts_of(compiled, **facts), is_running=is_running)
    return [problem.field for problem in report.problems]


def problems(sets: dict[str, Any], **facts: Any) -> tuple[Problem, ...]:
    compiled = compiled_from(sets)
    return run_checks(compiled, facts_of(compiled, **facts)).problems


def test_the_default_spec_works_on_a_quiet_host() -> None:
    assert fields({}) == []


def test_memory_counts_weights_in_the_type_they_are_loaded_as() -> None:
    # Two engines: 1 GB of KV, 1 GB of processes, and 270 MB of 16-bit weights each, which double as float32.
    for dtype, needed in (("auto", 4_540_000_000), ("bfloat16", 4_540_000_000), ("float32", 5_080_000_000)):
        sets = CPU | {"model.dtype": dtype}
        assert fields(sets, mem_available_bytes=needed) == []
        assert fields(sets, mem_available_bytes=needed - 1) == ["engine.kv_memory_bytes"]


def test_what_is_free_is_not_asked_of_a_running_deployment() -> None:
    taken = {"mem_available_bytes": 0, "shm_free_bytes": 0, "ports_in_use": frozenset({8001, 30000})}
    assert fields(CPU, **taken) == ["engine.kv_memory_bytes", "/dev/shm", "prefill.port", "router.port"]
    assert fields(CPU, is_running=True, **taken) == []


def test_memory_is_one_sum_of_engines_and_cache_servers() -> None:
    # 4.54 GB as above, two servers with 2 GB and a process of 0.1 GB each, and what they leave to others.
    engines, both = 4_540_000_000, 8_740_000_000 + KEPT_FREE_BYTES
    assert fields(CACHED, mem_available_bytes=both) == []
    assert fields(CACHED, mem_available_bytes=both - 1) == ["cache.l1_size_bytes"]
    assert fields(CACHED, mem_available_bytes=engines) == ["cache.l1_size_bytes"]
    assert fields(CACHED, mem_available_bytes=engines - 1) == ["engine.kv_memory_bytes"]
    assert fields(CACHED | {"cache.shared": True}, mem_available_bytes=both - 2_100_000_000) == []
    compiled = compiled_from(CACHED)
    (problem,) = run_checks(compiled, facts_of(compiled, mem_available_bytes=both - 10**9)).problems
    assert "2 engines need 4.54 GB" in problem.message
    assert "2 cache servers need 4.468 GB" in problem.message
    assert "together 9.008 GB, but 8.008 GB is free" in problem.message
    assert "at most 1.5 GB, write cache.shared: true, " in problem.fix
    # What the message says does work.
    assert fields(CACHED | {"cache.l1_size_bytes": "1.5GB"}, mem_available_bytes=both - 10**9) == []


def test_memory_of_cache_servers_counts_beside_gpus_too() -> None:
    sets = {"engine.device": "cuda", "prefill.devices": [0], "decode.devices": [1]}
    sets |= {"cache.enabled": True, "cache.l1_size_bytes": "10GB"}
    needed = 20_200_000_000 + KEPT_FREE_BYTES
    assert fields(sets, mem_available_bytes=needed) == []
    assert fields(sets, mem_available_bytes=needed - 1) == ["cache.l1_size_bytes"]


def test_what_this_deployment_holds_already_is_not_looked_for() -> None:
    compiled = compiled_from(CACHED)
    taken = facts_of(
        compiled,
        mem_available_bytes=0,
        shm_free_bytes=0,
        ports_in_use=frozenset({8001, 5600, 8101, 5700, 6555, 6556, 8090, 8091, 30000}),
        running={plan.name: frozenset(plan.ports.values()) for plan in compiled.plans},
    )
    assert run_checks(compiled, taken).problems == ()
    # A process that is down needs memory, and a port of its own that somebody else has taken.
    partly = replace(taken, running={name: ports for name, ports in taken.running.items() if name != "cache-decode"})
    found = [problem.field for problem in run_checks(compiled, partly).problems]
    assert found == ["cache.l1_size_bytes", "cache.http_port", "cache.port"]
    moved = compiled_from(CACHED | {"decode.port": 9000})
    found = [p.field for p in run_checks(moved, replace(taken, ports_in_use=frozenset({8001, 9000}))).problems]
    assert found == ["decode.port"], "the spec says another port than the one that runs"


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        ({}, []),
        ({"cache.chunk_size_tokens": 64}, ["cache.chunk_size_tokens"]),
        ({"cache.chunk_size_tokens": 64, "engine.block_size_tokens": 32}, []),
        ({"engine.block_size_tokens": 96}, ["cache.chunk_size_tokens"]),
        ({"cache.chunk_size_tokens": 64, "cache.enabled": False}, []),
        (
            {
                "cache.chunk_size_tokens": 48,
                "cache.enabled": True,
                "engine.device": "cuda",
                "engine.gpu_memory_utilization": 0.4,
            },
            [],
        ),
    ],
)
def test_a_chunk_is_whole_blocks(sets: dict[str, Any], found: list[str]) -> None:
    assert fields(CACHED | sets) == found


def test_the_path_of_a_socket_has_a_limit() -> None:
    longest = "/" + "d" * (106 - len("/cache-x-prefiller-0123456789ab.sock"))
    sets = CACHED | {"name": "x"}
    assert fields(sets | {"cache.runtime_dir": longest}) == []
    assert fields(sets | {"cache.runtime_dir": longest + "d"}) == ["cache.runtime_dir"], "decoder is shorter"
    assert fields(sets, runtime_dir=longest + "d") == ["cache.runtime_dir"]
    elsewhere = {"prefill.hosts": ["192.0.2.1"], "decode.hosts": ["192.0.2.1"]}
    assert fields(sets | elsewhere, runtime_dir=longest + "d") == []


def test_the_interpreter_of_an_engine_with_a_cache_has_the_connector() -> None:
    bare = InterpreterFacts("0.32.0", "1.5.1", has_antiphon=False)
    for sets, found in ((CACHED, ["engine.python"]), (CPU, [])):
        compiled = compiled_from(sets)
        keys = facts_of(compiled).interpreters
        report = run_checks(compiled, facts_of(compiled, interpreters=dict.fromkeys(keys, bare)))
        assert [problem.field for problem in report.problems] == found


def test_a_quota_past_the_cache_is_pointed_out() -> None:
    compiled = compiled_from(
        CACHED | {"cache.quota_bytes": {"a": "1GB", "b": "3GB"}, "cache.default_quota_bytes": "4GB"}
    )
    notices = run_checks(compiled, facts_of(compiled)).notices
    found = [notice.field for notice in notices if "limits nothing" in notice.message]
    assert found == ["cache.quota_bytes.b", "cache.default_quota_bytes"]


def test_only_local_processes_use_this_host() -> None:
    sets = CPU | {"prefill.hosts": ["192.0.2.1"], "decode.hosts": ["192.0.2.2"]}
    empty = {"interpreters": {}, "model": ModelFacts(), "mem_available_bytes": 0, "shm_free_bytes": 0}
    assert fields(sets, ports_in_use=frozenset({8001, 8101}), **empty) == []


def test_the_same_port_on_two_hosts_is_no_clash() -> None:
    sets = CPU | {"prefill.hosts": ["192.0.2.1"], "decode.hosts": ["192.0.2.2"], "decode.port": 8001}
    assert fields(sets | {"decode.side_channel_port": 5600}) == []


def test_two_names_of_this_machine_are_one_host() -> None:
    sets = CPU | {"prefill.hosts": ["192.0.2.1"], "decode.port": 8001}
    assert fields(sets, local_hosts=frozenset({"127.0.0.1", "192.0.2.1"})) == ["decode.port"]


def test_versions_are_compared_between_interpreters_of_both_pools() -> None:
    compiled = compiled_from(CPU | {"decode.env": {"PYTHONPATH": "/opt/site"}})
    ours, theirs = InterpreterFacts("0.32.0", "1.5.1"), InterpreterFacts("0.26.0", "1.5.1")
    keys = list(facts_of(compiled).interpreters)
    assert len(keys) == 2, "the same interpreter with another PYTHONPATH is another interpreter"
    report = run_checks(compiled, facts_of(compiled, interpreters=dict(zip(keys, (ours, theirs), strict=True))))
    assert [problem.field for problem in report.problems] == ["decode.python"]


def test_simulated_engines_need_no_interpreter_model_or_memory() -> None:
    empty = {"interpreters": {}, "model": ModelFacts(), "mem_available_bytes": 0, "shm_free_bytes": 0}
    assert fields({"engine.kind": "simulated"}, **empty) == []


@pytest.mark.parametrize(
    ("sets", "found"),
    [
        ({"prefill.devices": [0], "decode.devices": [1]}, []),
        ({}, ["decode.devices"]),
        ({"engine.gpu_memory_utilization": 0.5}, []),
        ({"engine.kv_memory_bytes": "1GB"}, []),
        ({"engine.env": {"CUDA_VISIBLE_DEVICES": "1"}}, ["decode.devices"]),
        ({"prefill.env": {"CUDA_VISIBLE_DEVICES": "1"}}, []),
        ({"prefill.tensor_parallel_size": 4, "prefill.devices": [0, 1]}, ["prefill.devices", "decode.devices"]),
        ({"decode.tensor_parallel_size": 3}, ["decode.tensor_parallel_size", "decode.devices"]),
        ({"prefill.tensor_parallel_size": 2, "decode.tensor_parallel_size": 3}, None),
    ],
)
def test_gpus(sets: dict[str, Any], found: list[str] | None) -> None:
    problems = fields(sets, machine=GPU_HOST)
    if found is None:
        assert "decode.tensor_parallel_size" in problems
    else:
        assert problems == found


def test_cuda_on_a_host_without_a_gpu() -> None:
    assert fields({"engine.device": "cuda", "engine.kv_memory_bytes": "1GB"}, num_cuda_devices=0) == ["engine.device"]
    sets = {"prefill.device": "cuda", "decode.device": "cpu", "prefill.kv_memory_bytes": "1GB"}
    assert fields(sets, num_cuda_devices=0) == ["decode.device", "prefill.device"]


def test_a_simulated_and_a_real_pool_do_not_mix() -> None:
    assert fields({"decode.kind": "simulated"}) == ["decode.kind"]


def test_only_a_word_publishes_the_router() -> None:
    public = {"engine.kind": "simulated", "router.host": "0.0.0.0"}
    assert fields(public) == ["router.host"]
    assert fields(public | {"router.public_without_key": True}) == []
    assert fields(public | {"router.api_key_file": "/etc/keys"}) == []
    assert fields(public | {"router.tenants_file": "/etc/tenants.yaml"}) == []
    # The key is for the admin routes; inference would be open all the same.
    assert fields(public | {"router.admin_key_file": "/etc/key"}) == ["router.host"]


def test_clients_keys_have_one_source() -> None:
    sets = {"engine.kind": "simulated", "router.tenants_file": "/etc/tenants.yaml"}
    assert fields(sets) == []
    both = sets | {"router.api_key_file": "/etc/keys"}
    assert fields(both) == ["router.api_key_file"]
    (problem,) = problems(both)
    assert problem.fix == "remove it, and name the file in api_key_files of a tenant"


def test_a_file_of_tenants_is_reported_problem_by_problem() -> None:
    sets = {"engine.kind": "simulated", "router.tenants_file": "/etc/tenants.yaml"}
    wrong = tuple(Problem(f"/etc/tenants.yaml: tenants[{number}].weight", "is", "do") for number in range(2))
    assert problems(sets, tenants_problems=wrong) == wrong


def test_a_router_elsewhere_cannot_reach_loopback() -> None:
    sets = {"engine.kind": "simulated", "router.host": "192.0.2.3", "router.public_without_key": True}
    assert fields(sets) == ["prefill.hosts", "decode.hosts"]
    assert fields(sets, local_hosts=frozenset({"127.0.0.1", "192.0.2.3"})) == []
    assert fields(sets | {"prefill.hosts": ["192.0.2.1"], "decode.hosts": ["192.0.2.2"]}) == []


@pytest.mark.parametrize(
    ("sets", "found", "filled_s"),
    [
        ({}, [], None),
        ({"supervisor.stop_grace_s": 6}, [], 4.0),
        ({"supervisor.stop_grace_s": 0}, [], 0.0),
        ({"supervisor.stop_grace_s": 6, "router.drain_timeout_s": 5.9}, [], 5.9),
        ({"supervisor.stop_grace_s": 6, "router.drain_timeout_s": 6}, ["router.drain_timeout_s"], 6.0),
        ({"supervisor.stop_grace_s": 0, "router.drain_timeout_s": 0}, [], 0.0),
        ({"supervisor.stop_grace_s": 10, "router.stop_notice_s": 4}, [], 4.0),
        ({"supervisor.stop_grace_s": 10, "router.stop_notice_s": 5, "router.drain_timeout_s": 4.9}, [], 4.9),
        (
            {"supervisor.stop_grace_s": 10, "router.stop_notice_s": 5, "router.drain_timeout_s": 5},
            ["router.drain_timeout_s"],
            5.0,
        ),
        ({"supervisor.stop_grace_s": 10, "router.stop_notice_s": 10}, ["router.stop_notice_s"], 0.0),
        ({"supervisor.stop_grace_s": 0, "router.drain_timeout_s": 1}, ["router.drain_timeout_s"], 1.0),
    ],
)
def test_the_router_drains_within_the_grace(sets: dict[str, Any], found: list[str], filled_s: float | None) -> None:
    sets = {"engine.kind": "simulated", **sets}
    assert fields(sets) == found
    argv = compiled_from(sets).plans[-1].argv
    assert ("--drain-timeout-s" in argv) == (filled_s is not None)
    assert filled_s is None or float(argv[argv.index("--drain-timeout-s") + 1]) == filled_s


@pytest.mark.parametrize(("lease_s", "longest_s"), [(6, 3.0), (9, 4.5), (10, 5.0), (20, 15.0), (100, 95.0)])
def test_a_handover_leaves_a_margin_of_the_lease(lease_s: int, longest_s: float) -> None:
    sets = {"engine.kind": "simulated", "handoff.lease_s": lease_s}
    assert fields(sets | {"router.handover_timeout_s": longest_s}) == []
    assert fields(sets | {"router.handover_timeout_s": longest_s + 0.1}) == ["router.handover_timeout_s"]
    argv = compiled_from(sets).plans[-1].argv
    filled_s = float(argv[argv.index("--handover-timeout-s") + 1]) if "--handover-timeout-s" in argv else 20.0
    assert filled_s == min(20.0, longest_s)


def test_what_is_not_started_needs_no_memory_or_ports() -> None:
    # One engine needs 1 GB of KV, 1 GB of processes and 270 MB of weights.
    compiled = compiled_from(CPU)
    facts = facts_of(
        compiled, mem_available_bytes=2_270_000_000, shm_free_bytes=64 * 2**20, ports_in_use=frozenset({8101, 30000})
    )

    def found(*started: str) -> list[str]:
        return [problem.field for problem in run_checks(compiled, facts, started=started).problems]

    assert found("prefill-0") == []
    assert found("decode-0") == ["decode.port"]
    assert found("prefill-0", "decode-0") == ["engine.kv_memory_bytes", "/dev/shm", "decode.port"]
    assert found("router") == ["router.port"]


def test_a_deployment_names_the_port_of_its_router() -> None:
    assert fields({"router.port": 0}) == ["router.port"]


def test_a_wildcard_is_no_host() -> None:
    assert "prefill.hosts" in fields(CPU | {"prefill.hosts": ["0.0.0.0"]})


ports = st.integers(min_value=1, max_value=65535) | st.integers(min_value=8000, max_value=8003)


@given(
    st.fixed_dictionaries(
        {
            "prefill.port": ports,
            "prefill.side_channel_port": ports,
            "decode.port": ports,
            "decode.side_channel_port": ports,
            "router.port": ports,
            "cache.port": ports,
            "cache.http_port": ports,
            "cache.enabled": st.booleans(),
            "cache.shared": st.booleans(),
            "prefill.replicas": st.integers(1, 3),
            "decode.replicas": st.integers(1, 3),
        }
    )
)
def test_no_problem_means_no_clash_and_a_clash_is_a_problem(sets: dict[str, Any]) -> None:
    compiled = compiled_from({"engine.kind": "simulated", **sets})
    taken = [port for plan in compiled.plans for port in plan.ports.values()]
    has_clash = len(taken) != len(set(taken)) or max(taken) > 65535
    assert bool(run_checks(compiled, facts_of(compiled)).problems) == has_clash
