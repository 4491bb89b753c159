"""The requests of a simulated fleet: read from a trace, or generated with the same shape.

A trace is a file of one JSON object a line, in the order of arrival:

    timestamp      milliseconds since its beginning; requests that share one are a burst
    input_length   tokens of the prompt
    output_length  tokens of the answer
    hash_ids       one number for each 512 tokens of the prompt, the last one for what is left: equal numbers mean
                   equal tokens there and before

Lengths are divided by ``scale``: one token of the simulation stands for so many of the trace, and the engines' model is
scaled with it, so that times and shares stay those of the whole trace. The requests of a burst are spread at random
over the time until the next timestamp, for a timestamp that is rounded to seconds says nothing about simultaneity.

Token ids and bytes follow from the hash ids alone: equal prefixes, and only they, are equal as either.

Always true: arrivals are in the order of their times, and equal options give equal arrivals.
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise
from math import inf
from pathlib import Path
from random import Random
from typing import Any

TRACE_BLOCK_TOKENS = 512
"""Tokens of the trace that one hash id stands for."""

TOKEN_BYTES = 4
"""Of the text that stands for a token."""

BLOCK_TOKENS = 16
"""Simulated tokens of a KV block: vLLM's block size on a GPU."""

SCALES = (1, 2, 4, 8, 16, 32)
"""Divisors that leave whole KV blocks of a hash id."""

HASH_ID_MAX = 2**22
"""Hash ids of a trace, so that a token id fits 31 bits."""

LINE_BYTES_MAX = 1 << 20
REQUESTS_MAX = 1_000_000


class TraceInvalid(ValueError):
    """A line of a trace is not what the format says."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request.

    Args:
        at_s: when it comes.
        num_tokens, num_output: of prompt and answer, scaled, at least 1.
        hash_ids: of the prompt.
    """

    at_s: float
    num_tokens: int
    num_output: int
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shape:
    """What a generated workload is like; lengths are in tokens of a trace. The values resemble chats with an assistant.

    Args:
        rate_per_s: requests a second.
        num_systems: different system prompts; the n-th is used in proportion to n ** -zipf.
        system_tokens: the shortest and the longest of them.
        mean_turns: turns of a conversation, geometric.
        think_s: mean time from one turn to the next, exponential.
        first_tokens, next_tokens: medians of what the user adds in the first turn and in later ones, log-normal.
        spread: sigma of both.
        output_tokens: mean of an answer, exponential.
        bucket_s, burst: conversations start in buckets of so many seconds whose rates differ, by a gamma distribution
            of this variance, and are spread inside them.
    """

    rate_per_s: float = 3.4
    num_systems: int = 64
    zipf: float = 1.1
    system_tokens: tuple[int, int] = (512, 4096)
    mean_turns: float = 2.5
    think_s: float = 60.0
    first_tokens: float = 5000.0
    next_tokens: float = 1500.0
    spread: float = 1.1
    output_tokens: float = 340.0
    bucket_s: float = 3.0
    burst: float = 0.5
    prompt_tokens_max: int = 120_000


CHATS = Shape()
HOT_PREFIX = replace(
    CHATS, num_systems=1, system_tokens=(8192, 8192), mean_turns=1.0, first_tokens=800.0, output_tokens=150.0
)
"""Every prompt begins with the same long system prompt, and ends with something new."""


def read_trace(path: Path, num_requests: int, scale: int, rate_scale: float, seed: int) -> list[Arrival]:
    """The first requests of a trace.

    Args:
        rate_scale: they come so many times as fast.
        seed: decides where in its burst a request comes.

    Raises:
        TraceInvalid: a line is malformed, or the times decrease.
        OSError: the file cannot be read.
    """
    with path.open(encoding="utf-8") as file:
        rows = list(islice(_rows(file), min(num_requests, REQUESTS_MAX)))
    if not rows:
        raise TraceInvalid(f"{path} has no request")
    return list(_spread(rows, scale, rate_scale, Random(seed)))


def _rows(lines: Iterable[str]) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    before_s = 0.0
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(line) > LINE_BYTES_MAX:
            raise TraceInvalid(f"line {number} is longer than {LINE_BYTES_MAX} bytes")
        try:
            row: Any = json.loads(line)
            at_s, num_input, num_output = row["timestamp"] / 1000, int(row["input_length"]), int(row["output_length"])
            ids = tuple(int(one) for one in row["hash_ids"])
        except (ValueError, TypeError, KeyError) as error:
            raise TraceInvalid(f"line {number}: {type(error).__name__}: {error}") from error
        if num_input < 1 or num_output < 0 or len(ids) != -(-num_input // TRACE_BLOCK_TOKENS):
            raise TraceInvalid(f"line {number}: {len(ids)} hash ids for {num_input} tokens")
        if at_s < before_s or not all(0 <= one < HASH_ID_MAX for one in ids):
            raise TraceInvalid(f"line {number}: the time decreases, or a hash id is not in 0 to {HASH_ID_MAX - 1}")
        before_s = at_s
        yield at_s, num_input, num_output, ids


def _spread(
    rows: Sequence[tuple[float, int, int, tuple[int, ...]]], scale: int, rate_scale: float, chance: Random
) -> Iterator[Arrival]:
    """Bursts, each spread until the next one begins; the last as far as the one before it."""
    starts = sorted({row[0] for row in rows})
    width_s = {one: after - one for one, after in pairwise(starts)}
    width_s[starts[-1]] = width_s[starts[-2]] if len(starts) > 1 else 1.0
    times = sorted((row[0] + chance.random() * width_s[row[0]], number) for number, row in enumerate(rows))
    for at_s, number in times:
        _, num_input, num_output, ids = rows[number]
        yield _scaled(at_s / rate_scale, num_input, num_output, ids, scale)


def _scaled(at_s: float, num_input: int, num_output: int, ids: tuple[int, ...], scale: int) -> Arrival:
    num_tokens = max(1, num_input // scale)
    return Arrival(at_s, num_tokens, max(1, round(num_output / scale)), ids)


def generate(shape: Shape, num_requests: int, scale: int, rate_scale: float, seed: int) -> list[Arrival]:
    """Conversations: each turn repeats what was said before, system prompts are shared by popularity."""
    chance = Random(seed)
    next_id = iter(range(HASH_ID_MAX))
    systems: list[tuple[int, list[int]]] = []
    for _ in range(shape.num_systems):
        low, high = (tokens // TRACE_BLOCK_TOKENS for tokens in shape.system_tokens)
        num_blocks = chance.randint(low, high)
        systems.append((num_blocks * TRACE_BLOCK_TOKENS, list(islice(next_id, num_blocks))))
    popularity = list(accumulate((n + 1) ** -shape.zipf for n in range(shape.num_systems)))
    turns: list[tuple[float, int, int, int, tuple[int, ...]]] = []
    num_turns, last_s = 0, inf
    for start_s in _starts(shape, chance):
        if last_s == inf and num_turns >= num_requests:
            last_s = sorted(turn[0] for turn in turns)[num_requests - 1]
        if start_s > last_s:
            break
        system = systems[bisect_left(popularity, chance.random() * popularity[-1])]
        for turn in _conversation(shape, chance, start_s, system, next_id):
            turns.append((turn[0], num_turns, *turn[1:]))
            num_turns += 1
    turns.sort()
    first_s = turns[0][0]
    return [
        _scaled((at_s - first_s) / rate_scale, num_input, num_output, ids, scale)
        for at_s, _, num_input, num_output, ids in turns[:num_requests]
    ]


def _starts(shape: Shape, chance: Random) -> Iterator[float]:
    """When conversations start, without end."""
    mean = shape.rate_per_s / shape.mean_turns * shape.bucket_s
    bucket_s, due = 0.0, 0.0
    while True:
        due += mean * chance.gammavariate(1 / shape.burst, shape.burst)
        num = int(due)
        due -= num
        yield from sorted(bucket_s + chance.random() * shape.bucket_s for _ in range(num))
        bucket_s += shape.bucket_s


def _conversation(
    shape: Shape, chance: Random, at_s: float, system: tuple[int, list[int]], next_id: Iterator[int]
) -> Iterator[tuple[float, int, int, tuple[int, ...]]]:
    length, ids = system[0], list(system[1])
    median = shape.first_tokens
    while True:
        length += max(1, round(median * chance.lognormvariate(0.0, shape.spread)))
        length = min(length, shape.prompt_tokens_max)
        ids += islice(next_id, length // TRACE_BLOCK_TOKENS - len(ids))
        last = () if length % TRACE_BLOCK_TOKENS == 0 else (next(next_id),)
        num_output = max(1, round(chance.expovariate(1 / shape.output_tokens)))
        yield at_s, length, num_output, (*ids, *last)
        if length == shape.prompt_tokens_max or chance.random() * shape.mean_turns < 1.0:
            return
        length += num_output
        at_s += chance.expovariate(1 / shape.think_s)
        median = shape.next_tokens


def block_keys(arrival: Arrival, scale: int) -> list[int]:
    """A number for each full KV block of the prompt; equal numbers mean equal blocks and equal prefixes."""
    per_id = TRACE_BLOCK_TOKENS // scale // BLOCK_TOKENS
    num = arrival.num_tokens // BLOCK_TOKENS
    keys: list[int] = []
    for one in arrival.hash_ids:
        keys.extend(range(one * per_id, one * per_id + per_id))
        if len(keys) >= num:
            break
    return keys[:num]


def block_tokens(key: int) -> range:
    """The token ids of a KV block."""
    return range(key * BLOCK_TOKENS, (key + 1) * BLOCK_TOKENS)


def token_ids(arrival: Arrival, scale: int) -> list[int]:
    """The token ids of the prompt."""
    width = TRACE_BLOCK_TOKENS // scale
    tokens: list[int] = []
    for one in arrival.hash_ids:
        tokens.extend(range(one * width, (one + 1) * width))
    return tokens[: arrival.num_tokens]


def prompt_bytes(tokens: Sequence[int]) -> bytes:
    """What stands for the text: ``TOKEN_BYTES`` for each token."""
    return array("I", tokens).tobytes()
