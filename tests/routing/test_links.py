"""Measured rates: what stands for what, what counts, and how a shared link is told from a slow one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.routing.endpoint import Endpoint
from antiphon.routing.links import KEPT_SHARE, PAIRS_MAX, Links, Rate, SharedTime


def engines(role: str, num: int) -> list[Endpoint]:
    return [Endpoint(f"http://{role}{index}:8000", role) for index in range(num)]  # type: ignore[arg-type]


def warmed(links: Links, prefill: Endpoint, decode: Endpoint, num_bytes: int, seconds: float) -> None:
    """A transfer, and before it the one with the handshake."""
    links.measured(prefill, decode, num_bytes, 100.0)
    assert links.measured(prefill, decode, num_bytes, seconds)


def test_what_stands_for_a_pair_of_which_nothing_is_measured() -> None:
    links = Links(1000.0, 10.0, 1)
    (one, other), (first, second) = engines("p", 2), engines("d", 2)
    assert links.bytes_s(one, first) == links.pool_bytes_s == 1000.0
    warmed(links, one, first, 400, 2.0)
    assert links.bytes_s(one, first) == 200.0
    assert links.bytes_s(other, first) == links.bytes_s(None, first) == 200.0, "its decode engine"
    assert links.bytes_s(one, second) == 200.0, "the pool"
    warmed(links, other, second, 6000, 2.0)
    assert links.bytes_s(one, second) == links.bytes_s(None, second) == 3000.0
    assert links.bytes_s(one, first) == 200.0
    assert 200.0 < links.pool_bytes_s < 3000.0
    links.validate()


def test_a_handshake_and_a_short_transfer_do_not_count() -> None:
    links = Links(1000.0, 10.0, 100)
    (prefill,), (decode,) = engines("p", 1), engines("d", 1)
    assert not links.measured(prefill, decode, 5000, 1.0), "the first one has the handshake in it"
    assert not links.measured(prefill, decode, 99, 1.0)
    assert not links.measured(prefill, decode, 500, 0.0), "no time is no rate"
    assert links.bytes_s(prefill, decode) == 1000.0
    assert links.pairs() == {}
    assert links.measured(prefill, decode, 100, 1.0)
    assert links.pairs() == {(prefill.url, decode.url): 100.0}


def test_a_rate_has_a_floor() -> None:
    links = Links(1000.0, 10.0, 1)
    (prefill,), (decode,) = engines("p", 1), engines("d", 1)
    warmed(links, prefill, decode, 1, 1e6)
    assert links.bytes_s(prefill, decode) == links.bytes_s(None, decode) == links.pool_bytes_s == 10.0
    links.validate()


def test_one_odd_transfer_moves_a_rate_a_little_and_several_move_it_all_the_way() -> None:
    links = Links(1000.0, 10.0, 1)
    (prefill,), (decode,) = engines("p", 1), engines("d", 1)
    warmed(links, prefill, decode, 5000, 5.0)
    for _ in range(10):
        links.measured(prefill, decode, 5000, 5.0)
    assert links.bytes_s(prefill, decode) == pytest.approx(1000.0)
    links.measured(prefill, decode, 5000, 400.0)  # it waited long in its engine
    assert 500.0 < links.bytes_s(prefill, decode) < 1000.0
    links.measured(prefill, decode, 5000, 0.0001)  # its KV was there
    assert links.bytes_s(prefill, decode) < 1000.0
    for _ in range(25):
        links.measured(prefill, decode, 5000, 100.0)
    assert links.bytes_s(prefill, decode) == pytest.approx(50.0, rel=0.05)
    for _ in range(60):
        links.measured(prefill, decode, 5000, 1.0)
    assert links.bytes_s(prefill, decode) == pytest.approx(5000.0, rel=0.05)


def test_an_engine_that_restarts_is_measured_anew() -> None:
    links = Links(1000.0, 10.0, 1)
    (prefill,), (first, second) = engines("p", 1), engines("d", 2)
    warmed(links, prefill, first, 200, 1.0)
    warmed(links, prefill, second, 400, 1.0)
    links.forget(first)
    assert links.pairs() == {(prefill.url, second.url): 400.0}
    assert not links.measured(prefill, first, 200, 1.0), "its handshake is to be made again"
    links.forget(prefill)
    assert links.pairs() == {}
    assert links.bytes_s(prefill, second) == 400.0, "what the decode engine takes is still known"
    links.validate()


def test_pairs_are_bounded_and_those_used_last_are_kept() -> None:
    links = Links(1000.0, 10.0, 1)
    (kept,), decodes = engines("p", 1), engines("d", PAIRS_MAX + 1)
    for decode in decodes[:PAIRS_MAX]:
        warmed(links, kept, decode, 200, 1.0)
    links.measured(kept, decodes[0], 200, 1.0)
    links.measured(kept, decodes[-1], 200, 1.0)
    pairs = links.pairs()
    assert (kept.url, decodes[0].url) in pairs
    assert (kept.url, decodes[1].url) not in pairs
    assert len(pairs) == PAIRS_MAX - 1, "the newest has no rate yet"
    links.validate()


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0.001, 100.0)), min_size=1, max_size=30))
def test_a_rate_is_the_mean_of_its_samples_each_forgotten_a_little_at_each_new_one(
    samples: list[tuple[int, float]],
) -> None:
    rate = Rate()
    for num_bytes, seconds in samples:
        rate.add(num_bytes, seconds)
    weights = [KEPT_SHARE**age for age in reversed(range(len(samples)))]
    weighed_bytes = sum(weight * num_bytes for weight, (num_bytes, _) in zip(weights, samples, strict=True))
    weighed_s = sum(weight * seconds for weight, (_, seconds) in zip(weights, samples, strict=True))
    assert rate.bytes_s() == pytest.approx(weighed_bytes / weighed_s)
    each = [num_bytes / seconds for num_bytes, seconds in samples]
    assert min(each) <= rate.bytes_s() * 1.0001 + 1e-9
    assert rate.bytes_s() <= max(each) * 1.0001 + 1e-9
    assert rate.bytes_s(open_s=5.0) <= rate.bytes_s()


def test_a_rate_without_a_sample_is_0() -> None:
    assert Rate().bytes_s() == Rate().bytes_s(3.0) == 0.0


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 100)), min_size=1, max_size=8), st.floats(0.5, 50))
def test_transfers_that_share_a_link_each_tell_its_whole_rate(starts: list[tuple[float, int]], link: float) -> None:
    """A link shared evenly, followed from event to event: whatever overlaps, bytes over own time is its rate."""
    arrivals = sorted(starts)
    running: list[list[float]] = []  # bytes left, bytes, share at its begin
    share, now_s = SharedTime(), 0.0
    num_told = 0
    while arrivals or running:
        ends_s = now_s + min(one[0] for one in running) * len(running) / link if running else float("inf")
        next_s = min(ends_s, arrivals[0][0] if arrivals else float("inf"))
        for one in running:
            one[0] -= (next_s - now_s) * link / len(running)
        now_s = next_s
        if arrivals and arrivals[0][0] <= now_s:
            _, size = arrivals.pop(0)
            running.append([float(size), float(size), share.begin(now_s)])
            continue
        done = min(running)
        running.remove(done)
        own_s = share.end(now_s) - done[2]
        assert done[1] / own_s == pytest.approx(link, rel=1e-6)
        num_told += 1
    assert num_told == len(starts)
    assert share.num == 0
