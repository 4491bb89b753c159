"""Whether a tier is used: it is left alone after its first failure, and probed until it answers.

Always true: while it is not closed, nothing but one probe at a time goes to the tier. The wait between two probes
doubles, up to a bound, and begins anew after a recovery.
"""

from __future__ import annotations

from enum import Enum


class BreakerState(Enum):
    """Of one tier."""

    __hash__ = object.__hash__
    CLOSED = "closed"
    """In use."""
    OPEN = "open"
    """Left alone until the next probe."""
    HALF_OPEN = "half_open"
    """A probe is under way."""


class Breaker:
    """The breaker of one tier.

    Args:
        retry_min_s: from the first failure to the first probe.
        retry_max_s: longest wait from a probe that failed to the next.
    """

    __slots__ = ("_retry_max_s", "_retry_min_s", "_retry_s", "num_opened", "reason", "retry_at_s", "state")

    def __init__(self, retry_min_s: float, retry_max_s: float) -> None:
        self._retry_min_s = retry_min_s
        self._retry_max_s = retry_max_s
        self._retry_s = retry_min_s
        self.state = BreakerState.CLOSED
        self.retry_at_s = 0.0
        self.reason = ""
        self.num_opened = 0

    @property
    def is_closed(self) -> bool:
        """Whether the tier is used."""
        return self.state is BreakerState.CLOSED

    def failed(self, now_s: float, reason: str) -> bool:
        """A call failed, or had no answer in time. Returns whether that has opened it."""
        if self.state is BreakerState.OPEN:
            return False  # one of several calls that were under way
        is_new = self.state is BreakerState.CLOSED
        self._retry_s = self._retry_min_s if is_new else min(2 * self._retry_s, self._retry_max_s)
        self.state = BreakerState.OPEN
        self.retry_at_s = now_s + self._retry_s
        self.reason = reason
        self.num_opened += is_new
        return is_new

    def is_due(self, now_s: float) -> bool:
        """Whether a probe may begin."""
        return self.state is BreakerState.OPEN and now_s >= self.retry_at_s

    def probing(self) -> None:
        """A probe begins."""
        assert self.state is BreakerState.OPEN, self.state
        self.state = BreakerState.HALF_OPEN

    def recovered(self) -> None:
        """A probe was answered in time."""
        assert self.state is BreakerState.HALF_OPEN, self.state
        self.state = BreakerState.CLOSED
        self.reason = ""

    def answered(self) -> None:
        """A call was answered in time: the probe, or one that was under way when another call failed."""
        if self.state is BreakerState.HALF_OPEN:
            self.recovered()
