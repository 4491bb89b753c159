"""The tier ``peer`` of a simulated server: what ``cache_server.peer_store`` does with threads, done with messages.

A question goes first to each server that has handed over what is asked for, then, for the rest, to the coordinator; a
fetch is a pull. What cannot be had is a miss, never an error. It knows nothing of who hands over.
"""

from __future__ import annotations

from collections.abc import Callable

from antiphon.cache.events import TierDone
from antiphon.cache.tier_jobs import JobKind, Outcome, TierJob
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server.peer_expected import Question
from antiphon.core.chunks import ChunkKey
from antiphon.protocol import peers as wire
from antiphon.sim.peers_net import Network, Pipe
from antiphon.sim.peers_pulls import LEND_S, FindServer, SimPull
from antiphon.sim.peers_server import SimServer


class SimPeerTier:
    """The tier of one life of a server.

    Args:
        network: of the simulation.
        server: whose.
        find: the life of a server that runs now.
    """

    def __init__(self, network: Network, server: SimServer, find: FindServer) -> None:
        self._network = network
        self._server = server
        self._find = find

    def run(self, job: TierJob) -> None:
        """Does a job; its end is a step of the server's cache."""
        match job.kind:
            case JobKind.ASK:
                self._ask(job)
            case JobKind.FETCH:
                self._fetch(job)
            case JobKind.CLEAR:
                self._end(TierDone(job.id, Outcome.DONE, keys=()))
            case _:
                self._end(TierDone(job.id, Outcome.DONE))

    def _end(self, done: TierDone) -> None:
        """On a thread: never within the step that has ordered it."""

        def step() -> None:
            self._server.step(done)

        self._server.process.after(0.0001, step)

    def _fetch(self, job: TierJob) -> None:
        assert job.region is not None

        def ended(*, is_here: bool) -> None:
            self._end(TierDone(job.id, Outcome.DONE if is_here else Outcome.MISSING))

        SimPull(self._network, self._server, self._find, (job.keys[0], job.region), ended)

    def _ask(self, job: TierJob) -> None:
        questions = self._server.expected.questions(job.keys, self._now_s)

        def go_on() -> None:
            if questions:
                self._ask_held(questions.pop(), go_on)
            else:
                self._locate(job)

        go_on()

    @property
    def _now_s(self) -> float:
        return self._network.timeline.now_s

    # ---- of the server that was named --------------------------------------------------------------------------------

    def _ask_held(self, question: Question, go_on: Callable[[], None]) -> None:
        """Asks a server how far it is; the end of the connection and the deadline are answers too."""
        named, chunks = question
        server = self._server
        is_over = False

        def answered(states: list[str] | None) -> None:
            nonlocal is_over
            if is_over:
                return
            is_over = True
            if states is None:
                self._network.timeline.count("not told how far", server.host)
                server.where.failed(named, self._now_s, "no answer")
                server.expected.lost(chunks)
            else:
                server.where.answered(named)
                for state in states:
                    self._network.timeline.count(f"held {state}", server.host)
                for key in server.expected.answered(chunks, states, self._now_s):
                    server.where.located(key, [named], self._now_s)
            go_on()

        if not server.where.take(named, self._now_s):
            is_over = True
            server.expected.lost(chunks)
            server.process.after(0.0, go_on)
            return
        holder = self._find(named.instance)
        if holder is None or not holder.process.is_alive or holder.incarnation != named.incarnation:
            server.process.after(0.0002, lambda: answered(None))
            return
        self._call(holder, chunks, answered)

    def _call(
        self, holder: SimServer, chunks: list[tuple[bytes, bytes]], answered: Callable[[list[str] | None], None]
    ) -> None:
        mine = self._server
        to_there = Pipe(self._network, mine.process, holder.process, (mine.host, holder.host))
        from_there = Pipe(self._network, holder.process, mine.process, (holder.host, mine.host))

        def asked(keys: list[tuple[TierKey, ChunkKey]]) -> None:
            from_there.send(list(holder.lender.held(keys)))

        def told(states: list[str]) -> None:
            answered(states)
            to_there.end()

        def late() -> None:
            answered(None)
            to_there.end()

        to_there.on_message, to_there.on_end = asked, from_there.end
        from_there.on_message, from_there.on_end = told, lambda: answered(None)
        to_there.send([(TierKey(tier_key), ChunkKey(key)) for tier_key, key in chunks])
        mine.process.after(LEND_S, late)

    # ---- of the coordinator ------------------------------------------------------------------------------------------

    def _locate(self, job: TierJob) -> None:
        server, now_s = self._server, self._now_s
        unknown = [
            key
            for key in job.keys
            if not server.expected.is_expected(key, now_s) and not server.where.is_known(key, now_s)
        ]

        def located(answer: wire.Message | None) -> None:
            if isinstance(answer, wire.Located):
                for key, numbers in zip(unknown, answer.holders, strict=True):
                    server.where.located(key, [answer.members[number] for number in numbers], self._now_s)
            found = tuple(bool(server.where.usable(key, self._now_s)) for key in job.keys)
            gone = tuple(server.expected.is_gone(key) for key in job.keys)
            self._end(TierDone(job.id, Outcome.DONE, found=found, gone=gone))

        if not unknown or server.member is None:
            located(None)
        else:
            server.member.ask(list(unknown), located)
