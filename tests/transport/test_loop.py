"""The event loop of every process."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.transport.loop import ended, run


def test_it_runs_on_uvloop_and_returns_the_result() -> None:
    async def main() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert run(main()) == "uvloop"


def test_errors_come_out_and_what_was_left_running_is_cancelled() -> None:
    left: list[asyncio.Task[None]] = []

    async def main() -> None:
        left.append(asyncio.create_task(asyncio.sleep(60)))
        await asyncio.sleep(0)
        raise KeyError("bug")

    with pytest.raises(KeyError):
        run(main())
    assert left[0].cancelled()


async def test_the_end_of_tasks_is_awaited_and_a_bug_of_theirs_comes_out() -> None:
    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)

    async def fails() -> None:
        raise KeyError("bug")

    waiting = asyncio.create_task(slow())
    await asyncio.sleep(0)
    waiting.cancel()
    await ended([waiting])
    assert waiting.cancelled()
    with pytest.raises(KeyError):
        await ended([waiting, asyncio.create_task(fails())])
    await ended([])


async def test_a_cancel_of_who_waits_for_the_end_of_tasks_is_heard() -> None:
    gate = asyncio.Event()

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await gate.wait()

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    task.cancel()
    waiting = asyncio.create_task(ended([task]))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled()
    gate.set()
    await ended([task])
