"""Token reports and receipts brought together: each report goes to the receipt whose id its request carries.

Owns the followers of the cache servers and a sweep. Always true:

- A receipt is in the ring before an engine hears of its request. So a report that has no receipt concerns another
  router, or a receipt that is gone: it is dropped at once, and nothing is kept for what may never come.
- A request costs nothing here while it runs: its receipt is found by the report, or by the sweep.
- A request's tokens are counted once: when it is closed and all its reports are there, or ``SETTLE_S`` after its end
  was seen. A report that comes later is shown in the receipt all the same.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from antiphon.core.errors import RequestRefused
from antiphon.observe.receipt import Receipt, ReceiptRing
from antiphon.observe.router_metrics import RouterMetrics
from antiphon.observe.token_metrics import TokenMetrics
from antiphon.observe.token_sources import Leg, LegTokens, ReportedTokens, TokenSources, merge, shown
from antiphon.protocol.reports import TokenReport
from antiphon.router.headers import leg_of
from antiphon.router.report_follower import ReportFollower
from antiphon.transport.http.server import Responder

log = logging.getLogger("antiphon.router")

SETTLE_S: Final = 2.0
"""How long after a request's end its reports are waited for: engines send theirs when they are done with it."""

SWEEP_INTERVAL_S: Final = 0.25

OPEN_MAX: Final = 100_000
"""Receipts that the sweep holds: those of requests that run or have just ended; past it the oldest are settled."""

READERS_MAX: Final = 64
"""Readers of a receipt that wait for its reports: people and checks, not traffic."""

READ_WAIT_MAX_S: Final = 5.0
_READ_INTERVAL_S: Final = 0.02

_SEVERAL = frozenset(("prompt_list", "n", "best_of", "beam_search"))
"""Reasons of a path whose requests are several for the engine: how many reports come is not known."""


class TokenReports:
    """The token reports of one router.

    Args:
        urls: admin addresses of the cache servers to follow; may be empty.
        connect_timeout_s: how long a connection attempt to one may take.
        receipts: the router's.
        metrics: the router's, with which those of the reports are read.
        on_namespace: called for each report of a request of ours that names its namespace: with the receipt, the leg,
            the admin address of the cache server, and the digest.
    """

    def __init__(
        self,
        urls: Sequence[str],
        connect_timeout_s: float,
        receipts: ReceiptRing,
        metrics: RouterMetrics,
        on_namespace: Callable[[Receipt, Leg, str, bytes], None] | None = None,
    ) -> None:
        self._followers = [ReportFollower(url, connect_timeout_s, self._on_reports) for url in dict.fromkeys(urls)]
        self._receipts = receipts
        self._on_namespace = on_namespace
        self._metrics = TokenMetrics(metrics.registry, self._servers_up)
        self._held = metrics.held
        self._owners: dict[str, ReportFollower] = {}
        self._running: dict[str, Receipt] = {}
        self._ended: dict[str, tuple[float, Receipt]] = {}
        self._newest_id: str | None = None
        self._num_readers = 0
        self._is_stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to follow: a task for each server and one that sweeps; none without a server."""
        if self._followers:
            runs = [*(follower.run() for follower in self._followers), self._sweep_on()]
            self._tasks = [asyncio.create_task(run) for run in runs]

    def release_readers(self) -> None:
        """The router stops: nobody waits for a receipt any more."""
        self._is_stopping = True

    async def stop(self) -> None:
        """End the tasks."""
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._tasks = []

    def status(self) -> list[dict[str, object]]:
        """What is known of each cache server, for people."""
        return [follower.status() | {"same_as": self._url_of_same(follower)} for follower in self._followers]

    def _url_of_same(self, follower: ReportFollower) -> str | None:
        """The other address under which this server is followed, and its reports are taken."""
        owner = self._owners.get(follower.incarnation or "", follower)
        return None if owner is follower else owner.url

    def _servers_up(self) -> Mapping[str, bool]:
        return {follower.url: follower.is_up for follower in self._followers}

    # -- reading a receipt ------------------------------------------------------------------------------------------

    def show(self, receipt: Receipt) -> dict[str, object]:
        """The receipt as plain values for JSON, with what the engines reported if a cache server is followed."""
        values = receipt.as_dict()
        if not self._followers:
            return values
        reported = receipt.reported or ReportedTokens()
        sources = _sources_of(receipt, reported)
        missing = _missing_of(receipt, reported)
        return values | {
            "tokens": {
                "prompt": sources.num_prompt_tokens,
                "by_source": sources.by_source,
                "reported_by": "cache_server" if reported.prefill or reported.decode else None,
                "state": _state_of(receipt, reported),
                "missing": missing,
                "sum_ok": sources.is_sum_ok,
                "prefill": shown(reported.prefill),
                "decode": shown(reported.decode),
            }
        }

    async def wait(self, receipt: Receipt, wait_s: float, responder: Responder) -> None:
        """Wait until the receipt is closed and its reports are there or waited for no more, at most ``wait_s``.

        Raises:
            RequestRefused: 503, too many wait already.
        """
        if self._num_readers >= READERS_MAX:
            raise RequestRefused(
                f"{READERS_MAX} readers wait for receipts already; ask again without wait_s, or later",
                status=503,
                kind="service_unavailable",
                code="too_many_waiting",
            )
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_s
        self._num_readers += 1
        try:
            # A look now and then, since a request that ends tells nobody: that would cost every request.
            while self._is_awaited(receipt) and not responder.is_disconnected and not self._is_stopping:
                left_s = deadline_s - loop.time()
                if left_s <= 0:
                    return
                await asyncio.sleep(min(_READ_INTERVAL_S, left_s))
        finally:
            self._num_readers -= 1

    def _is_awaited(self, receipt: Receipt) -> bool:
        if not self._followers:
            return receipt.outcome is None
        return _state_of(receipt, receipt.reported or ReportedTokens()) == "waiting"

    # -- reports arrive ---------------------------------------------------------------------------------------------

    def _on_reports(self, follower: ReportFollower, reports: Sequence[TokenReport], num_invalid: int) -> None:
        """Take the reports of one page."""
        assert follower.incarnation is not None
        # One server under two addresses would count twice: its life belongs to the follower that saw it first.
        if self._owners.setdefault(follower.incarnation, follower) is not follower:
            return
        if len(self._owners) > 2 * len(self._followers):
            alive = {each.incarnation for each in self._followers}
            self._owners = {life: owner for life, owner in self._owners.items() if life in alive}
        if num_invalid:
            self._metrics.reports["invalid"] += num_invalid
        for report in reports:
            self._metrics.reports[self._take(follower.url, report)] += 1

    def _take(self, server: str, report: TokenReport) -> str:
        """Take one report of a server; returns what became of it."""
        found = leg_of(report.request)
        if found is None:
            return "not_ours"
        receipt_id, leg = found
        receipt = self._find(receipt_id)
        if receipt is None:
            return "not_ours"
        if report.namespace and self._on_namespace is not None:
            self._on_namespace(receipt, leg, server, bytes.fromhex(report.namespace))
        reported = receipt.reported
        if reported is None:
            reported = receipt.reported = ReportedTokens()
        reported.add(leg, _tokens_of(report))
        if reported.is_settled:
            self._count_if_wrong(reported, _sources_of(receipt, reported))
            return "late"
        if receipt.outcome is not None and _state_of(receipt, reported) == "complete":
            self._settle(receipt)
        return "matched"

    def _find(self, receipt_id: str) -> Receipt | None:
        receipt = self._running.get(receipt_id)
        if receipt is None and receipt_id in self._ended:
            receipt = self._ended[receipt_id][1]
        return receipt if receipt is not None else self._receipts.get(receipt_id)

    # -- requests end -----------------------------------------------------------------------------------------------

    async def _sweep_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                self.sweep(loop.time())
            except Exception:  # supervised: a bug here must not end the counting for ever
                log.exception("the sweep of receipts failed")
            await asyncio.sleep(SWEEP_INTERVAL_S)

    def sweep(self, now_s: float) -> None:
        """Find requests that have begun and ended since the last sweep, and settle those whose time is over."""
        newest_id = None
        begun = []
        for receipt in self._receipts.newer_than(self._newest_id):
            newest_id = newest_id or receipt.id
            if receipt.reported is None or not receipt.reported.is_settled:
                begun.append(receipt)
        self._newest_id = newest_id or self._newest_id
        for receipt in reversed(begun):
            if receipt.id not in self._ended:
                self._running[receipt.id] = receipt
        for receipt in [receipt for receipt in self._running.values() if receipt.outcome is not None]:
            del self._running[receipt.id]
            reported = receipt.reported or ReportedTokens()
            if reported.is_settled:
                continue
            if _state_of(receipt, reported) == "complete":
                self._settle(receipt)
            else:
                self._ended[receipt.id] = (now_s, receipt)
        while self._ended:
            since_s, receipt = next(iter(self._ended.values()))
            if now_s - since_s < SETTLE_S and len(self._ended) <= OPEN_MAX:
                break
            self._settle(receipt)
        while len(self._running) > OPEN_MAX:
            del self._running[next(iter(self._running))]

    def _settle(self, receipt: Receipt) -> None:
        """Count the request's tokens: no report is waited for any more."""
        reported = receipt.reported
        if reported is None:
            reported = receipt.reported = ReportedTokens()
        assert not reported.is_settled, "a request's tokens are counted once"
        reported.is_settled = True
        self._ended.pop(receipt.id, None)
        sources = _sources_of(receipt, reported)
        for source, number in sources.by_source.items():
            self._metrics.by_source[source] += number
        if receipt.path == "cached" and receipt.num_held_tokens is not None and reported.decode is not None:
            self._held("cached", receipt.num_held_tokens, reported.decode.num_held)
        if receipt.outcome == "completed":
            for leg in _missing_of(receipt, reported):
                self._metrics.missing[leg] += 1
        self._count_if_wrong(reported, sources)

    def _count_if_wrong(self, reported: ReportedTokens, sources: TokenSources) -> None:
        if sources.is_sum_ok is False and not reported.is_wrong:
            reported.is_wrong = True
            self._metrics.num_sums_wrong += 1


def _tokens_of(report: TokenReport) -> LegTokens:
    return LegTokens(
        engine=report.engine,
        incarnation=report.incarnation,
        num_prompt_tokens=report.num_prompt_tokens,
        device=report.device,
        l1=report.l1,
        remote_prefill=report.remote_prefill,
        computed=report.computed,
        num_preemptions=report.num_preemptions,
        finish=report.finish,
        l2=report.l2,
        peer=report.peer,
    )


def _sources_of(receipt: Receipt, reported: ReportedTokens) -> TokenSources:
    if receipt.decode is None and reported.decode is None:  # the prefill engine is the last one
        return merge(_told(receipt, reported), None, reported.prefill)
    return merge(_told(receipt, reported), reported.prefill, reported.decode)


def _told(receipt: Receipt, reported: ReportedTokens) -> int | None:
    """Tokens of the prompt by another source than reports. What the router counted itself stands in where there is
    nothing else, and is held against no report."""
    if receipt.prompt_tokens is None and reported.prefill is None and reported.decode is None:
        return receipt.num_placed_tokens
    return receipt.prompt_tokens


def _missing_of(receipt: Receipt, reported: ReportedTokens) -> list[Leg]:
    """The legs whose report is to come: of engines that got the request, and did not refuse it as invalid."""
    is_refused = receipt.outcome == "completed" and (receipt.status or 0) >= 400
    if is_refused or receipt.reason == "single_stage":
        return []
    sent: list[tuple[Leg, str | None]] = [("prefill", receipt.prefill), ("decode", receipt.decode)]
    return [leg for leg, address in sent if address is not None and reported.leg(leg) is None]


def _state_of(receipt: Receipt, reported: ReportedTokens) -> str:
    """``waiting`` for reports, ``complete``, or ``incomplete``: waiting no more, some are missing."""
    if receipt.outcome is None:
        return "waiting"
    is_missing = bool(_missing_of(receipt, reported))
    if reported.is_settled:
        return "incomplete" if is_missing else "complete"
    return "waiting" if is_missing or receipt.reason in _SEVERAL else "complete"
