"""What a cache server's ``GET /reports`` answers: token reports, as the router reads them.

Always true: one entry that is no report costs that entry, never the page, so that an asker can go on behind it. Fields
that are not known here are ignored.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from antiphon.core.errors import ProtocolError

NAME_CHARS_MAX: Final = 1_000
COUNT_MAX: Final = 1 << 40
"""More tokens than any prompt has."""

_Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class TokenReport(msgspec.Struct, frozen=True):
    """Where the prompt tokens of one request came from; see ``antiphon.protocol.cache.Report``.

    Args:
        sequence: number of the report in this life of the cache server, from 1.
    """

    sequence: _Number
    request: _Name
    engine: _Name
    incarnation: _Name
    num_prompt_tokens: _Count
    device: _Count
    l1: _Count
    remote_prefill: _Count
    computed: _Count
    num_preemptions: _Count
    finish: Literal["finished", "aborted"]


class _Page(msgspec.Struct, frozen=True, kw_only=True):
    incarnation: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
    next_sequence: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)] = msgspec.field(name="next")
    num_lost: _Number


class ReportPage(_Page, frozen=True, kw_only=True):
    """One answer.

    Args:
        incarnation: the life of the server that the numbers belong to.
        next_sequence: ``next``: the number to ask for next.
        num_lost: reports that were asked for and are no longer kept.
        events: the reports, in the order of their numbers.
    """

    events: tuple[TokenReport, ...]


class _RawPage(_Page, frozen=True, kw_only=True):
    events: tuple[msgspec.Raw, ...]


_pages = msgspec.json.Decoder(ReportPage)
_raw_pages = msgspec.json.Decoder(_RawPage)
_reports = msgspec.json.Decoder(TokenReport)


def decode_page(body: bytes) -> tuple[ReportPage, int]:
    """The answer in ``body``, and how many of its entries were left out because they are no reports.

    Raises:
        ProtocolError: the answer as a whole is none of ``/reports``.
    """
    try:
        return _pages.decode(body), 0
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass  # find out whether the page or an entry is wrong
    try:
        raw = _raw_pages.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"this is no answer of /reports: {error}") from error
    reports = tuple(report for report in map(_report, raw.events) if report is not None)
    page = ReportPage(
        incarnation=raw.incarnation, next_sequence=raw.next_sequence, num_lost=raw.num_lost, events=reports
    )
    return page, len(raw.events) - len(reports)


def _report(raw: msgspec.Raw) -> TokenReport | None:
    try:
        return _reports.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
