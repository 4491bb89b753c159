"""Point 5: prefill and decode on two GPUs against the same two engines aggregated, at rising load.

The same engines serve both: one router splits each request over them, the other sends each request to one of them, by
prefix. Requests come at random times that are the same for both. Half of the prompts begin with the first half of an
earlier one; everything else is new. Nothing is asked of the figures but that every request is answered: the table says
where splitting pays and where it does not.
"""

from __future__ import annotations

import random
from concurrent.futures import ProcessPoolExecutor

import traffic
from common import Report, device_hits, external_hits, reset
from processes import Process, Stack, client_processes, say
from traffic import CLIENTS, Planned, path_count

PD_PORT, AGGREGATED_PORT = 18_910, 18_911
MIXES = {"prefill-heavy": (4_096, 32, (4, 8, 12)), "decode-heavy": (512, 256, (8, 24, 40))}
"""Tokens of a prompt and of an answer, and requests a second."""
WINDOW_S = 12.0
RETURNING_SHARE, RETURNING_AFTER_S = 0.5, 2.0
CPU_LIMIT = 0.9
"""Of a core: past it the router is what is measured."""


def routers(stack: Stack, prefill: int, decode: int) -> dict[str, Process]:
    """Both, over the same two engines."""
    one, other = (f"http://127.0.0.1:{port}" for port in (prefill, decode))
    split = ("--policy", "prefix-aware", "--prefill", one, "--decode", other)
    whole = ("--policy", "prefix-aware", "--no-vllm-pd-disaggregation", "--decode", one, "--decode", other)
    found = {
        "split": stack.router("router-split", PD_PORT, *split),
        "aggregated": stack.router("router-aggregated", AGGREGATED_PORT, *whole),
    }
    stack.wait_ready(found.values(), "/readiness")
    return found


def measure(stack: Stack, report: Report, engines: dict[str, Process]) -> None:
    """With the engines there: ``P`` and ``D``, each able to be both."""
    modes = routers(stack, engines["P"].port, engines["D"].port)
    content = 1
    lines = []
    with client_processes(CLIENTS) as clients:
        for mix, (length, new_tokens, rates) in MIXES.items():
            for router in modes.values():  # each engine meets each kind of batch once
                traffic.run(clients, router, planned(length, new_tokens, 8, 2.0), content)
                content += 1
            for rate in rates:
                plan = planned(length, new_tokens, rate, WINDOW_S)
                for mode, router in modes.items():
                    found = one_run(clients, engines, router, plan, content)
                    content += 1
                    lines.append((mix, rate, mode, found))
                    judge(report, f"{mix}, {rate} a second, {mode}", mode, found)
                for engine in engines.values():
                    engine.check()
    table(lines)
    for router in modes.values():
        router.end()


def planned(length: int, new_tokens: int, rate: float, window_s: float) -> list[Planned]:
    """The requests of a run. A prompt is two halves; the first half of a returning one has come before."""
    chance = random.Random(7)
    plan: list[Planned] = []
    for number, at_s in enumerate(traffic.arrivals(rate, window_s, 7)):
        earlier = [one for one in plan if one.at_s < at_s - RETURNING_AFTER_S]
        is_returning = bool(earlier) and chance.random() < RETURNING_SHARE
        first = chance.choice(earlier).parts[0] if is_returning else (length // 2, 2 * number)
        parts = (first, (length - length // 2, 2 * number + 1))
        plan.append(Planned(at_s, parts, new_tokens, "returning" if is_returning else "new"))
    return plan


def one_run(
    clients: ProcessPoolExecutor, engines: dict[str, Process], router: Process, plan: list[Planned], content: int
) -> dict[str, float]:
    """Its figures, with what was split and what was reused."""
    for engine in engines.values():
        reset(engine.port)
    paths = path_count(router, "pd")
    hits = {name: external_hits(engine.port) for name, engine in engines.items()}
    device = {name: device_hits(engine.port) for name, engine in engines.items()}
    done = traffic.run(clients, router, plan, content)
    found = done.figures()
    found["split"] = path_count(router, "pd") - paths
    for name, engine in engines.items():
        found[f"external hits of {name}"] = external_hits(engine.port) - hits[name]
        found[f"device hits of {name}"] = device_hits(engine.port) - device[name]
    if done.errors:
        say(f"    {done.errors[:3]}")
    return found


def judge(report: Report, name: str, mode: str, found: dict[str, float]) -> None:
    """One line; missed where a request failed, went another way than it should, or the harness was the limit."""
    is_split = found["split"] == (found["requests"] if mode == "split" else 0)
    is_fair = found["late_p99_ms"] < traffic.LATE_LIMIT_S * 1e3 and found["router_cpu"] < CPU_LIMIT
    shown = (
        f"first token p50 {found['ttft_p50_ms']:.0f}, p99 {found['ttft_p99_ms']:.0f} ms; between tokens p50 "
        f"{found['gap_p50_ms']:.1f}, p99 {found['gap_p99_ms']:.1f} ms; {found['requests_s']:.2f} requests/s, "
        f"{found['tokens_s']:.0f} tokens/s; {found['errors']:.0f} errors, router {found['router_cpu']:.2f} of a core"
    )
    report.note(name, found, shown, is_met=found["errors"] == 0 and is_split and is_fair)


def table(lines: list[tuple[str, int, str, dict[str, float]]]) -> None:
    """In the form of the docs."""
    say("| traffic | offered/s | | TTFT p50 | p99 | between tokens p50 | p99 | a token p50 | requests/s | tokens/s |")
    say("|---|---|---|---|---|---|---|---|---|---|")
    columns = ("ttft_p50_ms", "ttft_p99_ms", "gap_p50_ms", "gap_p99_ms", "per_token_p50_ms", "requests_s", "tokens_s")
    for mix, rate, mode, found in lines:
        say(f"| {mix} | {rate} | {mode} | " + " | ".join(f"{found[column]:.1f}" for column in columns) + " |")
