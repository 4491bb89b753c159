"""How blocks are told apart here: by a digest over all tokens up to their end, and over what else makes KV unequal.

Owns the form of an announcement (:class:`StoredBlocks`), and the digests of prompts and of announced blocks, which must
agree: a block is claimed for a prompt where both were made of the same root, tokens and keys.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

BlockHash = int | bytes
"""An engine's own name of a block."""

TOKEN_BYTES: Final = 8
_DIGEST_BYTES: Final = 16
_TAGS: Final = ("lora", "cache_salt")


class StoredBlocks:
    """Blocks that an engine has announced, in the order of a prefix.

    Args:
        hashes: the engine's names of them.
        parent: the engine's name of the block before the first; None at the beginning of a prompt.
        token_ids: of all of them, 0 to 2**63 - 1.
        block_size: tokens in each.
    """

    def __init__(
        self, hashes: Sequence[BlockHash], parent: BlockHash | None, token_ids: Sequence[int], block_size: int
    ) -> None:
        self.hashes = hashes
        self.parent = parent
        self.token_ids = token_ids
        self.block_size = block_size
        self.adapter = ""
        """``lora_name``, empty for the model itself."""
        self.extras: Sequence[Sequence[object] | None] | None = None
        """``extra_keys``: one entry a block; None where there is none at all."""
        self.group = 0
        self.medium = ""
        self.kind = ""
        """``kv_cache_spec_kind``."""


class HashedPrompt:
    """The digests of one prompt, computed as far as they were asked for."""

    def __init__(self, token_ids: Sequence[int], root: bytes) -> None:
        self.token_ids = token_ids
        """Kept, so that its identity belongs to no other."""
        self.root = root
        self.chains: dict[int, list[bytes]] = {}
        """By block size."""

    def digest(self, index: int, size: int) -> bytes:
        """Of the block ``index``; those before it must have been asked for."""
        chain = self.chains.get(size)
        if chain is None:
            chain = self.chains[size] = []
        if index == len(chain):
            parent = chain[index - 1] if index else sized_root(self.root, size)
            chain.append(next_digest(parent, pack(self.token_ids[index * size : (index + 1) * size]), b""))
        return chain[index]


def chain_root(adapter: str, cache_salt: str) -> bytes:
    """What the chain of a prompt begins with: with another adapter or salt, nothing is shared."""
    return blake2b(canonical([adapter, cache_salt]), digest_size=_DIGEST_BYTES).digest()


def sized_root(root: bytes, block_size: int) -> bytes:
    """``root`` for blocks of one size."""
    return b"%b %d" % (root, block_size)


def next_digest(parent: bytes, packed: bytes, extra: bytes) -> bytes:
    """The digest of the block after ``parent``: of its tokens as 8 bytes each, and of its further keys."""
    return blake2b(b"%b%d %b%b" % (parent, len(packed), packed, extra), digest_size=_DIGEST_BYTES).digest()


def pack(token_ids: Sequence[int]) -> bytes:
    """Tokens as 8 bytes each."""
    return array("q", token_ids).tobytes()


def keys_of(stored: StoredBlocks, index: int) -> list[object]:
    """The further keys of a block, without the name of the adapter. A tagged key counts as the untagged one."""
    given = stored.extras
    keys = given[index] if given is not None and index < len(given) else None
    if keys is None:
        return []
    found: list[object] = []
    for key in keys:
        if isinstance(key, list | tuple) and len(key) > 1 and key[0] in _TAGS and isinstance(key[1], str):
            key = key[1]
        if not (stored.adapter and key == stored.adapter):
            found.append(key)
    return found


def salt_of(keys: list[object]) -> str:
    """The salt, where it is the only key of the first block."""
    only = keys[0] if len(keys) == 1 else None
    return only if isinstance(only, str) else ""


def canonical(value: object) -> bytes:
    """Bytes that differ where values differ."""
    if isinstance(value, list | tuple):
        parts = [canonical(part) for part in value]
        return b"[%d:%b]" % (len(parts), b"".join(parts))
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")
    return b"%b%d:%b" % (type(value).__name__.encode(), len(data), data)


PLAIN: Final = chain_root("", "")
"""The root of prompts for the model itself, without a salt."""
