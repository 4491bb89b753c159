"""How a handler answers one request of a client: a whole body, or a stream that ends truthfully.

Owns the framing of responses; the connection behind it owns the bytes and the order of requests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from antiphon.protocol.body import Buffer
from antiphon.transport.http.message import Headers, head_bytes

if TYPE_CHECKING:
    from antiphon.transport.http.server import HttpServerConnection


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

    def send(self, status: int, headers: Headers, body: Buffer) -> None:
        """Answer with a whole body; ``content-length`` and ``connection`` are added."""
        assert not self.started, "a response was already started"
        self.started = True
        connection = self._connection
        fields = [*headers, (b"content-length", b"%d" % len(body))]
        if not connection.keeps_alive:
            fields.append((b"connection", b"close"))
        if connection.is_head:
            connection.write(head_bytes(status, fields))
        elif len(body) < 65_536:
            connection.write(head_bytes(status, fields) + body)
        else:
            connection.write(head_bytes(status, fields))
            connection.write(body)
        self._finish()

    def start_stream(self, status: int, headers: Headers) -> None:
        """Begin a response whose length is not known; chunked, or until close for HTTP/1.0.

        The head leaves with the first piece.
        """
        assert not self.started, "a response was already started"
        self.started = True
        connection = self._connection
        fields = list(headers)
        if connection.version == "1.0":
            connection.keeps_alive = False
        else:
            self._chunked = True
            fields.append((b"transfer-encoding", b"chunked"))
        if not connection.keeps_alive:
            fields.append((b"connection", b"close"))
        self._head = head_bytes(status, fields)

    def write(self, data: bytes) -> None:
        """Send ``data`` (not empty) as one piece of a started stream."""
        assert data, "an empty piece would end the stream"
        if self._chunked:
            data = b"%b%x\r\n%b\r\n" % (self._head, len(data), data)
        elif self._head:
            data = self._head + data
        self._head = b""
        self._connection.write(data)

    def end(self, data: bytes = b"") -> None:
        """End a started stream truthfully, after a last piece if there is one."""
        assert self.started and not self.finished
        if self._chunked:
            last = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            self._connection.write(b"%b%b0\r\n\r\n" % (self._head, last))
        elif self._head or data:
            self._connection.write(self._head + data)
        self._head = b""
        self._finish()

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

    def _finish(self) -> None:
        self.finished = True
        self._connection.response_finished()
