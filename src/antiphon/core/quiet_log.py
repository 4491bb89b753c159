"""Log lines that peers or repeating faults can cause, at a bounded rate: they must not fill the disk."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final

REPEAT_AFTER_S: Final = 30.0
CAUSES_MAX: Final = 64
"""Causes remembered; past it the one that happened longest ago is forgotten."""


class QuietLog:
    """Logs at most ``num_lines`` of a cause in ``repeat_after_s``; the next line says how many were left out.

    Safe for any thread.

    Args:
        log: where the lines go.
        clock_s: the time in seconds.
        num_lines: of one cause, before the others are left out.
        repeat_after_s: seconds until a cause is said again.
    """

    def __init__(
        self,
        log: logging.Logger,
        clock_s: Callable[[], float] = time.monotonic,
        *,
        num_lines: int = 1,
        repeat_after_s: float = REPEAT_AFTER_S,
    ) -> None:
        self._log = log
        self._clock_s = clock_s
        self._num_lines = num_lines
        self._repeat_after_s = repeat_after_s
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}  # cause -> when its window began, lines asked for since

    def info(self, cause: str, message: str, *values: object) -> None:
        """``message`` for information, unless this cause was logged a moment ago; ``values`` fill it in."""
        self._say(logging.INFO, cause, message, values, None)

    def warning(self, cause: str, message: str, *values: object) -> None:
        """``message`` as a warning, unless this cause was logged a moment ago; ``values`` fill it in."""
        self._say(logging.WARNING, cause, message, values, None)

    def error(self, cause: str, message: str, error: BaseException) -> None:
        """``message`` as an error with the traceback of ``error``: for bugs."""
        self._say(logging.ERROR, cause, message, (), error)

    def say(self, level: int, cause: str, message: str, *values: object) -> None:
        """``message`` at any level, unless this cause was logged a moment ago; ``values`` fill it in."""
        self._say(level, cause, message, values, None)

    def _say(
        self, level: int, cause: str, message: str, values: tuple[object, ...], error: BaseException | None
    ) -> None:
        now_s = self._clock_s()
        with self._lock:
            began_s, num_asked = self._said.pop(cause, (-math.inf, 0))
            num_left_out = 0
            if now_s - began_s >= self._repeat_after_s:
                num_left_out = max(0, num_asked - self._num_lines)
                began_s, num_asked = now_s, 0
            while len(self._said) >= CAUSES_MAX:
                self._said.pop(next(iter(self._said)))
            self._said[cause] = (began_s, num_asked + 1)
            if num_asked >= self._num_lines:
                return
        text = message % values if values else message
        more = f" ({num_left_out} more since the last line)" if num_left_out else ""
        self._log.log(level, "%s%s", text, more, exc_info=error)
