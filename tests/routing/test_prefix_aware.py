"""prefix_aware: what is sent where, that affinity yields to load, and that a hot prefix is shared by all."""

from __future__ import annotations

from collections import Counter
from heapq import heappop, heappush
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.routing.affinity import Affinity
from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.endpoint import Endpoint, Role
from antiphon.routing.options import FleetOptions
from antiphon.routing.pickers import PickerOptions, load_bound
from antiphon.routing.pool import Pool


def pool_of(num: int, role: Role = "prefill", options: FleetOptions | None = None) -> Pool:
    pool = Pool(role, "prefix_aware", options or FleetOptions())
    for index in range(num):
        pool.health_succeeded(pool.add(f"http://10.0.0.{index}:8000"), 0.0)
    return pool


def ask_of(data: bytes, num_tokens: int | None = None) -> Ask:
    return Ask(prompt=Prompt(b"model", data, len(data) // 4 if num_tokens is None else num_tokens))


def pick(pool: Pool, ask: Ask | None, chance: float = 0.0) -> Endpoint:
    endpoint = pool.pick(0.0, chance, ask)
    assert endpoint is not None
    return endpoint


def text(number: int, num_bytes: int) -> bytes:
    return Random(number).randbytes(num_bytes)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_repeated_prefix_goes_where_it_was_sent(role: Role) -> None:
    pool = pool_of(8, role)
    first = ask_of(text(1, 40_000))
    chosen = pick(pool, first, 0.4)
    assert first.num_matched_tokens == 0
    for number in range(20):
        again = ask_of(text(1, 40_000) + text(number + 2, 3000))
        assert pick(pool, again, number / 20) is chosen
        assert 9500 <= again.num_matched_tokens <= 10_000
    other = Ask(prompt=Prompt(b"other model", text(1, 40_000), 10_000))
    assert {pick(pool, other, 0.9) is chosen, other.num_matched_tokens > 0} == {False}


def test_the_turns_of_a_chat_stay_together_while_the_pool_is_idle() -> None:
    pool, chance = pool_of(4), Random(3)
    chats = [text(number, 2000) for number in range(40)]
    homes: dict[int, Endpoint] = {}
    for turn in range(6):
        for number, chat in enumerate(chats):
            ask = ask_of(chat + text(turn * 100 + number, 600))
            home = pick(pool, ask, chance.random())
            assert homes.setdefault(number, home) is home
            chats[number] = ask.prompt.data if ask.prompt else b""
    assert set(homes.values()) == set(pool.endpoints)


def test_one_chat_alone_never_moves() -> None:
    pool, data = pool_of(4), text(1, 2000)
    home = pick(pool, ask_of(data))
    for number in range(400):
        data = data[:60_000] + text(number, 300)
        endpoint = pick(pool, ask_of(data), number / 400)
        trial = pool.begin(endpoint, 10)
        assert endpoint is home
        pool.end(endpoint, trial, 10)


def test_an_engine_with_the_bound_in_flight_is_passed_over() -> None:
    pool = pool_of(4)
    hot = text(1, 8000)
    home = pick(pool, ask_of(hot))
    for _ in range(2):
        pool.begin(home, 1)
    assert home.num_active == load_bound(2, 4, 1.25) + 1
    assert pick(pool, ask_of(hot)) is not home
    pool.end(home, 0, 1)
    pool.end(home, 0, 1)
    assert pick(pool, ask_of(hot)) is not None


def test_work_in_flight_outweighs_what_is_held_and_the_other_way_round() -> None:
    pool = pool_of(2)
    home = pick(pool, ask_of(text(1, 40_000), 10_000))
    (other,) = [one for one in pool.endpoints if one is not home]
    pool.begin(home, 4000)
    pool.begin(other, 0)
    pool.begin(other, 0)  # so that requests in flight do not forbid
    warm = ask_of(text(1, 40_000) + text(2, 400), 10_100)
    assert pick(pool, warm) is home, "4000 tokens to wait for, and nearly 10000 saved"
    home.num_uncached_tokens += 9000
    assert pick(pool, ask_of(text(1, 40_000) + text(3, 400), 10_100)) is other
    home.num_uncached_tokens -= 9000


def test_a_decode_engine_with_more_requests_must_hold_more() -> None:
    pool = pool_of(2, "decode")
    for number in range(200):  # the mean prompt has about 1000 tokens
        pick(pool, ask_of(text(number, 4000)), number % 10 / 10)
    short, long = text(1000, 4000), text(1001, 40_000)
    home = pick(pool, ask_of(short))
    assert pick(pool, ask_of(long)) in pool.endpoints
    holders = pool.prefixes.match(Prompt(b"model", long), "decode")
    (long_home,) = holders
    for endpoint, data, is_taken in ((home, short, False), (long_home, long, True)):
        (other,) = [one for one in pool.endpoints if one is not endpoint]
        for _ in range(20):
            pool.begin(endpoint)
            pool.begin(other)
        for _ in range(2):
            pool.begin(endpoint)
        assert (pick(pool, ask_of(data, len(data) // 4)) is endpoint) == is_taken
        for one in pool.endpoints:
            while one.num_active:
                pool.end(one, 0)


def test_without_a_prompt_it_is_power_of_two() -> None:
    pool = pool_of(2)
    pool.begin(pool.endpoints[0])
    for ask in (None, Ask(5)):
        assert {pick(pool, ask, number / 50) for number in range(50)} == {pool.endpoints[1]}


def test_a_restart_and_a_removal_forget_what_was_sent() -> None:
    pool = pool_of(3)
    data = text(1, 8000)
    home = pick(pool, ask_of(data))
    pool.saw_engine(home, "life 1")
    pool.saw_engine(home, "life 2")
    ask = ask_of(data)
    pick(pool, ask)
    assert ask.num_matched_tokens == 0
    holders = pool.prefixes.match(Prompt(b"model", data), "prefill")
    for endpoint in holders:
        pool.remove(endpoint)
    assert pool.prefixes.match(Prompt(b"model", data), "prefill") == {}
    pool.prefixes.validate()


def test_both_pools_share_an_index_and_not_what_is_in_it() -> None:
    prefill = pool_of(2)
    decode = Pool("decode", "prefix_aware", FleetOptions(), prefill.prefixes)
    decode.health_succeeded(decode.add("http://10.0.0.0:8000"), 0.0)
    data = text(1, 8000)
    pick(prefill, ask_of(data))
    ask = ask_of(data)
    pick(decode, ask)
    assert ask.num_matched_tokens == 0
    pick(decode, again := ask_of(data))
    assert again.num_matched_tokens > 1900


def test_a_pick_that_came_to_nothing_is_not_taken_for_a_hit() -> None:
    pool = pool_of(2)
    first = pick(pool, ask_of(text(1, 4000)), 0.1)
    ask = ask_of(text(1, 8000))
    for chance in (0.1, 0.9, 0.1):
        assert pick(pool, ask, chance) is first
        assert ask.num_matched_tokens < 1000


@given(
    st.sampled_from(("prefill", "decode")),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3000)), min_size=1, max_size=6),
    st.integers(0, 2000),
    st.floats(0, 1, exclude_max=True),
    st.data(),
)
@settings(max_examples=300, deadline=None)
def test_the_choice_is_the_least_work_of_those_that_may_be_preferred(
    role: Role, loads: list[tuple[int, int]], num_tokens: int, chance: float, data: st.DataObject
) -> None:
    affinity = Affinity(PickerOptions(role, 1.25))
    endpoints = [Endpoint(f"http://{index}:1", role) for index in range(len(loads))]
    for endpoint, (active, tokens) in zip(endpoints, loads, strict=True):
        endpoint.num_active, endpoint.num_uncached_tokens = active, tokens if active else 0
    drawn = data.draw(st.lists(st.integers(0, num_tokens), max_size=len(loads)))
    held = dict(zip(endpoints, drawn, strict=False))
    total = sum(one.num_active for one in endpoints)
    bound = load_bound(total, len(endpoints), 1.25)
    weight = max(64, num_tokens) if role == "decode" else 64

    def work(endpoint: Endpoint, *, is_preferred: bool) -> float:
        load = endpoint.num_uncached_tokens + weight * endpoint.num_active
        return load - (held.get(endpoint, 0) if is_preferred else 0)

    chosen = affinity.choose(endpoints, chance, num_tokens, held)
    least = min(work(one, is_preferred=one.num_active < bound) for one in endpoints)
    assert work(chosen, is_preferred=chosen.num_active < bound) == least
    affinity.validate()


def closed(num: int, num_in_flight: int, hot: bytes, chance: Random) -> tuple[Counter[Endpoint], dict[Endpoint, float]]:
    """A pool that always has so many requests, each engine serving in turn. Requests by engine, and the mean load."""
    pool = pool_of(num)
    sent: Counter[Endpoint] = Counter()
    load_s: dict[Endpoint, float] = dict.fromkeys(pool.endpoints, 0.0)
    free_s: dict[Endpoint, float] = dict.fromkeys(pool.endpoints, 0.0)
    running: list[tuple[float, int, Endpoint, int, float]] = []
    now_s = 0.0
    for number in range(120 * num):
        if len(running) == num_in_flight:
            now_s, _, done, num_tokens, begun_s = heappop(running)
            pool.end(done, 0, num_tokens)
            load_s[done] += now_s - begun_s
        ask = ask_of(hot + chance.randbytes(chance.randint(200, 1000)))
        endpoint = pick(pool, ask, chance.random())
        assert ask.prompt is not None
        uncached = ask.prompt.num_tokens - ask.num_matched_tokens
        pool.begin(endpoint, uncached)
        sent[endpoint] += 1
        free_s[endpoint] = max(now_s, free_s[endpoint]) + (uncached + 100) / 10_000
        heappush(running, (free_s[endpoint], number, endpoint, uncached, now_s))
    pool.validate()
    return sent, load_s


@pytest.mark.parametrize("share", [0.5, 1, 4])
@pytest.mark.parametrize("num", [4, 8, 32, 96])
def test_a_hot_prefix_is_shared_by_all(num: int, share: float) -> None:
    """Every request begins with the same 8 kB: no engine has more than 1.5 times the mean, of requests or of load."""
    sent, load_s = closed(num, max(2, int(num * share)), text(1, 8192), Random(num))
    assert max(sent.values()) <= 1.5 * sum(sent.values()) / num
    assert max(load_s.values()) <= 1.5 * sum(load_s.values()) / num


def test_the_recent_share_alone_makes_affinity_yield() -> None:
    """Loads are equal at each pick: only the counts of the last requests tell the engines apart."""
    affinity = Affinity(PickerOptions("prefill", 1.25))
    endpoints = [Endpoint(f"http://{index}:1", "prefill", num_active=1) for index in range(4)]
    chosen = Counter(affinity.choose(endpoints, 0.3, 1000, {endpoints[0]: 1000}) for _ in range(2000))
    assert 1.3 * 500 < chosen[endpoints[0]] < 1.5 * 500
    affinity.validate()
    affinity.set_members(endpoints[1:])
    affinity.validate()
