"""What a request passes before it begins, as a whole: it leaves no garbage, and a bug on the way ends that request
alone."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.router.app import Router
from tests.router.scripted import Seen, Wire, counted, newest, prefills, routing, streams, until
from tests.router.served import Gate, ask_as, cold, crowd, engine, idle, prefills_at, streams_at, tenant, tenants_file
from tests.router.stack import quiet_ports

OF_A_REQUEST = {
    *("Body", "Flight", "Handle", "HttpRequest", "Life", "Relay", "Responder", "WholeAnswer"),
    *("Ticket", "Ask", "Prompt", "ColdItem", "_Entry", "Receipt", "HashedPrompt", "Refuse", "Wait", "Placement"),
}


def found(kept_garbage: list[object]) -> set[str]:
    gc.collect()
    return OF_A_REQUEST & {type(each).__name__ for each in kept_garbage}


def all_of_it(folder: Path, **limits: Any) -> dict[str, Any]:
    """Knobs of a router that looks at everything. A token has a megabyte, and a hundred of them are cold."""
    return {
        "policy": "kv_aware",
        "kv_events_port": quiet_ports(1),
        "tokenize_timeout_s": 5.0,
        "local_max_tokens": 16,
        "kv_bytes_per_token": 1_000_000,
        "cold_min_bytes": 100_000_000,
        "tenants_file": tenants_file(folder, {"name": "a"} | limits, in_flight_max=8),
    }


def tokenizes(answer: bytes, script: Any = None) -> Any:
    """An engine that takes every prompt for these tokens, and else does as ``script``, or as prefill and decode."""

    async def either(seen: Seen, wire: Wire) -> None:
        if seen.path == "/tokenize":
            wire.whole(answer)
        elif script is not None:
            await script(seen, wire)
        elif b'"do_remote_decode"' in seen.body:
            await prefills(seen, wire)
        elif json.loads(seen.body).get("stream"):
            await streams(seen, wire)
        else:
            wire.whole(b'{"choices":[{"text":"a"}],"usage":{"prompt_tokens":3,"completion_tokens":1}}')

    return either


TOKENS = json.dumps({"tokens": list(range(200))}).encode()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"prompt": "long " * 40}, "pd"),
        ({"prompt": "long " * 40, "stream": False}, "pd"),
        ({"prompt": [1] * 8}, "local"),
        ({"prompt": "x", "n": 2}, "local"),
        ({"prompt": "x", "cache_salt": "mine"}, ""),
        ({"prompt": "x", "kv_transfer_params": {}}, ""),
    ],
    ids=["stream", "whole", "short", "n", "salt_refused", "handle_refused"],
)
async def test_a_request_leaves_no_cycle(
    kept_garbage: list[object], tmp_path: Path, fields: dict[str, Any], path: str
) -> None:
    async with (
        engine(tokenizes(TOKENS)) as p,
        engine(tokenizes(TOKENS)) as d,
        routing([p], [d], receipts_max=2, **all_of_it(tmp_path)) as router,
    ):
        for _number in range(3):  # connections are made, and what is kept of the last prompts is there
            await ask_as(router, "sk-a", **fields)
        found(kept_garbage)
        kept_garbage.clear()
        for _number in range(4):
            reply = await ask_as(router, "sk-a", **fields)
            assert reply.status == (200 if path else 400)
            assert reply.headers.get("x-antiphon-path", "") == path
        await idle(router)
        assert not found(kept_garbage)


async def test_neither_do_those_who_waited_were_held_were_refused_or_left(
    kept_garbage: list[object], tmp_path: Path
) -> None:
    gate, decode_gate = Gate(), Gate()
    knobs = all_of_it(tmp_path, concurrent_max=4, queue_max=2) | {"cold_per_engine": 2, "transfer_bytes_per_s": 5e7}
    async with (
        engine(tokenizes(TOKENS, prefills_at(gate, num_tokens=300))) as p,
        engine(tokenizes(TOKENS, streams_at(decode_gate))) as d,
        routing([p], [d], receipts_max=2, **knobs) as router,
        crowd(router) as clients,
    ):
        found(kept_garbage)
        kept_garbage.clear()
        for number in range(2):
            clients.ask("sk-a", prompt=[number] * 120)
        await until(lambda: len(gate.standing) == 2, "two are computed")
        async with crowd(router) as leaving:
            for number in range(4):
                leaving.ask("sk-a", prompt=[10 + number] * 120)
            await until(lambda: waiting(router) == 4, "they wait, for one thing or another")
            assert (tenant(router, "a").num_waiting, cold(router).num_waiting) == (2, 2)
            assert (await ask_as(router, "sk-a", prompt=[20] * 120)).status == 429
        gate.open()
        await until(lambda: cold(router).num_held == 1, "one is held")
        decode_gate.open()
        assert [reply.status for reply in await clients.replies()] == [200] * 2
        await idle(router)
        clients.tasks.clear()
        # A connection that its client has cut is a cycle with its parser, and has its small responder in it.
        assert found(kept_garbage) <= {"Responder"}


def waiting(router: Router) -> int:
    """Requests that wait to begin."""
    assert router.tenants is not None
    return router.tenants.num_waiting + cold(router).num_waiting


async def test_what_is_kept_of_requests_that_are_over_has_a_bound(tmp_path: Path) -> None:
    """By type: the live objects of requests are as many after many requests as after a few."""
    async with (
        engine(tokenizes(TOKENS)) as p,
        engine(tokenizes(TOKENS)) as d,
        routing([p], [d], receipts_max=2, **all_of_it(tmp_path)) as router,
    ):

        async def ask(first: int, num: int) -> dict[str, int]:
            for number in range(first, first + num):
                assert (await ask_as(router, "sk-a", prompt=f"prompt {number} " * 20)).status == 200
            await idle(router)
            gc.collect()
            names = [type(each).__name__ for each in gc.get_objects()]
            return {name: names.count(name) for name in OF_A_REQUEST}

        before = await ask(0, 40)  # more than are remembered by the last prompts
        after = await ask(40, 60)
        assert after == before


# ---- bugs ------------------------------------------------------------------------------------------------------------


@pytest.mark.interpreted  # compiled classes take only what is theirs
@pytest.mark.parametrize("step", ["question", "tokenize", "held", "place"])
async def test_a_bug_on_the_way_ends_one_request(tmp_path: Path, step: str, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        engine(tokenizes(TOKENS)) as p,
        engine(tokenizes(TOKENS)) as d,
        routing([p], [d], **all_of_it(tmp_path, concurrent_max=1)) as router,
    ):
        assert router.entry is not None
        assert router.where is not None
        owner: Any = router.entry if step == "place" else router.where
        name = {"place": "placer"}.get(step, step)
        right = getattr(owner, name)

        class Broken:
            def place(self, *_: object) -> None:
                raise ZeroDivisionError

        def raises(*_: object) -> None:
            raise ZeroDivisionError

        setattr(owner, name, Broken() if step == "place" else raises)
        reply = await ask_as(router, "sk-a", prompt="long " * 40)
        assert reply.status == 500
        assert "ZeroDivisionError" in caplog.text
        await idle(router)
        setattr(owner, name, right)
        assert (await ask_as(router, "sk-a", prompt="long " * 40)).status == 200
        await idle(router)


# ---- what is cold ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("knobs", [{}, {"local_max_tokens": 16, "tokenize_timeout_s": 0}], ids=["bytes", "tokens"])
async def test_a_prompt_that_was_sent_before_is_warm(knobs: dict[str, Any]) -> None:
    """Where no engine says what it holds, what it was sent counts."""
    knobs = knobs | {"policy": "prefix_aware", "kv_bytes_per_token": 1_000_000, "cold_min_bytes": 100_000_000}
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], **knobs) as router:
        for number in range(4):
            assert (await ask_as(router, None, prompt="what all begin with " * 500 + str(number))).status == 200
        await idle(router)
        counts = cold(router).counts
        assert (counts["admitted_at_once"], counts["admitted_warm"]) == (1, 3)
        assert counted(router, "path_total", path="pd", reason="default") == 4
        assert newest(router)["path"] == "pd"
