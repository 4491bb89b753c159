"""Digests of what can be lent: each is taken once, soon after the store, and not of what came from a peer."""

from __future__ import annotations

from typing import Any

import xxhash

from antiphon.cache.arena import RegionHandle
from antiphon.cache.events import LeaseId
from antiphon.cache.lending import Loan, Shelf
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server.peer_serving import AHEAD_MAX, Digests
from tests.cache.test_lending import KEYS, new_cache, store

BYTES = bytes(range(256)) * 16


class CountingArena:
    """Says what was read of it."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        self.read.append(offset_bytes)
        return memoryview(BYTES)[offset_bytes : offset_bytes + num_bytes]


def loan_of(region: RegionHandle) -> Loan:
    return Loan(LeaseId(1), region, 64)


async def test_it_is_taken_once_ahead_or_when_it_is_asked_for() -> None:
    arena: Any = CountingArena()
    digests = Digests(arena)
    stored, asked, pulled = (RegionHandle(64 * number, 64, 100 + number) for number in range(3))
    digests.stored(TierKey(b"a" * 32), stored, 64)
    digests.pulled(b"b" * 32)
    digests.stored(TierKey(b"b" * 32), pulled, 64)
    digests._ahead.submit(lambda: None).result()
    assert arena.read == [0], "what came from a peer is digested again"
    for region in (stored, asked, pulled, stored, asked):
        offset = region.offset_bytes
        assert await digests.of(loan_of(region)) == xxhash.xxh3_128(BYTES[offset : offset + 64]).digest()
    assert arena.read == [0, 64, 128]
    digests.close()
    digests.stored(TierKey(b"c" * 32), RegionHandle(256, 64, 104), 64)
    assert 256 not in arena.read, "closed"


async def test_two_that_want_a_digest_take_it_once() -> None:
    arena: Any = CountingArena()
    digests = Digests(arena)
    region = RegionHandle(0, 64, 100)
    with digests._lock:  # both begin at the same time
        digests._ahead.submit(digests._take, region, 64)
        digests.begin(loan_of(region))
    digest = await digests.of(loan_of(region))
    digests.close()
    assert digest == digests.known(loan_of(region)) == xxhash.xxh3_128(BYTES[:64]).digest()
    assert arena.read == [0]


async def test_no_more_wait_than_may() -> None:
    arena: Any = CountingArena()
    digests = Digests(arena)
    digests._num_ahead = AHEAD_MAX
    digests.stored(TierKey(b"a" * 32), RegionHandle(0, 64, 100), 64)
    digests._ahead.submit(lambda: None).result()
    assert arena.read == []
    digests.close()


def test_the_shelf_tells_of_each_chunk_once() -> None:
    cache = new_cache()
    shelf = Shelf(cache)
    told: list[tuple[TierKey, int]] = []
    shelf.on_stored = lambda key, region, num_bytes: told.append((key, num_bytes))
    for key in KEYS[:3]:
        store(cache, key)
    shelf.follow()
    shelf.follow()
    assert {key for key, _ in told} == shelf.chunks.keys()
    assert len(told) == len(shelf.chunks) == 3
