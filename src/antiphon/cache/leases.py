"""Leases: who protects which chunks, and when that ends.

A lease belongs to a request of one life of an engine. It ends

- when a process of that engine releases it and no announced copy is running, or
- when the last process of that engine is gone, and ``quarantine_s`` has passed: the DMA of a dying process.

It never ends by its age; that raises an alarm once. The owner's connection may end while workers of the same engine go
on: they may be copying, announced or not, so the lease waits for them (ORPHANED) or for a release by one of them.

This module keeps leases and their states; it does not know what ending one does to chunks (``books``).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from antiphon.cache.connections import Connection, Engine
from antiphon.cache.events import ConnectionId, LeaseId
from antiphon.cache.index import Chunk
from antiphon.cache.states import LeaseState, assert_listed
from antiphon.core.errors import LeaseUnknown, NotOwner


@dataclass(slots=True, eq=False)
class Lease:
    """Protection of ``chunks`` for one request.

    Args:
        connection: the owner's connection.
        copies: connections that announced a copy which has not ended.
        quiet_at_s: until then the DMA of a dead process may touch the chunks; 0 where none died.
    """

    id: LeaseId
    engine: Engine
    connection: ConnectionId
    request: str
    chunks: tuple[Chunk, ...]
    num_bytes: int
    began_s: float
    state: LeaseState = LeaseState.HELD
    copies: set[ConnectionId] = field(default_factory=set)
    quiet_at_s: float = 0.0

    def enter(self, state: LeaseState) -> None:
        """Go on to ``state``."""
        assert_listed(self.state, state)
        self.state = state


class Leases:
    """The leases that have not ended.

    Args:
        first_id: id of the first lease; drawn at random by who starts the server, as the first generation is.
        quarantine_s: seconds from the death of a process to the reuse of what it could touch.
    """

    __slots__ = ("_next_id", "_quarantine_s", "_quarantined", "active", "unalarmed")

    def __init__(self, first_id: int, quarantine_s: float) -> None:
        self._next_id = first_id
        self._quarantine_s = quarantine_s
        self.active: dict[LeaseId, Lease] = {}
        """Every lease that has not ended, oldest first."""
        self.unalarmed: dict[LeaseId, Lease] = {}
        """Those of them that have raised no alarm, oldest first."""
        self._quarantined: list[tuple[float, LeaseId]] = []  # a heap: a lease may wait for a death older than its end

    @property
    def next_quarantine_end_s(self) -> float | None:
        """When the next quarantine is over; None where none runs."""
        return self._quarantined[0][0] if self._quarantined else None

    def open(self, owner: Connection, request: str, chunks: tuple[Chunk, ...], now_s: float) -> Lease:
        """A new lease over ``chunks``."""
        assert chunks, "a lease protects something"
        num_bytes = sum(chunk.num_bytes for chunk in chunks)
        lease = Lease(LeaseId(self._next_id), owner.engine, owner.id, request, chunks, num_bytes, now_s)
        self._next_id += 1
        self.active[lease.id] = self.unalarmed[lease.id] = lease
        owner.engine.leases.add(lease.id)
        for chunk in chunks:
            owner.engine.lease_chunk(chunk)
        return lease

    def of_engine(self, lease_id: LeaseId, connection: Connection) -> Lease:
        """A lease that a process of its engine names.

        Raises:
            LeaseUnknown: none of that id, or it protects only against the dead any more.
            NotOwner: it belongs to another engine, or another life of this one.
        """
        lease = self.active.get(lease_id)
        if lease is None or lease.state is LeaseState.QUARANTINED:
            raise LeaseUnknown(f"lease {lease_id} does not exist, or has ended", remedy="look up again")
        if lease.engine is not connection.engine:
            owner = f"{lease.engine.id.name} ({lease.engine.id.incarnation})"
            raise NotOwner(f"lease {lease_id} belongs to engine {owner}, not to {connection.engine.id.name}")
        return lease

    def release(self, lease_id: LeaseId, connection: Connection, request: str, now_s: float) -> Lease:
        """The owner gives the lease up. It is over if ``state`` is ENDED afterwards.

        Raises:
            LeaseUnknown: none of that id, or it was released before.
            NotOwner: it belongs to another engine or request.
        """
        lease = self.of_engine(lease_id, connection)
        if lease.state is LeaseState.RELEASING:
            raise LeaseUnknown(f"lease {lease_id} was released before", remedy="release each lease once")
        if lease.request != request:
            raise NotOwner(f"lease {lease_id} belongs to request {lease.request}, not to {request}")
        if lease.copies:
            lease.enter(LeaseState.RELEASING)
        else:
            self._settle(lease, now_s)
        return lease

    def copy_began(self, lease_id: LeaseId, connection: Connection) -> Lease:
        """A process of the lease's engine begins to copy.

        Raises:
            LeaseUnknown: as ``of_engine``, or the owner has released it.
            NotOwner: as ``of_engine``.
        """
        lease = self.of_engine(lease_id, connection)
        if lease.state is LeaseState.RELEASING:
            raise LeaseUnknown(f"lease {lease_id} was released", remedy="do not copy from it")
        lease.copies.add(connection.id)
        return lease

    def copy_ended(self, lease_id: LeaseId, connection: Connection, now_s: float) -> Lease:
        """That copy has ended.

        Raises:
            LeaseUnknown: as ``of_engine``, or this process announced no copy.
            NotOwner: as ``of_engine``.
        """
        lease = self.of_engine(lease_id, connection)
        if connection.id not in lease.copies:
            raise LeaseUnknown(f"connection {connection.id} announced no copy of lease {lease_id}")
        lease.copies.discard(connection.id)
        if lease.state is LeaseState.RELEASING and not lease.copies:
            self._settle(lease, now_s)
        return lease

    def connection_ended(self, connection: Connection, now_s: float) -> Iterator[Lease]:
        """The connection is gone from its engine. Yields the leases whose quarantine begins."""
        is_last = not connection.engine.connections
        for lease_id in sorted(connection.engine.leases):
            lease = self.active[lease_id]
            if lease.state is LeaseState.QUARANTINED:
                continue
            had_copy = connection.id in lease.copies
            lease.copies.discard(connection.id)
            if had_copy or is_last:
                lease.quiet_at_s = now_s + self._quarantine_s
            if is_last or (lease.state is LeaseState.RELEASING and not lease.copies):
                self._settle(lease, now_s)
                yield lease
            elif lease.state is LeaseState.HELD and lease.connection == connection.id:
                lease.enter(LeaseState.ORPHANED)

    def _settle(self, lease: Lease, now_s: float) -> None:
        """Nobody alive protects anything with it: it ends, at once or after the quarantine."""
        if lease.quiet_at_s > now_s:
            lease.enter(LeaseState.QUARANTINED)
            heapq.heappush(self._quarantined, (lease.quiet_at_s, lease.id))
        else:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        lease.enter(LeaseState.ENDED)
        del self.active[lease.id]
        self.unalarmed.pop(lease.id, None)
        lease.engine.leases.discard(lease.id)
        for chunk in lease.chunks:
            lease.engine.unlease_chunk(chunk)

    def end_quarantines(self, now_s: float) -> Iterator[Lease]:
        """Ends and yields the leases whose quarantine is over."""
        while self._quarantined and self._quarantined[0][0] <= now_s:
            _, lease_id = heapq.heappop(self._quarantined)
            lease = self.active[lease_id]
            self._end(lease)
            yield lease

    def take_overdue(self, now_s: float, alarm_s: float) -> Iterator[Lease]:
        """Yields, once each, the leases that are ``alarm_s`` old."""
        while self.unalarmed:
            lease = next(iter(self.unalarmed.values()))
            if lease.began_s + alarm_s > now_s:
                return
            del self.unalarmed[lease.id]
            yield lease

    def validate(self) -> None:
        """Assert the invariants."""
        by_engine: dict[Engine, dict[Chunk, int]] = {}
        quarantined = {lease_id for _, lease_id in self._quarantined}
        assert len(quarantined) == len(self._quarantined), "a lease is twice in quarantine"
        for lease_id, lease in self.active.items():
            assert lease.id == lease_id
            assert lease.state is not LeaseState.ENDED
            assert lease.num_bytes == sum(chunk.num_bytes for chunk in lease.chunks)
            assert lease_id in lease.engine.leases
            assert lease.copies <= lease.engine.connections, f"lease {lease_id} waits for a copy of the dead"
            assert (lease.state is LeaseState.QUARANTINED) == (lease_id in quarantined)
            if lease.state is LeaseState.HELD:
                assert lease.connection in lease.engine.connections, f"lease {lease_id} is held by the dead"
            if lease.state is LeaseState.RELEASING:
                assert lease.copies, f"lease {lease_id} waits for nothing"
            if lease.state is LeaseState.QUARANTINED:
                assert not lease.copies
            else:
                assert lease.engine.connections, f"lease {lease_id}: its engine is gone, and it is not in quarantine"
            counts = by_engine.setdefault(lease.engine, {})
            for chunk in lease.chunks:
                counts[chunk] = counts.get(chunk, 0) + 1
        assert quarantined <= self.active.keys()
        assert self.unalarmed.keys() <= self.active.keys()
        for engine, counts in by_engine.items():
            assert engine.leased == counts, "an engine's leased chunks are miscounted"
            assert engine.leased_bytes == sum(chunk.num_bytes for chunk in counts), "leased bytes do not add up"
            assert all(lease_id in self.active for lease_id in engine.leases)
