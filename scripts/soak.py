"""Mixed traffic through a whole deployment for a long time: nothing grows, nothing is left, no answer differs.

    python scripts/soak.py --minutes 20

Starts `antiphon up` with the demo model: a prefill engine, a decode engine, one cache server for both, the router.
Clients hold conversations that share beginnings, streamed and whole, and leave at random moments; now and then the
engines' own prefix caches are emptied, so that the cache server is used. Checked:

- a prompt that is asked again (greedy, float32) gets the text that it got first;
- no request fails that its client did not leave;
- the anonymous memory of every process in the last quarter is at most what it was in the second, plus 5 % and 16 MB;
- prompt tokens did come from the cache server, and every engine's report of a request adds up;
- no process of the deployment died;
- when the traffic ends, within 30 seconds, no lease, no reservation and no KV block is left. (A prefill that ends just
  as its client leaves keeps its blocks for the lease of the hand-over, 20 seconds.)

Prints a line every 30 seconds and a table at the end; exits 1 where a check fails. Needs the environment of
`make install-dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from antiphon.engine import demo_model
from antiphon.engine.vllm import parse_metrics

SPEC = """\
name: soak
model: {{path: {model}, served_name: smollm2, dtype: float32, max_model_len: 2048}}
engine:
  device: cpu
  kv_memory_bytes: 240MB
  max_num_seqs: 8
  dev_mode: true
  args: {{generation-config: vllm}}
prefill: {{port: {prefill}, side_channel_port: {prefill_side}}}
decode: {{port: {decode}, side_channel_port: {decode_side}}}
handoff: {{lease_s: {lease_s}}}
cache: {{shared: true, l1_size_bytes: 500MB, port: {cache}, http_port: {cache_http}}}
router: {{port: {router}}}
supervisor: {{state_dir: "{state}"}}
"""
PORTS = ("prefill", "prefill_side", "decode", "decode_side", "cache", "cache_http", "router")
SAMPLE_S = 5.0
LINE_S = 30.0
START_TIMEOUT_S = 400.0
LEASE_S = 20
END_TIMEOUT_S = LEASE_S + 10.0
REQUEST_TIMEOUT_S = 120.0
FRESH = httpx.Limits(max_keepalive_connections=0)
"""For what is asked seldom: an engine closes idle connections, and a request on one that closes fails."""
GROWTH_SHARE_MAX = 0.05
GROWTH_BYTES_MAX = 16 << 20
NUM_CLIENTS = 6
NUM_BEGINNINGS = 8
WORDS = (
    "river",
    "stone",
    "bread",
    "cloud",
    "winter",
    "garden",
    "music",
    "engine",
    "paper",
    "window",
    "orange",
    "north",
)


def free_ports(num: int) -> list[int]:
    """Ports on which nothing listens."""
    probes = [socket.socket() for _ in range(num)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def descendants(pid: int) -> dict[int, str]:
    """Every process below ``pid``, and itself: pid to a short name."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, todo = {}, [pid]
    while todo:
        one = todo.pop()
        todo += parents.get(one, [])
        try:
            words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        text = " ".join(word.decode(errors="replace") for word in words if word)
        found[one] = f"{one} {text[-48:] if 'VLLM' not in text else text[:48]}"
    return found


def anonymous_bytes(pid: int) -> int | None:
    """Anonymous resident memory: not the arena, which is shared and has its size from the start."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


@dataclass
class Soak:
    """One run."""

    url: str
    engines: dict[str, str]
    cache_url: str
    rng: random.Random
    texts: dict[str, str] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    memory: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    def prompt(self) -> str:
        """A beginning that others share, and a turn of its own from a small number of turns."""
        beginning, turn = self.rng.randrange(NUM_BEGINNINGS), self.rng.randrange(24)
        shared, own = random.Random(beginning), random.Random(1000 * beginning + turn)
        length = (20, 150, 300, 500, 700, 900, 1100, 1300)[beginning]
        words = [shared.choice(WORDS) for _ in range(length)] + [own.choice(WORDS) for _ in range(20)]
        return " ".join(words)

    async def client(self, ends_s: float) -> None:
        """Asks, one request after the other, and now and then leaves."""
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S) as http:
            while time.monotonic() < ends_s:
                await self.ask(http)

    async def ask(self, http: httpx.AsyncClient) -> None:
        prompt = self.prompt()
        is_streamed = self.rng.random() < 0.5
        leaves_s = self.rng.choice((0.01, 0.05, 0.2, 0.5, 1.5)) if self.rng.random() < 0.25 else None
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 8, "temperature": 0, "stream": is_streamed}
        self.counts["asked"] += 1
        try:
            text = await asyncio.wait_for(self.answer(http, body), leaves_s or REQUEST_TIMEOUT_S)
        except TimeoutError:
            self.counts["left" if leaves_s else "timed out"] += 1
            if not leaves_s:
                self.failures.append("a request took too long")
            return
        except (httpx.HTTPError, ValueError) as error:
            self.counts["failed"] += 1
            self.failures.append(f"{type(error).__name__}: {error}")
            return
        self.counts["answered"] += 1
        first = self.texts.setdefault(prompt, text)
        if first != text:
            self.failures.append(f"another answer to the same prompt: {first!r}, then {text!r}")

    async def answer(self, http: httpx.AsyncClient, body: dict[str, Any]) -> str:
        if not body["stream"]:
            response = await http.post(f"{self.url}/v1/completions", json=body)
            response.raise_for_status()
            return str(response.json()["choices"][0]["text"])
        text = ""
        async with http.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            response.raise_for_status()
            is_complete = False
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_complete = True
                elif line.startswith("data: "):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise ValueError(f"an error event: {event['error']}")
                    text += event["choices"][0]["text"] if event["choices"] else ""
        if not is_complete:
            raise ValueError("a stream ended without [DONE]")
        return text

    async def forget(self, ends_s: float) -> None:
        """Empties the engines' own caches now and then; vLLM refuses while blocks are in use, which is as well."""
        async with httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S, limits=FRESH) as http:
            while time.monotonic() < ends_s:
                await asyncio.sleep(self.rng.uniform(2, 8))
                for url in self.engines.values():
                    await http.post(f"{url}/reset_prefix_cache")

    async def watch(self, pid: int, ends_s: float) -> None:
        """Samples memory, and prints a line now and then."""
        began_s = next_line_s = time.monotonic()
        while time.monotonic() < ends_s:
            now_s = time.monotonic()
            for one, name in descendants(pid).items():
                size = anonymous_bytes(one)
                if size is not None:
                    self.names[one] = name
                    self.memory.setdefault(one, []).append((now_s, size))
            if now_s >= next_line_s:
                total = sum(samples[-1][1] for samples in self.memory.values())
                print(
                    f"{now_s - began_s:6.0f} s  {dict(self.counts)}  {total / 1e6:.0f} MB in {len(self.memory)} "
                    f"processes  {len(self.failures)} failures",
                    flush=True,
                )
                next_line_s += LINE_S
            await asyncio.sleep(SAMPLE_S)

    async def check_end(self) -> dict[str, float]:
        """What is left, once nothing is or the time is over."""
        deadline_s = time.monotonic() + END_TIMEOUT_S
        async with httpx.AsyncClient(timeout=30, limits=FRESH) as http:
            while True:
                left = await self.left(http)
                if not any(left.values()) or time.monotonic() > deadline_s:
                    self.failures += [f"left at the end: {value:g} {name}" for name, value in left.items() if value]
                    return left
                await asyncio.sleep(0.25)

    async def left(self, http: httpx.AsyncClient) -> dict[str, float]:
        leases = (await http.get(f"{self.cache_url}/leases")).json()["leases"]
        status = (await http.get(f"{self.cache_url}/status")).json()
        found: dict[str, float] = {
            "leases": len(leases),
            "reservations": status["storage_manager"]["l1_manager"]["write_locked_count"],
        }
        for name, url in self.engines.items():
            found[f"share of the KV of {name}"] = parse_metrics((await http.get(f"{url}/metrics")).text).kv_usage or 0
        return found

    def check_reports(self, status: dict[str, Any]) -> None:
        """Reuse really happened, and every report adds up."""
        if not status["tokens"]["reported"]["l1"]:
            self.failures.append("no prompt token came from the cache server")
        if status["reports"]["mismatched"]:
            self.failures.append(f"{status['reports']['mismatched']} reports do not add up")

    def check_restarts(self, state_dir: Path) -> None:
        """Every process is the one that was started."""
        command = [sys.executable, "-m", "antiphon", "status", "--name", "soak", "--format", "json"]
        done = subprocess.run([*command, "--state-dir", str(state_dir)], capture_output=True, text=True, check=True)
        (deployment,) = json.loads(done.stdout)["deployments"]
        for row in deployment["processes"]:
            if row["restarts"] or row["state"] != "ready":
                self.failures.append(f"{row['name']} is {row['state']} after {row['restarts']} restarts")

    def check_memory(self) -> list[str]:
        """A line for every process; what has grown is a failure."""
        lines = []
        for pid, samples in sorted(self.memory.items()):
            quarter = len(samples) // 4
            if quarter < 2:
                continue
            second = statistics.median(size for _, size in samples[quarter : 2 * quarter])
            last = statistics.median(size for _, size in samples[-quarter:])
            has_grown = last > second * (1 + GROWTH_SHARE_MAX) + GROWTH_BYTES_MAX
            lines.append(f"  {second / 1e6:8.1f} -> {last / 1e6:8.1f} MB  {self.names[pid]}")
            if has_grown:
                self.failures.append(f"memory grew from {second:.0f} to {last:.0f} bytes: {self.names[pid]}")
        return lines


async def run(minutes: float, seed: int) -> int:
    """One soak; the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="antiphon-soak-"))
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    model = demo_model.prepare(demo_model.cache_folder(), print)
    spec = folder / "antiphon.yaml"
    spec.write_text(SPEC.format(model=model, state=folder / "state", lease_s=LEASE_S, **ports))
    output = folder / "up.log"
    with output.open("wb") as log:
        up = subprocess.Popen(
            [sys.executable, "-m", "antiphon", "up", "--config", str(spec), "--quiet-logs"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    url = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    try:
        await ready(url["router"], up, output)
        soak = Soak(
            url["router"],
            {"prefill": url["prefill"], "decode": url["decode"]},
            url["cache_http"],
            random.Random(seed),
        )
        ends_s = time.monotonic() + minutes * 60
        tasks = [soak.client(ends_s) for _ in range(NUM_CLIENTS)]
        await asyncio.gather(*tasks, soak.forget(ends_s), soak.watch(up.pid, ends_s))
        left = await soak.check_end()
        status = httpx.get(f"{url['cache_http']}/status").json()
        soak.check_reports(status)
        soak.check_restarts(folder / "state")
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(90)
    print(f"\n{minutes:g} minutes, seed {seed}: {dict(soak.counts)}, {len(soak.texts)} different prompts")
    print(f"prompt tokens by source, as the engines reported: {status['tokens']['reported']}")
    print(f"left at the end: {left}")
    print("anonymous memory, median of the second and of the last quarter:")
    print("\n".join(soak.check_memory()))
    for failure, number in Counter(soak.failures).most_common(20):
        print(f"FAILED {number} x {failure}")
    print("ok" if not soak.failures else f"{len(soak.failures)} failures; logs: {folder}")
    return 0 if not soak.failures else 1


async def ready(url: str, up: subprocess.Popen[bytes], output: Path) -> None:
    """Waits until the router answers that every pool has an engine."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient(timeout=5) as http:
        while True:
            if up.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the deployment did not start:\n{output.read_text()[-4000:]}")
            try:
                if (await http.get(f"{url}/readiness")).status_code == 200:
                    return
            except httpx.HTTPError:
                pass  # nothing listens yet
            await asyncio.sleep(0.5)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Mixed traffic through a whole deployment for a long time.")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sys.exit(asyncio.run(run(options.minutes, options.seed)))
