"""Token reports of engines: the last ones by number, and sums over all.

A report that does not add up is kept and counted: a wrong figure must be seen, not hidden.
"""

from __future__ import annotations

import time
from collections import deque
from itertools import islice
from typing import Final

from antiphon.cache_server.translate import check_name
from antiphon.cache_server.views import ReportPage, TokenReport, TokenTotals
from antiphon.cache_server.waiting import Waiters
from antiphon.core.errors import ProtocolError
from antiphon.core.namespace import DIGEST_BYTES
from antiphon.protocol import cache as wire

REPORTS_MAX: Final = 16_384
"""Reports kept, about 500 bytes each: at 1000 requests a second a reader may be away for 16 s."""

_COUNT_MAX = 1 << 40
_FINISHES = frozenset(("finished", "aborted"))


class Reports:
    """The reports of one life of the server."""

    def __init__(self) -> None:
        self._ring: deque[TokenReport] = deque(maxlen=REPORTS_MAX)
        self.next_sequence = 1
        self.totals = TokenTotals()
        self.waiters = Waiters(lambda: self.next_sequence)

    def add(self, body: wire.Report) -> TokenReport:
        """Takes a report.

        Raises:
            ProtocolError: a count is negative or absurd, ``finish`` is unknown, or the namespace is none.
        """
        for name in ("request", "engine", "incarnation"):
            check_name(getattr(body, name), f"the report's {name}")
        counts = (
            body.num_prompt_tokens,
            body.device,
            body.l1,
            body.remote_prefill,
            body.computed,
            body.num_preemptions,
        )
        fetched = (body.l2, body.peer)
        if not all(0 <= count < _COUNT_MAX for count in (*counts, *fetched)):
            raise ProtocolError(f"a report has counts from 0 to {_COUNT_MAX}: {body}")
        if body.finish not in _FINISHES:
            raise ProtocolError(f"a request is finished or aborted, not {body.finish[:50]!r}")
        if len(body.namespace) not in (0, DIGEST_BYTES):
            raise ProtocolError(f"a namespace has {DIGEST_BYTES} bytes, {len(body.namespace)} were sent")
        names = (body.request, body.engine, body.incarnation)
        more = (body.finish, time.time(), body.namespace.hex())
        report = TokenReport(self.next_sequence, *names, *counts, *more, *fetched)
        self._ring.append(report)
        self.next_sequence += 1
        self._add_up(report)
        self.waiters.wake()
        return report

    def _add_up(self, report: TokenReport) -> None:
        totals = self.totals
        totals.num_reports += 1
        totals.num_mismatched += not adds_up(report)
        totals.num_aborted += report.finish == "aborted"
        totals.num_prompt_tokens += report.num_prompt_tokens
        totals.device += report.device
        totals.l1 += report.l1
        totals.remote_prefill += report.remote_prefill
        totals.computed += report.computed
        totals.l2 += report.l2
        totals.peer += report.peer

    def since(self, sequence: int, num_reports_max: int) -> ReportPage:
        """At most ``num_reports_max`` reports from number ``sequence`` on.

        Raises:
            ValueError: ``sequence`` is beyond what was ever reported, so that the asker means another life.
        """
        if not 1 <= sequence <= self.next_sequence:
            raise ValueError(f"report numbers go from 1 to {self.next_sequence}, not {sequence}")
        base = self.next_sequence - len(self._ring)
        first = max(sequence, base)
        last = min(first + num_reports_max, self.next_sequence)
        return ReportPage(tuple(islice(self._ring, first - base, last - base)), last, first - sequence)


def adds_up(report: TokenReport) -> bool:
    """Whether every prompt token has one source; of an aborted request nobody can say."""
    total = report.device + report.l1 + report.l2 + report.peer + report.remote_prefill + report.computed
    return total == report.num_prompt_tokens or report.finish == "aborted"
