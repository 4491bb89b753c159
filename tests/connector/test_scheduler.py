"""What the scheduler side promises, plans and reports, case by case, through the hooks that vLLM calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.connector.plan import LoadPlan, StepPlan, StorePlan
from antiphon.protocol import cache as calls
from tests.connector.blocks import CHUNK_SIZE
from tests.connector.engine import EngineOptions, EngineRequest, Status
from tests.connector.harness import Harness

NewHarness = Callable[..., Harness]
PROMPT = list(range(100, 128))
"""Three chunks of eight, and half of one."""


def sources(harness: Harness, request: EngineRequest) -> tuple[int, int, int, int]:
    report = harness.report_of(request)
    return report.device, report.l1, report.remote_prefill, report.computed


def forget_blocks(harness: Harness, request: EngineRequest, first_token: int) -> None:
    """The engine's own cache loses this prompt from a token on."""
    for state in request.states[first_token:]:
        block = harness.engine.pool.cached.pop(state, None)
        if block is not None:
            del harness.engine.pool.hash_of[block]


def slow(*kinds: type[calls.Body]) -> Callable[[Any], None]:
    def prepare(session: Any) -> None:
        session.is_slow = lambda body: isinstance(body, kinds)

    return prepare


def make_slow(harness: Harness, *kinds: type[calls.Body]) -> None:
    """Answers to these calls come when they are delivered."""
    for client in harness.clients:
        slow(*kinds)(client.session)


# ---- what is found ---------------------------------------------------------------------------------------------------


def test_a_prompt_is_stored_found_and_loaded(new_harness: NewHarness) -> None:
    harness = new_harness()
    assert sources(harness, harness.run(PROMPT)) == (0, 0, 0, 28)
    harness.engine.pool.reset()
    assert sources(harness, harness.run(PROMPT)) == (0, 24, 0, 4)
    assert sources(harness, harness.run(PROMPT)) == (24, 0, 0, 4)
    assert harness.engine.num_loads == 1
    harness.assert_idle()


@pytest.mark.parametrize("num_tokens", [7, 8, 9, 16, 23, 24, 25])
def test_the_last_prompt_token_is_computed_whatever_is_found(new_harness: NewHarness, num_tokens: int) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    found = num_tokens // CHUNK_SIZE * CHUNK_SIZE
    loaded = min(found, num_tokens - 1)
    assert sources(harness, harness.run(PROMPT[:num_tokens])) == (0, loaded, 0, num_tokens - loaded)
    harness.assert_idle()


@pytest.mark.parametrize("num_local", [4, 8, 12, 16, 20, 24])
def test_a_local_hit_is_continued_in_the_middle_of_a_chunk(new_harness: NewHarness, num_local: int) -> None:
    harness = new_harness()
    first = harness.run(PROMPT)
    forget_blocks(harness, first, num_local)
    assert sources(harness, harness.run(PROMPT)) == (num_local, 24 - num_local, 0, 4)
    harness.assert_idle()


def test_a_local_hit_longer_than_what_the_cache_has_gives_the_lease_back(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT[:9])
    longer = harness.run([*PROMPT[:20]], 1)
    harness.scheduler.reset_cache()
    harness.run(PROMPT[:9])
    make_slow(harness)
    again = harness.run(PROMPT[:20])
    assert sources(harness, again)[0] == 16
    assert harness.engine.num_loads == 0
    assert harness.server is not None
    assert harness.server.num_calls["Release"] >= 1
    assert sources(harness, longer) == (8, 0, 0, 12)
    harness.assert_idle()


def test_output_is_stored_and_found_too(new_harness: NewHarness) -> None:
    harness = new_harness()
    first = harness.run(PROMPT, max_new_tokens=14)
    harness.engine.pool.reset()
    again = harness.run(first.all_token_ids)
    assert sources(harness, again) == (0, 40, 0, 2)


def test_what_two_salts_hold_is_not_shared(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT, salt=1)
    harness.engine.pool.reset()
    assert sources(harness, harness.run(PROMPT, salt=2)) == (0, 0, 0, 28)


def test_requests_without_reuse_and_short_ones_never_ask(new_harness: NewHarness) -> None:
    harness = new_harness()
    bypassed = harness.run(PROMPT, reads_no_cache=True)
    harness.run(PROMPT[: CHUNK_SIZE - 1], max_new_tokens=1)
    assert harness.server is not None
    assert "Lookup" not in harness.server.num_calls
    assert sources(harness, bypassed) == (0, 0, 0, 28)
    harness.assert_idle()


@pytest.mark.parametrize(("can_load", "can_store"), [(True, False), (False, True)])
def test_loading_and_storing_can_be_turned_off(new_harness: NewHarness, can_load: bool, can_store: bool) -> None:
    harness = new_harness(can_load=can_load, can_store=can_store)
    harness.run(PROMPT)
    harness.engine.pool.reset()
    harness.run(PROMPT)
    assert harness.server is not None
    assert ("Lookup" in harness.server.num_calls) == can_load
    assert ("Reserve" in harness.server.num_calls) == can_store
    assert harness.engine.num_loads == 0


def test_a_request_that_another_connector_loads_is_left_to_it_and_stored(new_harness: NewHarness) -> None:
    harness = new_harness()
    handed_over = harness.run(PROMPT, kv_transfer_params={"do_remote_prefill": True})
    assert sources(harness, handed_over) == (0, 0, 27, 1)
    assert harness.server is not None
    assert "Lookup" not in harness.server.num_calls
    harness.engine.pool.reset()
    assert sources(harness, harness.run(PROMPT)) == (0, 24, 0, 4)
    harness.assert_idle()


def test_a_hand_over_that_fails_is_looked_up(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    harness.engine.pull_failure_chance = 1.0
    retried = harness.run(PROMPT, kv_transfer_params={"do_remote_prefill": True})
    assert sources(harness, retried) == (0, 24, 0, 4)
    harness.assert_idle()


# ---- answers that come late, or never --------------------------------------------------------------------------------


def test_a_request_waits_for_an_answer_that_may_still_come(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    make_slow(harness, calls.Lookup)
    request = harness.add(PROMPT)
    harness.step()
    assert request.status is Status.WAITING
    harness.deliver()
    harness.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    harness.settle()
    assert sources(harness, request) == (0, 24, 0, 4)


def test_a_late_answer_is_a_miss_and_given_back(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    make_slow(harness, calls.Lookup)
    request = harness.add(PROMPT)
    harness.step()
    harness.clock.advance(0.051)
    harness.step()
    assert request.status is Status.RUNNING
    harness.deliver()
    harness.settle()
    assert sources(harness, request) == (0, 0, 0, 28)
    harness.assert_idle()


def test_a_server_that_hangs_is_neither_asked_nor_offered_anything(new_harness: NewHarness) -> None:
    harness = new_harness()
    assert harness.server is not None
    for client in harness.clients:
        assert client.session is not None
        client.session.is_responsive = False
    before = dict(harness.server.num_calls)
    request = harness.add(PROMPT)
    harness.step()
    assert request.status is Status.RUNNING, "it must not wait a step"
    harness.settle()
    assert harness.server.num_calls == {**before, "Report": 1}
    harness.assert_idle()


@pytest.mark.parametrize(("waits_s", "num_lookups"), [(0.1, 1), (1.1, 4)])
def test_only_an_old_miss_is_looked_up_again(new_harness: NewHarness, waits_s: float, num_lookups: int) -> None:
    harness = new_harness()
    assert harness.server is not None
    taken = harness.engine.pool.take(len(harness.engine.pool.free))
    harness.add(PROMPT)  # no room: it is asked for in every step, the first time long after it came
    for _ in range(3):
        harness.clock.advance(waits_s)
        harness.step()
    assert harness.server.num_calls["Lookup"] == num_lookups
    harness.engine.pool.give_back(taken)
    harness.settle()
    harness.assert_idle()


def test_an_allocation_that_fails_keeps_the_promise(new_harness: NewHarness) -> None:
    harness = new_harness(EngineOptions(num_blocks=14, running_max=2))
    harness.run(PROMPT)
    harness.engine.pool.reset()
    assert harness.server is not None
    harness.add([7] * 30, max_new_tokens=4)
    for _ in range(2):
        harness.step()
    lookups = harness.server.num_calls["Lookup"]
    request = harness.add(PROMPT)
    for _ in range(2):
        harness.step()
        assert request.status is Status.WAITING
        assert harness.server.num_leases == 1
    harness.settle()
    assert sources(harness, request) == (0, 24, 0, 4)
    assert harness.server.num_calls["Lookup"] == lookups + 1
    harness.assert_idle()


# ---- the gate --------------------------------------------------------------------------------------------------------


def test_nothing_is_looked_up_or_stored_before_the_gates_have_passed(new_harness: NewHarness) -> None:
    harness = new_harness(EngineOptions(num_ranks=2))
    server, late = harness.server, harness.clients[2]
    assert server is not None
    assert late.session is not None
    server.gates[late.session.connection] = "not_run"
    harness.run(PROMPT)
    assert "Lookup" not in server.num_calls
    assert "Reserve" not in server.num_calls
    assert server.num_calls["AskProcesses"] <= 4, "it is not asked in every step"
    server.gates[late.session.connection] = "passed"
    harness.clock.advance(1.0)
    harness.run(PROMPT)
    assert server.num_calls["Reserve"] >= 1
    harness.assert_idle()


def test_a_request_waits_for_the_first_answer_about_the_gates(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    harness.clients[0].lose()
    assert harness.server is not None
    harness.prepare = slow(calls.AskProcesses)
    harness.reconnect()
    request = harness.add(PROMPT)
    harness.step()
    assert request.status is Status.WAITING
    harness.deliver()
    harness.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    harness.settle()
    assert sources(harness, request) == (0, 24, 0, 4)
    harness.assert_idle()


# ---- loads that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_local", [0, 12])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_failed_load_is_computed_and_not_promised_again(
    new_harness: NewHarness, num_local: int, num_ranks: int
) -> None:
    harness = new_harness(EngineOptions(num_ranks=num_ranks))
    forget_blocks(harness, harness.run(PROMPT), num_local)
    request = harness.add(PROMPT)
    harness.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    harness.lose_server()
    harness.clock.advance(10.0)
    harness.step()
    harness.sides[0]._sessions.let_go(None, 0.0, (), True)
    harness.clock.advance(10.0)
    harness.sides[0]._sessions.let_go(None, 0.0, (), True)  # the first rank has no arena any more
    harness.start_server()
    harness.settle()
    assert harness.engine.num_failed_loads == 1
    assert harness.engine.loads_of[request.request_id] == 1
    assert request.status is Status.FINISHED_STOPPED
    assert request.sources.count("l1") == 0
    harness.engine.pool.reset()
    assert sources(harness, harness.run(PROMPT)) == (0, 24, 0, 4), "what was computed instead was stored"
    harness.assert_idle()


def test_a_failed_load_ends_its_request_where_vllm_says_so(new_harness: NewHarness) -> None:
    harness = new_harness(EngineOptions(recomputes_failed_loads=False))
    harness.run(PROMPT)
    harness.engine.pool.reset()
    request = harness.add(PROMPT)
    harness.step()
    harness.sides[0].run_load(between=_fail)
    harness.settle()
    assert request.status is Status.FINISHED_ERROR
    assert sources(harness, harness.run(PROMPT)) == (0, 24, 0, 4)
    harness.assert_idle()


@pytest.mark.parametrize("recomputes", [True, False])
def test_nothing_is_promised_after_a_failed_load_until_the_workers_are_asked_again(
    new_harness: NewHarness, recomputes: bool
) -> None:
    """The worker has lost its connection: one load finds none that covers it, the requests behind it are computed."""
    harness = new_harness(EngineOptions(recomputes_failed_loads=recomputes))
    harness.run(PROMPT)
    harness.engine.pool.reset()
    server, worker = harness.server, harness.clients[1]
    assert server is not None
    first = harness.add(PROMPT)
    harness.step()
    assert first.status is Status.WAITING_FOR_REMOTE_KVS
    worker.lose()
    harness.clock.advance(10.0)
    for _ in range(2):
        harness.sides[0]._sessions.let_go(None, 0.0, (), True)
        harness.clock.advance(10.0)
    harness.dispose()
    server.num_calls.clear()
    behind = harness.add(PROMPT)  # looked up, and promised nothing yet
    assert server.num_calls["Lookup"] == 1
    taken = harness.engine.pool.take(len(harness.engine.pool.free))
    harness.run_copies()
    harness.step()  # it is told that the load failed
    harness.engine.pool.give_back(taken)
    later = harness.add(PROMPT)
    harness.settle()
    assert harness.engine.num_failed_loads == 1
    assert first.status is (Status.FINISHED_STOPPED if recomputes else Status.FINISHED_ERROR)
    assert [one.status for one in (behind, later)] == [Status.FINISHED_STOPPED] * 2
    assert server.num_calls["AskProcesses"] >= 1
    assert harness.engine.num_loads == 1
    worker.connect(server)
    harness.clock.advance(1.0)
    harness.engine.pool.reset()
    assert sources(harness, harness.run(PROMPT)) == (0, 24, 0, 4), "it is back with the worker"
    harness.assert_idle()


def test_tokens_are_not_hashed_for_stores_before_the_gates_have_passed(new_harness: NewHarness) -> None:
    harness = new_harness()
    assert harness.server is not None
    for connection in harness.server.gates:
        harness.server.gates[connection] = "not_run"
    request = harness.add(PROMPT, max_new_tokens=4)
    harness.step()
    harness.step()
    tracked = harness.scheduler_side._requests[request.request_id]
    assert tracked.chain is not None
    assert tracked.chain.num_tokens == 0
    harness.settle()
    harness.assert_idle()


def _fail() -> None:
    raise calls.error_of(calls.Failure("protocol_error", "that is no place for a chunk"))


# ---- the server comes and goes ---------------------------------------------------------------------------------------


def test_a_promise_of_a_server_that_died_is_kept_from_its_arena(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    request = harness.add(PROMPT)
    harness.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    harness.lose_server()
    harness.settle()
    assert harness.engine.num_failed_loads == 0
    assert request.sources.count("l1") == 24


def test_a_server_that_dies_between_lookup_and_admission_is_a_miss(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    request = harness.add(PROMPT)
    harness.lose_server()
    harness.settle()
    assert request.sources.count("computed") == 28
    harness.start_server()
    harness.run(PROMPT)
    harness.assert_idle()


@pytest.mark.parametrize("when", ["answered", "promised", "loading"])
def test_a_lease_is_released_on_the_next_connection_to_the_same_server(new_harness: NewHarness, when: str) -> None:
    harness = new_harness(EngineOptions(num_blocks=14, running_max=2))
    harness.run(PROMPT)
    harness.engine.pool.reset()
    assert harness.server is not None
    if when == "promised":
        harness.add([7] * 30, max_new_tokens=4)
        harness.step()
        harness.step()
    harness.add(PROMPT)
    if when != "answered":
        harness.step()
    assert harness.server.num_leases == 1
    harness.clients[0].lose()
    harness.dispose()
    harness.step()
    harness.reconnect()
    harness.settle()
    harness.assert_idle()


@pytest.mark.parametrize("is_seen_by_the_server", [False, True])
def test_a_release_that_was_not_answered_is_sent_again_to_the_same_server(
    new_harness: NewHarness, is_seen_by_the_server: bool
) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    assert harness.server is not None
    session = harness.clients[0].session
    assert session is not None
    session.is_slow = lambda body: isinstance(body, calls.Release)
    harness.add(PROMPT)
    for _ in range(3):
        harness.step()
        harness.run_copies()
    assert [type(pending.body) for pending in session.queue] == [calls.Release]
    if is_seen_by_the_server:  # only its answer is lost
        harness.server.answer(session.connection, session.queue[0].body)
    harness.clients[0].lose()
    harness.dispose()
    assert harness.server.num_leases == (0 if is_seen_by_the_server else 1)
    harness.reconnect()
    assert harness.server.num_leases == 0, "no step of the engine is needed for it"
    harness.server.num_bad_releases = 0
    releases = harness.server.num_calls["Release"]
    harness.clients[0].lose()
    harness.reconnect()
    assert harness.server.num_calls["Release"] == releases, "what was answered is not sent again"
    harness.settle()
    harness.assert_idle()


def test_a_queued_promise_is_loaded_though_the_workers_have_another_connection(new_harness: NewHarness) -> None:
    """The scheduler's connection was there all the time: the lease is held, through whichever connection it is read."""
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    taken = harness.engine.pool.take(len(harness.engine.pool.free))
    request = harness.add(PROMPT)
    harness.step()
    harness.clients[1].lose()
    for _ in range(2):
        harness.clock.advance(10.0)
        harness.sides[0].let_go()
        harness.dispose()
    assert harness.clients[1].all[0].is_disposed
    harness.reconnect()
    harness.clock.advance(0.1)
    harness.engine.pool.give_back(taken)
    harness.settle()
    assert harness.engine.num_failed_loads == 0
    assert sources(harness, request) == (0, 24, 0, 4)
    harness.assert_idle()


def test_what_a_late_lookup_found_is_owed_too(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    assert harness.server is not None
    make_slow(harness, calls.Lookup, calls.Release)
    harness.add(PROMPT)
    harness.step()
    harness.clock.advance(0.051)
    harness.step()
    session = harness.clients[0].session
    assert session is not None
    session.deliver(1)
    assert [type(pending.body) for pending in session.queue] == [calls.Release]
    harness.clients[0].lose()
    harness.dispose()
    assert harness.server.num_leases == 1
    harness.reconnect()
    assert harness.server.num_leases == 0
    harness.settle()
    harness.assert_idle()


def test_an_engine_without_a_server_serves(new_harness: NewHarness) -> None:
    harness = new_harness(has_server=False)
    assert harness.run(PROMPT).status is Status.FINISHED_STOPPED
    harness.start_server()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    assert sources(harness, harness.run(PROMPT)) == (0, 24, 0, 4)
    harness.assert_idle()


def test_clearing_reaches_the_server(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    assert harness.scheduler.reset_cache() is True
    assert sources(harness, harness.run(PROMPT)) == (0, 0, 0, 28)
    harness.lose_server()
    assert harness.scheduler.reset_cache() is True


# ---- plans -----------------------------------------------------------------------------------------------------------


def test_a_plan_survives_the_way_to_the_workers() -> None:
    region = calls.Region(4096, 8192, 7)
    plan = StepPlan(
        loads=[LoadPlan("one", "life", (region,), 1, (4, 5), 12.5)],
        stores=[StorePlan(3, "two", b"n" * 32, "tenant", None, (b"k" * 32,), (8, 9))],
        preempted=["three"],
        finished=["four"],
        incarnation="life",
        made_at_s=13.5,
        cancel_stores=True,
    )
    assert pickle.loads(pickle.dumps(plan)) == plan
