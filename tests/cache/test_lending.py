"""The shelf is what is readable, whatever the cache does; what is lent is leased, and means what its borrower says."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cache.effects import Attached, Committed, Refused, Reserved
from antiphon.cache.events import Attach, Clear, Commit, ConnectionId, Detach, EngineId, Release, Reserve, Tick
from antiphon.cache.lending import Shelf, Wanted, lend
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.tier_key import TierKey, meaning_of
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest

ENGINE, PEER = ConnectionId(1), ConnectionId(1 << 40)
LAYOUT = ChunkLayout(2, 8)
NAMESPACE = NamespaceDigest(hashlib.sha256(b"n").digest())
KEYS = [ChunkKey(hashlib.sha256(bytes([number])).digest()) for number in range(8)]
WANTED = Wanted(NAMESPACE, None, 16)


def new_cache(num_chunks: int = 4, **options: int) -> Cache:
    cache = Cache(CacheOptions(arena_bytes=16 * num_chunks, alignment_bytes=16, reserved_share_max=1.0, **options))
    for connection, name, layout, slabs in ((ENGINE, "e", LAYOUT, (0, 1)), (PEER, "p", ChunkLayout(1, 1), ())):
        attach = Attach(connection, EngineId(name, "i"), "m" if slabs else "", 256, layout, slabs)
        assert isinstance(cache.step(attach, 0.0)[0], Attached)
    return cache


def store(cache: Cache, key: ChunkKey, tenant: str = "t", namespace: NamespaceDigest = NAMESPACE) -> bool:
    reply = cache.step(Reserve(ENGINE, namespace, tenant, None, (key,)), 0.0)[0]
    assert isinstance(reply, Reserved), reply
    for grant in reply.grants:
        assert isinstance(cache.step(Commit(ENGINE, (grant.region,)), 0.0)[0], Committed)
    return bool(reply.grants)


def tier_key(key: ChunkKey, tenant: str = "t") -> TierKey:
    return meaning_of(NAMESPACE, tenant, "m", LAYOUT).key_of(key)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 7), st.just("clear"), st.just("follow")), max_size=40),
    st.sampled_from((2, 5, 1_000)),
)
def test_the_shelf_is_what_is_readable_and_its_changes_lead_there(steps: list[int | str], log_max: int) -> None:
    cache = new_cache(event_log_max=log_max)
    shelf = Shelf(cache)
    told: set[TierKey] = set()
    told_to = 1
    for step in [*steps, "follow"]:
        if isinstance(step, int):
            store(cache, KEYS[step])
        elif step == "clear":
            cache.step(Clear(), 0.0)
        else:
            shelf.follow()
            shelf.validate()
            changes = shelf.changes_since(told_to, 1_000)
            assert changes is not None
            for is_stored, key in changes:
                assert (key in told) != is_stored, "told twice"
                (told.add if is_stored else told.discard)(key)
            told_to += len(changes)
            assert told_to == shelf.next_sequence
            assert told == shelf.chunks.keys()


def test_changes_that_are_no_longer_kept_are_lost_aloud() -> None:
    cache = new_cache()
    shelf = Shelf(cache, num_changes_max=3)
    for key in KEYS[:4]:
        store(cache, key)
    shelf.follow()
    assert shelf.changes_since(1, 10) is None
    assert shelf.changes_since(2, 2) == [(True, tier_key(KEYS[1])), (True, tier_key(KEYS[2]))]
    assert shelf.changes_since(5, 10) == []


def test_private_tenants_and_our_own_do_not_leave() -> None:
    cache = new_cache()
    shelf = Shelf(cache, frozenset({"private"}))
    for number, tenant in enumerate(("private", "antiphon.gate", "t")):
        store(cache, KEYS[number], tenant, NamespaceDigest(hashlib.sha256(tenant.encode()).digest()))
    shelf.follow()
    assert list(shelf.chunks.values()) == [KEYS[2]]
    shelf.validate()


def test_a_loan_protects_until_it_is_given_back_and_is_no_lookup() -> None:
    cache = new_cache(num_chunks=2)
    shelf = Shelf(cache)
    store(cache, KEYS[0])
    shelf.follow()
    before = cache.statistics().hit_tokens
    loan = lend(shelf, PEER, tier_key(KEYS[0]), WANTED)
    assert loan is not None
    assert loan.num_bytes == 16
    for key in KEYS[1:5]:
        store(cache, key)
    cache.step(Clear(), 0.0)
    assert cache.regions() == [loan.region], "a lent chunk was given away"
    assert cache.statistics().hit_tokens == before
    released = cache.step(Release(PEER, tier_key(KEYS[0]).hex(), loan.lease), 0.0)[0]
    assert not isinstance(released, Refused), released
    assert cache.regions() == []
    cache.validate()


def test_a_borrower_that_is_gone_is_waited_for() -> None:
    cache = new_cache(quarantine_s=1.0)  # type: ignore[arg-type]  # a float among counts
    shelf = Shelf(cache)
    store(cache, KEYS[0])
    shelf.follow()
    assert lend(shelf, PEER, tier_key(KEYS[0]), WANTED) is not None
    cache.step(Detach(PEER), 5.0)
    cache.step(Clear(), 5.5)
    assert len(cache.regions()) == 1
    cache.step(Tick(), 6.1)
    assert cache.regions() == []


def test_what_means_something_else_is_not_lent() -> None:
    cache = new_cache()
    shelf = Shelf(cache)
    store(cache, KEYS[0])
    shelf.follow()
    key = tier_key(KEYS[0])
    other = NamespaceDigest(hashlib.sha256(b"other").digest())
    for wanted in (Wanted(other, None, 16), Wanted(NAMESPACE, "x", 16), Wanted(NAMESPACE, None, 8)):
        assert lend(shelf, PEER, key, wanted) is None
    assert lend(shelf, PEER, key, Wanted(NAMESPACE, None, 16, 99)) is None
    assert lend(shelf, PEER, tier_key(KEYS[1]), WANTED) is None
    assert lend(shelf, PEER, tier_key(KEYS[0], "other"), WANTED) is None
    assert not cache.leases()
