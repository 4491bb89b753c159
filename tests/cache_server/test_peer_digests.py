"""Digests of what can be lent: each is taken once, soon after the store, and not of what came from a peer. What a peer
waits for goes first, and no wait is longer than it may be."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import xxhash

from antiphon.cache.arena import RegionHandle
from antiphon.cache.events import ConnectionId, LeaseId
from antiphon.cache.lending import Loan, Shelf
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server import peer_digests
from antiphon.cache_server.peer_digests import AHEAD_MAX, THREADS, Digests
from antiphon.cache_server.peer_serving import PeerSelf, PeerServing, _Borrower
from antiphon.core.errors import PeerUnavailable
from antiphon.protocol import peers as wire
from tests.cache.test_lending import KEYS, new_cache, store
from tests.cache_server.test_peer_loans import Books
from tests.cache_server.world import wait_for

BYTES = bytes(range(256)) * 32


class GatedArena:
    """Says what was read of it. Where its gate is closed, reads wait until they are let through."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.broken: set[int] = set()
        self._may_read = set(range(100))
        self._changed = threading.Condition()

    def close_gate(self) -> None:
        self._may_read.clear()

    def let_through(self, *numbers: int) -> None:
        with self._changed:
            self._may_read.update(numbers)
            self._changed.notify_all()

    def view(self, offset_bytes: int, num_bytes: int) -> memoryview:
        number = offset_bytes // 64
        self.read.append(number)
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._may_read, 10.0)
        if number in self.broken:
            raise ValueError("no such bytes")
        return memoryview(BYTES)[offset_bytes : offset_bytes + num_bytes]


def region_of(number: int) -> RegionHandle:
    return RegionHandle(64 * number, 64, 100 + number)


def loan_of(number: int) -> Loan:
    return Loan(LeaseId(1 + number), region_of(number), 64)


def digest_of(number: int) -> bytes:
    return xxhash.xxh3_128(BYTES[64 * number : 64 * number + 64]).digest()


@pytest.fixture
def arena() -> Any:
    return GatedArena()


@pytest.fixture
async def digests(arena: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Digests]:
    monkeypatch.setattr(peer_digests, "WAIT_S", 10.0)  # however busy the machine is
    new = Digests(arena)
    yield new
    arena.let_through(*range(100))
    new.close()


async def soon(holds: Callable[[], bool], what: str) -> None:
    await asyncio.get_running_loop().run_in_executor(None, wait_for, holds, what)


async def test_it_is_taken_once_ahead_or_when_it_is_asked_for(digests: Digests, arena: Any) -> None:
    stored, asked, pulled = range(3)
    digests.stored(TierKey(b"a" * 32), region_of(stored), 64)
    digests.pulled(b"b" * 32)
    digests.stored(TierKey(b"b" * 32), region_of(pulled), 64)
    await soon(lambda: digests.num_waiting == 0, "what is taken ahead")
    assert arena.read == [stored], "what came from a peer is digested again"
    for number in (stored, asked, pulled, stored, asked):
        await digests.first([loan_of(number)])
        assert digests.known(loan_of(number)) == digest_of(number)
    assert arena.read == [stored, asked, pulled]
    digests.close()
    digests.stored(TierKey(b"c" * 32), region_of(4), 64)
    digests.begin(loan_of(4))
    await digests.first([loan_of(4)])
    assert 4 not in arena.read, "closed"
    assert digests.num_waiting == 0


async def test_what_is_asked_for_again_is_taken_once(digests: Digests, arena: Any) -> None:
    """Also by the thread that takes digests ahead."""
    arena.close_gate()
    digests.stored(TierKey(b"a" * 32), region_of(0), 64)
    digests.stored(TierKey(b"b" * 32), region_of(1), 64)
    await soon(lambda: arena.read == [0], "the first")
    for _ in range(5):
        for number in range(8):
            digests.begin(loan_of(number))
    await soon(lambda: len(arena.read) == 1 + THREADS, "busy threads")
    assert digests.num_waiting == 2 + 5 + THREADS
    waits = [asyncio.create_task(digests.first([loan_of(0)])) for _ in range(3)]
    arena.let_through(*range(8))
    await asyncio.gather(*waits)
    assert digests.known(loan_of(0)) == digest_of(0)
    await soon(lambda: digests.num_waiting == 0, "all")
    assert sorted(arena.read) == list(range(8))


async def test_what_is_waited_for_goes_first_and_what_is_being_taken_is_not_waited_for_elsewhere(
    digests: Digests, arena: Any
) -> None:
    arena.close_gate()
    for number in range(8):
        digests.begin(loan_of(number))
    await soon(lambda: sorted(arena.read) == [0, 1], "busy threads")
    last = asyncio.create_task(digests.first([loan_of(7)]))
    running = asyncio.create_task(digests.first([loan_of(number) for number in (9, 5, 1, 0)]))
    await asyncio.sleep(0)
    arena.let_through(0, 1)
    await running
    await soon(lambda: len(arena.read) == 4, "the next two")
    assert sorted(arena.read[2:]) == [2, 7], "what is waited for is at the end of the queue"
    arena.let_through(*range(8))
    await last
    assert digests.known(loan_of(7)) == digest_of(7)
    assert 9 not in arena.read, "a digest was begun although another was being taken"


async def test_a_wait_ends_in_time_whatever_the_threads_do(
    digests: Digests, arena: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_digests, "WAIT_S", 0.02)
    arena.close_gate()
    began_s = time.monotonic()
    await digests.first([loan_of(0)])
    assert digests.known(loan_of(0)) is None
    assert 0.02 <= time.monotonic() - began_s < 5.0
    arena.let_through(0)
    await soon(lambda: digests.known(loan_of(0)) is not None, "the digest, which was begun")


async def test_no_more_wait_than_may(digests: Digests, arena: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_digests, "QUEUED_MAX", 3)
    digests._num_ahead = AHEAD_MAX
    digests.stored(TierKey(b"a" * 32), region_of(0), 64)
    assert digests.num_waiting == AHEAD_MAX
    digests._num_ahead = 0
    arena.close_gate()
    for number in range(2):
        digests.begin(loan_of(number))
    await soon(lambda: sorted(arena.read) == [0, 1], "busy threads")
    for number in range(2, 7):
        digests.begin(loan_of(number))
    assert list(digests._queue) == [102, 103, 104]
    dropped = asyncio.create_task(digests.first([loan_of(4)]))
    await asyncio.sleep(0)
    waits = [asyncio.create_task(digests.first([loan_of(number)])) for number in (8, 9, 10)]
    await asyncio.sleep(0)
    assert list(digests._queue) == [110, 109, 108], "the others are dropped, and asked for again"
    await dropped
    arena.let_through(*range(11))
    await asyncio.gather(*waits)
    assert digests.known(loan_of(10)) == digest_of(10)
    await soon(lambda: digests.num_waiting == 0, "nothing that is being taken")
    assert digests._taking.keys() == digests._queue.keys() == set()


async def test_a_digest_that_cannot_be_taken_holds_up_nobody(digests: Digests, arena: Any) -> None:
    arena.broken = {0, 1}
    began_s = time.monotonic()
    digests.stored(TierKey(b"a" * 32), region_of(1), 64)
    for number in (0, 1, 0):
        await digests.first([loan_of(number)])
        assert digests.known(loan_of(number)) is None
    assert time.monotonic() - began_s < peer_digests.WAIT_S, "it was waited for"
    await digests.first([loan_of(2)])
    assert digests.known(loan_of(2)) == digest_of(2), "the threads go on"
    await soon(lambda: digests.num_waiting == 0, "nothing that is being taken")
    assert digests._taking == {}


async def test_closing_ends_the_waits(arena: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_digests, "WAIT_S", 60.0)
    digests = Digests(arena)
    arena.close_gate()
    waits = [asyncio.create_task(digests.first([loan_of(number)])) for number in range(4)]
    await soon(lambda: len(arena.read) == THREADS, "busy threads")
    closing = asyncio.get_running_loop().run_in_executor(None, digests.close)
    await soon(lambda: sum(wait.done() for wait in waits) == len(waits) - THREADS, "those that no thread takes")
    arena.let_through(*range(4))
    await asyncio.gather(closing, *waits)
    assert len(arena.read) == THREADS


async def test_each_call_for_loans_is_answered_in_time_though_all_digests_are_slow(
    arena: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are repeated as a puller does. What was leased without a digest goes back."""
    monkeypatch.setattr(peer_digests, "WAIT_S", 0.02)
    books: Any = Books()
    serving = PeerServing(PeerSelf("me", "i", b""), books, books, arena)
    arena.close_gate()
    borrowers = [_Borrower(serving, ConnectionId(number), ("p", "i")) for number in range(2)]
    body = wire.Lend(bytes(32), None, 64, 1, bytes(32 * 16))
    for _ in range(3):
        began_s = time.monotonic()
        answers = await asyncio.gather(*(borrower.answer(body) for borrower in borrowers))
        assert time.monotonic() - began_s < 5.0
        assert [(len(lent.chunks), lent.num_later) for lent, _ in answers] == [(0, 16)] * 2  # type: ignore[union-attr]
        assert not borrowers[0].loans
    assert len(books.given_back) == 2 * 3 * 16
    assert len(arena.read) == THREADS
    arena.let_through(*range(16))
    await soon(lambda: serving.digests.num_waiting == 0, "the digests")
    lent, _ = await borrowers[0].answer(body)
    assert (len(lent.chunks), lent.num_later) == (16, 0)  # type: ignore[union-attr]
    assert len(arena.read) == 16, "a digest was taken twice"
    serving.digests.close()


class Stream:
    """A connection of a peer that has shown the secret. It says what the test gives it; bytes wait to be sent."""

    def __init__(self) -> None:
        self.said: asyncio.Queue[wire.Message | None] = asyncio.Queue()
        self.sent: asyncio.Queue[wire.Message] = asyncio.Queue()
        self.is_sending = asyncio.Event()
        self.may_send = asyncio.Event()

    async def prove(self, answerer: object) -> wire.Hello:
        return wire.Hello(1, wire.PEER, "p", "i", bytes(16))

    async def receive(self) -> wire.Envelope:
        body = await self.said.get()
        if body is None:
            raise PeerUnavailable("it has ended")
        return wire.Envelope(1, body)

    async def send(self, call_id: int, body: wire.Message, payload: memoryview | None = None) -> None:
        if payload is not None:
            self.is_sending.set()
            await self.may_send.wait()
        self.sent.put_nowait(body)

    def close(self) -> None:
        pass


class AttachingBooks(Books):
    """Also knows which connections are attached."""

    def __init__(self) -> None:
        super().__init__()
        self.attached: list[ConnectionId] = []

    def attach(self, connection: ConnectionId, instance: str, incarnation: str) -> None:
        self.attached.append(connection)

    def detach(self, connection: ConnectionId) -> None:
        self.attached.remove(connection)


@pytest.mark.parametrize("ending", ["sent", "ended"])
async def test_a_lease_outlives_its_connection_while_another_sends_under_it(arena: Any, ending: str) -> None:
    books: Any = AttachingBooks()
    serving = PeerServing(PeerSelf("me", "i", b""), books, books, arena)
    one, two = Stream(), Stream()
    owner = asyncio.create_task(serving._serve(one))  # type: ignore[arg-type]
    one.said.put_nowait(wire.Lend(bytes(32), None, 64, 1, bytes(32)))
    assert isinstance(await one.sent.get(), wire.Lent)
    reader = asyncio.create_task(serving._serve(two))  # type: ignore[arg-type]
    two.said.put_nowait(wire.Read(100))
    await two.is_sending.wait()
    one.said.put_nowait(None)
    await owner
    assert len(books.attached) == 2, "the lease has ended with its connection"
    if ending == "sent":
        two.may_send.set()
        two.said.put_nowait(wire.Read(100))
        assert isinstance(await two.sent.get(), wire.ReadBegins)
        assert isinstance(await two.sent.get(), wire.Failure), "what begins afterwards is under no lease"
        assert len(books.attached) == 1
        two.said.put_nowait(None)
        await reader
    else:
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
    assert books.attached == []
    serving.digests.close()


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
