"""What a request leaves behind where something goes wrong on its way in: bugs, retries, a router that stops, clients
that write what their engines do not read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from antiphon.observe.receipt import Receipt
from antiphon.protocol.body import KEYS_MAX, scan
from antiphon.router.prompts import Prompts
from antiphon.routing.admission import ColdAdmission
from antiphon.routing.ask import Prompt
from antiphon.routing.kv_chain import StoredBlocks
from antiphon.routing.placement import Placer
from tests.router.scripted import (
    Client,
    ScriptedEngine,
    Seen,
    Wire,
    connected,
    newest,
    prefills,
    routing,
    streams,
    take_down,
    take_for_ready,
    until,
)
from tests.router.served import (
    Gate,
    ask_as,
    check_idle,
    cold,
    crowd,
    engine,
    error_of,
    idle,
    post,
    prefills_at,
    streams_at,
    tenant,
    tenants_file,
)
from tests.router.test_tokenizing import asking

AWARE: dict[str, Any] = {"prefill_policy": "prefix_aware", "decode_policy": "prefix_aware"}
TEXT = "word " * 1000


class Buggy:
    """Raises where it is asked for anything, the first so many times."""

    def __init__(self, real: object, method: str, num: int = 1) -> None:
        self._real = real
        self._method = method
        self._num_left = num

    def __getattr__(self, name: str) -> Any:
        if name == self._method and self._num_left:
            self._num_left -= 1
            raise ZeroDivisionError
        return getattr(self._real, name)


async def read(client: Client) -> int:
    return (await client.reply()).status


# ---- bugs ------------------------------------------------------------------------------------------------------------


@pytest.mark.interpreted  # compiled classes take only what is theirs
@pytest.mark.parametrize("step", ["place", "avoid_for", "tokenize"])
async def test_a_bug_on_the_way_in_ends_the_request_that_meets_it(tmp_path: Path, step: str) -> None:
    knobs: dict[str, Any] = {"tenants_file": tenants_file(tmp_path, {"name": "a"}), "kv_bytes_per_token": 1}
    knobs |= AWARE | {"local_max_tokens": 1, "tokenize_timeout_s": 0.5}
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], **knobs) as router:
        entry = router.entry
        assert entry is not None
        if step == "place":
            entry.placer = Buggy(entry.placer, step)  # type: ignore[assignment]
        elif step == "avoid_for":
            entry.cold = Buggy(entry.cold, step)  # type: ignore[assignment]
        else:
            entry.where = Buggy(entry.where, step)  # type: ignore[assignment]
        reply = await ask_as(router, "sk-a", prompt=TEXT)
        assert reply.status == 500
        await idle(router)
        assert newest(router)["outcome"] == "failed"
        assert (await ask_as(router, "sk-a", prompt=TEXT)).status == 200
        await idle(router)


@pytest.mark.interpreted  # compiled classes take only what is theirs
async def test_a_bug_of_a_request_that_waited_is_not_that_of_the_one_that_made_room(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(tmp_path, {"name": "a"}, in_flight_max=1)
    async with engine(prefills) as p, engine(streams_at(gate)) as d, routing([p], [d], tenants_file=path) as router:
        async with crowd(router) as clients:
            first = clients.ask("sk-a")
            await until(lambda: gate.standing, "the first is served")
            second, third = clients.ask("sk-a"), clients.ask("sk-a")
            await until(lambda: tenant(router, "a").num_waiting == 2, "the others wait")
            assert router.entry is not None
            router.entry.placer = Buggy(router.entry.placer, "place")  # type: ignore[assignment]
            gate.open()
            assert (await first).status == 200
            assert sorted([(await second).status, (await third).status]) == [200, 500]
        await idle(router)
        assert {receipt.outcome for receipt in router.receipts.latest(3)} == {"completed", "failed"}


# ---- a router that stops ---------------------------------------------------------------------------------------------


async def test_what_waits_when_the_router_stops_begins_no_more(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(tmp_path, {"name": "a"}, in_flight_max=1)
    async with engine(prefills) as p, engine(streams_at(gate)) as d, routing([p], [d], tenants_file=path) as router:
        async with crowd(router) as clients:
            tasks = [clients.ask("sk-a") for _ in range(6)]
            await until(lambda: tenant(router, "a").num_waiting == 5, "all but one wait")
            await until(lambda: gate.standing, "that one is served")
            assert await router.stop(0.0) == 6
            replies = [await task for task in tasks]
            assert {reply.status for reply in replies} == {503}
            assert {error_of(reply)["code"] for reply in replies} == {"stopping"}
        check_idle(router)
        assert len(p.seen) == len(d.seen) == 1


# ---- tenants ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_keys", [KEYS_MAX - 1, KEYS_MAX])
async def test_a_body_without_room_for_the_salt_is_refused(tmp_path: Path, num_keys: int) -> None:
    path = tenants_file(tmp_path, {"name": "a"})
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], tenants_file=path) as router:
        body = {"prompt": "x", "stream": True} | {f"k{index}": 1 for index in range(num_keys - 2)}
        async with connected(router) as client:
            post(client, body, "sk-a")
            status = await read(client)
        assert status == (400 if num_keys == KEYS_MAX else 200)
        await idle(router)
        assert newest(router)["outcome"] == ("failed" if num_keys == KEYS_MAX else "completed")


async def test_a_request_that_no_engine_was_asked_for_costs_its_tenant_no_tokens(tmp_path: Path) -> None:
    gate = Gate()
    knobs = {"kv_bytes_per_token": 1_000_000, "cold_min_bytes": 100_000_000, "cold_queue_max": 0}
    path = tenants_file(tmp_path, {"name": "a"})
    async with (
        engine(prefills_at(gate)) as p,
        engine(streams) as d,
        routing([p], [d], tenants_file=path, **knobs) as router,
        crowd(router) as clients,
    ):
        first = clients.ask("sk-a", prompt=[7] * 200)
        await until(lambda: gate.standing, "the first is prefilled")
        before = tenant(router, "a").admitted_cost
        refused = await ask_as(router, "sk-a", prompt=[7] * 200)
        assert (refused.status, error_of(refused)["code"]) == (429, "cold_queue_full")
        assert tenant(router, "a").admitted_cost == before
        gate.open()
        assert (await first).status == 200
        await idle(router)


async def test_a_high_limit_of_tokens_is_not_charged_before_they_are_answered(tmp_path: Path) -> None:
    gate = Gate()
    path = tenants_file(tmp_path, {"name": "a", "tokens_per_s": 100, "tokens_burst": 5000})
    async with engine(prefills) as p, engine(streams_at(gate)) as d, routing([p], [d], tenants_file=path) as router:
        async with crowd(router) as clients:
            for _ in range(4):
                clients.ask("sk-a", max_tokens=1_000_000)
            await until(lambda: len(gate.standing) == 4, "all are served at once")
            assert tenant(router, "a").num_waiting == 0
        await idle(router)


# ---- prompts ---------------------------------------------------------------------------------------------------------


def test_the_prompt_is_what_the_engine_reads_on_that_route() -> None:
    body = scan(json.dumps({"prompt": "x", "messages": [{"role": "user", "content": TEXT}], "token_ids": [1]}).encode())
    prompts = Prompts()
    chat = prompts.read("/v1/chat/completions", body, "")
    plain = prompts.read("/v1/completions", body, "")
    tokens = prompts.read("/inference/v1/generate", body, "")
    assert chat is not None and plain is not None and tokens is not None  # noqa: PT018
    assert chat.data.startswith(b"[{")
    assert (plain.data, tokens.num_tokens) == (b'"x"', 1)
    assert chat.num_tokens > 1000
    assert prompts.read("/v1/responses", body, "") is None


def test_tools_and_system_are_text_that_is_computed() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": TEXT}}]
    messages = [{"role": "user", "content": "hello"}]
    plain = Prompts().read("/v1/chat/completions", scan(json.dumps({"messages": messages}).encode()), "")
    body = scan(json.dumps({"messages": messages, "tools": tools}).encode())
    prompts = Prompts()
    prompt = prompts.read("/v1/chat/completions", body, "")
    assert plain is not None and prompt is not None  # noqa: PT018
    assert prompt.num_tokens > plain.num_tokens + 1000
    num_bytes = len(prompt.data) + len(json.dumps(tools))
    for _ in range(200):
        prompts.learn(body, prompt, num_bytes // 5)
    learnt = prompts.read("/v1/chat/completions", body, "")
    assert learnt is not None
    assert learnt.num_tokens == pytest.approx(num_bytes / 5, rel=0.05)


async def test_answers_of_tokenizers_are_remembered_for_one_scope_alone() -> None:
    async with asking() as world:
        for scope in (b"a", b"b", b"a"):
            assert await world.tokenizing.token_ids(world.endpoint, b"abc", scope) is not None
        assert world.count("asked") == 2


# ---- cold prompts ----------------------------------------------------------------------------------------------------


class Watched:
    """Cold-transfer admission that keeps what it is told a decode engine pulls."""

    def __init__(self, admission: ColdAdmission) -> None:
        self._admission = admission
        self.pulls: list[int | None] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._admission, name)

    def prefill_answered(self, item: Any, decode: Any, now_s: float, num_tokens: int | None) -> Any:
        self.pulls.append(num_tokens)
        return self._admission.prefill_answered(item, decode, now_s, num_tokens)


@pytest.mark.interpreted  # compiled classes take only what is theirs
async def test_without_tokens_what_was_sent_tells_who_is_warm_and_what_is_pulled() -> None:
    """Tokens are wanted here, and none are known in time."""
    gate = Gate()
    gate.open()
    knobs = AWARE | {"kv_bytes_per_token": 1_000_000, "cold_min_bytes": 100_000_000}
    knobs |= {"local_max_tokens": 1, "tokenize_timeout_s": 0}
    async with engine(prefills_at(gate, 1250)) as p, engine(streams) as d, routing([p], [d], **knobs) as router:
        assert router.entry is not None
        assert router.cold is not None
        router.entry.cold = watched = Watched(router.cold)  # type: ignore[assignment]
        assert router.where is not None
        assert router.where.most_held(Prompt(b"s", b"x", 1)) is None
        for _ in range(2):
            assert (await ask_as(router, None, prompt=TEXT)).status == 200
        await idle(router)
        counts = cold(router).counts
        assert (counts["admitted_at_once"], counts["admitted_warm"]) == (1, 1)
        first, second = watched.pulls
        assert first == 1250
        assert second is not None
        assert second < 100, "the decode engine holds most of it"


async def test_an_answer_that_is_not_streamed_keeps_others_from_their_turn_no_longer_than_its_transfer_takes() -> None:
    gate = Gate()
    knobs = {"kv_bytes_per_token": 1_000_000_000, "cold_min_bytes": 1, "transfer_bytes_per_s": 1e10}
    knobs |= {"handover_timeout_s": 1.0}  # 3.3 GB in a third of it, and a prompt has 3
    async with engine(prefills) as p, engine(streams_at(gate)) as d, routing([p], [d], **knobs) as router:
        async with crowd(router) as clients:
            tasks = [clients.ask(None, prompt=[7, 7, 7], stream=False) for _ in range(3)]
            await until(lambda: len(gate.standing) == 3, "all are decoded at once")
            gate.open()
            assert [(await task).status for task in tasks] == [200] * 3
        await idle(router)


async def test_the_rates_of_an_engine_that_went_down_are_forgotten() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], kv_bytes_per_token=1000) as router:
        assert router.cold is not None
        prefill, decode = router.fleet.all()
        links = router.cold._transfers.links
        for _ in range(2):
            links.measured(prefill, decode, 1 << 30, 1.0)
        assert cold(router).rates
        take_down(router, decode)  # so its restart is noticed: its next answer names another life
        assert not cold(router).rates


# ---- the path "cached" -----------------------------------------------------------------------------------------------


async def test_a_request_whose_engine_cannot_be_reached_is_prefilled_and_says_so() -> None:
    tokens = list(range(64))

    async def unused(seen: Seen, wire: Wire) -> None:
        raise AssertionError

    async with engine(prefills) as p, engine(streams) as d:
        gone = ScriptedEngine(unused, 9)  # nothing listens there
        knobs = {"local_max_tokens": 8, "tokenize_timeout_s": 0}
        async with routing([p], [gone, d], **knobs) as router:
            held = router.fleet.decode.find(gone.url)
            assert held is not None
            take_for_ready(router, held)
            router.fleet.kv_index.store(held, 0, StoredBlocks([1, 2, 3, 4], None, tokens, 16))
            reply = await ask_as(router, None, prompt=[*tokens, 1, 2])
            assert reply.status == 200
            assert reply.headers["x-antiphon-path"] == "pd"
            await idle(router)
            receipt = newest(router)
            assert (receipt["path"], receipt["decode"]) == ("pd", d.address)
            assert len(p.seen) == len(d.seen) == 1
            assert d.seen[0].params is not None
            assert isinstance(router.entry and router.entry.placer, Placer)


async def test_clients_that_leave_while_they_wait_leave_nothing(tmp_path: Path) -> None:
    gate = Gate()
    knobs = {"kv_bytes_per_token": 1_000_000, "cold_min_bytes": 100_000_000}
    path = tenants_file(tmp_path, {"name": "a", "queue_max": 4}, in_flight_max=4)
    async with (
        engine(prefills_at(gate)) as p,
        engine(streams) as d,
        routing([p], [d], tenants_file=path, **knobs) as router,
    ):
        async with crowd(router) as clients:
            for _ in range(12):
                clients.ask("sk-a", prompt=[7] * 200)
            await until(lambda: tenant(router, "a").num_waiting == 4, "some wait for their tenant")
            await until(lambda: cold(router).num_waiting == 7, "and some for their admission")
        await asyncio.wait_for(idle(router), 10)
        assert len(p.seen) <= 12
        check_idle(router)


async def test_cold_prompts_that_wait_keep_no_other_tenant_from_idle_engines(tmp_path: Path) -> None:
    gate = Gate()
    knobs = {"kv_bytes_per_token": 1_000_000, "cold_min_bytes": 100_000_000}
    path = tenants_file(tmp_path, {"name": "a"}, {"name": "b"}, in_flight_max=4)
    async with (
        engine(prefills_at(gate)) as lane,
        engine(prefills) as other,
        engine(streams) as d,
        routing([lane, other], [d], tenants_file=path, **knobs) as router,
        crowd(router) as clients,
    ):
        flood = [clients.ask("sk-a", prompt=[7] * 200) for _ in range(12)]
        await until(lambda: cold(router).num_waiting == 11, "all but one wait for their admission")
        assert (await ask_as(router, "sk-b", prompt="x")).status == 200
        assert router.tenants is not None
        router.tenants.validate()
        gate.open()
        assert {(await task).status for task in flood} == {200}
        await idle(router)


async def test_no_more_requests_step_aside_than_may_wait(tmp_path: Path) -> None:
    gate = Gate()
    knobs = {"kv_bytes_per_token": 1_000_000, "cold_min_bytes": 100_000_000}
    path = tenants_file(tmp_path, {"name": "a", "queue_max": 3}, in_flight_max=4)
    async with (
        engine(prefills_at(gate)) as p,
        engine(streams) as d,
        routing([p], [d], tenants_file=path, **knobs) as router,
        crowd(router) as clients,
    ):
        flood = [clients.ask("sk-a", prompt=[7] * 200) for _ in range(12)]
        await until(lambda: sum(task.done() for task in flood) == 2, "some are refused")
        assert cold(router).num_waiting == 6, "one is served; three are aside, and three have places"
        assert tenant(router, "a").num_waiting == 3
        gate.open()
        statuses = sorted([(await task).status for task in flood])
        assert statuses == [200] * 10 + [503] * 2
        await idle(router)


@pytest.mark.parametrize("model", ["lo/ra", "lo\\/ra"])
async def test_blocks_of_the_model_itself_are_not_those_of_its_adapter(model: str) -> None:
    """The name of an adapter is known from the blocks that it made."""
    tokens = list(range(64))
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d], local_max_tokens=8) as router:
        index, decode = router.fleet.kv_index, router.fleet.decode.ready[0]
        where, receipt = router.where, Receipt("r", "/v1/completions", 0.0)
        assert where is not None
        body = scan(f'{{"model":"{model}","prompt":{tokens}}}'.encode())

        def held() -> dict[str, int]:
            prompt = Prompts().read("/v1/completions", body, "")
            assert prompt is not None
            where.know(receipt, body, prompt, "")
            assert where.question("/v1/completions", body, prompt) is None
            return dict(where.held(receipt, prompt)[0])

        index.store(decode, 0, StoredBlocks([1, 2, 3], None, tokens[:48], 16))
        assert held() == {decode.address: 48}, "nothing says yet that it is no model"
        of_adapter = StoredBlocks([7], None, tokens[:16], 16)
        of_adapter.adapter = "lo/ra"
        index.store(decode, 0, of_adapter)
        assert held() == {decode.address: 16}
        index.validate()
