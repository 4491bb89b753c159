"""Point 2: time to the first token of a warm prompt from L1, against vLLM's own CPU offload, HBM and computing it.

Two engines on one GPU, one of them at work at a time; prompts take turns between them. A prompt is asked for again, and
then with a turn of 64 new tokens after it. Limits: no slower than vLLM's own offload; at 32k tokens over HBM by at most
1.15 times the bytes over the bus rate of this run, and at most 0.15 of computing.

The same is told, without a limit, of a prompt that ends 16 tokens after a whole chunk. These 16 are computed after a
load from L1, as after a hit in HBM: eagerly in part, where vLLM's offload, which keeps blocks of 16, has all of them
and computes the last token alone, in one CUDA graph.
"""

from __future__ import annotations

import time

import overlap
from common import (
    CHUNK,
    KV_BYTES_PER_TOKEN,
    Report,
    ask,
    external_hits,
    median,
    num_stored,
    percentile,
    prompt,
    reset,
    ttft_ms,
    wait_registered,
    wait_stored,
)
from processes import Failed, Process, Stack, antiphon, say

CACHE_PORT, PORTS = 16_700, {"antiphon": 18_700, "vLLM offload": 18_701}
KV_TOKENS = 100_000
CHUNK_BYTES = 32 << 20
LENGTHS = {2_048: 11, 8_192: 7, 32_768: 9, 2_064: 9}
"""Tokens of a prompt, and prompts of that length."""
TURN_TOKENS = 64
KINDS = ("compute", "hbm", "l1", "turn hbm", "turn l1")
OFFLOAD_SETTLE_S = 0.7
HBM_LIMIT, COMPUTE_LIMIT = 1.15, 0.15


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    bus = bus_to_gpu()
    report.note("bus to the GPU, GB/s", bus, f"{bus:.1f} GB/s")
    cache = stack.cache_server(CACHE_PORT, 48)
    stack.wait_ready([cache], "/status")
    args = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.3")
    ours = stack.engine("antiphon", PORTS["antiphon"], antiphon(CACHE_PORT), *args)
    theirs = stack.engine("offload", PORTS["vLLM offload"], None, "--kv-offloading-size", "24", *args)
    stack.wait_ready([ours, theirs])
    measure(report, bus, cache, ours)
    overlap.measure(report, cache, ours.port)
    for process in (ours, theirs):
        process.check()


def measure(report: Report, bus: float, cache: Process, ours: Process) -> None:
    """With the engines there."""
    ours.check_reuse()
    wait_registered(report, ours)
    for port in PORTS.values():
        ask(port, prompt(300, 1), 4)
    for length, repeats in LENGTHS.items():
        found: dict[str, dict[str, list[float]]] = {name: {kind: [] for kind in KINDS} for name in PORTS}
        for seed in range(repeats + 1):
            for name, port in PORTS.items():
                one = visit(name, port, cache, prompt(length, 100 * (name == "antiphon") + seed))
                if seed:  # the first of a length compiles and captures
                    for kind, value in one.items():
                        found[name][kind].append(value)
        judge(report, length, found, bus)


def visit(name: str, port: int, cache: Process, ids: list[int]) -> dict[str, float]:
    """Milliseconds to the first token, by kind: computed, in HBM, from host memory; and with a new turn."""
    before = num_stored(cache)
    found = {"compute": ttft_ms(port, ids)}
    if name == "antiphon":
        wait_stored(cache, before + len(ids) // CHUNK)
    else:
        time.sleep(OFFLOAD_SETTLE_S)
    found["hbm"] = ttft_ms(port, ids)
    found["l1"] = from_host(name, port, ids, len(ids))
    found["turn hbm"] = ttft_ms(port, ids + prompt(TURN_TOKENS, ids[0]))
    found["turn l1"] = from_host(name, port, ids + prompt(TURN_TOKENS, ids[1]), len(ids))
    return found


def from_host(name: str, port: int, ids: list[int], num_stored: int) -> float:
    """Milliseconds to the first token with nothing in HBM and ``num_stored`` tokens in host memory."""
    reset(port)
    hits = external_hits(port)
    took_ms = ttft_ms(port, ids)
    if (came := external_hits(port) - hits) < num_stored // CHUNK * CHUNK:
        say(f"  {name}: {came:.0f} of {num_stored} tokens came from host memory")
        if came < 0.9 * num_stored:
            raise Failed(f"{name} took {came:.0f} of {num_stored} tokens from host memory")
    return took_ms


def judge(report: Report, length: int, found: dict[str, dict[str, list[float]]], bus: float) -> None:
    """The medians of a length, and what is asked of them."""
    middle = {name: {kind: median(values) for kind, values in one.items()} for name, one in found.items()}
    report.note(f"raw {length}", found)
    for name, one in middle.items():
        worst = percentile(found[name]["l1"], 0.99)
        shown = ", ".join(f"{kind} {value:.1f}" for kind, value in one.items())
        report.note(f"{length}, {name}, ms", one, f"{shown} (worst from host memory {worst:.1f})")
    ours, is_whole = middle["antiphon"], length % CHUNK == 0
    for kind in ("l1", "turn l1"):
        theirs = middle["vLLM offload"][kind]
        is_asked = is_whole or kind == "turn l1"
        report.note(f"{length}, {kind} against vLLM offload", [ours[kind], theirs], f"{ours[kind]:.1f} ms",
                    f"<= {theirs:.1f} ms", ours[kind] <= theirs if is_asked else None)  # fmt: skip
    is_asked = length > 30_000
    limit = HBM_LIMIT * (length // CHUNK * CHUNK_BYTES) / bus / 1e6
    for kind in ("", "turn "):
        over = ours[f"{kind}l1"] - ours[f"{kind}hbm"]
        report.note(f"{length}, {kind}L1 over HBM", [over, limit], f"{over:.1f} ms", f"<= {limit:.1f} ms",
                    over <= limit if is_asked else None)  # fmt: skip
    share = ours["l1"] / ours["compute"]
    report.note(f"{length}, L1 over computing", share, f"{share:.3f}", f"<= {COMPUTE_LIMIT:g}" if is_asked else "",
                share <= COMPUTE_LIMIT if is_asked else None)  # fmt: skip


def bus_to_gpu(num_bytes: int = 1 << 30, repeats: int = 7) -> float:
    """GB/s from pinned memory to the GPU."""
    import torch

    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    device.copy_(host, non_blocking=True)
    took_s = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        took_s.append(time.perf_counter() - began_s)
    del host, device
    torch.cuda.empty_cache()
    return num_bytes / median(took_s) / 1e9
