"""``/v1/models`` before engines that are slow, that hang and that refuse: one that answers is enough, soon."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

from antiphon.router.app import Router
from antiphon.router.models import ASKED_MAX
from tests.router.scripted import Reply, ScriptedEngine, Seen, Wire, connected, engine, routing, until

LIST = b'{"object":"list","data":[{"id":"m"}]}'

Script = Callable[[Seen, Wire], Awaitable[None]]


async def hangs(_: Seen, wire: Wire) -> None:
    """It takes the request and says nothing."""
    await wire.until_closed()


async def lists(_: Seen, wire: Wire) -> None:
    """It knows its models."""
    wire.whole(LIST)


def refuses(status: int) -> Script:
    """A script that answers with an error."""

    async def answer(_: Seen, wire: Wire) -> None:
        wire.whole(b'{"error":%d}' % status, status=status)

    return answer


@contextlib.asynccontextmanager
async def decoding(*scripts: Script, timeout_s: float = 30.0) -> AsyncIterator[tuple[Router, list[ScriptedEngine]]]:
    """A router before decode engines with these scripts."""
    async with contextlib.AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(engine(script)) for script in scripts]
        yield await stack.enter_async_context(routing([], engines, health_timeout_s=timeout_s)), engines


async def models_of(router: Router) -> Reply:
    async with connected(router) as client:
        client.get("/v1/models")
        return await client.reply()


async def test_an_engine_that_hangs_delays_nobody() -> None:
    async with decoding(hangs, hangs, lists) as (router, engines):
        async with asyncio.timeout(5.0):  # far less than what one engine is given
            reply = await models_of(router)
        assert (reply.status, reply.body) == (200, LIST)
        # Nobody is asked any more.
        await until(lambda: [each.num_left for each in engines] == [1, 1, 0], "the others are let go of")


async def test_an_engine_that_answers_at_once_is_the_only_one_that_is_asked() -> None:
    async with decoding(lists, lists, lists) as (router, engines):
        assert (await models_of(router)).status == 200
        assert [len(each.seen) for each in engines] == [1, 0, 0]


async def test_all_engines_together_have_the_time_of_one() -> None:
    async with decoding(*[hangs] * (ASKED_MAX + 3), timeout_s=0.5) as (router, engines):
        async with asyncio.timeout(0.5 * ASKED_MAX):
            reply = await models_of(router)
        assert reply.status == 503
        assert json.loads(reply.body)["error"]["type"] == "service_unavailable"
        assert sum(len(each.seen) for each in engines) == ASKED_MAX


async def test_a_list_is_preferred_to_a_refusal() -> None:
    async with decoding(refuses(500), refuses(401), refuses(404), lists) as (router, engines):
        reply = await models_of(router)
        assert (reply.status, reply.body) == (200, LIST)
        assert [len(each.seen) for each in engines] == [1, 1, 1, 1]


async def test_a_refusal_is_the_answer_where_there_is_no_list() -> None:
    async with decoding(refuses(500), refuses(401), refuses(404)) as (router, _):
        reply = await models_of(router)
        assert (reply.status, reply.body) == (401, b'{"error":401}')


async def test_a_client_that_leaves_lets_go_of_the_engines() -> None:
    async with decoding(hangs, hangs) as (router, engines):
        async with connected(router) as client:
            client.get("/v1/models")
            await until(lambda: all(each.seen for each in engines), "both are asked")
        assert await router.stop(0.0) == 1  # the handler that was at work
        await until(lambda: [each.num_left for each in engines] == [1, 1], "both are let go of")
