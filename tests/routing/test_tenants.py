"""Shares, rates, queues and deadlines of tenants: single decisions, walks against a plain model, and shares of the work
under overload with arrivals that hypothesis draws."""

from __future__ import annotations

import heapq
from collections import deque
from fractions import Fraction
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from antiphon.routing.tenants import (
    ADMIT,
    CODES,
    CONCURRENCY,
    OVERLOADED,
    RATE,
    TOKENS,
    WAIT,
    Refuse,
    TenantOptions,
    Tenants,
    TenantStatistics,
    Verdict,
)


def tenants(*options: TenantOptions, in_flight_max: int | None = None, wait_max_s: float = 30.0) -> Tenants:
    return Tenants(list(options), in_flight_max, wait_max_s)


def of(shared: Tenants, name: str) -> TenantStatistics:
    return next(each for each in shared.statistics() if each.name == name)


def refused(verdict: Verdict) -> tuple[int, str, int]:
    assert isinstance(verdict, Refuse)
    return verdict.status, verdict.code, verdict.retry_after_s


# ---- one decision ----------------------------------------------------------------------------------------------------


def test_without_limits_all_are_admitted_at_once() -> None:
    shared = tenants(TenantOptions("a"), TenantOptions("b"))
    for item in range(1000):
        assert shared.offer(item, "ab"[item % 2], 10, 0.0) is ADMIT
    assert (shared.num_in_flight, shared.num_waiting) == (1000, 0)
    assert [shared.leave(item, 1.0) for item in range(1000)] == [[]] * 1000
    shared.validate(1.0)
    assert (of(shared, "a").num_admitted, of(shared, "a").admitted_cost, shared.num_in_flight) == (500, 5000, 0)


def test_a_place_that_becomes_free_goes_to_who_has_had_least_for_its_weight() -> None:
    shared = tenants(TenantOptions("heavy", weight=3), TenantOptions("light"), in_flight_max=1)
    assert shared.offer("first", "light", 100, 0.0) is ADMIT
    for number in range(8):
        assert shared.offer(("h", number), "heavy", 100, 0.0) is WAIT
        assert shared.offer(("l", number), "light", 100, 0.0) is WAIT
    order, item = [], "first"
    for _ in range(12):
        (item,) = shared.leave(item, 1.0)
        order.append(item[0])
    assert order.count("h") == 8, "three of four, until none are left"
    assert order[:8].count("h") == 6


def test_a_tenant_that_was_idle_is_owed_nothing() -> None:
    shared = tenants(TenantOptions("busy"), TenantOptions("idle"), in_flight_max=1)
    item: object = ("busy", 0)
    assert shared.offer(item, "busy", 10, 0.0) is ADMIT
    for number in range(1, 100):
        shared.offer(("busy", number), "busy", 10, 0.0)
        (item,) = shared.leave(item, 0.0)
    for number in range(100, 150):
        shared.offer(("busy", number), "busy", 10, 0.0)
        shared.offer(("idle", number), "idle", 10, 0.0)
    got = []
    for _ in range(20):
        (item,) = shared.leave(item, 0.0)
        assert isinstance(item, tuple)
        got.append(item[0])
    assert abs(got.count("idle") - got.count("busy")) <= 1


def test_requests_past_the_rate_wait_for_it_and_no_longer() -> None:
    shared = tenants(TenantOptions("a", requests_per_s=2, burst=3, queue_max=10), wait_max_s=2.0)
    assert [shared.offer(item, "a", 1, 100.0) for item in range(3)] == [ADMIT] * 3
    assert [shared.offer(item, "a", 1, 100.0) for item in range(3, 7)] == [WAIT] * 4
    assert refused(shared.offer(7, "a", 1, 100.0)) == (429, RATE, 3), "it would wait 2.5 s"
    assert shared.tick(100.4).admitted == []
    assert shared.tick(100.5).admitted == [3]
    assert shared.tick(101.5).admitted == [4, 5]
    assert shared.tick(101.9).refused == []
    assert shared.tick(102.0).admitted == [6]
    assert of(shared, "a").waited_s == pytest.approx(0.5 + 1.5 + 1.5 + 2.0)
    shared.validate(102.0)


def test_a_token_rate_counts_what_a_request_cost_in_the_end() -> None:
    shared = tenants(TenantOptions("a", tokens_per_s=10, tokens_burst=100))
    assert shared.offer("small", "a", 60, 0.0) is ADMIT
    assert shared.offer("next", "a", 60, 0.0) is WAIT
    assert shared.tick(1.9).admitted == []
    assert shared.leave("small", 1.9, cost=10) == ["next"], "50 tokens came back"
    assert shared.offer("large", "a", 1_000, 20.0) is ADMIT, "a full bucket is enough for what is larger than it"
    assert refused(shared.offer("after", "a", 1, 20.0))[:2] == (429, TOKENS), "but it is in debt"
    assert shared.leave("large", 20.0, cost=0) == []
    assert shared.offer("again", "a", 100, 20.0) is ADMIT


@pytest.mark.parametrize(
    ("options", "in_flight_max", "answer"),
    [
        (TenantOptions("a", requests_per_s=0.1, queue_max=0), None, (429, RATE, 10)),
        (TenantOptions("a", tokens_per_s=5.0, tokens_burst=8, queue_max=0), None, (429, TOKENS, 2)),
        (TenantOptions("a", concurrent_max=1, queue_max=0), None, (429, CONCURRENCY, 1)),
        (TenantOptions("a", queue_max=0), 1, (503, OVERLOADED, 1)),
        (TenantOptions("a", concurrent_max=1, queue_max=0), 1, (429, CONCURRENCY, 1)),
    ],
)
def test_a_full_queue_refuses_and_says_whose_limit_it_is(
    options: TenantOptions, in_flight_max: int | None, answer: tuple[int, str, int]
) -> None:
    shared = tenants(options, in_flight_max=in_flight_max)
    assert shared.offer("in", "a", 8, 5.0) is ADMIT
    assert refused(shared.offer("out", "a", 8, 5.0)) == answer
    assert of(shared, "a").refused == dict.fromkeys(CODES, 0) | {answer[1]: 1}
    assert shared.leave("out", 6.0) == [], "of no concern"
    shared.validate(6.0)
    assert shared.num_in_flight == 1


def test_who_waits_too_long_is_refused_and_who_stands_behind_is_not() -> None:
    shared = tenants(TenantOptions("a", concurrent_max=1), TenantOptions("b"), in_flight_max=2, wait_max_s=5.0)
    assert shared.offer(1, "a", 1, 0.0) is ADMIT
    assert shared.offer(2, "a", 1, 1.0) is WAIT
    assert shared.offer(3, "a", 1, 3.0) is WAIT
    assert shared.offer("b", "b", 1, 3.0) is ADMIT, "another tenant's limit holds nobody else back"
    assert shared.tick(5.9).refused == []
    ((item, refusal),) = shared.tick(6.0).refused
    assert (item, refused(refusal)) == (2, (429, CONCURRENCY, 5))
    shared.validate(6.0)
    assert shared.leave(1, 7.0) == [3]


def test_a_client_that_leaves_the_queue_makes_room_in_it() -> None:
    shared = tenants(TenantOptions("a", queue_max=1), in_flight_max=1)
    assert shared.offer(1, "a", 1, 0.0) is ADMIT
    assert shared.offer(2, "a", 1, 0.0) is WAIT
    assert refused(shared.offer(3, "a", 1, 4.0)) == (503, OVERLOADED, 4)
    assert shared.leave(2, 4.0) == []
    assert shared.offer(3, "a", 1, 4.0) is WAIT
    assert shared.leave(1, 5.0) == [3]
    assert (of(shared, "a").num_left_waiting, of(shared, "a").num_admitted) == (1, 2)


def test_a_rate_holds_among_others_that_wait() -> None:
    slow = TenantOptions("slow", requests_per_s=1, burst=1)
    shared = tenants(slow, TenantOptions("fast"), in_flight_max=1)
    item: object = ("fast", 0)
    assert shared.offer(item, "fast", 10, 0.0) is ADMIT
    for number in range(1, 40):
        shared.offer(("fast", number), "fast", 10, 0.0)
    for number in range(20):
        shared.offer(("slow", number), "slow", 10, 0.0)
    order = []
    for number in range(39):
        (item,) = shared.leave(item, number / 10)
        assert isinstance(item, tuple)
        order.append(item[0])
    assert order.count("slow") == 4, "one a second in 3.9 s, not more"
    shared.validate(3.8)


def test_a_tenant_held_back_by_its_own_limit_catches_nothing_up() -> None:
    one_at_a_time = TenantOptions("slow", concurrent_max=1)
    shared = tenants(one_at_a_time, TenantOptions("fast", weight=3, queue_max=100), in_flight_max=2)
    assert shared.offer(("slow", "long"), "slow", 10, 0.0) is ADMIT
    item: object = ("fast", 0)
    assert shared.offer(item, "fast", 10, 0.0) is ADMIT
    for number in range(1, 90):
        shared.offer(("fast", number), "fast", 10, 0.0)
    for number in range(20):
        shared.offer(("slow", number), "slow", 10, 0.0)
    for _ in range(60):
        (item,) = shared.leave(item, 0.0)
    order: list[object] = []
    in_flight = deque([item, ("slow", "long")])
    for _ in range(28):
        (item,) = shared.leave(in_flight.pop(), 0.0)
        in_flight.appendleft(item)
        assert isinstance(item, tuple)
        order.append(item[0])
    assert 6 <= order.count("slow") <= 8, "a quarter from now on"


def test_virtual_time_is_set_back_without_a_change_of_order() -> None:
    shared = tenants(TenantOptions("a", weight=0.001), TenantOptions("b", weight=0.001), in_flight_max=1)
    item: object = ("a", -1)
    assert shared.offer(item, "a", 10**9, 0.0) is ADMIT
    for number in range(60):
        shared.offer(("a", number), "a", 10**9, 0.0)
        shared.offer(("b", number), "b", 10**9, 0.0)
    order = []
    for _ in range(60):
        (item,) = shared.leave(item, 0.0)
        assert isinstance(item, tuple)
        order.append(item[0])
    assert shared._virtual <= 1e12 + 10**12
    assert all(abs(order[:end].count("a") - order[:end].count("b")) <= 1 for end in range(60))


# ---- against a plain model -------------------------------------------------------------------------------------------


class PlainShares:
    """Start-time fair queueing in fractions, by lists, for tenants without limits of their own."""

    def __init__(self, weights: list[int], in_flight_max: int) -> None:
        self.weights = weights
        self.in_flight_max = in_flight_max
        self.starts = [Fraction(0)] * len(weights)
        self.now = Fraction(0)
        self.waiting: list[list[tuple[int, int]]] = [[] for _ in weights]
        self.turn: list[int] = []
        self.flying: dict[int, tuple[int, int]] = {}

    def _begin(self, who: int, item: int, cost: int) -> None:
        self.now = max(self.now, self.starts[who])
        self.starts[who] += Fraction(cost, self.weights[who])
        self.flying[item] = (who, cost)

    def offer(self, item: int, who: int, cost: int) -> bool:
        if not self.waiting[who]:
            self.starts[who] = max(self.starts[who], self.now)
            if len(self.flying) < self.in_flight_max:
                self._begin(who, item, cost)
                return True
            self.turn.append(who)
        self.waiting[who].append((item, cost))
        return False

    def leave(self, item: int, cost: int | None) -> list[int]:
        if item in self.flying:
            who, expected = self.flying.pop(item)
            if cost is not None:
                self.starts[who] += Fraction(cost - expected, self.weights[who])
        else:
            who = next(who for who, queue in enumerate(self.waiting) if item in dict(queue))
            self.waiting[who] = [each for each in self.waiting[who] if each[0] != item]
        admitted = []
        while True:
            self.turn = [who for who in self.turn if self.waiting[who]]
            if not self.turn or len(self.flying) == self.in_flight_max:
                return admitted
            who = min(self.turn, key=lambda who: self.starts[who])
            first, expected = self.waiting[who].pop(0)
            self._begin(who, first, expected)
            admitted.append(first)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_admissions_are_those_of_a_plain_model(data: st.DataObject) -> None:
    weights = data.draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=4), label="weights")
    in_flight_max = data.draw(st.integers(1, 4), label="in_flight_max")
    shared = tenants(
        *(TenantOptions(str(who), weight=weight, queue_max=100) for who, weight in enumerate(weights)),
        in_flight_max=in_flight_max,
    )
    plain = PlainShares(weights, in_flight_max)
    alive: list[int] = []
    for item in range(data.draw(st.integers(1, 60), label="steps")):
        if alive and data.draw(st.booleans()):
            gone = alive.pop(data.draw(st.integers(0, len(alive) - 1)))
            cost = data.draw(st.none() | st.integers(0, 200))
            assert shared.leave(gone, 0.0, cost) == plain.leave(gone, cost)
        else:
            who, cost = data.draw(st.integers(0, len(weights) - 1)), data.draw(st.integers(1, 100))
            assert (shared.offer(item, str(who), cost, 0.0) is ADMIT) == plain.offer(item, who, cost)
            alive.append(item)
        shared.validate(0.0)


class TenantWalk(RuleBasedStateMachine):
    """Every kind of limit at once, against what must hold of the events alone."""

    WAIT_MAX_S = 3.0
    SLACK = 1e-3

    @initialize(
        in_flight_max=st.none() | st.integers(1, 5),
        rates=st.lists(st.none() | st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
        token_rates=st.lists(st.none() | st.sampled_from([5.0, 40.0]), min_size=3, max_size=3),
        concurrent=st.lists(st.none() | st.integers(1, 3), min_size=3, max_size=3),
        queue_max=st.integers(0, 4),
        weights=st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=3, max_size=3),
    )
    def begin(
        self,
        in_flight_max: int | None,
        rates: list[float | None],
        token_rates: list[float | None],
        concurrent: list[int | None],
        queue_max: int,
        weights: list[float],
    ) -> None:
        self.in_flight_max = in_flight_max
        self.options = {
            name: TenantOptions(name, weight, rate, 2, tokens, 30, most, queue_max)
            for name, weight, rate, tokens, most in zip("abc", weights, rates, token_rates, concurrent, strict=True)
        }
        self.shared = Tenants(list(self.options.values()), in_flight_max, self.WAIT_MAX_S)
        self.now_s = 1000.0
        self.next_item = 0
        self.owner: dict[int, str] = {}
        self.since: dict[int, float] = {}
        self.costs: dict[int, int] = {}
        self.flying: list[int] = []
        self.queues: dict[str, deque[int]] = {name: deque() for name in "abc"}
        self.history: dict[str, list[tuple[float, int]]] = {name: [] for name in "abc"}
        self.given_back = dict.fromkeys("abc", 0)
        self.num_refused = 0

    def admitted(self, item: int) -> None:
        name = self.owner[item]
        options = self.options[name]
        self.flying.append(item)
        assert self.in_flight_max is None or len(self.flying) <= self.in_flight_max
        of_tenant = sum(self.owner[each] == name for each in self.flying)
        assert options.concurrent_max is None or of_tenant <= options.concurrent_max
        history = self.history[name]
        history.append((self.now_s, self.costs[item]))
        if options.requests_per_s is not None:
            for number, (then_s, _) in enumerate(history):
                most = options.burst + options.requests_per_s * (self.now_s - then_s)
                assert len(history) - number <= most + self.SLACK
        if options.tokens_per_s is not None:
            # The last one may be larger than the bucket, if that was full.
            tokens = sum(cost for _, cost in history) - self.given_back[name]
            most = options.tokens_burst + options.tokens_per_s * (self.now_s - 1000.0)
            assert tokens - max(0, self.costs[item] - options.tokens_burst) <= most + self.SLACK

    def all_admitted(self, items: list[object]) -> None:
        for item in items:
            assert isinstance(item, int)
            assert self.queues[self.owner[item]].popleft() == item, "in the order in which they came"
            self.admitted(item)

    @rule(name=st.sampled_from("abc"), cost=st.integers(1, 60))
    def offer(self, name: str, cost: int) -> None:
        item = self.next_item
        self.next_item += 1
        self.owner[item], self.costs[item], self.since[item] = name, cost, self.now_s
        verdict = self.shared.offer(item, name, cost, self.now_s)
        if isinstance(verdict, Refuse):
            self.num_refused += 1
            assert verdict.status == (503 if verdict.code == OVERLOADED else 429)
            assert verdict.retry_after_s >= 1
            is_full = len(self.queues[name]) == self.options[name].queue_max
            assert is_full or verdict.code in (RATE, TOKENS)
        elif verdict is ADMIT:
            assert not self.queues[name], "nobody is overtaken"
            self.admitted(item)
        else:
            self.queues[name].append(item)
            assert len(self.queues[name]) <= self.options[name].queue_max

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), cost=st.none() | st.integers(0, 90))
    def end(self, data: st.DataObject, cost: int | None) -> None:
        item = self.flying.pop(data.draw(st.integers(0, len(self.flying) - 1)))
        if cost is not None:
            self.given_back[self.owner[item]] += max(0, self.costs[item] - cost)
        self.all_admitted(self.shared.leave(item, self.now_s, cost))
        self.shared.validate(self.now_s)

    @precondition(lambda self: any(self.queues.values()))
    @rule(data=st.data())
    def leave_the_queue(self, data: st.DataObject) -> None:
        item = data.draw(st.sampled_from([item for queue in self.queues.values() for item in queue]))
        self.queues[self.owner[item]].remove(item)
        self.all_admitted(self.shared.leave(item, self.now_s))
        assert self.shared.leave(item, self.now_s) == [], "it is gone"

    @rule(passed_s=st.sampled_from([0.0, 0.1, 0.5, 1.0, 4.0]))
    def tick(self, passed_s: float) -> None:
        self.now_s += passed_s
        changes = self.shared.tick(self.now_s)
        gone = [item for item, _ in changes.refused]
        for item in gone:
            assert isinstance(item, int)
            assert self.now_s - self.since[item] >= self.WAIT_MAX_S
            self.queues[self.owner[item]].remove(item)
            self.num_refused += 1
        self.all_admitted(changes.admitted)
        for queue in self.queues.values():
            assert all(self.now_s - self.since[item] < self.WAIT_MAX_S for item in queue)
        self.shared.validate(self.now_s)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "shared"):
            return
        self.shared.validate()
        assert self.shared.num_in_flight == len(self.flying)
        assert self.shared.num_waiting == sum(map(len, self.queues.values()))
        statistics = self.shared.statistics()
        assert [each.num_waiting for each in statistics] == [len(self.queues[name]) for name in "abc"]
        assert sum(sum(each.refused.values()) for each in statistics) == self.num_refused
        assert [each.num_admitted for each in statistics] == [len(self.history[name]) for name in "abc"]


TestTenantWalk = TenantWalk.TestCase
TestTenantWalk.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# ---- shares under overload -------------------------------------------------------------------------------------------


class Overload:
    """Tenants whose queues never run dry, on engines that take a time for each request that may depend on its cost.

    Requests come in bursts; each ends after its time; what it cost in the end differs from what was expected by up to
    ``error`` of it.
    """

    def __init__(self, weights: list[float], in_flight_max: int, cost_max: list[int], seed: int, error: float) -> None:
        self.random = Random(seed)
        self.weights = weights
        self.cost_max = cost_max
        self.error = error
        self.shared = tenants(
            *(TenantOptions(str(who), weight=weight, queue_max=1000) for who, weight in enumerate(weights)),
            in_flight_max=in_flight_max,
            wait_max_s=1e9,
        )
        self.ends: list[tuple[float, int]] = []
        self.costs: dict[int, tuple[int, int]] = {}
        self.work = [0.0] * len(weights)
        self.next_item = 0
        self.now_s = 0.0

    def _begun(self, item: int) -> None:
        seconds = self.costs[item][1] * self.random.uniform(0.5, 1.5) / 1000 + self.random.random() * 0.05
        heapq.heappush(self.ends, (self.now_s + seconds, item))

    def arrive(self, who: int) -> None:
        """One more request of a tenant."""
        item = self.next_item
        self.next_item += 1
        self.costs[item] = (who, self.random.randint(1, self.cost_max[who]))
        if self.shared.offer(item, str(who), self.costs[item][1], self.now_s) is ADMIT:
            self._begun(item)

    def step(self) -> None:
        """The next request ends."""
        self.now_s, item = heapq.heappop(self.ends)
        who, cost = self.costs.pop(item)
        spent = max(0, round(cost * (1 + self.random.uniform(-self.error, self.error))))
        self.work[who] += spent
        for begun in self.shared.leave(item, self.now_s, spent):
            assert isinstance(begun, int)
            self._begun(begun)

    def fill(self, backlogged: list[int]) -> None:
        """Bursts of a drawn size, so that these tenants wait."""
        for who in backlogged:
            if of(self.shared, str(who)).num_waiting < 2:
                for _ in range(self.random.randint(2, 20)):
                    self.arrive(who)


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.0]), min_size=2, max_size=4),
    cost_max=st.lists(st.sampled_from([5, 50, 200]), min_size=4, max_size=4),
    in_flight_max=st.integers(1, 12),
    seed=st.integers(0, 2**32),
    error=st.sampled_from([0.0, 0.5]),
)
def test_shares_of_the_work_are_the_weights_within_a_tenth(
    weights: list[float], cost_max: list[int], in_flight_max: int, seed: int, error: float
) -> None:
    world = Overload(weights, in_flight_max, cost_max, seed, error)
    everyone = list(range(len(weights)))
    for _ in range(in_flight_max + 20):  # what was admitted before all waited
        world.fill(everyone)
        world.step()
    before = [each.admitted_cost for each in world.shared.statistics()]
    # A request of each tenant, and what is not yet known of those in flight, are beyond any order of admission: so long
    # that both are a small part of the least share.
    unsettled = max(cost_max[: len(weights)]) * (1 + error * in_flight_max / 2)
    enough = 25 * unsettled * sum(weights) / min(weights)
    got = [0] * len(weights)
    while sum(got) < enough:
        for _ in range(50):
            world.fill(everyone)
            world.step()
        got = [each.admitted_cost - then for each, then in zip(world.shared.statistics(), before, strict=True)]
    world.shared.validate(world.now_s)
    for who, weight in enumerate(weights):
        fair = sum(got) * weight / sum(weights)
        assert abs(got[who] - fair) <= 0.1 * fair, (got, weights)


@settings(max_examples=30, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([1.0, 2.0]), st.sampled_from([1.0, 4.0]), st.sampled_from([1.0, 3.0])),
    seed=st.integers(0, 2**32),
    in_flight_max=st.integers(1, 8),
)
def test_what_an_idle_tenant_leaves_goes_to_the_others_by_weight(
    weights: tuple[float, float, float], seed: int, in_flight_max: int
) -> None:
    world = Overload(list(weights), in_flight_max, [50, 50, 50], seed, 0.0)
    for backlogged in ([0, 1, 2], [0, 1], [1, 2], [0, 1, 2]):
        for _ in range(60):  # those who no longer come run dry, unless their weight lets them wait for long
            world.fill(backlogged)
            world.step()
        while any(of(world.shared, str(who)).num_waiting for who in {0, 1, 2} - set(backlogged)):
            world.fill(backlogged)
            world.step()
        before = list(world.work)
        for _ in range(600):
            world.fill(backlogged)
            assert world.shared.num_in_flight == in_flight_max, "work is there, and no place is empty"
            world.step()
        got = [world.work[who] - before[who] for who in (0, 1, 2)]
        total = sum(weights[who] for who in backlogged)
        for who in backlogged:
            fair = sum(got) * weights[who] / total
            assert abs(got[who] - fair) <= 0.1 * fair + 100, (backlogged, got, weights)


@settings(max_examples=50, deadline=None)
@given(weight=st.sampled_from([0.01, 0.1, 1.0]), seed=st.integers(0, 2**32))
def test_nobody_starves_beside_a_flood(weight: float, seed: int) -> None:
    world = Overload([1.0, weight], 4, [20, 20], seed, 0.0)
    for _ in range(50):
        world.fill([0])
        world.step()
    world.arrive(1)
    others = world.shared.statistics()[0].num_admitted
    while of(world.shared, "1").num_waiting:
        world.fill([0])
        world.step()
    assert world.shared.statistics()[0].num_admitted - others <= 2, "its first request begins at once"
    for _ in range(3):
        world.arrive(1)
    others = of(world.shared, "0").admitted_cost
    while of(world.shared, "1").num_waiting:
        world.fill([0])
        world.step()
    got = of(world.shared, "0").admitted_cost - others
    assert got <= 4 * 20 / weight + 5 * 20, "its share, and no more than a request of each beyond it"


def test_tenants_are_named_once() -> None:
    with pytest.raises(AssertionError):
        tenants(TenantOptions("a"), TenantOptions("a"))
    with pytest.raises(AssertionError):
        TenantOptions("a", weight=0)
    with pytest.raises(KeyError):
        tenants(TenantOptions("a")).offer(1, "b", 1, 0.0)
