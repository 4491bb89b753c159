"""A flood of large cold prompts among steady warm traffic, on real engines: with cold-transfer admission and without.

    python scripts/flood.py

Starts `antiphon up` with the demo model, two prefill engines and one decode engine, of one thread each. Warm requests,
whose prompts the engines hold but for some tokens, come at a steady rate; cold prompts come all at once. Measured is
the time to the first token of the warm ones: without a flood, with one, and with one through a second router without
admission.

In production engines have machines of their own. Here all share the cores of one, so that an engine that computes slows
the others whoever sent it there. The measure is therefore what warm requests take on the other prefill engine, without
a flood, while the one that cold prompts are kept to computes prompts of somebody else, one at a time.

Prints a table; exits 1 where warm requests under the flood, with admission, take more than FACTOR times that, at the
99th percentile. Needs two cores, 10 GB of memory and the environment of `make install-dev`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from soak import ready

from antiphon.engine import demo_model

SPEC = """\
name: flood
model: {{path: {model}, served_name: smollm2, dtype: float32, max_model_len: 2048}}
engine:
  device: cpu
  threads: 1
  kv_memory_bytes: 400MB
  max_num_seqs: 16
  args: {{generation-config: vllm}}
prefill: {{port: {prefill}, side_channel_port: {prefill_side}, replicas: 2}}
decode: {{port: {decode}, side_channel_port: {decode_side}}}
router:
  port: {router}
  policy: prefix_aware
  kv_bytes_per_token: {kv_token_bytes}
  cold_min_bytes: {cold_min_bytes}
supervisor: {{state_dir: "{state}"}}
"""
PORTS = ("prefill", "prefill_side", "decode", "decode_side", "router", "plain")
KV_TOKEN_BYTES = 30 * 2 * 3 * 64 * 4
"""Of the demo model in float32: layers, keys and values, heads, their size, bytes."""
COLD_TOKENS = 900
COLD_MIN_TOKENS = 400
WARM_HELD_TOKENS = 256
WARM_NEW_TOKENS = 100
WARM_INTERVAL_S = 2.0
FACTOR = 1.5
BUSY = "no flood, that engine busy"


def tokens(num: int, seed: int) -> list[int]:
    """``num`` token ids; another seed shares no prefix."""
    rng = random.Random(seed)
    return [rng.randrange(100, 40_000) for _ in range(num)]


async def keep_busy(engine: str, seed: int) -> None:
    """Let a prefill engine compute one cold prompt after the other, which the router knows nothing of."""
    async with httpx.AsyncClient(timeout=600) as http:
        while True:
            await first_token_s(http, engine, tokens(COLD_TOKENS, seed))
            seed += 1


def free_places() -> dict[str, int]:
    """A port for each name, with the next one free too, for a second replica."""
    while True:
        base = random.randrange(15_000, 30_000)
        with contextlib.ExitStack() as held:
            try:
                for port in range(base, base + 2 * len(PORTS)):
                    held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return {name: base + 2 * number for number, name in enumerate(PORTS)}


async def first_token_s(http: httpx.AsyncClient, url: str, prompt: list[int]) -> float:
    """Seconds from sending a request to its first token."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    began_s = time.monotonic()
    found_s = None
    async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if found_s is None and line.startswith("data: "):
                found_s = time.monotonic() - began_s
    if found_s is None:
        raise RuntimeError("an answer without a token")
    return found_s


async def traffic(url: str, seed: int, num_warm: int, num_cold: int) -> tuple[list[float], float]:
    """Seconds to the first token of each warm request, and until the last cold one had its first token."""
    async with httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_connections=None)) as http:
        began_s = time.monotonic()
        cold = [
            asyncio.create_task(first_token_s(http, url, tokens(COLD_TOKENS, seed + number)))
            for number in range(num_cold)
        ]
        warm = []
        for number in range(num_warm):
            prompt = tokens(WARM_HELD_TOKENS, seed=1) + tokens(WARM_NEW_TOKENS, seed + 10_000 + number)
            warm.append(asyncio.create_task(first_token_s(http, url, prompt)))
            await asyncio.sleep(WARM_INTERVAL_S)
        await asyncio.gather(*cold)
        cold_s = time.monotonic() - began_s if cold else 0.0
        return await asyncio.gather(*warm), cold_s


@contextlib.contextmanager
def plain_router(url: dict[str, str], ports: dict[str, int], prefill: list[str]) -> Iterator[str]:
    """A second router before engines of the same deployment, without admission."""
    command = [sys.executable, "-m", "antiphon", "router", "--port", str(ports["plain"]), "--policy", "prefix_aware"]
    for engine in prefill:
        command += ["--prefill", engine]
    process = subprocess.Popen([*command, "--decode", url["decode"], "--log-level", "error"])
    try:
        deadline_s = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url['plain']}/readiness").status_code == 200:
                    break
            if time.monotonic() > deadline_s:
                raise RuntimeError("the second router does not start")
            time.sleep(0.1)
        yield url["plain"]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


async def run(num_warm: int, num_cold: int) -> int:
    """One measurement; the exit status."""
    folder = Path(tempfile.mkdtemp(prefix="antiphon-flood-"))
    ports = free_places()
    model = demo_model.prepare(demo_model.cache_folder(), print)
    spec = folder / "antiphon.yaml"
    sizes = {"kv_token_bytes": KV_TOKEN_BYTES, "cold_min_bytes": COLD_MIN_TOKENS * KV_TOKEN_BYTES}
    spec.write_text(SPEC.format(model=model, state=folder / "state", **sizes, **ports))
    output = folder / "up.log"
    with output.open("wb") as log:
        command = [sys.executable, "-m", "antiphon", "up", "--config", str(spec), "--quiet-logs"]
        up = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    url = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
    prefill = [url["prefill"], f"http://127.0.0.1:{ports['prefill'] + 1}"]
    found: dict[str, tuple[list[float], float]] = {}
    try:
        await ready(url["router"], up, output)
        async with httpx.AsyncClient(timeout=300) as http:
            for engine in (*prefill, url["decode"]):
                await first_token_s(http, engine, tokens(WARM_HELD_TOKENS, seed=1))
        for _ in range(2):
            await traffic(url["router"], 100, 2, 0)  # the first transfers between two engines
        found["no flood"] = await traffic(url["router"], 20_000, num_warm, 0)
        lane = httpx.get(f"{url['router']}/status").json()["cold_admission"]["lane"]
        busy = asyncio.create_task(keep_busy(lane[0], 80_000))
        with plain_router(url, ports, [engine for engine in prefill if engine != lane[0]]) as plain:
            found[BUSY] = await traffic(plain, 30_000, num_warm, 0)
        busy.cancel()
        await asyncio.wait([busy])
        found["admission"] = await traffic(url["router"], 40_000, num_warm, num_cold)
        with plain_router(url, ports, prefill) as plain:
            found["none"] = await traffic(plain, 60_000, num_warm, num_cold)
    finally:
        up.send_signal(signal.SIGINT)
        up.wait(90)
    print(f"\n{num_warm} warm requests, one every {WARM_INTERVAL_S:g} s; {num_cold} cold ones of {COLD_TOKENS} tokens")
    print("seconds to the first token of warm requests:      p50     p99    last cold one begun after")
    for name, (warm, cold_s) in found.items():
        p99 = statistics.quantiles(warm, n=100, method="inclusive")[98]
        print(f"  {name:44} {statistics.median(warm):8.3f} {p99:7.3f} {cold_s:9.1f}")
    p99s = {name: statistics.quantiles(warm, n=100, method="inclusive")[98] for name, (warm, _) in found.items()}
    ratio, plain = p99s["admission"] / p99s[BUSY], p99s["none"] / p99s[BUSY]
    print(f"p99 over that of the second line: {ratio:.2f} with admission, {plain:.2f} without")
    return 0 if ratio <= FACTOR else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--warm", type=int, default=30, help="warm requests (default: 30)")
    parser.add_argument("--cold", type=int, default=12, help="cold prompts at once (default: 12)")
    options = parser.parse_args()
    return asyncio.run(run(options.warm, options.cold))


if __name__ == "__main__":
    sys.exit(main())
