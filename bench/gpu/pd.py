"""Point 1, second part: prefill and decode over NIXL with reuse on both sides, ``MultiConnector`` in both roles.

On two GPUs one engine each; on one GPU both share it, and NIXL takes seconds for a transfer. NIXL makes both use the
HND layout. Each prompt is computed on D alone, handed over from a P that computes it, from a P that takes it from L1,
and served by a D that takes from L1 what P stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from answers import is_explained, is_same
from common import (
    CHUNK,
    KV_BYTES_PER_TOKEN,
    LIVELY,
    Answer,
    Report,
    ask,
    ask_top,
    external_hits,
    num_stored,
    prompt,
    reset,
    wait_stored,
)
from processes import Failed, Process, Stack, antiphon, num_gpus

CACHE_PORT, P_PORT, D_PORT = 16_900, 18_900, 18_901
KV_TOKENS = 100_000
LENGTHS = (2_064, 8_208, 32_784)
PROMPTS = 3
NEW_TOKENS = 16
TO_P = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    cache = stack.cache_server(CACHE_PORT, 40)
    stack.wait_ready([cache], "/status")
    has_two = num_gpus() > 1
    args = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.4")
    engines = []
    for number, (name, port, role) in enumerate((("P", P_PORT, "kv_producer"), ("D", D_PORT, "kv_consumer"))):
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 1_000)}
        if has_two:
            environment["CUDA_VISIBLE_DEVICES"] = str(number)
        engines.append(stack.engine(name, port, both(role), *args, *LIVELY, **environment))
    stack.wait_ready(engines)
    for engine in engines:
        engine.check_reuse()
    measure(report, cache, engines, LENGTHS, PROMPTS)


def measure(report: Report, cache: Process, engines: list[Process], lengths: Sequence[int], prompts: int) -> None:
    """With the engines there, so many prompts of each length."""
    for length in lengths:
        found = [visit(cache, prompt(length, seed), f"{length}-{seed}") for seed in range(prompts)]
        for kind in found[0]:
            number = sum(one[kind] for one in found)
            is_met = None if kind.startswith("told only") else number == prompts
            report.note(f"{length}: {kind}", [number, prompts], f"{number} of {prompts}", is_met=is_met)
        for engine in engines:
            engine.check()


def both(role: str) -> dict[str, Any]:
    """NIXL first, ours beside it."""
    ours = antiphon(CACHE_PORT)
    del ours["kv_load_failure_policy"]
    children = [{"kv_connector": "NixlConnector", "kv_role": role}, ours]
    return {
        "kv_connector": "MultiConnector", "kv_role": role, "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children},
    }  # fmt: skip


def handed_over(ids: list[int], salt: str) -> Answer:
    """The answer of D, with KV from P."""
    params = ask(P_PORT, ids, 1, cache_salt=salt, kv_transfer_params=TO_P).params
    if not params:
        raise Failed("P gave nothing to hand over")
    return ask_top(D_PORT, ids, NEW_TOKENS, cache_salt=salt, kv_transfer_params=params)


def visit(cache: Process, ids: list[int], salt: str) -> dict[str, bool]:
    """Whether each way gave the answer of its like without L1, and took its KV from where it should.

    D that takes L1 computes the same tokens in the same pieces as from its own memory: the same answer. P computes a
    prompt as a whole, or 16 tokens of it after a load: its KV differs in the last bits, so that D's tokens are
    explained by them (``answers``).
    """
    wanted = len(ids) // CHUNK * CHUNK
    before = num_stored(cache)
    alone = ask_top(D_PORT, ids, NEW_TOKENS, cache_salt=f"{salt}-alone")
    wait_stored(cache, before + wanted // CHUNK)
    pulled = handed_over(ids, salt)
    again = ask_top(D_PORT, ids, NEW_TOKENS, cache_salt=salt)  # what was pulled is in D's own cache
    wait_stored(cache, before + 2 * wanted // CHUNK)
    for port in (P_PORT, D_PORT):
        reset(port)
    hits = external_hits(P_PORT)
    taken = handed_over(ids, salt)
    found = {"P takes from L1, as P computes": is_explained(taken.tokens, pulled)}
    found["P took all chunks from L1"] = external_hits(P_PORT) - hits == wanted
    for port in (P_PORT, D_PORT):
        reset(port)
    hits = external_hits(D_PORT)
    loaded = ask_top(D_PORT, ids, NEW_TOKENS, cache_salt=salt)
    found["D takes from L1, as from HBM"] = is_same(loaded, again)
    found["D took all chunks from L1"] = external_hits(D_PORT) - hits == wanted
    found["D pulls, as D alone"] = is_explained(pulled.tokens, alone)
    found["told only: D pulls, equal to D alone"] = pulled.tokens == alone.tokens
    found["told only: P takes from L1, equal"] = taken.tokens == pulled.tokens
    return found
