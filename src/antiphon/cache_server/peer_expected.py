"""Chunks that other cache servers will have, since an engine of theirs has handed them over. No input, output or clock.

Always true: what is expected is bounded, and forgotten when its time is over; a chunk that nobody has begun to store is
expected for ``UNSEEN_MAX_S`` at most.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from antiphon.cache.awaiting import UNSEEN_MAX_S
from antiphon.protocol.peers import HELD_KEYS_MAX, Holder

EXPECTED_MAX: Final = 65_536
GONE_MAX: Final = 4_096

Question = tuple[Holder, list[tuple[bytes, bytes]]]
"""What is to be asked of whom: tier key and chunk key of each chunk."""


@dataclass(slots=True)
class _Expected:
    holder: Holder
    chunk_key: bytes
    since_s: float
    until_s: float


class Expectations:
    """What is expected of which server, by tier key."""

    def __init__(self) -> None:
        self._expected: OrderedDict[bytes, _Expected] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._expected)

    def add(self, holder: Holder, chunks: Sequence[tuple[bytes, bytes]], now_s: float, wait_s: float) -> None:
        """The holder will have these chunks; somebody waits ``wait_s`` for them."""
        while self._expected and next(iter(self._expected.values())).until_s <= now_s:
            self._expected.popitem(last=False)
        for tier_key, chunk_key in chunks:
            self._gone.pop(tier_key, None)
            self._expected.pop(tier_key, None)
            self._expected[tier_key] = _Expected(holder, chunk_key, now_s, now_s + wait_s)
        while len(self._expected) > EXPECTED_MAX:
            self._expected.popitem(last=False)

    def is_expected(self, key: bytes, now_s: float) -> bool:
        """Whether the chunk is still to come."""
        found = self._expected.get(key)
        return found is not None and found.until_s > now_s

    def is_gone(self, key: bytes) -> bool:
        """Whether the chunk was expected, and will not come."""
        return key in self._gone

    def questions(self, keys: Sequence[bytes], now_s: float) -> list[Question]:
        """What is to be asked of whom, about those of ``keys`` that are expected."""
        by_holder: dict[Holder, list[tuple[bytes, bytes]]] = {}
        for key in keys:
            if self.is_expected(key, now_s):
                found = self._expected[key]
                by_holder.setdefault(found.holder, []).append((key, found.chunk_key))
        return [
            (holder, chunks[first : first + HELD_KEYS_MAX])
            for holder, chunks in by_holder.items()
            for first in range(0, len(chunks), HELD_KEYS_MAX)
        ]

    def answered(self, chunks: Sequence[tuple[bytes, bytes]], states: Sequence[str], now_s: float) -> list[bytes]:
        """The holder has answered; returns the tier keys of what can be lent, which is expected no more."""
        readable = []
        for (key, _), state in zip(chunks, states, strict=True):
            found = self._expected.get(key)
            if state == "readable":
                readable.append(key)
                self._expected.pop(key, None)
            elif state == "refused" or (state == "unseen" and found and now_s - found.since_s >= UNSEEN_MAX_S):
                self.lost([(key, b"")])
        return readable

    def lost(self, chunks: Sequence[tuple[bytes, bytes]]) -> None:
        """These do not come."""
        for key, _ in chunks:
            if self._expected.pop(key, None) is not None:
                self._gone[key] = None
        while len(self._gone) > GONE_MAX:
            self._gone.popitem(last=False)
