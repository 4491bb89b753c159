"""Prefill and decode on real engines in two networks, whose link is cut and joined while requests are under way.

Goal: over addresses that are not loopback, answers are those of computing alone; while the link is cut, every request
ends, in an error or in a right answer, and none hangs; soon after it is joined, requests are handed over again. Method:
what ``antiphon config render`` says for two hosts, in two networks of the kernel, with cache servers that share.
KV is handed over by NIXL between the engines, and in ``make soak`` (``ANTIPHON_SOAK``) through the cache servers too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon.engine.vllm import parse_metrics
from tests.cache_server.peer_world import secret_file
from tests.process.two_networks import DEVICE, Namespace, TwoNetworks, two_networks
from tests.real.deployment import LEASE_S, START_TIMEOUT_S, wait_for
from tests.real.reuse import CHUNK, get, tokens

pytestmark = [pytest.mark.real_engine, pytest.mark.timeout(900)]

SPEC = """\
name: apart
model: {{path: {model}, served_name: smollm2, dtype: float32, max_model_len: 4096}}
engine:
  device: cpu
  kv_memory_bytes: 400MB
  max_num_seqs: 8
  dev_mode: true
  args: {{generation-config: vllm}}
prefill: {{hosts: [{p}]}}
decode: {{hosts: [{d}]}}
handoff: {handoff}
cache: {{l1_size_bytes: 600MB, peers: true, cluster_secret_file: "{secret}", runtime_dir: "{runtime_dir}"}}
router: {{host: {d}, public_without_key: true, admin_key_file: "{key_file}", kv_events_host: {d}}}
"""
KEY = "of-the-operator"
HANDOFFS = {"nixl": f"{{lease_s: {LEASE_S}}}", "cache": "{kind: cache}"}
TAIL = 30
MAX_TOKENS = 8
CUT_S = 12.0
BOUND_S = 60.0
"""Longest that a request may take, cut or not; a decode engine that waits for KV gives it up after half of that."""
REJOIN_S = 60.0


@dataclass(frozen=True)
class Ended:
    """How a request ended: ``status`` 0 where the connection was lost."""

    seed: int
    status: int
    text: str
    began_s: float
    took_s: float


class World:
    """All processes of a deployment on two hosts.

    Args:
        networks: the hosts.
        folder: for the spec and the logs.
        adopted: process ids that the leak check leaves alone.
    """

    def __init__(self, networks: TwoNetworks, folder: Path, adopted: set[int]) -> None:
        self.networks = networks
        self.folder = folder
        self._adopted = adopted
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, str] = {}
        """Of each process, for the test."""
        self.kind = ""

    def start(self, kind: str, model: Path, short: Path) -> None:
        """All, in the order of the plan, each when the one before is ready."""
        self.kind = kind
        spec = self.folder / "antiphon.yaml"
        places = {"p": self.networks.p.address, "d": self.networks.d.address, "runtime_dir": short / "run"}
        places["key_file"] = short / "key"
        spec.write_text(SPEC.format(model=model, secret=secret_file(short), handoff=HANDOFFS[kind], **places))
        (short / "key").write_text(KEY)
        command = [sys.executable, "-m", "antiphon", "config", "render", "--config", str(spec), "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        for process in json.loads(done.stdout)["processes"]:
            self._start(process)
        for role in ("prefill", "decode"):
            wait_for(lambda role=role: self.is_sharing(f"cache-{role}"), f"the server of {role} shares", 90.0)  # type: ignore[misc]

    def _start(self, process: dict[str, Any]) -> None:
        name, log = process["name"], self.folder / f"{process['name']}.log"
        network = self._network_of(process["host"])
        environment = {key: value for key, value in os.environ.items() if key not in process["unset_env"]}
        environment |= process["env"] | {"UCX_TLS": "tcp", "UCX_NET_DEVICES": DEVICE, "HF_HUB_OFFLINE": "1"}
        with log.open("wb") as output:
            child = network.popen(
                process["argv"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self._children[name] = child
        self._adopted.add(child.pid)
        host, port = process["base_url"].removeprefix("http://").rsplit(":", 1)
        self.urls[name] = f"http://127.0.0.1:{network.outside(int(port), host)}"

        def is_ready() -> bool:
            assert child.poll() is None, f"{name} ended:\n{log.read_text()[-4000:]}"
            return get(self.urls[name] + process["ready_path"], 5.0)[0] == 200

        wait_for(is_ready, f"{name} is ready", START_TIMEOUT_S)

    def _network_of(self, host: str) -> Namespace:
        found = [each for each in (self.networks.p, self.networks.d) if each.address == host]
        assert found, host
        return found[0]

    def is_sharing(self, name: str) -> bool:
        """Whether a cache server shares all it has, and its engine has passed its gate."""
        code, body = get(f"{self.urls[name]}/status")
        status = json.loads(body) if code == 200 else {}
        gates = [process["gate"] for engine in status.get("engines", ()) for process in engine["processes"]]
        return "passed" in gates and bool(status["peers"]["is_listed"]) and status["peers"]["nixl"] == "in use"

    def ask(self, seed: int) -> Ended:
        """One request to the router with the prompt of a seed."""
        began_s = time.monotonic()
        status, answer = complete(self.urls["router"], prompt_of(seed))
        text = answer["choices"][0]["text"] if status == 200 else ""
        return Ended(seed, status, text, began_s, time.monotonic() - began_s)

    def right(self, seed: int) -> str:
        """The text by computing on the decode engine alone: the salt keeps the prompt from every cache."""
        status, answer = complete(self.urls["decode-0"], prompt_of(seed), cache_salt=f"alone-{seed}")
        assert status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text

    def is_handed_over(self, seed: int) -> bool:
        """Whether a new prompt goes from engine to engine; its answer is right in any case."""
        ended = self.ask(seed)
        if ended.status != 200:
            return False
        assert ended.text == self.right(seed)
        newest = json.loads(get(f"{self.urls['router']}/receipts", key=KEY)[1])["receipts"][0]["id"]
        receipt = json.loads(get(f"{self.urls['router']}/receipts/{newest}?wait_s=5", key=KEY)[1])
        return bool(receipt["handoff"] == self.kind)

    def close(self) -> None:
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(30)
            self._adopted.discard(child.pid)


def prompt_of(seed: int) -> list[int]:
    return tokens(2 * CHUNK + TAIL, seed)


def complete(url: str, prompt: list[int], **fields: Any) -> tuple[int, dict[str, Any]]:
    """Status and JSON of a greedy completion; status 0 where the connection was lost."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, **fields}
    request = urllib.request.Request(
        f"{url}/v1/completions", data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=2 * BOUND_S) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
    except ConnectionError as error:
        return 0, {"error": repr(error)}


class Load:
    """Clients that ask for new prompts one after the other until the context ends."""

    def __init__(self, world: World, num_clients: int = 3) -> None:
        self._world = world
        self._is_over = threading.Event()
        self.ended: list[Ended] = []
        self._clients = [threading.Thread(target=self._run, args=(10_000 * (1 + each),)) for each in range(num_clients)]

    def _run(self, seed: int) -> None:
        while not self._is_over.is_set():
            ended = self._world.ask(seed)
            self.ended.append(ended)
            seed += 1
            if ended.status != 200:
                self._is_over.wait(0.2)

    def __enter__(self) -> Load:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for client in self._clients:
            client.join(3 * BOUND_S)
            assert not client.is_alive(), "a request hangs"


@pytest.fixture(scope="module", params=list(HANDOFFS) if os.environ.get("ANTIPHON_SOAK") else ["nixl"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, model: Path, adopted: set[int]
) -> Iterator[World]:
    """Two engines and two cache servers on two hosts, the router beside the decode engine."""
    with tempfile.TemporaryDirectory(prefix="a-") as short, two_networks(adopted) as networks:
        made = World(networks, tmp_path_factory.mktemp("apart"), adopted)
        try:
            made.start(request.param, model, Path(short))
            yield made
        finally:
            made.close()


def test_answers_are_those_of_computing_alone(world: World) -> None:
    for seed in (1, 2, 3):
        assert world.is_handed_over(seed), f"prompt {seed} was not handed over"


def test_the_link_is_cut_and_joined_under_load(world: World) -> None:
    with Load(world) as load:
        wait_for(lambda: len(load.ended) >= 6, "requests are answered", 60.0)
        cut_s = time.monotonic()
        world.networks.cut()
        wait_for(lambda: time.monotonic() > cut_s + CUT_S, "the time passes", 2 * CUT_S)
        joined_s = time.monotonic()
        world.networks.join()
        # A prompt of its own each time: what was not handed over was stored by the decode engine.
        seeds = iter(range(90_000, 91_000))
        wait_for(lambda: world.is_handed_over(next(seeds)), "a request is handed over", REJOIN_S)
        back_s = time.monotonic() - joined_s
    counts = Counter(ended.status for ended in load.ended if cut_s < ended.began_s + ended.took_s < joined_s)
    longest_s = max(ended.took_s for ended in load.ended)
    print(f"{world.kind}: while cut {dict(counts)}; longest {longest_s:.1f} s; handed over again after {back_s:.1f} s")
    assert {ended.status for ended in load.ended} <= {200, 500, 502, 503, 504}
    assert longest_s < BOUND_S
    during = [ended for ended in load.ended if ended.status == 200 and ended.began_s + ended.took_s > cut_s]
    for ended in during[:12] + during[-4:]:
        assert ended.text == world.right(ended.seed), f"prompt {ended.seed} has another answer"


def test_nothing_is_held_afterwards(world: World) -> None:
    def is_free(name: str) -> bool:
        return parse_metrics(get(f"{world.urls[name]}/metrics")[1].decode()).kv_usage == 0

    def is_unleased(name: str) -> bool:
        return not json.loads(get(f"{world.urls[name]}/leases")[1])["leases"]

    for engine in ("prefill-0", "decode-0"):
        wait_for(lambda engine=engine: is_free(engine), f"{engine} holds no block", 3 * LEASE_S)  # type: ignore[misc]
    for server in ("cache-prefill", "cache-decode"):
        wait_for(lambda server=server: is_unleased(server), f"{server} holds no lease", 30.0)  # type: ignore[misc]
