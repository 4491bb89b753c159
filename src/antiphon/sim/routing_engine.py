"""A simulated engine: prefill with NIXL's leases, or decode; and the ways in which it can fail.

A prefill engine holds the blocks of an answered prefill until a decode engine has pulled them or the lease ends, and
frees them then. A handle whose blocks are free is read without any error: the reader gets what others have written
there. A decode engine that has admitted a request keeps its lease alive while it waits, as vLLM's heartbeats do, and
frees the blocks if the request is aborted. It fails a load whose blocks expired while it was stopped itself: what an
engine does that stands still for longer than a lease is not the router's to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.routing.endpoint import Role
from antiphon.sim.network import Channel, Process
from antiphon.sim.routing_values import (
    ADMIT_S,
    COMPUTE_S,
    LEASE_S,
    TOKEN_S,
    Answer,
    Ask,
    Done,
    Garbage,
    Head,
    Invalid,
    RoutingFault,
    Said,
    SimHandle,
    Token,
)
from antiphon.sim.timeline import CheckFailed, Timeline

PULL_AGAIN_S = 0.05
SLOWNESS = 12.0

_F = RoutingFault


class Link:
    """A connection: what the router sends on ``up``, what the engine sends on ``down``."""

    def __init__(self, router: Process, engine: Process) -> None:
        self.up: Channel[Ask] = Channel(router, engine)
        self.down: Channel[Said] = Channel(engine, router)

    def close(self) -> None:
        """From the router's side."""
        self.up.end()


@dataclass(slots=True, eq=False)
class Work:
    """A request that an engine has."""

    ask: Ask
    link: Link
    is_admitted: bool = False
    is_over: bool = False


@dataclass(slots=True)
class Hold:
    """Blocks of an answered prefill."""

    until_s: float
    reader: Work | None = None
    """A decode engine's request that keeps the lease alive."""


class SimEngine:
    """One address, through all its lives.

    Args:
        timeline: the time that it lives in.
        name: unique; its role is its first letter, ``p`` or ``d``.
        find: the engine of a name, for pulling.
    """

    def __init__(self, timeline: Timeline, name: str, find: Callable[[str], SimEngine]) -> None:
        self.timeline = timeline
        self.name = name
        self.role: Role = "prefill" if name.startswith("p") else "decode"
        self.incarnation = 0
        self.modes: dict[RoutingFault, int] = {}
        """Ways to behave, each with the number of faults that want it."""
        self.last_stopped_s = float("-inf")
        self.expired: list[SimHandle] = []
        """Leases that ended before anybody pulled."""
        self._find = find
        self.start()

    @property
    def engine_id(self) -> str:
        """Of the present life."""
        return f"{self.name}#{self.incarnation}"

    def start(self) -> None:
        """Begin a life."""
        self.incarnation += 1
        self.process = Process(self.timeline, self.engine_id)
        self.holds: dict[int, Hold] = {}
        self.works: list[Work] = []
        self._num_holds = 0
        self._ids: set[str] = set()

    def kill(self) -> None:
        """End a life: blocks and requests are gone."""
        self.process.kill()
        for work in self.works:
            work.is_over = True
        self.works = []
        self.holds = {}

    def free(self, handle: SimHandle) -> None:
        """A decode engine says that it does not want these blocks any more."""
        if handle.incarnation == self.incarnation:
            self.holds.pop(handle.number, None)

    def accept(self, router: Process) -> Link:
        """A connection."""
        link = Link(router, self.process)
        link.up.on_message = lambda ask: self._begin(ask, link)
        link.up.on_end = lambda: self._aborted(link)
        return link

    # -- requests ---------------------------------------------------------------------------------------------------

    def _begin(self, ask: Ask, link: Link) -> None:
        if ask.id in self._ids:
            raise CheckFailed(f"{self.name} was sent the request id {ask.id} twice in one life")
        self._ids.add(ask.id)
        work = Work(ask, link)
        self.works.append(work)
        chance = self.timeline.random
        if self.role == "prefill":
            self._after(chance.uniform(*COMPUTE_S), work, lambda: self._answer_prefill(work))
        else:
            self._after(chance.uniform(*ADMIT_S), work, lambda: self._admit(work))

    def _aborted(self, link: Link) -> None:
        for work in [work for work in self.works if work.link is link]:
            handle = work.ask.handle
            if work.is_admitted and handle is not None:
                self._find(handle.engine).free(handle)
            self._over(work)

    def _over(self, work: Work) -> None:
        work.is_over = True
        if work in self.works:
            self.works.remove(work)

    def _after(self, delay_s: float, work: Work, action: Callable[[], None]) -> None:
        """Does ``action``, unless the request is over by then."""
        slowness = SLOWNESS if _F.SLOW in self.modes else 1.0
        self.process.after(delay_s * slowness, lambda: None if work.is_over else action())

    def _say(self, work: Work, said: Said) -> None:
        self.timeline.count(f"said {type(said).__name__}")
        for _ in range(2 if _F.DUPLICATE in self.modes else 1):
            work.link.down.send(said)

    def _fails(self, work: Work) -> bool:
        """Whether it answers with a failure, or not at all."""
        chance, ask = self.timeline.random, work.ask
        invalid_here = Invalid.FOR_PREFILL if self.role == "prefill" else Invalid.FOR_DECODE
        if ask.invalid is invalid_here and not (ask.is_salted and chance.random() < 0.5):  # one token may be acceptable
            self._say(work, Answer(400))
            if ask.handle is not None and chance.random() < 0.5:  # some versions free the blocks, some do not
                self._find(ask.handle.engine).free(ask.handle)
        elif ask.invalid is Invalid.POISON or _F.ERRORS in self.modes:
            self._say(work, Answer(500))
        elif _F.OVERLOAD in self.modes:
            self._say(work, Answer(chance.choice((429, 503)), retry_after_s=chance.choice((None, 3))))
        elif _F.GARBAGE in self.modes and chance.random() < 0.7:
            self._say(work, Garbage())
        elif _F.RESET in self.modes and chance.random() < 0.7:
            work.link.down.end()
        else:
            return _F.LOSE in self.modes and chance.random() < 0.7
        self._over(work)
        return True

    # -- prefill ----------------------------------------------------------------------------------------------------

    def _answer_prefill(self, work: Work) -> None:
        if self._fails(work):
            return
        handle = None
        if _F.NO_HANDLE not in self.modes:
            self._num_holds += 1
            number = self._num_holds
            handle = SimHandle(self.name, self.incarnation, number)
            self.holds[number] = Hold(self.timeline.now_s + LEASE_S)
            self._expire_later(number, LEASE_S)
        self._say(work, Head())
        self._say(work, Answer(200, handle))
        self._over(work)

    def _expire_later(self, number: int, delay_s: float) -> None:
        self.process.after(delay_s, lambda: self._expire(number))

    def _expire(self, number: int) -> None:
        hold = self.holds.get(number)
        if hold is None:
            return
        if hold.reader is not None and not hold.reader.is_over:
            hold.until_s = self.timeline.now_s + LEASE_S
        if self.timeline.now_s >= hold.until_s:
            del self.holds[number]
            self.expired.append(SimHandle(self.name, self.incarnation, number))
            self.timeline.count("lease expired")
            self.timeline.note(f"{self.name} lease {number} expired")
        else:
            self._expire_later(number, hold.until_s - self.timeline.now_s)

    # -- decode -----------------------------------------------------------------------------------------------------

    def _admit(self, work: Work) -> None:
        handle = work.ask.handle
        if self._fails(work):
            return
        work.is_admitted = True
        if handle is None:
            self._generate(work, 0, True)
            return
        hold = self._find(handle.engine).holds.get(handle.number)
        if hold is not None and handle.incarnation == self._find(handle.engine).incarnation:
            hold.reader = work
        self._after(self.timeline.random.uniform(*ADMIT_S), work, lambda: self._pull(work, handle))

    def _pull(self, work: Work, handle: SimHandle) -> None:
        holder = self._find(handle.engine)
        is_gone = not holder.process.is_alive or handle.incarnation != holder.incarnation
        if not is_gone and holder.process.is_stopped:
            self._after(PULL_AGAIN_S, work, lambda: self._pull(work, handle))
            return
        is_right = not is_gone and holder.holds.pop(handle.number, None) is not None
        if is_gone or (not is_right and self.last_stopped_s > self.timeline.now_s - 4 * LEASE_S):
            self.timeline.count("load failed")
            self._say(work, Answer(500))
            self._over(work)
            return
        if not is_right and not work.ask.is_salted:
            raise CheckFailed(f"{self.name} read other people's KV for {work.ask.id}: handle {handle} was freed")
        self.timeline.count("pulled" if is_right else "salted read of freed blocks")
        self._generate(work, 0, is_right)

    def _generate(self, work: Work, index: int, is_right: bool) -> None:
        chance, ask = self.timeline.random, work.ask
        if index and _F.RESET in self.modes and chance.random() < 0.3:
            work.link.down.end()
            self._over(work)
            return
        if index and _F.MUTE in self.modes and chance.random() < 0.3:
            return
        is_cut = index > 0 and _F.TRUNCATE in self.modes and chance.random() < 0.3
        if index == ask.num_tokens or is_cut:
            if not is_cut:
                self._say(work, Done(is_right))
            work.link.down.end()
            self._over(work)
            return
        if ask.is_stream:
            self._say(work, Token(index, is_right))
        self._after(chance.uniform(*TOKEN_S), work, lambda: self._generate(work, index + 1, is_right))
