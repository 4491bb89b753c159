"""What the admin side asks of the server: all of it answered at once from memory, in the loop that serves the calls.

``CacheServer`` has this shape; tests give a stand-in for what is hard to bring about.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol

from antiphon.cache.effects import Reply
from antiphon.cache.events import Clear, Pin, SetQuota, Unpin
from antiphon.cache.listing import ChunkPage
from antiphon.cache.log import LogPage
from antiphon.cache.machine import Cache
from antiphon.cache.statistics import Statistics
from antiphon.cache.tiers import TierStatistics
from antiphon.cache_server.metrics import CallTallies
from antiphon.cache_server.views import EngineView, LeaseView, Population, ReportPage, TokenTotals
from antiphon.config.cache_server_spec import CacheServerSpec


class ServerView(Protocol):
    """A cache server as its admin side sees it."""

    @property
    def spec(self) -> CacheServerSpec: ...
    @property
    def instance(self) -> str: ...
    @property
    def incarnation(self) -> str: ...
    @property
    def started_at(self) -> float:
        """Seconds since 1970."""

    @property
    def socket_path(self) -> str: ...
    @property
    def token_totals(self) -> TokenTotals: ...
    @property
    def call_counts(self) -> Mapping[tuple[str, str], int]:
        """By the name of the call and its outcome: ``ok``, or an error code."""

    @property
    def tallies(self) -> CallTallies: ...
    @property
    def population(self) -> Population: ...
    @property
    def cache(self) -> Cache:
        """To be read; ``control`` changes it."""

    @property
    def now_s(self) -> float:
        """By the clock of the cache's steps."""

    @property
    def peers(self) -> dict[str, object] | None:
        """What is shared with other cache servers; None where nothing is."""

    def statistics(self) -> Statistics: ...
    def engines(self) -> list[EngineView]: ...
    def tiers(self) -> list[tuple[TierStatistics, tuple[int, int, int | None]]]:
        """What the plan counts of each tier, and its records, bytes and most bytes."""

    @property
    def handoffs(self) -> Counter[str]: ...

    def leases(self) -> list[LeaseView]:
        """Oldest first."""

    def events_since(self, sequence: int, num_events_max: int) -> LogPage:
        """Raises ValueError beyond the log."""

    def chunks_after(self, generation: int, num_chunks_max: int) -> ChunkPage:
        """Readable chunks of later generations; 0 begins."""

    def reports_since(self, sequence: int, num_reports_max: int) -> ReportPage:
        """Raises ValueError beyond the log."""

    async def wait_events(self, sequence: int, timeout_s: float) -> bool:
        """Whether an event of that number or later is there, within ``timeout_s``."""

    async def wait_reports(self, sequence: int, timeout_s: float) -> bool:
        """Whether a report of that number or later is there, within ``timeout_s``."""

    def control(self, event: Clear | Pin | Unpin | SetQuota) -> Reply:
        """What an operator asks for. Raises AntiphonError where it is refused."""

    def loops_alive(self) -> Mapping[str, bool]: ...
