"""A request whose lookup waits for tiers: it is passed over until the answer, and its tokens are told apart."""

from __future__ import annotations

import msgspec
import pytest

from antiphon.connector.onboarding import PrefillRate
from antiphon.connector.requests import Promise, Sources
from antiphon.protocol import cache as calls
from tests.connector.engine import EngineRequest, Status
from tests.connector.fakes import FakePending
from tests.connector.harness import Harness
from tests.connector.test_scheduler import PROMPT, NewHarness, make_slow


def begin(new_harness: NewHarness) -> tuple[Harness, EngineRequest, FakePending]:
    """A stored prompt that is asked for again, and of which the server says that it waits for 0.4 s."""
    harness = new_harness()
    harness.run(PROMPT)
    harness.engine.pool.reset()
    make_slow(harness, calls.Lookup)
    request = harness.add(PROMPT)
    (pending,) = [each for client in harness.clients for each in client.session.queue]
    pending.onboarding = (calls.Onboarding(8, 24, 0.4), harness.clock())
    return harness, request, pending


def test_it_waits_longer_than_for_an_answer_and_counts_what_came_from_a_tier(new_harness: NewHarness) -> None:
    harness, request, pending = begin(new_harness)
    for _ in range(4):
        harness.clock.advance(0.1)
        harness.step()
        assert request.status is Status.WAITING
    answer = harness.server.answer(pending.session.connection, pending.body)
    assert isinstance(answer, calls.Found)
    pending.session.queue.clear()
    pending.complete(msgspec.structs.replace(answer, fetched=(("l2", (1,)), ("peer", (2,)))))
    harness.step()
    assert request.status is Status.WAITING_FOR_REMOTE_KVS
    harness.settle()
    report = harness.report_of(request)
    assert (report.device, report.l1, report.l2, report.peer) == (0, 8, 8, 8)
    assert (report.remote_prefill, report.computed) == (0, 4)
    harness.assert_idle()


def test_without_an_answer_in_time_it_is_a_miss(new_harness: NewHarness) -> None:
    harness, request, _ = begin(new_harness)
    harness.clock.advance(0.451)
    harness.step()
    assert request.status is Status.RUNNING
    harness.deliver()
    harness.settle()
    assert harness.report_of(request).computed == 28
    harness.assert_idle()


def test_lookups_say_how_long_they_wait(new_harness: NewHarness) -> None:
    _, _, pending = begin(new_harness)
    assert isinstance(pending.body, calls.Lookup)
    assert pending.body.onboard_s == 600.0


@pytest.mark.parametrize(
    ("start", "end", "l2", "peer"), [(0, 32, 16, 8), (8, 20, 12, 0), (12, 16, 4, 0), (20, 28, 4, 4), (24, 32, 0, 8)]
)
def test_tokens_of_a_source_are_those_of_its_chunks(start: int, end: int, l2: int, peer: int) -> None:
    fetched = (("disk", (1,)), ("peer", (3,)), ("redis", (2,)))
    promise = Promise(None, 1, (), 32, 0.0).with_fetched(fetched)
    assert promise.num_fetched_tokens(start, end, 8) == (l2, peer)


def test_loaded_tokens_have_one_source_each() -> None:
    sources = Sources()
    sources.step(24, 4, local_tokens=8, is_from_l1=True, prompt=28, fetched_tokens=(7, 3))
    assert (sources.device, sources.l1, sources.l2, sources.peer) == (8, 6, 7, 3)
    assert (sources.computed, sources.total) == (4, 28)


def test_the_speed_is_that_of_steps_that_prefill() -> None:
    rate = PrefillRate()
    for num_tokens, now_s in ((1000, 0.0), (8, 0.5), (1000, 10.0), (1000, 11.0), (0, 11.5)):
        rate.scheduled(num_tokens)
        rate.step(now_s)
    assert rate.tokens_per_s == pytest.approx(2000)
    rate.scheduled(1000)
    rate.step(12.0)
    rate.step(100.0)  # idle meanwhile
    assert 1700 < rate.tokens_per_s < 2000


def test_the_speed_of_an_engine_that_plans_ahead_is_not_that_of_its_planning() -> None:
    """Each step is planned as soon as the one before the last has ended, and runs when the last has."""
    rate = PrefillRate(is_async=True)
    # A prefill of 1000 tokens that takes a second, after steps of decoding of 50 ms; the next two steps decode too.
    for num_tokens, now_s in ((1, 0.0), (1, 0.001), (1000, 0.05), (1, 0.1), (1, 1.1), (1, 1.15)):
        rate.scheduled(num_tokens)
        rate.step(now_s)
    assert rate.tokens_per_s == pytest.approx(1000)
