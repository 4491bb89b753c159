"""Leases that are owed back: each is released until the server has answered.

A release that was sent when its connection ended may not have been read, and while another process of the engine is
attached the lease then lives on. So it is sent again on the next session of the same life of the server. Any answer
ends the debt: ``LeaseUnknown`` says that an earlier release was read, or that the lease has ended with its engine. To
another life of the server nothing is owed.

Always true: a debt is sent once a session. Any thread may call anything here, and nothing waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol

from antiphon.client.pending import OnLate
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol.cache import Answered, Body, Release

_Debt = tuple[str, str, int]
"""Life of the server, request, and lease."""


class Sent(Protocol):
    """A call that was sent (``Pending``)."""

    def abandon(self) -> None:
        """Nobody waits for it: its answer goes to ``on_late``."""


class Creditor(Protocol):
    """What is needed of a session."""

    @property
    def incarnation(self) -> str:
        """Life of the server."""

    def give_back(self, body: Body, on_late: OnLate) -> Sent:
        """Sends a call that must find room; the session is given up where it finds none."""


class Releases:
    """What one client owes.

    Args:
        current: the session of the client, or None.
        owed_max: debts that are kept. Past it the oldest is left to the end of the engine's connections.
        log: for those.
    """

    def __init__(self, current: Callable[[], Creditor | None], owed_max: int, log: QuietLog) -> None:
        self._current = current
        self._owed_max = owed_max
        self._log = log
        self._lock = threading.Lock()
        self._owed: dict[_Debt, Creditor | None] = {}  # and the session it was sent on last; the oldest first

    def __len__(self) -> int:
        return len(self._owed)

    def owe(self, incarnation: str, request: str, lease: int) -> None:
        """Releases the lease now, or as soon as there is a session of that life of the server."""
        debt = incarnation, request, lease
        with self._lock:
            self._owed.setdefault(debt, None)
            is_over = len(self._owed) > self._owed_max
            if is_over:
                del self._owed[next(iter(self._owed))]
        if is_over:
            self._log.warning("owed", f"{self._owed_max} leases are to be released: the oldest is given up")
        session = self._current()  # after the debt is noted: a session that comes later finds it
        if session is not None:
            self._pay(session, (debt,))

    def pay(self, session: Creditor) -> None:
        """Sends what was not sent on this session; what is owed to another life of the server is void."""
        with self._lock:
            debts = tuple(self._owed)
        self._pay(session, debts)

    def _pay(self, session: Creditor, debts: tuple[_Debt, ...]) -> None:
        to_send: list[_Debt] = []
        with self._lock:
            for debt in debts:
                if debt not in self._owed:
                    continue
                if debt[0] != session.incarnation:
                    del self._owed[debt]
                elif self._owed[debt] is not session:
                    self._owed[debt] = session
                    to_send.append(debt)
        for debt in to_send:
            _, request, lease = debt
            session.give_back(Release(request, lease), partial(self._paid, debt)).abandon()

    def _paid(self, debt: _Debt, _answer: Answered) -> None:
        with self._lock:
            self._owed.pop(debt, None)

    def forget_in_child(self) -> None:
        """After a fork, in the child: the debts are the parent's."""
        self._lock = threading.Lock()
        self._owed.clear()
