"""The coordinator of the nodes' cache servers, held by the router's replica.

Invariants: it ends with the replica; while the replica lives, one that has ended is started again, after a second at
first and after half a minute at most. It is no reason for the replica to end: without it nothing is shared, and
requests go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from antiphon.config.plan import ProcessPlan
from antiphon.core.errors import StartError
from antiphon.ray.holder import Holder, HolderOptions
from antiphon.ray.replica import Tasks

AGAIN_S = 1.0
AGAIN_MAX_S = 30.0


class HeldCoordinator:
    """One coordinator.

    Args:
        plan: its process.
        options: how it is held.
        say: gets lines for the log of the replica; must not block.
        tasks: those of the replica, which are stopped before this is.
    """

    def __init__(self, plan: ProcessPlan, options: HolderOptions, say: Callable[[str], None], tasks: Tasks) -> None:
        self._plan, self._options, self._say, self._tasks = plan, options, say, tasks
        self._holder: Holder | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        """Of the process; None when there is none."""
        return None if self._holder is None else self._holder.pid

    async def start(self) -> None:
        """Start it and wait until it is ready.

        Raises:
            StartError: it did not become ready; nothing of it is left.
        """
        self._holder = Holder(self._plan, self._options, self._say)
        await self._holder.start(on_end=self._on_end)
        self._say(f"the coordinator of the cache servers listens (log: {self._holder.log_path})")

    async def stop(self) -> None:
        """End it. Nothing happens when nothing runs."""
        self._is_stopping = True
        if self._holder is not None:
            await self._holder.stop()

    def _on_end(self, reason: str) -> None:
        if not self._is_stopping:
            self._say(f"the coordinator {reason}: nothing is shared until it is started again")
            self._tasks.start(self._start_again(), "the coordinator's next start")

    async def _start_again(self) -> None:
        wait_s = AGAIN_S
        while True:
            if self._holder is not None:
                await self._holder.stop()  # what the one before has left
            await asyncio.sleep(wait_s)
            try:
                await self.start()
            except StartError as error:
                wait_s = min(2 * wait_s, AGAIN_MAX_S)
                self._say(f"the coordinator is tried again in {wait_s:g} s: {error}")
            else:
                return
