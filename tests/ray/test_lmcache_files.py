"""LMCache's files, each key: mapped, ignored with a notice, or refused with the name of the part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.load import load_spec, read_mapping
from antiphon.config.tier_spec import parse_tier
from antiphon.ray.lmcache_files import KEYS, interpret, not_built, read_lmcache_file, unreadable
from antiphon.ray.mapping import Mapped, mapped
from antiphon.ray.serve_file import read_serve_file
from tests.ray.configs import DATA, LAPTOP, refused

CONNECTOR = "engine_kwargs.kv_transfer_config.kv_connector"
FILE = "runtime_env.env_vars.LMCACHE_CONFIG_FILE"
NOBODY = 65534
MOONCAKE_TIER = (
    "mooncake://storage-server:49999?timeout_s=1.0&metadata=etcd%3A%2F%2Fmetadata-server%3A2379"
    "&local_host=compute-node-001&segment_gb=3.3554432&protocol=rdma&devices=rdma0"
)
SAMPLES: dict[str, Any] = {"bool": True, "int": 4096, "GiB": 2, "text": "x", "list": ["UCX"], "any": "x"}


def meaning_of(name: str) -> Mapped:
    application = read_serve_file(DATA / name)
    return mapped(application.args, folder=application.folder, machine=LAPTOP)


def test_the_second_file_hands_over_through_the_cache_servers() -> None:
    found = meaning_of("lmcache_nixl.yaml")
    assert found.spec.handoff.kind == "cache"
    assert found.spec.cache.enabled
    assert found.spec.prefill.kv_transfer_config is None, "the connector is made from the spec"
    said = {notice.field: notice.message for notice in found.notices}
    assert "handed over through the cache servers" in said[f"prefill_config.{CONNECTOR}"]
    extra = "prefill_config.engine_kwargs.kv_transfer_config.kv_connector_extra_config"
    assert "computed by the decode engine" in said[f"{extra}.discard_partial_chunks"]
    assert any("between nodes nothing is handed over" in text for text in said.values())


def test_with_peers_nodes_hand_over_to_each_other() -> None:
    application = read_serve_file(DATA / "lmcache_nixl.yaml")
    args = application.args.model_copy(update={"antiphon": {"cache": {"peers": True}}})
    found = mapped(args, folder=application.folder, machine=LAPTOP)
    assert (found.spec.handoff.kind, found.spec.cache.peers) == ("cache", True)
    assert not any("between nodes nothing" in notice.message for notice in found.notices)


def test_servers_that_ask_each_other_need_l1() -> None:
    found = interpret({"enable_p2p": True, "local_cpu": False, "p2p_host": "localhost"}, "decode", "f")
    assert found.values == {"cache.peers": True, "cache.enabled": True}
    assert [notice.field for notice in found.notices] == ["f: p2p_host"]


def test_the_third_file_hands_over_through_a_mooncake_store() -> None:
    found = meaning_of("lmcache_mooncake.yaml")
    assert found.spec.handoff.kind == "cache"
    (tier,) = map(parse_tier, found.spec.cache.l2)
    assert (tier.url, tier.metadata) == ("mooncake://storage-server:49999", "etcd://metadata-server:2379")
    assert (tier.local_host, tier.protocol, tier.devices) == ("compute-node-001", "rdma", "rdma0")
    assert (tier.segment_gb, tier.timeout_s) == (3.3554432, 1.0)
    assert not any("between nodes nothing" in notice.message for notice in found.notices)


@pytest.mark.parametrize(
    ("name", "pool", "values"),
    [
        (
            "lmcache_prefiller.yaml",
            "prefill",
            {
                "cache.enabled": True,
                "cache.l1_size_bytes": 1 << 30,
                "decode.side_channel_port": 55555,
                "handoff.kind": "cache",
                "handoff.kv_buffer_device": "auto",
            },
        ),
        (
            "lmcache_mooncake_store.yaml",
            "decode",
            {
                "cache.chunk_size_tokens": 256,
                "cache.enabled": True,
                "cache.l1_size_bytes": 5 << 30,
                "cache.l2": [MOONCAKE_TIER],
            },
        ),
    ],
)
def test_what_a_file_is_mapped_to(name: str, pool: Any, values: dict[str, Any]) -> None:
    found = read_lmcache_file(DATA / name, pool, "here")
    assert (found.problems, found.values) == ([], values)
    spec = load_spec(None, {"model.path": "m", **values})
    assert spec.cache.enabled, "the values are those of the spec"


def test_an_etcd_with_a_user_and_tls() -> None:
    """What LMCache has no words for stands beside its own."""
    raw = read_mapping(DATA / "lmcache_mooncake_store.yaml")
    raw["extra_config"] |= {
        "metadata_server": "etcds://metadata-server:2379",
        "metadata_user": "kv",
        "metadata_password_file": "/etc/pw",
        "metadata_ca_file": "/etc/ca.pem",
    }
    found = interpret(raw, "decode", "f")
    assert found.problems == []
    (tier,) = map(parse_tier, found.values["cache.l2"])
    assert (tier.metadata, tier.metadata_members) == ("etcds://metadata-server:2379", ["metadata-server:2379"])
    assert (tier.metadata_user, tier.metadata_password_file, tier.metadata_ca_file) == ("kv", "/etc/pw", "/etc/ca.pem")


def test_a_password_in_the_url_of_etcd_is_refused_and_not_shown() -> None:
    raw = read_mapping(DATA / "lmcache_mooncake_store.yaml")
    raw["extra_config"]["metadata_server"] = "etcd://kv:hunter2@metadata-server:2379"
    (problem,) = interpret(raw, "decode", "f").problems
    assert "metadata_password_file" in problem.message
    assert "hunter2" not in f"{problem.message} {problem.fix}"


def test_both_roles_of_the_second_file_agree() -> None:
    files = [("lmcache_prefiller.yaml", "prefill"), ("lmcache_decoder.yaml", "decode")]
    prefill, decode = (read_lmcache_file(DATA / name, pool, "here") for name, pool in files)  # type: ignore[arg-type]
    assert prefill.values == decode.values
    assert "nixl_role" in read_lmcache_file(DATA / files[0][0], "decode", "here").problems[0].field


@pytest.mark.parametrize("name", KEYS)
def test_every_key_meets_its_fate(name: str) -> None:
    key = KEYS[name]
    special = {"nixl_role": "sender", "nixl_buffer_device": "cpu", "nixl_buffer_size": 1 << 30}
    special["remote_url"] = "mooncakestore://host:49999/"
    value = special.get(name, SAMPLES[key.kind])
    outer, _, inner = name.partition(".")
    found = interpret({outer: {inner: value} if inner else value}, "prefill", "f")
    fields = [notice.field for notice in found.notices]
    if key.fate == "ignored":
        assert (fields, found.values, found.missing) == ([f"f: {name}"], {}, {})
    elif key.fate == "refused":
        assert list(found.missing.values()) == [[name]]
        assert name in not_built(found, "f")[0].message
    elif name.startswith("extra_config."):
        assert (fields, found.values) == ([f"f: {name}"], {}), "an option of no store"
    elif name != "nixl_role":
        assert list(found.values) == [key.to]
        load_spec(None, {"model.path": "m", **found.values})
    assert found.problems == []


@pytest.mark.parametrize("name", KEYS)
def test_a_value_that_asks_for_nothing_is_passed_over(name: str) -> None:
    outer, _, inner = name.partition(".")
    for value in KEYS[name].harmless:
        found = interpret({outer: {inner: value} if inner else value}, "prefill", "f")
        assert (found.missing, found.problems, found.notices, found.values) == ({}, [], [], {})


@pytest.mark.parametrize(
    ("raw", "field", "words"),
    [
        ({"nixl_bufer_size": 1}, "f: nixl_bufer_size", "did you mean nixl_buffer_size?"),
        ({"extra_config": {"protocl": "tcp"}}, "f: extra_config.protocl", "did you mean extra_config.protocol?"),
        ({"zzz": 1}, "f: zzz", "docs/ray.md"),
        ({"chunk_size": "256"}, "f: chunk_size", "must be a whole number"),
        ({"chunk_size": False}, "f: chunk_size", "must be a whole number"),
        ({"max_local_disk_size": False}, "f: max_local_disk_size", "must be a number"),
        ({"enable_nixl": "yes"}, "f: enable_nixl", "must be true or false"),
        ({"remote_url": 5}, "f: remote_url", "must be text"),
        ({"remote_url": "mooncakestore://host"}, "f: remote_url", "write host and port of the master"),
        ({"extra_config": 5}, "f: extra_config", "not a known key"),
    ],
)
def test_a_wrong_key_or_value_is_named(raw: dict[str, Any], field: str, words: str) -> None:
    (problem,) = interpret(raw, "prefill", "f").problems
    assert problem.field == field
    assert words in f"{problem.message} {problem.fix}"


def test_the_larger_size_is_kept() -> None:
    sizes = {"max_local_cpu_size": 3, "nixl_buffer_size": 1 << 30}
    assert interpret(sizes, "prefill", "f").values == {"cache.l1_size_bytes": 3 << 30}
    reversed_sizes = dict(reversed(sizes.items()))
    assert interpret(reversed_sizes, "prefill", "f").values == {"cache.l1_size_bytes": 3 << 30}


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    env = {"LMCACHE_CONFIG_FILE": "absent.yaml", "LMCACHE_USE_EXPERIMENTAL": "True"}
    found = refused(("prefill_config.runtime_env.env_vars", env), folder=tmp_path)
    assert f"{tmp_path / 'absent.yaml'} cannot be read: No such file" in found[f"prefill_config.{FILE}"]
    assert "on every node" in found[f"prefill_config.{FILE}"]
    (tmp_path / "absent.yaml").write_text("- a list\n")
    found = refused(("prefill_config.runtime_env.env_vars", env), folder=tmp_path)
    assert any("not a mapping" in text for text in found.values())
    assert unreadable(tmp_path / "absent.yaml", "here") is None
    assert unreadable(tmp_path, "here") is not None, "a folder is no file"


@contextlib.contextmanager
def bound_by_permissions() -> Iterator[None]:
    """As a user whom file permissions bind: not as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_without_permission_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text("{}")
    path.chmod(0)
    with bound_by_permissions():
        problem = unreadable(path, "here")
    assert problem is not None
    assert "Permission denied" in problem.message


def test_two_files_that_disagree(tmp_path: Path) -> None:
    for pool, size in (("prefill", 128), ("decode", 256)):
        (tmp_path / f"{pool}.yaml").write_text(f"chunk_size: {size}\n")
    changes = [
        (f"{pool}_config.runtime_env.env_vars", {"LMCACHE_CONFIG_FILE": f"{pool}.yaml"})
        for pool in ("prefill", "decode")
    ]
    (text,) = refused(*changes, folder=tmp_path).values()
    assert "256, but prefill_config" in text


def test_keys_of_the_connector(tmp_path: Path) -> None:
    extra = {"lmcache_rpc_prt": "a", "discard_partial_chunks": False}
    transfer = {"kv_connector": "LMCacheConnectorV1", "kv_connector_extra_config": extra}
    found = refused(("decode_config.engine_kwargs.kv_transfer_config", transfer))
    assert (
        "did you mean lmcache_rpc_port?"
        in found["decode_config.engine_kwargs.kv_transfer_config.kv_connector_extra_config.lmcache_rpc_prt"]
    )


def test_the_data_have_the_keys_of_the_table() -> None:
    for path in DATA.glob("lmcache_*.yaml"):
        raw = read_mapping(path)
        if "applications" not in raw:
            assert interpret(raw, "decode" if "decoder" in path.name else "prefill", "f").problems == []


def test_another_store_is_refused_by_name() -> None:
    found = interpret({"remote_url": "lm://host:65432"}, "prefill", "f")
    assert found.missing == {"a remote store other than Mooncake": ["remote_url"]}
    assert "cache.l2" not in found.values
