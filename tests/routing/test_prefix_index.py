"""The prefix index: what two prompts share, and what is remembered of each engine, beside a plain model."""

from __future__ import annotations

import json
from collections import OrderedDict
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.routing.ask import Prompt
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.prefix_index import ENDS, HASHED_MAX_BYTES, PrefixIndex, prefix_hashes


def engines(num: int) -> list[Endpoint]:
    return [Endpoint(f"http://10.0.0.{index}:8000", "prefill" if index % 2 == 0 else "decode") for index in range(num)]


def floor_of(num_bytes: int) -> int:
    """Down to where a block ends."""
    return max((end for end in ENDS if end <= num_bytes), default=0)


def num_common(one: bytes, other: bytes) -> int:
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )


def test_blocks_are_fine_first_and_grow() -> None:
    sizes = [end - start for start, end in zip([0, *ENDS], ENDS, strict=False)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (128, 2048)
    assert ENDS[-1] <= HASHED_MAX_BYTES < ENDS[-1] + 2048
    assert len(prefix_hashes(Prompt(b"", bytes(128_000 * 4)))) < 330
    assert len(prefix_hashes(Prompt(b"", bytes(3 * HASHED_MAX_BYTES)))) == len(ENDS)


@given(st.integers(0, 9000), st.integers(0, 3000), st.integers(0, 3000))
@settings(max_examples=100, deadline=None)
def test_prompts_share_hashes_exactly_as_far_as_they_are_equal(shared: int, one_more: int, other_more: int) -> None:
    head = Random(shared).randbytes(shared)
    one, other = head + b"a" * one_more, head + b"b" * other_more
    hashes = zip(prefix_hashes(Prompt(b"s", one)), prefix_hashes(Prompt(b"s", other)), strict=False)
    equal = [a == b for a, b in hashes]
    num_equal = sum(equal)
    assert equal == [True] * num_equal + [False] * (len(equal) - num_equal)
    assert (ENDS[num_equal - 1] if num_equal else 0) == floor_of(shared)


def test_scopes_share_nothing_wherever_they_end() -> None:
    data = b"x" * 1000
    assert not set(prefix_hashes(Prompt(b"a", data))) & set(prefix_hashes(Prompt(b"b", data)))
    assert not set(prefix_hashes(Prompt(b"ax", data))) & set(prefix_hashes(Prompt(b"a", b"x" + data)))


def test_hashes_are_computed_once() -> None:
    prompt = Prompt(b"", bytes(500))
    assert prefix_hashes(prompt) is prefix_hashes(prompt)
    short = Prompt(b"", b"short")
    assert prefix_hashes(short) == []
    assert prefix_hashes(short) is prefix_hashes(short)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_the_next_turn_of_a_chat_finds_the_last_one(separators: tuple[str, str]) -> None:
    index, endpoint = PrefixIndex(), engines(1)[0]
    messages = [{"role": "system", "content": "You are kind. " * 60}]
    chance = Random(1)

    def body() -> bytes:
        return json.dumps(messages, separators=separators).encode()

    sent = b""
    for _ in range(12):
        messages.append({"role": "user", "content": chance.randbytes(chance.randint(20, 900)).hex()})
        prompt = Prompt(b"model", body())
        found = index.match(prompt, "prefill").get(endpoint, 0)
        assert found == floor_of(max(0, len(sent) - 1)), "all but the bracket that closed the list"
        index.insert(endpoint, prompt)
        sent = body()
        messages.append({"role": "assistant", "content": chance.randbytes(100).hex()})
        answered = index.match(Prompt(b"model", body()), "prefill")
        assert answered == {endpoint: floor_of(len(sent) - 1)}
    messages[0]["content"] = "You are rude. " * 60
    assert index.match(Prompt(b"model", body()), "prefill") == {}
    index.validate()


def test_an_engine_in_another_life_holds_nothing() -> None:
    index, (endpoint, _) = PrefixIndex(), engines(2)
    one, other = Prompt(b"", bytes(1000)), Prompt(b"", b"x" * 1000)
    index.insert(endpoint, one)
    endpoint.life += 1
    assert index.match(one, "prefill") == {}
    assert index.num_bytes_of(endpoint) == 0
    index.insert(endpoint, other)
    assert index.match(one, "prefill") == {}
    assert index.match(other, "prefill") == {endpoint: floor_of(1000)}
    index.validate()


def test_what_an_engine_is_remembered_to_hold_is_bounded_and_the_oldest_goes_first() -> None:
    index, (endpoint, _) = PrefixIndex(engine_max_bytes=4096), engines(2)
    prompts = [Prompt(b"", Random(number).randbytes(1024)) for number in range(8)]
    for number, prompt in enumerate(prompts):
        index.insert(endpoint, prompt)
        index.insert(endpoint, prompts[0])
        assert index.num_bytes_of(endpoint) == min(4096, 1024 * (number + 1))
    held = [index.match(prompt, "prefill").get(endpoint, 0) for prompt in prompts]
    assert held == [1024, 0, 0, 0, 0, 1024, 1024, 1024]
    index.insert(endpoint, Prompt(b"", bytes(100_000)))
    assert index.match(Prompt(b"", bytes(100_000)), "prefill") == {endpoint: floor_of(4096)}
    index.validate()


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    index, (endpoint, _) = PrefixIndex(engine_max_bytes=2048), engines(2)
    long = Prompt(b"", Random(1).randbytes(2048))
    index.insert(endpoint, long)
    index.insert(endpoint, Prompt(b"", Random(2).randbytes(512)))
    assert index.match(long, "prefill") == {endpoint: 1536}


def test_a_bound_too_small_for_any_block_remembers_nothing() -> None:
    for index in (PrefixIndex(engine_max_bytes=100), PrefixIndex(engine_max_bytes=0)):
        endpoint = engines(1)[0]
        index.insert(endpoint, Prompt(b"", bytes(1000)))
        assert index.match(Prompt(b"", bytes(1000)), "prefill") == {}
        index.validate()


def test_engines_share_the_entries_equally() -> None:
    index, all_of_them = PrefixIndex(entries_max=40), engines(4)
    for number in range(30):
        index.insert(all_of_them[0], Prompt(b"", Random(number).randbytes(512)))
    assert index.num_entries == 40
    for number, endpoint in enumerate(all_of_them[1:]):
        for other in range(30):
            index.insert(endpoint, Prompt(b"", Random(100 * number + other + 50).randbytes(512)))
        index.validate()
    assert index.num_entries == 40
    assert {len(one.sizes) for one in index._holdings.values()} == {10}


def test_more_engines_than_entries() -> None:
    index = PrefixIndex(entries_max=3)
    for endpoint in engines(10):
        index.insert(endpoint, Prompt(b"", bytes(1000)))
        index.validate()
    assert index.num_entries <= 3


def test_forgetting_costs_nothing_at_once_and_is_swept_later() -> None:
    index, (gone, _, stays, *_) = PrefixIndex(), engines(4)
    for number in range(200):
        index.insert(gone, Prompt(b"", Random(number).randbytes(1024)))
    shared = Prompt(b"", Random(0).randbytes(1024))
    index.insert(stays, shared)
    index.forget(gone)
    index.forget(gone)
    assert index.num_entries == 201 * 8
    assert index.match(shared, "prefill") == {stays: 1024}
    for number in range(300, 340):
        index.insert(gone, Prompt(b"", Random(number).randbytes(1024)))
        assert index.match(shared, "prefill") == {stays: 1024}
        index.validate()
    assert index.num_entries == 41 * 8


class Model:
    """The same in plain words: of each engine, the prefixes and when they were last used."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.held: dict[Endpoint, OrderedDict[bytes, int]] = {}
        self.lives: dict[Endpoint, int] = {}

    def insert(self, endpoint: Endpoint, data: bytes) -> None:
        if self.lives.get(endpoint) != endpoint.life:
            self.held[endpoint] = OrderedDict()
            self.lives[endpoint] = endpoint.life
        held = self.held[endpoint]
        ends = [end for end in ENDS if end <= min(len(data), self.max_bytes)]
        for number in reversed(range(len(ends))):
            held.pop(data[: ends[number]], None)
            held[data[: ends[number]]] = ends[number] - (ends[number - 1] if number else 0)
        while sum(held.values()) > self.max_bytes:
            held.popitem(last=False)

    def match(self, data: bytes) -> dict[Endpoint, int]:
        found = {}
        for endpoint, held in self.held.items():
            if self.lives[endpoint] == endpoint.life:
                num_bytes = max((len(one) for one in held if data.startswith(one)), default=0)
                if num_bytes:
                    found[endpoint] = num_bytes
        return found


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("insert", "insert", "insert", "forget", "restart")),
            st.integers(0, 3),
            st.binary(min_size=2, max_size=2),
        ),
        max_size=60,
    ),
    st.sampled_from((512, 2048, 10_000)),
)
@settings(max_examples=200, deadline=None)
def test_it_is_the_plain_model(steps: list[tuple[str, int, bytes]], max_bytes: int) -> None:
    index, model, all_of_them = PrefixIndex(engine_max_bytes=max_bytes), Model(max_bytes), engines(4)

    def data_of(seed: bytes) -> bytes:
        """One of a tree of prompts: 3 first halves, each with 4 second ones, of different lengths."""
        first, second = seed[0] % 3, seed[1] % 4
        return b"%d" % first * (300 + 200 * first) + b"%d" % second * (150 * second)

    for what, number, seed in steps:
        endpoint, data = all_of_them[number], data_of(seed)
        if what == "insert":
            index.insert(endpoint, Prompt(b"", data))
            model.insert(endpoint, data)
        elif what == "forget":
            index.forget(endpoint)
            model.held.pop(endpoint, None)
            model.lives.pop(endpoint, None)
        else:
            endpoint.life += 1
        wanted = model.match(data)
        for role in ("prefill", "decode"):
            found = index.match(Prompt(b"", data), role)
            assert found == {one: num for one, num in wanted.items() if one.role == role}
        index.validate()
