"""The head of a message that came on a connection, by which the next one is known that differs in its body alone.

A client sends the same head again and again, and so does an engine, but for the length of the body. What the parser
would say of such a head is known: it need not see it. Whoever uses this makes sure that the parser stands between two
messages.

Invariant: what is known by :meth:`KnownHead.begin_of_body` is one whole message, to the last byte, with a body.
"""

from __future__ import annotations

from typing import Final

_END: Final = b"\r\n\r\n"
_LENGTH: Final = b"\r\ncontent-length:"
_FRAMING: Final = frozenset((b"transfer-encoding", b"expect", b"upgrade"))
"""A head with one of these is not known again: more depends on it than where the body ends."""
_DIGITS_MAX: Final = 8
_ZERO: Final = 48
_NINE: Final = 57
_CR: Final = 13
_SPACE: Final = 32


class KnownHead:
    """A head.

    Args:
        before, after: its bytes around the digits of the body's length, the empty line included.
        digits: of that length, when the head came.
        fields: as the parser gave them.
        place: among them, of the length.
    """

    def __init__(
        self, before: bytes, after: bytes, digits: bytes, fields: list[tuple[bytes, bytes]], place: int
    ) -> None:
        self._before = before
        self._after = after
        self._digits = digits
        self._fields = fields
        self._place = place
        self.max_bytes = len(before) + len(after) + _DIGITS_MAX

    def begin_of_body(self, data: bytes) -> int:
        """Where the body begins if ``data`` is this head, whatever its length says, and the whole body; else 0."""
        if not data.startswith(self._before):
            return 0
        size = len(data)
        start = end = len(self._before)
        length = 0
        while end < size and end - start < _DIGITS_MAX:
            digit = data[end]
            if not _ZERO <= digit <= _NINE:
                break
            length = length * 10 + digit - _ZERO
            end += 1
        begin = end + len(self._after)
        if size - begin != length or not length or data[start] == _ZERO or not data.startswith(self._after, end):
            return 0
        return begin

    def fields(self, data: bytes, begin: int) -> list[tuple[bytes, bytes]]:
        """The fields of ``data``, whose body begins there: a list that may be shared, and is not to be changed."""
        digits = data[len(self._before) : begin - len(self._after)]
        if digits == self._digits:
            return self._fields
        fields = self._fields.copy()
        fields[self._place] = (b"content-length", digits)
        return fields


def known_head(data: bytes, fields: list[tuple[bytes, bytes]]) -> KnownHead | None:
    """The head of ``data``, which the parser has taken for one whole message; None where it is not to be known again.

    Args:
        fields: as the parser gave them, names lower-case.
    """
    size = data.find(_END) + len(_END)
    head = data[:size].lower()
    start = head.find(_LENGTH) + len(_LENGTH)
    if start < len(_LENGTH) or size < len(_END) or head.count(b"\r\n") != len(fields) + 2:
        return None
    if data[start] == _SPACE:
        start += 1
    end = start
    while _ZERO <= data[end] <= _NINE:
        end += 1
    digits = data[start:end]
    if not 0 < len(digits) <= _DIGITS_MAX or data[end] != _CR or int(digits) != len(data) - size:
        return None
    names = [name for name, _ in fields]
    if not _FRAMING.isdisjoint(names) or names.count(b"content-length") != 1:
        return None
    return KnownHead(data[:start], data[end:size], digits, fields, names.index(b"content-length"))
