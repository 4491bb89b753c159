"""``handoff.kind: cache``: what each process gets for it, and where it cannot work."""

from __future__ import annotations

import json
from typing import Any

import pytest

from antiphon.config.checks import run_checks
from antiphon.config.compile import Compiled
from tests.config.facts_for_tests import compiled_from, facts_of

KIND = {"handoff.kind": "cache", "engine.device": "cpu"}
PEERS = KIND | {"cache.peers": True}


def value(result: Compiled, name: str, flag: str) -> str | None:
    argv = next(plan.argv for plan in result.plans if plan.name == name)
    return argv[argv.index(flag) + 1] if flag in argv else None


def transfer(result: Compiled, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(value(result, name, "--kv-transfer-config") or "null")
    return found


def problems(result: Compiled) -> dict[str, str]:
    return {problem.field: problem.message for problem in run_checks(result, facts_of(result)).problems}


def test_engines_get_the_cache_connector_alone() -> None:
    result = compiled_from(PEERS)
    for pool, server in (("prefill", 0), ("decode", 1)):
        config = transfer(result, f"{pool}-0")
        assert (config["kv_connector"], config["kv_role"]) == ("AntiphonConnector", "kv_both")
        assert config["kv_connector_extra_config"]["antiphon.port"] == result.servers[server].port
        assert config["kv_load_failure_policy"] == "fail"
    assert value(result, "router", "--handoff") == "cache"
    assert value(result, "router", "--local-max-tokens") == "255"
    assert problems(result) == {}


def test_engines_repeat_events_for_the_length_that_is_implied() -> None:
    """As they do where the same length is written."""
    implied, written = compiled_from(PEERS), compiled_from(PEERS | {"router.local_max_tokens": 255})
    for result in (implied, written):
        assert "replay_endpoint" in json.loads(value(result, "prefill-0", "--kv-events-config") or "null")
        assert [engine.kv_replay_port for engine in result.engines] == [5800, 5900]
        assert not [notice for notice in result.notices if notice.field.endswith("kv_replay_port")]
    assert [plan.argv for plan in implied.plans] == [plan.argv for plan in written.plans]
    assert [plan.ports for plan in implied.plans] == [plan.ports for plan in written.plans]


def test_at_an_ipv6_address_it_is_said_that_none_are_repeated() -> None:
    result = compiled_from(PEERS | {"prefill.hosts": ["::1"], "decode.hosts": ["::1"]})
    said = [notice.message for notice in result.notices if notice.field.endswith("kv_replay_port")]
    assert len(said) == 2
    assert all("IPv6" in text for text in said)


def test_nixl_stays_the_default() -> None:
    result = compiled_from({"engine.device": "cpu"})
    assert transfer(result, "prefill-0")["kv_connector"] == "MultiConnector"
    assert value(result, "router", "--handoff") is None
    assert value(result, "router", "--local-max-tokens") is None


def test_no_lease_bounds_the_hand_over() -> None:
    result = compiled_from(PEERS | {"handoff.lease_s": 6, "router.handover_timeout_s": 60})
    assert value(result, "router", "--handover-timeout-s") == "60.0"
    assert problems(result) == {}


def test_what_the_spec_says_of_short_prompts_stands() -> None:
    assert value(compiled_from(PEERS | {"router.local_max_tokens": 7}), "router", "--local-max-tokens") == "7"


@pytest.mark.parametrize(
    "more",
    [
        {"cache.shared": True},
        {"cache.peers": True},
        {"cache.l2": ["redis://127.0.0.1:6379"]},
        {"cache.l2": ["mooncake://127.0.0.1:50051?metadata=http://127.0.0.1:8080/metadata"]},
    ],
)
def test_the_servers_must_have_a_way_to_each_other(more: dict[str, Any]) -> None:
    assert problems(compiled_from(KIND | more)) == {}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({}, "handoff.kind"),
        ({"cache.l2": ["disk:///var/lib/antiphon?capacity_gb=2"]}, "handoff.kind"),
        ({"cache.l2": ["redis://127.0.0.1:6379?store=none"]}, "handoff.kind"),
        ({"cache.enabled": False}, "cache.enabled"),
        ({"cache.peers": True, "router.handoff": "nixl"}, "router.handoff"),
    ],
)
def test_else_it_is_refused(more: dict[str, Any], field: str) -> None:
    assert field in problems(compiled_from(KIND | more))


@pytest.mark.parametrize("pool", ["prefill", "decode"])
@pytest.mark.parametrize("name", ["NixlConnector", "MultiConnector", "AntiphonConector"])
def test_any_other_connector_is_refused(pool: str, name: str) -> None:
    result = compiled_from(PEERS | {f"{pool}.kv_transfer_config": {"kv_connector": name}})
    assert any(problem.field == f"{pool}.kv_transfer_config.kv_connector" for problem in result.problems)


def test_the_connector_of_lmcache_is_ours_and_its_keys_are_understood() -> None:
    """As in the documents of LMCache with a hand-over by its own."""
    raw = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"discard_partial_chunks": False, "lmcache_rpc_port": "producer1"},
    }
    result = compiled_from(PEERS | {"prefill.kv_transfer_config": raw})
    assert result.problems == ()
    assert transfer(result, "prefill-0")["kv_connector"] == "AntiphonConnector"
    said = " ".join(f"{notice.field} {notice.message}" for notice in result.notices)
    assert "discard_partial_chunks is left out: chunks are whole here" in said
    assert "lmcache_rpc_port is left out" in said


def test_engines_say_what_they_hold_where_the_router_listens() -> None:
    """It looks up short prompts, by a limit that is filled in, and so hears of KV."""
    for more in ({}, {"engine.kind": "simulated"}):
        result = compiled_from(PEERS | more)
        port = value(result, "router", "--kv-events-port")
        assert (port or "").isdecimal()
        told = " ".join(next(each for each in result.plans if each.name == "prefill-0").argv)
        assert f"tcp://127.0.0.1:{port}" in told
        assert "None" not in told


def test_simulated_engines_are_told_their_servers() -> None:
    result = compiled_from({"handoff.kind": "cache", "engine.kind": "simulated", "cache.peers": True})
    ports = [value(result, name, "--cache-port") for name in ("prefill-0", "decode-0")]
    assert ports == [str(server.port) for server in result.servers]
    assert value(result, "decode-0", "--cache-chunk-size") == "256"
    assert value(compiled_from({"engine.kind": "simulated"}), "decode-0", "--cache-port") is None
