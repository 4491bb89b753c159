"""Head-major slabs across tensor-parallel sizes: one rank writes and two read, and back. Two GPUs.

Both engines load one checkpoint (``checkpoint``), alive at the same time beside one cache server. What one size stored
the other takes whole. The tokens that follow are held against those that the reader gives when it computes the prompt
itself. Sums of bf16 differ between tensor-parallel sizes, and random weights turn that into another token now and then:
so the same is told of the two engines without any reuse, which is the most that can be asked. With these weights two
heads that change places are another first token for every prompt, and a last bit of bf16 for none; that the tokens
depend on the prompt is checked too.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import checkpoint
from common import (
    Failed,
    Process,
    Report,
    Stack,
    antiphon,
    ask,
    at_once,
    external_hits,
    get,
    machine,
    num_chunks,
    prompt,
    reset,
    wait_stored,
)
from correct import equal, leading

CACHE_PORT, PORTS = 16_950, {"TP=1": 18_950, "TP=2": 18_951}
KV_BYTES_PER_TOKEN = checkpoint.LAYERS * 8 * 2 * 128 * 2
KV_TOKENS = 200_000
ARENA_GB = 20
LENGTHS = {2_064: 24, 8_208: 8}
"""Tokens of a prompt, and prompts of that length."""
NEW_TOKENS, CHUNK = 8, 256
MARGIN, CONTROL_LIMIT, SAME_LIMIT = 0.2, 0.6, 0.9
"""Shares of first tokens: so much less may be equal than without reuse; with less without reuse nothing is shown; and
of an engine that answers from the KV in its own memory."""
NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}  # fmt: skip


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    num_gpus = len(machine()["gpus"].splitlines())
    if num_gpus < 2:
        raise Failed(f"two GPUs are needed, {num_gpus} is there")
    with tempfile.TemporaryDirectory(prefix="antiphon-slabs-") as folder:
        began_s = time.monotonic()
        stack.checkpoint = checkpoint.make(stack.paths.model, Path(folder))
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
    for length, number in LENGTHS.items():
        for writer, reader in (("TP=1", "TP=2"), ("TP=2", "TP=1")):
            across(report, cache, (writer, reader), length, number)
    report.note("namespaces in the cache server", get(cache.port, "/status")[1][:4_000])


def across(report: Report, cache: Process, names: tuple[str, str], length: int, number: int) -> None:
    """One direction, prompts of one length."""
    writer, reader = (PORTS[name] for name in names)
    name = f"{length}: {names[0]} writes, {names[1]} reads"
    seeds = range(1_000 * (writer > reader), 1_000 * (writer > reader) + number)
    prompts = [prompt(length, seed) for seed in seeds]
    wanted = length // CHUNK
    before = num_chunks(cache)
    written = tokens(writer, prompts, "shared")
    wait_stored(cache, before + wanted * number)
    reset(reader)
    hits = external_hits(reader)
    loaded = tokens(reader, prompts, "shared")
    came, expected = external_hits(reader) - hits, wanted * CHUNK * number
    report.note(f"{name}: tokens from L1", [came, expected], f"{came:.0f} of {expected}", is_met=came == expected)
    hits = external_hits(reader)
    again = tokens(reader, prompts, "shared")
    from_memory = external_hits(reader) - hits
    computed = tokens(reader, prompts, "own")
    ours, control = share(loaded, computed), share(written, computed)
    figures = {
        "first tokens equal, from L1 against computed": ours,
        "first tokens equal, the other size against computed": control,
        "leading tokens": [leading(loaded, computed), leading(written, computed)],
        "as from the reader's own memory": [equal(loaded, again), share(loaded, again), number, from_memory],
        "tokens": {"written": written, "loaded": loaded, "again": again, "computed": computed},
    }
    shown = (
        f"first tokens as computed {ours:.2f}, without reuse {control:.2f}; leading {leading(loaded, computed):.2f}, "
    )
    shown += f"without reuse {leading(written, computed):.2f}; {equal(loaded, again)} of {number} as from its memory"
    is_met = control >= CONTROL_LIMIT and ours >= control - MARGIN and share(loaded, again) >= SAME_LIMIT
    report.note(name, figures, shown, is_met=is_met)


def tokens(port: int, prompts: list[list[int]], salt: str) -> list[list[int]]:
    """One prompt at a time, so that each is computed in the same pieces."""
    return [one.tokens for one in at_once([partial(ask, port, ids, NEW_TOKENS, cache_salt=salt) for ids in prompts], 1)]


def share(one: list[list[int]], other: list[list[int]]) -> float:
    """Of answers whose first tokens are equal."""
    return sum(a[0] == b[0] for a, b in zip(one, other, strict=True)) / len(one)
