"""Point 3: what storing costs a busy engine: 2k tokens in, 128 out, without a pause, every prompt new.

Three engines on one GPU, one of them at work at a time: without a connector, with Antiphon's, with vLLM's own offload.
They take turns. Limits: throughput of ours at least 0.97 of the one without, the 99th percentile between tokens at most
1.1 times.
"""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from common import (
    CHUNK,
    KV_BYTES_PER_TOKEN,
    Report,
    ask,
    at_once,
    median,
    metric,
    num_chunks,
    num_stored,
    percentile,
    prompt,
    stream,
    wait_registered,
    wait_stored,
)
from processes import Failed, Process, Stack, antiphon, client_processes

CACHE_PORT, PORTS = 16_800, {"no connector": 18_800, "antiphon": 18_801, "vLLM offload": 18_802}
KV_TOKENS = 150_000
PROMPT_TOKENS, NEW_TOKENS = 2_048, 128
CONCURRENCY, REQUESTS, CLIENTS = 48, 96, 4
CHUNKS_PER_REQUEST = (PROMPT_TOKENS + NEW_TOKENS) // CHUNK
REPEATS = 5
THROUGHPUT_LIMIT, GAP_LIMIT = 0.97, 1.1


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    cache = stack.cache_server(CACHE_PORT, 40)
    stack.wait_ready([cache], "/status")
    args = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.3")
    engines = [
        stack.engine("plain", PORTS["no connector"], None, *args),
        stack.engine("antiphon", PORTS["antiphon"], antiphon(CACHE_PORT), *args),
        stack.engine("offload", PORTS["vLLM offload"], None, "--kv-offloading-size", "28", *args),
    ]
    stack.wait_ready(engines)
    engines[1].check_reuse()
    wait_registered(report, engines[1])
    measure(report, cache, PORTS)
    report.note("chunks in L1 at the end", num_chunks(cache))
    for engine in engines:
        engine.check()


def measure(report: Report, cache: Process, ports: dict[str, int]) -> None:
    """With the engines there."""
    rates: dict[str, list[float]] = {name: [] for name in ports}
    gaps: dict[str, list[float]] = {name: [] for name in ports}
    firsts: dict[str, list[float]] = {name: [] for name in ports}
    chunks: list[int] = []
    offloaded: list[float] = []
    report.note("raw", {"requests_s": rates, "gap_p99_ms": gaps, "ttft_p50_ms": firsts})
    with client_processes(CLIENTS) as clients:
        for port in ports.values():
            ask(port, prompt(300, 1), 4)
            load(clients, port, 10_000_000, CONCURRENCY)
        wait_stored(cache, num_stored(cache) + 1)
        for turn in range(REPEATS):
            for number, (name, port) in enumerate(ports.items()):
                stored, before = num_stored(cache), offload_bytes(port)
                rate, gap, first = load(clients, port, 1_000 * (10 * turn + number + 1), REQUESTS)
                rates[name].append(rate)
                gaps[name].append(gap)
                firsts[name].append(first)
                if name == "antiphon":
                    chunks.append(wait_stored(cache, stored + REQUESTS * CHUNKS_PER_REQUEST) - stored)
                elif name == "vLLM offload":
                    offloaded.append(offload_bytes(port) - before)
    compare(report, rates, gaps, firsts)
    judge_stored(report, chunks, offloaded)


def judge_stored(report: Report, chunks: list[int], offloaded: list[float]) -> None:
    """Whether each turn stored what it should; of vLLM's offload it is told what its own metric says."""
    wanted = REQUESTS * CHUNKS_PER_REQUEST
    report.note("chunks stored in each turn", [chunks, wanted], f"{chunks}", f"= {wanted} each",
                bool(chunks) and all(one == wanted for one in chunks))  # fmt: skip
    whole = REQUESTS * PROMPT_TOKENS * KV_BYTES_PER_TOKEN
    shares = [round(one / whole, 2) for one in offloaded]
    report.note("vLLM offload stored in each turn, over the prompts' bytes", [offloaded, whole], f"{shares}")


def offload_bytes(port: int) -> float:
    """Bytes that vLLM's own offload says it has stored; 0 where it says nothing."""
    return metric(port, "vllm:kv_offload_store_bytes_total") or metric(port, "vllm:kv_offload_store_bytes")


def compare(
    report: Report, rates: dict[str, list[float]], gaps: dict[str, list[float]], firsts: dict[str, list[float]]
) -> None:
    """The medians, and what is asked of them."""
    for name in rates:
        shown = f"{median(rates[name]):.2f} requests/s, between tokens p99 {median(gaps[name]):.1f} ms, "
        report.note(name, [median(rates[name]), median(gaps[name]), median(firsts[name])],
                    f"{shown}first token p50 {median(firsts[name]):.0f} ms")  # fmt: skip
    for name in ("antiphon", "vLLM offload"):
        share = median(rates[name]) / median(rates["no connector"])
        gap = median(gaps[name]) / median(gaps["no connector"])
        is_ours = name == "antiphon"
        report.note(f"throughput, {name}", share, f"{share:.3f}", f">= {THROUGHPUT_LIMIT:g}" if is_ours else "",
                    share >= THROUGHPUT_LIMIT if is_ours else None)  # fmt: skip
        report.note(f"p99 between tokens, {name}", gap, f"{gap:.3f}", f"<= {GAP_LIMIT:g}" if is_ours else "",
                    gap <= GAP_LIMIT if is_ours else None)  # fmt: skip


def load(clients: ProcessPoolExecutor, port: int, seed: int, requests: int) -> tuple[float, float, float]:
    """Requests a second, the 99th percentile between tokens in ms, the median to the first token in ms."""
    shares = [range(seed + client, seed + requests, CLIENTS) for client in range(CLIENTS)]
    prompts_made = list(clients.map(_prepare, shares))
    assert sum(prompts_made) == requests
    began_s = time.perf_counter()
    found = list(clients.map(partial(_client, port), shares))
    took_s = time.perf_counter() - began_s
    answers = [times for one in found for times, _ in one]
    if any(number != NEW_TOKENS for one in found for _, number in one):
        raise Failed("an answer is shorter than asked for")
    gaps = [(b - a) * 1e3 for times in answers for a, b in itertools.pairwise(times)]
    return requests / took_s, percentile(gaps, 0.99), median([times[0] for times in answers]) * 1e3


def _prepare(seeds: range) -> int:
    """Processes are started before time is taken."""
    return len(seeds)


def _client(port: int, seeds: range) -> list[tuple[list[float], int]]:
    jobs = [partial(stream, port, prompt(PROMPT_TOKENS, seed), NEW_TOKENS) for seed in seeds]
    return [(answer.times_s, answer.num_tokens) for answer in at_once(jobs, CONCURRENCY // CLIENTS)]
