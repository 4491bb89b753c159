"""The coordinator's connections: each member has one, on which it joins, tells what it holds, and asks.

Owns the listening socket, the connections and the one ``Directory``. Everything runs on one event loop, so that a
message is applied whole before the next.

Always true:

- Nothing is taken up from a connection that has not shown the cluster secret.
- A member whose connection ends is none any more from that moment on.
- A connection costs one coroutine; there are at most ``CONNECTIONS_MAX``, and those that have not shown the secret go
  after a short time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import Counter
from typing import Final

from antiphon.coordinator.directory import Directory, DirectoryOptions, Member
from antiphon.core.errors import AntiphonError, PeerRefused, ProtocolError
from antiphon.core.ids import new_incarnation
from antiphon.core.namespace import FORMAT_VERSION
from antiphon.core.quiet_log import QuietLog
from antiphon.observe.trace_context import parse_traceparent
from antiphon.observe.tracing import Span, Tracing
from antiphon.protocol import peers as wire
from antiphon.protocol.cluster_proof import Answerer
from antiphon.transport.loop import ended
from antiphon.transport.peer_tcp import PeerListener, PeerStream

log = logging.getLogger("antiphon.coordinator")

CONNECTIONS_MAX: Final = 4_096
HEARTBEATS_PER_TIMEOUT: Final = 3
_EXPIRE_INTERVAL_S: Final = 0.25
_SILENCE_MAX_S: Final = 120.0
"""A connection on which nothing comes for so long is closed."""
_REFUSALS_SAID_S: Final = 60.0
"""The log names three refusals in so long: a server that is refused comes again every second or two."""


class Coordinator:
    """One coordinator.

    Args:
        secret: of the cluster.
        options: of the directory.
        tracing: where spans go; None where nothing is traced.
    """

    def __init__(self, secret: bytes, options: DirectoryOptions, tracing: Tracing | None = None) -> None:
        self.tracing = tracing
        self._secret = secret
        self._options = options
        self._loop = asyncio.get_running_loop()
        self._expiring: asyncio.Task[None] | None = None
        self._quiet = QuietLog(log, num_lines=20)
        self._refusals = QuietLog(log, num_lines=3, repeat_after_s=_REFUSALS_SAID_S)
        self.directory = Directory(options)
        self.incarnation = new_incarnation()
        self.counts: Counter[str] = Counter()
        self._listener = PeerListener(self._serve, CONNECTIONS_MAX, self.counts, self._quiet)
        self.port = 0

    def listen(self, sock: socket.socket) -> None:
        """Accepts connections on ``sock``, which listens; it is the coordinator's from here on."""
        self.port = sock.getsockname()[1]
        self._listener.listen(sock)
        self._expiring = self._loop.create_task(self._expire())

    @property
    def is_alive(self) -> bool:
        """Whether connections are accepted and silent members expire."""
        return self._listener.is_alive and self._expiring is not None and not self._expiring.done()

    @property
    def num_connections(self) -> int:
        """Connections, whether or not they have shown the secret."""
        return self._listener.num_connections

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(_EXPIRE_INTERVAL_S)
            for member in self.directory.expire(self._loop.time()):
                self._quiet.say(
                    logging.WARNING,
                    "silent members",
                    "%s (%s) was not heard of for %.1f s and is no member any more",
                    *(member.instance, member.incarnation, self._options.heartbeat_timeout_s),
                )

    async def _serve(self, stream: PeerStream) -> None:
        try:
            hello = await self._proved(stream)
            if hello is not None:
                await self._talk(stream, hello)
        finally:
            stream.close()

    async def _proved(self, stream: PeerStream) -> wire.Hello | None:
        """Who has shown the secret; None where that did not happen."""
        answerer = Answerer(self._secret, wire.COORDINATOR, "coordinator", self.incarnation)
        try:
            return await stream.prove(answerer)
        except PeerRefused as error:
            self._refused("a connection", error)
        except AntiphonError as error:
            hello = answerer.hello
            if hello is None:
                log.debug("a connection ended: %s", error)
            else:  # who has another secret sees it first, and goes without a word
                reason = f"{hello.instance} has not shown the cluster secret: {error.message}"
                self._refused("a connection", PeerRefused(reason))
        return None

    async def _talk(self, stream: PeerStream, hello: wire.Hello) -> None:
        session: int | None = None
        try:
            while True:
                async with asyncio.timeout(_SILENCE_MAX_S):
                    call = await stream.receive()
                try:
                    if isinstance(call.body, wire.Join):
                        if session is not None:
                            self.directory.leave(session)
                        session = self._join(hello, call.body)
                        answer: wire.Message = wire.Joined(self._options.heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT)
                    else:
                        answer = self._answer(session, call.body)
                except AntiphonError as error:
                    self._refused(f"a call of {hello.instance}", error)
                    answer = wire.failure_of(error)
                async with asyncio.timeout(_SILENCE_MAX_S):
                    await stream.send(call.id, answer)
        except (AntiphonError, TimeoutError) as error:
            log.debug("a connection ended: %s", error)
        finally:
            if session is not None:
                self.directory.leave(session)

    def _refused(self, what: str, error: AntiphonError) -> None:
        self.counts["refused"] += 1
        self._refusals.warning("refusals", "%s is refused: %s", what, error.message)

    def _join(self, hello: wire.Hello, body: wire.Join) -> int:
        if body.tier_format != FORMAT_VERSION:
            raise PeerRefused(
                f"{hello.instance} stores chunks in format {body.tier_format}, this cluster in {FORMAT_VERSION}",
                remedy="run the same version of Antiphon on all hosts",
            )
        session = self.directory.join(hello.instance, hello.incarnation, body.url, self._loop.time())
        self.counts["joins"] += 1
        log.info("%s (%s) at %s has joined", hello.instance, hello.incarnation, body.url)
        return session

    def _answer(self, session: int | None, body: wire.Message) -> wire.Message:
        if session is None:
            raise ProtocolError("a member joins before anything else")
        directory = self.directory
        directory.heard(session, self._loop.time())
        match body:
            case wire.Heartbeat():
                return wire.Noted()
            case wire.Listing():
                keys = wire.split_keys(body.keys)
                is_kept = directory.listed(
                    session, keys, body.next_sequence, is_first=body.is_first, is_last=body.is_last
                )
                return wire.Noted() if is_kept else wire.Resync()
            case wire.Events():
                if any(len(key) != wire.KEY_BYTES for _, key in body.changes):
                    raise ProtocolError(f"a tier key has {wire.KEY_BYTES} bytes")
                is_kept = directory.changed(session, body.first_sequence, body.num_events, body.changes)
                return wire.Noted() if is_kept else wire.Resync()
            case wire.Locate():
                return self._locate(session, body)
            case _:
                raise ProtocolError(f"a coordinator does not answer {type(body).__name__}")

    def _locate(self, session: int, body: wire.Locate) -> wire.Located:
        keys = wire.split_keys(body.keys)
        began_s = time.time()
        numbers: dict[Member, int] = {}
        found = [
            tuple(numbers.setdefault(member, len(numbers)) for member in holders)
            for holders in self.directory.locate(session, keys)
        ]
        self.counts["locates"] += 1
        self.counts["located_keys"] += len(keys)
        num_found = sum(map(bool, found))
        self.counts["found_keys"] += num_found
        parent = parse_traceparent(body.traceparent) if self.tracing is not None and body.traceparent else None
        if self.tracing is not None and parent is not None:
            counts = {"antiphon.chunks.asked": len(keys), "antiphon.chunks.found": num_found}
            context, times = self.tracing.begin(parent), (began_s, time.time())
            self.tracing.record(Span("directory.locate", context, parent, *times, "server", counts))
        members = tuple(wire.Holder(member.instance, member.incarnation, member.url) for member in numbers)
        return wire.Located(members, tuple(found))

    async def close(self) -> None:
        """Stops listening and ends every connection."""
        await self._listener.close()
        if self._expiring is not None:
            self._expiring.cancel()
            await ended([self._expiring])
