"""Log lines that peers can cause, at a bounded rate: a fault that repeats must not fill the disk."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_LINES_PER_WINDOW = 10
_WINDOW_S = 10.0


class QuietLog:
    """Passes at most ``_LINES_PER_WINDOW`` lines of a kind in a window, and says how many it left out.

    Args:
        log: where the lines go.
        clock: seconds.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._windows: dict[str, tuple[float, int]] = {}  # kind: when the window began, lines asked for in it

    def say(self, level: int, kind: str, message: str, *values: object) -> None:
        """Logs, unless too much of this kind was logged.

        Args:
            kind: one of a fixed few: every kind is remembered.
        """
        now_s = self._clock()
        began_s, num_lines = self._windows.get(kind, (now_s, 0))
        if now_s - began_s > _WINDOW_S:
            if num_lines > _LINES_PER_WINDOW:
                self._log.log(level, "(%d more lines of %s were left out)", num_lines - _LINES_PER_WINDOW, kind)
            began_s, num_lines = now_s, 0
        self._windows[kind] = (began_s, num_lines + 1)
        if num_lines < _LINES_PER_WINDOW:
            self._log.log(level, message, *values)
