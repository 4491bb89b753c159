"""A log that says each thing once in a while, however often it happens."""

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
    """Logs one line a cause in ``REPEAT_AFTER_S``, with the number of lines left out. Safe for any thread.

    Args:
        log: where the lines go.
        clock_s: the time in seconds.
    """

    def __init__(self, log: logging.Logger, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}  # cause -> when it was said, lines left out since

    def info(self, cause: str, message: str) -> None:
        """``message`` for information, unless this cause was logged a moment ago."""
        self._say(logging.INFO, cause, message, None)

    def warning(self, cause: str, message: str) -> None:
        """``message`` as a warning, unless this cause was logged a moment ago."""
        self._say(logging.WARNING, cause, message, None)

    def error(self, cause: str, message: str, error: BaseException) -> None:
        """``message`` as an error with the traceback of ``error``: for bugs."""
        self._say(logging.ERROR, cause, message, error)

    def _say(self, level: int, cause: str, message: str, error: BaseException | None) -> None:
        now_s = self._clock_s()
        with self._lock:
            said_s, num_left_out = self._said.pop(cause, (-math.inf, 0))
            if now_s - said_s < REPEAT_AFTER_S:
                self._said[cause] = (said_s, num_left_out + 1)
                return
            while len(self._said) >= CAUSES_MAX:
                self._said.pop(next(iter(self._said)))
            self._said[cause] = (now_s, 0)
        more = f" ({num_left_out} more since the last line)" if num_left_out else ""
        self._log.log(level, "%s%s", message, more, exc_info=error)
