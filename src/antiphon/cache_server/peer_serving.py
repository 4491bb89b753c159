"""The side that lends: connections of other cache servers, which lease chunks and read them.

Owns the listening socket and the connections, on the peers' thread. What a peer may do is what an engine's scheduler
may: lease what is readable, for as long as its connection lasts.

Always true:

- Nothing is told before the peer has shown the cluster secret; NIXL's metadata least of all.
- The bytes of a loan are sent from the arena itself, while the lease holds.
- The lease of a peer whose connection ended goes after the cache's quarantine. A peer that is silent while it has loans
  is given up after ``LOAN_SILENCE_S``: what it reads afterwards has another digest than it was told, so that it is
  never used.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import socket
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from antiphon.cache.arena import RegionHandle
from antiphon.cache.events import ConnectionId
from antiphon.cache.lending import Loan, Wanted
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server.peer_lending import FIRST_BORROWER, Lender
from antiphon.cache_server.peer_threads import CacheThread
from antiphon.core.chunks import ChunkKey
from antiphon.core.errors import AntiphonError, PeerRefused, PeerUnavailable, ProtocolError
from antiphon.core.namespace import NamespaceDigest
from antiphon.core.quiet_log import QuietLog
from antiphon.observe.trace_context import parse_traceparent
from antiphon.observe.tracing import Span, Tracing
from antiphon.protocol import peers as wire
from antiphon.protocol.cluster_proof import Answerer
from antiphon.storage.arena import ArenaMapping
from antiphon.storage.record import PayloadDigest
from antiphon.transport.nixl_agent import NixlAgent
from antiphon.transport.peer_tcp import PeerListener, PeerStream

log = logging.getLogger("antiphon.peers")

CONNECTIONS_MAX: Final = 1_024
LOAN_SILENCE_S: Final = 30.0
SILENCE_S: Final = 600.0
SEND_TIMEOUT_S: Final = 30.0
DIGEST_THREADS: Final = 2
DIGESTS_MAX: Final = 65_536
AHEAD_MAX: Final = 256
"""Chunks whose digests may wait to be taken before anybody asks; those of others are taken when they are lent."""
PULLED_MAX: Final = 4_096


@dataclass(frozen=True)
class PeerSelf:
    """What this server is to others.

    Args:
        instance, incarnation: its name and life.
        secret: of the cluster.
    """

    instance: str
    incarnation: str
    secret: bytes


class Digests:
    """Digests of chunks in the arena, each taken once: a readable chunk does not change.

    They are taken soon after the store, on a thread of their own, so that a peer does not wait for it; not those of
    chunks that came from a peer themselves, and not when many wait. A chunk that goes meanwhile costs nothing but that:
    its generation is never asked for.

    Args:
        arena: where they are.
    """

    def __init__(self, arena: ArenaMapping) -> None:
        self._arena = arena
        self._known: OrderedDict[int, bytes] = OrderedDict()
        """By generation of the region; under ``lock``."""
        self._taking: dict[int, concurrent.futures.Future[bytes]] = {}
        """What a thread is busy with, by generation; under ``lock``."""
        self._pulled: OrderedDict[bytes, None] = OrderedDict()
        """Tier keys of what came from a peer lately; under ``lock``."""
        self._num_ahead = 0
        """Under ``lock``."""
        self._lock = threading.Lock()
        self._threads = concurrent.futures.ThreadPoolExecutor(DIGEST_THREADS, "antiphon-digest")
        self._ahead = concurrent.futures.ThreadPoolExecutor(1, "antiphon-digest-ahead")

    def known(self, loan: Loan) -> bytes | None:
        """The digest of a leased chunk, where it was taken."""
        with self._lock:
            return self._known.get(loan.region.generation)

    async def of(self, loan: Loan) -> bytes:
        """The digest of a leased chunk, 16 bytes."""
        known = self.known(loan)
        if known is None:
            loop = asyncio.get_running_loop()
            known = await loop.run_in_executor(self._threads, self._take, loan.region, loan.num_bytes)
        return known

    def begin(self, loan: Loan) -> None:
        """The digest of a chunk will be asked for. Does not wait."""
        with contextlib.suppress(RuntimeError):  # closed
            self._threads.submit(self._take, loan.region, loan.num_bytes)

    def pulled(self, key: bytes) -> None:
        """The chunk of that tier key comes from a peer, which has its digest: nobody is likely to ask here."""
        with self._lock:
            self._pulled[key] = None
            while len(self._pulled) > PULLED_MAX:
                self._pulled.popitem(last=False)

    def stored(self, key: TierKey, region: RegionHandle, num_bytes: int) -> None:
        """The chunk is readable: its digest is taken soon. Of any thread; does not wait."""
        with self._lock:
            if key in self._pulled or self._num_ahead >= AHEAD_MAX:
                self._pulled.pop(key, None)
                return
            self._num_ahead += 1
        try:
            self._ahead.submit(self._take_ahead, region, num_bytes)
        except RuntimeError:
            pass  # closed

    @property
    def num_ahead(self) -> int:
        """Digests that are to be taken before anybody asks."""
        return self._num_ahead

    def _take_ahead(self, region: RegionHandle, num_bytes: int) -> None:
        try:
            self._take(region, num_bytes)
        finally:
            with self._lock:
                self._num_ahead -= 1

    def _take(self, region: RegionHandle, num_bytes: int) -> bytes:
        with self._lock:
            known, taking = self._known.get(region.generation), self._taking.get(region.generation)
            if known is not None:
                return known
            mine: concurrent.futures.Future[bytes] = concurrent.futures.Future()
            if taking is None:
                self._taking[region.generation] = mine
        if taking is not None:
            return taking.result()  # another thread has begun
        digest = PayloadDigest()
        digest.update(self._arena.view(region.offset_bytes, num_bytes))
        found = digest.digest()
        with self._lock:
            del self._taking[region.generation]
            self._known[region.generation] = found
            while len(self._known) > DIGESTS_MAX:
                self._known.popitem(last=False)
        mine.set_result(found)
        return found

    def close(self) -> None:
        """Waits for the digests that are being taken: the arena must not be unmapped before."""
        self._ahead.shutdown(wait=True, cancel_futures=True)
        self._threads.shutdown(wait=True, cancel_futures=True)


class PeerServing:
    """Lends to peers.

    Args:
        myself: who lends.
        lender: the books, on the cache's thread.
        cache: that thread.
        arena: whose chunks.
    """

    def __init__(self, myself: PeerSelf, lender: Lender, cache: CacheThread, arena: ArenaMapping) -> None:
        self._myself = myself
        self._lender = lender
        self._cache = cache
        self._arena = arena
        self.digests = Digests(arena)
        self._next_connection = FIRST_BORROWER
        self._borrowers: dict[tuple[str, str], set[_Borrower]] = {}
        """Connections that have shown the secret, by name and life of the peer."""
        self._quiet = QuietLog(log, num_lines=20)
        self.agent: NixlAgent | None = None
        """Over which peers may read; None until it has started, or where there is none."""
        self.tracing: Tracing | None = None
        """Takes spans of loans; None where nothing is traced."""
        self.counts: Counter[str] = Counter()
        self._listener = PeerListener(self._serve, CONNECTIONS_MAX, self.counts, self._quiet)

    @property
    def num_connections(self) -> int:
        """Connections of peers."""
        return self._listener.num_connections

    def listen(self, sock: socket.socket) -> None:
        """Accepts connections on ``sock``, which listens; it is closed by ``close``."""
        self._listener.listen(sock)

    async def _serve(self, stream: PeerStream) -> None:
        borrower: _Borrower | None = None
        myself = self._myself
        try:
            answerer = Answerer(myself.secret, wire.PEER, myself.instance, myself.incarnation)
            hello = await stream.prove(answerer)
            connection = ConnectionId(self._next_connection)
            self._next_connection += 1
            borrower = _Borrower(self, connection, (hello.instance, hello.incarnation))
            self._borrowers.setdefault(borrower.peer, set()).add(borrower)
            await self._cache.call(lambda: self._lender.attach(connection, hello.instance, hello.incarnation))
            while True:
                async with asyncio.timeout(LOAN_SILENCE_S if borrower.loans else SILENCE_S):
                    call = await stream.receive()
                if isinstance(call.body, wire.Return):
                    borrower.give_back(call.body.leases)
                    continue
                payload: memoryview | None = None
                try:
                    answer, payload = await borrower.answer(call.body)
                except AntiphonError as error:
                    answer = wire.failure_of(error)
                async with asyncio.timeout(SEND_TIMEOUT_S):
                    await stream.send(call.id, answer, payload)
        except PeerRefused as error:
            self.counts["refused"] += 1
            self._quiet.say(logging.WARNING, "refused peers", "a peer is refused: %s", error.message)
        except (AntiphonError, TimeoutError) as error:
            log.debug("a peer's connection ended: %s", error)
        finally:
            if borrower is not None:
                self._left(borrower)
                borrower.end()
            stream.close()

    def _left(self, borrower: _Borrower) -> None:
        others = self._borrowers[borrower.peer]
        others.discard(borrower)
        if not others:
            del self._borrowers[borrower.peer]

    def loan_of(self, peer: tuple[str, str], lease: int) -> Loan:
        """A loan of any connection of that life of a peer. Raises PeerUnavailable where it has none of that name."""
        for borrower in self._borrowers.get(peer, ()):
            if (loan := borrower.loans.get(lease)) is not None:
                return loan
        raise PeerUnavailable(f"lease {lease} is none of this peer")

    async def close(self) -> None:
        """Ends every connection."""
        await self._listener.close()
        await asyncio.get_running_loop().run_in_executor(None, self.digests.close)


class _Borrower:
    """One connection that has shown the secret.

    Args:
        serving: whose.
        connection: its number in the cache.
        peer: whose it is: name and life.
    """

    def __init__(self, serving: PeerServing, connection: ConnectionId, peer: tuple[str, str]) -> None:
        self._serving = serving
        self._connection = connection
        self.peer = peer
        self.loans: dict[int, Loan] = {}
        self._polled: set[int] = set()
        """Those of them whose reads need this side's NIXL agent."""

    async def answer(self, body: wire.Message) -> tuple[wire.Message, memoryview | None]:
        """The answer to a call, and the bytes that follow it."""
        match body:
            case wire.AskNixl():
                return self._nixl(), None
            case wire.Lend():
                return await self._lend(body), None
            case wire.AskHeld():
                return await self._held(body), None
            case wire.Read():
                loan = self._serving.loan_of(self.peer, body.lease)
                self._serving.counts["sent_bytes"] += loan.num_bytes
                payload = self._serving._arena.view(loan.region.offset_bytes, loan.num_bytes)
                return wire.ReadBegins(loan.num_bytes), payload
            case _:
                raise ProtocolError(f"a cache server does not answer {type(body).__name__} of a peer")

    def _nixl(self) -> wire.NixlInfo:
        agent, arena = self._serving.agent, self._serving._arena
        return wire.NixlInfo(None if agent is None else agent.metadata, arena.address, arena.data_bytes)

    async def _lend(self, body: wire.Lend) -> wire.Lent:
        serving = self._serving
        began_s = time.time()
        keys = [TierKey(key) for key in wire.split_keys(body.keys)]
        wanted = Wanted(NamespaceDigest(body.namespace), body.fingerprint, body.num_bytes, body.format_version)
        loans, num_capped = await serving._cache.call(lambda: serving._lender.lend(self._connection, keys, wanted))
        self.loans.update((loan.lease, loan) for _, loan in loans)
        if body.needs_polls:
            self._polled.update(loan.lease for _, loan in loans)
            self._heat(len(loans))
        chunks: list[wire.LentChunk] = []
        later: list[int] = []
        for index, loan in loans:
            digest = serving.digests.known(loan)
            if digest is None and not chunks:
                digest = await serving.digests.of(loan)
            if digest is None:  # what is known is read meanwhile
                serving.digests.begin(loan)
                later.append(loan.lease)
            else:
                chunks.append(wire.LentChunk(index, loan.lease, loan.region.offset_bytes, digest))
        if later:
            self.give_back(tuple(later))
        if serving.tracing is not None:
            self._trace(serving.tracing, body, len(chunks), began_s)
        return wire.Lent(tuple(chunks), num_capped, len(later))

    def _trace(self, tracing: Tracing, body: wire.Lend, num_lent: int, began_s: float) -> None:
        """The span of a loan: until the peer is told of it."""
        parent = parse_traceparent(body.traceparent)
        if parent is None:
            return
        attributes: dict[str, str | int] = {
            "antiphon.instance": self._serving._myself.instance,
            "antiphon.peer": self.peer[0],
            "antiphon.chunks.asked": len(body.keys) // wire.KEY_BYTES,
            "antiphon.chunks.lent": num_lent,
            "antiphon.bytes": num_lent * body.num_bytes,
        }
        tracing.record(Span("peer.lend", tracing.begin(parent), parent, began_s, time.time(), "server", attributes))

    async def _held(self, body: wire.AskHeld) -> wire.Held:
        lender = self._serving._lender
        tier_keys, chunk_keys = wire.split_keys(body.tier_keys), wire.split_keys(body.chunk_keys)
        if len(tier_keys) != len(chunk_keys):
            raise ProtocolError("AskHeld names each chunk by both of its keys")
        pairs = [(TierKey(tier), ChunkKey(chunk)) for tier, chunk in zip(tier_keys, chunk_keys, strict=True)]
        states = await self._serving._cache.call(lambda: lender.held(pairs))
        return wire.Held(bytes(wire.HELD_STATES.index(state) for state in states))

    def give_back(self, leases: tuple[int, ...]) -> None:
        """The leases end; nothing is answered."""
        serving = self._serving
        for lease in leases:
            self.loans.pop(lease, None)
        polled = self._polled.intersection(leases)
        self._polled -= polled
        self._heat(-len(polled))

        def step() -> None:
            serving._lender.give_back(self._connection, leases)

        serving._cache.tell(step)

    def _heat(self, change: int) -> None:
        """Some reads over NIXL only work while this side polls."""
        if change and self._serving.agent is not None:
            with contextlib.suppress(PeerUnavailable):
                self._serving.agent.borrowers(change)

    def end(self) -> None:
        """The connection is over."""
        self._heat(-len(self._polled))
        self._serving._cache.tell(lambda: self._serving._lender.detach(self._connection))
