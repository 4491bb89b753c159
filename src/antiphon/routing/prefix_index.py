"""Which engines have been sent which beginnings of prompts, by the bytes.

A prompt is cut into blocks at places that depend on nothing but the distance from its beginning, and each block has a
hash over its scope and all bytes up to its end: two prompts share a hash where they are equal up to there. Messages
come as JSON, and the next turn of a chat repeats the list up to where the last one closed it, byte for byte, if the
client serialises as before; a client that does not is taken for a new one.

Blocks grow from 128 bytes to 2 KiB, so that a short prompt is known to 128 bytes, a long one to 2 KiB, and a prompt of
128k tokens costs about 320 hashes. Up to ``HASHED_MAX_BYTES`` are looked at: what is beyond them is taken as not held.

Owns the table from hashes to engines, and of each engine the hashes in the order of their last use. It does not know
what an engine really holds: it forgets the least recently used beyond ``engine_max_bytes``, as an engine does, and all
of an engine that has restarted. Always true: an engine that has a hash has those of the shorter prefixes too; entries
are at most ``entries_max``; invariants: :meth:`PrefixIndex.validate`.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import accumulate
from typing import Final

from antiphon.routing.ask import Prompt
from antiphon.routing.endpoint import Endpoint, Role

ENTRIES_MAX: Final = 1 << 18
"""Prefixes of all engines together: some 75 MB."""
ENGINE_MAX_BYTES: Final = 8 << 20
"""Of prompts for each engine: about two million tokens."""
HASHED_MAX_BYTES: Final = 1 << 20
"""Of a prompt: about 256k tokens."""
BLOCKS: Final[tuple[tuple[int, int], ...]] = ((16, 128), (16, 256), (16, 512), (32, 1024))
"""So many blocks of so many bytes, in this order; then ``LAST_BLOCK_BYTES``."""
LAST_BLOCK_BYTES: Final = 2048
SWEPT_MIN: Final = 64
"""Entries of engines that are forgotten which an insertion takes away, at least: forgetting is O(1)."""


def _ends() -> list[int]:
    sizes = [size for num, size in BLOCKS for _ in range(num)]
    sizes += [LAST_BLOCK_BYTES] * ((HASHED_MAX_BYTES - sum(sizes)) // LAST_BLOCK_BYTES)
    return list(accumulate(sizes))


ENDS: Final[list[int]] = _ends()
"""Where blocks end, in bytes from the beginning of a prompt."""


def prefix_hashes(prompt: Prompt) -> list[int]:
    """The hash of each prefix that ends with a block, the shortest first; computed once for a prompt."""
    if prompt.hashes is not None:
        return prompt.hashes
    data = prompt.data
    num_bytes = len(data)
    running = blake2b(b"%d " % len(prompt.scope), digest_size=7)  # 56 bits: a small integer
    running.update(prompt.scope)
    hashes: list[int] = []
    start = 0
    for end in ENDS:
        if end > num_bytes:
            break
        running.update(data[start:end])
        hashes.append(int.from_bytes(running.digest(), "big"))
        start = end
    prompt.hashes = hashes
    return hashes


class _Holding:
    """What one life of one engine has been sent."""

    def __init__(self, endpoint: Endpoint, slot: int) -> None:
        self.endpoint = endpoint
        self.life = endpoint.life
        self.role: Role = endpoint.role
        self.slot = slot
        self.bit = 1 << slot
        self.num_bytes = 0
        self.sizes: OrderedDict[int, int] = OrderedDict()
        """Bytes of the last block by hash; the least recently used first, a prefix after those that begin with it."""


class PrefixIndex:
    """What the engines of a fleet have been sent.

    Args:
        entries_max: prefixes of all engines together, each with an equal share.
        engine_max_bytes: of one engine: a bound for what its KV cache holds.
    """

    def __init__(self, entries_max: int = ENTRIES_MAX, engine_max_bytes: int = ENGINE_MAX_BYTES) -> None:
        assert entries_max >= 1 and engine_max_bytes >= 0
        self.num_entries = 0
        self._entries_max = entries_max
        self._engine_max_bytes = engine_max_bytes
        self._share = entries_max
        """Entries that one engine may have."""
        self._holders: dict[int, int] = {}
        """For each hash a bit for each engine that has it."""
        self._holdings: dict[Endpoint, _Holding] = {}
        self._slots: list[_Holding | None] = []
        """By bit; None for one that is free, or still in entries of an engine that is forgotten."""
        self._free: list[int] = []
        self._roles: dict[Role, int] = {"prefill": 0, "decode": 0}
        """The bits of the engines of each role."""
        self._leaving: list[_Holding] = []
        """Forgotten, and some of their entries not yet taken away."""

    def match(self, prompt: Prompt, role: Role) -> dict[Endpoint, int]:
        """The engines of a role that have been sent a prefix of the prompt, and how many of its bytes.

        O(blocks + engines found). Engines that have not been sent a whole block of it are left out.
        """
        found: dict[Endpoint, int] = {}
        current = self._roles[role]
        if not current:
            return found
        holders = self._holders
        num_bytes = 0
        for depth, value in enumerate(prefix_hashes(prompt)):
            held = current & holders.get(value, 0)
            if held != current:
                if num_bytes:
                    self._add(found, current & ~held, num_bytes)
                current = held
                if not held:
                    break
            num_bytes = ENDS[depth]
        if current and num_bytes:
            self._add(found, current, num_bytes)
        return found

    def insert(self, endpoint: Endpoint, prompt: Prompt) -> None:
        """The prompt is sent to the engine."""
        hashes = prefix_hashes(prompt)
        if self._leaving:
            self._sweep(max(SWEPT_MIN, 2 * len(hashes)))
        if not hashes:
            return
        holding = self._holdings.get(endpoint)
        if holding is not None and holding.life != endpoint.life:
            self.forget(endpoint)
            holding = None
        if holding is None:
            holding = self._join(endpoint)
        num = len(hashes)
        while num > self._share or ENDS[num - 1] > self._engine_max_bytes:  # the end of one that is too long for it
            num -= 1
            if not num:
                return
        holders, sizes, bit = self._holders, holding.sizes, holding.bit
        for index in range(num - 1, -1, -1):  # the shortest prefix last: it goes last
            value = hashes[index]
            if value in sizes:
                sizes.move_to_end(value)
            else:
                size = ENDS[index] - ENDS[index - 1] if index else ENDS[0]
                sizes[value] = size
                holding.num_bytes += size
                self.num_entries += 1
                holders[value] = holders.get(value, 0) | bit
        while len(sizes) > self._share or holding.num_bytes > self._engine_max_bytes:
            self._drop_oldest(holding)
        if self.num_entries > self._entries_max:
            self._sweep(self.num_entries)

    def forget(self, endpoint: Endpoint) -> None:
        """The engine holds nothing any more, or is gone. O(1)."""
        holding = self._holdings.pop(endpoint, None)
        if holding is None:
            return
        self._slots[holding.slot] = None
        self._roles[holding.role] &= ~holding.bit
        self._leaving.append(holding)
        self._share = self._entries_max // max(1, len(self._holdings))

    def num_bytes_of(self, endpoint: Endpoint) -> int:
        """Bytes of prompts that are remembered of the engine; those that prompts share count once."""
        holding = self._holdings.get(endpoint)
        return holding.num_bytes if holding is not None and holding.life == endpoint.life else 0

    def validate(self) -> None:
        """Assert the invariants. Takes time in proportion to the entries."""
        assert self.num_entries <= self._entries_max
        held: dict[int, int] = {}
        num_entries = 0
        for holding in [*self._holdings.values(), *self._leaving]:
            num_entries += len(holding.sizes)
            assert holding.num_bytes == sum(holding.sizes.values()) <= self._engine_max_bytes
            for value in holding.sizes:
                held[value] = held.get(value, 0) | holding.bit
        assert held == self._holders, "the table and what engines have disagree"
        assert num_entries == self.num_entries
        bits = sum(holding.bit for holding in self._holdings.values())
        assert bits == self._roles["prefill"] | self._roles["decode"]
        for endpoint, holding in self._holdings.items():
            assert holding.endpoint is endpoint and self._slots[holding.slot] is holding
            assert len(holding.sizes) <= self._share
        taken = [one.slot for one in [*self._holdings.values(), *self._leaving]]
        assert sorted(taken + self._free) == list(range(len(self._slots))), "a bit is of two engines, or of none"

    # -- inside -----------------------------------------------------------------------------------------------------

    def _add(self, found: dict[Endpoint, int], bits: int, num_bytes: int) -> None:
        """The engines of these bits have so many bytes, unless they are in another life by now."""
        slots = self._slots
        while bits:
            low = bits & -bits
            bits ^= low
            holding = slots[low.bit_length() - 1]
            assert holding is not None
            if holding.life == holding.endpoint.life:
                found[holding.endpoint] = num_bytes

    def _join(self, endpoint: Endpoint) -> _Holding:
        """An engine that nothing is known of: the others' shares get smaller."""
        if self._free:
            slot = self._free.pop()
        else:
            slot = len(self._slots)
            self._slots.append(None)
        holding = _Holding(endpoint, slot)
        self._slots[slot] = self._holdings[endpoint] = holding
        self._roles[holding.role] |= holding.bit
        self._share = self._entries_max // len(self._holdings)
        for other in self._holdings.values():
            while len(other.sizes) > self._share:
                self._drop_oldest(other)
        return holding

    def _drop_oldest(self, holding: _Holding) -> None:
        value, size = holding.sizes.popitem(last=False)
        holding.num_bytes -= size
        self.num_entries -= 1
        left = self._holders[value] & ~holding.bit
        if left:
            self._holders[value] = left
        else:
            del self._holders[value]

    def _sweep(self, num: int) -> None:
        """Take away so many entries of engines that are forgotten."""
        while self._leaving:
            holding = self._leaving[-1]
            while holding.sizes:
                if not num:
                    return
                self._drop_oldest(holding)
                num -= 1
            self._free.append(holding.slot)
            self._leaving.pop()
