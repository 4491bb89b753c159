"""The console: prefixed lines of every process and the supervisor's own, written so that nobody can be blocked by it.

Lines go into a bounded queue; one thread writes them. When nobody reads the console (a full pipe, a stopped terminal),
the queue fills, further lines are dropped and counted, and the count is printed as soon as there is room. When the
console is gone (closed pipe, hung-up terminal), lines are discarded for good. Log files are not affected.

It does not know what a line means.
"""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections import deque

QUEUE_LINES_MAX = 4000
"""Lines held while nobody reads: some seconds of two engines that log every request."""
LINE_CHARS_MAX = 4000
_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
OWN_NAME = "antiphon"


class Console:
    """A line writer over a file descriptor that never blocks its callers.

    Args:
        fd: where to write; not closed by the console.
        is_coloured: colour the prefixes with ANSI codes.
        has_logs: show the children's lines; the supervisor's own are always shown.
        queue_lines_max: most lines held while nobody reads.
    """

    def __init__(
        self,
        fd: int = 1,
        *,
        is_coloured: bool | None = None,
        has_logs: bool = True,
        queue_lines_max: int = QUEUE_LINES_MAX,
    ) -> None:
        self._fd = fd
        self._is_coloured = os.isatty(fd) and "NO_COLOR" not in os.environ if is_coloured is None else is_coloured
        self._has_logs = has_logs
        self._queue: deque[str] = deque()
        self._queue_lines_max = queue_lines_max
        self._changed = threading.Condition()
        self._num_dropped = 0
        self._num_dropped_total = 0
        self._is_closing = False
        self._is_idle = True
        self._is_gone = False
        self._colours: dict[str, int] = {}
        # A daemon, because a write that nobody reads never returns, and the program must be able to end all the same.
        self._thread = threading.Thread(target=self._write_all, name="antiphon-console", daemon=True)
        self._thread.start()

    def log_line(self, name: str, line: str) -> None:
        """A line of a child's log, shown as ``[name] line``; control characters are removed."""
        if self._has_logs:
            self._put(f"{self._prefix(name)}{_CONTROL.sub('', line)[:LINE_CHARS_MAX]}")

    def say(self, text: str) -> None:
        """The supervisor's own words, prefixed with ``[antiphon]``; may have several lines."""
        for line in text.splitlines():
            self._put(f"{self._prefix(OWN_NAME)}{line}")

    def plain(self, text: str) -> None:
        """Text without a prefix, so that it can be copied; may have several lines."""
        for line in text.splitlines() or [""]:
            self._put(line)

    def statistics(self) -> dict[str, int]:
        """``num_queued`` lines, and ``num_dropped`` since the start."""
        with self._changed:
            return {"num_queued": len(self._queue), "num_dropped": self._num_dropped_total}

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Write what is queued, for at most ``timeout_s``, then stop; further lines are discarded."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
            while (self._queue or not self._is_idle) and not self._is_gone and time.monotonic() < deadline:
                self._changed.wait(max(0.0, deadline - time.monotonic()))

    def _prefix(self, name: str) -> str:
        if not self._is_coloured:
            return f"[{name}] "
        colour = 1 if name == OWN_NAME else self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\x1b[{colour}m[{name}]\x1b[0m "

    def _put(self, line: str) -> None:
        with self._changed:
            if self._is_gone or self._is_closing:
                return
            if len(self._queue) >= self._queue_lines_max:
                self._num_dropped += 1
                self._num_dropped_total += 1
                return
            if self._num_dropped:
                notice = f"{self._num_dropped} lines were not shown: nobody read the console; the log files have them"
                self._num_dropped = 0
                self._queue.append(f"{self._prefix(OWN_NAME)}{notice}")
            self._queue.append(line)
            self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()
                while not self._queue:
                    if self._is_closing:
                        return
                    self._changed.wait()
                self._is_idle = False
                raw = ("\n".join(self._queue) + "\n").encode("utf-8", errors="replace")
                self._queue.clear()
            try:
                self._write(raw)
            except OSError:
                with self._changed:
                    self._is_gone = True
                    self._queue.clear()
                    self._changed.notify_all()
                return

    def _write(self, raw: bytes) -> None:
        view = memoryview(raw)
        while view:
            try:
                view = view[os.write(self._fd, view) :]
            except BlockingIOError:
                # Another program may have made the shared terminal non-blocking.
                select.select([], [self._fd], [])
