"""Answers calls: one answer for each, in the order in which they came.

Owns what is known of each connection. A frame that is no call costs its connection. A connection that is attached is
not let go before its peer hangs up, since its process may still be copying: only then is the cache told (``Detach``).
Over TCP, where any user of the machine can connect, only ``Hello`` and ``Ping`` are answered: they tell where the unix
socket is. Its connections end by themselves (``FrameLimits``). Over the unix socket, what changes anything needs
``Attach`` first.
A lookup of a peer that has hung up is not taken up: nobody would know of its lease, which lasts while other processes
of the engine are attached. What else such a peer sent counts, or ends with the connection.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from antiphon.cache.effects import Attached, Detached, Found, Onboarded, Onboarding, Refused
from antiphon.cache.events import ConnectionId, Detach, EngineId, HandedOver, Lookup, Release, TicketId
from antiphon.cache.tier_key import Meaning, TierKey, meaning_of
from antiphon.cache_server.driver import CacheDriver
from antiphon.cache_server.metrics import CallTallies
from antiphon.cache_server.reports import Reports, adds_up
from antiphon.cache_server.traces import LookupTrace, ServerTraces
from antiphon.cache_server.translate import ROLE_CHARS_MAX, answer_of, check_name, event_of
from antiphon.cache_server.views import ProcessView
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import AntiphonError, ConnectionUnknown, NotLocal, ProtocolError, VersionMismatch
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol import cache as wire
from antiphon.protocol.cache_handoff import HandoffKey
from antiphon.transport.frames_server import FrameConnection

log = logging.getLogger("antiphon.cache_server")

GATES = frozenset(("passed", "failed", "not_run"))
_DETAIL_CHARS_MAX = 500
_CALL_ID_MAX = (1 << 63) - 1


@dataclass(slots=True)
class _Peer:
    """One connection that has said hello, and the process behind it once it is attached."""

    client: str
    attach: wire.Attach | None = None
    gate: str = "not_run"
    detail: str = ""

    @property
    def engine(self) -> EngineId | None:
        return None if self.attach is None else EngineId(self.attach.engine, self.attach.incarnation)


def _nobody_expects(key: HandoffKey, chunks: Sequence[tuple[TierKey, ChunkKey]], wait_s: float) -> None:
    """Without peers, what others have comes from shared tiers alone."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A lookup that waits for tiers."""

    connection: FrameConnection
    call_id: int
    request: str
    trace: LookupTrace | None = None


@dataclass
class Calls:
    """The handler of all connections.

    Args:
        driver: of the cache.
        reports: where reports go.
        welcome: the answer to ``Hello``.
        descriptor: of the arena.
        tallies: what is counted of calls.
        quiet: for what peers can cause to be logged.
    """

    driver: CacheDriver
    reports: Reports
    welcome: wire.Welcome
    descriptor: int
    tallies: CallTallies
    quiet: QuietLog
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls, by name and by ``ok`` or the error code; lookups of peers that are gone by ``hung_up``; frames that are no
    call as ``frame``."""
    handoffs: Counter[str] = field(default_factory=Counter)
    """Lookups of what was handed over: ``here``, ``elsewhere``, or of ``other_meaning``."""
    expect: Callable[[HandoffKey, Sequence[tuple[TierKey, ChunkKey]], float], None] = _nobody_expects
    """Told of what is handed over by way of another server, and for how long it is waited for."""
    traces: ServerTraces | None = None
    """None where nothing is traced."""
    _peers: dict[int, _Peer] = field(default_factory=dict)
    _waiting: dict[TicketId, _Waiting] = field(default_factory=dict)
    _early: dict[TicketId, Found] = field(default_factory=dict)
    """Final answers that came within the step of their lookup."""

    def __post_init__(self) -> None:
        self.driver.on_onboarded = self._onboarded

    # ---- FrameHandler ------------------------------------------------------------------------------------------------

    def frame_received(self, connection: FrameConnection, payload: bytes) -> None:
        """Answers a call."""
        began_s = time.perf_counter()
        try:
            call = wire.decode_call(payload)
            if not 0 < call.id <= _CALL_ID_MAX:
                raise ProtocolError(f"a call has an id from 1 to {_CALL_ID_MAX}, not {call.id}")
        except ProtocolError as error:
            self.faulted(connection, error)
            return
        peer = self._peers.get(connection.number)
        if peer is None:
            self._greet(connection, call)
            return
        if isinstance(call.body, wire.Lookup) and connection.has_hung_up:
            self.counts["Lookup", "hung_up"] += 1
            return
        try:
            answer = self._answer(connection, peer, call)
        except AntiphonError as error:
            answer = wire.failure_of(error)
        outcome = answer.code if isinstance(answer, wire.Failure) else "ok"
        name = type(call.body).__name__
        self.counts[name, outcome] += 1
        connection.send(wire.frame(wire.Answer(call.id, answer)))
        self.tallies.answered(name, time.perf_counter() - began_s)

    def faulted(self, connection: FrameConnection, error: ProtocolError) -> None:
        """Tells the peer what is wrong, and takes nothing more from it."""
        peer = self._peers.get(connection.number)
        self.counts["frame", "protocol_error"] += 1
        self.quiet.say(
            logging.WARNING, "faulty connections", "connection %d is given up: %s", connection.number, error.message
        )
        last = wire.frame(wire.Answer(0, wire.failure_of(error)))
        connection.end(last, waits_for_peer=peer is not None and peer.attach is not None)

    def ended(self, connection: FrameConnection) -> None:
        """The peer has hung up, or was never attached."""
        peer = self._peers.pop(connection.number, None)
        if peer is None or peer.attach is None:
            return
        for ticket in [ticket for ticket, waiting in self._waiting.items() if waiting.connection is connection]:
            self._trace_ended(self._waiting.pop(ticket).trace, None)
        if self.traces is not None:
            self.traces.stores.gone(connection.number)
        reply = self.driver.step(Detach(ConnectionId(connection.number)))
        assert isinstance(reply, Detached), reply
        self.quiet.say(
            logging.INFO,
            "detached processes",
            "engine %s: %s (process %d) is gone; %d reservations dropped, %d leases in quarantine",
            *(peer.attach.engine, peer.attach.role, peer.attach.pid),
            *(reply.num_reservations, reply.num_leases_quarantined),
        )

    # ---- calls -------------------------------------------------------------------------------------------------------

    def _greet(self, connection: FrameConnection, call: wire.Call) -> None:
        """The first call of a connection."""
        body = call.body
        try:
            if not isinstance(body, wire.Hello):
                raise ProtocolError(f"the first call must be Hello, not {type(body).__name__}")
            if body.version != wire.PROTOCOL_VERSION:
                raise VersionMismatch(
                    f"the client speaks version {body.version} of the protocol, this server {wire.PROTOCOL_VERSION}",
                    remedy="run the same version of Antiphon in the engine and the cache server",
                )
            client = check_name(body.client, "the client's name", ROLE_CHARS_MAX)
        except AntiphonError as error:
            failure = wire.failure_of(error)
            self.counts[type(body).__name__, failure.code] += 1
            self.quiet.say(logging.WARNING, "refused clients", "a client is refused: %s", error.message)
            connection.end(wire.frame(wire.Answer(call.id, failure)), waits_for_peer=False)
            return
        self._peers[connection.number] = _Peer(client)
        self.counts["Hello", "ok"] += 1
        descriptor = self.descriptor if connection.is_unix else None
        connection.send(wire.frame(wire.Answer(call.id, self.welcome)), descriptor)

    def _answer(self, connection: FrameConnection, peer: _Peer, call: wire.Call) -> wire.Answered:
        body = call.body
        if not connection.is_unix and not isinstance(body, wire.Hello | wire.Ping):
            raise NotLocal(
                f"{type(body).__name__} is answered over the unix socket only, which also passes the memory",
                remedy=f"connect to {self.welcome.socket_path}",
            )
        match body:
            case wire.Hello():
                raise ProtocolError("Hello was said before")
            case wire.Attach():
                return self._attach(connection, peer, body)
            case wire.Report():
                if peer.attach is None:
                    raise _not_attached()
                return self._report(body)
            case wire.Clear() if peer.attach is None:
                raise _not_attached()
            case wire.EngineNote():
                return self._note(peer, body)
            case wire.AskProcesses():
                if peer.engine is None:
                    raise _not_attached()
                return wire.Processes(tuple((view.role, view.gate) for view in self.processes(peer.engine)))
            case wire.Ping():
                return wire.Noted()
            case wire.Lookup():
                return self._look_up(connection, call.id, body)
            case _:
                num_slabs = 0 if peer.attach is None else len(peer.attach.slabs)
                answer = answer_of(self.driver.step(event_of(body, ConnectionId(connection.number), num_slabs)))
                if isinstance(answer, wire.Reserved):
                    self.tallies.verdicts.update(answer.verdicts)
                if self.traces is not None:
                    self.traces.stores.called(connection.number, body, answer)
                return answer

    def _look_up(self, connection: FrameConnection, call_id: int, body: wire.Lookup) -> wire.Answered:
        event = event_of(body, ConnectionId(connection.number), 0)
        assert isinstance(event, Lookup)
        peer = self._peers[connection.number]
        if body.handoff is not None and peer.attach is not None:
            event = self._handed_over(event, body.handoff, peer.attach)
        traces = self.traces
        trace = None if traces is None or not body.traceparent else traces.begin(body)
        try:
            reply = self.driver.step(event)
        finally:
            if traces is not None:
                traces.stepped()
        answer = answer_of(reply)
        if isinstance(reply, Onboarding):
            early = self._early.pop(reply.ticket, None)
            if early is None:
                self._waiting[reply.ticket] = _Waiting(connection, call_id, body.request, trace)
                if trace is not None and peer.attach is not None:
                    self._trace_waits(trace, event, reply, peer.attach)
                return answer
            answer = answer_of(early)
        self._trace_ended(trace, answer)
        return answer

    def _trace_waits(self, trace: LookupTrace, event: Lookup, reply: Onboarding, attach: wire.Attach) -> None:
        assert self.traces is not None
        self.traces.waits(trace, self._missing(event, reply, attach))

    def _missing(self, event: Lookup, reply: Onboarding, attach: wire.Attach) -> Iterator[TierKey]:
        size = self.welcome.chunk_size_tokens
        meaning = _meaning_of(event, attach)
        for key in event.keys[reply.num_tokens // size : reply.num_tokens_max // size]:
            yield meaning.key_of(key)

    def _trace_ended(self, trace: LookupTrace | None, answer: wire.Answered | None) -> None:
        if trace is not None and self.traces is not None:
            self.traces.over(trace, answer)

    def _handed_over(self, event: Lookup, key: HandoffKey, attach: wire.Attach) -> Lookup:
        """The lookup, with what a prefill engine has handed over of it; what does not fit is left out."""
        num_chunks = key.num_tokens // self.welcome.chunk_size_tokens
        is_meant = 0 < num_chunks <= len(event.keys) and event.keys[num_chunks - 1] == key.last_key
        if not is_meant or key.namespace != event.namespace:
            self.handoffs["other_meaning"] += 1
            self.quiet.say(
                logging.WARNING,
                "hand-overs of another meaning",
                "request %s: what was handed over means something else here (another model, KV type, layout or salt): "
                "it is computed again",
                event.request,
            )
            return event
        is_here = key.incarnation == self.welcome.incarnation
        self.handoffs["here" if is_here else "elsewhere"] += 1
        if not is_here:
            meaning = _meaning_of(event, attach)
            self.expect(key, [(meaning.key_of(each), each) for each in event.keys[:num_chunks]], event.onboard_s)
        return replace(event, handed_over=HandedOver(num_chunks, is_here))

    def _onboarded(self, notice: Onboarded) -> None:
        """A lookup that waited for tiers has its answer. A peer that takes none gives its lease back by us."""
        found = notice.found
        waiting = self._waiting.pop(notice.ticket, None)
        if waiting is None:
            self._early[notice.ticket] = found
        elif waiting.connection.is_open and not waiting.connection.has_hung_up:
            answer = answer_of(found)
            waiting.connection.send(wire.frame(wire.Answer(waiting.call_id, answer)))
            self._trace_ended(waiting.trace, answer)
        else:
            self._trace_ended(waiting.trace, None)
            if found.lease is not None:
                self.counts["Lookup", "hung_up"] += 1
                self.driver.step(Release(notice.connection, waiting.request, found.lease))

    def _attach(self, connection: FrameConnection, peer: _Peer, body: wire.Attach) -> wire.Answered:
        reply = self.driver.step(event_of(body, ConnectionId(connection.number), len(body.slabs)))
        if isinstance(reply, Refused):
            self.quiet.say(
                logging.WARNING, "refused engines", "engine %s is refused: %s", body.engine[:200], reply.error
            )
        if isinstance(reply, Attached):
            peer.attach = body
            self.quiet.say(
                logging.INFO,
                "attached processes",
                "engine %s (%s): %s (process %d) attached for %s, chunks of %d slabs of %d bytes",
                *(body.engine, body.incarnation, body.role, body.pid, body.model, body.num_slabs, body.slab_bytes),
            )
        return answer_of(reply)

    def _report(self, body: wire.Report) -> wire.Noted:
        report = self.reports.add(body)
        if not adds_up(report):
            self.quiet.say(
                logging.WARNING,
                "reports that do not add up",
                "request %s of engine %s: %d prompt tokens; sources: %d device, %d l1, %d l2, %d peer, %d remote, "
                "%d computed",
                *(report.request, report.engine, report.num_prompt_tokens),
                *(report.device, report.l1, report.l2, report.peer, report.remote_prefill, report.computed),
            )
        return wire.Noted()

    def _note(self, peer: _Peer, body: wire.EngineNote) -> wire.Noted:
        if peer.attach is None:
            raise _not_attached()
        if body.gate not in GATES:
            raise ProtocolError(f"a gate is one of {', '.join(sorted(GATES))}, not {body.gate[:50]!r}")
        peer.detail = check_name(body.detail, "the detail", _DETAIL_CHARS_MAX)
        peer.gate = body.gate
        if body.gate == "failed":
            self.quiet.say(
                logging.ERROR,
                "failed gates",
                "engine %s: %s may not load from the cache: %s",
                *(peer.attach.engine, peer.attach.role, body.detail),
            )
        return wire.Noted()

    # ---- views -------------------------------------------------------------------------------------------------------

    def processes(self, engine: EngineId) -> tuple[ProcessView, ...]:
        """The attached processes of an engine, in the order in which they came."""
        return tuple(
            ProcessView(peer.attach.role, peer.attach.pid, peer.gate, peer.detail)
            for peer in self._peers.values()
            if peer.attach is not None and peer.engine == engine
        )


def _meaning_of(event: Lookup, attach: wire.Attach) -> Meaning:
    """What the chunks of a lookup mean in a tier."""
    layout = ChunkLayout(attach.num_slabs, attach.slab_bytes, attach.fingerprint)
    return meaning_of(event.namespace, event.tenant, attach.model, layout)


def _not_attached() -> ConnectionUnknown:
    return ConnectionUnknown("the connection is not attached", remedy="attach before any other call")
