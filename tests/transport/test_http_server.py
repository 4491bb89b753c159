"""The server side of the edge: order, keep-alive, bodies, leaving clients, back-pressure, drain."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.transport.http.message import HttpLimits, HttpRequest
from antiphon.transport.http.server import Responder
from tests.transport.http_edge import Recorder, connected, connection_of, echo, http_server, serving, until

pytestmark = pytest.mark.usefixtures("drivers")

GET = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"
BIG = b"x" * 65_536


def post(path: bytes, body: bytes, *fields: bytes) -> bytes:
    head = [b"POST /%b HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *fields, b"", b""]
    return b"\r\n".join(head) + body


# ---- requests and their order ----------------------------------------------------------------------------------------


async def test_a_request_arrives_whole() -> None:
    recorder = Recorder()
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(post(b"a%20b?x=1&y=%00", b"body", b"X-Thing:  padded \t", b"x-thing: twice"))
        status, header, body = await client.response()
    assert (status, header[b"content-type"], body) == (200, b"text/plain", b"POST /a%20b body")
    (request,) = recorder.requests
    assert (request.method, request.path, request.query, request.version) == ("POST", "/a%20b", "x=1&y=%00", "1.1")
    things = [value for name, value in request.headers if name == b"x-thing"]
    assert [value.strip() for value in things] == [b"padded", b"twice"]
    assert (request.header(b"host"), request.header(b"nothing")) == (b"x", None)


async def test_keep_alive_serves_one_after_the_other_on_one_connection() -> None:
    recorder = Recorder()
    async with serving(recorder) as (server, port), connected(port) as client:
        for number in range(5):
            client.send(post(b"%d" % number, b"b%d" % number))
            assert (await client.response())[2] == b"POST /%d b%d" % (number, number)
        assert server.statistics() == {"connections": 1, "busy": 0}


async def test_pipelined_requests_are_answered_in_order_and_one_at_a_time() -> None:
    busy: list[int] = []

    async def act(request: HttpRequest, responder: Responder) -> None:
        busy.append(server.statistics()["busy"])
        # The later a request, the sooner its handler is ready: order must come from the connection.
        await asyncio.sleep(0.02 / (1 + int(request.path[1:])))
        echo(request, responder)

    recorder = Recorder(act)
    async with serving(recorder) as (server, port), connected(port) as client:
        client.send(b"".join(post(b"%d" % number, b"x" * number) for number in range(10)))
        for number in range(10):
            assert (await client.response())[2] == b"POST /%d %b" % (number, b"x" * number)
    assert set(busy) == {1}


async def test_a_request_that_arrives_between_two_responses_waits_its_turn() -> None:
    started: list[str] = []

    async def act(request: HttpRequest, _responder: Responder) -> None:
        started.append(request.path)

    recorder = Recorder(act)
    connection, _ = connection_of(http_server(recorder.handle))
    connection.data_received(GET % b"1" + GET % b"2")
    await until(lambda: started == ["/1"])
    recorder.responders[0].send(200, [], b"")  # the second one starts at the loop's next turn …
    connection.data_received(GET % b"3")  # … and this one comes before it
    await until(lambda: len(started) == 2)
    recorder.responders[1].send(200, [], b"")
    await until(lambda: len(started) == 3)
    recorder.responders[2].send(200, [], b"")
    assert started == ["/1", "/2", "/3"]


async def test_too_many_pipelined_requests_end_the_connection_behind_those_that_may_wait() -> None:
    release = asyncio.Event()

    async def act(request: HttpRequest, responder: Responder) -> None:
        await release.wait()
        echo(request, responder)

    recorder = Recorder(act)
    async with serving(recorder, HttpLimits(pipelined_max=3)) as (server, port):
        async with connected(port) as client:
            client.send(post(b"x", b"body") * 6)
            await until(lambda: recorder.requests)
            release.set()
            for _ in range(4):
                assert (await client.response())[2] == b"POST /x body"
            assert await client.rest() == b""
        await until(lambda: (server.statistics(), server.held_bytes) == ({"connections": 0, "busy": 0}, 0))
    assert len(recorder.requests) == 4


async def test_connection_close_and_http_1_0_end_after_the_response() -> None:
    async with serving(Recorder()) as (_, port):
        for request in (post(b"", b"", b"connection: close"), b"GET / HTTP/1.0\r\n\r\n"):
            async with connected(port) as client:
                client.send(request)
                assert b"connection: close\r\n" in await client.rest()


async def test_http_1_0_with_keep_alive_goes_on() -> None:
    async with serving(Recorder()) as (_, port), connected(port) as client:
        for _ in range(2):
            client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            status, header, _ = await client.response()
            assert (status, header[b"connection"]) == (200, b"keep-alive"), "else the client waits for the close"


async def test_a_stream_for_http_1_0_ends_with_the_connection() -> None:
    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.start_stream(200, [])
        responder.write(b"one")
        responder.end()

    async with serving(Recorder(act)) as (_, port), connected(port) as client:
        client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"one"


async def test_chunked_bodies_and_trailers() -> None:
    recorder = Recorder()
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        client.send(b"3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nx-trailer: 1\r\n\r\n")
        assert (await client.response())[2] == b"POST / abc0123456789"
        client.send(GET % b"next")
        assert (await client.response())[2] == b"GET /next "


async def test_bodies_are_the_same_bytes_however_large() -> None:
    recorder = Recorder()
    body = bytes(range(256)) * 8192
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(post(b"", body))
        await client.response()
    assert bytes(recorder.requests[0].body) == body


async def test_expect_continue_of_http_1_0_is_not_answered() -> None:
    async with serving(Recorder()) as (_, port), connected(port) as client:
        client.send(b"POST / HTTP/1.0\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\nabc")
        assert (await client.response())[0] == 200


async def test_expect_continue_is_answered_before_the_body() -> None:
    async with serving(Recorder()) as (_, port), connected(port) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n")
        assert (await client.response())[0] == 100
        client.send(b"abc")
        assert (await client.response())[2] == b"POST / abc"


EXPECTING = b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\nexpect: 100-continue\r\n\r\n"


async def test_expect_continue_behind_another_request_is_answered_in_its_turn() -> None:
    release = asyncio.Event()

    async def act(request: HttpRequest, responder: Responder) -> None:
        await release.wait()
        echo(request, responder)

    recorder = Recorder(act)
    async with serving(recorder) as (server, port), connected(port) as client:
        client.send(GET % b"1" + GET % b"2" + EXPECTING % b"3")
        await until(lambda: recorder.requests)
        (connection,) = server._connections
        connection.sweep(server.loop.time() + 600.0)  # while it waits for its turn, it is not late
        release.set()
        assert (await client.response())[2] == b"GET /1 "
        assert (await client.response())[2] == b"GET /2 "
        assert (await client.response())[0] == 100
        client.send(b"abc" + GET % b"4" + EXPECTING % b"5")
        assert (await client.response())[2] == b"POST /3 abc"
        assert (await client.response())[2] == b"GET /4 "  # and no second 100
        assert (await client.response())[0] == 100  # from here on the body has the usual time
        connection.sweep(server.loop.time() + 50.0)
        connection.sweep(server.loop.time() + 70.0)
        assert (await client.response())[0] == 408


async def test_a_body_that_did_not_wait_for_its_100_gets_none() -> None:
    async def act(_request: HttpRequest, _responder: Responder) -> None:
        """It is answered below."""

    recorder = Recorder(act)
    connection, transport = connection_of(http_server(recorder.handle))
    connection.data_received(GET % b"1" + EXPECTING % b"2" + b"abc" + post(b"3", b"abcdef")[:-3])
    for number in range(2):
        await until(lambda: len(recorder.responders) == number + 1)  # noqa: B023 - it is called here
        recorder.responders[number].send(200, [], b"")
    connection.data_received(b"def")
    await until(lambda: len(recorder.responders) == 3)
    assert [bytes(request.body) for request in recorder.requests] == [b"", b"abc", b"abcdef"]
    assert b" 100 " not in transport.written


async def test_expect_continue_beside_an_offered_upgrade_is_answered_once() -> None:
    async with serving(Recorder()) as (_, port), connected(port) as client:
        client.send((EXPECTING % b"a")[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert (await client.response())[0] == 100
        client.send(b"abc")
        assert (await client.response())[2] == b"POST /a abc"


# ---- the form of a target --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "path", "query", "host"),
    [
        (b"http://there/v1/completions", "/v1/completions", "", b"there"),
        (b"HTTP://there:80/a?b=http://c/d", "/a", "b=http://c/d", b"there:80"),
        (b"https://[::1]:1/a", "/a", "", b"[::1]:1"),
        (b"http://there", "/", "", b"there"),
        (b"http://there?a=1", "/", "a=1", b"there"),
        (b"/http://there/a", "/http://there/a", "", b"here"),
        (b"/a", "/a", "", b"here"),
    ],
)
async def test_a_target_that_names_its_host_is_served_as_its_path(
    target: bytes, path: str, query: str, host: bytes
) -> None:
    """And it is that host, whatever the field says (RFC 9112, 3.2.2)."""
    recorder = Recorder()
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(b"POST %b HTTP/1.1\r\na: 1\r\nhost: here\r\ncontent-length: 2\r\n\r\nhi" % target)
        assert (await client.response())[2] == b"POST %b hi" % path.encode()
    (request,) = recorder.requests
    assert (request.path, request.query, request.target) == (path, query, path + ("?" + query if query else ""))
    assert request.header(b"host") == host
    assert request.headers == [(b"a", b"1"), (b"host", host), (b"content-length", b"2")]


async def test_a_target_names_a_host_that_no_field_does() -> None:
    recorder = Recorder()
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(b"GET http://there/a HTTP/1.1\r\n\r\n")
        assert (await client.response())[0] == 200
    assert recorder.requests[0].header(b"host") == b"there"


@pytest.mark.parametrize("target", [b"http:///a", b"http://a@b/c", b"ftp://a/b", b"http://?a", b"http://a#b/c"])
async def test_a_target_that_is_no_url_of_ours_is_refused(target: bytes) -> None:
    recorder = Recorder()
    async with serving(recorder) as (server, port), connected(port) as client:
        client.send(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
        assert (await client.response())[0] == 400
        assert await client.rest() == b""
        assert server.num_refused == {400: 1}
    assert recorder.requests == []


async def test_head_is_answered_without_a_body() -> None:
    async with serving(Recorder()) as (_, port), connected(port) as client:
        client.send(b"HEAD /a HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 10)
        assert b"content-length: 8\r\n" in head
        client.send(GET % b"next")
        assert (await client.response())[2] == b"GET /next "


async def test_an_offered_upgrade_is_declined_by_serving_the_request() -> None:
    recorder = Recorder()
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA")
    async with serving(recorder) as (_, port), connected(port) as client:
        client.send(post(b"a", b"body", *offer) + post(b"b", b"more", *offer) + GET % b"c")
        for expected in (b"POST /a body", b"POST /b more", b"GET /c "):
            assert (await client.response())[2] == expected
    assert [len(request.headers) for request in recorder.requests] == [2, 2, 1]


async def test_empty_lines_between_requests_are_ignored() -> None:
    async with serving(Recorder(), HttpLimits(head_timeout_s=0.2)) as (_, port), connected(port) as client:
        client.send(post(b"a", b"body") + b"\r\n")
        assert (await client.response())[0] == 200
        await asyncio.sleep(0.5)  # the stray line must not count as a request that is late
        client.send(GET % b"b")
        assert (await client.response())[2] == b"GET /b "


@given(st.data())
@settings(max_examples=150)
def test_requests_do_not_depend_on_how_their_bytes_are_split(data: st.DataObject) -> None:
    bodies = data.draw(st.lists(st.binary(max_size=40), min_size=1, max_size=4))
    chunked = data.draw(st.lists(st.booleans(), min_size=4, max_size=4))
    stream = b""
    for number, body in enumerate(bodies):
        if chunked[number]:
            head = b"POST /%d HTTP/1.1\r\nA: %d\r\ntransfer-encoding: chunked\r\n\r\n" % (number, number)
            pieces = [body[start : start + 7] for start in range(0, len(body), 7)]
            stream += head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        else:
            stream += post(b"%d" % number, body, b"A: %d" % number)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))

    async def feed() -> list[tuple[str, list[tuple[bytes, bytes]], bytes]]:
        recorder = Recorder()
        connection, _ = connection_of(http_server(recorder.handle))
        for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            connection.data_received(stream[start:stop])
            if data.draw(st.booleans()):
                await asyncio.sleep(0)
        await until(lambda: len(recorder.requests) == len(bodies))
        return [(request.path, request.headers, bytes(request.body)) for request in recorder.requests]

    seen = asyncio.run(feed())
    assert [(path, body) for path, _, body in seen] == [(f"/{number}", body) for number, body in enumerate(bodies)]
    assert [headers for _, headers, _ in seen if (b"a", b"0") in headers]
    assert all((b"a", b"%d" % number) in headers for number, (_, headers, _) in enumerate(seen))


# ---- responses and their end -----------------------------------------------------------------------------------------


async def test_a_stream_is_chunked_and_ends_truthfully() -> None:
    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.start_stream(200, [(b"content-type", b"text/event-stream")])
        for piece in (b"one", b"two", BIG):
            responder.write(piece)
            await asyncio.sleep(0)
        responder.end(b"last")

    async with serving(Recorder(act)) as (_, port), connected(port) as client:
        for _ in range(2):
            client.send(GET % b"")
            status, header, body = await client.response()
            assert (status, header[b"transfer-encoding"], body) == (200, b"chunked", b"onetwo" + BIG + b"last")


async def test_an_empty_piece_is_a_bug_and_not_the_end_of_the_stream() -> None:
    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.start_stream(200, [])
        responder.write(b"one")
        with pytest.raises(AssertionError):
            responder.write(b"")
        responder.end()

    async with serving(Recorder(act)) as (_, port), connected(port) as client:
        client.send(GET % b"")
        assert (await client.response())[2] == b"one"


async def test_an_aborted_stream_is_seen_to_be_incomplete() -> None:
    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.start_stream(200, [])
        responder.write(b"one")
        responder.abort()

    async with serving(Recorder(act)) as (_, port), connected(port) as client:
        client.send(GET % b"")
        assert (await client.rest()).endswith(b"3\r\none\r\n")


async def test_a_reset_is_a_reset() -> None:
    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.reset()

    async with serving(Recorder(act)) as (_, port), connected(port) as client:
        client.send(GET % b"")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(client.reader.read(), 10)


async def test_a_failing_handler_is_answered_with_500_and_the_connection_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def act(request: HttpRequest, responder: Responder) -> None:
        if request.path == "/bad":
            raise KeyError("secret detail")
        echo(request, responder)

    async with serving(Recorder(act)) as (_, port), connected(port) as client:
        client.send(GET % b"bad")
        status, _, body = await client.response()
        assert status == 500
        assert b"secret" not in body
        client.send(GET % b"good")
        assert (await client.response())[0] == 200
    assert "secret detail" in caplog.text


async def test_a_handler_that_fails_in_the_middle_of_a_stream_cuts_it(caplog: pytest.LogCaptureFixture) -> None:
    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.start_stream(200, [])
        responder.write(b"one")
        raise KeyError("in the middle")

    async with serving(Recorder(act)) as (_, port), connected(port) as client:
        client.send(GET % b"")
        assert (await client.rest()).endswith(b"one\r\n")
    assert "in the middle" in caplog.text


# ---- clients that leave ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["close", "half-close", "reset"])
async def test_a_client_that_leaves_is_reported_once(way: str) -> None:
    reports: list[Responder] = []
    done = asyncio.Event()

    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.on_disconnect = lambda: reports.append(responder)
        responder.start_stream(200, [])
        responder.write(b"one")
        await done.wait()
        responder.write(b"dropped")  # accepted and dropped
        responder.end()

    async with serving(Recorder(act)) as (server, port):
        async with connected(port) as client:
            client.send(GET % b"")
            await client.reader.readuntil(b"one")
            if way == "half-close":
                client.writer.write_eof()
            elif way == "reset":
                client.writer.transport.abort()
            else:
                client.writer.close()
            await until(lambda: reports)
        assert reports[0].is_disconnected
        done.set()
        await until(lambda: server.statistics() == {"connections": 0, "busy": 0})
    assert len(reports) == 1


async def test_a_client_that_leaves_after_the_response_is_not_reported() -> None:
    reports: list[str] = []

    async def act(request: HttpRequest, responder: Responder) -> None:
        responder.on_disconnect = lambda: reports.append(request.path)
        echo(request, responder)

    async with serving(Recorder(act)) as (server, port):
        async with connected(port) as client:
            client.send(GET % b"")
            await client.response()
        await until(lambda: server.statistics()["connections"] == 0)
    assert reports == []


async def test_pipelined_requests_of_a_client_that_left_are_never_started() -> None:
    release = asyncio.Event()

    async def act(request: HttpRequest, responder: Responder) -> None:
        await release.wait()
        echo(request, responder)

    recorder = Recorder(act)
    async with serving(recorder) as (server, port):
        async with connected(port) as client:
            client.send(GET % b"1" + GET % b"2")
            await until(lambda: recorder.requests)
        await until(lambda: server.statistics()["connections"] == 0)
        release.set()
        await until(lambda: server.statistics()["busy"] == 0)
    assert [request.path for request in recorder.requests] == ["/1"]


# ---- back-pressure ---------------------------------------------------------------------------------------------------


async def test_a_slow_reader_stalls_the_handler_and_loses_nothing() -> None:
    events: list[str] = []
    sent = 0

    async def act(_request: HttpRequest, responder: Responder) -> None:
        nonlocal sent
        ready = asyncio.Event()
        responder.on_stall = lambda: events.append("stall")
        responder.on_resume = lambda: (events.append("resume"), ready.set())[0]
        responder.start_stream(200, [])
        while events.count("resume") < 2:
            ready.clear()
            responder.write(BIG)
            sent += len(BIG)
            if responder.is_stalled:
                await ready.wait()
        responder.end()

    async with serving(Recorder(act)) as (_, port), connected(port) as client:
        client.writer.transport.pause_reading()
        client.send(GET % b"")
        await until(lambda: events == ["stall"])
        before = sent
        await asyncio.sleep(0.05)
        assert sent == before, "the handler goes on while the client does not read"
        client.writer.transport.resume_reading()
        _, _, body = await client.response()
    assert len(body) == sent
    assert events[:4] == ["stall", "resume", "stall", "resume"]


async def test_a_client_that_never_reads_is_cut_off() -> None:
    reports: list[str] = []
    left = asyncio.Event()

    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.on_disconnect = lambda: (reports.append("left"), left.set())[0]
        responder.start_stream(200, [])
        while not responder.is_stalled:
            responder.write(BIG)
        await left.wait()

    limits = HttpLimits(write_stall_timeout_s=0.2)
    async with serving(Recorder(act), limits) as (server, port), connected(port) as client:
        client.writer.transport.pause_reading()
        client.send(GET % b"")
        await until(lambda: reports == ["left"])
        await until(lambda: server.statistics()["connections"] == 0)
        client.writer.transport.abort()


# ---- drain -----------------------------------------------------------------------------------------------------------


async def test_drain_lets_requests_finish_and_closes_idle_connections() -> None:
    release = asyncio.Event()

    async def act(request: HttpRequest, responder: Responder) -> None:
        await release.wait()
        echo(request, responder)

    recorder = Recorder(act)
    server = http_server(recorder.handle)
    port = await server.listen("127.0.0.1", 0)
    async with connected(port) as busy, connected(port) as idle:
        busy.send(GET % b"a")
        await until(lambda: recorder.requests)
        await until(lambda: server.statistics()["connections"] == 2)
        draining = asyncio.create_task(server.drain(10))
        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        release.set()
        assert (await busy.rest()).endswith(b"GET /a ")
        assert await draining == 0


async def test_drain_cuts_what_does_not_finish_in_time() -> None:
    forever = asyncio.Event()

    async def act(_request: HttpRequest, responder: Responder) -> None:
        responder.start_stream(200, [])
        responder.write(b"one")
        await forever.wait()

    recorder = Recorder(act)
    server = http_server(recorder.handle)
    port = await server.listen("127.0.0.1", 0)
    async with connected(port) as client:
        client.send(GET % b"a")
        await until(lambda: recorder.requests)
        assert await server.drain(0.05) == 1
        assert (await client.rest()).endswith(b"one\r\n")
    assert server.statistics()["busy"] == 0
