"""The two-phase store: masks that are true, slabs that are granted once, and reservations that always end."""

from __future__ import annotations

from itertools import pairwise

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import Aborted, ChunkStored, CommitOutcome, Committed, Detached, Removal, Reserved, Verdict
from antiphon.cache.events import Abort, Clear, Commit, Detach, Reserve
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import CapacityExceeded, ProtocolError, StaleHandle
from tests.cache.world import CHUNK_BYTES, World, namespace, options, prompt_keys

WRITE, RESIDENT, REFUSED = Verdict.WRITE, Verdict.RESIDENT, Verdict.REFUSED


def test_what_a_store_answers_as_resident_the_next_lookup_finds() -> None:
    world = World(options(4))
    engine = world.attach()
    assert world.store(engine, "abc") == (WRITE, WRITE, WRITE)
    assert world.store(engine, "abcd") == (RESIDENT, RESIDENT, RESIDENT, WRITE)
    assert world.num_hit(engine, "abcd") == 4


def test_nothing_is_read_before_the_commit() -> None:
    world = World(options(4))
    engine = world.attach()
    reserved = world.reserve(engine, "ab")
    assert world.num_hit(engine, "ab") == 0
    assert world.commit(engine, reserved.grants[:1]).outcomes == (CommitOutcome.READABLE,)
    assert world.num_hit(engine, "ab") == 1
    world.commit(engine, reserved.grants[1:])
    assert world.num_hit(engine, "ab") == 2


def test_a_grant_says_where_to_write() -> None:
    world = World(options(4), first_id=50)
    grants = world.reserve(world.attach(), "ab").grants
    assert [grant.region for grant in grants] == [
        RegionHandle(0, CHUNK_BYTES, 50),
        RegionHandle(CHUNK_BYTES, CHUNK_BYTES, 51),
    ]
    assert [grant.slabs for grant in grants] == [(0, 1), (0, 1)]


def test_a_chunk_is_readable_when_all_ranks_have_committed() -> None:
    world = World(options(4))
    rank0, rank1 = world.attach(slabs=(0,)), world.attach(slabs=(1,))
    first = world.reserve(rank0, "a")
    assert world.commit(rank0, first.grants).outcomes == (CommitOutcome.PARTIAL,)
    assert world.num_hit(rank0, "a") == 0
    assert world.reserve(rank0, "a").verdicts == (Verdict.PARTIAL,)
    second = world.reserve(rank1, "a")
    assert second.grants[0].region == first.grants[0].region, "both ranks write into one region"
    assert second.grants[0].slabs == (1,)
    assert world.commit(rank1, second.grants).outcomes == (CommitOutcome.READABLE,)
    assert world.num_hit(rank0, "a") == 1


def test_engines_of_different_tensor_parallel_size_complete_each_other() -> None:
    world = World(options(4))
    half, whole = world.attach("two ranks", slabs=(0,)), world.attach("one rank", slabs=(0, 1))
    grants = world.reserve(half, "a").grants
    other = world.reserve(whole, "a")
    assert other.grants[0].slabs == (1,), "the slab that nobody writes"
    world.commit(half, grants)
    assert world.commit(whole, other.grants).outcomes == (CommitOutcome.READABLE,)


def test_the_second_writer_is_told_that_the_chunk_is_being_written() -> None:
    world = World(options(4))
    first, second = world.attach("one"), world.attach("two")
    grants = world.reserve(first, "ab").grants
    answer = world.reserve(second, "abc")
    assert answer.verdicts == (Verdict.BEING_WRITTEN, Verdict.BEING_WRITTEN, WRITE)
    assert world.reserve(first, "a").verdicts == (Verdict.BEING_WRITTEN,)
    world.commit(first, grants)
    assert world.reserve(second, "ab").verdicts == (RESIDENT, RESIDENT)


def test_a_writer_is_granted_what_another_gave_up_after_its_own_commit() -> None:
    world = World(options(4))
    half, whole = world.attach("half", slabs=(0,)), world.attach("whole", slabs=(0, 1))
    given_up = world.reserve(half, "a").grants[0].region
    own = world.reserve(whole, "a").grants
    world.call(Abort(half, (given_up,)), Aborted)
    assert world.reserve(whole, "a").verdicts == (Verdict.BEING_WRITTEN,)
    world.commit(whole, own)
    rest = world.reserve(whole, "a")
    assert rest.grants[0].slabs == (0,)
    assert world.commit(whole, rest.grants).outcomes == (CommitOutcome.READABLE,)


def test_an_abort_frees_the_reservation_at_once() -> None:
    world = World(options(1))
    engine = world.attach()
    grants = world.reserve(engine, "a").grants
    assert world.reserve(engine, "b").verdicts == (REFUSED,)
    assert world.call(Abort(engine, (grants[0].region,)), Aborted).num_regions == 1
    assert world.reserve(engine, "b").verdicts == (WRITE,)


def test_an_abort_keeps_what_other_ranks_committed() -> None:
    world = World(options(1))
    rank0, rank1 = world.attach(slabs=(0,)), world.attach(slabs=(1,))
    world.store(rank0, "a")
    grants = world.reserve(rank1, "a").grants
    world.call(Abort(rank1, (grants[0].region,)), Aborted)
    assert world.store(rank1, "a") == (WRITE,)
    assert world.num_hit(rank0, "a") == 1


def test_a_dead_writers_bytes_are_not_given_out_before_the_quarantine_is_over() -> None:
    world = World(options(1))
    dying, other = world.attach("dying"), world.attach("other")
    world.reserve(dying, "a")
    assert world.call(Detach(dying), Detached).num_reservations == 1
    assert world.removed()[-1].removal is Removal.ABANDONED
    answer = world.reserve(other, "a")
    assert answer.verdicts == (REFUSED,)
    assert isinstance(answer.refusal, CapacityExceeded)
    world.tick(0.9)
    assert world.reserve(other, "a").verdicts == (REFUSED,)
    world.tick(0.2)
    assert world.reserve(other, "a").verdicts == (WRITE,)


def test_regions_are_those_that_a_chunk_holds_also_out_of_the_index() -> None:
    world = World(options(4))
    writer, other = world.attach(), world.attach("other")
    (grant,) = world.reserve(writer, "a").grants
    world.store(other, "b")
    assert len(world.cache.regions()) == 2
    assert grant.region in world.cache.regions()
    world.detach(writer)
    assert grant.region in world.cache.regions()
    world.tick(1.0)
    assert grant.region not in world.cache.regions()
    assert len(world.cache.regions()) == 1


def test_after_a_writers_death_the_chunk_can_be_stored_elsewhere_at_once() -> None:
    world = World(options(2))
    dying, other = world.attach("dying"), world.attach("other")
    old = world.reserve(dying, "a").grants[0].region
    world.detach(dying)
    assert world.store(other, "a") == (WRITE,)
    assert world.lookup(other, "a").regions[0].offset_bytes != old.offset_bytes


def test_a_rank_that_outlives_another_commits_into_nothing() -> None:
    world = World(options(2))
    rank0, rank1 = world.attach(slabs=(0,)), world.attach(slabs=(1,))
    world.reserve(rank0, "a")
    grants = world.reserve(rank1, "a").grants
    world.detach(rank0)
    assert world.commit(rank1, grants).outcomes == (CommitOutcome.DROPPED,)
    assert world.num_hit(rank1, "a") == 0
    world.tick(1.0)
    assert world.cache.statistics().free_bytes == 2 * CHUNK_BYTES


def test_a_chunk_cleared_while_it_is_written_is_dropped() -> None:
    world = World(options(1))
    engine = world.attach()
    grants = world.reserve(engine, "a").grants
    world.effects(Clear())
    assert world.reserve(engine, "a").verdicts == (REFUSED,), "the writer still writes there"
    assert world.commit(engine, grants).outcomes == (CommitOutcome.DROPPED,)
    assert world.store(engine, "a") == (WRITE,)


def test_stale_handles_are_refused_and_change_nothing() -> None:
    world = World(options(2))
    engine, other = world.attach("one"), world.attach("two")
    old = world.reserve(engine, "a").grants[0].region
    world.call(Abort(engine, (old,)), Aborted)
    new = world.reserve(engine, "a").grants[0].region
    assert (new.offset_bytes, new.generation) == (old.offset_bytes, old.generation + 1)
    message = world.assert_refused(Commit(engine, (new, old)), StaleHandle)
    assert f"generation {old.generation}" in message
    world.assert_refused(Abort(engine, (old,)), StaleHandle)
    world.assert_refused(Commit(other, (new,)), StaleHandle)
    world.assert_refused(Commit(engine, (new, new)), StaleHandle)
    moved = RegionHandle(new.offset_bytes + CHUNK_BYTES, CHUNK_BYTES, new.generation)
    world.assert_refused(Commit(engine, (moved,)), StaleHandle)
    assert world.call(Commit(engine, (new,)), Committed).outcomes == (CommitOutcome.READABLE,)
    world.assert_refused(Commit(engine, (new,)), StaleHandle)


def test_handles_of_an_earlier_life_are_refused() -> None:
    before, after = World(options(1), first_id=1000), World(options(1), first_id=5_000_000)
    old = before.reserve(before.attach(), "a").grants[0].region
    engine = after.attach()
    after.reserve(engine, "a")
    after.assert_refused(Commit(engine, (old,)), StaleHandle)


def test_after_a_refused_chunk_no_more_room_is_made() -> None:
    world = World(options(3))
    engine, other = world.attach("one"), world.attach("two")
    world.store(engine, "abc")
    lease = world.lookup(engine, "ab").lease
    answer = world.reserve(other, "xyz")
    assert answer.verdicts == (WRITE, REFUSED, REFUSED)
    assert isinstance(answer.refusal, CapacityExceeded)
    assert world.removed_letters("abc") == "c"
    world.release(engine, lease)
    world.commit(other, answer.grants)
    assert world.store(other, "xyz") == (RESIDENT, WRITE, WRITE)


def test_a_chunk_larger_than_the_arena_is_refused() -> None:
    world = World(options(1))
    large = ChunkLayout(num_slabs=1, slab_bytes=2 * CHUNK_BYTES)
    answer = world.reserve(world.attach(slabs=(0,), layout=large), "a")
    assert answer.verdicts == (REFUSED,)
    assert isinstance(answer.refusal, CapacityExceeded)


def test_a_writer_that_never_commits_fills_only_its_share() -> None:
    world = World(options(4, reserved_share_max=0.5))
    greedy, other = world.attach("greedy"), world.attach("other")
    answer = world.reserve(greedy, "abcd")
    assert answer.verdicts == (WRITE, WRITE, REFUSED, REFUSED)
    assert "commit or abort" in str(answer.refusal)
    assert world.reserve(other, "xy").verdicts == (WRITE, WRITE)


def test_one_who_writes_no_slabs_stores_nothing() -> None:
    world = World(options(4))
    world.assert_refused(world.reserve_event(world.attach(slabs=()), "a"), ProtocolError)


def test_a_call_with_too_many_keys_is_refused() -> None:
    world = World(options(4, keys_per_call_max=2))
    engine = world.attach()
    assert "at most 2" in world.assert_refused(world.reserve_event(engine, "abc"), ProtocolError)
    assert world.reserve(engine, "ab").verdicts == (WRITE, WRITE)


def test_a_store_in_pieces_names_its_parent() -> None:
    world = World(options(4))
    engine = world.attach()
    world.store(engine, "ab")
    world.store(engine, "abcd", first=2)
    stored = [notice for notice in world.notices if isinstance(notice, ChunkStored)]
    keys = prompt_keys("abcd")
    assert [(notice.parent, notice.key) for notice in stored] == [(None, keys[0]), *pairwise(keys)]
    assert world.num_hit(engine, "abcd") == 4


def test_an_empty_call_is_answered() -> None:
    world = World(options(1))
    engine = world.attach()
    assert world.call(Reserve(engine, namespace(), "", None, ()), Reserved) == Reserved((), (), None)
    assert world.call(Commit(engine, ()), Committed).outcomes == ()
    assert world.call(Abort(engine, ()), Aborted).num_regions == 0
    assert world.lookup(engine, "").num_tokens == 0
