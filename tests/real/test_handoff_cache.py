"""KV handed over through cache servers, with real engines and no NIXL between them.

Goal: what a prefill engine has stored is loaded by the decode engine from its own cache server, which has it from the
prefill engine's as a peer, or from a tier that both share; the decode engine computes less than a chunk; its answers
are those of computing alone; the death of the prefill engine after its store changes nothing. Method: two engines in
float32, a cache server for each on loopback, first as peers over NIXL, then before one Mooncake store whose metadata is
in etcd and whose memory is a process of its own. The tests that kill come last.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.deployment import wait_for
from tests.real.reuse import BLOCK, CHUNK, CacheServerProcess, Engine, get, post, tokens
from tests.router.stack import RouterProcess
from tests.storage.servers import Etcd, MooncakeMaster, MooncakeMemory, Service

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(900)]

BLOCK_BYTES = BLOCK * 46_080  # of the demo model in float32
KV_MEMORY_BYTES = 34 * BLOCK_BYTES
TAIL = 19
ASKED = {"antiphon_handoff": True}


class Memory(MooncakeMemory):
    """Room for what all tests hand over."""

    SEGMENT_BYTES = 1 << 30


class HandoffServer(CacheServerProcess):
    """A cache server that shares with the other one.

    Args:
        instance: its name.
        flags: how it shares.
        ports: of its calls and its HTTP.
    """

    def __init__(
        self,
        folder: Path,
        instance: str,
        flags: tuple[str, ...],
        ports: list[int],
        around: tuple[Callable[[], None], set[int]],
    ) -> None:
        super().__init__(folder, *ports, *around)
        self._instance = instance
        self._flags = flags

    def start(self) -> None:
        command = [sys.executable, "-m", "antiphon", "cache-server", "--port", str(self.port)]
        command += ["--http-port", str(self._http_port), "--l1-size-gb", "0.4", "--chunk-size", str(CHUNK)]
        command += ["--instance-id", self._instance, "--runtime-dir", str(self.folder), *self._flags]
        with (self.folder / f"{self._instance}.log").open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=self._preexec
            )
        self._adopted.add(self.process.pid)
        wait_for(lambda: get(f"{self.url}/readiness")[0] == 200, f"cache server {self._instance} is ready", 30.0)


def _shares(server: HandoffServer) -> bool:
    peers = server.status()["peers"]
    return bool(peers["is_listed"]) and peers["nixl"] == "in use"


class World:
    """Both engines, both servers, and what lies between the servers."""

    def __init__(self, folder: Path, model: Path, take: Callable[[int], list[int]], around: tuple[Any, Any]) -> None:
        self.folder = folder
        self.around = around
        self._take = take
        self._model = model
        self._others: list[subprocess.Popen[bytes]] = []
        self._services: list[Service] = []
        self.servers: list[HandoffServer] = []
        self.engines: list[Engine] = []
        self.way = ""
        self.kept_prompt: list[int] = []
        self.kept_params: dict[str, Any] = {}
        """Handed over before the prefill engine was killed, and not loaded yet."""

    def start(self, way: str) -> None:
        self.way = way
        flags = self._start_coordinator() if way == "peers" else self._start_mooncake()
        for name in ("p", "d"):
            self.servers.append(HandoffServer(self.folder, name, flags, self._take(2), self.around))
            self.servers[-1].start()
        for server in self.servers:
            (port,) = self._take(1)
            folder = self.folder / f"engine-{server.port}"
            folder.mkdir()
            engine = Engine(folder, self._model, port, server, *self.around)
            self.engines.append(engine)
            engine.start(KV_MEMORY_BYTES)
            wait_for(server.has_engine, "the gate has passed", 10.0)
        if way == "peers":
            for server in self.servers:
                wait_for(lambda server=server: _shares(server), "it shares", 30.0)  # type: ignore[misc]

    def _start_coordinator(self) -> tuple[str, ...]:
        port, http_port = self._take(2)
        command = [sys.executable, "-m", "antiphon", "coordinator", "--port", str(port), "--http-port", str(http_port)]
        command += ["--runtime-dir", str(self.folder)]
        with (self.folder / "coordinator.log").open("ab") as output:
            process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=self.around[0])
        self.around[1].add(process.pid)
        self._others.append(process)
        wait_for(lambda: get(f"http://127.0.0.1:{http_port}/healthz")[0] == 200, "the coordinator is ready", 30.0)
        return ("--coordinator-url", f"127.0.0.1:{port}", "--p2p-advertise-url", "127.0.0.1:0")

    def _start_mooncake(self) -> tuple[str, ...]:
        etcd = Etcd(self.folder / "etcd", self.around[1], self._take)
        master = MooncakeMaster(self.folder / "master", self.around[1], self._take, has_http_metadata=False)
        metadata = f"etcd://127.0.0.1:{etcd.port}"
        memory = Memory(self.folder / "memory", self.around[1], self._take, master, metadata)
        for service in (etcd, master, memory):
            self._services.append(service)
            service.start()
        return ("--l2", f"mooncake://{master.address}?metadata={metadata}&chunk_gb_max=0.02&timeout_s=10")

    def num_fetched(self, server: HandoffServer) -> int:
        """Chunks that the server has taken from the other one, over NIXL, or from the tier."""
        found = server.status()
        if self.way == "peers":
            assert found["peers"]["counts"]["nixl_reads"] >= found["peers"]["counts"]["pulled"]
            return int(found["peers"]["counts"]["pulled"])
        (tier,) = (each for each in found["storage_manager"]["l2_tiers"] if each["name"] == "mooncake")
        return int(tier["fetches"]["hit"])

    @property
    def prefill(self) -> Engine:
        return self.engines[0]

    @property
    def decode(self) -> Engine:
        return self.engines[1]

    def prefilled(self, prompt: list[int]) -> dict[str, Any]:
        """What the prefill engine answers in ``kv_transfer_params``."""
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0, "kv_transfer_params": ASKED}
        params: dict[str, Any] = post(f"{self.prefill.url}/v1/completions", body)["kv_transfer_params"]
        return params

    def close(self) -> None:
        for engine in self.engines:
            if engine.process is not None and engine.process.poll() is None:
                engine.kill()
        for server in self.servers:
            if server.process is not None and server.process.poll() is None:
                server.kill()
        for process in self._others:
            process.kill()
            process.wait(20)
            self.around[1].discard(process.pid)
        for service in reversed(self._services):
            service.kill()


@pytest.fixture(scope="module", params=["peers", "mooncake"])
def world(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    model: Path,
    _ports: object,
    die_with_parent: Callable[[], None],
    adopted: set[int],
) -> Iterator[World]:
    """Two engines and two cache servers that hand over in one way."""
    take: Callable[[int], list[int]] = _ports.take  # type: ignore[attr-defined]
    found = World(tmp_path_factory.mktemp("h"), model, take, (die_with_parent, adopted))
    try:
        found.start(request.param)
        yield found
    finally:
        found.close()


@pytest.mark.parametrize("num_chunks", [1, 3, 6])
def test_the_decode_engine_computes_less_than_a_chunk_and_says_the_same(world: World, num_chunks: int) -> None:
    prompt = tokens(num_chunks * CHUNK + TAIL, seed=100 + num_chunks)
    alone = world.decode.complete(prompt, cache_salt="alone")
    params = world.prefilled(prompt)
    assert set(params) == {"antiphon_handoff"}
    before = world.num_fetched(world.servers[1])
    handed = world.decode.complete(prompt, kv_transfer_params=params)
    assert handed.text == alone.text
    assert (handed.source("remote_prefill"), handed.source("computed")) == (num_chunks * CHUNK, TAIL)
    assert world.num_fetched(world.servers[1]) == before + num_chunks


def test_a_prompt_of_less_than_a_chunk_is_not_handed_over(world: World) -> None:
    prompt = tokens(CHUNK - 1, seed=200)
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": ASKED}
    assert post(f"{world.prefill.url}/v1/completions", body)["kv_transfer_params"] is None


def test_through_the_router(world: World, die_with_parent: Callable[[], None]) -> None:
    prompt = tokens(4 * CHUNK + TAIL, seed=300)
    alone = world.decode.complete(prompt, cache_salt="alone")
    flags = ["--prefill", world.prefill.url, "--decode", world.decode.url, "--handoff", "cache"]
    flags += [word for server in world.servers for word in ("--cache-server", server.url)]
    router = RouterProcess.start(die_with_parent, *flags)
    try:
        url = f"http://127.0.0.1:{router.port}"
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 16, "temperature": 0}
        answer = post(f"{url}/v1/completions", body)
        assert answer["choices"][0]["text"] == alone.text
        (receipt,) = json.loads(get(f"{url}/receipts")[1])["receipts"]
        receipt = json.loads(get(f"{url}/receipts/{receipt['id']}?wait_s=5")[1])
        assert (receipt["path"], receipt["handoff"]) == ("pd", "cache")
        assert receipt["tokens"]["by_source"] == {"device": 0, "l1": 0, "computed": len(prompt)}
        assert receipt["tokens"]["decode"]["computed"] == TAIL
    finally:
        router.stop()
    for engine in world.engines:
        wait_for(lambda engine=engine: engine.metrics().kv_usage == 0, "no block is held", 10.0)  # type: ignore[misc]
    for server in world.servers:
        wait_for(lambda server=server: server.num_leases() == 0, "no lease is held", 10.0)  # type: ignore[misc]


def test_the_prefill_engine_is_killed_right_after_its_store(world: World) -> None:
    prompt, world.kept_prompt = tokens(5 * CHUNK + TAIL, seed=400), tokens(2 * CHUNK + TAIL, seed=500)
    alone = world.decode.complete(prompt, cache_salt="alone")
    world.kept_params = world.prefilled(world.kept_prompt)
    before = world.servers[0].num_objects
    params = world.prefilled(prompt)
    wait_for(lambda: world.servers[0].num_objects >= before + 5, "the prompt is stored", 20.0)
    world.prefill.kill()
    handed = world.decode.complete(prompt, kv_transfer_params=params)
    assert handed.text == alone.text
    assert handed.source("computed") == TAIL < CHUNK


def test_its_server_is_killed_too(world: World) -> None:
    """What only that server had is computed; what it has published to a tier is still handed over."""
    prompt = world.kept_prompt
    alone = world.decode.complete(prompt, cache_salt="alone")
    world.servers[0].kill()
    handed = world.decode.complete(prompt, kv_transfer_params=world.kept_params)
    assert handed.text == alone.text
    assert handed.source("computed") == (len(prompt) if world.way == "peers" else TAIL)
