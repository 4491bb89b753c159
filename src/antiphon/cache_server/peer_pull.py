"""How a chunk is pulled from a peer: whom to ask, in which order, what to believe. No socket, clock or thread.

``pull`` is a generator: it yields what is to be done (``LendFrom``, ``ReadFrom``, ``Verify``, ``GiveBack``) and is sent
how that ended, an error as a value. So the same decisions run in threads and in a simulation.

Always true:

- True is returned only after the bytes in the target had the digest that their holder gave for the chunk that was
  asked for, under the meaning that was asked for.
- A peer that failed once is left alone until its breaker lets one call through, or until a new life of it joins.
- What ends because this puller has no time left for it is a miss: it is no failure of the peer, and no other is tried.
- A peer that was too slow ``SLOW_MAX`` times in a row, with nothing else in its way, has failed. A loan does not show
  that it is better; a chunk that comes does, and any answer that promises no bytes ends the trial.
- Nobody is said to have sent wrong bytes but who kept the loan until they were there.
- Holders that are remembered are few, and forgotten after ``ttl_s``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Final

from antiphon.cache.breaker import Breaker
from antiphon.cache.lending import Wanted
from antiphon.core.errors import AntiphonError
from antiphon.protocol.peers import Holder, LentChunk

RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 4.0
"""With the time of the one call that is let through, a peer that is back is used within 5 s."""
HOLDERS_MAX: Final = 2
"""Peers that are tried for one chunk: a lookup waits for it."""
PEERS_MAX: Final = 4_096
SLOW_MAX: Final = 3
"""Reads in a row that a peer was too slow for: one or two are a moment in which it, or what lies between, had other
work; each of them costs a lookup most of its time."""


@dataclass(frozen=True, slots=True)
class NoTime:
    """This puller has no room or time left, which says nothing of the holder."""


@dataclass(frozen=True, slots=True)
class TooSlow:
    """The bytes did not come in time, though nothing else was in their way for long enough."""


@dataclass(frozen=True, slots=True)
class LoanEnded:
    """The bytes have another digest, and their loan ended while they came: the holder may have used their place."""


@dataclass(frozen=True, slots=True)
class LendFrom:
    """Have the holder lease the chunk. The answer: the loan, None where it has none, NoTime, or an error."""

    holder: Holder
    key: bytes
    wanted: Wanted


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """Bring the bytes into the target. The answer: None, NoTime, TooSlow, or an error. Nothing writes to the target
    then."""

    holder: Holder
    loan: LentChunk


@dataclass(frozen=True, slots=True)
class Verify:
    """The answer: whether the bytes in the target have this digest; LoanEnded where they have not, and could not."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class GiveBack:
    """The loan is needed no more. Nothing is waited for; the answer means nothing."""

    holder: Holder
    loan: LentChunk


Action = LendFrom | ReadFrom | Verify | GiveBack
Ended = LentChunk | NoTime | TooSlow | LoanEnded | AntiphonError | bool | None


class Whereabouts:
    """Which peers hold what, as far as the coordinator said lately, and which of them are used.

    Args:
        keys_max: keys that are remembered.
        ttl_s: for how long.
    """

    def __init__(self, keys_max: int = 65_536, ttl_s: float = 10.0) -> None:
        self._keys_max = keys_max
        self._ttl_s = ttl_s
        self._holders: OrderedDict[bytes, tuple[float, tuple[Holder, ...]]] = OrderedDict()
        self._breakers: OrderedDict[tuple[str, str], Breaker] = OrderedDict()
        self._slow: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        """Reads one after another for which a life of a peer was too slow, and when the last of them was over."""
        self.counts: Counter[str] = Counter()

    def located(self, key: bytes, holders: Sequence[Holder], now_s: float) -> None:
        """The coordinator has answered."""
        self._holders.pop(key, None)
        if holders:
            self._holders[key] = now_s + self._ttl_s, tuple(holders)
            while len(self._holders) > self._keys_max:
                self._holders.popitem(last=False)

    def is_known(self, key: bytes, now_s: float) -> bool:
        """Whether holders of the key are remembered."""
        found = self._holders.get(key)
        return found is not None and found[0] > now_s

    def usable(self, key: bytes, now_s: float) -> list[Holder]:
        """Holders that a call may go to now. Changes nothing."""
        if not self.is_known(key, now_s):
            return []
        return [holder for holder in self._holders[key][1] if self._is_usable(holder, now_s)]

    def _is_usable(self, holder: Holder, now_s: float) -> bool:
        breaker = self._breakers.get(holder.life)
        return breaker is None or breaker.is_closed or breaker.is_due(now_s)

    def take(self, holder: Holder, now_s: float) -> bool:
        """Whether a call may go to the holder; where its breaker is open, for this one call."""
        if not self._is_usable(holder, now_s):
            return False
        breaker = self._breakers.get(holder.life)
        if breaker is not None and not breaker.is_closed:
            breaker.probing()
        return True

    def absent(self, holder: Holder, key: bytes) -> None:
        """The holder has it not, or not any more."""
        found = self._holders.pop(key, None)
        left = () if found is None else tuple(each for each in found[1] if each != holder)
        if found is not None and left:
            self._holders[key] = found[0], left

    def failed(self, holder: Holder, now_s: float, reason: str) -> None:
        """A call failed, or had no answer in time."""
        breaker = self._breakers.setdefault(holder.life, Breaker(RETRY_MIN_S, RETRY_MAX_S))
        self._breakers.move_to_end(holder.life)
        if breaker.failed(now_s, reason):
            self.counts["breakers_opened"] += 1
        while len(self._breakers) > PEERS_MAX:
            self._breakers.popitem(last=False)

    def slow(self, holder: Holder, began_s: float, now_s: float) -> None:
        """A read that began at ``began_s`` was not over in time, and it is the holder's doing. Reads that were under
        way at once count as one."""
        num_slow, last_s = self._slow.get(holder.life, (0, float("-inf")))
        if began_s < last_s:
            return
        num_slow += 1
        self._slow[holder.life] = num_slow, now_s
        self._slow.move_to_end(holder.life)
        while len(self._slow) > PEERS_MAX:
            self._slow.popitem(last=False)
        if num_slow >= SLOW_MAX:
            self.failed(holder, now_s, f"its bytes did not come in time, {num_slow} times in a row")

    def _is_slow(self, holder: Holder) -> bool:
        return self._slow.get(holder.life, (0, 0.0))[0] >= SLOW_MAX

    def lent(self, holder: Holder) -> None:
        """The holder has given a loan. Where it is left alone for being slow, that shows nothing yet."""
        if not self._is_slow(holder):
            self.answered(holder)

    def not_shown(self, holder: Holder, now_s: float) -> None:
        """Its bytes did not come in time, which says nothing of it: where it was slow, it may still be."""
        if self._is_slow(holder):
            self.not_asked(holder, now_s)

    def came(self, holder: Holder) -> None:
        """The bytes of a chunk came in time."""
        self._slow.pop(holder.life, None)
        self.answered(holder)

    def not_asked(self, holder: Holder, now_s: float) -> None:
        """The call was not made after all. A breaker that let it through waits anew; one that is closed stays so."""
        breaker = self._breakers.get(holder.life)
        if breaker is not None and not breaker.is_closed:
            breaker.failed(now_s, breaker.reason)

    def answered(self, holder: Holder) -> None:
        """A call was answered in time."""
        breaker = self._breakers.get(holder.life)
        if breaker is not None:
            breaker.answered()

    def breakers(self) -> dict[str, dict[str, object]]:
        """What is open, and why, by peer, for people."""
        return {
            f"{instance} ({incarnation})": {"state": breaker.state.value, "reason": breaker.reason}
            for (instance, incarnation), breaker in self._breakers.items()
            if not breaker.is_closed
        }


def pull(where: Whereabouts, key: bytes, wanted: Wanted, clock: Callable[[], float]) -> Generator[Action, Ended, bool]:
    """Pulls one chunk into the target that whoever drives this has; returns whether it is there.

    Args:
        where: holders and breakers.
        key: tier key.
        wanted: what the bytes must mean.
        clock: seconds.
    """
    for holder in where.usable(key, clock())[:HOLDERS_MAX]:
        if not where.take(holder, clock()):
            continue
        try:
            is_here = yield from _pull_from(holder, where, key, wanted, clock)
        except GeneratorExit:  # whoever drives this has a bug: the breaker must not wait for an answer
            where.not_asked(holder, clock())
            raise
        if is_here is not None:
            return is_here
    return False


def _pull_from(
    holder: Holder, where: Whereabouts, key: bytes, wanted: Wanted, clock: Callable[[], float]
) -> Generator[Action, Ended, bool | None]:
    """Pulls from one holder; returns whether the chunk is there, and None where another may be asked."""
    loan = yield LendFrom(holder, key, wanted)
    if isinstance(loan, AntiphonError):
        where.counts["failed"] += 1
        where.failed(holder, clock(), loan.message)
        return None
    if isinstance(loan, NoTime):
        where.counts["late"] += 1
        where.not_asked(holder, clock())
        return False
    if not isinstance(loan, LentChunk):
        where.answered(holder)
        where.counts["absent"] += 1
        where.absent(holder, key)
        return None
    where.lent(holder)
    began_s = clock()
    ended = yield ReadFrom(holder, loan)
    if isinstance(ended, AntiphonError):
        where.counts["failed"] += 1
        where.failed(holder, clock(), ended.message)
        yield GiveBack(holder, loan)
        return None
    if isinstance(ended, NoTime | TooSlow):
        where.counts["late"] += 1
        if isinstance(ended, TooSlow):
            where.slow(holder, began_s, clock())
        else:
            where.not_shown(holder, clock())
        yield GiveBack(holder, loan)
        return False
    verdict = yield Verify(loan.digest)
    yield GiveBack(holder, loan)
    if verdict is True:
        where.counts["pulled"] += 1
        where.came(holder)
        return True
    if isinstance(verdict, LoanEnded):
        where.counts["failed"] += 1
        where.failed(holder, clock(), "the connection of a loan ended while its bytes came, and they are others now")
        return None
    where.counts["corrupt"] += 1
    where.absent(holder, key)
    where.failed(holder, clock(), "bytes that it sent had another digest than it said")
    return None
