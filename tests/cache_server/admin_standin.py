"""A cache server for the tests of the admin side: the real cache and arena behind a unix socket, and planted faults.

It serves calls one at a time in the test's event loop. ``faults`` says, by the name of a call, what happens instead of
the true answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.cache import events
from antiphon.cache.effects import Effect, Refused, Reply, Reserved
from antiphon.cache.events import ConnectionId, EngineId
from antiphon.cache.listing import ChunkPage
from antiphon.cache.log import LogPage
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.statistics import Statistics
from antiphon.cache_server.metrics import CallTallies
from antiphon.cache_server.reports import Reports
from antiphon.cache_server.translate import answer_of, event_of
from antiphon.cache_server.views import EngineView, LeaseView, Population, ProcessView, ReportPage, TokenTotals
from antiphon.cache_server.waiting import Waiters
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import cache as wire
from antiphon.storage.arena import HEADER_BYTES, ArenaOwner

PAGE = 4096
CHUNK_SIZE_TOKENS = 256


class Hang(Exception):
    """No answer."""


class HangUp(Exception):
    """The connection is closed instead of an answer."""


Fault = Callable[[wire.Answered], wire.Answered | bytes]
"""Gets the true answer, returns another one, or bytes of no frame; or raises one of the above."""


class StandIn:
    """One server with an arena of ``num_pages``."""

    def __init__(self, folder: Path, num_pages: int = 16, usable_pages: int | None = None) -> None:
        self.spec = CacheServerSpec(l1_size_gb=0.001, chunk_size=CHUNK_SIZE_TOKENS, eviction_policy="LRU")
        self.instance = "stand-in"
        self.incarnation = "abcd1234"
        self.started_at = time.time()
        self.socket_path = str(folder / "stand-in.sock")
        self.call_counts: Counter[tuple[str, str]] = Counter()
        self.tallies = CallTallies()
        self.faults: dict[str, Fault] = {}
        self.calls: list[str] = []
        self.num_connections = 0
        self.loops = {"calls": True, "ticks": True}
        self.population_error: str | None = None
        usable = None if usable_pages is None else usable_pages * PAGE
        self.cache = Cache(CacheOptions(arena_bytes=num_pages * PAGE, usable_bytes=usable), first_id=7)
        self.reports = Reports()
        self._waiters = Waiters(lambda: self.cache.statistics().next_event_sequence)
        self._arena = ArenaOwner.create(num_pages * PAGE, self.instance, self.incarnation)
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.socket_path)
        self._listener.listen(8)
        self._spawn(self._accept())

    # ---- what the admin side asks --------------------------------------------------------------------------------

    @property
    def token_totals(self) -> TokenTotals:
        return self.reports.totals

    @property
    def peers(self) -> dict[str, object] | None:
        return None

    @property
    def population(self) -> Population:
        statistics = self.cache.statistics()
        return Population(statistics.usable_bytes, statistics.arena_bytes, self.population_error)

    def statistics(self) -> Statistics:
        return self.cache.statistics()

    def engines(self) -> list[EngineView]:
        books = self.cache._books
        return [
            EngineView(
                each.id.name,
                each.id.incarnation,
                each.model,
                tuple(ProcessView("worker-0", 1, "passed", "") for _ in each.connections),
                each.leased_bytes,
            )
            for each in books.connections.engines.values()
        ]

    def tiers(self) -> list[object]:
        return []

    @property
    def handoffs(self) -> Counter[str]:
        return Counter(here=1)

    def leases(self) -> list[LeaseView]:
        books = self.cache._books
        return [
            LeaseView(
                each.id,
                each.engine.id.name,
                each.engine.id.incarnation,
                each.request,
                each.state.value,
                time.monotonic() - each.began_s,
                each.num_bytes,
                len(each.chunks),
            )
            for each in books.leases.active.values()
        ]

    def events_since(self, sequence: int, num_events_max: int) -> LogPage:
        return self.cache.events_since(sequence, num_events_max)

    def chunks_after(self, generation: int, num_chunks_max: int) -> ChunkPage:
        return self.cache.chunks_after(generation, num_chunks_max)

    def reports_since(self, sequence: int, num_reports_max: int) -> ReportPage:
        return self.reports.since(sequence, num_reports_max)

    async def wait_events(self, sequence: int, timeout_s: float) -> bool:
        return await self._waiters.wait(sequence, timeout_s)

    async def wait_reports(self, sequence: int, timeout_s: float) -> bool:
        return await self.reports.waiters.wait(sequence, timeout_s)

    @property
    def now_s(self) -> float:
        return time.monotonic()

    def control(self, event: events.Clear | events.Pin | events.Unpin | events.SetQuota) -> Reply:
        reply = self.step(event)[0]
        if isinstance(reply, Refused):
            raise reply.error
        return reply  # type: ignore[return-value]

    def loops_alive(self) -> dict[str, bool]:
        return self.loops

    # ---- an engine, without its connection -----------------------------------------------------------------------

    def step(self, event: events.Event) -> list[Effect]:
        effects = self.cache.step(event, time.monotonic())
        for notice in effects[1:]:
            self.tallies.noticed(notice)  # type: ignore[arg-type]
        self._waiters.wake()
        return effects

    def attach_engine(self, name: str = "P", connection: int = 100) -> ConnectionId:
        made = ConnectionId(connection)
        layout = ChunkLayout(1, PAGE)
        effects = self.step(events.Attach(made, EngineId(name, "life"), "m", CHUNK_SIZE_TOKENS, layout, (0,)))
        assert type(effects[0]).__name__ == "Attached", effects
        return made

    def store(self, connection: ConnectionId, *keys: int, tenant: str = "") -> None:
        """Stores chunks, one after the other of one sequence, a call for each."""
        parent = None
        for key in keys:
            names = (key_of(key),)
            reply = self.step(events.Reserve(connection, namespace_of(tenant), tenant, parent, names))[0]
            assert isinstance(reply, Reserved), reply
            self.tallies.verdicts.update(verdict.value for verdict in reply.verdicts)
            self.step(events.Commit(connection, tuple(grant.region for grant in reply.grants)))
            parent = names[0]

    def lookup(self, connection: ConnectionId, *keys: int, tenant: str = "", request: str = "r") -> Any:
        names = tuple(key_of(key) for key in keys)
        return self.step(events.Lookup(connection, request, namespace_of(tenant), tenant, names))[0]

    # ---- the socket ----------------------------------------------------------------------------------------------

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            sock, _ = await loop.sock_accept(self._listener)
            self.num_connections += 1
            self._spawn(self._serve(sock, ConnectionId(self.num_connections)))

    async def _serve(self, sock: socket.socket, connection: ConnectionId) -> None:
        loop = asyncio.get_running_loop()
        is_attached = False
        received = b""
        try:
            while data := await loop.sock_recv(sock, 65_536):
                received += data
                while len(received) >= 4 and len(received) >= (end := 4 + wire.frame_length(received[:4])):
                    call = wire.decode_call(received[4:end])
                    received = received[end:]
                    answer, fds = self._answer(call.body, connection)
                    is_attached = is_attached or isinstance(answer, wire.Attached)
                    fault = self.faults.get(type(call.body).__name__)
                    wrong = fault(answer) if fault is not None else answer
                    sent = wrong if isinstance(wrong, bytes) else wire.frame(wire.Answer(call.id, wrong))
                    if fds:
                        socket.send_fds(sock, [sent], fds)
                    else:
                        await loop.sock_sendall(sock, sent)
        except Hang:
            await loop.sock_recv(sock, 1)  # until the other end has had enough
        except (HangUp, OSError):
            pass
        finally:
            sock.close()
            if is_attached:
                self.step(events.Detach(connection))

    def _answer(self, body: wire.Body, connection: ConnectionId) -> tuple[wire.Answered, list[int]]:
        name = type(body).__name__
        self.calls.append(name)
        began_s = time.perf_counter()
        if isinstance(body, wire.Hello):
            arena_bytes = HEADER_BYTES + self._arena.data_bytes
            names = (self.instance, self.incarnation, self.socket_path)
            welcome = wire.Welcome(wire.PROTOCOL_VERSION, *names, CHUNK_SIZE_TOKENS, arena_bytes, HEADER_BYTES)
            self.call_counts[name, "ok"] += 1
            return welcome, [self._arena.fd]
        assert not isinstance(body, wire.Report | wire.EngineNote | wire.Ping | wire.AskProcesses), body
        reply = self.step(event_of(body, connection, 1))[0]
        answer = answer_of(reply)  # type: ignore[arg-type]
        if isinstance(reply, Reserved):
            self.tallies.verdicts.update(verdict.value for verdict in reply.verdicts)
        self.call_counts[name, answer.code if isinstance(answer, wire.Failure) else "ok"] += 1
        self.tallies.answered(name, time.perf_counter() - began_s)
        return answer, []

    def corrupt(self, offset_bytes: int) -> None:
        """Flips a bit of the arena."""
        self._arena.mapping.view(offset_bytes, 1)[0] ^= 1

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        self._arena.close()


@contextlib.asynccontextmanager
async def standing_in(folder: Path, num_pages: int = 16, usable_pages: int | None = None) -> AsyncIterator[StandIn]:
    server = StandIn(folder, num_pages, usable_pages)
    try:
        yield server
    finally:
        await server.close()


def key_of(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def namespace_of(tenant: str) -> NamespaceDigest:
    return NamespaceDigest(tenant.encode().ljust(32, b"."))


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for what has no event of its own."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        await asyncio.sleep(0.005)


# ---- asking over HTTP ------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        return self.json["error"]


async def ask(port: int, method: str, target: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Answer:
    """One request on a connection of its own; ``host`` is the port's unless ``headers`` says otherwise."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = {"host": f"127.0.0.1:{port}", "connection": "close", "content-length": str(len(body))} | (headers or {})
    lines = [f"{method} {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    try:
        writer.write("\r\n".join(lines).encode() + body)
        async with asyncio.timeout(20):
            head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    first, *others = head.decode().split("\r\n")
    found = dict(line.lower().split(": ", 1) for line in others)
    return Answer(int(first.split()[1]), found, rest)


async def get(port: int, target: str, **headers: str) -> Answer:
    return await ask(port, "GET", target, headers=headers)


async def post(port: int, target: str, value: object) -> Answer:
    return await ask(port, "POST", target, json.dumps(value).encode(), {"content-type": "application/json"})
