"""The client side of HTTP/1.1: the connections to one engine.

Owns upstream connections. :class:`HttpCall` and :meth:`HttpPool.fetch` make whole responses of an exchange's callbacks.
Retries nothing: what may be sent twice is the caller's knowledge.
"""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, cast

from antiphon.core.errors import (
    ConnectFailed,
    ConnectTimeout,
    OwnLimit,
    UpstreamError,
    UpstreamGarbage,
    UpstreamLost,
    UpstreamTimeout,
)
from antiphon.protocol.body import Buffer
from antiphon.transport.http.client_connection import HttpClientConnection
from antiphon.transport.http.deadlines import Deadlines
from antiphon.transport.http.message import Fields, HttpResponse, field_lines
from antiphon.transport.http.strand import Promise

_IDLE_REUSE_MAX_S: Final = 2.0
"""A connection idle for longer is not reused: an engine's server closes idle ones after 5 s (uvicorn's default), and a
request written into a closing connection is lost without anybody knowing whether it ran."""

_OWN_LIMITS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""What a failed connect says of this machine rather than of the engine."""

_LET_GO: Final = "the router has let go of this engine"

BODY_MAX_BYTES: Final = 16_777_216
"""The largest whole answer that is taken from an engine: 16 MiB."""


class HttpCall(Promise[HttpResponse]):
    """One request whose whole response is wanted: await it. A :class:`ResponseSink`.

    Not awaiting it leaves the connection in use until the response or :meth:`abort`. Awaiting it raises what
    :meth:`HttpPool.fetch` lists, or what :meth:`abort` was given.
    """

    def __init__(
        self, connection: HttpClientConnection, timeout_s: float, body_max_bytes: int = BODY_MAX_BYTES
    ) -> None:
        super().__init__()
        self.has_head = False
        """Whether the answer has begun to arrive."""
        self._body: bytes | bytearray = b""
        self._connection = connection
        self._timeout_s = timeout_s
        self._body_max_bytes = body_max_bytes

    def start(self, buffers: Sequence[Buffer]) -> None:
        """Send the request."""
        self._connection.start(buffers, self, self._timeout_s)

    def abort(self, error: Exception) -> None:
        """Cut the connection and let whoever waits see ``error``; nothing if the response has arrived."""
        if not self.is_resolved:
            self._connection.abort()
            self.fail(error)

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_head = True
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        body = self._body
        if len(body) + len(data) > self._body_max_bytes:
            self.abort(UpstreamGarbage(f"the engine's answer is larger than {self._body_max_bytes} bytes"))
        elif not body:
            self._body = data
        elif isinstance(body, bytearray):
            body += data
        else:
            self._body = bytearray(body) + data

    def on_read_end(self) -> None:
        pass

    def on_chunk(self, raw: bytes, begin: int) -> None:
        self.on_body(raw[begin:-2])

    def on_end(self) -> None:
        self.resolve(HttpResponse(self._status, self._headers, bytes(self._body)))

    def on_lost(self, error: UpstreamError) -> None:
        self.fail(error)

    def on_timeout(self) -> None:
        self.abort(UpstreamTimeout(f"no answer within {self._timeout_s:g} s"))


class HttpPool:
    """The connections to one engine.

    Args:
        host, port: where the engine listens.
        connections_max: at most so many at once; one more request is refused with :class:`ConnectFailed`.
        connect_timeout_s: how long a connection attempt may take.
    """

    def __init__(self, host: str, port: int, *, connections_max: int = 1024, connect_timeout_s: float = 2.0) -> None:
        self.host = host
        self.port = port
        self.authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._connections_max = connections_max
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[HttpClientConnection] = deque()
        self._all: set[HttpClientConnection] = set()
        self._deadlines: dict[float, Deadlines] = {}  # by the time given; a process gives a handful of times
        self._num_connecting = 0
        self._is_closed = False
        self.loop = asyncio.get_running_loop()

    def acquire_nowait(self) -> HttpClientConnection | None:
        """An idle connection that is fresh enough, or None."""
        oldest = self.loop.time() - _IDLE_REUSE_MAX_S
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and connection.idle_since >= oldest:
                return connection
            connection.abort()
        return None

    async def acquire(self) -> HttpClientConnection:
        """An idle connection, or a new one.

        Raises:
            ConnectFailed: refused, unreachable or timed out; no byte was written.
            OwnLimit: too many connections, or this process is out of file descriptors, ports or memory.
        """
        connection = self.acquire_nowait()
        if connection is not None:
            return connection
        if self._is_closed:
            raise ConnectFailed(_LET_GO)
        if self.is_full:
            raise OwnLimit("too many connections to this engine are open")
        connecting = asyncio.create_task(self._connect())  # a time-out needs a task, and a strand is none
        self._num_connecting += 1
        try:
            connection = await connecting
        except asyncio.CancelledError:
            if connecting.done() and not connecting.cancelled() and connecting.exception() is None:
                connecting.result().abort()  # made, but nobody is left to use it
            raise
        finally:
            self._num_connecting -= 1
        if not connection.is_open:
            raise ConnectFailed("the connection was closed as soon as it was made")
        if not self._takes(connection):
            raise ConnectFailed(_LET_GO)
        return connection

    def _takes(self, connection: HttpClientConnection) -> bool:
        """Whether a new connection is still wanted; else it is cut."""
        if self._is_closed:
            connection.abort()
            return False
        self._all.add(connection)
        return True

    async def _connect(self) -> HttpClientConnection:
        def make() -> Any:
            return HttpClientConnection(self)

        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, made = await self.loop.create_connection(make, self.host, self.port)
        except TimeoutError:
            raise ConnectTimeout(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            kind = OwnLimit if error.errno in _OWN_LIMITS else ConnectFailed
            raise kind(f"no connection: {error.strerror or error}") from error
        return cast("HttpClientConnection", made)

    @property
    def is_full(self) -> bool:
        """Whether no further connection may be opened."""
        return len(self._all) + self._num_connecting >= self._connections_max

    async def fetch(
        self, buffers: Sequence[Buffer], *, timeout_s: float, body_max_bytes: int = BODY_MAX_BYTES
    ) -> HttpResponse:
        """Send one request and return the whole response. Cancelling it cuts the connection.

        Raises:
            ConnectFailed: no byte was written.
            UpstreamLost, UpstreamGarbage: the answer is missing, cut or unusable.
            UpstreamTimeout: no complete answer within ``timeout_s``.
        """
        call = HttpCall(await self.acquire(), timeout_s, body_max_bytes)
        call.start(buffers)
        try:
            return await call
        except asyncio.CancelledError:
            call.abort(UpstreamLost("cancelled"))
            raise

    def deadlines(self, timeout_s: float) -> Deadlines:
        """The deadlines of exchanges that are given ``timeout_s``."""
        deadlines = self._deadlines.get(timeout_s)
        if deadlines is None:
            deadlines = self._deadlines[timeout_s] = Deadlines(self.loop, timeout_s)
        return deadlines

    def give_back(self, connection: HttpClientConnection) -> None:
        """An exchange ended cleanly: the connection may be reused for a while."""
        connection.idle_since = self.loop.time()
        self._idle.append(connection)

    def forget(self, connection: HttpClientConnection) -> None:
        """The connection is of no use any more."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Cut every connection, and make no more: whoever waits for an answer is told that it is lost."""
        self._is_closed = True
        for connection in list(self._all):
            connection.lose(UpstreamLost(_LET_GO))
        for deadlines in self._deadlines.values():
            deadlines.close()

    def statistics(self) -> dict[str, int]:
        """Counts now: ``open`` connections, of which ``idle``."""
        return {"open": len(self._all), "idle": len(self._idle)}


def request_head(method: str, target: str, authority: str, fields: Fields, *, length: int | None) -> bytes:
    """A request head from the request line to the empty line; ``length`` None leaves ``content-length`` out."""
    end = b"\r\n" if length is None else b"content-length: %d\r\n\r\n" % length
    line = f"{method} {target} HTTP/1.1\r\nhost: {authority}\r\n".encode("latin-1")
    return b"%b%b%b" % (line, field_lines(fields), end)
