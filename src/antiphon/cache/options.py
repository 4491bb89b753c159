"""Every bound of the cache, once, with its unit and reason.

Nothing is cut off in silence at a bound: what exceeds it is refused with a typed error, or reported as a count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from antiphon.core.chunks import CHUNK_SIZE_TOKENS
from antiphon.core.units import KIB

PAGE_BYTES = 4 * KIB


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """How large the cache is, and where its limits are.

    Args:
        arena_bytes: bytes of the arena when it is wholly populated.
        usable_bytes: bytes populated at the start; None means all. It grows by ``ArenaGrew``.
        chunk_size_tokens: tokens of a chunk; an engine with another size is refused at ``Attach``.
        alignment_bytes: every region starts and ends at a multiple: a page, which direct disk access and pinning ask
            for.
        eviction_policy: ``lru``, or ``arc`` (resists scans).
        quarantine_s: seconds between the end of a connection and the reuse of the bytes that it could touch: the DMA of
            a dying process ends well within one second.
        lease_alarm_s: age in seconds at which a lease raises an alarm; it is never ended by it. A load takes far less.
        reservation_alarm_s: the same for a reservation that is neither committed nor aborted.
        leased_share_max: share of the arena that the leases of one engine may protect, each chunk counted once; past it
            a lookup reports a shorter prefix. It keeps one engine from pinning the arena.
        leases_per_engine_max: leases that one engine may have, each for a request; past it a lookup reports nothing. It
            keeps an engine that never releases from filling the server's memory with leases on the same chunks.
        reserved_share_max: share of the arena that one connection may have reserved and not committed; past it chunks
            are refused. It keeps a writer that never commits from filling the arena.
        pinned_share_max: share of the arena that pins may keep, each chunk counted once; past it a pin is refused. It
            leaves room for what comes.
        pins_max: pins at once, each of one prefix; past it a pin is refused.
        quota_bytes: bytes that a tenant may occupy, by tenant, at the start.
        quotas_max: tenants that may be given a quota while the cache runs, beside those of ``quota_bytes``; past it
            ``SetQuota`` is refused.
        default_quota_bytes: the same for tenants not named; None means no quota.
        keys_per_call_max: chunk keys of one call: 16384 are 4 M tokens, past any context length; a larger call is
            refused.
        tenants_max: accounts of tenants that have no quota of their own. Past it the account that was idle longest is
            folded into ``Statistics.folded``; where all hold something, new tenants store into one that they share.
        own_tenants: tenants that have an account of their own past that bound, as those of ``quota_bytes`` have.
        event_log_max: events kept for observers, about 300 bytes each; who reads too late is told how many are lost.
        victims_tried_max: chunks that the policy may offer before the arena is searched for the coldest contiguous
            window. More than one matters only where chunk sizes differ.
        ghost_share_max: ``arc`` remembers the keys of evicted chunks whose bytes add up to this share of the arena.
    """

    arena_bytes: int
    usable_bytes: int | None = None
    chunk_size_tokens: int = CHUNK_SIZE_TOKENS
    alignment_bytes: int = PAGE_BYTES
    eviction_policy: str = "lru"
    quarantine_s: float = 1.0
    lease_alarm_s: float = 60.0
    reservation_alarm_s: float = 60.0
    leased_share_max: float = 0.5
    leases_per_engine_max: int = 16_384
    reserved_share_max: float = 0.5
    pinned_share_max: float = 0.5
    pins_max: int = 1_024
    quota_bytes: Mapping[str, int] = field(default_factory=dict)
    quotas_max: int = 1_024
    default_quota_bytes: int | None = None
    keys_per_call_max: int = 16_384
    tenants_max: int = 4_096
    own_tenants: frozenset[str] = frozenset()
    event_log_max: int = 32_768
    victims_tried_max: int = 8
    ghost_share_max: float = 2.0

    def __post_init__(self) -> None:
        usable = self.initial_usable_bytes
        if self.alignment_bytes < 1 or self.arena_bytes < self.alignment_bytes:
            raise ValueError(f"the arena ({self.arena_bytes} bytes) holds no unit of {self.alignment_bytes} bytes")
        if self.arena_bytes % self.alignment_bytes or usable % self.alignment_bytes:
            raise ValueError(f"arena_bytes and usable_bytes must be multiples of {self.alignment_bytes}")
        if not 0 <= usable <= self.arena_bytes:
            raise ValueError(f"usable_bytes must be from 0 to {self.arena_bytes}, not {usable}")
        for name in ("quarantine_s", "lease_alarm_s", "reservation_alarm_s", "ghost_share_max"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
        for name in ("leased_share_max", "reserved_share_max", "pinned_share_max"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1")
        for name in (
            "chunk_size_tokens",
            "keys_per_call_max",
            "leases_per_engine_max",
            "pins_max",
            "quotas_max",
            "tenants_max",
            "event_log_max",
            "victims_tried_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")

    @property
    def initial_usable_bytes(self) -> int:
        """Bytes that are populated at the start."""
        return self.arena_bytes if self.usable_bytes is None else self.usable_bytes

    @property
    def leased_bytes_max(self) -> int:
        """Bytes that the leases of one engine may hold."""
        return int(self.arena_bytes * self.leased_share_max)

    @property
    def reserved_bytes_max(self) -> int:
        """Bytes that one connection may have reserved and not committed."""
        return int(self.arena_bytes * self.reserved_share_max)

    @property
    def pinned_bytes_max(self) -> int:
        """Bytes that all pins may keep."""
        return int(self.arena_bytes * self.pinned_share_max)
