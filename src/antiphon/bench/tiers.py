"""The bench of the tiers: how fast each stores and reads whole chunks, beside the plain calls of what is behind it.

Both run in turns, in the same threads and with the same bytes, so that what else the machine does falls on both. The
best round of each counts.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from antiphon.bench.figures import BenchResult, Rows, Say
from antiphon.config.tier_spec import TierSpec
from antiphon.core.errors import TierCorrupt, TierError
from antiphon.core.namespace import NamespaceDigest
from antiphon.core.units import MIB
from antiphon.storage.plain_calls import MooncakePlain, PlainCalls, plain_calls
from antiphon.storage.tier import ChunkMeta, TierStore
from antiphon.storage.tiers import open_tier

RATIO_MIN: Final = 0.7
"""Of the plain calls' rate, that a tier shall reach."""
_READY_TIMEOUT_S: Final = 30.0


@dataclass(frozen=True)
class TiersBenchOptions:
    """What to measure.

    Args:
        tiers: which; what they hold under other keys is left alone, but may be evicted.
        chunk_bytes: of a chunk, a multiple of 4096.
        num_chunks: stored and read in each round.
        num_threads: that do so.
        num_rounds: of which the best counts.
    """

    tiers: Sequence[TierSpec]
    chunk_bytes: int = 8 * MIB
    num_chunks: int = 8
    num_threads: int = 2
    num_rounds: int = 7

    @classmethod
    def quick(cls, tiers: Sequence[TierSpec]) -> TiersBenchOptions:
        """Seconds: the figures say that it runs, not how fast it is."""
        return cls(tiers, MIB, 4, 2, 2)


@dataclass
class _Best:
    """Bytes a second of the best round."""

    put: float = 0.0
    get: float = 0.0

    def take(self, put: float, get: float) -> None:
        self.put, self.get = max(self.put, put), max(self.get, get)


def run_tiers_bench(options: TiersBenchOptions, say: Say) -> BenchResult:
    """Measures each tier.

    Raises:
        ConfigError: a tier cannot be opened.
        TierError: a call failed, or what was read is not what was stored.
        StartError: the plain calls of one cannot be made.
    """
    rows = Rows()
    for spec in options.tiers:
        say(f"{spec.tier_name}: {options.num_chunks} chunks of {options.chunk_bytes / 1e6:.1f} MB")
        with closing(open_tier(spec)) as store:
            _wait_ready(store)
            ours, plain = _measure(spec, store, options)
        for name, own_rate, plain_rate in (("store", ours.put, plain.put), ("read", ours.get, plain.get)):
            rows.add(f"{spec.tier_name}: {name}", own_rate / 1e9, "GB/s")
            if plain_rate:
                rows.add(f"{spec.tier_name}: {name}, plain calls", plain_rate / 1e9, "GB/s")
                rows.at_least(f"{spec.tier_name}: {name}, of plain calls", own_rate / plain_rate, "x", RATIO_MIN)
    return BenchResult.here(rows)


def _measure(spec: TierSpec, store: TierStore, options: TiersBenchOptions) -> tuple[_Best, _Best]:
    meta = ChunkMeta(NamespaceDigest(hashlib.sha256(b"bench").digest()), None, options.chunk_bytes)
    keys = [hashlib.sha256(b"bench %d" % number).digest() for number in range(options.num_chunks)]
    payload = _buffer(options.chunk_bytes)
    payload[:] = os.urandom(options.chunk_bytes)
    targets = [_buffer(options.chunk_bytes) for _ in range(options.num_threads)]

    def get(number: int) -> None:
        if not store.get_into(keys[number], meta, targets[number % options.num_threads]):
            raise TierError(f"the tier {spec.tier_name} does not have what was stored: is it large enough?")

    ours, plain = _Best(), _Best()
    with contextlib.ExitStack() as after:
        after.callback(store.remove, keys)
        plain_round = _plain_round(spec, options, payload, after)
        for _ in range(options.num_rounds):
            if plain_round is not None:
                plain.take(*plain_round())
            ours.take(*_round(options, lambda number: store.put(keys[number], payload, meta), get))
        if any(target != payload for target in targets[: options.num_chunks]):
            raise TierCorrupt(f"the tier {spec.tier_name} returned other bytes than were stored")
    return ours, plain


def _plain_round(
    spec: TierSpec, options: TiersBenchOptions, payload: memoryview, after: contextlib.ExitStack
) -> Callable[[], tuple[float, float]] | None:
    """A round of the plain calls of what is behind the tier; None for a kind that has none."""
    if spec.kind == "mooncake":
        rounds = MooncakePlain(spec, options.num_chunks, options.chunk_bytes, options.num_threads)
        after.callback(rounds.close)
        return rounds.round
    calls = plain_calls(spec)
    if calls is None:
        return None
    after.callback(calls.close)
    put, get = _plain(calls, payload, options.chunk_bytes)
    return lambda: _round(options, put, get)


def _plain(
    calls: PlainCalls, payload: memoryview, chunk_bytes: int
) -> tuple[Callable[[int], None], Callable[[int], None]]:
    def get(number: int) -> None:
        if calls.get(number, chunk_bytes) != chunk_bytes:
            raise TierError("the plain calls do not return what they stored")

    return lambda number: calls.put(number, payload), get


def _round(options: TiersBenchOptions, put: Callable[[int], None], get: Callable[[int], None]) -> tuple[float, float]:
    """Bytes a second of storing and reading all chunks."""
    rates = []
    with ThreadPoolExecutor(options.num_threads) as pool:
        for call in (put, get):
            start_s = time.perf_counter()
            list(pool.map(call, range(options.num_chunks)))
            rates.append(options.num_chunks * options.chunk_bytes / (time.perf_counter() - start_s))
    return rates[0], rates[1]


def _buffer(num_bytes: int) -> memoryview:
    """Page-aligned, as an arena is."""
    return memoryview(mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _wait_ready(store: TierStore) -> None:
    """Some connect in the background.

    Raises:
        TierError: it does not answer in time.
    """
    deadline_s = time.monotonic() + _READY_TIMEOUT_S
    while True:
        try:
            store.probe()
        except TierError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
        else:
            return
