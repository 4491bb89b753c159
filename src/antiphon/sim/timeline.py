"""Virtual time: one queue of actions, one source of chance, one trace.

Always true: equal seeds give equal traces, byte for byte, in every process. So nothing here or in what it drives reads
a clock, and nothing iterates over a set of text or of objects.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from random import Random

Action = Callable[[], None]


class CheckFailed(AssertionError):
    """The simulation has seen what must not be."""


class Timeline:
    """Runs actions in the order of their times; equal times in the order in which they were added.

    Args:
        seed: decides everything that is left to chance.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now_s = 0.0
        self.trace: list[str] = []
        self.seen: Counter[str] = Counter()
        """What has occurred, by name: the coverage of a run."""
        self.is_calm = False
        """No more faults, hiccups and slow copies."""
        self.subject = ""
        """Whom the last count with a subject was about: the name of a process."""
        self._armed: dict[tuple[str, int], list[Action]] = {}
        self._queue: list[tuple[float, int, Action]] = []
        self._num_added = 0

    def after(self, delay_s: float, action: Action) -> None:
        """Runs ``action`` in ``delay_s`` seconds."""
        assert delay_s >= 0, delay_s
        self.at(self.now_s + delay_s, action)

    def at(self, time_s: float, action: Action) -> None:
        """Runs ``action`` at a time that is not past."""
        assert time_s >= self.now_s, (time_s, self.now_s)
        self._num_added += 1
        heapq.heappush(self._queue, (time_s, self._num_added, action))

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        self.trace.append(f"{self.now_s:.6f} {text}")

    def count(self, name: str, subject: str | None = None) -> None:
        """Something has occurred, to ``subject``."""
        self.seen[name] += 1
        self.subject = self.subject if subject is None else subject
        for action in self._armed.pop((name, self.seen[name]), ()):
            action()

    def when(self, name: str, number: int, action: Action) -> None:
        """Runs ``action`` when ``name`` has occurred ``number`` times."""
        self._armed.setdefault((name, number), []).append(action)

    def run_until(self, until_s: float, is_done: Callable[[], bool] | None = None) -> bool:
        """Runs what is due until ``until_s``, or until ``is_done``. Returns whether that came true."""
        while self._queue and self._queue[0][0] <= until_s:
            self.now_s, _, action = heapq.heappop(self._queue)
            action()
            if is_done is not None and is_done():
                return True
        self.now_s = max(self.now_s, until_s)
        return is_done is not None and is_done()

    def digest(self) -> str:
        """SHA-256 over the trace."""
        return sha256("\n".join(self.trace).encode()).hexdigest()
