"""The states of endpoints and who moves them; trials; drain and removal; never an empty pool."""

from __future__ import annotations

import pytest

from antiphon.routing.budget import RetryBudget, backoff_s
from antiphon.routing.endpoint import Cause, Endpoint, Verdict
from antiphon.routing.fleet import Fleet
from antiphon.routing.options import FleetOptions
from antiphon.routing.pool import Pool
from antiphon.routing.states import EndpointState

UNKNOWN, READY, SUSPECT, DOWN, DRAINING = list(EndpointState)[:5]
OPTIONS = FleetOptions(open_min_s=1.0, open_max_s=8.0)
URLS = ("http://a:1", "http://b:1", "http://c:1")


@pytest.fixture
def pool() -> Pool:
    pool = Pool("prefill", "round_robin", OPTIONS)
    for url in URLS:
        pool.health_succeeded(pool.add(url), 0.0)
    assert [endpoint.state for endpoint in pool.endpoints] == [READY] * 3
    return pool


def picks(pool: Pool, num: int, now_s: float) -> list[Endpoint | None]:
    """Picked and begun one after another."""
    taken: list[Endpoint | None] = []
    for _ in range(num):
        endpoint = pool.pick(now_s, 0.0)
        taken.append(endpoint)
        if endpoint is not None:
            pool.begin(endpoint)
    pool.validate()
    return taken


def fail(pool: Pool, endpoint: Endpoint, verdict: Verdict, now_s: float, trial: int = 0) -> None:
    pool.judge(endpoint, verdict, now_s, 1.0, trial=trial)
    pool.validate()


def test_a_refused_connection_takes_it_out_at_once(pool: Pool) -> None:
    a = pool.endpoints[0]
    life = a.life
    fail(pool, a, Verdict.REFUSED, 1.0)
    assert a.state is DOWN
    assert a.life == life + 1
    assert a not in picks(pool, 4, 1.5)


def test_a_connection_that_is_not_made_says_nothing_of_a_restart(pool: Pool) -> None:
    a = pool.endpoints[0]
    fail(pool, a, Verdict.UNREACHABLE, 1.0)
    assert a.state is DOWN
    assert a.life == 0


def test_a_timeout_makes_it_suspect_and_the_next_one_takes_it_out(pool: Pool) -> None:
    a = pool.endpoints[0]
    fail(pool, a, Verdict.TIMED_OUT, 1.0)
    assert a.state is SUSPECT
    fail(pool, a, Verdict.TIMED_OUT, 3.0)
    assert a.state is DOWN
    assert a.cause is Cause.REQUEST


def test_errors_make_it_suspect_only_in_a_row_or_as_a_share(pool: Pool) -> None:
    a, b = pool.endpoints[:2]
    for _ in range(2):
        fail(pool, a, Verdict.FAILED, 1.0)
    pool.judge(a, Verdict.SUCCEEDED, 1.0, 0.0)
    fail(pool, a, Verdict.FAILED, 1.0)
    assert a.state is READY
    for _ in range(40):
        fail(pool, b, Verdict.FAILED, 1.0)
        fail(pool, b, Verdict.FAILED, 1.0)
        if b.state is not READY:
            break
        pool.judge(b, Verdict.SUCCEEDED, 1.0, 0.0)
    assert b.state is not READY, "two of three fail"


def test_errors_alone_never_take_it_out(pool: Pool) -> None:
    """It answers, and may be all that there is: the request can be at fault."""
    a = pool.endpoints[0]
    for second in range(20):
        fail(pool, a, Verdict.FAILED, float(second))
    assert a.state is SUSPECT


def test_an_error_is_excused_when_another_engine_fails_the_same_request(pool: Pool) -> None:
    a = pool.endpoints[0]
    for _ in range(10):
        fail(pool, a, Verdict.FAILED, 1.0)
        pool.excuse(a)
    assert a.state is READY
    assert a.num_failures == 0


def test_a_suspect_is_tried_by_one_request_at_a_time(pool: Pool) -> None:
    a = pool.endpoints[0]
    fail(pool, a, Verdict.TIMED_OUT, 1.0)
    assert a not in picks(pool, 6, 1.5), "it is left alone for a while"
    taken = picks(pool, 6, 2.5)
    assert taken.count(a) == 1
    pool.end(a, a.trial)
    assert picks(pool, 6, 2.5).count(a) == 1


def test_the_trial_brings_it_back_or_doubles_the_wait(pool: Pool) -> None:
    a = pool.endpoints[0]
    fail(pool, a, Verdict.REFUSED, 0.0)
    waits = []
    now_s = 0.0
    for _ in range(6):
        waits.append(a.retry_at_s - now_s)
        now_s = a.retry_at_s
        assert pool.pick(now_s - 0.01, 0.0) is not a
        assert pool.pick(now_s, 0.0) is a
        trial = pool.begin(a)
        assert trial
        fail(pool, a, Verdict.UNREACHABLE, now_s, trial)
        pool.end(a, trial)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert pool.pick(a.retry_at_s, 0.0) is a
    trial = pool.begin(a)
    pool.judge(a, Verdict.SUCCEEDED, a.retry_at_s, 0.0, trial=trial)
    pool.end(a, trial)
    assert a.state is READY
    assert a.retry_at_s == 0
    assert a.num_active == 0
    pool.validate()


def test_what_was_sent_before_it_went_down_does_not_bring_it_back(pool: Pool) -> None:
    a = pool.endpoints[0]
    assert pool.begin(a) == 0
    fail(pool, a, Verdict.REFUSED, 1.0)
    pool.judge(a, Verdict.SUCCEEDED, 1.0, 0.0, trial=0)
    assert a.state is DOWN


def test_where_none_is_ready_suspects_are_used_freely(pool: Pool) -> None:
    for endpoint in pool.endpoints:
        fail(pool, endpoint, Verdict.TIMED_OUT, 1.0)
    taken = picks(pool, 6, 1.1)
    assert {taken.count(endpoint) for endpoint in pool.endpoints} == {2}


def test_where_all_are_down_each_is_tried_by_one_request_the_least_bad_first(pool: Pool) -> None:
    for second in (0.0, 0.0, 4.0):
        fail(pool, pool.endpoints[0], Verdict.REFUSED, second)
    fail(pool, pool.endpoints[1], Verdict.REFUSED, 4.0)
    fail(pool, pool.endpoints[2], Verdict.REFUSED, 4.1)
    assert not pool.can_answer
    a, b, c = pool.endpoints
    assert picks(pool, 5, 4.2) == [b, c, a, None, None]
    assert pool.retry_after_s(4.2) == 1
    pool.end(c, c.trial)
    assert pool.pick(4.2, 0.0) is c


def test_health_checks_take_it_out_only_after_several(pool: Pool) -> None:
    a = pool.endpoints[0]
    for _ in range(2):
        pool.health_failed(a, 1.0, 0.5)
    pool.health_succeeded(a, 1.0)
    for _ in range(2):
        pool.health_failed(a, 1.0, 0.5)
    assert a.state is READY
    pool.health_failed(a, 1.0, 0.5)
    assert a.state is DOWN
    assert a.cause is Cause.HEALTH
    pool.health_succeeded(a, 2.0)
    assert a.state is SUSPECT
    pool.health_succeeded(a, 3.0)
    assert a.state is READY


def test_health_checks_do_not_bring_back_what_hangs(pool: Pool) -> None:
    """An engine whose requests hang may still answer health checks: only a request shows that it works."""
    a = pool.endpoints[0]
    fail(pool, a, Verdict.TIMED_OUT, 0.0)
    fail(pool, a, Verdict.TIMED_OUT, 1.0)
    pool.health_succeeded(a, 1.5)
    assert a.state is DOWN
    pool.health_succeeded(a, 9.0)
    assert a.state is SUSPECT
    for _ in range(5):
        pool.health_succeeded(a, 9.0)
    assert a.state is SUSPECT
    pool.judge(a, Verdict.SUCCEEDED, 9.0, 0.0)
    assert a.state is READY


def test_a_connection_is_no_proof_against_a_hang(pool: Pool) -> None:
    a, b = pool.endpoints[:2]
    fail(pool, a, Verdict.REFUSED, 0.0)
    fail(pool, b, Verdict.TIMED_OUT, 0.0)
    fail(pool, b, Verdict.TIMED_OUT, 1.0)
    pool.connected(a)
    pool.connected(b)
    assert (a.state, b.state) == (SUSPECT, DOWN)


def test_drained_gets_nothing_and_comes_back_unknown(pool: Pool) -> None:
    a = pool.endpoints[0]
    pool.begin(a)
    pool.drain(a)
    assert a not in picks(pool, 6, 1.0)
    fail(pool, a, Verdict.REFUSED, 1.0)
    assert a.state is DRAINING
    pool.end(a, 0)
    pool.open(a)
    assert a.state is UNKNOWN
    assert pool.pick(1.0, 0.0) is a, "one request tries it"


def test_removed_goes_once_its_last_request_has_ended(pool: Pool) -> None:
    a, b = pool.endpoints[:2]
    gone: list[Endpoint] = []
    pool.when_gone(gone.append)
    pool.begin(a)
    pool.begin(a)
    pool.remove(a)
    pool.remove(b)
    assert gone == [b]
    pool.end(a, 0)
    assert gone == [b]
    pool.validate()
    pool.end(a, 0)
    assert gone == [b, a]
    assert [one.url for one in pool.endpoints] == [URLS[2]]
    assert a.state is EndpointState.REMOVED
    pool.validate()


def test_removal_can_be_taken_back(pool: Pool) -> None:
    a = pool.endpoints[0]
    pool.begin(a)
    pool.remove(a)
    assert pool.add(a.url) is a
    pool.end(a, 0)
    assert a in pool.endpoints
    assert a.state is UNKNOWN


def test_added_closed_it_waits_to_be_opened(pool: Pool) -> None:
    d = pool.add("http://d:1", is_open=False)
    pool.health_succeeded(d, 1.0)
    assert d.state is DRAINING
    assert d not in picks(pool, 8, 1.0)
    pool.open(d)
    pool.health_succeeded(d, 1.0)
    assert d in picks(pool, 4, 1.0)


def test_held_is_shown_as_unknown_until_it_is_opened_or_drained(pool: Pool) -> None:
    d = pool.add("http://d:1", is_open=False)
    assert (d.is_held, d.shown_state, d.state) == (True, UNKNOWN, DRAINING)
    assert pool.add(d.url, is_open=False) is d
    pool.health_refused(d, 1.0, 0.5)
    assert d.is_held
    pool.validate()
    pool.drain(d)
    assert (d.is_held, d.shown_state) == (False, DRAINING)
    pool.open(d)
    assert (d.is_held, d.shown_state, d.state) == (False, UNKNOWN, UNKNOWN)
    pool.validate()


def test_pool_is_open_while_any_endpoint_takes_requests(pool: Pool) -> None:
    a, b, c = pool.endpoints
    pool.drain(a)
    pool.remove(b)
    pool.health_refused(c, 1.0, 0.5)
    assert (c.state, pool.is_open) == (EndpointState.DOWN, True)
    pool.add("http://d:1", is_open=False)
    pool.drain(c)
    assert not pool.is_open
    pool.open(a)
    assert pool.is_open


def test_another_engine_id_is_another_life(pool: Pool) -> None:
    a = pool.endpoints[0]
    restarted: list[Endpoint] = []
    pool.when_restarted(restarted.append)
    pool.saw_engine(a, "one")
    pool.saw_engine(a, "")
    pool.saw_engine(a, "one")
    assert (a.life, restarted) == (0, [])
    pool.saw_engine(a, "two")
    assert (a.life, restarted) == (1, [a])
    fail(pool, a, Verdict.REFUSED, 1.0)
    pool.saw_engine(a, "three")
    assert a.life == 2, "its restart was seen when it refused"


def test_ending_more_than_began_is_a_bug(pool: Pool) -> None:
    with pytest.raises(AssertionError, match="ended more requests than it began"):
        pool.end(pool.endpoints[0], 0)


def test_prefill_and_decode_turn_independently() -> None:
    fleet = Fleet(("http://p0:1", "http://p1:1"), ("http://d0:1", "http://d1:1"), FleetOptions())
    for endpoint in fleet.all():
        fleet.pool(endpoint.role).health_succeeded(endpoint, 0.0)
    pairs = set()
    for number in range(8):
        prefill = fleet.prefill.pick(0.0, 0.0)
        if number % 3 == 0:
            fleet.prefill.pick(0.0, 0.0)  # a request that went no further
        pairs.add((prefill, fleet.decode.pick(0.0, 0.0)))
    assert len(pairs) == 4
    fleet.validate()


def test_warm_pairs_go_first_unless_they_have_too_much_to_do() -> None:
    fleet = Fleet(("http://p:1",), ("http://d0:1", "http://d1:1", "http://d2:1"), FleetOptions(prefers_warm_pairs=True))
    for endpoint in fleet.all():
        fleet.pool(endpoint.role).health_succeeded(endpoint, 0.0)
    prefill, warm = fleet.prefill.endpoints[0], fleet.decode.endpoints[2]
    fleet.pairs.warm(prefill, warm)
    assert fleet.pairs.cold([prefill], fleet.decode.endpoints) == [(prefill, one) for one in fleet.decode.endpoints[:2]]
    assert {fleet.pick_decode(0.0, 0.0, partner=prefill) for _ in range(4)} == {warm}
    fleet.decode.begin(warm)
    fleet.decode.begin(warm)
    assert {fleet.pick_decode(0.0, 0.0, partner=prefill) for _ in range(3)} == set(fleet.decode.endpoints)
    fleet.decode.end(warm, 0)
    fleet.decode.end(warm, 0)
    fleet.prefill.saw_engine(prefill, "one")
    fleet.prefill.saw_engine(prefill, "two")
    assert not fleet.pairs.is_warm(prefill, warm), "the prefill engine has restarted"
    fleet.decode.remove(warm)
    fleet.validate()


def test_retries_are_a_share_of_requests_and_a_floor() -> None:
    budget = RetryBudget(0.2, 3.0, 0.5, 100.0)
    assert [budget.allow(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(50):
        budget.request()
    assert sum(budget.allow(0.0) for _ in range(50)) == pytest.approx(10, abs=1)
    assert not budget.allow(0.0)
    assert budget.allow(4.0), "time refills the floor"
    for _ in range(10_000):
        budget.request()
    assert budget.saved == 100
    budget.validate()
    assert budget.num_denied + budget.num_retries == 4 + 50 + 2


def test_the_wait_doubles_up_to_its_limit_with_jitter() -> None:
    assert [backoff_s(number, 1.0, 8.0, 1.0) for number in (1, 2, 3, 4, 5, 500)] == [1, 2, 4, 8, 8, 8]
    assert backoff_s(3, 1.0, 8.0, 0.0) == 2.0
