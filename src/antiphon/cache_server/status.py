"""What the server shows of itself as JSON: ``/status``, ``/leases``, ``/chunks``, entries of ``/events``, ``/reports``.

The self-probe is left out everywhere: its chunk, lookups, engine, tenant and events; so are the lookups and the tenant
of the engines' gates. Nothing here waits or changes
anything.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Final

from antiphon import __version__
from antiphon.cache.effects import ChunkRemoved, ChunkStored
from antiphon.cache.states import ChunkState
from antiphon.cache.statistics import Statistics, TenantStatistics
from antiphon.cache_server.admin_view import ServerView
from antiphon.cache_server.metrics import without_probe
from antiphon.cache_server.probe import PROBE_NAME, ProbeResult, ProbeTally
from antiphon.cache_server.tier_views import l2_of
from antiphon.cache_server.views import EngineView, LeaseView, TokenReport
from antiphon.protocol.cache import GATE_TENANT

LEASES_MAX: Final = 1_000
"""Leases of one answer, oldest first; how many more there are is said."""

CHUNKS_MAX: Final = 4_096
"""Chunks of one page of ``/chunks``: 270 KB, made in some milliseconds in which no call is answered."""

Json = dict[str, object]


def health_of(server: ServerView, probe: ProbeResult, now_s: float) -> Json:
    """The body of ``/healthz``; healthy while ``reason`` is None. ``now_s``: of the clock of ``probe.ended_s``."""
    loops = dict(server.loops_alive())
    dead = sorted(name for name, is_alive in loops.items() if not is_alive)
    reason = None
    if dead:
        reason = f"a loop of the server has ended: {', '.join(dead)}; restart the server"
    elif not probe.is_ok:
        reason = f"the self-probe failed at {probe.step}: {probe.detail}"
    population = server.population
    return {
        "status": "ok" if reason is None else "unhealthy",
        "reason": reason,
        "incarnation": server.incarnation,
        "probe": {
            "is_ok": probe.is_ok,
            "step": probe.step,
            "detail": probe.detail,
            "took_ms": round(probe.took_s * 1e3, 3),
            "age_ms": round(max(0.0, now_s - probe.ended_s) * 1e3, 3),
        },
        "loops": loops,
        "populated_ratio": round(population.populated_bytes / population.total_bytes, 4),
        "population_error": population.error,
    }


def status_of(server: ServerView, health: Json, tally: ProbeTally) -> Json:
    """The body of ``/status``."""
    statistics = server.statistics()
    leases = [lease for lease in server.leases() if lease.engine != PROBE_NAME]
    engines = [engine for engine in server.engines() if engine.engine != PROBE_NAME]
    totals = server.token_totals
    chunk_size_tokens = server.spec.chunk_size
    hit_tokens = statistics.hit_tokens - tally.num_hit_chunks * chunk_size_tokens
    lookup_tokens = statistics.hit_tokens + statistics.miss_tokens - tally.num_lookup_chunks * chunk_size_tokens
    gates = statistics.tenants.get(GATE_TENANT)
    if gates is not None:
        hit_tokens -= gates.tokens.hit_tokens
        lookup_tokens -= gates.tokens.hit_tokens + gates.tokens.miss_tokens
    return {
        "is_healthy": health["reason"] is None,
        "reason": health["reason"],
        "instance": server.instance,
        "incarnation": server.incarnation,
        "version": __version__,
        "uptime_s": round(max(0.0, time.time() - server.started_at), 3),
        "chunk_size_tokens": chunk_size_tokens,
        "eviction_policy": server.spec.eviction_policy,
        "storage_manager": {"l1_manager": _l1_of(server, statistics, leases, tally)} | l2_of(server.tiers()),
        "tokens": {
            "lookup": lookup_tokens,
            "hit": hit_tokens,
            "reported": {
                "device": totals.device,
                "l1": totals.l1,
                "l2": totals.l2,
                "peer": totals.peer,
                "remote_prefill": totals.remote_prefill,
                "computed": totals.computed,
            },
        },
        "reports": {
            "count": totals.num_reports,
            "prompt_tokens": totals.num_prompt_tokens,
            "mismatched": totals.num_mismatched,
            "aborted": totals.num_aborted,
        },
        "leases": _leases_summary(leases, engines),
        "pins": {
            "count": statistics.num_pins,
            "pinned_bytes": statistics.pinned_bytes,
            "pinned_bytes_max": statistics.pinned_bytes_max,
        },
        "handoffs": dict(server.handoffs),
        "engines": [dataclasses.asdict(engine) for engine in engines],
        "tenants": _tenants_of(statistics.tenants),
    } | ({} if server.peers is None else {"peers": server.peers})


def _l1_of(server: ServerView, statistics: Statistics, leases: list[LeaseView], tally: ProbeTally) -> Json:
    num_readable, used_bytes = without_probe(statistics, tally)
    population = server.population
    return {
        "is_healthy": population.error is None,
        "detail": population.error,
        "total_object_count": num_readable,
        "memory_used_bytes": used_bytes,
        "memory_total_bytes": statistics.arena_bytes,
        "memory_usable_bytes": statistics.usable_bytes,
        "memory_usage_ratio": round(used_bytes / statistics.arena_bytes, 6),
        "read_locked_count": sum(lease.num_chunks for lease in leases),
        "write_locked_count": statistics.num_chunks[ChunkState.INCOMPLETE],
    }


def _leases_summary(leases: list[LeaseView], engines: list[EngineView]) -> Json:
    by_state: dict[str, int] = {}
    for lease in leases:
        by_state[lease.state] = by_state.get(lease.state, 0) + 1
    return {
        "count": len(leases),
        "by_state": by_state,
        "leased_bytes": sum(engine.leased_bytes for engine in engines),
        "oldest_age_s": round(max((lease.age_s for lease in leases), default=0.0), 3),
    }


def _tenants_of(tenants: Mapping[str, TenantStatistics]) -> Json:
    return {
        name: {
            "used_bytes": tenant.used_bytes,
            "quota_bytes": tenant.quota_bytes,
            "tokens": {
                "hit": tenant.tokens.hit_tokens,
                "miss": tenant.tokens.miss_tokens,
                "stored": tenant.tokens.stored_tokens,
                "evicted": tenant.tokens.evicted_tokens,
                "refused": tenant.tokens.refused_tokens,
            },
        }
        for name, tenant in tenants.items()
        if name not in (PROBE_NAME, GATE_TENANT)
    }


def leases_of(server: ServerView) -> Json:
    """The body of ``/leases``: at most ``LEASES_MAX``, oldest first."""
    leases = [lease for lease in server.leases() if lease.engine != PROBE_NAME]
    shown = leases[:LEASES_MAX]
    return {
        "incarnation": server.incarnation,
        "count": len(leases),
        "num_left_out": len(leases) - len(shown),
        "leases": [dataclasses.asdict(lease) | {"age_s": round(lease.age_s, 3)} for lease in shown],
    }


def event_of(event: ChunkStored | ChunkRemoved) -> Json | None:
    """An entry of ``/events``; None for the probe's. ``at``: when, in seconds since 1970."""
    if event.tenant == PROBE_NAME:
        return None
    common: Json = {
        "sequence": event.sequence,
        "kind": "stored" if isinstance(event, ChunkStored) else "removed",
        "namespace": event.namespace.hex(),
        "key": event.key.hex(),
        "model": event.model,
        "tenant": event.tenant,
        "num_bytes": event.num_bytes,
        "at": round(event.at_s + time.time() - time.monotonic(), 3),
    }
    if isinstance(event, ChunkStored):
        return common | {"parent": event.parent.hex() if event.parent is not None else None}
    return common | {"reason": event.removal.value}


def chunks_of(server: ServerView, after: int) -> Json:
    """The body of ``/chunks``: at most ``CHUNKS_MAX`` readable chunks; without the probe's."""
    page = server.chunks_after(after, CHUNKS_MAX)
    return {
        "incarnation": server.incarnation,
        "next": page.next_sequence,
        "after": page.after,
        "chunk_size_tokens": server.spec.chunk_size,
        "chunks": [
            {
                "namespace": group.namespace.hex(),
                "model": group.model,
                "tenant": group.tenant,
                "keys": b"".join(group.keys).hex(),
            }
            for group in page.groups
            if group.tenant != PROBE_NAME
        ],
    }


def report_of(report: TokenReport) -> Json:
    """An entry of ``/reports``."""
    return dataclasses.asdict(report)
