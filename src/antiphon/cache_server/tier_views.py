"""What the server shows of its tiers, in ``/status`` and ``/metrics``. Nothing here waits or changes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from antiphon.cache.breaker import BreakerState
from antiphon.cache.tiers import TierStatistics
from antiphon.observe import cache_metrics as names
from antiphon.observe.cache_metrics import MetricsPage

Usage = tuple[int, int, int | None]
Shown = Sequence[tuple[TierStatistics, Usage]]


def l2_of(tiers: Shown) -> dict[str, object]:
    """The part of ``/status``; nothing without tiers."""
    return {"l2_tiers": [_tier_of(*tier) for tier in tiers]} if tiers else {}


def _tier_of(tier: TierStatistics, usage: Usage) -> dict[str, object]:
    counts = tier.counts
    num_chunks, held_bytes, capacity_bytes = usage
    return {
        "name": tier.name,
        "store": tier.store,
        "is_healthy": tier.breaker is BreakerState.CLOSED,
        "breaker": tier.breaker.value,
        "reason": tier.reason or None,
        "total_object_count": num_chunks,
        "held_bytes": held_bytes,
        "capacity_bytes": capacity_bytes,
        "known_count": tier.num_known,
        "is_known_complete": tier.is_complete,
        "jobs": tier.num_running,
        "clears_pending": tier.num_clears,
        "queue": {
            "bytes": tier.queued_bytes,
            "bytes_max": tier.queue_bytes_max,
            "chunks": tier.num_waiting,
            "later": tier.num_dirty,
            "is_paused": tier.is_paused,
        },
        "fetches": {
            "hit": counts.num_fetched,
            "miss": counts.num_missing,
            "corrupt": counts.num_corrupt,
            "bytes": counts.fetched_bytes,
            "seconds": round(counts.fetch_s, 6),
        },
        "publications": {
            "published": counts.num_published,
            "refused": counts.num_refused,
            "lost": counts.num_lost,
            "full": counts.num_full,
            "promoted": counts.num_promoted,
            "bytes": counts.published_bytes,
            "seconds": round(counts.publish_s, 6),
        },
        "failures": {"failed": counts.num_failed, "overdue": counts.num_overdue, "opened": tier.num_opened},
    }


def set_tiers(page: MetricsPage, tiers: Shown) -> None:
    """The series of the tiers; none without tiers."""
    for metric, values in _series(tiers).items():
        page.set_labeled(metric, values)


def _series(tiers: Shown) -> dict[names.Metric, dict[tuple[str, ...], float]]:
    plain: dict[names.Metric, Callable[[TierStatistics, Usage], float]] = {
        names.TIER_OPENED: lambda tier, usage: tier.num_opened,
        names.TIER_CHUNKS: lambda tier, usage: tier.num_known,
        names.TIER_HELD_BYTES: lambda tier, usage: usage[1],
        names.TIER_QUEUE_BYTES: lambda tier, usage: tier.queued_bytes,
        names.TIER_JOBS: lambda tier, usage: tier.num_running,
        names.TIER_FETCHED_BYTES: lambda tier, usage: tier.counts.fetched_bytes,
        names.TIER_FETCH_SECONDS: lambda tier, usage: tier.counts.fetch_s,
        names.TIER_PUBLISHED_BYTES: lambda tier, usage: tier.counts.published_bytes,
        names.TIER_PUBLISH_SECONDS: lambda tier, usage: tier.counts.publish_s,
    }
    series: dict[names.Metric, dict[tuple[str, ...], float]] = {
        metric: {(tier.name,): value(tier, usage) for tier, usage in tiers} for metric, value in plain.items()
    }
    labeled: dict[names.Metric, Callable[[TierStatistics], dict[str, int | bool]]] = {
        names.TIER_BREAKER: lambda tier: {state.value: state is tier.breaker for state in BreakerState},
        names.TIER_FETCHES: lambda tier: {
            "hit": tier.counts.num_fetched,
            "miss": tier.counts.num_missing,
            "corrupt": tier.counts.num_corrupt,
        },
        names.TIER_PUBLICATIONS: lambda tier: {
            "published": tier.counts.num_published,
            "refused": tier.counts.num_refused,
            "lost": tier.counts.num_lost,
            "full": tier.counts.num_full,
        },
        names.TIER_FAILURES: lambda tier: {"failed": tier.counts.num_failed, "overdue": tier.counts.num_overdue},
    }
    for metric, values in labeled.items():
        series[metric] = {(tier.name, label): value for tier, _ in tiers for label, value in values(tier).items()}
    return series
