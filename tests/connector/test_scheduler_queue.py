"""A deep queue, what its requests may pin, and one request among them that cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from antiphon.connector import requests as connector_requests
from antiphon.connector.requests import RequestIdentity
from antiphon.protocol import cache as calls
from tests.connector.engine import EngineOptions, EngineRequest, Status
from tests.connector.harness import Harness, identify

NewHarness = Callable[..., Harness]
PROMPT = list(range(100, 128))
NUM_REQUESTS = 10
AHEAD_MAX = 4


def prompt(number: int) -> list[int]:
    return [number, *PROMPT[1:]]


@pytest.fixture
def harness(new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch) -> Harness:
    """Ten stored prompts, and an engine that has forgotten them."""
    monkeypatch.setattr(connector_requests, "PROMISES_AHEAD_MAX", AHEAD_MAX)
    made = new_harness(EngineOptions(num_blocks=60), num_chunks=12 * NUM_REQUESTS)
    for number in range(NUM_REQUESTS):
        made.run(prompt(number))
    made.engine.pool.reset()
    assert made.server is not None
    made.server.num_calls.clear()
    return made


def assert_all_loaded(harness: Harness, requests: list[EngineRequest]) -> None:
    assert [harness.report_of(request).l1 for request in requests] == [24] * len(requests)
    harness.assert_idle()


def test_a_deep_queue_pins_no_more_than_allowed_and_is_still_loaded(harness: Harness) -> None:
    assert harness.server is not None
    taken = harness.engine.pool.take(len(harness.engine.pool.free))
    requests = [harness.add(prompt(number)) for number in range(NUM_REQUESTS)]
    assert harness.server.num_leases == harness.server.num_calls["Lookup"] == AHEAD_MAX
    for _ in range(3):
        harness.step()  # the head of the queue is asked for, and has no room
    assert harness.server.num_leases == AHEAD_MAX
    harness.engine.pool.give_back(taken)
    for _ in range(200):
        harness.step()
        assert len(harness.scheduler_side._pins) <= 2 * AHEAD_MAX
        harness.run_copies()
    assert harness.server.num_calls["Lookup"] == NUM_REQUESTS, "each is looked up once"
    harness.settle()
    assert_all_loaded(harness, requests)


def make_slow(harness: Harness) -> None:
    session = harness.clients[0].session
    assert session is not None
    session.is_slow = lambda body: isinstance(body, calls.Lookup)


def test_a_scheduler_that_passes_over_what_has_no_answer_asks_for_no_more_than_allowed(harness: Harness) -> None:
    assert harness.server is not None
    session = harness.clients[0].session
    assert session is not None
    make_slow(harness)
    requests = [harness.add(prompt(number)) for number in range(NUM_REQUESTS)]
    harness.step()
    assert [request.status for request in requests] == [Status.WAITING] * NUM_REQUESTS
    assert len(session.queue) == AHEAD_MAX
    for _ in range(NUM_REQUESTS):
        session.deliver()
        harness.step()
        harness.run_copies()
        assert len(session.queue) <= AHEAD_MAX
    harness.settle()
    assert_all_loaded(harness, requests)


def test_no_request_waits_for_others_longer_than_for_an_answer(harness: Harness) -> None:
    make_slow(harness)
    requests = [harness.add(prompt(number)) for number in range(NUM_REQUESTS)]
    session = harness.clients[0].session
    assert session is not None
    harness.step()
    assert len(session.queue) == AHEAD_MAX
    harness.clock.advance(0.051)
    harness.step()
    assert Status.RUNNING in {request.status for request in requests}
    harness.settle()
    assert all(request.status is Status.FINISHED_STOPPED for request in requests)
    harness.assert_idle()


def test_requests_that_end_in_the_queue_make_room(harness: Harness) -> None:
    assert harness.server is not None
    taken = harness.engine.pool.take(len(harness.engine.pool.free))
    early = [harness.add(prompt(number)) for number in range(AHEAD_MAX)]
    for request in early[1:]:
        harness.engine.abort(request.request_id)
    assert harness.server.num_leases == 1
    late = [harness.add(prompt(number)) for number in range(AHEAD_MAX, NUM_REQUESTS)]
    assert harness.server.num_leases == AHEAD_MAX
    harness.engine.pool.give_back(taken)
    harness.settle()
    assert_all_loaded(harness, [early[0], *late])


# ---- a request that cannot be read -----------------------------------------------------------------------------------


def test_one_odd_request_goes_without_reuse_and_is_told_of_once(
    new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    odd: list[str] = []

    def identify_most(request: EngineRequest) -> RequestIdentity | str:
        if request.salt == 13:
            odd.append(request.request_id)
            raise KeyError("adapter")
        return identify(request)

    monkeypatch.setattr(harness.scheduler_side, "_identify", identify_most)
    first, second = harness.add(PROMPT, salt=13), harness.add(PROMPT)
    harness.settle()
    assert harness.scheduler.out_of_service is None
    assert [harness.report_of(request).l1 for request in (first, second)] == [0, 24]
    assert harness.report_of(first).computed == len(PROMPT)
    assert odd == [first.request_id], "it is not tried again for each hook"
    assert harness.faults.records == [
        f"what the KV of request {first.request_id} means cannot be told: KeyError('adapter')"
    ]
    harness.faults.records.clear()
    harness.engine.pool.reset()
    assert harness.report_of(harness.run(PROMPT)).l1 == 24
    harness.assert_idle()


def test_many_odd_requests_are_one_line(new_harness: NewHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = new_harness()

    def identify_none(_request: EngineRequest) -> RequestIdentity | str:
        raise KeyError("adapter")

    monkeypatch.setattr(harness.scheduler_side, "_identify", identify_none)
    for _ in range(5):
        harness.run(PROMPT)
    assert len(harness.faults.records) == 1
