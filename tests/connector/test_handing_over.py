"""KV handed over through cache servers: two engines with the connector's own threads, beside real cache servers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.chunks import chunk_keys
from antiphon.protocol.cache_handoff import PARAM, HandoffKey, is_asked_for, read_key
from tests.cache_server.handoff_processes import ServerProcess, Servers, servers
from tests.cache_server.world import wait_for
from tests.connector.blocks import CHUNK_SIZE
from tests.connector.engine import EngineRequest, Status
from tests.connector.harness import Harness

NewHarness = Callable[..., Harness]
DEADLINE_S = 30.0
PROMPT = list(range(100, 160))
NUM_HANDED = len(PROMPT) // CHUNK_SIZE * CHUNK_SIZE
ASKED = {PARAM: True}


# ---- what the key is -------------------------------------------------------------------------------------------------

KEY = HandoffKey("server", "life", "127.0.0.1:6755", bytes(range(32)), bytes(range(1, 33)), 512)


def test_a_key_comes_back_as_it_was() -> None:
    params = json.loads(json.dumps(KEY.as_params()))
    assert read_key(params) == KEY
    assert not is_asked_for(params)


@pytest.mark.parametrize("name", list(KEY.as_params()[PARAM]))
@pytest.mark.parametrize("value", [None, -1, 0, "", "zz", "x" * 400, [], {}, True])
def test_a_key_that_cannot_be_is_none(name: str, value: object) -> None:
    if (name, value) == ("address", "") or (name in ("server", "incarnation", "address") and value == "zz"):
        return  # that can be
    params = KEY.as_params()
    params[PARAM][name] = value
    found = read_key(params)
    assert found is None or (name == "num_tokens" and value is True), found


@pytest.mark.parametrize("params", [None, {}, {PARAM: True}, {PARAM: None}, {PARAM: []}, {PARAM: {}}])
def test_other_params_are_no_key(params: dict[str, Any] | None) -> None:
    assert read_key(params) is None


# ---- on fakes --------------------------------------------------------------------------------------------------------


def test_a_prefill_that_is_asked_says_what_it_stores(new_harness: NewHarness) -> None:
    harness = new_harness()
    request = harness.run(PROMPT, kv_transfer_params=dict(ASKED))
    key = read_key(request.answered)
    assert key is not None
    assert harness.server is not None
    assert (key.server, key.incarnation, key.address) == ("fake", harness.server.incarnation, "")
    assert key.num_tokens == NUM_HANDED
    assert harness.expected[key.last_key], "the last chunk of the prompt"
    harness.assert_idle()


@pytest.mark.parametrize("why", ["not asked", "short", "no store", "no server"])
def test_else_it_says_nothing(new_harness: NewHarness, why: str) -> None:
    harness = new_harness(can_store=why != "no store", has_server=why != "no server")
    tokens = PROMPT[: CHUNK_SIZE - 1] if why == "short" else PROMPT
    request = harness.run(tokens, kv_transfer_params=None if why == "not asked" else dict(ASKED))
    assert request.answered is None
    harness.assert_idle()


def test_an_aborted_prefill_says_nothing(new_harness: NewHarness) -> None:
    harness = new_harness()
    request = harness.add(PROMPT, max_new_tokens=50, kv_transfer_params=dict(ASKED))
    for _ in range(20):
        harness.step()
        harness.deliver()
    harness.engine.abort(request.request_id)
    harness.settle()
    assert request.status is Status.FINISHED_ABORTED
    assert request.answered is None
    harness.assert_idle()


def test_what_was_handed_over_is_reported_as_that(new_harness: NewHarness) -> None:
    harness = new_harness()
    handed = harness.run(PROMPT, kv_transfer_params=dict(ASKED))
    harness.engine.pool.reset()
    request = harness.run(PROMPT, kv_transfer_params=handed.answered)
    report = harness.report_of(request)
    assert (report.remote_prefill, report.l1) == (NUM_HANDED, 0)
    assert report.computed == len(PROMPT) - NUM_HANDED
    harness.assert_idle()


# ---- with real servers -----------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[Servers]:
    with servers(tmp_path, die_with_parent) as started:
        yield started


def settle(*harnesses: Harness) -> None:
    def is_idle() -> bool:
        for harness in harnesses:
            harness.step()
        return not any(harness.engine.has_work or harness.scheduler_side._jobs for harness in harnesses)

    wait_for(is_idle, "no request is left", DEADLINE_S)


def prefill(harness: Harness, tokens: list[int]) -> EngineRequest:
    """Again and again until the connection and the gate are there, so that a key is answered."""
    asked: list[EngineRequest] = []

    def has_answer() -> bool:
        if not asked or asked[-1].is_finished:
            asked.append(harness.add(tokens, 1, kv_transfer_params=dict(ASKED)))
        harness.step()
        return asked[-1].answered is not None

    wait_for(has_answer, "a prefill says what it stores", DEADLINE_S)
    return asked[-1]


def decode(harness: Harness, tokens: list[int], params: dict[str, Any]) -> EngineRequest:
    request = harness.add(tokens, 2, kv_transfer_params=params)
    settle(harness)
    assert request.status is Status.FINISHED_STOPPED
    return request


def warm(harness: Harness) -> None:
    """Until the engine's connection and gate are there."""
    prefill(harness, list(range(900, 900 + CHUNK_SIZE)))
    settle(harness)


def assert_handed_over(request: EngineRequest) -> None:
    assert request.sources.count("computed") == len(PROMPT) - NUM_HANDED < CHUNK_SIZE, request.sources
    assert request.sources.count("l1") == NUM_HANDED


@dataclass
class Pair:
    """Two engines, each beside a cache server of its own; the servers are peers. The first has prefilled ``PROMPT`` and
    answered ``params``; its stores may still run."""

    first: ServerProcess
    second: ServerProcess
    prefiller: Harness
    decoder: Harness
    params: dict[str, Any]


@pytest.fixture
def pair(new_harness: NewHarness, made: Servers) -> Pair:
    first, second = made.peers(chunk_size=CHUNK_SIZE)
    prefiller = new_harness(real_port=first.port, engine="p")
    decoder = new_harness(real_port=second.port, engine="d")
    warm(decoder)
    request = prefill(prefiller, PROMPT)
    assert request.answered is not None
    return Pair(first, second, prefiller, decoder, request.answered)


@pytest.mark.process
def test_one_server_for_both_waits_for_the_commit(new_harness: NewHarness, made: Servers) -> None:
    port = made.one("one", chunk_size=CHUNK_SIZE).port
    prefiller, decoder = new_harness(real_port=port, engine="p"), new_harness(real_port=port, engine="d")
    warm(decoder)
    num_whole = 0
    for number in range(5):  # a machine that is busy may keep a server from answering in time: a store is dropped then
        prompt = [number * 100 + token for token in PROMPT]
        request = prefill(prefiller, prompt)  # its stores run still
        assert request.answered is not None
        num_whole += decode(decoder, prompt, request.answered).sources.count("computed") == len(PROMPT) - NUM_HANDED
        settle(prefiller)
    assert num_whole >= 3
    assert not prefiller.faults.records + decoder.faults.records


@pytest.mark.process
def test_two_servers_hand_over_as_peers(pair: Pair) -> None:
    key = read_key(pair.params)
    assert key is not None
    assert key.address
    assert_handed_over(decode(pair.decoder, PROMPT, pair.params))
    settle(pair.prefiller)
    assert not pair.prefiller.faults.records + pair.decoder.faults.records
    assert pair.second.get("/status")["peers"]["counts"]["pulled"] == NUM_HANDED // CHUNK_SIZE


@pytest.mark.process
def test_the_death_of_the_prefill_engine_after_its_store_costs_nothing(pair: Pair) -> None:
    settle(pair.prefiller)
    for connector in (*pair.prefiller.workers, pair.prefiller.scheduler):
        connector.shutdown()  # its sockets end, as with a process that is killed
    assert_handed_over(decode(pair.decoder, PROMPT, pair.params))


@pytest.mark.process
def test_the_death_of_its_server_makes_the_decode_engine_compute(pair: Pair) -> None:
    pair.first.end()
    began_s = time.monotonic()
    decoded = decode(pair.decoder, PROMPT, pair.params)
    assert decoded.sources.count("computed") == len(PROMPT)
    assert time.monotonic() - began_s < 3.0, "it waited to the deadline although nobody can bring it"
    assert pair.second.get("/status")["peers"]["counts"]["failed"] >= 1


@pytest.mark.process
@pytest.mark.parametrize("change", ["incarnation", "address", "last_key", "namespace"])
def test_a_forged_or_stale_key_makes_the_decode_engine_compute(pair: Pair, change: str) -> None:
    settle(pair.prefiller)
    values = pair.params[PARAM]
    values[change] = {
        "incarnation": "another",
        "address": f"127.0.0.1:{pair.first.ports['http_port']}",
        "last_key": bytes(32).hex(),
        "namespace": bytes(range(32)).hex(),
    }[change]
    decoded = decode(pair.decoder, PROMPT, pair.params)
    # It is not followed; the directory of the coordinator may know some of the chunks all the same.
    assert decoded.sources.count("computed") >= len(PROMPT) - NUM_HANDED
    status = pair.second.get("/status")
    if change in ("last_key", "namespace"):
        assert status["handoffs"] == {"other_meaning": 1}
    else:
        assert status["handoffs"] == {"elsewhere": 1}
        assert status["peers"]["counts"]["failed"] >= 1
    assert not pair.decoder.faults.records


@pytest.mark.process
def test_an_abort_while_it_waits_leaves_nothing(new_harness: NewHarness, made: Servers) -> None:
    server = made.one("one", chunk_size=CHUNK_SIZE)
    decoder = new_harness(real_port=server.port, engine="d")
    warm(decoder)
    request = prefill(decoder, PROMPT)
    settle(decoder)
    key = read_key(request.answered)
    assert key is not None
    decoder.engine.pool.reset()
    longer = [*PROMPT, *range(200, 200 + 2 * CHUNK_SIZE)]
    params = key_for(decoder, longer, key).as_params()
    waiting = decoder.add(longer, 2, kv_transfer_params=params)
    decoder.step()
    decoder.engine.abort(waiting.request_id)
    settle(decoder)
    assert decoder.scheduler_side.num_tracked == 0
    wait_for(lambda: server.num_leases == 0, "no lease is left", DEADLINE_S)


def key_for(harness: Harness, tokens: list[int], key: HandoffKey) -> HandoffKey:
    """As if a prefill engine had said that it stores all of these tokens."""
    keys = chunk_keys(key.namespace, tokens, CHUNK_SIZE)
    return HandoffKey(key.server, key.incarnation, key.address, key.namespace, keys[-1], len(keys) * CHUNK_SIZE)
