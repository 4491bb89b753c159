"""An engine with the connector's own threads and clients, beside a real cache server that is killed and stopped."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.connector.blocks import CHUNK_SIZE
from tests.connector.engine import EngineOptions, EngineRequest, Status
from tests.connector.harness import Harness

pytestmark = pytest.mark.process

NewHarness = Callable[..., Harness]
DEADLINE_S = 30.0
PROMPT = list(range(100, 160))


class Server:
    """``antiphon cache-server`` as a process, on one port in all its lives."""

    def __init__(self, port: int, folder: Path, die_with_parent: Callable[[], None]) -> None:
        self.port = port
        self._folder = folder
        self._die_with_parent = die_with_parent
        self.start()

    def start(self) -> None:
        flags = {"port": self.port, "http-port": 0, "l1-size-gb": 0.01, "chunk-size": CHUNK_SIZE}
        flags |= {"instance-id": "real", "runtime-dir": self._folder}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "antiphon", "cache-server", *(f"--{k}={v}" for k, v in flags.items())],
            preexec_fn=self._die_with_parent,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        assert any("ready:" in line for line in self.process.stderr)

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def server(free_port: int, tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[Server]:
    made = Server(free_port, tmp_path, die_with_parent)
    yield made
    with contextlib.suppress(ProcessLookupError):
        made.send(signal.SIGCONT)
    if made.process.poll() is None:
        made.kill()


def settle(harness: Harness) -> None:
    """Steps until no request is left and the last stores have ended."""
    end_s = time.monotonic() + DEADLINE_S
    while harness.engine.has_work or harness.scheduler_side._jobs:
        assert time.monotonic() < end_s, "requests are left"
        harness.step()
        time.sleep(0.0005)


def run(harness: Harness, tokens: list[int]) -> EngineRequest:
    request = harness.add(tokens)
    settle(harness)
    assert request.status is Status.FINISHED_STOPPED
    return request


def run_until_loaded(harness: Harness, tokens: list[int]) -> EngineRequest:
    """The same prompt again and again, until a connection, a gate and a stored prefix are there."""
    end_s = time.monotonic() + DEADLINE_S
    while True:
        harness.engine.pool.reset()
        request = run(harness, tokens)
        if "l1" in request.sources:
            return request
        assert time.monotonic() < end_s, "nothing is loaded"
        time.sleep(0.01)


def assert_nothing_left(harness: Harness) -> None:
    assert not harness.faults.records
    for connector in (harness.scheduler, *harness.workers):
        assert connector.out_of_service is None
    assert harness.scheduler_side.num_tracked == 0
    assert len(harness.engine.pool.free) == harness.engine.pool.num_usable


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_stored_is_loaded_in_the_next_life_too(new_harness: NewHarness, server: Server, num_ranks: int) -> None:
    harness = new_harness(EngineOptions(num_ranks=num_ranks), real_port=server.port)
    loaded = run_until_loaded(harness, PROMPT)
    assert loaded.sources.count("l1") == 56
    server.kill()
    for _ in range(20):
        harness.engine.pool.reset()
        run(harness, PROMPT)
    server.start()
    assert run_until_loaded(harness, PROMPT).sources.count("l1") == 56
    assert_nothing_left(harness)


def test_a_server_that_hangs_costs_no_request_more_than_the_time_of_a_lookup(
    new_harness: NewHarness, server: Server
) -> None:
    harness = new_harness(real_port=server.port)
    run_until_loaded(harness, PROMPT)
    server.send(signal.SIGSTOP)
    began_s = time.monotonic()
    for _ in range(10):
        harness.engine.pool.reset()
        run(harness, PROMPT)
    assert time.monotonic() - began_s < 8.0, "each request waited for the server"
    server.send(signal.SIGCONT)
    run_until_loaded(harness, PROMPT)
    assert_nothing_left(harness)


@pytest.mark.parametrize("seed", range(2))
def test_a_server_that_is_killed_at_any_moment_costs_no_byte(
    new_harness: NewHarness, server: Server, seed: int
) -> None:
    options = EngineOptions(num_blocks=40, running_max=6, num_ranks=1 + seed)
    harness = new_harness(options, seed=seed, real_port=server.port)
    chance = random.Random(seed)
    bases = [[chance.randrange(50) for _ in range(60)] for _ in range(2)]
    run_until_loaded(harness, bases[0])
    for life in range(4):
        for number in range(25):
            harness.add(chance.choice(bases)[: chance.randrange(8, 60)], chance.randrange(1, 10))
            for _ in range(chance.randrange(1, 8)):
                harness.step()
            if chance.random() < 0.2 and harness.engine.requests:
                harness.engine.abort(chance.choice(sorted(harness.engine.requests)))
            if number % 3 == 0:
                harness.engine.pool.reset()
        server.send(signal.SIGKILL) if life % 2 else server.send(signal.SIGTERM)
        for _ in range(20):
            harness.step()
        server.kill()
        server.start()
    settle(harness)
    run_until_loaded(harness, bases[1])
    assert_nothing_left(harness)
