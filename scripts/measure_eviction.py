"""Replays request traces through the real cache and prints, for each eviction policy and cache size, the tokens hit.

A trace is one JSON object a line with ``input_length`` (tokens) and ``hash_ids``, one id for each 512-token block,
where an equal id means an equal block after an equal prefix. A request looks its full blocks up, releases them, and
stores what it did not find, at once and in the order of the file: times, outputs and concurrency play no part. With
``--scan-every N`` a prompt of ``--scan-blocks`` blocks that nobody repeats comes after every N requests; its tokens
are not counted.

Hit rates are weighted by tokens: tokens found over tokens of all prompts of the trace.

    python scripts/measure_eviction.py TRACE... [--shares 0.01,0.05] [--scan-every 10] [--policies lru,arc]

Standard library and antiphon only. ``slru`` and ``s3fifo`` live here, for comparison; they see the same chunks without
children as the others.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from antiphon.cache.effects import Found, Reserved
from antiphon.cache.events import Attach, Commit, ConnectionId, EngineId, Lookup, Release, Reserve
from antiphon.cache.index import Chunk
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.policy import EvictionPolicy, IsEvictable
from antiphon.cache.policy.choose import choose_policy
from antiphon.cache.policy.heap import ColdestFirst
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest

BLOCK_TOKENS = 512
UNIT_BYTES = 64
CONNECTION = ConnectionId(1)
NAMESPACE = NamespaceDigest(bytes(32))

Request = tuple[tuple[ChunkKey, ...], int]
"""Keys of the full blocks of a prompt, and its length in tokens (0: not counted)."""


class _Segmented:
    """Two heaps, and the bytes of the chunks in each segment (0 probation, 1 protected)."""

    def __init__(self, is_evictable: IsEvictable) -> None:
        self.heaps = (ColdestFirst(is_evictable), ColdestFirst(is_evictable))
        self.segment: dict[Chunk, int] = {}
        self.num_bytes = [0, 0]
        self.capacity_bytes = 0

    def place(self, chunk: Chunk, segment: int) -> None:
        self.segment[chunk] = segment
        self.num_bytes[segment] += chunk.num_bytes

    def move(self, chunk: Chunk, segment: int) -> None:
        old = self.segment[chunk]
        was_offered = chunk in self.heaps[old]
        self.heaps[old].discard(chunk)
        self.num_bytes[old] -= chunk.num_bytes
        self.place(chunk, segment)
        if was_offered:
            self.heaps[segment].offer(chunk)

    def offer(self, chunk: Chunk) -> None:
        self.heaps[self.segment[chunk]].offer(chunk)

    def removed(self, chunk: Chunk, *, is_evicted: bool) -> None:
        segment = self.segment.pop(chunk)
        self.heaps[segment].discard(chunk)
        self.num_bytes[segment] -= chunk.num_bytes

    def resized(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes

    def validate(self, chunks: set[Chunk]) -> None:
        assert self.segment.keys() == chunks


class Slru(_Segmented):
    """Segmented LRU: a hit protects; at most half of the bytes are protected; probation goes first."""

    name = "slru"

    def __init__(self, is_evictable: IsEvictable) -> None:
        super().__init__(is_evictable)
        self.order: dict[Chunk, None] = {}  # protected chunks, least recently used first

    def stored(self, chunk: Chunk) -> None:
        self.place(chunk, 0)

    def used(self, chunk: Chunk) -> None:
        self.order.pop(chunk, None)
        self.order[chunk] = None
        if self.segment[chunk] == 0:
            self.move(chunk, 1)
        while self.num_bytes[1] > self.capacity_bytes // 2:
            coldest = next(iter(self.order))
            del self.order[coldest]
            self.move(coldest, 0)

    def take(self) -> Chunk | None:
        return self.heaps[0].take() or self.heaps[1].take()

    def removed(self, chunk: Chunk, *, is_evicted: bool) -> None:
        self.order.pop(chunk, None)
        super().removed(chunk, is_evicted=is_evicted)


class S3Fifo(_Segmented):
    """S3-FIFO: a small queue of a tenth for the new, a main queue for those used there, ghosts of the evicted new.

    Where the paper turns its queues, a chunk that was used goes back to the hot end, at most three times for each use.
    """

    name = "s3fifo"

    def __init__(self, is_evictable: IsEvictable) -> None:
        super().__init__(is_evictable)
        self.num_uses: dict[Chunk, int] = {}
        self.ghosts: dict[ChunkKey, None] = {}

    def stored(self, chunk: Chunk) -> None:
        is_ghost = chunk.key in self.ghosts
        self.ghosts.pop(chunk.key, None)
        self.place(chunk, int(is_ghost))
        self.num_uses[chunk] = 0

    def used(self, chunk: Chunk) -> None:
        self.num_uses[chunk] = min(3, self.num_uses[chunk] + 1)

    def take(self) -> Chunk | None:
        segment = 0 if self.num_bytes[0] > self.capacity_bytes // 10 else 1
        return self._take_from(segment) or self._take_from(1 - segment)

    def _take_from(self, segment: int) -> Chunk | None:
        while (chunk := self.heaps[segment].take()) is not None:
            if self.num_uses[chunk] == 0:
                return chunk
            self.num_uses[chunk] = 0 if segment == 0 else self.num_uses[chunk] - 1
            self.move(chunk, 1)
            self.heaps[1].offer(chunk)
        return None

    def removed(self, chunk: Chunk, *, is_evicted: bool) -> None:
        if is_evicted and self.segment[chunk] == 0:
            self.ghosts[chunk.key] = None
            while len(self.ghosts) * chunk.num_bytes > self.capacity_bytes:
                del self.ghosts[next(iter(self.ghosts))]
        del self.num_uses[chunk]
        super().removed(chunk, is_evicted=is_evicted)


OTHERS: dict[str, Callable[[IsEvictable], EvictionPolicy]] = {"slru": Slru, "s3fifo": S3Fifo}


def make_policy(options: CacheOptions, is_evictable: IsEvictable) -> EvictionPolicy:
    """A policy of this file, or of the cache."""
    make = OTHERS.get(options.eviction_policy)
    return make(is_evictable) if make is not None else choose_policy(options, is_evictable)


def new_cache(policy: str, num_blocks: int) -> Cache:
    """A cache of ``num_blocks`` blocks under a policy."""
    options = CacheOptions(
        arena_bytes=num_blocks * UNIT_BYTES,
        alignment_bytes=UNIT_BYTES,
        chunk_size_tokens=BLOCK_TOKENS,
        eviction_policy=policy,
        leased_share_max=1.0,
        reserved_share_max=1.0,
        event_log_max=1,
    )
    cache = Cache(options, make_policy=make_policy)
    layout = ChunkLayout(num_slabs=1, slab_bytes=UNIT_BYTES)
    cache.step(Attach(CONNECTION, EngineId("replay", "1"), "trace", BLOCK_TOKENS, layout, (0,)), 0.0)
    return cache


def replay(cache: Cache, requests: list[Request]) -> float:
    """Runs the requests. Returns the share of prompt tokens that were found."""
    hit_tokens = total_tokens = 0
    for keys, num_tokens in requests:
        found = cache.step(Lookup(CONNECTION, "request", NAMESPACE, "", keys), 0.0)[0]
        assert isinstance(found, Found), found
        if found.lease is not None:
            cache.step(Release(CONNECTION, "request", found.lease), 0.0)
        reserved = cache.step(Reserve(CONNECTION, NAMESPACE, "", None, keys), 0.0)[0]
        assert isinstance(reserved, Reserved), reserved
        cache.step(Commit(CONNECTION, tuple(grant.region for grant in reserved.grants)), 0.0)
        if num_tokens:
            hit_tokens += found.num_tokens
            total_tokens += num_tokens
    return hit_tokens / total_tokens


def load(path: Path) -> list[Request]:
    """The requests of a trace; the last block of a prompt counts only if it is full."""
    requests = []
    with path.open() as lines:
        for line in lines:
            item = json.loads(line)
            num_full = item["input_length"] // BLOCK_TOKENS
            keys = tuple(ChunkKey(block.to_bytes(32, "little")) for block in item["hash_ids"][:num_full])
            requests.append((keys, item["input_length"]))
    return requests


def with_scans(requests: list[Request], every: int, num_blocks: int) -> Iterator[Request]:
    """The requests, and after every ``every`` of them a prompt that nobody repeats."""
    for number, request in enumerate(requests, 1):
        yield request
        if every and number % every == 0:
            first = 2**128 + number * num_blocks
            yield tuple(ChunkKey((first + block).to_bytes(32, "little")) for block in range(num_blocks)), 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", type=Path, help="trace files, JSON lines")
    parser.add_argument("--shares", default="0.01,0.02,0.05,0.1,0.2,0.4", help="cache sizes as shares of all blocks")
    parser.add_argument(
        "--policies", default=",".join(("lru", "arc", *OTHERS)), help="policies, in the order of columns"
    )
    parser.add_argument("--scan-every", type=int, default=0, help="requests between two scans (0: none)")
    parser.add_argument("--scan-blocks", type=int, default=200, help="blocks of one scan")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    policies = arguments.policies.split(",")
    machine = f"{os.cpu_count()} CPUs, {platform.machine()}, Python {platform.python_version()}"
    print(f"{datetime.date.today().isoformat()}, {machine}")  # noqa: DTZ011, the reader's own date
    for path in arguments.traces:
        trace = load(path)
        requests = list(with_scans(trace, arguments.scan_every, arguments.scan_blocks))
        num_blocks = len({key for keys, _ in trace for key in keys})
        scans = f", a scan of {arguments.scan_blocks} every {arguments.scan_every}" if arguments.scan_every else ""
        print(f"\n{path.name}: {len(trace)} requests, {num_blocks} different full blocks{scans}\n")
        print("| cache, blocks | share |" + "".join(f" {policy} |" for policy in policies))
        print("|---|---|" + "---|" * len(policies))
        for share in map(float, arguments.shares.split(",")):
            size = max(1, int(share * num_blocks))
            began_s = time.perf_counter()
            rates = [replay(new_cache(policy, size), requests) for policy in policies]
            print(f"| {size} | {share:.1%} |" + "".join(f" {rate:.2%} |" for rate in rates), flush=True)
            print(f"{time.perf_counter() - began_s:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
