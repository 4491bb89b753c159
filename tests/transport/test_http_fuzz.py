"""The HTTP edge under bytes that nobody would send: valid messages, mutated, in random pieces, with clients and engines
that leave. Whatever comes, no exception leaves a callback, no request gets two answers, and nothing is left behind.

Seeded: a failure names its seed, and the same seed fails again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from antiphon.core.errors import UpstreamError
from antiphon.transport.http.client import HttpPool
from antiphon.transport.http.client_connection import HttpClientConnection
from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import HttpServer, HttpServerConnection, Responder
from tests.transport.http_edge import FakeTransport, connection_of

SEEDS = 40
CASES_A_SEED = 60
FAR_S = 1e6

TOKENS = (
    *(b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b",", b";", b"0", b"-1", b"\xff", b"0\r\n\r\n", b"\r\n\r\n"),
    *(b"content-length: 5\r\n", b"content-length: 0\r\n", b"transfer-encoding: chunked\r\n", b"connection: close\r\n"),
    *(b"GET /x HTTP/1.1\r\nhost: x\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n", b"expect: 100-continue\r\n", b" HTTP/1.0"),
    *(b"connection: upgrade\r\nupgrade: h2c\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"a: b\r\n c\r\n"),
    *(b"http://y", b"://"),
)


def pieces_of(chance: random.Random, data: bytes) -> list[bytes]:
    """``data`` in pieces: whole, byte by byte, or cut anywhere."""
    kind = chance.random()
    if kind < 0.2:
        return [data]
    if kind < 0.35:
        return [data[at : at + 1] for at in range(len(data))]
    cuts = sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(1, 8)))
    return [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True) if start < stop]


def mutated(chance: random.Random, data: bytes) -> bytes:
    """``data`` with a few bytes changed, dropped, doubled or put in."""
    text = bytearray(data)
    for _ in range(chance.choice((0, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(text) + 1)
        match chance.randrange(5):
            case 0 if at < len(text):
                text[at] = chance.randrange(256)
            case 1:
                del text[at : at + chance.choice((1, 2, 5, 20))]
            case 2:
                text[at:at] = text[at : at + chance.randrange(1, 40)]
            case 3:
                del text[at:]
            case _:
                text[at:at] = chance.choice(TOKENS)
    return bytes(text)


def chunks_of(chance: random.Random, body: bytes) -> bytes:
    size = chance.randrange(1, 12)
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    end = chance.choice((b"0\r\n\r\n", b"0\r\nx-trailer: 1\r\n\r\n"))
    return b"".join(b"%x%b\r\n%b\r\n" % (len(part), chance.choice((b"", b";e=1")), part) for part in parts) + end


def a_request(chance: random.Random) -> bytes:
    method = chance.choice((b"GET", b"POST", b"POST", b"HEAD"))
    target = b"%b/%d" % (chance.choice((b"", b"", b"", b"http://y")), chance.randrange(100))
    head = b"%b %b HTTP/%b\r\nhost: x\r\n" % (method, target, chance.choice((b"1.1", b"1.1", b"1.0")))
    head += chance.choice((b"", b"", b"connection: close\r\n", b"expect: 100-continue\r\n", b"a: %b\r\n" % (b"x" * 90)))
    if method != b"POST":
        return head + b"\r\n"
    body = chance.randbytes(chance.randrange(60))
    if chance.random() < 0.5 and b"HTTP/1.1" in head:
        return head + b"transfer-encoding: chunked\r\n\r\n" + chunks_of(chance, body)
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass
class Handler:
    """Answers each request at once, later, in pieces, or by cutting it, as chance has it; each answer is numbered."""

    chance: random.Random
    requests: list[HttpRequest] = field(default_factory=list)
    waiting: list[Callable[[], None]] = field(default_factory=list)
    cut: set[int] = field(default_factory=set)
    num_left: int = 0

    async def handle(self, request: HttpRequest, responder: Responder) -> None:
        number = len(self.requests)
        self.requests.append(request)
        responder.on_disconnect = self._left

        def answer() -> None:
            self._answer(number, responder, is_whole=request.method == "HEAD")

        if self.chance.random() < 0.6:
            answer()
        else:
            self.waiting.append(answer)

    def _answer(self, number: int, responder: Responder, *, is_whole: bool) -> None:
        lines = [(b"x-number", b"%d" % number)]
        kind = self.chance.random()
        if kind < 0.6 or is_whole:
            responder.send(200, lines, b"body of %d" % number)
            return
        responder.start_stream(200, lines)
        responder.write(b"first piece of %d" % number)
        if kind < 0.95:
            responder.end(b"last" if kind < 0.8 else b"")
        else:
            self.cut.add(number)
            responder.abort()

    def _left(self) -> None:
        self.num_left += 1


def answers_in(written: bytes, handler: Handler) -> tuple[list[int], list[int]]:
    """What a client reads: the numbers of the answers, in order, and the statuses of refusals. Asserts their framing;
    what was cut may end anywhere."""
    numbers: list[int] = []
    refusals: list[int] = []
    while written:
        head, separator, written = written.partition(b"\r\n\r\n")
        assert separator, head
        lines = head.split(b"\r\n")
        status = int(lines[0].split(b" ")[1])
        if status == 100:
            continue
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        number = int(fields[b"x-number"]) if b"x-number" in fields else None
        if number is None:
            refusals.append(status)
        else:
            numbers.append(number)
        if number is not None and handler.requests[number].method == "HEAD":
            continue
        if b"content-length" in fields:
            size = int(fields[b"content-length"])
            assert len(written) >= size
            written = written[size:]
        elif fields.get(b"transfer-encoding") == b"chunked":
            written, is_whole = _without_chunks(written)
            assert is_whole is (number not in handler.cut)
            assert is_whole or not written
        else:
            written = b""  # until the close
    return numbers, refusals


def _without_chunks(data: bytes) -> tuple[bytes, bool]:
    while data:
        line, _, data = data.partition(b"\r\n")
        size = int(line, 16)
        assert data[size : size + 2] == b"\r\n"
        data = data[size + 2 :]
        if not size:
            return data, True
    return b"", False


async def drive(chance: random.Random, pieces: list[bytes], *, is_calm: bool) -> Handler:
    """One connection, from its first byte to its end. ``is_calm``: all that is random are the answers' shapes."""
    handler = Handler(chance)
    limits = HttpLimits(header_max_bytes=4096, header_count_max=20, body_max_bytes=2000, pipelined_max=4)
    server = HttpServer(handler.handle, limits, in_strands=True)
    connection, transport = connection_of(server)
    for piece in pieces:
        if transport.is_closed or (not is_calm and chance.random() < 0.01):
            break
        connection.data_received(piece)
        if not is_calm and chance.random() < 0.1:
            connection.pause_writing()
            connection.resume_writing()
        if is_calm or chance.random() < 0.5:
            await _settle(handler)
    if is_calm or chance.random() < 0.7:
        await _settle(handler)
        if connection._request is None and not connection._pending and not connection.is_busy:
            assert server.held_bytes == 0, "bytes of requests that are over are still counted"
        _expire(connection, transport, server)
    num_busy = int(connection._responder is not None and not connection._responder.finished)
    connection.connection_lost(None)
    assert handler.num_left == num_busy, "a client that leaves is reported once, to the request in progress"
    await _settle(handler)
    assert server.held_bytes == 0
    assert server.statistics() == {"connections": 0, "busy": 0}
    numbers, refusals = answers_in(transport.written, handler)
    assert numbers == sorted(set(numbers)), "answers out of order, or two to one request"
    assert len(refusals) <= 1
    return handler


async def _settle(handler: Handler) -> None:
    """Let what waits be answered, and what that lets begin."""
    for _ in range(20):
        while handler.waiting:
            handler.waiting.pop(0)()
        await asyncio.sleep(0)
        if not handler.waiting:
            await asyncio.sleep(0)
            if not handler.waiting:
                return
    raise AssertionError("requests without end")


def _expire(connection: HttpServerConnection, transport: FakeTransport, server: HttpServer) -> None:
    """Whatever state it is in, an idle connection ends when its time is up: at most a refusal, then the close."""
    assert transport.is_closed or not connection.is_busy, "a request that nobody answers"
    for factor in (1, 2, 3):
        if not transport.is_closed:
            connection.sweep(server.loop.time() + factor * FAR_S)
    assert transport.is_closed, "a connection that nothing ends"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_server_under_mutated_requests(seed: int) -> None:
    async def run() -> None:
        chance = random.Random(seed)
        for _ in range(CASES_A_SEED):
            data = b"".join(a_request(chance) for _ in range(chance.randrange(1, 7)))
            await drive(chance, pieces_of(chance, mutated(chance, data)), is_calm=False)

    asyncio.run(run())


@pytest.mark.parametrize("seed", range(SEEDS // 2))
def test_mutated_requests_do_not_depend_on_how_they_are_split(seed: int) -> None:
    """What a server takes for a request must not depend on segments: that is where smuggled ones hide."""

    async def run() -> None:
        chance = random.Random(seed)
        for _ in range(CASES_A_SEED):
            data = mutated(chance, b"".join(a_request(chance) for _ in range(chance.randrange(1, 4))))
            seen = []
            for pieces in ([data], pieces_of(chance, data)):
                handler = await drive(random.Random(seed), pieces, is_calm=True)
                seen.append([(r.method, r.target, r.headers, bytes(r.body)) for r in handler.requests])
            assert seen[0] == seen[1], data

    asyncio.run(run())


# ---- the client side -------------------------------------------------------------------------------------------------


class Sink:
    """Notes what a connection reports, and asserts its order."""

    def __init__(self, connection: HttpClientConnection, aborts_at: int) -> None:
        self.ends: list[str] = []
        self.body = b""
        self.num_heads = 0
        self.is_aborted = False
        self._connection = connection
        self._aborts_at = aborts_at

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert not self.ends
        assert not self.is_aborted
        assert status >= 200 or status == 101 or status < 100
        self.num_heads += 1
        assert self.num_heads == 1

    def on_body(self, data: bytes) -> None:
        assert self.num_heads == 1
        assert not self.ends
        assert data
        assert not self.is_aborted
        self.body += data
        if len(self.body) > self._aborts_at:
            self.is_aborted = True
            self._connection.abort()

    def on_read_end(self) -> None:
        assert not self.ends
        assert not self.is_aborted

    def on_end(self) -> None:
        assert self.num_heads == 1
        assert not self.is_aborted
        self.ends.append("end")

    def on_lost(self, error: UpstreamError) -> None:
        assert not self.is_aborted
        self.ends.append("lost")

    def on_timeout(self) -> None:
        raise AssertionError("nobody set a time")


def an_answer(chance: random.Random) -> tuple[bytes, bytes]:
    """An answer, and its body."""
    body = chance.randbytes(chance.randrange(60))
    early = chance.choice((b"", b"", b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"))
    head = early + b"HTTP/1.1 %d X\r\nserver: x\r\n" % chance.choice((200, 200, 400, 503))
    head += chance.choice((b"", b"", b"connection: close\r\n"))
    match chance.randrange(3):
        case 0:
            return head + b"transfer-encoding: chunked\r\n\r\n" + chunks_of(chance, body), body
        case 1:
            return head + b"content-length: %d\r\n\r\n" % len(body) + body, body
        case _:
            return head + b"connection: close\r\n\r\n" + body, body


def hear(chance: random.Random, pool: HttpPool) -> str:
    """One connection that is asked once or twice; returns how the first exchange ended."""
    connection, transport = HttpClientConnection(pool), FakeTransport()
    connection.connection_made(cast("Any", transport))
    pool._all.add(connection)
    first = Sink(connection, chance.choice((10**6, 10**6, 10**6, 0, 20)))
    sinks = [first]
    connection.start([b"GET / HTTP/1.1\r\n\r\n", b""], first)
    answers = [an_answer(chance) for _ in range(chance.randrange(1, 3))]
    is_closing = b"connection: close" in answers[0][0]  # the second answer is then a part of the first, or is dropped
    data = b"".join(answer for answer, _ in answers)
    said = mutated(chance, data) or b"x"
    for piece in pieces_of(chance, said):
        if transport.is_closed:
            break
        if chance.random() < 0.05:
            connection.pause()
            connection.resume()
        connection.data_received(piece)
        if len(sinks) == 1 and first.ends == ["end"] and pool.acquire_nowait() is connection:
            sinks.append(Sink(connection, 10**6))
            connection.start([b"GET / HTTP/1.1\r\n\r\n"], sinks[1])
    connection.connection_lost(chance.choice((None, ConnectionResetError())))
    for sink in sinks:
        assert len(sink.ends) == (0 if sink.is_aborted else 1)
    assert pool.statistics() == {"open": 0, "idle": 0}
    if said == data and not is_closing and not first.is_aborted:
        assert (first.ends, first.body) == (["end"], answers[0][1])
    return "aborted" if first.is_aborted else first.ends[0]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_client_under_mutated_answers(seed: int) -> None:
    async def run() -> list[str]:
        chance = random.Random(seed)
        pool = HttpPool("127.0.0.1", 1)
        return [hear(chance, pool) for _ in range(CASES_A_SEED)]

    ends = asyncio.run(run())
    assert {"end", "lost"} <= set(ends), "the cases have become too tame, or too wild"
