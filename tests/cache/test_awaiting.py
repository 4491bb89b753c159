"""Lookups that wait for what a prefill engine has handed over: until it is stored, does not come, or time is over."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.cache.awaiting import NOT_COMING_MAX, POLL_MAX_S, POLL_MIN_S, REFUSED_S, UNSEEN_MAX_S, WAIT_MIN_S
from antiphon.cache.effects import Found, Notice, Onboarded, Onboarding
from antiphon.cache.events import Abort, Clear, Commit, ConnectionId, Detach, HandedOver, Lookup
from antiphon.cache.lending import Shelf, held_state
from antiphon.cache.machine import Cache
from antiphon.cache.tier_jobs import JobKind, Outcome
from antiphon.cache.tier_options import TierOptions, TiersOptions
from antiphon.core.chunks import ChunkKey
from tests.cache.test_tiers import TierWorld, key_of
from tests.cache.world import CHUNK_SIZE_TOKENS, World, namespace, options, prompt_keys

PEER = TierOptions("peer", store="none", source="peer", is_shared=True, timeout_s=4.0)


class HereWorld(World):
    """A cache without any tier."""

    def __init__(self, num_chunks: int = 8) -> None:
        super().__init__(options(num_chunks))
        self.cache = Cache(self.options, 1, tiers=TiersOptions((), onboard_share_max=1.0))

    def ask(self, connection: ConnectionId, text: str, num_handed: int, wait_s: float = 5.0, rate: float = 0.0) -> Any:
        return ask(self, connection, text, HandedOver(num_handed, is_here=True), wait_s, rate)


def ask(
    world: World, connection: ConnectionId, text: str, handed: HandedOver, wait_s: float = 5.0, rate: float = 0.0
) -> Any:
    keys = prompt_keys(text, "")
    return world.reply(Lookup(connection, "r", namespace(""), "", keys, wait_s, rate, handed))


def found_in(notices: list[Any]) -> Found | None:
    answers = [notice for notice in notices if isinstance(notice, Onboarded)]
    assert len(answers) <= 1
    return answers[0].found if answers else None


def num_chunks(found: Found | None) -> int:
    assert found is not None, "the lookup still waits"
    return found.num_tokens // CHUNK_SIZE_TOKENS


# ---- the same server -------------------------------------------------------------------------------------------------


def test_a_lookup_waits_for_a_reserved_chunk_and_is_answered_by_its_commit() -> None:
    world = HereWorld()
    writer, reader = world.attach(), world.attach()
    world.store(writer, "ab")
    reserved = world.reserve(writer, "abc", first=2)
    reply = ask(world, reader, "abcd", HandedOver(3, is_here=True))
    assert isinstance(reply, Onboarding)
    assert (reply.num_tokens, reply.num_tokens_max) == (2 * CHUNK_SIZE_TOKENS, 3 * CHUNK_SIZE_TOKENS)
    assert found_in(world.tick(0.5)) is None
    _, *notices = world.effects(commit_of(world, writer, reserved))
    assert num_chunks(found_in(notices)) == 3
    world.cache.validate()


def commit_of(world: World, writer: ConnectionId, reserved: Any) -> Any:
    return Commit(writer, tuple(grant.region for grant in reserved.grants))


def test_a_chunk_that_nobody_has_begun_to_store_is_waited_for_a_moment_only() -> None:
    world = HereWorld()
    reader = world.attach()
    assert isinstance(world.ask(reader, "ab", 2), Onboarding)
    assert found_in(world.tick(UNSEEN_MAX_S * 0.9)) is None
    assert num_chunks(found_in(world.tick(UNSEEN_MAX_S * 0.2))) == 0
    assert not world.cache.leases()


def test_a_chunk_that_is_reserved_meanwhile_is_waited_for_to_the_deadline() -> None:
    world = HereWorld()
    writer, reader = world.attach(), world.attach()
    assert isinstance(world.ask(reader, "a", 1, wait_s=3.0), Onboarding)
    world.reserve(writer, "a")
    assert found_in(world.tick(2.9)) is None
    assert num_chunks(found_in(world.tick(0.2))) == 0


def test_a_store_that_is_given_up_ends_the_wait() -> None:
    world = HereWorld()
    writer, reader = world.attach(), world.attach()
    world.store(writer, "a")
    reserved = world.reserve(writer, "ab", first=1)
    assert isinstance(world.ask(reader, "ab", 2), Onboarding)
    _, *notices = world.effects(Abort(writer, tuple(grant.region for grant in reserved.grants)))
    assert num_chunks(found_in(notices)) == 1


def test_the_death_of_the_writer_ends_the_wait_with_what_it_has_committed() -> None:
    world = HereWorld()
    writer, reader = world.attach(), world.attach()
    world.store(writer, "ab")
    world.reserve(writer, "abc", first=2)
    assert isinstance(world.ask(reader, "abc", 3), Onboarding)
    _, *notices = world.effects(Detach(writer))
    assert num_chunks(found_in(notices)) == 2


def test_a_refused_store_ends_the_wait_and_is_not_waited_for_afterwards() -> None:
    world = HereWorld(num_chunks=1)
    writer, other, reader = world.attach(), world.attach(), world.attach()
    world.reserve(other, "x")  # all the room there is
    assert isinstance(world.ask(reader, "a", 1), Onboarding)
    assert found_in(world.effects(world.reserve_event(writer, "a"))[1:]) == Found(None, (), 0, 0)
    assert isinstance(world.ask(reader, "a", 1), Found), "it is known that it does not come"


SLOW = TierOptions("redis", is_shared=True, timeout_s=9.0)


@pytest.mark.parametrize("is_dead_before", [False, True])
def test_a_writer_that_dies_while_a_tier_is_asked_is_not_waited_for(is_dead_before: bool) -> None:
    world = TierWorld(8, SLOW, lists=False)
    writer, reader = world.attach(), world.attach()
    reserved = world.reserve(writer, "ab")
    world.commit(writer, reserved.grants[:1])
    if is_dead_before:
        world.effects(Detach(writer))
    assert isinstance(ask(world, reader, "ab", HandedOver(2, is_here=True)), Onboarding)
    if not is_dead_before:
        world.effects(Detach(writer))
    (job,) = world.of(JobKind.ASK)
    assert num_chunks(found_in(world.end(job, found=(False,)))) == 1
    world.cache.validate()


def test_a_tier_that_hangs_does_not_hold_up_what_is_stored_here() -> None:
    world = TierWorld(8, SLOW, lists=False)
    writer, reader = world.attach(), world.attach()
    reserved = world.reserve(writer, "a")
    assert isinstance(ask(world, reader, "a", HandedOver(1, is_here=True)), Onboarding)
    assert len(world.of(JobKind.ASK)) == 1
    assert num_chunks(found_in(world.effects(commit_of(world, writer, reserved))[1:])) == 1


def test_what_is_cleared_while_it_is_stored_is_not_waited_for() -> None:
    world = HereWorld()
    writer, reader = world.attach(), world.attach()
    world.reserve(writer, "a")
    assert isinstance(world.ask(reader, "a", 1), Onboarding)
    assert num_chunks(found_in(world.effects(Clear())[1:])) == 0
    assert isinstance(world.ask(reader, "a", 1), Found)


def test_what_another_writer_stores_is_waited_for_although_the_first_has_died() -> None:
    world = HereWorld()
    writer, other, reader = world.attach(), world.attach(), world.attach()
    world.reserve(writer, "a")
    world.effects(Detach(writer))
    reserved = world.reserve(other, "a")
    assert isinstance(world.ask(reader, "a", 1), Onboarding)
    assert num_chunks(found_in(world.effects(commit_of(world, other, reserved))[1:])) == 1


def test_a_death_and_a_refusal_are_forgotten() -> None:
    world = HereWorld(num_chunks=1)
    writer, reader = world.attach(), world.attach()
    world.reserve(writer, "a")
    world.effects(world.reserve_event(writer, "x"))  # no room
    world.effects(Detach(writer))
    assert isinstance(world.ask(reader, "a", 1), Found)
    world.tick(UNSEEN_MAX_S)
    assert isinstance(world.ask(reader, "a", 1, wait_s=0.1), Onboarding), "this is of a hand-over that came later"
    assert isinstance(world.ask(reader, "x", 1), Found)
    world.tick(REFUSED_S)
    assert isinstance(world.ask(reader, "x", 1, wait_s=0.1), Onboarding)


def test_a_fetch_that_fails_says_nothing_of_the_engine_that_stores() -> None:
    world = TierWorld(8)
    writer, reader = world.attach(), world.attach()
    world.in_tier(writer, "a")
    assert isinstance(world.wait(reader, "a"), Onboarding)
    (job,) = world.of(JobKind.FETCH)
    world.end(job, Outcome.MISSING)
    reply = ask(world, reader, "a", HandedOver(1, is_here=True))
    assert isinstance(reply, Onboarding)
    reserved = world.reserve(writer, "a")
    assert num_chunks(found_in(world.effects(commit_of(world, writer, reserved))[1:])) == 1


def test_what_is_remembered_of_refused_stores_is_bounded() -> None:
    world = HereWorld(num_chunks=1)
    world.tick(0.0)
    awaiting = world.cache._books.tiers.onboardings.awaiting  # type: ignore[union-attr]
    keys = [ChunkKey(number.to_bytes(32, "big")) for number in range(NOT_COMING_MAX + 10)]
    for key in keys:
        awaiting.refused(key)
    awaiting.validate()
    assert [awaiting.is_given_up(keys[number]) for number in (0, 9, 10, -1)] == [False, False, True, True]


def test_a_fast_engine_waits_long_enough_for_a_copy() -> None:
    world = HereWorld()
    writer, reader = world.attach(), world.attach()
    world.reserve(writer, "a")
    reply = world.ask(reader, "a", 1, rate=1e9)
    assert isinstance(reply, Onboarding)
    assert reply.wait_s == WAIT_MIN_S


def test_without_a_hand_over_nothing_is_waited_for() -> None:
    world = HereWorld()
    writer, reader = world.attach(), world.attach()
    world.reserve(writer, "a")
    assert isinstance(world.reply(Lookup(reader, "r", namespace(""), "", prompt_keys("a"), 5.0)), Found)


class Ranks:
    """Two ranks of one engine, each with half of chunk ``a``, and a reader of another."""

    def __init__(self, num_reserved: int = 2) -> None:
        self.world = HereWorld()
        self.ranks = [self.world.attach("e", (slab,)) for slab in (0, 1)]
        self.reader = self.world.attach("d")
        self.reserved = [self.world.reserve(rank, "a") for rank in self.ranks[:num_reserved]]
        self.shelf = Shelf(self.world.cache)

    def ask(self, wait_s: float = 9.0) -> Any:
        return self.world.ask(self.reader, "a", 1, wait_s)

    def commit(self, rank: int) -> Found | None:
        event = commit_of(self.world, self.ranks[rank], self.reserved[rank])
        return found_in(self.world.effects(event)[1:])

    def abort(self, rank: int) -> Found | None:
        regions = tuple(grant.region for grant in self.reserved[rank].grants)
        return found_in(self.world.effects(Abort(self.ranks[rank], regions))[1:])

    def state(self) -> str:
        self.shelf.follow()
        return held_state(self.shelf, key_of("a"), prompt_keys("a")[-1])


@pytest.mark.parametrize("has_committed", [True, False])
def test_what_one_rank_gives_up_is_not_waited_for_although_another_has_stored_its_part(has_committed: bool) -> None:
    ranks = Ranks()
    if has_committed:
        ranks.commit(0)
    assert ranks.state() == "reserved"
    assert isinstance(ranks.ask(), Onboarding)
    assert num_chunks(ranks.abort(1)) == 0
    assert ranks.state() == "refused"
    assert isinstance(ranks.ask(), Found), "a lookup that comes now"
    if not has_committed:
        ranks.commit(0)
        assert ranks.state() == "refused"
        assert isinstance(ranks.ask(), Found)
    ranks.world.cache.validate()


def test_what_one_rank_has_given_up_and_stores_again_is_waited_for() -> None:
    ranks = Ranks()
    ranks.commit(0)
    ranks.abort(1)
    ranks.reserved[1] = ranks.world.reserve(ranks.ranks[1], "a")
    assert ranks.state() == "reserved"
    assert isinstance(ranks.ask(), Onboarding)
    assert num_chunks(ranks.commit(1)) == 1


def test_what_is_stored_in_part_and_left_is_waited_for_a_moment_only() -> None:
    ranks = Ranks()
    ranks.commit(0)
    ranks.abort(1)
    ranks.world.tick(UNSEEN_MAX_S)  # which forgets the abort: this hand-over may be one that stores the rest
    assert ranks.state() == "unseen"
    assert isinstance(ranks.ask(), Onboarding)
    assert found_in(ranks.world.tick(UNSEEN_MAX_S * 0.9)) is None
    assert num_chunks(found_in(ranks.world.tick(UNSEEN_MAX_S * 0.2))) == 0


def test_a_rank_that_begins_after_another_has_ended_is_waited_for() -> None:
    ranks = Ranks(num_reserved=1)
    assert isinstance(ranks.ask(), Onboarding)
    ranks.world.tick(UNSEEN_MAX_S * 0.95)
    assert ranks.commit(0) is None
    assert ranks.state() == "reserved", "a rank is about to store the rest"
    assert found_in(ranks.world.tick(UNSEEN_MAX_S * 0.1)) is None
    ranks.reserved.append(ranks.world.reserve(ranks.ranks[1], "a"))
    assert found_in(ranks.world.tick(UNSEEN_MAX_S)) is None
    assert num_chunks(ranks.commit(1)) == 1


def test_a_rank_that_never_begins_is_not_waited_for_to_the_deadline() -> None:
    ranks = Ranks(num_reserved=1)
    assert isinstance(ranks.ask(), Onboarding)
    ranks.commit(0)
    assert num_chunks(next(filter(None, (found_in(ranks.world.tick(0.5)) for _ in range(5))), None)) == 0


def test_a_death_is_forgotten_once_the_chunk_is_stored_anew() -> None:
    """Also while only one of the ranks has begun."""
    ranks = Ranks()
    ranks.world.effects(Detach(ranks.ranks[1]))
    assert ranks.state() == "refused"
    ranks.reserved = [ranks.world.reserve(ranks.ranks[0], "a")]
    assert ranks.state() == "reserved"
    assert isinstance(ranks.ask(), Onboarding)


def test_an_abort_of_what_was_cleared_says_nothing_of_who_stores_it_now() -> None:
    ranks = Ranks()
    ranks.world.effects(Clear())
    again = ranks.world.attach("f", (0, 1))
    reserved = ranks.world.reserve(again, "a")
    assert isinstance(ranks.ask(), Onboarding)
    assert ranks.abort(1) is None
    assert num_chunks(found_in(ranks.world.effects(commit_of(ranks.world, again, reserved))[1:])) == 1


def test_a_reader_that_leaves_leaves_nothing() -> None:
    world = HereWorld()
    writer, reader = world.attach(), world.attach()
    reserved = world.reserve(writer, "a")
    assert isinstance(world.ask(reader, "a", 1), Onboarding)
    world.detach(reader)
    _, *notices = world.effects(commit_of(world, writer, reserved))
    assert found_in(notices) is None
    assert not world.cache.leases()
    assert not world.cache._books.tiers.onboardings.awaiting._waiters  # type: ignore[union-attr]


# ---- another server --------------------------------------------------------------------------------------------------


def test_another_server_is_asked_until_it_has_the_chunks() -> None:
    world = TierWorld(8, PEER, lists=False)
    reader = world.attach()
    assert isinstance(ask(world, reader, "ab", HandedOver(2, is_here=False)), Onboarding)
    waited_s, num_asks = 0.0, 0
    while num_asks < 6:
        for job in world.of(JobKind.ASK):
            num_asks += 1
            assert world.end(job, found=(False, False), gone=(False, False)) == []
        assert not world.of(JobKind.FETCH)
        world.tick(POLL_MIN_S)
        waited_s += POLL_MIN_S
    assert waited_s > POLL_MAX_S, "it is asked ever less often"
    while not world.of(JobKind.ASK):
        world.tick(POLL_MIN_S)
    (job,) = world.of(JobKind.ASK)
    world.end(job, found=(True, True), gone=(False, False))
    notices = world.end_all(JobKind.FETCH)
    found = found_in(notices)
    assert num_chunks(found) == 2
    assert found is not None
    assert found.fetched == (("peer", (0, 1)),)


def test_what_another_server_says_does_not_come_ends_the_wait() -> None:
    world = TierWorld(8, PEER, lists=False)
    reader = world.attach()
    assert isinstance(ask(world, reader, "ab", HandedOver(2, is_here=False)), Onboarding)
    (job,) = world.of(JobKind.ASK)
    world.end(job, found=(True, False), gone=(False, True))
    assert num_chunks(found_in(world.end_all(JobKind.FETCH))) == 1


def test_a_shared_tier_is_asked_to_the_deadline() -> None:
    world = TierWorld(8, TierOptions("redis", is_shared=True, timeout_s=9.0), lists=False)
    reader = world.attach()
    assert isinstance(ask(world, reader, "a", HandedOver(1, is_here=False), wait_s=1.0), Onboarding)
    notices: list[Notice] = []
    for _ in range(250):
        for job in world.of(JobKind.ASK):
            notices += world.end(job, found=(False,))
        notices += world.tick(0.004)[1:]
    assert num_chunks(found_in(notices)) == 0


def test_nobody_who_could_bring_it_is_no_reason_to_wait() -> None:
    world = HereWorld()
    reader = world.attach()
    assert isinstance(ask(world, reader, "a", HandedOver(1, is_here=False)), Found)


# ---- what a peer is told ---------------------------------------------------------------------------------------------


def test_how_far_a_store_is() -> None:
    world = HereWorld(num_chunks=2)
    writer = world.attach()
    shelf = Shelf(world.cache)

    def state(text: str) -> str:
        shelf.follow()
        return held_state(shelf, key_of(text), prompt_keys(text)[-1])

    assert state("a") == "unseen"
    reserved = world.reserve(writer, "a")
    assert state("a") == "reserved"
    world.commit(writer, reserved.grants)
    assert state("a") == "readable"
    world.reserve(writer, "xy")
    world.reserve(writer, "pq")
    assert state("p") == "refused"


# ---- any order -------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_whatever_happens_the_wait_ends_in_time_with_what_is_there(data: st.DataObject) -> None:
    """Against a plain model: the answer is the readable prefix, and comes when it is whole or the time is over."""
    world = HereWorld(num_chunks=6)
    writer, reader = world.attach(), world.attach()
    text = "abcd"
    reserved: dict[int, Any] = {}
    committed: set[int] = set()
    for place in range(data.draw(st.integers(0, 4))):
        reserved[place] = world.reserve(writer, text[: place + 1], first=place)
    num_handed = data.draw(st.integers(1, 4))
    wait_s = data.draw(st.sampled_from((0.3, 2.0)))
    found: Found | None = None
    began_s, waited_s = world.now_s, 0.0
    reply = world.ask(reader, text, num_handed, wait_s)
    assert isinstance(reply, Onboarding)
    while found is None:
        waited_s = world.now_s - began_s
        assert waited_s < wait_s + 1.0, "it waits for ever"
        open_places = sorted(set(reserved) - committed)
        if open_places and data.draw(st.booleans()):
            place = data.draw(st.sampled_from(open_places))
            committed.add(place)
            notices = world.effects(commit_of(world, writer, reserved[place]))[1:]
        else:
            notices = world.tick(data.draw(st.sampled_from((0.01, 0.3, 1.1))))[1:]
        world.cache.validate()
        found = found_in(notices)
    prefix = next(place for place in range(5) if place not in committed)
    assert num_chunks(found) == prefix
    assert prefix >= num_handed or world.now_s - began_s >= min(wait_s, UNSEEN_MAX_S)


def test_a_job_that_fails_is_asked_again() -> None:
    world = TierWorld(8, PEER, lists=False)
    reader = world.attach()
    assert isinstance(ask(world, reader, "a", HandedOver(1, is_here=False), wait_s=5.0), Onboarding)
    (job,) = world.of(JobKind.ASK)
    world.end(job, Outcome.FAILED)
    for _ in range(400):
        for probe in world.of(JobKind.PROBE):
            world.end(probe)
        world.tick(0.01)
        if world.of(JobKind.ASK):
            break
    (again,) = world.of(JobKind.ASK)
    world.end(again, found=(True,), gone=(False,))
    assert num_chunks(found_in(world.end_all(JobKind.FETCH))) == 1
