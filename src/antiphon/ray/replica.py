"""What the replicas of engines and router have in common: a process that is held, and an end that is clean.

Invariant: whatever way a replica ends, its process does not outlive it; see ``holder.py``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from antiphon.engine import vllm
from antiphon.ray import inside
from antiphon.ray.holder import Holder

log = logging.getLogger("ray.serve")
T = TypeVar("T")
HEALTH_TIMEOUT_S = 5.0
TASKS_TIMEOUT_S = 10.0
"""None of a replica's tasks waits for anything once it is cancelled."""


async def within(timeout_s: float, awaitable: Awaitable[T]) -> T:
    """What it gives, in time.

    Raises:
        TimeoutError: not in time.
    """
    async with asyncio.timeout(timeout_s):
        return await awaitable


class Tasks:
    """The tasks that a replica owns: cancelled and awaited at its end. One that fails is logged, and so is one that has
    not ended in time, which is awaited no longer."""

    def __init__(self, stop_timeout_s: float = TASKS_TIMEOUT_S) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._stop_timeout_s = stop_timeout_s

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if not tasks:
            return
        _, left = await asyncio.wait(tasks, timeout=self._stop_timeout_s)
        for task in left:
            log.error("antiphon: %s has not ended %g s after it was told to", task.get_name(), self._stop_timeout_s)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("antiphon: %s has failed", task.get_name(), exc_info=task.exception())


def end_replica(reason: str) -> None:
    """The process that this replica is for has ended: so does the replica, at once, and Serve starts another.

    Without this Serve would notice at the third health check. What the process has left is ended by its watchdog.
    """
    log.error("antiphon: this replica ends, because its process %s", reason)
    inside.end_process()


async def check_holder(holder: Holder | None) -> None:
    """Raises RuntimeError unless the process runs and answers its health check."""
    if holder is None or holder.pid is None or holder.ended is not None:
        reason = None if holder is None else holder.ended
        raise RuntimeError(f"its process does not run: {reason or 'it is stopped'}")
    url, path = holder.plan.base_url, holder.plan.ready_path
    if not await vllm.is_ready(url, path, timeout_s=HEALTH_TIMEOUT_S):
        raise RuntimeError(f"{holder.plan.name} does not answer {path} with 200 (log: {holder.log_path})")
