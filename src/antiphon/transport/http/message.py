"""What the HTTP edge passes around: a request as it was received, a response head, and the limits of the edge."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Headers = Sequence[tuple[bytes, bytes]]
"""Header fields in the order received; names lower-case, values without surrounding white space."""

REASONS = {
    100: b"Continue",
    200: b"OK",
    201: b"Created",
    204: b"No Content",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Method Not Allowed",
    408: b"Request Timeout",
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

HOP_BY_HOP = frozenset(
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
    pipelined_max_bytes: int = 1_048_576
    """Bodies that one connection may send ahead while its request is served."""
    bodies_max_bytes: int = 1_073_741_824
    """Bodies held for all connections together: past it a request is refused with 503."""


class HttpRequest:
    """One request as it was received."""

    __slots__ = ("body", "headers", "keep_alive", "method", "path", "query", "target", "version")

    def __init__(self, method: str, target: bytes, version: str) -> None:
        path, _, query = target.partition(b"?")
        self.method = method
        self.target = target.decode("latin-1")
        self.path = path.decode("latin-1")
        self.query = query.decode("latin-1")
        self.version = version
        self.headers: list[tuple[bytes, bytes]] = []
        self.body: bytes | bytearray = b""
        self.keep_alive = True

    def header(self, name: bytes) -> bytes | None:
        """The first value of the field ``name`` (lower-case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


@dataclass(slots=True)
class HttpResponse:
    """A whole response."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        """The first value of the field ``name`` (lower-case), or None."""
        for key, value in self.headers:
            if key == name:
                return value
        return None


def head_bytes(status: int, headers: Headers) -> bytes:
    """A response head, from the status line to the empty line."""
    parts = [b"HTTP/1.1 %d %s\r\n" % (status, REASONS.get(status, b"Unknown"))]
    parts.extend([name + b": " + value + b"\r\n" for name, value in headers])
    parts.append(b"\r\n")
    return b"".join(parts)
