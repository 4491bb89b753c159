"""The bench of the router: what it costs, beside engines that cost nothing.

The simulated engines are Python and slower than the router, so that rates say little. What is measured of the router is
its own processor time, as the kernel counts it, which does not depend on how fast the engines are; and how much later
an answer comes than straight from an engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

from antiphon.bench.figures import BenchResult, Rows, Say
from antiphon.bench.router_fleet import RouterFleet, generate_load
from antiphon.bench.router_load import LoadPlan, LoadResult

MANY_CLIENTS: Final = 64
NUM_STREAMS: Final = 32
STREAM_TOKENS: Final = 256
STREAM_TOKEN_MS: Final = 10.0
"""Slow enough for each token of a stream to be a piece of its own, as a GPU's are."""
_NUM_TURNS: Final = 2
"""Straight and through the router take turns, so that what else the machine does falls on both."""
_WARM_S: Final = 0.5


@dataclass(frozen=True)
class RouterBenchOptions:
    """What to measure.

    Args:
        seconds: of load for each measurement.
        stream_tokens: of each stream.
    """

    seconds: float = 5.0
    stream_tokens: int = STREAM_TOKENS


@dataclass(frozen=True)
class _Cost:
    """A load, and the router's processor time for it in seconds."""

    load: LoadResult
    cpu_s: float


def run_router_bench(options: RouterBenchOptions, say: Say) -> BenchResult:
    """Measures everything, one after the other, with processes of its own.

    Raises:
        StartError: one of them does not run.
        UpstreamGarbage: a request was not answered as it should be.
    """
    rows = Rows()
    say("starting two prefill and two decode engines, and a router")
    with RouterFleet(token_ms=0) as fleet:
        form = "the router's hot modules run " + ("compiled" if fleet.status()["compiled"] else "as Python")
        rows.add("memory, idle", fleet.router.process.memory_bytes()[0] / 1e6, "MB", form)
        for port in (fleet.engine.port, fleet.router.port):
            generate_load(LoadPlan(port, MANY_CLIENTS, _WARM_S))
        idle_cpu_s = _idle_cpu_s(fleet, min(1.0, options.seconds))
        _measure_latency(fleet, options, rows, say)
        request_s = 0.0
        for num_clients in (1, MANY_CLIENTS):
            say(f"requests on {_connections(num_clients)}")
            cost = _cost(fleet, LoadPlan(fleet.router.port, num_clients, options.seconds), idle_cpu_s)
            request_s = cost.cpu_s / cost.load.num_answered
            name = f"processor time of a request, {_connections(num_clients)}"
            rows.add(name, request_s * 1e6, "us", f"{cost.load.num_answered} requests")
        most_bytes = fleet.router.process.memory_bytes()[1]
    say(f"{NUM_STREAMS} streams at once")
    with RouterFleet(STREAM_TOKEN_MS) as fleet:
        plan = LoadPlan(fleet.router.port, NUM_STREAMS, options.seconds, options.stream_tokens, is_stream=True)
        cost = _cost(fleet, plan, idle_cpu_s)
        event_s = (cost.cpu_s - cost.load.num_answered * request_s) / cost.load.num_events
        note = f"{cost.load.num_events} events, their requests taken off"
        rows.add(f"processor time of a streamed event, {NUM_STREAMS} streams", event_s * 1e6, "us", note)
        most_bytes = max(most_bytes, fleet.router.process.memory_bytes()[1])
    rows.add("processor time in a second, idle", idle_cpu_s * 1e3, "ms", "health checks")
    rows.add("memory, the most under this load", most_bytes / 1e6, "MB")
    return BenchResult.here(rows)


def _connections(number: int) -> str:
    return f"{number} connection" + ("s" if number > 1 else "")


def _idle_cpu_s(fleet: RouterFleet, seconds: float) -> float:
    """Processor time of the router in a second without requests."""
    process, began_s, before_s = fleet.router.process, time.monotonic(), fleet.router.process.cpu_s()
    time.sleep(seconds)
    return (process.cpu_s() - before_s) / (time.monotonic() - began_s)


def _cost(fleet: RouterFleet, plan: LoadPlan, idle_cpu_s: float) -> _Cost:
    """Make load, and count what the router used for it beyond what it uses anyway."""
    process, began_s, before_s = fleet.router.process, time.monotonic(), fleet.router.process.cpu_s()
    load = generate_load(plan)
    used_s = process.cpu_s() - before_s
    return _Cost(load, used_s - idle_cpu_s * (time.monotonic() - began_s))


def _measure_latency(fleet: RouterFleet, options: RouterBenchOptions, rows: Rows, say: Say) -> None:
    """Adds how long a request takes straight and through the router, on one connection."""
    ways = {"straight to one engine": fleet.engine.port, "through the router": fleet.router.port}
    found: dict[str, list[LoadResult]] = {name: [] for name in ways}
    say("latency, straight and through the router in turns")
    for _ in range(_NUM_TURNS):
        for name, port in ways.items():
            found[name].append(generate_load(LoadPlan(port, 1, options.seconds / _NUM_TURNS)))
    straight, routed = found.values()
    for percent in ("p50", "p99"):
        values = [sum(getattr(result, f"{percent}_ms") for result in each) / _NUM_TURNS for each in (straight, routed)]
        for name, value in zip(ways, values, strict=True):
            rows.add(f"request {name}, {percent}", value, "ms", "1 connection, one token")
        rows.add(f"latency added, {percent}", values[1] - values[0], "ms", "the prefill engine's part included")
