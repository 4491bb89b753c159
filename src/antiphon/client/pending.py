"""One call that was sent: its answer when it comes, its error when none can come."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from antiphon.core.errors import AntiphonError
from antiphon.protocol.cache import Answered, Body, Failure, Onboarding, error_of

OnLate = Callable[[Answered], None]


class Calls(Protocol):
    """What a call needs of the session that it belongs to."""

    def poll(self) -> None:
        """Takes in the answers that have arrived, without waiting."""

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for it any more."""


class Pending:
    """A call and, once it is done, its answer or its error. Safe for any thread.

    Args:
        calls: the session it was sent on.
        body: the call.
        sent_at_s: when, on the monotonic clock.
        on_late: told of an answer that comes after ``abandon``, once the client has undone it; it must not wait.

    A lookup that waits for tiers is not done, and has ``onboarding``: what the server said first, and when that came.
    """

    __slots__ = (
        "_answer",
        "_calls",
        "_error",
        "_gate",
        "_is_done",
        "body",
        "is_abandoned",
        "is_read",
        "on_late",
        "onboarding",
        "sent_at_s",
    )

    def __init__(self, calls: Calls, body: Body, sent_at_s: float, on_late: OnLate | None = None) -> None:
        self.body = body
        self.sent_at_s = sent_at_s
        self.on_late = on_late
        self.is_abandoned = False
        self.is_read = False
        self.onboarding: tuple[Onboarding, float] | None = None
        self._calls = calls
        self._answer: Answered | None = None
        self._error: AntiphonError | None = None
        self._is_done = False
        self._gate = threading.Lock()
        self._gate.acquire()

    @property
    def is_done(self) -> bool:
        """Whether there is an answer or an error; never waits."""
        if not self._is_done and not self.is_abandoned:
            self._calls.poll()
        return self._is_done

    def result(self) -> Answered:
        """The answer. The call must be done.

        Raises:
            CacheUnavailable: it was not sent, or the connection ended before the answer.
            CacheError: of the ``Failure`` that the server answered with, in its own class.
        """
        assert self._is_done, "the call is not done"
        self.is_read = True
        if self._error is not None:
            raise self._error
        assert self._answer is not None
        if isinstance(self._answer, Failure):
            raise error_of(self._answer)
        return self._answer

    def wait(self, timeout_s: float) -> bool:
        """Waits until the call is done, at most ``timeout_s``; whether it is."""
        if not self._is_done and self._gate.acquire(timeout=max(0.0, timeout_s)):
            self._gate.release()
        return self._is_done

    def abandon(self) -> None:
        """Nobody waits any more: what the answer grants is given back when it comes, or now if it has come unread."""
        self._calls.abandon(self)

    # ---- for the session, under its lock -------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Whether there is an error: no answer will come."""
        return self._error is not None

    @property
    def answer(self) -> Answered | None:
        """The answer that has come, if any."""
        return self._answer

    def complete(self, answer: Answered | None, error: AntiphonError | None = None) -> None:
        """The answer, or the error, has come."""
        assert not self._is_done, "a call is done once"
        assert (answer is None) != (error is None)
        self._answer, self._error, self._is_done = answer, error, True
        self._gate.release()
