"""The counts of cached tokens in an answer's usage object, replaced in its bytes.

A decode engine that pulled its prompt's KV counts all of it as cached. What reuse saved is what the prefill engine had
cached, and that is what a client is to read. Nothing but the numbers is changed, and only where there are some.

Each function takes an answer, JSON or events, and the number that is to stand there; None writes null. What it must
contain to be changed is named beside it: a text cannot contain that, since its quotes are escaped.
"""

from __future__ import annotations

import re
from typing import Final

from antiphon.protocol.body import Buffer

HAS_CACHED_TOKENS: Final = b'"cached_tokens"'
HAS_CACHE_READ: Final = b'"cache_read_input_tokens"'

USAGE_MAX_BYTES: Final = 4096
"""A usage object is shorter: what is passed on in pieces is looked at with as much of what came before."""

_ZERO: Final = 48
_NINE: Final = 57
_USAGE: Final = b'"usage":{'
_DETAILS: Final = b'"prompt_tokens_details":{'
_USUAL: Final = b'"prompt_tokens_details":{"cached_tokens":'
_CACHED: Final = b'"cached_tokens'
_OBJECT: Final = rb'"usage"\s*:\s*\{(?:[^{}]|\{[^{}]*+\})*?'
_CACHED_TOKENS = re.compile(
    rb"(" + _OBJECT + rb'"(?:prompt|input)_tokens_details"\s*:\s*\{[^{}]*?"cached_tokens"\s*:\s*)\d+'
    rb'(?:([^{}]*?"cached_tokens_per_turn"\s*:\s*\[)\d+(\]))?'
)
_MESSAGE_USAGE = re.compile(rb'"usage"\s*:\s*\{[^{}]*?"cache_read_input_tokens"\s*:\s*\d[^{}]*\}')
_READ = re.compile(rb'("cache_read_input_tokens"\s*:\s*)(\d+)')
_INPUT = re.compile(rb'("input_tokens"\s*:\s*)(\d+)')

_OUTPUT = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})(?!\d)')
"""Of a usage object: a text cannot contain it, since its quotes are escaped."""


def output_tokens(body: Buffer) -> int | None:
    """The tokens of a whole answer, by the last usage object at its end; None where there is none."""
    found = _last(_OUTPUT, bytes(memoryview(body)[-USAGE_MAX_BYTES:]))
    return int(found[1]) if found is not None else None


def with_cached_tokens(body: Buffer, cached_tokens: int | None) -> bytes:
    """The ``cached_tokens`` of every usage object. For answers that hold no JSON of the client's."""
    number = _number(cached_tokens)
    text = body if isinstance(body, bytes) else bytes(body)
    first = text.find(HAS_CACHED_TOKENS)
    start = first + len(_USUAL) - len(_DETAILS)
    # As vLLM writes it, and nowhere else.
    if first >= len(_DETAILS) and text[first - len(_DETAILS) : start] == _USUAL and text.find(_CACHED, start) < 0:
        usage = text.rfind(_USAGE, 0, first)
        if usage >= 0 and text.find(b"}", usage, first) < 0:
            end = start
            size = len(text)
            while end < size and _ZERO <= text[end] <= _NINE:
                end += 1
            return b"".join([text[:start], number, text[end:]]) if end > start else text
    return _CACHED_TOKENS.sub(lambda found: _with_number(found, number), text)


def with_cached_tokens_at_end(body: Buffer, cached_tokens: int | None) -> bytes:
    """The ``cached_tokens`` of the last usage object, of a response: what comes before it may be the client's, as the
    schema of a tool."""
    body = bytes(body)
    found = _last(_CACHED_TOKENS, body)
    if found is None:
        return body
    return body[: found.start()] + _with_number(found, _number(cached_tokens)) + body[found.end() :]


def with_cache_read(body: Buffer, cached_tokens: int | None) -> bytes:
    """The ``cache_read_input_tokens`` of a message, and its ``input_tokens``, which are those that no cache had a part
    in: their sum stays. Of every usage object of a stream; of a whole message, of the last one, since the input of a
    tool is JSON of the model's."""
    body = bytes(body)
    if not body.startswith(b"{"):
        return _MESSAGE_USAGE.sub(lambda found: _with_cache_read(found[0], cached_tokens), body)
    found = _last(_MESSAGE_USAGE, body)
    if found is None:
        return body
    return body[: found.start()] + _with_cache_read(found[0], cached_tokens) + body[found.end() :]


def _with_number(found: re.Match[bytes], number: bytes) -> bytes:
    changed = found[1] + number
    return changed + found[2] + number + found[3] if found[2] is not None else changed


def _with_cache_read(usage: bytes, cached_tokens: int | None) -> bytes:
    read, rest = _READ.search(usage), _INPUT.search(usage)
    assert read is not None, "found by it"
    if rest is not None:
        num_input = int(rest[2]) + int(read[2]) - (cached_tokens or 0)
        usage = _INPUT.sub(rb"\g<1>%d" % max(num_input, 0), usage, count=1)
    return _READ.sub(rb"\g<1>" + _number(cached_tokens), usage, count=1)


def _number(cached_tokens: int | None) -> bytes:
    return b"null" if cached_tokens is None else b"%d" % cached_tokens


def _last(pattern: re.Pattern[bytes], body: bytes) -> re.Match[bytes] | None:
    found = None
    for each in pattern.finditer(body):
        found = each
    return found
