"""What the edge refuses: malformed requests, and requests past its limits. Nothing of it reaches the handler."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from antiphon.transport.http import server as server_module
from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import Responder
from tests.transport.http_edge import Recorder, connected, echo, serving, until

pytestmark = pytest.mark.usefixtures("drivers")

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"


def status_of(answer: bytes) -> int:
    """The status of a refusal, which is JSON in OpenAI's shape and the last thing on its connection."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    return int(head.split(b" ")[1])


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 3\r\ncontent-length: 4\r\n\r\nabcd",
        HEAD + b"content-length: 3, 3\r\n\r\nabc",
        HEAD + b"content-length: +3\r\n\r\nabc",
        HEAD + b"content-length: -3\r\n\r\nabc",
        HEAD + b"content-length: 99999999999999999999999\r\n\r\nabc",
        HEAD + b"transfer-encoding: gzip\r\n\r\nabc",
        HEAD + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: identity, chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: identity\r\n\r\nGET /smuggled HTTP/1.1\r\n\r\n",
        HEAD + b"transfer-encoding:\r\n\r\n",
        b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        HEAD + b"content-length: 0x3\r\n\r\nabc",
        HEAD + b"content-length: 1_0\r\n\r\nabcdefghij",
        HEAD + b"content-length: 1 2\r\n\r\nabc",
        HEAD + b"content-length:\r\n\r\n",
        HEAD + b"content-length : 3\r\n\r\nabc",
        HEAD + b" content-length: 3\r\n\r\nabc",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n+3\r\nabc\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3 \r\nabc\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3;a=b\nabc\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3;a=\x00\r\nabc\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabc\n0\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\n\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 5\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\na: b\r\n folded\r\n\r\n",
        HEAD + b"a: b\r\n\tfolded\r\n\r\n",
        HEAD + b"a: b\nc: d\r\n\r\n",
        HEAD + b"a: b\rc: d\r\n\r\n",
        HEAD + b"a: b\r\n\n",
        HEAD + b"a: \x7f\r\n\r\n",
        HEAD + b"a\x00: b\r\n\r\n",
        HEAD + b"host: y\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\r\n\r\n",
        b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
        b"GET /\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nxyz\r\nabc\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n-1\r\nabc\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n3\r\nabcXX0\r\n\r\n",
        HEAD + b"a: b\r\n folded\r\n\r\n",
        HEAD + b"a : b\r\n\r\n",
        HEAD + b"a: \x00\r\n\r\n",
        HEAD + b"\xff\xff: b\r\n\r\n",
        b"GET / HTTP/1.1\nhost: x\n\n",
        b"GET / HTTP/9.9\r\nhost: x\r\n\r\n",
        b"GET\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS client
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"hello\r\n\r\n",
    ],
)
async def test_malformed_requests_are_refused(data: bytes) -> None:
    recorder = Recorder()
    async with serving(recorder) as (server, port):
        async with connected(port) as client:
            client.send(data)
            assert status_of(await client.rest()) == 400
        await until(lambda: server.statistics() == {"connections": 0, "busy": 0})
    assert recorder.requests == []


async def test_connect_is_refused() -> None:
    recorder = Recorder()
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(b"CONNECT a:1 HTTP/1.1\r\nhost: a:1\r\n\r\n")
        assert status_of(await client.rest()) == 405
    assert recorder.requests == []


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\na: " + b"x" * 2000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"a%d: x\r\n" % n for n in range(100)) + b"\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: x\r\n" * 9 + b"\r\n",
        b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\na: " + b"x" * 2000,  # never ends
        b"GET / HTTP/1.1\r\n" + b"x" * 2000,
    ],
)
@pytest.mark.parametrize("piece", [7, 1_000_000])
async def test_large_headers_are_refused_with_431(data: bytes, piece: int) -> None:
    recorder = Recorder()
    limits = HttpLimits(header_max_bytes=1000, header_count_max=8)
    async with serving(recorder, limits) as (_, port), connected(port) as client:
        for start in range(0, len(data), piece):
            client.send(data[start : start + piece])
            await asyncio.sleep(0)
        assert status_of(await client.rest()) == 431
    assert recorder.requests == []


async def test_headers_within_the_limits_pass() -> None:
    limits = HttpLimits(header_max_bytes=1000, header_count_max=8)
    async with serving(Recorder(), limits) as (_, port), connected(port) as client:
        client.send(b"GET / HTTP/1.1\r\n" + b"a: %b\r\n" % (b"x" * 100) * 8 + b"\r\n")
        assert (await client.response())[0] == 200


async def test_a_large_body_before_a_header_does_not_count_as_header() -> None:
    limits = HttpLimits(header_max_bytes=1000)
    async with serving(Recorder(), limits) as (_, port), connected(port) as client:
        client.send(b"POST / HTTP/1.1\r\ncontent-length: 5000\r\n\r\n" + b"x" * 5000 + b"GET /n")
        assert (await client.response())[0] == 200
        client.send(b"ext HTTP/1.1\r\n\r\n")
        assert (await client.response())[2] == b"GET /next "


@pytest.mark.parametrize(
    ("head", "body"),
    [
        (b"content-length: 1001\r\n\r\n", b""),
        (b"content-length: 1001\r\nexpect: 100-continue\r\n\r\n", b""),
        (b"transfer-encoding: chunked\r\n\r\n", b"1f4\r\n" + b"x" * 500 + b"\r\n1f5\r\n" + b"x" * 501 + b"\r\n"),
    ],
)
async def test_large_bodies_are_refused_with_413(head: bytes, body: bytes) -> None:
    recorder = Recorder()
    async with serving(recorder, HttpLimits(body_max_bytes=1000)) as (_, port), connected(port) as client:
        client.send(HEAD + head + body)
        answer = await client.rest()
        assert not answer.startswith(b"HTTP/1.1 100")
        assert status_of(answer) == 413
    assert recorder.requests == []


async def test_a_client_that_sends_its_large_body_first_still_reads_the_refusal() -> None:
    async with serving(Recorder(), HttpLimits(body_max_bytes=1000)) as (_, port), connected(port) as client:
        client.send(HEAD + b"content-length: 4000000\r\n\r\n")
        for _ in range(40):
            client.send(b"x" * 100_000)
            await asyncio.sleep(0.002)
        assert status_of(await client.rest()) == 413


@pytest.mark.parametrize(
    "endless", [b"0\r\na: " + b"x" * 40_000, b"0\r\n" + b"a: x\r\n" * 8000, b"1;" + b"x" * 40_000, b"0" * 40_000]
)
async def test_framing_without_end_is_refused_with_413(endless: bytes) -> None:
    """Trailer fields, chunk extensions and zeros before a size are no body, and would never reach its limit."""
    recorder = Recorder()
    async with serving(recorder, HttpLimits(header_max_bytes=8192)) as (_, port), connected(port) as client:
        client.send(HEAD + b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await client.response())[0] == 100  # the head was read alone
        for start in range(0, len(endless), 1000):
            client.send(endless[start : start + 1000])
            await asyncio.sleep(0)
        assert status_of(await client.rest()) == 413
    assert recorder.requests == []


async def test_a_body_in_chunks_of_one_byte_passes() -> None:
    recorder = Recorder()
    body = b"0123456789" * 1000
    limits = HttpLimits(header_max_bytes=1024)
    async with serving(recorder, limits) as (_, port), connected(port) as client:
        client.send(HEAD + b"expect: 100-continue\r\ntransfer-encoding: chunked\r\n\r\n")
        assert (await client.response())[0] == 100
        chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
        for start in range(0, len(chunks), 5000):
            client.send(chunks[start : start + 5000])
            await asyncio.sleep(0)
        assert (await client.response())[0] == 200
    assert bytes(recorder.requests[0].body) == body


async def test_a_body_of_just_the_limit_passes() -> None:
    async with serving(Recorder(), HttpLimits(body_max_bytes=1000)) as (_, port), connected(port) as client:
        client.send(HEAD + b"content-length: 1000\r\n\r\n" + b"x" * 1000)
        assert (await client.response())[0] == 200


@pytest.mark.parametrize(
    "data", [b"G", HEAD, HEAD + b"content-length: 5\r\n\r\nab", HEAD + b"transfer-encoding: chunked\r\n\r\n5\r\nab"]
)
async def test_requests_that_do_not_arrive_in_time_are_refused_with_408(data: bytes) -> None:
    limits = HttpLimits(head_timeout_s=0.2, body_read_timeout_s=0.2)
    recorder = Recorder()
    async with serving(recorder, limits) as (server, port):
        async with connected(port) as client:
            client.send(data)
            assert status_of(await client.rest()) == 408
        await until(lambda: server.statistics()["connections"] == 0)
    assert recorder.requests == []


async def test_a_head_that_trickles_in_is_late_too() -> None:
    async with serving(Recorder(), HttpLimits(head_timeout_s=0.5)) as (_, port), connected(port) as client:
        for byte in HEAD + b"a: " + b"x" * 100:
            client.send(bytes([byte]))
            await asyncio.sleep(0.05)
            if client.reader.at_eof() or client.reader._buffer:  # type: ignore[attr-defined]
                break
        assert status_of(await client.rest()) == 408


async def test_an_idle_connection_is_closed_without_a_word() -> None:
    async with serving(Recorder(), HttpLimits(keepalive_timeout_s=0.2, head_timeout_s=0.2)) as (_, port):
        async with connected(port) as client:
            client.send(b"GET / HTTP/1.1\r\n\r\n")
            await client.response()
            assert await client.rest() == b""
        async with connected(port) as silent:
            assert await silent.rest() == b""


async def test_a_long_response_is_not_an_idle_connection() -> None:
    async def act(request: HttpRequest, responder: Responder) -> None:
        await asyncio.sleep(0.5)
        echo(request, responder)

    limits = HttpLimits(keepalive_timeout_s=0.1, head_timeout_s=0.1, body_read_timeout_s=0.1)
    async with serving(Recorder(act), limits) as (_, port), connected(port) as client:
        client.send(b"GET /a HTTP/1.1\r\n\r\n")
        assert (await client.response())[2] == b"GET /a "


@pytest.mark.parametrize("junk", [b"\r\n\r\n", b"nonsense\r\n\r\n", b"GET /b HTTP/1.1\r\nunfinished"])
async def test_what_follows_a_request_in_progress_does_not_cut_its_response(junk: bytes) -> None:
    async def act(request: HttpRequest, responder: Responder) -> None:
        responder.start_stream(200, [])
        responder.write(b"one")
        await asyncio.sleep(0.4)
        responder.end(b"two")

    recorder = Recorder(act)
    async with serving(recorder, HttpLimits(head_timeout_s=0.1)) as (server, port):
        async with connected(port) as client:
            client.send(b"GET /a HTTP/1.1\r\n\r\n")
            await until(lambda: recorder.requests)
            client.send(junk)
            assert (await client.response())[2] == b"onetwo"
            if junk.strip():
                assert await client.rest() == b""
        await until(lambda: server.statistics()["connections"] == 0)
    assert len(recorder.requests) == 1


async def test_valid_requests_before_a_malformed_one_are_answered() -> None:
    recorder = Recorder()
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(b"GET /1 HTTP/1.1\r\n\r\nGET /2 HTTP/1.1\r\n\r\nnonsense\r\n\r\n")
        assert (await client.response())[2] == b"GET /1 "
        assert (await client.response())[2] == b"GET /2 "
        assert await client.rest() == b""
    assert [request.path for request in recorder.requests] == ["/1", "/2"]


async def test_connections_past_the_limit_are_told_so() -> None:
    recorder = Recorder()
    async with serving(recorder, HttpLimits(connections_max=2)) as (server, port):
        async with connected(port), connected(port):
            await until(lambda: server.statistics()["connections"] == 2)
            async with connected(port) as third:
                # What it has sent already must not turn the close into a reset that takes the answer with it.
                third.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 300000\r\n\r\n" + b"x" * 300_000)
                status, header, body = await third.response()
                assert (status, header[b"connection"], header[b"retry-after"]) == (503, b"close", b"1")
                assert header[b"content-type"] == b"application/json"
                error = json.loads(body)["error"]
                assert (error["type"], error["code"]) == ("service_unavailable", "too_many_connections")
                assert "2" in error["message"]
                assert await third.rest() == b""
            assert server.num_refused == {503: 1}
            assert server.statistics()["connections"] == 2
        await until(lambda: server.statistics()["connections"] == 0)
        async with connected(port) as client:
            client.send(b"GET /a HTTP/1.1\r\n\r\n")
            assert (await client.response())[0] == 200
    assert [request.path for request in recorder.requests] == ["/a"]


async def test_connections_past_the_limit_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is told so and stays costs a descriptor: for a few seconds, and only so many at a time."""
    monkeypatch.setattr(server_module, "TURNED_AWAY_MAX", 2)
    async with contextlib.AsyncExitStack() as stack:
        server, port = await stack.enter_async_context(serving(Recorder(), HttpLimits(connections_max=1)))
        await stack.enter_async_context(connected(port))
        await until(lambda: server.statistics()["connections"] == 1)
        others = [await stack.enter_async_context(connected(port)) for _ in range(4)]
        for other in others:
            assert (await other.response())[0] == 503
        assert len(server.turned_away) == 2
        for connection in list(server.turned_away):
            connection.sweep(server.loop.time() + 60.0)
        await until(lambda: not server.turned_away)
        assert server.num_refused == {503: 4}


async def echo_after(event: asyncio.Event, request: HttpRequest, responder: Responder) -> None:
    """A handler that is busy until the event."""
    await event.wait()
    echo(request, responder)


async def test_trailer_fields_do_not_pass_for_header_fields() -> None:
    recorder = Recorder()
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(
            b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\ntrailer: x-late\r\n\r\n"
            b"2\r\nhi\r\n0\r\nx-late: 1\r\nauthorization: t\r\n\r\n"
        )
        assert (await client.response())[0] == 200
        assert recorder.requests[0].header(b"x-late") is None
        assert recorder.requests[0].header(b"authorization") is None
        client.send(b"GET /b HTTP/1.1\r\nhost: x\r\nx-next: 1\r\n\r\n")
        assert (await client.response())[0] == 200
        assert recorder.requests[1].header(b"x-next") == b"1"


async def test_bodies_of_all_connections_together_are_bounded() -> None:
    released = asyncio.Event()
    recorder = Recorder(act=lambda request, responder: echo_after(released, request, responder))
    limits = HttpLimits(bodies_max_bytes=1000)
    async with serving(recorder, limits) as (server, port), connected(port) as one, connected(port) as two:
        one.send(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 900\r\n\r\n" + b"x" * 900)
        await until(lambda: recorder.requests)
        assert server.held_bytes == 900
        two.send(b"POST /b HTTP/1.1\r\nhost: x\r\ncontent-length: 200\r\n\r\n" + b"x" * 200)
        assert (await two.response())[0] == 503
        released.set()
        assert (await one.response())[0] == 200
        await until(lambda: server.held_bytes == 0)


async def test_what_is_sent_ahead_on_one_connection_is_bounded() -> None:
    released = asyncio.Event()
    recorder = Recorder(act=lambda request, responder: echo_after(released, request, responder))
    limits = HttpLimits(pipelined_max_bytes=1000)
    async with serving(recorder, limits) as (server, port), connected(port) as client:
        request = b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 600\r\n\r\n" + b"x" * 600
        client.send(request)
        await until(lambda: recorder.requests)
        client.send(request * 3)
        await until(lambda: server.held_bytes > 600)
        released.set()
        assert (await client.response())[0] == 200
        assert (await client.response())[0] == 200
        assert await client.rest() == b""
        assert len(recorder.requests) == 2
        await until(lambda: server.held_bytes == 0)
