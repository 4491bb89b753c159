"""A snapshot of the cache in numbers. Values only; nothing here changes the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from antiphon.cache.books import Books, Counters
from antiphon.cache.events import EngineId, LeaseId
from antiphon.cache.states import ChunkState, LeaseState
from antiphon.cache.tenants import TokenCounts


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """One tenant. ``quota_bytes`` is None without a quota."""

    used_bytes: int
    quota_bytes: int | None
    tokens: TokenCounts


@dataclass(frozen=True, slots=True)
class Statistics:
    """The cache at one moment.

    Args:
        num_chunks: chunks that hold bytes, by state; READABLE is what lookups can report.
        num_bytes: their bytes, by state.
        free_bytes: usable bytes that no chunk holds.
        largest_hole_bytes: the largest chunk that fits without evicting.
        num_leases: leases that have not ended, by state.
        leased_bytes: bytes of the chunks that they protect, each chunk counted once for each engine.
        reserved_bytes: bytes of slabs that are reserved and not committed.
        num_pins: pins that have not ended.
        pinned_bytes: bytes of the chunks that they keep, each counted once.
        pinned_bytes_max: the most that they may keep.
        counters: totals since the start.
        tenants: by name.
        folded: tokens of tenants whose accounts gave way to others.
    """

    arena_bytes: int
    usable_bytes: int
    free_bytes: int
    largest_hole_bytes: int
    num_chunks: Mapping[ChunkState, int]
    num_bytes: Mapping[ChunkState, int]
    num_leases: Mapping[LeaseState, int]
    leased_bytes: int
    reserved_bytes: int
    num_pins: int
    pinned_bytes: int
    pinned_bytes_max: int
    num_connections: int
    num_engines: int
    next_event_sequence: int
    counters: Counters
    tenants: Mapping[str, TenantStatistics]
    folded: TokenCounts

    @property
    def hit_tokens(self) -> int:
        """Tokens that lookups found, over all tenants."""
        return self.folded.hit_tokens + sum(tenant.tokens.hit_tokens for tenant in self.tenants.values())

    @property
    def miss_tokens(self) -> int:
        """Tokens that lookups asked for and did not find, over all tenants."""
        return self.folded.miss_tokens + sum(tenant.tokens.miss_tokens for tenant in self.tenants.values())


@dataclass(frozen=True, slots=True)
class LeaseFacts:
    """One lease that has not ended. ``began_s`` by the clock of the steps."""

    lease: LeaseId
    engine: EngineId
    request: str
    state: LeaseState
    began_s: float
    num_bytes: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """One life of an engine that is attached or has leases."""

    engine: EngineId
    model: str
    leased_bytes: int


def leases(books: Books) -> list[LeaseFacts]:
    """Every lease that has not ended, oldest first."""
    return [
        LeaseFacts(
            lease.id, lease.engine.id, lease.request, lease.state, lease.began_s, lease.num_bytes, len(lease.chunks)
        )
        for lease in books.leases.active.values()
    ]


def engines(books: Books) -> list[EngineFacts]:
    """Every engine that is known, in the order in which they came."""
    return [EngineFacts(engine.id, engine.model, engine.leased_bytes) for engine in books.connections.engines.values()]


def take(books: Books) -> Statistics:
    """The snapshot; later steps do not change it."""
    num_leases: dict[LeaseState, int] = {state: 0 for state in LeaseState if state is not LeaseState.ENDED}
    for lease in books.leases.active.values():
        num_leases[lease.state] += 1
    return Statistics(
        arena_bytes=books.arena.size_bytes,
        usable_bytes=books.arena.usable_bytes,
        free_bytes=books.arena.free_bytes,
        largest_hole_bytes=books.arena.largest_hole_bytes,
        num_chunks={state: count for state, count in books.num_chunks.items() if state is not ChunkState.FREED},
        num_bytes={state: count for state, count in books.num_bytes.items() if state is not ChunkState.FREED},
        num_leases=num_leases,
        leased_bytes=sum(engine.leased_bytes for engine in books.connections.engines.values()),
        reserved_bytes=sum(connection.reserved_bytes for connection in books.connections.connections.values()),
        num_pins=len(books.pins.pins),
        pinned_bytes=books.pins.pinned_bytes,
        pinned_bytes_max=books.pins.num_bytes_max,
        num_connections=len(books.connections.connections),
        num_engines=len(books.connections.engines),
        next_event_sequence=books.log.next_sequence,
        counters=dataclasses.replace(books.counters),
        tenants={
            account.name: TenantStatistics(account.used_bytes, account.quota_bytes, dataclasses.replace(account.counts))
            for account in books.tenants.accounts.values()
        },
        folded=dataclasses.replace(books.tenants.folded),
    )
