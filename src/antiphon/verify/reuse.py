"""Whether KV is really kept and found again: what the cache server holds, and what the prefill engine took from it.

Numbers come from where an operator reads them: ``/status`` of the cache server and the engine's own metrics.
"""

from __future__ import annotations

import asyncio
import json

from antiphon.config.plan import ProcessPlan
from antiphon.core.errors import StartError
from antiphon.engine.vllm import EngineMetrics, http_get, http_post, scrape_metrics
from antiphon.verify.check import Check

METRICS_TIMEOUT_S = 20.0
SETTLE_TIMEOUT_S = 20.0
"""Blocks of an answered request are free once they were handed over and stored, which takes a moment."""


class Reuse:
    """The two checks of reuse, between ``begin`` and ``checks``.

    Args:
        prefill: the prefill engine.
        decode: the decode engine.
        server: the prefill engine's cache server.
    """

    def __init__(self, prefill: ProcessPlan, decode: ProcessPlan, server: ProcessPlan) -> None:
        self._engines = (prefill, decode)
        self._prefill = prefill
        self._server = server
        self._num_objects = 0
        self._metrics = EngineMetrics(())

    async def begin(self) -> None:
        """Reads the counters before anything is asked."""
        self._num_objects = await self._read_num_objects()
        self._metrics = await scrape_metrics(self._prefill.base_url, timeout_s=METRICS_TIMEOUT_S)

    async def forget(self) -> None:
        """Empties the engines' own prefix caches. The cache servers keep what they have.

        Raises:
            StartError: an engine holds blocks all the time.
        """
        deadline = asyncio.get_running_loop().time() + SETTLE_TIMEOUT_S
        for engine in self._engines:
            while not await _reset(engine):
                if asyncio.get_running_loop().time() > deadline:
                    raise StartError(f"{engine.name} does not empty its prefix cache: its KV blocks stay in use")
                await asyncio.sleep(0.05)

    async def checks(self) -> list[Check]:
        """Whether chunks were stored, and whether the prefill engine found them."""
        num_objects = await self._read_num_objects()
        seen = f"total_object_count of {self._server.name} went from {self._num_objects} to {num_objects} chunks"
        metrics = await scrape_metrics(self._prefill.base_url, timeout_s=METRICS_TIMEOUT_S)
        asked, found = (
            (metrics.get(f"vllm:external_prefix_cache_{name}_total") or 0)
            - (self._metrics.get(f"vllm:external_prefix_cache_{name}_total") or 0)
            for name in ("queries", "hits")
        )
        share = found / asked if asked else 0.0
        rate = f"{share:.0%} of the tokens that {self._prefill.name} lacked: {found:.0f} of {asked:.0f}"
        return [
            Check("offload", num_objects > self._num_objects, seen),
            Check("external prefix cache hit rate", found > 0, rate),
        ]

    async def _read_num_objects(self) -> int:
        status, body = await http_get(f"{self._server.base_url}/status", timeout_s=METRICS_TIMEOUT_S)
        if status != 200:
            raise StartError(f"{self._server.name} does not tell its status: {body[:200]!r}")
        return int(json.loads(body)["storage_manager"]["l1_manager"]["total_object_count"])


async def _reset(engine: ProcessPlan) -> bool:
    """Whether the engine's prefix cache is empty; it refuses while blocks are in use."""
    status, body = await http_post(f"{engine.base_url}/reset_prefix_cache", timeout_s=METRICS_TIMEOUT_S)
    return status == 200 and bool(json.loads(body).get("success"))
