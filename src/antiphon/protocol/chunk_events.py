"""What a cache server tells of its chunks, as the router reads it: ``GET /events`` and ``GET /chunks``.

Always true: fields that are not known here are ignored, and so is an event of a kind that is not known.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from antiphon.core.errors import ProtocolError
from antiphon.protocol.pages import DECODE_ERRORS, Incarnation, Name, NextNumber, Number, Page, PageReader

KEY_BYTES: Final = 32

STORED: Final = "stored"
REMOVED: Final = "removed"

_Key = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Keys = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{64})*\Z")]


class ChunkEvent(msgspec.Struct, frozen=True):
    """A chunk became readable, or left the index.

    Args:
        sequence: number of the event in this life of the cache server, from 1.
        kind: ``stored`` or ``removed``.
        key: its key in hex.
    """

    sequence: Number
    kind: Name
    key: _Key


class ListedChunks(msgspec.Struct, frozen=True):
    """Readable chunks of one namespace. ``keys``: in hex, joined."""

    keys: _Keys


class ChunkListing(msgspec.Struct, frozen=True, kw_only=True):
    """One page of all readable chunks.

    Args:
        incarnation: the life of the server.
        next_sequence: ``next``: the number of the first event that came after this page was made.
        after: what to ask for next; None where this page is the last.
        chunk_size_tokens: tokens of a chunk.
        chunks: by namespace.
    """

    incarnation: Incarnation
    next_sequence: NextNumber = msgspec.field(name="next")
    after: Number | None
    chunk_size_tokens: NextNumber
    chunks: tuple[ListedChunks, ...]

    def keys(self) -> list[bytes]:
        """The keys of all chunks of the page."""
        return [
            joined[start : start + KEY_BYTES]
            for joined in (bytes.fromhex(listed.keys) for listed in self.chunks)
            for start in range(0, len(joined), KEY_BYTES)
        ]


_reader: Final = PageReader("/events", ChunkEvent)
_listings: Final = msgspec.json.Decoder(ChunkListing)


def decode_events(body: bytes) -> tuple[Page[ChunkEvent], int]:
    """The answer of ``/events``, and how many of its entries were left out because they are no events.

    Raises:
        ProtocolError: the answer as a whole is none of ``/events``.
    """
    return _reader.read(body)


def decode_listing(body: bytes) -> ChunkListing:
    """The answer of ``/chunks``.

    Raises:
        ProtocolError: it is none.
    """
    try:
        return _listings.decode(body)
    except DECODE_ERRORS as error:
        raise ProtocolError(f"this is no answer of /chunks: {error}") from error
