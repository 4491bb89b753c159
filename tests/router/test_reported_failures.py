"""What users of other routers have reported, as far as no other test is about it: see ``test_failure_index.py``."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest

from tests.router.failing import (
    CHAT,
    COMPLETIONS,
    Fleet,
    Sight,
    check_answered,
    check_refused,
    event,
    fleet,
    handle_of,
    hangs,
    prefills,
    responds,
)
from tests.router.scripted import DONE, Wire, connected, until


@pytest.mark.parametrize("end", ["silence", "end"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_stream_ends_at_done_though_the_engine_holds_its_connection(path: str, end: str) -> None:
    """The client is told at once, and the engine's slot is free, whether or not the framing ever ends."""

    async def forgets_to_end(sight: Sight, wire: Wire) -> None:
        wire.begin()
        wire.piece(event(sight.path, "one") + DONE)
        await wire.writer.drain()
        if end == "silence":
            await wire.until_closed()
        wire.end()

    async with fleet(1, 1, idle_timeout_s=60.0) as engines:
        engines.decode[0].next = [forgets_to_end]
        async with asyncio.timeout(5):
            reply = await engines.ask(path, stream=True)
            assert reply.body == event(path, "one") + DONE
            await engines.wait_idle()
        assert (await engines.receipt(reply))["outcome"] == "completed"
        check_answered(await engines.ask(path, stream=True), path, stream=True)


async def at_an_engine(engines: Fleet, num: int) -> None:
    """Wait until the decode engines have seen so many requests."""
    await until(lambda: engines.num_sights("decode") >= num, "it is at an engine")


@pytest.mark.parametrize("policy", ["least_load", "power_of_two"])
async def test_new_requests_go_to_the_engine_that_has_less_to_do(policy: str) -> None:
    """By this router's own count, at once: nothing is polled between two requests."""
    async with fleet(1, 2, policy=policy) as engines, contextlib.AsyncExitStack() as held:
        slow, quick = engines.decode
        slow.script = hangs
        for number in range(8):
            client = await held.enter_async_context(connected(engines.router))
            num_quick = len(quick.sights)
            engines.send(client)
            await at_an_engine(engines, number + 1)
            if len(quick.sights) > num_quick:
                check_answered(await client.reply(), COMPLETIONS, stream=False)
        assert len(slow.sights) <= 1  # the quick one is empty again each time
        assert len(quick.sights) >= 7


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_session_does_not_pin_an_engine_that_has_too_much_to_do(role: str) -> None:
    async with fleet(2, 2, policy="consistent_hash", prefill_timeout_s=30.0, first_token_timeout_s=30.0) as engines:
        release = asyncio.Event()
        for engine in engines.pool(role):
            well = engine.script

            async def waits(sight: Sight, wire: Wire, well: Any = well) -> None:
                await release.wait()
                await well(sight, wire)

            engine.script = waits
        tasks = [asyncio.create_task(engines.ask(user="the same")) for _ in range(10)]
        await until(lambda: engines.num_sights(role) == 10, "all are at an engine")
        counts = sorted(len(engine.sights) for engine in engines.pool(role))
        release.set()
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 10
        # At most a quarter more than the mean, rounded up.
        assert counts[-1] <= 7, counts
        quiet = [await engines.ask(user="the same") for _ in range(4)]
        assert len({reply.headers[f"x-antiphon-{role}"] for reply in quiet}) == 1


def usage(num_prompt: int, cached: int | None) -> dict[str, Any]:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": num_prompt, "completion_tokens": 2, "total_tokens": num_prompt + 2} | details


@pytest.mark.parametrize("cached", [0, 16, 63])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_cached_tokens_are_what_the_prefill_engine_reused(path: str, cached: int, stream: bool) -> None:
    """The decode engine counts every token that it pulled as cached: that is no saving."""

    async def prefills_some(sight: Sight, wire: Wire) -> None:
        wire.whole(json.dumps({"kv_transfer_params": handle_of(sight), "usage": usage(64, cached)}).encode())

    async def decodes_with_usage(sight: Sight, wire: Wire) -> None:
        text = 'it said "usage":{"prompt_tokens_details":{"cached_tokens":9}}'
        choice = {"index": 0} | ({"text": text} if path == COMPLETIONS else {"message": {"content": text}})
        if not stream:
            wire.whole(json.dumps({"id": "d", "choices": [choice], "usage": usage(64, 64)}).encode())
            return
        wire.begin()
        wire.piece(event(path, text))
        wire.piece(f"data: {json.dumps({'id': 'd', 'choices': [], 'usage': usage(64, 64)})}\n\n".encode())
        wire.piece(DONE)
        wire.end()

    async with fleet(1, 1) as engines:
        engines.prefill[0].script, engines.decode[0].script = prefills_some, decodes_with_usage
        reply = await engines.ask(path, stream=stream, stream_options={"include_usage": True} if stream else None)
        shown = json.loads(reply.body.split(b"\n\n")[-3][6:]) if stream else json.loads(reply.body)
        assert shown["usage"] == usage(64, cached)
        assert b'\\"cached_tokens\\":9' in reply.body  # text is text
        tokens = (await engines.receipt(reply))["tokens"]
        assert tokens["prompt"] == 64
        assert tokens["by_source"]["device"] == cached


async def test_engine_that_hangs_holds_up_nobody_else() -> None:
    """One decode engine never answers, and its requests wait: those of the other are served at once all the while."""
    async with fleet(1, 2, first_token_timeout_s=60.0) as engines:
        engines.decode[0].script = hangs
        waiting: list[asyncio.Task[Any]] = []
        num_answered = 0
        async with asyncio.timeout(10):
            while num_answered < 20:
                task = asyncio.create_task(engines.ask(stream=True))
                before = engines.num_sights("decode")
                await at_an_engine(engines, before + 1)
                if engines.decode[0].sights and engines.sights("decode") and not await is_done(task):
                    waiting.append(task)
                else:
                    check_answered(await task, COMPLETIONS, stream=True)
                    num_answered += 1
        assert len(waiting) >= 10
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def is_done(task: asyncio.Task[Any]) -> bool:
    """Whether a request ends by itself; one that hangs does not."""
    done, _ = await asyncio.wait([task], timeout=0.15)
    return bool(done)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_overload_of_the_prefill_pool_is_told_as_overload(stream: bool) -> None:
    """503 and its Retry-After, not 500; the decode pool is left in peace."""
    async with fleet(2, 1) as engines:
        engines.always("prefill", responds(503, "Retry-After: 11"))
        reply = await engines.ask(stream=stream)
        check_refused(reply, 503, "prefill_overloaded")
        assert reply.headers["retry-after"] == "11"
        assert engines.num_sights("decode") == 0
        assert "down" not in (await engines.states("prefill")).values()


@pytest.mark.parametrize("n", [2, 5])
async def test_several_sequences_hold_no_blocks_at_a_prefill_engine(n: int) -> None:
    """One handle is read once: so no prefill engine is asked, and the reason is said."""
    async with fleet(1, 1) as engines:
        reply = await engines.ask(n=n)
        assert (reply.headers["x-antiphon-path"], reply.headers["x-antiphon-reason"]) == ("local", "n")
        assert engines.prefill[0].script is prefills
        assert engines.num_sights("prefill") == 0
        assert engines.sights("decode")[0].json["n"] == n


@pytest.mark.parametrize("stage", ["prefill", "decode", "stream"])
async def test_client_that_leaves_is_followed_by_the_router(stage: str) -> None:
    """At each stage the engine's connection is closed soon, and only engines that had the request saw any of it."""
    left = asyncio.Event()

    async def waits(sight: Sight, wire: Wire) -> None:
        if stage == "stream":
            wire.begin()
            wire.piece(event(sight.path, "one"))
        try:
            await wire.until_closed()
        finally:
            left.set()

    async with fleet(1, 1, abort_grace_s=0.2) as engines:
        role = "prefill" if stage == "prefill" else "decode"
        engines.always(role, waits)
        async with connected(engines.router) as client:
            engines.send(client, stream=True)
            await until(lambda: engines.num_sights(role) == 1, "the engine has it")
            if stage == "stream":
                await client.reader.readuntil(b"one")
        async with asyncio.timeout(3):
            await left.wait()
        await engines.wait_idle()
        assert engines.num_sights("decode") == (0 if stage == "prefill" else 1)
        assert await engines.samples("requests_total", 'outcome="cancelled"') == 1


async def test_every_counter_is_given_back_exactly_once() -> None:
    """Ends of every kind, a few hundred: afterwards each engine is thought to have nothing."""
    # A hand-over that is completed for nobody may meet an engine that hangs: it has the time of a hand-over.
    quick = {"handover_timeout_s": 1.0, "abort_grace_s": 0.05} | dict.fromkeys(
        ("prefill_timeout_s", "first_token_timeout_s", "idle_timeout_s"), 0.3
    )
    num_requests = 240
    async with fleet(2, 2, **quick) as engines:

        async def some(number: int) -> None:
            for role, scripts in (
                ("prefill", [responds(500), responds(400), hangs]),
                ("decode", [responds(503), hangs]),
            ):
                if number % 7 == len(role):
                    engines.pool(role)[number % 2].next.append(scripts[number % len(scripts)])
            if number % 5 == 0:
                async with connected(engines.router) as client:
                    engines.send(client, stream=bool(number % 2))
                    await asyncio.sleep(number % 10 / 1000)
                return
            await engines.ask(stream=bool(number % 2), n=2 if number % 11 == 0 else 1)

        for start in range(0, num_requests, 24):
            await asyncio.gather(*(some(number) for number in range(start, start + 24)))
        await engines.wait_idle()
        ends = [
            await engines.samples("requests_total", f'outcome="{end}"') for end in ("completed", "cancelled", "failed")
        ]
        assert all(number >= 5 for number in ends), ends
        assert num_requests * 4 / 5 <= sum(ends) <= num_requests  # who leaves at once may never have asked
        for endpoint in engines.router.fleet.all():
            assert endpoint.num_active == 0, endpoint.address
