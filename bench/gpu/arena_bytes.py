"""Chunks as they lie in the cache server's arena: read, compared head by head, and spoiled to see whether that shows.

A client of the cache server maps the arena as a worker does, looks a prompt up and reads the regions that it is leased.
A chunk is ``[kv_head][layer][token][k|v]`` in bf16.
"""

from __future__ import annotations

import ctypes
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
from answers import FAR
from common import CHUNK
from processes import Failed, Process, get

HEADS, WIDTH = 8, 256
"""Of the 8B shape: KV heads, elements of K and V of a head."""
RELATIVE_LIMIT = 0.2
"""Of the root mean square of a head's KV in a layer. Two tensor-parallel sizes, which sum in another order, differ by
some hundredths; two heads that have nothing in common by 1.4."""

Chunk = Any
"""bf16 as uint16, ``[HEADS, layers, CHUNK, WIDTH]``."""


class Arena:
    """The arena of one cache server.

    Args:
        cache: the server.
        num_layers: of the model whose chunks lie there.
    """

    def __init__(self, cache: Process, num_layers: int) -> None:
        from antiphon.client import CacheClient, ClientOptions
        from antiphon.core.chunks_layout import ChunkLayout

        self._cache = cache
        self._shape = (HEADS, num_layers, CHUNK, WIDTH)
        options = ClientOptions(
            host="127.0.0.1", port=cache.port - 1, role="bench", engine="bench", incarnation=str(os.getpid()),
            model="m", layout=ChunkLayout(HEADS, num_layers * CHUNK * WIDTH * 2), chunk_size_tokens=CHUNK,
            slabs=(), needs_arena=True, call_timeout_s=10.0,
        )  # fmt: skip
        self._client = CacheClient(options)
        self._client.start()
        if not self._client.wait_connected(10):
            raise Failed(f"no connection to the cache server: {self._client.state}")

    def close(self) -> None:
        """Ends the connection."""
        self._client.close()

    def chunks(self, ids: Sequence[int], salt: str = "") -> list[Chunk]:
        """Copies of the whole chunks of a prompt. Raises Failed where one of them is not there."""
        with self._leased(ids, salt) as views:
            return [view.copy() for view in views]

    def swap_heads(self, ids: Sequence[int], chunks: Sequence[int], heads: tuple[int, int], salt: str = "") -> None:
        """Spoils chunks of a prompt, by number: two heads change places. Done twice it is undone."""
        one, other = heads
        with self._leased(ids, salt) as views:
            for number in chunks:
                views[number][[one, other]] = views[number][[other, one]]

    def _namespace(self, tenant: str) -> bytes:
        """What the KV of that tenant's requests means; there is one kind."""
        found: set[str] = set()
        cursor = 0
        while True:
            page = json.loads(get(self._cache.port, f"/chunks?after={cursor}")[1])
            found |= {group["namespace"] for group in page["chunks"] if group["tenant"] == tenant}
            if not page["chunks"] or not page["after"] or page["after"] <= cursor:
                break
            cursor = page["after"]
        if len(found) != 1:
            raise Failed(f"chunks of {tenant} have {len(found)} namespaces, one is understood")
        return bytes.fromhex(found.pop())

    @contextmanager
    def _leased(self, ids: Sequence[int], salt: str) -> Iterator[list[Chunk]]:
        """The chunks of a prompt where they lie."""
        from antiphon.core.chunks import ChunkChain
        from antiphon.core.tenants import tenant_of
        from antiphon.protocol import cache as calls

        session = self._client.session
        if session is None:
            raise Failed(f"the connection to the cache server has ended: {self._client.state}")
        tenant = tenant_of(salt)
        namespace = self._namespace(tenant)
        chain = ChunkChain(namespace, CHUNK)
        chain.extend(list(ids[: len(ids) // CHUNK * CHUNK]))
        found = session.call(calls.Lookup("bench", namespace, tenant, b"".join(chain.keys)))
        try:
            if len(found.regions) != len(chain.keys):
                raise Failed(f"{len(found.regions)} of {len(chain.keys)} chunks are in the arena")
            yield [self._view(session.address_of(region)) for region in found.regions]
        finally:
            if found.lease is not None:
                session.call(calls.Release("bench", found.lease))

    def _view(self, address: int) -> Chunk:
        number = HEADS * self._shape[1] * CHUNK * WIDTH
        raw = (ctypes.c_uint16 * number).from_address(address)
        return numpy.frombuffer(raw, dtype=numpy.uint16).reshape(self._shape)


def values(chunk: Chunk) -> Any:
    """float32."""
    return (chunk.astype(numpy.uint32) << 16).view(numpy.float32)


def distances(one: Chunk, other: Chunk) -> Any:
    """``[heads, layers]``: how far each head of a layer is, over its root mean square in ``other``."""
    a, b = values(one), values(other)
    over = numpy.sqrt(numpy.square(a - b).mean(axis=(2, 3), dtype=numpy.float64))
    under = numpy.sqrt(numpy.square(b).mean(axis=(2, 3), dtype=numpy.float64))
    found = over / numpy.maximum(under, 1e-30)
    return numpy.where(numpy.isfinite(found), found, FAR)


def distance(one: Chunk, other: Chunk) -> float:
    """The largest of ``distances``."""
    return float(distances(one, other).max())


def wrong_heads(one: Chunk, other: Chunk) -> list[int]:
    """Heads of ``one`` that are not those of ``other`` within ``RELATIVE_LIMIT``, in any layer."""
    return [int(head) for head in numpy.flatnonzero((distances(one, other) > RELATIVE_LIMIT).any(axis=1))]


def own_places(one: Chunk, other: Chunk) -> bool:
    """Whether each head of ``one`` is nearest to the head of ``other`` at the same place."""
    number = len(one)
    return all(
        min(range(number), key=lambda place, head=head: distance(one[[head]], other[[place]])) == head
        for head in range(number)
    )
