"""What this process has put into a service that cannot be asked cheaply: the books behind ``TierStore.usage``."""

from __future__ import annotations

import threading
from typing import Final

from antiphon.storage.tier import TierUsage

__all__ = ["KnownKeys"]

KNOWN_MAX: Final = 65_536
"""Keys remembered, about 10 MB; past it the one put longest ago is forgotten."""


class KnownKeys:
    """Keys and their bytes, at most ``KNOWN_MAX``. Thread-safe. What others put or the service evicted is not in it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_by_key: dict[bytes, int] = {}
        self._held_bytes = 0

    def add(self, key: bytes, num_bytes: int) -> None:
        with self._lock:
            self._held_bytes += num_bytes - self._bytes_by_key.pop(key, 0)
            self._bytes_by_key[key] = num_bytes
            while len(self._bytes_by_key) > KNOWN_MAX:
                self._held_bytes -= self._bytes_by_key.pop(next(iter(self._bytes_by_key)))

    def discard(self, key: bytes) -> None:
        with self._lock:
            self._held_bytes -= self._bytes_by_key.pop(key, 0)

    def usage(self, capacity_bytes: int | None) -> TierUsage:
        with self._lock:
            return TierUsage(len(self._bytes_by_key), self._held_bytes, capacity_bytes)
