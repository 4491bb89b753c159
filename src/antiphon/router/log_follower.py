"""Follows a numbered log of one cache server: a long poll, again and again.

Always true: within one life of the server each entry is handed on once, in order; after a restart of the server it
begins anew with the new life. A server that cannot be reached, or answers with something else, is asked again after a
pause that doubles up to ``BACKOFF_MAX_S``. What the entries mean is for who derives from it.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Final, Generic, TypeVar
from urllib.parse import quote, urlsplit

from antiphon.core.errors import ProtocolError, UpstreamError
from antiphon.protocol.pages import Page
from antiphon.transport.http.client import HttpPool, request_head

log = logging.getLogger("antiphon.router")

E = TypeVar("E")

WAIT_S: Final = 10.0
"""How long the server may hold an answer back for want of entries."""

ANSWER_TIMEOUT_S: Final = 3.0
"""How long it may take beyond that: a server that is stopped or stuck shows after so long."""

PAUSE_S: Final = 0.05
"""Between two polls, so that many entries cost one exchange: the router has requests to serve."""

PAGE_FULL: Final = 1_000
"""Entries of an answer from which on there are probably more, which are asked for at once."""

PAGE_BYTES_MAX: Final = 8_388_608
"""An answer has at most 1000 entries of some 400 bytes; names of the greatest length make it 4 MB."""

SLICE: Final = 100
"""Entries that are handed on in a row, about a millisecond: others have their turn in between."""

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0


class LogFollower(ABC, Generic[E]):
    """Follows one log of one server.

    Args:
        url: the server's admin address, ``http://HOST:PORT``.
        connect_timeout_s: how long a connection attempt may take.
    """

    route: ClassVar[str]
    """Path of the log."""
    name: ClassVar[str]
    """What its entries are, for messages."""

    def __init__(self, url: str, connect_timeout_s: float) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, url
        self.url = url
        self.incarnation: str | None = None
        """The life of the server that was seen last."""
        self.is_up = False
        self.detail: str | None = "not asked yet"
        """Why it is not up; None while it is."""
        self.num_invalid = 0
        self.num_entries = 0
        self.num_lost = 0
        self.num_lives = 0
        self._next = 1
        self._pool = HttpPool(parts.hostname, parts.port, connections_max=2, connect_timeout_s=connect_timeout_s)

    # -- what derives from it says ----------------------------------------------------------------------------------

    @abstractmethod
    def _read(self, body: bytes) -> tuple[Page[E], int]:
        """The page in an answer, and how many of its entries cannot be read. Raises ProtocolError."""

    @abstractmethod
    def _number(self, entry: E) -> int:
        """The number of an entry."""

    @abstractmethod
    def _receive(self, entries: Sequence[E], num_invalid: int) -> None:
        """Takes the next entries, and how many besides cannot be used."""

    async def _prepare(self) -> None:
        """Comes before each poll. Raises UpstreamError or ProtocolError as a poll does."""

    def _lost(self, num_lost: int) -> None:
        """Entries of this life are lost, or, with 0, another life has begun. Comes before the entries that follow."""

    def _came_up(self) -> None:
        """The server answers, for the first time or again. Comes before the entries that follow."""

    def _went_down(self) -> None:
        """The server does not answer. May be said again."""

    # -- following --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Follow until cancelled."""
        backoff_s = BACKOFF_MIN_S
        try:
            while True:
                try:
                    await self._prepare()
                    pause_s = await self._poll()
                    backoff_s = BACKOFF_MIN_S
                except (UpstreamError, ProtocolError) as error:
                    self._set_down(error.message)
                    pause_s, backoff_s = backoff_s, min(2 * backoff_s, BACKOFF_MAX_S)
                except Exception as error:  # supervised: a bug here must not end the following for ever
                    log.exception("following the %s of %s failed", self.name, self.url)
                    self._set_down(f"internal error: {type(error).__name__}")
                    pause_s = backoff_s = BACKOFF_MAX_S
                await asyncio.sleep(pause_s)
        finally:
            self._pool.close()

    def status(self) -> dict[str, object]:
        """What is known of the server, for people."""
        return {
            "url": self.url,
            "is_up": self.is_up,
            "detail": self.detail,
            "incarnation": self.incarnation,
            "num_lives": self.num_lives,
            f"num_{self.route[1:]}": self.num_entries,
            "num_lost": self.num_lost,
            "num_invalid": self.num_invalid,
        }

    async def _get(self, target: str, timeout_s: float) -> bytes:
        """The body of an answer.

        Raises:
            UpstreamError, ProtocolError: there is no answer, or none that can be used.
        """
        head = request_head("GET", target, self._pool.authority, [(b"accept", b"*/*")], length=None)
        response = await self._pool.fetch([head], timeout_s=timeout_s, body_max_bytes=PAGE_BYTES_MAX)
        if response.status != 200:
            said = response.body[:200].decode("utf-8", "replace")
            raise ProtocolError(f"{target.partition('?')[0]} answered with {response.status}: {said}")
        return response.body

    async def _poll(self) -> float:
        """One exchange; returns the seconds until the next.

        Raises:
            UpstreamError, ProtocolError: there is no answer, or none that can be used.
        """
        wait_s = WAIT_S if self.is_up else 0.0  # the first answer says at once that it is up
        target = f"{self.route}?since={self._next}&wait_s={wait_s:g}"
        if self.incarnation is not None:
            target += f"&incarnation={quote(self.incarnation, safe='')}"
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        page, num_invalid = self._read(await self._get(target, wait_s + ANSWER_TIMEOUT_S))
        entries = self._take(page, num_invalid)
        num_seen = len(page.events) + num_invalid
        for first in range(0, num_seen, SLICE):
            self._receive(entries[first : first + SLICE], num_seen - len(entries) if first == 0 else 0)
            await asyncio.sleep(0)
        if num_seen >= PAGE_FULL:
            return 0.0
        is_early = num_seen == 0 and loop.time() - began_s < wait_s / 2  # it is stopping, or does not wait at all
        return BACKOFF_MIN_S if is_early else PAUSE_S

    def _take(self, page: Page[E], num_invalid: int) -> list[E]:
        """Take note of one answer; returns its entries.

        Raises:
            ProtocolError: its numbers do not go on from where the question began.
        """
        is_new_life = page.incarnation != self.incarnation
        since = 1 if is_new_life else self._next
        num_seen = len(page.events) + num_invalid
        if page.next_sequence < since + num_seen:
            raise ProtocolError(
                f"{self.route} answered {num_seen} {self.name} from number {since} on, and that {page.next_sequence} "
                "is next"
            )
        entries = [entry for entry in page.events if since <= self._number(entry) < page.next_sequence]
        if is_new_life:
            self._begin_life(page)
        elif page.num_lost:
            self.num_lost += page.num_lost
            self._lost(page.num_lost)
        if not self.is_up:
            log.info("cache server %s answers with its %s", self.url, self.name)
            self._came_up()
        self.is_up, self.detail = True, None
        self._next = page.next_sequence
        self.num_entries += len(entries)
        self.num_invalid += num_seen - len(entries)
        return entries

    def _begin_life(self, page: Page[E]) -> None:
        # What was lost before the first answer to this router concerns none of its requests.
        if self.incarnation is not None:
            log.info("cache server %s has begun a new life", self.url)
            self.num_lost += page.num_lost
        self.incarnation = page.incarnation
        self.num_lives += 1
        self._lost(0)

    def _set_down(self, why: str) -> None:
        if self.is_up or self.detail == "not asked yet":
            log.warning("cache server %s does not answer with its %s: %s", self.url, self.name, why)
        self.is_up, self.detail = False, why
        self._went_down()
