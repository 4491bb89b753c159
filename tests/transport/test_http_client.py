"""The client side of the edge: reuse of connections, and every way in which an engine's answer can go wrong."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.core.errors import ConnectFailed, UpstreamError, UpstreamGarbage, UpstreamLost, UpstreamTimeout
from antiphon.transport.http import client as client_module
from antiphon.transport.http.client import HttpPool, request_head
from antiphon.transport.http.client_connection import HttpClientConnection
from antiphon.transport.http.message import HttpRequest, HttpResponse
from antiphon.transport.http.server import Responder
from tests.transport.http_edge import WAIT_S, Recorder, Upstream, serving, until

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


def says(*pieces: bytes, then_close: bool = False) -> Script:
    """An upstream that answers with ``pieces``, each in its own segment."""

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        if then_close:
            writer.close()

    return script


def get(pool: HttpPool, body: bytes = b"") -> list[bytes]:
    return [request_head("POST", "/x?y=1", pool.authority, [(b"a", b"b")], length=len(body)), body]


async def fetch(pool: HttpPool, timeout_s: float = WAIT_S, body_max_bytes: int = 10_000_000) -> HttpResponse:
    return await pool.fetch(get(pool), timeout_s=timeout_s, body_max_bytes=body_max_bytes)


async def test_an_ipv6_address_stands_in_brackets() -> None:
    pool = HttpPool("fd00::1", 8001)
    assert get(pool)[0].splitlines()[1] == b"host: [fd00::1]:8001"


class Sink:
    """Notes what a connection reports."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.ends: list[str] = []
        self.num_reads = 0

    def on_head(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        assert not self.ends
        assert not self.status, "a second head"
        self.status = status

    def on_body(self, data: bytes) -> None:
        assert data
        assert not self.ends
        self.body += data

    def on_read_end(self) -> None:
        assert not self.ends
        self.num_reads += 1

    def on_chunk(self, raw: bytes, begin: int) -> None:
        self.on_body(raw[begin:-2])
        self.on_read_end()

    def on_end(self) -> None:
        self.ends.append("end")

    def on_lost(self, error: UpstreamError) -> None:
        self.ends.append(type(error).__name__)


# ---- answers ---------------------------------------------------------------------------------------------------------


async def test_the_request_is_written_as_given() -> None:
    recorder = Recorder()
    async with serving(recorder) as (_, port):
        pool = HttpPool("127.0.0.1", port)
        response = await pool.fetch(get(pool, b"\x00body"), timeout_s=WAIT_S)
        pool.close()
    assert (response.status, response.header(b"content-type")) == (200, b"text/plain")
    (request,) = recorder.requests
    assert (request.method, request.path, request.query, bytes(request.body)) == ("POST", "/x", "y=1", b"\x00body")
    assert request.header(b"host") == b"127.0.0.1:%d" % port


@pytest.mark.parametrize(
    ("pieces", "then_close", "body"),
    [
        ((OK,), False, b"ok"),
        (tuple(OK[n : n + 1] for n in range(len(OK))), False, b"ok"),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",), False, b"ok"),
        ((b"HTTP/1.1 200 OK\r\n\r\no", b"k"), True, b"ok"),
        ((b"HTTP/1.0 200 OK\r\n\r\nok",), True, b"ok"),
        ((b"HTTP/1.1 100 Continue\r\n\r\n", OK), False, b"ok"),
        ((b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + OK,), False, b"ok"),
        ((b"HTTP/1.1 204 No Content\r\n\r\n",), False, b""),
    ],
)
async def test_every_framing_of_an_answer(pieces: tuple[bytes, ...], then_close: bool, body: bytes) -> None:
    async with Upstream(says(*pieces, then_close=then_close)).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        response = await fetch(pool)
        assert response.body == body
        assert response.status in (200, 204)
        pool.close()


@pytest.mark.parametrize(
    ("pieces", "then_close", "error"),
    [
        ((), True, UpstreamLost),
        ((b"HTTP/1.1 200 OK\r\n",), True, UpstreamLost),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nok",), True, UpstreamLost),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n",), True, UpstreamLost),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nok",), True, UpstreamLost),
        ((b"HTTP/1.1 100 Continue\r\n\r\n",), True, UpstreamLost),
        ((b"nonsense\r\n\r\n",), False, UpstreamGarbage),
        ((b"HTTP/1.1 200 OK\r\n\x00bad: 1\r\n\r\n",), False, UpstreamGarbage),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",), False, UpstreamGarbage),
        ((b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",), False, UpstreamGarbage),
        ((b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",), False, UpstreamGarbage),
        ((b"HTTP/1.1 200 OK\r\na: " + b"x" * 200_000,), False, UpstreamGarbage),
        ((b"HTTP/1.1 200 OK\r\ncontent-length: 3000\r\n\r\n" + b"x" * 3000,), False, UpstreamGarbage),
    ],
)
async def test_every_way_an_answer_goes_wrong(
    pieces: tuple[bytes, ...], then_close: bool, error: type[UpstreamError]
) -> None:
    async with Upstream(says(*pieces, then_close=then_close)).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        with pytest.raises(error) as caught:
            await fetch(pool, body_max_bytes=2000)
        assert type(caught.value) is error
        assert pool.statistics() == {"open": 0, "idle": 0}


async def test_a_reset_is_a_loss() -> None:
    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nendless")
        await asyncio.sleep(0.02)
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        writer.transport.abort()

    async with Upstream(script).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        # Only a clean end of the connection ends a body without a length.
        with pytest.raises(UpstreamLost):
            await fetch(pool)


async def test_a_late_answer_is_a_timeout_and_cuts_the_connection() -> None:
    async def script(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        cut.set()

    cut = asyncio.Event()
    async with Upstream(script).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        with pytest.raises(UpstreamTimeout):
            await fetch(pool, timeout_s=0.1)
        assert pool.statistics() == {"open": 0, "idle": 0}
        await asyncio.wait_for(cut.wait(), WAIT_S)


async def test_a_cancelled_fetch_cuts_the_connection() -> None:
    async def script(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        assert await reader.read() == b""
        cut.set()

    cut = asyncio.Event()
    async with Upstream(script).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        call = asyncio.create_task(fetch(pool))
        await until(lambda: upstream.heads)
        call.cancel()
        await asyncio.wait_for(cut.wait(), WAIT_S)
        assert pool.statistics() == {"open": 0, "idle": 0}
        assert call.cancelled()


@given(st.data())
@settings(max_examples=100)
def test_answers_do_not_depend_on_how_their_bytes_are_split(data: st.DataObject) -> None:
    body = data.draw(st.binary(max_size=60))
    if data.draw(st.booleans()):
        pieces = [body[start : start + 7] for start in range(0, len(body), 7)]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        stream = b"HTTP/1.1 207 Multi\r\nA: b\r\nTransfer-Encoding: chunked\r\n\r\n" + framed
    else:
        stream = b"HTTP/1.1 207 Multi\r\nA: b\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))

    async def receive() -> tuple[HttpPool, Sink]:
        pool, sink = HttpPool("h", 1), Sink()
        connection = _detached(pool)
        connection.start([b"request"], sink)
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            if stop > start:
                connection.data_received(stream[start:stop])
        return pool, sink

    pool, sink = asyncio.run(receive())
    assert (sink.status, sink.body, sink.ends) == (207, body, ["end"])
    assert pool.statistics()["idle"] == 1


class Wire:
    """A transport that remembers."""

    def __init__(self) -> None:
        self.is_closed = False

    def write(self, data: bytes) -> None:
        pass

    writelines = write

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, _name: str) -> None:
        return None


def _detached(pool: HttpPool) -> HttpClientConnection:
    connection = HttpClientConnection(pool)
    connection.connection_made(Wire())  # type: ignore[arg-type]
    return connection


# ---- connections -----------------------------------------------------------------------------------------------------


async def test_connections_are_reused() -> None:
    async with Upstream(says(OK)).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        for _ in range(5):
            assert (await fetch(pool)).body == b"ok"
        assert upstream.num_connections == 1
        await asyncio.gather(*[fetch(pool) for _ in range(4)])
        assert upstream.num_connections == 4
        assert pool.statistics() == {"open": 4, "idle": 4}
        pool.close()
        assert pool.statistics() == {"open": 0, "idle": 0}


@pytest.mark.parametrize(
    "close", [b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok", b"HTTP/1.0 200 OK\r\n\r\nok"]
)
async def test_connections_that_the_engine_will_close_are_not_reused(close: bytes) -> None:
    async with Upstream(says(close, then_close=True)).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        for _ in range(2):
            assert (await fetch(pool)).body == b"ok"
        assert upstream.num_connections == 2
        assert pool.statistics()["idle"] == 0


@pytest.mark.interpreted  # the constant is compiled in
async def test_a_stale_connection_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_IDLE_REUSE_MAX_S", 0.05)
    async with Upstream(says(OK)).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        await fetch(pool)
        await asyncio.sleep(0.1)
        assert pool.acquire_nowait() is None
        assert pool.statistics() == {"open": 0, "idle": 0}
        await fetch(pool)
        assert upstream.num_connections == 2
        pool.close()


async def test_an_idle_connection_that_the_engine_closed_is_not_reused() -> None:
    async with Upstream(says(OK, then_close=True)).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        await fetch(pool)
        await until(lambda: pool.statistics()["open"] == 0)
        assert (await fetch(pool)).body == b"ok"
        assert upstream.num_connections == 2


@pytest.mark.parametrize("surplus", [OK, b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n", b"junk", b"\x00"])
async def test_an_engine_that_says_more_than_was_asked_is_not_asked_again(surplus: bytes) -> None:
    async with Upstream(says(OK + surplus)).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        for _ in range(2):
            assert (await fetch(pool)).body == b"ok"
        assert upstream.num_connections == 2


async def test_a_connection_that_still_holds_a_request_is_not_reused() -> None:
    is_over, has_ended = asyncio.Event(), asyncio.Event()

    async def refuses_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await is_over.wait()
        writer.close()
        has_ended.set()

    server = await asyncio.start_server(refuses_early, "127.0.0.1", 0)
    pool = HttpPool("127.0.0.1", server.sockets[0].getsockname()[1])
    answer = await pool.fetch(get(pool, b"z" * 16_000_000), timeout_s=WAIT_S, body_max_bytes=1000)
    assert answer.body == b"ok"
    assert pool.statistics()["idle"] == 0
    pool.close()
    is_over.set()
    await has_ended.wait()
    server.close()


async def test_bytes_on_an_idle_connection_end_it() -> None:
    async with Upstream(says(OK, b"HTTP/1.1 200 OK\r\n")).running() as upstream:
        pool = HttpPool("127.0.0.1", upstream.port)
        await fetch(pool)
        await until(lambda: pool.statistics() == {"open": 0, "idle": 0})
        assert (await fetch(pool)).body == b"ok"


async def test_the_next_exchange_may_start_when_the_last_one_ends() -> None:
    """A sink that starts a request from ``on_end`` gets its own answer, even if bytes followed the first one."""

    class Chain(Sink):
        def __init__(self, pool: HttpPool, following: Sink) -> None:
            super().__init__()
            self._pool = pool
            self._following = following

        def on_end(self) -> None:
            super().on_end()
            connection = self._pool.acquire_nowait()
            if connection is not None:
                connection.start([b"next"], self._following)

    for surplus, expected in ((b"", "end"), (b"HTTP/1.1 500 Bad\r\ncontent-length: 0\r\n\r\n", None)):
        pool, second = HttpPool("h", 1), Sink()
        first = Chain(pool, second)
        connection = _detached(pool)
        connection.start([b"request"], first)
        connection.data_received(OK + surplus)
        assert (first.body, first.ends) == (b"ok", ["end"])
        if expected is None:
            assert (second.status, second.ends) == (0, [])
            assert pool.statistics()["idle"] == 0
        else:
            connection.data_received(OK)
            assert (second.status, second.body, second.ends) == (200, b"ok", ["end"])


async def test_a_refused_connection_is_a_connect_failure(free_port: int) -> None:
    pool = HttpPool("127.0.0.1", free_port)
    with pytest.raises(ConnectFailed) as caught:
        await fetch(pool)
    assert caught.value.retryable
    assert pool.statistics() == {"open": 0, "idle": 0}


async def test_a_connection_that_is_not_accepted_in_time_is_a_connect_failure() -> None:
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        port = full.getsockname()[1]
        fillers = []
        try:
            for _ in range(4):  # more than the queue holds: the kernel leaves the rest without an answer
                filler = socket.socket()
                filler.setblocking(False)
                filler.connect_ex(("127.0.0.1", port))
                fillers.append(filler)
            pool = HttpPool("127.0.0.1", port, connect_timeout_s=0.2)
            with pytest.raises(ConnectFailed, match=r"within 0\.2 s"):
                await fetch(pool)
        finally:
            for filler in fillers:
                filler.close()


async def test_closing_tells_whoever_waits_and_makes_no_more_connections() -> None:
    recorder = Recorder(lambda _request, _responder: asyncio.Event().wait())
    async with serving(recorder) as (_, port):
        pool = HttpPool("127.0.0.1", port)
        waiting = asyncio.create_task(fetch(pool))
        await until(lambda: len(recorder.requests) == 1)
        connecting = asyncio.create_task(fetch(pool))
        await asyncio.sleep(0)  # its first step
        assert pool._num_connecting == 1
        pool.close()
        with pytest.raises(UpstreamLost, match="has let go of this engine"):
            await asyncio.wait_for(waiting, WAIT_S)
        for attempt in (connecting, fetch(pool)):
            with pytest.raises(ConnectFailed, match="has let go of this engine"):
                await asyncio.wait_for(attempt, WAIT_S)
        assert pool.statistics() == {"open": 0, "idle": 0}


async def test_connections_are_bounded() -> None:
    release = asyncio.Event()

    async def act(_request: HttpRequest, responder: Responder) -> None:
        await release.wait()
        responder.send(200, [], b"")

    recorder = Recorder(act)
    async with serving(recorder) as (_, port):
        pool = HttpPool("127.0.0.1", port, connections_max=2)
        calls = [asyncio.create_task(fetch(pool)) for _ in range(2)]
        await until(lambda: len(recorder.requests) == 2)
        with pytest.raises(ConnectFailed, match="too many"):
            await fetch(pool)
        release.set()
        await asyncio.gather(*calls)
        assert (await fetch(pool)).status == 200
        pool.close()


# ---- streams ---------------------------------------------------------------------------------------------------------


async def test_a_stream_is_delivered_as_it_comes_and_can_be_paused() -> None:
    size = 4_000_000

    async def script(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (size + 3) + b"one")
        await writer.drain()
        await release.wait()
        writer.write(b"x" * size)
        await writer.drain()

    release = asyncio.Event()
    async with Upstream(script).running() as upstream:
        pool, sink = HttpPool("127.0.0.1", upstream.port), Sink()
        connection = await pool.acquire()
        connection.start(get(pool), sink)
        await until(lambda: sink.body == b"one")
        connection.pause()
        release.set()
        await asyncio.sleep(0.1)
        assert sink.body == b"one", "bytes arrive while reading is paused"
        connection.resume()
        await until(lambda: sink.ends)
        assert (len(sink.body), sink.ends) == (size + 3, ["end"])
        assert pool.statistics() == {"open": 1, "idle": 1}
        pool.close()


async def test_an_aborted_exchange_reports_nothing_more() -> None:
    async with Upstream(says(b"HTTP/1.1 200 OK\r\n\r\none", b"two", then_close=True)).running() as upstream:
        pool, sink = HttpPool("127.0.0.1", upstream.port), Sink()
        connection = await pool.acquire()
        connection.start(get(pool), sink)
        await until(lambda: sink.body)
        connection.abort()
        await asyncio.sleep(0.05)
        assert sink.ends == []
        assert pool.statistics() == {"open": 0, "idle": 0}


async def test_a_sink_may_abort_in_the_middle_of_a_piece() -> None:
    class Impatient(Sink):
        def on_body(self, data: bytes) -> None:
            super().on_body(data)
            connection.abort()

    pool, sink = HttpPool("h", 1), Impatient()
    connection = _detached(pool)
    connection.start([b"request"], sink)
    connection.data_received(OK)
    connection.connection_lost(None)
    assert (sink.body, sink.ends) == (b"ok", [])
