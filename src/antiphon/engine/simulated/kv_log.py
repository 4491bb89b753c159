"""What the prefix cache of a simulated engine has gained and lost: the events that vLLM would publish.

Owns a description of each cached block, and the events since they were last taken. Blocks are named by hashes that mean
nothing to anybody else, new in each life. Pure.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

from antiphon.engine.simulated.sequence import Sequence
from antiphon.protocol.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event


class _Description(NamedTuple):
    parent: int | None
    tokens: list[int]
    salt: str


class KvLog:
    """The log of one life of one engine.

    Args:
        secret: makes the names of blocks; other bytes in each life.
        block_size_tokens: tokens in a block.
    """

    def __init__(self, secret: bytes, block_size_tokens: int) -> None:
        self._secret = secret
        self._size = block_size_tokens
        self._known: dict[int, _Description] = {}
        self._events: list[Event] = []
        self._last: int | None = None
        """The key whose block the last event has stored last."""
        self._gone: dict[int, None] = {}
        """Forgotten since the last event; they may come back at once, in another place."""

    def describe(self, sequence: Sequence, index: int, key: int) -> None:
        """The full block ``index`` of ``sequence`` is about to be cached as ``key``."""
        if key in self._known:
            return
        start, end = index * self._size, (index + 1) * self._size
        num_prompt = len(sequence.prompt)
        tokens = sequence.prompt[start:end] + sequence.output[max(0, start - num_prompt) : max(0, end - num_prompt)]
        assert len(tokens) == self._size, "the block is not full"
        parent = sequence.keys[index - 1] if index else None
        self._known[key] = _Description(parent, tokens, sequence.namespace)

    def cached(self, key: int) -> None:
        """A block that was described is found by ``key`` from now on."""
        if key in self._gone:
            del self._gone[key]
            return
        self._tell_gone()
        parent, tokens, salt = self._known[key]
        name = self._name(key)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and parent is not None and parent == self._last:
            last.block_hashes.append(name)
            last.token_ids.extend(tokens)
            if last.extra_keys is not None:
                last.extra_keys.append(None)
        else:
            stored = BlockStored([name], None if parent is None else self._name(parent), list(tokens), self._size)
            stored.medium, stored.group_idx, stored.kv_cache_spec_kind = "GPU", 0, "full_attention"
            if salt and parent is None:
                stored.extra_keys = [[salt]]
            self._events.append(stored)
        self._last = key

    def forgot(self, key: int) -> None:
        """No block is found by ``key`` any more."""
        self._gone[key] = None

    def cleared(self) -> None:
        """No block is found by any key."""
        self._known.clear()
        self._gone.clear()
        self._events.append(AllBlocksCleared())
        self._last = None

    def take(self) -> list[Event]:
        """The events since the last call."""
        self._tell_gone()
        events, self._events = self._events, []
        self._last = None
        return events

    def _tell_gone(self) -> None:
        for key in self._gone:
            del self._known[key]
            self._events.append(BlockRemoved([self._name(key)], "GPU", 0))
            self._last = None
        self._gone.clear()

    def _name(self, key: int) -> int:
        data = key.to_bytes(32, "big")
        return int.from_bytes(blake2b(data, digest_size=8, key=self._secret).digest(), "big")
