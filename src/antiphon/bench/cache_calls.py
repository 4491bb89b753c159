"""How long calls take: lookups with and without their hashing, an empty call, a lookup after a store."""

from __future__ import annotations

import hashlib
import time
from array import array
from contextlib import closing
from types import SimpleNamespace
from typing import Final

from antiphon.bench.figures import Rows, Say, percentile
from antiphon.bench.rig import TENANT, Buffer, CacheMiss, Prompt, Target, ask, attached, release, retrieve, store
from antiphon.core import chunks
from antiphon.core.chunks import TOKEN_BYTES, ChunkChain, chunk_keys
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import CacheError
from antiphon.protocol import cache as protocol

SMALL_LAYOUT: Final = ChunkLayout(num_slabs=1, slab_bytes=4096)
"""Calls do not depend on the size of a chunk; small ones let 128k tokens fit any arena."""

LOOKUP_GOALS_MS: Final = {8_192: 1.0, 131_072: 5.0}
"""p50 by tokens, hashing included."""
_WARM_CALLS: Final = 20
_HASH_ROUNDS: Final = 20


def measure_lookups(target: Target, tokens: tuple[int, ...], num_calls: int, rows: Rows, say: Say) -> None:
    """Adds p50 and p99 of a lookup that finds everything, by number of tokens, with hashing and without."""
    chunk_bytes = SMALL_LAYOUT.chunk_bytes
    with attached(target, SMALL_LAYOUT, "lookups") as session:
        for num_tokens in tokens:
            say(f"lookup of {num_tokens} tokens, {num_calls} times")
            prompt = Prompt.new(num_tokens, target.chunk_size_tokens)
            with closing(Buffer(len(prompt.keys) * chunk_bytes)) as source:
                store(session, prompt, source.address, chunk_bytes)
            with_hash_s, without_s = [], []
            for number in range(_WARM_CALLS + num_calls):
                request = f"lookups-{number}"
                began_s = time.perf_counter()
                joined = b"".join(chunk_keys(prompt.namespace, prompt.tokens, target.chunk_size_tokens))
                hashed_s = time.perf_counter()
                found = ask(session, protocol.Lookup(request, prompt.namespace, TENANT, joined), protocol.Found)
                ended_s = time.perf_counter()
                release(session, request, found)
                if found.num_tokens != num_tokens:
                    raise CacheError(f"a lookup found {found.num_tokens} of {num_tokens} tokens")
                if number >= _WARM_CALLS:
                    with_hash_s.append(ended_s - began_s)
                    without_s.append(ended_s - hashed_s)
            name, goal_ms = f"lookup of {num_tokens} tokens", LOOKUP_GOALS_MS.get(num_tokens)
            p50_ms = percentile(with_hash_s, 50) * 1e3
            if goal_ms is None:
                rows.add(f"{name}, p50", p50_ms, "ms", "hashing a list of ids included")
            else:
                rows.at_most(f"{name}, p50", p50_ms, "ms", goal_ms)
            rows.add(f"{name}, p99", percentile(with_hash_s, 99) * 1e3, "ms", f"{num_calls} calls")
            rows.add(f"{name}, keys given, p50", percentile(without_s, 50) * 1e3, "ms")
            rows.add(f"{name}, keys given, p99", percentile(without_s, 99) * 1e3, "ms")


def measure_hashing(num_tokens: int, chunk_size_tokens: int, rows: Rows, say: Say) -> None:
    """Adds the time of hashing a token, and how often each was hashed while a chain grew token batch by token batch."""
    say(f"hashing {num_tokens} tokens")
    prompt = Prompt.new(num_tokens, chunk_size_tokens)
    packed = array("i", prompt.tokens)
    for name, tokens in (("a list of ids", prompt.tokens), ("an array of ids", packed)):
        times_s = []
        for _ in range(_HASH_ROUNDS):
            began_s = time.perf_counter()
            chunk_keys(prompt.namespace, tokens, chunk_size_tokens)
            times_s.append(time.perf_counter() - began_s)
        rows.add(f"hashing, {name}", min(times_s) / num_tokens * 1e9, "ns", f"a token, best of {_HASH_ROUNDS}")
    rows.at_most("times that a token is hashed", times_hashed(prompt, chunk_size_tokens), "x", 1.0)


class _CountingSha256:
    """SHA-256 that counts the bytes it is given beyond the first, which is the key before."""

    num_bytes = 0

    def __init__(self, data: bytes) -> None:
        self._state = hashlib.sha256(data)

    def update(self, data: memoryview) -> None:
        _CountingSha256.num_bytes += len(data)
        self._state.update(data)

    def digest(self) -> bytes:
        return self._state.digest()


def times_hashed(prompt: Prompt, chunk_size_tokens: int) -> float:
    """How often each token goes through SHA-256 while a prompt grows by 100 tokens at a time, as an engine's does.

    Counted by a digest that stands in for the chain's own. The prompt must be whole chunks.
    """
    chain = ChunkChain(prompt.namespace, chunk_size_tokens)
    _CountingSha256.num_bytes = 0
    namespace = vars(chunks)
    own = namespace["hashlib"]
    namespace["hashlib"] = SimpleNamespace(sha256=_CountingSha256)
    try:
        for start in range(0, len(prompt.tokens), 100):
            chain.extend(prompt.tokens[start : start + 100])
    finally:
        namespace["hashlib"] = own
    assert chain.keys == prompt.keys, "a chain that grows has other keys"
    return _CountingSha256.num_bytes / (len(prompt.tokens) * TOKEN_BYTES)


def measure_ping(target: Target, num_calls: int, rows: Rows, say: Say) -> None:
    """Adds the round trip of a call that does nothing."""
    say(f"{num_calls} empty calls")
    with attached(target, SMALL_LAYOUT, "ping") as session:
        times_s = []
        for _ in range(_WARM_CALLS + num_calls):
            began_s = time.perf_counter()
            ask(session, protocol.Ping(), protocol.Noted)
            times_s.append(time.perf_counter() - began_s)
    rows.add("empty call, p50", percentile(times_s[_WARM_CALLS:], 50) * 1e6, "us")
    rows.add("empty call, p99", percentile(times_s[_WARM_CALLS:], 99) * 1e6, "us", f"{num_calls} calls")


def measure_read_after_write(target: Target, num_rounds: int, rows: Rows, say: Say) -> None:
    """Adds how many lookups hit that one client makes right after another's store was answered."""
    say(f"{num_rounds} lookups, each right after a store")
    chunk_bytes = SMALL_LAYOUT.chunk_bytes
    num_hits = 0
    with (
        attached(target, SMALL_LAYOUT, "writer") as writer,
        attached(target, SMALL_LAYOUT, "reader") as reader,
        closing(Buffer(chunk_bytes)) as source,
        closing(Buffer(chunk_bytes)) as destination,
    ):
        for number in range(num_rounds):
            prompt = Prompt.new(target.chunk_size_tokens, target.chunk_size_tokens)
            source.fill_random()
            store(writer, prompt, source.address, chunk_bytes)
            try:
                retrieve(reader, prompt, f"reader-{number}", destination.address, chunk_bytes)
            except CacheMiss:
                continue
            num_hits += destination.equals(source)
    rows.at_least("lookups that hit right after a store", num_hits, f"of {num_rounds}", num_rounds)
