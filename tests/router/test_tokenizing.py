"""Asking engines for token ids: the memory, shared questions, late answers, failures, limits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from antiphon.router.tokenizing import Tokenizing, TokenizingOptions
from antiphon.routing.endpoint import Endpoint
from antiphon.transport.http.client import HttpPool
from antiphon.transport.http.strand import Strand
from tests.router.kv_engines import until
from tests.router.scripted import ScriptedEngine, Seen, Wire

PATIENT = {"wait_s": 5.0, "timeout_s": 5.0}


class Asking:
    """One engine that makes a token of each byte of its question, and what asks it."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(self._script)
        self.status = 200
        self.body: bytes | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.tokenizing: Tokenizing
        self.endpoint: Endpoint

    async def _script(self, seen: Seen, wire: Wire) -> None:
        assert seen.path == "/tokenize"
        await self.gate.wait()
        wire.whole(self.body if self.body is not None else answer(seen.body), self.status)

    async def ask(self, question: bytes = b"abc") -> list[int] | None:
        tokens = await self.tokenizing.token_ids(self.endpoint, question)
        self.tokenizing.validate()
        return None if tokens is None else list(tokens)

    def count(self, name: str) -> int:
        return self.tokenizing.statistics()[name]


def answer(question: bytes) -> bytes:
    return json.dumps({"count": len(question), "max_model_len": 100, "tokens": list(question)}).encode()


@asynccontextmanager
async def asking(**options: Any) -> AsyncIterator[Asking]:
    world = Asking()
    server = await asyncio.start_server(world.engine.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    world.endpoint = Endpoint(f"http://127.0.0.1:{port}", "prefill")
    pool = HttpPool("127.0.0.1", port)
    pools = {world.endpoint: pool}
    fields = [(b"authorization", b"Bearer worker")]
    world.tokenizing = Tokenizing(pools.__getitem__, TokenizingOptions(**(PATIENT | options)), fields)
    try:
        yield world
    finally:
        world.tokenizing.close()
        pool.close()
        server.close()
        await server.wait_closed()


async def test_an_answer_is_remembered() -> None:
    async with asking() as world:
        assert await world.ask() == [97, 98, 99]
        assert await world.ask() == [97, 98, 99]
        assert len(world.engine.seen) == 1
        assert b"authorization: Bearer worker" in world.engine.heads[0]
        assert (world.count("asked"), world.count("hits"), world.count("late")) == (1, 1, 0)


async def test_one_question_is_asked_once_at_a_time() -> None:
    async with asking() as world:
        world.gate.clear()
        tasks = [asyncio.create_task(world.ask()) for _ in range(5)]
        await until(lambda: world.count("shared") == 4, "four share the question of the first")
        world.gate.set()
        assert await asyncio.gather(*tasks) == [[97, 98, 99]] * 5
        assert len(world.engine.seen) == 1


async def test_a_late_answer_is_of_use_to_the_next_request() -> None:
    async with asking(wait_s=0.02) as world:
        world.gate.clear()
        assert await world.ask() is None
        assert world.count("in_flight") == 1
        world.gate.set()
        await until(lambda: not world.count("in_flight"), "the answer has come")
        assert await world.ask() == [97, 98, 99]
        assert (world.count("late"), world.count("failed")) == (1, 0)


async def test_a_request_that_is_no_task_waits_too_and_may_leave() -> None:
    async with asking() as world:
        world.gate.clear()
        found: list[object] = []

        async def request() -> None:
            found.append(await world.ask())

        staying, leaving = Strand(request()), Strand(request())
        staying.step()
        leaving.step()
        leaving.cancel()
        world.gate.set()
        await until(lambda: found, "the one that stayed has its tokens")
        assert found == [[97, 98, 99]]


async def test_an_engine_that_fails_is_left_alone_for_a_while() -> None:
    async with asking(pause_s=0.05) as world:
        for status in (500, 503, 404, 401, 429):
            world.status = status
            assert await world.ask(b"%d" % status) is None
            assert await world.ask(b"x%d" % status) is None
            await until(lambda: world.tokenizing._may_ask(world.endpoint, b"x"), "the pause is over")
        assert world.count("failed") == world.count("not_asked") == len(world.engine.seen) == 5
        world.status = 200
        for body in (b"", b"{}", b'{"tokens":[-1]}'):
            world.body = body
            assert await world.ask() is None
            await until(lambda: world.tokenizing._may_ask(world.endpoint, b"x"), "the pause is over")
        world.body = None
        assert await world.ask() == [97, 98, 99]


async def test_a_question_that_is_refused_is_not_asked_again_and_others_are() -> None:
    async with asking() as world:
        world.status = 400
        assert await world.ask(b"bad") is None
        world.status = 200
        assert await world.ask(b"bad") is None
        assert await world.ask(b"good") == list(b"good")
        assert len(world.engine.seen) == 2
        assert world.count("failed") == 0


async def test_an_engine_that_never_answers_is_given_up() -> None:
    async with asking(wait_s=0.01, timeout_s=0.05) as world:
        world.gate.clear()
        assert await world.ask() is None
        await until(lambda: world.count("failed") == 1, "it is given up")
        assert world.count("in_flight") == 0
        world.gate.set()


async def test_an_engine_that_is_gone_or_refuses_connections_is_a_miss() -> None:
    async with asking() as world:
        gone = Endpoint("http://127.0.0.1:1", "prefill")
        assert await world.tokenizing.token_ids(gone, b"x") is None
        assert world.count("failed") == 1


async def test_questions_at_once_and_their_length_are_bounded() -> None:
    async with asking(in_flight_max=2, question_max_bytes=10) as world:
        assert await world.ask(bytes(11)) is None
        world.gate.clear()
        tasks = [asyncio.create_task(world.ask(b"%d" % number)) for number in range(3)]
        await until(lambda: world.count("not_asked") == 2, "the third is not asked")
        world.gate.set()
        assert await asyncio.gather(*tasks) == [[48], [49], None]


async def test_the_memory_is_bounded_in_bytes() -> None:
    async with asking(cache_max_bytes=600) as world:
        for number in range(5):
            assert await world.ask(b"%d" % number) == [48 + number]
        assert world.count("bytes") <= 600
        assert await world.ask(bytes(100)) == [0] * 100
        assert await world.ask(b"4") == [52]
        assert world.count("hits") == 1


async def test_closing_leaves_nobody_waiting() -> None:
    async with asking() as world:
        world.gate.clear()
        task = asyncio.create_task(world.ask())
        await until(lambda: world.engine.seen, "it was asked")
        world.tokenizing.close()
        assert await asyncio.wait_for(task, 5) is None
        world.gate.set()
