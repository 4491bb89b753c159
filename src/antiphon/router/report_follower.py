"""Follows the token reports of one cache server: a long poll, again and again.

Always true: within one life of the server each report is handed on once, in order; after a restart of the server it
begins anew with the new life. A server that cannot be reached, or answers with something else, is asked again after a
pause that doubles up to ``BACKOFF_MAX_S``. It matches nothing: see ``token_reports``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final
from urllib.parse import quote, urlsplit

from antiphon.core.errors import ProtocolError, UpstreamError
from antiphon.protocol.reports import ReportPage, TokenReport, decode_page
from antiphon.transport.http.client import HttpPool, request_head

log = logging.getLogger("antiphon.router")

WAIT_S: Final = 10.0
"""How long the server may hold an answer back for want of reports."""

ANSWER_TIMEOUT_S: Final = 3.0
"""How long it may take beyond that: a server that is stopped or stuck shows after so long."""

PAUSE_S: Final = 0.05
"""Between two polls, so that many reports cost one exchange: the router has requests to serve."""

PAGE_FULL: Final = 1_000
"""Reports of an answer from which on there are probably more, which are asked for at once."""

PAGE_BYTES_MAX: Final = 8_388_608
"""An answer has at most 1000 reports of some 300 bytes; names of the greatest length make it 4 MB."""

SLICE: Final = 100
"""Reports that are handed on in a row, about a millisecond: others have their turn in between."""

BACKOFF_MIN_S: Final = 0.1
BACKOFF_MAX_S: Final = 2.0


class ReportFollower:
    """Follows one server.

    Args:
        url: its admin address, ``http://HOST:PORT``.
        connect_timeout_s: how long a connection attempt may take.
        on_reports: called with the reports of each page that has entries, and how many of these are no reports.
    """

    def __init__(
        self,
        url: str,
        connect_timeout_s: float,
        on_reports: Callable[[ReportFollower, Sequence[TokenReport], int], None],
    ) -> None:
        parts = urlsplit(url)
        assert parts.hostname is not None and parts.port is not None, url
        self.url = url
        self.incarnation: str | None = None
        """The life of the server that was seen last."""
        self.is_up = False
        self.detail: str | None = "not asked yet"
        """Why it is not up; None while it is."""
        self._num_invalid = 0
        self._num_reports = 0
        self._num_lost = 0
        self._num_lives = 0
        self._next = 1
        self._on_reports = on_reports
        self._pool = HttpPool(parts.hostname, parts.port, connections_max=2, connect_timeout_s=connect_timeout_s)

    async def run(self) -> None:
        """Follow until cancelled."""
        backoff_s = BACKOFF_MIN_S
        try:
            while True:
                try:
                    pause_s = await self._poll()
                    backoff_s = BACKOFF_MIN_S
                except (UpstreamError, ProtocolError) as error:
                    self._set_down(error.message)
                    pause_s, backoff_s = backoff_s, min(2 * backoff_s, BACKOFF_MAX_S)
                except Exception as error:  # supervised: a bug here must not end the following for ever
                    log.exception("following the reports of %s failed", self.url)
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
            "num_lives": self._num_lives,
            "num_reports": self._num_reports,
            "num_lost": self._num_lost,
            "num_invalid": self._num_invalid,
        }

    async def _poll(self) -> float:
        """One exchange; returns the seconds until the next.

        Raises:
            UpstreamError, ProtocolError: there is no answer, or none that can be used.
        """
        wait_s = WAIT_S if self.is_up else 0.0  # the first answer says at once that it is up
        target = f"/reports?since={self._next}&wait_s={wait_s:g}"
        if self.incarnation is not None:
            target += f"&incarnation={quote(self.incarnation, safe='')}"
        head = request_head("GET", target, self._pool.authority, [(b"accept", b"*/*")], length=None)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        response = await self._pool.fetch([head], timeout_s=wait_s + ANSWER_TIMEOUT_S, body_max_bytes=PAGE_BYTES_MAX)
        if response.status != 200:
            said = response.body[:200].decode("utf-8", "replace")
            raise ProtocolError(f"/reports answered with {response.status}: {said}")
        page, num_invalid = decode_page(response.body)
        reports = self._take(page, num_invalid)
        num_seen = len(page.events) + num_invalid
        for first in range(0, num_seen, SLICE):
            self._on_reports(self, reports[first : first + SLICE], num_seen - len(reports) if first == 0 else 0)
            await asyncio.sleep(0)
        if num_seen >= PAGE_FULL:
            return 0.0
        is_early = num_seen == 0 and loop.time() - began_s < wait_s / 2  # it is stopping, or does not wait at all
        return BACKOFF_MIN_S if is_early else PAUSE_S

    def _take(self, page: ReportPage, num_invalid: int) -> list[TokenReport]:
        """Take note of one answer; returns its reports.

        Raises:
            ProtocolError: its numbers do not go on from where the question began.
        """
        is_new_life = page.incarnation != self.incarnation
        since = 1 if is_new_life else self._next
        num_seen = len(page.events) + num_invalid
        if page.next_sequence < since + num_seen:
            raise ProtocolError(
                f"/reports answered {num_seen} reports from number {since} on, and that {page.next_sequence} is next"
            )
        reports = [report for report in page.events if since <= report.sequence < page.next_sequence]
        if is_new_life:
            self._begin_life(page)
        else:
            self._num_lost += page.num_lost
        if not self.is_up:
            log.info("cache server %s answers with its token reports", self.url)
        self.is_up, self.detail = True, None
        self._next = page.next_sequence
        self._num_reports += len(reports)
        self._num_invalid += num_seen - len(reports)
        return reports

    def _begin_life(self, page: ReportPage) -> None:
        # What was lost before the first answer to this router concerns none of its requests.
        if self.incarnation is not None:
            log.info("cache server %s has begun a new life", self.url)
            self._num_lost += page.num_lost
        self.incarnation = page.incarnation
        self._num_lives += 1

    def _set_down(self, why: str) -> None:
        if self.is_up or self.detail == "not asked yet":
            log.warning("cache server %s does not answer with its token reports: %s", self.url, why)
        self.is_up, self.detail = False, why
