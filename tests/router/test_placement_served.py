"""A router that goes by what is where, from outside: which engine gets a prompt, when the hand-over is left out, and
that an answer is right though what was held is gone."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from antiphon.cache import events
from antiphon.cache.effects import Reserved
from antiphon.cache_server.admin import start_admin
from antiphon.core.chunks import chunk_keys
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import cache as wire_cache
from antiphon.router.app import Router
from antiphon.routing.chunk_index import scope_of
from tests.cache_server.admin_standin import CHUNK_SIZE_TOKENS, standing_in
from tests.router.scripted import Reply, Seen, Wire, connected, counted, newest, prefills, routing, streams, until
from tests.router.served import Gate, ask_as, crowd, engine, idle, post, prefills_at, tenants_file
from tests.router.stack import quiet_ports
from tests.router.told import speak_until_heard, told


def text(number: int, num_tokens: int = 100) -> str:
    """A prompt of so many tokens of the simulated tokenizer, unlike any other from its first word on."""
    return f"{number:04d}" + "word" * (num_tokens - 1)


def path_of(reply: Reply) -> tuple[str, str]:
    return reply.headers["x-antiphon-path"], reply.headers["x-antiphon-reason"]


def num_cached(reply: Reply) -> int:
    number: int = json.loads(reply.body)["usage"]["prompt_tokens_details"]["cached_tokens"]
    return number


# ---- short prompts ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[7] * 16, "w" * 40], ids=["tokens", "text"])
async def test_a_short_prompt_is_served_without_a_hand_over(prompt: Any) -> None:
    async with (
        engine(prefills) as p,
        engine(streams) as d,
        routing([p], [d], local_max_tokens=16, tokenize_timeout_s=0) as router,
    ):
        reply = await ask_as(router, None, prompt=prompt)
        assert (reply.status, path_of(reply)) == (200, ("local", "short"))
        shown = newest(router)
        assert (shown["path"], shown["reason"], shown["prefill"]) == ("local", "short", None)
        assert counted(router, "path_total", path="local", reason="short") == 1
        assert not p.seen
        assert d.seen[-1].params is None
        longer = await ask_as(router, None, prompt=[7] * 17)
        assert path_of(longer) == ("pd", "default")
        assert counted(router, "path_total", path="pd", reason="default") == 1
        assert len(p.seen) == 1
        await idle(router)


# ---- prefix_aware ----------------------------------------------------------------------------------------------------


async def test_prompts_that_begin_alike_go_to_one_prefill_engine_and_others_do_not() -> None:
    async with contextlib.AsyncExitStack() as stack:
        pool = [await stack.enter_async_context(engine(prefills)) for _ in range(4)]
        d = await stack.enter_async_context(engine(streams))
        router = await stack.enter_async_context(routing(pool, [d], prefill_policy="prefix_aware"))
        for turn in range(12):
            for chat in range(8):
                said = [{"role": "user", "content": f"chat {chat} " + "words " * 300 + "more " * 50 * turn}]
                async with connected(router) as client:
                    post(client, {"messages": said, "stream": True}, path="/v1/chat/completions")
                    assert (await client.reply()).status == 200
        engines_of: dict[str, Counter[int]] = {}
        for index, each in enumerate(pool):
            for seen in each.seen:
                chat_of = json.loads(seen.body)["messages"][0]["content"][:7]
                engines_of.setdefault(chat_of, Counter())[index] += 1
        assert all(max(where.values()) >= 11 for where in engines_of.values()), engines_of
        assert len({where.most_common(1)[0][0] for where in engines_of.values()}) > 1, "not all at one engine"
        await idle(router)


async def test_a_hot_prefix_is_spread() -> None:
    gate, num = Gate(), 64
    async with contextlib.AsyncExitStack() as stack:
        pool = [await stack.enter_async_context(engine(prefills_at(gate))) for _ in range(4)]
        d = await stack.enter_async_context(engine(streams))
        router = await stack.enter_async_context(routing(pool, [d], prefill_policy="prefix_aware"))
        clients = await stack.enter_async_context(crowd(router))
        clients.ask(prompt="hot " * 1000)
        await until(lambda: gate.standing, "the first is computed")
        gate.open_one()
        await clients.replies()
        for number in range(num):
            clients.ask(prompt="hot " * 1000 + str(number))
        await until(lambda: len(gate.standing) == num, "all are at engines")
        loads = [endpoint.num_active for endpoint in router.fleet.prefill.endpoints]
        assert sum(loads) == num
        assert max(loads) <= 1.5 * num / len(pool), loads
        gate.open()
        assert {reply.status for reply in await clients.replies()} == {200}
        await idle(router)


# ---- kv_aware --------------------------------------------------------------------------------------------------------


async def test_a_prompt_goes_to_the_prefill_engine_that_holds_its_beginning() -> None:
    async with told(num_prefill=3, num_decode=2) as fleet:
        for number in range(6):
            reply, _ = await fleet.complete(text(number))
            assert path_of(reply) == ("pd", "default")
            first = newest(fleet.router)["prefill"]
            for each in fleet.prefill:
                await fleet.heard(each)
            again, _ = await fleet.complete(text(number) + "and more of it")
            shown: Any = newest(fleet.router)
            assert (shown["prefill"], again.headers["x-antiphon-prefill"]) == (first, first)
            assert shown["tokens"]["by_source"]["device"] == 100
            for each in fleet.prefill:
                await fleet.heard(each)


async def test_a_decode_engine_that_holds_a_prompt_serves_it_without_a_hand_over() -> None:
    async with told(num_decode=3, local_max_tokens=16) as fleet:
        router = fleet.router
        first, answer = await fleet.complete(text(1))
        assert path_of(first) == ("pd", "default")
        holder = newest(router)["decode"]
        for each in fleet.decode:
            await fleet.heard(each)
        num_prefills = fleet.prefill[0].live.num_requests
        for more in ("", "eight more tokens, as it goes on"):
            again, same = await fleet.complete(text(1) + more)
            assert path_of(again) == ("cached", "held_by_engine")
            assert again.headers["x-antiphon-decode"] == holder
            assert num_cached(again) >= 96, "what it holds it does not compute again"
            assert more or same == answer
        shown = newest(router)
        assert (shown["path"], shown["reason"], shown["prefill"]) == ("cached", "held_by_engine", None)
        assert int(str(shown["num_held_tokens"])) >= 96
        assert counted(router, "path_total", path="cached", reason="held_by_engine") == 2
        assert fleet.prefill[0].live.num_requests == num_prefills


async def streamed(router: Router, prompt: str, **options: Any) -> None:
    async with connected(router) as client:
        body = {"model": "m", "prompt": prompt, "max_tokens": 6, "temperature": 0, "stream": True}
        post(client, body | ({"stream_options": options} if options else {}))
        reply = await client.reply()
    assert (reply.status, reply.body[-8:]) == (200, b"[DONE]\n\n"), reply.body
    await idle(router)


async def test_the_receipt_of_a_prompt_that_was_held_says_where_its_tokens_came_from() -> None:
    """By what the decode engine says itself; where it does not, the number alone is known."""
    async with told(local_max_tokens=16) as fleet:
        await fleet.complete(text(1))
        await fleet.heard(fleet.decode[0])
        reply, _ = await fleet.complete(text(1))
        num_prompt = json.loads(reply.body)["usage"]["prompt_tokens"]
        known = {"device": num_cached(reply), "computed": num_prompt - num_cached(reply)}
        assert known["device"] >= 96
        shown = newest(fleet.router)
        assert (shown["path"], shown["tokens"]) == (
            "cached",
            {"prompt": num_prompt, "by_source": known, "reported_by": "usage"},
        )
        for options in ({"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}):
            await streamed(fleet.router, text(1), **options)
            assert newest(fleet.router)["tokens"] == shown["tokens"]
        await streamed(fleet.router, text(1))
        silent = newest(fleet.router)
        assert (silent["path"], silent["tokens"]) == (
            "cached",
            {"prompt": num_prompt, "by_source": {"unknown": num_prompt}, "reported_by": None},
        )


async def test_chats_are_told_apart_by_their_tokens_too() -> None:
    async with told(num_decode=2, local_max_tokens=24) as fleet:
        said = [{"role": "user", "content": "word" * 200}]

        async def chat() -> Reply:
            async with connected(fleet.router) as client:
                post(client, {"model": "m", "messages": said, "max_tokens": 4}, path="/v1/chat/completions")
                return await client.reply()

        first = await chat()
        assert path_of(first) == ("pd", "default")
        for each in fleet.decode:
            await fleet.heard(each)
        again = await chat()
        assert path_of(again) == ("cached", "held_by_engine")
        assert json.loads(again.body)["choices"] == json.loads(first.body)["choices"]
        await idle(fleet.router)


async def test_what_is_held_for_one_tenant_is_not_for_another(tmp_path: Path) -> None:
    path = tenants_file(tmp_path, {"name": "a"}, {"name": "b", "may_salt": True})
    async with told(local_max_tokens=16, tenants_file=path) as fleet:
        (decode,) = fleet.decode

        async def ask(key: str, **fields: Any) -> tuple[str, int]:
            reply, _ = await fleet.complete(text(1), key, **fields)
            await fleet.heard(decode)
            return path_of(reply)[0], num_cached(reply)

        assert await ask("sk-a") == ("pd", 0)
        assert await ask("sk-b") == ("pd", 0)
        assert await ask("sk-b", cache_salt="mine") == ("pd", 0)
        for key, fields in (("sk-a", {}), ("sk-b", {}), ("sk-b", {"cache_salt": "mine"})):
            assert await ask(key, **fields) == ("cached", 96)


async def test_a_salt_is_the_same_however_its_client_writes_it() -> None:
    async with told(local_max_tokens=16) as fleet:
        for number, salt in enumerate(("plain", "caf\u00e9")):  # the second is sent with an escape
            first, _ = await fleet.complete(text(number), cache_salt=salt)
            await fleet.heard(fleet.decode[0])
            again, _ = await fleet.complete(text(number), cache_salt=salt)
            await fleet.heard(fleet.decode[0])
            assert (path_of(first)[0], path_of(again)[0]) == ("pd", "cached")


async def test_a_decode_engine_that_was_cleared_is_given_the_kv_again() -> None:
    async with told(local_max_tokens=16) as fleet:
        (decode,) = fleet.decode
        _, answer = await fleet.complete(text(1))
        await fleet.heard(decode)
        assert path_of((await fleet.complete(text(1)))[0]) == ("cached", "held_by_engine")
        await fleet.heard(decode)
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
            writer.write(
                b"POST /reset_prefix_cache HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            )
            assert b'"success":true' in await reader.read()
            writer.close()
        await until(lambda: fleet.blocks(decode) == 0, "it is heard")
        again, same = await fleet.complete(text(1))
        assert (path_of(again), same) == (("pd", "default"), answer)


async def test_an_engine_that_lost_it_without_a_word_computes_it_and_is_right() -> None:
    async with told(local_max_tokens=16) as fleet:
        (decode,) = fleet.decode
        _, answer = await fleet.complete(text(1))
        await fleet.heard(decode)
        decode.forget_in_silence()
        again, same = await fleet.complete(text(1))
        assert (path_of(again), num_cached(again), same) == (("cached", "held_by_engine"), 0, answer)


async def test_an_engine_that_has_restarted_is_claimed_nothing_of() -> None:
    async with told(local_max_tokens=16) as fleet:
        (decode,) = fleet.decode
        answers = {number: (await fleet.complete(text(number)))[1] for number in range(3)}
        await fleet.heard(decode)
        await decode.stop()
        await decode.start()
        # Nobody knows yet that it is another life: what was claimed costs a recomputation at most.
        reply, same = await fleet.complete(text(0))
        assert same == answers[0]
        # What it says next tells its lives apart.
        await speak_until_heard(fleet, decode)
        reply, same = await fleet.complete(text(1))
        assert (path_of(reply), same) == (("pd", "default"), answers[1])
        await fleet.heard(decode)
        reply, same = await fleet.complete(text(1))
        assert (path_of(reply), same) == (("cached", "held_by_engine"), answers[1])


async def test_a_prefill_engine_that_has_restarted_is_claimed_nothing_of() -> None:
    async with told(num_prefill=1) as fleet:
        (prefill,) = fleet.prefill
        _, answer = await fleet.complete(text(1))
        await fleet.heard(prefill)
        await prefill.stop()
        await prefill.start()
        reply, same = await fleet.complete(text(1))
        shown: Any = newest(fleet.router)
        assert (path_of(reply), same) == (("pd", "default"), answer)
        assert shown["tokens"]["by_source"]["device"] == 0
        await speak_until_heard(fleet, prefill)


async def test_a_holder_that_is_gone_is_not_waited_for() -> None:
    async with told(num_decode=2, local_max_tokens=16) as fleet:
        _, answer = await fleet.complete(text(1))
        holder = next(each for each in fleet.decode if each.url.endswith(str(newest(fleet.router)["decode"])))
        await fleet.heard(holder)
        await holder.stop()
        reply, same = await fleet.complete(text(1))
        assert same == answer
        assert not reply.headers["x-antiphon-decode"].endswith(str(holder.port))


# ---- tokens that are not known ---------------------------------------------------------------------------------------


async def test_a_tokenizer_that_is_slow_is_not_waited_for() -> None:
    """The request is placed by its bytes: as prefix_aware would."""
    gate = Gate()

    async def script(seen: Seen, wire: Wire) -> None:
        if seen.path == "/tokenize":
            await gate.arrive(seen)
            wire.whole(b'{"tokens":[1,2,3]}')
        elif b'"do_remote_decode"' in seen.body:
            await prefills(seen, wire)
        else:
            await streams(seen, wire)

    async with contextlib.AsyncExitStack() as stack:
        pool = [await stack.enter_async_context(engine(script)) for _ in range(3)]
        d = await stack.enter_async_context(engine(script))
        router = await stack.enter_async_context(
            routing(pool, [d], policy="kv_aware", kv_events_port=quiet_ports(1), tokenize_timeout_s=0.03)
        )
        for number in range(6):
            reply = await ask_as(router, None, prompt="the same beginning " * 100 + str(number))
            assert (reply.status, path_of(reply)) == (200, ("pd", "default"))
        served = [sum(seen.path == "/v1/completions" for seen in each.seen) for each in pool]
        assert sorted(served) == [0, 0, 6]
        assert gate.num_arrived == 6
        assert router.where is not None
        statistics: Any = router.where.statistics()["tokenize"]
        assert statistics["in_flight"] == 6
        gate.open()
        await idle(router)


async def test_clients_that_leave_while_tokens_are_asked_for_leave_nothing() -> None:
    gate = Gate()

    async def script(seen: Seen, wire: Wire) -> None:
        await gate.arrive(seen)
        wire.whole(b'{"tokens":[1,2,3]}')

    async with engine(script) as p, engine(script) as d:
        knobs: dict[str, Any] = {"policy": "kv_aware", "kv_events_port": quiet_ports(1), "tokenize_timeout_s": 5}
        async with routing([p], [d], **knobs) as router:
            assert router.where is not None
            async with crowd(router) as clients:
                for number in range(5):
                    clients.ask(prompt=f"text {number}")
                await until(lambda: gate.num_arrived == 5, "tokens are asked for")
            await idle(router)
            assert {seen.path for seen in p.seen + d.seen} == {"/tokenize"}
            async with crowd(router) as clients:
                clients.ask(prompt="text 9")
                await until(lambda: gate.num_arrived == 6, "tokens are asked for")
                await router.stop(0.0)
                assert [reply.status for reply in await clients.replies()] == [503]
            await idle(router)


@pytest.mark.parametrize(
    "prompt",
    [
        "[]",
        "[1099511627776]",
        "[9223372036854775807]",
        "[9223372036854775808]",
        "[-1]",
        "[1.5]",
        "[[1,2],[3]]",
        "7",
        "null",
        "[" + ",".join(["4294967296"] * 600) + "]",
    ],
    ids=lambda prompt: prompt[:24],
)
async def test_numbers_that_are_no_tokens_are_the_engines_to_judge(tmp_path: Path, prompt: str) -> None:
    async def script(seen: Seen, wire: Wire) -> None:
        wire.whole(b'{"error":{"message":"no"}}' if seen.path != "/tokenize" else b"{}", status=400)

    async with standing_in(tmp_path, 64) as cache, engine(script) as p, engine(script) as d:
        admin = await start_admin(cache, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{admin.port}"
        knobs: dict[str, Any] = {"policy": "kv_aware", "kv_events_port": quiet_ports(1), "local_max_tokens": 16}
        async with routing([p], [d], cache_servers=[url], **knobs) as router, connected(router) as client:
            store_chunks(cache, [7] * 512)
            where = router.where
            assert where is not None
            await until(lambda: where.chunks.num_chunks(url) == 2, "the chunks are known")
            for endpoint in router.fleet.decode.ready:
                where.chunks.learn(scope_of(b"", b""), endpoint.address, url, NAMESPACE)
            post(client, b'{"prompt":%b}' % prompt.encode())
            assert (await client.reply()).status == 400
            await idle(router)
        await admin.close()


# ---- held by a cache server ------------------------------------------------------------------------------------------

NAMESPACE = b"n" * 32


def store_chunks(cache: Any, tokens: list[int]) -> None:
    """An engine stores the chunks of a prompt."""
    connection = cache.attach_engine()
    parent = None
    for key in chunk_keys(NamespaceDigest(NAMESPACE), tokens, CHUNK_SIZE_TOKENS):
        reply = cache.step(events.Reserve(connection, NamespaceDigest(NAMESPACE), "", parent, (key,)))[0]
        assert isinstance(reply, Reserved), reply
        cache.step(events.Commit(connection, tuple(grant.region for grant in reply.grants)))
        parent = key


async def test_what_a_cache_server_holds_is_not_handed_over(tmp_path: Path) -> None:
    prompt = [7] * 600
    async with standing_in(tmp_path, 64) as cache, engine(prefills) as p, engine(streams) as d:
        admin = await start_admin(cache, "127.0.0.1", 0)
        try:
            url = f"http://127.0.0.1:{admin.port}"
            async with routing([p], [d], cache_servers=[url], local_max_tokens=100) as router:
                where = router.where
                assert where is not None
                first = await ask_as(router, None, prompt=prompt)
                assert path_of(first) == ("pd", "default")
                await idle(router)
                # The decode engine stores it, and says under which namespace.
                store_chunks(cache, prompt)
                request = f"cmpl-{newest(router)['engine_request_id']}-0-1a2b3c4d"
                counts = {"num_prompt_tokens": 600, "device": 0, "l1": 0, "remote_prefill": 600, "computed": 0}
                cache.reports.add(
                    wire_cache.Report(
                        request=request,
                        engine="d",
                        incarnation="life",
                        num_preemptions=0,
                        finish="finished",
                        namespace=NAMESPACE,
                        **counts,
                    )
                )
                cache.reports.waiters.wake()
                await until(lambda: where.chunks.server_of(d.address) == url, "its report is here")
                await until(lambda: where.chunks.num_chunks(url) == 2, "the chunks are known")
                again = await ask_as(router, None, prompt=prompt)
                assert path_of(again) == ("cached", "held_by_server")
                assert newest(router)["num_held_tokens"] == 512
                assert counted(router, "path_total", path="cached", reason="held_by_server") == 1
                assert len(p.seen) == 1
                assert d.seen[-1].params is None
                # Another salt shares nothing, and what is cleared is not held.
                salted = await ask_as(router, None, prompt=prompt, cache_salt="x")
                assert path_of(salted) == ("pd", "default")
                cache.control(events.Clear())
                await until(lambda: where.chunks.num_chunks(url) == 0, "it is heard")
                assert path_of(await ask_as(router, None, prompt=prompt)) == ("pd", "default")
                await idle(router)
        finally:
            await admin.close()
