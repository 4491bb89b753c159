"""The connections of a worker through which promises may be loaded, each held until none can come for it any more.

A lease lasts while any process of its engine is attached. So a load is safe through a connection that was there when
the lease was known to be held, and has not been closed since, ended or not; through a later one it is not: the engine
may have been without a connection in between, and the bytes be another's. A connection that came back is therefore kept
beside the ones before it.

Always true: what is held is not closed; at most one session that is held is open, and at most ``ENDED_MAX`` are not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from antiphon.client.session import Session

QUIET_S = 2.0
"""A session that ended is kept at least as long, unless too many have: a plan that needs it may be on its way."""

ENDED_MAX = 3
"""Sessions that ended and are held. A client keeps one more before it connects no more; what is loaded through the
oldest fails where there are more."""


@dataclass(slots=True, eq=False)
class _Held:
    """``lost_s``: when its end was noticed; None while it is open."""

    session: Session
    lost_s: float | None = None


class Sessions:
    """The sessions of one worker that are held, for all lives of the server."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._held: list[_Held] = []  # the oldest first

    def seen(self, session: Session) -> None:
        """A connection is there: it is held from here on."""
        with self._lock:
            if any(held.session is session for held in self._held) or not session.hold():
                return
            too_many = [held for held in self._held if not held.session.is_open][:-ENDED_MAX]
            self._held = [*(held for held in self._held if held not in too_many), _Held(session)]
        _retire(too_many)

    def borrow(self, incarnation: str, promised_at_s: float) -> Session | None:
        """The newest connection to that life of the server that was there at a time; None where there is none.

        The caller gives it back by ``unhold``. It may have ended.

        Args:
            promised_at_s: as in ``LoadPlan``.
        """
        with self._lock:
            for held in reversed(self._held):
                session = held.session
                is_there = session.incarnation == incarnation and session.opened_at_s <= promised_at_s
                if is_there and session.hold():
                    return session
        return None

    def let_go(self, promised: str | None, planned_s: float, in_use: Iterable[str], is_idle: bool) -> None:
        """Lets go of what no promise can come for any more.

        Args:
            promised: the life that the scheduler side promises on, as of the last plan whose loads are queued.
            planned_s: when that plan was made: later ones load what was promised later.
            in_use: lives that loads are queued for.
            is_idle: no step is running.
        """
        now_s = self._now_s()
        gone: list[_Held] = []
        with self._lock:
            busy = set(in_use)
            for number, held in enumerate(self._held):
                session = held.session
                if session.is_open or session.incarnation in busy:
                    continue
                if held.lost_s is None:
                    held.lost_s = now_s
                has_moved_on = promised != session.incarnation
                is_replaced = any(
                    newer.session.incarnation == session.incarnation and newer.session.opened_at_s <= planned_s
                    for newer in self._held[number + 1 :]
                )
                if now_s - held.lost_s >= QUIET_S and (has_moved_on or is_replaced or is_idle):
                    gone.append(held)
            self._held = [held for held in self._held if held not in gone]
        _retire(gone)

    def close(self) -> None:
        """Lets go of all."""
        with self._lock:
            held_before, self._held = self._held, []
        for held in held_before:
            held.session.unhold()


def _retire(gone: list[_Held]) -> None:
    for held in gone:
        held.session.retire()
        held.session.unhold()
