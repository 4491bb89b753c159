"""Point 1: the same tokens with KV from L1 as without, greedy; under load, with preemption and with aborts.

Each prompt ends 16 tokens after a whole chunk, so that a hit in L1 and one in the engine's own cache stop at the same
token: what follows is then computed in the same pieces, and the tokens must be equal. Computed as a whole, or beside
others, the sums of bf16 differ in the last bits, and random weights turn that into another token now and then; so the
same is also asked with nothing to reuse (another ``cache_salt``), and told beside it. That tokens do depend on the KV
is checked too: prompts that differ in all but their ends must give different ones.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial

from common import (
    KV_BYTES_PER_TOKEN,
    LIVELY,
    Failed,
    Process,
    Report,
    Stack,
    antiphon,
    ask,
    at_once,
    external_hits,
    get,
    metric,
    num_chunks,
    prompt,
    reset,
    stream,
    wait_stored,
)

CACHE_PORT, PORT = 16_600, 18_600
KV_TOKENS = 100_000
ARENA_GB = 48
LENGTHS = {2_064: (1, 4, 16), 8_208: (1, 16), 16_400: (1,), 32_784: (1, 4)}
NEW_TOKENS = 16
CHUNK = 256
LEADING_LIMIT = 0.7
"""Of the tokens that stay equal without reuse: both are few draws."""


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    cache = stack.cache_server(CACHE_PORT, ARENA_GB)
    stack.wait_ready([cache], "/status")
    args = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.6")
    engine = stack.engine("engine", PORT, antiphon(CACHE_PORT), *args, *LIVELY)
    began_s = time.monotonic()
    stack.wait_ready([engine])
    report.note("engine ready, s", time.monotonic() - began_s, f"{time.monotonic() - began_s:.0f} s")
    log = engine.log.read_text(errors="replace")
    if "KV reuse is on" not in log:
        lines = [line for line in log.splitlines() if "antiphon" in line.lower() or "reuse" in line]
        raise Failed("the gate has not passed:\n" + "\n".join(lines[-20:]))
    report.note("gate", [line for line in log.splitlines() if "KV reuse is on" in line or "KV layout" in line])
    sensitivity(report)
    for length, concurrencies in LENGTHS.items():
        alone(report, cache, length)
        for concurrency in concurrencies[1:]:
            together(report, cache, length, concurrency)
        engine.check()
    preemption(report, cache)
    pressure(report, engine)
    aborts(report, cache)
    engine.check()
    log = engine.log.read_text(errors="replace")
    bad = [line for line in log.splitlines() if "antiphon" in line.lower() and ("ERROR" in line or "WARNING" in line)]
    report.note("errors and warnings of the connector", bad[:40], str(len(bad)))


def sensitivity(report: Report) -> None:
    """Prompts with the same last 16 tokens and nothing else in common."""
    for length in (2_064, 32_784):
        found = [ask(PORT, prompt(length, 90_000 + seed)[:-16] + prompt(16, 1), NEW_TOKENS).tokens for seed in range(4)]
        num_different = len({tuple(one) for one in found})
        num_first = len({one[0] for one in found})
        shown = f"{num_different} of 4 answers differ, {num_first} first tokens"
        report.note(f"{length}: tokens depend on the prompt", found, shown, is_met=num_different == 4)


def chunks_of(length: int) -> int:
    """Whole chunks of a prompt."""
    return length // CHUNK


def fill(cache: Process, prompts: list[list[int]]) -> list[list[int]]:
    """Computes each alone, and waits until it is stored. Returns the tokens."""
    before = num_chunks(cache)
    found = [ask(PORT, one, NEW_TOKENS).tokens for one in prompts]
    wait_stored(cache, before + sum(chunks_of(len(one)) for one in prompts))
    return found


def from_l1(report: Report, name: str, prompts: list[list[int]], concurrency: int) -> list[list[int]]:
    """The tokens with the engine's own cache emptied; notes whether all that could came from L1."""
    reset(PORT)
    before = external_hits(PORT)
    found = at_once([partial(ask, PORT, one, NEW_TOKENS) for one in prompts], concurrency)
    hits = external_hits(PORT) - before
    wanted = sum(chunks_of(len(one)) * CHUNK for one in prompts)
    report.note(f"{name}: tokens from L1", [hits, wanted], f"{hits:.0f} of {wanted}", is_met=hits == wanted)
    return [one.tokens for one in found]


def equal(one: list[list[int]], other: list[list[int]]) -> int:
    """How many are equal."""
    return sum(a == b for a, b in zip(one, other, strict=True))


def alone(report: Report, cache: Process, length: int) -> None:
    """One at a time: computed, from the engine's own cache, from L1."""
    prompts = [prompt(length, seed) for seed in range(4 if length > 10_000 else 6)]
    before = num_chunks(cache)
    pairs = [[ask(PORT, one, NEW_TOKENS).tokens for _ in range(2)] for one in prompts]
    computed, device = ([pair[place] for pair in pairs] for place in range(2))
    wait_stored(cache, before + len(prompts) * chunks_of(length))
    loaded = from_l1(report, f"{length} alone", prompts, 1)
    number = len(prompts)
    shown = f"{equal(loaded, device)} of {number} as from HBM, {equal(loaded, computed)} as computed"
    is_met = equal(loaded, device) == number
    report.note(f"{length} alone", [equal(loaded, device), equal(loaded, computed), number], shown, is_met=is_met)


def together(report: Report, cache: Process, length: int, concurrency: int) -> None:
    """Several at a time, against each alone; and the same without reuse."""
    prompts = [prompt(length, 1_000 * concurrency + seed) for seed in range(concurrency)]
    computed = fill(cache, prompts)
    name = f"{length} x {concurrency}"
    loaded = from_l1(report, name, prompts, concurrency)
    jobs = [partial(ask, PORT, one, NEW_TOKENS, cache_salt=f"other-{concurrency}") for one in prompts]
    plain = [one.tokens for one in at_once(jobs, concurrency)]
    ours, control = leading(loaded, computed), leading(plain, computed)
    shown = f"equal to alone: {equal(loaded, computed)} of {concurrency}, without reuse {equal(plain, computed)}; "
    shown += f"leading tokens {ours:.2f}, without reuse {control:.2f}"
    report.note(name, [equal(loaded, computed), equal(plain, computed), ours, control], shown,
                is_met=ours >= LEADING_LIMIT * control)  # fmt: skip


def leading(one: list[list[int]], other: list[list[int]]) -> float:
    """Share of tokens before the first that differs."""
    shares = []
    for a, b in zip(one, other, strict=True):
        number = next((place for place, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
        shares.append(number / len(b))
    return sum(shares) / len(shares)


def preemption(report: Report, cache: Process) -> None:
    """Requests that are running lose their blocks, again and again, and get them back from L1."""
    prompts = [prompt(4_112, 2_000 + seed) for seed in range(8)]
    computed = [one.tokens for one in at_once([partial(ask, PORT, one, 96) for one in prompts], 8)]
    wait_stored(cache, num_chunks(cache) + 1)
    reset(PORT)
    again = [one.tokens for one in at_once([partial(ask, PORT, one, 96) for one in prompts], 8)]
    reset(PORT)
    before, hits = metric(PORT, "vllm:num_preemptions_total"), external_hits(PORT)
    is_over = threading.Event()

    def disturb() -> None:
        while not is_over.wait(0.15):
            get(PORT, "/reset_prefix_cache?reset_running_requests=true", "POST")

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        found = at_once([partial(ask, PORT, one, 96) for one in prompts], 8)
    finally:
        is_over.set()
        thread.join()
    tokens = [one.tokens for one in found]
    preempted = metric(PORT, "vllm:num_preemptions_total") - before
    ours, control = leading(tokens, computed), leading(again, computed)
    shown = f"leading tokens {ours:.2f}, without preemption {control:.2f}, {preempted:.0f} preemptions"
    is_met = all(len(one) == 96 for one in tokens) and ours >= LEADING_LIMIT * control and preempted > 0
    report.note("preemption by reset", [ours, control, preempted, external_hits(PORT) - hits], shown, is_met=is_met)


def pressure(report: Report, engine: Process) -> None:
    """More than fits: vLLM preempts on its own. All requests end, with as many tokens as asked for."""
    before = metric(PORT, "vllm:num_preemptions_total")
    prompts = [prompt(2_064, 3_000 + seed) for seed in range(48)]
    jobs = [partial(ask, PORT, one, 320) for one in prompts]
    found = at_once(jobs, 48)
    preempted = metric(PORT, "vllm:num_preemptions_total") - before
    is_whole = all(len(one.tokens) == 320 for one in found)
    engine.check()
    report.note("preemption by memory", [preempted, is_whole], f"{preempted:.0f} preemptions, all whole: {is_whole}",
                is_met=is_whole)  # fmt: skip


def aborts(report: Report, cache: Process) -> None:
    """Clients that leave while their prompt is loaded or computed; the others get their tokens, and nothing is left."""
    prompts = [prompt(8_208, 4_000 + seed) for seed in range(12)]
    computed = fill(cache, prompts)
    chance = random.Random(5)
    kept_found: list[list[int]] = []
    kept_wanted: list[list[int]] = []
    reset(PORT)
    jobs = [partial(ask, PORT, one, NEW_TOKENS) for one in prompts[::2]]
    control = leading([one.tokens for one in at_once(jobs, len(jobs))], computed[::2])
    for _ in range(3):
        reset(PORT)
        jobs = []
        for place, one in enumerate(prompts):
            if place % 2:
                jobs.append(partial(stream, PORT, one, 64, chance.uniform(0.005, 0.25)))
            else:
                jobs.append(partial(ask, PORT, one, NEW_TOKENS))
        found = at_once(jobs, len(jobs))
        kept_found += [one.tokens for one in found[::2]]
        kept_wanted += computed[::2]
    until_s = time.monotonic() + 20
    while metric(PORT, "vllm:num_requests_running") + metric(PORT, "vllm:num_requests_waiting") > 0:
        if time.monotonic() > until_s:
            raise Failed("requests of clients that left are still there")
        time.sleep(0.1)
    reset(PORT)
    leases = leases_left(cache)
    used = metric(PORT, "vllm:kv_cache_usage_perc")
    ours = leading(kept_found, kept_wanted)
    shown = f"leading tokens of the others {ours:.2f}, without aborts {control:.2f}; "
    shown += f"{leases:.0f} leases and {used:.3f} of the blocks left"
    report.note("aborts", [equal(kept_found, kept_wanted), len(kept_found), ours, control, leases, used], shown,
                is_met=ours >= LEADING_LIMIT * control and leases == 0 and used == 0)  # fmt: skip


def leases_left(cache: Process, timeout_s: float = 10.0) -> float:
    """Leases that stay after everything has ended."""
    until_s = time.monotonic() + timeout_s
    while (number := metric(cache.port, "antiphon_cache_leases")) and time.monotonic() < until_s:
        time.sleep(0.1)
    return number
