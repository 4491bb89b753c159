"""What a router does at its own limits, when it stops, and with refusals that come after the prefill."""

from __future__ import annotations

import asyncio
import errno
import json
from typing import Any

import pytest

from antiphon.router.headers import forwarded_headers
from antiphon.routing.states import EndpointState
from antiphon.transport.http.message import HttpRequest
from tests.router.scripted import (
    DONE,
    EVENT,
    HANDLE,
    Seen,
    Wire,
    ask,
    connected,
    counted,
    engine,
    newest,
    prefills,
    routing,
    streams,
    until,
)


async def never_ends(_: Seen, wire: Wire) -> None:
    """A decode engine that streams one event and then nothing."""
    wire.begin()
    wire.piece(EVENT)
    await wire.until_closed()


async def refuses(seen: Seen, wire: Wire) -> None:
    """A decode engine that refuses what a client asked for, and serves what the router asks for itself."""
    if json.loads(seen.body).get("max_tokens") == 1:
        wire.whole(b'{"choices":[{"text":"x"}]}')
    else:
        wire.whole(b'{"error":{"message":"max_tokens is too large"}}', status=400)


async def test_a_refused_decode_request_lets_its_kv_be_pulled_all_the_same() -> None:
    async with engine(prefills) as p, engine(refuses) as d, routing([p], [d]) as router:
        reply = await ask(router, max_tokens=10**6, stream=False)
        assert reply.status == 400
        assert "too large" in json.loads(reply.body)["error"]["message"]
        await until(lambda: len(d.seen) == 2, "a second decode request")
        freeing = json.loads(d.seen[1].body)
        assert freeing["kv_transfer_params"] == HANDLE
        assert freeing["max_tokens"] == 1
        assert freeing["cache_salt"].startswith("antiphon-free-")
        await until(lambda: router.inference.num_active == 0, "nothing in progress")
        assert newest(router)["status"] == 400
        assert counted(router, "handovers_abandoned_total") == 0


async def test_a_stream_that_the_end_of_the_drain_cuts_says_so() -> None:
    async with engine(prefills) as p, engine(never_ends) as d, routing([p], [d]) as router, connected(router) as client:
        client.send()
        await until(lambda: counted(router, "engine_requests_total", role="decode", engine=d.address), "it is sent")
        reading = asyncio.create_task(client.reply())
        stopping = asyncio.create_task(router.stop(drain_timeout_s=0.3))
        reply = await reading
        assert not reply.is_cut
        assert reply.status in (200, 503)
        if reply.status == 200:
            assert reply.body.endswith(DONE)
        assert b"the router is stopping" in reply.body
        assert await stopping == 1
        assert newest(router)["outcome"] == "failed"


async def test_a_second_signal_ends_the_drain_and_still_says_so() -> None:
    async with engine(prefills) as p, engine(never_ends) as d, routing([p], [d]) as router, connected(router) as client:
        client.send()
        await until(lambda: router.inference.num_active == 1, "one in progress")
        stopping = asyncio.create_task(router.stop(drain_timeout_s=60))
        reading = asyncio.create_task(client.reply())
        await until(lambda: router.server.is_draining, "it drains")
        router.server.hurry()
        reply = await reading
        assert not reply.is_cut
        assert b"the router is stopping" in reply.body
        assert await stopping == 1


@pytest.mark.interpreted  # it replaces a method of a pool
@pytest.mark.parametrize("code", [errno.EMFILE, errno.EADDRNOTAVAIL])
async def test_a_limit_of_this_machine_takes_no_engine_down(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        with monkeypatch.context() as patch:
            for endpoint in router.fleet.all():
                patch.setattr(router.engines.pool(endpoint), "acquire_nowait", lambda: None)
                patch.setattr(router.engines.pool(endpoint), "loop", FailingLoop(code))
            assert (await ask(router)).status == 503
            assert {endpoint.state for endpoint in router.fleet.all()} == {EndpointState.READY}
        assert (await ask(router)).status == 200


class FailingLoop:
    """A loop whose connections fail with one error."""

    def __init__(self, code: int) -> None:
        self._code = code

    async def create_connection(self, *_: Any) -> None:
        raise OSError(self._code, "no more")


async def test_admin_routes_are_not_for_a_page_that_points_its_name_here() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        for host, status in (
            ("evil.example", 403),
            ("127.0.0.1:8000", 200),
            ("localhost", 200),
            ("[::1]:30000", 200),
            ("[::1", 403),
        ):
            async with connected(router) as client:
                client.writer.write(f"GET /status HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
                assert (await client.reply()).status == status, host


def test_fields_named_by_connection_stay_here() -> None:
    headers = [(b"connection", b"keep-alive, X-Secret"), (b"x-secret", b"s"), (b"x-open", b"o")]
    request = HttpRequest("POST", b"/v1/completions", "1.1", headers)
    assert forwarded_headers(request) == [(b"x-open", b"o")]
    request = HttpRequest("POST", b"/x", "1.1", [*request.headers, (b"connection", b"x-open")])
    assert forwarded_headers(request) == [], "several fields count as one"


async def test_an_engine_that_has_never_answered_is_not_ready() -> None:
    async with engine(prefills) as p, engine(streams) as d:
        p.is_healthy = False
        async with routing([p], [d]) as router, connected(router) as client:
            client.get("/readiness")
            reply = await client.reply()
            assert reply.status == 503
            assert "prefill" in json.loads(reply.body)["reason"]
