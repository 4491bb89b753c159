"""All that needs two engines, on one start: ``pd``, ``pd_load``, ``flood`` and ``restart``.

Two GPUs, an engine on each, NIXL and Antiphon in ``MultiConnector``, both able to prefill and to decode; one cache
server. A part that fails does not keep the next from being measured. The weights are those whose tokens depend on the
KV; they take the same time.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable

import flood
import pd
import pd_load
import restart
from common import KV_BYTES_PER_TOKEN, LIVELY, Failed, OutOfTime, Process, Report, Stack, machine, say

PARTS = ("pd", "load", "flood", "restart")
KV_TOKENS = 400_000
ARENA_GB = 48
ARGS = ("--kv-cache-memory-bytes", str(KV_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.6", *LIVELY)
AGAIN_TOKENS = 100_000
AGAIN_ARGS = (
    "--kv-cache-memory-bytes", str(AGAIN_TOKENS * KV_BYTES_PER_TOKEN), "--gpu-memory-utilization", "0.3", *LIVELY,
)  # fmt: skip
"""Of the restarted engine, which finds another one on its GPU."""


def run(stack: Stack, report: Report, parts: tuple[str, ...] = PARTS) -> None:
    """The parts, in order. Raises Failed at the end where one of them has failed."""
    if unknown := set(parts) - set(PARTS):
        raise Failed(f"there is no part {', '.join(sorted(unknown))}: {', '.join(PARTS)}")
    num_gpus = len(machine()["gpus"].splitlines())
    if num_gpus < 2:
        raise Failed(f"two GPUs are needed, {num_gpus} is there")
    began_s = time.monotonic()
    cache = stack.cache_server(pd.CACHE_PORT, ARENA_GB)
    stack.wait_ready([cache], "/status")
    engines = {}
    for number, (name, port) in enumerate((("P", pd.P_PORT), ("D", pd.D_PORT))):
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 1_000), "CUDA_VISIBLE_DEVICES": str(number)}
        engines[name] = stack.engine(name, port, pd.both("kv_both"), *ARGS, **environment)
    stack.wait_ready(engines.values())
    for engine in engines.values():
        engine.check_reuse()
    report.note("engines ready, s", time.monotonic() - began_s, f"{time.monotonic() - began_s:.0f} s")
    measure(stack, report, cache, engines, parts)


def measure(
    stack: Stack, report: Report, cache: Process, engines: dict[str, Process], parts: tuple[str, ...] = PARTS
) -> None:
    """With the engines there."""
    both = pd.both("kv_both")
    steps: dict[str, Callable[[], None]] = {
        "pd": lambda: pd.measure(report, cache, list(engines.values()), (2_064, 8_208), 2),
        "load": lambda: pd_load.measure(stack, report, engines),
        "flood": lambda: flood.measure(stack, report, engines),
        "restart": lambda: restart.measure(stack, report, cache, engines["D"], both, *AGAIN_ARGS),
    }
    failures = []
    for part in PARTS:
        if part not in parts:
            continue
        began_s = time.monotonic()
        say(f"{part}:")
        try:
            steps[part]()
        except OutOfTime:
            raise
        except Exception as error:  # supervised: the next part is measured, and the failure told at the end
            failures.append(f"{part}: {error!r}")
            say(traceback.format_exc())
            report.note(f"{part} has failed", repr(error))
        report.note(f"{part}, s", time.monotonic() - began_s, f"{time.monotonic() - began_s:.0f} s")
    if failures:
        raise Failed("; ".join(failures))
