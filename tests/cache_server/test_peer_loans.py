"""Loans for many threads: one call for what several wish for, none ahead, and an end of all waiting at a failure."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from antiphon.cache.arena import RegionHandle
from antiphon.cache.events import ConnectionId, LeaseId
from antiphon.cache.lending import Loan, Wanted
from antiphon.cache_server import peer_loans
from antiphon.cache_server.peer_loans import LOANS_LOW, PeerLoans
from antiphon.cache_server.peer_pull import LendFrom, NoTime
from antiphon.cache_server.peer_serving import PeerSelf, PeerServing, _Borrower
from antiphon.core.errors import PeerTimeout, PeerUnavailable, ProtocolError
from antiphon.core.namespace import NamespaceDigest
from antiphon.protocol import peers as wire
from tests.cache_server.world import wait_for

HOLDER = wire.Holder("one", "i", "host:1")
WANTED, OTHER = (Wanted(NamespaceDigest(bytes([number]) * 32), None, 64) for number in range(2))


def key_of(number: int) -> bytes:
    return bytes([number]) * 32


def lent_of(lend: wire.Lend, num_max: int = 256, num_capped: int = 0, num_later: int = 0) -> wire.Lent:
    """Each chunk's lease is the first byte of its key."""
    keys = wire.split_keys(lend.keys)[:num_max]
    chunks = tuple(wire.LentChunk(at, key[0], 0, bytes(16)) for at, key in enumerate(keys))
    return wire.Lent(chunks, num_capped, num_later)


class Link:
    """A connection whose answers are given by ``answer``."""

    def __init__(self, answer: Callable[[wire.Lend], wire.Message]) -> None:
        self.answer = answer
        self.lends: list[list[int]] = []
        self.returned: list[int] = []
        self.has_hung_up = False
        self.is_closed = False

    def call(self, body: Any, timeout_s: float) -> wire.Message:
        assert isinstance(body, wire.Lend)
        self.lends.append([key[0] for key in wire.split_keys(body.keys)])
        return self.answer(body)

    def post(self, body: Any, timeout_s: float) -> None:
        assert isinstance(body, wire.Return)
        self.returned += body.leases

    def close(self) -> None:
        self.is_closed = True


class Links:
    """Gives a new link for each ``take``."""

    def __init__(self) -> None:
        self.taken: list[Link] = []
        self.answer: Callable[[wire.Lend], wire.Message] = lent_of
        self.may_answer = threading.Event()
        self.may_answer.set()

    def take(self, holder: wire.Holder, timeout_s: float) -> Link:
        self.taken.append(Link(self._answer))
        return self.taken[-1]

    def _answer(self, lend: wire.Lend) -> wire.Message:
        assert self.may_answer.wait(10.0)
        return self.answer(lend)

    def learn_memory(self, *_: object) -> None:
        pass

    def needs_polls(self, holder: wire.Holder) -> bool:
        return True


class World:
    """Loans, and threads that wish for them."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self.links: Any = Links()
        self.loans = PeerLoans(self.links)
        self.pool = pool

    def wish(self, number: int, wanted: Wanted = WANTED, wait_s: float = 30.0) -> Future[Any]:
        action = LendFrom(HOLDER, key_of(number), wanted)
        return self.pool.submit(self.loans.lend, action, time.monotonic() + wait_s)

    @property
    def account(self) -> Any:
        with self.loans._lock:
            return self.loans._account(HOLDER)

    def wish_while_busy(self, first: int, *others: int) -> list[Future[Any]]:
        """One call is under way while the others wish."""
        self.links.may_answer.clear()
        wishes = [self.wish(first)]
        wait_for(lambda: self.account.is_busy, "a call")
        wishes += [self.wish(number) for number in others]
        wait_for(lambda: len(self.account.wishes) == len(others), "the wishes")
        return wishes


@pytest.fixture
def world() -> Iterator[World]:
    with ThreadPoolExecutor(16) as pool:
        new = World(pool)
        yield new
        new.links.may_answer.set()
        new.loans.close()


def test_what_is_wished_for_meanwhile_goes_in_one_call_and_back_in_few(world: World) -> None:
    wishes = world.wish_while_busy(0, 1, 2, 3, 4, 5)
    world.links.may_answer.set()
    loans = [wish.result(5.0) for wish in wishes]
    assert [loan.lease for loan in loans if loan] == [0, 1, 2, 3, 4, 5], "each thread has its own chunk"
    (link,) = world.links.taken
    assert [sorted(lend) for lend in link.lends] == [[0], [1, 2, 3, 4, 5]]
    for loan in loans[:3]:
        world.loans.give_back(HOLDER, loan)
    assert link.returned == [], "they wait for others"
    for loan in loans[3:]:
        world.loans.give_back(HOLDER, loan)
    assert sorted(link.returned) == [0, 1, 2, 3, 4, 5], "a lease is kept"
    assert world.account.is_idle


def test_no_more_is_asked_for_while_many_loans_are_out(world: World) -> None:
    wishes = world.wish_while_busy(0, *range(1, LOANS_LOW + 1))
    world.links.may_answer.set()
    loans = [wish.result(5.0) for wish in wishes]
    late = [world.wish(number) for number in (20, 21)]
    wait_for(lambda: len(world.account.wishes) == 2, "the wishes")
    assert not any(wish.done() for wish in late)
    world.loans.give_back(HOLDER, loans[0])
    assert [wish.result(5.0).lease for wish in late] == [20, 21]
    link = world.links.taken[0]
    assert sorted(link.lends[-1]) == [20, 21]
    assert link.returned == [0], "it went along with the call"


def test_a_failure_ends_all_waiting_and_the_connection(world: World) -> None:
    def fail(lend: wire.Lend) -> wire.Message:
        raise PeerTimeout("late")

    wishes = world.wish_while_busy(0, 1, 2)
    world.links.answer = fail
    world.links.may_answer.set()
    with pytest.raises(PeerTimeout, match="late"):
        wishes[0].result(5.0)
    for wish in wishes[1:]:
        with pytest.raises(PeerUnavailable, match="another call to it failed: late"):
            wish.result(5.0)
    assert len(world.links.taken[0].lends) == 1
    assert world.links.taken[0].is_closed
    assert world.account.is_idle


def test_a_failure_elsewhere_ends_the_waiting_too_and_the_connection_after_its_call(world: World) -> None:
    wishes = world.wish_while_busy(0, 1)
    world.loans.failed(HOLDER, PeerTimeout("a read"))
    with pytest.raises(PeerUnavailable, match="a read"):
        wishes[1].result(5.0)
    assert not world.links.taken[0].is_closed, "another thread uses it"
    world.links.may_answer.set()
    loan = wishes[0].result(5.0)
    assert loan is not None
    wait_for(lambda: world.links.taken[0].is_closed, "its end")
    world.loans.give_back(HOLDER, loan)
    assert world.account.is_idle
    assert world.wish(2).result(5.0) is not None
    assert len(world.links.taken) == 2


@pytest.mark.parametrize("reason", ["num_capped", "num_later"])
def test_what_is_held_back_is_asked_for_again_for_a_while(
    world: World, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter([0, 0, 1])

    def answer(lend: wire.Lend) -> wire.Message:
        return lent_of(lend, next(answers), **{reason: 1})

    world.links.answer = answer
    loan = world.wish(7).result(5.0)
    assert loan is not None
    assert loan.lease == 7
    monkeypatch.setattr(peer_loans, "HELD_BACK_MAX_S", 0.02)
    world.links.answer = lambda lend: lent_of(lend, 0, **{reason: 1})
    assert world.wish(8).result(5.0) is None
    world.links.answer = lambda lend: lent_of(lend, 0)
    num_calls = len(world.links.taken[0].lends)
    assert world.wish(9).result(5.0) is None, "it has none"
    assert len(world.links.taken[0].lends) == num_calls + 1


def test_each_meaning_has_a_call_of_its_own(world: World) -> None:
    wishes = world.wish_while_busy(0)
    wishes += [world.wish(1), world.wish(2, OTHER), world.wish(3)]
    wait_for(lambda: len(world.account.wishes) == 3, "the wishes")
    world.links.may_answer.set()
    assert [wish.result(5.0).lease for wish in wishes] == [0, 1, 2, 3]
    assert sorted(sorted(lend) for lend in world.links.taken[0].lends) == [[0], [1, 3], [2]]


@pytest.mark.parametrize("indexes", [(0, 0), (1,)])
def test_chunks_that_nobody_asked_for_are_no_answer(world: World, indexes: tuple[int, ...]) -> None:
    chunks = tuple(wire.LentChunk(index, 1, 0, bytes(16)) for index in indexes)
    world.links.answer = lambda lend: wire.Lent(chunks, 0)
    with pytest.raises(ProtocolError, match="nobody asked for"):
        world.wish(0).result(5.0)


def test_a_connection_that_the_peer_has_ended_is_replaced(world: World) -> None:
    first = world.wish(0).result(5.0)
    world.links.taken[0].has_hung_up = True
    second = world.wish(1).result(5.0)
    assert first is not None
    assert second is not None
    assert [link.is_closed for link in world.links.taken] == [True, False]
    world.loans.give_back(HOLDER, first)
    world.loans.give_back(HOLDER, second)
    assert world.account.is_idle


def test_a_wish_has_an_end_which_is_no_failure_of_the_peer(world: World) -> None:
    wishes = world.wish_while_busy(0, *range(1, LOANS_LOW + 1))
    world.links.may_answer.set()
    for wish in wishes:
        wish.result(5.0)
    began_s = time.monotonic()
    assert world.wish(30, wait_s=0.02).result(5.0) == NoTime()
    assert time.monotonic() - began_s < 1.0
    assert world.account.wishes == []
    assert [link.is_closed for link in world.links.taken] == [False]


def test_who_has_no_time_to_wait_is_lent_what_needs_no_wait(world: World) -> None:
    assert world.wish(3, wait_s=-1.0).result(5.0).lease == 3


def test_an_account_with_a_wish_is_not_forgotten_for_those_of_other_peers(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread asks of another peer just when this one has found its account."""
    monkeypatch.setattr(peer_loans, "_PEERS_MAX", 1)
    find = world.loans._account
    others: list[Future[Any]] = []

    def finding(holder: wire.Holder) -> Any:
        account = find(holder)
        if holder == HOLDER and not others:
            for number in range(3):
                other = LendFrom(wire.Holder(f"other {number}", "i", "host:2"), key_of(number), WANTED)
                others.append(world.pool.submit(world.loans.lend, other, time.monotonic() + 30.0))
            wait([others[0]], timeout=0.1)  # it ends, or waits for this thread
        return account

    monkeypatch.setattr(world.loans, "_account", finding)
    loan = world.wish(5).result(5.0)
    for other in others:
        other.result(5.0)
    assert world.account.num_loans == 1, "the account with the loan was forgotten"
    world.loans.give_back(HOLDER, loan)
    assert world.account.num_loans == 0
    assert world.account.is_idle


@pytest.mark.parametrize("end", ["a call failed", "another call of the peer failed", "the peer hung up", "given back"])
def test_a_loan_is_held_until_its_connection_has_ended(world: World, end: str) -> None:
    loan, other = (world.wish(number).result(5.0) for number in (3, 4))
    assert world.loans.is_held(HOLDER, loan)
    if end == "a call failed":
        world.links.answer = lambda lend: Links()  # which is no answer
        with pytest.raises(ProtocolError):
            world.wish(5).result(5.0)
    elif end == "another call of the peer failed":
        world.loans.failed(HOLDER, PeerTimeout("a read"))
    elif end == "the peer hung up":
        world.links.taken[0].has_hung_up = True
    else:
        world.loans.give_back(HOLDER, loan)
    assert not world.loans.is_held(HOLDER, loan)
    assert world.loans.is_held(HOLDER, other) == (end == "given back")
    world.links.answer = lent_of
    assert world.loans.is_held(HOLDER, world.wish(6).result(5.0)), "one of a connection that lives"
    assert not world.loans.is_held(HOLDER, loan), "the next connection has not that loan"


def test_whether_a_loan_is_held_is_told_after_the_call_under_way(world: World) -> None:
    loan = world.wish(3).result(5.0)
    world.wish_while_busy(4)
    asking = world.pool.submit(world.loans.is_held, HOLDER, loan)
    wait([asking], timeout=0.05)
    assert not asking.done(), "the call may say that the connection has ended"
    world.links.answer = lambda lend: Links()
    world.links.may_answer.set()
    assert asking.result(5.0) is False


# ---- the side that lends ---------------------------------------------------------------------------------------------


class Books:
    """A lender with three chunks, on a cache's thread that is this one."""

    def __init__(self) -> None:
        self.given_back: list[int] = []

    def lend(self, connection: ConnectionId, keys: list[bytes], wanted: Wanted) -> tuple[list[tuple[int, Loan]], int]:
        loans = [(at, Loan(LeaseId(100 + at), RegionHandle(64 * at, 64, 7 + at), 64)) for at in range(len(keys))]
        return loans, 0

    def give_back(self, connection: ConnectionId, leases: tuple[int, ...]) -> None:
        self.given_back += leases

    async def call(self, step: Callable[[], Any]) -> Any:
        return step()

    def tell(self, step: Callable[[], None]) -> None:
        step()


class Arena:
    """What lies behind its beginning is read only once it may be."""

    def __init__(self) -> None:
        self.may_read_on = threading.Event()

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        if offset_bytes:
            assert self.may_read_on.wait(10.0)
        return memoryview(bytes(num_bytes))


async def test_a_loan_waits_for_one_digest_and_any_connection_of_the_peer_reads_it() -> None:
    books: Any = Books()
    arena: Any = Arena()
    serving = PeerServing(PeerSelf("me", "i", b""), books, books, arena)
    one, two, stranger = (_Borrower(serving, ConnectionId(at), (name, "i")) for at, name in enumerate("ppq"))
    for borrower in (one, two, stranger):
        serving._borrowers.setdefault(borrower.peer, set()).add(borrower)
    body = wire.Lend(bytes(32), None, 64, 1, bytes(96))
    lent, _ = await one.answer(body)
    assert isinstance(lent, wire.Lent)
    assert ([loan.index for loan in lent.chunks], lent.num_later) == ([0], 2), "it has waited for all digests"
    assert books.given_back == [101, 102]
    arena.may_read_on.set()
    for number in (8, 9):
        wait_for(lambda number=number: number in serving.digests._known, "the others, which were begun")
    lent, _ = await one.answer(body)
    assert isinstance(lent, wire.Lent)
    assert ([loan.index for loan in lent.chunks], lent.num_later) == ([0, 1, 2], 0)
    assert len({*one.loans}) == 3
    begins, payload = await two.answer(wire.Read(101))
    assert begins == wire.ReadBegins(64)
    assert payload is not None
    with pytest.raises(PeerUnavailable, match="none of this peer"):
        await stranger.answer(wire.Read(101))
    serving.digests.close()
