"""Leases: what a lookup reports stays until its owner, or the death of its engine and a quarantine, ends it."""

from __future__ import annotations

from antiphon.cache.effects import (
    ChunkStored,
    Detached,
    Found,
    LeaseAlarm,
    LeaseNoted,
    ReservationAlarm,
    Ticked,
    Verdict,
)
from antiphon.cache.events import Clear, CopyBegan, CopyEnded, Detach, LeaseId, Lookup, Release, Tick
from antiphon.cache.states import LeaseState
from antiphon.core.errors import LeaseUnknown, NotOwner, ProtocolError
from tests.cache.world import CHUNK_SIZE_TOKENS, World, namespace, options, prompt_keys


def full(num_chunks: int = 2, **changes: object) -> tuple[World, str]:
    """A world whose arena is filled by one prompt, and that prompt."""
    world = World(options(num_chunks, **changes))
    prompt = "abcdefgh"[:num_chunks]
    writer = world.attach("writer")
    world.store(writer, prompt)
    return world, prompt


def test_a_lookup_reports_and_leases_the_contiguous_prefix() -> None:
    world, _ = full(3)
    reader = world.attach("reader")
    found = world.lookup(reader, "abx")
    assert (found.num_tokens, len(found.regions)) == (2 * CHUNK_SIZE_TOKENS, 2)
    assert world.lookup(reader, "x") == Found(None, (), 0, 0)
    assert world.cache.statistics().num_leases[LeaseState.HELD] == 1


def test_a_hole_ends_the_prefix() -> None:
    world = World(options(4))
    writer = world.attach()
    world.store(writer, "abc", first=1)
    assert world.num_hit(writer, "abc") == 0
    assert world.store(writer, "a") == (Verdict.WRITE,)
    assert world.num_hit(writer, "abc") == 3


def test_leased_chunks_are_not_evicted() -> None:
    world, prompt = full()
    reader = world.attach("reader")
    lease = world.lookup(reader, prompt).lease
    world.tick(3600.0)
    assert world.store(reader, "xy") == (Verdict.REFUSED, Verdict.REFUSED)
    world.release(reader, lease)
    assert world.store(reader, "xy") == (Verdict.WRITE, Verdict.WRITE)


def test_a_release_waits_for_an_announced_copy() -> None:
    world, prompt = full()
    scheduler, worker = world.attach("reader", slabs=()), world.attach("reader")
    lease = world.lookup(scheduler, prompt).lease
    assert lease is not None
    assert world.call(CopyBegan(worker, lease), LeaseNoted).state is LeaseState.HELD
    assert world.release(scheduler, lease) == LeaseNoted(lease, LeaseState.RELEASING)
    assert world.store(worker, "x") == (Verdict.REFUSED,)
    assert world.call(CopyEnded(worker, lease), LeaseNoted).state is LeaseState.ENDED
    assert world.store(worker, "x") == (Verdict.WRITE,)


def test_no_copy_may_begin_on_a_lease_that_is_released_or_gone() -> None:
    world, prompt = full()
    scheduler, worker = world.attach("reader", slabs=()), world.attach("reader")
    lease = world.lookup(scheduler, prompt).lease
    assert lease is not None
    world.call(CopyBegan(worker, lease), LeaseNoted)
    world.release(scheduler, lease)
    world.assert_refused(CopyBegan(worker, lease), LeaseUnknown)
    world.call(CopyEnded(worker, lease), LeaseNoted)
    world.assert_refused(CopyBegan(worker, lease), LeaseUnknown)
    world.assert_refused(CopyEnded(worker, lease), LeaseUnknown)


def test_a_copy_that_was_not_announced_cannot_end() -> None:
    world, prompt = full()
    reader = world.attach("reader")
    lease = world.lookup(reader, prompt).lease
    assert lease is not None
    world.assert_refused(CopyEnded(reader, lease), LeaseUnknown)


def test_only_the_owner_releases() -> None:
    world, prompt = full()
    reader, stranger = world.attach("reader"), world.attach("stranger")
    reborn = world.attach("reader", incarnation="2")
    lease = world.lookup(reader, prompt, request="r1").lease
    assert lease is not None
    assert "reader (1)" in world.assert_refused(Release(stranger, "r1", lease), NotOwner)
    world.assert_refused(Release(reborn, "r1", lease), NotOwner)
    world.assert_refused(Release(reader, "r2", lease), NotOwner)
    world.assert_refused(CopyBegan(stranger, lease), NotOwner)
    world.assert_refused(Release(reader, "r1", LeaseId(lease + 1)), LeaseUnknown)
    world.release(reader, lease, "r1")
    world.assert_refused(Release(reader, "r1", lease), LeaseUnknown)


def test_releasing_twice_takes_nothing_from_another_lease() -> None:
    world, prompt = full()
    reader = world.attach("reader")
    first, second = world.lookup(reader, prompt, "r1").lease, world.lookup(reader, prompt, "r2").lease
    assert first is not None
    world.release(reader, first, "r1")
    world.assert_refused(Release(reader, "r1", first), LeaseUnknown)
    assert world.store(reader, "xy") == (Verdict.REFUSED, Verdict.REFUSED)
    world.release(reader, second, "r2")
    assert world.store(reader, "xy") == (Verdict.WRITE, Verdict.WRITE)


def test_the_death_of_an_engine_ends_its_leases_after_the_quarantine() -> None:
    world, prompt = full()
    reader, other = world.attach("reader"), world.attach("other")
    world.lookup(reader, prompt)
    assert world.call(Detach(reader), Detached).num_leases_quarantined == 1
    assert world.num_hit(other, prompt) == 2, "others go on reading"
    world.tick(0.9)
    assert world.store(other, "x") == (Verdict.REFUSED,)
    world.tick(0.2)
    assert world.store(other, "x") == (Verdict.WRITE,)
    assert world.cache.statistics().num_engines == 2, "the dead engine is forgotten"


def test_workers_keep_a_lease_whose_scheduler_is_gone() -> None:
    world, prompt = full()
    scheduler, worker = world.attach("reader", slabs=()), world.attach("reader")
    lease = world.lookup(scheduler, prompt).lease
    assert lease is not None
    world.detach(scheduler)
    world.tick(60.0)
    assert world.cache.statistics().num_leases[LeaseState.ORPHANED] == 1
    assert world.store(worker, "x") == (Verdict.REFUSED,)
    again = world.attach("reader", slabs=())
    assert world.release(again, lease) == LeaseNoted(lease, LeaseState.ENDED)
    assert world.store(worker, "x") == (Verdict.WRITE,)


def test_the_death_of_a_copying_worker_holds_the_bytes_for_a_quarantine() -> None:
    world, prompt = full()
    scheduler, worker = world.attach("reader", slabs=()), world.attach("reader")
    lease = world.lookup(scheduler, prompt).lease
    assert lease is not None
    world.call(CopyBegan(worker, lease), LeaseNoted)
    world.release(scheduler, lease)
    assert world.call(Detach(worker), Detached).num_leases_quarantined == 1
    other = world.attach("other")
    assert world.store(other, "x") == (Verdict.REFUSED,)
    world.tick(1.0)
    assert world.store(other, "x") == (Verdict.WRITE,)


def test_a_release_right_after_a_copiers_death_waits_too() -> None:
    world, prompt = full()
    scheduler, worker = world.attach("reader", slabs=()), world.attach("reader")
    lease = world.lookup(scheduler, prompt).lease
    assert lease is not None
    world.call(CopyBegan(worker, lease), LeaseNoted)
    world.detach(worker)
    world.tick(0.5)
    assert world.release(scheduler, lease) == LeaseNoted(lease, LeaseState.QUARANTINED)
    world.assert_refused(Release(scheduler, "r", lease), LeaseUnknown)
    world.tick(0.5)
    assert sum(world.cache.statistics().num_leases.values()) == 0


def test_an_engine_that_comes_back_in_time_does_not_get_its_leases_back() -> None:
    world, prompt = full()
    reader = world.attach("reader")
    lease = world.lookup(reader, prompt).lease
    assert lease is not None
    world.detach(reader)
    again = world.attach("reader")
    world.assert_refused(Release(again, "r", lease), LeaseUnknown)
    world.tick(1.0)
    assert world.store(again, "x") == (Verdict.WRITE,)
    assert world.cache.statistics().leased_bytes == 0


def test_age_raises_one_alarm_and_ends_nothing() -> None:
    world, prompt = full(lease_alarm_s=10.0, reservation_alarm_s=20.0)
    reader = world.attach("reader")
    lease = world.lookup(reader, prompt, "slow").lease
    assert world.cache.next_deadline_s == 10.0
    assert world.tick(9.9) == [Ticked(10.0)]
    _, alarm = world.tick(0.2)
    assert isinstance(alarm, LeaseAlarm)
    assert (alarm.lease, alarm.request, alarm.engine.name, alarm.state) == (lease, "slow", "reader", LeaseState.HELD)
    assert world.tick(100.0) == [Ticked(None)]
    assert world.store(reader, "x") == (Verdict.REFUSED,)
    world.release(reader, lease, "slow")
    assert world.cache.statistics().counters.num_lease_alarms == 1


def test_a_reservation_that_is_not_committed_raises_one_alarm() -> None:
    world = World(options(2, reservation_alarm_s=5.0))
    writer = world.attach("writer")
    grants = world.reserve(writer, "a").grants
    world.tick(5.0)
    alarms = [notice for notice in world.notices if isinstance(notice, ReservationAlarm)]
    assert [(alarm.connection, alarm.key, alarm.age_s) for alarm in alarms] == [(writer, prompt_keys("a")[0], 5.0)]
    world.tick(50.0)
    world.commit(writer, grants)
    assert world.num_hit(writer, "a") == 1


def test_leased_bytes_of_an_engine_are_capped() -> None:
    world, _ = full(4, leased_share_max=0.5)
    reader, other = world.attach("reader"), world.attach("other")
    found = world.lookup(reader, "abcd", "r1")
    assert (len(found.regions), found.num_chunks_capped) == (2, 2)
    again = world.lookup(reader, "abcd", "r2")
    assert (len(again.regions), again.num_chunks_capped) == (2, 2), "what is leased already costs nothing more"
    assert len(world.lookup(other, "abcd").regions) == 2, "the cap is each engine's own"
    statistics = world.cache.statistics()
    assert statistics.counters.num_capped_lookups == 3
    assert statistics.leased_bytes == statistics.arena_bytes


def test_tokens_past_the_cap_count_as_missed() -> None:
    world, _ = full(4, leased_share_max=0.25)
    reader = world.attach("reader")
    world.lookup(reader, "abcd")
    counts = world.cache.statistics().tenants[""].tokens
    assert (counts.hit_tokens, counts.miss_tokens) == (CHUNK_SIZE_TOKENS, 3 * CHUNK_SIZE_TOKENS)


def test_a_cleared_chunk_keeps_its_bytes_until_the_lease_ends() -> None:
    world, prompt = full()
    reader = world.attach("reader")
    lease = world.lookup(reader, prompt).lease
    world.effects(Clear())
    assert world.num_hit(reader, prompt) == 0
    assert world.store(reader, "x") == (Verdict.REFUSED,)
    world.release(reader, lease)
    assert world.store(reader, "xy") == (Verdict.WRITE, Verdict.WRITE)


def test_a_lookup_with_too_many_keys_is_refused() -> None:
    world = World(options(2, keys_per_call_max=2))
    reader = world.attach()
    world.assert_refused(Lookup(reader, "r", namespace(), "", prompt_keys("abc")), ProtocolError)


def test_read_after_write_a_thousand_times() -> None:
    world = World(options(8))
    engine = world.attach()
    for number in range(1000):
        prompt = chr(1000 + number) + "ab"
        reserved = world.reserve(engine, prompt)
        world.commit(engine, reserved.grants)
        assert world.num_hit(engine, prompt) == 3
    assert sum(isinstance(notice, ChunkStored) for notice in world.notices) == 3000
    assert isinstance(world.reply(Tick()), Ticked)


def test_an_engine_that_never_releases_gets_a_limited_number_of_leases() -> None:
    world, prompt = full(2, leases_per_engine_max=3)
    reader, other = world.attach("reader"), world.attach("other")
    leases = [world.lookup(reader, prompt).lease for _ in range(3)]
    assert world.lookup(reader, prompt) == Found(None, (), 0, 2)
    assert world.lookup(other, prompt).lease is not None
    world.release(reader, leases[0])
    assert world.lookup(reader, prompt).lease is not None
