"""Which ``local_host`` of a Mooncake store each cache server of a deployment has, and what is said of a wrong one.

A store reaches each of its nodes at one address, so that one address cannot serve several hosts.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from antiphon.config.cache_servers import with_local_hosts
from antiphon.config.checks import run_checks
from antiphon.config.compile import Compiled
from antiphon.config.problems import Notice
from antiphon.config.spec import Spec
from antiphon.config.tier_facts import tier_faults
from antiphon.config.tier_spec import TierSpec, parse_tier
from tests.config.facts_for_tests import compiled_from, facts_of

CPU = {"engine.device": "cpu", "cache.l1_size_bytes": "1GB"}
STORE = "mooncake://10.0.0.9:50051?segment_gb=4.0"
GIVEN = f"{STORE}&local_host=10.1.0.1&protocol=rdma"
TWO_HOSTS = {"prefill.hosts": ["10.0.0.1"], "decode.hosts": ["10.0.0.2"], "router.host": "10.0.0.1"}
OTHER_MACHINE = "203.0.113.7"


def compiled_with(tier: str, **more: Any) -> Compiled:
    return compiled_from(CPU | {"cache.l2": [tier]} | more)


def tiers_of(compiled: Compiled) -> dict[str, TierSpec]:
    """The tier of each cache server, by the server's name."""
    plans = [plan for plan in compiled.plans if plan.role == "cache_server"]
    return {plan.name: parse_tier(plan.argv[plan.argv.index("--l2") + 1]) for plan in plans}


def local_hosts(compiled: Compiled) -> dict[str, str]:
    return {name: tier.local_host for name, tier in tiers_of(compiled).items()}


def said(compiled: Compiled) -> list[Notice]:
    return [notice for notice in compiled.notices if notice.field == "cache.l2"]


@pytest.mark.parametrize("tier", [STORE, GIVEN])
@pytest.mark.parametrize("is_shared", [True, False])
def test_on_several_hosts_each_server_has_its_own(tier: str, is_shared: bool) -> None:
    more = {"prefill.hosts": ["10.0.0.1", "10.0.0.2"], "prefill.replicas": 2, "cache.shared": is_shared}
    compiled = compiled_with(tier, **(TWO_HOSTS | more))
    expected = (
        {"cache-0": "10.0.0.1", "cache-1": "10.0.0.2"}
        if is_shared
        else {"cache-prefill-0": "10.0.0.1", "cache-prefill-1": "10.0.0.2", "cache-decode": "10.0.0.2"}
    )
    assert local_hosts(compiled) == expected
    written = parse_tier(tier)
    for found in tiers_of(compiled).values():
        assert found == written.model_copy(update={"local_host": found.local_host}), "nothing else changes"


def test_that_one_was_written_and_is_not_used_is_said() -> None:
    (notice,) = said(compiled_with(GIVEN, **TWO_HOSTS))
    assert "local_host 10.1.0.1" in notice.message
    assert said(compiled_with(STORE, **TWO_HOSTS)) == []
    assert said(compiled_with(GIVEN)) == []


@pytest.mark.parametrize(
    "hosts",
    [
        {},
        {"prefill.hosts": ["10.0.0.1"], "decode.hosts": ["10.0.0.1"], "router.host": "10.0.0.1"},
        {"prefill.hosts": ["127.0.0.1"], "decode.hosts": ["127.0.0.2"]},
    ],
)
@pytest.mark.parametrize("tier", [STORE, GIVEN])
def test_on_one_machine_it_is_as_it_is_written(hosts: dict[str, Any], tier: str) -> None:
    found = tiers_of(compiled_with(tier, **hosts))
    assert found == dict.fromkeys(found, parse_tier(tier))
    assert len(found) == 2


def test_other_tiers_stay_as_they_are() -> None:
    tier = "redis://10.0.0.9:6379/0?prefix=mine"
    assert set(tiers_of(compiled_with(tier, **TWO_HOSTS)).values()) == {parse_tier(tier)}


@pytest.mark.parametrize("host", [OTHER_MACHINE, "0.0.0.0"])
def test_one_that_is_not_of_this_machine_is_found_before_anything_starts(host: str) -> None:
    pytest.importorskip("mooncake", reason="needs mooncake")
    compiled = compiled_with(f"mooncake://127.0.0.1:1?local_host={host}", **{"cache.shared": True})
    facts = facts_of(compiled, tier_faults=tier_faults(compiled, frozenset({"127.0.0.1"})))
    (found,) = [each for each in run_checks(compiled, facts).problems if each.field.startswith("cache.l2")]
    assert found.field == "cache.l2[0]"
    assert found.message.startswith(f"the tier mooncake: local_host '{host}' ")
    assert "write in local_host the address of this machine" in found.fix


# ---- on one machine of several, which knows nothing of the others ----------------------------------------------------


def given(*tiers: str) -> Spec:
    return compiled_from(CPU | {"cache.l2": list(tiers)}).spec


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", OTHER_MACHINE, "compute-node-001", "0.0.0.0"])
def test_a_machine_that_others_reach_replaces_one_that_is_not_its_own(host: str) -> None:
    disk = "disk:///kv?store=back&capacity_gb=1"
    spec = with_local_hosts(given(f"{STORE}&local_host={host}", disk), "10.0.0.7")
    assert [tier.local_host for tier in spec.cache.tiers] == ["10.0.0.7", "127.0.0.1"]
    assert spec.cache.l2[1] == disk
    assert spec.cache.tiers[0] == parse_tier(f"{STORE}&local_host=10.0.0.7")


def test_it_keeps_one_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "compute-node-001")
    spec = given(f"{STORE}&local_host=compute-node-001")
    assert with_local_hosts(spec, "10.0.0.7") is spec


@pytest.mark.parametrize("tier", [STORE, GIVEN, "redis://10.0.0.9:6379/0"])
def test_a_machine_that_serves_itself_alone_changes_nothing(tier: str) -> None:
    spec = given(tier)
    assert with_local_hosts(spec, "127.0.0.1") is spec


def test_a_spec_without_tiers_stays_as_it_is() -> None:
    spec = given()
    assert with_local_hosts(spec, "10.0.0.7") is spec
