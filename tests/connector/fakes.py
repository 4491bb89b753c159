"""A cache server without sockets: the real cache machine, a real arena, and sessions whose timing a test decides.

``FakeSession`` keeps the contract of ``antiphon.client.session.Session`` as far as the connector uses it, and asserts
what a real one could only suffer: an address asked for after the mapping is gone, a hold given back twice.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

from antiphon.cache.effects import Refused
from antiphon.cache.events import Attach, ConnectionId, Detach, EngineId, Tick
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache_server.translate import CacheCall, answer_of, event_of
from antiphon.client.options import ClientOptions
from antiphon.client.pending import OnLate
from antiphon.client.releases import Releases
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.errors import AntiphonError, CacheUnavailable
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol import cache as calls
from antiphon.storage.arena import ArenaOwner

log = logging.getLogger("antiphon.client")

QUIET_S = 2.0
_connection_ids = itertools.count(1)
_incarnations = itertools.count(1)


class FakeClock:
    """A monotonic clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class FakeServer:
    """One life of a cache server."""

    def __init__(self, layout: ChunkLayout, chunk_size_tokens: int, num_chunks: int, clock: FakeClock) -> None:
        self.instance = "fake"
        self.incarnation = f"life-{next(_incarnations)}"
        self.layout = layout
        self.clock = clock
        self.is_alive = True
        self.owner = ArenaOwner.create(layout.chunk_bytes * num_chunks, self.instance, self.incarnation)
        options = CacheOptions(
            arena_bytes=layout.chunk_bytes * num_chunks,
            chunk_size_tokens=chunk_size_tokens,
            alignment_bytes=layout.chunk_bytes,
        )
        self.cache = Cache(options, first_id=next(_incarnations) * 1_000_000)
        self.roles: dict[ConnectionId, str] = {}
        self.gates: dict[ConnectionId, str] = {}
        self.reports: list[calls.Report] = []
        self.num_bad_releases = 0
        self.num_calls: dict[str, int] = {}
        self.on_readable: Callable[[bytes, bytes], None] = lambda _key, _content: None
        """Told of each chunk that a commit made readable: its key, and the bytes of all slabs."""
        self._keys: dict[int, bytes] = {}  # of what was granted, by generation
        self._lock = threading.Lock()

    def attach(self, options: ClientOptions) -> ConnectionId:
        connection = ConnectionId(next(_connection_ids))
        engine = EngineId(options.engine, options.incarnation)
        event = Attach(connection, engine, options.model, options.chunk_size_tokens, options.layout, options.slabs)
        with self._lock:
            reply = self.cache.step(event, self.clock())[0]
        assert not isinstance(reply, Refused), reply
        self.roles[connection], self.gates[connection] = options.role, "not_run"
        return connection

    def detach(self, connection: ConnectionId) -> None:
        with self._lock:
            self.cache.step(Detach(connection), self.clock())
        del self.roles[connection], self.gates[connection]

    def tick(self) -> None:
        with self._lock:
            self.cache.step(Tick(), self.clock())
            self.cache.validate()

    def answer(self, connection: ConnectionId, body: calls.Body) -> calls.Answered:
        with self._lock:
            name = type(body).__name__
            self.num_calls[name] = self.num_calls.get(name, 0) + 1
            match body:
                case calls.EngineNote():
                    self.gates[connection] = body.gate
                    return calls.Noted()
                case calls.Report():
                    self.reports.append(body)
                    return calls.Noted()
                case calls.AskProcesses():
                    return calls.Processes(tuple((role, self.gates[c]) for c, role in self.roles.items()))
            try:
                event = event_of(cast("CacheCall", body), connection, self.layout.num_slabs)
            except AntiphonError as error:
                return calls.failure_of(error)
            if isinstance(body, calls.Commit):
                contents = [self._content(region) for region in body.regions]
            reply = self.cache.step(event, self.clock())[0]
            answer = answer_of(reply)
            self.num_bad_releases += isinstance(body, calls.Release) and isinstance(answer, calls.Failure)
            if isinstance(body, calls.Reserve) and isinstance(answer, calls.Reserved):
                keys = calls.split_keys(body.keys)
                self._keys.update((grant.region.generation, keys[grant.index]) for grant in answer.grants)
            if isinstance(body, calls.Commit) and isinstance(answer, calls.Committed):
                for region, outcome, content in zip(body.regions, answer.outcomes, contents, strict=True):
                    if outcome == "readable":
                        self.on_readable(self._keys[region.generation], content)
            return answer

    def _content(self, region: calls.Region) -> bytes:
        return ctypes.string_at(self.owner.mapping.address + region.offset, self.layout.chunk_bytes)

    @property
    def num_leases(self) -> int:
        return len(self.cache.leases())

    @property
    def reserved_bytes(self) -> int:
        return self.cache.statistics().reserved_bytes

    def close(self) -> None:
        self.owner.close()


class FakePending:
    """A call. ``session.deliver`` completes it."""

    def __init__(self, session: FakeSession, body: calls.Body, on_late: OnLate | None = None) -> None:
        self.session, self.body, self.on_late = session, body, on_late
        self.answer: calls.Answered | None = None
        self.error: AntiphonError | None = None
        self.is_abandoned = False
        self.is_read = False
        self.onboarding: tuple[calls.Onboarding, float] | None = None
        self.done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self.done.is_set()

    @property
    def has_failed(self) -> bool:
        return self.error is not None

    def complete(self, answer: calls.Answered | None, error: AntiphonError | None = None) -> None:
        self.answer, self.error = answer, error
        self.done.set()
        if self.is_abandoned:
            self._give_back()

    def wait(self, timeout_s: float) -> bool:
        """No time passes here."""
        assert timeout_s >= 0
        return self.is_done

    def result(self) -> calls.Answered:
        assert self.is_done, "the call is not done"
        self.is_read = True
        if self.error is not None:
            raise self.error
        assert self.answer is not None
        if isinstance(self.answer, calls.Failure):
            raise calls.error_of(self.answer)
        return self.answer

    def abandon(self) -> None:
        if self.is_abandoned or self.is_read:
            return
        self.is_abandoned = True
        if self.is_done:
            self._give_back()

    def _give_back(self) -> None:
        if isinstance(self.answer, calls.Found) and self.answer.lease is not None:
            assert isinstance(self.body, calls.Lookup)
            self.session.releases.owe(self.session.incarnation, self.body.request, self.answer.lease)
        if self.answer is not None and self.on_late is not None:
            self.on_late(self.answer)


class FakeSession:
    """A session whose answers come at once, or when ``deliver`` is called where ``is_slow`` says so."""

    def __init__(self, server: FakeServer, options: ClientOptions, releases: Releases | None = None) -> None:
        self.server, self.options = server, options
        alone = Releases(lambda: self if self.is_open else None, options.owed_releases_max, QuietLog(log))
        self.releases = alone if releases is None else releases
        self.instance, self.incarnation = server.instance, server.incarnation
        self.peer_address = ""
        self.arena = server.owner.mapping if options.needs_arena else None
        self.connection = server.attach(options)
        self.is_open = True
        self.is_responsive = True
        self.is_full = False
        self.is_disposed = False
        self.is_retired = False
        self.num_holds = 0
        self.opened_at_s = server.clock()
        self.ended_s = 0.0
        self.queue: deque[FakePending] = deque()
        self.is_slow: Callable[[calls.Body], bool] = lambda _body: False
        self.between: Callable[[], None] = lambda: None
        """Called where other threads may run: before a call is made and after it was answered."""
        self.between_addresses: Callable[[], None] = lambda: None
        self._lock = threading.RLock()

    def give_back(self, body: calls.Body, on_late: OnLate | None = None) -> FakePending:
        return self.submit(body, on_late, is_undo=True)

    def submit(self, body: calls.Body, on_late: OnLate | None = None, *, is_undo: bool = False) -> FakePending:
        pending = FakePending(self, body, on_late)
        if not self.is_open or (self.is_full and not is_undo):
            pending.complete(None, CacheUnavailable("the session has ended"))
            return pending
        with self._lock:
            self.queue.append(pending)
        if not self.is_slow(body):
            self.deliver()
        return pending

    def call(self, body: calls.Body, timeout_s: float | None = None) -> calls.Answered:
        self.between()
        pending = self.submit(body)
        if not pending.is_done:
            self.deliver()
        self.between()
        return pending.result()

    def deliver(self, number: int | None = None) -> None:
        """The server answers the oldest ``number`` calls; all where it is None."""
        with self._lock:
            left = len(self.queue) if number is None else number
            while self.queue and left > 0:
                left -= 1
                pending = self.queue.popleft()
                pending.complete(self.server.answer(self.connection, pending.body))

    def hold(self) -> bool:
        with self._lock:
            if self.is_disposed:
                return False
            self.num_holds += 1
            return True

    def unhold(self) -> None:
        with self._lock:
            assert self.num_holds > 0, "unhold without hold"
            self.num_holds -= 1

    def retire(self) -> None:
        self.is_retired = True
        self.end()

    def end(self) -> None:
        """The connection is lost. The server sees its end when it is disposed of."""
        with self._lock:
            if not self.is_open:
                return
            self.is_open = False
            self.ended_s = self.server.clock()
            while self.queue:
                self.queue.popleft().complete(None, CacheUnavailable("the connection ended"))

    def dispose_if_due(self) -> None:
        with self._lock:
            has_quiet = self.is_retired or self.arena is None or self.server.clock() - self.ended_s >= QUIET_S
            if self.is_open or self.is_disposed or self.num_holds or not has_quiet:
                return
            self.is_disposed = True
        if self.server.is_alive:
            self.server.detach(self.connection)

    def address_of(self, region: calls.Region) -> int:
        assert self.arena is not None
        assert not self.is_disposed, "the arena was unmapped"
        assert self.is_open or self.num_holds > 0, "the arena is used without a hold"
        self.between_addresses()
        return self.arena.address + region.offset


class FakeClient:
    """Keeps at most one open session, as a test says."""

    def __init__(self, options: ClientOptions, on_change: Callable[[], None] = lambda: None) -> None:
        self.options = options
        self.on_change = on_change
        self.current: FakeSession | None = None
        self.all: list[FakeSession] = []
        self.is_closed = False
        self.releases = Releases(lambda: self.session, options.owed_releases_max, QuietLog(log))
        self.prepare: Callable[[FakeSession], None] = lambda _session: None
        self.server_to_find: FakeServer | None = None

    @property
    def session(self) -> FakeSession | None:
        current = self.current
        return current if current is not None and current.is_open else None

    @property
    def state(self) -> str:
        return "connected" if self.session is not None else "connecting"

    def release(self, incarnation: str, request: str, lease: int) -> None:
        self.releases.owe(incarnation, request, lease)

    def start(self) -> None:
        if self.server_to_find is not None:
            self.connect(self.server_to_find)

    def wait_connected(self, timeout_s: float) -> bool:
        return self.session is not None

    def connect(self, server: FakeServer) -> None:
        assert self.session is None
        assert server.is_alive
        self.current = FakeSession(server, self.options, self.releases)
        self.all.append(self.current)
        self.prepare(self.current)
        self.releases.pay(self.current)
        self.on_change()

    def lose(self) -> None:
        if self.current is not None:
            self.current.end()
            self.current = None
            self.on_change()

    def close(self) -> None:
        self.is_closed = True
        if self.current is not None:
            self.current.end()


class FakeDevice:
    type = "cpu"


class FakeTensor:
    """A layer's KV: ``num_blocks`` blocks of ``block_bytes``, in memory that C can see."""

    device = FakeDevice()

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self.shape = (num_blocks, block_bytes)
        self.block_bytes = block_bytes
        self.memory = (ctypes.c_ubyte * (num_blocks * block_bytes))()
        self.view = memoryview(self.memory).cast("B")

    def data_ptr(self) -> int:
        return ctypes.addressof(self.memory)

    def stride(self, dim: int) -> int:
        return (self.block_bytes, 1)[dim]

    def element_size(self) -> int:
        return 1

    def is_contiguous(self) -> bool:
        return True

    def block(self, block_id: int) -> memoryview:
        return self.view[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]


def open_sessions(clients: Iterable[FakeClient]) -> list[Any]:
    """The current sessions of these clients."""
    return [client.session for client in clients if client.session is not None]
