"""The receipt: what happened to one request, and where.

A receipt is filled in while the request runs and closed once. The ring keeps the latest ones, up to a number; an id
that is not there was never given out or is too old.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator

from antiphon.observe.token_sources import ReportedTokens

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}(?:-.*)?")
_NO_TRACE = "0" * 32


class Receipt:
    """One request. Times are milliseconds from the router's receipt of the whole request; None: not known or not
    reached."""

    def __init__(self, id: str, route: str, created_unix_s: float) -> None:  # noqa: A002 - the name that clients see
        self.id = id
        self.route = route
        self.created_unix_s = created_unix_s

    # What is never filled in stays a value of the class, and costs a request nothing.
    path: str = ""
    reason: str = ""
    stream: bool = False
    client_request_id: str | None = None
    engine_request_id: str | None = None
    traceparent: str | None = None
    """The client's field of W3C trace context, as it came; where it sent none and the router traces, that of its own
    span."""
    tenant: str | None = None
    """The name of the tenant whose key was shown."""
    num_held_tokens: int | None = None
    """Prompt tokens that the engine that has the prompt first was expected to hold when it was chosen: the prefill
    engine, or the decode engine of the path ``cached``. None where nothing was expected."""
    chunk_scope: bytes | None = None
    """By which its cache server's chunks are looked up (``routing.chunk_index.scope_of``); not shown."""
    prefill: str | None = None
    """``host:port`` of the prefill engine."""
    decode: str | None = None
    status: int | None = None
    """HTTP status that the client was sent."""
    outcome: str | None = None
    """``completed``, ``failed`` or ``cancelled``; None while the request runs."""
    error: str | None = None
    code: str | None = None
    """Of the router's own refusal, as the client was sent it; None where the client got none of the router's."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that the own prefix cache of the engine that had the prompt first held; None: it does not say."""
    num_placed_tokens: int | None = None
    """Tokens of the prompt of a request on the path ``cached``, which is taken for prompts whose tokens are known
    alone; not shown where an engine says how many there are."""
    output_tokens: int | None = None
    """Of a tenant's answer that was not streamed, as it says itself; None where it does not. Not shown."""
    handed_over_by: str | None = None
    """``nixl`` or ``cache``, where a decode engine was given a handle."""
    reported: ReportedTokens | None = None
    """What the engines reported through cache servers; filled in by who follows these."""
    prefill_ms: float | None = None
    """The prefill engine's part, from sending the request to its whole answer."""
    handover_ms: float | None = None
    """From the prefill's answer to the first token of the decode engine; None for an answer that was not streamed,
    whose first token cannot be seen."""
    first_token_ms: float | None = None
    total_ms: float | None = None
    num_events: int = 0
    """Pieces of the answer that were passed on to the client."""

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON, times under ``ms``, token counts under ``tokens``."""
        return {
            "id": self.id,
            "route": self.route,
            "created_unix_s": round(self.created_unix_s, 3),
            "path": self.path,
            "reason": self.reason,
            "handoff": self.handoff,
            "handle": self.handed_over_by,
            "num_held_tokens": self.num_held_tokens,
            "stream": self.stream,
            "client_request_id": self.client_request_id,
            "engine_request_id": self.engine_request_id,
            "trace_id": self.trace_id,
            "tenant": self.tenant,
            "prefill": self.prefill,
            "decode": self.decode,
            "status": self.status,
            "outcome": self.outcome,
            "error": self.error,
            "code": self.code,
            "tokens": {
                "prompt": self.num_placed_tokens if self.prompt_tokens is None else self.prompt_tokens,
                "by_source": self.tokens_by_source,
                "reported_by": "usage" if self.has_sources else None,
            },
            "ms": self.times_ms,
            "num_events": self.num_events,
        }

    @property
    def times_ms(self) -> dict[str, float | None]:
        """Durations in milliseconds, rounded."""
        return {
            "prefill": _rounded(self.prefill_ms),
            "handover": _rounded(self.handover_ms),
            "first_token": _rounded(self.first_token_ms),
            "total": _rounded(self.total_ms),
        }

    @property
    def trace_id(self) -> str | None:
        """The trace that ``traceparent`` names; None where it names none."""
        found = _TRACEPARENT.fullmatch(self.traceparent) if self.traceparent is not None else None
        return None if found is None or found[1] == _NO_TRACE else found[1]

    @property
    def tokens_by_source(self) -> dict[str, int]:
        """Prompt tokens by where the engine that had the prompt first took them from: ``device`` (its own prefix
        cache), ``computed``; or ``unknown``. Empty where not even their number is known."""
        if self.prompt_tokens is not None and self.cached_tokens is not None:
            return {"device": self.cached_tokens, "computed": self.prompt_tokens - self.cached_tokens}
        num_tokens = self.num_placed_tokens if self.prompt_tokens is None else self.prompt_tokens
        return {} if num_tokens is None else {"unknown": num_tokens}

    @property
    def handoff(self) -> str | None:
        """Which hand-over has served: ``nixl``, ``cache`` or ``none``, as the decode engine says what it had from one;
        None where a handle was sent and the engine has not said."""
        if self.handed_over_by is None:
            return "none"
        last = None if self.reported is None else self.reported.decode
        if last is None:
            return None
        return self.handed_over_by if last.remote_prefill else "none"

    @property
    def has_sources(self) -> bool:
        """Whether an engine's usage says where the prompt's tokens came from."""
        return self.prompt_tokens is not None and self.cached_tokens is not None


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


class ReceiptRing:
    """The latest receipts, at most ``receipts_max`` of them."""

    def __init__(self, receipts_max: int) -> None:
        assert receipts_max >= 0
        self._receipts_max = receipts_max
        self._by_id: OrderedDict[str, Receipt] = OrderedDict()

    def add(self, receipt: Receipt) -> None:
        """Keep ``receipt``, at the cost of the oldest one."""
        if self._receipts_max == 0:
            return
        if len(self._by_id) >= self._receipts_max:
            self._by_id.popitem(last=False)
        self._by_id[receipt.id] = receipt

    def get(self, receipt_id: str) -> Receipt | None:
        """The receipt with this id, or None."""
        return self._by_id.get(receipt_id)

    def newer_than(self, receipt_id: str | None) -> Iterator[Receipt]:
        """The receipts after the one with this id, newest first; all if it is not there. Nothing may be added
        meanwhile."""
        for receipt in reversed(self._by_id.values()):
            if receipt.id == receipt_id:
                return
            yield receipt

    def latest(self, num: int) -> list[Receipt]:
        """The ``num`` latest receipts, newest first."""
        newest_first = reversed(self._by_id.values())
        return [receipt for receipt, _ in zip(newest_first, range(num), strict=False)]

    def __len__(self) -> int:
        return len(self._by_id)
