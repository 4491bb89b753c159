"""Whether the engine of a worker has started: its workers have warmed up and captured their CUDA graphs.

vLLM does not tell connectors in so many words. It asks every worker for what connectors hand over to each other when
that is done, but inside a ``MultiConnector`` none after the first that has something, as NIXL has. The first step comes
later still, and for ever later in an engine that nobody uses. But vLLM makes its scheduler after all that, and with it
the scheduler side of this connector: where that one is attached to the cache server, the engine has started.

It asks the server, never waits, and is used by one thread; ``has_started`` may be set by any.
"""

from __future__ import annotations

import logging

from antiphon.client.pending import Pending
from antiphon.client.session import Session
from antiphon.core.errors import AntiphonError
from antiphon.protocol import cache as calls

log = logging.getLogger("antiphon.connector")

SCHEDULER_ROLE = "scheduler"
"""Of the scheduler side, as the cache server is told."""


class StartWatch:
    """One question on its way at most."""

    def __init__(self) -> None:
        self.has_started = False
        self._asked: Pending | None = None

    def look(self, session: Session | None) -> bool:
        """Whether the engine has started, as far as the server has said by now."""
        if self.has_started or session is None:
            return self.has_started
        if self._asked is None:
            self._asked = session.submit(calls.AskProcesses())
        if not self._asked.is_done:
            return False
        asked, self._asked = self._asked, None
        try:
            answer = asked.result()
        except AntiphonError as error:
            log.debug("whether the engine has started is not known: %s", error)
            return False
        assert isinstance(answer, calls.Processes)
        return any(role == SCHEDULER_ROLE for role, _ in answer.processes)
