"""When a process that ended by itself is started again: exponential back-off, a limited number in a window.

Pure: time is an argument. It starts nothing.
"""

from __future__ import annotations

from collections import deque

from antiphon.config.supervisor_spec import RestartSpec


class RestartBudget:
    """The restarts of one process.

    The wait doubles with each restart that is still in the window, so that a process that has been well for a whole
    window begins at ``backoff_first_s`` again.

    Args:
        spec: the policy.
        first_s: the wait before the first restart of a window, where it is to be shorter than the policy's, which the
            second then has. Seconds.
    """

    def __init__(self, spec: RestartSpec, *, first_s: float | None = None) -> None:
        self._spec = spec
        self._first_s = first_s
        self._restarts_s: deque[float] = deque(maxlen=spec.max_in_window + 1)

    def next_delay_s(self, now_s: float) -> float | None:
        """Seconds to wait before the restart that this call grants, or None when the process must not be restarted.

        ``now_s`` is any monotonic clock and never goes back between calls.
        """
        assert not self._restarts_s or now_s >= self._restarts_s[-1], (now_s, self._restarts_s)
        while self._restarts_s and now_s - self._restarts_s[0] >= self._spec.window_s:
            self._restarts_s.popleft()
        if not self._spec.enabled or len(self._restarts_s) >= self._spec.max_in_window:
            return None
        num_before = len(self._restarts_s)
        self._restarts_s.append(now_s)
        if self._first_s is not None:
            if num_before == 0:
                return min(self._first_s, self._spec.backoff_first_s, self._spec.backoff_max_s)
            num_before -= 1
        # 2.0**64 is past any permitted maximum, and keeps the power finite.
        return min(self._spec.backoff_first_s * 2.0 ** min(num_before, 64), self._spec.backoff_max_s)

    @property
    def num_in_window(self) -> int:
        """Restarts granted within the window of the last call."""
        return len(self._restarts_s)
