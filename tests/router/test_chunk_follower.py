"""The router's view of a cache server: against what it truly holds under loss, restarts, clears and failing polls, and
with a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from antiphon.cache.effects import Reserved
from antiphon.cache.events import Attach, Clear, Commit, ConnectionId, EngineId, Reserve
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.states import ChunkState
from antiphon.cache_server import status
from antiphon.cache_server.admin import AdminServer, start_admin
from antiphon.cache_server.admin_poll import LongPolls, NumberedLog, Page
from antiphon.cache_server.admin_request import PollQuery
from antiphon.cache_server.server import CacheServer
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.core.chunks import ChunkKey, chunk_keys
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import ProtocolError, UpstreamError
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import cache as wire
from antiphon.router import chunk_follower, log_follower
from antiphon.router.chunk_follower import ChunkFollower
from antiphon.routing.chunk_index import ChunkIndex, scope_of
from tests.cache_server.admin_process import MIB, engine_at
from tests.cache_server.admin_standin import get, until
from tests.router.scripted import engine, routing, streams

NAMESPACE = NamespaceDigest(b"n" * 32)
PAGE = 4096
SIZE = 4
URL = "http://127.0.0.1:1"


def tokens_of(number: int, size: int = SIZE) -> list[int]:
    return [number] * size


def key_of(number: int, size: int = SIZE) -> ChunkKey:
    return chunk_keys(NAMESPACE, tokens_of(number, size), size)[0]


class Server:
    """The cache and the answers of a real server, without its sockets: a ring of few events, and small pages."""

    def __init__(self) -> None:
        self.num_lives = 0
        self.spec = SimpleNamespace(chunk_size=SIZE)
        self.restart()

    def restart(self) -> None:
        self.num_lives += 1
        self.incarnation = f"life-{self.num_lives}"
        options = CacheOptions(arena_bytes=7 * PAGE, chunk_size_tokens=SIZE, event_log_max=6)
        self.cache = Cache(options, first_id=1 << 30)
        self.cache.step(Attach(ConnectionId(1), EngineId("e", "i"), "m", SIZE, ChunkLayout(1, PAGE), (0,)), 0.0)
        self.polls = LongPolls(self.incarnation)

    def store(self, number: int) -> None:
        reply = self.cache.step(Reserve(ConnectionId(1), NAMESPACE, "t", None, (key_of(number),)), 0.0)[0]
        assert isinstance(reply, Reserved)
        self.cache.step(Commit(ConnectionId(1), tuple(grant.region for grant in reply.grants)), 0.0)

    def holds(self, number: int) -> bool:
        chunk = self.cache._books.index.chunks.get(key_of(number))
        return chunk is not None and chunk.state is ChunkState.READABLE

    def chunks_after(self, after: int, num_max: int) -> Any:
        assert num_max == status.CHUNKS_MAX
        return self.cache.chunks_after(after, 3)

    def _since(self, sequence: int, num_max: int) -> Page[Any]:
        page = self.cache.events_since(sequence, min(num_max, 4))
        return Page(page.events, page.next_sequence, page.num_lost)

    async def answer(self, target: str) -> bytes:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path == "/chunks":
            return json.dumps(status.chunks_of(self, int(query["after"]))).encode()  # type: ignore[arg-type]
        assert parts.path == "/events"
        log = NumberedLog(self._since, None, status.event_of)  # type: ignore[arg-type]
        poll = PollQuery(int(query["since"]), 0.0, query.get("incarnation"))
        responder = SimpleNamespace(is_disconnected=False)
        return json.dumps(await self.polls.answer(log, poll, responder)).encode()  # type: ignore[arg-type]


Happening = tuple[str, int]


class Follower(ChunkFollower):
    """Follows a ``Server``; before each answer something happens to it."""

    def __init__(self, server: Server, happenings: list[list[Happening]]) -> None:
        self.index = ChunkIndex()
        super().__init__(URL, 1.0, self.index)
        self.server = server
        self.happenings = happenings
        self.num_asked = 0

    async def _get(self, target: str, timeout_s: float) -> bytes:
        self.num_asked += 1
        garbled = False
        for kind, number in self.happenings.pop(0) if self.happenings else []:
            if kind == "store":
                self.server.store(number)
            elif kind == "clear":
                self.server.cache.step(Clear(), 0.0)
            elif kind == "restart":
                self.server.restart()
            elif kind == "gone":
                raise UpstreamError("no connection")
            else:
                garbled = True
        body = await self.server.answer(target)
        return body.replace(b'"kind": "removed"', b'"kind": 1') if garbled else body

    async def turn(self) -> None:
        """As ``run`` does it, once."""
        try:
            await self._prepare()
            await self._poll()
        except (UpstreamError, ProtocolError) as error:
            self._set_down(error.message)
        self.index.validate()

    def holds(self, number: int) -> bool:
        return self.index.num_tokens_held(self.url, NAMESPACE, tokens_of(number)) == SIZE


HAPPENINGS = st.lists(
    st.lists(
        st.tuples(
            st.sampled_from(["store"] * 8 + ["clear", "restart", "gone", "garbled"]),
            st.integers(0, 9),
        ),
        max_size=12,
    ),
    max_size=12,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(HAPPENINGS)
def test_it_is_right_again_once_nothing_happens(
    monkeypatch: pytest.MonkeyPatch, happenings: list[list[Happening]]
) -> None:
    monkeypatch.setattr(chunk_follower, "LISTING_PAUSE_S", 0.0)

    async def follow() -> None:
        server = Server()
        follower = Follower(server, happenings)
        while follower.happenings:
            await follower.turn()
        for _ in range(6):  # a poll that finds what it missed, a listing of at most 3 pages, and polls for what follows
            await follower.turn()
        assert follower.is_up
        assert [follower.holds(number) for number in range(10)] == [server.holds(number) for number in range(10)]
        assert follower.incarnation == server.incarnation
        assert follower.status()["num_chunks"] == sum(server.holds(number) for number in range(10))

    asyncio.run(follow())


async def test_a_life_costs_one_listing_and_so_does_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_follower, "LISTING_PAUSE_S", 0.0)
    server = Server()
    for number in range(5):
        server.store(number)
    follower = Follower(server, [])
    await follower.turn()
    assert (follower.num_listings, follower.num_entries, follower.num_lives) == (1, 0, 1)
    assert all(follower.holds(number) for number in range(5))
    server.store(5)
    await follower.turn()
    assert follower.holds(5)
    for number in range(6, 14):  # more than the ring keeps
        server.store(number)
    await follower.turn()
    assert (follower.num_listings, follower.num_lost > 0) == (1, True)
    assert follower.status()["is_listed"] is False
    assert not any(map(follower.holds, range(14)))
    await follower.turn()
    assert (follower.num_listings, follower.num_lives) == (2, 1)
    assert [follower.holds(number) for number in range(14)] == [number > 6 for number in range(14)]


async def test_while_it_does_not_answer_it_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_follower, "LISTING_PAUSE_S", 0.0)
    server = Server()
    server.store(1)
    follower = Follower(server, [])
    await follower.turn()
    assert follower.holds(1)
    follower.happenings = [[("gone", 0)]]
    await follower.turn()
    assert (follower.is_up, follower.holds(1)) == (False, False)
    await follower.turn()  # an answer without an event
    assert (follower.is_up, follower.holds(1), follower.num_listings) == (True, True, 1)


async def test_listings_keep_their_distance() -> None:
    server = Server()
    follower = Follower(server, [])
    loop = asyncio.get_running_loop()
    await follower.turn()
    began_s = loop.time()
    server.restart()
    await follower.turn()
    await follower.turn()
    assert follower.num_listings == 2
    assert loop.time() - began_s > 0.8 * chunk_follower.LISTING_PAUSE_S


# ---- with a real server ----------------------------------------------------------------------------------------------


@dataclass
class Served:
    server: CacheServer
    admin: AdminServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.admin.port}"

    async def close(self) -> None:
        await self.admin.close()
        await self.server.close()


async def started(folder: Path, port: int = 0) -> Served:
    spec = CacheServerSpec(port=0, http_port=0, l1_size_gb=0.0042, instance_id="t", runtime_dir=str(folder / "run"))
    server = await CacheServer.start(spec)
    admin = await start_admin(server, "127.0.0.1", port)
    await until(lambda: server.population.is_complete)
    return Served(server, admin)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    made = await started(tmp_path)
    yield made
    await made.close()


async def store(served: Served, *numbers: int) -> None:
    """Chunks of 256 tokens, and a report of a request that used them."""
    async with engine_at(served.server.socket_path, MIB) as engine:
        for number in numbers:
            call = wire.Reserve(NAMESPACE, "t", None, key_of(number, 256))
            reserved = await engine.call(call, wire.Reserved)
            await engine.call(wire.Commit(tuple(grant.region for grant in reserved.grants)), wire.Committed)
        await engine.call(wire.Report("r", "P", "life", 256, 0, 0, 0, 256, 0, "finished", NAMESPACE), wire.Noted)


async def test_a_server_is_followed_once_however_often_it_is_named() -> None:
    named = ["http://127.0.0.1:9", "http://127.0.0.1:9/"]
    async with engine(streams) as d, routing([], [d], cache_servers=named, local_max_tokens=1) as router:
        assert router.where is not None
        assert router.spec.cache_servers == named[:1] * 2
        followed: Any = router.where.statistics()["cache_servers"]
        assert [each["url"] for each in (*followed, *router.reports.status())] == named[:1] * 2


async def test_with_a_real_server(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_follower, "BACKOFF_MAX_S", 0.1)
    index = ChunkIndex()
    await store(served, 1)
    (report,) = (await get(served.admin.port, "/reports")).json["events"]
    scope = scope_of(b"m", b"t")
    index.learn(scope, "d:1", served.url, bytes.fromhex(report["namespace"]))

    def held(number: int) -> int:
        return index.held_by_engines(scope, tokens_of(number, 300)).get("d:1", 0)

    follower = ChunkFollower(served.url, 1.0, index)
    following = asyncio.create_task(follower.run())
    try:
        await until(lambda: held(1) == 256)
        await store(served, 2)
        await until(lambda: held(2) == 256)
        assert (await get(served.admin.port, "/healthz")).status == 200  # the probe's chunk is nobody's
        served.server.control(Clear())
        await until(lambda: held(1) == held(2) == 0)
        await store(served, 3)
        await until(lambda: held(3) == 256)
        assert follower.status()["num_chunks"] == 1
        assert (follower.num_listings, follower.num_invalid, follower.num_lost) == (1, 0, 0)
        await served.close()
        await until(lambda: held(3) == 0)
        again = await started(tmp_path, served.admin.port)
        served.server, served.admin = again.server, again.admin
        await store(served, 4)
        await until(lambda: held(4) == 256)
        assert (held(3), follower.num_lives) == (0, 2)
    finally:
        following.cancel()
        await asyncio.wait([following])


async def test_pages_of_the_admin_route(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "CHUNKS_MAX", 2)
    await store(served, 1, 2, 3)
    first = (await get(served.admin.port, "/chunks")).json
    assert (first["incarnation"], first["next"], first["chunk_size_tokens"]) == (served.server.incarnation, 4, 256)
    (group,) = first["chunks"]
    assert group == {
        "namespace": NAMESPACE.hex(),
        "model": "m",
        "tenant": "t",
        "keys": key_of(1, 256).hex() + key_of(2, 256).hex(),
    }
    last = (await get(served.admin.port, f"/chunks?after={first['after']}")).json
    assert ([each["keys"] for each in last["chunks"]], last["after"]) == ([key_of(3, 256).hex()], None)
    for wrong in ("after=-1", "after=x", f"after={2**63}", "since=1"):
        refused = await get(served.admin.port, f"/chunks?{wrong}")
        assert (refused.status, refused.error["param"]) == (400, wrong.partition("=")[0])
