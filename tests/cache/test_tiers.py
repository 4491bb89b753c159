"""The tier plan: what is asked of which tier when, and what a lookup that waits gets. No store, no thread, no time."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cache.breaker import Breaker, BreakerState
from antiphon.cache.effects import (
    Found,
    Notice,
    Onboarded,
    Onboarding,
    Refused,
    Removal,
    TierChanged,
    TierNoted,
    Verdict,
)
from antiphon.cache.events import Clear, ConnectionId, Lookup, TierDone
from antiphon.cache.machine import Cache
from antiphon.cache.tier_jobs import JobKind, Outcome, TierJob
from antiphon.cache.tier_key import TierKey, meaning_of, selection_of
from antiphon.cache.tier_options import TierOptions, TiersOptions
from antiphon.core.errors import ProtocolError
from tests.cache.world import CHUNK_BYTES, CHUNK_SIZE_TOKENS, TWO_SLABS, World, namespace, options, prompt_keys

THROUGH = TierOptions("fast", timeout_s=1.0, retry_min_s=0.5, retry_max_s=2.0)


class TierWorld(World):
    """A cache with tiers: jobs wait in ``jobs`` until the test ends them."""

    def __init__(self, num_chunks: int, *tiers: TierOptions, lists: bool = True, **changes: Any) -> None:
        cache_options = options(num_chunks)
        super().__init__(cache_options)
        self.cache = Cache(cache_options, 1, tiers=TiersOptions(tiers or (THROUGH,), **changes))
        self.jobs: list[TierJob] = []
        self.stored: list[set[TierKey]] = [set() for _ in tiers or (THROUGH,)]
        self.tick(0.0)
        if lists:
            self.end_all(JobKind.LIST, keys=())

    def effects(self, event: Any) -> list[Any]:
        found = super().effects(event)
        self.jobs += [notice for notice in found if isinstance(notice, TierJob)]
        return found

    def of(self, kind: JobKind, tier: int = 0) -> list[TierJob]:
        return [job for job in self.jobs if job.kind is kind and job.tier == tier]

    def end(self, job: TierJob, outcome: Outcome = Outcome.DONE, **answer: Any) -> list[Notice]:
        self.jobs.remove(job)
        reply, *notices = self.effects(TierDone(job.id, outcome, **answer))
        assert isinstance(reply, TierNoted), reply
        return notices

    def end_all(self, kind: JobKind, outcome: Outcome = Outcome.DONE, **answer: Any) -> list[Notice]:
        """Ends jobs of that kind until none is left, those too that begin meanwhile."""
        notices: list[Notice] = []
        while found := [job for job in self.jobs if job.kind is kind]:
            notices += self.end(found[0], outcome, **answer)
        return notices

    def wait(self, connection: ConnectionId, text: str, wait_s: float = 9.0, rate: float = 0.0, **names: str) -> Any:
        tenant = names.get("tenant", "")
        keys = prompt_keys(text, tenant)
        return self.reply(Lookup(connection, "r", namespace(tenant), tenant, keys, wait_s, rate))

    def found(self, notices: list[Notice]) -> Found:
        (notice,) = [notice for notice in notices if isinstance(notice, Onboarded)]
        return notice.found

    def num_of(self, found: Found) -> int:
        return found.num_tokens // CHUNK_SIZE_TOKENS

    @property
    def tier(self) -> Any:
        return self.cache.tiers()[0]

    def in_tier(self, connection: ConnectionId, text: str) -> None:
        """Stores and publishes a prompt, then has the arena forget it by storing others."""
        self.store(connection, text)
        self.end_all(JobKind.PUBLISH)
        num_chunks = self.options.arena_bytes // CHUNK_BYTES
        other = "".join(chr(ord("A") + number) for number in range(num_chunks))
        self.store(connection, other)
        for job in self.of(JobKind.PUBLISH):
            self.end(job, Outcome.FULL)
        assert self.num_hit(connection, text) == 0


def key_of(text: str, tenant: str = "") -> TierKey:
    return meaning_of(namespace(tenant), tenant, "demo", TWO_SLABS).key_of(prompt_keys(text, tenant)[-1])


# ---- publishing ------------------------------------------------------------------------------------------------------


def test_a_chunk_is_published_when_its_last_slab_is_committed_and_not_before() -> None:
    world = TierWorld(8)
    first, second = world.attach(slabs=(0,)), world.attach(slabs=(1,))
    reserved = world.reserve(first, "a")
    assert world.of(JobKind.PUBLISH) == []
    world.commit(first, reserved.grants)
    assert world.of(JobKind.PUBLISH) == []
    world.store(second, "a")
    (job,) = world.of(JobKind.PUBLISH)
    assert (job.keys, job.region, job.num_bytes) == ((key_of("a"),), reserved.grants[0].region, CHUNK_BYTES)
    world.end(job)
    assert (world.tier.num_known, world.tier.queued_bytes, world.tier.counts.num_published) == (1, 0, 1)


def test_what_is_being_published_is_not_evicted() -> None:
    world = TierWorld(2)
    writer = world.attach()
    world.store(writer, "ab")
    jobs = world.of(JobKind.PUBLISH)
    assert len(jobs) == 2
    world.reserve(writer, "xy")
    assert world.removed() == []
    world.end(jobs[1])
    world.store(writer, "x")
    assert world.removed_letters("ab") == "b"


def test_the_queue_is_bounded_and_what_does_not_fit_is_counted() -> None:
    tier = dataclasses.replace(THROUGH, publishes_max=1, queue_bytes_max=2 * CHUNK_BYTES)
    world = TierWorld(8, tier)
    world.store(world.attach(), "abcd")
    assert (world.tier.queued_bytes, world.tier.counts.num_refused) == (2 * CHUNK_BYTES, 2)
    world.end_all(JobKind.PUBLISH)
    assert (world.tier.counts.num_published, world.tier.queued_bytes) == (2, 0)


def test_back_publishes_what_was_stored_a_while_ago() -> None:
    world = TierWorld(8, dataclasses.replace(THROUGH, store="back", flush_after_s=5.0))
    world.store(world.attach(), "ab")
    assert world.of(JobKind.PUBLISH) == []
    world.tick(4.9)
    assert world.of(JobKind.PUBLISH) == []
    assert world.cache.next_deadline_s == 5.0
    world.tick(0.1)
    assert len(world.of(JobKind.PUBLISH)) == 2


def test_back_publishes_what_is_to_be_evicted_and_evicts_another() -> None:
    world = TierWorld(3, dataclasses.replace(THROUGH, store="back", flush_after_s=99.0), dirty_free_share=0.0)
    writer = world.attach()
    world.store(writer, "a")
    world.tick(99.0)
    world.end_all(JobKind.PUBLISH)  # clean
    world.store(writer, "b")
    world.store(writer, "c")
    world.lookup(writer, "a")
    world.store(writer, "d")
    assert [job.keys for job in world.of(JobKind.PUBLISH)] == [(key_of("b"),), (key_of("c"),)]
    assert world.removed() == []  # nothing was left to evict: what is being published stays
    world.end_all(JobKind.PUBLISH)
    world.store(writer, "d")
    assert [removed.removal for removed in world.removed()] == [Removal.EVICTED]
    assert world.tier.counts.num_lost == 0


def test_a_private_tenant_is_never_published_nor_waited_for() -> None:
    world = TierWorld(8, dataclasses.replace(THROUGH, is_shared=True), private_tenants=frozenset({"secret"}))
    writer = world.attach()
    world.store(writer, "a", tenant="secret")
    assert world.jobs == []
    assert isinstance(world.wait(writer, "z", tenant="secret"), Found)


def test_a_full_tier_is_left_alone_for_a_while() -> None:
    world = TierWorld(8, dataclasses.replace(THROUGH, publishes_max=1, full_pause_s=2.0))
    world.store(world.attach(), "ab")
    world.end(world.of(JobKind.PUBLISH)[0], Outcome.FULL)
    assert world.of(JobKind.PUBLISH) == []
    assert world.tier.breaker is BreakerState.CLOSED
    world.tick(2.0)
    assert [job.keys for job in world.of(JobKind.PUBLISH)] == [(key_of("ab"),)]


def test_a_tier_that_answers_and_refuses_what_is_written_is_read() -> None:
    """As an object store whose disk is full may do."""
    world = TierWorld(4, dataclasses.replace(THROUGH, publishes_max=1, retry_min_s=0.5, retry_max_s=2.0))
    writer = world.attach()
    world.in_tier(writer, "a")
    world.store(writer, "b")

    def refuse() -> None:
        (job,) = world.of(JobKind.PUBLISH)
        world.end(job, Outcome.FAILED)

    world.tick(2.0)
    refuse()
    assert world.tier.breaker is BreakerState.OPEN  # it may be gone
    world.tick(0.5)
    world.end_all(JobKind.PROBE)
    assert world.tier.breaker is BreakerState.CLOSED
    refuse()
    assert (world.tier.breaker, world.tier.is_paused, world.tier.num_opened) == (BreakerState.CLOSED, True, 1)
    assert world.tier.reason
    world.wait(writer, "a")
    world.end_all(JobKind.FETCH)
    assert world.num_hit(writer, "a") == 1
    assert world.of(JobKind.PUBLISH) == []
    world.tick(2.0)
    world.end_all(JobKind.PUBLISH)
    assert (world.tier.is_paused, world.tier.reason) == (False, "")
    world.store(writer, "c")
    refuse()
    # What was published since is no sign of it any more.
    assert (world.tier.breaker, world.tier.num_opened) == (BreakerState.OPEN, 2)


def test_what_is_to_be_evicted_does_not_wait_for_a_tier_that_has_no_room() -> None:
    back = dataclasses.replace(THROUGH, store="back", flush_after_s=99.0, full_pause_s=2.0)
    world = TierWorld(2, back, dirty_free_share=0.0)
    writer = world.attach()
    world.store(writer, "a")
    world.tick(99.0)
    world.end(world.of(JobKind.PUBLISH)[0], Outcome.FULL)
    world.store(writer, "b")
    assert world.store(writer, "c") == (Verdict.WRITE,)
    assert world.of(JobKind.PUBLISH) == []
    world.tick(2.0)
    world.reserve(writer, "d")
    assert len(world.of(JobKind.PUBLISH)) == 2, "now both are saved first"


def test_a_tier_that_leaves_a_write_unanswered_is_left_alone_each_time() -> None:
    world = TierWorld(8, dataclasses.replace(THROUGH, publishes_max=1, timeout_s=1.0, retry_min_s=0.5))
    world.store(world.attach(), "abc")
    for number in range(1, 3):
        world.tick(1.0)
        assert (world.tier.breaker, world.tier.num_opened) == (BreakerState.OPEN, number)
        world.end_all(JobKind.PUBLISH)
        world.tick(0.5)
        world.end_all(JobKind.PROBE)
        assert world.tier.breaker is BreakerState.CLOSED


# ---- onboarding ------------------------------------------------------------------------------------------------------


def test_a_hit_in_the_arena_is_answered_at_once_and_asks_nobody() -> None:
    world = TierWorld(8, dataclasses.replace(THROUGH, is_shared=True))
    writer = world.attach()
    world.store(writer, "ab")
    world.end_all(JobKind.PUBLISH)
    assert world.num_of(world.wait(writer, "ab")) == 2
    assert world.jobs == []


def test_a_miss_that_no_tier_has_is_answered_at_once() -> None:
    world = TierWorld(8)
    writer = world.attach()
    assert isinstance(world.wait(writer, "zz"), Found)
    assert world.jobs == []


def test_what_a_tier_has_is_fetched_and_leased() -> None:
    world = TierWorld(4)
    writer = world.attach()
    world.in_tier(writer, "ab")
    first = world.wait(writer, "abz")
    assert isinstance(first, Onboarding)
    assert (first.num_tokens, first.num_tokens_max, first.wait_s) == (0, 2 * CHUNK_SIZE_TOKENS, 5.0)
    assert [job.keys for job in world.of(JobKind.FETCH)] == [(key_of("a"),), (key_of("ab"),)]
    assert world.num_hit(writer, "ab") == 0  # not before it was checked
    later, sooner = world.of(JobKind.FETCH)
    world.end(sooner)
    assert world.num_hit(writer, "ab") == 0
    found = world.found(world.end(later))
    assert (world.num_of(found), found.fetched) == (2, (("l2", (0, 1)),))
    world.release(writer, found.lease)
    assert world.num_hit(writer, "ab") == 2  # it stays


def test_a_caller_that_does_not_wait_is_answered_from_the_arena() -> None:
    world = TierWorld(4)
    writer = world.attach()
    world.in_tier(writer, "ab")
    assert isinstance(world.wait(writer, "ab", wait_s=0.0), Found)
    assert world.of(JobKind.FETCH) == []


@pytest.mark.parametrize("outcome", [Outcome.CORRUPT, Outcome.MISSING, Outcome.FAILED])
def test_a_fetch_that_fails_is_a_miss_and_leaves_nothing(outcome: Outcome) -> None:
    world = TierWorld(4)
    writer = world.attach()
    world.in_tier(writer, "ab")
    world.wait(writer, "ab")
    found = world.found(world.end(world.of(JobKind.FETCH)[0], outcome))
    assert found.lease is None
    world.end_all(JobKind.FETCH)
    assert world.num_hit(writer, "ab") == 0
    assert (world.tier.breaker is BreakerState.OPEN) == (outcome is Outcome.FAILED)
    assert world.cache.statistics().reserved_bytes == 0


def test_at_the_deadline_the_piece_that_is_there_is_the_hit() -> None:
    world = TierWorld(6)
    writer = world.attach()
    world.in_tier(writer, "abc")
    world.wait(writer, "abc", wait_s=0.5)
    world.end(world.of(JobKind.FETCH)[0])
    notices = world.tick(0.5)
    found = world.found(notices)
    assert (world.num_of(found), found.fetched) == (1, (("l2", (0,)),))
    world.release(writer, found.lease)
    world.end_all(JobKind.FETCH)
    assert world.num_hit(writer, "abc") == 3  # what was under way is kept


def test_the_wait_is_shorter_than_computing_would_take() -> None:
    world = TierWorld(4)
    writer = world.attach()
    world.in_tier(writer, "ab")
    first = world.wait(writer, "ab", rate=100.0)
    assert first.wait_s == pytest.approx(0.8 * 2 * CHUNK_SIZE_TOKENS / 100.0)


def test_two_lookups_wait_for_one_fetch() -> None:
    world = TierWorld(4)
    writer = world.attach()
    world.in_tier(writer, "a")
    world.wait(writer, "a")
    world.wait(writer, "ab")
    (job,) = world.of(JobKind.FETCH)
    found = [notice.found for notice in world.end(job) if isinstance(notice, Onboarded)]
    assert [world.num_of(each) for each in found] == [1, 1]


def test_a_connection_that_ends_waits_for_nothing() -> None:
    world = TierWorld(4)
    writer, reader = world.attach(), world.attach()
    world.in_tier(writer, "ab")
    world.wait(reader, "ab")
    world.detach(reader)
    assert not [notice for notice in world.end_all(JobKind.FETCH) if isinstance(notice, Onboarded)]
    assert sum(world.cache.statistics().num_leases.values()) == 0


def test_the_region_of_an_overdue_fetch_is_held_until_it_has_really_ended() -> None:
    world = TierWorld(2)
    writer = world.attach()
    world.in_tier(writer, "a")
    world.wait(writer, "a")
    (job,) = world.of(JobKind.FETCH)
    found = world.found(world.tick(1.0))
    assert found.lease is None
    assert world.tier.breaker is BreakerState.OPEN
    assert job.region in world.cache.regions()
    grants = world.reserve(writer, "a").grants
    assert [grant.region for grant in grants] != [job.region]
    world.commit(writer, grants)
    world.end(job)
    assert job.region not in world.cache.regions()
    assert world.num_hit(writer, "a") == 1  # that of the writer


def test_a_shared_tier_is_asked_for_what_is_not_known() -> None:
    world = TierWorld(8, dataclasses.replace(THROUGH, is_shared=True))
    writer = world.attach()
    assert isinstance(world.wait(writer, "abc"), Onboarding)
    (ask,) = world.of(JobKind.ASK)
    assert ask.keys == (key_of("a"), key_of("ab"), key_of("abc"))
    world.end(ask, found=(True, True, False))
    found = world.found(world.end_all(JobKind.FETCH))
    assert world.num_of(found) == 2


def test_the_next_tier_is_tried_and_what_is_fetched_often_goes_to_the_faster() -> None:
    world = TierWorld(4, dataclasses.replace(THROUGH, promotion_hits=2), dataclasses.replace(THROUGH, name="slow"))
    writer = world.attach()

    def store(text: str) -> None:
        """The fast tier has no room for it."""
        world.store(writer, text)
        while jobs := [job for job in world.jobs if job.kind is JobKind.PUBLISH]:
            world.end(jobs[0], Outcome.DONE if jobs[0].tier else Outcome.FULL)

    def fetch() -> None:
        assert isinstance(world.wait(writer, "a"), Onboarding)
        assert [job.tier for job in world.of(JobKind.FETCH, 1)] == [1]
        world.release(writer, world.found(world.end_all(JobKind.FETCH)).lease)

    store("a")
    store("ABCD")
    fetch()
    assert world.tier.counts.num_promoted == 0
    store("EFGH")
    fetch()
    assert world.tier.counts.num_promoted == 1
    world.tick(1.0)
    published = set()
    while jobs := world.of(JobKind.PUBLISH, 0):
        published |= {job.keys[0] for job in jobs}
        world.end(jobs[0])
    assert key_of("a") in published


# ---- clear -----------------------------------------------------------------------------------------------------------


def test_a_clear_reaches_the_tier_after_what_is_being_published() -> None:
    world = TierWorld(8)
    writer = world.attach()
    world.store(writer, "a")
    world.reply(Clear())
    assert world.of(JobKind.CLEAR) == []
    world.end_all(JobKind.PUBLISH)
    (clear,) = world.of(JobKind.CLEAR)
    assert clear.keys == (key_of("a"),)
    assert isinstance(world.wait(writer, "a"), Found)
    world.end(clear, keys=clear.keys)
    assert (world.tier.num_known, world.tier.counts.num_cleared) == (0, 1)


def test_what_is_fetched_while_it_is_cleared_is_not_found() -> None:
    world = TierWorld(4)
    writer = world.attach()
    world.in_tier(writer, "a")
    world.wait(writer, "a")
    world.reply(Clear())
    found = world.found(world.end_all(JobKind.FETCH))
    assert found.lease is None
    assert world.num_hit(writer, "a") == 0


def test_a_clear_of_a_tenant_means_its_records_only() -> None:
    mine, others = key_of("a", "mine"), key_of("a", "other")
    assert mine != others
    assert selection_of("mine", None).matches(mine)
    assert not selection_of("mine", None).matches(others)
    assert selection_of(None, "demo").matches(others)
    assert not selection_of("mine", "another").matches(mine)
    assert selection_of(None, None).matches(mine)


def settled_writer(world: TierWorld) -> ConnectionId:
    """It has a chunk, ``a``, in the tier; nothing waits to be published any more."""
    writer = world.attach()
    world.in_tier(writer, "a")
    world.tick(2.0)
    world.end_all(JobKind.PUBLISH)
    return writer


def test_a_clear_that_fails_is_tried_again() -> None:
    world = TierWorld(4)
    writer = settled_writer(world)
    world.reply(Clear())
    world.end(world.of(JobKind.CLEAR)[0], Outcome.FAILED)
    world.tick(0.5)
    world.end_all(JobKind.PROBE)
    assert isinstance(world.wait(writer, "a"), Found)
    assert len(world.of(JobKind.CLEAR)) == 1


def test_a_clear_that_is_not_whole_goes_on_and_hides_what_it_means_until_then() -> None:
    world = TierWorld(4)
    writer = settled_writer(world)
    world.reply(Clear(model="demo"))
    (first,) = world.of(JobKind.CLEAR)
    world.reply(Clear(model="demo"))
    world.end(first, num_paged=7, is_whole=False)
    (second,) = world.of(JobKind.CLEAR)
    assert (first.is_continued, second.is_continued, second.selection) == (False, True, first.selection)
    assert (world.tier.num_clears, world.tier.counts.num_cleared) == (2, 7)
    assert isinstance(world.wait(writer, "a"), Found)
    world.store(writer, "n")
    assert world.of(JobKind.PUBLISH) == []
    world.end(second, num_paged=1)
    (again,) = world.of(JobKind.CLEAR)  # the one that was asked for meanwhile looks at everything
    assert not again.is_continued
    world.end(again)
    assert (world.tier.num_clears, world.tier.counts.num_cleared) == (0, 8)
    assert len(world.of(JobKind.PUBLISH)) == 1


def test_a_clear_that_fails_half_way_begins_anew() -> None:
    world = TierWorld(4)
    world.reply(Clear())
    world.end(world.of(JobKind.CLEAR)[0], is_whole=False)
    world.end(world.of(JobKind.CLEAR)[0], Outcome.FAILED)
    world.tick(0.5)
    world.end_all(JobKind.PROBE)
    (clear,) = world.of(JobKind.CLEAR)
    assert not clear.is_continued


# ---- the breaker -----------------------------------------------------------------------------------------------------


def test_one_failure_opens_and_a_probe_closes() -> None:
    world = TierWorld(4)
    writer = world.attach()
    world.in_tier(writer, "a")
    world.wait(writer, "a")
    notices = world.end(world.of(JobKind.FETCH)[0], Outcome.FAILED, reason="down")
    assert [notice for notice in notices if isinstance(notice, TierChanged)] == [TierChanged("fast", "open", "down")]
    assert isinstance(world.wait(writer, "a"), Found)  # nobody waits for it now
    world.tick(0.49)
    assert world.of(JobKind.PROBE) == []
    world.tick(0.01)
    world.end(world.of(JobKind.PROBE)[0], Outcome.FAILED)
    world.tick(0.99)
    assert world.of(JobKind.PROBE) == []
    world.tick(0.01)
    world.end(world.of(JobKind.PROBE)[0])
    assert world.tier.breaker is BreakerState.CLOSED
    assert isinstance(world.wait(writer, "a"), Onboarding)


def test_probes_come_at_most_two_seconds_apart() -> None:
    breaker = Breaker(0.1, 2.0)
    now_s, waits = 0.0, []
    breaker.failed(now_s, "x")
    for _ in range(9):
        waits.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
        breaker.probing()
        assert not breaker.failed(now_s, "x")
    assert waits[:3] == pytest.approx([0.1, 0.2, 0.4])
    assert max(waits) == pytest.approx(2.0)
    assert breaker.num_opened == 1


def test_a_job_that_does_not_run_is_refused() -> None:
    world = TierWorld(4)
    reply = world.reply(TierDone(world.cache.tiers()[0].num_known + 999, Outcome.DONE))  # type: ignore[arg-type]
    assert isinstance(reply, Refused)
    assert isinstance(reply.error, ProtocolError)


# ---- anything in any order -------------------------------------------------------------------------------------------

STEP = st.one_of(
    st.tuples(st.just("store"), st.sampled_from(("ab", "abc", "xy", "abz", "q")), st.sampled_from(("", "t"))),
    st.tuples(st.just("wait"), st.sampled_from(("abc", "xyz", "abzz", "q")), st.sampled_from(("", "t"))),
    st.tuples(st.just("end"), st.integers(0, 9), st.sampled_from(tuple(Outcome))),
    st.tuples(st.just("tick"), st.sampled_from((0.0, 0.1, 0.6, 3.0)), st.none()),
    st.tuples(st.just("clear"), st.sampled_from((None, "t")), st.none()),
    st.tuples(st.just("leave"), st.none(), st.none()),
)


def answer_of(job: TierJob, outcome: Outcome, there: set[TierKey]) -> dict[str, Any]:
    """What a tier that holds ``there`` says."""
    if job.kind is JobKind.PUBLISH and outcome is Outcome.DONE:
        there.add(job.keys[0])
    if job.kind is JobKind.ASK:
        return {"found": tuple(key in there for key in job.keys)}
    if job.kind is JobKind.LIST:
        return {"keys": tuple(sorted(there))}
    if job.kind is JobKind.CLEAR and outcome is Outcome.DONE:
        assert job.selection is not None
        removed = tuple(sorted(key for key in there if job.selection.matches(key)))
        there.difference_update(removed)
        return {"keys": removed}
    return {}


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=40), st.sampled_from(("through", "back")), st.booleans(), st.integers(2, 6))
def test_the_books_are_right_whatever_happens(
    steps: list[tuple[str, Any, Any]], store: Any, is_shared: bool, num_chunks: int
) -> None:
    slow = dataclasses.replace(
        THROUGH, name="slow", is_shared=is_shared, publishes_max=1, queue_bytes_max=2 * CHUNK_BYTES, known_max=3
    )
    fast = dataclasses.replace(THROUGH, store=store, flush_after_s=0.5, promotion_hits=1)
    world = TierWorld(num_chunks, fast, slow, lists=False, onboards_max=3, ahead_max=2)
    there: list[set[TierKey]] = [set(), set()]
    owner, leases = world.attach(), []

    def end(job: TierJob, outcome: Outcome) -> None:
        if (outcome is Outcome.MISSING or outcome is Outcome.CORRUPT) and job.kind is not JobKind.FETCH:
            outcome = Outcome.FAILED
        if outcome is Outcome.FULL and job.kind is not JobKind.PUBLISH:
            outcome = Outcome.DONE
        leases.extend(
            notice.found.lease
            for notice in world.end(job, outcome, **answer_of(job, outcome, there[job.tier]))
            if isinstance(notice, Onboarded)
        )

    for what, first, second in steps:
        if what == "store":
            world.store(owner, first, tenant=second)
        elif what == "wait":
            reply = world.wait(owner, first, wait_s=1.0, tenant=second)
            leases += [reply.lease] if isinstance(reply, Found) else []
        elif what == "end" and world.jobs:
            end(world.jobs[first % len(world.jobs)], second)
        elif what == "tick":
            leases += [each.found.lease for each in world.tick(first) if isinstance(each, Onboarded)]
        elif what == "clear":
            world.reply(Clear(first))
        elif what == "leave":
            world.detach(owner)
            world.tick(1.0)
            owner, leases = world.attach(), []
    for _ in range(40):  # everything comes to its end
        while world.jobs:
            end(world.jobs[0], Outcome.DONE)
        leases += [each.found.lease for each in world.tick(1.0) if isinstance(each, Onboarded)]
    for lease in filter(None, leases):
        world.release(owner, lease)
    shown = world.cache.tiers()
    assert [(each.breaker, each.queued_bytes, each.num_clears) for each in shown] == [(BreakerState.CLOSED, 0, 0)] * 2
    assert sum(world.cache.statistics().num_leases.values()) == 0
    assert world.cache.next_deadline_s is None
