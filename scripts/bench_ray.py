"""What Ray Serve adds to a request: the router's own port and Serve's address, in one run, before simulated engines.

    python scripts/bench_ray.py [--requests N] [--json FILE]

Starts a local Ray on loopback with one prefill engine and one decode engine that cost nothing, in a process of its own.
The two ways take turns, so that what else the machine does meets both. Measured are the time of a request, its first
event for streams, and the processor time of every process that belongs to it, the engines' and Ray's own included, but
for the client's; what the same processes use while nothing is asked is taken off.

Prints a table. Needs the environment of `make install-dev` with `requirements/ray.lock`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from local_ray import local_ray

from antiphon.bench.processes import cpu_s_of

ROUNDS = 6
IDLE_S = 4.0
NUM_WARM = 50
NUM_TOKENS = 32
APP = "bench"
SHAPES = {"whole answer": (False, 1), "stream": (True, 1), "stream, 8 clients": (True, 8)}
BODY = {"model": "m", "prompt": "the quick brown fox jumps over the lazy dog", "max_tokens": NUM_TOKENS}
PARTS = ("router", "engines", "Serve's proxy", "ingress", "Ray's rest")


@dataclass
class Measured:
    """One way, one shape of request."""

    whole_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    cpu_s: Counter[str] = field(default_factory=Counter)
    elapsed_s: float = 0.0


def part_of(pid: int, session: bytes) -> str | None:
    """Which part of the system a process is; None: none of it."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return None
    if f"ANTIPHON_PROCESS={APP}/router".encode() in environment:
        return "router"
    if f"ANTIPHON_PROCESS={APP}/".encode() in environment:
        return "engines"
    if words.startswith(b"ray::ProxyActor"):
        return "Serve's proxy"
    if words.startswith(f"ray::ServeReplica:{APP}:ingress".encode()):
        return "ingress"
    is_ray = words.startswith(b"ray::") or session in words or session in environment
    return "Ray's rest" if is_ray and pid != os.getpid() else None


def parts(session: bytes) -> dict[int, str]:
    """The processes of the system, by pid."""
    found = {int(name): part_of(int(name), session) for name in os.listdir("/proc") if name.isdigit()}
    return {pid: part for pid, part in found.items() if part is not None}


def used(pids: dict[int, str]) -> Counter[str]:
    """Processor seconds by part."""
    total: Counter[str] = Counter()
    for pid, part in pids.items():
        total[part] += cpu_s_of(pid)
    return total


def ask(connection: http.client.HTTPConnection, body: bytes) -> tuple[float, float]:
    """Seconds to the first byte of the body, and to the last."""
    began_s = time.perf_counter()
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    first = response.read(1)
    first_s = time.perf_counter() - began_s
    rest = response.read()
    whole_s = time.perf_counter() - began_s
    if response.status != 200 or not first or not rest:
        raise SystemExit(f"error: {response.status} {(first + rest)[:300]!r}")
    return first_s, whole_s


def load(port: int, num: int, num_clients: int, *, stream: bool) -> list[tuple[float, float]]:
    """``num`` requests from ``num_clients`` clients, each on a connection that it keeps."""
    body = json.dumps(BODY | {"stream": stream}).encode()
    found: list[tuple[float, float]] = []

    def run() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        found.extend([ask(connection, body) for _ in range(num // num_clients)])
        connection.close()

    clients = [threading.Thread(target=run) for _ in range(num_clients)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    if len(found) != num // num_clients * num_clients:
        raise SystemExit("error: a client has failed")
    return found


def deploy(router_port: int) -> None:
    """The application, until it runs."""
    from ray import serve

    from antiphon.ray import LLMConfig, build_pd_openai_app

    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    configs = {
        f"{pool}_config": LLMConfig(
            model_loading_config={"model_id": "m"}, engine_kwargs={"kv_transfer_config": transfer}
        )
        for pool in ("prefill", "decode")
    }
    fast = {"prefill_overhead_ms": 0, "prefill_tokens_per_s": 1e9, "decode_token_ms": 0, "transfer_gb_per_s": 10000}
    own = {"engine": {"kind": "simulated", "simulated": fast}, "router": {"port": router_port}}
    serve.run(build_pd_openai_app(configs | {"antiphon": own}), name=APP)


def measure(ports: dict[str, int], session: bytes, num: int) -> dict[tuple[str, str], Measured]:
    """Every shape, both ways in turns."""
    pids = parts(session)
    before = used(pids)
    time.sleep(IDLE_S)
    idle = Counter({part: (value - before[part]) / IDLE_S for part, value in used(pids).items()})
    found: dict[tuple[str, str], Measured] = {}
    for shape, (stream, num_clients) in SHAPES.items():
        for port in ports.values():
            load(port, NUM_WARM, num_clients, stream=stream)
        for _ in range(ROUNDS):
            for way, port in ports.items():
                each = found.setdefault((shape, way), Measured())
                begun, began_s = used(pids), time.perf_counter()
                times = load(port, num // ROUNDS, num_clients, stream=stream)
                elapsed_s = time.perf_counter() - began_s
                each.elapsed_s += elapsed_s
                each.first_s += [first_s for first_s, _ in times]
                each.whole_s += [whole_s for _, whole_s in times]
                for part, value in used(pids).items():
                    each.cpu_s[part] += max(0.0, value - begun[part] - idle[part] * elapsed_s)
    return found


def share(values: list[float], percent: float) -> float:
    """A percentile, in milliseconds."""
    ordered = sorted(values)
    return 1000 * ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def table(found: dict[tuple[str, str], Measured]) -> list[str]:
    """Lines of Markdown."""
    heads = ["request", "way", "p50 ms", "p99 ms", "first p50 ms", "requests/s", "CPU ms", *PARTS]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * 2 + "---:|" * (len(heads) - 2)]
    for (shape, way), each in found.items():
        num = len(each.whole_s)
        cpu = [1000 * each.cpu_s[part] / num for part in PARTS]
        figures = [share(each.whole_s, 50), share(each.whole_s, 99), share(each.first_s, 50)]
        cells = [shape, way, *(f"{value:.2f}" for value in figures), f"{num / each.elapsed_s:.0f}"]
        cells += [f"{sum(cpu):.2f}", *(f"{value:.2f}" for value in cpu)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare the router's own port with Serve's address.")
    parser.add_argument("--requests", type=int, default=1200, help="of each shape and way [1200]")
    parser.add_argument("--http-port", type=int, default=18080, help="Serve's port [18080]")
    parser.add_argument("--router-port", type=int, default=18081, help="the router's port [18081]")
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="br-", ignore_cleanup_errors=True) as folder,
        local_ray(folder, options.http_port),
    ):
        deploy(options.router_port)
        ports = {"the router's port": options.router_port, "Serve's address": options.http_port}
        found = measure(ports, folder.encode(), options.requests)
    print("\n".join(table(found)))
    if options.json is not None:
        rows: list[dict[str, Any]] = [
            {
                "request": shape,
                "way": way,
                "p50_ms": share(each.whole_s, 50),
                "p99_ms": share(each.whole_s, 99),
                "cpu_ms": {part: 1000 * each.cpu_s[part] / len(each.whole_s) for part in PARTS},
            }
            for (shape, way), each in found.items()
        ]
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
