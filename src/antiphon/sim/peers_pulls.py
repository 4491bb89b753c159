"""Pulls of a simulated server: the generator of ``cache_server.peer_pull``, driven by messages with deadlines.

Every step may come late or not at all. A pull that missed a deadline goes on as with an error; its connection is ended,
so that the holder takes the loan back, and what still comes is not taken up. The connection may also be lost while the
bytes come, as that of many loans is when another call fails: the read goes on, and finds what is there by then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Protocol

from antiphon.cache.arena import RegionHandle
from antiphon.cache.lending import Wanted
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server.peer_pull import Action, Ended, GiveBack, LendFrom, LoanEnded, ReadFrom, Verify, pull
from antiphon.core.errors import PeerTimeout, PeerUnavailable
from antiphon.protocol import peers as wire
from antiphon.sim.peers_net import Network, Pipe
from antiphon.sim.peers_server import CHUNK_BYTES, NAMESPACE, SimServer, digest_of
from antiphon.sim.timeline import CheckFailed

LEND_S = 0.25
READ_S = 0.5
READ_MEAN_S = 0.002
FLIP_SHARE = 0.05
"""Reads in which a bit is flipped on the way."""
STALL_SHARE = 0.08
STALL_S = (0.05, 0.9)
"""Reads that take so long in their middle: past their deadline, or long enough for the loan to be lost."""
LOSS_SHARE = 0.2
LOSS_S = (0.2, 0.48)
"""Reads whose loan's connection is lost in their middle, so long before their end."""

FindServer = Callable[[str], SimServer | None]


class PullEnded(Protocol):
    """Told how a pull ended."""

    def __call__(self, *, is_here: bool) -> None: ...


class SimPull:
    """One pull of one chunk into one reserved region.

    Args:
        network: of the simulation.
        server: that pulls.
        find: the life of a server that runs now.
        wanted: tier key of the chunk, and the region reserved for it.
        ended: told whether the chunk is in the region, for good.
    """

    def __init__(
        self,
        network: Network,
        server: SimServer,
        find: FindServer,
        wanted: tuple[TierKey, RegionHandle],
        ended: PullEnded,
    ) -> None:
        self._network = network
        self._timeline = network.timeline
        self._server = server
        self._find = find
        self._key, self._region = wanted
        self._ended = ended
        meant = Wanted(NAMESPACE, server.layout.fingerprint, CHUNK_BYTES)
        self._pulling: Generator[Action, Ended, bool] = pull(
            server.where, self._key, meant, lambda: self._timeline.now_s
        )
        self._step = 0
        self._pipe: Pipe | None = None
        self._holder: SimServer | None = None
        self._is_lent = False
        """The connection of the last loan has not ended, as seen here."""
        self._is_flipped = False
        """The bytes of the last read have changed on the way."""
        if server.member is None or server.where.is_known(self._key, self._timeline.now_s):
            server.process.after(0.0, lambda: self._go_on(None))
        else:
            server.member.ask([self._key], self._located)

    def _located(self, answer: wire.Message | None) -> None:
        if isinstance(answer, wire.Located):
            holders = [answer.members[number] for number in answer.holders[0]]
            self._server.where.located(self._key, holders, self._timeline.now_s)
        self._go_on(None)

    def _go_on(self, ended: Ended) -> None:
        self._step += 1
        try:
            action = self._pulling.send(ended)
        except StopIteration as stop:
            self._end(is_here=bool(stop.value))
            return
        match action:
            case LendFrom():
                self._lend(action)
            case ReadFrom():
                self._read(action)
            case Verify():
                self._verify(action)
            case GiveBack():
                if self._pipe is not None:
                    self._pipe.send(("return", action.loan.lease))
                self._go_on(None)

    def _verify(self, action: Verify) -> None:
        offset = self._region.offset_bytes
        data = bytes(self._server.memory[offset : offset + CHUNK_BYTES])
        counts = self._server.where.counts
        is_whole, num_corrupt, is_flipped = digest_of(data) == action.digest, counts["corrupt"], self._is_flipped
        if not is_whole and not is_flipped:
            self._timeline.count("bytes of a lost loan")
        self._go_on(is_whole if is_whole or self._is_lent else LoanEnded())
        if counts["corrupt"] != num_corrupt and not is_flipped:
            raise CheckFailed(f"{self._server.process.name} says that a peer sent wrong bytes, which it did not")

    def _end(self, *, is_here: bool) -> None:
        if self._pipe is not None:
            self._pipe.end()
        if is_here:
            self._timeline.count("pulled", self._server.host)
        self._ended(is_here=is_here)

    def _by(self, timeout_s: float) -> Callable[[Ended], None]:
        """Takes the answer of this step once; without one in time the step ends by a timeout."""
        step = self._step

        def answered(ended: Ended) -> None:
            if self._step == step:
                self._go_on(ended)

        def expire() -> None:
            if self._step == step:
                self._timeline.count("timeout", self._server.host)
                self._drop()
                self._go_on(PeerTimeout("no answer in time"))

        self._server.process.after(timeout_s, expire)
        return answered

    def _drop(self) -> None:
        self._is_lent = False
        if self._pipe is not None:
            self._pipe.end()
            self._pipe = None

    def _lend(self, action: LendFrom) -> None:
        self._drop()
        answered = self._by(LEND_S)
        holder = self._find(action.holder.instance)
        if holder is None or not holder.process.is_alive or holder.incarnation != action.holder.incarnation:
            self._server.process.after(0.0002, lambda: answered(PeerUnavailable("it is gone")))
            return
        self._holder = holder
        mine, theirs = self._server, holder
        to_there = Pipe(self._network, mine.process, theirs.process, (mine.host, theirs.host))
        from_there = Pipe(self._network, theirs.process, mine.process, (theirs.host, mine.host))
        desk = _Desk(theirs, (mine.host, mine.incarnation), from_there)
        to_there.on_message, to_there.on_end = desk.received, desk.ended

        def ended() -> None:
            if self._pipe is to_there:
                self._is_lent = False
            answered(PeerUnavailable("the connection ended"))

        from_there.on_message, from_there.on_end = answered, ended
        self._pipe, self._is_lent = to_there, True
        to_there.send(("lend", action))

    def _read(self, action: ReadFrom) -> None:
        answered = self._by(READ_S)
        chance = self._timeline.random
        holder, offset = self._holder, action.loan.offset
        assert holder is not None
        half = CHUNK_BYTES // 2
        stall_s = chance.uniform(*STALL_S) if not self._timeline.is_calm and chance.random() < STALL_SHARE else 0.0
        is_lost = not self._timeline.is_calm and chance.random() < LOSS_SHARE
        step = self._step
        self._is_flipped = False

        def copy(first: int, size: int) -> bool:
            if not holder.process.is_alive or self._step != step:
                return False
            start = self._region.offset_bytes + first
            self._server.memory[start : start + size] = holder.memory[offset + first : offset + first + size]
            return True

        def second() -> None:
            if not copy(half, half):
                answered(PeerUnavailable("the holder is gone"))
                return
            if not self._timeline.is_calm and chance.random() < FLIP_SHARE:
                self._is_flipped = True
                place = self._region.offset_bytes + chance.randrange(CHUNK_BYTES)
                self._server.memory[place] ^= 1 << chance.randrange(8)
                self._timeline.count("read flipped")
            answered(None)

        def first() -> None:
            copy(0, half)
            if stall_s:
                self._timeline.count("read stalled")
            loss_s = 0.0
            if is_lost and self._step == step:
                self._timeline.count("loan lost")
                loss_s = chance.uniform(*LOSS_S)
                self._drop()
            self._server.process.after(stall_s + loss_s + chance.expovariate(1 / READ_MEAN_S), second)

        self._server.process.after(chance.expovariate(1 / READ_MEAN_S), first)


class _Desk:
    """The holder's end of a pull's connection."""

    def __init__(self, holder: SimServer, who: tuple[str, str], from_here: Pipe) -> None:
        self._holder = holder
        self._from_here = from_here
        self._connection = holder.borrower(*who)

    def received(self, message: tuple[str, object]) -> None:
        verb, value = message
        lender = self._holder.lender
        if verb == "return":
            assert isinstance(value, int)
            lender.give_back(self._connection, [value])
            return
        assert isinstance(value, LendFrom)
        loans, _ = lender.lend(self._connection, [TierKey(value.key)], value.wanted)
        lent = None
        for index, loan in loans:
            offset = loan.region.offset_bytes
            lent = wire.LentChunk(index, loan.lease, offset, self._holder.digest_at(offset))
        self._from_here.send(lent)

    def ended(self) -> None:
        self._holder.lender.detach(self._connection)
        self._from_here.end()
