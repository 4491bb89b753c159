"""Head-major slabs across tensor-parallel sizes: one rank writes and two read, and back. Two GPUs.

Both engines load one checkpoint (``checkpoint``), alive at the same time beside one cache server. Sums of bf16 differ
between tensor-parallel sizes, so that the same KV is compared head by head and layer by layer, with a tolerance far
below what a wrong head would be (``arena_bytes``):

- written: each size computes and stores the same prompts apart, under two salts; the chunks are read from the arena.
- read: one size takes the prompt that the other stored, computes 256 tokens more and stores them. Above the first layer
  the KV of these depends on every head that was loaded. It is held against what the writer computes for them alone.
- planted: two heads of different ranks, and two of one rank, change places in the arena. Both comparisons must see it.

The tokens are told besides: those from L1 against those that the reader computes, and the same without any reuse.
"""

from __future__ import annotations

import time
from functools import partial

import arena_bytes
import checkpoint
from answers import leading, num_equal
from arena_bytes import Arena, Chunk
from common import CHUNK, Answer, Report, ask, at_once, external_hits, num_stored, prompt, reset, wait_stored
from processes import Failed, Process, Stack, antiphon, get, need_gpus

CACHE_PORT, PORTS = 16_950, {"TP=1": 18_950, "TP=2": 18_951}
KV_BYTES_PER_TOKEN = checkpoint.LAYERS * 8 * 2 * 128 * 2
KV_TOKENS = 200_000
ARENA_GB = 20
LENGTHS = {2_064: 12, 8_208: 6}
"""Tokens of a prompt, and prompts of that length."""
NEW_TOKENS = 8
SWAPS = ((2, 5), (0, 1))
"""Heads of different ranks, and of one, of two ranks with four each."""
MARGIN, CONTROL_LIMIT = 0.25, 0.6
"""Shares of first tokens: so much less may be equal than without reuse; with less without reuse nothing is shown."""
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}  # fmt: skip


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    need_gpus(2)
    began_s = time.monotonic()
    stack.checkpoint = checkpoint.make(stack.paths.model, stack.folder("slabs"))
    report.note("checkpoint made, s", time.monotonic() - began_s, f"{time.monotonic() - began_s:.0f} s")
    cache = stack.cache_server(CACHE_PORT, ARENA_GB)
    stack.wait_ready([cache], "/status")
    args = (
        "--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.2",
        "--enforce-eager",
    )  # fmt: skip
    one = stack.engine("TP1", PORTS["TP=1"], antiphon(CACHE_PORT), *args, CUDA_VISIBLE_DEVICES="0")
    two = ("--tensor-parallel-size", "2", "--disable-custom-all-reduce")
    other = stack.engine("TP2", PORTS["TP=2"], antiphon(CACHE_PORT), *args, *two, **NO_MULTICAST)
    stack.wait_ready([one, other])
    one.check_reuse()
    other.check_reuse(2)
    report.note("engines ready, s", time.monotonic() - began_s, f"{time.monotonic() - began_s:.0f} s")
    measure(report, cache)
    for engine in (one, other):
        engine.check()


def measure(report: Report, cache: Process) -> None:
    """With the engines there."""
    for name, port in PORTS.items():
        found = [ask(port, prompt(2_064, 90_000 + seed)[:-16] + prompt(16, 1), NEW_TOKENS).tokens for seed in range(6)]
        number = len({one[0] for one in found})
        report.note(
            f"{name}: first tokens that depend on the prompt", found, f"{number} of 6 differ", is_met=number >= 5
        )
    arena = Arena(cache, checkpoint.LAYERS)
    for length in LENGTHS:
        written(report, cache, arena, length)
    for writer, reader in (("TP=1", "TP=2"), ("TP=2", "TP=1")):
        for length, number in LENGTHS.items():
            across(report, cache, (writer, reader), length, number)
        read(report, cache, arena, (writer, reader))
    arena.close()
    report.note("namespaces in the cache server", get(cache.port, "/status")[1][:4_000])


def stored(cache: Process, port: int, ids: list[int], salt: str, num_new: int) -> Answer:
    """Asks, and waits until so many more chunks are in the arena. Raises Failed where they do not come."""
    before = num_stored(cache)
    found = ask(port, ids, NEW_TOKENS, cache_salt=salt)
    if (came := wait_stored(cache, before + num_new, 5.0) - before) < num_new:
        raise Failed(f"{came} of {num_new} chunks were stored")
    return found


def written(report: Report, cache: Process, arena: Arena, length: int) -> None:
    """What each size stores of the same prompts, head by head; and with two heads that changed places."""
    apart, wrong, misplaced, seen = 0.0, 0, 0, []
    prompts = [prompt(length, 5_000 + seed) for seed in range(2)]
    for ids in prompts:
        found: dict[str, list[Chunk]] = {}
        for number, (name, port) in enumerate(PORTS.items()):
            salt = f"written-{number}"
            stored(cache, port, ids, salt, length // CHUNK)
            found[name] = arena.chunks(ids, salt)
        for a, b in zip(*found.values(), strict=True):
            apart = max(apart, arena_bytes.distance(a, b))
            wrong += len(arena_bytes.wrong_heads(a, b))
        misplaced += not arena_bytes.own_places(found["TP=1"][-1], found["TP=2"][-1])
        for swap in SWAPS:
            arena.swap_heads(ids, [0], swap, "written-1")
            spoiled = arena.chunks(ids, "written-1")[0]
            arena.swap_heads(ids, [0], swap, "written-1")
            seen.append(arena_bytes.wrong_heads(spoiled, found["TP=1"][0]) == sorted(swap))
    figures = {"apart": apart, "wrong heads": wrong, "misplaced": misplaced, "planted seen": seen}
    shown = f"heads apart by {apart:.3f} at most, {wrong} wrong; {sum(seen)} of {len(seen)} planted swaps named"
    report.note(f"{length}: both sizes store the same", figures, shown, f"<= {arena_bytes.RELATIVE_LIMIT:g}",
                wrong == 0 and misplaced == 0 and all(seen))  # fmt: skip


def read(report: Report, cache: Process, arena: Arena, names: tuple[str, str]) -> None:
    """What the reader computes on top of the writer's chunks, head by head; and on top of spoiled ones."""
    writer, reader = (PORTS[name] for name in names)
    num_loaded = 2_048 // CHUNK
    apart, wrong, came, seen = [], 0, 0.0, []
    for seed in range(2 + len(SWAPS)):
        ids = prompt(2_048 + CHUNK + 16, 6_000 + 100 * (writer > reader) + seed)
        salt, own = f"read-{seed}-{writer}", f"own-{seed}-{writer}"
        stored(cache, writer, ids, own, num_loaded + 1)
        stored(cache, writer, ids[: num_loaded * CHUNK + 16], salt, num_loaded)
        swap = SWAPS[seed - 2] if seed >= 2 else None
        if swap is not None:
            arena.swap_heads(ids[: num_loaded * CHUNK], range(num_loaded), swap, salt)
        hits = external_hits(reader)
        stored(cache, reader, ids, salt, 1)
        came += external_hits(reader) - hits
        found, wanted = arena.chunks(ids, salt)[num_loaded], arena.chunks(ids, own)[num_loaded]
        if swap is None:
            apart.append(arena_bytes.distance(found, wanted))
            wrong += len(arena_bytes.wrong_heads(found, wanted))
        else:
            seen.append(arena_bytes.distance(found, wanted))
    expected = num_loaded * CHUNK * (2 + len(SWAPS))
    figures = {"apart": apart, "wrong heads": wrong, "apart with planted swaps": seen, "from L1": [came, expected]}
    shown = f"heads apart by {max(apart):.3f}, {wrong} wrong; with planted swaps by {min(seen):.2f}; "
    shown += f"{came:.0f} of {expected} tokens from L1"
    is_met = wrong == 0 and min(seen) > arena_bytes.RELATIVE_LIMIT and came == expected
    report.note(f"{names[0]} writes, {names[1]} goes on", figures, shown, f"<= {arena_bytes.RELATIVE_LIMIT:g}",
                is_met)  # fmt: skip


def across(report: Report, cache: Process, names: tuple[str, str], length: int, number: int) -> None:
    """One direction, prompts of one length: all chunks come from L1, and the tokens are told."""
    writer, reader = (PORTS[name] for name in names)
    name = f"{length}: {names[0]} writes, {names[1]} reads"
    seeds = range(1_000 * (writer > reader), 1_000 * (writer > reader) + number)
    prompts = [prompt(length, seed) for seed in seeds]
    wanted = length // CHUNK
    before = num_stored(cache)
    written = one_by_one(writer, prompts, "shared")
    wait_stored(cache, before + wanted * number)
    reset(reader)
    hits = external_hits(reader)
    loaded = one_by_one(reader, prompts, "shared")
    came, expected = external_hits(reader) - hits, wanted * CHUNK * number
    report.note(f"{name}: tokens from L1", [came, expected], f"{came:.0f} of {expected}", is_met=came == expected)
    computed = one_by_one(reader, prompts, "own")
    ours, control = share(loaded, computed), share(written, computed)
    figures = {
        "first tokens equal, from L1 against computed": ours,
        "first tokens equal, the other size against computed": control,
        "leading tokens": [leading(loaded, computed), leading(written, computed)],
        "equal": [num_equal(loaded, computed), num_equal(written, computed), number],
    }
    shown = f"first tokens as the reader computes {ours:.2f}, without reuse {control:.2f}"
    report.note(name, figures, shown, is_met=control >= CONTROL_LIMIT and ours >= control - MARGIN)


def one_by_one(port: int, prompts: list[list[int]], salt: str) -> list[Answer]:
    """Each alone, so that it is computed in the same pieces."""
    return at_once([partial(ask, port, ids, NEW_TOKENS, cache_salt=salt) for ids in prompts], 1)


def share(one: list[Answer], other: list[Answer]) -> float:
    """Of answers whose first tokens are equal."""
    return sum(a.tokens[0] == b.tokens[0] for a, b in zip(one, other, strict=True)) / len(one)
