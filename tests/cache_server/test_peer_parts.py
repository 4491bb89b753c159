"""The pure parts of sharing: whom a pull asks and believes, what a peer may lease, what the coordinator is told."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

import pytest

from antiphon.cache.events import ConnectionId
from antiphon.cache.lending import Shelf, Wanted
from antiphon.cache_server import peer_pull
from antiphon.cache_server.peer_feed import Feed
from antiphon.cache_server.peer_lending import FIRST_BORROWER, Lender
from antiphon.cache_server.peer_membership import Membership
from antiphon.cache_server.peer_pull import (
    SLOW_MAX,
    GiveBack,
    LendFrom,
    LoanEnded,
    NoTime,
    ReadFrom,
    TooSlow,
    Verify,
    Whereabouts,
    pull,
)
from antiphon.cache_server.peer_serving import PeerSelf
from antiphon.core.errors import LeaseUnknown, PeerTimeout, PeerUnavailable
from antiphon.core.namespace import NamespaceDigest
from antiphon.observe.trace_context import SpanContext
from antiphon.observe.tracing import ActiveSpan
from antiphon.protocol.peers import Events, Holder, LentChunk, Listing, Locate, Located
from tests.cache.test_lending import KEYS, WANTED, new_cache, store, tier_key

KEY = bytes(32)
LOAN = LentChunk(0, 7, 4096, bytes(16))
ONE, TWO = Holder("one", "i", "host:1"), Holder("two", "i", "host:2")
WISH = Wanted(NamespaceDigest(hashlib.sha256(b"n").digest()), None, 16)


class Driver:
    """Answers the actions of pulls from a script."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.where = Whereabouts(ttl_s=1_000.0)
        self.said: list[str] = []
        self.scripts: dict[str, Callable[[Any], Any]] = {
            "LendFrom": lambda action: LOAN,
            "ReadFrom": lambda action: None,
            "Verify": lambda action: True,
            "GiveBack": lambda action: None,
        }
        self.where.located(KEY, [ONE, TWO], self.now_s)

    def pull(self) -> bool:
        self.said = []
        pulling = pull(self.where, KEY, WISH, lambda: self.now_s)
        ended = None
        while True:
            try:
                action = pulling.send(ended)
            except StopIteration as stop:
                return bool(stop.value)
            name = type(action).__name__
            holder = f" {action.holder.instance}" if isinstance(action, LendFrom | ReadFrom | GiveBack) else ""
            self.said.append(name + holder)
            ended = self.scripts[name](action)


def test_a_pull_lends_reads_verifies_and_gives_back() -> None:
    driver = Driver()
    assert driver.pull()
    assert driver.said == ["LendFrom one", "ReadFrom one", "Verify", "GiveBack one"]


def test_a_peer_that_failed_once_is_left_alone_and_tried_again_later() -> None:
    driver = Driver()
    driver.scripts["LendFrom"] = lambda action: PeerTimeout("late") if action.holder == ONE else LOAN
    assert driver.pull()
    assert driver.said == ["LendFrom one", "LendFrom two", "ReadFrom two", "Verify", "GiveBack two"]
    assert driver.pull()
    assert driver.said[0] == "LendFrom two"
    driver.now_s += 0.6
    assert driver.pull()
    assert driver.said[:2] == ["LendFrom one", "LendFrom two"]
    driver.now_s += 0.6  # the wait has doubled
    assert driver.pull()
    assert driver.said[0] == "LendFrom two"
    driver.now_s += 5.0
    driver.scripts["LendFrom"] = lambda action: LOAN
    assert driver.pull()
    assert driver.said[0] == "LendFrom one"
    assert driver.where.breakers() == {}


def test_only_one_call_tries_a_peer_out() -> None:
    driver = Driver()
    driver.where.failed(ONE, driver.now_s, "down")
    driver.now_s += 1.0
    assert driver.where.take(ONE, driver.now_s)
    assert not driver.where.take(ONE, driver.now_s)
    driver.where.answered(ONE)
    assert driver.where.take(ONE, driver.now_s)


def test_a_pull_that_is_given_up_closes_nobody_out_for_good() -> None:
    driver = Driver()
    driver.where.failed(ONE, driver.now_s, "down")
    driver.now_s += 1.0
    pulling = pull(driver.where, KEY, WISH, lambda: driver.now_s)
    assert isinstance(pulling.send(None), LendFrom)
    pulling.close()
    assert not driver.where.take(ONE, driver.now_s)
    assert driver.where.take(ONE, driver.now_s + 5.0)


def test_a_new_life_of_a_peer_is_not_blamed_for_the_last() -> None:
    driver = Driver()
    driver.where.failed(ONE, driver.now_s, "down")
    again = Holder("one", "next", "host:1")
    driver.where.located(KEY, [ONE, again], driver.now_s)
    assert driver.where.usable(KEY, driver.now_s) == [again]


def test_wrong_bytes_are_no_hit_and_open_the_breaker() -> None:
    driver = Driver()
    driver.scripts["Verify"] = lambda action: False
    assert not driver.pull()
    assert [word for word in driver.said if word.startswith("GiveBack")] == ["GiveBack one", "GiveBack two"]
    assert driver.where.counts["corrupt"] == 2
    assert len(driver.where.breakers()) == 2
    assert not driver.where.is_known(KEY, driver.now_s)


@pytest.mark.parametrize("answer", [None, PeerUnavailable("gone")])
def test_a_holder_without_the_chunk_is_passed_over(answer: object) -> None:
    driver = Driver()
    driver.scripts["LendFrom"] = lambda action: answer if action.holder == ONE else LOAN
    assert driver.pull()
    assert driver.said[1] == "LendFrom two"
    is_closed = answer is None
    assert (driver.where.breakers() == {}) == is_closed


def test_a_read_that_failed_gives_its_loan_back() -> None:
    driver = Driver()
    driver.scripts["ReadFrom"] = lambda action: PeerTimeout("hung")
    assert not driver.pull()
    assert driver.said == [
        "LendFrom one",
        "ReadFrom one",
        "GiveBack one",
        "LendFrom two",
        "ReadFrom two",
        "GiveBack two",
    ]


@pytest.mark.parametrize("step", ["LendFrom", "ReadFrom"])
def test_what_this_puller_has_no_time_for_is_a_miss_and_no_failure_of_the_peer(step: str) -> None:
    driver = Driver()
    driver.scripts[step] = lambda action: NoTime()
    assert not driver.pull()
    assert driver.said == ["LendFrom one", "ReadFrom one", "GiveBack one"][: 1 if step == "LendFrom" else 3]
    assert driver.where.breakers() == {}
    assert driver.where.counts == {"late": 1}
    assert driver.where.usable(KEY, driver.now_s) == [ONE, TWO]


def test_a_peer_that_was_to_be_tried_out_and_was_not_asked_is_tried_out_later() -> None:
    driver = Driver()
    driver.where.located(KEY, [ONE], driver.now_s)
    driver.where.failed(ONE, driver.now_s, "down")
    driver.now_s += 1.0
    driver.scripts["LendFrom"] = lambda action: NoTime()
    assert not driver.pull()
    assert driver.said == ["LendFrom one"]
    driver.now_s += 5.0
    driver.scripts["LendFrom"] = lambda action: LOAN
    assert driver.pull()
    assert driver.where.counts["breakers_opened"] == 1


def test_bytes_whose_loan_ended_while_they_came_are_no_wrong_bytes_of_the_holder() -> None:
    driver = Driver()
    driver.scripts["Verify"] = lambda action: True if driver.said[-2] == "ReadFrom two" else LoanEnded()
    assert driver.pull(), "the other holder was not asked"
    assert driver.said[3:5] == ["GiveBack one", "LendFrom two"]
    assert driver.where.counts == {"failed": 1, "breakers_opened": 1, "pulled": 1}
    assert "connection of a loan ended" in str(driver.where.breakers()["one (i)"]["reason"])
    assert driver.where.is_known(KEY, driver.now_s), "the holder may still have the chunk"


def slow_driver() -> Driver:
    """A driver with one holder, whose breaker is open since it was slow."""
    driver = Driver()
    driver.where.located(KEY, [ONE], driver.now_s)
    driver.scripts["ReadFrom"] = lambda action: TooSlow()
    for number in range(SLOW_MAX):
        assert driver.where.breakers() == {}, number
        assert not driver.pull()
        assert driver.said == ["LendFrom one", "ReadFrom one", "GiveBack one"]
    assert list(driver.where.breakers()) == ["one (i)"]
    assert driver.where.counts == {"late": SLOW_MAX, "breakers_opened": 1}
    return driver


def test_a_peer_that_is_slow_again_and_again_is_closed_out_until_bytes_come_in_time() -> None:
    driver = slow_driver()
    assert not driver.pull()
    assert driver.said == []
    driver.now_s += 0.6
    seen = []

    def read(action: object) -> TooSlow:
        seen.append(driver.where.usable(KEY, driver.now_s))
        return TooSlow()

    driver.scripts["ReadFrom"] = read
    assert not driver.pull()
    assert seen == [[]], "its loan alone has let others in"
    driver.now_s += 0.6
    assert driver.where.usable(KEY, driver.now_s) == [], "the wait has doubled"
    driver.now_s += 5.0
    driver.scripts["ReadFrom"] = lambda action: None
    assert driver.pull()
    assert driver.where.breakers() == {}
    driver.scripts["ReadFrom"] = lambda action: TooSlow()
    assert not driver.pull()
    assert driver.where.breakers() == {}, "it is counted anew"


@pytest.mark.parametrize(
    ("step", "ended"),
    [
        ("ReadFrom", NoTime()),
        ("ReadFrom", TooSlow()),
        ("ReadFrom", PeerTimeout("hung")),
        ("LendFrom", NoTime()),
        ("LendFrom", PeerTimeout("hung")),
        ("Verify", False),
        ("Verify", LoanEnded()),
    ],
)
def test_a_peer_that_was_slow_is_tried_out_again_however_a_trial_ends(step: str, ended: object) -> None:
    driver = slow_driver()
    driver.now_s += 5.0
    driver.scripts |= {"ReadFrom": lambda action: None, step: lambda action: ended}
    assert not driver.pull()
    assert driver.where.usable(KEY, driver.now_s) == [], "it has shown nothing"
    driver.now_s += 5.0
    driver.where.located(KEY, [ONE], driver.now_s)
    driver.scripts |= {"ReadFrom": lambda action: None, "LendFrom": lambda action: LOAN, "Verify": lambda action: True}
    assert driver.pull()


def test_a_pull_given_up_while_it_tries_out_a_slow_peer_closes_it_out_for_a_while_only() -> None:
    driver = slow_driver()
    driver.now_s += 5.0
    pulling = pull(driver.where, KEY, WISH, lambda: driver.now_s)
    pulling.send(None)
    assert isinstance(pulling.send(LOAN), ReadFrom)
    pulling.close()
    assert driver.where.usable(KEY, driver.now_s) == []
    assert driver.where.usable(KEY, driver.now_s + 5.0) == [ONE]


def test_reads_that_are_slow_now_and_then_close_nobody_out() -> None:
    driver = Driver()
    for number in range(4 * SLOW_MAX):
        ended = None if number % SLOW_MAX == 0 else TooSlow()
        driver.scripts["ReadFrom"] = lambda action, ended=ended: ended
        driver.pull()
    assert driver.where.breakers() == {}
    assert driver.where.counts["late"] == 4 * (SLOW_MAX - 1)


def test_those_who_were_slow_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_pull, "PEERS_MAX", 3)
    where = Whereabouts()
    for number in range(9):
        where.slow(Holder(f"peer {number}", "i", "host:1"), 0.0, 0.0)
    assert len(where._slow) == 3


def test_reads_that_were_under_way_at_once_are_slow_once() -> None:
    where = Whereabouts()
    for number in range(SLOW_MAX - 1):
        for late_s in (0.0, 0.001, 0.5):
            where.slow(ONE, 10.0 * number + late_s, 10.0 * number + 2.0 + late_s)
    assert where.breakers() == {}
    where.slow(ONE, 100.0, 102.0)
    assert "3 times in a row" in str(where.breakers()["one (i)"]["reason"])


class Questions:
    """A session with a coordinator that answers by order."""

    def __init__(self) -> None:
        self.bodies: list[object] = []
        self.asked: list[asyncio.Future[Located]] = []

    async def call(self, body: object, timeout_s: float) -> Located:
        self.bodies.append(body)
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


async def test_an_answer_under_way_when_another_question_fails_is_used_and_closes_no_breaker() -> None:
    questions: Any = Questions()
    nobody: Any = None
    member = Membership(PeerSelf("a", "i", b""), ("host:1", "host:2"), nobody, nobody, nobody)
    member._session = questions
    async with asyncio.TaskGroup() as tasks:
        first, second = (tasks.create_task(member.ask([KEY], 1.0)) for _ in range(2))
        await asyncio.sleep(0)
        questions.asked[1].set_exception(PeerTimeout("late"))
        assert await second is None
        questions.asked[0].set_result(Located((ONE,), ((0,),)))
        assert await first == Located((ONE,), ((0,),))
    assert await member.ask([KEY], 1.0) is None, "it is left alone for a while"
    assert len(questions.asked) == 2


async def test_a_question_that_is_sent_marks_the_span_that_asks() -> None:
    questions: Any = Questions()
    nobody: Any = None
    member = Membership(PeerSelf("a", "i", b""), ("host:1", "host:2"), nobody, nobody, nobody)
    span = ActiveSpan(SpanContext(7, 8, is_sampled=True))
    assert await member.ask([KEY], 1.0, span) is None
    assert not span.has_parts, "nobody was asked"
    member._session = questions
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(member.ask([KEY], 1.0, span))
        await asyncio.sleep(0)
        assert questions.bodies == [Locate(KEY, span.context.traceparent)]
        questions.asked[0].set_result(Located((), ((),)))
    assert asking.result() == Located((), ((),))
    assert span.has_parts


def test_what_is_known_is_bounded_and_gets_old() -> None:
    where = Whereabouts(keys_max=3, ttl_s=1.0)
    for number in range(5):
        where.located(bytes([number]), [ONE], 0.0)
    assert [where.is_known(bytes([number]), 0.5) for number in range(5)] == [False, False, True, True, True]
    assert where.usable(bytes([4]), 1.5) == []


# ---- what is lent ----------------------------------------------------------------------------------------------------


def new_lender(cap_bytes: int = 64) -> tuple[Lender, Any]:
    cache = new_cache()
    shelf = Shelf(cache)
    lender = Lender(lambda event: cache.step(event, 0.0)[0], shelf, 256, cap_bytes)  # type: ignore[arg-type, return-value]
    for key in KEYS[:4]:
        store(cache, key)
    return lender, cache


def test_a_peer_leases_up_to_its_cap_over_all_its_connections() -> None:
    lender, cache = new_lender(cap_bytes=32)
    first, second, other = (ConnectionId(FIRST_BORROWER + number) for number in (1, 2, 3))
    lender.attach(first, "p", "i")
    lender.attach(second, "p", "i")
    lender.attach(other, "q", "i")
    keys = [tier_key(key) for key in KEYS[:4]]
    loans, num_capped = lender.lend(first, keys[:1], WANTED)
    assert (len(loans), num_capped) == (1, 0)
    loans, num_capped = lender.lend(second, keys, WANTED)
    assert ([index for index, _ in loans], num_capped) == ([0], 3)
    loans, num_capped = lender.lend(other, [*keys[:2], tier_key(KEYS[6])], WANTED)
    assert ([index for index, _ in loans], num_capped) == ([0, 1], 0)
    with pytest.raises(LeaseUnknown):
        lender.loan(first, loans[0][1].lease)
    assert lender.give_back(other, [loan.lease for _, loan in loans] + [12345]) == 2
    assert lender.lent_bytes() == {"p/i": 32}
    lender.detach(first)
    lender.detach(second)
    lender.detach(second)
    assert lender.lent_bytes() == {}
    assert lender.num_loans == 0
    cache.validate()


# ---- what the coordinator is told ------------------------------------------------------------------------------------


def test_a_feed_lists_in_pages_and_goes_on_with_changes() -> None:
    cache = new_cache(num_chunks=8)
    shelf = Shelf(cache)
    for key in KEYS[:3]:
        store(cache, key)
    feed = Feed(shelf, page_keys=2, page_changes=2)
    first = feed.next()
    store(cache, KEYS[3])  # while it is listed
    second = feed.next()
    assert isinstance(first, Listing)
    assert isinstance(second, Listing)
    assert (first.is_first, first.is_last, second.is_first, second.is_last) == (True, False, False, True)
    assert first.keys + second.keys == b"".join(tier_key(key) for key in KEYS[:3])
    changes = feed.next()
    assert changes == Events(second.next_sequence, 1, ((True, tier_key(KEYS[3])),))
    assert feed.next() is None
    for key in KEYS[4:7]:
        store(cache, key)
    told = [feed.next(), feed.next()]
    assert [each.num_events for each in told if isinstance(each, Events)] == [2, 1]
    feed.restart()
    again = feed.next()
    assert isinstance(again, Listing)
    assert again.is_first


def test_a_feed_without_chunks_lists_none() -> None:
    feed = Feed(Shelf(new_cache()))
    assert feed.next() == Listing(True, True, 1, b"")
    assert feed.next() is None


def test_a_feed_that_lost_changes_lists_again() -> None:
    cache = new_cache(num_chunks=8)
    feed = Feed(Shelf(cache, num_changes_max=2))
    feed.next()
    for key in KEYS[:5]:
        store(cache, key)
    again = feed.next()
    assert isinstance(again, Listing)
    assert again.keys == b"".join(tier_key(key) for key in KEYS[:5])
    assert Verify(bytes(16)) == Verify(bytes(16))
