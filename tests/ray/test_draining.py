"""An engine comes to a router and leaves it, by the client that a replica's host uses; the router runs in this loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from antiphon.core.errors import ProtocolError, RequestRefused, UpstreamError, UpstreamTimeout
from antiphon.ray.draining import Left, RouterClient
from antiphon.router.app import Router
from tests.router.scripted import DONE, EVENT, Seen, Wire, connected, engine, prefills, routing, streams, until

NOBODY = "http://127.0.0.1:1"


def client_of(router: Router) -> RouterClient:
    return RouterClient(f"http://127.0.0.1:{router.spec.port}")


class Holding:
    """A decode engine's script: one event, and the rest when it is told to."""

    def __init__(self) -> None:
        self.go_on, self.begun = asyncio.Event(), asyncio.Event()

    async def __call__(self, _: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(EVENT)
        self.begun.set()
        await self.go_on.wait()
        wire.piece(DONE)
        wire.end()


async def test_an_engine_comes_takes_requests_and_leaves() -> None:
    async with (
        engine(prefills) as p,
        engine(streams) as d,
        engine(streams) as new,
        routing([p], [d], health_interval_s=0.1) as router,
    ):
        client = client_of(router)
        row = await client.register("decode", new.url)
        assert (row["url"], row["role"]) == (new.url, "decode")
        assert (await client.register("decode", new.url))["url"] == new.url, "it is known already"
        row = await client.wait_open("decode", new.url, 30)
        assert row["state"] == "ready"
        assert len(await client.rows()) == 3
        assert await client.leave("decode", new.url, 5) == Left()
        assert await client.row("decode", new.url) is None
        assert await client.leave("decode", new.url, 5) == Left(), "it is gone already"


async def test_leaving_waits_for_the_requests_in_flight() -> None:
    holding = Holding()
    async with engine(prefills) as p, engine(holding) as d, routing([p], [d]) as router, connected(router) as asker:
        client = client_of(router)
        asker.send()
        await holding.begun.wait()
        leaving = asyncio.create_task(client.leave("decode", d.url, 30))
        await until(lambda: not router.fleet.decode.is_open, "it drains")
        assert not leaving.done(), "the last of its pool leaves too, when its request has ended"
        holding.go_on.set()
        assert await leaving == Left()
        reply = await asker.reply()
        assert reply.status == 200
        assert reply.body.endswith(DONE)


async def test_what_has_not_ended_by_the_deadline_is_cut() -> None:
    holding = Holding()
    async with engine(prefills) as p, engine(holding) as d, routing([p], [d]) as router, connected(router) as asker:
        client = client_of(router)
        asker.send()
        await holding.begun.wait()
        assert await client.wait_idle("decode", d.url, 0.3) == 1
        begin_s = time.monotonic()
        assert await client.leave("decode", d.url, 0.5) == Left(num_cut=1)
        assert time.monotonic() - begin_s >= 0.5
        holding.go_on.set()


async def test_an_engine_that_does_not_open_is_named() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        client = client_of(router)
        with pytest.raises(UpstreamTimeout, match="it is not known"):
            await client.wait_open("decode", NOBODY, 0.2)
        await client.register("decode", NOBODY)
        with pytest.raises(UpstreamTimeout, match=r"takes no requests after 0\.3 s"):
            await client.wait_open("decode", NOBODY, 0.3)
        assert await client.drain("prefill", NOBODY) is None
        assert await client.remove("prefill", NOBODY, force=True) == 0


async def test_a_refusal_is_typed() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        with pytest.raises(RequestRefused) as caught:
            await client_of(router).register("decode", "http://no-port")
        assert (caught.value.status, caught.value.code) == (400, "invalid_url")


async def test_without_a_router_an_engine_leaves_all_the_same(free_port: int) -> None:
    client = RouterClient(f"http://127.0.0.1:{free_port}", timeout_s=1)
    with pytest.raises(UpstreamError):
        await client.rows()
    begin_s = time.monotonic()
    left = await client.leave("decode", NOBODY, 60)
    assert left.trouble
    assert time.monotonic() - begin_s < 30, "there is nothing to wait for"


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
    finally:
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize("body", [b"hello", b"[]", b'{"endpoints": 3}'])
async def test_what_is_no_router_is_said(body: bytes) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    async with answering(answer) as url:
        with pytest.raises((ProtocolError, UpstreamError), match=r"no router|no JSON"):
            await RouterClient(url).rows()


async def test_a_router_that_hangs_is_given_up() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    url = "http://{}:{}".format(*server.sockets[0].getsockname()[:2])
    try:
        left = await RouterClient(url, timeout_s=0.3).leave("decode", NOBODY, 30)
    finally:
        server.close()
        await server.wait_closed()
    assert "no answer" in left.trouble
