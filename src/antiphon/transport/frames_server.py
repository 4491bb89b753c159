"""The server side of framed calls: sockets, limits and deadlines, on one event loop.

Owns the listening sockets and every connection. A handler is given whole frames in order, and says what to send. It
works on the sockets themselves rather than on the loop's transports, since a descriptor must travel with an answer,
and since a connection that was given up must stay open until the peer itself has ended it.

Always true:

- ``ended`` is called once for each connection, after its socket is closed.
- A connection that ends by ``end(..., waits_for_peer=True)`` is closed only after the peer has hung up.
- What waits to be sent stays below ``outbound_high_bytes`` and one answer: past it no further frame is taken up.
- A peer costs nothing but its own connection: neither silence, nor half a frame, nor reading too slowly stops others.

It does not know what a frame means.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import struct
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from antiphon.core.errors import ProtocolError
from antiphon.transport.frames import FrameBuffer

log = logging.getLogger("antiphon.frames")

_RECEIVE_BYTES = 65_536
_FRAMES_PER_TURN = 32
"""Frames of one connection that are handled before others get their turn."""
_ACCEPTS_PER_TURN = 64
_ACCEPT_PAUSE_S = 0.2
_SWEEP_INTERVAL_S = 0.25
_PEER_CREDENTIALS = struct.Struct("3i")  # process id, user id, group id


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What one server allows.

    Args:
        connections_max: connections at once over unix sockets, those that wait for their peer's end included.
        tcp_connections_max: the same over TCP, where any user can connect. Each kind is counted by itself,
            so that neither takes the other's room.
        tcp_life_s: seconds from a TCP connection to its end, whatever it says: it is for one or two calls.
        first_frame_timeout_s: seconds from the connection to its first whole frame.
        frame_timeout_s: seconds from a frame's first byte to its last.
        outbound_high_bytes: bytes that may wait for a peer before its next frame is left alone.
        stall_timeout_s: seconds in which a peer must take something of what waits for it.
        linger_s: seconds that a peer gets to read the last frame of a connection that is closed.
    """

    connections_max: int = 1024
    tcp_connections_max: int = 64
    tcp_life_s: float = 30.0
    first_frame_timeout_s: float = 5.0
    frame_timeout_s: float = 5.0
    outbound_high_bytes: int = 262_144
    stall_timeout_s: float = 10.0
    linger_s: float = 1.0


class FrameHandler(Protocol):
    """What a server does with frames."""

    def frame_received(self, connection: FrameConnection, payload: bytes) -> None:
        """A whole frame has come."""

    def faulted(self, connection: FrameConnection, error: ProtocolError) -> None:
        """The stream is of no use any more. The handler calls ``connection.end``."""

    def ended(self, connection: FrameConnection) -> None:
        """The connection is over and its socket closed."""


class _State(Enum):
    OPEN = "open"
    ENDING = "ending"  # nothing is read any more; waits for the peer's end, or for a short time
    CLOSED = "closed"


class FrameConnection:
    """One connection.

    Args:
        server: it belongs to.
        sock: connected; the connection's from here on.
        number: names it in this server.
    """

    def __init__(self, server: FrameServer, sock: socket.socket, number: int) -> None:
        self._server = server
        self._loop = server.loop
        self._sock = sock
        self._fd = sock.fileno()
        self._inbound = FrameBuffer()
        self._outbound = bytearray()
        self._state = _State.OPEN
        self._is_reading = False
        self._is_turn_due = False
        self._is_unsendable = False
        self._has_spoken = False
        self._is_shut = False
        self._waits_for_peer = False
        self._deadline_s: float | None = self._loop.time() + server.limits.first_frame_timeout_s
        self._stalled_since_s: float | None = None
        self.number = number
        self.is_unix = sock.family == socket.AF_UNIX
        self._life_ends_s = None if self.is_unix else self._loop.time() + server.limits.tcp_life_s
        self._read_on()

    @property
    def is_open(self) -> bool:
        """Whether frames are taken up and answers sent."""
        return self._state is _State.OPEN

    @property
    def has_hung_up(self) -> bool:
        """Whether the peer has ended its side, though what it sent before that may not be taken up yet."""
        poller = select.poll()
        poller.register(self._fd, select.POLLRDHUP)
        return bool(poller.poll(0))

    @property
    def outbound_bytes(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._outbound)

    # ---- receiving ---------------------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            self._loop.add_reader(self._fd, self._on_readable)

    def _read_off(self) -> None:
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._fd)

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionResetError:
            data = b""  # it closed with answers unread
        except OSError as error:
            self._fault(f"receiving failed: {error.strerror}")
            return
        if not data:
            self._close()
            return
        self._inbound.feed(data)
        self._turn()

    def _turn(self) -> None:
        """Handles some of the frames that have arrived."""
        self._is_turn_due = False
        limits = self._server.limits
        for _ in range(_FRAMES_PER_TURN):
            if self._state is not _State.OPEN or len(self._outbound) > limits.outbound_high_bytes:
                break
            try:
                payload = self._inbound.next()
            except ProtocolError as error:
                self._server.handler.faulted(self, error)
                break
            if payload is None:
                self._wait_for_more()
                return
            self._has_spoken = True
            self._deadline_s = None
            self._server.handler.frame_received(self, payload)
        else:
            if self._state is _State.OPEN:
                self._is_turn_due = True
                self._loop.call_soon(self._turn)
        self._read_off()  # what is here comes first: after the turn, or when what waits was sent

    def _wait_for_more(self) -> None:
        if not len(self._inbound):
            if self._has_spoken:
                self._deadline_s = None
        elif self._deadline_s is None:
            self._deadline_s = self._loop.time() + self._server.limits.frame_timeout_s
        self._read_on()

    # ---- sending -----------------------------------------------------------------------------------------------------

    def send(self, frame: bytes, descriptor: int | None = None) -> None:
        """Sends a frame, as soon as the peer takes it. Nothing is sent once the connection is ending.

        Args:
            descriptor: passed along; only while nothing else waits to be sent, and over a unix socket.
        """
        if self._state is _State.OPEN:
            self._send(frame, descriptor)

    def _send(self, frame: bytes, descriptor: int | None = None) -> None:
        if self._is_unsendable:
            return
        num_sent = 0
        if not self._outbound:
            try:
                if descriptor is None:
                    num_sent = self._sock.send(frame, socket.MSG_NOSIGNAL)
                else:
                    num_sent = socket.send_fds(self._sock, [frame], [descriptor], socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._give_up_sending(f"sending failed: {error.strerror}")
                return
        if descriptor is not None and num_sent == 0:
            self._give_up_sending("the descriptor could not be passed: the socket takes nothing")
            return
        if num_sent < len(frame):
            if not self._outbound:
                self._stalled_since_s = self._loop.time()
                self._loop.add_writer(self._fd, self._on_writable)
            self._outbound += frame[num_sent:]

    def _on_writable(self) -> None:
        try:
            num_sent = self._sock.send(self._outbound, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._give_up_sending(f"sending failed: {error.strerror}")
            return
        del self._outbound[:num_sent]
        self._stalled_since_s = self._loop.time()
        if not self._outbound:
            self._drop_outbound()
            if self._state is _State.ENDING:
                self._shut_down()
        has_room = len(self._outbound) <= self._server.limits.outbound_high_bytes
        if self._state is _State.OPEN and has_room and not self._is_reading and not self._is_turn_due:
            self._turn()

    def _drop_outbound(self) -> None:
        if self._stalled_since_s is not None:
            self._stalled_since_s = None
            self._loop.remove_writer(self._fd)
        self._outbound.clear()

    def _give_up_sending(self, reason: str) -> None:
        self._is_unsendable = True
        self._drop_outbound()
        # Later: the handler may be in the middle of the call whose answer this was.
        self._loop.call_soon(self._fault, reason)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _fault(self, reason: str) -> None:
        if self._state is _State.OPEN:
            self._server.handler.faulted(self, ProtocolError(reason))

    def end(self, last: bytes | None, *, waits_for_peer: bool) -> None:
        """Takes up no further frame, sends ``last``, and shuts the sending side down.

        Args:
            last: a frame; None sends nothing more.
            waits_for_peer: keep the socket until the peer has hung up, however long that takes. Otherwise it is closed
                after ``linger_s`` at the latest.
        """
        if self._state is not _State.OPEN:
            return
        self._state = _State.ENDING
        self._waits_for_peer = waits_for_peer
        self._deadline_s = None if waits_for_peer else self._loop.time() + self._server.limits.linger_s
        self._read_off()
        if last is not None:
            self._send(last)
        self._server.watch_hangup(self)
        if not self._outbound:
            self._shut_down()

    def _shut_down(self) -> None:
        if not self._is_shut:
            self._is_shut = True
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError:
                self._is_unsendable = True  # the peer was faster; its hang-up is seen by the watch

    def hung_up(self) -> None:
        """The peer's end was seen while the connection was ending."""
        self._close()

    def abandon(self) -> None:
        """Closes at once, for the end of the process: nobody is told."""
        self._close(is_told=False)

    def _close(self, *, is_told: bool = True) -> None:
        if self._state is _State.CLOSED:
            return
        was_ending, self._state = self._state is _State.ENDING, _State.CLOSED
        self._read_off()
        self._drop_outbound()
        self._server.forget(self, was_ending)
        self._sock.close()
        if is_told:
            self._server.handler.ended(self)

    def sweep(self, now_s: float) -> None:
        """Looks at the deadlines."""
        stalled_since_s = self._stalled_since_s
        is_stalled = stalled_since_s is not None and now_s - stalled_since_s > self._server.limits.stall_timeout_s
        is_late = self._deadline_s is not None and now_s > self._deadline_s
        if self._life_ends_s is not None and now_s > self._life_ends_s:
            self.end(None, waits_for_peer=False)
        if self._state is _State.ENDING:
            if is_stalled:
                self._drop_outbound()
                self._shut_down()
            if is_late:
                self._close()
        elif is_stalled:
            self._is_unsendable = True
            self._drop_outbound()
            self._fault("the peer takes no answers")
        elif is_late and self._is_reading:
            what = "no whole frame came" if self._has_spoken else "the first frame did not come"
            self._fault(f"{what} in time")

    @property
    def fd(self) -> int:
        """Number of the socket's descriptor."""
        return self._fd


class FrameServer:
    """Listens, and holds the connections.

    Args:
        handler: of frames.
        limits: of all connections.
        uids: users that may connect to a unix socket.
    """

    def __init__(self, handler: FrameHandler, limits: FrameLimits, uids: frozenset[int]) -> None:
        self.loop = asyncio.get_running_loop()
        self.handler = handler
        self.limits = limits
        self._uids = uids
        self._listeners: list[socket.socket] = []
        self._connections: dict[int, FrameConnection] = {}
        self._num_unix = 0
        self._ending: dict[int, FrameConnection] = {}  # by descriptor
        self._hangups = select.epoll()
        self._next_number = 1
        self._sweeping: asyncio.TimerHandle | None = None
        self.swept_at_s = self.loop.time()
        """When the deadlines were looked at last, by the loop's clock: how a watcher knows that the loop turns."""
        self.num_refused = 0
        """Connections turned away: too many, or of another user."""

    @property
    def num_connections(self) -> int:
        """Connections that are not closed, of both kinds."""
        return len(self._connections)

    def _num_of_kind(self, *, is_unix: bool) -> int:
        return self._num_unix if is_unix else len(self._connections) - self._num_unix

    @property
    def is_listening(self) -> bool:
        """Whether new connections are accepted."""
        return bool(self._listeners)

    def listen(self, sock: socket.socket) -> None:
        """Accepts connections on ``sock``, which listens; it is the server's from here on."""
        sock.setblocking(False)
        if self._sweeping is None:
            self.loop.add_reader(self._hangups.fileno(), self._on_hangups)
            self._sweep()
        self._listeners.append(sock)
        self.loop.add_reader(sock.fileno(), self._on_connections, sock)

    def close(self) -> None:
        """Stops listening and closes every connection at once. The handler is told of none."""
        for sock in self._listeners:
            self.loop.remove_reader(sock.fileno())
            sock.close()
        self._listeners.clear()
        for connection in list(self._connections.values()):
            connection.abandon()
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None
            self.loop.remove_reader(self._hangups.fileno())
        self._hangups.close()

    def _on_connections(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            try:
                sock, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue  # it left again before it was accepted
            except OSError as error:
                # Descriptors or memory are short: the listener would be ready again at once.
                log.warning("no connection can be accepted for now: %s", error.strerror)
                self.loop.remove_reader(listener.fileno())
                self.loop.call_later(_ACCEPT_PAUSE_S, self._resume, listener)
                return
            self._admit(sock)

    def _resume(self, listener: socket.socket) -> None:
        if listener in self._listeners:
            self.loop.add_reader(listener.fileno(), self._on_connections, listener)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        reason = None
        is_unix = sock.family == socket.AF_UNIX
        num_open = self._num_of_kind(is_unix=is_unix)
        if num_open >= (self.limits.connections_max if is_unix else self.limits.tcp_connections_max):
            reason = f"{num_open} connections are open over {'unix' if is_unix else 'TCP'}, no more are allowed"
        elif is_unix:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
            pid, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
            if uid not in self._uids:
                reason = f"process {pid} of user {uid} may not connect"
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if reason is not None:
            self.num_refused += 1
            log.debug("a connection is turned away: %s", reason)
            sock.close()
            return
        connection = FrameConnection(self, sock, self._next_number)
        self._next_number += 1
        self._connections[connection.number] = connection
        self._num_unix += is_unix

    def watch_hangup(self, connection: FrameConnection) -> None:
        """Tells the connection when its peer has hung up, without reading from it."""
        self._ending[connection.fd] = connection
        self._hangups.register(connection.fd, select.EPOLLRDHUP)

    def _on_hangups(self) -> None:
        for fd, _ in self._hangups.poll(0):
            connection = self._ending.get(fd)
            if connection is not None:
                connection.hung_up()

    def forget(self, connection: FrameConnection, was_ending: bool) -> None:
        """The connection closes its socket."""
        del self._connections[connection.number]
        self._num_unix -= connection.is_unix
        if was_ending:
            del self._ending[connection.fd]
            self._hangups.unregister(connection.fd)

    def _sweep(self) -> None:
        now_s = self.swept_at_s = self.loop.time()
        for connection in list(self._connections.values()):
            connection.sweep(now_s)
        self._sweeping = self.loop.call_later(_SWEEP_INTERVAL_S, self._sweep)
