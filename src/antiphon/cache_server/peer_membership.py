"""This server as a member: joins the coordinator, tells it what is here, asks it who holds what.

Owns the one connection to the coordinator, on the peers' thread. Losing it costs sharing alone: it is made again, and
all chunks are listed again.

Always true: one message of the feed is under way at a time; a question that is not answered by its deadline is answered
by nothing, and for a while no other is asked.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Final

from antiphon.cache.breaker import Breaker
from antiphon.cache_server.peer_feed import Feed
from antiphon.cache_server.peer_serving import PeerSelf
from antiphon.cache_server.peer_threads import CacheThread
from antiphon.core.errors import AntiphonError, PeerTimeout, PeerUnavailable, ProtocolError
from antiphon.core.namespace import FORMAT_VERSION
from antiphon.core.quiet_log import QuietLog
from antiphon.observe.tracing import ActiveSpan
from antiphon.protocol import peers as wire
from antiphon.protocol.cluster_proof import Asker
from antiphon.transport.loop import heed_cancel
from antiphon.transport.peer_tcp import PeerStream

log = logging.getLogger("antiphon.peers")

CONNECT_TIMEOUT_S: Final = 2.0
ANSWER_TIMEOUT_S: Final = 2.0
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
ASKING_MAX: Final = 256
"""Questions under way at once."""
GATHER_S: Final = 0.01
"""What is stored one after the other is told at once."""
SAID_AGAIN_S: Final = 60.0
"""How often the log says why this server is no member, where that does not change."""


class Membership:
    """The member.

    Args:
        myself: who joins.
        urls: of the coordinator, and where peers reach this server.
        make_feed: a new feed, on the cache's thread.
        wait_for_changes: waits for the cache to change, at most the seconds that it is given.
        cache: that thread.
    """

    def __init__(
        self,
        myself: PeerSelf,
        urls: tuple[str, str],
        make_feed: Callable[[], Feed],
        wait_for_changes: Callable[[float], Awaitable[None]],
        cache: CacheThread,
    ) -> None:
        self._myself = myself
        self._coordinator_url, self._advertise_url = urls
        self._make_feed = make_feed
        self._wait_for_changes = wait_for_changes
        self._cache = cache
        self._lost = QuietLog(log, repeat_after_s=SAID_AGAIN_S)
        self._joined = QuietLog(log, num_lines=20)
        self._breaker = Breaker(0.5, 2.0)
        self._session: _Session | None = None
        self.is_listed = False
        self.num_joins = 0
        self.num_listings = 0
        self.reason = "not joined yet"
        """Why it is no member, for people; empty while it is one."""

    @property
    def is_member(self) -> bool:
        """Whether the coordinator knows this server."""
        return self._session is not None

    async def run(self) -> None:
        """Stays a member until it is cancelled."""
        retry_s = RETRY_MIN_S
        while True:
            num_joins = self.num_joins
            try:
                await self._be_member()
            except (AntiphonError, TimeoutError) as error:
                self.reason = str(error) or type(error).__name__
                self._lost.warning(self.reason, "no member of the cluster: %s", self.reason)
            self._session = None
            self.is_listed = False
            heed_cancel()
            retry_s = RETRY_MIN_S if self.num_joins != num_joins else min(2 * retry_s, RETRY_MAX_S)
            await asyncio.sleep(retry_s * random.uniform(0.5, 1.0))

    async def _be_member(self) -> None:
        myself = self._myself
        asker = Asker(myself.secret, wire.COORDINATOR, myself.instance, myself.incarnation)
        stream = await PeerStream.connect(self._coordinator_url, asker, CONNECT_TIMEOUT_S)
        session = _Session(stream)
        try:
            async with asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(session.read())
                try:
                    await self._talk(session)
                finally:
                    reading.cancel()
        except* (AntiphonError, TimeoutError) as group:
            raise PeerUnavailable(str(_first(group))) from None
        finally:
            session.end()
            stream.close()

    async def _talk(self, session: _Session) -> None:
        joined = await session.call(wire.Join(self._advertise_url, FORMAT_VERSION), ANSWER_TIMEOUT_S)
        if not isinstance(joined, wire.Joined):
            raise ProtocolError(f"Join is answered by Joined, not by {type(joined).__name__}")
        heartbeat_s = min(60.0, max(0.05, joined.heartbeat_s))
        self.num_joins += 1
        self._session, self.reason = session, ""
        self._joined.info("joins", "a member of the cluster at %s", self._coordinator_url)
        feed = await self._cache.call(self._make_feed)
        num_listings = self.num_listings
        while True:
            message = await self._cache.call(feed.next)
            answer = await session.call(message or wire.Heartbeat(), ANSWER_TIMEOUT_S)
            if isinstance(answer, wire.Resync):
                self.is_listed = False
                await self._cache.call(feed.restart)
                continue
            self.num_listings = num_listings + feed.num_listings
            self.is_listed = self.is_listed or (isinstance(message, wire.Listing) and message.is_last)
            if message is None:
                await self._wait_for_changes(heartbeat_s)
                await asyncio.sleep(GATHER_S)

    async def ask(self, keys: list[bytes], timeout_s: float, span: ActiveSpan | None = None) -> wire.Located | None:
        """Which members hold ``keys``; None where that is not known, and for a while after a failure.

        Args:
            span: that asks, which has a part once the question is sent; None where it is not traced.
        """
        loop = asyncio.get_running_loop()
        session, breaker = self._session, self._breaker
        if session is None:
            return None
        if not breaker.is_closed:
            if not breaker.is_due(loop.time()):
                return None
            breaker.probing()
        traceparent = ""
        if span is not None:
            traceparent, span.has_parts = span.context.traceparent, True
        try:
            located = await session.call(wire.Locate(b"".join(keys), traceparent), timeout_s)
        except (AntiphonError, asyncio.CancelledError) as error:
            breaker.failed(loop.time(), str(error))
            if isinstance(error, asyncio.CancelledError):
                raise
            return None
        breaker.answered()
        if not isinstance(located, wire.Located) or len(located.holders) != len(keys):
            return None
        return located


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class _Session:
    """One connection: calls and their answers.

    Args:
        stream: that has shown the secret.
    """

    def __init__(self, stream: PeerStream) -> None:
        self._stream = stream
        self._next_id = 16
        self._waiting: dict[int, asyncio.Future[wire.Message]] = {}
        self._is_over = False

    async def read(self) -> None:
        """Takes up answers until the connection ends, which it raises."""
        while True:
            envelope = await self._stream.receive()
            future = self._waiting.pop(envelope.id, None)
            if future is not None and not future.done():
                future.set_result(envelope.body)

    async def call(self, body: wire.Message, timeout_s: float) -> wire.Message:
        """The answer to a call.

        Raises:
            PeerTimeout, PeerUnavailable: none came.
            AntiphonError: it is a ``Failure``.
        """
        if self._is_over or len(self._waiting) >= ASKING_MAX:
            raise PeerUnavailable("the connection to the coordinator is over, or too many questions are under way")
        call_id, self._next_id = self._next_id, self._next_id + 1
        future: asyncio.Future[wire.Message] = asyncio.get_running_loop().create_future()
        self._waiting[call_id] = future
        try:
            async with asyncio.timeout(timeout_s):
                await self._stream.send(call_id, body)
                answer = await future
        except TimeoutError:
            raise PeerTimeout(f"the coordinator did not answer within {timeout_s:g} s") from None
        finally:
            self._waiting.pop(call_id, None)
        if isinstance(answer, wire.Failure):
            raise wire.error_of(answer)
        return answer

    def end(self) -> None:
        """Nobody waits any more."""
        self._is_over = True
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(PeerUnavailable("the connection to the coordinator ended"))
        self._waiting.clear()
