"""Bounds and choices of routing, each with its unit. The shell fills them from the spec; nothing here reads one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from antiphon.routing.prefix_index import ENGINE_MAX_BYTES, ENTRIES_MAX

ENDPOINTS_MAX = 1024
"""Endpoints of a pool, as many as the spec takes."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """How engines are picked and judged.

    Args:
        prefill_policy, decode_policy: names from ``policies.POLICIES``.
        load_factor: consistent_hash, prefix_aware and warm pairs yield at an engine that has this many times the
            mean load.
        prefix_entries_max: prefixes that are remembered of all engines together; about 300 bytes each.
        prefix_bytes_max: bytes of prompts that are remembered of one engine: as much as its KV holds.
        is_prefill_awaited: prefill engines may come later: while there are none, requests are not without that pool.
        prefers_warm_pairs: a decode engine that has pulled from the prefill engine before goes first.
        failed_probes_max: health checks that fail in a row before an engine is down; a busy one is slow, not dead.
        good_probes_min: health checks that succeed in a row before a suspect is ready, where no request was the cause.
        failures_max: requests that fail in a row before a ready engine is suspect.
        error_share_max: share of failed requests, over about the last ``error_window``, that makes it suspect.
        error_window: requests that the share is taken over.
        open_min_s, open_max_s: how long a failed engine is left alone: doubled each time, with jitter.
        retry_share: retries allowed for each request.
        retry_floor: retries allowed however few requests there are.
        retry_floor_per_s: how fast that floor comes back.
        retries_saved_max: allowances that can be saved up, so that a killed engine's requests can all be retried.
    """

    prefill_policy: str = "round_robin"
    decode_policy: str = "round_robin"
    load_factor: float = 1.25
    prefix_entries_max: int = ENTRIES_MAX
    prefix_bytes_max: int = ENGINE_MAX_BYTES
    is_prefill_awaited: bool = False
    prefers_warm_pairs: bool = False
    failed_probes_max: int = 3
    good_probes_min: int = 2
    failures_max: int = 3
    error_share_max: float = 0.5
    error_window: int = 20
    open_min_s: float = 0.5
    open_max_s: float = 30.0
    retry_share: float = 0.2
    retry_floor: float = 32.0
    retry_floor_per_s: float = 1.0
    retries_saved_max: float = 1000.0


@dataclass(frozen=True, slots=True)
class LifeOptions:
    """Stage deadlines and retries of a request, in seconds.

    Args:
        connect_s: to make one connection.
        prefill_s: from a connected prefill engine to its answer.
        handover_s: after a prefill's answer, in which its handle may be sent; some seconds less than the lease.
        first_token_s: from sending a decode request to its first byte.
        idle_s: between two bytes of an answer.
        abort_grace_s: how long a decode request with a handle is held after its client left, so that it is admitted.
        prefills_max: prefill requests sent for one request, the first and the fresh one after a hand-over counted.
        backoff_min_s, backoff_max_s: the wait before the only prefill engine is tried again.
        prefill_fallback: what happens when every prefill engine has failed: tell the client, or prefill on the
            decode engine.
        is_kept: KV is handed over through cache servers: the prefill engine holds nothing for it, and a handle can be
            sent again, whatever becomes of that engine.
    """

    connect_s: float = 5.0
    prefill_s: float = 120.0
    handover_s: float = 20.0
    first_token_s: float = 120.0
    idle_s: float = 120.0
    abort_grace_s: float = 1.0
    prefills_max: int = 3
    backoff_min_s: float = 0.05
    backoff_max_s: float = 1.0
    prefill_fallback: Literal["fail", "local"] = "fail"
    is_kept: bool = False
