"""What the side of the engine must keep to, so that a promise of the cache stays one. The rules of a cache client:

1. A call without an answer for 50 ms counts as a miss; while one is overdue, no other is made.
2. What is answered after nobody waits any more is undone: ``Found`` is released, ``Reserved`` aborted, a noted copy
   ended.
3. A connection that ended is drained: its socket stays open and its arena mapped while a copy holds it, and for
   ``DRAIN_QUIET_S`` after its end, since the server takes our end of file for "touches the arena no more".
4. A promise is loaded only through a session that was attached when the promise arrived, and has not been closed
   since: only then the engine was never without a connection, and the lease never ended (``Session.covers``).
5. A session whose oldest call is not answered for ``GIVE_UP_S`` is given up: nothing more is sent, and another is
   begun. It is read on to its end, since a lookup may have found something.
6. A lookup that is said to wait for tiers is waited for as long as the server says, and the deadline; it makes no call
   overdue. What it finds is a promise as any other.
7. A release is owed until it is answered. When the connection ends first, it is sent again to the same life of the
   server; a new life knows nothing of it.

``scheduler`` and ``worker`` add: blocks are not reused while a copy reads or writes them; a commit follows the end of
its copy; a release follows the end of its loads, unless the copies were announced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import Attached, Found, LeaseNoted, Onboarding, Refused, Reply, Reserved
from antiphon.cache.events import Abort, Attach, ConnectionId, CopyBegan, CopyEnded, Event, LeaseId, Release
from antiphon.sim.memory import Arena, Mapping
from antiphon.sim.network import Channel, Process

DEADLINE_S = 0.05
DRAIN_QUIET_S = 0.6
GIVE_UP_S = 0.6
RECONNECT_S = (0.03, 0.2)

UNKNOWN = ConnectionId(0)
"""Stands for the caller's connection in a call; the server knows which it is."""

OnAnswer = Callable[[Reply | None], None]
"""Takes the answer, or None where the connection ended before it."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a client sends."""

    id: int
    event: Event


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server sends. ``arena``: with the answer to ``Attach``."""

    id: int
    reply: Reply
    arena: Arena | None = None


@dataclass(frozen=True, slots=True)
class Promise:
    """What a lookup found.

    Args:
        incarnation: of the server.
        arrived_at_s: when the answer arrived.
    """

    incarnation: str
    arrived_at_s: float
    request: str
    lease: LeaseId
    regions: tuple[RegionHandle, ...]


@dataclass(slots=True, eq=False)
class Pending:
    """A call without an answer."""

    event: Event
    sent_at_s: float
    on_answer: OnAnswer
    is_abandoned: bool = False
    is_answered: bool = False
    waits_until_s: float | None = None
    """Where it waits for tiers."""


@dataclass(slots=True, eq=False)
class Session:
    """One attached connection, from its ``Attached`` on.

    Args:
        num_holds: copies that use its mapping.
        ended_at_s: when its end was seen; None while it is open.
    """

    incarnation: str
    mapping: Mapping
    to_server: Channel[Call]
    attached_at_s: float
    pending: dict[int, Pending] = field(default_factory=dict)
    onboarding: dict[int, Pending] = field(default_factory=dict)
    num_holds: int = 0
    ended_at_s: float | None = None
    is_closed: bool = False

    @property
    def is_open(self) -> bool:
        """Whether calls can be made."""
        return self.ended_at_s is None

    def is_responsive(self, now_s: float) -> bool:
        """Whether no call is overdue."""
        oldest = next(iter(self.pending.values()), None)
        return oldest is None or now_s - oldest.sent_at_s < DEADLINE_S

    def covers(self, promise: Promise) -> bool:
        """Whether the promise may be loaded through it (rule 4)."""
        return (
            not self.is_closed
            and self.incarnation == promise.incarnation
            and self.attached_at_s <= promise.arrived_at_s
        )

    def is_drained(self, now_s: float) -> bool:
        """Whether it may be closed (rule 3). A scheduler holds nothing and touches no arena."""
        return self.ended_at_s is not None and not self.num_holds and now_s >= self.ended_at_s + DRAIN_QUIET_S


class CacheClient:
    """Keeps one process connected, and its calls in order.

    Args:
        process: whose client it is.
        connect: opens a connection; gives the channel to the server and the one from it, or None where no server is.
        attach: what the process registers.
    """

    def __init__(
        self,
        process: Process,
        connect: Callable[[Process], tuple[Channel[Call], Channel[Answer]] | None],
        attach: Attach,
    ) -> None:
        self._process = process
        self._timeline = process.timeline
        self._connect = connect
        self._attach = attach
        self._num_calls = 0
        self._owed: dict[tuple[str, LeaseId], str] = {}
        """Releases without an answer: server and lease, and the request."""
        self.session: Session | None = None
        self.draining: list[Session] = []
        self.connect()

    # ---- connections -------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Opens a connection, or tries again later."""
        channels = self._connect(self._process)
        if channels is None:
            self._reconnect()
            return
        to_server, to_client = channels

        def attached(answer: Answer) -> None:
            reply = answer.reply
            assert isinstance(reply, Attached), reply
            assert answer.arena is not None
            arena = answer.arena
            session = Session(arena.incarnation, Mapping(arena), to_server, self._timeline.now_s)
            self.session = session
            to_client.on_message = lambda answer: self._answered(session, answer)
            to_client.on_end = lambda: self._ended(session, "lost")
            self._timeline.note(f"{self._process.name} attached to {arena.incarnation}")
            self._pay(session)

        def refused() -> None:
            to_server.end()
            self._reconnect()

        to_client.on_message = attached
        to_client.on_end = refused
        to_server.send(Call(0, self._attach))

    def _reconnect(self) -> None:
        """Tries again after a while."""
        self._process.after(self._timeline.random.uniform(*RECONNECT_S), self.connect)

    def _ended(self, session: Session, why: str) -> None:
        """The server's end of file was seen, or the session was given up. The server may answer a call still."""
        if not session.is_open:
            return
        self._timeline.note(f"{self._process.name} {why} {session.incarnation}")
        session.ended_at_s = self._timeline.now_s
        self.session = None
        self.draining.append(session)
        for pending in [*session.onboarding.values(), *session.pending.values()]:
            pending.on_answer(None)
            self.abandon(pending)
        self._process.after(DRAIN_QUIET_S if self._attach.slabs else 0.0, lambda: self.close_drained(session))
        self._reconnect()

    def close_drained(self, session: Session) -> None:
        """Closes the session if it has ended and nothing needs it."""
        is_idle = session.is_drained(self._timeline.now_s) if self._attach.slabs else not session.is_open
        if is_idle and not session.is_closed:
            session.is_closed = True
            session.mapping.close()
            session.to_server.end()
            self.draining.remove(session)
            self._timeline.note(f"{self._process.name} closed {session.incarnation}")

    def hold(self, session: Session) -> None:
        """A copy begins to use the session's mapping."""
        session.num_holds += 1

    def unhold(self, session: Session) -> None:
        """That copy has ended."""
        assert session.num_holds > 0
        session.num_holds -= 1
        self.close_drained(session)

    def session_for(self, promise: Promise) -> Session | None:
        """The session through which a promise may be loaded."""
        sessions = [*self.draining, *([] if self.session is None else [self.session])]
        return next((session for session in sessions if session.covers(promise)), None)

    # ---- calls -------------------------------------------------------------------------------------------------------

    @property
    def usable(self) -> Session | None:
        """The session to call, if there is one and it answers (rule 1)."""
        session = self.session
        return session if session is not None and session.is_responsive(self._timeline.now_s) else None

    def submit(self, session: Session, event: Event, on_answer: OnAnswer) -> Pending:
        """Makes a call."""
        self._num_calls += 1
        pending = Pending(event, self._timeline.now_s, on_answer)
        session.pending[self._num_calls] = pending
        session.to_server.send(Call(self._num_calls, event))
        self._process.after(GIVE_UP_S, lambda: self._give_up_if_deaf(session, pending))
        return pending

    def _give_up_if_deaf(self, session: Session, pending: Pending) -> None:
        """The server should have answered by now (rule 5)."""
        if session.is_open and not pending.is_answered and pending.waits_until_s is None:
            self._timeline.count("session given up")
            self._ended(session, "gives up")

    def ask(self, session: Session, event: Event, on_answer: OnAnswer) -> Pending:
        """As ``submit``, with None after the deadline; the late answer is undone (rules 1 and 2)."""
        pending = self.submit(session, event, on_answer)

        def overdue() -> None:
            if pending.is_answered or pending.is_abandoned:
                return
            now_s = self._timeline.now_s
            if pending.waits_until_s is not None and now_s < pending.waits_until_s + DEADLINE_S:
                self._process.after(pending.waits_until_s + DEADLINE_S - now_s, overdue)
            else:
                self._timeline.count("no answer in time")
                self.abandon(pending)
                on_answer(None)

        self._process.after(DEADLINE_S, overdue)
        return pending

    def abandon(self, pending: Pending) -> None:
        """Nobody waits for the answer any more."""
        pending.is_abandoned = True
        pending.on_answer = _ignore

    def _answered(self, session: Session, answer: Answer) -> None:
        if isinstance(answer.reply, Onboarding):
            pending = session.onboarding[answer.id] = session.pending.pop(answer.id)
            pending.waits_until_s = self._timeline.now_s + answer.reply.wait_s
            self._timeline.count("onboarding", self._process.name)
            return
        place = session.onboarding if answer.id in session.onboarding else session.pending
        pending = place.pop(answer.id)
        pending.is_answered = True
        if pending.is_abandoned:
            self._undo(session, pending, answer.reply)
        else:
            pending.on_answer(answer.reply)

    def _undo(self, session: Session, pending: Pending, reply: Reply) -> None:
        """An answer came for nobody (rule 2)."""
        self._timeline.count(f"late {type(reply).__name__}")
        if isinstance(reply, Found) and reply.lease is not None:
            request = getattr(pending.event, "request")  # noqa: B009
            self.release(session.incarnation, reply.lease, request)
        elif not session.is_open:
            return  # the rest ends with the connection
        elif isinstance(reply, Reserved) and reply.grants:
            self.submit(session, Abort(UNKNOWN, tuple(grant.region for grant in reply.grants)), _ignore)
        elif isinstance(reply, LeaseNoted) and isinstance(pending.event, CopyBegan):
            self.submit(session, CopyEnded(UNKNOWN, reply.lease), _ignore)

    # ---- releases ----------------------------------------------------------------------------------------------------

    def release(self, incarnation: str, lease: LeaseId, request: str) -> None:
        """Owes a release, and sends it as soon as may be (rule 7)."""
        self._owed[incarnation, lease] = request
        if self.session is not None:
            self._send_release(self.session, incarnation, lease)

    def _pay(self, session: Session) -> None:
        """Sends what is owed to this life of the server; what is owed to another is void."""
        self._owed = {debt: request for debt, request in self._owed.items() if debt[0] == session.incarnation}
        for incarnation, lease in list(self._owed):
            self._timeline.count("release sent again")
            self._send_release(session, incarnation, lease)

    def _send_release(self, session: Session, incarnation: str, lease: LeaseId) -> None:
        if session.incarnation == incarnation:
            request = self._owed[incarnation, lease]
            self.submit(
                session, Release(UNKNOWN, request, lease), lambda reply: self._released(incarnation, lease, reply)
            )

    def _released(self, incarnation: str, lease: LeaseId, reply: Reply | None) -> None:
        if reply is not None:
            assert isinstance(reply, LeaseNoted | Refused), reply
            self._owed.pop((incarnation, lease), None)


def _ignore(reply: Reply | None) -> None:
    """Nobody waits for the answer."""


def with_connection(event: Event, connection: ConnectionId) -> Event:
    """The event as a call of ``connection``."""
    return dataclasses.replace(event, connection=connection)  # type: ignore[arg-type]
