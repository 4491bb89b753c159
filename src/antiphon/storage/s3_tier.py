"""The tier in an S3-compatible object store: an object for each chunk.

Always true: an object is written in one request, so that it is there whole or not at all; the client tries nothing
again by itself, since the tier's breaker decides when to.

How much is kept, and for how long, is the bucket's setting. The objects are not encrypted by this.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from antiphon.core.errors import ConfigError, TierCorrupt, TierFull, TierTimeout, TierUnavailable
from antiphon.core.extras import install_remedy
from antiphon.core.units import MIB
from antiphon.storage.calls import Deadline, Piece, Pieces, Transfers
from antiphon.storage.known_keys import KnownKeys
from antiphon.storage.record import RecordReader, RecordWriter, record_bytes
from antiphon.storage.tier import ChunkMeta, TierUsage, removed_if_corrupt

if TYPE_CHECKING:
    from obstore.store import S3Store

__all__ = ["S3Tier", "S3TierOptions"]

PIECE_BYTES: Final = 2 * MIB
KEYS_PER_DELETE: Final = 500
KEYS_PER_PAGE: Final = 1000
"""Of a listing: the most that the service gives at once."""
HEADS_MAX: Final = 32
"""Requests of one question at once. They take one thread together."""
_HEADS_SHARE: Final = 0.9
"""Of the time that is left: then a question is answered with what is known."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class S3TierOptions:
    """How the tier reaches its bucket.

    Args:
        bucket: its name; it exists.
        prefix: of every object's name.
        endpoint: URL of the service; None: Amazon's.
        region: of the bucket.
        access_key_id, secret_access_key, session_token: None: what the client finds in its environment.
        is_virtual_hosted: whether the bucket is named in the host (``bucket.host``) rather than in the path.
        timeout_s: of each call.
        num_threads: calls at once.
    """

    bucket: str
    prefix: str = "antiphon"
    endpoint: str | None = None
    region: str | None = None
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    is_virtual_hosted: bool = False
    timeout_s: float = 10.0
    num_threads: int = 4


class S3Tier:
    """See the module. It connects when it is first called.

    Args:
        name: of the tier.
        options: where the bucket is.

    Raises:
        ConfigError: the client is not installed, or an option cannot be.
    """

    def __init__(self, name: str, options: S3TierOptions) -> None:
        self.name = name
        self._options = options
        self._store = _connect(options)
        self._transfers = Transfers(name, options.num_threads, PIECE_BYTES)
        self._pool = self._transfers.pool
        self._known = KnownKeys()

    # ---- the calls ---------------------------------------------------------------------------------------------------

    def put(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        """See ``TierStore.put``. It takes as much memory as the record has, until the service has it."""
        import obstore

        deadline = self._deadline()
        writer = RecordWriter(key, payload, meta)
        record = memoryview(bytearray(writer.total_bytes))
        writer.fill(record)
        writer.check()
        self._call(lambda: obstore.put(self._store, self._name_of(key), record, use_multipart=False), deadline)
        self._known.add(key, writer.total_bytes)

    def get_into(self, key: bytes, meta: ChunkMeta, into: memoryview) -> bool:
        """See ``TierStore.get_into``."""
        deadline = self._deadline()
        reader = RecordReader(key, meta, into)

        def read(pieces: Pieces[Piece]) -> bool:
            return self._guarded(lambda: self._read(key, record_bytes(meta), pieces))

        with removed_if_corrupt(self, key):
            is_there = self._transfers.receive(reader, read, deadline)
        if not is_there:
            self._known.discard(key)
        return is_there

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``TierStore.contains``. One request for each key, in their order, several at once.

        Where the deadline comes before all are answered, those without an answer count as not there.

        Raises:
            TierTimeout: none is answered.
        """
        deadline = self._deadline()

        def ask() -> set[bytes]:
            return self._guarded(lambda: asyncio.run(self._heads(keys, deadline)))

        found = self._pool.call(ask, deadline) if keys else set()
        return [key in found for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See ``TierStore.remove``."""
        import obstore

        for key in keys:
            self._known.discard(key)
        deadline = self._deadline()
        names = [self._name_of(key) for key in keys]
        for start in range(0, len(names), KEYS_PER_DELETE):
            part = names[start : start + KEYS_PER_DELETE]
            with contextlib.suppress(FileNotFoundError):
                self._call(lambda part=part: obstore.delete(self._store, part), deadline)  # type: ignore[misc]

    def keys(self) -> None:
        """See ``TierStore.keys``: the bucket is shared."""

    def pages(self, part: bytes, at: int = 0) -> Iterator[list[bytes]]:
        """See ``PagedStore.pages``. From byte 0 on the folder of the first byte is listed, else the whole prefix."""
        import obstore

        folder = part[:1].hex() if at == 0 and part else None
        listing = obstore.list(self._store, folder, chunk_size=KEYS_PER_PAGE)
        while (page := self._call(lambda: next(listing, None), self._deadline())) is not None:
            names = (item["path"].rpartition("/")[2] for item in page)
            keys = (bytes.fromhex(name) for name in names if _RECORD.fullmatch(name))
            yield [key for key in keys if key[at : at + len(part)] == part]

    def usage(self) -> TierUsage:
        """See ``TierStore.usage``: what this process has put."""
        return self._known.usage(None)

    def probe(self) -> None:
        """See ``TierStore.probe``. It asks for an object that is not there."""
        import obstore

        with contextlib.suppress(FileNotFoundError):
            self._call(lambda: obstore.head(self._store, self._name_of(b"probe")), self._deadline())

    def close(self) -> None:
        """See ``TierStore.close``."""
        self._transfers.close()

    # ---- in the threads ----------------------------------------------------------------------------------------------

    def _read(self, key: bytes, total_bytes: int, pieces: Pieces[Piece]) -> bool:
        import obstore

        try:
            answer = obstore.get(self._store, self._name_of(key))
        except FileNotFoundError:
            return False
        if answer.meta["size"] != total_bytes:
            raise TierCorrupt(
                f"the record of chunk {key.hex()[:16]} has {answer.meta['size']} bytes, not {total_bytes}"
            )
        offset_bytes = 0
        for part in answer.stream(min_chunk_size=PIECE_BYTES):
            view = memoryview(part)
            pieces.put(Piece(view, offset_bytes, len(view), is_lent=False))
            offset_bytes += len(view)
        return True

    async def _heads(self, keys: Sequence[bytes], deadline: Deadline) -> set[bytes]:
        """Those that are there, as far as it is known shortly before the deadline; what is not answered is given up.

        Raises:
            TierTimeout: nothing is answered.
            obstore.exceptions.BaseError: one was refused.
        """
        import obstore

        left = iter(keys)
        answers: dict[bytes, bool] = {}

        async def ask() -> None:
            for key in left:
                try:
                    await obstore.head_async(self._store, self._name_of(key))
                    answers[key] = True
                except FileNotFoundError:
                    answers[key] = False

        asking = [asyncio.create_task(ask()) for _ in range(min(HEADS_MAX, len(keys)))]
        left_s = deadline.left_s() * _HEADS_SHARE
        await asyncio.wait(asking, timeout=left_s, return_when=asyncio.FIRST_EXCEPTION)
        for each in asking:
            each.cancel()
        for ended in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended
        if not answers:
            raise deadline.passed()
        return {key for key, is_there in answers.items() if is_there}

    # ---- around a call -----------------------------------------------------------------------------------------------

    def _name_of(self, key: bytes) -> str:
        """Spread over folders, for stores that keep them."""
        name = key.hex()
        return f"{name[:2]}/{name}"

    def _deadline(self) -> Deadline:
        return Deadline(self._options.timeout_s, f"the object store of tier {self.name}")

    def _call(self, work: Callable[[], T], deadline: Deadline) -> T:
        return self._pool.call(lambda: self._guarded(work), deadline)

    def _guarded(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; an error of the client as one of ours, but for a missing object."""
        from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

        try:
            return work()
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise TierUnavailable(
                f"the object store of tier {self.name} refuses the keys: {_first_line(error)}",
                remedy="name a file with the right ones in credentials_file",
            ) from None
        except FileNotFoundError:
            raise
        except (BaseError, OSError) as error:
            text = _first_line(error)
            if "timed out" in text or "timeout" in text.lower():
                raise TierTimeout(f"the object store of tier {self.name}: {text}") from None
            if any(mark in text for mark in _FULL_MARKS):
                raise TierFull(f"the object store of tier {self.name} has no room: {text}") from None
            raise TierUnavailable(f"the object store of tier {self.name}: {text}") from None


_RECORD: Final = re.compile(r"[0-9a-f]{64}")
_FULL_MARKS: Final = ("507 Insufficient", "InsufficientStorage", "XMinioStorageFull", "QuotaExceeded", "no space left")
_TEXT_MAX: Final = 300


def _first_line(error: Exception) -> str:
    """What the client says, without the dump of its state that it adds."""
    return str(error).split("\n", 1)[0][:_TEXT_MAX]


def _connect(options: S3TierOptions) -> S3Store:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import S3Store
    except ImportError as error:
        raise ConfigError("the client for S3 is not installed", remedy=install_remedy("s3")) from error
    given: dict[str, Any] = {
        "endpoint": options.endpoint,
        "region": options.region,
        "access_key_id": options.access_key_id,
        "secret_access_key": options.secret_access_key,
        "session_token": options.session_token,
    }
    timeout = timedelta(seconds=options.timeout_s)
    try:
        return S3Store(
            options.bucket,
            prefix=options.prefix or None,
            virtual_hosted_style_request=options.is_virtual_hosted,
            client_options={
                "timeout": timeout,
                "connect_timeout": timeout,
                "allow_http": (options.endpoint or "").startswith("http://"),
            },
            retry_config={"max_retries": 0, "retry_timeout": timeout},
            **{name: value for name, value in given.items() if value is not None},
        )
    except (BaseError, ValueError) as error:
        raise ConfigError(f"the options of the S3 tier cannot be: {_first_line(error)}") from None
