"""The tier ``peer``: chunks in the arenas of other cache servers, as a store that is only read.

``contains`` asks the coordinator, once for many keys; ``get_into`` pulls a chunk into its target. Both are called from
a bounded pool of threads, several at once, and decide by ``peer_pull``.

Always true:

- What cannot be had is a miss: neither a peer nor the coordinator that is dead, hung or slow is an error of the tier.
- ``get_into`` returns only when nothing writes to its target any more. With a read over NIXL that is given up that
  takes longer than its deadline: the breaker of a peer that hangs opens at the deadline, and nobody waits for its room.
- But for that it ends by ``BUDGET_S``, and what a call takes that is under way then, whatever happens.
- A chunk has room among all reads before a loan of it is asked for. What has no room, or does not come in time while
  its peer gives signs, is a miss. It is no failure of the peer, but where it was slow several times in a row.
- True means that the target has the digest that the holder gave.
- What was handed over (``expect``) is asked of the server that was named, which must prove the cluster secret, and of
  no coordinator; until it is there, that server says it will not come, does not answer, or the time is over.

It does not decide what is kept of it, and never writes to a peer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final

from antiphon.cache.lending import Wanted
from antiphon.cache_server.peer_expected import Expectations, Question
from antiphon.cache_server.peer_links import PeerLinks
from antiphon.cache_server.peer_loans import LEND_TIMEOUT_S, PeerLoans
from antiphon.cache_server.peer_pull import (
    Action,
    Ended,
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
from antiphon.cache_server.peer_room import BYTES_PER_S, Place, ReadRoom, ReadTurn
from antiphon.core.errors import AntiphonError, PeerTimeout, PeerUnavailable, ProtocolError, TierError, TierUnavailable
from antiphon.core.units import MIB
from antiphon.observe.tracing import active_span, active_traceparent
from antiphon.protocol import peers as wire
from antiphon.storage.record import PayloadDigest, address_of
from antiphon.storage.tier import ChunkMeta, TierUsage
from antiphon.transport.nixl_agent import NixlAgent, Reading, RemoteMemory
from antiphon.transport.peer_tcp import PeerSocket

TIER_NAME: Final = "peer"

BUDGET_S: Final = 3.0
"""For all of one ``get_into``. With the calls that it may have begun just before, for a loan and to give it back, it is
below what the tier plan waits."""
PIECE_BYTES: Final = 8 * MIB
"""A chunk is read over NIXL in equal pieces of at most this size: the digest of one is taken while the next comes."""
TCP_PIECE_BYTES: Final = MIB
"""So many bytes come over TCP before anything is seen of them."""
ASK_TIMEOUT_S: Final = 0.05

Locate = Callable[[list[bytes], float], wire.Located | None]


class PeerStore:
    """The tier.

    Args:
        locate: asks the coordinator; None where it does not say in time.
        links: to peers.
        arena: first address and bytes of the arena, which NIXL reads into.
    """

    def __init__(self, locate: Locate, links: PeerLinks, arena: tuple[int, int]) -> None:
        self._locate = locate
        self._links = links
        self._loans = PeerLoans(links)
        self.room = ReadRoom()
        self._arena_address, self._arena_bytes = arena
        self._lock = threading.Lock()
        self._is_closed = False
        self.digesting = threading.Semaphore(max(1, len(os.sched_getaffinity(0)) - 1))
        """So many digests at once leave a processor to the thread that reads."""
        self.on_pulled: Callable[[bytes], None] = _nobody_cares
        """Told of each key whose chunk is in its target."""
        self.expected = Expectations()
        """Under ``lock`` alone."""
        self.where = Whereabouts()
        """Under ``lock`` alone."""

    @property
    def name(self) -> str:
        """Of the tier."""
        return TIER_NAME

    def put(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        """Raises TierError: nothing is written to peers, which pull what they want."""
        raise TierError("the tier peer is only read")

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of ``keys`` a peer holds that can be used now."""
        self._check_open()
        with self._lock:
            open_questions = self.expected.questions(keys, time.monotonic())
        for question in open_questions:
            self._ask_held(question)
        with self._lock:
            now_s = time.monotonic()
            others = [key for key in keys if not self.expected.is_expected(key, now_s)]
        for first in range(0, len(others), wire.KEYS_PER_CALL_MAX):
            self._ask(others[first : first + wire.KEYS_PER_CALL_MAX])
        now_s = time.monotonic()
        with self._lock:
            return [bool(self.where.usable(key, now_s)) for key in keys]

    def _ask(self, keys: Sequence[bytes]) -> None:
        now_s = time.monotonic()
        with self._lock:
            unknown = [key for key in keys if not self.where.is_known(key, now_s)]
        if not unknown:
            return
        located = self._locate(unknown, ASK_TIMEOUT_S)
        if located is None:
            return
        members = located.members
        now_s = time.monotonic()
        with self._lock:
            for key, numbers in zip(unknown, located.holders, strict=True):
                if all(0 <= number < len(members) for number in numbers):
                    self.where.located(key, [members[number] for number in numbers], now_s)

    def expect(self, holder: wire.Holder, chunks: Sequence[tuple[bytes, bytes]], wait_s: float) -> None:
        """The holder will have these chunks (tier key and chunk key), for as long as somebody waits for them."""
        with self._lock:
            self.expected.add(holder, chunks, time.monotonic(), wait_s)

    def gone(self, keys: Sequence[bytes]) -> list[bool]:
        """Which of ``keys`` were expected and will not come."""
        with self._lock:
            return [self.expected.is_gone(key) for key in keys]

    def _ask_held(self, question: Question) -> None:
        holder, chunks = question
        with self._lock:
            if not self.where.take(holder, time.monotonic()):
                self.expected.lost(chunks)
                return
        link: PeerSocket | None = None
        try:
            link = self._links.take(holder, LEND_TIMEOUT_S)
            body = wire.AskHeld(b"".join(key for key, _ in chunks), b"".join(key for _, key in chunks))
            held = link.call(body, LEND_TIMEOUT_S)
            if not isinstance(held, wire.Held) or len(held.states) != len(chunks):
                raise ProtocolError(f"AskHeld is not answered by {type(held).__name__}")
            states = [
                wire.HELD_STATES[number] if number < len(wire.HELD_STATES) else "refused" for number in held.states
            ]
        except AntiphonError as error:
            if link is not None:
                link.close()
            self.broken(holder, error)
            with self._lock:
                self.where.counts["failed"] += 1
                self.where.failed(holder, time.monotonic(), error.message)
                self.expected.lost(chunks)
            self.room.look()
            return
        self._links.give_back(holder, link)
        now_s = time.monotonic()
        with self._lock:
            self.where.answered(holder)
            for key in self.expected.answered(chunks, states, now_s):
                self.where.located(key, [holder], now_s)

    def get_into(self, key: bytes, meta: ChunkMeta, into: memoryview) -> bool:
        """Pulls a chunk into ``into``, of ``meta.num_bytes`` bytes; False where no peer gave it."""
        self._check_open()
        assert len(into) == meta.num_bytes, (len(into), meta.num_bytes)
        end_s = time.monotonic() + BUDGET_S
        self._ask([key])
        drive = _Drive(self, into, end_s)
        try:
            if drive.take_room(lambda: self._is_usable(key)):
                return self._pull(key, meta, drive)
            if self._is_usable(key):
                with self._lock:
                    self.where.counts["late"] += 1
            return False
        finally:
            drive.close()

    def _is_usable(self, key: bytes) -> bool:
        with self._lock:
            return bool(self.where.usable(key, time.monotonic()))

    def _pull(self, key: bytes, meta: ChunkMeta, drive: _Drive) -> bool:
        wanted = Wanted(meta.namespace, meta.layout_fingerprint, meta.num_bytes, meta.format_version)
        with self._lock:
            pulling = pull(self.where, key, wanted, time.monotonic)
        try:
            ended: Ended = None
            while True:
                with self._lock:
                    try:
                        action = pulling.send(ended)
                    except StopIteration as stop:
                        if stop.value:
                            self.on_pulled(key)
                        return bool(stop.value)
                if isinstance(ended, AntiphonError):
                    self.room.look()
                ended = drive.do(action)
        finally:
            with self._lock:
                pulling.close()

    def hung(self, holder: wire.Holder, error: PeerTimeout) -> None:
        """A read from the holder has missed its deadline, and is not over yet."""
        self.broken(holder, error)
        with self._lock:
            self.where.failed(holder, time.monotonic(), error.message)
        self.room.look()

    def broken(self, holder: wire.Holder, error: AntiphonError) -> None:
        """A call to the holder failed: nobody waits for another one to it."""
        self._loans.failed(holder, error)
        self._links.failed(holder)

    def breakers(self) -> dict[str, dict[str, object]]:
        """Which peers are left alone, and why."""
        with self._lock:
            return self.where.breakers()

    def remove(self, keys: Sequence[bytes]) -> None:
        """Nothing is removed from peers."""

    def keys(self) -> Iterator[bytes] | None:
        """None: the coordinator is asked instead."""
        return None

    def usage(self) -> TierUsage:
        """Nothing of this server's."""
        return TierUsage(0, 0, None)

    def probe(self) -> None:
        """Nothing to try out: each peer and the coordinator have a breaker of their own."""
        self._check_open()

    def close(self) -> None:
        """Closes the links."""
        self._is_closed = True
        self._loans.close()
        self._links.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierUnavailable("the tier peer is closed")

    def is_registered(self, address: int, num_bytes: int) -> bool:
        """Whether NIXL can read into this memory."""
        return self._arena_address <= address and address + num_bytes <= self._arena_address + self._arena_bytes


def _nobody_cares(key: bytes) -> None:
    pass


def _note_transport(name: str) -> None:
    span = active_span()
    if span is not None:
        span.attributes["antiphon.transport"] = name


class _Drive:
    """Does what one pull asks for.

    Args:
        store: whose.
        into: the target.
        end_s: when it is over, on the monotonic clock.
    """

    def __init__(self, store: PeerStore, into: memoryview, end_s: float) -> None:
        self._store = store
        self._links = store._links
        self._loans = store._loans
        self._into = into
        self._end_s = end_s
        self._loan_end_s = end_s - min(BUDGET_S / 2, len(into) / BYTES_PER_S)
        """Who still waits to ask for a loan then cannot have the bytes in time."""
        self._place = Place(len(into))
        self._lent: tuple[wire.Holder, wire.LentChunk] | None = None
        """What is to be given back."""
        self._digest = b""
        """Of what was read last."""

    def take_room(self, is_wanted: Callable[[], bool]) -> bool:
        """Waits for room, as long as it is wanted and in time; returns whether there is some, until ``close``."""
        return self._store.room.take(self._place, self._end_s - LEND_TIMEOUT_S, is_wanted)

    def do(self, action: Action) -> Ended:
        """The answer to ``action``; errors are values."""
        try:
            match action:
                case LendFrom():
                    return self._lend(action)
                case ReadFrom():
                    return self._read(action)
                case Verify():
                    return self._verify(action)
                case GiveBack():
                    self._give_back()
                    return None
        except AntiphonError as error:
            if isinstance(action, LendFrom):
                self._links.failed(action.holder)
            return error

    def _lend(self, action: LendFrom) -> wire.LentChunk | NoTime | None:
        self._give_back()
        if not self._place.is_held and not self.take_room(lambda: True):
            return NoTime()
        span = active_span()
        if span is not None:
            span.attributes["antiphon.peer"] = action.holder.instance
        loan = self._loans.lend(action, self._loan_end_s, active_traceparent())
        self._lent = (action.holder, loan) if isinstance(loan, wire.LentChunk) else None
        return loan

    def _verify(self, action: Verify) -> bool | LoanEnded:
        if self._digest == action.digest:
            return True
        is_held = self._lent is not None and self._loans.is_held(*self._lent)
        return False if is_held else LoanEnded()

    def _read(self, action: ReadFrom) -> NoTime | TooSlow | None:
        num_bytes = len(self._into)
        agent, memory = self._links.agent, self._links.memory_of(action.holder)
        if agent is not None and memory is not None and self._store.is_registered(address_of(self._into), num_bytes):
            try:
                late = self._read_nixl(action, agent, memory)
            except PeerUnavailable:
                self._links.nixl_ended(action.holder, is_ok=False)  # a peer that lives is read over TCP
            else:
                if late is None:
                    self._links.nixl_ended(action.holder, is_ok=True)
                    _note_transport("nixl")
                return late
        if time.monotonic() >= self._end_s:
            return NoTime()
        _note_transport("tcp")
        num_unseen = min(num_bytes, TCP_PIECE_BYTES)
        with self._store.room.reading(action.holder.life, num_bytes, num_unseen, self._end_s) as turn:
            return self._read_tcp(action, turn)

    def _read_tcp(self, action: ReadFrom, turn: ReadTurn) -> NoTime | TooSlow | None:
        digest = PayloadDigest()

        def came(piece: memoryview) -> None:
            turn.came(len(piece))
            digest.update(piece)

        link = self._links.take(action.holder, LEND_TIMEOUT_S)
        try:
            link.read_into(action.loan.lease, self._into, turn.deadline_s, came)
        except AntiphonError as error:
            if isinstance(error, PeerTimeout) and not turn.is_hung:
                return TooSlow() if turn.is_slow else NoTime()
            self._store.broken(action.holder, error)
            raise
        finally:
            self._links.give_back(action.holder, link)
        self._digest = digest.digest()
        return None

    def _read_nixl(self, action: ReadFrom, agent: NixlAgent, memory: RemoteMemory) -> NoTime | TooSlow | None:
        """Raises as ``Reading.wait``; afterwards nothing writes to the target."""
        num_bytes, holder = len(self._into), action.holder
        readings: list[Reading] = []
        ended: NoTime | TooSlow | AntiphonError
        with self._store.room.reading(holder.life, num_bytes, num_bytes, self._end_s) as turn:
            try:
                self._take_pieces(agent, memory, action.loan.offset, turn, readings)
                return None
            except AntiphonError as error:
                ended = error
                if isinstance(error, PeerTimeout) and not turn.is_hung:
                    ended = TooSlow() if turn.is_slow else NoTime()
        if isinstance(ended, PeerTimeout):
            self._store.room.give_back(self._place)  # what is still on its way keeps nobody waiting
            self._store.hung(holder, ended)
        _settle(agent, readings)
        if isinstance(ended, AntiphonError):
            raise ended
        return ended

    def _take_pieces(
        self, agent: NixlAgent, memory: RemoteMemory, offset: int, turn: ReadTurn, readings: list[Reading]
    ) -> None:
        """Orders ``readings`` of all pieces of what is at ``offset``, and takes the digest of each as it comes."""
        num_bytes = len(self._into)
        here, there = address_of(self._into), memory.address + offset
        num_pieces = -(-num_bytes // PIECE_BYTES)
        pieces = list(pairwise(num_bytes * number // num_pieces for number in range(num_pieces + 1)))
        digest = PayloadDigest()
        for start, end in pieces:
            readings.append(agent.read(memory, there + start, here + start, end - start))
        for reading, (start, end) in zip(readings, pieces, strict=True):
            reading.wait(turn.look_s)
            turn.came(end - start)
            with self._store.digesting:
                digest.update(self._into[start:end])
        self._digest = digest.digest()

    def _give_back(self) -> None:
        """The loan goes back."""
        lent, self._lent = self._lent, None
        if lent is not None:
            self._loans.give_back(*lent)

    def close(self) -> None:
        """Loan and room go back."""
        self._give_back()
        self._store.room.give_back(self._place)


def _settle(agent: NixlAgent, readings: Sequence[Reading]) -> None:
    """Gives reads up, and waits until none of them writes any more."""
    for reading in readings:
        with contextlib.suppress(PeerUnavailable):  # closed: its end settles the read
            agent.expire(reading)
    for reading in readings:
        reading.settle()
