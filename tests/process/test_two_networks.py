"""Two cache servers that share over a link between two networks, which is cut and joined while both are loaded.

Goal: over addresses that are not loopback, with a cluster secret, chunks of one are hits of the other; while the link
is cut, each finds what is in its memory as fast as before and shares nothing; soon after it is joined they share again;
no chunk ever has wrong bytes, and no call fails. Method: two networks of the kernel, without root; the coordinator and
the server that stores are in one, the server that pulls is in the other.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache_server.peer_world import CoordinatorProcess, secret_file
from tests.cache_server.test_tiers import fill, is_right, onboard
from tests.cache_server.world import ServerProcess, keys_of, wait_for
from tests.engine.simulated_processes import EngineProcess
from tests.process.deployment import Load
from tests.process.measured import Latencies, Phase, TrafficProcess, populated, stay
from tests.process.two_networks import DEVICE, Namespace, TwoNetworks, two_networks
from tests.router.stack import RouterProcess

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl")
BEFORE_S = 2.0
CUT_S = 5.0
REJOIN_S = 10.0
"""Longest from the join of the link until chunks are pulled again."""
NUM = 8


@pytest.fixture
def networks(adopted: set[int]) -> Iterator[TwoNetworks]:
    with two_networks(adopted) as made:
        yield made


@contextlib.contextmanager
def coordinator_in(network: Namespace, folder: Path, secret: str) -> Iterator[str]:
    """A coordinator that the other network reaches; its address."""
    log = folder / "coordinator.log"
    argv = [sys.executable, "-m", "antiphon", "coordinator", "--host", network.address, "--port", "0"]
    argv += ["--http-port", "0", "--cluster-secret-file", secret, "--runtime-dir", str(folder)]
    with log.open("wb") as output:
        process = network.popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:

        def is_ready() -> re.Match[str] | None:
            assert process.poll() is None, log.read_text()
            return CoordinatorProcess.READY.search(log.read_text())

        yield f"{network.address}:{wait_for(is_ready, 'a coordinator', 20.0)[2]}"
    finally:
        process.kill()
        process.wait()


class Sharing:
    """A server in each network, both members.

    Args:
        networks: theirs.
        transport: how the bytes come.
        p, d: the servers; their ``get`` works from the test.
    """

    def __init__(self, networks: TwoNetworks, transport: str, p: ServerProcess, d: ServerProcess) -> None:
        self.networks = networks
        self.transport = transport
        self.p = p
        self.d = d

    @staticmethod
    def peers(server: ServerProcess) -> dict[str, Any]:
        found: dict[str, Any] = server.get("/status")["peers"]
        return found

    def num_pulled(self) -> int:
        """Chunks that D's server has pulled."""
        return int(self.peers(self.d)["counts"]["pulled"])

    def num_read(self) -> int:
        """Those of them whose bytes came over NIXL."""
        return int(self.peers(self.d)["counts"]["nixl_reads"])


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=needs_nixl)])
def sharing(
    request: pytest.FixtureRequest, tmp_path: Path, networks: TwoNetworks, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sharing]:
    """Both servers share in the way of the parameter; the bytes cannot go past the link."""
    monkeypatch.setenv("UCX_TLS", "tcp")  # not through the memory that both are in
    monkeypatch.setenv("UCX_NET_DEVICES", DEVICE)
    secret = secret_file(tmp_path)
    with contextlib.ExitStack() as undo:
        url = undo.enter_context(coordinator_in(networks.p, tmp_path, secret))
        servers = []
        for name, network, quota in (("p", networks.p, ()), ("d", networks.d, ("--quota", "shared=0.004"))):
            flags = ["--coordinator-url", url, "--p2p-advertise-url", f"{network.address}:0", "--instance-id", name]
            flags += ["--cluster-secret-file", secret, "--p2p-transport", request.param, *quota]
            server = populated(undo.enter_context(ServerProcess(tmp_path, network.preexec, *flags)))
            server.http_port = network.outside(server.http_port)
            servers.append(server)
        for server in servers:
            wait_for(lambda server=server: is_sharing(server, request.param), "it shares", 90.0)  # type: ignore[misc]
        yield Sharing(networks, request.param, *servers)


def is_sharing(server: ServerProcess, transport: str) -> bool:
    try:
        status = Sharing.peers(server)
    except OSError:  # the relay is not there yet
        return False
    return bool(status["is_listed"]) and (transport == "tcp" or status["nixl"] == "in use")


@pytest.fixture
def alone(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[ServerProcess]:
    """A server that shares nothing, to compare with: what else the machine does slows it down too."""
    with ServerProcess(tmp_path, die_with_parent, "--instance-id", "alone") as server:
        yield populated(server)


def test_the_link_is_cut_and_joined_under_load(
    sharing: Sharing, alone: ServerProcess, die_with_parent: Callable[[], None]
) -> None:
    check_both_ways(sharing)
    clients = {
        name: TrafficProcess(role, server, die_with_parent)
        for name, role, server in (
            ("hot p", "hot", sharing.p),
            ("hot d", "hot", sharing.d),
            ("alone", "hot", alone),
            ("shared", "shared", sharing.p),
            ("pull", "pull", sharing.d),
        )
    }
    try:
        first = sharing.num_pulled()
        wait_for(lambda: sharing.num_pulled() > first + 20, "chunks are pulled", 10.0)
        began_s = time.monotonic()
        stay(BEFORE_S)
        before = Phase("before", began_s, time.monotonic())
        began_s = time.monotonic()
        sharing.networks.cut()
        wait_for(lambda: not sharing.peers(sharing.d)["is_member"], "D's server has noticed", CUT_S)
        stay(CUT_S - (time.monotonic() - began_s))
        cut = Phase("cut", began_s, time.monotonic())
        num_pulled, num_read, joined_s = sharing.num_pulled(), sharing.num_read(), time.monotonic()
        sharing.networks.join()
        wait_for(lambda: sharing.num_pulled() > num_pulled, "chunks are pulled again", 3 * REJOIN_S)
        back_s = time.monotonic() - joined_s
        stay(BEFORE_S)
        saw = {name: client.end() for name, client in clients.items()}
    finally:
        for client in clients.values():
            client.kill()
    assert not {name: said["errors"] for name, said in saw.items() if said["errors"]}
    print(f"{sharing.transport}: pulled again {back_s:.2f} s after the join", sharing.peers(sharing.d)["counts"])
    for name in ("hot p", "hot d"):
        usual, during = (Latencies.of(saw[name]["samples"], phase) for phase in (before, cut))
        other = Latencies.of(saw["alone"]["samples"], cut)
        print(f"{name} {usual}\n{name} {during}\nalone {other}")
        during.check(usual, other)
    hits = saw["pull"]["hits"]
    assert sum(before.began_s < hit_s < before.ended_s for hit_s in hits) > 10
    assert not [hit_s for hit_s in hits if cut.began_s + 1 < hit_s < cut.ended_s], "a chunk came through a cut link"
    assert sum(hit_s > joined_s + back_s for hit_s in hits) > 5
    assert back_s < REJOIN_S
    assert (sharing.num_read() > num_read > 0) is (sharing.transport == "nixl")
    check_both_ways(sharing, "after")


@pytest.fixture
def router(networks: TwoNetworks) -> Iterator[RouterProcess]:
    """A router and a decode engine in D's network, a prefill engine in P's; its port works from the test."""
    with contextlib.ExitStack() as undo:
        flags = []
        for role, network in (("prefill", networks.p), ("decode", networks.d)):
            options = {"host": network.address, "role": role, "engine_id": f"{role}-1"}
            engine = EngineProcess.start(network.preexec, **options)
            undo.callback(engine.stop)
            flags += [f"--{role}", f"http://{network.address}:{engine.port}"]
        made = RouterProcess.start(networks.d.preexec, *flags, "--health-interval-s", "0.2", "--health-timeout-s", "1")
        undo.callback(made.stop)
        made.port = networks.d.outside(made.port)
        wait_for(lambda: is_ready(made), "both engines are usable", 20.0)
        yield made


def is_ready(router: RouterProcess) -> bool:
    with contextlib.suppress(OSError):  # the relay is not there yet
        return router.ask("GET", "/readiness").status == 200
    return False


def test_requests_while_the_link_between_the_engines_is_cut(networks: TwoNetworks, router: RouterProcess) -> None:
    """Each ends in time and truthfully; soon after the join they are handed over again."""
    with Load(router.port, num_clients=6) as load:
        load.wait_answers(30, 0.0)
        cut_s = time.monotonic()
        networks.cut()
        stay(CUT_S)
        joined_s = time.monotonic()
        networks.join()
        wait_for(lambda: has_handed_over(router), "a request is handed over", REJOIN_S)
        back_s = time.monotonic() - joined_s
        load.wait_answers(30, time.monotonic())
    print(f"handed over again {back_s:.2f} s after the join; while cut:", load.counts(cut_s))
    load.check(may_lose_connection=False)


def has_handed_over(router: RouterProcess) -> bool:
    """Whether one more request goes from engine to engine."""
    answer = router.complete("what is said about this?")
    receipt = router.receipt(answer)
    return (answer.status, receipt["path"], receipt["reason"]) == (200, "pd", "default")


def check_both_ways(sharing: Sharing, name: str = "first") -> None:
    """What each server stores is a hit of the other, bit for bit."""
    for here, there in ((sharing.p, sharing.d), (sharing.d, sharing.p)):
        chain = f"{name} {here.instance}"
        keys = keys_of(chain, NUM)
        with here.connect().attach(engine="one") as one, there.connect().attach(engine="other") as other:
            fill(one, chain, keys)

            def has_come(other: Any = other, chain: str = chain, keys: list[bytes] = keys) -> bool:
                found, _ = onboard(other, chain, keys)
                is_whole = found.num_tokens == NUM * 256
                assert is_right(other, found, keys)
                other.release(found)
                return is_whole

            wait_for(has_come, f"{chain} is pulled", 10.0)
