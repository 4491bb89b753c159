"""How requests end, and how stores do: aborts at every stage, preemption, held-back blocks, and hooks that fail."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.protocol import cache as calls
from tests.connector.engine import EngineOptions, EngineRequest, Status
from tests.connector.fakes import FakeTensor
from tests.connector.harness import Harness

NewHarness = Callable[..., Harness]
PROMPT = list(range(100, 128))


def step_without_copies(harness: Harness, number: int = 1) -> None:
    for _ in range(number):
        harness.step()


def run_until(harness: Harness, request: EngineRequest, status: Status) -> None:
    for _ in range(50):
        if request.status is status:
            return
        harness.step()
    raise AssertionError(f"the request is {request.status}")


# ---- aborts ----------------------------------------------------------------------------------------------------------


def abort_waiting_for_the_lookup(harness: Harness) -> EngineRequest:
    for client in harness.clients:
        assert client.session is not None
        client.session.is_slow = lambda body: isinstance(body, calls.Lookup)
    request = harness.add(PROMPT)
    harness.step()
    assert request.status is Status.WAITING
    return request


def abort_answered(harness: Harness) -> EngineRequest:
    return harness.add(PROMPT)


def abort_waiting_for_the_load(harness: Harness) -> EngineRequest:
    request = harness.add(PROMPT)
    harness.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    return request


def abort_loaded(harness: Harness) -> EngineRequest:
    request = abort_waiting_for_the_load(harness)
    harness.run_copies()
    harness.step()
    return request


def abort_running(harness: Harness) -> EngineRequest:
    request = abort_loaded(harness)
    harness.step()
    assert request.status is Status.RUNNING
    return request


def abort_storing(harness: Harness) -> EngineRequest:
    request = harness.add([*PROMPT[8:], *PROMPT])
    step_without_copies(harness, 2)
    assert harness.sides[0]._jobs
    return request


STAGES = (
    abort_waiting_for_the_lookup,
    abort_answered,
    abort_waiting_for_the_load,
    abort_loaded,
    abort_running,
    abort_storing,
)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("is_026", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_left_of_a_request_that_is_aborted(
    new_harness: NewHarness, stage: Callable[[Harness], EngineRequest], is_026: bool, num_ranks: int
) -> None:
    harness = new_harness(EngineOptions(is_026=is_026, num_ranks=num_ranks))
    harness.run(PROMPT)
    harness.engine.pool.reset()
    request = stage(harness)
    harness.engine.abort(request.request_id)
    harness.settle()
    assert request.status is Status.FINISHED_ABORTED
    harness.assert_idle()
    harness.assert_reports_add_up()


def test_an_abort_in_the_middle_of_a_load_waits_for_its_end(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    request = harness.add(PROMPT)
    harness.step()

    def between() -> None:
        harness.engine.abort(request.request_id)
        harness.step()
        assert request.request_id in harness.engine.requests, "its blocks are free while they are written"

    harness.sides[0].run_load(between)
    harness.settle()
    harness.assert_idle()


# ---- stores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_026", [False, True])
def test_blocks_of_a_finished_request_are_held_back_until_they_are_stored(
    new_harness: NewHarness, is_026: bool
) -> None:
    harness = new_harness(EngineOptions(is_026=is_026))
    request = harness.add(PROMPT, max_new_tokens=1)
    step_without_copies(harness, 6)
    assert request.status is Status.FINISHED_STOPPED
    assert len(harness.engine.pool.free) < harness.engine.pool.num_usable
    harness.run_copies()
    harness.step()
    assert len(harness.engine.pool.free) == harness.engine.pool.num_usable
    harness.settle()
    harness.assert_idle()


def test_a_store_has_ended_when_every_rank_has_ended_it(new_harness: NewHarness) -> None:
    harness = new_harness(EngineOptions(num_ranks=2))
    harness.add(PROMPT, max_new_tokens=1)
    step_without_copies(harness, 4)
    first, second = harness.sides
    while first.run_store():
        pass
    step_without_copies(harness, 3)
    assert harness.engine.has_work
    assert harness.scheduler_side._jobs
    while second.run_store():
        pass
    step_without_copies(harness, 2)
    assert not harness.engine.has_work
    harness.settle()
    harness.assert_idle()


def test_no_more_stores_run_than_allowed_and_what_was_left_is_offered_later(new_harness: NewHarness) -> None:
    harness = new_harness(EngineOptions(step_tokens_max=8, num_blocks=60), store_jobs_max=2)
    request = harness.add([*PROMPT, *PROMPT], max_new_tokens=20)
    for _ in range(12):
        harness.step()
        assert len(harness.scheduler_side._jobs) <= 2
    harness.settle()
    harness.engine.pool.reset()
    again = harness.run(request.all_token_ids)
    assert again.sources.count("l1") == len(request.all_token_ids) // 8 * 8
    harness.assert_idle()


def test_a_decode_stores_the_chunks_that_it_completes(new_harness: NewHarness) -> None:
    harness = new_harness()
    request = harness.add(PROMPT, max_new_tokens=22)
    harness.settle()
    harness.engine.pool.reset()
    again = harness.run(request.all_token_ids[:49])
    assert again.sources.count("l1") == 48
    harness.assert_idle()


def test_a_preempted_request_is_not_stored_from_blocks_that_others_have(new_harness: NewHarness) -> None:
    harness = new_harness(EngineOptions(num_blocks=16, running_max=3))
    requests = [harness.add([token] * 17, max_new_tokens=12) for token in (1, 2, 3)]
    harness.settle()
    assert sum(request.num_preemptions for request in requests) > 0
    harness.assert_idle()
    harness.assert_reports_add_up()


def test_one_that_was_preempted_and_loads_again_is_freed_once(new_harness: NewHarness) -> None:
    """Its cancelled store still waits for the server when it is aborted; vLLM frees it at the end of the load."""
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    request = harness.add([*PROMPT, *PROMPT], max_new_tokens=8)
    run_until(harness, request, Status.WAITING_FOR_REMOTE_KVS)
    harness.run_copies()
    run_until(harness, request, Status.RUNNING)
    step_without_copies(harness, 2)
    assert harness.sides[0]._jobs, "its store has not run"
    harness.engine.reset_prefix_cache()
    run_until(harness, request, Status.WAITING_FOR_REMOTE_KVS)
    assert harness.sides[0]._jobs
    harness.engine.abort(request.request_id)
    harness.settle()
    harness.assert_idle()


def test_what_a_preemption_kept_from_being_stored_is_stored_later(new_harness: NewHarness) -> None:
    harness = new_harness()
    request = harness.add(PROMPT, max_new_tokens=4)
    step_without_copies(harness, 2)
    assert harness.sides[0]._jobs
    harness.engine.reset_prefix_cache()
    harness.settle()
    assert request.num_preemptions == 1
    harness.engine.pool.reset()
    assert harness.run(PROMPT).sources.count("l1") == 24
    harness.assert_idle()


def test_running_requests_that_are_reset_resume_in_the_same_step(new_harness: NewHarness) -> None:
    harness = new_harness(EngineOptions(step_tokens_max=40))
    harness.run(PROMPT[:17])
    harness.engine.pool.reset()
    request = harness.add(PROMPT, max_new_tokens=6)
    run_until(harness, request, Status.WAITING_FOR_REMOTE_KVS)
    harness.run_copies()
    run_until(harness, request, Status.RUNNING)
    harness.engine.reset_prefix_cache()
    harness.settle()
    assert request.num_preemptions == 1
    report = harness.report_of(request)
    assert (report.device, report.l1, report.remote_prefill, report.computed) == (0, 16, 0, 12)
    assert report.num_preemptions == 1
    harness.assert_idle()


def test_only_what_was_completed_is_reported_as_finished(new_harness: NewHarness) -> None:
    harness = new_harness(EngineOptions(step_tokens_max=8))
    early, late, never = (harness.add([token] * 20, max_new_tokens=9) for token in (1, 2, 3))
    harness.step()
    harness.engine.abort(early.request_id)
    harness.engine.abort(never.request_id)
    for _ in range(4):
        harness.step()
    harness.engine.abort(late.request_id)
    harness.settle()
    assert harness.report_of(early).finish == "aborted"
    assert harness.report_of(early).computed == 8
    assert harness.report_of(late).finish == "finished"
    assert harness.server is not None
    assert len(harness.server.reports) == 2, "what never ran is not reported"


# ---- hooks that fail -------------------------------------------------------------------------------------------------

SCHEDULER_CALLS = (
    "new_request",
    "num_matched_tokens",
    "allocated",
    "scheduled",
    "take_plan",
    "finished",
    "worker_news",
)


def fail(*_arguments: Any, **_options: Any) -> None:
    raise RuntimeError("a bug")


def start_everything(harness: Harness) -> list[EngineRequest]:
    """One request that loads, one that stores, one that runs, one that waits."""
    harness.run(PROMPT)
    harness.engine.pool.reset()
    storing = harness.add([5] * 30, max_new_tokens=4)
    harness.step()
    loading = harness.add(PROMPT, max_new_tokens=4)
    harness.step()
    waiting = harness.add([6] * 20, max_new_tokens=4)
    return [storing, loading, waiting]


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("is_026", [False, True])
@pytest.mark.parametrize("call", SCHEDULER_CALLS)
def test_an_engine_outlives_a_scheduler_side_that_fails(
    new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch, call: str, is_026: bool, recomputes: bool
) -> None:
    """Also where vLLM does not compute what was not loaded: what was promised before is loaded."""
    harness = new_harness(EngineOptions(is_026=is_026, step_tokens_max=64, recomputes_failed_loads=recomputes))
    requests = start_everything(harness)
    monkeypatch.setattr(harness.scheduler_side, call, fail)
    requests.append(harness.add(PROMPT[:20], max_new_tokens=4))
    harness.settle()
    assert harness.scheduler.out_of_service is not None
    assert call in harness.faults.records[0] or "a bug" in harness.faults.records[0]
    assert [request.status for request in requests] == [Status.FINISHED_STOPPED] * 4
    assert harness.engine.num_failed_loads == 0
    assert len(harness.engine.pool.free) == harness.engine.pool.num_usable
    num_loads = harness.engine.num_loads
    assert harness.run(PROMPT).status is Status.FINISHED_STOPPED
    assert harness.engine.num_loads == num_loads, "it is out of service for good"


@pytest.mark.parametrize("call", ["scheduled", "take_plan"])
def test_a_load_that_was_planned_is_done_although_the_rest_of_the_step_failed(
    new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    harness = new_harness(EngineOptions(recomputes_failed_loads=False, step_tokens_max=64))
    harness.run(PROMPT)
    harness.engine.pool.reset()
    monkeypatch.setattr(harness.scheduler_side, call, fail)
    loaded, computed = harness.add(PROMPT), harness.add([6] * 20)
    harness.settle()
    assert harness.scheduler.out_of_service is not None
    assert [one.status for one in (loaded, computed)] == [Status.FINISHED_STOPPED] * 2
    assert loaded.sources.count("l1") == 24


@pytest.mark.parametrize("recomputes", [True, False])
def test_only_a_load_that_nobody_could_plan_fails(
    new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch, recomputes: bool
) -> None:
    harness = new_harness(EngineOptions(recomputes_failed_loads=recomputes, step_tokens_max=64))
    harness.run(PROMPT)
    harness.engine.pool.reset()
    allocated = harness.scheduler_side.allocated

    def second_fails(request: Any, block_ids: list[int], num_external_tokens: int) -> Any:
        if request is requests[1]:
            fail()
        return allocated(request, block_ids, num_external_tokens)

    monkeypatch.setattr(harness.scheduler_side, "allocated", second_fails)
    requests = [harness.add(PROMPT[:length]) for length in (28, 20, 24)]
    harness.settle()
    assert harness.scheduler.out_of_service is not None
    middle = Status.FINISHED_STOPPED if recomputes else Status.FINISHED_ERROR
    assert [one.status for one in requests] == [Status.FINISHED_STOPPED, middle, Status.FINISHED_STOPPED]
    assert (harness.engine.num_loads, harness.engine.num_failed_loads) == (2, 1)
    assert len(harness.engine.pool.free) == harness.engine.pool.num_usable


WORKER_CALLS = ("_cancel", "_load", "_store_on")


@pytest.mark.parametrize("recomputes", [True, False])
@pytest.mark.parametrize("call", WORKER_CALLS)
def test_an_engine_outlives_a_worker_side_that_fails(
    new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch, call: str, recomputes: bool
) -> None:
    """Where vLLM does not compute what was not loaded, only requests fail that were promised before it was noticed."""
    harness = new_harness(EngineOptions(num_ranks=2, recomputes_failed_loads=recomputes))
    requests = start_everything(harness)
    monkeypatch.setattr(harness.sides[1], call, fail)
    requests.append(harness.add(PROMPT[:20], max_new_tokens=4))
    step_without_copies(harness, 2)
    promised = {one.request_id for one in requests if one.status is Status.WAITING_FOR_REMOTE_KVS}
    if call == "_cancel":
        harness.run_copies()
        harness.engine.reset_prefix_cache()
    harness.settle()
    assert harness.faults.records
    assert all(request.is_finished for request in requests)
    failed = {one.request_id for one in requests if one.status is Status.FINISHED_ERROR}
    assert failed <= (promised if call == "_load" else set())
    assert len(harness.engine.pool.free) == harness.engine.pool.num_usable
    if call == "_store_on":
        return  # a store that fails costs no request anything
    assert harness.server is not None
    assert "failed" in harness.server.gates.values()
    num_loads, num_reserves = harness.engine.num_loads, harness.server.num_calls.get("Reserve", 0)
    for _ in range(3):
        harness.engine.pool.reset()
        again = harness.run(PROMPT)
        assert again.status is Status.FINISHED_STOPPED
        assert harness.report_of(again).computed == len(PROMPT), "its tokens are still reported"
    assert harness.engine.num_loads == num_loads, "nothing is promised any more"
    assert harness.server.num_calls.get("Reserve", 0) == num_reserves, "nothing is offered any more"
    assert not harness.server.cache.leases()


def test_a_connection_that_is_made_later_is_told_that_the_gate_turned(
    new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = new_harness()
    monkeypatch.setattr(harness.sides[0], "_cancel", fail)
    harness.add(PROMPT, max_new_tokens=4)
    harness.step()
    harness.engine.reset_prefix_cache()
    harness.settle()
    harness.lose_server()
    harness.start_server()
    assert harness.server is not None
    assert sorted(harness.server.gates.values()) == ["failed", "not_run"]


def test_a_store_is_not_committed_from_blocks_that_it_was_not_kept_from(
    new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook that ends stores before their blocks are used again has failed while one copies."""
    harness = new_harness()
    harness.run(PROMPT)
    assert harness.server is not None
    harness.server.num_calls.clear()
    harness.add([5] * 30, max_new_tokens=4)
    harness.step()
    side = harness.sides[0]
    (session,) = [held.session for held in side._sessions._held]
    monkeypatch.setattr(side, "_cancel", fail)

    def between() -> None:
        session.between_addresses = lambda: None
        harness.engine.reset_prefix_cache()
        harness.step()

    session.between_addresses = between  # type: ignore[attr-defined]
    side.run_store()
    assert harness.workers[0].out_of_service is not None
    assert harness.server.num_calls["Reserve"] >= 1
    assert "Commit" not in harness.server.num_calls
    assert harness.server.reserved_bytes == 0
    harness.settle()


@pytest.mark.parametrize("is_026", [False, True])
def test_a_worker_that_cannot_copy_holds_nothing_back(
    new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch, is_026: bool
) -> None:
    """Scheduler and server work, the worker has refused: its engine must serve on."""
    monkeypatch.setattr(FakeTensor.device, "type", "xpu")
    harness = new_harness(EngineOptions(is_026=is_026))
    assert harness.workers[0].out_of_service == "the engine's KV cannot be copied: the KV blocks are on xpu"
    assert harness.server is not None
    for client in harness.clients:  # as if the scheduler had been told that all is well
        assert client.session is not None
        harness.server.roles[client.session.connection] = "worker-0"
        harness.server.gates[client.session.connection] = "passed"
    for _ in range(12):
        assert harness.run(PROMPT, max_new_tokens=1).status is Status.FINISHED_STOPPED
    assert "Reserve" not in harness.server.num_calls
    assert not harness.scheduler_side._jobs
    assert len(harness.engine.pool.free) == harness.engine.pool.num_usable


def test_a_gate_that_fails_stores_nothing(
    new_harness: NewHarness, stubbed_connector: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    result = stubbed_connector.GateResult(False, "block 3 differs")
    monkeypatch.setattr(stubbed_connector, "run_gate", lambda *_arguments: result)
    with caplog.at_level(logging.ERROR, "antiphon.connector"):
        harness = new_harness()
    assert "the gate failed: block 3 differs" in caplog.text
    assert harness.server is not None
    assert list(harness.server.gates.values()) == ["not_run", "failed"]
    harness.run(PROMPT)
    harness.engine.pool.reset()
    assert harness.run(PROMPT).sources.count("computed") == 28
    assert not {"Lookup", "Reserve"} & harness.server.num_calls.keys()


def test_shutting_down_closes_clients_also_out_of_service(new_harness: NewHarness) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    for connector in (harness.scheduler, *harness.workers):
        connector.out_of_service = "a test says so"
        connector.shutdown()
        connector.shutdown()
    assert all(client.is_closed for client in harness.clients)
