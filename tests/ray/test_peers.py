"""Cache servers of several nodes that share: what is refused, what each is told, where the coordinator is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.config.compile import compile_all
from antiphon.config.tier_spec import parse_tier
from antiphon.core.errors import StartError
from antiphon.ray.peers import (
    INSTANCE_CHARS_MAX,
    check_secret_here,
    coordinator_beside_router,
    coordinator_url,
    peers_notices,
    peers_problems,
)
from antiphon.ray.plans import AppSettings, EnginePlace, engine_plan, router_plan
from tests.ray.configs import LAPTOP, Change, mapped_from

NODES = ("192.0.2.5", "2001:db8::6")
PUBLIC: dict[str, Any] = {"host": "0.0.0.0", "public_without_key": True}


def settings(cache: dict[str, Any], router: dict[str, Any] | None = None) -> AppSettings:
    changes: list[Change] = [("antiphon.cache", {"shared": True, **cache})]
    if router is not None:
        changes.append(("antiphon.router", router))
    found = mapped_from(*changes)
    return AppSettings.of(found.spec, found.pools).named("app")


def place(own: AppSettings, address: str, router: str) -> EnginePlace:
    url = coordinator_url(own.spec, router)
    return EnginePlace("r1", address, 9001, 9101, 9201, router, coordinator_url=url)


def server_of(own: AppSettings, address: str, router: str) -> Any:
    made = engine_plan(own, "decode", place(own, address, router), LAPTOP).server_plan
    assert made is not None
    return made


def flag(argv: tuple[str, ...], name: str) -> str:
    return argv[argv.index(name) + 1]


def problems(own: AppSettings) -> dict[str, str]:
    servers = compile_all(own.spec, LAPTOP).servers
    return {each.field: f"{each.message} -> {each.fix}" for each in peers_problems(own.spec, servers)}


def notices(own: AppSettings) -> dict[str, str]:
    servers = compile_all(own.spec, LAPTOP).servers
    return {each.field: each.message for each in peers_notices(own.spec, servers)}


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef0123456789abcdef\n")
    path.chmod(0o600)
    return str(path)


def test_servers_of_two_nodes_are_members_of_one_cluster(secret: str) -> None:
    own = settings({"peers": True, "cluster_secret_file": secret, "peer_port": 9700, "coordinator_port": 9800}, PUBLIC)
    assert problems(own) == {}
    plans = [server_of(own, address, NODES[0]) for address in NODES]
    assert [flag(plan.argv, "--p2p-advertise-url") for plan in plans] == [
        "http://192.0.2.5:9700",
        "http://[2001:db8::6]:9700",
    ]
    assert {flag(plan.argv, "--coordinator-url") for plan in plans} == {"http://192.0.2.5:9800"}
    assert {flag(plan.argv, "--cluster-secret-file") for plan in plans} == {secret}
    assert len({flag(plan.argv, "--instance-id") for plan in plans}) == 2
    assert [plan.listens_on("peers") for plan in plans] == list(NODES)
    assert not any("--p2p-host" in plan.argv for plan in plans), "each listens at the address of its node alone"
    assert [plan.listens_on("calls") for plan in plans] == ["127.0.0.1"] * 2


def test_every_engine_of_a_node_asks_for_the_same_server(secret: str) -> None:
    own = settings({"peers": True, "cluster_secret_file": secret}, PUBLIC)
    plans = [
        engine_plan(own, pool, place(own, NODES[0], NODES[1]), LAPTOP).server_plan for pool in ("prefill", "decode")
    ]
    assert plans[0] == plans[1]


def test_a_server_on_loopback_stays_there() -> None:
    own = settings({"peers": True, "host": "127.0.0.2"})
    plan = server_of(own, "127.0.0.1", "127.0.0.1")
    assert flag(plan.argv, "--p2p-advertise-url") == "http://127.0.0.2:6755"
    assert (plan.listens_on("peers"), plan.listens_on("calls")) == ("127.0.0.2", "127.0.0.2")
    assert flag(plan.argv, "--coordinator-url") == "http://127.0.0.1:6655"


@pytest.mark.parametrize("address", [*NODES, "2001:db8:1111:2222:3333:4444:5555:6666", "127.0.0.1"])
def test_a_name_is_one_that_a_server_may_have(address: str, secret: str) -> None:
    own = settings({"peers": True, "cluster_secret_file": secret}, PUBLIC)
    long = AppSettings(own.spec.model_copy(update={"name": "x" * 32}), own.pools)
    other = address.replace("6", "7").replace("5", "4").replace("127", "126")
    names = [
        flag(server_of(each, at, NODES[0]).argv, "--instance-id") for each in (own, long) for at in (address, other)
    ]
    assert len(set(names)) == 4
    assert all(len(name) <= INSTANCE_CHARS_MAX and ":" not in name for name in names)


def test_without_peers_a_server_is_told_nothing_of_others() -> None:
    own = settings({}, PUBLIC)
    plan = server_of(own, NODES[0], NODES[0])
    assert "--coordinator-url" not in plan.argv
    assert flag(plan.argv, "--instance-id") == "app-shared"
    assert coordinator_beside_router(own.spec, NODES[0], LAPTOP) is None
    assert (problems(own), notices(own)) == ({}, {})


def test_the_coordinator_is_beside_the_router(secret: str) -> None:
    ports = {"coordinator_port": 9800, "coordinator_http_port": 9801}
    own = settings({"peers": True, "cluster_secret_file": secret, **ports}, PUBLIC)
    plan = coordinator_beside_router(own.spec, NODES[0], LAPTOP)
    assert plan is not None
    assert (flag(plan.argv, "--host"), flag(plan.argv, "--port")) == (NODES[0], "9800")
    assert flag(plan.argv, "--cluster-secret-file") == secret
    assert (plan.listens_on("calls"), plan.listens_on("http")) == (NODES[0], "127.0.0.1")
    assert plan.base_url == "http://127.0.0.1:9801"
    assert "started beside the router" in notices(own)["antiphon.cache.peers"]
    assert router_plan(own, NODES[0], LAPTOP).role == "router"


def test_a_coordinator_that_is_named_is_not_started(secret: str) -> None:
    own = settings({"peers": True, "cluster_secret_file": secret, "coordinator_url": "192.0.2.9:6655"}, PUBLIC)
    assert (problems(own), notices(own)) == ({}, {})
    assert coordinator_beside_router(own.spec, NODES[0], LAPTOP) is None
    assert flag(server_of(own, NODES[0], NODES[0]).argv, "--coordinator-url") == "192.0.2.9:6655"


@pytest.mark.parametrize(
    ("url", "router", "words"),
    [
        ("127.0.0.1:6655", PUBLIC, "reached from its own node only"),
        ("192.0.2.9:6655", None, "no other member reaches them"),
        ("0.0.0.0:6655", PUBLIC, "no address to connect to"),
    ],
)
def test_a_coordinator_that_somebody_cannot_reach_is_refused(
    url: str, router: dict[str, Any] | None, words: str, secret: str
) -> None:
    own = settings({"peers": True, "cluster_secret_file": secret, "coordinator_url": url}, router)
    assert words in problems(own)["cache.coordinator_url"]


@pytest.mark.parametrize(("router", "is_needed"), [(PUBLIC, True), (None, False)])
def test_a_secret_is_needed_beyond_loopback(router: dict[str, Any] | None, is_needed: bool) -> None:
    found = problems(settings({"peers": True}, router))
    assert ("openssl rand" in found.get("cache.cluster_secret_file", "")) == is_needed


def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("short")
    path.chmod(0o644)
    own = settings({"peers": True, "cluster_secret_file": str(path)}, PUBLIC)
    assert "has 5 characters" in problems(own)["cache.cluster_secret_file"]
    assert "mode 0644" in notices(own)["antiphon.cache.cluster_secret_file"]
    with pytest.raises(StartError, match="has 5 characters") as raised:
        check_secret_here(own.spec)
    assert raised.value.field == "antiphon.cache.cluster_secret_file"


def test_a_secret_that_only_the_nodes_have_is_said(tmp_path: Path) -> None:
    own = settings({"peers": True, "cluster_secret_file": str(tmp_path / "elsewhere")}, PUBLIC)
    assert problems(own) == {}
    assert "each node of an engine" in notices(own)["antiphon.cache.cluster_secret_file"]
    with pytest.raises(StartError, match="cannot be read"):
        check_secret_here(own.spec)


def test_where_there_is_no_server_nothing_is_started() -> None:
    own = settings({"peers": True, "enabled": False}, PUBLIC)
    assert problems(own) == {}
    assert "there is no cache server" in notices(own)["antiphon.cache.peers"]
    assert coordinator_beside_router(own.spec, NODES[0], LAPTOP) is None
    assert coordinator_url(own.spec, NODES[0]) is None


@pytest.mark.parametrize("node", NODES)
def test_each_node_has_its_own_address_in_a_mooncake_store(node: str) -> None:
    """One file is read by all nodes, so the ``local_host`` in it can be of one of them at most."""
    tier = "mooncake://192.0.2.1:50051?metadata=http://192.0.2.1:8080/metadata&local_host=192.0.2.99"
    own = settings({"l2": [tier]}, PUBLIC)
    plan = server_of(own, node, NODES[0])
    assert parse_tier(flag(plan.argv, "--l2")).local_host == node
