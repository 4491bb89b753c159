"""Point 6: 64 cold prompts of 16k tokens at once, with and without the router's cold-transfer admission.

Warm requests go on meanwhile: turns of chats, whose beginning both engines hold, from prefill to decode, and short
prompts that the decode engine serves alone. Measured are theirs: without a flood, with one through each router.
"""

from __future__ import annotations

import json

import traffic
from common import KV_BYTES_PER_TOKEN, Report, reset
from processes import Failed, Process, Stack, client_processes, get, say
from traffic import CLIENTS, Planned, Run, path_count

ADMISSION_PORT, PLAIN_PORT = 18_912, 18_913
COLD, COLD_TOKENS, COLD_NEW_TOKENS, COLD_AT_S = 64, 16_016, 16, 2.0
WINDOW_S, QUIET_S = 30.0, 14.0
TURN_RATE, TURN_HELD, TURN_TOKENS, TURN_NEW_TOKENS, CHATS = 4.0, 1_024, 100, 64, 8
SHORT_RATE, SHORT_TOKENS, SHORT_NEW_TOKENS = 4.0, 200, 128


def measure(stack: Stack, report: Report, engines: dict[str, Process]) -> None:
    """With the engines there, ``P`` and ``D``."""
    urls = {name: f"http://127.0.0.1:{engine.port}" for name, engine in engines.items()}
    common = ("--policy", "prefix-aware", "--local-max-tokens", "256", "--prefill", urls["P"], "--decode", urls["D"])
    limits = ("--kv-bytes-per-token", str(KV_BYTES_PER_TOKEN), "--cold-queue-timeout-s", "120")
    routers = {
        "admission": stack.router("router-admission", ADMISSION_PORT, *common, *limits),
        "no admission": stack.router("router-plain", PLAIN_PORT, *common, "--kv-bytes-per-token", "0"),
    }
    stack.wait_ready(routers.values(), "/readiness")
    is_on = {name: bool(admission(router)["is_on"]) for name, router in routers.items()}
    if is_on != {"admission": True, "no admission": False}:
        raise Failed(f"the admission is {is_on}")
    found: dict[str, Run] = {}
    with client_processes(CLIENTS) as clients:
        for router in routers.values():
            traffic.run(clients, router, warm(2.0) + cold(2), 301)
        plans = (("no flood", "admission", 0, QUIET_S), ("flood, admission", "admission", COLD, WINDOW_S),
                 ("flood, no admission", "no admission", COLD, WINDOW_S))  # fmt: skip
        for number, (name, router_name, num_cold, window_s) in enumerate(plans):
            router = routers[router_name]
            for engine in engines.values():
                reset(engine.port)
            # The chats' beginnings are on both engines before.
            held = [Planned(0.2 * chat, ((TURN_HELD, chat), (TURN_TOKENS, 50)), 2) for chat in range(CHATS)]
            traffic.run(clients, router, held, 310 + number)
            paths = {path: path_count(router, path) for path in ("pd", "local", "cached")}
            found[name] = traffic.run(clients, router, warm(window_s) + cold(num_cold), 310 + number)
            report.note(f"{name}: paths", {path: path_count(router, path) - value for path, value in paths.items()})
            report.note(f"{name}: state of the admission", admission(router))
            judge(report, name, found[name], num_cold)
            for engine in engines.values():
                engine.check()
    compare(report, found)
    for router in routers.values():
        router.end()


def warm(window_s: float) -> list[Planned]:
    """Turns and short prompts, the same for each run."""
    turns = traffic.arrivals(TURN_RATE, window_s, 11)
    shorts = traffic.arrivals(SHORT_RATE, window_s, 12)
    return [
        Planned(at_s, ((TURN_HELD, number % CHATS), (TURN_TOKENS, 1_000 + number)), TURN_NEW_TOKENS, "turn")
        for number, at_s in enumerate(turns)
    ] + [
        Planned(at_s, ((SHORT_TOKENS, 5_000 + number),), SHORT_NEW_TOKENS, "short")
        for number, at_s in enumerate(shorts)
    ]  # fmt: skip


def cold(number: int) -> list[Planned]:
    """All at once."""
    return [Planned(COLD_AT_S, ((COLD_TOKENS, 9_000 + one),), COLD_NEW_TOKENS, "cold") for one in range(number)]


def admission(router: Process) -> dict[str, object]:
    """What the router says of it."""
    section = json.loads(get(router.port, "/status")[1])["cold_admission"]
    return {name: section.get(name) for name in ("is_on", "why_off", "counts", "rates", "budget_bytes")}


def judge(report: Report, name: str, done: Run, num_cold: int) -> None:
    """The lines of a run. Warm requests count from the flood on."""
    for kind in ("turn", "short"):
        after = [one for one in done.of(kind).outcomes if one.at_s >= COLD_AT_S]
        figures = Run(after, done.cpu_share).figures()
        shown = (
            f"first token p50 {figures['ttft_p50_ms']:.0f}, p99 {figures['ttft_p99_ms']:.0f} ms; "
            f"between tokens p50 {figures['gap_p50_ms']:.1f}, p99 {figures['gap_p99_ms']:.1f} ms"
        )
        is_fair = figures["late_p99_ms"] < traffic.LATE_LIMIT_S * 1e3
        report.note(f"{name}: {kind}", figures, shown, is_met=figures["errors"] == 0 and is_fair)
    if num_cold:
        figures = done.of("cold").figures()
        ends_s = [one.end_s - COLD_AT_S for one in done.of("cold").outcomes if not one.error]
        figures["all_done_s"], figures["half_done_s"] = max(ends_s), sorted(ends_s)[len(ends_s) // 2]
        shown = f"all done after {max(ends_s):.1f} s, first token p50 {figures['ttft_p50_ms'] / 1e3:.1f} s"
        report.note(f"{name}: cold", figures, shown, is_met=figures["errors"] == 0)
    if done.errors:
        say(f"    {done.errors[:3]}")
        report.note(f"{name}: errors", done.errors[:20])


def compare(report: Report, found: dict[str, Run]) -> None:
    """What the admission changes for warm requests."""
    p99s = {name: done.of("turn").figures()["ttft_p99_ms"] for name, done in found.items()}
    ours, plain = p99s["flood, admission"], p99s["flood, no admission"]
    report.note("turns, first token p99, admission against none", [ours, plain], f"{ours:.0f} ms", f"<= {plain:.0f} ms",
                ours <= plain)  # fmt: skip
