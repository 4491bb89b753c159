"""Follows what one cache server stores and removes, and keeps ``routing.chunk_index`` in step with it.

A life of the server begins with a listing of its chunks (``/chunks``); the events (``/events``) from the number that
its first page names are then applied in order. So what changes while the pages are read is made good by the events.
Where events are lost, or one cannot be read, the content is forgotten at once and listed again, and in between little
is taken to be held. A listing follows the one before after ``LISTING_PAUSE_S`` at the earliest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import ClassVar, Final

from antiphon.protocol.chunk_events import REMOVED, STORED, ChunkEvent, decode_events, decode_listing
from antiphon.protocol.pages import Page
from antiphon.router.log_follower import ANSWER_TIMEOUT_S, LogFollower
from antiphon.routing.chunk_index import ChunkIndex

log = logging.getLogger("antiphon.router")

LISTING_PAGES_MAX: Final = 1_024
"""Pages of one listing, each of some thousand chunks: far more than the index keeps."""

KEYS_SLICE: Final = 1_000
"""Keys of a listing that are taken in a row, a fraction of a millisecond: others have their turn in between."""

LISTING_PAUSE_S: Final = 0.5
"""A server whose events are lost again and again costs a listing twice a second."""


class ChunkFollower(LogFollower[ChunkEvent]):
    """Follows one server.

    Args:
        url: its admin address, ``http://HOST:PORT``, which is also its name in the index.
        connect_timeout_s: how long a connection attempt may take.
        index: what it keeps in step; others may follow other servers into the same.
    """

    route: ClassVar[str] = "/events"
    name: ClassVar[str] = "chunk events"

    def __init__(self, url: str, connect_timeout_s: float, index: ChunkIndex) -> None:
        super().__init__(url, connect_timeout_s)
        self._index = index
        self._is_listed = False
        self._listed_at_s = float("-inf")
        self.num_listings = 0

    def status(self) -> dict[str, object]:
        """What is known of the server, for people."""
        return super().status() | {
            "is_listed": self._is_listed,
            "num_listings": self.num_listings,
            "num_chunks": self._index.num_chunks(self.url),
            "num_left_out": self._index.num_left_out(self.url),
        }

    def _read(self, body: bytes) -> tuple[Page[ChunkEvent], int]:
        return decode_events(body)

    def _number(self, entry: ChunkEvent) -> int:
        return entry.sequence

    def _receive(self, entries: Sequence[ChunkEvent], num_invalid: int) -> None:
        if num_invalid:  # it may have said that a chunk is gone
            self._forget()
        if not self._is_listed:
            return  # the listing tells it all
        for event in entries:
            if event.kind == STORED:
                self._index.stored(self.url, bytes.fromhex(event.key))
            elif event.kind == REMOVED:
                self._index.removed(self.url, bytes.fromhex(event.key))

    def _lost(self, num_lost: int) -> None:
        self._forget()

    def _came_up(self) -> None:
        self._index.set_up(self.url, True)

    def _went_down(self) -> None:
        self._index.set_up(self.url, False)

    def _forget(self) -> None:
        self._index.forget(self.url)
        self._is_listed = False

    async def _prepare(self) -> None:
        """List the chunks if that is due. Raises UpstreamError or ProtocolError."""
        if self._is_listed:
            return
        loop = asyncio.get_running_loop()
        await asyncio.sleep(max(0.0, self._listed_at_s + LISTING_PAUSE_S - loop.time()))
        self._listed_at_s = loop.time()
        after: int | None = 0
        num_pages = 0
        while after is not None and num_pages < LISTING_PAGES_MAX:
            page = decode_listing(await self._get(f"/chunks?after={after}", ANSWER_TIMEOUT_S))
            if num_pages == 0:
                self._begin(page.incarnation, page.next_sequence, page.chunk_size_tokens)
            elif page.incarnation != self.incarnation:
                self._forget()  # it has restarted meanwhile; the next poll says so
                return
            keys = page.keys()
            for first in range(0, len(keys), KEYS_SLICE):
                for key in keys[first : first + KEYS_SLICE]:
                    self._index.stored(self.url, key)
                await asyncio.sleep(0)
            num_pages += 1
            after = page.after if self._index.has_room(self.url) else None
        self._is_listed = True
        self.num_listings += 1

    def _begin(self, incarnation: str, next_sequence: int, chunk_size_tokens: int) -> None:
        if incarnation != self.incarnation:
            if self.incarnation is not None:
                log.info("cache server %s has begun a new life", self.url)
            self.incarnation = incarnation
            self.num_lives += 1
        self._next = next_sequence
        self._index.begin(self.url, chunk_size_tokens)
