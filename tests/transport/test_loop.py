"""The event loop of every process."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.transport.loop import run


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
