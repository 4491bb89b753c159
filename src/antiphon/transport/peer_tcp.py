"""Connections between cache servers, and to their coordinator: the proof of the secret, calls, and chunk bytes.

``PeerSocket`` is the side that connects, for a thread that may block; ``PeerStream`` serves either side on an event
loop; ``PeerListener`` accepts connections there. Chunk bytes go from memory into the socket and from the socket into
memory, with no copy in between.

Always true:

- Nothing but the proof of the secret is sent or taken up before both sides have given it.
- A call ends by its deadline. After an error of any kind the connection is of no use, and closed.
- No frame is larger than its limit, and no more chunk bytes are taken than were asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final

from antiphon.config.cluster import host_port_of
from antiphon.core.errors import AntiphonError, PeerTimeout, PeerUnavailable, ProtocolError
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol import peers as wire
from antiphon.protocol.cache import LENGTH_BYTES, frame_length
from antiphon.protocol.cluster_proof import Answerer, Asker
from antiphon.transport.loop import ended

__all__ = ["PeerListener", "PeerSocket", "PeerStream"]

PROOF_TIMEOUT_S: Final = 2.0
"""From the connection to the end of the proof, on the side that is connected to."""
_PIECE_BYTES: Final = 1 << 20
_ACCEPT_PAUSE_S: Final = 0.2
"""After a failed accept: descriptors or memory are short, and would be so again at once."""


class PeerSocket:
    """A connection for one thread at a time. Made by ``connect``."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._next_id = 1
        self._buffer = bytearray()
        self.is_closed = False
        self.incarnation = ""
        """Of the life of the other side that answers."""

    @classmethod
    def connect(cls, url: str, asker: Asker, timeout_s: float) -> PeerSocket:
        """Connects and proves the secret.

        Raises:
            PeerUnavailable: nobody listens there.
            PeerTimeout: there was no connection, or no proof, in time.
            PeerRefused: one of the two has another secret or version.
        """
        deadline_s = time.monotonic() + timeout_s
        try:
            sock = socket.create_connection(host_port_of(url), timeout_s)
        except TimeoutError:
            raise PeerTimeout(f"no connection to {url} within {timeout_s:g} s") from None
        except (OSError, ValueError) as error:
            raise PeerUnavailable(f"no connection to {url}: {error}") from None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = cls(sock)
        try:
            challenge = peer.call(asker.hello, deadline_s - time.monotonic())
            proof = asker.answer(challenge)
            assert isinstance(challenge, wire.Challenge)
            peer.incarnation = challenge.incarnation
            answer = peer.call(proof, deadline_s - time.monotonic())
        except AntiphonError:
            peer.close()
            raise
        if not isinstance(answer, wire.Accepted):
            peer.close()
            raise ProtocolError(f"Proof is answered by Accepted, not by {type(answer).__name__}")
        return peer

    @property
    def has_hung_up(self) -> bool:
        """Whether the other side has ended the connection, or says something unasked."""
        self._sock.settimeout(0.0)
        try:
            self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True
        return True

    def call(self, body: wire.Message, timeout_s: float) -> wire.Message:
        """Sends a call and returns its answer.

        Raises:
            PeerTimeout, PeerUnavailable, ProtocolError: there is none; the connection is closed.
            AntiphonError: the answer is a ``Failure``; the connection goes on.
        """
        deadline_s = time.monotonic() + timeout_s
        call_id, self._next_id = self._next_id, self._next_id + 1
        with self._closing():
            self._set_timeout(deadline_s)
            self._sock.sendall(wire.frame(call_id, body))
            envelope = wire.decode(self._frame(deadline_s))
            if envelope.id != call_id:
                raise ProtocolError(f"call {call_id} was answered as {envelope.id}")
        if isinstance(envelope.body, wire.Failure):
            raise wire.error_of(envelope.body)
        return envelope.body

    def post(self, body: wire.Message, timeout_s: float) -> None:
        """Sends a message that has no answer.

        Raises:
            PeerTimeout, PeerUnavailable: it could not be sent; the connection is closed.
        """
        call_id, self._next_id = self._next_id, self._next_id + 1
        with self._closing():
            self._set_timeout(time.monotonic() + timeout_s)
            self._sock.sendall(wire.frame(call_id, body))

    def read_into(
        self,
        lease: int,
        into: memoryview,
        deadline_s: Callable[[], float],
        on_piece: Callable[[memoryview], None],
    ) -> None:
        """Has the bytes of a leased chunk sent into ``into``, all of it.

        Args:
            lease: names it.
            into: where to.
            deadline_s: for all of it, on the monotonic clock; asked again when it is over, as it may move.
            on_piece: told of the bytes that came, piece by piece, in order, while they are in the processor's cache.

        Raises:
            PeerTimeout, PeerUnavailable, ProtocolError: they did not come; the connection is closed.
            AntiphonError: the holder refuses; the connection goes on.
        """
        begins = self.call(wire.Read(lease), deadline_s() - time.monotonic())
        with self._closing():
            if not isinstance(begins, wire.ReadBegins) or begins.num_bytes != len(into):
                raise ProtocolError(f"{len(into)} bytes were asked for: {str(begins)[:100]}")
            # What came together with the answer is the beginning.
            start = min(len(self._buffer), len(into))
            into[:start] = self._buffer[:start]
            del self._buffer[:start]
            told = 0
            while start < len(into):
                end = min(told + _PIECE_BYTES, len(into))
                start += self._recv_into(into[start:end], deadline_s)
                if start == end:
                    on_piece(into[told:end])
                    told = end
            if told < len(into):
                on_piece(into[told:])

    def _recv_into(self, into: memoryview, deadline_s: Callable[[], float]) -> int:
        while True:
            self._set_timeout(deadline_s())
            try:
                num_bytes = self._sock.recv_into(into)
            except TimeoutError:
                continue  # the deadline may have moved; else it ends here
            if not num_bytes:
                raise PeerUnavailable("the peer ended the connection")
            return num_bytes

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        """Closes the connection after an error, and names it."""
        try:
            yield
        except TimeoutError:
            self.close()
            raise PeerTimeout("the peer did not answer in time") from None
        except OSError as error:
            self.close()
            raise PeerUnavailable(f"the connection failed: {error}") from None
        except AntiphonError:
            self.close()
            raise

    def _set_timeout(self, deadline_s: float) -> None:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)

    def _frame(self, deadline_s: float) -> bytes:
        self._fill(LENGTH_BYTES, deadline_s)
        length = frame_length(self._buffer[:LENGTH_BYTES])
        self._fill(LENGTH_BYTES + length, deadline_s)
        payload = bytes(self._buffer[LENGTH_BYTES : LENGTH_BYTES + length])
        del self._buffer[: LENGTH_BYTES + length]
        return payload

    def _fill(self, num_bytes: int, deadline_s: float) -> None:
        while len(self._buffer) < num_bytes:
            self._set_timeout(deadline_s)
            data = self._sock.recv(65_536)
            if not data:
                raise PeerUnavailable("the peer ended the connection")
            self._buffer += data

    def close(self) -> None:
        """Closes it; twice is allowed."""
        self.is_closed = True
        self._sock.close()


class PeerStream:
    """A connection on an event loop, of either side; one task reads.

    Args:
        sock: connected; the stream's from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray()
        self._sending = asyncio.Lock()

    @classmethod
    async def connect(cls, url: str, asker: Asker, timeout_s: float) -> PeerStream:
        """As ``PeerSocket.connect``."""
        stream: PeerStream | None = None
        sock: socket.socket | None = None
        try:
            async with asyncio.timeout(timeout_s):
                host, port = host_port_of(url)
                loop = asyncio.get_running_loop()
                family, kind, proto, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
                sock = socket.socket(family, kind, proto)
                sock.setblocking(False)
                await loop.sock_connect(sock, address)
                stream = cls(sock)
                await stream.send(1, asker.hello)
                await stream.send(2, asker.answer(await stream._answer()))
                if not isinstance(await stream._answer(), wire.Accepted):
                    raise ProtocolError("the proof was not answered by Accepted")
                return stream
        except BaseException as error:  # supervised: raised again, once the socket is closed
            if sock is not None:
                sock.close()
            if isinstance(error, TimeoutError):
                raise PeerTimeout(f"no connection to {url} within {timeout_s:g} s") from None
            if isinstance(error, OSError | ValueError):
                raise PeerUnavailable(f"no connection to {url}: {error}") from None
            raise

    async def _answer(self) -> wire.Message:
        body = (await self.receive()).body
        if isinstance(body, wire.Failure):
            raise wire.error_of(body)
        return body

    async def prove(self, answerer: Answerer) -> wire.Hello:
        """The proof, on the side that was connected to. Returns who the other side is.

        Raises:
            PeerRefused, PeerTimeout, PeerUnavailable, ProtocolError: it failed; the other side was told.
        """
        try:
            async with asyncio.timeout(PROOF_TIMEOUT_S):
                call = await self.receive()
                challenge = answerer.challenge(call.body)
                await self.send(call.id, challenge)
                call = await self.receive()
                answerer.check(call.body)
                await self.send(call.id, wire.Accepted())
        except TimeoutError:
            raise PeerTimeout("the other side gave no proof in time") from None
        except AntiphonError as error:
            with contextlib.suppress(AntiphonError, TimeoutError):
                async with asyncio.timeout(PROOF_TIMEOUT_S):
                    await self.send(2 if answerer.hello else 1, wire.failure_of(error))
            raise
        assert answerer.hello is not None
        return answerer.hello

    async def receive(self) -> wire.Envelope:
        """The next message.

        Raises:
            PeerUnavailable: the other side has ended the connection.
            ProtocolError: what came is no message.
        """
        await self._fill(LENGTH_BYTES)
        length = frame_length(self._buffer[:LENGTH_BYTES])
        await self._fill(LENGTH_BYTES + length)
        payload = bytes(self._buffer[LENGTH_BYTES : LENGTH_BYTES + length])
        del self._buffer[: LENGTH_BYTES + length]
        return wire.decode(payload)

    async def _fill(self, num_bytes: int) -> None:
        while len(self._buffer) < num_bytes:
            try:
                data = await self._loop.sock_recv(self._sock, 65_536)
            except OSError as error:
                raise PeerUnavailable(f"the connection failed: {error}") from None
            if not data:
                raise PeerUnavailable("the other side ended the connection")
            self._buffer += data

    async def send(self, call_id: int, body: wire.Message, payload: memoryview | None = None) -> None:
        """Sends a message, and ``payload`` after it.

        Raises:
            PeerUnavailable: the connection is of no use any more.
        """
        async with self._sending:
            try:
                await self._loop.sock_sendall(self._sock, wire.frame(call_id, body))
                if payload is not None:
                    await self._loop.sock_sendall(self._sock, payload)
            except OSError as error:
                raise PeerUnavailable(f"the connection failed: {error}") from None

    def close(self) -> None:
        """Closes it; no task may be reading or sending."""
        self._sock.close()


class PeerListener:
    """Accepts connections on an event loop; each is served by a task of its own.

    Args:
        serve: serves one connection, and closes it.
        connections_max: one more is closed at once, and counted.
        counts: of it ``refused`` counts those.
        quiet: told of accepts that failed.
    """

    def __init__(
        self,
        serve: Callable[[PeerStream], Coroutine[Any, Any, None]],
        connections_max: int,
        counts: Counter[str],
        quiet: QuietLog,
    ) -> None:
        self._serve = serve
        self._connections_max = connections_max
        self._counts = counts
        self._quiet = quiet
        self._tasks: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    @property
    def is_alive(self) -> bool:
        """Whether connections are accepted."""
        return self._accepting is not None and not self._accepting.done()

    @property
    def num_connections(self) -> int:
        """Connections, whether or not they have shown the secret."""
        return len(self._tasks)

    def listen(self, sock: socket.socket) -> None:
        """Accepts connections on ``sock``, which listens; it is the listener's from here on."""
        sock.setblocking(False)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(sock))

    async def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with sock:
            while True:
                try:
                    accepted, _ = await loop.sock_accept(sock)
                except OSError as error:
                    self._quiet.say(logging.WARNING, "failed accepts", "accepting a connection: %s", error.strerror)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                    continue
                if len(self._tasks) >= self._connections_max:
                    self._counts["refused"] += 1
                    accepted.close()
                    continue
                task = loop.create_task(self._serve(PeerStream(accepted)))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stops listening and ends every connection."""
        tasks = [task for task in (self._accepting, *self._tasks) if task is not None]
        for task in tasks:
            task.cancel()
        await ended(tasks)
