"""A server with a recording handler, raw clients, and an upstream that says exactly what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import HttpServer, HttpServerConnection, Responder

WAIT_S = 10.0
"""Longest wait for something that should happen at once on a quiet machine."""


@dataclass
class Recorder:
    """A handler that notes every request and answers ``<method> <path> <body>``, or does what ``act`` says."""

    act: Callable[[HttpRequest, Responder], Awaitable[None]] | None = None
    requests: list[HttpRequest] = field(default_factory=list)
    responders: list[Responder] = field(default_factory=list)

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        self.requests.append(request)
        self.responders.append(responder)
        if self.act is not None:
            await self.act(request, responder)
        else:
            echo(request, responder)


def echo(request: HttpRequest, responder: Responder) -> None:
    body = b"%b %b %b" % (request.method.encode(), request.path.encode(), bytes(request.body))
    responder.send(200, [(b"content-type", b"text/plain")], body)


class Driver:
    """What runs the handlers of the servers that ``http_server`` makes; the fixture ``drivers`` sets it."""

    in_strands = False


def http_server(
    handler: Callable[[HttpRequest, Responder], Awaitable[None] | None], limits: HttpLimits | None = None
) -> HttpServer:
    """A server whose handlers run in tasks or in strands, as ``Driver`` says."""
    return HttpServer(handler, limits, in_strands=Driver.in_strands)


@contextlib.asynccontextmanager
async def serving(recorder: Recorder, limits: HttpLimits | None = None) -> AsyncIterator[tuple[HttpServer, int]]:
    """A listening server and its port."""
    server = http_server(recorder.handle, limits)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.drain(0)


class FakeTransport:
    """What a connection needs of a transport, without a socket."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def write_eof(self) -> None:
        pass

    def writelines(self, pieces: Sequence[bytes]) -> None:
        self.written += b"".join(pieces)

    def get_extra_info(self, _name: str) -> None:
        return None

    def set_write_buffer_limits(self, **_limits: int) -> None:
        pass


def connection_of(server: HttpServer) -> tuple[HttpServerConnection, FakeTransport]:
    connection, transport = HttpServerConnection(server), FakeTransport()
    connection.connection_made(cast("Any", transport))
    return connection, transport


class RawClient:
    """One connection, in bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def response(self) -> tuple[int, dict[bytes, bytes], bytes]:
        """The next response, framed by its length or its chunks: (status, header, body)."""
        async with asyncio.timeout(WAIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            lines = head.split(b"\r\n")[:-2]
            header = dict(line.split(b": ", 1) for line in lines[1:])
            status = int(lines[0].split(b" ")[1])
            if header.get(b"transfer-encoding") == b"chunked":
                return status, header, await self._chunks()
            return status, header, await self.reader.readexactly(int(header.get(b"content-length", b"0")))

    async def _chunks(self) -> bytes:
        body = b""
        while True:
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            body += await self.reader.readexactly(size)
            assert await self.reader.readexactly(2) == b"\r\n"
            if not size:
                return body

    async def rest(self) -> bytes:
        """Everything until the server closes; a reset counts as the end."""
        async with asyncio.timeout(WAIT_S):
            data = b""
            with contextlib.suppress(ConnectionError):
                while piece := await self.reader.read(65536):
                    data += piece
            return data


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[RawClient]:
    """A raw connection to a port of this machine."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def until(condition: Callable[[], object]) -> None:
    """Wait until ``condition`` is true."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - for conditions that set no event
            await asyncio.sleep(0.005)


@dataclass
class Upstream:
    """A server that reads one request head (and body by content-length) and then runs ``script`` on the connection."""

    script: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
    heads: list[bytes] = field(default_factory=list)
    num_connections: int = 0
    port: int = 0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Upstream]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                for line in head.split(b"\r\n"):
                    if line.startswith(b"content-length: "):
                        await reader.readexactly(int(line[16:]))
                await self.script(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            self._tasks.discard(task)
