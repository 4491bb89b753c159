"""KV blocks whose bytes prove themselves, and the pool that holds them.

Owns every block of one simulated engine: its 32 bytes, its reference count, its place in the free list and in the
prefix cache. Pure: no clock, no socket.

A block's bytes are a function of the model, the namespace and *all tokens up to the last one in the block*: they
continue from the bytes of the block before. So a wrong block also spoils what is computed after it, as in a real
model, and a generated token is a digest over all blocks that its sequence sees: any wrong, torn, stale or foreign
block changes the text.

Invariants (:meth:`SimulatedKv.validate`): each block is either free or referenced; a cached key names a block whose
key it is; reservations never exceed the free blocks.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

from antiphon.engine.simulated.tokenizer import NUM_WORDS

BLOCK_BYTES = 32
"""Bytes of a simulated block: enough to prove its content; the *size* that transfers pretend to move is
:data:`KV_BYTES_PER_TOKEN`."""

KV_BYTES_PER_TOKEN = 131_072
"""KV of one token of an 8B model with 32 layers, 8 KV heads of 128 and 16-bit values."""

_MODULUS = 0x52E32E22F951BBF0ADA490D62A3C8BFF82194A0298DC4F76C185833AB9B82149
"""A 255-bit prime without structure. The state after tokens t1, t2 … is a polynomial in 2**64 modulo it, so that it
does not depend on how many tokens were computed at once; a prime near a power of two would let small differences
cancel."""


def root_state(model_name: str, namespace: str) -> int:
    """The state before the first token."""
    seed = f"{model_name}\0{namespace}".encode("utf-8", "replace")
    return int.from_bytes(blake2b(seed, digest_size=BLOCK_BYTES).digest(), "big") % _MODULUS


def pack(tokens: Sequence[int]) -> bytes:
    """``tokens`` (0 to 2**63 - 1) as 8 bytes each, big-endian: the form that :func:`extend` takes."""
    return struct.pack(f">{len(tokens)}Q", *tokens)


def extend(state: int, packed: bytes | memoryview) -> int:
    """The state after the packed tokens."""
    return (state << 8 * len(packed) | int.from_bytes(packed, "big")) % _MODULUS


def chain_keys(root: int, packed: bytes, block_size_tokens: int) -> list[int]:
    """The key of each *full* block of a prompt: the state that its bytes have when all is right."""
    size = 8 * block_size_tokens
    view = memoryview(packed)
    keys: list[int] = []
    state = root
    for start in range(0, len(packed) - size + 1, size):
        state = extend(state, view[start : start + size])
        keys.append(state)
    return keys


class CacheLog(Protocol):
    """Hears what the prefix cache gains and loses."""

    def cached(self, key: int) -> None:
        """A block is found by ``key`` from now on."""

    def forgot(self, key: int) -> None:
        """No block is found by ``key`` any more."""

    def cleared(self) -> None:
        """No block is found by any key."""


class SimulatedKv:
    """The blocks of one engine.

    Args:
        num_blocks: how many there are.
        block_size_tokens: tokens in each.
    """

    def __init__(self, num_blocks: int, block_size_tokens: int) -> None:
        assert num_blocks > 0 and block_size_tokens > 0
        self.num_blocks = num_blocks
        self.block_size_tokens = block_size_tokens
        self.num_reserved = 0
        """Free blocks promised to running sequences, so that none needs preemption."""
        self.num_evicted = 0
        self.log: CacheLog | None = None
        self._contents = [bytes(BLOCK_BYTES)] * num_blocks
        self._references = [0] * num_blocks
        self._keys: list[int | None] = [None] * num_blocks
        self._cached: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_scribbles = 0

    # -- accounting -------------------------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Blocks that no sequence and no lease holds; some of them still serve the prefix cache."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that a sequence or a lease holds."""
        return self.num_blocks - len(self._free)

    @property
    def num_available(self) -> int:
        """Free blocks that are not promised to a running sequence."""
        return len(self._free) - self.num_reserved

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size_tokens)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free blocks, least recently used first; what they cached is forgotten."""
        assert count <= len(self._free), "more blocks allocated than are free"
        return [self._allocate_one() for _ in range(count)]

    def acquire(self, block_ids: Sequence[int]) -> None:
        """One more reference to each block."""
        for block in block_ids:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def num_idle(self, block_ids: Sequence[int]) -> int:
        """How many of ``block_ids`` are free, so that acquiring them takes free blocks."""
        return sum(not self._references[block] for block in block_ids)

    def free(self, block_ids: Sequence[int]) -> None:
        """One reference less to each block; blocks late in a prefix are evicted before early ones."""
        for block in reversed(block_ids):
            assert self._references[block] > 0, f"block {block} is freed twice"
            self._references[block] -= 1
            if not self._references[block]:
                self._free[block] = None

    def free_and_overwrite(self, block_ids: Sequence[int]) -> None:
        """As :meth:`free`, and blocks that nobody else holds are overwritten at once, as if they had been reused.

        What they held for the prefix cache moves to other free blocks, so that reuse goes on while whoever still has
        the block numbers reads other bytes.
        """
        self.free(block_ids)
        gone = dict.fromkeys(block for block in block_ids if not self._references[block])
        for block in gone:
            self._free.move_to_end(block)
        for block in reversed(gone):
            key = self._keys[block]
            if key is not None:
                self._forget(block)
                spare = next(iter(self._free))
                if spare not in gone:
                    self._forget(spare)
                    self._contents[spare] = self._contents[block]
                    self._keys[spare], self._cached[key] = key, spare
                    if self.log is not None:
                        self.log.cached(key)
                    self._free.move_to_end(spare)
            self._num_scribbles += 1
            noise = b"scribble %d %d" % (block, self._num_scribbles)
            self._contents[block] = blake2b(noise, digest_size=BLOCK_BYTES).digest()
        for block in reversed(gone):
            self._free.move_to_end(block, last=False)

    # -- prefix cache -----------------------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[int]) -> list[int]:
        """The blocks that hold the longest cached prefix of ``keys``; they are not acquired."""
        found: list[int] = []
        for key in keys:
            block = self._cached.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def publish(self, block: int, key: int) -> None:
        """Let later requests reuse the full ``block`` under ``key``; the first block of a key stays."""
        if key not in self._cached:
            self._forget(block)
            self._cached[key] = block
            self._keys[block] = key
            if self.log is not None:
                self.log.cached(key)

    def reset_cache(self) -> bool:
        """Forget all cached prefixes, as vLLM only while no block is held; returns whether it did."""
        if self.num_used:
            return False
        for block in list(self._cached.values()):
            self._forget(block)
        if self.log is not None:
            self.log.cleared()
        return True

    # -- bytes ------------------------------------------------------------------------------------------------------

    def read(self, block_ids: Sequence[int]) -> list[bytes]:
        """The bytes of each block, whoever holds it.

        Raises:
            IndexError: a number that is no block of this engine.
        """
        if any(block < 0 for block in block_ids):
            raise IndexError("block numbers are not negative")
        return [self._contents[block] for block in block_ids]

    def write(self, block: int, content: bytes) -> None:
        """Put bytes that were pulled from elsewhere into a block."""
        assert len(content) == BLOCK_BYTES, len(content)
        self._contents[block] = content

    def compute(self, root: int, block_ids: Sequence[int], position: int, packed: bytes) -> None:
        """Compute the KV of the packed tokens that start at ``position``, on top of the bytes before them."""
        size = self.block_size_tokens
        view = memoryview(packed)
        index, within = divmod(position, size)
        start = 0
        while start < len(view):
            stop = start + 8 * (size - within)
            before = root if not (index or within) else self._state(block_ids[index if within else index - 1])
            state = extend(before, view[start:stop])
            self._contents[block_ids[index]] = state.to_bytes(BLOCK_BYTES, "big")
            start, index, within = stop, index + 1, 0

    def next_token(self, block_ids: Sequence[int], choice: int) -> int:
        """The word that follows all bytes in ``block_ids``; ``choice`` tells the n answers to one prompt apart."""
        contents = self._contents
        seen = b"".join([contents[block] for block in block_ids])
        digest = blake2b(seen, digest_size=8, salt=choice.to_bytes(8, "big")).digest()
        return int.from_bytes(digest, "big") % NUM_WORDS

    # -- checks -----------------------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check every invariant; for tests and simulation.

        Raises:
            AssertionError: one does not hold.
        """
        assert self.num_free + self.num_used == self.num_blocks
        assert 0 <= self.num_reserved <= self.num_free
        for block, count in enumerate(self._references):
            assert count >= 0 and (count == 0) == (block in self._free), f"block {block} has {count} references"
        for key, block in self._cached.items():
            assert self._keys[block] == key, f"block {block} does not know its key"
        assert sum(key is not None for key in self._keys) == len(self._cached)

    def _allocate_one(self) -> int:
        block, _ = self._free.popitem(last=False)
        if self._keys[block] is not None:
            self.num_evicted += 1
            self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            del self._cached[key]
            if self.log is not None:
                self.log.forgot(key)

    def _state(self, block: int) -> int:
        return int.from_bytes(self._contents[block], "big")
