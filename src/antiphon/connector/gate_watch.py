"""Whether the workers of this engine have passed their gates: asked of the cache server, never waited for.

An answer holds for as long as its session, unless there is a reason to doubt it: a load that failed. A worker may have
lost its connection, or its gate may have turned.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Literal

from antiphon.client.session import Session
from antiphon.connector.requests import LookupCall
from antiphon.core.errors import AntiphonError
from antiphon.protocol import cache as calls

log = logging.getLogger("antiphon.connector")

GATE_AGAIN_S = 0.25
"""Between two questions whether the gates have passed: a worker that comes later is seen soon, and a gate that failed
does not cost a call in each step."""


class GateWatch:
    """Whether every worker of this engine has passed its gate, on the current session; asked until it is so.

    Args:
        num_ranks: workers of the engine.
        timeout_s: without an answer for so long nothing waits for it.
    """

    def __init__(self, num_ranks: int, timeout_s: float, now_s: Callable[[], float]) -> None:
        self._num_ranks = num_ranks
        self._timeout_s = timeout_s
        self._now_s = now_s
        self._passed: Session | None = None
        self._asked: LookupCall | None = None
        self._closed: tuple[Session, float] | None = None  # the last answer was no, and when
        self._is_doubted = False

    @property
    def is_doubted(self) -> bool:
        """Whether a load has failed and the workers have not been found well since: nothing is promised meanwhile."""
        return self._is_doubted

    def doubt(self) -> None:
        """What is known of the workers may have changed: they are asked again."""
        self._passed = self._asked = self._closed = None  # an answer on its way may be older than the change
        self._is_doubted = True

    def state(self, session: Session) -> Literal["passed", "asked", "closed"]:
        """``passed``: lookups make sense. ``asked``: the answer is on its way. Never waits."""
        if self._passed is session:
            return "passed"
        now_s = self._now_s()
        if self._closed is not None and self._closed[0] is session and now_s - self._closed[1] < GATE_AGAIN_S:
            return "closed"
        if self._asked is None or self._asked.session is not session:
            self._asked = LookupCall(session, session.submit(calls.AskProcesses()), now_s)
        asked = self._asked
        if not asked.pending.is_done:
            return "asked" if now_s - asked.sent_s < self._timeout_s else "closed"
        self._asked, self._closed = None, (session, now_s)
        try:
            answer = asked.pending.result()
        except AntiphonError as error:
            log.debug("the state of the workers is not known: %s", error)
            return "closed"
        assert isinstance(answer, calls.Processes)
        gates = [gate for role, gate in answer.processes if role.startswith("worker")]
        if len(gates) < self._num_ranks or any(gate != "passed" for gate in gates):
            return "closed"
        self._passed, self._closed, self._is_doubted = session, None, False
        return "passed"
