"""All that needs two engines, on one start: ``pd``, ``pd_load``, ``flood`` and ``restart``.

Two GPUs, an engine on each, NIXL and Antiphon in ``MultiConnector``, both able to prefill and to decode; one cache
server. On one GPU both share it, with less KV, and only the parts whose figures do not compare GPUs run. A part that
fails does not keep the next from being measured; each writes ``pair-PART.json``, and the start ``pair-start.json``. The
weights are those whose tokens depend on the KV; they take the same time.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence

import flood
import pd
import pd_load
import restart
from common import KV_BYTES_PER_TOKEN, LIVELY, Report, wait_registered
from processes import Failed, OutOfTime, Process, Stack, machine, need_gpus, num_gpus, say

PARTS = ("pd", "load", "flood", "restart")
KV_TOKENS = 400_000
ARENA_GB = 48
PD_PROMPTS = 2
TIMED = ("load", "flood")
"""Parts whose figures would show that the engines still register the arena."""
ARGS = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.6", *LIVELY)
AGAIN_TOKENS = SHARED_TOKENS = 100_000
SHARED_ARGS = (
    "--kv-cache-memory-bytes", str(SHARED_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.4", *LIVELY,
)  # fmt: skip
"""Of two engines on one GPU."""
AGAIN_ARGS = (
    "--kv-cache-memory-bytes", str(AGAIN_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.3", *LIVELY,
)  # fmt: skip
"""Of the restarted engine, which finds another one on its GPU."""


def run(stack: Stack, report: Report, parts: Sequence[str] = PARTS) -> None:
    """The parts, in order. Raises Failed at the end where one of them has failed or missed a limit."""
    assert set(parts) <= set(PARTS)
    is_shared = num_gpus() < 2
    need_gpus(1)
    if is_shared and (apart := [part for part in parts if part in TIMED]):
        raise Failed(f"{', '.join(apart)} needs 2 GPUs, there is 1: --parts pd,restart run here")
    args = SHARED_ARGS if is_shared else ARGS
    reports = {part: Report(f"pair-{part}", report.out) for part in PARTS if part in parts}
    began_s = time.monotonic()
    cache = stack.cache_server(pd.CACHE_PORT, ARENA_GB)
    stack.wait_ready([cache], "/status")
    engines = {}
    for gpu, (name, port) in zip((0, 0 if is_shared else 1), (("P", pd.P_PORT), ("D", pd.D_PORT)), strict=True):
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 1_000), "CUDA_VISIBLE_DEVICES": str(gpu)}
        engines[name] = stack.engine(name, port, pd.both("kv_both"), *args, **environment)
    stack.wait_ready(engines.values())
    for engine in engines.values():
        engine.check_reuse()
    took_s = time.monotonic() - began_s
    report.note("engines ready, s", took_s, f"{took_s:.0f} s")
    for part in reports.values():
        part.note("machine", machine())
        part.note("engines ready, s", took_s)
    measure(stack, reports, cache, engines)


def measure(stack: Stack, reports: dict[str, Report], cache: Process, engines: dict[str, Process]) -> None:
    """With the engines there: the parts that have a report."""
    both = pd.both("kv_both")
    steps: dict[str, Callable[[Report], None]] = {
        "pd": lambda report: pd.measure(report, cache, list(engines.values()), pd.LENGTHS, PD_PROMPTS),
        "load": lambda report: pd_load.measure(stack, report, engines),
        "flood": lambda report: flood.measure(stack, report, engines),
        "restart": lambda report: restart.measure(stack, report, cache, engines["D"], both, *AGAIN_ARGS),
    }
    bad = []
    for part, report in reports.items():
        say(f"{part}:")
        report.began_s = time.monotonic()
        failure = None
        try:
            if part in TIMED:
                wait_registered(report, *engines.values())
            steps[part](report)
        except OutOfTime as error:
            report.close(str(error))
            raise
        except Exception as error:  # supervised: the next part is measured, and the failure told at the end
            say(traceback.format_exc())
            failure = repr(error)
        if not report.close(failure):
            bad.append(f"{part}: {failure or 'a limit was missed'}")
    if bad:
        raise Failed("; ".join(bad))
