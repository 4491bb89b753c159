"""Heads that are known again: whatever comes, the outcome is the one that the parser alone would give."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import UpstreamError
from antiphon.transport.http.client import HttpPool
from antiphon.transport.http.client_connection import HttpClientConnection
from antiphon.transport.http.known_head import known_head
from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import HttpServer, HttpServerConnection, Responder
from tests.transport.http_edge import FakeTransport

LENGTHS = (
    *(
        b"Content-Length: %d",
        b"content-length:%d",
        b"CONTENT-LENGTH:  %d",
        b"content-length: 0%d",
        b"content-length: %d ",
    ),
    *(
        b"content-length: +%d",
        b"x: y\r\ncontent-length: %d\r\nContent-Type: a",
        b"content-length: 5\r\ncontent-length: %d",
    ),
    *(b"transfer-encoding: chunked\r\ncontent-length: %d", b"expect: 100-continue\r\ncontent-length: %d"),
    *(b"connection: close\r\ncontent-length: %d", b"connection: upgrade\r\nupgrade: x\r\ncontent-length: %d"),
    *(
        b"x: content-length: 3\r\ncontent-length: %d",
        b"a: b\r\n c\r\ncontent-length: %d",
        b"host: y\r\ncontent-length: %d",
    ),
)
REQUESTS = (
    b"POST /a?b HTTP/1.1",
    b"POST http://z/a HTTP/1.1",
    b"GET / HTTP/1.0",
    b"\r\nPUT /%41 HTTP/1.1",
    b"HEAD / HTTP/1.1",
)
ANSWERS = (
    b"HTTP/1.1 200 OK",
    b"HTTP/1.1 200",
    b"HTTP/1.0 200 OK",
    b"HTTP/1.1 404 No",
    b"HTTP/1.1 204 No",
    b"HTTP/1.1 103 A",
)


@st.composite
def messages(draw: st.DrawFn, lines: tuple[bytes, ...]) -> list[bytes]:
    """Pieces, most of them a whole message each; few heads, with bodies of any length, and some that lie about it."""
    heads = draw(
        st.lists(
            st.tuples(st.sampled_from(lines), st.sampled_from(LENGTHS[:2]) | st.sampled_from(LENGTHS)),
            min_size=1,
            max_size=2,
        )
    )
    stream = b""
    pieces: list[bytes] = []
    for _ in range(draw(st.integers(1, 7))):
        line, length = draw(st.sampled_from(heads))
        body = draw(st.sampled_from((b"", b"x", b"12345", b"content-length: 1\r\n\r\n", b"b" * 30, b"0\r\n\r\n")))
        end = draw(st.sampled_from((b"\r\n",) * 9 + (b"\n",)))
        size = max(0, len(body) + draw(st.sampled_from((0,) * 9 + (-1, 1))))
        stream += end.join((line, b"host: x", length % size, b"", body))
        match draw(st.sampled_from("wwwwwwjc")):
            case "w":
                pieces.append(stream)
            case "c":
                cut = draw(st.integers(0, len(stream)))
                pieces += (stream[:cut], stream[cut:])
            case _:
                continue  # with the next one
        stream = b""
    return [piece for piece in (*pieces, stream) if piece]


class ParsedOnly(HttpServerConnection):
    """Knows no head again."""

    def _take_known(self, *_: object) -> bool:
        return False


class AnswersParsedOnly(HttpClientConnection):
    """The same, of an engine's answers."""

    def _take_known(self, *_: object) -> bool:
        return False


async def served(
    kind: type[HttpServerConnection], pieces: list[bytes], limits: HttpLimits, answers: list[bool]
) -> object:
    """Everything that comes of ``pieces``; ``answers``: which requests are answered before the next piece."""
    seen: list[object] = []
    waiting: list[Responder] = []

    async def handle(request: HttpRequest, responder: Responder) -> None:
        wanted = (request.method, request.target, request.path, request.query, request.version, bytes(request.body))
        seen.append((wanted, list(request.headers), dict(request.first), request.keep_alive, request.is_body_dropped))
        waiting.append(responder)

    server = HttpServer(handle, limits, in_strands=True)
    connection, transport = kind(server), FakeTransport()
    connection.connection_made(cast("Any", transport))
    for piece, is_answered in zip(pieces, answers, strict=True):
        if transport.is_closed:
            break
        connection.data_received(piece)
        seen.append((connection._reading, connection._is_broken, connection.is_busy, server.held_bytes))
        while is_answered and waiting:
            waiting.pop(0).send(200, b"", b"answer")
            await asyncio.sleep(0)
    return seen, transport.written, transport.is_closed, server.num_refused


@given(st.data(), messages(REQUESTS), st.sampled_from((16, 65_536)), st.sampled_from((90, 65_536)))
@settings(max_examples=150, deadline=None)
def test_requests_are_those_that_the_parser_finds(
    data: st.DataObject, pieces: list[bytes], body_max_bytes: int, header_max_bytes: int
) -> None:
    limits = HttpLimits(body_max_bytes=body_max_bytes, bodies_max_bytes=55, header_max_bytes=header_max_bytes)
    answers = [data.draw(st.sampled_from((True, True, True, False))) for _ in pieces]
    assert asyncio.run(served(HttpServerConnection, pieces, limits, answers)) == asyncio.run(
        served(ParsedOnly, pieces, limits, answers)
    )


async def test_the_parser_does_not_see_a_head_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    async def handle(request: HttpRequest, responder: Responder) -> None:
        seen.append(bytes(request.body))
        responder.send(200, b"", b"")

    server = HttpServer(handle, in_strands=True)
    connection, sink = HttpServerConnection(server), Sink(cast("Any", None), "")
    connection.connection_made(cast("Any", FakeTransport()))
    engine = HttpClientConnection(HttpPool("h", 1))
    engine.connection_made(cast("Any", FakeTransport()))
    for number, body in enumerate((b"a", b"b", b"c" * 11)):
        connection.data_received(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        engine.start([b"request"], cast("Any", sink))
        engine.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        if not number:
            monkeypatch.setattr(connection, "_parser", None)
            monkeypatch.setattr(engine, "_parser", None)
    assert seen == [what[1] for what in sink.heard if what[0] == "body"] == [b"a", b"b", b"c" * 11]
    assert server.held_bytes == 0


class Sink:
    """Notes what it hears, and may cut the connection in the middle."""

    def __init__(self, connection: HttpClientConnection, cuts_at: str) -> None:
        self.heard: list[tuple[object, ...]] = []
        self._connection = connection
        self._cuts_at = cuts_at

    def _note(self, kind: str, *what: object) -> None:
        self.heard.append((kind, *what))
        if kind == self._cuts_at:
            self._connection.abort()

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._note("head", status, list(headers))

    def on_body(self, data: bytes) -> None:
        self._note("body", data)

    def on_read_end(self) -> None:
        self._note("read end")

    def on_chunk(self, raw: bytes, begin: int) -> None:
        self._note("chunk", raw, begin)

    def on_end(self) -> None:
        self._note("end")

    def on_lost(self, error: UpstreamError) -> None:
        self._note("lost", str(error))


async def heard(kind: type[HttpClientConnection], pieces: list[bytes], cuts_at: list[str]) -> object:
    """Everything that comes of ``pieces``, a request before each where none is under way."""
    pool = HttpPool("h", 1)
    connection, transport = kind(pool), FakeTransport()
    connection.connection_made(cast("Any", transport))
    sinks: list[Sink] = []
    for piece, cut in zip(pieces, cuts_at, strict=True):
        if transport.is_closed:
            break
        if connection._sink is None:
            if pool.acquire_nowait() is None and sinks:
                break
            sinks.append(Sink(connection, cut))
            connection.start([b"request"], cast("Any", sinks[-1]))
        connection.data_received(piece)
    return [sink.heard for sink in sinks], transport.is_closed, pool.statistics()


@given(st.data(), messages(ANSWERS))
@settings(max_examples=150, deadline=None)
def test_answers_are_those_that_the_parser_finds(data: st.DataObject, pieces: list[bytes]) -> None:
    cuts_at = [data.draw(st.sampled_from(("", "", "", "", "head", "body"))) for _ in pieces]
    assert asyncio.run(heard(HttpClientConnection, pieces, cuts_at)) == asyncio.run(
        heard(AnswersParsedOnly, pieces, cuts_at)
    )


FIELDS = [(b"a", b"b"), (b"content-length", b"3")]


@pytest.mark.parametrize(
    ("other", "begin"),
    [
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: 3\r\n\r\nxyz", 44),
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: 12\r\n\r\nxyzxyzxyzxyz", 45),
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: 3\r\n\r\nxyzx", 0),
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: 3\r\n\r\nxy", 0),
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: 03\r\n\r\nxyz", 0),
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: 0\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: \r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: ", 0),
        (b"POST / HTTP/1.1\r\nA: c\r\nContent-Length: 3\r\n\r\nxyz", 0),
        (b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: 3\r\nB: c\r\n\r\nxyz", 0),
    ],
)
def test_a_head_is_known_whatever_length_it_says_if_the_body_has_it(other: bytes, begin: int) -> None:
    known = known_head(b"POST / HTTP/1.1\r\nA: b\r\nContent-Length: 3\r\n\r\nabc", FIELDS)
    assert known is not None
    assert known.begin_of_body(other) == begin
    if begin:
        assert known.fields(other, begin) == [(b"a", b"b"), (b"content-length", b"%d" % (len(other) - begin))]
    assert FIELDS == [(b"a", b"b"), (b"content-length", b"3")]
