"""One life of a cache server: the real ``Cache``, driven by messages, with an arena of bytes.

Its shell's rules are those of the real one: a connection is detached when the peer's end of file was seen, and not when
this side closed it; the arena is populated piece by piece; ``Tick`` comes when a deadline is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from antiphon.cache.arena import RegionHandle
from antiphon.cache.effects import (
    Attached,
    ChunkRemoved,
    Committed,
    Effect,
    Onboarded,
    Onboarding,
    Pinned,
    QuotaSet,
    Refused,
    Removal,
    Reply,
    Reserved,
    TierChanged,
    Unpinned,
)
from antiphon.cache.events import (
    ArenaGrew,
    Attach,
    Clear,
    ConnectionId,
    Detach,
    Event,
    Pin,
    Release,
    SetQuota,
    Tick,
    TierDone,
    Unpin,
)
from antiphon.cache.inspection import Selected
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache.tier_jobs import TierJob
from antiphon.cache.tier_options import TiersOptions
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import AntiphonError, CapacityExceeded, ChunksPinned, ChunkUnknown, LeaseUnknown, StaleHandle
from antiphon.sim.client import Answer, Call, with_connection
from antiphon.sim.memory import Arena
from antiphon.sim.network import Channel, Process
from antiphon.sim.tier import SimulatedTier
from antiphon.sim.timeline import CheckFailed, Timeline

EXPECTED_ERRORS = (LeaseUnknown, StaleHandle)
"""What a client that keeps the rules can be refused with: it released or committed to a connection that had ended."""

EXPECTED_BY_OPERATORS = (CapacityExceeded, ChunksPinned, ChunkUnknown)

GROW_S = 0.04
OPERATOR = "operator"
FREED = 0xFE
"""What the bytes of a freed region are overwritten with."""

R = TypeVar("R")


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: ConnectionId, client: str, to_client: Channel[Answer]) -> None:
        self.connection = connection
        self.client = client
        self.to_client = to_client
        self.is_attached = False
        self.is_closed = False
        """This side has closed it; the peer's end is still to come."""


class Server:
    """One life.

    Args:
        timeline: virtual time.
        options: of the cache.
        incarnation: of this life.
        validate_every: the cache is validated after each step of this many.
        behind: the tiers of the plan, and what stands for them.
    """

    def __init__(
        self,
        timeline: Timeline,
        options: CacheOptions,
        incarnation: str,
        validate_every: int,
        behind: tuple[TiersOptions, list[SimulatedTier]] | None = None,
    ) -> None:
        self.process = Process(timeline, incarnation)
        self.arena = Arena(incarnation, options.arena_bytes)
        plan, self._tiers = (None, []) if behind is None else behind
        self.cache = Cache(options, first_id=timeline.random.getrandbits(48), tiers=plan)
        self._waiting: dict[int, tuple[Peer, int, str]] = {}
        """Lookups that wait for tiers: peer, call and request."""
        self._early: list[Onboarded] = []
        self.peers: dict[ConnectionId, Peer] = {}
        self._timeline = timeline
        self._options = options
        self._validate_every = validate_every
        self._regions: dict[int, RegionHandle] = {}
        self._num_connections = 0
        self._num_steps = 0
        self._tick_due_s = float("inf")
        self._usable_bytes = options.initial_usable_bytes
        self._pins: dict[ChunkKey, tuple[frozenset[ChunkKey], float]] = {}
        """What pins keep, and until when, by the answers alone."""
        self.process.after(GROW_S, self._grow)

    def accept(self, client: Process) -> tuple[Channel[Call], Channel[Answer]]:
        """A connection of ``client``: the channel to the server, and the one from it."""
        self._num_connections += 1
        to_server: Channel[Call] = Channel(client, self.process)
        to_client: Channel[Answer] = Channel(self.process, client)
        peer = Peer(ConnectionId(self._num_connections), client.name, to_client)
        self.peers[peer.connection] = peer
        to_server.on_message = lambda call: self._serve(peer, call)
        to_server.on_end = lambda: self._peer_ended(peer)
        return to_server, to_client

    def close(self, peer: Peer) -> None:
        """Closes a connection from this side, as after a frame that cannot be read. What comes later is not read."""
        self._timeline.note(f"{self.process.name} closes connection {peer.connection}")
        peer.is_closed = True
        peer.to_client.end()

    def _peer_ended(self, peer: Peer) -> None:
        """The peer's end of file was seen."""
        del self.peers[peer.connection]
        peer.to_client.end()
        self._waiting = {ticket: waiting for ticket, waiting in self._waiting.items() if waiting[0] is not peer}
        self.detach(peer)

    def detach(self, peer: Peer) -> None:
        """The peer touches the arena no more."""
        if peer.is_attached:
            peer.is_attached = False
            self.step(Detach(peer.connection), self.process.name)

    def _serve(self, peer: Peer, call: Call) -> None:
        if peer.is_closed:
            return
        reply = self.step(with_connection(call.event, peer.connection), peer.client)
        is_attached = isinstance(reply, Attached)
        peer.is_attached |= is_attached
        if isinstance(reply, Onboarding):
            self._waiting[reply.ticket] = (peer, call.id, call.event.request)  # type: ignore[union-attr]
        peer.to_client.send(Answer(call.id, reply, self.arena if is_attached else None))
        early, self._early = self._early, []
        for notice in early:
            self._onboarded(notice)

    def _onboarded(self, notice: Onboarded) -> None:
        """A lookup that waited for tiers has its answer. One that nobody takes is given back by the server."""
        if notice.ticket not in self._waiting:
            self._early.append(notice)  # within the step of its lookup
            return
        peer, call_id, request = self._waiting.pop(notice.ticket)
        self._timeline.count("onboarded")
        if not peer.is_closed:
            peer.to_client.send(Answer(call_id, notice.found))
        elif notice.found.lease is not None:
            self.step(Release(peer.connection, request, notice.found.lease), self.process.name)

    def _run(self, job: TierJob) -> None:
        tier = self._tiers[job.tier]

        def done(event: TierDone) -> None:
            self._timeline.count(f"tier {job.kind.value} {event.outcome.value}")
            self.step(event, tier.name)

        tier.run(job, self.process, self.arena, done)

    # ---- an operator -------------------------------------------------------------------------------------------------

    def control(self, event: Pin | Unpin | SetQuota) -> Reply:
        """An operator asks for something."""
        return self.step(event, OPERATOR)

    def clear(self, event: Clear) -> None:
        """An operator clears."""
        self.step(event, OPERATOR)

    def pin_some(self, number: float, ttl_s: float | None) -> None:
        """Pins the prefix up to one of the chunks; ``number`` from 0 to 1 says which."""
        facts = self.cache.chunk_facts(Selected(), 0, 1_000).chunks
        if not facts:
            return
        parents = {each.key: each.parent for each in facts}
        key: ChunkKey | None = facts[int(number * len(facts))].key
        assert key is not None
        reply = self.control(Pin((key,), ttl_s))
        if isinstance(reply, Pinned):
            kept: list[ChunkKey] = []
            while key is not None:
                kept.append(key)
                key = parents[key]
            until_s = float("inf") if ttl_s is None else self._timeline.now_s + ttl_s
            self._pins[reply.key] = (frozenset(kept), until_s)

    def unpin_some(self, number: float) -> None:
        """Ends one of the pins."""
        pins = self.cache.pins()
        if pins:
            key = pins[int(number * len(pins))].key
            self._pins.pop(key, None)
            self.control(Unpin(key))

    def set_quota(self, tenant: str, quota_bytes: int | None) -> None:
        """Gives a tenant a quota, or takes it away where there is one."""
        if quota_bytes is not None or tenant in self.cache.quotas():
            self.control(SetQuota(tenant, quota_bytes))

    def undo_control(self, quotas: Mapping[str, int]) -> None:
        """Ends all pins; the quotas are those of the start."""
        self._pins = {}
        self.control(Unpin())
        for tenant in sorted({*self.cache.quotas(), *quotas}):
            self.set_quota(tenant, quotas.get(tenant))

    def _check_pins(self, notices: list[Effect]) -> None:
        """What is pinned goes by a clear alone, and the whole pin with it."""
        now_s = self._timeline.now_s
        self._pins = {key: (kept, until_s) for key, (kept, until_s) in self._pins.items() if until_s > now_s}
        for notice in notices:
            if isinstance(notice, ChunkRemoved):
                hit = [key for key, (kept, _) in self._pins.items() if notice.key in kept]
                if hit and notice.removal is not Removal.CLEARED:
                    raise CheckFailed(f"a pinned chunk went: {notice.removal.value} {notice.key[:3].hex()}")
                for key in hit:
                    del self._pins[key]

    def _grow(self) -> None:
        """More of the arena is populated."""
        piece = max(1, self._options.arena_bytes // 8 // self._options.alignment_bytes) * self._options.alignment_bytes
        self._usable_bytes = min(self._options.arena_bytes, self._usable_bytes + piece)
        self.step(ArenaGrew(self._usable_bytes), self.process.name)
        if self._usable_bytes < self._options.arena_bytes:
            self.process.after(GROW_S, self._grow)

    def step(self, event: Event, caller: str) -> Reply:
        """One step of the cache, noted, counted and checked."""
        timeline = self._timeline
        reply, *notices = self.cache.step(event, timeline.now_s)
        timeline.note(f"{self.process.name} {caller} {_brief(event)} -> {_brief(reply)}")
        self._check_pins(notices)
        for notice in notices:
            self._count_notice(notice)
            if isinstance(notice, TierJob):
                self._run(notice)
        self._count_reply(reply, EXPECTED_BY_OPERATORS if caller == OPERATOR else EXPECTED_ERRORS)
        self._num_steps += 1
        if self._num_steps % self._validate_every == 0:
            self.cache.validate()
        self._spoil_free_bytes()
        self._schedule_tick()
        for notice in notices:
            if isinstance(notice, Onboarded):
                self._onboarded(notice)
        return reply  # type: ignore[return-value]

    def _spoil_free_bytes(self) -> None:
        """What the cache has freed may be anybody's from here on: it is overwritten at once."""
        regions = {region.generation: region for region in self.cache.regions()}
        for generation, region in self._regions.items():
            if generation not in regions:
                self.arena.data[region.offset_bytes : region.end_bytes] = bytes([FREED]) * region.size_bytes
        self._regions = regions

    def _schedule_tick(self) -> None:
        """A tick when the next deadline is due, if none is coming before."""
        due_s = self.cache.next_deadline_s
        if due_s is not None and due_s < self._tick_due_s:
            self._tick_due_s = due_s
            self.process.after(max(0.0, due_s - self._timeline.now_s), self._tick)

    def _tick(self) -> None:
        self._tick_due_s = float("inf")
        self.step(Tick(), self.process.name)

    def _count_reply(self, reply: Effect, expected: tuple[type[AntiphonError], ...]) -> None:
        timeline = self._timeline
        if isinstance(reply, Reserved):
            for verdict in reply.verdicts:
                timeline.count(f"verdict {verdict.value}")
            if reply.refusal is not None:
                timeline.count(f"refusal {type(reply.refusal).__name__}")
        elif isinstance(reply, Committed):
            for outcome in reply.outcomes:
                timeline.count(f"commit {outcome.value}")
        elif isinstance(reply, Refused):
            timeline.count(f"refused {type(reply.error).__name__}")
            if not isinstance(reply.error, expected):
                raise CheckFailed(f"a client that keeps the rules was refused: {reply.error!r}")
        elif isinstance(reply, Pinned | Unpinned | QuotaSet):
            timeline.count(f"reply {type(reply).__name__}")

    def _count_notice(self, notice: Effect) -> None:
        self._timeline.note(f"{self.process.name}   {_brief(notice)}")
        if isinstance(notice, TierChanged):
            self._timeline.count(f"breaker {notice.state}")
        elif isinstance(notice, ChunkRemoved):
            self._timeline.count(f"removal {notice.removal.value}")
        else:
            self._timeline.count(f"notice {type(notice).__name__}")

    def check_idle(self) -> None:
        """Nothing protects anything: for when all requests have ended."""
        self.step(Tick(), "check")
        self.cache.validate()
        statistics = self.cache.statistics()
        held = {f"{state.value} leases": count for state, count in statistics.num_leases.items() if count}
        held |= {
            f"{state.value} chunks": count
            for state, count in statistics.num_chunks.items()
            if count and state.value in ("retired", "quarantined")
        }
        if statistics.reserved_bytes:
            held["reserved bytes"] = statistics.reserved_bytes
        for tier in self.cache.tiers():
            busy = (tier.num_running, tier.num_waiting, tier.queued_bytes, tier.num_clears)
            if tier.breaker.value != "closed" or any(busy):
                held[f"tier {tier.name} {tier.breaker.value}, jobs and waiting {busy}"] = 1
        if self._waiting:
            held["lookups that wait for tiers"] = len(self._waiting)
        if held:
            raise CheckFailed(f"all requests have ended, and {self.process.name} still has {held}")


def _brief(value: object) -> str:
    """A value in a few words for the trace: keys by their first bytes."""
    words = [type(value).__name__]
    for name in getattr(value, "__match_args__", ()):
        item = getattr(value, name)
        if name in _DULL or item is None or isinstance(value, Attach):
            continue
        words.append(f"{name}={_short(item)}")
    return " ".join(words)


_DULL = frozenset(
    {"at_s", "namespace", "model", "num_bytes", "chunk_size_tokens", "layout", "sequence", "next_deadline_s"}
)


def _short(item: object) -> str:
    if isinstance(item, bytes):
        return item[:3].hex()
    if isinstance(item, tuple):
        return f"[{','.join(map(_short, item))}]"
    show: Callable[[object], str] | None = _SHOWN.get(type(item).__name__)
    return show(item) if show is not None else str(item)


def _region(item: object) -> str:
    return f"{getattr(item, 'offset_bytes')}@{getattr(item, 'generation') % 1_000_000}"  # noqa: B009


def _enum(item: object) -> str:
    return str(getattr(item, "value"))  # noqa: B009


_SHOWN: dict[str, Callable[[object], str]] = {
    "RegionHandle": _region,
    "Grant": lambda item: f"{_short(getattr(item, 'region'))}:{_short(getattr(item, 'slabs'))}",  # noqa: B009
    "Verdict": _enum,
    "CommitOutcome": _enum,
    "Removal": _enum,
    "LeaseState": _enum,
}
