"""How often the router may try again: a budget over all requests, and the wait before the next try.

Always true of a :class:`RetryBudget`: retries never exceed ``share`` of the requests, plus the floor, plus what the
floor has regained. So a pool that fails cannot multiply its load by more than 1 + ``share`` for long. A connection that
is refused costs no engine anything: passing it over is not a retry and is not counted here.
"""

from __future__ import annotations


class RetryBudget:
    """A token bucket.

    Args:
        share: what each request adds.
        floor: what there is at the start, and what time alone refills up to.
        floor_per_s: how fast it does.
        saved_max: the most that is kept.
    """

    __slots__ = ("_floor", "_floor_per_s", "_last_s", "_saved", "_saved_max", "_share", "num_denied", "num_retries")

    def __init__(self, share: float, floor: float, floor_per_s: float, saved_max: float) -> None:
        assert 0 <= share <= 1 and 0 <= floor <= saved_max and floor_per_s >= 0
        self._share = share
        self._floor = floor
        self._floor_per_s = floor_per_s
        self._saved_max = saved_max
        self._saved = floor
        self._last_s: float | None = None
        self.num_retries = 0
        self.num_denied = 0

    @property
    def saved(self) -> float:
        """Retries that are allowed at this moment."""
        return self._saved

    def request(self) -> None:
        """A request came in."""
        saved = self._saved + self._share
        self._saved = saved if saved < self._saved_max else self._saved_max

    def allow(self, now_s: float) -> bool:
        """Whether a retry is allowed; if so, it is taken."""
        if self._last_s is not None and self._saved < self._floor:
            regained = max(0.0, now_s - self._last_s) * self._floor_per_s
            self._saved = min(self._floor, self._saved + regained)
        self._last_s = now_s
        if self._saved < 1:
            self.num_denied += 1
            return False
        self._saved -= 1
        self.num_retries += 1
        return True

    def validate(self) -> None:
        """Assert the invariants."""
        assert 0 <= self._saved <= self._saved_max


def backoff_s(num_failures: int, min_s: float, max_s: float, jitter: float) -> float:
    """The wait after so many failures (1 and up): doubled each time up to ``max_s``, then 0.5 to 1.0 of it by
    ``jitter`` (0 to 1), so that routers that failed together do not come back together."""
    assert num_failures >= 1 and 0 <= jitter <= 1
    return min(max_s, min_s * 2.0 ** min(num_failures - 1, 32)) * (0.5 + 0.5 * jitter)
