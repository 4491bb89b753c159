"""Simulated engines in the test's own loop, which tell a router there what KV they hold."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
from collections.abc import AsyncIterator
from typing import Any

from antiphon.config.kv_events import topic_of
from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.engine.simulated.kv_events import KvEventsOptions
from antiphon.engine.simulated.machine import EngineOptions
from antiphon.engine.simulated.server import ServerOptions, SimulatedServer
from antiphon.router.app import Router
from tests.router.scripted import Reply, connected, routing, until
from tests.router.served import idle, post
from tests.router.stack import quiet_ports

FAST = SimulatedSpec(
    prefill_overhead_ms=0,
    prefill_tokens_per_s=1e9,
    decode_token_ms=0,
    transfer_gb_per_s=10_000,
    block_size_tokens=4,
    bytes_per_token=4,
)


class Simulated:
    """A simulated engine in the test's own loop, of many lives at one port."""

    def __init__(self, role: str, events_port: int) -> None:
        self.role = role
        self._events_port = events_port
        self.port = self._replay_port = 0
        self.server: SimulatedServer | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def live(self) -> SimulatedServer:
        assert self.server is not None
        return self.server

    @property
    def num_cached(self) -> int:
        """Blocks that it could use again."""
        return len(self.live.engine.kv._cached)

    async def start(self) -> None:
        sock = socket.create_server(("127.0.0.1", self.port), reuse_port=True)
        self.port = sock.getsockname()[1]
        if not self._replay_port:
            self._replay_port = quiet_ports(1)
        topic = topic_of(self.url, self._replay_port)
        told = KvEventsOptions(
            f"tcp://127.0.0.1:{self._events_port}", topic, f"tcp://127.0.0.1:{self._replay_port}", 10_000
        )
        options = ServerOptions(
            engine=EngineOptions(FAST, "m", 256, "fail"),
            engine_id=f"{self.role}-{secrets.token_hex(4)}",
            role=self.role,
            kv_events=told,
        )
        self.server = server = SimulatedServer(options)
        server.side_channel_port = await server.side_channel.listen("127.0.0.1", 0)
        sock.setblocking(False)
        await server.http.listen("", 0, sock=sock)

    async def stop(self) -> None:
        if self.server is not None:
            self.server.close()
            await self.server.http.drain(0.0)
            await self.server.side_channel.drain(0.0)
            self.server = None

    def forget_in_silence(self) -> None:
        """The cache is emptied, and nobody is told."""
        publisher = self.live.publisher
        assert publisher is not None
        assert self.live.engine.kv.reset_cache()
        publisher._log.take()


class Fleet:
    """A router that is told what simulated engines hold."""

    def __init__(self, router: Router, prefill: list[Simulated], decode: list[Simulated]) -> None:
        self.router = router
        self.prefill = prefill
        self.decode = decode

    def blocks(self, engine: Simulated) -> int:
        endpoint = next(each for each in self.router.fleet.all() if each.url == engine.url)
        return self.router.fleet.kv_index.num_blocks(endpoint)

    async def complete(self, prompt: Any, key: str | None = None, **fields: Any) -> tuple[Reply, str]:
        """A completion that is not streamed, and its text."""
        async with connected(self.router) as client:
            post(client, {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0} | fields, key)
            reply = await client.reply()
        assert reply.status == 200, reply.body
        await idle(self.router)
        return reply, json.loads(reply.body)["choices"][0]["text"]

    async def heard(self, engine: Simulated) -> None:
        """Everything that it has said has arrived: what it holds is what the router takes it to hold."""
        await until(lambda: self.blocks(engine) == engine.num_cached, "its events are here")


@contextlib.asynccontextmanager
async def told(num_prefill: int = 1, num_decode: int = 1, **knobs: Any) -> AsyncIterator[Fleet]:
    events_port = quiet_ports(1)
    pools = [Simulated("prefill", events_port) for _ in range(num_prefill)]
    decode = [Simulated("decode", events_port) for _ in range(num_decode)]
    values: dict[str, Any] = {"policy": "kv_aware", "kv_events_port": events_port, "tokenize_timeout_s": 5.0} | knobs
    try:
        for each in pools + decode:
            await each.start()
        async with routing(pools, decode, **values) as router:  # type: ignore[arg-type] - their URLs are all that counts
            fleet = Fleet(router, pools, decode)
            for each in pools + decode:
                await speak_until_heard(fleet, each)
            yield fleet
    finally:
        for each in pools + decode:
            await each.stop()


async def speak_until_heard(fleet: Fleet, engine: Simulated) -> None:
    """Let an engine say something until everything that it holds is known: what it says before its connection is made
    is lost, and made good with what it says next."""
    for turn in range(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", engine.port)
        body = json.dumps({"prompt": [1000 + turn, engine.port, 1, 1, 1], "max_tokens": 1}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        writer.write(head.encode() + b"content-type: application/json\r\nconnection: close\r\n\r\n" + body)
        await reader.read()
        writer.close()
        with contextlib.suppress(AssertionError):
            await until(lambda: fleet.blocks(engine) == engine.num_cached, "it is heard", 1.0)
            return
    raise AssertionError("it is never heard")
