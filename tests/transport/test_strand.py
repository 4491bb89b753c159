"""Strands and promises: what goes on at once, what waits for the loop, and how each of them ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from antiphon.transport.http.strand import Promise, Strand
from tests.transport.http_edge import until

pytestmark = pytest.mark.interpreted  # a class of Python does not inherit from a compiled one


class Told(Strand):
    """A strand that notes how it ended."""

    def __init__(self, coroutine: Coroutine[Any, Any, None]) -> None:
        super().__init__(coroutine)
        self.ends: list[Exception | None] = []

    def ended(self, error: Exception | None) -> None:
        self.ends.append(error)


async def test_goes_on_in_the_stack_of_who_resolves() -> None:
    first: Promise[int] = Promise()
    second: Promise[str] = Promise()
    seen: list[object] = []

    async def work() -> None:
        seen.append(await first)
        seen.append(await second)

    strand = Told(work())
    assert seen == []
    strand.step()
    first.resolve(1)
    assert seen == [1]
    assert not strand.is_done
    second.resolve("two")
    assert seen == [1, "two"]
    assert strand.is_done
    assert strand.ends == [None]


async def test_what_is_there_already_is_not_waited_for() -> None:
    promise: Promise[int] = Promise()
    promise.resolve(1)
    promise.resolve(2)
    promise.fail(ValueError("late"))
    seen: list[int] = []

    async def work() -> None:
        seen.append(await promise)

    Told(work()).step()
    assert seen == [1]
    assert await promise == 1


async def test_failure_is_raised_where_it_is_awaited_and_told_at_the_end() -> None:
    promise: Promise[int] = Promise()
    error = ValueError("no")

    async def work() -> None:
        await promise

    strand = Told(work())
    strand.step()
    promise.fail(error)
    promise.resolve(1)
    assert strand.ends == [error]
    with pytest.raises(ValueError, match="no"):
        await promise


async def test_error_of_a_strand_without_listener_is_raised_where_it_was_continued() -> None:
    async def work() -> None:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        Strand(work()).step()


async def test_promise_in_a_task() -> None:
    promise: Promise[int] = Promise()
    task = asyncio.create_task(_result(promise))
    await asyncio.sleep(0)
    promise.resolve(7)
    assert not task.done(), "a task goes on at the loop's next turn"
    assert await task == 7


async def test_a_task_that_was_cancelled_leaves_the_promise_alone() -> None:
    promise: Promise[int] = Promise()
    task = asyncio.create_task(_result(promise))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    promise.resolve(7)
    assert await promise == 7


async def _result(promise: Promise[int]) -> int:
    return await promise


async def test_futures_tasks_and_bare_yields_of_asyncio() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    seen: list[object] = []

    async def work() -> None:
        await asyncio.sleep(0)
        seen.append("turn")
        seen.append(await future)
        seen.append(await asyncio.create_task(asyncio.sleep(0, "task")))
        async with asyncio.Lock():
            await asyncio.sleep(0.001)

    strand = Told(work())
    strand.step()
    assert seen == []
    await until(lambda: seen == ["turn"])
    future.set_result(5)
    await until(lambda: strand.is_done)
    assert seen == ["turn", 5, "task"]
    assert strand.ends == [None]


async def test_cancel_is_raised_at_the_wait_and_what_it_waited_for_is_cancelled() -> None:
    task = asyncio.create_task(asyncio.sleep(60))
    ends: list[str] = []

    async def work() -> None:
        try:
            await task
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        finally:
            ends.append("cleaned up")

    strand = Told(work())
    strand.step()
    strand.cancel()
    assert ends == ["cancelled", "cleaned up"]
    assert strand.ends == [None]
    strand.cancel()
    await asyncio.sleep(0)
    assert task.cancelled()
    assert ends == ["cancelled", "cleaned up"]
    assert strand.ends == [None]


async def test_cancelled_strand_may_still_wait() -> None:
    never: Promise[None] = Promise()
    last: Promise[None] = Promise()

    async def work() -> None:
        try:
            await never
        finally:
            await last

    strand = Told(work())
    strand.step()
    strand.cancel()
    never.resolve(None)
    assert not strand.is_done, "what it no longer waits for does not wake it"
    last.resolve(None)
    assert strand.ends == [None]


async def test_a_strand_begun_or_woken_by_another_keeps_them_apart() -> None:
    outer: Promise[str] = Promise()
    inner: Promise[str] = Promise()
    seen: list[str] = []

    async def second() -> None:
        seen.append(await inner)

    async def first() -> None:
        Told(second()).step()
        seen.append(await outer)
        inner.resolve("inner")
        seen.append("after inner")

    strand = Told(first())
    strand.step()
    outer.resolve("outer")
    assert seen == ["outer", "inner", "after inner"]
    assert strand.is_done
