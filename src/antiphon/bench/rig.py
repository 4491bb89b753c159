"""What every measurement of the cache uses: clients, buffers, chunk keys."""

from __future__ import annotations

import ctypes
import mmap
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from antiphon.client import CacheClient, ClientOptions, Session
from antiphon.core.chunks import ChunkKey, chunk_keys
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import CacheError, CacheUnavailable, ProtocolError
from antiphon.core.ids import new_incarnation
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import cache as protocol
from antiphon.storage.arena import copy_bytes

TENANT: Final = "bench"
CONNECT_TIMEOUT_S: Final = 10.0
CALL_TIMEOUT_S: Final = 10.0
T = TypeVar("T", bound=protocol.AnswerBody)


class CacheMiss(CacheError):
    """Not all chunks that were asked for are in the cache: for a bench, which knows what is there, a fault."""


@dataclass(frozen=True)
class Target:
    """Where the cache server is, and how large its chunks are."""

    host: str
    port: int
    chunk_size_tokens: int


@dataclass(frozen=True)
class Shape:
    """What is stored and retrieved at once."""

    num_chunks: int
    chunk_bytes: int

    @property
    def num_bytes(self) -> int:
        return self.num_chunks * self.chunk_bytes

    def __str__(self) -> str:
        return f"{self.num_chunks} x {self.chunk_bytes / 1e6:.1f} MB"


class Buffer:
    """Private memory, every page of it touched: what an engine's KV memory is to a copy."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.num_bytes = num_bytes
        self._first = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(self._first)
        ctypes.memset(self.address, 1, num_bytes)

    def fill_random(self) -> None:
        """Bytes that differ from place to place, so that a copy to a wrong place shows."""
        block = secrets.token_bytes(1 << 20)
        for start in range(0, self.num_bytes, len(block)):
            size = min(len(block), self.num_bytes - start)
            self._map[start : start + size] = block[:size]
            # A count in front of each block makes no two of them equal.
            self._map[start : start + 8] = start.to_bytes(8, "little")

    def clear(self) -> None:
        ctypes.memset(self.address, 0, self.num_bytes)

    def equals(self, other: Buffer) -> bool:
        with memoryview(self._map) as own, memoryview(other._map) as its:
            return own == its

    def close(self) -> None:
        del self._first
        self._map.close()


def layout_of(shape: Shape) -> ChunkLayout:
    """Of chunks of that size: one slab."""
    return ChunkLayout(num_slabs=1, slab_bytes=shape.chunk_bytes)


def model_of(layout: ChunkLayout) -> str:
    """Served model name of every bench client with that layout."""
    return f"bench-{layout.slab_bytes}"


@contextmanager
def attached(target: Target, layout: ChunkLayout, role: str) -> Iterator[Session]:
    """A session that writes every slab of ``layout``; the chunks of its model are cleared at the end.

    Raises:
        CacheUnavailable: no session within ``CONNECT_TIMEOUT_S``.
    """
    options = ClientOptions(
        host=target.host,
        port=target.port,
        role=role,
        engine=f"bench-{role}",
        incarnation=new_incarnation(),
        model=model_of(layout),
        layout=layout,
        chunk_size_tokens=target.chunk_size_tokens,
        slabs=tuple(range(layout.num_slabs)),
        needs_arena=True,
        call_timeout_s=CALL_TIMEOUT_S,
    )
    client = CacheClient(options)
    client.start()
    try:
        if not client.wait_connected(CONNECT_TIMEOUT_S) or (session := client.session) is None:
            raise CacheUnavailable(f"no session with the cache server at {target.host}:{target.port}: {client.state}")
        yield session
        # Chunks of another size, left behind, would make room for the next measurement dearer.
        ask(session, protocol.Clear(model=options.model), protocol.Cleared)
    finally:
        client.close()


@dataclass(frozen=True)
class Prompt:
    """Tokens of one prompt, as an engine has them, and the keys of its chunks."""

    namespace: NamespaceDigest
    tokens: list[int]
    keys: list[ChunkKey]
    joined: bytes

    @classmethod
    def new(cls, num_tokens: int, chunk_size_tokens: int) -> Prompt:
        """A prompt that no one has used before."""
        namespace = NamespaceDigest(secrets.token_bytes(32))
        tokens = [(position * 2_654_435_761) % 150_000 for position in range(num_tokens)]
        keys = chunk_keys(namespace, tokens, chunk_size_tokens)
        return cls(namespace, tokens, keys, b"".join(keys))


def ask(session: Session, body: protocol.Body, kind: type[T]) -> T:
    """The answer of that kind. Raises as ``Session.call``, and ProtocolError for another kind."""
    answer = session.call(body)
    if not isinstance(answer, kind):
        raise ProtocolError(f"{type(body).__name__} was answered with {type(answer).__name__}")
    return answer


def lookup(session: Session, prompt: Prompt, request: str) -> protocol.Found:
    return ask(session, protocol.Lookup(request, prompt.namespace, TENANT, prompt.joined), protocol.Found)


def release(session: Session, request: str, found: protocol.Found) -> None:
    if found.lease is not None:
        ask(session, protocol.Release(request, found.lease), protocol.LeaseNoted)


def store(session: Session, prompt: Prompt, source_address: int, chunk_bytes: int) -> None:
    """Reserve, copy, commit.

    Raises:
        CacheError: the server had no room for all of it, or did not keep it.
    """
    reserve = protocol.Reserve(prompt.namespace, TENANT, None, prompt.joined)
    reserved = ask(session, reserve, protocol.Reserved)
    if len(reserved.grants) != len(prompt.keys):
        why = reserved.refusal[1] if reserved.refusal else ", ".join(sorted(set(reserved.verdicts)))
        raise CacheError(f"{len(reserved.grants)} of {len(prompt.keys)} chunks may be written: {why}")
    for grant in reserved.grants:
        copy_bytes(session.address_of(grant.region), source_address + grant.index * chunk_bytes, chunk_bytes)
    committed = ask(session, protocol.Commit(tuple(g.region for g in reserved.grants)), protocol.Committed)
    if set(committed.outcomes) != {"readable"}:
        raise CacheError(f"a commit left chunks {', '.join(sorted(set(committed.outcomes)))}")


def retrieve(session: Session, prompt: Prompt, request: str, destination_address: int, chunk_bytes: int) -> None:
    """Look up, copy, release.

    Raises:
        CacheMiss: not all of it is there.
    """
    found = lookup(session, prompt, request)
    if len(found.regions) != len(prompt.keys):
        release(session, request, found)
        raise CacheMiss(f"{len(found.regions)} of {len(prompt.keys)} chunks were found")
    for index, region in enumerate(found.regions):
        copy_bytes(destination_address + index * chunk_bytes, session.address_of(region), chunk_bytes)
    release(session, request, found)
