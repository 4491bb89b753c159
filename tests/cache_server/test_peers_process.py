"""Peers as processes on loopback: chunks of one are pulled by another, and their deaths cost no more than that."""

from __future__ import annotations

import importlib.util
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cache_server.peer_world import CHUNK_BYTES, CoordinatorProcess, HostProcess, secret_file
from tests.cache_server.world import wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl")
TRANSPORTS = ["tcp", pytest.param("nixl", marks=needs_nixl)]
NUM = 8


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return secret_file(tmp_path)


@pytest.fixture
def coordinator(tmp_path: Path, secret: str) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path, secret) as process:
        yield process


def ready(host: HostProcess, transport: str) -> HostProcess:
    if transport == "nixl":
        host.wait_status("NIXL", 90.0, nixl="in use")
    host.wait_status("its listing", is_listed=True)
    return host


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_chunk_of_one_is_pulled_by_the_other_bit_for_bit(
    transport: str, tmp_path: Path, secret: str, coordinator: CoordinatorProcess
) -> None:
    with (
        HostProcess(tmp_path, "a", coordinator.url, secret, p2p_transport=transport) as a,
        HostProcess(tmp_path, "b", coordinator.url, secret, p2p_transport=transport) as b,
    ):
        for host in (a, b):
            ready(host, transport)
        assert b.ask("contains", name="x", num=NUM) == 0
        assert b.ask("pull", name="x", num=2)["came"] == 0
        assert a.ask("store", name="x", num=NUM) == NUM
        wait_for(lambda: coordinator.placements() == NUM, "the directory")
        assert b.ask("contains", name="x", num=NUM + 3) == NUM
        pulled = b.ask("pull", name="x", num=NUM + 3)
        assert (pulled["came"], pulled["equal"]) == (NUM, NUM)
        assert b.ask("lookup", name="x", num=NUM)["found"] == NUM, "what was pulled is not kept"
        counts = b.ask("status")["counts"]
        assert counts["nixl_bytes"] == (NUM * CHUNK_BYTES if transport == "nixl" else 0)
        # Both hold it now. What a evicts is gone from there, and b has its own.
        wait_for(lambda: coordinator.placements() == 2 * NUM, "the directory")
        a.ask("evict")
        wait_for(lambda: coordinator.placements() == NUM, "the directory")
        assert a.ask("pull", name="x", num=NUM)["equal"] == NUM, "the other way round"
        assert a.ask("status")["num_loans"] == 0
        assert b.stop() == {"is_quiet": True}
        assert wait_for(lambda: coordinator.placements() == NUM, "one member less")
        assert a.stop() == {"is_quiet": True}


def test_another_layout_shares_nothing(tmp_path: Path, secret: str, coordinator: CoordinatorProcess) -> None:
    with (
        HostProcess(tmp_path, "a", coordinator.url, secret) as a,
        HostProcess(tmp_path, "b", coordinator.url, secret, fingerprint="other") as b,
    ):
        for host in (a, b):
            ready(host, "tcp")
        a.ask("store", name="x", num=NUM)
        wait_for(lambda: coordinator.placements() == NUM, "the directory")
        assert b.ask("contains", name="x", num=NUM) == 0
        assert b.ask("pull", name="x", num=NUM)["came"] == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_peer_that_dies_or_hangs_costs_one_lookup(
    number: signal.Signals, transport: str, tmp_path: Path, secret: str, coordinator: CoordinatorProcess
) -> None:
    with (
        HostProcess(tmp_path, "a", coordinator.url, secret, p2p_transport=transport) as a,
        HostProcess(tmp_path, "b", coordinator.url, secret, p2p_transport=transport) as b,
    ):
        for host in (a, b):
            ready(host, transport)
        b.ask("store", name="own", num=4)
        a.ask("store", name="x", num=40)
        wait_for(lambda: coordinator.placements() == 44, "the directory")
        assert b.ask("pull", name="x", num=2)["equal"] == 2
        usual_s = statistics.median(b.ask("lookup", name="own", num=4)["took_s"] for _ in range(20))
        b.begin("pull", name="x", num=40)
        a.signal(number)
        first = b.end()
        assert first["came"] == first["equal"], "a chunk came with wrong bytes"
        assert first["took_s"] < 4.0
        times_s = []
        for _ in range(20):
            hit = b.ask("lookup", name="own", num=4)
            assert hit["found"] == 4
            times_s.append(hit["took_s"])
            missed = b.ask("pull", name="y", num=1)
            assert missed["came"] == 0
        assert statistics.median(times_s) < usual_s + 0.002
        again = b.ask("pull", name="x", num=40)
        assert again["came"] == 0
        assert again["took_s"] < 0.2, "the peer was asked again at once"
        wait_for(lambda: len(coordinator.get("/status")[1]["members"]) == 1, "a member less", 6.0)
        if number is signal.SIGSTOP:
            a.signal(signal.SIGCONT)
            wait_for(lambda: b.ask("pull", name="x", num=40)["came"], "its return", 6.0)
        assert b.ask("status")["num_loans"] == 0


@needs_nixl
def test_a_read_from_a_peer_that_hangs_in_its_middle_is_given_up(
    tmp_path: Path, secret: str, coordinator: CoordinatorProcess
) -> None:
    """Over UCX's TCP, where the holder takes part in a read; with memory of one host the reader needs it not."""
    options = {
        "p2p_transport": "nixl",
        "environment": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        "chunk_bytes": 8 << 20,
        "l1_size_gb": 0.4,
    }
    with (
        HostProcess(tmp_path, "a", coordinator.url, secret, **options) as a,
        HostProcess(tmp_path, "b", coordinator.url, secret, **options) as b,
    ):
        for host in (a, b):
            ready(host, "nixl")
        a.ask("store", name="x", num=40)
        wait_for(lambda: coordinator.placements() == 40, "the directory")
        assert b.ask("pull", name="x", num=1)["equal"] == 1
        b.begin("pull", name="x", num=40)
        wait_for(lambda: a.ask("status")["counts"]["lent"] > 3, "a read under way")
        a.signal(signal.SIGSTOP)
        pulled = b.end()
        assert pulled["came"] == pulled["equal"] < 39
        assert pulled["took_s"] < 6.0
        counts = b.ask("status")["counts"]
        assert counts["failed"] >= 1
        again = b.ask("pull", name="x", num=40)
        assert again["came"] == 0
        a.signal(signal.SIGCONT)
        wait_for(lambda: b.ask("pull", name="x", num=40)["came"], "its return", 20.0)
        kept = b.ask("lookup", name="x", num=40)
        assert kept["found"] > 1
        assert b.stop() == {"is_quiet": True}


def test_another_secret_is_refused_by_coordinator_and_peers(
    tmp_path: Path, secret: str, coordinator: CoordinatorProcess
) -> None:
    wrong = secret_file(tmp_path, "wrong")
    with HostProcess(tmp_path, "liar", coordinator.url, wrong) as liar:
        status = wait_for(
            lambda: (found := liar.ask("status")) and "secret" in str(found["reason"]) and found, "the refusal"
        )
        assert not status["is_member"]
        told = coordinator.get("/status")[1]
        assert told["members"] == []
        assert told["refused"] >= 1
    with HostProcess(tmp_path, "a", coordinator.url, secret) as a:
        ready(a, "tcp")
        program = (
            "import sys\n"
            "from antiphon.protocol.cluster_proof import Asker\n"
            "from antiphon.transport.peer_tcp import PeerSocket\n"
            "PeerSocket.connect(sys.argv[1], Asker(b'w' * 32, 'peer', 'x', 'y'), 5.0)\n"
        )
        done = subprocess.run([sys.executable, "-c", program, a.url], capture_output=True, text=True, timeout=60)
        assert "has another cluster secret" in done.stderr


def test_a_new_coordinator_learns_everything_again(tmp_path: Path, secret: str) -> None:
    with CoordinatorProcess(tmp_path, secret) as first:
        port = first.port
        with (
            HostProcess(tmp_path, "a", first.url, secret) as a,
            HostProcess(tmp_path, "b", first.url, secret) as b,
        ):
            for host in (a, b):
                ready(host, "tcp")
            a.ask("store", name="x", num=NUM)
            wait_for(lambda: first.placements() == NUM, "the directory")
            first.kill()
            b.wait_status("the loss", is_member=False)
            assert b.ask("pull", name="x", num=NUM)["came"] == 0
            a.ask("store", name="y", num=2)
            with CoordinatorProcess(tmp_path, secret, port) as second:
                wait_for(lambda: second.placements() == NUM + 2, "all chunks", 10.0)
                b.wait_status("its return", is_listed=True)
                assert b.ask("pull", name="x", num=NUM)["equal"] == NUM
                assert b.ask("pull", name="y", num=2)["equal"] == 2


def test_a_hung_coordinator_costs_sharing_only(tmp_path: Path, secret: str, coordinator: CoordinatorProcess) -> None:
    with HostProcess(tmp_path, "a", coordinator.url, secret) as a:
        ready(a, "tcp")
        a.ask("store", name="own", num=4)
        coordinator.signal(signal.SIGSTOP)
        took_s = [a.ask("pull", name=f"n{number}", num=1)["took_s"] for number in range(6)]
        assert max(took_s) < 0.5
        assert statistics.median(took_s) < 0.02
        assert a.ask("lookup", name="own", num=4)["found"] == 4
        coordinator.signal(signal.SIGCONT)
        a.wait_status("its return", is_listed=True)


def test_the_coordinator_shows_itself_and_stops(coordinator: CoordinatorProcess) -> None:
    assert coordinator.get("/healthz")[1]["status"] == "ok"
    assert coordinator.get("/nothing")[0] == 404
    code, page = coordinator.get("/metrics")
    assert code == 200
    assert "antiphon_coordinator_members 0.0" in page
    assert "antiphon_coordinator_joins_total 0.0" in page
    coordinator.signal(signal.SIGTERM)
    assert coordinator.child.wait(10) == 0


def test_an_address_that_others_reach_needs_a_secret(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "antiphon", "coordinator", "--host", "0.0.0.0", "--runtime-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 2
    assert "--cluster-secret-file: 0.0.0.0 is not a loopback address" in done.stderr
    assert "openssl rand -hex 32" in done.stderr
