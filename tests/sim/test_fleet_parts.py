"""The parts of the simulated fleet: traces, blocks, links, engines. Each against a plain count or a known figure."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.sim.fleet_blocks import Blocks
from antiphon.sim.fleet_engine import H200_8B, DecodeEngine, Job, PrefillEngine, Stages
from antiphon.sim.fleet_link import Card, Links, validate
from antiphon.sim.fleet_oracle import bound_hit_rate
from antiphon.sim.fleet_trace import (
    BLOCK_TOKENS,
    CHATS,
    HOT_PREFIX,
    SCALES,
    Arrival,
    TraceInvalid,
    block_keys,
    block_tokens,
    generate,
    prompt_bytes,
    read_trace,
    token_ids,
)
from antiphon.sim.timeline import Timeline

SCALE = 8


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return path


def row(timestamp: int, num_input: int, ids: list[int]) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": num_input, "output_length": 80, "hash_ids": ids}


# ---- traces ----------------------------------------------------------------------------------------------------------


def test_a_trace_is_scaled_and_its_bursts_are_spread(tmp_path: Path) -> None:
    rows = [row(0, 1000, [7, 100 + number]) for number in range(50)] + [row(3000, 512, [7]) for _ in range(50)]
    path = write(tmp_path / "trace.jsonl", rows)
    arrivals = read_trace(path, 1000, SCALE, 2.0, seed=1)
    times = [arrival.at_s for arrival in arrivals]
    assert times == sorted(times)
    assert len(set(times)) == 100, "simultaneous requests stay simultaneous"
    assert [arrival.num_tokens for arrival in arrivals] == [125] * 50 + [64] * 50
    assert {arrival.num_output for arrival in arrivals} == {10}
    assert 0 <= times[0] < times[49] < 1.5 <= times[50] < times[99] < 3.0
    assert times[49] - times[0] > 1.0, "a burst is not spread until the next"
    assert read_trace(path, 1000, SCALE, 2.0, seed=1) == arrivals
    assert read_trace(path, 1000, SCALE, 2.0, seed=2) != arrivals
    assert len(read_trace(path, 60, SCALE, 2.0, seed=1)) == 60


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        "7",
        json.dumps({"timestamp": 0}),
        json.dumps(row(0, 1000, [1])),
        json.dumps(row(0, 0, [])),
        json.dumps(row(0, 10, [-1])),
        json.dumps(row(0, 10, [2**40])),
        json.dumps(row(-1, 10, [1])),
    ],
)
def test_a_malformed_trace_names_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(row(0, 10, [1])) + "\n" + line + "\n")
    with pytest.raises(TraceInvalid, match="line 2"):
        read_trace(path, 10, SCALE, 1.0, seed=1)


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n")
    with pytest.raises(TraceInvalid, match="no request"):
        read_trace(path, 10, SCALE, 1.0, seed=1)


@pytest.mark.parametrize("shape", [CHATS, HOT_PREFIX])
def test_generated_requests_keep_the_rules_of_a_trace(shape: object) -> None:
    arrivals = generate(shape, 400, SCALE, 3.0, seed=4)  # type: ignore[arg-type]
    assert arrivals == generate(shape, 400, SCALE, 3.0, seed=4)  # type: ignore[arg-type]
    assert arrivals != generate(shape, 400, SCALE, 3.0, seed=5)  # type: ignore[arg-type]
    assert len(arrivals) == 400
    assert [arrival.at_s for arrival in arrivals] == sorted(arrival.at_s for arrival in arrivals)
    before: dict[int, tuple[int, ...]] = {}
    for arrival in arrivals:
        for place, one in enumerate(arrival.hash_ids):
            assert before.setdefault(one, arrival.hash_ids[:place]) == arrival.hash_ids[:place]


def test_generated_chats_have_the_shape_that_they_are_said_to_have() -> None:
    arrivals = generate(CHATS, 3000, SCALE, 1.0, seed=1)
    assert 8_000 < sum(arrival.num_tokens for arrival in arrivals) / 3000 * SCALE < 20_000
    assert arrivals[-1].at_s == pytest.approx(3000 / CHATS.rate_per_s, rel=0.2)
    assert 0.4 < bound_hit_rate(arrivals, SCALE, None) < 0.75
    assert bound_hit_rate(arrivals, SCALE, 20_000) < bound_hit_rate(arrivals, SCALE, None)
    assert bound_hit_rate(generate(HOT_PREFIX, 500, SCALE, 1.0, seed=1), SCALE, None) > 0.8


@given(
    ids=st.lists(st.integers(0, 500), min_size=1, max_size=6, unique=True),
    last=st.integers(1, 512),
    scale=st.sampled_from(SCALES),
)
def test_blocks_tokens_and_bytes_say_the_same(ids: list[int], last: int, scale: int) -> None:
    arrival = Arrival(0.0, max(1, ((len(ids) - 1) * 512 + last) // scale), 1, tuple(ids))
    tokens = token_ids(arrival, scale)
    assert len(tokens) == arrival.num_tokens == len(prompt_bytes(tokens)) // 4
    assert len(set(tokens)) == len(tokens)
    keys = block_keys(arrival, scale)
    assert len(keys) == arrival.num_tokens // BLOCK_TOKENS
    assert [token for key in keys for token in block_tokens(key)] == tokens[: len(keys) * BLOCK_TOKENS]


# ---- blocks ----------------------------------------------------------------------------------------------------------

PROMPTS = [tuple(range(10 * root, 10 * root + length)) for root in range(4) for length in (1, 3, 6)]


@settings(max_examples=200)
@given(steps=st.lists(st.tuples(st.sampled_from(PROMPTS), st.integers(0, 3), st.booleans()), max_size=60))
def test_blocks_are_finite_and_what_is_used_stays(steps: list[tuple[tuple[int, ...], int, bool]]) -> None:
    removed: list[int] = []
    blocks = Blocks(12, removed.append)
    found: set[int] = set()
    held: list[tuple[tuple[int, ...], int]] = []
    for keys, num_private, is_end in steps:
        if is_end and held:
            blocks.release(*held.pop(0))
        used = set().union(*(one for one, _ in held)) if held else set()
        num_used = len(used) + sum(number for _, number in held)
        fits = num_used + len(set(keys) - used) + num_private <= 12
        assert blocks.take(keys, num_private) == fits
        if fits:
            held.append((keys, num_private))
            found |= set(blocks.found(keys))
        assert not used & set(removed), "a block in use was given away"
        found -= set(removed)
        removed.clear()
        blocks.validate()
        for prompt in PROMPTS:
            expected = next((place for place, key in enumerate(prompt) if key not in found), len(prompt))
            assert blocks.match(prompt) == expected


def test_the_least_recently_used_block_goes_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    removed: list[int] = []
    blocks = Blocks(6, removed.append)
    for keys in ((1, 2, 3), (11, 12, 13), (1, 2)):
        assert blocks.take(keys, 0)
        blocks.found(keys)
        blocks.release(keys, 0)
    assert blocks.take((), 5)
    assert removed == [3, 13, 12, 11, 2]


# ---- links -----------------------------------------------------------------------------------------------------------


def send(transfers: list[tuple[float, int, int, float]]) -> list[float]:
    """Ends of transfers: start, number of source and target, bytes. Cards move 10 bytes a second."""
    timeline = Timeline(1)
    links = Links(timeline, 0.5)
    sources, targets = ([Card(f"{kind}{number}", 10.0) for number in range(3)] for kind in "st")
    ends = [inf] * len(transfers)
    for number, (at_s, source, target, num_bytes) in enumerate(transfers):

        def end(number: int = number) -> None:
            ends[number] = timeline.now_s
            for card in (*sources, *targets):
                validate(card)

        timeline.after(
            at_s,
            lambda source=source, target=target, num_bytes=num_bytes, end=end: links.send(  # type: ignore[misc]
                sources[source], targets[target], num_bytes, end
            ),
        )
    timeline.run_until(1e6, lambda: inf not in ends)
    return ends


def test_a_transfer_alone_has_its_cards_bandwidth() -> None:
    assert send([(0.0, 0, 0, 100.0)]) == [pytest.approx(10.5)]


def test_transfers_share_a_card_equally_and_get_the_rest_when_one_has_ended() -> None:
    assert send([(0.0, 0, 0, 100.0), (0.0, 1, 0, 50.0)]) == [pytest.approx(15.5), pytest.approx(10.5)]
    assert send([(0.0, 0, 0, 100.0), (0.0, 0, 1, 100.0), (0.0, 1, 2, 100.0)]) == [
        pytest.approx(20.5),
        pytest.approx(20.5),
        pytest.approx(10.5),
    ]


TRANSFER = st.tuples(st.floats(0, 20), st.integers(0, 2), st.integers(0, 2), st.floats(0, 200))


@given(transfers=st.lists(TRANSFER, max_size=12))
def test_no_card_is_faster_than_it_is(transfers: list[tuple[float, int, int, float]]) -> None:
    ends = send(transfers)
    for card in range(3):
        for side in (1, 2):
            mine = [(one, end) for one, end in zip(transfers, ends, strict=True) if one[side] == card]
            if mine:
                first_s, last_s = min(one[0] for one, _ in mine) + 0.5, max(end for _, end in mine)
                assert sum(one[3] for one, _ in mine) <= 10.0 * (last_s - first_s) + 1e-3
    for one, end in zip(transfers, ends, strict=True):
        assert end >= one[0] + 0.5 + one[3] / 10.0 - 1e-6


# ---- engines ---------------------------------------------------------------------------------------------------------


class Pair:
    """A prefill and a decode engine, and what became of requests."""

    def __init__(self, scale: int = SCALE) -> None:
        self.timeline = Timeline(1)
        model = H200_8B.scaled(scale)
        self.prefill = PrefillEngine("P", model, self.timeline, None)
        self.decode = DecodeEngine("D", model, self.timeline, None, Links(self.timeline, model.transfer_s))
        self.computed_s: dict[int, float] = {}
        self.first_s: dict[int, float] = {}
        self.done_s: dict[int, float] = {}

    def ask(self, job: Job) -> None:
        now = self.timeline

        def note(times: dict[int, float]) -> None:
            times[job.number] = now.now_s
            self.prefill.validate()
            self.decode.validate()

        def computed() -> None:
            note(self.computed_s)
            self.decode.submit(job, self.prefill, Stages(lambda: note(self.first_s), lambda: note(self.done_s)))

        self.prefill.submit(job, computed)

    def run(self, number: int) -> None:
        assert self.timeline.run_until(1e6, lambda: len(self.done_s) == number)


def job(number: int, num_tokens: int, num_output: int = 1, root: int = 0) -> Job:
    return Job(number, num_tokens, num_output, [root * 10_000 + key for key in range(num_tokens // BLOCK_TOKENS)])


@pytest.mark.parametrize("scale", [1, 8])
@pytest.mark.parametrize(
    ("num_tokens", "cold_ms", "warm_ms"), [(2048, 54, 20), (8192, 220, 34), (16_000, 483, 48), (32_768, 1240, 80)]
)
def test_the_model_takes_as_long_as_was_measured(num_tokens: int, cold_ms: int, warm_ms: int, scale: int) -> None:
    pair = Pair(scale)
    pair.ask(job(1, num_tokens // scale))
    pair.run(1)
    assert pair.computed_s[1] * 1000 == pytest.approx(cold_ms, rel=0.12)
    start_s = pair.timeline.now_s
    pair.ask(job(2, num_tokens // scale))
    pair.run(2)
    assert (pair.computed_s[2] - start_s) * 1000 == pytest.approx(warm_ms, rel=0.2, abs=4)
    assert (pair.first_s[1] - pair.computed_s[1]) * 1000 < warm_ms + num_tokens * 131_072 / 45e6 + 20


def test_prompts_are_computed_in_the_order_in_which_they_came() -> None:
    pair = Pair()
    for number in range(6):
        pair.ask(job(number, 4000, root=number))
    pair.run(6)
    assert sorted(pair.computed_s, key=pair.computed_s.__getitem__) == list(range(6))
    gaps = [pair.computed_s[number + 1] - pair.computed_s[number] for number in range(5)]
    assert min(gaps) > 0.5, "a prompt was computed beside another at no cost"


def test_a_prompt_waits_for_room_and_every_block_is_given_back() -> None:
    pair = Pair()
    capacity = pair.prefill.blocks.capacity
    num = capacity // 1000 + 4
    for number in range(num):
        pair.ask(job(number, 16_000, num_output=40, root=number))
    pair.run(num)
    assert pair.prefill.blocks.num_used == pair.decode.blocks.num_used == 0
    assert pair.prefill.blocks.num_held <= capacity


def test_a_larger_batch_decodes_slower_for_each_and_faster_for_all() -> None:
    alone, many = Pair(), Pair()
    alone.ask(job(0, 800, num_output=100))
    alone.run(1)
    for number in range(40):
        many.ask(job(number, 800, num_output=100))
    many.run(40)
    alone_s = alone.done_s[0] - alone.first_s[0]
    slowest_s = max(many.done_s[number] - many.first_s[number] for number in range(40))
    assert alone_s * 1.05 < slowest_s < alone_s * 10
    assert alone_s == pytest.approx(100 * SCALE * 0.006, rel=0.1)
