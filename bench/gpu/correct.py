"""Point 1: the same tokens with KV from L1 as without, greedy; alone and together, with preemption and with aborts.

Each prompt ends 16 tokens after a whole chunk, so that a hit in L1 and one in the engine's own cache stop at the same
token: what follows is then computed in the same pieces, and an answer from L1 must be *the same* as the one from HBM
(``answers``). Beside others the sums of bf16 differ in the last bits: such an answer must be *explained* by rounding;
and when the others have ended each prompt is asked again, alone, without emptying the engine's cache. It then reads the
blocks that were loaded beside the others, and its answer must be the same as the one from HBM. That one wrong request
of 16 is seen is checked too: two heads of one chunk change places in the arena.
"""

from __future__ import annotations

import time
from functools import partial

import arena_bytes
import hardship
from answers import difference, is_same, leading, num_equal, num_explained, num_same
from arena_bytes import Arena
from common import (
    CHUNK,
    KV_BYTES_PER_TOKEN,
    LIVELY,
    Answer,
    Report,
    ask,
    ask_top,
    at_once,
    device_hits,
    external_hits,
    note_capture_errors,
    num_stored,
    prompt,
    reset,
    wait_stored,
)
from processes import Process, Stack, antiphon

CACHE_PORT, PORT = 16_600, 18_600
KV_TOKENS = 560_000
"""Sixteen prompts of 32k tokens, and some room."""
ARENA_GB = 96
LEASED_GB = ARENA_GB / 2
"""What one engine may have leased at once, the cache server's default: with more in all, a lookup finds a part."""
LENGTHS = {2_064: (4, 16), 8_208: (16,), 16_400: (4,), 32_784: (4, 16)}
"""Tokens of a prompt, and how many are loaded together, in rising order."""
ALONE = 4
CONTROL_TOKENS_MAX = 150_000
"""With more tokens than this in all the same is not computed without reuse besides, which is told only."""
NEW_TOKENS = 16
PLANTED = 7
"""The prompt of 16 that is spoiled."""


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    began_s = time.monotonic()
    cache = stack.cache_server(CACHE_PORT, ARENA_GB)
    stack.wait_ready([cache], "/status")
    args = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.8")
    engine = stack.engine("engine", PORT, antiphon(CACHE_PORT), *args, *LIVELY)
    stack.wait_ready([engine])
    engine.check_reuse()
    report.note("engine ready, s", time.monotonic() - began_s, f"{time.monotonic() - began_s:.0f} s")
    log = engine.log.read_text(errors="replace")
    report.note("gate", [line for line in log.splitlines() if "KV reuse is on" in line or "KV layout" in line])
    measure(report, cache, engine)
    log = engine.log.read_text(errors="replace")
    bad = [line for line in log.splitlines() if "antiphon" in line.lower() and ("ERROR" in line or "WARNING" in line)]
    report.note("errors and warnings of the connector", bad[:40], str(len(bad)))
    note_capture_errors(report, engine)


def measure(report: Report, cache: Process, engine: Process) -> None:
    """With the engine there."""
    sensitivity(report)
    arena = Arena(cache, num_layers=32)
    prompts: list[list[int]] = []
    for length, concurrencies in LENGTHS.items():
        began_s = time.monotonic()
        prompts = [prompt(length, 1_000 + seed) for seed in range(max(concurrencies))]
        computed, wanted = fill(cache, prompts)
        alone(report, length, prompts[:ALONE], computed, wanted)
        for concurrency in concurrencies:
            together(report, f"{length} x {concurrency}", prompts[:concurrency], wanted)
        if length == min(LENGTHS):
            planted(report, arena, prompts, wanted)
        one_chunk(report, arena, length, prompts[0], wanted[0])
        engine.check()
        report.note(f"{length}, s", time.monotonic() - began_s)
    arena.close()
    for step in (hardship.aborts, hardship.preemption, hardship.pressure):
        began_s = time.monotonic()
        step(report, cache, PORT, prompts)
        engine.check()
        report.note(f"{step.__name__}, s", time.monotonic() - began_s)


def sensitivity(report: Report) -> None:
    """Prompts with the same last 16 tokens and nothing else in common."""
    for length in (2_064, 32_784):
        found = [ask(PORT, prompt(length, 90_000 + seed)[:-16] + prompt(16, 1), NEW_TOKENS).tokens for seed in range(4)]
        num_different = len({tuple(one) for one in found})
        num_first = len({one[0] for one in found})
        shown = f"{num_different} of 4 answers differ, {num_first} first tokens"
        report.note(f"{length}: tokens depend on the prompt", found, shown, is_met=num_different == 4)


def whole(prompts: list[list[int]]) -> int:
    """Tokens of their whole chunks."""
    return sum(len(one) // CHUNK * CHUNK for one in prompts)


def fill(cache: Process, prompts: list[list[int]]) -> tuple[list[Answer], list[Answer]]:
    """Each alone: computed, and from the engine's own cache. Waits until all is stored."""
    before = num_stored(cache)
    pairs = [[ask_top(PORT, one, NEW_TOKENS) for _ in range(2)] for one in prompts]
    wait_stored(cache, before + whole(prompts) // CHUNK)
    return [one for one, _ in pairs], [other for _, other in pairs]


def from_l1(report: Report, name: str, prompts: list[list[int]], concurrency: int) -> list[Answer]:
    """The answers with the engine's own cache emptied; notes whether all that could came from L1."""
    reset(PORT)
    before = external_hits(PORT)
    way = ask_top if concurrency == 1 else ask
    found: list[Answer] = at_once([partial(way, PORT, one, NEW_TOKENS) for one in prompts], concurrency)
    hits, wanted = external_hits(PORT) - before, whole(prompts)
    least = min(wanted, leasable(concurrency))
    shown = f"{hits:.0f} of {wanted}" + (f", at least {least} by the cap of leases" if least < wanted else "")
    report.note(f"{name}: tokens from L1", [hits, wanted, least], shown, is_met=least <= hits <= wanted)
    return found


def leasable(concurrency: int) -> int:
    """Tokens of whole chunks that as many requests find in any case; those that come later find what others return."""
    return int(LEASED_GB * 1e9 / KV_BYTES_PER_TOKEN) // CHUNK * CHUNK - CHUNK * concurrency


def alone(report: Report, length: int, prompts: list[list[int]], computed: list[Answer], wanted: list[Answer]) -> None:
    """One at a time: from L1, against the engine's own cache and against computing."""
    number = len(prompts)
    loaded = from_l1(report, f"{length} alone", prompts, 1)
    same, apart = num_same(loaded, wanted[:number]), worst(loaded, wanted)
    equal = num_equal(loaded, computed[:number])
    shown = f"{same} of {number} as from HBM (apart by {apart:.3f} at most), {equal} as computed"
    report.note(f"{length} alone", [same, equal, number, apart], shown, is_met=same == number)


def together(report: Report, name: str, prompts: list[list[int]], wanted: list[Answer]) -> None:
    """Several at a time, against each alone; then each alone from the blocks that were loaded."""
    number = len(prompts)
    wanted = wanted[:number]
    loaded = from_l1(report, name, prompts, number)
    explained = num_explained(loaded, wanted)
    figures = {"explained": explained, "equal": num_equal(loaded, wanted), "leading": leading(loaded, wanted)}
    shown = f"{explained} of {number} explained, {figures['equal']} equal to alone"
    as_loaded(report, name, prompts, wanted)
    if sum(len(one) for one in prompts) <= CONTROL_TOKENS_MAX:
        jobs = [partial(ask, PORT, one, NEW_TOKENS, cache_salt=f"other-{number}") for one in prompts]
        plain: list[Answer] = at_once(jobs, number)
        figures |= {"equal without reuse": num_equal(plain, wanted), "leading without reuse": leading(plain, wanted)}
        shown += f", {figures['equal without reuse']} without reuse"
    report.note(name, figures, shown, is_met=explained == number)


def as_loaded(report: Report, name: str, prompts: list[list[int]], wanted: list[Answer]) -> None:
    """Each alone, from the blocks that are in HBM since they were loaded beside others: as from HBM."""
    device, external = device_hits(PORT), external_hits(PORT)
    found = [ask_top(PORT, one, NEW_TOKENS) for one in prompts]
    came, more = device_hits(PORT) - device, external_hits(PORT) - external
    same, apart = num_same(found, wanted), worst(found, wanted)
    shown = f"{same} of {len(prompts)} give the answer from HBM (apart by {apart:.3f} at most)"
    is_met = same == len(prompts) and came == whole(prompts) and more == 0
    report.note(f"{name}: blocks that were loaded", [same, len(prompts), apart, came, more], shown, is_met=is_met)


def worst(found: list[Answer], wanted: list[Answer]) -> float:
    """The largest difference."""
    return max(difference(a, b) for a, b in zip(found, wanted, strict=False))


def planted(report: Report, arena: Arena, prompts: list[list[int]], wanted: list[Answer]) -> None:
    """One chunk of one prompt is wrong in the arena: the comparison names that request, and no other."""
    spoiled = [len(prompts[PLANTED]) // CHUNK // 2]
    arena.swap_heads(prompts[PLANTED], spoiled, (2, 5))
    try:
        reset(PORT)
        loaded: list[Answer] = at_once([partial(ask, PORT, one, NEW_TOKENS) for one in prompts], len(prompts))
        found = [ask_top(PORT, one, NEW_TOKENS) for one in prompts]
    finally:
        arena.swap_heads(prompts[PLANTED], spoiled, (2, 5))
    wrong = [place for place, (a, b) in enumerate(zip(found, wanted, strict=True)) if not is_same(a, b)]
    apart = difference(found[PLANTED], wanted[PLANTED])
    shown = f"requests {wrong} of {len(prompts)} are seen, apart by {apart:.2f}; {PLANTED} was spoiled"
    report.note("a wrong chunk is seen", [wrong, apart, num_explained(loaded, wanted)], shown,
                is_met=wrong == [PLANTED])  # fmt: skip


def one_chunk(report: Report, arena: Arena, length: int, ids: list[int], wanted: Answer) -> None:
    """How far the comparison sees, told only: all heads of one chunk in the middle are another head's."""
    number = length // CHUNK // 2
    pairs = [(head, head + 1) for head in range(0, arena_bytes.HEADS, 2)]
    for pair in pairs:
        arena.swap_heads(ids, [number], pair)
    try:
        reset(PORT)
        found = ask_top(PORT, ids, NEW_TOKENS)
    finally:
        for pair in pairs:
            arena.swap_heads(ids, [number], pair)
    apart, is_seen = difference(found, wanted), not is_same(found, wanted)
    report.note(f"{length}: one chunk of {length // CHUNK} wrong", [apart, is_seen],
                f"{'seen' if is_seen else 'not seen'}, apart by {apart:.2f}")  # fmt: skip
