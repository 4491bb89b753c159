"""Engines that say exactly what a test tells them to, and a router in the test's own event loop before them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from antiphon.config.router_spec import RouterSpec
from antiphon.observe.tracing import Tracing
from antiphon.router.app import Router
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.states import EndpointState

WAIT_S = 10.0
"""Longest wait for something that should happen at once on a quiet machine."""

HANDLE = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_block_ids": [[1]]}
PREFILLED = json.dumps({"id": "x", "kv_transfer_params": HANDLE, "usage": {"prompt_tokens": 3}}).encode()
EVENT = b'data: {"id":"x","choices":[{"index":0,"text":"word"}]}\n\n'
DONE = b"data: [DONE]\n\n"


@dataclass
class Seen:
    """One request as an engine got it."""

    path: str
    body: bytes

    @property
    def params(self) -> object:
        return json.loads(self.body).get("kv_transfer_params")


@dataclass
class ScriptedEngine:
    """A server whose inference routes do what ``script`` says; /health answers 200 while ``is_healthy``."""

    script: Callable[[Seen, Wire], Awaitable[None]]
    port: int = 0
    is_healthy: bool = True
    seen: list[Seen] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)
    """Of every request, health checks included."""
    num_left: int = 0
    """Connections that the router closed while an answer was under way."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                path = head.split(b" ", 2)[1].decode()
                length = next(
                    (int(line[16:]) for line in head.lower().split(b"\r\n") if line[:15] == b"content-length:"), 0
                )
                body = await reader.readexactly(length)
                if path == "/health":
                    wire.whole(b"", status=200 if self.is_healthy else 503)
                    continue
                self.seen.append(Seen(path, body))
                await self.script(self.seen[-1], wire)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.num_left += not wire.is_idle
        finally:
            writer.close()


class Wire:
    """What a script writes to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self.is_idle = True

    def whole(self, body: bytes, status: int = 200, content_type: str = "application/json") -> None:
        """A whole answer."""
        head = f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
        self.writer.write(head.encode() + body)

    def begin(self, content_type: str = "text/event-stream") -> None:
        """The head of a stream."""
        self.is_idle = False
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())

    def piece(self, data: bytes) -> None:
        """One chunk."""
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self) -> None:
        """The end of a stream."""
        self.writer.write(b"0\r\n\r\n")
        self.is_idle = True

    def cut(self) -> None:
        """Close what was begun."""
        self.is_idle = True
        self.writer.close()
        raise ConnectionResetError

    @property
    def is_cut(self) -> bool:
        """Whether the router has closed the connection."""
        return self._reader.at_eof()

    async def until_closed(self) -> None:
        """Wait until the router closes the connection; raises what the end of the connection raises."""
        self.is_idle = False
        await self._reader.readexactly(1)


async def prefills(_: Seen, wire: Wire) -> None:
    """A prefill engine's script: a handle at once."""
    wire.whole(PREFILLED)


async def streams(_: Seen, wire: Wire) -> None:
    """A decode engine's script: three events."""
    wire.begin()
    for _number in range(3):
        wire.piece(EVENT)
    wire.piece(DONE)
    wire.end()


@contextlib.asynccontextmanager
async def engine(script: Callable[[Seen, Wire], Awaitable[None]]) -> AsyncIterator[ScriptedEngine]:
    """A listening engine."""
    made = ScriptedEngine(script)
    tasks: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(made.serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    made.port = server.sockets[0].getsockname()[1]
    try:
        yield made
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def routing(
    prefill: list[ScriptedEngine], decode: list[ScriptedEngine], tracing: Tracing | None = None, **knobs: object
) -> AsyncIterator[Router]:
    """A router before these engines, listening on ``router.spec.port``. It probes them once, and again and again only
    where ``health_interval_s`` is given, so that a test can decide what the registry believes; and it warms pairs only
    where it is told to, so that engines see the requests of the test and no others."""
    values: dict[str, object] = {"port": 0, "drain_timeout_s": 0.0, "warm_pairs": False} | knobs
    pools = {"prefill": [each.url for each in prefill], "decode": [each.url for each in decode]}
    router = Router(RouterSpec.model_validate(values | pools), tracing)
    port = await router.start()
    if "health_interval_s" not in knobs:
        assert router._watch is not None
        router._watch.cancel()  # before its first step
    router.spec = router.spec.model_copy(update={"port": port})
    try:
        yield router
    finally:
        await router.stop()


def endpoints(router: Router) -> list[Endpoint]:
    """Every endpoint, prefill first."""
    return router.fleet.all()


def take_for_ready(router: Router, endpoint: Endpoint) -> None:
    """Let health checks have said that it answers, whatever is true."""
    for _ in range(3):
        router.fleet.pool(endpoint.role).health_succeeded(endpoint, time.monotonic())
    assert endpoint.state is EndpointState.READY


def take_down(router: Router, endpoint: Endpoint) -> None:
    """Let a health check have been refused a connection, whatever is true."""
    router.fleet.pool(endpoint.role).health_refused(endpoint, time.monotonic(), 1.0)


@dataclass
class Reply:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_cut: bool


class Client:
    """One client connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, path: str = "/v1/completions", **fields: object) -> None:
        """Write one request."""
        body = json.dumps({"prompt": "x", "stream": True} | fields).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.writer.write(head.encode() + body)

    def get(self, path: str) -> None:
        """Write a GET."""
        self.writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())

    async def reply(self) -> Reply:
        """Read one answer to its end."""
        async with asyncio.timeout(WAIT_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            body, is_cut = b"", False
            try:
                if "content-length" in headers:
                    body = await self.reader.readexactly(int(headers["content-length"]))
                else:
                    while size := int(await self.reader.readuntil(b"\r\n"), 16):
                        body += (await self.reader.readexactly(size + 2))[:-2]
                    await self.reader.readexactly(2)
            except asyncio.IncompleteReadError:
                is_cut = True
            return Reply(int(first.split()[1]), headers, body, is_cut)

    def leave(self) -> None:
        """Close the connection."""
        self.writer.close()


@contextlib.asynccontextmanager
async def connected(router: Router) -> AsyncIterator[Client]:
    """A client of the router."""
    client = Client(*await asyncio.open_connection("127.0.0.1", router.spec.port))
    try:
        yield client
    finally:
        client.leave()


async def ask(router: Router, path: str = "/v1/completions", **fields: object) -> Reply:
    """One request on its own connection."""
    async with connected(router) as client:
        client.send(path, **fields)
        return await client.reply()


async def until(holds: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Wait until the answer is true."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not holds():
        assert asyncio.get_running_loop().time() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)


def newest(router: Router) -> dict[str, object]:
    """The newest receipt; its times are also found as ``prefill_ms`` and so on."""
    shown = router.receipts.latest(1)[0].as_dict()
    times = shown["ms"]
    assert isinstance(times, dict)
    return shown | {f"{name}_ms": value for name, value in times.items()}


def counted(router: Router, name: str, **labels: str) -> float:
    """The value of one of the router's counters or gauges; 0 before it was touched."""
    return router.metrics.registry.get_sample_value(f"antiphon_router_{name}", labels) or 0.0
