"""A listener for KV events in the test's own loop, and a publisher whose every message is chosen."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from antiphon.router.kv_events import KvEvents, KvEventsOptions, KvSource
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.kv_index import IndexOptions, KvIndex

WAIT_S = 10.0


async def until(holds: Callable[[], object], what: str, timeout_s: float = WAIT_S) -> None:
    """Poll until it is true."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        await asyncio.sleep(0.005)


class Listener:
    """Hears the topics of ``sources``."""

    def __init__(self, **options: Any) -> None:
        self.sources: dict[str, KvSource] = {}
        self.index = KvIndex(IndexOptions())
        self.events = KvEvents(self.index, self.sources.get, KvEventsOptions(tick_s=0.02, **options))

    def expect(self, topic: str, replay_port: int = 0) -> Endpoint:
        endpoint = Endpoint(f"http://{topic}:1", "prefill")
        self.sources[topic] = KvSource(endpoint, "127.0.0.1", replay_port)
        return endpoint

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.events.ports[0]}"

    def held(self, endpoint: Endpoint, tokens: list[int]) -> int:
        self.index.validate()
        return self.index.match([*tokens, 0], [endpoint])[0]

    def count(self, name: str) -> Any:
        return self.events.statistics()[name]


class Wire:
    """Sends exactly what it is told to, and answers replays with what it is told it has."""

    def __init__(self, url: str) -> None:
        self.context = zmq.asyncio.Context()
        self.pub = self.context.socket(zmq.PUB)
        self.pub.connect(url)
        self.router = self.context.socket(zmq.ROUTER)
        self.replay_port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.said: list[tuple[int, bytes]] = []
        self.num_asked = 0
        self._task: asyncio.Task[None] | None = None

    def answer_replays(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._answer())

    async def send(self, *frames: bytes) -> None:
        await self.pub.send_multipart(list(frames))

    async def say(
        self, topic: str, number: int, events: list[Any], *, is_lost: bool = False, stamp_s: float = 0
    ) -> None:
        payload = msgspec.msgpack.encode([stamp_s or time.time(), events, 0])
        self.said.append((number, payload))
        if not is_lost:
            await self.send(topic.encode(), number.to_bytes(8, "big"), payload)

    async def _answer(self) -> None:
        while True:
            client, _, start = await self.router.recv_multipart()
            self.num_asked += 1
            for number, payload in self.said:
                if number >= int.from_bytes(start, "big"):
                    await self.router.send_multipart([client, b"", b"t", number.to_bytes(8, "big"), payload])
            await self.router.send_multipart([client, b"", b"", b"\xff" * 8, b""])

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self.context.destroy(linger=0)


def stored(hashes: list[int], tokens: list[int], parent: int | None = None, **fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": tokens}
    return (
        event | {"block_size": len(tokens) // len(hashes), "lora_id": None, "medium": "GPU", "lora_name": None} | fields
    )
