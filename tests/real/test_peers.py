"""Cache servers that share, and a disk tier behind each, on real engines.

Goal: a prompt that one pool has computed is loaded by the other from its own cache server, which pulled it from the
first one's; after a restart of a cache server the prompt is loaded from its tier; receipts say which, and every answer
is that of computing. Method: one deployment in float32 with a cache server for each pool, a coordinator, and a disk
tier; prompts are sent to one engine alone through a router that has only that one, or through the deployment's router.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.observe.collector import HAS_ROTEL, Collector, collector, tree
from tests.real.deployment import LEASE_S, Deployment, wait_for
from tests.real.reuse import CHUNK, tokens
from tests.real.test_by_content import MAX_TOKENS, RouterProcess, reset
from tests.router.stack import quiet_ports

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(600)]

SPEC = """\
name: real
model: {{path: {model}, served_name: smollm2, dtype: float32, max_model_len: 4096}}
engine:
  device: cpu
  kv_memory_bytes: 400MB
  max_num_seqs: 8
  dev_mode: true
  args: {{generation-config: vllm}}
prefill: {{port: {prefill}, side_channel_port: {prefill_side}}}
decode: {{port: {decode}, side_channel_port: {decode_side}}}
handoff: {{lease_s: {lease_s}}}
cache:
  l1_size_bytes: 600MB
  port: {cache}
  http_port: {cache_http}
  runtime_dir: "{runtime_dir}"
  peers: true
  peer_port: {peers}
  coordinator_port: {coordinator}
  coordinator_http_port: {coordinator_http}
  l2: ["disk://{runtime_dir}/kv?capacity_gb=1"]
router: {{port: {router}}}
supervisor: {{state_dir: "{state_dir}"}}
tracing: {{enabled: {is_traced}, otlp_endpoint: "{otlp_endpoint}", otlp_protocol: grpc, metrics_interval_s: 5}}
"""
POOLS = ("prefill", "decode")
TAIL = 30
SETTLE_S = 30.0


class SharingDeployment(Deployment):
    """One prefill engine, one decode engine, a cache server for each, their coordinator, one router."""

    def __init__(
        self, folder: Path, short: Path, model: Path, preexec: Callable[[], None], seen: Collector | None = None
    ) -> None:
        self.seen = seen
        first = quiet_ports(12)
        names = ("prefill", "prefill_side", "decode", "decode_side", "router", "coordinator", "coordinator_http")
        self.ports = {name: first + index for index, name in enumerate(names)}
        self.ports |= {"cache": first + 8, "cache_http": first + 10, "peers": quiet_ports(2)}
        self.state_dir = folder / "state"
        self.spec_path = folder / "antiphon.yaml"
        folders = {"state_dir": self.state_dir, "runtime_dir": short}
        traced = {"is_traced": str(seen is not None).lower()}
        traced["otlp_endpoint"] = seen.url("grpc") if seen is not None else "http://127.0.0.1:4317"
        self.spec_path.write_text(SPEC.format(model=model, lease_s=LEASE_S, **folders, **traced, **self.ports))
        self.output = folder / "up.log"
        self.url = f"http://127.0.0.1:{self.ports['router']}"
        self.engine_urls = {pool: f"http://127.0.0.1:{self.ports[pool]}" for pool in POOLS}
        self.server_urls = {
            pool: f"http://127.0.0.1:{self.ports['cache_http'] + index}" for index, pool in enumerate(POOLS)
        }
        self._preexec = preexec
        self.process: subprocess.Popen[bytes] | None = None

    def server(self, pool: str) -> dict[str, Any]:
        """``/status`` of the pool's cache server; empty where it does not answer."""
        code, body = self.get("/status", self.server_urls[pool])
        return json.loads(body) if code == 200 else {}

    def is_sharing(self, pool: str) -> bool:
        """Whether the server shares all it has, over NIXL, and its engine's worker has passed its gate."""
        status = self.server(pool)
        gates = [process["gate"] for engine in status.get("engines", ()) for process in engine["processes"]]
        peers = status.get("peers") or {}
        return "passed" in gates and bool(peers.get("is_listed")) and peers.get("nixl") == "in use"

    def num_known(self) -> int:
        """Chunks that the coordinator knows of."""
        body = self.get("/status", f"http://127.0.0.1:{self.ports['coordinator_http']}")[1]
        return int(json.loads(body)["chunks"])

    def num_published(self, pool: str) -> int:
        """Chunks in the server's disk tier."""
        (tier,) = [tier for tier in self.server(pool)["storage_manager"]["l2_tiers"] if tier["name"] == "disk"]
        return int(tier["total_object_count"])

    def alone(self, pool: str) -> contextlib.AbstractContextManager[RouterProcess]:
        """A router that has the pool's engine only."""
        return self.router(f"{pool}-alone", "--decode", self.engine_urls[pool], pools=(pool,))

    @contextlib.contextmanager
    def router(self, name: str, *flags: str, pools: tuple[str, ...]) -> Iterator[RouterProcess]:
        """A further router, with the cache servers of ``pools``, and, where they are both, their engines."""
        port = quiet_ports(1)
        command = [sys.executable, "-m", "antiphon", "router", "--port", str(port), *flags]
        for pool in pools:
            command += ["--cache-server", self.server_urls[pool]]
            command += [f"--{pool}", self.engine_urls[pool]] if len(pools) > 1 else []
        log_path = self.output.with_name(f"{name}.log")
        with log_path.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=self._preexec)
        try:
            router = RouterProcess(f"http://127.0.0.1:{port}")

            def is_ready() -> bool:
                assert process.poll() is None, log_path.read_text()
                return self.get("/readiness", router.url)[0] == 200

            wait_for(is_ready, f"the router {name} is ready", SETTLE_S)
            yield router
        finally:
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0, log_path.read_text()


@pytest.fixture(scope="module")
def sharing(
    tmp_path_factory: pytest.TempPathFactory, model: Path, die_with_parent: Callable[[], None]
) -> Iterator[SharingDeployment]:
    """The deployment; both servers share, and have pulled a chunk from each other, which connects them."""
    folder = tmp_path_factory.mktemp("peers")
    with contextlib.ExitStack() as exits:
        short = exits.enter_context(tempfile.TemporaryDirectory(prefix="a-"))  # a socket's path is short
        seen = exits.enter_context(collector(folder, die_with_parent)) if HAS_ROTEL else None
        found = SharingDeployment(folder, Path(short), model, die_with_parent, seen)
        try:
            found.start()
            for pool in POOLS:
                wait_for(lambda pool=pool: found.is_sharing(pool), f"the server of {pool} shares", 60)
            yield found
            assert found.stop() == 0, found.output.read_text()[-4000:]
        finally:
            if found.process is not None and found.process.poll() is None:
                found.process.kill()
                found.process.wait()


@pytest.fixture(scope="module")
def alone(sharing: SharingDeployment) -> Iterator[dict[str, RouterProcess]]:
    """For each pool a router that has its engine only. The servers are connected: each has pulled from the other."""
    with sharing.alone("prefill") as prefill, sharing.alone("decode") as decode:
        routers = {"prefill": prefill, "decode": decode}
        for seed, (here, there) in ((5001, POOLS), (5002, POOLS[::-1])):
            prompt = tokens(CHUNK + TAIL, seed)
            store(sharing, routers[here], prompt)
            routers[there].ask(prompt)
        yield routers


def store(sharing: SharingDeployment, router: RouterProcess, prompt: list[int]) -> str:
    """Sends a prompt that nobody has seen; returns the text once the coordinator knows the prompt's chunks."""
    before = sharing.num_known()
    text, receipt = router.ask(prompt)
    assert receipt["tokens"]["by_source"]["computed"] == len(prompt)
    num_known = before + len(prompt) // CHUNK
    wait_for(lambda: sharing.num_known() >= num_known, "the coordinator knows its chunks", SETTLE_S)
    return text


def check(receipt: dict[str, Any], source: str, num_tokens: int) -> None:
    """The receipt says that so many tokens came from ``source`` and the others were computed; all sums are right."""
    told = receipt["tokens"]
    expected = {source: num_tokens, "computed": told["prompt"] - num_tokens}
    assert {name: number for name, number in told["by_source"].items() if number} == expected
    assert told["sum_ok"] is True
    assert sum(told["by_source"].values()) == told["prompt"]


def computed(router: RouterProcess, prompt: list[int]) -> str:
    """The text by computing: the salt keeps the prompt from every cache."""
    text, receipt = router.ask(prompt, cache_salt=f"computed-{time.monotonic_ns()}")
    assert receipt["tokens"]["by_source"]["computed"] == len(prompt)
    return text


@pytest.mark.parametrize(("seed", "first", "second"), [(5003, "prefill", "decode"), (5004, "decode", "prefill")])
def test_what_one_pool_has_seen_is_loaded_by_the_other(
    sharing: SharingDeployment, alone: dict[str, RouterProcess], seed: int, first: str, second: str
) -> None:
    """It is pulled once, and then kept: the second time it comes from the own server's memory."""
    prompt = tokens(2 * CHUNK + TAIL, seed)
    text = store(sharing, alone[first], prompt)
    again, receipt = alone[second].ask(prompt)
    check(receipt, "peer", 2 * CHUNK)
    assert again == text == computed(alone[second], prompt)
    assert sharing.server(second)["tokens"]["reported"]["peer"] >= 2 * CHUNK
    reset(sharing.engine_urls[second])
    again, receipt = alone[second].ask(prompt)
    check(receipt, "l1", 2 * CHUNK)
    assert again == text


def test_a_hand_over_of_what_decode_has_seen(sharing: SharingDeployment, alone: dict[str, RouterProcess]) -> None:
    """Through the deployment's router: the prefill engine loads it from the decode engine's server, and hands it
    over."""
    prompt = tokens(2 * CHUNK + TAIL, 5005)
    text = store(sharing, alone["decode"], prompt)
    reset(sharing.engine_urls["decode"])
    again, receipt = RouterProcess(sharing.url).ask(prompt)
    assert receipt["path"] == "pd"
    assert receipt["tokens"]["prefill"]["peer"] == 2 * CHUNK
    check(receipt, "peer", 2 * CHUNK)
    assert again == text


def test_the_hand_over_through_the_cache_gives_the_answers_of_nixls(
    sharing: SharingDeployment, alone: dict[str, RouterProcess]
) -> None:
    """The same two engines behind two routers: one hands over by NIXL between the engines, the other by the servers,
    which pull over NIXL. Each prompt is computed by the prefill engine for each of them: the salts differ."""
    with sharing.router("handoff-cache", "--handoff", "cache", pools=POOLS) as by_cache:
        for number in range(3):
            prompt = tokens((number + 1) * CHUNK + TAIL, 5200 + number)
            before = sharing.server("decode")["peers"]["counts"]["nixl_reads"]
            through_cache, receipt = by_cache.ask(prompt, cache_salt="by cache")
            assert (receipt["path"], receipt["handoff"]) == ("pd", "cache")
            assert receipt["tokens"]["decode"]["computed"] == TAIL
            assert sharing.server("decode")["peers"]["counts"]["nixl_reads"] > before
            by_nixl, receipt = RouterProcess(sharing.url).ask(prompt, cache_salt="by nixl")
            assert (receipt["path"], receipt["handoff"]) == ("pd", "nixl")
            assert receipt["tokens"]["by_source"]["computed"] == len(prompt)
            assert through_cache == by_nixl


@pytest.mark.skipif(not HAS_ROTEL, reason="needs rotel")
def test_one_connected_trace_of_a_hand_over_of_what_decode_has_seen(
    sharing: SharingDeployment, alone: dict[str, RouterProcess]
) -> None:
    """From the client's ``traceparent`` through the router, vLLM's own spans of both engines, the lookup of the prefill
    engine's cache server and what that pulled from the decode engine's."""
    assert sharing.seen is not None
    prompt = tokens(2 * CHUNK + TAIL, 5007)
    text = store(sharing, alone["decode"], prompt)
    reset(sharing.engine_urls["decode"])
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
    header = {"traceparent": f"00-{trace_id}-{span_id}-01"}
    answer = httpx.post(f"{sharing.url}/v1/completions", json=body, headers=header, timeout=300)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == text
    receipt = sharing.receipt(answer.headers["x-antiphon-receipt"])
    assert (receipt["path"], receipt["trace_id"]) == ("pd", trace_id)
    route = "POST /v1/completions"
    wanted = {route, "prefill", "hand-over", "decode", "llm_request", "cache.lookup", "peer.pull", "peer.lend"}

    def engines() -> set[str]:
        return {span.service for span in sharing.seen.trace(trace_id) if span.name == "llm_request"}  # type: ignore[union-attr]

    def num_lent() -> int:
        return len([span for span in sharing.seen.trace(trace_id) if span.name == "peer.lend"])  # type: ignore[union-attr]

    sharing.seen.wait_trace(trace_id, wanted, SETTLE_S)
    wait_for(lambda: engines() == {"antiphon-prefill", "antiphon-decode"}, "the spans of both engines", SETTLE_S)
    wait_for(lambda: num_lent() == 2, "the spans of both loans", SETTLE_S)
    spans = sharing.seen.trace(trace_id)
    by_id = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.parent_id not in by_id]
    assert (root.name, root.parent_id, root.service) == (route, span_id, "antiphon-router"), tree(spans)
    parents = {(span.service, span.name, by_id[span.parent_id].name) for span in spans if span is not root}
    expected = {
        ("antiphon-router", "prefill", route),
        ("antiphon-router", "hand-over", route),
        ("antiphon-router", "decode", route),
        ("antiphon-prefill", "llm_request", "prefill"),
        ("antiphon-decode", "llm_request", "decode"),
        ("antiphon-cache-server", "cache.lookup", "prefill"),
        ("antiphon-cache-server", "peer.pull", "cache.lookup"),
        ("antiphon-cache-server", "peer.lend", "peer.pull"),
    }
    assert expected <= parents, tree(spans)
    (lookup,) = [span for span in spans if span.name == "cache.lookup" and span["tokens.peer"]]
    assert lookup["tokens.peer"] == 2 * CHUNK
    assert root["tokens.peer"] == 2 * CHUNK, "the engines' reports came before the span was sent"


def test_after_a_restart_of_its_server_a_prompt_is_loaded_from_the_disk(
    sharing: SharingDeployment, alone: dict[str, RouterProcess]
) -> None:
    """A lookup waits for the disk no longer than computing would take, which a busy machine may let pass: of some."""
    prompts = [tokens(2 * CHUNK + TAIL, 5100 + number) for number in range(4)]
    before = sharing.num_published("decode")
    texts = [store(sharing, alone["decode"], prompt) for prompt in prompts]
    wait_for(lambda: sharing.num_published("decode") >= before + 8, "all chunks are on the disk", SETTLE_S)
    incarnation = sharing.server("decode")["incarnation"]
    os.kill(sharing.status()["cache-decode"]["pid"], signal.SIGKILL)
    wait_for(lambda: sharing.server("decode").get("incarnation", incarnation) != incarnation, "the next life", SETTLE_S)
    wait_for(lambda: sharing.is_sharing("decode"), "the engine is attached again, and the server shares", SETTLE_S)
    reset(sharing.engine_urls["decode"])
    answers = [alone["decode"].ask(prompt) for prompt in prompts]
    assert [text for text, _ in answers] == texts
    loaded = [receipt for _, receipt in answers if receipt["tokens"]["by_source"]["computed"] < 2 * CHUNK]
    assert loaded, [receipt["tokens"] for _, receipt in answers]
    for receipt in loaded:
        check(receipt, "l2", receipt["tokens"]["by_source"]["l2"])
    assert max(receipt["tokens"]["by_source"]["l2"] for receipt in loaded) == 2 * CHUNK


def test_status_and_the_live_check_know_the_coordinator(sharing: SharingDeployment) -> None:
    rows = sharing.status()
    assert {name for name, row in rows.items() if row["state"] == "ready"} == rows.keys()
    assert (rows["coordinator"]["role"], rows["coordinator"]["num_members"]) == ("coordinator", 2)
    done = sharing.check_live()
    assert done.returncode == 0, done.stdout + done.stderr
