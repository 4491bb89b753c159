"""Follows the token reports of one cache server (``log_follower``). It matches nothing: see ``token_reports``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from antiphon.protocol.pages import Page
from antiphon.protocol.reports import TokenReport, decode_page
from antiphon.router.log_follower import LogFollower


class ReportFollower(LogFollower[TokenReport]):
    """Follows the reports of one server.

    Args:
        url: its admin address, ``http://HOST:PORT``.
        connect_timeout_s: how long a connection attempt may take.
        on_reports: called with the reports of each page that has entries, and how many of these are no reports.
    """

    route: ClassVar[str] = "/reports"
    name: ClassVar[str] = "token reports"

    def __init__(
        self,
        url: str,
        connect_timeout_s: float,
        on_reports: Callable[[ReportFollower, Sequence[TokenReport], int], None],
    ) -> None:
        super().__init__(url, connect_timeout_s)
        self._on_reports = on_reports

    def _read(self, body: bytes) -> tuple[Page[TokenReport], int]:
        return decode_page(body)

    def _number(self, entry: TokenReport) -> int:
        return entry.sequence

    def _receive(self, entries: Sequence[TokenReport], num_invalid: int) -> None:
        self._on_reports(self, entries, num_invalid)
