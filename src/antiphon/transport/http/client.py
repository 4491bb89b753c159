"""The client side of HTTP/1.1: keep-alive connections to one engine, one exchange at a time on each.

Owns upstream connections. An exchange delivers the response by callbacks, so that a streamed token costs one call and
no task switch; :class:`HttpCall` and :meth:`HttpPool.fetch` wrap that for whole responses. Retries nothing: what may be
sent twice is the caller's knowledge.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, Protocol, cast

import httptools

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
from antiphon.transport.http.deadlines import Deadlines
from antiphon.transport.http.message import Fields, HttpResponse, field_lines
from antiphon.transport.http.strand import Promise

_IDLE_REUSE_MAX_S: Final = 2.0
"""A connection idle for longer is not reused: an engine's server closes idle ones after 5 s (uvicorn's default), and a
request written into a closing connection is lost without anybody knowing whether it ran."""

_REST_TIMEOUT_S: Final = 1.0
"""How long the end of an answer's framing is waited for where the answer itself is known to be whole."""

_HEAD_MAX_BYTES: Final = 131_072

_OWN_LIMITS: Final = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""What a failed connect says of this machine rather than of the engine."""

_LET_GO: Final = "the router has let go of this engine"

BODY_MAX_BYTES: Final = 16_777_216
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

    def on_timeout(self) -> None:
        """The time given to the exchange has passed; it goes on, unless whoever hears this aborts it."""


class HttpClientConnection:
    """One connection to an engine."""

    def __init__(self, pool: HttpPool) -> None:
        self.loop = pool.loop
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: ResponseSink | None = None
        self._deadlines: Deadlines | None = None
        self._fields: list[tuple[bytes, bytes]] = []
        self._raw_head_bytes = 0
        self._has_head = False
        self._is_complete = False
        self._ends_at_close = False
        self._keeps_alive = False
        self._may_be_unsent = False
        """The request was large: an engine may answer before it has read it."""
        self._is_paused = False
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport and are not instances of it.
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self, buffers: Sequence[Buffer], sink: ResponseSink, timeout_s: float | None = None) -> None:
        """Write a request (head and body) and deliver its response to ``sink``, which is told once if that takes longer
        than ``timeout_s``."""
        assert self._sink is None and self._transport is not None
        self._sink = sink
        self._has_head = False
        self._is_complete = False
        self._raw_head_bytes = 0
        if timeout_s is not None:
            self._deadlines = deadlines = self._pool.deadlines(timeout_s)
            deadlines.add(self)
        self._may_be_unsent = len(buffers) > 1
        if len(buffers) == 1:
            self._transport.write(buffers[0])
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
                self.lose(UpstreamGarbage("the engine's answer is not valid HTTP"))
        else:
            if self._is_complete:
                self._end()
            elif self._sink is not None:
                self._sink.on_read_end()
            if not self._has_head and self._raw_head_bytes > _HEAD_MAX_BYTES:
                self.lose(UpstreamGarbage("the header of the engine's answer is too large"))

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """Of no concern: a request is written whole, and is in memory anyway."""

    def resume_writing(self) -> None:
        """See :meth:`pause_writing`."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        self._transport = None
        if self._sink is not None:
            if self._ends_at_close and exc is None:
                self._end()
            else:
                self.lose(UpstreamLost("the engine closed the connection before its answer was complete"))

    def expire(self) -> None:
        """The time given to the exchange has passed."""
        self._deadlines = None
        if self._sink is not None:
            self._sink.on_timeout()

    def on_message_begin(self) -> None:
        self._fields = []
        if self._is_complete:
            # A second answer to one request: the connection is out of step, and whatever it says next is not trusted.
            self._keeps_alive = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser, sink, fields = self._parser, self._sink, self._fields
        if sink is None or self._is_complete:
            return
        status = parser.get_status_code()
        if 100 <= status < 200:
            return  # an interim answer, such as 103: the real one follows
        self._has_head = True
        self._keeps_alive = keeps_alive = parser.should_keep_alive()
        if not keeps_alive:
            self._ends_at_close = not any(name in (b"content-length", b"transfer-encoding") for name, _ in fields)
        self._fields = []  # what comes later are trailer fields, which nobody asked for
        sink.on_head(status, fields)

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

    def finish_alone(self) -> None:
        """Whoever made the exchange has its answer whole: what may be missing is the end of its framing. Read that, for
        a moment, so that the connection can be used again."""
        if self._sink is None:
            return
        self._forget_exchange()
        if self._is_paused:
            self.resume()
        self._sink = _Rest(self)
        self._deadlines = deadlines = self._pool.deadlines(_REST_TIMEOUT_S)
        deadlines.add(self)

    def give_back(self) -> None:
        """It was acquired, and nothing was sent."""
        self._pool.give_back(self)

    def abort(self) -> None:
        """Cut the connection, without a word to the sink: whoever aborts knows."""
        self._forget_exchange()
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()

    def _forget_exchange(self) -> ResponseSink | None:
        """The exchange is over; returns who must be told, if anybody."""
        if self._deadlines is not None:
            self._deadlines.remove(self)
            self._deadlines = None
        sink, self._sink = self._sink, None
        return sink

    @property
    def is_open(self) -> bool:
        """Whether a request can be written."""
        return self._transport is not None and not self._transport.is_closing()

    def _end(self) -> None:
        sink = self._forget_exchange()
        if sink is None:
            return  # it aborted in the middle of the last piece
        if self._may_be_unsent and self._transport is not None and self._transport.get_write_buffer_size():
            self._keeps_alive = False  # the next request would stand behind the rest of this one
        if self._keeps_alive:  # false where the close is the answer's end
            if self._is_paused:
                self.resume()  # the next exchange on it must be heard
            self._pool.give_back(self)
        else:
            self._pool.forget(self)
            if self._transport is not None:
                self._transport.close()
        sink.on_end()

    def lose(self, error: UpstreamError) -> None:
        """Cut the connection; whoever waits for an answer is told so."""
        sink = self._forget_exchange()
        self._pool.forget(self)
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.on_lost(error)


class _Rest:
    """Takes what comes after an answer."""

    def __init__(self, connection: HttpClientConnection) -> None:
        self._connection = connection

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        pass

    def on_body(self, data: bytes) -> None:
        self._connection.abort()  # more of an answer that was whole

    def on_read_end(self) -> None:
        pass

    def on_end(self) -> None:
        pass

    def on_lost(self, error: UpstreamError) -> None:
        pass

    def on_timeout(self) -> None:
        self._connection.abort()


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
