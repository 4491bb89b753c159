"""Waits until a numbered log has grown past a number, for long polls."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Waiters:
    """Who waits for a log to grow. On one event loop; bounded by the connections of the admin server.

    Args:
        next_sequence: the number that the next entry will have.
    """

    def __init__(self, next_sequence: Callable[[], int]) -> None:
        self._next_sequence = next_sequence
        self._futures: set[asyncio.Future[None]] = set()

    def wake(self) -> None:
        """The log has grown."""
        for future in self._futures:
            if not future.done():
                future.set_result(None)

    async def wait(self, sequence: int, timeout_s: float) -> bool:
        """Whether an entry of number ``sequence`` or later exists; waits for one up to ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._next_sequence() <= sequence:
                    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._futures.add(future)
                    try:
                        await future
                    finally:
                        self._futures.discard(future)
        except TimeoutError:
            return False
        return True
