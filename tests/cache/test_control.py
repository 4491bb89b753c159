"""What an operator asks: pins keep a prefix and end; quotas change while the cache runs; what is held is listed."""

from __future__ import annotations

import time

import pytest

from antiphon.cache.effects import ChunkRemoved, Cleared, Pinned, QuotaSet, Refused, Removal, Unpinned, Verdict
from antiphon.cache.events import Clear, ConnectionId, Pin, SetQuota, Unpin
from antiphon.cache.inspection import Selected
from antiphon.cache.machine import Cache
from antiphon.cache.policy.choose import POLICY_NAMES
from antiphon.cache.tenants import OVERFLOW_TENANT
from antiphon.cache.tier import Tier
from antiphon.cache.tier_key import TierKey, tag_of
from antiphon.cache.tier_options import TierOptions, TiersOptions
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import CapacityExceeded, ChunksPinned, ChunkUnknown, ProtocolError
from tests.cache.world import CHUNK_BYTES, FOUR_SLABS, World, namespace, options, prompt_keys

both = pytest.mark.parametrize("policy", POLICY_NAMES)


def made(num_chunks: int = 8, **changes: object) -> tuple[World, ConnectionId]:
    world = World(options(num_chunks, **changes))
    return world, world.attach()


def pin(world: World, text: str, tenant: str = "", ttl_s: float | None = None) -> Pinned:
    return world.call(Pin(prompt_keys(text, tenant)[-1:], ttl_s), Pinned)


def quota(world: World, tenant: str, num_chunks: float | None) -> QuotaSet:
    quota_bytes = None if num_chunks is None else int(num_chunks * CHUNK_BYTES)
    return world.call(SetQuota(tenant, quota_bytes), QuotaSet)


# ---- pins ------------------------------------------------------------------------------------------------------------


@both
def test_a_pinned_prefix_stays_whatever_comes(policy: str) -> None:
    world, engine = made(4, eviction_policy=policy)
    world.store(engine, "ab")
    assert pin(world, "ab").num_chunks == 2
    for number in range(20):
        assert world.store(engine, str(number % 10) + "x") == (Verdict.WRITE, Verdict.WRITE)
    assert world.num_hit(engine, "ab") == 2
    world.call(Unpin(prompt_keys("ab")[-1]), Unpinned)
    for number in range(4):
        world.store(engine, f"{number}y")
    assert world.num_hit(engine, "ab") < 2


def test_a_pin_of_the_last_chunk_keeps_all_before_it_and_none_behind_it() -> None:
    world, engine = made(4, pinned_share_max=1.0)
    world.store(engine, "abcd")
    answer = pin(world, "abc")
    assert (answer.num_chunks, answer.num_named, answer.num_bytes) == (3, 3, 3 * CHUNK_BYTES) or pytest.fail(
        str(answer)
    )
    assert world.store(engine, "x") == (Verdict.WRITE,)
    assert world.store(engine, "yz") == (Verdict.WRITE, Verdict.REFUSED)
    assert world.num_hit(engine, "abcd") == 3


def test_what_is_not_there_is_said_and_not_pinned_when_it_comes() -> None:
    world, engine = made(8)
    world.store(engine, "ab")
    keys = prompt_keys("abcd")
    answer = world.call(Pin(keys), Pinned)
    assert (answer.num_chunks, answer.num_named, answer.key) == (2, 4, keys[1])
    world.store(engine, "abcd")
    assert world.cache.statistics().pinned_bytes == 2 * CHUNK_BYTES
    again = world.call(Pin(keys), Pinned)
    assert (again.num_chunks, again.num_named, world.cache.statistics().num_pins) == (4, 4, 2)


def test_nothing_of_it_there_is_refused_and_says_what_to_do() -> None:
    world, engine = made(8)
    assert "send a request with the prompt" in world.assert_refused(Pin(prompt_keys("ab")), ChunkUnknown)
    world.store(engine, "ab")
    world.call(Clear(), Cleared)
    world.assert_refused(Pin(prompt_keys("ab")[-1:]), ChunkUnknown)


def test_a_chunk_whose_beginning_is_gone_cannot_be_pinned() -> None:
    world, engine = made(8)
    world.store(engine, "bc", 1)  # the chunk before it was never stored
    assert "one before it" in world.assert_refused(Pin(prompt_keys("bc")[-1:]), ChunkUnknown)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_time_that_is_none(ttl_s: float) -> None:
    world, engine = made()
    world.store(engine, "a")
    world.assert_refused(Pin(prompt_keys("a"), ttl_s), ProtocolError)


def test_keys_that_do_not_follow_each_other() -> None:
    world, engine = made()
    world.store(engine, "ab")
    world.store(engine, "x")
    world.assert_refused(Pin((*prompt_keys("ab"), *prompt_keys("x"))), ProtocolError)
    world.assert_refused(Pin(()), ProtocolError)


def test_pins_are_bounded_by_bytes_each_chunk_once_and_by_number() -> None:
    world, engine = made(8, pinned_share_max=0.5, pins_max=3)
    for prompt in ("abc", "abx", "yz"):
        world.store(engine, prompt)
    pin(world, "abc")
    assert pin(world, "abx").pinned_bytes == 4 * CHUNK_BYTES
    assert "end a pin" in world.assert_refused(Pin(prompt_keys("y")), CapacityExceeded)
    pin(world, "a")
    assert "3 pins" in world.assert_refused(Pin(prompt_keys("ab")), CapacityExceeded)
    assert pin(world, "abc", ttl_s=1.0).num_chunks == 3  # the same again is no further one


def test_a_chunk_stays_until_the_last_pin_of_it_has_ended() -> None:
    world, engine = made(4, pinned_share_max=1.0)
    world.store(engine, "abc")
    pin(world, "abc")
    pin(world, "ab")
    assert world.call(Unpin(prompt_keys("abc")[-1]), Unpinned).pinned_bytes == 2 * CHUNK_BYTES
    for number in range(6):
        world.store(engine, str(number))
    assert world.num_hit(engine, "abc") == 2
    assert world.call(Unpin(), Unpinned).num_pins == 1
    assert "no pin" in world.assert_refused(Unpin(prompt_keys("ab")[-1]), ChunkUnknown)


def test_a_pin_ends_by_its_time_and_a_tick_is_asked_for() -> None:
    world, engine = made(2, pinned_share_max=1.0)
    world.store(engine, "ab")
    pin(world, "ab", ttl_s=5.0)
    assert world.cache.next_deadline_s == 5.0
    pin(world, "ab", ttl_s=9.0)
    world.tick(5.0)
    assert world.store(engine, "x") == (Verdict.REFUSED,)
    world.tick(4.0)
    assert world.cache.statistics().num_pins == 0
    assert world.store(engine, "x") == (Verdict.WRITE,)
    pin(world, "x", ttl_s=1.0)
    pin(world, "x")
    world.tick(10.0)
    assert world.cache.statistics().num_pins == 1


def test_pins_that_were_ended_before_their_time_leave_no_trail() -> None:
    world, engine = made(4, pins_max=2, pinned_share_max=1.0)
    for prompt in ("a", "x"):
        world.store(engine, prompt)
    for _ in range(4):
        pin(world, "a", ttl_s=5.0)
        world.call(Unpin(None), Unpinned)
    for prompt in ("a", "x"):
        pin(world, prompt, ttl_s=5.0)
    world.cache.validate()
    world.tick(5.0)
    assert world.cache.pins() == []


def test_pins_that_are_made_again_and_again_leave_no_trail() -> None:
    world, engine = made(2, pins_max=4)
    world.store(engine, "a")
    for number in range(100):
        pin(world, "a", ttl_s=100.0 + number)
    assert len(world.cache._books.pins._ends) <= 8


def test_a_window_for_a_larger_chunk_goes_around_what_is_pinned() -> None:
    world, engine = made(4)
    other = world.attach("big", (0, 1, 2, 3), layout=FOUR_SLABS, model="big")
    for prompt in "abcd":
        world.store(engine, prompt)
    pin(world, "b")
    assert world.store(other, "W", tenant="w") == (Verdict.WRITE,)
    assert world.removed_letters("c") + world.removed_letters("d") == "cd"
    assert world.num_hit(engine, "b") == 1
    assert world.store(other, "V", tenant="w") == (Verdict.WRITE,)
    assert world.num_hit(engine, "b") == 1


def test_clear_spares_nothing_or_refuses() -> None:
    world, engine = made(8)
    for tenant in ("a", "b"):
        world.store(engine, "xy", tenant=tenant)
    pin(world, "xy", "a")
    assert "1 pins" in world.assert_refused(Clear(spares_pinned=True), ChunksPinned)
    world.assert_refused(Clear(tenant="a", spares_pinned=True), ChunksPinned)
    assert world.call(Clear(tenant="b", spares_pinned=True), Cleared) == Cleared(2, 2 * CHUNK_BYTES, 0)
    # An engine's own clear says that the bytes are not true any more.
    assert world.call(Clear(model="demo"), Cleared) == Cleared(2, 2 * CHUNK_BYTES, 0, 1)
    assert world.cache.statistics().pinned_bytes == 0


def test_a_leased_pinned_chunk_is_held_until_its_lease_ends() -> None:
    world, engine = made(8)
    world.store(engine, "a")
    found = world.lookup(engine, "a")
    pin(world, "a")
    assert world.call(Clear(), Cleared) == Cleared(1, 0, CHUNK_BYTES, 1)
    world.release(engine, found.lease)
    assert world.cache.statistics().free_bytes == 8 * CHUNK_BYTES


def test_eviction_does_not_look_at_what_is_pinned() -> None:
    """The cost of room is that of the chunks that go, however many are pinned."""

    def seconds(num_pinned: int) -> float:
        cache_options = options(num_pinned + 64, pinned_share_max=1.0, event_log_max=1)
        cache = World.__new__(World)
        cache.cache, cache.now_s, cache.notices, cache._num_connections = Cache(cache_options), 0.0, [], 0
        cache.effects = lambda event: cache.cache.step(event, cache.now_s)  # type: ignore[method-assign]
        engine = cache.attach()
        for number in range(num_pinned):
            cache.store(engine, chr(1_000 + number))
            cache.call(Pin(prompt_keys(chr(1_000 + number))), Pinned)
        best = float("inf")
        for turn in range(5):
            began_s = time.perf_counter()
            for number in range(200):
                cache.store(engine, chr(20_000 + turn * 200 + number))
            best = min(best, time.perf_counter() - began_s)
        return best

    assert seconds(1_000) < 4 * seconds(10)


# ---- quotas ----------------------------------------------------------------------------------------------------------


def test_a_lower_quota_evicts_the_tenants_oldest_chunks_at_once() -> None:
    world, engine = made(8)
    for prompt in "abcd":
        world.store(engine, prompt, tenant="t")
        world.store(engine, prompt, tenant="other")
    world.num_hit(engine, "a", "t")
    answer = quota(world, "t", 2)
    assert (answer.used_bytes, answer.num_evicted) == (2 * CHUNK_BYTES, 2)
    assert world.removed_letters("b", "t") + world.removed_letters("c", "t") == "bc"
    assert {notice.removal for notice in world.removed()} == {Removal.EVICTED_FOR_QUOTA}
    assert {notice.tenant for notice in world.removed()} == {"t"}
    world.store(engine, "e", tenant="t")
    assert world.cache.statistics().tenants["t"].used_bytes == 2 * CHUNK_BYTES


def test_leased_and_pinned_chunks_outlast_a_lower_quota() -> None:
    world, engine = made(8)
    for prompt in "abcd":
        world.store(engine, prompt, tenant="t")
    found = world.lookup(engine, "a", tenant="t")
    pin(world, "b", "t")
    answer = quota(world, "t", 0)
    assert (answer.used_bytes, answer.num_evicted) == (2 * CHUNK_BYTES, 2)
    assert world.store(engine, "z", tenant="t") == (Verdict.REFUSED,)
    world.release(engine, found.lease)
    assert world.num_hit(engine, "a", "t") == 1
    assert quota(world, "t", 1).num_evicted == 1
    assert world.num_hit(engine, "b", "t") == 1


def test_a_prefix_goes_from_its_end_for_a_quota_and_stops_before_what_is_pinned() -> None:
    world, engine = made(8)
    world.store(engine, "abcd", tenant="t")
    pin(world, "ab", "t")
    assert quota(world, "t", 1).num_evicted == 2
    assert world.removed_letters("abcd", "t") == "dc"


def test_without_a_quota_nothing_goes_and_a_first_one_knows_what_was_stored_before() -> None:
    world, engine = made(8)
    for prompt in "abcd":
        world.store(engine, prompt, tenant="t")
    assert quota(world, "t", 4).num_evicted == 0
    assert world.store(engine, "e", tenant="t") == (Verdict.WRITE,)
    assert world.removed_letters("a", "t") == "a"
    assert quota(world, "t", None).quota_bytes is None
    for prompt in "fgh":
        assert world.store(engine, prompt, tenant="t") == (Verdict.WRITE,)
    assert "no quota of its own" in world.assert_refused(SetQuota("t", None), ProtocolError)
    assert "no quota of its own" in world.assert_refused(SetQuota("nobody", None), ProtocolError)
    world.assert_refused(SetQuota("t", -1), ProtocolError)
    world.assert_refused(SetQuota(OVERFLOW_TENANT, 1), ProtocolError)


def test_without_its_own_quota_a_tenant_has_the_default_again() -> None:
    world, engine = made(8, default_quota_bytes=2 * CHUNK_BYTES, quota_bytes={"t": 4 * CHUNK_BYTES})
    for prompt in "abcd":
        world.store(engine, prompt, tenant="t")
    answer = quota(world, "t", None)
    assert (answer.quota_bytes, answer.used_bytes, answer.num_evicted) == (2 * CHUNK_BYTES, 2 * CHUNK_BYTES, 2)


def test_a_tenant_that_shared_an_account_gets_its_own_with_what_it_holds() -> None:
    world, engine = made(8, tenants_max=1)
    for tenant in ("first", "second", "third"):
        world.store(engine, "ab", tenant=tenant)
    assert world.cache.statistics().tenants[OVERFLOW_TENANT].used_bytes == 4 * CHUNK_BYTES
    answer = quota(world, "third", 1)
    assert (answer.used_bytes, answer.num_evicted) == (CHUNK_BYTES, 1)
    tenants = world.cache.statistics().tenants
    assert tenants[OVERFLOW_TENANT].used_bytes == 2 * CHUNK_BYTES
    assert tenants["third"].quota_bytes == CHUNK_BYTES


def test_quotas_are_bounded_and_a_place_is_free_when_its_tenant_holds_nothing() -> None:
    world, engine = made(8, quotas_max=2)
    world.store(engine, "a", tenant="one")
    quota(world, "one", 2)
    quota(world, "two", 2)
    assert "no more may be" in world.assert_refused(SetQuota("three", 1), CapacityExceeded)
    quota(world, "one", None)
    world.assert_refused(SetQuota("three", 1), CapacityExceeded)  # it still holds a chunk
    world.call(Clear(tenant="one"), Cleared)
    assert quota(world, "three", 2).quota_bytes == 2 * CHUNK_BYTES
    assert world.cache.quotas() == {"two": 2 * CHUNK_BYTES, "three": 2 * CHUNK_BYTES}


# ---- what is held ----------------------------------------------------------------------------------------------------


def test_namespaces_have_their_sums_the_largest_first() -> None:
    world, engine = made(16)
    world.store(engine, "a", tenant="small")
    world.store(engine, "abc", tenant="large")
    world.lookup(engine, "ab", tenant="large")
    pin(world, "a", "large")
    large, small = world.cache.namespaces(Selected(), 10).namespaces
    assert (large.tenant, large.num_chunks, large.num_bytes) == ("large", 3, 3 * CHUNK_BYTES)
    assert (large.num_leased, large.num_pinned, large.model) == (2, 1, "demo")
    assert (small.tenant, small.num_chunks, small.num_leased, small.namespace) == ("small", 1, 0, namespace("small"))
    found = world.cache.namespaces(Selected(), 1)
    assert (found.namespaces, found.num_left_out) == ((large,), 1)
    assert world.cache.namespaces(Selected(model="x"), 9).namespaces == ()
    assert world.cache.namespaces(Selected(but_not=frozenset({"large"})), 9).namespaces == (small,)


def test_chunks_page_by_page_with_what_is_known_of_each() -> None:
    world, engine = made(16)
    world.store(engine, "abc", tenant="t")
    world.store(engine, "zzz", first=1)  # its first chunk is not there: nobody knows how far in it is
    world.now_s = 7.0
    world.num_hit(engine, "ab", "t")
    pin(world, "a", "t")
    seen, after = [], 0
    while True:
        page = world.cache.chunk_facts(Selected(), after, 2)
        seen += page.chunks
        if page.after is None:
            break
        after = page.after
    assert [each.position for each in seen] == [0, 1, 2, None, None]
    assert [each.key for each in seen[:3]] == list(prompt_keys("abc", "t"))
    assert [each.used_s for each in seen] == [7.0, 7.0, 0.0, 0.0, 0.0]
    assert [each.num_pins for each in seen] == [1, 0, 0, 0, 0]
    assert seen[1].parent == seen[0].key
    assert len(world.cache.chunk_facts(Selected(tenant="t"), 0, 9).chunks) == 3
    assert world.cache.chunk_facts(Selected(), 2**60, 9).after is None


def test_names_that_nothing_here_has() -> None:
    world, engine = made(8, quota_bytes={"limited": CHUNK_BYTES})
    world.store(engine, "a", tenant="t")
    for known in (Selected("t", "demo"), Selected("limited"), Selected(model="demo"), Selected()):
        assert world.cache.known_of(known).unknown == ()
    assert world.cache.known_of(Selected("x", "demo")).unknown == ("tenant",)
    assert world.cache.known_of(Selected("x", "y")).unknown == ("tenant", "model")


def test_a_name_that_only_a_tier_has_is_known() -> None:
    disk, shared, peer = TierOptions("disk"), TierOptions("shared", is_shared=True), TierOptions("peer", source="peer")
    cache = Cache(options(4), tiers=TiersOptions((disk, peer)))
    assert cache._books.tiers is not None
    tier = cache._books.tiers.tiers[0]
    assert cache.known_of(Selected("old")).unlisted == ("disk",)  # it is not listed yet
    tier.is_complete = True
    assert (cache.known_of(Selected("old")).unknown, cache.known_of(Selected("old")).unlisted) == (("tenant",), ())
    tier.remember(TierKey(tag_of("old") + tag_of("demo") + bytes(24)))
    assert cache.known_of(Selected("old", "demo")).unknown == ()
    other = Cache(options(4), tiers=TiersOptions((shared,)))
    assert other.known_of(Selected("old")).unlisted == ("shared",)


def test_a_tier_counts_its_records_by_tenant_and_model() -> None:
    tier = Tier(0, TierOptions("disk", known_max=2))
    keys = [TierKey(tag_of("t") + tag_of("m") + bytes([number]) * 24) for number in range(3)]
    for key in (*keys, keys[2]):
        tier.remember(key)
    assert (tier.num_known_of, tier.is_complete) == ({keys[0][:8]: 2}, False)
    for key in keys:
        tier.forget(key)
    assert tier.num_known_of == {}


def test_events_say_when() -> None:
    world, engine = made(8)
    world.now_s = 3.0
    world.store(engine, "a")
    world.now_s = 5.0
    world.call(Clear(), Cleared)
    assert [event.at_s for event in world.cache.events_since(1, 9).events] == [3.0, 5.0]
    assert isinstance(world.cache.events_since(2, 9).events[0], ChunkRemoved)


def test_a_refusal_leaves_no_pin_behind() -> None:
    world, engine = made(4, pinned_share_max=0.5)
    world.store(engine, "abc")
    reply = world.reply(Pin(prompt_keys("abc")))
    assert isinstance(reply, Refused)
    assert world.cache.pins() == []
    assert pin(world, "ab").key == ChunkKey(prompt_keys("ab")[-1])
