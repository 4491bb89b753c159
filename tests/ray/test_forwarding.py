"""The ingress as an ASGI application before a scripted router: bytes both ways, clients that leave, routers that go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from antiphon.core.errors import UpstreamError
from antiphon.ray import forwarding as module
from antiphon.ray.forwarding import Forwarder

Script = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]
BODY_MAX = 1000
SOON_S = 30.0
"""For what takes no time on a machine that has some."""
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-antiphon-path: pd\r\n\r\nhi"


class Router:
    """Answers each request as its script says, and remembers what it was sent."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.seen: list[bytes] = []
        self.lost = asyncio.Event()
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = [
                    int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"content-length:")
                ]
                self.seen.append(head + await reader.readexactly(sum(length)))
                await self.script(self.seen[-1], writer)
        self.lost.set()
        writer.close()


class Client:
    """One request, as Serve makes it of HTTP."""

    def __init__(self, path: str = "/v1/x", body: bytes = b"", **scope: Any) -> None:
        fields = [(b"host", b"localhost:8000"), (b"content-type", b"application/json"), (b"connection", b"keep-alive")]
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [*fields, (b"content-length", b"%d" % len(body))],
            "client": ("127.0.0.1", 5),
        } | scope
        self._received = [{"type": "http.request", "body": body, "more_body": False}]
        self.leaves = asyncio.Event()
        self.sent: list[Any] = []
        self.news = asyncio.Event()

    async def receive(self) -> Any:
        if self._received:
            return self._received.pop()
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self.news.set()

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)


@pytest.fixture
async def router() -> AsyncIterator[Router]:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK)

    found = Router(answer)
    await found.start()
    yield found
    await found.stop()


@pytest.fixture
async def forwarder(router: Router) -> AsyncIterator[Forwarder]:
    async def find() -> str:
        return f"http://127.0.0.1:{router.port}"

    found = Forwarder(find, BODY_MAX, is_published=False)
    yield found
    found.close()


async def asked(forwarder: Forwarder, client: Client) -> Client:
    await within(SOON_S, forwarder(client.scope, client.receive, client.send))
    return client


async def within(timeout_s: float, waiting: Awaitable[Any]) -> None:
    async with asyncio.timeout(timeout_s):
        await waiting


async def test_bytes_pass_both_ways_unchanged(router: Router, forwarder: Forwarder) -> None:
    path, query = "/v1/a%20b", b"x=1%2F2&y"
    client = await asked(forwarder, Client(path, b'{"a": 1}', query_string=query))
    assert (client.status, client.body) == (200, b"hi")
    assert (b"x-antiphon-path", b"pd") in client.sent[0]["headers"]
    head, _, body = router.seen[0].partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /v1/a%20b?x=1%2F2&y HTTP/1.1"
    assert body == b'{"a": 1}'
    assert b"host: localhost:8000" in head
    assert b"content-type: application/json" in head
    assert b"keep-alive" not in head
    assert b"forwarded" not in head


async def test_a_route_prefix_is_serves(router: Router, forwarder: Forwarder) -> None:
    await asked(forwarder, Client("/pd/v1/models", root_path="/pd", method="GET"))
    await asked(forwarder, Client("/pd", root_path="/pd"))
    assert [line.split(b" ")[1] for line in router.seen] == [b"/v1/models", b"/"]


async def test_who_asks_from_elsewhere_is_said(router: Router, forwarder: Forwarder) -> None:
    await asked(forwarder, Client(client=("192.0.2.7", 9)))
    assert b"x-forwarded-for: 192.0.2.7" in router.seen[0]
    published = Forwarder(forwarder._find, BODY_MAX, is_published=True)
    await asked(published, Client())
    published.close()
    assert b"x-forwarded-for: 127.0.0.1" in router.seen[1]


async def test_each_piece_of_a_stream_passes_as_it_comes(router: Router, forwarder: Forwarder) -> None:
    goes_on = asyncio.Event()

    async def stream(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await goes_on.wait()
        writer.write(b"4\r\nlast\r\n0\r\n\r\n")

    router.script = stream
    client = Client()
    asking = asyncio.create_task(asked(forwarder, client))
    while client.body != b"first":
        client.news.clear()
        await within(SOON_S, client.news.wait())
    assert not any(name == b"transfer-encoding" for name, _ in client.sent[0]["headers"])
    goes_on.set()
    await asking
    assert client.body == b"firstlast"
    assert [message.get("more_body") for message in client.sent] == [None, True, False]


async def test_a_client_that_leaves_cuts_its_connection(router: Router, forwarder: Forwarder) -> None:
    async def begin(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")

    router.script = begin
    client = Client()
    asking = asyncio.create_task(asked(forwarder, client))
    while client.body != b"first":
        client.news.clear()
        await within(SOON_S, client.news.wait())
    client.leaves.set()
    await asking
    await within(SOON_S, router.lost.wait())
    assert client.sent[-1]["more_body"] is True


async def test_a_request_that_is_cancelled_cuts_its_connection(router: Router, forwarder: Forwarder) -> None:
    begun = asyncio.Event()

    async def begin(_: bytes, __: asyncio.StreamWriter) -> None:
        begun.set()

    router.script = begin
    asking = asyncio.create_task(asked(forwarder, Client()))
    await within(SOON_S, begun.wait())
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    await within(SOON_S, router.lost.wait())


async def test_an_answer_that_is_cut_is_not_whole(router: Router, forwarder: Forwarder) -> None:
    async def cut(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await writer.drain()
        writer.transport.abort()

    router.script = cut
    client = Client()
    with pytest.raises(UpstreamError):
        await asked(forwarder, client)
    assert client.body == b"first"
    assert all(message.get("more_body", True) for message in client.sent)


async def test_a_router_that_ends_before_its_answer_is_a_502(router: Router, forwarder: Forwarder) -> None:
    async def cut(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    router.script = cut
    client = await asked(forwarder, Client())
    assert client.status == 502
    assert b'"code": "router_lost"' in client.body


async def test_a_body_that_is_too_large_is_refused_here(router: Router, forwarder: Forwarder) -> None:
    client = await asked(forwarder, Client(body=b"x" * (BODY_MAX + 1)))
    assert client.status == 413
    assert router.seen == []


async def test_a_request_waits_for_a_router_that_starts_again_elsewhere(router: Router, forwarder: Forwarder) -> None:
    await asked(forwarder, Client())
    await router.stop()
    forwarder.close()
    asking = asyncio.create_task(asked(forwarder, Client()))
    other = Router(router.script)
    await other.start()
    router.port = other.port
    client = await asking
    assert (client.status, len(other.seen)) == (200, 1)
    await other.stop()


async def test_without_a_router_a_request_is_refused_in_time(
    router: Router, forwarder: Forwarder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROUTER_WAIT_S", 0.3)
    await router.stop()
    client = await asked(forwarder, Client())
    assert client.status == 503
    assert (b"retry-after", b"1") in client.sent[0]["headers"]


async def test_serve_may_start_and_stop_it(forwarder: Forwarder) -> None:
    events = [{"type": "lifespan.shutdown"}, {"type": "lifespan.startup"}]
    sent: list[Any] = []

    async def receive() -> Any:
        return events.pop()

    async def send(message: Any) -> None:
        sent.append(message["type"])

    await forwarder({"type": "lifespan"}, receive, send)
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


async def test_the_limit_of_connections_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request past it waits, and is refused; it does not begin another pool, with as many connections again."""
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(module, "ROUTER_WAIT_S", 0.3)
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: bytes, writer: asyncio.StreamWriter) -> None:
        begun.set()
        await go_on.wait()
        writer.write(OK)

    router = Router(slow)
    await router.start()

    async def find() -> str:
        return f"http://127.0.0.1:{router.port}"

    forwarder = Forwarder(find, BODY_MAX, is_published=False)
    first = asyncio.create_task(asked(forwarder, Client()))
    await within(SOON_S, begun.wait())
    assert [(await asked(forwarder, Client())).status for _ in range(2)] == [503, 503]
    assert len(router.seen) == 1
    go_on.set()
    assert (await first).status == 200
    forwarder.close()
    await router.stop()
