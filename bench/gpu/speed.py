"""Points 2 and 3 on one start: ``ttft``, ``overlap``, then ``store_cost``.

Three engines on one GPU, one at work at a time.
"""

from __future__ import annotations

import overlap
import store_cost
import ttft
from common import KV_BYTES_PER_TOKEN, Report
from processes import Stack, antiphon

KV_TOKENS = 120_000


def run(stack: Stack, report: Report) -> None:
    """All of it."""
    bus = ttft.bus_to_gpu()
    report.note("bus to the GPU, GB/s", bus, f"{bus:.1f} GB/s")
    cache = stack.cache_server(ttft.CACHE_PORT, 48)
    stack.wait_ready([cache], "/status")
    args = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.28")
    ours = stack.engine("antiphon", ttft.PORTS["antiphon"], antiphon(ttft.CACHE_PORT), *args)
    theirs = stack.engine("offload", ttft.PORTS["vLLM offload"], None, "--kv-offloading-size", "24", *args)
    plain = stack.engine("plain", store_cost.PORTS["no connector"], None, *args)
    stack.wait_ready([ours, theirs, plain])
    ttft.measure(report, bus, cache, ours)
    overlap.measure(report, cache, ours.port)
    store_cost.measure(report, cache, {"no connector": plain.port, **ttft.PORTS})
    for process in (ours, theirs, plain):
        process.check()
