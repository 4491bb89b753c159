"""The server side of HTTP/1.1: parses requests, hands each to one handler, writes what the handler answers.

Owns the client connections and their limits. A connection serves one request at a time, in order; further pipelined
requests wait, up to a limit. A client that leaves is reported to the handler at once; what that means is the handler's
decision. Knows nothing of routing, JSON or engines.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

import httptools

from antiphon.protocol.body import Buffer
from antiphon.protocol.openai import JSON, error_body
from antiphon.transport.http.message import HttpLimits, HttpRequest, head_bytes
from antiphon.transport.http.responder import Responder

log = logging.getLogger("antiphon.http")

__all__ = ["Handler", "HttpServer", "HttpServerConnection", "Responder"]

Handler = Callable[[HttpRequest, Responder], Awaitable[None]]

_SWEEP_INTERVAL_S = 1.0
_WRITE_HIGH_WATER_BYTES = 262_144
_CLOSE_FLUSH_TIMEOUT_S = 10.0


class HttpServerConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = server.loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._pending: deque[HttpRequest] = deque()
        self._request: HttpRequest | None = None
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._header_bytes = 0
        self._raw_head_bytes = 0
        self._body_bytes = 0
        self._held_bytes = 0
        self._active_bytes = 0
        self._refused: tuple[int, str] | None = None
        self._responder: Responder | None = None
        self._deadline = self._loop.time() + self._limits.head_timeout_s
        self._reading = "idle"
        self._stalled_since: float | None = None
        self._closing_since: float | None = None
        self._is_broken = False
        self._has_completed = False
        self.version = "1.1"
        self.is_head = False
        """The request in progress is a HEAD: its answer has no body."""
        self.keeps_alive = True
        self.is_closed = False
        self.is_write_paused = False

    # -- asyncio.Protocol -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have the methods of asyncio.Transport and are not instances of it.
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER_BYTES)
        if not self._server.admit(self):
            body = error_body("too many open connections", status=503)
            fields = [(b"content-type", JSON), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
            self._transport.write(head_bytes(503, fields) + body)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._release(self._held_bytes)
        self._server.forget(self)
        self._pending.clear()
        responder = self._responder
        if responder is not None and not responder.finished and responder.on_disconnect is not None:
            responder.on_disconnect()

    def eof_received(self) -> bool:
        # A client that shuts down its sending side is taken to have left, as vLLM's own server does.
        return False

    def data_received(self, data: bytes) -> None:
        while data and not self._is_broken:
            data = self._parse(data)

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser; returns what must be parsed next."""
        self._has_completed = False
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as error:
            return self._without_upgrade(data[error.args[0] :])
        except httptools.HttpParserCallbackError as error:
            if self._refused is None:
                raise error.__context__ or error from error
            self._refuse(*self._refused)
        except httptools.HttpParserError:
            self._refuse(400, "the request is not valid HTTP/1.1")
        else:
            # The parser holds back a field that has not ended, so that what was fed is counted too.
            if self._reading == "head" and not self._has_completed:
                self._raw_head_bytes += len(data)
                if self._raw_head_bytes > self._limits.header_max_bytes:
                    self._refuse(431, "the request header is too large")
        return b""

    def _without_upgrade(self, rest: bytes) -> bytes:
        """Serve a request that offers another protocol as if it had not offered it, as RFC 9110 (7.8) allows."""
        request, self._request = self._request, None
        assert request is not None
        if request.method == "CONNECT":
            self._refuse(405, "CONNECT is not served here")
            return b""
        self._parser = httptools.HttpRequestParser(self)
        self._reading = "idle"
        dropped = (b"connection", b"upgrade", b"http2-settings")
        fields = [b"%b: %b\r\n" % field for field in request.headers if field[0] not in dropped]
        head = [request.method.encode("latin-1"), b" ", self._target, b" HTTP/1.1\r\n", *fields, b"\r\n"]
        return b"".join(head) + rest

    def pause_writing(self) -> None:
        self.is_write_paused = True
        self._stalled_since = self._loop.time()
        if self._responder is not None and self._responder.on_stall is not None:
            self._responder.on_stall()

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self._stalled_since = None
        if self._responder is not None and self._responder.on_resume is not None:
            self._responder.on_resume()

    # -- httptools callbacks ----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._target = b""
        self._fields = []
        self._header_bytes = 0
        self._body_bytes = 0
        # Not earlier: empty lines between requests are no request that could be late.
        self._reading = "head"
        self._deadline = self._loop.time() + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._count_header(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == "body":
            return  # a trailer field: nobody asked for it, and it must not pass for a header field
        self._count_header(len(name) + len(value) + 4)
        if len(self._fields) >= self._limits.header_count_max:
            self._give_up(431, "the request has too many header fields")
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        parser = self._parser
        request = HttpRequest(parser.get_method().decode("latin-1"), self._target, parser.get_http_version())
        request.headers = self._fields
        request.keep_alive = parser.should_keep_alive()
        self._request = request
        self._reading = "body"
        self._raw_head_bytes = 0
        self._deadline = self._loop.time() + self._limits.body_read_timeout_s
        length = request.header(b"content-length")
        if length is not None and int(length) > self._limits.body_max_bytes:
            self._give_up(413, f"the request body is larger than {self._limits.body_max_bytes} bytes")
        expect = request.header(b"expect")
        if expect is not None and expect.lower() == b"100-continue" and self._responder is None:
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        request = self._request
        assert request is not None
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_max_bytes:
            self._give_up(413, f"the request body is larger than {self._limits.body_max_bytes} bytes")
        self._hold(len(data))
        if not request.body:
            request.body = data
        elif isinstance(request.body, bytearray):
            request.body += data
        else:
            request.body = bytearray(request.body) + data

    def on_message_complete(self) -> None:
        if self._parser.should_upgrade():
            return
        request, self._request = self._request, None
        assert request is not None
        self._has_completed = True
        self._reading = "idle"
        self._deadline = self._loop.time() + self._limits.keepalive_timeout_s
        if self._responder is None and not self._pending:
            self._begin(request)
        elif len(self._pending) >= self._limits.pipelined_max:
            self.close()
        else:
            self._pending.append(request)

    # -- requests ---------------------------------------------------------------------------------------------------

    def _begin(self, request: HttpRequest) -> None:
        self.version = request.version
        self.is_head = request.method == "HEAD"
        self.keeps_alive = request.keep_alive and not self._server.is_draining
        self._active_bytes = len(request.body)
        responder = Responder(self)
        self._responder = responder
        self._server.start(request, responder)

    def response_finished(self) -> None:
        """Called by the responder: serve the next pipelined request, or wait for one, or close."""
        self._responder = None
        self._release(self._active_bytes)
        self._active_bytes = 0
        if self.is_closed:
            return
        if self._pending and self.keeps_alive and not self._server.is_draining:
            self._loop.call_soon(self._next)
        elif self._is_broken:
            self._linger()
        elif not self.keeps_alive or self._server.is_draining:
            self.close()
        else:
            self._deadline = self._loop.time() + self._limits.keepalive_timeout_s

    def _next(self) -> None:
        if self._pending and self._responder is None and not self.is_closed:
            self._begin(self._pending.popleft())

    def write(self, data: Buffer) -> None:
        """Write to the client; dropped when it has left."""
        if not self.is_closed and self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        """Close after what was written is flushed; what a client does not take within a few seconds is dropped."""
        if self._transport is not None:
            self._closing_since = self._closing_since or self._loop.time()
            self._transport.close()

    def abort(self) -> None:
        """Close at once; what is not flushed is dropped."""
        if self._transport is not None:
            self._transport.abort()

    def _linger(self) -> None:
        """Say that nothing follows, and drop what the client still sends until it closes, for a few seconds.

        Closing at once would reset the connection, and the client might never read why it was refused.
        """
        if self._transport is not None and self._closing_since is None:
            self._closing_since = self._loop.time()
            if not self._transport.is_closing():
                self._transport.write_eof()

    def reset(self) -> None:
        """Close with a TCP reset."""
        if self._transport is not None:
            sock = self._transport.get_extra_info("socket")
            if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._transport.abort()

    def sweep(self, now: float) -> None:
        """Enforce the deadlines of this connection; called about once a second."""
        assert self._transport is not None
        if self._closing_since is not None:
            if now - self._closing_since > _CLOSE_FLUSH_TIMEOUT_S:
                self._transport.abort()
        elif self._stalled_since is not None and now - self._stalled_since > self._limits.write_stall_timeout_s:
            self._transport.abort()
        elif now < self._deadline:
            return
        elif self._reading in ("head", "body"):
            self._refuse(408, "the request did not arrive in time")
        elif self._responder is None:
            self.close()

    @property
    def peer_is_loopback(self) -> bool:
        """Whether the other end is on this machine: a loopback address or a unix socket."""
        peer = None if self._transport is None else self._transport.get_extra_info("peername")
        if not isinstance(peer, tuple):
            return True
        return ipaddress.ip_address(str(peer[0]).partition("%")[0].removeprefix("::ffff:")).is_loopback

    @property
    def is_busy(self) -> bool:
        """Whether a request is being served."""
        return self._responder is not None

    def _hold(self, size: int) -> None:
        """Count bytes of a body; too many, here or in the whole server, end the request."""
        self._held_bytes += size
        self._server.held_bytes += size
        if self._responder is not None and self._held_bytes - self._active_bytes > self._limits.pipelined_max_bytes:
            self._give_up(413, "too much was sent ahead on one connection")
        if self._server.held_bytes > self._limits.bodies_max_bytes:
            self._give_up(503, "too many request bodies are being received")

    def _release(self, size: int) -> None:
        released = min(size, self._held_bytes)
        self._held_bytes -= released
        self._server.held_bytes -= released

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > self._limits.header_max_bytes:
            self._give_up(431, "the request header is too large")

    def _give_up(self, status: int, message: str) -> None:
        """Stop the parser from inside one of its callbacks; :meth:`data_received` then refuses."""
        self._refused = (status, message)
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answer an unreadable request and close; behind requests in progress, close when these are answered."""
        self._reading = "idle"
        self._is_broken = True
        if self._request is not None:  # what has arrived of its body is of no use
            self._request = None
            self._release(self._body_bytes)
        if self._responder is None and not self._pending and not self.is_closed:
            self.keeps_alive = False
            Responder(self).send(status, [(b"content-type", JSON)], error_body(message, status=status))


class HttpServer:
    """A listening server.

    Args:
        handler: called once for each request; it owns the response.
        limits: what one client may cost.
    """

    def __init__(self, handler: Handler, limits: HttpLimits | None = None) -> None:
        self.limits = limits or HttpLimits()
        self.loop = asyncio.get_running_loop()
        self.is_draining = False
        self.held_bytes = 0
        """Bytes of request bodies that are held now."""
        self._handler = handler
        self._connections: set[HttpServerConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._unconnected = asyncio.Event()
        self._unconnected.set()
        self._hurry = asyncio.Event()

    async def listen(self, host: str, port: int, *, sock: socket.socket | None = None) -> int:
        """Listen on ``host:port`` (0: any free port), or on ``sock``; returns the port.

        Raises:
            OSError: the address cannot be bound.
        """
        make = lambda: HttpServerConnection(self)  # noqa: E731
        if sock is not None:
            self._server = await self.loop.create_server(make, sock=sock, backlog=1024)
        else:
            self._server = await self.loop.create_server(make, host, port, backlog=1024)
        self._sweep()
        return int(self._server.sockets[0].getsockname()[1])

    async def drain(self, timeout_s: float) -> int:
        """Stop accepting and let requests in progress finish for at most ``timeout_s``; returns how many were cut.

        A handler that is cut is cancelled, and may still say so to its client. What was written is flushed, within the
        same time but for at least a second.
        """
        deadline = self.loop.time() + timeout_s
        self.is_draining = True
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            if not connection.is_busy:
                connection.close()
        await self._wait(self._idle, timeout_s)
        cut = await self._cut()
        for connection in list(self._connections):
            connection.close()
        await self._wait(self._unconnected, max(1.0, deadline - self.loop.time()))
        if self._connections:
            log.warning("%d clients had not taken their answers when the time was up", len(self._connections))
        for connection in list(self._connections):
            connection.abort()  # the sweep that would end it stops with the server
        self.close()
        return cut

    def hurry(self) -> None:
        """End the waits of :meth:`drain` at once."""
        self._hurry.set()

    async def _wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Wait for ``event``, at most ``timeout_s``, and no longer than until :meth:`hurry`."""
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self._hurry.wait())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def _cut(self) -> int:
        """Cancel the handlers that still run, and wait until they have said so; returns how many there were."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        return len(tasks)

    def close(self) -> None:
        """Stop at once: cut every connection and cancel every handler."""
        self.is_draining = True
        if self._server is not None:
            self._server.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
        for task in self._tasks:
            task.cancel()
        for connection in list(self._connections):
            connection.close()

    def statistics(self) -> dict[str, int]:
        """Counts now: open ``connections``, requests in progress (``busy``)."""
        return {"connections": len(self._connections), "busy": len(self._tasks)}

    def admit(self, connection: HttpServerConnection) -> bool:
        """Whether there is room for one more connection; it is then counted."""
        if len(self._connections) >= self.limits.connections_max:
            return False
        self._connections.add(connection)
        self._unconnected.clear()
        return True

    def forget(self, connection: HttpServerConnection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        if not self._connections:
            self._unconnected.set()

    def start(self, request: HttpRequest, responder: Responder) -> None:
        """Run the handler for one request."""
        task: asyncio.Task[None] = self.loop.create_task(self._run(request, responder))
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._finished)

    async def _run(self, request: HttpRequest, responder: Responder) -> None:
        try:
            await self._handler(request, responder)
        except Exception:  # supervised: one request's bug must not end the server; it is logged and answered
            log.exception("the handler of %s %s failed", request.method, request.path)
            if not responder.started:
                body = error_body("internal error", status=500)
                responder.send(500, [(b"content-type", JSON)], body)
            elif not responder.finished:
                responder.abort()

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()

    def _sweep(self) -> None:
        now = self.loop.time()
        for connection in list(self._connections):
            connection.sweep(now)
        self._sweeper = self.loop.call_later(_SWEEP_INTERVAL_S, self._sweep)
