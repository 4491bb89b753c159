"""What of the cache can be lent to other cache servers: which tier keys stand for which chunks, and leases on them.

A peer names a chunk by its tier key (``tier_key``), into which tenant, model, namespace and layout enter. The ``Shelf``
knows the tier keys of all readable chunks and numbers their changes, for a directory; ``lend`` leases one chunk.

Always true:

- After ``follow`` the shelf has exactly the readable chunks that may leave this server: those of private tenants and of
  Antiphon's own may not.
- What is lent is readable, means what the borrower says, and stays until the lease ends, as any lease does.

It does not count a loan as a lookup: hits and misses are those of engines. It does not know who the borrowers are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import ChunkStored
from antiphon.cache.events import ConnectionId, LeaseId
from antiphon.cache.index import Chunk
from antiphon.cache.machine import Cache
from antiphon.cache.states import ChunkState
from antiphon.cache.tier_key import Meaning, TierKey, meaning_of
from antiphon.core.chunks import ChunkKey
from antiphon.core.namespace import FORMAT_VERSION, NamespaceDigest

__all__ = ["HeldState", "Loan", "Shelf", "Wanted", "held_state", "lend"]

HeldState = Literal["unseen", "reserved", "readable", "refused"]

OWN_TENANTS: Final = "antiphon."
"""Tenants of the self-probe and of engines' gates begin so; no request's does."""

_PAGE_EVENTS: Final = 1_024
_PAGE_CHUNKS: Final = 4_096


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the bytes of a chunk must mean to its borrower, beside its tier key."""

    namespace: NamespaceDigest
    fingerprint: str | None
    num_bytes: int
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, slots=True)
class Loan:
    """One lent chunk: its lease, and where its bytes are."""

    lease: LeaseId
    region: RegionHandle
    num_bytes: int


class Shelf:
    """The tier keys of what can be lent, and their last changes.

    Args:
        cache: whose chunks.
        private_tenants: whose chunks stay here.
        num_changes_max: changes that are kept for a reader; who comes later lists all.
    """

    def __init__(
        self, cache: Cache, private_tenants: frozenset[str] = frozenset(), num_changes_max: int = 32_768
    ) -> None:
        self._cache = cache
        self._private = private_tenants
        self._meanings: dict[NamespaceDigest, Meaning] = {}
        self._by_chunk: dict[ChunkKey, TierKey] = {}
        self._changes: deque[tuple[bool, TierKey]] = deque(maxlen=num_changes_max)
        self.chunks: dict[TierKey, ChunkKey] = {}
        self.next_sequence = 1
        """Number that the next change will have."""
        self.read_to = 1
        """Number of the first event of the cache that was not taken up."""
        self.on_stored: Callable[[TierKey, RegionHandle, int], None] = _nobody_cares
        """Told of each chunk that can be lent from now on: its key, region and bytes."""

    def follow(self) -> None:
        """Takes up what the cache has stored and removed since the last time."""
        log = self._cache._books.log
        while self.read_to != log.next_sequence:
            page = log.since(self.read_to, _PAGE_EVENTS)
            self.read_to = page.next_sequence
            if page.num_lost:
                self._read_all()
                return
            for event in page.events:
                if isinstance(event, ChunkStored):
                    self._stored(event.key)
                else:
                    self._removed(event.key)

    def changes_since(self, sequence: int, num_max: int) -> Sequence[tuple[bool, TierKey]] | None:
        """At most ``num_max`` changes from number ``sequence`` on, as (is it stored, key); None where some are lost."""
        assert 1 <= sequence <= self.next_sequence, (sequence, self.next_sequence)
        first = sequence - (self.next_sequence - len(self._changes))
        if first < 0:
            return None
        return [self._changes[index] for index in range(first, min(first + num_max, len(self._changes)))]

    def _stored(self, key: ChunkKey) -> None:
        chunk = self._cache._books.index.chunks.get(key)
        if chunk is None or key in self._by_chunk or not self._may_leave(chunk):
            return  # where it is gone already, the event that says so follows
        tier_key = self._key_of(chunk)
        self._by_chunk[key] = tier_key
        self.chunks[tier_key] = key
        self._note(True, tier_key)
        self.on_stored(tier_key, chunk.region, chunk.binding.layout.chunk_bytes)

    def _removed(self, key: ChunkKey) -> None:
        tier_key = self._by_chunk.pop(key, None)
        if tier_key is not None:
            del self.chunks[tier_key]
            self._note(False, tier_key)

    def _note(self, is_stored: bool, key: TierKey) -> None:
        self._changes.append((is_stored, key))
        self.next_sequence += 1

    def _read_all(self) -> None:
        """Events are lost: compare with all that is there."""
        found: dict[ChunkKey, None] = {}
        after: int | None = 0
        while after is not None:
            page = self._cache.chunks_after(after, _PAGE_CHUNKS)
            found.update(dict.fromkeys(key for group in page.groups for key in group.keys))
            after = page.after
            self.read_to = page.next_sequence
        for key in [key for key in self._by_chunk if key not in found]:
            self._removed(key)
        for key in found:
            self._stored(key)

    def _may_leave(self, chunk: Chunk) -> bool:
        tenant = chunk.binding.tenant
        is_ours = tenant.startswith(OWN_TENANTS) or tenant in self._private
        return chunk.state is ChunkState.READABLE and not is_ours

    def _key_of(self, chunk: Chunk) -> TierKey:
        binding = chunk.binding
        meaning = self._meanings.get(binding.namespace)
        if meaning is None or meaning.layout != binding.layout:
            if len(self._meanings) >= 1_024:
                self._meanings.clear()
            meaning = meaning_of(binding.namespace, binding.tenant, binding.model, binding.layout)
            self._meanings[binding.namespace] = meaning
        return meaning.key_of(chunk.key)

    def validate(self) -> None:
        """Assert the invariants; after ``follow``."""
        chunks = self._cache._books.index.chunks
        readable = {key for key, chunk in chunks.items() if self._may_leave(chunk)}
        assert readable == self._by_chunk.keys(), "the shelf is not what is readable"
        assert {key: chunk for chunk, key in self._by_chunk.items()} == self.chunks


def _nobody_cares(key: TierKey, region: RegionHandle, num_bytes: int) -> None:
    pass


def is_meant(chunk: Chunk, wanted: Wanted) -> bool:
    """Whether the chunk's bytes mean to their borrower what they mean here."""
    binding = chunk.binding
    here = (binding.namespace, binding.layout.fingerprint, binding.layout.chunk_bytes, FORMAT_VERSION)
    return here == (wanted.namespace, wanted.fingerprint, wanted.num_bytes, wanted.format_version)


def held_state(shelf: Shelf, tier_key: TierKey, key: ChunkKey) -> HeldState:
    """How far the store of a chunk is that an engine here has handed over; after ``follow``."""
    if shelf.chunks.get(tier_key) == key:
        return "readable"
    books = shelf._cache._books
    if books.tiers is None:
        return "reserved" if key in books.index.chunks else "unseen"
    awaiting = books.tiers.onboardings.awaiting
    if awaiting.is_given_up(key):
        return "refused"
    return "reserved" if awaiting.is_being_stored(key) else "unseen"


def lend(shelf: Shelf, borrower: ConnectionId, key: TierKey, wanted: Wanted) -> Loan | None:
    """Leases the chunk of ``key`` to an attached connection; None where there is none that means ``wanted``.

    The request that owns the lease is the key in hex.

    Raises:
        ConnectionUnknown: the borrower is not attached.
    """
    books = shelf._cache._books
    connection = books.connections.get(borrower)
    chunk_key = shelf.chunks.get(key)
    chunk = None if chunk_key is None else books.index.chunks.get(chunk_key)
    if chunk is None or chunk.state is not ChunkState.READABLE or not is_meant(chunk, wanted):
        return None
    books.lease(chunk)
    lease = books.leases.open(connection, key.hex(), (chunk,), books.now_s)
    return Loan(lease.id, chunk.region, wanted.num_bytes)
