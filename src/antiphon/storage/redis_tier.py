"""The tier in a Redis or Valkey server: one value for each chunk, written and read in pieces.

A record is written piece by piece under a name of its own, which ends by itself if nobody finishes it, and gets the
chunk's name in one step. One value, so that the server evicts a chunk whole; pieces, because they are faster than one
long write, and because a deadline is looked at between them.

Always true: a chunk's name has a whole record, or nothing. What another client writes there is found out by the digest.

How much is kept, and what goes first, is the server's setting (``maxmemory``, ``maxmemory-policy``).
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from antiphon.core.errors import ConfigError, TierError, TierFull, TierTimeout, TierUnavailable
from antiphon.core.extras import install_remedy
from antiphon.core.units import KIB, MIB
from antiphon.storage.calls import Deadline, Piece, Pieces, Transfers
from antiphon.storage.known_keys import KnownKeys
from antiphon.storage.record import RecordReader, RecordWriter, record_bytes
from antiphon.storage.tier import KEY_BYTES, ChunkMeta, TierUsage, removed_if_corrupt

if TYPE_CHECKING:
    import redis

__all__ = ["RedisTier", "RedisTierOptions"]

UNFINISHED_TTL_S: Final = 60
KEYS_PER_CALL: Final = 1000
_READ_BYTES: Final = 256 * KIB
"""At once from the socket. Each read gives the interpreter away and takes it back; by default the client reads a
quarter of this."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RedisTierOptions:
    """How the tier reaches its server.

    Args:
        url: ``redis://host:port/db``, ``rediss://`` with TLS, or ``unix://path?db=0``; without password.
        username: None: the default user.
        password: None: none.
        ca_file: certificates that a ``rediss`` server is checked against; None: the system's.
        prefix: of every key.
        timeout_s: of each call.
        num_threads: calls at once, each with a connection.
        piece_bytes: of one write or read.
    """

    url: str
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    prefix: str = "antiphon"
    timeout_s: float = 5.0
    num_threads: int = 4
    piece_bytes: int = 2 * MIB


class RedisTier:
    """See the module. It connects when it is first called.

    Args:
        name: of the tier.
        options: where the server is.

    Raises:
        ConfigError: the client is not installed, or the URL is none.
    """

    def __init__(self, name: str, options: RedisTierOptions) -> None:
        self.name = name
        self._options = options
        self._client = _connect(options)
        self._command: Callable[..., Any] = self._client.execute_command
        self._transfers = Transfers(name, options.num_threads, options.piece_bytes)
        self._pool = self._transfers.pool
        self._known = KnownKeys()
        self._numbers = itertools.count()
        self._life = os.urandom(6).hex()

    # ---- the calls ---------------------------------------------------------------------------------------------------

    def put(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        """See ``TierStore.put``. ``TierFull``: the server has no memory and evicts nothing."""
        writer = RecordWriter(key, payload, meta)
        self._transfers.send(writer, lambda pieces: self._guarded(lambda: self._write(key, pieces)), self._deadline())
        self._known.add(key, record_bytes(meta))

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
        """See ``TierStore.contains``."""
        return self._call(lambda: [bool(found) for found in self._each(keys, "EXISTS")])

    def remove(self, keys: Sequence[bytes]) -> None:
        """See ``TierStore.remove``."""
        for key in keys:
            self._known.discard(key)
        self._call(lambda: list(self._each(keys, "UNLINK")))

    def keys(self) -> None:
        """See ``TierStore.keys``: the server is shared."""

    def pages(self, part: bytes, at: int = 0) -> Iterator[list[bytes]]:
        """See ``PagedStore.pages``. The server goes through all its keys, and sends those that are meant."""
        head = f"{self._options.prefix}:{{"
        # Names of unfinished records go on behind the brace.
        pattern = f"{_literally(head)}{'?' * (2 * at)}{part.hex()}*}}"
        name_length = len(head.encode()) + 2 * KEY_BYTES + 1
        cursor = 0
        while True:
            ask = partial(self._command, "SCAN", cursor, "MATCH", pattern, "COUNT", KEYS_PER_CALL)
            cursor, names = self._call(ask)
            yield [
                bytes.fromhex(name[-2 * KEY_BYTES - 1 : -1].decode())
                for name in names
                if len(name) == name_length and _RECORD.match(name, name_length - 2 * KEY_BYTES - 1)
            ]
            if not cursor:
                return

    def usage(self) -> TierUsage:
        """See ``TierStore.usage``: what this process has put."""
        return self._known.usage(None)

    def probe(self) -> None:
        """See ``TierStore.probe``."""
        self._call(self._client.ping)

    def close(self) -> None:
        """See ``TierStore.close``."""
        if not self._pool.is_closed:
            self._transfers.close()
            self._client.close()

    # ---- in the threads ----------------------------------------------------------------------------------------------

    def _write(self, key: bytes, pieces: Pieces[Piece]) -> None:
        import redis

        unfinished = f"{self._options.prefix}:{{{key.hex()}}}:{self._life}:{next(self._numbers)}"
        try:
            while (piece := pieces.take()) is not None:
                end_bytes = piece.offset_bytes + piece.num_bytes
                try:
                    value = piece.slot[: piece.num_bytes]
                    if piece.offset_bytes == 0:
                        self._command("SET", unfinished, value, "EX", UNFINISHED_TTL_S)
                    elif self._command("APPEND", unfinished, value) != end_bytes:
                        raise TierFull(f"the server of tier {self.name} evicted a chunk while it was written")
                finally:
                    self._transfers.slots.give_back(piece.slot)
            with self._client.pipeline(transaction=True) as steps:
                steps.rename(unfinished, self._name_of(key))
                steps.persist(self._name_of(key))
                steps.execute()
        except TierTimeout:
            raise
        except (TierError, redis.exceptions.OutOfMemoryError):
            # Not of a server that fails: there, what is unfinished ends by itself.
            self._client.unlink(unfinished)
            raise

    def _read(self, key: bytes, total_bytes: int, pieces: Pieces[Piece]) -> bool:
        name, offset_bytes, step_bytes = self._name_of(key), 0, self._options.piece_bytes
        # One byte more than the record has: a longer one is found out.
        while offset_bytes <= total_bytes:
            end_bytes = min(offset_bytes + step_bytes, total_bytes + 1)
            value = self._command("GETRANGE", name, offset_bytes, end_bytes - 1)
            if not value:
                return offset_bytes > 0
            pieces.put(Piece(memoryview(value), offset_bytes, len(value), is_lent=False))
            offset_bytes += len(value)
            if len(value) < step_bytes:
                return True
        return True

    def _each(self, keys: Sequence[bytes], command: str) -> Iterator[Any]:
        for start in range(0, len(keys), KEYS_PER_CALL):
            with self._client.pipeline(transaction=False) as steps:
                add: Callable[..., Any] = steps.execute_command
                for key in keys[start : start + KEYS_PER_CALL]:
                    add(command, self._name_of(key))
                yield from steps.execute()

    # ---- around a call -----------------------------------------------------------------------------------------------

    def _name_of(self, key: bytes) -> str:
        return f"{self._options.prefix}:{{{key.hex()}}}"

    def _deadline(self) -> Deadline:
        return Deadline(self._options.timeout_s, f"the server of tier {self.name}")

    def _call(self, work: Callable[[], T]) -> T:
        return self._pool.call(lambda: self._guarded(work), self._deadline())

    def _guarded(self, work: Callable[[], T]) -> T:
        """What ``work`` returns; an error of the client as one of ours."""
        import redis

        try:
            return work()
        except redis.exceptions.TimeoutError:
            raise TierTimeout(
                f"the server of tier {self.name} did not answer within {self._options.timeout_s:g} s"
            ) from None
        except redis.exceptions.OutOfMemoryError as error:
            raise TierFull(
                f"the server of tier {self.name} has no memory left: {error}",
                remedy="raise its maxmemory, or set its maxmemory-policy to allkeys-lru",
            ) from None
        except redis.exceptions.AuthenticationError as error:
            raise TierUnavailable(
                f"the server of tier {self.name} refuses the password: {error}",
                remedy="name a file with the right one in password_file",
            ) from None
        except (redis.exceptions.RedisError, OSError) as error:
            raise TierUnavailable(f"the server of tier {self.name}: {error}") from None


_RECORD: Final = re.compile(rb"[0-9a-f]{64}\}")


def _literally(text: str) -> str:
    """A pattern of the server that means ``text`` and nothing else."""
    return re.sub(r"([*?\[\]\\^-])", r"\\\1", text)


def _connect(options: RedisTierOptions) -> redis.Redis:
    try:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise ConfigError("the client for Redis is not installed", remedy=install_remedy("redis")) from error
    more: dict[str, Any] = {}
    if options.url.startswith("rediss://"):
        more["ssl_cert_reqs"] = "required"
        if options.ca_file is not None:
            more["ssl_ca_certs"] = options.ca_file
    if not options.url.startswith("unix://"):
        more["socket_connect_timeout"] = options.timeout_s
        more["socket_keepalive"] = True
    try:
        return redis.Redis.from_url(
            options.url,
            username=options.username,
            password=options.password,
            # By default the client tries again for seconds; the tier's breaker decides when to.
            retry=Retry(NoBackoff(), 0),
            socket_timeout=options.timeout_s,
            max_connections=options.num_threads,
            socket_read_size=_READ_BYTES,
            **more,
        )
    except ValueError as error:
        raise ConfigError(f"the URL of the tier is none: {error}") from None
