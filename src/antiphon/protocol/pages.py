"""Pages of a cache server's numbered logs, as the router reads them: ``/reports`` and ``/events``.

Always true: one entry that cannot be read costs that entry, never the page, so that an asker can go on behind it.
Fields that are not known here are ignored.
"""

from __future__ import annotations

from typing import Annotated, Final, Generic, TypeVar

import msgspec

from antiphon.core.errors import ProtocolError

E = TypeVar("E")

NAME_CHARS_MAX: Final = 1_000

Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Incarnation = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
NextNumber = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]

DECODE_ERRORS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class Page(msgspec.Struct, Generic[E], frozen=True, kw_only=True):
    """One answer.

    Args:
        incarnation: the life of the server that the numbers belong to.
        next_sequence: ``next``: the number to ask for next.
        num_lost: entries that were asked for and are no longer kept.
        events: the entries, in the order of their numbers.
    """

    incarnation: Incarnation
    next_sequence: NextNumber = msgspec.field(name="next")
    num_lost: Number
    events: tuple[E, ...]


class PageReader(Generic[E]):
    """Reads the pages of one route.

    Args:
        route: its path, for messages.
        kind: a ``msgspec.Struct``: one entry.
    """

    def __init__(self, route: str, kind: type[E]) -> None:
        self._route = route
        self._pages: msgspec.json.Decoder[Page[E]] = msgspec.json.Decoder(Page[kind])  # type: ignore[valid-type]
        self._raw_pages = msgspec.json.Decoder(Page[msgspec.Raw])
        self._entries: msgspec.json.Decoder[E] = msgspec.json.Decoder(kind)

    def read(self, body: bytes) -> tuple[Page[E], int]:
        """The answer in ``body``, and how many of its entries were left out because they cannot be read.

        Raises:
            ProtocolError: the answer as a whole is none of the route.
        """
        try:
            return self._pages.decode(body), 0
        except DECODE_ERRORS:
            pass  # find out whether the page or an entry is wrong
        try:
            raw = self._raw_pages.decode(body)
        except DECODE_ERRORS as error:
            raise ProtocolError(f"this is no answer of {self._route}: {error}") from error
        entries = tuple(entry for entry in map(self._entry, raw.events) if entry is not None)
        page = Page(incarnation=raw.incarnation, next_sequence=raw.next_sequence, num_lost=raw.num_lost, events=entries)
        return page, len(raw.events) - len(entries)

    def _entry(self, raw: msgspec.Raw) -> E | None:
        try:
            return self._entries.decode(raw)
        except DECODE_ERRORS:
            return None
