"""The KV blocks of a simulated engine: a finite number, shared by prefix, least recently used first to go.

A block with a key can be found by other requests; a block without one (the end of a prompt, the answer) is private.
Freed blocks with keys stay until their room is needed; of one request the last blocks go first.

Always true: the blocks that are held, by requests or for later ones, are at most the capacity; a block that a request
uses is not given away. What is not computed or pulled yet is held, and not found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class Blocks:
    """The blocks of one engine.

    Args:
        capacity: how many there are.
        on_removed: told the key of a block that could be found, and can no longer be.
    """

    def __init__(self, capacity: int, on_removed: Callable[[int], None]) -> None:
        self.capacity = capacity
        self.num_private = 0
        self._on_removed = on_removed
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._found: set[int] = set()

    @property
    def num_held(self) -> int:
        """Blocks that are not free."""
        return self.num_private + len(self._users) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that requests need."""
        return self.num_private + len(self._users)

    def match(self, keys: Sequence[int]) -> int:
        """How many of the first blocks can be found."""
        found = self._found
        for number, key in enumerate(keys):
            if key not in found:
                return number
        return len(keys)

    def take(self, keys: Sequence[int], num_private: int) -> bool:
        """Hold all blocks of a request, or none. Returns whether there was room."""
        users, idle = self._users, self._idle
        fresh = [key for key in keys if key not in users]
        kept = [key for key in fresh if key in idle]
        num_free = self.capacity - self.num_held
        if len(fresh) + num_private > num_free + len(idle):
            return False
        for key in kept:
            del idle[key]
        for key in keys:
            users[key] = users.get(key, 0) + 1
        self.num_private += num_private
        for _ in range(self.num_held - self.capacity):
            key, _ = idle.popitem(last=False)
            self._forget(key)
        return True

    def found(self, keys: Sequence[int]) -> list[int]:
        """These blocks are computed, or pulled: others find them. Returns those that could not be found before."""
        new = [key for key in keys if key not in self._found]
        assert all(key in self._users for key in new)
        self._found.update(new)
        return new

    def release(self, keys: Sequence[int], num_private: int) -> None:
        """A request needs its blocks no more."""
        users = self._users
        self.num_private -= num_private
        for key in reversed(keys):
            num = users[key] - 1
            if num:
                users[key] = num
                continue
            del users[key]
            if key in self._found:
                self._idle[key] = None

    def _forget(self, key: int) -> None:
        if key in self._found:
            self._found.discard(key)
            self._on_removed(key)

    def validate(self) -> None:
        """Assert the invariants."""
        assert 0 <= self.num_used <= self.num_held <= self.capacity, "more blocks are held than there are"
        assert not self._users.keys() & self._idle.keys(), "a block is both used and idle"
        assert self._found <= self._users.keys() | self._idle.keys(), "a block is found and not held"
        assert self._idle.keys() <= self._found
