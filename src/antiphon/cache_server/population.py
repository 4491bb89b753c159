"""Takes the arena's memory in the background, piece by piece, on a thread of its own.

Always true:

- Progress only grows, and is told to the event loop's thread.
- No piece is begun while the machine, or a control group, has less free than the piece and ``KEPT_FREE_BYTES``: a
  page that cannot be had ends a process of a control group. Where memory is short, the thread waits and tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from antiphon.core.errors import CapacityExceeded
from antiphon.core.memory import KEPT_FREE_BYTES, available_memory_bytes
from antiphon.core.units import MIB
from antiphon.storage.arena import ArenaOwner

log = logging.getLogger("antiphon.cache_server")

PIECE_BYTES: Final = 16 * MIB
"""Taken at once, 16 ms or so: the end of the process waits no longer than that."""

_RETRY_S = 1.0
_PROGRESS_LINE_S = 10.0
_NICENESS = 10
"""Engines that are starting on the same cores come first."""


class Population:
    """Populates one arena.

    Args:
        arena: nobody may close it before ``stop`` has returned.
        on_progress: called on the loop's thread with the bytes populated so far.
        available_bytes: how much memory may still be taken.
    """

    def __init__(
        self,
        arena: ArenaOwner,
        on_progress: Callable[[int], None],
        available_bytes: Callable[[], int] = available_memory_bytes,
    ) -> None:
        self._arena = arena
        self._on_progress = on_progress
        self._available_bytes = available_bytes
        self._loop = asyncio.get_running_loop()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="antiphon-populate", daemon=True)
        self.populated_bytes = 0
        self.error: str | None = None

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread; waits for its piece."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()

    @property
    def is_alive(self) -> bool:
        """Whether it goes on, or is complete."""
        return self._thread.is_alive() or self.populated_bytes == self._arena.data_bytes

    def _run(self) -> None:
        with contextlib.suppress(PermissionError):  # a sandbox may forbid it; then it does not give way
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        total_bytes = self._arena.data_bytes
        began_s = told_s = time.monotonic()
        while self.populated_bytes < total_bytes and not self._stopping.is_set():
            size_bytes = min(PIECE_BYTES, total_bytes - self.populated_bytes)
            error = self._take(self.populated_bytes, size_bytes)
            self._tell(error)
            if error is not None:
                self._stopping.wait(_RETRY_S)
                continue
            self.populated_bytes += size_bytes
            self._loop.call_soon_threadsafe(self._pass_on, self.populated_bytes)
            if time.monotonic() - told_s > _PROGRESS_LINE_S:
                told_s = time.monotonic()
                log.info("%d of %d MB of the arena are populated", self.populated_bytes // 10**6, total_bytes // 10**6)
        if self.populated_bytes == total_bytes:
            log.info("the arena is populated: %d MB in %.1f s", total_bytes // 10**6, time.monotonic() - began_s)

    def _pass_on(self, populated_bytes: int) -> None:
        if not self._stopping.is_set():
            self._on_progress(populated_bytes)

    def _take(self, offset_bytes: int, size_bytes: int) -> str | None:
        """Populates a piece; returns why it could not."""
        available_bytes = self._available_bytes()
        if available_bytes < size_bytes + KEPT_FREE_BYTES:
            return f"{available_bytes // 10**6} MB of memory are free, and {KEPT_FREE_BYTES // 10**6} MB are left alone"
        try:
            self._arena.populate(offset_bytes, size_bytes)
        except CapacityExceeded as error:
            return error.message
        return None

    def _tell(self, error: str | None) -> None:
        if (error is None) != (self.error is None):
            if error is None:
                log.info("the arena grows again")
            else:
                log.error("the arena stays at %d MB for now: %s", self.populated_bytes // 10**6, error)
        self.error = error
