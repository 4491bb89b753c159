"""The two ends of a request's life as races find them: a client that has left before it began, and a relay that has
ended and must leave its connection alone, since another request may be using it."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.observe.receipt import Receipt
from antiphon.protocol.apis import COMPLETIONS
from antiphon.router.relay import Relay
from antiphon.router.routes import ROUTES
from antiphon.routing.fleet import Fleet
from antiphon.routing.life import Life
from antiphon.routing.options import FleetOptions, LifeOptions
from antiphon.transport.http.message import HttpRequest
from tests.router.scripted import counted, engine, newest, prefills, routing, streams


class Connection:
    """As much of an engine's connection as a relay touches."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: list[str] = []

    def start(self, buffers: object, sink: object) -> None:
        self.done.append("start")

    def finish_alone(self) -> None:
        self.done.append("finish_alone")

    def abort(self) -> None:
        self.done.append("abort")

    def pause(self) -> None:
        self.done.append("pause")

    def resume(self) -> None:
        self.done.append("resume")


class Client:
    """As much of a responder as a relay touches; it stalls on each write."""

    def __init__(self) -> None:
        self.started = self.finished = self.is_stalled = self.is_disconnected = False
        self.on_stall = self.on_resume = self.on_disconnect = None

    def start_stream(self, status: int, headers: object) -> None:
        self.started = True

    def _written(self) -> None:
        if self.on_stall is not None:
            self.on_stall()

    def write(self, data: bytes) -> None:
        self._written()

    def send(self, status: int, headers: object, body: bytes) -> None:
        self.started = True
        self._written()
        self.finished = True

    def end(self, data: bytes = b"") -> None:
        self._written()
        self.finished = True


@pytest.mark.interpreted  # with a stand-in for a responder
async def test_client_that_left_before_its_request_began_is_served_by_nobody() -> None:
    client = Client()
    client.is_disconnected = True
    request = HttpRequest("POST", b"/v1/completions", "1.1")
    request.body = b'{"prompt":"x","stream":true}'
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        for path in ("/v1/completions", "/v1/embeddings"):
            await router.inference.serve(request, client, ROUTES[path])  # type: ignore[arg-type]
            assert newest(router)["outcome"] == "cancelled"
        assert p.seen == d.seen == []
        assert router.inference.num_active == 0
        assert counted(router, "client_disconnects_total", stage="received") == 2


class Owner:
    """As much of a request as a relay tells of its answer."""

    def __init__(self, client: Client) -> None:
        self.responder = client
        self.receipt = Receipt("i", "/r", 0.0)
        self.life = Life("i", Fleet(["http://p:1"], ["http://d:1"], FleetOptions()), LifeOptions(), path="pd")
        self.api = COMPLETIONS
        self.heard: list[str] = []

    def first_byte(self) -> None:
        self.heard.append("first byte")

    def ended(self, *, is_complete: bool, has_error: bool, is_json: bool = True) -> None:
        self.heard.append("ended" if is_complete and not has_error else "failed")


@pytest.mark.interpreted  # with a stand-in for a connection
@pytest.mark.parametrize("is_framed", [False, True], ids=["done only", "framed"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_nothing_is_done_to_the_connection_after_the_answer(is_framed: bool, stream: bool) -> None:
    connection, client = Connection(), Client()
    owner = Owner(client)
    relay = Relay(owner, connection, None)  # type: ignore[arg-type]
    relay.start([])
    content_type = b"text/event-stream" if stream else b"application/json"
    relay.on_head(200, [(b"content-type", content_type)])
    relay.on_body(b"data: [DONE]\n\n")
    is_alone = stream and not is_framed
    if is_alone:
        relay.on_read_end()
    else:
        relay.on_end()
    assert client.finished
    assert owner.heard == (["first byte", "ended"] if stream else ["ended"])
    relay.cancel()  # a client that leaves at this moment, or a deadline
    assert connection.done == (["start", "finish_alone"] if is_alone else ["start"])
    assert (client.on_stall, client.on_resume) == (None, None)
