"""``cached_tokens`` of a usage object, replaced in the bytes of an answer.

A decode engine that pulled its prompt's KV counts all of it as cached. What reuse saved is what the prefill engine had
cached, and that is what a client is to read. Nothing but the number is changed, and only where there is one.
"""

from __future__ import annotations

import re

from antiphon.protocol.body import Buffer

HAS_CACHED_TOKENS = b'"cached_tokens"'
"""What an answer must contain for :func:`with_cached_tokens` to change it; a text cannot: its quotes are escaped."""

_CACHED_TOKENS = re.compile(
    rb'("usage"\s*:\s*\{(?:[^{}]|\{[^{}]*+\})*?'
    rb'"(?:prompt|input)_tokens_details"\s*:\s*\{[^{}]*?"cached_tokens"\s*:\s*)\d+'
)


def with_cached_tokens(body: Buffer, cached_tokens: int | None) -> bytes:
    """``body``, JSON or events, with ``cached_tokens`` of every usage object that has it set; None writes null."""
    number = b"null" if cached_tokens is None else b"%d" % cached_tokens
    return _CACHED_TOKENS.sub(rb"\g<1>" + number, bytes(body))
