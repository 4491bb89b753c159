"""The cache in a deployment: which servers there are, with what command line, and what the engines and router are told.

Out of scope: checks (test_checks.py, golden files), and whether a server works (tests/cache_server).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from antiphon.cli.flags import model_from_flags, spec_options
from antiphon.config import cache_servers, transfer_cache
from antiphon.config.cache_server_spec import SIZE_MAX_BYTES, CacheServerSpec
from antiphon.config.compile import Compiled
from antiphon.config.load import load_spec
from antiphon.config.plan import ProcessPlan
from antiphon.config.problems import SpecError
from antiphon.config.resolve import Machine
from antiphon.config.router_spec import RouterSpec
from antiphon.connector import settings
from antiphon.core.tenants import tenant_of
from tests.config.facts_for_tests import GPU_HOST, LAPTOP, compiled_from

CPU = {"engine.device": "cpu", "cache.l1_size_bytes": "1GB"}
TEXTS = {
    "prefill": (
        '{"kv_connector":"MultiConnector","kv_role":"kv_producer","kv_connector_extra_config":{"connectors":'
        '[{"kv_connector":"NixlConnector","kv_role":"kv_producer","kv_load_failure_policy":"fail"},'
        '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":'
        '{"lmcache.mp.host":"tcp://localhost","lmcache.mp.port":6555}}]}}'
    ),
    "decode": (
        '{"kv_connector":"MultiConnector","kv_role":"kv_consumer","kv_connector_extra_config":{"connectors":'
        '[{"kv_connector":"NixlConnector","kv_role":"kv_consumer","kv_load_failure_policy":"fail"},'
        '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both","kv_connector_extra_config":'
        '{"lmcache.mp.host":"tcp://localhost","lmcache.mp.port":6556}}]}}'
    ),
}
"""What command lines written for LMCache's P/D deployment carry."""


def plans_of(compiled: Compiled) -> dict[str, ProcessPlan]:
    return {plan.name: plan for plan in compiled.plans}


def cache_child(plan: ProcessPlan) -> dict[str, Any]:
    """The cache connector that an engine is given."""
    config = json.loads(plan.argv[plan.argv.index("--kv-transfer-config") + 1])
    (child,) = [
        each
        for each in config["kv_connector_extra_config"]["connectors"]
        if each["kv_connector"] == "AntiphonConnector"
    ]
    return dict(child)


def options(plan: ProcessPlan) -> dict[str, Any]:
    return dict(cache_child(plan)["kv_connector_extra_config"])


def server_of_argv(plan: ProcessPlan) -> CacheServerSpec:
    """The command line as the command itself reads it."""
    made: list[CacheServerSpec] = []

    @click.command()
    @spec_options(CacheServerSpec)
    def command(**params: Any) -> None:
        made.append(model_from_flags(CacheServerSpec, params))

    result = CliRunner().invoke(command, list(plan.argv[4:]))
    assert result.exit_code == 0, result.output
    return made[0]


def urls(compiled: Compiled) -> list[str]:
    argv = compiled.plans[-1].argv
    return [argv[index + 1] for index, arg in enumerate(argv) if arg == "--cache-server"]


def test_each_server_has_its_own_folder_of_a_disk_tier_and_shares_the_rest() -> None:
    tiers = ["disk:///var/kv?capacity_gb=10&store=back", "redis://127.0.0.1:6379/0"]
    plans = plans_of(compiled_from(CPU | {"cache.l2": tiers, "cache.onboard_max_s": 3.0}))
    for name, instance in (("cache-prefill", "antiphon-prefiller"), ("cache-decode", "antiphon-decoder")):
        spec = server_of_argv(plans[name])
        assert [tier.url for tier in spec.tiers] == [f"disk:///var/kv/{instance}", "redis://127.0.0.1:6379/0"]
        assert (spec.tiers[0].store, spec.tiers[0].capacity_gb, spec.onboard_max_s) == ("back", 10.0, 3.0)


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        (["nfs://x"], "nfs:// is no tier"),
        (["disk:///var/kv"], "needs a capacity"),
        (["redis://a", "redis://b"], "two tiers are named redis"),
    ],
)
def test_a_tier_that_cannot_be_is_refused(tiers: list[str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        CacheServerSpec(l1_size_gb=1.0, l2=tiers)


def test_one_server_beside_each_engine_by_default() -> None:
    compiled = compiled_from(CPU)
    plans = plans_of(compiled)
    assert list(plans) == ["cache-prefill", "cache-decode", "prefill-0", "decode-0", "router"]
    assert plans["cache-prefill"].argv == (
        *(sys.executable, "-m", "antiphon", "cache-server", "--host", "127.0.0.1", "--port", "6555"),
        *("--http-port", "8090", "--l1-size-gb", "1", "--eviction-policy", "lru", "--chunk-size", "256"),
        *("--instance-id", "antiphon-prefiller"),
    )
    decode = plans["cache-decode"]
    assert (decode.role, decode.kind, decode.ready_path) == ("cache_server", "cache_server", "/readiness")
    assert (decode.ports, decode.base_url) == ({"http": 8091, "calls": 6556}, "http://127.0.0.1:8091")
    assert [options(plans[name]) for name in ("prefill-0", "decode-0")] == [
        {"antiphon.host": "127.0.0.1", "antiphon.port": 6555},
        {"antiphon.host": "127.0.0.1", "antiphon.port": 6556},
    ]
    assert urls(compiled) == ["http://127.0.0.1:8090", "http://127.0.0.1:8091"]
    assert RouterSpec(cache_servers=[urls(compiled)[0] + "/"]).cache_servers == urls(compiled)[:1]


def test_nixl_and_the_cache_share_the_connector_of_an_engine() -> None:
    argv = plans_of(compiled_from(CPU))["decode-0"].argv
    assert json.loads(argv[argv.index("--kv-transfer-config") + 1]) == {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_consumer",
        "engine_id": "decode-0-@INCARNATION@",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_consumer",
                    "kv_buffer_device": "cpu",
                    "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": 30},
                },
                {
                    "kv_connector": "AntiphonConnector",
                    "kv_connector_module_path": "antiphon.connector.vllm_connector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"antiphon.host": "127.0.0.1", "antiphon.port": 6556},
                },
            ]
        },
    }


def test_every_knob_reaches_the_server_and_is_read_back() -> None:
    sets = {
        "engine.device": "cpu",
        "name": "x",
        "cache.shared": True,
        "cache.l1_size_bytes": "1.5GiB",
        "cache.chunk_size_tokens": 512,
        "cache.eviction_policy": "LRU",
        "cache.host": "127.0.0.2",
        "cache.port": 7000,
        "cache.http_port": 7100,
        "cache.quota_bytes": {"a=b": "1MiB", "c": 10**9 + 1},
        "cache.default_quota_bytes": "3MB",
        "cache.runtime_dir": "/run/x",
    }
    compiled = compiled_from(sets)
    plans = plans_of(compiled)
    assert list(plans) == ["cache", "prefill-0", "decode-0", "router"]
    spec = server_of_argv(plans["cache"])
    assert (spec.l1_size_bytes, spec.chunk_size, spec.eviction_policy) == (3 << 29, 512, "lru")
    assert (spec.host, spec.http_host, spec.port, spec.http_port) == ("127.0.0.2", "127.0.0.2", 7000, 7100)
    assert spec.quota_bytes == {tenant_of("a=b"): 1 << 20, "c": 10**9 + 1}
    assert (spec.default_quota_bytes, spec.runtime_dir, spec.instance_id) == (3_000_000, "/run/x", "x-shared")
    assert plans["cache"].base_url == "http://127.0.0.2:7100"
    for name in ("prefill-0", "decode-0"):
        expected = {"antiphon.host": "127.0.0.2", "antiphon.port": 7000, "antiphon.chunk_size": 512}
        assert options(plans[name]) == expected
    assert compiled_from(sets | {"cache.eviction_policy": "arc"}).spec.cache.eviction_policy == "arc"


def test_without_the_cache_an_engine_gets_nixl_alone() -> None:
    compiled = compiled_from(CPU | {"cache.enabled": False})
    assert list(plans_of(compiled)) == ["prefill-0", "decode-0", "router"]
    assert '"kv_connector":"NixlConnector"' in compiled.plans[0].argv[-1]
    assert "AntiphonConnector" not in compiled.plans[0].argv[-1]
    assert urls(compiled) == []
    assert not [notice for notice in compiled.notices if notice.field.startswith("cache")]


def test_each_host_has_its_own_server_and_the_engines_use_it() -> None:
    hosts = {"prefill.hosts": ["10.0.0.1", "10.0.0.2"], "decode.hosts": ["10.0.0.2", "10.0.0.3"]}
    sets = CPU | hosts | {"prefill.replicas": 3, "decode.replicas": 2, "router.host": "10.0.0.2"}
    plans = plans_of(compiled_from(sets))
    placed = {name: (plan.host, plan.ports["calls"]) for name, plan in plans.items() if plan.role == "cache_server"}
    assert placed == {
        "cache-prefill-0": ("10.0.0.1", 6555),
        "cache-prefill-1": ("10.0.0.2", 6555),
        "cache-decode-0": ("10.0.0.2", 6556),
        "cache-decode-1": ("10.0.0.3", 6555),
    }
    ports = {name: options(plan)["antiphon.port"] for name, plan in plans.items() if plan.kind == "vllm"}
    expected = {"prefill-0": 6555, "prefill-1": 6555, "prefill-2": 6555, "decode-0": 6556, "decode-1": 6555}
    assert ports == expected
    # Admin routes answer on their own host: the router reads those beside it, and says which it cannot.
    compiled = compiled_from(sets)
    assert urls(compiled) == ["http://127.0.0.1:8090", "http://127.0.0.1:8091"]
    (notice,) = [each for each in compiled.notices if each.field == "router.cache_servers"]
    assert "cache-prefill-0, cache-decode-1" in notice.message
    shared = plans_of(compiled_from(sets | {"cache.shared": True}))
    names = [name for name, plan in shared.items() if plan.role == "cache_server"]
    assert names == ["cache-0", "cache-1", "cache-2"]
    assert {options(plan)["antiphon.port"] for plan in shared.values() if plan.kind == "vllm"} == {6555}


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.lists(st.sampled_from(["127.0.0.1", "10.0.0.1", "10.0.0.2"]), min_size=1, max_size=3, unique=True),
    st.booleans(),
)
def test_every_engine_has_exactly_one_server_on_its_host(p: int, d: int, hosts: list[str], shared: bool) -> None:
    sets = {"prefill.replicas": p, "decode.replicas": d, "prefill.hosts": hosts, "decode.hosts": hosts[::-1]}
    compiled = compiled_from(CPU | sets | {"cache.shared": shared})
    plans = plans_of(compiled)
    for engine in compiled.engines:
        mine = [server for server in compiled.servers if server.serves(engine)]
        assert len(mine) == 1
        assert mine[0].port == options(plans[engine.name])["antiphon.port"]
        assert plans[mine[0].name].host == engine.host
    assert len({server.instance for server in compiled.servers}) == len(compiled.servers)
    assert {server.name for server in compiled.servers} <= plans.keys()


def test_urls_of_the_user_are_kept() -> None:
    compiled = compiled_from(CPU | {"router.cache_servers": ["http://127.0.0.1:9999"]})
    assert urls(compiled) == ["http://127.0.0.1:9999", "http://127.0.0.1:8090", "http://127.0.0.1:8091"]
    with pytest.raises(SpecError, match="is not the admin URL of a cache server"):
        compiled_from({"router.cache_servers": ["tcp://127.0.0.1:6555"]})


@pytest.mark.parametrize(
    ("free_gb", "size"),
    [(None, 2 << 30), (100, 2 << 30), (10, 13 << 26), (4, 2 << 26), (2, 1 << 26), (0, 1 << 26)],
)
def test_the_size_that_is_not_written_is_a_share_of_what_engines_leave(free_gb: int | None, size: int) -> None:
    free = None if free_gb is None else free_gb * 10**9
    # Two engines take 1.4 GB each; a quarter of the rest is for the two servers, in steps of 64 MiB.
    compiled = compiled_from({"engine.device": "cpu"}, Machine(cores=4, has_cuda=False, mem_available_bytes=free))
    assert [server.l1_size_bytes for server in compiled.servers] == [size] * 2
    (notice,) = [each for each in compiled.notices if each.field == "cache.l1_size_bytes"]
    assert "for each cache server" in notice.message
    on_gpu = compiled_from({"engine.device": "cuda", "cache.enabled": True}, GPU_HOST)
    assert [server.l1_size_bytes for server in on_gpu.servers] == [16 << 30] * 2


def test_simulated_engines_use_none_unless_it_is_written() -> None:
    compiled = compiled_from({"engine.kind": "simulated"})
    assert compiled.servers == ()
    (notice,) = [each for each in compiled.notices if each.field == "cache.enabled"]
    assert "write true to start them" in notice.message
    assert not compiled_from({"engine.kind": "simulated", "cache.enabled": False}).notices
    written = compiled_from({"engine.kind": "simulated", "cache.enabled": True, "cache.l1_size_bytes": "1GB"})
    assert [server.name for server in written.servers] == ["cache-prefill", "cache-decode"]
    assert not written.notices
    assert not any("cache" in arg for plan in written.plans if plan.kind == "simulated" for arg in plan.argv)


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_engines_on_cuda_get_none_unless_it_is_written(device: str) -> None:
    """Memory of the host is taken for the cache where somebody has written of one."""
    sets = {"engine.device": device}
    compiled = compiled_from(sets, GPU_HOST)
    assert compiled.servers == ()
    assert not any("AntiphonConnector" in arg for plan in compiled.plans for arg in plan.argv)
    (notice,) = [each for each in compiled.notices if each.field == "cache.enabled"]
    assert "the prefill and decode engines run on CUDA" in notice.message
    assert "without a cache: section no cache server is started" in notice.message
    assert "write true to start one" in notice.message
    off = compiled_from(sets | {"cache.enabled": False}, GPU_HOST)
    assert "cache.enabled" not in {each.field for each in off.notices}
    written = compiled_from(sets | {"cache.enabled": True}, GPU_HOST)
    assert [server.name for server in written.servers] == ["cache-prefill", "cache-decode"]
    assert "cache.enabled" not in {each.field for each in written.notices}


@pytest.mark.parametrize("engine", [{"engine.device": "cuda"}, {"engine.kind": "simulated"}])
@pytest.mark.parametrize(
    "written",
    [
        {"cache.shared": True},
        {"cache.shared": False},
        {"cache.l1_size_bytes": "1GB"},
        {"cache.eviction_policy": "arc"},
        {"cache.l2": ["redis://127.0.0.1:6379/0"]},
        {"cache.peers": True},
    ],
)
def test_any_key_of_the_cache_starts_the_servers(engine: dict[str, Any], written: dict[str, Any]) -> None:
    compiled = compiled_from(engine | written, GPU_HOST)
    assert compiled.servers
    assert all(any(server.serves(engine) for server in compiled.servers) for engine in compiled.engines)
    assert "cache.enabled" not in {each.field for each in compiled.notices}
    assert compiled_from(engine | written | {"cache.enabled": False}, GPU_HOST).servers == ()


def test_only_the_pool_on_cuda_goes_without() -> None:
    compiled = compiled_from({"engine.device": "cpu", "prefill.device": "cuda"}, GPU_HOST)
    assert [server.name for server in compiled.servers] == ["cache-decode"]
    (notice,) = [each for each in compiled.notices if each.field == "cache.enabled"]
    assert notice.message.startswith("the prefill engines run on CUDA")


def test_a_connector_that_is_written_for_a_pool_on_cuda_gets_its_server() -> None:
    texts = {f"{pool}.kv_transfer_config": text for pool, text in TEXTS.items()}
    compiled = compiled_from({"engine.device": "cuda", "cache.l1_size_bytes": "1GB", **texts}, GPU_HOST)
    assert compiled.problems == ()
    assert len(compiled.servers) == 2


def test_the_largest_size_of_the_spec_is_one_that_a_server_takes() -> None:
    largest = {f"cache.{name}": SIZE_MAX_BYTES for name in ("l1_size_bytes", "default_quota_bytes")}
    compiled = compiled_from(CPU | largest | {"cache.quota_bytes": {"a": SIZE_MAX_BYTES}})
    spec = server_of_argv(plans_of(compiled)["cache-prefill"])
    assert (spec.l1_size_bytes, spec.default_quota_bytes, spec.quota_bytes) == (
        SIZE_MAX_BYTES,
        SIZE_MAX_BYTES,
        {"a": SIZE_MAX_BYTES},
    )
    with pytest.raises(SpecError, match="l1_size_bytes"):
        compiled_from(CPU | {"cache.l1_size_bytes": SIZE_MAX_BYTES + 1})


@pytest.mark.parametrize("names", [("team 1", tenant_of("team 1"))])
def test_a_tenant_has_one_quota(names: tuple[str, str]) -> None:
    with pytest.raises(SpecError, match="are one tenant"):
        compiled_from(CPU | {"cache.quota_bytes": dict.fromkeys(names, "1GB")})


def test_configurations_written_for_lmcache_work_as_they_stand() -> None:
    compiled = compiled_from(CPU | {f"{pool}.kv_transfer_config": text for pool, text in TEXTS.items()})
    assert compiled.problems == ()
    plans, own = plans_of(compiled), plans_of(compiled_from(CPU))
    for name, port in (("prefill-0", 6555), ("decode-0", 6556)):
        assert options(plans[name]) == {"antiphon.host": "localhost", "antiphon.port": port}
        assert cache_child(plans[name]) | {"kv_connector_extra_config": {}} == (
            cache_child(own[name]) | {"kv_connector_extra_config": {}}
        )
        assert '"kv_load_failure_policy":"fail"' in plans[name].argv[-1]
    said = [notice.message for notice in compiled.notices if "AntiphonConnector" in notice.message]
    assert said == ["LMCacheMPConnector is AntiphonConnector here"] * 2
    assert not [notice for notice in compiled.notices if "no cache server" in notice.message]


def test_a_user_without_the_cache_connector_has_no_server() -> None:
    sets = CPU | {"decode.kv_transfer_config": {"kv_connector": "NixlConnector"}}
    compiled = compiled_from(sets)
    assert [server.name for server in compiled.servers] == ["cache-prefill"]
    (notice,) = [each for each in compiled.notices if each.field == "decode.kv_transfer_config"]
    assert "the decode engines reuse no KV" in notice.message
    assert [server.name for server in compiled_from(sets | {"cache.shared": True}).servers] == ["cache"]


def with_child(**options_given: Any) -> Compiled:
    child = {"kv_connector": "AntiphonConnector", "kv_connector_extra_config": options_given.pop("options", {})}
    config = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}, child]},
    }
    return compiled_from(CPU | {"prefill.kv_transfer_config": config, **options_given})


def test_options_of_the_connector_pass_through_and_defaults_fill_in() -> None:
    given = {"antiphon.store": False, "antiphon": {"lookup_timeout_ms": 20}, "lmcache.mp.lazy_offload": True}
    compiled = with_child(options=given)
    assert compiled.problems == ()
    found = options(plans_of(compiled)["prefill-0"])
    assert found == {
        "antiphon.host": "127.0.0.1",
        "antiphon.port": 6555,
        "antiphon.store": False,
        "antiphon.lookup_timeout_ms": 20,
    }
    read, notices = settings.read_settings(found)
    assert (read.port, read.can_store, read.lookup_timeout_ms, notices) == (6555, False, 20, ())
    # With no server of this deployment, the usual port is somebody else's.
    alone = with_child(**{"cache.enabled": False})
    assert options(plans_of(alone)["prefill-0"]) == {"antiphon.host": "127.0.0.1", "antiphon.port": 6555}


def test_the_connector_knows_the_same_options() -> None:
    assert set(settings.KNOWN) == transfer_cache.OWN_KEYS
    assert settings.ALIASES == transfer_cache.ALIASES
    assert settings.ConnectorSettings().chunk_size_tokens == transfer_cache.DEFAULT_CHUNK_SIZE_TOKENS
    assert (
        settings.ConnectorSettings().port
        == transfer_cache.DEFAULT_PORT
        == load_spec(None, {"model.path": "x"}).cache.port
    )


def test_the_module_of_the_connector_is_there() -> None:
    root = Path(settings.__file__).parents[2]
    path = root / (transfer_cache.MODULE_PATH.replace(".", "/") + ".py")
    assert f"class {cache_servers.CACHE_CONNECTOR}" in path.read_text()


def test_an_address_that_others_reach_is_refused() -> None:
    with pytest.raises(SpecError, match=r"cache\.host: '0\.0\.0\.0' is not a loopback address"):
        compiled_from({"cache.host": "0.0.0.0"}, LAPTOP)
