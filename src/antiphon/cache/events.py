"""What comes in: calls of engines, and facts that the shell has seen. Values only.

Every event is answered by exactly one reply (``effects``), the first effect of its step. Keys and namespaces are
digests (``core.chunks``, ``core.namespace``); the caller chains them, and the cache checks that a key, its namespace,
the tenant and the layout belong together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

from antiphon.cache.arena import RegionHandle
from antiphon.cache.tier_jobs import JobId, Outcome
from antiphon.cache.tier_key import TierKey
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest

ConnectionId = NewType("ConnectionId", int)
"""Names a connection; the shell gives each a new one."""

LeaseId = NewType("LeaseId", int)

TicketId = NewType("TicketId", int)
"""Names a lookup that waits for tiers."""


@dataclass(frozen=True, slots=True)
class EngineId:
    """One life of an engine: its name, and the incarnation of this start."""

    name: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Attach:
    """A process of an engine registers.

    Args:
        connection: new.
        engine: shared by all processes of one engine.
        model: served model name, by which ``Clear`` can select.
        chunk_size_tokens: must be the cache's.
        layout: the same for all processes of the engine.
        slabs: the slabs that this process writes; empty for one that only looks up (a scheduler).
    """

    connection: ConnectionId
    engine: EngineId
    model: str
    chunk_size_tokens: int
    layout: ChunkLayout
    slabs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Detach:
    """The peer's end of file was seen: the process is gone or will touch the arena no more.

    It must not be sent because this side closed the socket: such a process may still be copying.
    """

    connection: ConnectionId


@dataclass(frozen=True, slots=True)
class HandedOver:
    """A prefill engine has stored the first chunks of a lookup, or is storing them: they are waited for.

    Args:
        num_chunks: of the lookup's keys, from the first on.
        is_here: it stores them in this cache; else in another, from where a tier brings them.
    """

    num_chunks: int
    is_here: bool


@dataclass(frozen=True, slots=True)
class Lookup:
    """How much of this prefix is readable? What is reported is leased to the request.

    Args:
        request: the engine's id of the request, owner of the lease.
        tenant: whose quota and statistics; a namespace belongs to one tenant.
        keys: the prefix from its first chunk on.
        onboard_s: how long it may wait for chunks of tiers; 0: what is in the arena is the answer.
        prefill_tokens_per_s: how fast the caller computes what it does not find; 0 where it does not know. The wait is
            shorter than that.
        handed_over: what a prefill engine has left for it; None where there is none.
    """

    connection: ConnectionId
    request: str
    namespace: NamespaceDigest
    tenant: str
    keys: tuple[ChunkKey, ...]
    onboard_s: float = 0.0
    prefill_tokens_per_s: float = 0.0
    handed_over: HandedOver | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The owner needs the lease no more, and its copies have ended or were announced by ``CopyBegan``."""

    connection: ConnectionId
    request: str
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class CopyBegan:
    """A process of the owner's engine copies out of the leased regions. Refused once the lease has ended."""

    connection: ConnectionId
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class CopyEnded:
    """That copy has ended, well or not: its process touches the regions no more."""

    connection: ConnectionId
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Reserve:
    """Which of these chunks are resident, and which should this process write?

    Args:
        parent: key of the chunk before the first of ``keys``; None where that is the first chunk of the sequence.
        keys: consecutive chunks of one sequence.
    """

    connection: ConnectionId
    namespace: NamespaceDigest
    tenant: str
    parent: ChunkKey | None
    keys: tuple[ChunkKey, ...]


@dataclass(frozen=True, slots=True)
class Commit:
    """The copies into these reserved regions are complete. All or none: one stale handle refuses the call."""

    connection: ConnectionId
    regions: tuple[RegionHandle, ...]


@dataclass(frozen=True, slots=True)
class Abort:
    """The writer gives these reservations up, and writes to their regions no more. All or none, as ``Commit``."""

    connection: ConnectionId
    regions: tuple[RegionHandle, ...]


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget chunks: of one tenant, of one model, of both, or, with neither, all.

    Args:
        spares_pinned: refuse where one of them is pinned. An engine that clears says that what it has stored is not
            true any more: then pins go too.
    """

    tenant: str | None = None
    model: str | None = None
    spares_pinned: bool = False


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep a prefix in the arena, as far as it is there in one piece: its chunks are not evicted.

    Args:
        keys: consecutive chunks of one sequence. Where the first is not the first of its sequence, those before it are
            meant too: one key stands for the whole prefix up to it.
        ttl_s: how long; None: until ``Unpin``. Said again of the same piece, it counts anew.
    """

    keys: tuple[ChunkKey, ...]
    ttl_s: float | None = None


@dataclass(frozen=True, slots=True)
class Unpin:
    """End the pin of that name (``Pinned.key``), or, with None, all."""

    key: ChunkKey | None = None


@dataclass(frozen=True, slots=True)
class SetQuota:
    """From here on the tenant may occupy ``quota_bytes``; None: what tenants without a quota of their own may.

    Where it occupies more, its coldest chunks go, as far as nothing protects them.
    """

    tenant: str
    quota_bytes: int | None


@dataclass(frozen=True, slots=True)
class TierDone:
    """A job of a tier has really ended: its thread touches the arena no more.

    Args:
        job: as in its ``TierJob``.
        found: of ``ASK``: one a key.
        gone: of ``ASK``, one a key or none at all: whether it is known that a chunk that was handed over does not come.
        keys: of ``LIST``: what is there, or None where the tier cannot say; of ``CLEAR``: what was removed.
        num_paged: of ``CLEAR``: records that were removed page by page, beside ``keys``.
        is_whole: of ``CLEAR``: whether all of it was gone through; else another job goes on.
        reason: for people, where it failed.
    """

    job: JobId
    outcome: Outcome
    found: tuple[bool, ...] = ()
    gone: tuple[bool, ...] = ()
    keys: tuple[TierKey, ...] | None = None
    num_paged: int = 0
    is_whole: bool = True
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ArenaGrew:
    """The shell has populated more of the arena.

    Args:
        usable_bytes: bytes populated from the start of the arena, never less than before.
    """

    usable_bytes: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Every step looks at the time; this one does nothing else."""


Event = (
    Attach
    | Detach
    | Lookup
    | Release
    | CopyBegan
    | CopyEnded
    | Reserve
    | Commit
    | Abort
    | Clear
    | Pin
    | Unpin
    | SetQuota
    | TierDone
    | ArenaGrew
    | Tick
)
