"""Whole cache servers that share: what one stores is a hit of the other, through the tier plan and the real calls."""

from __future__ import annotations

import http.client
import importlib.util
import json
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache_server.peer_world import CoordinatorProcess, secret_file
from tests.cache_server.test_tiers import fill, is_right, onboard
from tests.cache_server.world import ServerProcess, command, keys_of, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

needs_nixl = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl")
NUM = 8

Start = Callable[..., ServerProcess]


@pytest.fixture
def secret(tmp_path: Path) -> str:
    return secret_file(tmp_path)


@pytest.fixture
def coordinator(tmp_path: Path, secret: str) -> Iterator[CoordinatorProcess]:
    with CoordinatorProcess(tmp_path, secret) as process:
        yield process


@pytest.fixture
def start(
    tmp_path: Path, secret: str, coordinator: CoordinatorProcess, die_with_parent: Callable[[], None]
) -> Iterator[Start]:
    servers: list[ServerProcess] = []

    def starting(instance: str, transport: str = "tcp") -> ServerProcess:
        flags = {
            "instance-id": instance,
            "coordinator-url": f"http://{coordinator.url}",
            "p2p-advertise-url": "http://127.0.0.1:0",
            "cluster-secret-file": secret,
            "p2p-transport": transport,
        }
        words = [word for name, value in flags.items() for word in (f"--{name}", value)]
        server = ServerProcess(tmp_path, die_with_parent, *words)
        servers.append(server)
        server.wait_populated()
        wait_for(lambda: peers_of(server)["is_listed"], "a member", 20)
        if transport == "nixl":
            wait_for(lambda: peers_of(server)["nixl"] == "in use", "NIXL", 90)
        return server

    yield starting
    for server in servers:
        if server.process.poll() is None:
            server.process.send_signal(signal.SIGCONT)
        server.kill()


def peers_of(server: ServerProcess) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=10)
    try:
        connection.request("GET", "/status")
        status: dict[str, Any] = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    return status["peers"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("transport", ["tcp", pytest.param("nixl", marks=needs_nixl)])
def test_what_one_stores_is_a_hit_of_the_other(start: Start, coordinator: CoordinatorProcess, transport: str) -> None:
    a, b = start("a", transport), start("b", transport)
    keys = keys_of("p", NUM)
    with a.connect().attach() as on_a, b.connect().attach() as on_b:
        assert onboard(on_b, "p", keys)[0].num_tokens == 0
        fill(on_a, "p", keys)
        wait_for(lambda: coordinator.placements() == NUM, "the directory")
        assert on_b.lookup("p", keys).lease is None, "a lookup that does not wait gets what is in memory"
        found, first = onboard(on_b, "p", keys)
        assert first is not None
        assert found.num_tokens == NUM * 256
        assert found.fetched == (("peer", tuple(range(NUM))),)
        assert is_right(on_b, found, keys)
        on_b.release(found)
        at_once, first = onboard(on_b, "p", keys)
        assert (at_once.num_tokens, at_once.fetched, first) == (NUM * 256, (), None), "what was pulled is not kept"
        on_b.release(at_once)
        counts = peers_of(b)["counts"]
        assert counts["pulled"] == NUM
        assert (counts["nixl_reads"] == NUM) == (transport == "nixl")
        wait_for(lambda: peers_of(a)["num_loans"] == 0, "the loans are given back")
        assert a.get("/status")["engines"][0]["engine"] == "e", "a peer is shown as an engine"
        wait_for(lambda: coordinator.placements() == 2 * NUM, "the directory")
    assert a.stop() == 0
    assert b.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_peer_that_dies_or_hangs_slows_no_lookup_but_one(
    start: Start, coordinator: CoordinatorProcess, number: signal.Signals
) -> None:
    a, b = start("a"), start("b")
    own = keys_of("own", 4)
    chains = [keys_of(f"p{chain}", 4) for chain in range(32)]
    with a.connect().attach() as on_a, b.connect().attach() as on_b:
        fill(on_b, "own", own)
        for chain, keys in enumerate(chains):
            fill(on_a, f"p{chain}", keys)
        wait_for(lambda: coordinator.placements() == 4 + 4 * len(chains), "the directory")
        assert onboard(on_b, "p0", chains[0])[0].num_tokens == 4 * 256

        def timed(name: str, keys: list[bytes]) -> tuple[int, float]:
            began_s = time.perf_counter()
            found, _ = onboard(on_b, name, keys)
            took_s = time.perf_counter() - began_s
            on_b.release(found)
            return found.num_tokens, took_s

        usual_hit_s = statistics.median(timed("own", own)[1] for _ in range(30))
        usual_miss_s = statistics.median(timed(f"n{each}", keys_of(f"n{each}", 2))[1] for each in range(30))
        a.process.send_signal(number)
        first_s = timed("p1", chains[1])[1]
        hits, misses = [], []
        for chain in range(2, len(chains)):
            num_tokens, took_s = timed("own", own)
            assert num_tokens == 4 * 256
            hits.append(took_s)
            misses.append(timed(f"p{chain}", chains[chain])[1])
        for what, usual_s, took in (("hit", usual_hit_s, hits), ("miss", usual_miss_s, misses)):
            p50_s = statistics.median(took)
            print(f"{what}: usually p50 {usual_s * 1e3:.2f} ms; p50 {p50_s * 1e3:.2f}, most {max(took) * 1e3:.2f} ms")
        print(f"the first lookup after {number.name}: {first_s * 1e3:.1f} ms")
        assert statistics.median(hits) < usual_hit_s + 0.002
        assert statistics.median(misses) < usual_miss_s + 0.002
        alone = b.get("/status")["storage_manager"]["l2_tiers"][0]
        assert alone["breaker"] == "closed", "one peer's fault has closed all others out"


def test_seed_command_lines_share_on_one_host_without_a_secret_file(
    tmp_path: Path, die_with_parent: Callable[[], None]
) -> None:
    """A secret of this user is made in the runtime folder, which they have in common."""
    log = tmp_path / "c.log"
    with log.open("wb") as file:
        argv = [command(tmp_path)[0], "-m", "antiphon", "coordinator", "--port", "0", "--http-port", "0"]
        process = subprocess.Popen([*argv, "--runtime-dir", str(tmp_path)], stderr=file, preexec_fn=die_with_parent)
    try:
        found = wait_for(lambda: CoordinatorProcess.READY.search(log.read_text()), "a coordinator", 20)
        flags = ["--coordinator-url", f"http://localhost:{found[2]}", "--p2p-advertise-url", "http://127.0.0.1:0"]
        with ServerProcess(tmp_path, die_with_parent, *flags, "--p2p-transport", "tcp") as server:
            wait_for(lambda: peers_of(server)["is_member"], "a member", 20)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--coordinator-url", "127.0.0.1:1", "--p2p-advertise-url", "10.0.0.1:7000"),
            "--cluster-secret-file: 10.0.0.1 is not a loopback address",
        ),
        (("--coordinator-url", "127.0.0.1:1"), "add --p2p-advertise-url"),
        (("--p2p-advertise-url", "127.0.0.1:7000"), "add --coordinator-url"),
    ],
)
def test_half_of_it_or_no_secret_is_refused_before_the_start(tmp_path: Path, flags: tuple[str, ...], said: str) -> None:
    done = subprocess.run(command(tmp_path, *flags), capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
