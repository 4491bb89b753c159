"""Long polls of the numbered logs: ``/events`` and ``/reports``.

Always true:

- An answer has at most ``EVENTS_MAX`` entries and names the next number to ask for, so that an asker who goes on from
  there sees each entry once, or is told how many it missed.
- At most ``WAITING_MAX`` askers wait; one more is refused. A wait ends at its time, when the asker leaves, and when the
  server stops.
- Who asks for a number of another life gets this life from its start, at once: it has to begin anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, TypeVar

from antiphon.cache_server.admin_request import PollQuery
from antiphon.core.errors import RequestRefused
from antiphon.transport.http.server import Responder

E = TypeVar("E")

EVENTS_MAX: Final = 1_000
"""Entries of one answer, some 400 KB: an asker who is behind asks again at once."""

WAITING_MAX: Final = 64
"""Askers that wait: routers and a person or two; each holds a connection and a task."""


@dataclass(frozen=True, slots=True)
class Page(Generic[E]):
    """A stretch of a log: its entries, the number to ask for next, and how many of those asked for are lost."""

    entries: Sequence[E]
    next_sequence: int
    num_lost: int


@dataclass(frozen=True)
class NumberedLog(Generic[E]):
    """A log that can be polled.

    Args:
        since: reads a page; ValueError for a number beyond the log.
        wait: returns when there is an entry of that number, or after that many seconds.
        show: an entry as JSON values; None for one that is not shown.
    """

    since: Callable[[int, int], Page[E]]
    wait: Callable[[int, float], Awaitable[object]]
    show: Callable[[E], dict[str, object] | None]


@dataclass
class _Found:
    events: list[dict[str, object]]
    next_sequence: int
    num_lost: int
    has_restarted: bool


class LongPolls:
    """Answers polls and keeps who waits.

    Args:
        incarnation: of this life of the server.
    """

    def __init__(self, incarnation: str) -> None:
        self._incarnation = incarnation
        self._waits: set[asyncio.Future[object]] = set()
        self._is_closed = False

    async def answer(self, log: NumberedLog[E], query: PollQuery, responder: Responder) -> dict[str, object]:
        """The answer to one poll, waiting for it as long as the query allows.

        Raises:
            RequestRefused: 503, too many wait already.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + query.wait_s
        is_other_life = query.incarnation is not None and query.incarnation != self._incarnation
        found = _read(log, 1 if is_other_life else query.since)
        num_lost = found.num_lost
        is_urgent = is_other_life or found.has_restarted
        while not (found.events or num_lost or is_urgent or self._is_closed or responder.is_disconnected):
            left_s = deadline_s - loop.time()
            if left_s <= 0:
                break
            await self._wait(partial(log.wait, found.next_sequence, left_s), responder)
            found = _read(log, found.next_sequence)
            num_lost += found.num_lost
        return {
            "incarnation": self._incarnation,
            "next": found.next_sequence,
            "num_lost": num_lost,
            "events": found.events,
        }

    async def _wait(self, entry: Callable[[], Awaitable[object]], responder: Responder) -> None:
        if len(self._waits) >= WAITING_MAX:
            raise RequestRefused(
                f"{WAITING_MAX} askers wait already; ask again without wait_s, or later",
                status=503,
                kind="service_unavailable",
                code="too_many_waiting",
            )
        wait = asyncio.ensure_future(entry())
        self._waits.add(wait)
        responder.on_disconnect = lambda: _cancel(wait)
        try:
            await asyncio.wait({wait})
        finally:
            responder.on_disconnect = None
            wait.cancel()
            self._waits.discard(wait)
        if not wait.cancelled():
            wait.result()

    @property
    def num_waiting(self) -> int:
        """Askers that wait now."""
        return len(self._waits)

    def close(self) -> None:
        """End every wait: who waits is answered with what there is."""
        self._is_closed = True
        for wait in self._waits:
            wait.cancel()


def _cancel(wait: asyncio.Future[object]) -> None:
    wait.cancel()


def _read(log: NumberedLog[E], since: int) -> _Found:
    """From ``since`` on, skipping what is not shown; from the start where ``since`` is beyond the log."""
    num_lost = 0
    has_restarted = False
    while True:
        try:
            page = log.since(since, EVENTS_MAX)
        except ValueError:
            assert since != 1, "a log begins at 1"
            since, has_restarted = 1, True
            continue
        num_lost += page.num_lost
        shown = [entry for entry in map(log.show, page.entries) if entry is not None]
        if shown or not page.entries:
            return _Found(shown, page.next_sequence, num_lost, has_restarted)
        since = page.next_sequence
