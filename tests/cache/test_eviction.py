"""What goes when room is needed: the coldest, from the end of its prefix, within quotas; never what is protected."""

from __future__ import annotations

import pytest

from antiphon.cache.effects import ChunkRemoved, Cleared, Removal, Verdict
from antiphon.cache.events import Clear, ConnectionId
from antiphon.cache.machine import Cache
from antiphon.cache.policy.choose import POLICY_NAMES
from antiphon.cache.tenants import OVERFLOW_TENANT
from antiphon.core.errors import CapacityExceeded, ConfigError, QuotaExceeded
from tests.cache.world import CHUNK_BYTES, FOUR_SLABS, World, options

WRITE, REFUSED, RESIDENT = Verdict.WRITE, Verdict.REFUSED, Verdict.RESIDENT
both = pytest.mark.parametrize("policy", POLICY_NAMES)


def filled(prompts: list[str], num_chunks: int, **changes: object) -> tuple[World, ConnectionId]:
    world = World(options(num_chunks, **changes))
    engine = world.attach()
    for prompt in prompts:
        world.store(engine, prompt)
    return world, engine


def resident(world: World, engine: ConnectionId, prompts: str) -> str:
    """Which one-chunk prompts are readable. It looks inside, since a call would count as a use."""
    stored = {key for key, chunk in world.cache._books.index.chunks.items() if chunk.is_complete}
    return "".join(letter for letter in prompts if world.reserve_event(engine, letter).keys[0] in stored)


# ---- order -----------------------------------------------------------------------------------------------------------


def test_lru_evicts_what_was_used_longest_ago() -> None:
    world, engine = filled(["x", "y", "z"], 3)
    world.num_hit(engine, "x")
    world.store(engine, "1")
    assert resident(world, engine, "xyz1") == "xz1"
    world.store(engine, "z")  # asked about and resident: used
    world.store(engine, "23")
    assert resident(world, engine, "xyz1") == "z"


@both
def test_later_chunks_of_a_prefix_go_first(policy: str) -> None:
    world, engine = filled(["abcd"], 4, eviction_policy=policy)
    for number in range(4):
        world.store(engine, str(number))
    removed = world.removed_letters("abcd")
    assert removed == "dcba"[: len(removed)]
    assert len(removed) > 0
    assert all(notice.removal is Removal.EVICTED for notice in world.removed())


@both
def test_a_prompt_stored_in_pieces_goes_from_its_end_too(policy: str) -> None:
    world = World(options(4, eviction_policy=policy))
    engine = world.attach()
    for end in range(1, 5):
        world.store(engine, "abcd"[:end], first=end - 1)
    world.store(engine, "xy")
    assert world.removed_letters("abcd") == "dc"
    assert world.num_hit(engine, "abcd") == 2


@both
def test_a_shared_beginning_stays_while_a_branch_does(policy: str) -> None:
    world, engine = filled(["abx", "aby"], 4, eviction_policy=policy)
    world.store(engine, "1")
    world.store(engine, "2")
    assert world.num_hit(engine, "ab") + world.num_hit(engine, "1") + world.num_hit(engine, "2") >= 3
    for notice in world.removed():
        assert notice.key in {world.reserve_event(engine, prompt, 2).keys[0] for prompt in ("abx", "aby")}


@both
def test_a_chunk_that_is_being_extended_keeps_its_beginning(policy: str) -> None:
    world, engine = filled(["a", "x"], 2, eviction_policy=policy)
    world.num_hit(engine, "x")
    answer = world.reserve(engine, "ab", first=1)
    assert answer.verdicts == (WRITE,)
    assert resident(world, engine, "ax") == "a", "the parent of a chunk that the call stores does not make room for it"


def test_a_call_does_not_evict_what_it_asks_about() -> None:
    world, engine = filled(["abc"], 3)
    assert world.store(engine, "abcd") == (RESIDENT, RESIDENT, RESIDENT, REFUSED)
    assert world.num_hit(engine, "abc") == 3


def test_scans_pass_through_arc_and_wash_lru_out() -> None:
    left = {}
    for policy in POLICY_NAMES:
        world, engine = filled(["hot"], 8, eviction_policy=policy)
        world.num_hit(engine, "hot")
        for number in range(40):
            world.store(engine, chr(200 + number))
        left[policy] = world.num_hit(engine, "hot")
    assert left == {"lru": 0, "arc": 3}


def test_arc_learns_from_what_it_evicted_too_early() -> None:
    world = World(options(8, eviction_policy="arc"))
    engine = world.attach()
    policy = world.cache._books.policy
    before = policy.recent_target_bytes  # type: ignore[attr-defined]
    assert before == 4 * CHUNK_BYTES
    world.store(engine, "x")
    for letter in "12345678":
        world.store(engine, letter)
    world.store(engine, "x")  # a ghost of RECENT: it was evicted without a second use
    assert policy.recent_target_bytes == before + CHUNK_BYTES  # type: ignore[attr-defined]
    for letter in "abcdefghijkl":
        world.store(engine, letter)
    assert world.num_hit(engine, "x") == 1, "stored twice is as good as looked up"


@both
def test_storing_and_clearing_for_ever_keeps_the_order_small(policy: str) -> None:
    world = World(options(4, eviction_policy=policy))
    engine = world.attach()
    for _ in range(300):
        world.store(engine, "abcd")
        world.effects(Clear())  # validate() after each step asserts the bound
    assert world.cache.statistics().free_bytes == 4 * CHUNK_BYTES


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="lru, arc"):
        Cache(options(1, eviction_policy="fifo"))


# ---- quota -----------------------------------------------------------------------------------------------------------


def test_a_tenant_at_its_quota_makes_room_from_its_own() -> None:
    world = World(options(8, quota_bytes={"small": 2 * CHUNK_BYTES}))
    engine = world.attach()
    world.store(engine, "xyz")
    world.store(engine, "ab", tenant="small")
    world.store(engine, "c", tenant="small")
    assert world.num_hit(engine, "xyz") == 3
    assert world.num_hit(engine, "ab", "small") == 1
    assert [notice.removal for notice in world.removed()] == [Removal.EVICTED_FOR_QUOTA]
    tenant = world.cache.statistics().tenants["small"]
    assert (tenant.used_bytes, tenant.quota_bytes) == (2 * CHUNK_BYTES, 2 * CHUNK_BYTES)


def test_what_a_tenant_has_leased_stays_and_counts() -> None:
    world = World(options(8, default_quota_bytes=2 * CHUNK_BYTES))
    engine = world.attach()
    world.store(engine, "ab", tenant="t")
    lease = world.lookup(engine, "ab", tenant="t").lease
    answer = world.reserve(engine, "c", tenant="t")
    assert answer.verdicts == (REFUSED,)
    assert isinstance(answer.refusal, QuotaExceeded)
    world.effects(Clear())
    assert world.reserve(engine, "c", tenant="t").verdicts == (REFUSED,), "cleared bytes count until they are free"
    world.release(engine, lease)
    assert world.reserve(engine, "c", tenant="t").verdicts == (WRITE,)


def test_a_quota_smaller_than_a_chunk_stores_nothing_and_evicts_nothing() -> None:
    world = World(options(8, quota_bytes={"tiny": CHUNK_BYTES - 1}))
    engine = world.attach()
    world.store(engine, "a")
    answer = world.reserve(engine, "b", tenant="tiny")
    assert isinstance(answer.refusal, QuotaExceeded)
    assert world.removed() == []
    assert world.cache.statistics().tenants["tiny"].tokens.refused_tokens == 4


def test_storing_again_after_an_eviction_counts_again() -> None:
    world = World(options(8, quota_bytes={"t": CHUNK_BYTES}))
    engine = world.attach()
    for prompt in ("a", "b", "a", "b"):
        world.store(engine, prompt, tenant="t")
        assert world.cache.statistics().tenants["t"].used_bytes == CHUNK_BYTES


def test_salted_tenants_share_nothing() -> None:
    world = World(options(8))
    engine = world.attach()
    world.store(engine, "ab", tenant="one")
    assert world.num_hit(engine, "ab", "two") == 0
    assert world.store(engine, "ab", tenant="two") == (WRITE, WRITE)


def test_idle_tenants_give_way_and_their_counts_stay() -> None:
    world = World(options(8, tenants_max=2))
    engine = world.attach()
    world.lookup(engine, "ab", tenant="gone")
    world.store(engine, "a", tenant="holds")
    world.store(engine, "a", tenant="new")
    statistics = world.cache.statistics()
    assert set(statistics.tenants) == {"holds", "new"}
    assert (statistics.folded.miss_tokens, statistics.miss_tokens) == (8, 8)


def test_past_the_limit_tenants_share_one_account_with_the_default_quota() -> None:
    """A tenant is a text that a client chooses: as many as there are chunks must not keep others out."""
    world = World(options(8, tenants_max=2, default_quota_bytes=2 * CHUNK_BYTES, quota_bytes={"named": CHUNK_BYTES}))
    engine = world.attach()
    for tenant in ("one", "two"):
        world.store(engine, "a", tenant=tenant)
    assert world.lookup(engine, "ab", tenant="three").num_tokens == 0
    statistics = world.cache.statistics()
    assert set(statistics.tenants) == {"one", "two"}, "a lookup needs no account"
    assert statistics.folded.miss_tokens == 8
    assert world.store(engine, "ab", tenant="three") == (WRITE, WRITE)
    assert world.store(engine, "a", tenant="four") == (WRITE,)
    assert world.num_hit(engine, "a", "four") == 1
    shared = world.cache.statistics().tenants[OVERFLOW_TENANT]
    assert (shared.used_bytes, shared.quota_bytes) == (2 * CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert world.removed_letters("ab", "three") == "b"
    assert world.removed()[-1].tenant == "three", "observers are told whose chunk it was"
    assert world.store(engine, "a", tenant="named") == (WRITE,)
    assert world.cache.statistics().tenants["named"].quota_bytes == CHUNK_BYTES
    assert world.call(Clear("three", None), Cleared).num_chunks == 1
    assert world.num_hit(engine, "a", "four") == 1


def test_overflow_ends_where_there_is_room_again() -> None:
    world = World(options(8, tenants_max=1, own_tenants=frozenset({"probe"})))
    engine = world.attach()
    world.store(engine, "a", tenant="one")
    world.store(engine, "a", tenant="two")
    assert set(world.cache.statistics().tenants) == {"one", OVERFLOW_TENANT}
    world.call(Clear(None, None), Cleared)
    world.store(engine, "a", tenant="three")
    world.store(engine, "a", tenant="probe")
    assert {"three", "probe"} <= set(world.cache.statistics().tenants)


# ---- chunks of different size ----------------------------------------------------------------------------------------


def two_sizes(num_chunks: int, **changes: object) -> tuple[World, ConnectionId, ConnectionId]:
    """A world with an engine of small chunks, and one of chunks twice as large."""
    world = World(options(num_chunks, **changes))
    return world, world.attach("small"), world.attach("big", (0, 1, 2, 3), layout=FOUR_SLABS, model="big")


@both
def test_a_large_chunk_takes_the_coldest_neighbours(policy: str) -> None:
    world, small, big = two_sizes(4, eviction_policy=policy)
    for letter in "wxyz":
        world.store(small, letter)
    world.num_hit(small, "w")
    assert world.store(big, "B", tenant="big") == (WRITE,)
    assert resident(world, small, "wxyz") == "wz"
    assert {notice.removal for notice in world.removed()} == {Removal.EVICTED_IN_WINDOW}
    assert world.num_hit(big, "B", "big") == 1


def test_a_large_chunk_goes_around_what_is_leased() -> None:
    world, small, big = two_sizes(5)
    for letter in "vwxyz":
        world.store(small, letter)
    lease = world.lookup(small, "w").lease
    assert world.store(big, "B", tenant="big") == (WRITE,)
    assert resident(world, small, "vwxyz") == "vwz"
    world.release(small, lease)


def test_a_large_chunk_is_refused_where_leases_leave_no_stretch() -> None:
    world, small, big = two_sizes(4)
    for letter in "wxyz":
        world.store(small, letter)
    leases = [world.lookup(small, letter).lease for letter in "wy"]
    answer = world.reserve(big, "B", tenant="big")
    assert isinstance(answer.refusal, CapacityExceeded)
    assert resident(world, small, "wxyz") == "wxyz", "what cannot fit evicts nothing"
    world.release(small, leases[0])
    assert world.store(big, "B", tenant="big") == (WRITE,)


def test_small_chunks_take_the_place_of_a_large_one() -> None:
    world, small, big = two_sizes(4)
    world.store(big, "AB", tenant="big")
    assert world.store(small, "xy") == (WRITE, WRITE)
    assert world.num_hit(big, "AB", "big") == 1
    assert len(world.removed()) == 1


def test_the_policy_is_asked_first_for_one_that_fits() -> None:
    world, small, big = two_sizes(4)
    world.store(small, "x")
    world.store(big, "B", tenant="big")
    world.store(small, "y")
    assert world.store(big, "C", tenant="big") == (WRITE,)
    assert [notice.removal for notice in world.removed()] == [Removal.EVICTED]
    assert resident(world, small, "xy") == "xy", "x is colder, but its going would not have been enough"
    world.store(small, "z")
    assert resident(world, small, "xy") == "y", "x was passed over, and is offered again"


def test_a_parent_lost_in_a_window_hides_its_children_until_it_is_back() -> None:
    world, small, big = two_sizes(4)
    world.store(small, "abcd")
    assert world.store(big, "B", tenant="big") == (WRITE,)
    lost = world.removed_letters("abcd")
    assert len(lost) == 2
    assert world.num_hit(small, "abcd") == "abcd".index(min(lost))
    removed = [notice for notice in world.notices if isinstance(notice, ChunkRemoved)]
    assert {notice.removal for notice in removed} == {Removal.EVICTED_IN_WINDOW}


def test_sizes_in_turn_never_strand_the_arena() -> None:
    world, small, big = two_sizes(6)
    for number in range(60):
        engine, tenant = (big, "big") if number % 3 == 0 else (small, "")
        assert world.store(engine, chr(300 + number), tenant=tenant) == (WRITE,)
    assert world.cache.statistics().free_bytes <= 2 * CHUNK_BYTES
