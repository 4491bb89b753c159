"""The tier in an S3-compatible object store: an object for each chunk.

Always true: an object is written in one request, so that it is there whole or not at all; the client tries nothing
again by itself, since the tier's breaker decides when to.

How much is kept, and for how long, is the bucket's setting. The objects are not encrypted by this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
        """See ``TierStore.contains``. One request for each key, several at once."""
        deadline = self._deadline()
        stripes = [keys[start :: self._options.num_threads] for start in range(self._options.num_threads)]
        futures = [self._pool.start(lambda part=part: self._heads(part)) for part in stripes if part]  # type: ignore[misc]
        found = {key for future in futures for key in self._pool.result(future, deadline)}
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
        """See ``TierStore.keys``: the bucket is shared, and to list it is not cheap."""

    def usage(self) -> TierUsage:
        """See ``TierStore.usage``: what this process has put."""
        return self._known.usage(None)

    def probe(self) -> None:
        """See ``TierStore.probe``. It asks for an object that is not there."""
        self._pool.call(lambda: self._heads([b"probe"]), self._deadline())

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

    def _heads(self, keys: Sequence[bytes]) -> list[bytes]:
        """Those that are there."""
        import obstore

        found = []
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self._guarded(lambda key=key: obstore.head(self._store, self._name_of(key)))  # type: ignore[misc]
                found.append(key)
        return found

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
