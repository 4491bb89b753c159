"""KV handed over through cache servers by whole processes: simulated engines, a router, cache servers, a coordinator.

The text of an answer depends on every byte of KV, so that one comparison checks what was handed over.
"""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cache_server.handoff_processes import ServerProcess, Servers, servers
from tests.engine.simulated_processes import EngineProcess
from tests.router.stack import RouterProcess, ask, raw_request, urls, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

CHUNK = 32
NUM_TOKENS = 150
BODY: dict[str, Any] = {"model": "m", "prompt": list(range(1000, 1000 + NUM_TOKENS)), "max_tokens": 8}
NUM_CHUNKS = NUM_TOKENS // CHUNK
ASKED = {"antiphon_handoff": True}


class World:
    """One prefill and one decode engine, each beside a cache server, and an engine of its own to compare with."""

    def __init__(self, made: Servers, preexec: Callable[[], None], *, is_shared: bool = False) -> None:
        flags = {"chunk_size": CHUNK}
        if is_shared:
            self.first = self.second = made.one("one", **flags)
        else:
            self.first, self.second = made.peers(**flags)
        self._preexec = preexec
        self.alone = EngineProcess.start(preexec)
        self.prefill = self._start("prefill", self.first)
        self.decode = self._start("decode", self.second)
        self.router: RouterProcess | None = None

    def _start(self, role: str, server: ServerProcess) -> EngineProcess:
        cache = {"cache_port": server.port, "cache_chunk_size": CHUNK}
        engine = EngineProcess.start(self._preexec, role=role, engine_id=f"{role}-1", **cache)
        wait_for(
            lambda: len(server.get("/status")["engines"]) >= (2 if role == "decode" and server is self.first else 1),
            f"the {role} engine is attached",
        )
        return engine

    def start_router(self, *flags: str) -> None:
        own = {self.first.url, self.second.url}
        told = [part for url in sorted(own) for part in ("--cache-server", url)]
        pools = [*urls([self.prefill], "prefill"), *urls([self.decode], "decode")]
        self.router = RouterProcess.start(self._preexec, *pools, *told, "--handoff", "cache", *flags)

    def ask(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """The text of an answer, and its receipt once the engines have reported."""
        assert self.router is not None
        answer = ask(self.router.port, "POST", "/v1/completions", body)
        assert answer.status == 200, answer.body
        receipt = ask(self.router.port, "GET", f"/receipts/{answer.headers['x-antiphon-receipt']}?wait_s=5")
        return json.loads(answer.body)["choices"][0]["text"], json.loads(receipt.body)

    def expected(self, body: dict[str, Any]) -> str:
        return whole(self.alone, body)[0]

    def state(self, engine: EngineProcess) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(engine.ask("GET", "/simulated/state")[1])
        return found

    def stop(self) -> None:
        for engine in (self.alone, self.prefill, self.decode):
            if engine.process.poll() is None:
                engine.process.send_signal(signal.SIGCONT)
            engine.stop()
        if self.router is not None:
            self.router.stop()


def whole(engine: EngineProcess, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    status, data = engine.ask("POST", "/v1/completions", body)
    assert status == 200, data
    answer = json.loads(data)
    return answer["choices"][0]["text"], answer


@pytest.fixture
def worlds(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[Callable[..., World]]:
    made: list[World] = []
    with servers(tmp_path, die_with_parent) as started:

        def begin(**options: Any) -> World:
            made.append(World(started, die_with_parent, **options))
            return made[-1]

        yield begin
        for world in made:
            world.stop()


def num_computed(world: World, before: int = 0) -> int:
    return int(world.state(world.decode)["num_computed_tokens"]) - before


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_router_hands_over_through_cache_servers(worlds: Callable[..., World], is_shared: bool) -> None:
    world = worlds(is_shared=is_shared)
    world.start_router()
    text, receipt = world.ask(BODY)
    assert text == world.expected(BODY)
    assert (receipt["path"], receipt["reason"], receipt["handoff"]) == ("pd", "default", "cache")
    assert receipt["tokens"]["by_source"] == {"device": 0, "l1": 0, "computed": NUM_TOKENS}
    assert receipt["tokens"]["decode"]["remote_prefill"] == NUM_CHUNKS * CHUNK
    assert num_computed(world) == NUM_TOKENS - NUM_CHUNKS * CHUNK < CHUNK
    state = world.state(world.prefill)
    assert (state["blocks_used"], state["leases"]) == (0, 0), "the prefill engine waits for nobody"
    last = json.loads(world.prefill.ask("GET", "/simulated/last")[1])
    assert "do_remote_decode" not in last["body"]
    wait_for(lambda: world.first.num_leases + world.second.num_leases == 0, "no lease is left")


def test_a_prompt_of_less_than_a_chunk_is_computed_by_the_decode_engine(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.start_router()
    body = BODY | {"prompt": BODY["prompt"][: CHUNK - 1]}
    text, receipt = world.ask(body)
    assert text == world.expected(body)
    assert receipt["handoff"] == "none"
    assert num_computed(world) == CHUNK - 1


def test_the_prefill_engine_is_killed_right_after_its_store(worlds: Callable[..., World]) -> None:
    """Its node's server has the bytes: less than a chunk is computed again."""
    world = worlds()
    world.start_router()
    world.decode.process.send_signal(signal.SIGSTOP)  # between the two, for as long as it takes
    with socket.create_connection(("127.0.0.1", world.router.port)) as client:  # type: ignore[union-attr]
        client.settimeout(20)
        client.sendall(raw_request("/v1/completions", BODY))
        wait_for(lambda: world.first.num_chunks == NUM_CHUNKS, "the prompt is stored")
        world.prefill.kill()
        world.decode.process.send_signal(signal.SIGCONT)
        data = b""
        while b'"usage"' not in data:
            data += client.recv(65536)
    answer = json.loads(data.partition(b"\r\n\r\n")[2])
    assert answer["choices"][0]["text"] == world.expected(BODY)
    assert num_computed(world) < CHUNK


def test_its_server_is_killed_and_the_decode_engine_computes(worlds: Callable[..., World]) -> None:
    world = worlds()
    _, prefilled = whole(world.prefill, BODY | {"max_tokens": 1, "kv_transfer_params": ASKED})
    params = prefilled["kv_transfer_params"]
    world.first.end()
    text, _ = whole(world.decode, BODY | {"kv_transfer_params": params})
    assert text == world.expected(BODY)
    assert num_computed(world) == NUM_TOKENS


def test_without_the_prefill_engines_server_the_receipt_says_none(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.start_router()
    world.first.end()
    text, receipt = world.ask(BODY)
    assert text == world.expected(BODY)
    assert receipt["handoff"] == "none"
    assert receipt["tokens"]["decode"]["computed"] == NUM_TOKENS


def test_clients_that_leave_leave_nothing(worlds: Callable[..., World]) -> None:
    world = worlds()
    world.start_router()
    assert world.router is not None
    for number in range(30):
        prompt = [number * 1000 + token for token in range(NUM_TOKENS)]
        with socket.create_connection(("127.0.0.1", world.router.port)) as client:
            client.sendall(raw_request("/v1/completions", BODY | {"prompt": prompt, "stream": True}))
            if number % 3:
                client.recv(1)
    text, _ = world.ask(BODY)
    assert text == world.expected(BODY)
    for engine in (world.prefill, world.decode):
        wait_for(lambda engine=engine: world.state(engine)["blocks_used"] == 0, "no block is left")  # type: ignore[misc]
    wait_for(lambda: world.first.num_leases + world.second.num_leases == 0, "no lease is left", 15.0)
