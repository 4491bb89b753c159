"""JSON as every process here reads and writes it: bytes in, plain Python values out, and back.

A thin wrapper, so that the library behind it has one owner. It validates nothing but the syntax.
"""

from __future__ import annotations

import msgspec

from antiphon.core.errors import ProtocolError

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder()


def encode(value: object) -> bytes:
    """``value`` as compact UTF-8 JSON; dict keys keep their order."""
    return _encoder.encode(value)


def decode(data: bytes | bytearray | memoryview) -> object:
    """The value of a JSON text: dict, list, str, int, float, bool or None.

    Raises:
        ProtocolError: it is not valid JSON, or not UTF-8.
    """
    try:
        value: object = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"not valid JSON: {error}") from error
    return value


def text_in(raw: bytes | None) -> str:
    """The text that ``raw`` is in JSON; empty for None, any other value, and what is no JSON."""
    if raw is None or raw[:1] != b'"':
        return ""
    if b"\\" not in raw:  # as nearly always: it stands there as it is
        return raw[1:-1].decode("utf-8", "replace")
    try:
        text = decode(raw)
    except ProtocolError:
        return ""
    return text if isinstance(text, str) else ""
