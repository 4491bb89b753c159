"""A paged KV cache as vLLM keeps it: a pool of blocks with a prefix cache, and memory whose bytes follow from tokens.

The KV of a token is 8 bytes that depend on every token up to it, on the request's salt, on the layer and on the rank:
a block that is right in one place is wrong in every other.
"""

from __future__ import annotations

import random
from collections import OrderedDict

from tests.connector.fakes import FakeTensor

TOKEN_BYTES = 8
BLOCK_SIZE = 4
CHUNK_SIZE = 8
NUM_LAYERS = 2
BLOCK_BYTES = BLOCK_SIZE * TOKEN_BYTES
SLAB_BYTES = NUM_LAYERS * CHUNK_SIZE * TOKEN_BYTES
_MASK = (1 << 64) - 1


def next_state(state: int, token: int) -> int:
    """What stands for all tokens so far."""
    return hash((state, token)) & _MASK


def states_of(salt: int, tokens: list[int]) -> list[int]:
    """The state after each token."""
    state, found = salt, []
    for token in tokens:
        state = next_state(state, token)
        found.append(state)
    return found


def kv_bytes(states: list[int], layer: int, rank: int) -> bytes:
    """The KV of these tokens in one layer of one rank."""
    mark = (layer + 1) * 0x9E3779B97F4A7C15 + (rank + 1) * 0xC2B2AE3D27D4EB4F
    return b"".join(((state ^ mark) & _MASK).to_bytes(TOKEN_BYTES, "little") for state in states)


def chunk_bytes(states: list[int], num_ranks: int) -> bytes:
    """A whole stored chunk: a slab a rank, in it a part a layer."""
    assert len(states) == CHUNK_SIZE
    return b"".join(kv_bytes(states, layer, rank) for rank in range(num_ranks) for layer in range(NUM_LAYERS))


class BlockPool:
    """Blocks 1 to ``num_blocks - 1``; block 0 is padding. Freed blocks keep their content until they are given away."""

    def __init__(self, num_blocks: int) -> None:
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self.num_usable = num_blocks - 1
        self.references = [0] * num_blocks
        self.hash_of: dict[int, int] = {}
        self.cached: dict[int, int] = {}
        self.fresh: list[int] = []
        """Given away since the last step: their bytes may be overwritten from that step on."""

    def take(self, number: int) -> list[int]:
        assert number <= len(self.free)
        taken = []
        for _ in range(number):
            block, _none = self.free.popitem(last=False)
            self._forget(block)
            self.references[block] = 1
            taken.append(block)
        self.fresh += taken
        return taken

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.references[block] == 0:
                del self.free[block]
            self.references[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            assert self.references[block] > 0, "a block is freed twice"
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free[block] = None

    def cache(self, block: int, state: int) -> None:
        """The full block holds the KV of the tokens that ``state`` stands for."""
        if block not in self.hash_of and state not in self.cached:
            self.hash_of[block] = state
            self.cached[state] = block

    def find(self, states: list[int], max_tokens: int) -> list[int]:
        """Blocks of the longest cached prefix of at most ``max_tokens`` tokens."""
        found = []
        for end in range(BLOCK_SIZE, max_tokens + 1, BLOCK_SIZE):
            block = self.cached.get(states[end - 1])
            if block is None:
                break
            found.append(block)
        return found

    def reset(self) -> None:
        """Forgets the prefix cache."""
        self.hash_of.clear()
        self.cached.clear()

    def _forget(self, block: int) -> None:
        state = self.hash_of.pop(block, None)
        if state is not None:
            del self.cached[state]


class KvMemory:
    """The KV blocks of one rank."""

    def __init__(self, num_blocks: int, rank: int, chance: random.Random) -> None:
        self.rank = rank
        self.layers = [FakeTensor(num_blocks, BLOCK_BYTES) for _ in range(NUM_LAYERS)]
        self._chance = chance

    def spoil(self, blocks: list[int]) -> None:
        """The blocks belong to somebody else: their content is lost."""
        for block in blocks:
            for layer in self.layers:
                layer.block(block)[:] = self._chance.randbytes(BLOCK_BYTES)

    def write(self, table: list[int], states: list[int], start: int, end: int) -> None:
        """The KV of tokens ``start`` to ``end``."""
        for index, layer in enumerate(self.layers):
            data = kv_bytes(states[start:end], index, self.rank)
            for token in range(start, end):
                place = (table[token // BLOCK_SIZE] * BLOCK_SIZE + token % BLOCK_SIZE) * TOKEN_BYTES
                layer.view[place : place + TOKEN_BYTES] = data[:TOKEN_BYTES]
                data = data[TOKEN_BYTES:]

    def check(self, table: list[int], states: list[int], end: int, what: str) -> None:
        """The KV of tokens 0 to ``end`` is there and right."""
        for index, layer in enumerate(self.layers):
            data = kv_bytes(states[:end], index, self.rank)
            for number in range(-(-end // BLOCK_SIZE)):
                expected = data[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
                found = layer.block(table[number])[: len(expected)]
                assert found == expected, f"{what}: block {table[number]} (place {number}) has other bytes"
