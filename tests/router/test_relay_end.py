"""The two ends of a request's life as races find them: a client that has left before it began, and a relay that has
ended and must leave its connection alone, since another request may be using it."""

from __future__ import annotations

import asyncio
import time

import pytest

from antiphon.config.router_spec import RouterSpec
from antiphon.observe.receipt import Receipt
from antiphon.router.relay import Relay, RelayTimes
from antiphon.transport.http.message import HttpRequest
from tests.router.scripted import counted, engine, newest, prefills, routing, streams


class Connection:
    """As much of an engine's connection as a relay touches."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: list[str] = []

    def start(self, buffers: object, sink: object, timeout_s: float) -> None:
        self.done.append("start")

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


async def test_client_that_left_before_its_request_began_is_served_by_nobody() -> None:
    client = Client()
    client.is_disconnected = True
    request = HttpRequest("POST", b"/v1/completions", "1.1")
    request.body = b'{"prompt":"x","stream":true}'
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router:
        for may_split in (True, False):
            await router.inference.serve(request, client, may_split=may_split)  # type: ignore[arg-type]
            assert newest(router)["outcome"] == "cancelled"
        assert p.seen == d.seen == []
        assert router.inference.num_active == 0
        assert counted(router, "client_disconnects_total", stage="received") == 2


@pytest.mark.parametrize("late", ["leave", "timer"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_nothing_is_done_to_the_connection_after_the_answer(late: str, stream: bool) -> None:
    connection, client = Connection(), Client()
    spec = RouterSpec(idle_timeout_s=0.001, first_token_timeout_s=0.001)
    relay = Relay(client, connection, RelayTimes(spec), Receipt("i", "/r", 0.0), has_handle=True)  # type: ignore[arg-type]
    relay.start([])
    content_type = b"text/event-stream" if stream else b"application/json"
    relay.on_head(200, [(b"content-type", content_type)])
    relay.on_body(b"data: [DONE]\n\n")
    relay.on_end()
    assert client.finished
    # Before whoever waits for the relay has gone on.
    if late == "leave":
        relay.leave()
    else:
        time.sleep(0.003)  # past the deadline, without letting the loop run
        relay._check()
    await relay
    relay.close()
    assert connection.done == ["start"]
    assert relay.error is None
    assert (client.on_stall, client.on_resume) == (None, None)
