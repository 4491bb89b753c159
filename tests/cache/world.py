"""A cache with short words for its calls: tests say what they mean, not how an event is spelled.

``World.call`` validates the whole cache after each step, so that every test is also a test of the invariants.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from antiphon.cache.effects import (
    ChunkRemoved,
    Committed,
    Effect,
    Found,
    Grant,
    Notice,
    Refused,
    Reply,
    Reserved,
    Verdict,
)
from antiphon.cache.events import (
    Attach,
    Commit,
    ConnectionId,
    Detach,
    EngineId,
    Event,
    LeaseId,
    Lookup,
    Release,
    Reserve,
    Tick,
)
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.core.chunks import ChunkKey, chunk_keys
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import ModelIdentity, Namespace, NamespaceDigest

CHUNK_SIZE_TOKENS = 4
UNIT_BYTES = 64
"""Alignment, and size of a slab."""

TWO_SLABS = ChunkLayout(num_slabs=2, slab_bytes=UNIT_BYTES)
FOUR_SLABS = ChunkLayout(num_slabs=4, slab_bytes=UNIT_BYTES)
CHUNK_BYTES = TWO_SLABS.chunk_bytes

MODEL = ModelIdentity("demo", "rev1", "bfloat16", "", "full", 2, 2, 8)

R = TypeVar("R")


def options(num_chunks: int, **changes: object) -> CacheOptions:
    """An arena of ``num_chunks`` chunks of two slabs, without caps on leases and reservations."""
    plain = CacheOptions(
        arena_bytes=num_chunks * CHUNK_BYTES,
        chunk_size_tokens=CHUNK_SIZE_TOKENS,
        alignment_bytes=UNIT_BYTES,
        leased_share_max=1.0,
        reserved_share_max=1.0,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


def namespace(tenant: str = "", model: ModelIdentity = MODEL) -> NamespaceDigest:
    return Namespace(model, CHUNK_SIZE_TOKENS, cache_salt=tenant).digest()


def prompt_keys(text: str, tenant: str = "", model: ModelIdentity = MODEL) -> tuple[ChunkKey, ...]:
    """The keys of a prompt that has one chunk for each letter."""
    tokens = [ord(letter) for letter in text for _ in range(CHUNK_SIZE_TOKENS)]
    return tuple(chunk_keys(namespace(tenant, model), tokens, CHUNK_SIZE_TOKENS))


class World:
    """A cache, a time, and the notices so far."""

    def __init__(self, cache_options: CacheOptions, first_id: int = 1) -> None:
        self.options = cache_options
        self.cache = Cache(cache_options, first_id)
        self.now_s = 0.0
        self.notices: list[Notice] = []
        self._num_connections = 0

    def effects(self, event: Event) -> list[Effect]:
        found = self.cache.step(event, self.now_s)
        self.cache.validate()
        self.notices += found[1:]  # type: ignore[arg-type]
        return found

    def call(self, event: Event, kind: type[R]) -> R:
        """The reply, which must be of ``kind``."""
        reply = self.effects(event)[0]
        assert isinstance(reply, kind), reply
        return reply

    def assert_refused(self, event: Event, error: type[Exception]) -> str:
        """The message of the refusal, which must be an ``error``."""
        before = self.cache.statistics()
        reply = self.call(event, Refused)
        assert type(reply.error) is error, reply.error
        after = self.cache.statistics()
        assert dataclasses.replace(after, counters=before.counters) == before, "a refused call changed something"
        return str(reply.error)

    def reply(self, event: Event) -> Reply:
        return self.effects(event)[0]  # type: ignore[return-value]

    def attach(
        self,
        engine: str = "engine",
        slabs: tuple[int, ...] = (0, 1),
        incarnation: str = "1",
        layout: ChunkLayout = TWO_SLABS,
        model: str = "demo",
    ) -> ConnectionId:
        self._num_connections += 1
        connection = ConnectionId(self._num_connections)
        event = Attach(connection, EngineId(engine, incarnation), model, CHUNK_SIZE_TOKENS, layout, slabs)
        reply = self.reply(event)
        assert not isinstance(reply, Refused), reply
        return connection

    def detach(self, connection: ConnectionId) -> None:
        reply = self.reply(Detach(connection))
        assert not isinstance(reply, Refused), reply

    def tick(self, seconds: float) -> list[Effect]:
        self.now_s += seconds
        return self.effects(Tick())

    def lookup(self, connection: ConnectionId, text: str, request: str = "r", tenant: str = "") -> Found:
        return self.call(Lookup(connection, request, namespace(tenant), tenant, prompt_keys(text, tenant)), Found)

    def num_hit(self, connection: ConnectionId, text: str, tenant: str = "") -> int:
        """Chunks that a lookup finds; its lease is given back."""
        found = self.lookup(connection, text, "probe", tenant)
        if found.lease is not None:
            self.release(connection, found.lease, "probe")
        return found.num_tokens // CHUNK_SIZE_TOKENS

    def release(self, connection: ConnectionId, lease: LeaseId | None, request: str = "r") -> Reply:
        assert lease is not None
        reply = self.reply(Release(connection, request, lease))
        assert not isinstance(reply, Refused), reply
        return reply

    def reserve_event(self, connection: ConnectionId, text: str, first: int = 0, tenant: str = "") -> Reserve:
        keys = prompt_keys(text, tenant)
        parent = keys[first - 1] if first else None
        return Reserve(connection, namespace(tenant), tenant, parent, keys[first:])

    def reserve(self, connection: ConnectionId, text: str, first: int = 0, tenant: str = "") -> Reserved:
        return self.call(self.reserve_event(connection, text, first, tenant), Reserved)

    def commit(self, connection: ConnectionId, grants: tuple[Grant, ...]) -> Committed:
        return self.call(Commit(connection, tuple(grant.region for grant in grants)), Committed)

    def store(self, connection: ConnectionId, text: str, first: int = 0, tenant: str = "") -> tuple[Verdict, ...]:
        """Reserves and commits; the verdicts."""
        reserved = self.reserve(connection, text, first, tenant)
        self.commit(connection, reserved.grants)
        return reserved.verdicts

    def removed(self) -> list[ChunkRemoved]:
        return [notice for notice in self.notices if isinstance(notice, ChunkRemoved)]

    def removed_letters(self, text: str, tenant: str = "") -> str:
        """Which letters of the prompt have been removed, in order of removal."""
        letters = dict(zip(prompt_keys(text, tenant), text, strict=True))
        return "".join(letters[notice.key] for notice in self.removed() if notice.key in letters)
