"""One client connection of the HTTP/1.1 server: parses requests and writes what their handlers answer.

Owns the limits of a connection. It serves one request at a time, in order; further pipelined requests wait, up to a
limit. A client that leaves is reported to the handler at once; what that means is the handler's decision.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import re
import socket
import struct
from collections import deque
from typing import TYPE_CHECKING, Final, cast

import httptools

from antiphon.protocol.body import Buffer
from antiphon.protocol.openai import JSON, error_body
from antiphon.transport.http.known_head import KnownHead, known_head
from antiphon.transport.http.message import HttpRequest
from antiphon.transport.http.responder import Responder

if TYPE_CHECKING:
    from antiphon.transport.http.server import HttpServer

_WRITE_HIGH_WATER_BYTES: Final = 262_144
_CLOSE_FLUSH_TIMEOUT_S: Final = 10.0
_UNASKED_MAX_BYTES: Final = 65_536
"""Bodies up to this size are read without asking whether the client may send them."""
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
_SLASH: Final = 47
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)
"""A target that names its host, and the rest of it."""
_FRAMING_SHARE: Final = 8
"""Bytes sent for each byte of a body, at most, beside ``header_max_bytes``: a chunk of one byte takes six. More is
chunk extensions or trailer fields, which nobody asked for."""


class HttpServerConnection:
    """One client connection."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = server.loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._known: KnownHead | None = None
        """The head of the last request that was read, where it may come again, and what stands for such requests."""
        self._model: HttpRequest | None = None
        self._ready: HttpRequest | None = None
        """Complete, and served as soon as the parser returns: a handler may close the connection at once."""
        self._pending: deque[HttpRequest] = deque()
        self._request: HttpRequest | None = None
        self._target = b""
        self._fields: list[tuple[bytes, bytes]] = []
        self._header_count_max = self._limits.header_count_max
        self._unasked_max_bytes = min(_UNASKED_MAX_BYTES, self._limits.body_max_bytes)
        self._raw_head_bytes = 0
        self._feeding_bytes = 0
        self._body_bytes = 0
        self._body_fed_bytes = 0
        """What was fed for the body after the piece in which the header ended, framing and trailers included."""
        self._held_bytes = 0
        self._active_bytes = 0
        self._refused: tuple[int, str] | None = None
        self._owed: HttpRequest | None = None
        """Asked whether to send its body while another request was served: it is told when its turn comes."""
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
            self._turn_away()

    def _turn_away(self) -> None:
        """Say that there is no room for it. What it has sent is not read as a request."""
        self._is_broken = True
        self.keeps_alive = False
        message = f"too many open connections: the limit is {self._limits.connections_max}"
        body = error_body(message, status=503, code="too_many_connections")
        Responder(self).send(503, [(b"content-type", JSON), (b"retry-after", b"1")], body)
        if not self._server.turn_away(self):
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._release(self._held_bytes)
        self._server.forget(self)
        self._ready = self._known = self._model = None
        self._pending.clear()
        responder = self._responder
        if responder is not None and not responder.finished and responder.on_disconnect is not None:
            responder.on_disconnect()

    def eof_received(self) -> bool:
        # A client that shuts down its sending side is taken to have left, as vLLM's own server does.
        return False

    def data_received(self, data: bytes) -> None:
        known = self._known
        if known is None or not self._take_known(known, data):
            while data and not self._is_broken:
                data = self._parse(data)
        ready = self._ready
        if ready is not None:
            self._ready = None
            self._begin(ready)

    def _take_known(self, known: KnownHead, data: bytes) -> bool:
        """Take a request whose head is known, without the parser; whether it is one, and nothing is in its way."""
        model = self._model
        if self._reading != "idle" or self._is_broken or self.is_busy or self._pending or model is None:
            return False
        begin = known.begin_of_body(data)
        size = len(data) - begin
        held_bytes = self._server.held_bytes + size
        if not begin or size > self._unasked_max_bytes or held_bytes > self._limits.bodies_max_bytes:
            return False
        request = HttpRequest(model.method, b"", model.version, known.fields(data, begin), model)
        request.body = data[begin:]
        self._held_bytes += size
        self._server.held_bytes = held_bytes
        self._deadline = self._loop.time() + self._limits.keepalive_timeout_s
        self._ready = request
        self._active_bytes = size
        return True

    def _know(self, request: HttpRequest, data: bytes) -> None:
        """``data`` was this request and no more: the next one may have the same head."""
        known = known_head(data, request.headers) if request.keep_alive else None
        if known is not None and known.max_bytes <= self._limits.header_max_bytes:
            self._known = known
            self._model = HttpRequest(request.method, b"", request.version, request.headers, request)
            self._model.model = None

    def _parse(self, data: bytes) -> bytes:
        """Feed the parser; returns what must be parsed next."""
        was_idle = self._reading == "idle"
        self._known = None
        self._has_completed = False
        self._feeding_bytes = len(data)
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
            if not self._has_completed and self._reading != "idle":
                self._count_fed(len(data))
            elif was_idle and self._ready is not None and not self._pending:
                self._know(self._ready, data)
        return b""

    def _count_fed(self, size: int) -> None:
        """Bound what the parser holds back or drops: a field that has not ended, the framing of a body, trailers."""
        header_max_bytes = self._limits.header_max_bytes
        if self._reading == "head":
            self._raw_head_bytes += size
            if self._raw_head_bytes > header_max_bytes:
                self._refuse(431, "the request header is too large")
        else:
            self._body_fed_bytes += size
            if self._body_fed_bytes > _FRAMING_SHARE * self._body_bytes + header_max_bytes:
                self._refuse(413, "the request body's framing is too large")

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
        self._body_bytes = 0
        # Not earlier: empty lines between requests are no request that could be late.
        self._reading = "head"
        self._deadline = self._loop.time() + self._limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading == "body":
            return  # a trailer field: nobody asked for it, and it must not pass for a header field
        if len(self._fields) >= self._header_count_max:
            self._give_up(431, "the request has too many header fields")
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._raw_head_bytes + self._feeding_bytes > self._limits.header_max_bytes:  # else it cannot be too large
            size = len(self._target) + sum(len(name) + len(value) + 4 for name, value in self._fields)
            if size > self._limits.header_max_bytes:
                self._give_up(431, "the request header is too large")
        parser = self._parser
        method, version = parser.get_method().decode("latin-1"), parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._give_up(400, "HTTP/1.1 and HTTP/1.0 are served here")
        target = self._target
        if target[0] != _SLASH:
            target = self._origin_form(target)
        request = HttpRequest(method, target, version, self._fields)
        request.keep_alive = parser.should_keep_alive()
        self._request = request
        self._reading = "body"
        self._raw_head_bytes = 0
        self._body_fed_bytes = -self._feeding_bytes
        self._deadline = self._loop.time() + self._limits.body_read_timeout_s
        first = request.first
        if len(first) != len(self._fields) and sum(name == b"host" for name, _ in self._fields) > 1:
            self._give_up(400, "the request names more than one host")
        length = first.get(b"content-length")
        if length is None:
            coding = first.get(b"transfer-encoding")
            if coding is not None:
                self._check_coding(coding, version)
                self._check_sender(request)
        elif int(length) > self._unasked_max_bytes:
            if int(length) > self._limits.body_max_bytes:
                self._give_up(413, f"the request body is larger than {self._limits.body_max_bytes} bytes")
            self._check_sender(request)
        expect = first.get(b"expect")
        if expect is not None and expect.lower() == b"100-continue" and version == "1.1":
            if self.is_busy or self._pending:
                self._owed = request
                self._deadline = math.inf  # until then it is not late
            elif not parser.should_upgrade():  # else its head is parsed once more
                self.write(_CONTINUE)

    def _origin_form(self, target: bytes) -> bytes:
        """A target that names its host, as its path; that host counts, whatever the field says (RFC 9112, 3.2.2)."""
        if b"://" not in target:
            return target  # of CONNECT or OPTIONS
        found = _ABSOLUTE.fullmatch(target)
        if found is None:
            self._give_up(400, "the request target is no path and no http URL")
            return target
        host, rest = found.group(1), found.group(2) or b"/"
        names = [name for name, _ in self._fields]
        if b"host" in names:
            self._fields[names.index(b"host")] = (b"host", host)
        else:
            self._fields.append((b"host", host))
        return rest if rest[0] == _SLASH else b"/" + rest

    def _check_sender(self, request: HttpRequest) -> None:
        may_send = self._server.may_send
        if may_send is not None and not may_send(request):
            request.is_body_dropped = True

    def _check_coding(self, coding: bytes, version: str) -> None:
        """Only ``chunked`` is understood: another server on the way may see other ends in anything else."""
        if version == "1.0":
            self._give_up(400, "HTTP/1.0 has no transfer-encoding")
        if coding.strip().lower() != b"chunked":
            self._give_up(400, "the only transfer-encoding that is served here is chunked")

    def on_body(self, data: bytes) -> None:
        request = self._request
        assert request is not None
        size = len(data)
        self._body_bytes += size
        if self._body_bytes > self._limits.body_max_bytes:
            self._give_up(413, f"the request body is larger than {self._limits.body_max_bytes} bytes")
        if request.is_body_dropped:
            return
        self._hold(size)
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
        if self._responder is None and self._ready is None and not self._pending:
            self._ready = request
            self._active_bytes = len(request.body)
        elif len(self._pending) < self._limits.pipelined_max:
            self._pending.append(request)
        else:
            self._request = request  # to be let go of
            self._give_up(429, "too many requests were sent ahead on one connection")

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
        elif self._reading == "idle":
            self._deadline = self._loop.time() + self._limits.keepalive_timeout_s
        elif self._owed is not None:
            self._continue()

    def _continue(self) -> None:
        """Whoever asked whether to send its body may: no other request is before it."""
        owed, self._owed = self._owed, None
        if owed is self._request:
            self._deadline = self._loop.time() + self._limits.body_read_timeout_s
            self.write(_CONTINUE)

    def _next(self) -> None:
        if self._pending and not self.is_busy and not self.is_closed:
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
        elif not self.is_busy:
            self.close()

    @property
    def peer_is_loopback(self) -> bool:
        """Whether the other end is on this machine: a loopback address or a unix socket.

        One that left before it was accepted has no address, though what it sent is read: it may be anywhere.
        """
        transport = self._transport
        if transport is None:
            return False
        peer = transport.get_extra_info("peername")
        if not isinstance(peer, tuple):
            sock = transport.get_extra_info("socket")
            return sock is not None and sock.family == socket.AF_UNIX
        return ipaddress.ip_address(str(peer[0]).partition("%")[0].removeprefix("::ffff:")).is_loopback

    @property
    def is_busy(self) -> bool:
        """Whether a request is being served, or is about to be."""
        return self._responder is not None or self._ready is not None

    def _hold(self, size: int) -> None:
        """Count bytes of a body; too many, here or in the whole server, end the request."""
        held_bytes, all_bytes = self._held_bytes + size, self._server.held_bytes + size
        if held_bytes - self._active_bytes > self._limits.pipelined_max_bytes and self.is_busy:
            self._give_up(413, "too much was sent ahead on one connection")
        if all_bytes > self._limits.bodies_max_bytes:
            self._give_up(503, "too many request bodies are being received")
        self._held_bytes = held_bytes
        self._server.held_bytes = all_bytes

    def _release(self, size: int) -> None:
        released = min(size, self._held_bytes)
        self._held_bytes -= released
        self._server.held_bytes -= released

    def _give_up(self, status: int, message: str) -> None:
        """Stop the parser from inside one of its callbacks; :meth:`data_received` then refuses."""
        self._refused = (status, message)
        raise ValueError(message)

    def _refuse(self, status: int, message: str) -> None:
        """Answer an unreadable request and close; behind requests in progress, close when these are answered."""
        self._reading = "idle"
        self._is_broken = True
        refused = self._server.num_refused
        refused[status] = refused.get(status, 0) + 1
        request, self._request = self._request, None
        if request is not None:  # what has arrived of its body is of no use
            self._release(len(request.body))
        if not self.is_busy and not self._pending and not self.is_closed:
            self.keeps_alive = self.is_head = False  # not what the request before this one asked for
            Responder(self).send(status, [(b"content-type", JSON)], error_body(message, status=status))
