"""Point 2: time to the first token of a warm prompt from L1, against vLLM's own CPU offload, HBM and computing it.

Two engines on one GPU, one of them at work at a time; prompts take turns between them. Limits: no slower than vLLM's
own offload; at 32k tokens over HBM by at most 1.15 times the bytes over the bus rate of this run, and at most 0.15 of
computing.
"""

from __future__ import annotations

import time

from common import (
    KV_BYTES_PER_TOKEN,
    Failed,
    Process,
    Report,
    Stack,
    antiphon,
    ask,
    external_hits,
    median,
    num_chunks,
    percentile,
    prompt,
    reset,
    say,
    ttft_ms,
    wait_stored,
)

CACHE_PORT, PORTS = 16_700, {"antiphon": 18_700, "vLLM offload": 18_701}
KV_TOKENS = 100_000
CHUNK, CHUNK_BYTES = 256, 32 << 20
LENGTHS = {2_064: 9, 8_208: 7, 32_784: 5}
"""Tokens of a prompt, and prompts of that length."""
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
    for process in (ours, theirs):
        process.check()


def measure(report: Report, bus: float, cache: Process, ours: Process) -> None:
    """With the engines there."""
    ours.check_reuse()
    for port in PORTS.values():
        ask(port, prompt(300, 1), 4)
    for length, repeats in LENGTHS.items():
        found: dict[str, dict[str, list[float]]] = {name: {"compute": [], "hbm": [], "l1": []} for name in PORTS}
        for seed in range(repeats + 1):
            for name, port in PORTS.items():
                one = visit(name, port, cache, prompt(length, 100 * (name == "antiphon") + seed))
                if seed:  # the first of a length compiles and captures
                    for kind, value in one.items():
                        found[name][kind].append(value)
        judge(report, length, found, bus)


def visit(name: str, port: int, cache: Process, ids: list[int]) -> dict[str, float]:
    """Milliseconds to the first token: computed, in HBM, from host memory."""
    before = num_chunks(cache)
    found = {"compute": ttft_ms(port, ids)}
    if name == "antiphon":
        wait_stored(cache, before + len(ids) // CHUNK)
    else:
        time.sleep(OFFLOAD_SETTLE_S)
    found["hbm"] = ttft_ms(port, ids)
    reset(port)
    hits = external_hits(port)
    found["l1"] = ttft_ms(port, ids)
    if (came := external_hits(port) - hits) < len(ids) // CHUNK * CHUNK:
        say(f"  {name}: {came:.0f} of {len(ids)} tokens came from host memory")
        if came < 0.9 * len(ids):
            raise Failed(f"{name} took {came:.0f} of {len(ids)} tokens from host memory")
    return found


def judge(report: Report, length: int, found: dict[str, dict[str, list[float]]], bus: float) -> None:
    """The medians of a length, and what is asked of them."""
    middle = {name: {kind: median(values) for kind, values in one.items()} for name, one in found.items()}
    report.note(f"raw {length}", found)
    for name, one in middle.items():
        worst = percentile(found[name]["l1"], 0.99)
        shown = ", ".join(f"{kind} {value:.1f}" for kind, value in one.items())
        report.note(f"{length}, {name}, ms", one, f"{shown} (worst from host memory {worst:.1f})")
    ours, theirs = middle["antiphon"], middle["vLLM offload"]["l1"]
    report.note(f"{length}, L1 against vLLM offload", [ours["l1"], theirs], f"{ours['l1']:.1f} ms",
                f"<= {theirs:.1f} ms", ours["l1"] <= theirs)  # fmt: skip
    num_bytes = length // CHUNK * CHUNK_BYTES
    over = ours["l1"] - ours["hbm"]
    limit = HBM_LIMIT * num_bytes / bus / 1e6
    is_asked = length > 30_000
    report.note(f"{length}, L1 over HBM", [over, limit], f"{over:.1f} ms", f"<= {limit:.1f} ms",
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
