"""The policies, through a pool: which engine, and that load is kept count of."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.routing.ask import Ask
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.options import FleetOptions
from antiphon.routing.pickers import affinity_key, load_bound
from antiphon.routing.policies import POLICIES
from antiphon.routing.pool import Pool


def pool_of(num: int, policy: str, *, ready: bool = True) -> Pool:
    pool = Pool("decode", policy, FleetOptions())
    for index in range(num):
        endpoint = pool.add(f"http://10.0.0.{index}:8000")
        if ready:
            pool.health_succeeded(endpoint, 0.0)
    return pool


def pick(pool: Pool, chance: float = 0.0, key: int | None = None) -> Endpoint:
    endpoint = pool.pick(0.0, chance, Ask(key))
    assert endpoint is not None
    return endpoint


def take(pool: Pool, chance: float = 0.0, key: int | None = None) -> Endpoint:
    endpoint = pick(pool, chance, key)
    pool.begin(endpoint)
    return endpoint


def test_round_robin_takes_all_in_turn() -> None:
    pool = pool_of(3, "round_robin")
    assert [take(pool) for _ in range(6)] == pool.endpoints * 2


def test_random_takes_what_chance_says() -> None:
    pool = pool_of(4, "random")
    assert [pick(pool, chance) for chance in (0.0, 0.26, 0.6, 0.999)] == pool.endpoints


def test_least_load_takes_the_least_loaded_and_turns_among_equals() -> None:
    pool = pool_of(3, "least_load")
    assert [take(pool) for _ in range(3)] == pool.endpoints
    pool.end(pool.endpoints[1], 0)
    assert take(pool) is pool.endpoints[1]
    assert {pick(pool) for _ in range(3)} == set(pool.endpoints)


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(("take", "end", "down", "up"))), max_size=80))
@settings(max_examples=200, deadline=None)
def test_least_load_always_finds_the_minimum(steps: list[tuple[int, str]]) -> None:
    pool = pool_of(6, "least_load")
    now_s = 0.0
    for index, what in steps:
        now_s += 100.0
        endpoint = pool.endpoints[index]
        if what == "take" and pool.ready:
            chosen = pool.picker.pick(pool.ready, 0.0, None)
            assert chosen.num_active == min(one.num_active for one in pool.ready)
            assert chosen in pool.ready
            pool.begin(chosen)
        elif what == "end" and endpoint.num_active:
            pool.end(endpoint, 0)
        elif what == "down":
            pool.health_refused(endpoint, now_s, 0.5)
        elif what == "up":
            for _ in range(3):
                pool.health_succeeded(endpoint, now_s)
        pool.picker.validate()  # type: ignore[attr-defined]
        for one in pool.endpoints:
            if one.trial:  # the trials of this walk never end by their number
                one.trial = 0
        pool.validate()


def test_power_of_two_prefers_the_less_loaded_of_two_different_ones() -> None:
    pool = pool_of(2, "power_of_two")
    pool.begin(pool.endpoints[0])
    assert {pick(pool, number / 100) for number in range(100)} == {pool.endpoints[1]}
    many = pool_of(8, "power_of_two")
    taken = Counter(take(many, chance.random()).url for chance in [Random(5)] for _ in range(800))
    assert max(taken.values()) - min(taken.values()) <= 3


def test_power_of_two_sends_nearly_all_to_the_fast_one() -> None:
    """One engine answers at once, the other never: polled loads would share evenly."""
    pool, chance = pool_of(2, "power_of_two"), Random(1)
    slow, fast = pool.endpoints
    taken = Counter()
    for _ in range(100):
        endpoint = take(pool, chance.random())
        taken[endpoint] += 1
        if endpoint is fast:
            pool.end(fast, 0)
    assert taken[slow] <= 1
    assert slow.num_active == taken[slow]
    assert fast.num_active == 0


def test_consistent_hash_is_sticky_and_moves_little() -> None:
    pool = pool_of(8, "consistent_hash")
    keys = [key for number in range(400) if (key := affinity_key(b"%d" % number, None, None)) is not None]
    before = {key: pick(pool, key=key) for key in keys}
    assert before == {key: pick(pool, chance=0.7, key=key) for key in keys}
    assert set(before.values()) == set(pool.endpoints)
    gone = pool.endpoints[3]
    pool.remove(gone)
    moved = [key for key in keys if pick(pool, key=key) is not before[key]]
    assert moved == [key for key in keys if before[key] is gone]


@given(st.integers(1, 9), st.lists(st.integers(0, 3), min_size=1, max_size=120), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_consistent_hash_never_exceeds_its_bound(num: int, keys: list[int], chance: Random) -> None:
    pool = pool_of(num, "consistent_hash")
    under_way: list[Endpoint] = []
    for number in keys:
        if under_way and chance.random() < 0.3:
            pool.end(under_way.pop(chance.randrange(len(under_way))), 0)
        under_way.append(take(pool, chance.random(), affinity_key(b"session %d" % number, None, None)))
        assert under_way[-1].num_active <= load_bound(len(under_way) - 1, num, 1.25)
    pool.validate()


def test_affinity_prefers_session_then_user_then_prompt() -> None:
    every = affinity_key(b"s", b"u", b"p")
    assert every == affinity_key(b"s", b"v", b"q") != affinity_key(b"t", b"u", b"p")
    assert affinity_key(None, b"u", b"p") == affinity_key(None, b"u", b"q") != every
    assert affinity_key(None, None, b"p" * 5000) == affinity_key(None, None, memoryview(b"p" * 4999))
    assert affinity_key(None, None, b"") is None
    assert affinity_key(b"x", None, None) != affinity_key(None, b"x", None), "a user is no session"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_a_pool_in_which_none_is_ready(policy: str) -> None:
    pool = pool_of(3, policy, ready=False)
    taken = {take(pool, number / 30, number * 2**58) for number in range(30)}
    assert len(taken) == 3
    pool.validate()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_avoids_what_has_failed_the_request(policy: str) -> None:
    pool = pool_of(3, policy)
    one, other, last = pool.endpoints
    assert pool.pick(0.0, 0.1, Ask(7), [one, other]) is last
    assert pool.pick(0.0, 0.1, Ask(7), [one, other, last]) is None
