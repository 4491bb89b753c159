"""Traces of a whole deployment at a real collector: one connected trace of a request, and a collector that dies.

Method: a router, simulated prefill and decode engines, a cache server for each that share with each other by way of a
coordinator, a disk tier; all send to a collector over gRPC or HTTP, which passes on to a receiver in the test.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from antiphon.protocol import cache as wire
from tests.cache_server.handoff_processes import ServerProcess, Servers, servers
from tests.cache_server.world import Client, keys_of, namespace_of
from tests.engine.simulated_processes import EngineProcess
from tests.observe.collector import HAS_ROTEL, Collector, SeenSpan, collector, tree
from tests.router.stack import RouterProcess, ask, metrics_of, total, urls, wait_for

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not HAS_ROTEL, reason="needs rotel"),
]

CHUNK = 32
NUM_TOKENS = 150
NUM_CHUNKS = NUM_TOKENS // CHUNK
CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
PROTOCOLS = ["grpc", "http"]
BACK_S = 10.0
"""From the collector's return to spans there again: its pause, the sending interval, and a busy machine."""


class World:
    """The processes."""

    def __init__(
        self, made: Servers, seen: Collector, preexec: Callable[[], None], protocol: str, folder: Path
    ) -> None:
        self.seen = seen
        self._preexec = preexec
        self._made = made
        self.folder = folder
        self.flags = seen.flags(protocol)
        self.coordinator = made.start("coordinator", enable_tracing=True, **self.flags)
        self.prefill_server = self.server("p")
        self.decode_server = self.server("d", l2=f"disk://{folder}/kv?capacity_gb=1")
        self.prefill = self._engine("prefill", self.prefill_server)
        self.decode = self._engine("decode", self.decode_server)
        self.router = self._router()

    def server(self, name: str, **flags: object) -> ServerProcess:
        shares = {"coordinator_url": f"127.0.0.1:{self.coordinator.port}", "p2p_advertise_url": "127.0.0.1:0"}
        own = shares | {"p2p_transport": "tcp", "chunk_size": CHUNK} | self.flags | flags
        made = self._made.one(name, enable_tracing=True, **own)
        wait_for(lambda: made.get("/status")["peers"]["is_listed"], "it shares")
        return made

    def _engine(self, role: str, server: ServerProcess) -> EngineProcess:
        cache = {"cache_port": server.port, "cache_chunk_size": CHUNK}
        engine = EngineProcess.start(self._preexec, role=role, engine_id=f"{role}-1", **cache)
        wait_for(lambda: server.get("/status")["engines"], f"the {role} engine is attached")
        return engine

    def _router(self) -> RouterProcess:
        told = [part for each in (self.prefill_server, self.decode_server) for part in ("--cache-server", each.url)]
        pools = [*urls([self.prefill], "prefill"), *urls([self.decode], "decode")]
        own = [part for name, value in self.flags.items() for part in (f"--{name.replace('_', '-')}", str(value))]
        return RouterProcess.start(self._preexec, *pools, *told, "--handoff", "cache", "--enable-tracing", *own)

    def ask(self, first_token: int = 1000, traceparent: str | None = TRACEPARENT, **fields: Any) -> dict[str, Any]:
        """One request of tokens that nobody has seen; its receipt once the engines have reported."""
        body = {"model": "m", "prompt": list(range(first_token, first_token + NUM_TOKENS)), "max_tokens": 8} | fields
        header = {} if traceparent is None else {"traceparent": traceparent}
        answer = ask(self.router.port, "POST", "/v1/completions", body, header)
        assert answer.status == 200, answer.body
        receipt = ask(self.router.port, "GET", f"/receipts/{answer.headers['x-antiphon-receipt']}?wait_s=5").json
        assert receipt["outcome"] == "completed"
        found: dict[str, Any] = receipt
        return found

    def processes(self) -> list[subprocess.Popen[Any]]:
        """Those that send to the collector."""
        children = [each.child for each in (self.coordinator, self.prefill_server, self.decode_server)]
        return [*children, self.router.process]

    def stop(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.stop()
        if self.router.process.poll() is None:
            self.router.stop()


@pytest.fixture(params=PROTOCOLS)
def world(request: pytest.FixtureRequest, tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[World]:
    with collector(tmp_path, die_with_parent) as seen, servers(tmp_path, die_with_parent) as made:
        found = World(made, seen, die_with_parent, request.param, tmp_path)
        try:
            yield found
        finally:
            found.stop()


def check_connected(spans: list[SeenSpan]) -> SeenSpan:
    """Every span is a part of another one, but for the first, which is the client's; returns that."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans), tree(spans)
    roots = [span for span in spans if span.parent_id not in by_id]
    assert [span.parent_id for span in roots] == [CLIENT_SPAN], tree(spans)
    for span in spans:
        assert span.start_s <= span.end_s
        if span is not roots[0]:
            assert by_id[span.parent_id].start_s <= span.start_s + 0.001, tree(spans)
    return roots[0]


def named(spans: list[SeenSpan], name: str) -> list[SeenSpan]:
    return [span for span in spans if span.name == name]


def test_one_connected_trace_of_a_request_that_hit_a_peer(world: World) -> None:
    receipt = world.ask()
    assert receipt["trace_id"] == CLIENT_TRACE
    wanted = {"POST /v1/completions", "prefill", "cache.store", "hand-over", "decode", "cache.lookup", "peer.lend"}
    spans = world.seen.wait_trace(CLIENT_TRACE, wanted | {"peer.pull", "peer.locate"})

    def num_lent() -> int:
        return sum(int(span["chunks.lent"]) for span in named(world.seen.trace(CLIENT_TRACE), "peer.lend"))

    wait_for(lambda: num_lent() == NUM_CHUNKS, "the spans of all loans")
    spans = world.seen.trace(CLIENT_TRACE)
    root = check_connected(spans)
    assert root.name == "POST /v1/completions"
    by_id = {span.span_id: span for span in spans}
    parents = {(span.name, by_id[span.parent_id].name) for span in spans if span is not root}
    parents.discard(("queue", root.name))  # on a busy machine
    assert parents == {
        ("prefill", root.name),
        ("hand-over", root.name),
        ("decode", root.name),
        ("cache.store", "prefill"),
        ("cache.lookup", "decode"),
        ("peer.locate", "cache.lookup"),
        ("peer.pull", "cache.lookup"),
        ("peer.lend", "peer.pull"),
    }, tree(spans)
    assert {span.service for span in spans} == {"antiphon-router", "antiphon-cache-server"}
    assert {span.error for span in spans} == {None}
    assert root["receipt"] == receipt["id"]
    by_source = {name: root[f"tokens.{name}"] for name in receipt["tokens"]["by_source"]}
    assert by_source == receipt["tokens"]["by_source"], "the engines' reports came before the span was sent"
    (lookup,) = named(spans, "cache.lookup")
    assert (lookup.instance.partition("@")[0], lookup["tokens.peer"]) == ("d", NUM_CHUNKS * CHUNK)
    assert {span["peer"] for span in named(spans, "peer.pull")} == {"p"}
    assert {span.instance.partition("@")[0] for span in named(spans, "peer.lend")} == {"p"}
    (store,) = named(spans, "cache.store")
    assert (store["instance"], store["chunks.stored"]) == ("p", NUM_CHUNKS)


def test_a_lookup_of_what_a_tier_and_a_peer_have(world: World) -> None:
    """Its first chunk is on the disk of the server, the second at the peer, whom the coordinator names. On a busy
    machine the peer may be too slow for a lookup, which is then made again."""
    keys = keys_of("x", 2)

    def client(server: ServerProcess) -> Client:
        attach = {"slab_bytes": 256, "chunk_size_tokens": CHUNK, "role": "scheduler"}
        return Client(server.socket_path).hello().attach(**attach)

    def members() -> dict[str, int]:
        return {each["instance"]: each["num_chunks"] for each in world.coordinator.get("/status")["members"]}

    with client(world.prefill_server) as other:
        store(other, keys)
    with client(world.decode_server) as own:
        store(own, keys[:1])
        wait_for(lambda: _on_disk(world.decode_server) >= 1, "its first chunk is on the disk")
    world.decode_server.end()
    again = world.server("d", l2=f"disk://{world.folder}/kv?capacity_gb=1")
    wait_for(lambda: _on_disk(again) >= 1, "it knows what is on its disk")
    wait_for(lambda: members() == {"p": 2, "d": 0}, "the coordinator knows the peer's chunks")

    fetched: dict[str, set[int]] = {}
    with client(again) as own:

        def is_found() -> bool:
            body = wire.Lookup("r", namespace_of("x"), "t", b"".join(keys), 5.0, 0.0, None, TRACEPARENT)
            own.send(body)
            answer = own.receive().body
            if isinstance(answer, wire.Onboarding):
                answer = own.receive().body
            assert isinstance(answer, wire.Found), answer
            for source, places in answer.fetched:
                fetched.setdefault(source, set()).update(places)
            own.release(answer)
            return answer.num_tokens == 2 * CHUNK

        wait_for(is_found, "both chunks", 20.0)
    assert fetched == {"l2": {0}, "peer": {1}}
    world.seen.wait_trace(CLIENT_TRACE, {"cache.lookup", "tier.get", "peer.pull", "peer.lend", "directory.locate"})
    spans = world.seen.trace(CLIENT_TRACE)
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        assert (span.name == "cache.lookup") == (span.parent_id == CLIENT_SPAN), tree(spans)
        assert span.parent_id == CLIENT_SPAN or span.parent_id in by_id, tree(spans)
    (get,) = named(spans, "tier.get")
    assert (get["tier"], get["result"], get.error) == ("disk", "done", None)
    locate = named(spans, "directory.locate")[0]
    assert locate.service == "antiphon-coordinator"
    assert by_id[locate.parent_id].name == "peer.locate"


def test_a_question_that_finds_nothing_is_in_its_trace(world: World) -> None:
    attach = {"slab_bytes": 256, "chunk_size_tokens": CHUNK, "role": "scheduler"}
    with Client(world.prefill_server.socket_path).hello().attach(**attach) as client:
        client.send(wire.Lookup("r", namespace_of("z"), "t", b"".join(keys_of("z", 2)), 5.0, 0.0, None, TRACEPARENT))
        answer = client.receive().body
        if isinstance(answer, wire.Onboarding):
            answer = client.receive().body
        assert isinstance(answer, wire.Found), answer
        assert answer.num_tokens == 0
    spans = world.seen.wait_trace(CLIENT_TRACE, {"cache.lookup", "peer.locate", "directory.locate"})
    by_id = {span.span_id: span for span in spans}
    parents = {(span.name, by_id[span.parent_id].name if span.parent_id in by_id else "") for span in spans}
    assert parents == {("cache.lookup", ""), ("peer.locate", "cache.lookup"), ("directory.locate", "peer.locate")}
    assert {span["chunks.found"] for span in spans if span.name != "cache.lookup"} == {0}


def store(client: Client, keys: list[bytes]) -> None:
    """Once there is room: the arena is populated in the background."""
    wait_for(lambda: set(client.store("x", keys)) == {"write"}, "the chunks are stored")


def _on_disk(server: ServerProcess) -> int:
    (tier,) = [tier for tier in server.get("/status")["storage_manager"]["l2_tiers"] if tier["name"] == "disk"]
    return int(tier["total_object_count"])


def test_metrics_arrive(world: World) -> None:
    world.ask(traceparent=None)
    seen = world.seen

    def ended() -> int:
        metric = seen.metric("antiphon-router", "antiphon_router_requests")
        return 0 if metric is None else sum(int(point.as_int) for point in metric.sum.data_points)

    wait_for(lambda: ended() == 1, "the router's count", 15.0)
    metric = seen.metric("antiphon-router", "antiphon_router_requests")
    assert metric.sum.is_monotonic
    histogram = wait_for(
        lambda: seen.metric("antiphon-router", "antiphon_router_prefill_seconds"), "the router's times", 15.0
    )
    assert histogram.unit == "s"
    (point,) = histogram.histogram.data_points
    assert point.count == sum(point.bucket_counts) == 1
    wait_for(lambda: seen.metric("antiphon-cache-server", "antiphon_cache_lookups"), "a cache server's count", 15.0)
    members = wait_for(lambda: seen.metric("antiphon-coordinator", "antiphon_coordinator_members"), "its members", 15.0)
    assert [point.as_int for point in members.gauge.data_points] == [2]


# ---- a collector that is not there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda number: number.name)
def test_a_collector_that_dies_or_hangs_costs_its_spans_alone(world: World, number: signal.Signals) -> None:
    """Under load: no request fails or takes long, each process says so once and once that it is back, and sends again;
    none stays at its end."""
    num_rounds, num_at_once = 20, 4

    def load(first: int) -> list[float]:
        took_s = []
        for round_number in range(num_rounds):
            began_s = time.monotonic()
            world.ask((first * num_rounds + round_number) * 1000, None, stream=round_number % 2 == 0)
            took_s.append(time.monotonic() - began_s)
        return took_s

    with ThreadPoolExecutor(num_at_once) as threads:
        usual = sorted(chain.from_iterable(threads.map(load, range(num_at_once))))
        wait_for(lambda: world.seen.spans, "spans came")
        if number is signal.SIGKILL:
            world.seen.kill()
        else:
            world.seen.signal(number)
        during = sorted(chain.from_iterable(threads.map(load, range(num_at_once, 2 * num_at_once))))
    assert during[len(during) // 2] < 3 * usual[len(usual) // 2] + 0.1, "the usual request"
    assert during[-1] < max(1.5, 3 * usual[-1]), "the slowest request: a call to the collector may take 2 s"
    wait_for(lambda: total(metrics_of(world.router.port), "spans_total", "outcome=dropped"), "spans are dropped", 15.0)
    assert world.router.log.count("spans are not taken") == 1
    if number is signal.SIGKILL:
        world.seen.start()
    else:
        world.seen.signal(signal.SIGCONT)
    before = {span.span_id for span in world.seen.spans}

    def is_back() -> bool:
        receipt = world.ask(int(time.monotonic() * 1000) % 10**9 + 10**6, None)
        return any(span["receipt"] == receipt["id"] for span in world.seen.spans)

    wait_for(lambda: is_back() or {span.span_id for span in world.seen.spans} - before, "spans flow again", BACK_S)
    wait_for(lambda: world.router.log.count("spans are taken again") == 1, "the router says so", BACK_S)
    assert world.router.log.count("spans are not taken") == 1
    assert world.router.log.count("metrics are not taken") <= 1, "where they were due meanwhile"


@pytest.mark.parametrize("state", ["never", "stopped"])
def test_a_process_ends_in_time_without_its_collector(world: World, state: str) -> None:
    if state == "never":
        world.seen.kill()
    else:
        world.seen.signal(signal.SIGSTOP)
    world.ask()
    for process in world.processes():
        began_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        assert time.monotonic() - began_s < 5.0, process.args


def test_without_a_collector_processes_start_and_serve(
    tmp_path: Path, die_with_parent: Callable[[], None], free_port: int
) -> None:
    """Nobody was ever there."""
    with servers(tmp_path, die_with_parent) as made:
        flags = {"otlp_endpoint": f"http://127.0.0.1:{free_port}"}
        server = made.one("alone", enable_tracing=True, chunk_size=CHUNK, **flags)
        with Client(server.socket_path).hello().attach(slab_bytes=256, chunk_size_tokens=CHUNK) as client:
            store(client, keys_of("x", 2))
            lookup = wire.Lookup("r", namespace_of("x"), "t", b"".join(keys_of("x", 2)), 0.0, 0.0, None, TRACEPARENT)
            assert client.call(lookup, wire.Found).num_tokens == 2 * CHUNK


def test_an_endpoint_that_is_none_is_refused() -> None:
    command = [sys.executable, "-m", "antiphon", "coordinator", "--enable-tracing", "--otlp-endpoint", "ftp://x"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "is not the address of a collector" in done.stderr
