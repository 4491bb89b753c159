"""The event loop of every process here: uvloop; and the end of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` on a new uvloop event loop, cancel what it left behind, close the loop, return its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def heed_cancel() -> None:
    """For a task that goes on after errors of a group of tasks, which takes their place where a cancel comes with them.

    Raises:
        CancelledError: the current task was told to end.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def ended(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Waits until tasks that were cancelled have ended. A cancel of who waits is its own.

    Raises:
        Exception: what the first of them raised.
    """
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
