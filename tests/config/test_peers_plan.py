"""Cache servers of a deployment that share: what each is told, and the process of their coordinator."""

from __future__ import annotations

import sys

import pytest

from antiphon.config.checks import run_checks
from antiphon.config.compile import Compiled
from antiphon.config.plan import ProcessPlan
from tests.config.facts_for_tests import compiled_from, facts_of

CPU = {"engine.device": "cpu", "cache.l1_size_bytes": "1GB"}
PEERS = CPU | {"cache.peers": True}
HOSTS = {"prefill.hosts": ["10.0.0.1"], "decode.hosts": ["10.0.0.2"], "router.host": "10.0.0.1"}
FLAGS = ("--coordinator-url", "--p2p-advertise-url", "--p2p-host", "--p2p-transport", "--cluster-secret-file")


def plans_of(compiled: Compiled) -> dict[str, ProcessPlan]:
    return {plan.name: plan for plan in compiled.plans}


def told(plan: ProcessPlan) -> dict[str, str]:
    """What a cache server is told so that it shares."""
    return {flag: plan.argv[index + 1] for index, flag in enumerate(plan.argv) if flag in FLAGS}


def problems(compiled: Compiled) -> list[str]:
    report = run_checks(compiled, facts_of(compiled))
    return [problem.field for problem in report.problems]


def test_nothing_is_shared_by_default() -> None:
    plans = plans_of(compiled_from(CPU))
    assert "coordinator" not in plans
    assert told(plans["cache-prefill"]) == {}
    assert "peers" not in plans["cache-prefill"].ports


def test_both_servers_of_a_host_share_through_a_coordinator_on_loopback() -> None:
    compiled = compiled_from(PEERS)
    plans = plans_of(compiled)
    assert list(plans) == ["coordinator", "cache-prefill", "cache-decode", "prefill-0", "decode-0", "router"]
    coordinator = plans["coordinator"]
    assert coordinator.argv == (
        *(sys.executable, "-m", "antiphon", "coordinator", "--host", "127.0.0.1", "--port", "6655"),
        *("--http-host", "127.0.0.1", "--http-port", "8190"),
    )
    assert (coordinator.role, coordinator.kind, coordinator.ready_path) == ("coordinator", "coordinator", "/healthz")
    assert (coordinator.base_url, coordinator.host) == ("http://127.0.0.1:8190", "127.0.0.1")
    for name, port in (("cache-prefill", 6755), ("cache-decode", 6756)):
        assert told(plans[name]) == {
            "--coordinator-url": "http://127.0.0.1:6655",
            "--p2p-advertise-url": f"http://127.0.0.1:{port}",
        }
        assert plans[name].ports["peers"] == port
    assert problems(compiled) == []


def test_on_several_hosts_they_need_a_secret_and_listen_on_all_addresses() -> None:
    assert problems(compiled_from(PEERS | HOSTS | {"router.public_without_key": True})) == ["cache.cluster_secret_file"]
    more = {"cache.cluster_secret_file": "/etc/antiphon/cluster.secret", "cache.peer_transport": "tcp"}
    compiled = compiled_from(PEERS | HOSTS | more | {"router.public_without_key": True})
    assert problems(compiled) == []
    plans = plans_of(compiled)
    for name, host in (("cache-prefill", "10.0.0.1"), ("cache-decode", "10.0.0.2")):
        assert told(plans[name]) == {
            "--coordinator-url": "http://10.0.0.1:6655",
            "--p2p-advertise-url": f"http://{host}:6755",
            "--p2p-host": "0.0.0.0",
            "--p2p-transport": "tcp",
            "--cluster-secret-file": "/etc/antiphon/cluster.secret",
        }
        assert plans[name].listens_on("peers") == "0.0.0.0"
        assert plans[name].listens_on("calls") == "127.0.0.1"
    coordinator = plans["coordinator"]
    assert coordinator.host == "10.0.0.1"
    assert coordinator.argv[4:8] == ("--host", "0.0.0.0", "--port", "6655")
    assert coordinator.argv[-2:] == ("--cluster-secret-file", "/etc/antiphon/cluster.secret")
    assert (coordinator.listens_on("calls"), coordinator.listens_on("http")) == ("0.0.0.0", "127.0.0.1")


def test_a_coordinator_of_elsewhere_is_not_started() -> None:
    compiled = compiled_from(PEERS | {"cache.shared": True, "cache.coordinator_url": "10.0.0.9:6655"})
    plans = plans_of(compiled)
    assert list(plans) == ["cache", "prefill-0", "decode-0", "router"]
    assert told(plans["cache"])["--coordinator-url"] == "10.0.0.9:6655"
    assert problems(compiled) == ["cache.cluster_secret_file"]


@pytest.mark.parametrize("sets", [{"cache.shared": True}, {"cache.enabled": False}])
def test_where_nobody_is_there_to_share_with_it_is_said(sets: dict[str, object]) -> None:
    compiled = compiled_from(PEERS | sets)
    assert "coordinator" not in plans_of(compiled)
    (notice,) = [notice for notice in compiled.notices if notice.field == "cache.peers"]
    assert "nothing is shared" in notice.message


def test_the_ports_of_a_coordinator_clash_like_others() -> None:
    found = problems(compiled_from(PEERS | {"cache.coordinator_port": 6755, "cache.coordinator_http_port": 8091}))
    assert sorted(found) == ["cache.http_port", "cache.peer_port"]
