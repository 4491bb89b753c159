"""The size of a pool: the rule against a plain one that looks through all history, and pools under simulated loads."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.ray import autoscaling
from antiphon.ray.autoscaling import (
    GROWTH_MAX,
    SHRINK_SHARE,
    START_MAX_S,
    STATISTICS,
    Decision,
    Load,
    Look,
    Memory,
    PoolScaling,
    Rule,
    decide,
    load_of,
    needed,
)
from tests.ray.pools import LOOK_BACK_S, Engine, Pool, scaling

ONGOING = Rule("decode", {"ongoing_requests": 10.0}, upscale_delay_s=30.0, downscale_delay_s=120.0)


def carrying(*values: float | None) -> list[Load | None]:
    """One engine for each value of ongoing requests, None for one that is unknown."""
    return [None if value is None else Load({"ongoing_requests": (value, value)}) for value in values]


def sizes(rule: Rule, looks: list[tuple[float, list[Load | None]]], size: int, bounds: tuple[int, int]) -> list[int]:
    """The size after each look, where the pool has at once what it should."""
    memory, found = Memory(), []
    for at_s, loads in looks:
        size = decide(rule, memory, Look(at_s, size, *bounds, loads)).size
        found.append(size)
    return found


# ---- the rule --------------------------------------------------------------------------------------------------------


def test_grows_after_its_delay_without_a_break() -> None:
    high, calm = carrying(15, 15), carrying(9, 9)
    looks = [(0.0, high), (20.0, high), (29.9, high), (30.0, high)]
    assert sizes(ONGOING, looks, 2, (1, 8)) == [2, 2, 2, 3]
    broken = [(0.0, high), (20.0, calm), (25.0, high), (45.0, high), (55.0, high)]
    assert sizes(ONGOING, broken, 2, (1, 8)) == [2, 2, 2, 2, 3]


def test_shrinks_after_its_delay_to_the_most_that_was_needed() -> None:
    looks = [(0.0, carrying(1, 1, 1, 1)), (60.0, carrying(4, 4, 4, 4)), (120.0, carrying(1, 1, 1, 1))]
    assert sizes(ONGOING, looks, 4, (1, 8)) == [4, 4, 2]


def test_what_lies_between_the_measures_holds_the_size() -> None:
    """Two engines at 9 are more than one at 10, and three at 6 less than three need but more than 85% of two."""
    looks = [(float(at_s), carrying(6, 6, 6)) for at_s in range(0, 2000, 10)]
    assert set(sizes(ONGOING, looks, 3, (1, 8))) == {3}


def test_at_most_doubles_and_waits_for_those_that_come() -> None:
    memory = Memory()
    loads = carrying(500)
    assert decide(ONGOING, memory, Look(0, 1, 1, 64, loads)).size == 1
    assert decide(ONGOING, memory, Look(30, 1, 1, 64, loads)).size == 2
    for at_s in range(40, 300, 10):
        assert decide(ONGOING, memory, Look(at_s, 2, 1, 64, loads)).size == 2, "one is coming"
    two = carrying(500, 0)
    assert decide(ONGOING, memory, Look(300, 2, 1, 64, two)).size == 2
    assert decide(ONGOING, memory, Look(330, 2, 1, 64, two)).size == 4
    assert GROWTH_MAX == 2


def test_factors_multiply_a_step() -> None:
    slow = Rule("decode", ONGOING.targets, 0, 0, upscaling_factor=0.5, downscaling_factor=0.5)
    assert decide(slow, Memory(), Look(0, 4, 1, 64, carrying(20, 20, 20, 20))).size == 6
    assert decide(slow, Memory(), Look(0, 8, 1, 64, carrying(*[0.0] * 8))).size == 5
    assert decide(slow, Memory(), Look(0, 2, 1, 64, carrying(0, 0))).size == 1, "a step is never nothing"


def test_an_unknown_engine_holds_the_size_and_hides_no_overload() -> None:
    idle = [(float(at_s), carrying(0, 0, None)) for at_s in range(0, 2000, 10)]
    assert set(sizes(ONGOING, idle, 3, (1, 8))) == {3}
    loaded = [(0.0, carrying(40, None)), (30.0, carrying(40, None))]
    assert sizes(ONGOING, loaded, 2, (1, 8)) == [2, 4]
    nobody = [(float(at_s), []) for at_s in range(0, 2000, 10)]
    assert set(sizes(ONGOING, nobody, 3, (1, 8))) == {3}


def test_a_pool_without_a_value_of_its_target_is_unknown() -> None:
    loads: list[Load | None] = [Load({"ongoing_requests": None}), Load({"ongoing_requests": (0.0, 0.0)})]
    assert not needed(ONGOING, loads).is_known


def test_a_starting_engine_counts_and_one_that_never_comes_holds_nothing_for_ever() -> None:
    memory = Memory()
    found = {}
    for at_s in range(0, int(START_MAX_S) + 200, 10):
        found[at_s] = decide(ONGOING, memory, Look(at_s, 3, 1, 8, carrying(1, 1))).size
    first = min(at_s for at_s, size in found.items() if size < 3)
    assert first == START_MAX_S + ONGOING.downscale_delay_s


@pytest.mark.parametrize(("bounds", "size", "expected"), [((2, 4), 1, 2), ((2, 4), 9, 4), ((2, 4), 3, 3)])
def test_bounds_hold_at_once(bounds: tuple[int, int], size: int, expected: int) -> None:
    assert decide(ONGOING, Memory(), Look(0, size, *bounds, carrying())) == Decision(expected)


def test_a_change_says_why() -> None:
    grown = decide(Rule("decode", {"ongoing_requests": 10.0}, 0, 0), Memory(), Look(0, 1, 1, 4, carrying(15)))
    assert grown == Decision(2, "ongoing_requests 15 in all, 15 at last, 10 an engine")
    shrunk = decide(Rule("decode", {"ongoing_requests": 10.0}, 0, 0), Memory(), Look(0, 2, 1, 4, carrying(1, 1)))
    assert shrunk.size == 1
    assert shrunk.why.startswith("1 would do: ongoing_requests 2 in all")


class Plain:
    """The rule once more, from all looks since the last change, read backwards at each."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.looks: list[Look] = []

    def size(self, look: Look) -> int:
        size = min(max(look.size, look.lowest), look.most)
        if self.looks and size != min(max(self.looks[-1].size, self.looks[-1].lowest), self.looks[-1].most):
            self.looks = []
        self.looks.append(look)
        # The looks of an unbroken run to now in which the pool asked for the same.
        for wants, delay_s in ((self.grows, self.rule.upscale_delay_s), (self.shrinks, self.rule.downscale_delay_s)):
            run = []
            for index in range(len(self.looks) - 1, -1, -1):
                if not wants(index, size):
                    break
                run.append(self.looks[index])
            if run and look.at_s - run[-1].at_s >= delay_s:
                self.looks = []
                if wants == self.grows:
                    return min(look.most, math.floor(size * GROWTH_MAX), self.need(look)[0])
                return max(look.lowest, max(self.need(each)[1] for each in run))
        return size

    def need(self, look: Look) -> tuple[int, int]:
        known = [load for load in look.loads if load is not None]
        pairs = [load.values["ongoing_requests"] or (0.0, 0.0) for load in known]
        whole, recent = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        target = self.rule.targets["ongoing_requests"]
        up = math.ceil(min(whole, recent) / target - 1e-9)
        return up, max(1, math.ceil(max(whole, recent) / (target * SHRINK_SHARE) - 1e-9))

    def comes(self, index: int, size: int) -> bool:
        first = index
        while first >= 0 and len(self.looks[first].loads) < size:
            first -= 1
        return first < index and self.looks[index].at_s - self.looks[first + 1].at_s < START_MAX_S

    def grows(self, index: int, size: int) -> bool:
        look = self.looks[index]
        return self.need(look)[0] > size and size < look.most and not self.comes(index, size)

    def shrinks(self, index: int, size: int) -> bool:
        look = self.looks[index]
        is_known = bool(look.loads) and None not in look.loads
        is_less = is_known and self.need(look)[1] < size and size > look.lowest
        return is_less and not self.grows(index, size) and not self.comes(index, size)


amounts = st.integers(0, 60).map(lambda value: value / 2)
moods = st.sampled_from([0.0, 2.0, 8.5, 10.0, 12.0, 30.0])


@given(st.data(), st.integers(1, 3), st.integers(0, 6))
def test_the_rule_is_the_plain_one(data: st.DataObject, lowest: int, more: int) -> None:
    memory, plain = Memory(), Plain(ONGOING)
    size, now_s = lowest, 0.0
    mood = data.draw(moods)
    for _ in range(data.draw(st.integers(1, 60))):
        now_s += data.draw(st.sampled_from([1.0, 5.0, 15.0, 30.0, 400.0]))
        if data.draw(st.integers(0, 7)) == 0:
            mood = data.draw(moods)
        num_running = size - (data.draw(st.integers(0, size)) if data.draw(st.integers(0, 5)) == 0 else 0)
        loads: list[Load | None] = []
        for _ in range(num_running):
            pair = mood, mood + data.draw(st.sampled_from([0.0, 0.0, -2.0, 3.0]))
            is_known = data.draw(st.integers(0, 19)) > 0
            loads.append(Load({"ongoing_requests": (pair[0], max(0.0, pair[1]))}) if is_known else None)
        look = Look(now_s, size, lowest, lowest + more, loads)
        expected = plain.size(look)
        assert decide(ONGOING, memory, look).size == expected
        size = expected


# ---- what an engine carries ------------------------------------------------------------------------------------------


def series(role: str, *steps: tuple[float, float]) -> dict[str, list[tuple[float, float]]]:
    """The reports of an engine after each step of (requests, seconds)."""
    engine, now_s = Engine(role), 0.0
    for num_new, seconds in steps:
        now_s += seconds
        engine.step(num_new, seconds)
        engine.report(now_s)
    return {name: [(point.timestamp, point.value) for point in engine.reports[name]] for name in STATISTICS}


def flat(**values: float) -> dict[str, list[tuple[float, float]]]:
    """Reports of 15 seconds that do not change."""
    found = dict.fromkeys(STATISTICS, 0.0) | {f"engine_{name}": value for name, value in values.items()}
    assert found.keys() == frozenset(STATISTICS)
    return {name: [(float(at_s), value) for at_s in range(0, 16, 2)] for name, value in found.items()}


@pytest.mark.parametrize("missing", STATISTICS)
def test_a_missing_or_wrong_statistic_is_unknown(missing: str) -> None:
    reports = flat()
    assert load_of("prefill", reports, LOOK_BACK_S) is not None
    assert load_of("prefill", reports | {missing: []}, LOOK_BACK_S) is None
    assert load_of("prefill", reports | {missing: [(14.0, math.nan)]}, LOOK_BACK_S) is None


def test_uncached_tokens_are_requests_times_what_one_computed() -> None:
    load = load_of("prefill", series("prefill", *[(6.0, 2.0)] * 10), LOOK_BACK_S)
    assert load is not None
    pair = load.values["uncached_tokens"]
    assert pair is not None
    assert pair[1] > pair[0] > 1000, "a backlog that grows is more at last than on the whole"
    assert load.busy_share == 1


def test_tokens_of_requests_of_which_none_has_ever_ended_cannot_be_told() -> None:
    waiting = load_of("prefill", flat(running=1, waiting=3), LOOK_BACK_S)
    assert waiting is not None
    assert waiting.values["uncached_tokens"] is None
    assert (waiting.num_first_tokens, waiting.waited_s) == (1, 14), "they have waited for that long at least"
    idle = load_of("prefill", flat(), LOOK_BACK_S)
    assert idle is not None
    assert idle.values["uncached_tokens"] == (0, 0)


def test_an_earlier_engine_lends_its_average() -> None:
    load = load_of("prefill", flat(running=1, waiting=1, prefills=10, computed_tokens=5000), LOOK_BACK_S)
    assert load is not None
    assert load.values["uncached_tokens"] == (1000, 1000)


def test_sums_that_fall_begin_anew() -> None:
    reports = flat(running=1)
    times = [at_s for at_s, _ in reports[autoscaling.PREFILLS]]
    reports[autoscaling.PREFILLS] = list(zip(times, [100, 101, 102, 0, 1, 2, 3, 4], strict=True))
    reports[autoscaling.COMPUTED_TOKENS] = list(zip(times, [9e6, 9e6, 9e6, 0, 50, 100, 150, 200], strict=True))
    load = load_of("prefill", reports, LOOK_BACK_S)
    assert load is not None
    assert load.values["uncached_tokens"] == pytest.approx((200 / 6, 200 / 6))


def test_only_waiting_is_shortened_by_more_engines() -> None:
    """A prefill that alone takes longer than the target does not let the pool grow; waiting does."""
    rule = Rule("prefill", {"first_token_s": 2.0}, 30, 600)
    long = [Load(busy_share=0.5, num_first_tokens=10, waited_s=1.0, prefill_s=50.0)]
    assert needed(rule, long).up == 0
    queued = [Load(busy_share=1.0, num_first_tokens=10, waited_s=30.0, prefill_s=2.0)]
    assert needed(rule, queued).up == 2


def test_a_busy_prefill_pool_does_not_shrink_however_short_its_queues() -> None:
    rule = Rule("prefill", {"uncached_tokens": 16384.0}, 30, 600)
    light = {"uncached_tokens": (500.0, 500.0)}
    assert needed(rule, [Load(light, busy_share=0.5)] * 2).down == 2
    assert needed(rule, [Load(light, busy_share=0.3)] * 2).down == 1


def test_a_decode_engine_without_room_is_full_whatever_its_kv() -> None:
    def occupancy(**values: float) -> float:
        load = load_of("decode", flat(**values), LOOK_BACK_S)
        assert load is not None
        pair = load.values["kv_usage"]
        assert pair is not None
        return pair[0]

    assert occupancy(running=40, kv_usage=0.3) == 0.3
    assert occupancy(running=40, waiting=20, kv_usage=0.3) == 1.5
    assert occupancy(running=40, deferred=20, kv_usage=0.3) == 0.3, "KV that is on its way is no want of room"
    quick = flat(running=40, waiting=1, kv_usage=0.3)
    times = [at_s for at_s, _ in quick[autoscaling.FIRST_TOKENS]]
    for name, each in ((autoscaling.FIRST_TOKENS, 10.0), (autoscaling.FIRST_TOKEN_S, 0.5)):
        quick[name] = [(at_s, index * each) for index, at_s in enumerate(times)]
    load = load_of("decode", quick, LOOK_BACK_S)
    assert load is not None
    assert load.values["kv_usage"] == (pytest.approx(0.3), pytest.approx(0.3)), "they are there by chance"


# ---- Serve's side ----------------------------------------------------------------------------------------------------


def test_stale_statistics_hold_the_size_whatever_the_clocks_say() -> None:
    for skew_s in (0.0, -5000.0, 5000.0):
        pool = Pool(scaling("decode", (30, 60)), 1, 3)
        pool.size, pool.engines = 3, [Engine("decode") for _ in range(3)]
        for engine in pool.engines:
            engine.report(pool.now_s + skew_s)  # once, and never again
            engine.is_silent = True
        for _ in range(300):
            pool.now_s += 1
            pool.look()
        assert pool.changes == [], "an engine that is silent is not idle"


def test_skewed_clocks_change_nothing_else() -> None:
    pool = Pool(scaling("decode", (30, 60)), 1, 3)
    pool.size, pool.engines = 3, [Engine("decode") for _ in range(3)]
    for _ in range(60):
        pool.now_s += 2
        for engine in pool.engines:
            engine.report(pool.now_s - 7200)
        pool.look()
    assert [after for *_, after in pool.changes] == [1]


def test_changes_and_unknown_engines_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="ray.serve")
    pool = Pool(scaling("decode"), 1, 2)
    pool.run(1200, lambda _: 4.0)
    changes = [text for text in caplog.messages if "scales decode" in text]
    assert len(changes) == len(pool.changes) == 1
    assert changes[0].startswith("Antiphon scales decode from 1 to 2 engines: kv_usage 1.")
    caplog.clear()
    pool.engines[0].is_silent = True
    pool.run(60, lambda _: 4.0)
    assert caplog.messages == ["Antiphon: 1 of 2 engines of decode are unknown: it does not shrink."]


# ---- pools under load ------------------------------------------------------------------------------------------------

PREFILL_RATE = 1 / Engine.SECONDS["prefill"]
"""Requests a second that one prefill engine can do."""
DECODE_RATE = Engine.ROOM["decode"] / Engine.SECONDS["decode"]


@pytest.mark.parametrize(
    ("role", "rate", "bounds"), [("prefill", PREFILL_RATE, (2, 4)), ("decode", DECODE_RATE, (6, 10))]
)
def test_a_pool_with_only_min_and_max_scales_up_and_back(role: str, rate: float, bounds: tuple[int, int]) -> None:
    """The numbers of a plain config: a step to what only the largest pool can do, and back to nothing."""
    lowest, most = bounds
    pool = Pool(scaling(role), lowest, most)
    pool.run(300, lambda _: 0.3 * lowest * rate)
    assert pool.size == lowest
    begin_s = pool.now_s
    pool.run(900, lambda _: 0.95 * most * rate)
    assert pool.size == most
    assert pool.changes[0][0] - begin_s <= 90, "the first step comes in a minute and a half"
    pool.run(1800, lambda _: 0.0)
    assert pool.size == lowest
    assert pool.num_turns == 1


@settings(max_examples=12)
@given(st.sampled_from(["prefill", "decode"]), st.floats(0.05, 3.8), st.sampled_from([5.0, 60.0, 240.0]))
def test_a_constant_load_settles_and_stays(role: str, load: float, start_s: float) -> None:
    rate = {"prefill": PREFILL_RATE, "decode": DECODE_RATE}[role]
    pool = Pool(scaling(role), 1, 6, start_s)
    pool.run(5400, lambda _: load * rate)
    settled = len(pool.changes)
    pool.run(3600, lambda _: load * rate)
    assert len(pool.changes) == settled, "a size that does not suit the load, or one that is left again"
    assert pool.num_turns <= 1
    assert pool.size >= math.ceil(load - 1e-6), "it cannot work this load off"


@settings(max_examples=25)
@given(st.sampled_from(["prefill", "decode"]), st.integers(0, 2**32), st.floats(0.3, 3.0))
def test_noise_is_no_reason_to_turn(role: str, seed: int, load: float) -> None:
    """Arrivals that scatter by half their rate from step to step: in an hour it turns twice at most, and each turn
    keeps the delay of its way."""
    rate = {"prefill": PREFILL_RATE, "decode": DECODE_RATE}[role]
    chance = random.Random(seed)
    pool = Pool(scaling(role), 1, 6)
    pool.run(3600, lambda _: load * rate * chance.uniform(0.5, 1.5))
    assert pool.num_turns <= 2
    for (before_s, _, _), (at_s, size, after) in pairwise(pool.changes):
        delays = pool.scaling.rule
        assert at_s - before_s >= (delays.upscale_delay_s if after > size else delays.downscale_delay_s)


@settings(max_examples=25)
@given(st.sampled_from(["prefill", "decode"]), st.sampled_from([600.0, 1800.0]))
def test_a_ramp_is_followed_in_one_direction(role: str, seconds: float) -> None:
    rate = {"prefill": PREFILL_RATE, "decode": DECODE_RATE}[role]
    pool = Pool(scaling(role), 1, 5, start_s=30.0)
    pool.run(seconds, lambda at_s: 4.0 * rate * at_s / seconds)
    assert pool.size >= 4
    assert pool.num_turns == 0
    pool.run(3600, lambda _: 4.0 * rate * 0.95)
    pool.run(seconds, lambda at_s: 4.0 * rate * (1 - at_s / seconds))
    pool.run(1800, lambda _: 0.0)
    assert pool.size == 1
    assert pool.num_turns == 1


def test_losing_an_engine_under_load_is_no_reason_to_shrink() -> None:
    pool = Pool(scaling("decode"), 1, 3)
    pool.run(1200, lambda _: 2.0 * DECODE_RATE * 0.9)
    before = pool.size
    pool.engines.pop()
    pool.coming.append(pool.now_s + 120)
    pool.run(1800, lambda _: 2.0 * DECODE_RATE * 0.9)
    assert pool.size >= before


def test_the_policy_needs_nothing_but_itself() -> None:
    """Serve runs it in its controller, which need not have Antiphon."""
    source = autoscaling.__file__
    assert source is not None
    with open(source) as file:
        imports = [line for line in file if line.startswith(("import ", "from "))]
    assert not [line for line in imports if "antiphon" in line or "ray" in line.split()[1]]
    assert isinstance(scaling("decode"), PoolScaling)
