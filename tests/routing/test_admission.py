"""Cold-transfer admission, by example: what waits, for what, for how long, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.routing.admission import RETRY_AFTER_MAX_S, ColdAdmission
from antiphon.routing.cold import REFUSALS, AdmissionOptions, Admit, ColdItem, ColdStage, Refuse, Wait
from antiphon.routing.endpoint import Endpoint

PREFILLS = [Endpoint(f"http://p{index}:8000", "prefill") for index in range(8)]
DECODES = [Endpoint(f"http://d{index}:8000", "decode") for index in range(4)]


def options(**changes: float) -> AdmissionOptions:
    """One byte a token, 100 of them cold, 100 bytes a second, so that a decode engine takes 1000 in a third of a lease;
    the lane is a quarter of the prefill engines whatever warm requests do."""
    values: dict[str, float] = {
        "kv_bytes_per_token": 1,
        "warm_bytes": 100,
        "lane_share_max": 0.25,
        "queue_max": 100,
        "queue_max_bytes": 10_000,
        "ageing_bytes": 1000,
        "rate_bytes_s": 100.0,
        "rate_min_bytes_s": 1.0,
        "sample_min_bytes": 50,
    }
    return AdmissionOptions(**{**values, **changes})  # type: ignore[arg-type]


def made(num_prefills: int = 4, num_decodes: int = 1, **changes: float) -> ColdAdmission:
    admission = ColdAdmission(options(**changes))
    admission.set_prefills(PREFILLS[:num_prefills])
    admission.set_decodes(DECODES[:num_decodes])
    return admission


def a_cold(num_tokens: int = 300, num_body_bytes: int = 10) -> ColdItem:
    return ColdItem(num_tokens, num_tokens, num_body_bytes)


def answered(
    admission: ColdAdmission, item: ColdItem, now_s: float, prefill: int = 0, decode: int = 0
) -> Admit | Wait | Refuse:
    """Its prefill runs and answers."""
    admission.prefill_chosen(item, PREFILLS[prefill], now_s)
    return admission.prefill_answered(item, DECODES[decode], now_s)


def pull(admission: ColdAdmission, num_bytes: int, now_s: float, prefill: int = 0, decode: int = 0) -> ColdItem:
    """A request whose KV is under way, whatever the bounds."""
    item = ColdItem(1, num_bytes)
    assert isinstance(admission.offer(item, now_s), Admit)
    admission.prefill_chosen(item, PREFILLS[prefill], now_s)
    admission.prefill_answered(item, DECODES[decode], now_s)
    assert item.stage is ColdStage.PULLING
    return item


# ---- before the prefill ----------------------------------------------------------------------------------------------


def test_a_flood_of_cold_prompts_has_a_quarter_of_the_prefill_engines_and_warm_ones_pass() -> None:
    admission = made(8, 4)
    colds = [a_cold() for _ in range(64)]
    now_s = 0.0
    answers = [admission.offer(item, now_s) for item in colds]
    assert [type(answer) for answer in answers] == [Admit] * 2 + [Wait] * 62
    assert answers[2].until_s == 60.0  # type: ignore[union-attr]
    order = colds[:2]
    while len(order) < 64:
        first = order[-2]
        admission.prefill_chosen(first, PREFILLS[0], now_s)
        warm = ColdItem(99, 5000)
        assert isinstance(admission.offer(warm, now_s), Admit)
        assert admission.avoid_for(warm) == (PREFILLS[0],)
        assert admission.prefill_answered(first, DECODES[0], now_s) == first.answer
        admission.leave(warm, now_s)
        now_s += 0.25
        admission.pulled(first, 300, 0.25, now_s)
        decided = admission.tick(now_s)
        assert [type(item.answer) for item in decided] == [Admit], "one that has gone makes room for one"
        assert admission.statistics(now_s).num_cold == 2
        order += decided
        admission.validate()
    assert order == colds, "of equal size, in turn"
    assert admission.counts["admitted_from_queue"] == 62
    assert admission.counts["admitted_warm"] == 62


def test_nearly_warm_goes_first_and_equals_in_turn() -> None:
    admission = made()
    running, *waiting = items = [a_cold(num) for num in (100, 900, 500, 200, 500)]
    for item in items:
        admission.offer(item, 0.0)
    seen = []
    while waiting:
        admission.leave(running, 1.0)
        (running,) = admission.tick(1.0)
        seen.append(running)
        waiting.remove(running)
    assert seen == [items[index] for index in (3, 2, 4, 1)]


def test_nothing_small_passes_the_first_of_the_queue_because_that_is_too_large() -> None:
    admission = made(8)
    first, large, small = a_cold(800), a_cold(900), a_cold(110)
    assert isinstance(admission.offer(first, 0.0), Admit)
    assert isinstance(admission.offer(large, 0.0), Wait), "800 and 900 are more than the pool takes in time"
    assert isinstance(admission.offer(small, 10.0), Wait), "there is room for it, but it came too late to be first"
    assert admission.tick(10.0) == []
    admission.leave(first, 11.0)
    assert admission.tick(11.0) == [large]


def test_one_that_comes_first_by_its_order_does_not_wait_for_what_it_passes() -> None:
    admission = made(8)
    admission.offer(a_cold(800), 0.0)
    assert isinstance(admission.offer(a_cold(900), 0.0), Wait)
    assert isinstance(admission.offer(a_cold(110), 1.0), Admit)


def test_one_that_comes_later_with_the_same_order_waits_behind_it() -> None:
    admission = made(4)
    running, early, late = a_cold(), a_cold(), a_cold()
    admission.offer(running, 0.0)
    admission.offer(early, 0.0)
    admission.leave(running, 0.0)
    assert isinstance(admission.offer(late, 0.0), Wait), "though there is room"
    assert admission.tick(0.0) == [early]


@pytest.mark.parametrize(("more", "goes"), [(0, True), (1, False)])
def test_what_fills_a_budget_exactly_fits(more: int, goes: bool) -> None:
    by_rate = made(8)
    by_rate.offer(a_cold(600), 0.0)
    assert isinstance(by_rate.offer(a_cold(400 + more), 0.0), Admit) == goes
    by_free = made(8)
    by_free.free_kv(DECODES[0], 700)
    by_free.offer(a_cold(300), 0.0)
    assert isinstance(by_free.offer(a_cold(400 + more), 0.0), Admit) == goes
    transfer = made(8)
    pull(transfer, 400, 0.0)
    item = a_cold(600 + more)
    transfer.offer(item, 0.0)
    assert isinstance(answered(transfer, item, 0.0), Admit) == goes
    alone = made(8)
    alone.free_kv(DECODES[0], 500)
    item = a_cold(500 + more)
    alone.offer(item, 0.0)
    assert isinstance(answered(alone, item, 0.0), Admit) == goes
    for admission in (by_rate, by_free, transfer, alone):
        admission.validate()


def test_the_next_goes_whatever_the_budget_says_where_none_is_admitted() -> None:
    admission = made()
    admission.free_kv(DECODES[0], 0)
    giant = a_cold(10**9)
    assert isinstance(admission.offer(giant, 0.0), Admit)
    other = a_cold(100)
    assert isinstance(admission.offer(other, 0.0), Wait)
    answered(admission, giant, 1.0)
    assert admission.tick(1.0) == [], "its KV is not pulled yet"
    admission.leave(giant, 2.0)
    assert admission.tick(2.0) == [other]


def test_free_kv_of_the_pool_bounds_what_is_admitted_and_is_taken_off_as_it_is_used() -> None:
    admission = made(8, 2)
    first, second = a_cold(400), a_cold(400)
    admission.free_kv(DECODES[0], 300)
    assert isinstance(admission.offer(first, 0.0), Admit), "of the other engine it is not known"
    admission.free_kv(DECODES[1], 300)
    assert admission.statistics(0.0).budget_bytes == 600
    assert isinstance(admission.offer(second, 0.0), Wait)
    admission.free_kv(DECODES[1], 500)
    assert admission.tick(0.0) == [second]
    assert isinstance(answered(admission, first, 0.0, decode=1), Admit)
    assert {load.url: load.free_kv_bytes for load in admission.statistics(0.0).decodes} == {
        DECODES[0].url: 300,
        DECODES[1].url: 100,
    }
    assert admission.room_bytes(None, DECODES[1]) == 100
    admission.free_kv(DECODES[1], None)
    assert admission.room_bytes(None, DECODES[1]) == 600
    admission.validate()


def test_a_full_queue_refuses_with_429_by_number_and_by_bytes() -> None:
    admission = made(4, queue_max=2, queue_max_bytes=100)
    admission.offer(a_cold(), 0.0)
    assert isinstance(admission.offer(a_cold(300, 90), 0.0), Wait)
    refused = a_cold(300, 20)
    answer = admission.offer(refused, 0.0)
    assert isinstance(answer, Refuse)
    assert (answer.status, answer.code) == (429, "cold_queue_full")
    assert refused.stage is ColdStage.GONE
    assert isinstance(admission.offer(a_cold(300, 10), 0.0), Wait)
    assert isinstance(admission.offer(a_cold(300, 0), 0.0), Refuse)
    assert admission.counts["refused_cold_queue_full"] == 2
    assert isinstance(admission.offer(ColdItem(10, 10, 500), 0.0), Admit), "a warm one is not queued"
    admission.validate()


def test_who_waits_too_long_is_refused_with_503() -> None:
    admission = made(4, queue_s=60.0)
    admission.offer(a_cold(), 0.0)
    early, late = a_cold(), a_cold()
    early.tag = late.tag = "request"
    admission.offer(early, 5.0)
    admission.offer(late, 6.0)
    assert admission.due_s == 65.0
    assert admission.tick(64.9) == []
    assert admission.tick(65.0) == [early]
    assert isinstance(early.answer, Refuse)
    assert (early.answer.status, early.answer.code) == (503, "cold_queue_timeout")
    assert early.answer.code in REFUSALS
    assert early.tag == "request", "the shell is still to find it"
    assert admission.due_s == 66.0
    admission.leave(late, 65.5)
    admission.leave(early, 65.5)
    assert (late.tag, early.tag) == (None, None)
    assert admission.due_s == inf
    assert admission.statistics(70.0).num_waiting == 0
    assert admission.counts["left_waiting"] == 1


def test_when_to_come_back_goes_by_how_fast_the_queue_drains() -> None:
    admission = made(4, queue_max=4, queue_s=50.0)
    running, *others = [a_cold(200) for _ in range(5)]
    for item in (running, *others):
        admission.offer(item, 0.0)
    answer = admission.offer(a_cold(200), 0.0)
    assert isinstance(answer, Refuse)
    assert answer.retry_after_s == 50, "not known yet: the longest wait"
    for now_s in (2.0, 4.0):
        admission.leave(running, now_s)
        (running,) = admission.tick(now_s)
    assert admission.statistics(4.0).drain_bytes_s == 100.0
    assert admission.retry_after_s(4.0) == 4, "400 bytes wait"
    assert admission.retry_after_s(4.0, 250) == 7
    assert admission.retry_after_s(1e9) == RETRY_AFTER_MAX_S, "it has not moved for very long"
    for item in others:
        admission.leave(item, 4.0)
    assert admission.retry_after_s(4.0) == 1


# ---- ageing ----------------------------------------------------------------------------------------------------------


def test_a_large_prompt_under_a_steady_stream_of_nearly_warm_ones_waits_no_longer_than_the_bound() -> None:
    admission = made(4, ageing_s=10.0, queue_s=1000.0)
    running: ColdItem = a_cold(100)
    admission.offer(running, 0.0)
    large = a_cold(5000)
    admission.offer(large, 0.0)
    now_s, passed_by = 0.0, 0
    while running is not large:
        admission.offer(a_cold(100), now_s)
        admission.offer(a_cold(100), now_s)
        now_s += 1.0
        admission.leave(running, now_s)
        (running,) = admission.tick(now_s)
        passed_by += running is not large
        assert now_s < 100.0, "starved"
    assert 5 < passed_by <= 2 * 10, "only what came in its first ten seconds"


@given(st.lists(st.tuples(st.floats(0.0, 4.0), st.integers(100, 3000), st.booleans()), max_size=60))
@settings(deadline=None)
def test_no_request_is_passed_by_one_that_came_later_by_the_bound_or_more(
    steps: Sequence[tuple[float, int, bool]],
) -> None:
    ageing_s = 5.0
    admission = made(4, ageing_s=ageing_s, queue_s=1e6)
    running: ColdItem | None = a_cold(100)
    admission.offer(running, 0.0)
    now_s, admitted = 0.0, list[ColdItem]()
    waiting = list[ColdItem]()
    for step_s, num_tokens, ends in [*steps, *[(0.0, 100, True)] * len(steps)]:
        now_s += step_s
        if step_s or not ends:
            waiting.append(item := a_cold(num_tokens))
            admission.offer(item, now_s)
        if ends and running is not None:
            admission.leave(running, now_s)
            running = next(iter(admission.tick(now_s)), None)
            if running is not None:
                waiting.remove(running)
                assert all(running.offered_s < other.offered_s + ageing_s for other in waiting)
                admitted.append(running)
    admission.validate()


# ---- the lane --------------------------------------------------------------------------------------------------------


def test_cold_prompts_are_kept_to_their_lane_and_one_on_an_engine() -> None:
    admission = made(8)
    one, other = a_cold(), a_cold()
    admission.offer(one, 0.0)
    admission.offer(other, 0.0)
    assert admission.statistics(0.0).lane == [PREFILLS[0].url, PREFILLS[1].url]
    assert admission.avoid_for(one) == tuple(PREFILLS[2:8])
    admission.prefill_chosen(one, PREFILLS[0], 0.0)
    assert admission.avoid_for(other) == (*PREFILLS[2:8], PREFILLS[0])
    admission.prefill_chosen(other, PREFILLS[1], 0.0)
    assert admission.avoid_for(ColdItem(1, 1)) == (PREFILLS[0], PREFILLS[1])
    admission.leave(one, 1.0)
    assert admission.avoid_for(ColdItem(1, 1)) == (PREFILLS[1],)


def test_with_one_prefill_engine_nothing_is_passed_over() -> None:
    admission = made(1)
    cold = a_cold()
    assert isinstance(admission.offer(cold, 0.0), Admit)
    assert admission.avoid_for(cold) == ()
    admission.prefill_chosen(cold, PREFILLS[0], 0.0)
    assert admission.avoid_for(ColdItem(1, 1)) == admission.avoid_for(cold) == ()
    assert isinstance(admission.offer(a_cold(), 0.0), Wait)


def test_cold_prompts_alone_have_most_of_the_pool_and_give_way_when_warm_ones_come() -> None:
    admission = made(8, 4, lane_share_max=0.75, lane_window_s=30.0)
    assert admission.statistics(0.0).cold_max == 6
    warm = [ColdItem(1, 1) for _ in range(3)]
    for item in warm:
        admission.offer(item, 1.0)
    assert admission.statistics(1.0).cold_max == 4, "three, and one more, are left to warm ones"
    for item in warm:
        admission.leave(item, 2.0)
    admission.tick(29.0)
    assert admission.statistics(29.0).cold_max == 4, "what they needed is kept in mind"
    admission.tick(59.0)
    assert admission.statistics(59.0).cold_max == 4
    admission.tick(89.0)
    assert admission.statistics(89.0).cold_max == 6
    many = [ColdItem(1, 1) for _ in range(20)]
    for item in many:
        admission.offer(item, 90.0)
    assert admission.statistics(90.0).cold_max == 2, "never less than their share"
    admission.validate()


def test_what_runs_outside_the_lane_when_it_shrinks_counts() -> None:
    admission = made(4, 4, lane_share_max=0.75)
    colds = [a_cold() for _ in range(3)]
    for index, item in enumerate(colds):
        admission.offer(item, 0.0)
        admission.prefill_chosen(item, PREFILLS[index], 0.0)
    for _ in range(3):
        admission.offer(ColdItem(1, 1), 0.0)
    assert admission.avoid_for(ColdItem(1, 1)) == tuple(PREFILLS[:3])
    waiting = a_cold()
    admission.offer(waiting, 0.0)
    for item in colds[:2]:
        admission.leave(item, 1.0)
        assert admission.tick(1.0) == []
    admission.leave(colds[2], 1.0)
    assert admission.tick(1.0) == [waiting]
    admission.validate()


def test_an_engine_that_leaves_the_pool_takes_its_cold_prompt_with_it() -> None:
    admission = made(2)
    item = a_cold()
    admission.offer(item, 0.0)
    admission.prefill_chosen(item, PREFILLS[0], 0.0)
    admission.set_prefills(PREFILLS[1:2])
    admission.validate()
    admission.prefill_chosen(item, PREFILLS[1], 1.0)  # a retry
    admission.validate()
    admission.set_prefills(())
    admission.leave(item, 2.0)
    assert admission.avoid_for(a_cold()) == ()
    admission.validate()


# ---- after the prefill -----------------------------------------------------------------------------------------------


def test_transfers_to_a_decode_engine_are_bounded_and_wait_in_turn() -> None:
    admission = made(8, 2)
    busy = pull(admission, 800, 0.0)
    large, small, third = a_cold(500), ColdItem(1, 99), ColdItem(1, 101)
    admission.offer(large, 0.0)
    admission.offer(small, 0.0)
    admission.offer(third, 0.0)
    answer = answered(admission, large, 1.0)
    assert isinstance(answer, Wait)
    assert answer.until_s == 11.0, "a third of the lease of 30 s"
    assert isinstance(answered(admission, small, 1.0), Admit), "a small transfer never waits"
    assert isinstance(answered(admission, third, 2.0), Wait), "it fits, and is not first"
    assert admission.due_s == 11.0
    stats = admission.statistics(2.0)
    assert stats.num_held == 2
    assert (stats.decodes[0].in_flight_bytes, stats.decodes[0].budget_bytes, stats.decodes[0].num_held) == (
        899,
        1000,
        2,
    )
    assert admission.tick(3.0) == []
    admission.leave(small, 3.0)
    admission.leave(busy, 3.0)
    assert admission.tick(3.0) == [large, third]
    assert large.stage is third.stage is ColdStage.PULLING
    assert admission.due_s == inf
    admission.validate()


def test_a_transfer_that_is_larger_than_the_budget_goes_alone() -> None:
    admission = made(8)
    small = pull(admission, 50, 0.0)
    giant = a_cold(5000)
    admission.offer(giant, 0.0)
    assert isinstance(answered(admission, giant, 1.0), Admit), "no other large one is in flight there"
    assert admission.room_bytes(PREFILLS[0], DECODES[0]) == 0
    admission.leave(small, 1.0)
    admission.validate()


def test_after_a_third_of_the_lease_a_transfer_goes_all_the_same() -> None:
    admission = made(8, 2)
    pull(admission, 900, 0.0)
    items = [a_cold(500), a_cold(600)]
    for number, item in enumerate(items):
        admission.offer(item, 0.0)
        assert isinstance(answered(admission, item, 1.0 + number), Wait)
    assert admission.tick(10.9) == []
    assert admission.tick(11.0) == [items[0]]
    assert isinstance(items[0].answer, Admit)
    assert items[0].answer.is_overdue
    assert admission.tick(12.0) == [items[1]]
    assert admission.counts["held_overdue"] == 2
    admission.validate()


def test_the_wait_is_counted_from_the_first_answer_whichever_decode_engine_is_tried() -> None:
    admission = made(8, 2)
    pull(admission, 900, 0.0, decode=0)
    pull(admission, 900, 0.0, decode=1)
    item = a_cold(500)
    admission.offer(item, 0.0)
    answered(admission, item, 1.0)
    answer = admission.prefill_answered(item, DECODES[1], 7.0)
    assert isinstance(answer, Wait)
    assert answer.until_s == 11.0
    admission.validate()
    assert isinstance(admission.prefill_answered(item, DECODES[0], 11.0), Admit)
    assert isinstance(admission.prefill_answered(item, DECODES[1], 12.0), Admit), "refused: another one, at once"
    assert [load.in_flight_bytes for load in admission.statistics(12.0).decodes] == [900, 1400]
    admission.validate()


def test_a_fresh_prefill_takes_its_place_back_and_has_a_lease_of_its_own() -> None:
    admission = made(4)
    item, other = a_cold(), a_cold()
    admission.offer(item, 0.0)
    admission.offer(other, 0.0)
    answered(admission, item, 1.0)
    assert admission.tick(1.0) == [other]
    admission.prefill_chosen(other, PREFILLS[0], 1.0)
    admission.prefill_chosen(item, PREFILLS[0], 2.0)
    stats = admission.statistics(2.0)
    assert (stats.num_cold, stats.cold_max) == (2, 1), "it does not wait twice"
    assert stats.decodes[0].in_flight_bytes == 0
    admission.validate()
    pull(admission, 900, 3.0)
    answer = admission.prefill_answered(item, DECODES[0], 20.0)
    assert isinstance(answer, Wait)
    assert answer.until_s == 30.0
    admission.validate()


def test_what_a_decode_engine_holds_already_is_not_counted() -> None:
    admission = made(4)
    pull(admission, 900, 0.0)
    item = a_cold(500)
    admission.offer(item, 0.0)
    admission.prefill_chosen(item, PREFILLS[0], 0.0)
    assert isinstance(admission.prefill_answered(item, DECODES[0], 1.0, num_pull_tokens=100), Admit)
    assert admission.statistics(1.0).committed_bytes == 100
    admission.validate()


def test_what_is_measured_moves_the_budget() -> None:
    admission = made(8)
    for now_s in (-10.0, 0.0):  # the first has the handshake in it
        admission.pulled(pull(admission, 500, now_s), 500, 10.0, now_s + 10.0)
    stats = admission.statistics(10.0)
    assert stats.rates == {(PREFILLS[0].url, DECODES[0].url): 50.0}
    assert (stats.decodes[0].budget_bytes, stats.budget_bytes) == (500, 500)
    assert admission.room_bytes(PREFILLS[0], DECODES[0]) == 500
    first, second = a_cold(300), a_cold(300)
    assert isinstance(admission.offer(first, 10.0), Admit)
    assert isinstance(admission.offer(second, 10.0), Wait)
    admission.forget(DECODES[0])
    assert admission.statistics(10.0).rates == {}


def test_transfers_that_run_at_once_do_not_make_the_link_look_slow() -> None:
    admission = made(8)
    admission.pulled(pull(admission, 50, 0.0), 50, 1.0, 1.0)
    both = [pull(admission, 100, 10.0), pull(admission, 100, 10.0)]
    for item in both:
        admission.pulled(item, 100, 4.0, 14.0)
    (rate,) = admission.statistics(14.0).rates.values()
    assert rate == pytest.approx(50.0), "200 bytes in 4 s"


def test_a_transfer_that_failed_measures_nothing() -> None:
    admission = made(8)
    for _ in range(3):
        admission.leave(pull(admission, 500, 0.0), 100.0)
    assert admission.statistics(100.0).rates == {}
    gone = pull(admission, 500, 0.0)
    admission.leave(gone, 1.0)
    admission.pulled(gone, 500, 1.0, 2.0)
    admission.prefill_chosen(gone, PREFILLS[0], 3.0)
    assert isinstance(admission.prefill_answered(gone, DECODES[0], 3.0), Admit), "a late event changes nothing"
    assert admission.statistics(3.0).decodes[0].in_flight_bytes == 0
    admission.validate()


# ---- off -------------------------------------------------------------------------------------------------------------


def test_without_the_bytes_of_a_token_all_is_admitted_and_that_is_said() -> None:
    admission = made(4, kv_bytes_per_token=0)
    items = [a_cold(10**6) for _ in range(50)]
    for item in items:
        assert isinstance(admission.offer(item, 0.0), Admit)
        assert isinstance(answered(admission, item, 0.0), Admit)
    stats = admission.statistics(0.0)
    assert not stats.is_on
    assert "not known" in stats.why_off
    assert stats.counts == {"admitted_off": 50}
    assert made().statistics(0.0).is_on
    assert made().statistics(0.0).why_off == ""


def test_a_pool_that_is_not_known_has_no_budget() -> None:
    admission = ColdAdmission(options())
    assert admission.statistics(0.0).budget_bytes is None
    assert isinstance(admission.offer(a_cold(10**6), 0.0), Admit)
    assert isinstance(admission.offer(a_cold(10**6), 0.0), Wait), "one at once"
    assert made(num_decodes=0).statistics(0.0).budget_bytes == 0


def test_an_item_is_offered_once_and_admitted_before_it_is_sent() -> None:
    admission = made()
    item, waiting = a_cold(), a_cold()
    admission.offer(item, 0.0)
    with pytest.raises(AssertionError, match="offered twice"):
        admission.offer(item, 0.0)
    admission.offer(waiting, 0.0)
    with pytest.raises(AssertionError, match="not admitted"):
        admission.prefill_chosen(waiting, PREFILLS[0], 0.0)
    with pytest.raises(AssertionError, match="not admitted"):
        admission.prefill_answered(waiting, DECODES[0], 0.0)
