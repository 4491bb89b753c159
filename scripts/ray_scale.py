"""Two pools on Ray Serve that follow their load up and down: 2 to 4 prefill engines, 6 to 10 decode engines.

    python scripts/ray_scale.py [--clients N] [--downscale-delay-s S]

Starts a local Ray on loopback and deploys the config of Ray's own documentation, of which nothing but the numbers of
replicas is written: what the pools are scaled by is filled in. Its engines are simulated: a prefill engine computes 800
tokens a second, a decode engine has room for five answers of four and a half seconds. Clients stream one answer after
the other: short ones until the prefill pool has grown, longer ones until the decode pool has; then a few clients go on
until both have shrunk. The delay before a pool shrinks is ten minutes where none is written, and less here.

Prints each change of size, with the time from the policy's decision until the router uses the engines, and the requests
by how they ended; exits 1 where one failed or a pool did not follow. Needs the environment of `make install-dev` with
`requirements/ray.lock`, and 5 GB of memory.
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from local_ray import local_ray

from antiphon.bench.processes import free_ports

APP = "scale"
SIZES = {"prefill": (2, 4), "decode": (6, 10)}
SHORT_TOKENS, LONG_TOKENS, NUM_WORDS = 45, 90, 100
SIMULATED = {"prefill_overhead_ms": 0, "prefill_tokens_per_s": 800, "decode_token_ms": 50}
DECODE_BLOCKS = 130
FEW_CLIENTS = 4
REQUEST_TIMEOUT_S, FOLLOW_TIMEOUT_S = 60.0, 400.0
LOOK_S = 0.1
CHANGE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d+).* -- Antiphon scales (\w+) from (\d+) to (\d+) engines: (.*)"
)


def deploy(router_port: int, downscale_delay_s: float) -> None:
    """The application, until it runs."""
    from ray import serve

    from antiphon.ray import build_pd_openai_app

    config: dict[str, Any] = {}
    for role, (lowest, most) in SIZES.items():
        scaling = {"min_replicas": lowest, "max_replicas": most, "downscale_delay_s": downscale_delay_s}
        config[f"{role}_config"] = {
            "model_loading_config": {"model_id": "m"},
            "engine_kwargs": {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            "deployment_config": {"autoscaling_config": scaling},
        }
    config["antiphon"] = {
        "engine": {"kind": "simulated", "simulated": SIMULATED},
        "decode": {"simulated": {"kv_blocks": DECODE_BLOCKS}},
        "router": {"port": router_port},
    }
    serve.run(build_pd_openai_app(config), name=APP)


class Clients:
    """Clients that stream one answer after the other, each with a prompt of its own."""

    def __init__(self, port: int, num: int, num_tokens: int) -> None:
        self.port, self.num_tokens = port, num_tokens
        self.ended: Counter[str] = Counter()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(num)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * REQUEST_TIMEOUT_S)

    def _run(self, number: int) -> None:
        count = 0
        while not self._over.is_set():
            count += 1
            prompt = " ".join(f"{time.time_ns() % 10**8:08}-{word:03}" for word in range(NUM_WORDS))
            self.ended[self._one({"model": "m", "prompt": prompt, "max_tokens": self.num_tokens, "stream": True})] += 1

    def _one(self, body: dict[str, Any]) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=REQUEST_TIMEOUT_S)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            data = response.read()
        except TimeoutError:
            return "hangs"
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()
        if response.status != 200:
            return f"status {response.status}"
        is_whole = data.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' in data.replace(b": ", b":")
        return "answered" if is_whole else "cut"


def sizes(port: int) -> dict[str, int]:
    """Engines by role that take requests."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/endpoints")
    rows = json.loads(connection.getresponse().read())["endpoints"]
    connection.close()
    return dict(Counter(row["role"] for row in rows if row["state"] == "ready" and not row["is_warming"]))


def follow(port: int, wanted: dict[str, int]) -> list[tuple[float, str, int]]:
    """Look until the pools have the wanted sizes; by the wall clock, when each pool had another size."""
    found: list[tuple[float, str, int]] = []
    deadline_s = time.monotonic() + FOLLOW_TIMEOUT_S
    before: dict[str, int] = {}
    while before != wanted:
        if time.monotonic() >= deadline_s:
            raise SystemExit(f"error: the pools have {before} engines after {FOLLOW_TIMEOUT_S:g} s, not {wanted}")
        now = sizes(port)
        found += [(time.time(), role, num) for role, num in now.items() if before.get(role) != num]
        before = now
        time.sleep(LOOK_S)
    return found


def changes(folder: str) -> list[tuple[float, str, int, int, str]]:
    """What the policy has decided: when, for which pool, from and to how many, and why."""
    found = []
    for path in sorted(Path(folder).glob("session_latest/logs/serve/controller_*.log")):
        for match in CHANGE.finditer(path.read_text(errors="replace")):
            at_s = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + int(match[2]) / 1000
            found.append((at_s, match[3], int(match[4]), int(match[5]), match[6]))
    return found


def measure(folder: str, port: int, num_clients: int) -> int:
    """Load, look, print; the exit code."""
    (few_p, many_p), (few_d, many_d) = SIZES["prefill"], SIZES["decode"]
    phases = [
        (num_clients, SHORT_TOKENS, {"prefill": many_p, "decode": few_d}),
        (num_clients, LONG_TOKENS, {"prefill": many_p, "decode": many_d}),
        (FEW_CLIENTS, LONG_TOKENS, {"prefill": few_p, "decode": few_d}),
    ]
    seen = follow(port, {"prefill": few_p, "decode": few_d})
    lines, failed = [], 0
    for num, num_tokens, wanted in phases:
        began_s = time.time()
        with Clients(port, num, num_tokens) as clients:
            seen += follow(port, wanted)
            took_s = time.time() - began_s
        failed += clients.ended.total() - clients.ended["answered"]
        sizes_text = f"{wanted['prefill']} prefill and {wanted['decode']} decode engines after {took_s:.0f} s"
        lines.append(f"{num} clients, answers of {num_tokens} tokens: {sizes_text}; requests: {dict(clients.ended)}")
    for at_s, role, size, after, why in changes(folder):
        ready_s = next((when_s for when_s, *pool in seen if when_s >= at_s and pool == [role, after]), at_s) - at_s
        print(f"{role:8} {size:2} -> {after:2}  {ready_s:5.1f} s from decision to ready  {why}")
    print("\n".join(lines))
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=60)
    parser.add_argument("--downscale-delay-s", type=float, default=30.0)
    options = parser.parse_args()
    port, http_port = free_ports()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ar-") as folder, local_ray(folder, http_port):
        deploy(port, options.downscale_delay_s)
        print(f"8 engines after {time.monotonic() - began_s:.0f} s")
        return measure(folder, port, options.clients)


if __name__ == "__main__":
    sys.exit(main())
