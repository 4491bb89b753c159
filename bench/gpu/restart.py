"""Point 7: a restarted engine takes a returning conversation of 32k tokens from the cache server.

Conversations are computed on one GPU; that engine is stopped, and a new one started on the other GPU, which has never
seen them. Limits: all whole chunks come from the cache server, and sooner than computing them.
"""

from __future__ import annotations

import time
from typing import Any

from common import (
    CHUNK,
    Report,
    ask,
    external_hits,
    median,
    num_chunks,
    num_stored,
    prompt,
    ttft_ms,
    wait_registered,
    wait_stored,
)
from processes import Process, Stack

LENGTH, CONVERSATIONS, AT_ONCE, NEW_TOKENS = 32_784, 7, 2, 16
"""Two return as soon as the engine is ready, while its driver is still told of the arena; they are told apart. These
were stored last, as the driver is told of the arena from its front."""
PORT = 18_902


def measure(stack: Stack, report: Report, cache: Process, old: Process, transfer: dict[str, Any], *args: str) -> None:
    """With the engine there that is to be stopped, and the arguments of the new one, on GPU 0."""
    prompts = [prompt(LENGTH, 70_000 + seed) for seed in range(CONVERSATIONS)]
    wanted = LENGTH // CHUNK
    tokens = []
    for ids in prompts:
        before = num_stored(cache)
        tokens.append(ask(old.port, ids, NEW_TOKENS).tokens)
        wait_stored(cache, before + wanted)
    report.note("chunks in L1 before the restart", num_chunks(cache))
    prompts.reverse()
    tokens.reverse()
    began_s = time.monotonic()
    old.end()
    stopped_s = time.monotonic() - began_s
    environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(PORT + 1_000), "CUDA_VISIBLE_DEVICES": "0"}
    engine = stack.engine("restarted", PORT, transfer, *args, **environment)
    stack.wait_ready([engine])
    engine.check_reuse()
    took_s = time.monotonic() - began_s
    report.note("stopped, ready again, s", [stopped_s, took_s], f"{stopped_s:.1f} s, {took_s:.0f} s")
    ask(PORT, prompt(300, 1), 4)
    hits = external_hits(PORT)
    at_once = [ttft_ms(PORT, ids) for ids in prompts[:AT_ONCE]]
    is_early = not engine.is_registered()
    waited_s = wait_registered(report, engine)
    loaded = [ttft_ms(PORT, ids) for ids in prompts[AT_ONCE:]]
    came = external_hits(PORT) - hits
    expected = wanted * CHUNK * CONVERSATIONS
    report.note("tokens from the cache server", [came, expected], f"{came:.0f} of {expected}", is_met=came == expected)
    device = [ttft_ms(PORT, ids) for ids in prompts[-2:]]
    equal = sum(ask(PORT, ids, NEW_TOKENS).tokens == one for ids, one in zip(prompts[-2:], tokens[-2:], strict=True))
    report.note("same tokens as the engine that computed them, told only", [equal, 2], f"{equal} of 2")
    computed = [ttft_ms(PORT, prompt(LENGTH, 80_000 + seed)) for seed in range(CONVERSATIONS)]
    figures = {"at once": at_once, "loaded": loaded, "device": device, "computed": computed}
    report.note("raw, ms", {**figures, "waited until the arena was registered, s": waited_s})
    ours, limit = median(loaded), median(computed[1:])
    shown = ", ".join(f"{one:.0f}" for one in at_once)
    shown += f" ms; copies waited for {engine.num_waited()} pieces of the arena; {waited_s:.0f} s to the rest"
    report.note("conversations that return at once, ms", [at_once, engine.num_waited(), is_early], shown)
    report.note("returning conversation of 32k tokens, ms", [ours, limit], f"{ours:.1f} ms", f"<= {limit:.1f} computed",
                ours <= limit)  # fmt: skip
    report.note("its share of computing", ours / limit, f"{ours / limit:.3f}")
    engine.check()
