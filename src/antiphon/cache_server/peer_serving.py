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
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import Final

from antiphon.cache.events import ConnectionId
from antiphon.cache.lending import Loan, Wanted
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server.peer_lending import FIRST_BORROWER, Lender
from antiphon.cache_server.peer_threads import CacheThread
from antiphon.core.errors import AntiphonError, PeerRefused, PeerUnavailable, ProtocolError
from antiphon.core.namespace import NamespaceDigest
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol import peers as wire
from antiphon.protocol.cluster_proof import Answerer
from antiphon.storage.arena import ArenaMapping
from antiphon.storage.record import PayloadDigest
from antiphon.transport.nixl_agent import NixlAgent
from antiphon.transport.peer_tcp import PeerStream

log = logging.getLogger("antiphon.peers")

CONNECTIONS_MAX: Final = 1_024
LOAN_SILENCE_S: Final = 30.0
SILENCE_S: Final = 600.0
SEND_TIMEOUT_S: Final = 30.0
DIGEST_THREADS: Final = 2
DIGESTS_MAX: Final = 65_536


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

    Args:
        arena: where they are.
    """

    def __init__(self, arena: ArenaMapping) -> None:
        self._arena = arena
        self._known: OrderedDict[int, bytes] = OrderedDict()
        self._threads = concurrent.futures.ThreadPoolExecutor(DIGEST_THREADS, "antiphon-digest")

    async def of(self, loan: Loan) -> bytes:
        """The digest of a leased chunk, 16 bytes."""
        generation = loan.region.generation
        known = self._known.get(generation)
        if known is None:
            known = await asyncio.get_running_loop().run_in_executor(self._threads, self._take, loan)
            self._known[generation] = known
            while len(self._known) > DIGESTS_MAX:
                self._known.popitem(last=False)
        return known

    def _take(self, loan: Loan) -> bytes:
        digest = PayloadDigest()
        digest.update(self._arena.view(loan.region.offset_bytes, loan.num_bytes))
        return digest.digest()

    def close(self) -> None:
        """Waits for the digests that are being taken: the arena must not be unmapped before."""
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
        self._digests = Digests(arena)
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._next_connection = FIRST_BORROWER
        self._quiet = QuietLog(log, num_lines=20)
        self.agent: NixlAgent | None = None
        """Over which peers may read; None until it has started, or where there is none."""
        self.counts: Counter[str] = Counter()

    @property
    def num_connections(self) -> int:
        """Connections of peers."""
        return len(self._tasks)

    def listen(self, sock: socket.socket) -> None:
        """Accepts connections on ``sock``, which listens."""
        sock.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock))

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(sock)
            except OSError as error:
                self._quiet.say(logging.WARNING, "failed accepts", "accepting a peer: %s", error.strerror)
                await asyncio.sleep(0.2)
                continue
            if len(self._tasks) >= CONNECTIONS_MAX:
                self.counts["refused"] += 1
                accepted.close()
                continue
            task = loop.create_task(self._serve(PeerStream(accepted)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, stream: PeerStream) -> None:
        borrower: _Borrower | None = None
        myself = self._myself
        try:
            answerer = Answerer(myself.secret, wire.PEER, myself.instance, myself.incarnation)
            hello = await stream.prove(answerer)
            connection = ConnectionId(self._next_connection)
            self._next_connection += 1
            borrower = _Borrower(self, connection)
            await self._cache.call(lambda: self._lender.attach(connection, hello.instance, hello.incarnation))
            while True:
                async with asyncio.timeout(LOAN_SILENCE_S if borrower.loans else SILENCE_S):
                    call = await stream.receive()
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
                borrower.end()
            stream.close()

    async def close(self) -> None:
        """Ends every connection."""
        tasks = [task for task in (self._accepting, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await asyncio.get_running_loop().run_in_executor(None, self._digests.close)


class _Borrower:
    """One connection that has shown the secret.

    Args:
        serving: whose.
        connection: its number in the cache.
    """

    def __init__(self, serving: PeerServing, connection: ConnectionId) -> None:
        self._serving = serving
        self._connection = connection
        self.loans: dict[int, Loan] = {}

    async def answer(self, body: wire.Message) -> tuple[wire.Message, memoryview | None]:
        """The answer to a call, and the bytes that follow it."""
        match body:
            case wire.AskNixl():
                return self._nixl(), None
            case wire.Lend():
                return await self._lend(body), None
            case wire.Read():
                loan = self.loans.get(body.lease)
                if loan is None:
                    raise PeerUnavailable(f"lease {body.lease} is none of this connection")
                self._serving.counts["sent_bytes"] += loan.num_bytes
                payload = self._serving._arena.view(loan.region.offset_bytes, loan.num_bytes)
                return wire.ReadBegins(loan.num_bytes), payload
            case wire.Return():
                await self._return(body.leases)
                return wire.Noted(), None
            case _:
                raise ProtocolError(f"a cache server does not answer {type(body).__name__} of a peer")

    def _nixl(self) -> wire.NixlInfo:
        agent, arena = self._serving.agent, self._serving._arena
        return wire.NixlInfo(None if agent is None else agent.metadata, arena.address, arena.data_bytes)

    async def _lend(self, body: wire.Lend) -> wire.Lent:
        serving = self._serving
        keys = [TierKey(key) for key in wire.split_keys(body.keys)]
        wanted = Wanted(NamespaceDigest(body.namespace), body.fingerprint, body.num_bytes, body.format_version)
        loans, num_capped = await serving._cache.call(lambda: serving._lender.lend(self._connection, keys, wanted))
        self.loans.update((loan.lease, loan) for _, loan in loans)
        self._heat(len(loans))
        chunks = []
        for index, loan in loans:
            digest = await serving._digests.of(loan)
            chunks.append(wire.LentChunk(index, loan.lease, loan.region.offset_bytes, digest))
        serving.counts["lent"] += len(loans)
        return wire.Lent(tuple(chunks), num_capped)

    async def _return(self, leases: tuple[int, ...]) -> None:
        serving = self._serving
        num_ended = sum(self.loans.pop(lease, None) is not None for lease in set(leases))
        self._heat(-num_ended)
        await serving._cache.call(lambda: serving._lender.give_back(self._connection, leases))

    def _heat(self, change: int) -> None:
        """A peer that has loans may be reading over NIXL, which only works while this side polls."""
        if change and self._serving.agent is not None:
            with contextlib.suppress(PeerUnavailable):
                self._serving.agent.borrowers(change)

    def end(self) -> None:
        """The connection is over."""
        self._heat(-len(self.loans))
        self._serving._cache.tell(lambda: self._serving._lender.detach(self._connection))
