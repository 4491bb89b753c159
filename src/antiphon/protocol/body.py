"""Reads the top-level keys of a JSON request body without decoding it, and replaces some of them in place.

The client's bytes are kept: float text, big integers, key order, unknown keys, duplicates and white space reach the
engine as they were sent, except for the keys that are replaced. A body is scanned once; splicing copies none that is
large.

Does not know what any key means.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from antiphon.core.errors import ProtocolError

Buffer = bytes | bytearray | memoryview

_COPIED_MAX_BYTES: Final = 16_384
"""Pieces of a body up to this size are copied, which costs less than views of it."""

_top_level = msgspec.json.Decoder(dict[str, msgspec.Raw])
_text = msgspec.json.Decoder(str)
# Possessive, here and below: a repeat that may be taken back keeps a note for each byte, hundreds of bytes each.
_KEY = re.compile(rb'[\s,]*+("(?:[^"\\]++|\\.)*+")\s*+:\s*+', re.DOTALL)
_SPACE: Final = 32
_COMMA: Final = 44
_OPEN: Final = 123
_CLOSE: Final = 125
_ENDS_VALUE: Final = frozenset(b" \t\r\n,}")


class Body:
    """A JSON object as it was received.

    ``spans`` holds, in order of appearance, (key, start, end) of each top-level value that was looked for; a key that
    appears twice has two spans. ``values`` holds the raw bytes of the value that counts: the last one, as JSON parsers
    take it.
    """

    __slots__ = ("close", "raw", "spans", "values")

    def __init__(self, raw: bytes | bytearray, values: dict[str, msgspec.Raw]) -> None:
        self.raw = raw
        self.values = values
        self.spans: list[tuple[str, int, int]] = []
        self.close = 0
        """Index of the closing brace."""

    def get(self, key: str) -> bytes | None:
        """The raw bytes of a top-level value, or None where the key is absent."""
        value = self.values.get(key)
        return None if value is None else bytes(value)

    def sent(self, key: str) -> bytes | None:
        """The same as the client sent it, of a key that :func:`scan` looked for. It differs from :meth:`get` where
        the decoder was shown something else: see :func:`scan`."""
        for name, start, end in reversed(self.spans):
            if name == key:
                return bytes(memoryview(self.raw)[start:end])
        return None

    def splice(self, replace: Mapping[str, bytes], members: Mapping[str, bytes] | None = None) -> list[Buffer]:
        """The body with the values of ``replace`` (raw JSON by key), as buffers whose concatenation is the new body.

        A key that is present is replaced where it stands, at each place where it stands; a key that is absent is added
        at the end. The keys must be among those that :func:`scan` looked for. ``members`` holds what may be absent as
        :func:`member` writes it, where that is known beforehand.
        """
        raw = self.raw
        view: Buffer = raw if len(raw) <= _COPIED_MAX_BYTES else memoryview(raw)
        pieces: list[Buffer] = []
        position = 0
        for key, start, end in self.spans:
            value = replace.get(key)
            if value is not None:
                pieces.append(view[position:start])
                pieces.append(value)
                position = end
        values = self.values
        if members is None:
            added = [member(key, value) for key, value in replace.items() if key not in values]
        else:
            added = [members[key] for key in replace if key not in values]
        if added:
            comma = b"," if values else b""
            pieces.append(view[position : self.close])
            pieces.append(comma + b",".join(added) + b"}")
        else:
            pieces.append(view[position : self.close + 1])
        return pieces


def member(key: str, value: bytes) -> bytes:
    """A key, a plain word, and its raw value as they are written in an object."""
    return b'"%b":%b' % (key.encode(), value)


KEYS_MAX: Final = 1024
"""Top-level keys of a body; a request has a few dozen."""
NESTED_KEYS_MAX: Final = 1_000_000
"""Keys of a body at any depth, as far as they can be counted without reading it: bounds the decoder's memory."""
BRACKETS_MAX: Final = 500_000
"""Brackets of a body in which a key appears twice: it is read bracket by bracket, and must not hold up other
requests."""

_SMALL_BYTES: Final = 1_048_576


def scan(raw: bytes | bytearray, wanted: frozenset[str] | None = None) -> Body:
    """Read the top-level values of the JSON object ``raw``, and find where they stand.

    What Python's JSON takes and the decoder does not, an engine is to judge: half a surrogate pair as an escape, NaN,
    infinity. The decoder is shown other text of the same length in their place.

    Args:
        raw: the body.
        wanted: the keys that may be replaced, plain words; the places of others need not be found. None: all.

    Raises:
        ProtocolError: it is not JSON, not an object, or has too many keys.
    """
    if len(raw) > _SMALL_BYTES and raw.count(b'":') > NESTED_KEYS_MAX:
        raise ProtocolError("the request body has too many keys")
    try:
        values = _top_level.decode(raw)
        if not raw.isascii():
            raw.decode()  # the decoder looks only at keys
    except msgspec.ValidationError:
        raise ProtocolError("the request body must be a JSON object") from None
    except msgspec.DecodeError as error:
        strict = _strict(raw)
        if strict is None:
            raise ProtocolError(f"the request body is not valid JSON: {error}") from None
        body = scan(strict, wanted)
        body.raw = raw
        return body
    except UnicodeDecodeError:
        raise ProtocolError("the request body is not valid UTF-8") from None
    except RecursionError:
        raise ProtocolError("the request body is nested too deeply") from None
    if len(values) > KEYS_MAX:
        raise ProtocolError(f"the request body has more than {KEYS_MAX} top-level keys")
    body = Body(raw, values)
    if _follow(body, wanted):
        return body
    body.spans.clear()
    # By the sizes that the decoder saw, which is quick; where that leads astray (a key appears twice), by reading.
    if not _walk(body, _jump):
        body.spans.clear()
        walked = _walk(body, _Reader())
        assert walked, "a valid JSON object can be walked"
    return body


_LOOSE_MAX_BYTES: Final = 1_048_576
"""A longer body has to be strict: what it is replaced by costs a moment for each occurrence."""
_HALF_PAIR = re.compile(
    rb"(?<!\\)((?:\\\\)*+)"  # an escaped backslash begins no escape
    rb"(?:(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_NO_NUMBER = re.compile(rb"(?<=[\[,:\s])(-?)(?:(NaN)|Infinity)(?=[\],}\s])")


def _strict(raw: bytes | bytearray) -> bytes | None:
    """A text of the same length that a strict decoder takes if Python's takes ``raw``; None where nothing differs.

    No byte that ends or begins a value is touched, so that both have their values in the same places.
    """
    if len(raw) > _LOOSE_MAX_BYTES:
        return None
    strict = bytes(raw)
    if strict.find(b"\\u") >= 0:
        strict = _HALF_PAIR.sub(lambda found: found[0] if found[2] else found[1] + b"\\ufffd", strict)
    if strict.find(b"NaN") >= 0 or strict.find(b"Infinity") >= 0:
        strict = _NO_NUMBER.sub(lambda found: found[1] + (b"0.0" if found[2] else b"1.000000"), strict)
    return strict if strict != raw else None


def _follow(body: Body, wanted: frozenset[str] | None) -> bool:
    """Fill in ``spans`` and ``close`` by going along the values that the decoder saw, in their order. False where the
    body is written otherwise than most writers do (at most a space after a colon or a comma), a key appears twice, or
    the body is large and came in pieces.
    """
    if isinstance(body.raw, bytearray) and len(body.raw) > _COPIED_MAX_BYTES:
        return False
    raw = body.raw if isinstance(body.raw, bytes) else bytes(body.raw)
    spans = body.spans
    last = len(raw) - 1
    position = end = 0
    for key, value in body.values.items():
        before = raw[position]
        if before != _COMMA and before != _OPEN:  # "}": fewer keys stand here than the decoder saw
            return False
        position += 2 if raw[position + 1] == _SPACE else 1
        name = b'"' + key.encode() + b'":'
        start = position + len(name)
        if raw[position:start] != name:
            return False
        if raw[start] == _SPACE:
            start += 1
        # The length alone proves nothing: a body whose key appears twice can be made so that it ends inside a value.
        if not raw.startswith(value, start):
            return False
        position = end = start + len(value)
        if end > last:
            return False
        if wanted is None or key in wanted:
            spans.append((key, start, end))
    if not end or raw[end] != _CLOSE or (end != last and raw[end + 1 :].strip()):
        return False
    body.close = end
    return True


def _walk(body: Body, end_of_value: Callable[[Body, str, int], int]) -> bool:
    """Fill in ``spans`` and ``close``; False if ``end_of_value`` led astray, as it may where a key appears twice."""
    raw = body.raw
    seen: set[str] = set()
    position = raw.index(b"{") + 1
    match = _KEY.match(raw, position)
    while match is not None:
        name: bytes = match.group(1)
        key: str = _text.decode(name) if b"\\" in name else name[1:-1].decode()
        start = match.end()
        if key not in body.values:
            return False
        position = end_of_value(body, key, start)
        if position >= len(raw) or raw[position] not in _ENDS_VALUE:
            return False
        seen.add(key)
        body.spans.append((key, start, position))
        match = _KEY.match(raw, position)
    rest = raw[position:].strip()
    body.close = raw.rindex(b"}")
    return rest == b"}" and len(seen) == len(body.values)


def _jump(body: Body, key: str, start: int) -> int:
    """The end of a value that is, byte for byte, the one that the decoder saw; past the end of the body if it is not.

    The length alone proves nothing: a body whose key appears twice can be made so that it ends inside a value.
    """
    value = memoryview(body.values[key])
    return start + len(value) if body.raw.startswith(value, start) else len(body.raw)


_SCALAR = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[^\s,\]}]++', re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+([\[\]{}])', re.DOTALL)


class _Reader:
    """Finds the ends of values by reading them, up to a number of brackets in all. The body is known to be valid
    JSON."""

    def __init__(self) -> None:
        self._num_brackets = 0

    def __call__(self, body: Body, key: str, start: int) -> int:
        raw = body.raw
        if raw[start] not in b"[{":
            scalar = _SCALAR.match(raw, start)
            assert scalar is not None, "a valid JSON value has an end"
            return scalar.end()
        depth = 0
        for match in _TO_BRACKET.finditer(raw, start):
            depth += 1 if match.group(1) in b"[{" else -1
            if depth == 0:
                return match.end()
            self._num_brackets += 1
            if self._num_brackets > BRACKETS_MAX:
                raise ProtocolError("a top-level key appears twice in a body with very many brackets")
        raise AssertionError("a valid JSON value has an end")
