"""How long a lookup may wait for tiers: less than the engine would take to compute the same tokens.

The server is told the longest wait and the engine's speed with each lookup, and answers in time by itself; what is here
measures the speed, and says when an answer has not come although it should have. It never waits.
"""

from __future__ import annotations

from typing import Final

from antiphon.connector.requests import LookupCall

_TOKENS_MIN: Final = 64
"""A step of fewer tokens is a step of decoding, which says nothing of the speed of prefill."""
_FADING: Final = 0.9
"""Slower steps count little: the engine may have been idle in between."""


class PrefillRate:
    """Tokens that the engine computes in a second while it prefills, as measured over its last steps.

    Args:
        is_async: a step is planned while the one before it runs (vLLM's asynchronous scheduling): it begins when the
            next one is planned, and ends when the one after that is. Without, it begins when it is planned.
    """

    def __init__(self, *, is_async: bool = False) -> None:
        self.tokens_per_s = 0.0
        self._is_async = is_async
        self._num_tokens = 0
        self._began_s: float | None = None
        self._num_running = 0
        self._num_planned = 0

    def scheduled(self, num_tokens: int) -> None:
        """The step that is being planned computes these tokens too."""
        self._num_tokens += num_tokens

    def step(self, now_s: float) -> None:
        """The step is planned: the one that ran has ended, or is about to."""
        if self._began_s is not None and self._num_running >= _TOKENS_MIN and now_s > self._began_s:
            rate = self._num_running / (now_s - self._began_s)
            self.tokens_per_s = max(rate, _FADING * self.tokens_per_s + (1 - _FADING) * rate)
        self._began_s = now_s
        self._num_running, self._num_planned = (
            self._num_planned if self._is_async else self._num_tokens,
            self._num_tokens,
        )
        self._num_tokens = 0


def is_late(lookup: LookupCall, now_s: float, timeout_s: float) -> bool:
    """Whether the answer should be here by now.

    Args:
        timeout_s: for an answer that waits for nothing.
    """
    onboarding = lookup.pending.onboarding
    if onboarding is None:
        return now_s - lookup.sent_s >= timeout_s
    answer, came_s = onboarding
    return now_s - came_s >= answer.wait_s + timeout_s
