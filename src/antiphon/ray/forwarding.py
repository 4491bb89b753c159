"""What stands behind Serve's HTTP address: it forwards bytes to the router and back, and nothing else.

A plain ASGI application. Invariants: method, path, query, header and body reach the router as Serve has them; status,
header and body come back as the router has them, each piece as it comes; a client that leaves is a connection to the
router that is cut; an answer of the router that is cut never looks complete.

It reads no body, and holds no state but its connections. Hop-by-hop fields are each connection's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import quote

from antiphon.config.hosts import host_and_port, is_loopback
from antiphon.core.errors import ConnectFailed, OwnLimit, UpstreamError
from antiphon.protocol.openai import JSON, error_body
from antiphon.transport.http.client import HttpPool, request_head
from antiphon.transport.http.client_connection import HttpClientConnection

log = logging.getLogger("ray.serve")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade")
)
OWN_FIELDS = HOP_BY_HOP | {b"host", b"content-length"}
CONNECTIONS_MAX = 16_384
CONNECT_TIMEOUT_S = 2.0
ROUTER_WAIT_S = 10.0
"""How long a request waits for a router that starts again; then it is refused, and may be sent again."""
RETRY_S = 0.1
PENDING_MAX_BYTES = 1 << 20
"""Of an answer, ahead of a client that reads slowly."""


class Forwarder:
    """The ASGI application.

    Args:
        find: the URL of the router.
        body_max_bytes: of a request; what the router takes.
        is_published: whether clients of other machines reach the router itself. Then the router is told of each client
            that it asks for somebody else, and answers no admin route without a key.
    """

    def __init__(self, find: Callable[[], Awaitable[str]], body_max_bytes: int, *, is_published: bool) -> None:
        self._find = find
        self._body_max_bytes = body_max_bytes
        self._is_published = is_published
        self._pool: HttpPool | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "lifespan":
            await _lifespan(receive, send)
        elif kind == "http":
            await self._forward(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1003})

    def close(self) -> None:
        """Cut every connection."""
        if self._pool is not None:
            self._pool.close()

    async def _forward(self, scope: Message, receive: Receive, send: Send) -> None:
        body = await _body(receive, self._body_max_bytes)
        if body is None:
            return  # the client has left
        if len(body) > self._body_max_bytes:
            await _refuse(send, 413, f"the body is larger than {self._body_max_bytes} bytes", "request_too_large")
            return
        try:
            connection, authority = await self._connect()
        except (UpstreamError, OSError) as error:
            log.warning("antiphon: the router cannot be reached: %s", error)
            await _refuse(send, 503, "the router is not available; try again", "router_unavailable")
            return
        head = self._head(scope, authority, body)
        answer = _Answer(connection)
        connection.start([head + body] if len(body) < PENDING_MAX_BYTES else [head, body], answer)
        leaving = asyncio.create_task(_left(receive))
        leaving.add_done_callback(lambda _: answer.client_left())
        try:
            await answer.pass_on(send)
        finally:
            leaving.cancel()
            answer.close()

    def _head(self, scope: Message, authority: str, body: bytes) -> bytes:
        fields = [(name, value) for name, value in scope["headers"] if name not in OWN_FIELDS]
        host = next((value for name, value in scope["headers"] if name == b"host"), authority.encode())
        client = (scope.get("client") or ("",))[0] or "unknown"
        if self._is_published or not is_loopback(client):
            fields.append((b"x-forwarded-for", client.encode("latin-1", "replace")))
        has_body = body or any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        target = _target(scope)
        return request_head(
            scope["method"], target, host.decode("latin-1"), fields, length=len(body) if has_body else None
        )

    async def _connect(self) -> tuple[HttpClientConnection, str]:
        """A connection to the router, which may be starting again elsewhere.

        Raises:
            UpstreamError: none within ``ROUTER_WAIT_S``; nothing was sent.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + ROUTER_WAIT_S
        while True:
            try:
                pool = self._pool or await self._find_pool()
                return await pool.acquire(), pool.authority
            except ConnectFailed as error:
                if not isinstance(error, OwnLimit):  # another pool would have as many connections once more
                    self._forget(self._pool)
                if loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _find_pool(self) -> HttpPool:
        try:
            url = await self._find()
        except Exception as error:  # supervised: the router's replica may be gone in any way; it is asked again
            raise ConnectFailed(f"the router's replica does not answer: {error!r}") from error
        if self._pool is None:
            host, port = host_and_port(url)
            self._pool = HttpPool(host, port, connections_max=CONNECTIONS_MAX, connect_timeout_s=CONNECT_TIMEOUT_S)
        return self._pool

    def _forget(self, pool: HttpPool | None) -> None:
        """The router is not there any more; requests that it still answers go on."""
        if pool is not None and self._pool is pool:
            self._pool = None


class _Answer:
    """One answer of the router, a :class:`ResponseSink`, on its way to the client: pieces that have come since the last
    one was passed on go together. It reads no further ahead than ``PENDING_MAX_BYTES``."""

    def __init__(self, connection: HttpClientConnection) -> None:
        self._connection = connection
        self._head: Message | None = None
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._is_paused = False
        self._is_over = False
        self._has_left = False
        self._error: UpstreamError | None = None
        self._news = asyncio.Event()

    # --- from the router ---------------------------------------------------------------------------------------------

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        fields = [(name, value) for name, value in headers if name not in HOP_BY_HOP]
        self._head = {"type": "http.response.start", "status": status, "headers": fields}
        # It goes with what comes with it: the news is told at the end of what has been read.

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)
        self._num_bytes += len(data)
        if self._num_bytes > PENDING_MAX_BYTES and not self._is_paused:
            self._is_paused = True
            self._connection.pause()

    def on_read_end(self) -> None:
        self._news.set()

    def on_chunk(self, raw: bytes, begin: int) -> None:
        self.on_body(raw[begin:-2])
        self._news.set()

    def on_end(self) -> None:
        self._is_over = True
        self._news.set()

    def on_lost(self, error: UpstreamError) -> None:
        self._is_over = True
        self._error = error
        self._news.set()

    def on_timeout(self) -> None:
        raise AssertionError("no exchange of the ingress has a deadline: the router has them")

    # --- to the client -----------------------------------------------------------------------------------------------

    def client_left(self) -> None:
        """Nobody reads any more."""
        self._has_left = True
        self._news.set()

    async def pass_on(self, send: Send) -> None:
        """Pass everything on, until the end or until the client leaves.

        Raises:
            UpstreamError: the answer was cut after its head, and the client must not take it for whole.
        """
        has_begun = is_whole = False
        while not self._has_left and not is_whole:
            await self._news.wait()
            self._news.clear()
            if self._head is not None:
                head, self._head, has_begun = self._head, None, True
                await send(head)
            pieces, self._pieces, self._num_bytes = self._pieces, [], 0
            if self._is_paused:
                self._is_paused = False
                self._connection.resume()
            is_whole = self._is_over and self._error is None
            if pieces or is_whole:
                await send({"type": "http.response.body", "body": b"".join(pieces), "more_body": not is_whole})
            if self._error is not None and not self._pieces:
                break
        if self._error is None or self._has_left:
            return
        if has_begun:
            raise self._error
        await _refuse(send, 502, "the router ended before it answered", "router_lost")

    def close(self) -> None:
        """Cut the connection if the answer is not complete."""
        if not self._is_over:
            self._is_over = True
            self._connection.abort()


def _target(scope: Message) -> str:
    """Path and query as the client wrote them, below the route prefix."""
    root = scope.get("root_path", "")
    path = scope["path"]
    if root and path.startswith(root):
        path = path[len(root) :] or "/"
        raw = b""
    else:
        raw = (scope.get("raw_path") or b"").partition(b"?")[0]
    target = raw.decode("latin-1") if raw else quote(path, safe="/:@!$&'()*+,;=~-._")
    query = scope.get("query_string", b"")
    return f"{target}?{query.decode('latin-1')}" if query else target


async def _body(receive: Receive, max_bytes: int) -> bytes | None:
    """The body, read up to what is more than ``max_bytes``; None where the client has left."""
    pieces: list[bytes] = []
    size = 0
    while size <= max_bytes:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if not message.get("more_body", False):
            break
    return b"".join(pieces)


async def _left(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _refuse(send: Send, status: int, message: str, code: str) -> None:
    body = error_body(message, status=status, code=code)
    fields = [(b"content-type", JSON), (b"content-length", str(len(body)).encode())]
    if status == 503:
        fields.append((b"retry-after", b"1"))
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
