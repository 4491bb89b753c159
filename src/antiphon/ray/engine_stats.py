"""What an engine's ``/metrics`` says about its load, for Serve's ``record_autoscaling_stats``.

Owns which of vLLM's metrics are used, by names that the simulated engine has too. Invariant of :func:`engine_stats`:
all of ``autoscaling.STATISTICS`` or an error, so that a metric which is missing is never a load of nothing. What the
values mean for the size of a pool is decided in ``autoscaling.py``.

vLLM has no number of prompt tokens that wait: requests in the engine, times what a request has computed on average,
stand for them. Times of requests are summed there when a request ends, the time to the first token when that comes.
"""

from __future__ import annotations

import logging
import math

from antiphon.core.errors import ProtocolError, UpstreamError
from antiphon.engine.vllm import EngineMetrics, scrape_metrics
from antiphon.ray import autoscaling as names

log = logging.getLogger("antiphon.ray")

METRICS = {
    "vllm:num_requests_running": names.RUNNING,
    "vllm:num_requests_waiting": names.WAITING,
    "vllm:kv_cache_usage_perc": names.KV_USAGE,
    "vllm:time_to_first_token_seconds_count": names.FIRST_TOKENS,
    "vllm:time_to_first_token_seconds_sum": names.FIRST_TOKEN_S,
    "vllm:request_prefill_time_seconds_count": names.PREFILLS,
    "vllm:request_prefill_time_seconds_sum": names.PREFILL_S,
    "vllm:request_prefill_kv_computed_tokens_sum": names.COMPUTED_TOKENS,
}
WAITING_BY_REASON, DEFERRED = "vllm:num_requests_waiting_by_reason", "deferred"
"""Part of those that wait do so not for want of room: their KV is on its way, or they cannot run yet for another
reason. An engine without this metric is taken to have none of them."""
TIMEOUT_S = 5.0
"""Serve waits 10 s for the statistics of a replica."""


def engine_stats(metrics: EngineMetrics) -> dict[str, float]:
    """The values of ``autoscaling.STATISTICS``, summed over the ranks of an engine; their share of KV is the mean.

    Raises:
        ProtocolError: one is missing, or no finite number from 0 on.
    """
    found = {name: metrics.get(name) for name in METRICS}
    found["vllm:kv_cache_usage_perc"] = metrics.kv_usage
    stats: dict[str, float] = {}
    for name, value in found.items():
        if value is None:
            raise ProtocolError(f"the engine's metrics lack {name}", remedy="use a vLLM of the tested range")
        if not 0 <= value < math.inf:
            raise ProtocolError(f"{name} is {value}")
        stats[METRICS[name]] = value
    deferred = metrics.get(WAITING_BY_REASON, reason=DEFERRED) or 0.0
    stats[names.DEFERRED] = min(max(deferred, 0.0), stats[names.WAITING])
    stats[names.WAITING] -= stats[names.DEFERRED]
    assert stats.keys() == frozenset(names.STATISTICS)
    return stats


class StatsReader:
    """Asks one engine for its metrics; says once a change whether it can.

    Args:
        url: ``http://HOST:PORT`` of the engine.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._url = url
        self._timeout_s = timeout_s
        self._is_known = True

    async def read(self) -> dict[str, float]:
        """The engine's statistics; empty, and the reason in the log, while there are none."""
        try:
            stats = engine_stats(await scrape_metrics(self._url, timeout_s=self._timeout_s))
        except (UpstreamError, ProtocolError) as error:
            if self._is_known:
                log.warning("the load of the engine at %s is unknown: %s", self._url, error)
            self._is_known = False
            return {}
        if not self._is_known:
            log.info("the load of the engine at %s is known again", self._url)
        self._is_known = True
        return stats
