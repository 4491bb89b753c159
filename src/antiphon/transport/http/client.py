"""The client side of HTTP/1.1: keep-alive connections to one engine, one exchange at a time on each.

Owns upstream connections. An exchange delivers the response by callbacks, so that a streamed token costs one call and
no task switch; :meth:`HttpPool.fetch` wraps that for whole responses. Retries nothing: what may be sent twice is the
caller's knowledge.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Sequence
from typing import Protocol, cast

import httptools

from antiphon.core.errors import ConnectFailed, OwnLimit, UpstreamError, UpstreamGarbage, UpstreamLost, UpstreamTimeout
from antiphon.protocol.body import Buffer
from antiphon.transport.http.message import Headers, HttpResponse

_IDLE_REUSE_MAX_S = 2.0
"""A connection idle for longer is not reused: an engine's server closes idle ones after 5 s (uvicorn's default), and a
request written into a closing connection is lost without anybody knowing whether it ran."""

_HEAD_MAX_BYTES = 131_072

_OWN_LIMITS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""What a failed connect says of this machine rather than of the engine."""

_JOIN_MAX_BYTES = 65_536
"""A request up to this size is written as one piece, which costs less than several."""

BODY_MAX_BYTES = 16_777_216
"""The largest whole answer that is taken from an engine: 16 MiB."""


class ResponseSink(Protocol):
    """Receives one response. ``on_end`` or ``on_lost`` is called exactly once, and nothing after it."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The status line and header have arrived."""

    def on_body(self, data: bytes) -> None:
        """A piece of the body, not empty."""

    def on_read_end(self) -> None:
        """Every piece that has arrived so far was delivered: the time to pass them on together."""

    def on_end(self) -> None:
        """The response is complete."""

    def on_lost(self, error: UpstreamError) -> None:
        """The response will not be complete."""


class HttpClientConnection(asyncio.Protocol):
    """One connection to an engine."""

    def __init__(self, pool: HttpPool) -> None:
        self.loop = pool.loop
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: ResponseSink | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._raw_head_bytes = 0
        self._has_head = False
        self._is_complete = False
        self._ends_at_close = False
        self._keeps_alive = False
        self._is_paused = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport and are not instances of it.
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self, buffers: Sequence[Buffer], sink: ResponseSink) -> None:
        """Write a request (head and body) and deliver its response to ``sink``."""
        assert self._sink is None and self._transport is not None
        self._sink = sink
        self._has_head = False
        self._is_complete = False
        self._ends_at_close = False
        self._raw_head_bytes = 0
        if sum(map(len, buffers)) <= _JOIN_MAX_BYTES:
            self._transport.write(b"".join(buffers))
        else:
            self._transport.writelines(buffers)

    def data_received(self, data: bytes) -> None:
        if self._sink is None:
            self.abort()  # bytes that nobody asked for
            return
        if not self._has_head:
            self._raw_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            raise error.__context__ or error from error
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if self._is_complete:
                self._keeps_alive = False
                self._end()
            else:
                self._lose(UpstreamGarbage("the engine's answer is not valid HTTP"))
        else:
            if self._is_complete:
                self._end()
            elif self._sink is not None:
                self._sink.on_read_end()
            if not self._has_head and self._raw_head_bytes > _HEAD_MAX_BYTES:
                self._lose(UpstreamGarbage("the header of the engine's answer is too large"))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._transport = None
        if self._sink is not None:
            if self._ends_at_close and exc is None:
                self._end()
            else:
                self._lose(UpstreamLost("the engine closed the connection before its answer was complete"))

    def on_message_begin(self) -> None:
        self._fields = []
        if self._is_complete:
            # A second answer to one request: the connection is out of step, and whatever it says next is not trusted.
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # what comes later are trailer fields, which nobody asked for
            self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, sink = self._parser, self._sink
        if sink is None or self._is_complete:
            return
        status = parser.get_status_code()
        if 100 <= status < 200:
            return  # an interim answer, such as 103: the real one follows
        self._has_head = True
        self._keeps_alive = parser.should_keep_alive()
        self._ends_at_close = not any(name in (b"content-length", b"transfer-encoding") for name, _ in self._fields)
        sink.on_head(status, self._fields)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None and not self._is_complete:
            self._sink.on_body(data)

    def on_message_complete(self) -> None:
        # The sink hears of the end when the parser has returned: it may start the next exchange at once.
        if self._has_head:
            self._is_complete = True

    def pause(self) -> None:
        """Stop reading: the client behind this response reads too slowly."""
        if self._transport is not None and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Cut the connection, without a word to the sink: whoever aborts knows."""
        self._sink = None
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    @property
    def is_open(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    def _end(self) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return  # it aborted in the middle of the last piece
        if self._keeps_alive and not self._ends_at_close and self.is_open:
            if self._is_paused:
                self.resume()  # the next exchange on it must be heard
            self._pool.give_back(self)
        else:
            self._pool.forget(self)
            if self._transport is not None:
                self._transport.close()
        sink.on_end()

    def _lose(self, error: UpstreamError) -> None:
        sink, self._sink = self._sink, None
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.on_lost(error)


class HttpCall:
    """One request whose whole response is wanted: ``await call.done``.

    Not awaiting it leaves the connection in use until the response or :meth:`abort`.
    """

    def __init__(self, connection: HttpClientConnection, timeout_s: float, body_max_bytes: int) -> None:
        loop = connection.loop
        self.done: asyncio.Future[HttpResponse] = loop.create_future()
        self._connection = connection
        self._body_max_bytes = body_max_bytes
        self._timer = loop.call_later(timeout_s, self._expire, timeout_s)
        self._is_over = False
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._pieces: list[bytes] = []
        self._size = 0

    @property
    def has_head(self) -> bool:
        """Whether the answer has begun to arrive."""
        return self._status != 0

    def abort(self, error: Exception) -> None:
        """Cut the connection and let ``done`` raise ``error``; nothing if the response has arrived."""
        if not self._is_over:
            self._connection.abort()
            self._finish(error)

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status, self._headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._body_max_bytes:
            self.abort(UpstreamGarbage(f"the engine's answer is larger than {self._body_max_bytes} bytes"))
        else:
            self._pieces.append(data)

    def on_read_end(self) -> None:
        pass

    def on_end(self) -> None:
        self._finish(HttpResponse(self._status, self._headers, b"".join(self._pieces)))

    def on_lost(self, error: UpstreamError) -> None:
        self._finish(error)

    def _finish(self, result: HttpResponse | Exception) -> None:
        self._is_over = True
        self._timer.cancel()
        if self.done.done():  # whoever waited was cancelled
            return
        if isinstance(result, HttpResponse):
            self.done.set_result(result)
        else:
            self.done.set_exception(result)

    def _expire(self, timeout_s: float) -> None:
        self.abort(UpstreamTimeout(f"no answer within {timeout_s:g} s"))


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
        self.authority = f"{host}:{port}"
        self._connections_max = connections_max
        self._connect_timeout_s = connect_timeout_s
        self._idle: deque[HttpClientConnection] = deque()
        self._all: set[HttpClientConnection] = set()
        self._num_connecting = 0
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
        if self.is_full:
            raise OwnLimit("too many connections to this engine are open")
        self._num_connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await self.loop.create_connection(
                    lambda: HttpClientConnection(self), self.host, self.port
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {self._connect_timeout_s:g} s") from None
        except OSError as error:
            kind = OwnLimit if error.errno in _OWN_LIMITS else ConnectFailed
            raise kind(f"no connection: {error.strerror or error}") from error
        finally:
            self._num_connecting -= 1
        if not connection.is_open:
            raise ConnectFailed("the connection was closed as soon as it was made")
        self._all.add(connection)
        return connection

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
        call = self.call(await self.acquire(), buffers, timeout_s=timeout_s, body_max_bytes=body_max_bytes)
        try:
            return await call.done
        except asyncio.CancelledError:
            call.abort(UpstreamLost("cancelled"))
            raise

    def call(
        self,
        connection: HttpClientConnection,
        buffers: Sequence[Buffer],
        *,
        timeout_s: float,
        body_max_bytes: int = BODY_MAX_BYTES,
    ) -> HttpCall:
        """Send one request on an acquired connection; its answer arrives in the call."""
        call = HttpCall(connection, timeout_s, body_max_bytes)
        connection.start(buffers, call)
        return call

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
        """Cut every connection."""
        for connection in list(self._all):
            connection.abort()

    def statistics(self) -> dict[str, int]:
        """Counts now: ``open`` connections, of which ``idle``."""
        return {"open": len(self._all), "idle": len(self._idle)}


def request_head(method: str, target: str, authority: str, headers: Headers, *, length: int | None) -> bytes:
    """A request head from the request line to the empty line; ``length`` None leaves ``content-length`` out."""
    parts = [f"{method} {target} HTTP/1.1\r\nhost: {authority}\r\n".encode("latin-1")]
    parts.extend([name + b": " + value + b"\r\n" for name, value in headers])
    if length is not None:
        parts.append(b"content-length: %d\r\n" % length)
    parts.append(b"\r\n")
    return b"".join(parts)
