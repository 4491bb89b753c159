"""What the HTTP edge passes around: a request as it was received, a response head, and the limits of the edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

Headers = Sequence[tuple[bytes, bytes]]
"""Header fields in the order received; names lower-case, values without surrounding white space."""

Fields = Headers | bytes
"""Header fields, or the lines that they are written as, each with its line end."""

REASONS: Final = {
    100: b"Continue",
    200: b"OK",
    201: b"Created",
    202: b"Accepted",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    413: b"Content Too Large",
    415: b"Unsupported Media Type",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
}

HOP_BY_HOP: Final = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""Fields that concern one connection and are never passed on (RFC 9110, section 7.6.1)."""


@dataclass(frozen=True)
class HttpLimits:
    """What one client connection may cost."""

    header_max_bytes: int = 65_536
    header_count_max: int = 128
    body_max_bytes: int = 134_217_728
    head_timeout_s: float = 15.0
    """From the first byte of a request to the end of its header."""
    body_read_timeout_s: float = 60.0
    """Between the end of the header and the end of the body."""
    keepalive_timeout_s: float = 75.0
    write_stall_timeout_s: float = 120.0
    """How long a client may leave its full receive window unread."""
    connections_max: int = 4096
    pipelined_max: int = 16
    """Requests that one connection may send ahead; those are answered, and it is closed."""
    pipelined_max_bytes: int = 1_048_576
    """Bodies that one connection may send ahead while its request is served."""
    bodies_max_bytes: int = 1_073_741_824
    """Bodies held for all connections together: past it a request is refused with 503."""


class HttpRequest:
    """One request as it was received."""

    body: bytes | bytearray = b""
    keep_alive = True
    is_body_dropped = False
    """Its body is not kept: see :attr:`HttpServer.may_send`."""

    model: HttpRequest | None = None
    """Stands for all requests of a connection whose heads differ in the length of the body alone; this is one."""
    passed_on: bytes | None = None
    """Of a model: kept by whoever passes on what is the same in all of them."""

    def __init__(
        self,
        method: str,
        target: bytes,
        version: str,
        headers: list[tuple[bytes, bytes]] | None = None,
        model: HttpRequest | None = None,
    ) -> None:
        self.method = method
        if model is not None and headers is not None:
            self._be_like(model, version, headers)
            return
        self.target = target.decode("latin-1")
        self.path, _, self.query = self.target.partition("?")
        self.version = version
        self.headers = headers or []
        self.first = dict(reversed(self.headers))
        """The first value of each field."""

    def _be_like(self, model: HttpRequest, version: str, headers: list[tuple[bytes, bytes]]) -> None:
        self.target, self.path, self.query = model.target, model.path, model.query
        self.version = version
        self.headers = headers
        self.first = model.first if headers is model.headers else dict(reversed(headers))
        self.keep_alive = model.keep_alive
        self.model = model

    def header(self, name: bytes) -> bytes | None:
        """The first value of the field ``name`` (lower-case), or None."""
        return self.first.get(name)


class HttpResponse:
    """A whole response."""

    __slots__ = ("body", "headers", "status")

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    def header(self, name: bytes) -> bytes | None:
        """The first value of the field ``name`` (lower-case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


def field_lines(fields: Fields) -> bytes:
    """Header fields as they are written, each with its line end."""
    if isinstance(fields, bytes):
        return fields
    pieces: list[bytes] = []
    for name, value in fields:
        pieces.extend([name, b": ", value, b"\r\n"])
    return b"".join(pieces)


_STATUS_LINES: Final = {status: b"HTTP/1.1 %d %b\r\n" % (status, reason) for status, reason in REASONS.items()}


def status_line(status: int) -> bytes:
    """The first line of a response, with its line end."""
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def head_bytes(status: int, fields: Fields) -> bytes:
    """A response head, from the status line to the empty line."""
    return b"%b%b\r\n" % (status_line(status), field_lines(fields))
