"""Two threads that ask each other for things: that of the cache, and that of the peers.

The peers have an event loop on a thread of their own, so that nothing that they do keeps an engine's call waiting. What
they need of the cache is done on the cache's loop, one small step at a time.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from antiphon.core.errors import AntiphonError, PeerTimeout

CACHE_TIMEOUT_S: Final = 2.0
"""The cache's loop answers in well under a millisecond; one that does not for so long is stuck."""

T = TypeVar("T")


class CacheThread:
    """The cache's thread, as others see it.

    Args:
        loop: its event loop, which runs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    async def call(self, step: Callable[[], T]) -> T:
        """Does ``step`` there, and returns what it does.

        Raises:
            PeerTimeout: that thread does not turn, or has ended.
            AntiphonError: as ``step``. Anything else that it raises is a bug of the cache, and raised there too.
        """
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(step())
            except AntiphonError as error:
                future.set_exception(error)
            except BaseException as error:  # supervised: raised again, where it ends the server
                future.set_exception(error)
                raise

        self.tell(run)
        return await self._wait(future)

    def tell(self, step: Callable[[], None]) -> None:
        """Has ``step`` done there, some time soon; not at all where that loop is closed."""
        try:
            self._loop.call_soon_threadsafe(step)
        except RuntimeError:
            pass  # closed: the cache is gone, and with it what the step is about

    async def wait_for(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine that runs there; it has a limit of its own."""
        try:
            future = asyncio.run_coroutine_threadsafe(waiting, self._loop)
        except RuntimeError:
            waiting.close()
            raise PeerTimeout("the cache's thread has ended") from None
        return await asyncio.wrap_future(future)

    async def _wait(self, future: concurrent.futures.Future[T]) -> T:
        try:
            async with asyncio.timeout(CACHE_TIMEOUT_S):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise PeerTimeout(f"the cache's thread did not turn for {CACHE_TIMEOUT_S:g} s") from None
