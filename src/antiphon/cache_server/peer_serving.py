"""The side that lends: connections of other cache servers, which lease chunks and read them.

Owns the listening socket and the connections, on the peers' thread. What a peer may do is what an engine's scheduler
may: lease what is readable, for as long as its connection lasts.

Always true:

- Nothing is told before the peer has shown the cluster secret; NIXL's metadata least of all.
- The bytes of a loan are sent from the arena itself, while the lease holds: where the connection that owns it ends
  meanwhile, it counts as ended once they are sent, which takes ``SEND_TIMEOUT_S`` at most.
- The leases of a connection that ended go after the cache's quarantine. A peer that is silent while it has loans is
  given up after ``LOAN_SILENCE_S``: what it reads afterwards has another digest than it was told, so that it is never
  used. So has what it reads by NIXL after the quarantine, of which nobody tells this side; it knows that its connection
  has ended, and does not take that for wrong bytes.
- A call for loans waits for one digest, and for no longer than ``peer_digests.WAIT_S``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from antiphon.cache.events import ConnectionId
from antiphon.cache.lending import Loan, Wanted
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server.peer_digests import Digests
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
from antiphon.transport.nixl_agent import NixlAgent
from antiphon.transport.peer_tcp import PeerListener, PeerStream

log = logging.getLogger("antiphon.peers")

CONNECTIONS_MAX: Final = 1_024
LOAN_SILENCE_S: Final = 30.0
SILENCE_S: Final = 600.0
SEND_TIMEOUT_S: Final = 30.0


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
                with self._keeping(borrower.peer, call.body):
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
        owner = self._owner_of(peer, lease)
        if owner is None:
            raise PeerUnavailable(f"lease {lease} is none of this peer")
        return owner.loans[lease]

    def _owner_of(self, peer: tuple[str, str], lease: int) -> _Borrower | None:
        return next((each for each in self._borrowers.get(peer, ()) if lease in each.loans), None)

    @contextlib.contextmanager
    def _keeping(self, peer: tuple[str, str], body: wire.Message) -> Iterator[None]:
        """While bytes are sent, the lease that they are under is kept."""
        owner = self._owner_of(peer, body.lease) if isinstance(body, wire.Read) else None
        if owner is None:
            yield
            return
        owner.num_sends += 1
        try:
            yield
        finally:
            owner.sent()

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
        self.num_sends = 0
        """Chunks under its leases that are being sent, over any connection of the peer."""
        self._is_over = False

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
        for _, loan in loans:
            serving.digests.begin(loan)
        if loans:
            await serving.digests.first([loan for _, loan in loans])
        for index, loan in loans:
            digest = serving.digests.known(loan)
            if digest is None:  # what is known is read meanwhile
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

    def sent(self) -> None:
        """Nothing is read from the arena any more for one call that did."""
        self.num_sends -= 1
        self._end_if_quiet()

    def end(self) -> None:
        """The connection is over."""
        self._heat(-len(self._polled))
        self._is_over = True
        self._end_if_quiet()

    def _end_if_quiet(self) -> None:
        if self._is_over and not self.num_sends:
            self._serving._cache.tell(lambda: self._serving._lender.detach(self._connection))
