"""What a cache server's ``GET /reports`` answers: token reports, as the router reads them (``pages``)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec

from antiphon.protocol.pages import Name, Number, Page, PageReader

COUNT_MAX: Final = 1 << 40
"""More tokens than any prompt has."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=COUNT_MAX)]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})?\Z")]


class TokenReport(msgspec.Struct, frozen=True):
    """Where the prompt tokens of one request came from; see ``antiphon.protocol.cache.Report``.

    Args:
        sequence: number of the report in this life of the cache server, from 1.
        namespace: digest of the request's namespace in hex; empty where the engine does not say.
    """

    sequence: Number
    request: Name
    engine: Name
    incarnation: Name
    num_prompt_tokens: _Count
    device: _Count
    l1: _Count
    remote_prefill: _Count
    computed: _Count
    num_preemptions: _Count
    finish: Literal["finished", "aborted"]
    namespace: _Digest = ""
    l2: _Count = 0
    peer: _Count = 0


ReportPage = Page[TokenReport]

_reader: Final = PageReader("/reports", TokenReport)


def decode_page(body: bytes) -> tuple[Page[TokenReport], int]:
    """The answer in ``body``, and how many of its entries were left out because they are no reports.

    Raises:
        ProtocolError: the answer as a whole is none of ``/reports``.
    """
    return _reader.read(body)
