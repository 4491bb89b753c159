"""Chunk keys: a chain of SHA-256 over full chunks of token ids, seeded by the namespace.

    key[0] = SHA-256(namespace digest ‖ tokens of chunk 0 ‖ items that begin in chunk 0)
    key[n] = SHA-256(key[n-1]         ‖ tokens of chunk n ‖ items that begin in chunk n)

Always true:

- Equal keys mean an equal namespace and equal tokens and items from the first token to the end of the chunk.
- Each token is hashed once, however often the chain is extended. A tail shorter than a chunk has no key.
- Nothing of the process enters a key: no seed, no pickling, no address.

Tokens are hashed as little-endian 32-bit numbers. The part of a chunk's input before the items has a fixed length, and
items are encoded with their lengths, so that no two inputs run together.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NewType

from antiphon.core.namespace import DIGEST_BYTES, NamespaceDigest, encode_value

ChunkKey = NewType("ChunkKey", bytes)
"""Names a chunk and everything before it, 32 bytes."""

CHUNK_SIZE_TOKENS = 256
"""Tokens of a chunk unless said otherwise: a multiple of every engine's block size, and large enough to copy well."""

TOKEN_BYTES = 4

Tokens = Sequence[int] | bytes | bytearray | memoryview
"""Token ids: numbers, an ``array('i')``, or little-endian 32-bit numbers as bytes."""

_TOKEN_TYPECODE = "i"
assert array(_TOKEN_TYPECODE).itemsize == TOKEN_BYTES, "this platform's int is not 32 bits"


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """An image, sound or video of a request, whose placeholder tokens do not say what it is.

    Args:
        content_hash: the engine's hash of the processed item.
        first_token: position of its first placeholder token in the prompt.
        num_tokens: number of its placeholder tokens.
    """

    content_hash: str
    first_token: int
    num_tokens: int

    def __post_init__(self) -> None:
        if self.first_token < 0 or self.num_tokens < 1:
            raise ValueError(f"an item has a position and at least one token: {self}")


def pack_tokens(tokens: Tokens) -> memoryview:
    """``tokens`` as little-endian 32-bit numbers, without a copy where they already are.

    Raises:
        ValueError: not token ids: a number outside 32 bits, another type, or bytes that are not whole tokens.
    """
    if isinstance(tokens, bytes | bytearray | memoryview):
        view = memoryview(tokens)
        if view.format not in ("B", "b", "c", _TOKEN_TYPECODE) or view.nbytes % TOKEN_BYTES or not view.c_contiguous:
            raise ValueError(f"token bytes must be whole 32-bit numbers, not {view.nbytes} bytes of {view.format!r}")
        is_native = view.format == _TOKEN_TYPECODE
    else:
        if not (isinstance(tokens, array) and tokens.typecode == _TOKEN_TYPECODE):
            try:
                tokens = array(_TOKEN_TYPECODE, tokens)
            except (OverflowError, TypeError) as error:
                raise ValueError(f"token ids must be whole numbers of at most 32 bits: {error}") from error
        view = memoryview(tokens)
        is_native = True
    if is_native and sys.byteorder == "big":
        swapped = array(_TOKEN_TYPECODE, view.tobytes())
        swapped.byteswap()
        view = memoryview(swapped)
    return view.cast("B")


class ChunkChain:
    """The chunk keys of one growing sequence of tokens.

    Args:
        namespace: digest of the request's namespace.
        chunk_size_tokens: as in the namespace.
        items: the request's multimodal items, all of them, in any order.
    """

    __slots__ = ("_items", "_last", "_tail", "chunk_size_tokens", "keys", "namespace")

    def __init__(
        self,
        namespace: NamespaceDigest,
        chunk_size_tokens: int = CHUNK_SIZE_TOKENS,
        items: Iterable[MultimodalItem] = (),
    ) -> None:
        if len(namespace) != DIGEST_BYTES:
            raise ValueError(f"a namespace digest has {DIGEST_BYTES} bytes, not {len(namespace)}")
        if chunk_size_tokens < 1:
            raise ValueError(f"a chunk has at least one token, not {chunk_size_tokens}")
        self.namespace = namespace
        self.chunk_size_tokens = chunk_size_tokens
        self.keys: list[ChunkKey] = []
        self._last = self._seed()
        self._tail = b""
        self._items: dict[int, list[MultimodalItem]] = {}
        for item in sorted(items, key=lambda item: (item.first_token, item.num_tokens, item.content_hash)):
            self._items.setdefault(item.first_token // chunk_size_tokens, []).append(item)

    def _seed(self) -> bytes:
        return self.namespace

    @property
    def num_tokens(self) -> int:
        """Tokens given so far, the tail counted."""
        return len(self.keys) * self.chunk_size_tokens + len(self._tail) // TOKEN_BYTES

    def extend(self, tokens: Tokens) -> list[ChunkKey]:
        """Appends ``tokens``. Returns the keys of the chunks that they complete.

        Raises:
            ValueError: as ``pack_tokens``; nothing is appended then.
        """
        packed = pack_tokens(tokens)
        if self._tail:
            packed = memoryview(self._tail + packed)
        size = self.chunk_size_tokens * TOKEN_BYTES
        end = len(packed) - len(packed) % size
        first = len(self.keys)
        last, keys, sha256 = self._last, self.keys, hashlib.sha256
        for start in range(0, end, size):
            state = sha256(last)
            state.update(packed[start : start + size])
            if self._items and (items := self._items.get(len(keys))):
                state.update(self._encode(items))
            last = state.digest()
            keys.append(ChunkKey(last))
        self._last = last
        self._tail = bytes(packed[end:])
        return keys[first:]

    def _encode(self, items: list[MultimodalItem]) -> bytes:
        """Items with their places inside the chunk in which they begin."""
        placed = ((item.first_token % self.chunk_size_tokens, item.num_tokens, item.content_hash) for item in items)
        return encode_value(tuple(placed))


def chunk_keys(
    namespace: NamespaceDigest,
    tokens: Tokens,
    chunk_size_tokens: int = CHUNK_SIZE_TOKENS,
    items: Iterable[MultimodalItem] = (),
) -> list[ChunkKey]:
    """The keys of all full chunks of ``tokens``; a sequence shorter than a chunk has none."""
    return ChunkChain(namespace, chunk_size_tokens, items).extend(tokens)
