"""What a tier store is: a place outside the arena that keeps whole chunks by key.

Always true, of every store:

- What ``put`` returned for can be read whole by any later ``get_into``, or is a miss. A part of a chunk is never there
  to be read: a record appears at once, complete.
- ``get_into`` returns True only after the bytes in ``into`` have the digest that was stored with them, under the key
  and the meaning (``ChunkMeta``) that were asked for. Anything else is a miss or ``TierCorrupt``.
- A call returns or raises within the deadline that the store was made with, also when what is behind it hangs.

It does not decide what is stored, promoted or given up, and does not count failures: the callers do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from antiphon.core.errors import TierCorrupt, TierError
from antiphon.core.namespace import DIGEST_BYTES, FORMAT_VERSION, NamespaceDigest

__all__ = [
    "FINGERPRINT_BYTES_MAX",
    "KEY_BYTES",
    "ChunkMeta",
    "ExpectingStore",
    "PagedStore",
    "TierStore",
    "TierUsage",
    "removed_if_corrupt",
]

KEY_BYTES: Final = 32
FINGERPRINT_BYTES_MAX: Final = 512
"""Bytes of a layout fingerprint, UTF-8."""


@dataclass(frozen=True, slots=True)
class ChunkMeta:
    """Everything beside the key that makes bytes mean the same. Stands in the head of each record.

    Args:
        namespace: digest of the chunk's namespace, 32 bytes.
        layout_fingerprint: names an opaque layout; None where the slabs are head-major.
        num_bytes: of the whole chunk, at least 1.
        format_version: of the stored form of chunks.
    """

    namespace: NamespaceDigest
    layout_fingerprint: str | None
    num_bytes: int
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if len(self.namespace) != DIGEST_BYTES:
            raise ValueError(f"a namespace digest has {DIGEST_BYTES} bytes, not {len(self.namespace)}")
        if self.num_bytes < 1:
            raise ValueError(f"a chunk has at least one byte, not {self.num_bytes}")
        if len((self.layout_fingerprint or "").encode()) > FINGERPRINT_BYTES_MAX:
            raise ValueError(f"a layout fingerprint has at most {FINGERPRINT_BYTES_MAX} bytes")


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What a store holds.

    Args:
        num_chunks: records, as far as this process knows.
        held_bytes: their bytes, heads included.
        capacity_bytes: most bytes; None where the service behind the store sets the limit.
    """

    num_chunks: int
    held_bytes: int
    capacity_bytes: int | None


@runtime_checkable
class ExpectingStore(Protocol):
    """A store that is told of chunks that will be in it."""

    def gone(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of ``keys`` were expected and will not come, as far as the last ``contains`` has shown."""


@runtime_checkable
class PagedStore(Protocol):
    """A store behind a service that others use too, and that can be gone through, at a price."""

    def pages(self, part: bytes, at: int = 0) -> Iterator[list[bytes]]:
        """The keys that have ``part`` from byte ``at`` on, a page at a time, also those that nobody here has put.

        What is there from the first page to the last is in one of them; a page may be empty, and a key may come twice.
        Each page is a call with a deadline of its own. The caller may remove keys meanwhile, or leave at any page.

        Raises:
            TierUnavailable, TierTimeout: it is out of service. The listing is over then, and not whole.
        """


class TierStore(Protocol):
    """Blocking; called from a bounded pool of threads, several calls at once.

    Every call may raise ``TierUnavailable`` (out of service), ``TierTimeout`` (no answer by the deadline) and
    ``TierError``. Buffers are the caller's, and no store touches one after the call that it was given to.
    """

    @property
    def name(self) -> str:
        """Of the tier in the spec, such as ``disk``."""

    def put(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        """Stores a whole chunk; it is complete and checked when this returns. A key that is there is replaced.

        Raises:
            TierFull: there is no room for it.
        """

    def get_into(self, key: bytes, meta: ChunkMeta, into: memoryview) -> bool:
        """Reads a whole chunk into ``into``, of ``meta.num_bytes`` bytes. False: a miss.

        After False or an error the content of ``into`` has no meaning.

        Raises:
            TierCorrupt: the record was damaged or means something else; it was removed.
        """

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of ``keys`` are there, in their order. A hint: it may be gone or turn out damaged a moment later."""

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forgets ``keys``; those that are not there are left out."""

    def keys(self) -> Iterator[bytes] | None:
        """What is there, from this process's books; None where they do not say. A service is gone through by
        ``PagedStore``, where it can be."""

    def usage(self) -> TierUsage:
        """From this process's books: never waits for the service."""

    def probe(self) -> None:
        """A cheap call to what is behind the store.

        Raises:
            TierUnavailable, TierTimeout: it is out of service.
        """

    def close(self) -> None:
        """Gives everything back. A call after it raises ``TierUnavailable``. Closing twice is allowed."""


@contextlib.contextmanager
def removed_if_corrupt(store: TierStore, key: bytes) -> Iterator[None]:
    """Around a read of ``key``: a ``TierCorrupt`` passes after the record was removed, where that is possible."""
    try:
        yield
    except TierCorrupt:
        with contextlib.suppress(TierError):
            store.remove([key])
        raise
