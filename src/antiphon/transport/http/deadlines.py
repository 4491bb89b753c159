"""Deadlines of exchanges that are all given the same time: one timer of the event loop for all of them.

A timer for each exchange would be set and cancelled with it, and would hardly ever fire.
"""

from __future__ import annotations

import asyncio
from typing import Protocol


class Timed(Protocol):
    """Something that is told when its time is up."""

    def expire(self) -> None:
        """The time is up, and nobody said that it has ended."""


class Deadlines:
    """What was added less than ``timeout_s`` ago and has not been removed since."""

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._loop = loop
        self._timeout_s = timeout_s
        self._due: dict[Timed, float] = {}  # in the order of their deadlines, since all are given the same time
        self._timer: asyncio.TimerHandle | None = None

    def add(self, timed: Timed) -> None:
        """``timed.expire`` is called in ``timeout_s``, unless :meth:`remove` comes first."""
        self._due[timed] = self._loop.time() + self._timeout_s
        if self._timer is None:
            self._timer = self._loop.call_later(self._timeout_s, self._look)

    def remove(self, timed: Timed) -> None:
        """It has ended, or was told."""
        self._due.pop(timed, None)

    def close(self) -> None:
        """Tell nobody any more."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        """The first deadline has passed, or what it belonged to has ended and there is another one to wait for."""
        self._timer = None
        now = self._loop.time()
        late = []
        for timed, due in self._due.items():
            if due > now:
                self._timer = self._loop.call_later(due - now, self._look)
                break
            late.append(timed)
        for timed in late:
            if self._due.pop(timed, None) is not None:
                timed.expire()
