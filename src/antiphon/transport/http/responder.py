"""How a handler answers one request of a client: a whole body, or a stream that ends truthfully.

Owns the framing of responses; the connection behind it owns the bytes and the order of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from antiphon.protocol.body import Buffer
from antiphon.transport.http.message import Fields, field_lines, head_bytes, status_line

if TYPE_CHECKING:
    from antiphon.transport.http.server import HttpServerConnection


_JOIN_MAX_BYTES: Final = 65_536
"""A response up to this size is written as one piece, which costs less than several."""


class Responder:
    """How a handler answers one request.

    Exactly one of :meth:`send` or the sequence :meth:`start_stream`, :meth:`write` …, :meth:`end` is used. After the
    client has left, writes are accepted and dropped.
    """

    __slots__ = ("_chunked", "_connection", "_head", "finished", "on_disconnect", "on_resume", "on_stall", "started")

    def __init__(self, connection: HttpServerConnection) -> None:
        self._connection = connection
        self._chunked = False
        self._head = b""
        self.started = False
        self.finished = False
        self.on_disconnect: Callable[[], None] | None = None
        """Called once when the client leaves before the response is finished."""
        self.on_stall: Callable[[], None] | None = None
        """Called when the client reads too slowly: stop producing until ``on_resume``."""
        self.on_resume: Callable[[], None] | None = None

    @property
    def is_disconnected(self) -> bool:
        """Whether the client has left."""
        return self._connection.is_closed

    @property
    def is_stalled(self) -> bool:
        """Whether the client's receive window is full."""
        return self._connection.is_write_paused

    @property
    def peer_is_loopback(self) -> bool:
        """Whether the other end of the connection is on this machine."""
        return self._connection.peer_is_loopback

    def send(self, status: int, fields: Fields, body: Buffer) -> None:
        """Answer with a whole body; ``content-length`` and ``connection`` are added."""
        assert not self.started, "a response was already started"
        self.started = True
        connection = self._connection
        if not connection.keeps_alive:
            after = b"connection: close\r\n"
        elif connection.version == "1.0":
            after = b"connection: keep-alive\r\n"  # it asked for that, and else takes the close for the end
        else:
            after = b""
        head = b"%b%bcontent-length: %d\r\n%b\r\n" % (status_line(status), field_lines(fields), len(body), after)
        if connection.is_head:
            connection.write(head)
        elif len(body) < _JOIN_MAX_BYTES:
            connection.write(head + body)
        else:
            connection.write(head)
            connection.write(body)
        self.finished = True
        connection.response_finished()

    def start_stream(self, status: int, fields: Fields) -> None:
        """Begin a response whose length is not known; chunked, or until close for HTTP/1.0.

        The head leaves with the first piece.
        """
        assert not self.started, "a response was already started"
        self.started = True
        connection = self._connection
        lines = field_lines(fields)
        if connection.version == "1.0":
            connection.keeps_alive = False
        else:
            self._chunked = True
            lines += b"transfer-encoding: chunked\r\n"
        if not connection.keeps_alive:
            lines += b"connection: close\r\n"
        self._head = head_bytes(status, lines)

    def write(self, data: bytes) -> None:
        """Send ``data`` (not empty) as one piece of a started stream."""
        assert data, "an empty piece would end the stream"
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        self._connection.write(data)

    @property
    def takes_chunks(self) -> bool:
        """Whether :meth:`write_chunk` may be used: pieces of the stream are chunks, and one was written."""
        return self._chunked and not self._head and not self.finished

    def write_chunk(self, raw: bytes) -> None:
        """Send one piece that is in its framing already."""
        self._connection.write(raw)

    def end(self, data: bytes = b"") -> None:
        """End a started stream truthfully, after a last piece if there is one."""
        assert self.started and not self.finished
        if self._chunked:
            last = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            self._connection.write(b"%b%b0\r\n\r\n" % (self._head, last))
        elif self._head or data:
            self._connection.write(self._head + data)
        self._head = b""
        self.finished = True
        self._connection.response_finished()

    def abort(self) -> None:
        """Cut the connection: the client sees that the response is incomplete.

        A body that only the close would end is cut with a reset, since a close would look like its end.
        """
        self.finished = True
        if self.started and not self._chunked:
            self._connection.reset()
        else:
            self._connection.close()

    def reset(self) -> None:
        """Cut the connection with a TCP reset, and drop what the client has not received: for fault tests."""
        self.finished = True
        self._connection.reset()
