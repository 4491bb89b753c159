"""What goes out: one reply to every event, and notices of what happened besides. Values only.

A reply is a value or ``Refused`` with a typed error; after ``Refused`` nothing has changed. Notices tell the shell
what to publish and what to alarm, and, as a ``TierJob``, what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from antiphon.cache.arena import RegionHandle
from antiphon.cache.events import ConnectionId, EngineId, LeaseId, TicketId
from antiphon.cache.states import LeaseState
from antiphon.cache.tier_jobs import TierJob
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import AntiphonError, CacheError
from antiphon.core.namespace import NamespaceDigest


class Verdict(Enum):
    """The answer to ``Reserve`` for one chunk, true at the moment of the answer."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is Python code, on every count
    RESIDENT = "resident"
    """Readable: a lookup reports it."""
    WRITE = "write"
    """Not readable, and the caller should write the granted slabs."""
    BEING_WRITTEN = "being_written"
    """Not readable; the caller's missing slabs are reserved by another writer, or the caller is a writer itself."""
    PARTIAL = "partial"
    """Not readable; the caller's slabs are committed, other ranks' are missing."""
    REFUSED = "refused"
    """Not stored: no room, as ``Reserved.refusal`` says."""


class CommitOutcome(Enum):
    """What became of a committed region."""

    __hash__ = object.__hash__
    READABLE = "readable"
    """The chunk's last slab: a lookup reports it from this answer on."""
    PARTIAL = "partial"
    """Committed; other slabs of the chunk are missing."""
    DROPPED = "dropped"
    """The chunk was cleared, or lost another writer, while it was written: it will not be readable."""


class Removal(Enum):
    """Why a chunk left the index."""

    __hash__ = object.__hash__
    EVICTED = "evicted"
    """The policy's coldest chunk without children, for room."""
    EVICTED_FOR_QUOTA = "evicted_for_quota"
    """The tenant's coldest chunk without children, for the tenant's own room."""
    EVICTED_IN_WINDOW = "evicted_in_window"
    """It lay in the coldest contiguous window, where chunk sizes differ."""
    CLEARED = "cleared"
    ABANDONED = "abandoned"
    """Its writer aborted with nothing committed, or a writer's connection ended."""


# ---- replies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refused:
    """The call is refused and changed nothing."""

    error: AntiphonError


@dataclass(frozen=True, slots=True)
class Attached:
    """The connection is attached.

    Args:
        arena_bytes: bytes of the arena to map.
        usable_bytes: bytes usable so far.
    """

    arena_bytes: int
    usable_bytes: int


@dataclass(frozen=True, slots=True)
class Detached:
    """The connection is forgotten.

    Args:
        num_reservations: reservations that it left, their chunks dropped.
        num_leases_quarantined: leases whose quarantine begins with this end.
    """

    num_reservations: int
    num_leases_quarantined: int


@dataclass(frozen=True, slots=True)
class Found:
    """The answer to ``Lookup``.

    Args:
        lease: protects ``regions`` until it ends; None where nothing was found.
        regions: one a chunk, the contiguous readable prefix.
        num_tokens: tokens of that prefix.
        num_chunks_capped: readable chunks that follow it and were held back, as the engine's leases are at their cap.
        fetched: for each source beyond the arena, which chunks of the prefix came from there while this lookup waited.
    """

    lease: LeaseId | None
    regions: tuple[RegionHandle, ...]
    num_tokens: int
    num_chunks_capped: int
    fetched: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True, slots=True)
class Onboarding:
    """The first answer to a ``Lookup`` that waits for tiers; ``Onboarded`` follows, unless its connection ends.

    Args:
        ticket: names it in ``Onboarded``.
        num_tokens: tokens of the prefix that is readable now. They stay.
        num_tokens_max: tokens of the prefix if all comes that may.
        wait_s: the answer comes within this time.
    """

    ticket: TicketId
    num_tokens: int
    num_tokens_max: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class LeaseNoted:
    """The answer to ``Release``, ``CopyBegan`` and ``CopyEnded``: the state that the lease is in."""

    lease: LeaseId
    state: LeaseState


@dataclass(frozen=True, slots=True)
class Grant:
    """What a writer may write: these slabs of this region, until it commits or aborts."""

    key: ChunkKey
    region: RegionHandle
    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Reserved:
    """The answer to ``Reserve``.

    Args:
        verdicts: one a key, in the order of the keys.
        grants: one for each ``WRITE``, in the same order.
        refusal: why the first refused chunk has no room; None where none is refused. Later chunks of a prefix are of no
            use without it, so that those that would need new room are refused too.
    """

    verdicts: tuple[Verdict, ...]
    grants: tuple[Grant, ...]
    refusal: CacheError | None


@dataclass(frozen=True, slots=True)
class Committed:
    """The answer to ``Commit``: one outcome a region."""

    outcomes: tuple[CommitOutcome, ...]


@dataclass(frozen=True, slots=True)
class Aborted:
    """The answer to ``Abort``."""

    num_regions: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """The answer to ``Clear``.

    Args:
        num_chunks: chunks that left the index.
        freed_bytes: bytes that are free at once.
        held_bytes: bytes that become free when the leases and writers on them end.
        num_unpinned: pins that went with them.
    """

    num_chunks: int
    freed_bytes: int
    held_bytes: int
    num_unpinned: int = 0


@dataclass(frozen=True, slots=True)
class Pinned:
    """The answer to ``Pin``.

    Args:
        key: names the pin: the last chunk of the piece that is pinned.
        num_chunks: chunks of that piece, from the first of the prefix on.
        num_named: chunks of the whole prefix; what is not in the arena is not pinned when it comes.
        num_bytes: bytes of the piece.
        pinned_bytes: bytes that all pins keep, each chunk once.
        pinned_bytes_max: the most that they may keep.
    """

    key: ChunkKey
    num_chunks: int
    num_named: int
    num_bytes: int
    pinned_bytes: int
    pinned_bytes_max: int


@dataclass(frozen=True, slots=True)
class Unpinned:
    """The answer to ``Unpin``.

    Args:
        num_pins: pins that have ended.
        pinned_bytes: bytes that the others keep.
    """

    num_pins: int
    pinned_bytes: int


@dataclass(frozen=True, slots=True)
class QuotaSet:
    """The answer to ``SetQuota``.

    Args:
        quota_bytes: what holds for the tenant from here on; None means no quota.
        used_bytes: what it occupies: more than its quota only where the rest is protected or in quarantine.
        num_evicted: chunks of the tenant that went for it.
    """

    tenant: str
    quota_bytes: int | None
    used_bytes: int
    num_evicted: int


@dataclass(frozen=True, slots=True)
class TierNoted:
    """The answer to ``TierDone``."""


@dataclass(frozen=True, slots=True)
class ArenaResized:
    """The answer to ``ArenaGrew``."""

    usable_bytes: int


@dataclass(frozen=True, slots=True)
class Ticked:
    """The answer to ``Tick``.

    Args:
        next_deadline_s: when the next quarantine or alarm is due; None where nothing waits for time.
    """

    next_deadline_s: float | None


Reply = (
    Refused
    | Attached
    | Detached
    | Found
    | Onboarding
    | LeaseNoted
    | Reserved
    | Committed
    | Aborted
    | Cleared
    | Pinned
    | Unpinned
    | QuotaSet
    | TierNoted
    | ArenaResized
    | Ticked
)


# ---- notices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChunkStored:
    """A chunk became readable.

    Args:
        sequence: number of this event in the log of observers.
        parent: key of the chunk before it, None for the first of a sequence.
        at_s: when, by the clock of the steps.
    """

    sequence: int
    namespace: NamespaceDigest
    key: ChunkKey
    parent: ChunkKey | None
    model: str
    tenant: str
    num_bytes: int
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ChunkRemoved:
    """A chunk left the index.

    Args:
        sequence: number in the log of observers; None for a chunk that was never readable, which they were not told of.
        at_s: when, by the clock of the steps.
    """

    sequence: int | None
    namespace: NamespaceDigest
    key: ChunkKey
    model: str
    tenant: str
    num_bytes: int
    removal: Removal
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class LeaseAlarm:
    """A lease is older than ``lease_alarm_s``. Raised once; the lease goes on."""

    lease: LeaseId
    engine: EngineId
    request: str
    state: LeaseState
    age_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReservationAlarm:
    """A reservation is older than ``reservation_alarm_s``. Raised once; the reservation goes on."""

    connection: ConnectionId
    engine: EngineId
    key: ChunkKey
    age_s: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Onboarded:
    """The final answer to a lookup whose first was ``Onboarding``."""

    ticket: TicketId
    connection: ConnectionId
    found: Found


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The breaker of a tier has opened or closed, or what is written is refused, or taken again, while it is closed.
    ``reason``: of the failure that opened it, or what else is to be said."""

    name: str
    state: str
    reason: str


Notice = ChunkStored | ChunkRemoved | LeaseAlarm | ReservationAlarm | TierJob | Onboarded | TierChanged
Effect = Reply | Notice
