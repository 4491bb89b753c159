"""W3C trace context: which span something belongs to, as a value and as the text of ``traceparent``.

Always true: the ids of a :class:`SpanContext` are not zero; what :func:`parse_traceparent` takes is what the
specification allows, and everything else is no context rather than an error.
"""

from __future__ import annotations

import random
import re
from typing import Final, NamedTuple

TRACEPARENT_CHARS: Final = 55
"""Of the version that is written. Later versions may have more after it."""

_TRACEPARENT: Final = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED: Final = 1
_SPAN_BITS: Final = 64
_TRACE_BITS: Final = 128


class SpanContext(NamedTuple):
    """One span of one trace.

    Args:
        trace_id: 128 bits.
        span_id: 64 bits.
        is_sampled: whether its spans are recorded, here and by whoever is called from it.
    """

    trace_id: int
    span_id: int
    is_sampled: bool

    @property
    def traceparent(self) -> str:
        """The value of the header field."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def parse_traceparent(text: str | None) -> SpanContext | None:
    """The context in the value of a ``traceparent``; None where there is none that is valid."""
    found = None if text is None else _TRACEPARENT.fullmatch(text)
    if found is None or (found[1] == "00" and found[5] is not None):
        return None
    trace_id, span_id = int(found[2], 16), int(found[3], 16)
    if not trace_id or not span_id:
        return None
    return SpanContext(trace_id, span_id, bool(int(found[4], 16) & _SAMPLED))


def child_of(parent: SpanContext | None, chance: random.Random, *, is_sampled: bool = True) -> SpanContext:
    """The context of a new span.

    Args:
        parent: what it is a part of; None begins a trace.
        chance: ids need to be unique, not secret.
        is_sampled: of a new trace; a span of another one is recorded if that is.
    """
    span_id = chance.getrandbits(_SPAN_BITS) or 1
    if parent is None:
        return SpanContext(chance.getrandbits(_TRACE_BITS) or 1, span_id, is_sampled)
    return SpanContext(parent.trace_id, span_id, parent.is_sampled)
