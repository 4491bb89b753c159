"""One keep-alive connection to an engine, with one exchange at a time on it.

An exchange delivers the response by callbacks, so that a streamed token costs one call and no task switch.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol, cast

import httptools

from antiphon.core.errors import UpstreamError, UpstreamGarbage, UpstreamLost
from antiphon.protocol.body import Buffer
from antiphon.transport.http.deadlines import Deadlines
from antiphon.transport.http.known_head import KnownHead, known_head

if TYPE_CHECKING:
    from antiphon.transport.http.client import HttpPool

_REST_TIMEOUT_S: Final = 1.0
"""How long the end of an answer's framing is waited for where the answer itself is known to be whole."""

_HEAD_MAX_BYTES: Final = 131_072

_CHUNK_DIGITS_MAX: Final = 4
_CHUNK_MIN_BYTES: Final = 6
"""Of ``1 CR LF x CR LF``."""

_OK: Final = b"HTTP/1.1 200 "

_CR: Final = 13
_LF: Final = 10


class ResponseSink(Protocol):
    """Receives one response. ``on_end`` or ``on_lost`` is called exactly once, and nothing after it."""

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        """The status line and header have arrived."""

    def on_body(self, data: bytes) -> None:
        """A piece of the body, not empty."""

    def on_read_end(self) -> None:
        """Every piece that has arrived so far was delivered: the time to pass them on together."""

    def on_chunk(self, raw: bytes, begin: int) -> None:
        """Instead of ``on_body`` and ``on_read_end``, where exactly one chunk has arrived: ``raw[begin:-2]`` is the
        piece, and ``raw`` the same in its framing."""

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
        self._fields_of_head = self._fields
        self._known: KnownHead | None = None
        """The head of the last answer, where it was one that may come again: 200, whole, with a length."""
        self._raw_head_bytes = 0
        self._has_head = False
        self._is_complete = False
        self._has_chunk_ended = False
        self._is_between_chunks = False
        """The parser has taken a whole chunk, and nothing after it."""
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
        self._is_between_chunks = False
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
        if self._is_between_chunks:
            begin = _begin_of_chunk(data)
            if begin:  # as most tokens of a stream come: the parser need not see it, and is not told
                self._sink.on_chunk(data, begin)
                return
        is_first = False
        if not self._has_head:
            is_first = not self._raw_head_bytes
            if is_first and self._take_known(data):
                return
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
            self._is_between_chunks = self._has_chunk_ended and data.endswith(b"\r\n")
            if self._is_complete:
                if is_first:
                    self._know(data)
                self._end()
            elif self._sink is not None:
                self._sink.on_read_end()
            if not self._has_head and self._raw_head_bytes > _HEAD_MAX_BYTES:
                self.lose(UpstreamGarbage("the header of the engine's answer is too large"))

    def _know(self, data: bytes) -> None:
        """The piece was a whole answer: the next one may have the same head."""
        is_plain = self._keeps_alive and data.startswith(_OK)
        self._known = known_head(data, self._fields_of_head) if is_plain else None

    def _take_known(self, data: bytes) -> bool:
        """Deliver an answer whose head is known, without the parser; whether it is one."""
        known, sink = self._known, self._sink
        begin = known.begin_of_body(data) if known is not None else 0
        if known is None or sink is None or not begin:
            return False
        self._has_head = self._keeps_alive = True
        self._has_chunk_ended = False
        sink.on_head(200, known.fields(data, begin))
        self.on_body(data[begin:])
        self._is_complete = True
        self._end()
        return True

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
        self._has_chunk_ended = False
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
        self._fields_of_head = fields
        self._fields = []  # what comes later are trailer fields, which nobody asked for
        sink.on_head(status, fields)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None and not self._is_complete:
            self._sink.on_body(data)

    def on_chunk_header(self) -> None:
        self._has_chunk_ended = False

    def on_chunk_complete(self) -> None:
        self._has_chunk_ended = True

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


def _begin_of_chunk(data: bytes) -> int:
    """Where the piece begins if ``data`` is one chunk, whole and not empty, without extensions; else 0."""
    size = len(data)
    if size < _CHUNK_MIN_BYTES or data[size - 1] != _LF or data[size - 2] != _CR:
        return 0
    length = 0
    for index in range(_CHUNK_DIGITS_MAX + 1):
        byte = data[index]
        if 48 <= byte <= 57:
            length = length * 16 + byte - 48
        elif 97 <= byte <= 102:
            length = length * 16 + byte - 87
        elif 65 <= byte <= 70:
            length = length * 16 + byte - 55
        elif byte == _CR and data[index + 1] == _LF and length and index + length + 4 == size:
            return index + 2
        else:
            return 0
    return 0


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

    def on_chunk(self, raw: bytes, begin: int) -> None:
        self._connection.abort()

    def on_end(self) -> None:
        pass

    def on_lost(self, error: UpstreamError) -> None:
        pass

    def on_timeout(self) -> None:
        self._connection.abort()
