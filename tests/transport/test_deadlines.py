"""One timer for many deadlines: who is told, when, and who is not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from antiphon.transport.http.deadlines import Deadlines, Timed
from tests.transport.http_edge import until


@dataclass(eq=False)
class Exchange:
    told: list[float] = field(default_factory=list)

    def expire(self) -> None:
        self.told.append(asyncio.get_running_loop().time())


async def test_each_is_told_once_when_its_time_is_up() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines(loop, 0.05)
    exchanges = [Exchange() for _ in range(5)]
    added = []
    for exchange in exchanges:
        added.append(loop.time())
        deadlines.add(exchange)
        await asyncio.sleep(0.01)
    await until(lambda: exchanges[-1].told)
    for exchange, began in zip(exchanges, added, strict=True):
        assert len(exchange.told) == 1
        assert exchange.told[0] - began >= 0.045
    assert exchanges[0].told < exchanges[-1].told
    await asyncio.sleep(0.06)
    assert [len(exchange.told) for exchange in exchanges] == [1] * 5


async def test_who_has_ended_is_not_told_and_the_next_one_is() -> None:
    deadlines = Deadlines(asyncio.get_running_loop(), 0.03)
    ended, late = Exchange(), Exchange()
    deadlines.add(ended)
    deadlines.remove(ended)
    deadlines.remove(ended)
    await asyncio.sleep(0.01)
    deadlines.add(late)
    await until(lambda: late.told)
    assert ended.told == []
    again = Exchange()
    deadlines.add(again)  # after a time without any
    await until(lambda: again.told)


async def test_one_that_is_told_may_end_another() -> None:
    deadlines = Deadlines(asyncio.get_running_loop(), 0.01)
    other = Exchange()

    class Ends:
        def expire(self) -> None:
            deadlines.remove(other)

    first: Timed = Ends()
    last = Exchange()
    deadlines.add(first)
    deadlines.add(other)
    deadlines.add(last)
    await until(lambda: last.told)
    assert other.told == []


async def test_nobody_is_told_after_the_close() -> None:
    deadlines = Deadlines(asyncio.get_running_loop(), 0.01)
    exchange = Exchange()
    deadlines.add(exchange)
    deadlines.close()
    await asyncio.sleep(0.03)
    assert exchange.told == []
