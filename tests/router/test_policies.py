"""The policies as a user sets them: both pools independently, each by its own."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.router.scripted import Seen, Wire, ask, engine, prefills, routing, streams


@pytest.mark.parametrize("policy", ["round_robin", "random", "least_load", "power_of_two", "consistent_hash"])
async def test_every_policy_serves(policy: str) -> None:
    async with (
        engine(prefills) as p,
        engine(streams) as d,
        engine(streams) as e,
        routing([p], [d, e], policy=policy) as router,
    ):
        assert [(await ask(router)).status for _ in range(4)] == [200] * 4
        assert len(d.seen) + len(e.seen) == 4


async def test_policies_of_the_pools_are_independent() -> None:
    async with engine(prefills) as p, engine(prefills) as q, engine(streams) as d, engine(streams) as e:
        knobs = {"prefill_policy": "consistent_hash", "decode_policy": "round_robin"}
        async with routing([p, q], [d, e], **knobs) as router:
            replies = [await ask(router, user="one") for _ in range(6)]
            assert len({reply.headers["x-antiphon-prefill"] for reply in replies}) == 1
            assert sorted(Counter(reply.headers["x-antiphon-decode"] for reply in replies).values()) == [3, 3]


async def test_decode_prefills_where_that_is_allowed_and_no_prefill_engine_is_left() -> None:
    async with engine(prefills) as gone:
        pass
    async with engine(streams) as d, routing([gone], [d], prefill_fallback="local") as router:
        reply = await ask(router)
        assert (reply.status, reply.headers["x-antiphon-path"]) == (200, "local")
        assert reply.headers["x-antiphon-reason"] == "prefill_fallback"


@pytest.mark.parametrize("path", ["/tokenize", "/v1/rerank", "/score", "/v1/messages/count_tokens"])
async def test_single_stage_route_goes_to_one_decode_engine_once(path: str) -> None:
    async def answers(_: Seen, wire: Wire) -> None:
        wire.whole(b'{"count":3}')

    async with engine(prefills) as p, engine(answers) as d, engine(answers) as e, routing([p], [d, e]) as router:
        reply = await ask(router, path, stream=False)
        assert (reply.status, reply.body) == (200, b'{"count":3}')
        assert reply.headers["x-antiphon-reason"] == "single_stage"
        (seen,) = [*d.seen, *e.seen]
        assert (seen.path, p.seen) == (path, [])
