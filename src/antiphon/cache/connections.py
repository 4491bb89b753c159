"""Who is attached: connections, and the engines that they belong to.

An engine is one life of a vLLM instance; its processes (a scheduler, one worker a rank) attach apart. Reservations
belong to the connection that writes. Leases belong to the engine, since a scheduler looks up and its workers copy.

Always true: an engine is known exactly while one of its connections is attached, or one of its leases has not ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from antiphon.cache.arena import RegionHandle
from antiphon.cache.events import Attach, ConnectionId, EngineId, LeaseId
from antiphon.cache.index import Chunk
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import AntiphonError, ConnectionUnknown, LayoutMismatch, ProtocolError


@dataclass(slots=True, eq=False)
class Engine:
    """One life of an engine.

    Args:
        leased: chunks that its leases protect, with the number of these leases.
        leased_bytes: bytes of these chunks, each counted once.
    """

    id: EngineId
    model: str
    layout: ChunkLayout
    connections: set[ConnectionId] = field(default_factory=set)
    leases: set[LeaseId] = field(default_factory=set)
    leased: dict[Chunk, int] = field(default_factory=dict)
    leased_bytes: int = 0

    def lease_chunk(self, chunk: Chunk) -> None:
        """One more lease of this engine protects the chunk."""
        if chunk not in self.leased:
            self.leased_bytes += chunk.num_bytes
        self.leased[chunk] = self.leased.get(chunk, 0) + 1

    def unlease_chunk(self, chunk: Chunk) -> None:
        """One lease less."""
        self.leased[chunk] -= 1
        if not self.leased[chunk]:
            del self.leased[chunk]
            self.leased_bytes -= chunk.num_bytes


@dataclass(slots=True, eq=False)
class Reservation:
    """Slabs of a chunk that one connection may write."""

    writer: Connection
    chunk: Chunk
    region: RegionHandle
    slabs: tuple[int, ...]
    num_bytes: int
    began_s: float


@dataclass(slots=True, eq=False)
class Connection:
    """One attached process.

    Args:
        slabs: the slabs that it writes.
        reservations: by the generation of the region, oldest first.
        reserved_bytes: bytes of the slabs in ``reservations``.
    """

    id: ConnectionId
    engine: Engine
    slabs: tuple[int, ...]
    reservations: dict[int, Reservation] = field(default_factory=dict)
    reserved_bytes: int = 0


class Connections:
    """Attached connections and known engines."""

    __slots__ = ("_chunk_size_tokens", "connections", "engines")

    def __init__(self, chunk_size_tokens: int) -> None:
        self._chunk_size_tokens = chunk_size_tokens
        self.connections: dict[ConnectionId, Connection] = {}
        self.engines: dict[EngineId, Engine] = {}

    def get(self, connection: ConnectionId) -> Connection:
        """The attached connection.

        Raises:
            ConnectionUnknown: it is not attached.
        """
        found = self.connections.get(connection)
        if found is None:
            raise ConnectionUnknown(f"connection {connection} is not attached", remedy="attach before any other call")
        return found

    def attach(self, event: Attach) -> None:
        """Registers a connection.

        Raises:
            ProtocolError: the connection is attached already, or names slabs that the layout has not.
            LayoutMismatch: another chunk size than the cache's, or another layout or model than the engine's.
        """
        error = self._objection(event)
        if error is not None:
            raise error
        engine = self.engines.get(event.engine)
        if engine is None:
            engine = self.engines[event.engine] = Engine(event.engine, event.model, event.layout)
        engine.connections.add(event.connection)
        self.connections[event.connection] = Connection(event.connection, engine, event.slabs)

    def _objection(self, event: Attach) -> AntiphonError | None:
        if event.connection in self.connections:
            return ProtocolError(f"connection {event.connection} is attached already")
        slabs = event.slabs
        if len(set(slabs)) != len(slabs) or not all(0 <= slab < event.layout.num_slabs for slab in slabs):
            return ProtocolError(f"slabs {slabs} are not distinct slabs of the {event.layout.num_slabs} in the layout")
        if event.chunk_size_tokens != self._chunk_size_tokens:
            return LayoutMismatch(
                f"the engine's chunks have {event.chunk_size_tokens} tokens, the cache's {self._chunk_size_tokens}",
                remedy="give both the same chunk size",
            )
        engine = self.engines.get(event.engine)
        if engine is not None and (engine.layout != event.layout or engine.model != event.model):
            return LayoutMismatch(
                f"engine {event.engine.name} is attached as {engine.model} with {engine.layout}, and attaches again as "
                f"{event.model} with {event.layout}",
                remedy="all processes of one engine register the same model and layout",
            )
        return None

    def forget_engine_if_gone(self, engine: Engine) -> None:
        """Drops an engine that has neither connections nor leases."""
        if not engine.connections and not engine.leases:
            assert engine.leased_bytes == 0, "an engine without leases has leased bytes"
            del self.engines[engine.id]

    def validate(self) -> None:
        """Assert the invariants."""
        for engine_id, engine in self.engines.items():
            assert engine.id == engine_id
            assert engine.connections or engine.leases, f"{engine_id} is gone and known"
            assert engine.connections <= self.connections.keys(), f"{engine_id} has connections that are not attached"
        for connection_id, connection in self.connections.items():
            assert connection.id == connection_id
            assert self.engines.get(connection.engine.id) is connection.engine
            assert connection_id in connection.engine.connections
            total = sum(reservation.num_bytes for reservation in connection.reservations.values())
            assert total == connection.reserved_bytes, f"connection {connection_id}: {total} bytes reserved"
