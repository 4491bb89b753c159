"""What the scheduler side is given: its bounds and names, and where its connection comes from. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from antiphon.client.session import Session


class SessionSource(Protocol):
    """Where the current session comes from, and where leases go (``client.CacheClient``)."""

    @property
    def session(self) -> Session | None:
        """The attached connection, or None."""

    def release(self, incarnation: str, request: str, lease: int) -> None:
        """Gives a lease of that life of the server back, now or later. Never waits."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What the scheduler side is told of the engine and of the connector's settings.

    Args:
        engine: name of the engine.
        incarnation: of this start of it.
        model: served model name.
        block_size_tokens: tokens of a KV block.
        chunk_size_tokens: tokens of a chunk, whole blocks.
        num_ranks: workers of the engine, each of which ends every store.
        lookup_timeout_s: without an answer for so long a lookup is a miss.
        can_store: whether chunks are offered to the server.
        can_load: whether they are asked for.
        store_jobs_max: stores that may run; further chunks are offered in later steps.
        onboard_max_s: longest wait of a lookup for chunks of the server's tiers; 0: what is in its memory counts.
        is_async: whether the engine plans a step while the one before it runs.
    """

    engine: str
    incarnation: str
    model: str
    block_size_tokens: int
    chunk_size_tokens: int
    num_ranks: int
    lookup_timeout_s: float
    can_store: bool
    can_load: bool
    store_jobs_max: int
    onboard_max_s: float = 0.0
    is_async: bool = False
