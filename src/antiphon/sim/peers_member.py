"""A simulated server's connection to its coordinator: the rules of ``cache_server.peer_membership``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from antiphon.cache_server.peer_feed import Feed
from antiphon.core.namespace import FORMAT_VERSION
from antiphon.protocol import peers as wire
from antiphon.sim.network import Process
from antiphon.sim.peers_net import Pipe
from antiphon.sim.timeline import Timeline

ANSWER_S = 2.0
ASK_S = 0.05
FEED_S = 0.02
"""How soon a change is told."""
RETRY_S = (0.1, 1.0)

Answered = Callable[[wire.Message | None], None]
Connect = Callable[[], tuple[Pipe, Pipe] | None]


class SimMember:
    """The member.

    Args:
        timeline: virtual time.
        process: of the server.
        connect: to the coordinator, None while there is none.
        make_feed: a new feed.
    """

    def __init__(self, timeline: Timeline, process: Process, connect: Connect, make_feed: Callable[[], Feed]) -> None:
        self._timeline = timeline
        self._process = process
        self._connect = connect
        self._make_feed = make_feed
        self._pipe: Pipe | None = None
        self._life = 0
        self._next_id = 0
        self._waiting: dict[int, Answered] = {}
        self._heartbeat_s = 1.0
        self._heard_s = 0.0
        self._is_joined = False
        self._look: Callable[[float], None] | None = None
        """Plans the next look for another time; None while none is planned."""
        self._look_s = 0.0
        """The next look if none is left out."""
        self._planned_s = 0.0
        self._num_plans = 0
        process.after(timeline.random.random() * 0.01, self._begin)

    def _begin(self) -> None:
        pipes = self._connect()
        self._life += 1
        if pipes is None:
            self._later()
            return
        self._pipe, incoming = pipes
        life = self._life
        incoming.on_message = lambda call: self._received(life, call)
        incoming.on_end = lambda: self._lost(life)
        self._call(wire.Join("host", FORMAT_VERSION), ANSWER_S, self._joined)

    def _later(self) -> None:
        self._process.after(self._timeline.random.uniform(*RETRY_S), self._begin)

    def _lost(self, life: int) -> None:
        if life != self._life or self._pipe is None:
            return
        self._pipe.end()
        self._pipe = None
        self._is_joined = False
        self._life += 1
        waiting, self._waiting = self._waiting, {}
        for answered in waiting.values():
            answered(None)
        self._timeline.count("lost coordinator")
        self._later()

    def _call(self, body: wire.Message, timeout_s: float, answered: Answered) -> None:
        assert self._pipe is not None
        self._next_id += 1
        call_id = self._next_id
        self._waiting[call_id] = answered
        self._pipe.send((call_id, body))

        def expire() -> None:
            late = self._waiting.pop(call_id, None)
            if late is not None:
                late(None)

        self._process.after(timeout_s, expire)

    def _received(self, life: int, call: tuple[int, wire.Message]) -> None:
        call_id, body = call
        answered = self._waiting.pop(call_id, None) if life == self._life else None
        if answered is not None:
            answered(body)

    def _joined(self, answer: wire.Message | None) -> None:
        if not isinstance(answer, wire.Joined):
            self._lost(self._life)
            return
        self._heartbeat_s = answer.heartbeat_s
        self._is_joined = True
        self._tell(self._make_feed(), self._life)

    def _tell(self, feed: Feed, life: int) -> None:
        if life != self._life:
            return
        message = feed.next()
        is_due = self._timeline.now_s >= self._heard_s + self._heartbeat_s
        if message is None and not is_due:
            self._rest(feed, life)
            return

        def answered(answer: wire.Message | None) -> None:
            if life != self._life:
                return
            if answer is None or isinstance(answer, wire.Failure):
                self._lost(life)
                return
            self._heard_s = self._timeline.now_s
            if isinstance(answer, wire.Resync):
                self._timeline.count("resync")
                feed.restart()
            self._tell(feed, life)

        self._call(message or wire.Heartbeat(), ANSWER_S, answered)

    # ---- between two messages ----------------------------------------------------------------------------------------

    def _rest(self, feed: Feed, life: int) -> None:
        """Nothing is to be told: it looks again each ``FEED_S``. Looks that would find nothing are left out."""
        next_s = self._look_s = self._timeline.now_s + FEED_S
        heartbeat_s = self._heard_s + self._heartbeat_s
        while next_s < heartbeat_s:
            next_s += FEED_S
        self._plan(next_s, feed, life)

    def _plan(self, at_s: float, feed: Feed, life: int) -> None:
        self._planned_s = at_s
        self._look = partial(self._plan, feed=feed, life=life)
        self._num_plans += 1
        self._process.at(at_s, partial(self._look_at_plan, self._num_plans, feed, life))

    def _look_at_plan(self, number: int, feed: Feed, life: int) -> None:
        if number == self._num_plans:
            self._look = None
            self._tell(feed, life)

    def wake(self) -> None:
        """The next look may find something, or cannot be told from one that does: it is not left out."""
        if self._look is None:
            return
        now_s = self._timeline.now_s
        while self._look_s < now_s:
            self._look_s += FEED_S
        if self._look_s < self._planned_s:
            self._look(self._look_s)

    def ask(self, keys: list[bytes], answered: Answered) -> None:
        """Asks who holds ``keys``; None where there is no answer in time."""
        if not self._is_joined:
            answered(None)
        else:
            self._call(wire.Locate(b"".join(keys)), ASK_S, answered)
