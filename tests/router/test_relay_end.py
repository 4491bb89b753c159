"""A relay that has ended leaves its connection alone: another request may be using it."""

from __future__ import annotations

import asyncio

import pytest

from antiphon.config.router_spec import RouterSpec
from antiphon.observe.receipt import Receipt
from antiphon.router.relay import Relay


class Connection:
    """As much of an engine's connection as a relay touches."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.done: list[str] = []

    def start(self, buffers: object, sink: object) -> None:
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
        self.started = self.finished = self.is_stalled = False
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


@pytest.mark.parametrize("late", ["leave", "timer"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_nothing_is_done_to_the_connection_after_the_answer(late: str, stream: bool) -> None:
    connection, client = Connection(), Client()
    spec = RouterSpec(idle_timeout_s=0.001, first_token_timeout_s=0.001)
    relay = Relay(client, connection, spec, Receipt("i", "/r", 0.0), has_handle=True)  # type: ignore[arg-type]
    run = asyncio.create_task(relay.run([]))
    await asyncio.sleep(0)
    content_type = b"text/event-stream" if stream else b"application/json"
    relay.on_head(200, [(b"content-type", content_type)])
    relay.on_body(b"data: [DONE]\n\n")
    relay.on_end()
    assert client.finished
    # Before the task that waits for the relay has run again.
    if late == "leave":
        relay.leave()
    else:
        relay._check()
        await asyncio.sleep(0.01)
    await run
    assert connection.done == ["start"]
    assert relay.error is None
    assert (client.on_stall, client.on_resume) == (None, None)
