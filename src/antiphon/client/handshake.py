"""From nothing to a session: the TCP port names the unix socket, the unix socket passes the arena, ``Attach`` opens it.

Written as one straight line that waits through ``Waiter``, which the client's thread implements: so it can be
interrupted, and every step shares one deadline. Whatever was opened is closed when a step fails.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from antiphon import __version__
from antiphon.client.options import ClientOptions
from antiphon.client.wire import Wire, close_all
from antiphon.core.errors import AntiphonError, CacheError, CacheUnavailable, LayoutMismatch, NotLocal, VersionMismatch
from antiphon.protocol.cache import (
    PROTOCOL_VERSION,
    Answered,
    Attach,
    Attached,
    Body,
    Call,
    Failure,
    Hello,
    Welcome,
    decode_answer,
    error_of,
    frame,
)
from antiphon.storage.arena import ArenaMapping

Waiter = Callable[[int, int, float], None]
"""``waiter(descriptor, poll_events, deadline_s)`` returns when it is ready; raises CacheUnavailable at the deadline."""

_HELLO_ID = 1
_ATTACH_ID = 2
# `poll` reports an error or a hang-up as well: the socket itself says which.
_IN, _OUT = select.POLLIN, select.POLLOUT


class Refused(CacheError):
    """A server answered, and will not have this client. ``cause``: the error that says why."""

    def __init__(self, cause: AntiphonError) -> None:
        super().__init__(cause.message, remedy=cause.remedy)


@dataclass(frozen=True)
class Connected:
    """An attached connection, with everything that a session owns."""

    wire: Wire
    welcome: Welcome
    arena: ArenaMapping | None


def connect(options: ClientOptions, wait: Waiter) -> Connected:
    """A new attached connection.

    Raises:
        Refused: another version, chunk size, layout or model, not on this host, or another user's socket.
        CacheUnavailable: no server, it is not the one that answered first, or it says nothing in time.
        ProtocolError: what it says makes no sense.
    """
    deadline_s = time.monotonic() + options.connect_timeout_s
    seen = _ask_tcp(options, wait, deadline_s)
    with contextlib.ExitStack() as on_failure:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        wire = Wire(sock)
        on_failure.callback(wire.close)
        descriptors: list[int] = []
        on_failure.callback(close_all, descriptors)
        _connect_unix(sock, seen.socket_path, wait, deadline_s)
        _check_peer(sock)
        exchange = _Exchange(wire, wait, deadline_s, descriptors)
        welcome = _welcome(exchange.ask(_HELLO_ID, _hello(options)), options)
        if (welcome.instance, welcome.incarnation) != (seen.instance, seen.incarnation):
            raise CacheUnavailable("the cache server restarted while this client connected")
        if len(descriptors) != 1:
            raise CacheUnavailable(f"the cache server passed {len(descriptors)} descriptors of its arena, not one")
        arena: ArenaMapping | None = None
        if options.needs_arena:
            arena = _map(descriptors[0], welcome)
            on_failure.callback(arena.close)
        attached = exchange.ask(_ATTACH_ID, _attach(options))
        if not isinstance(attached, Attached):
            raise CacheUnavailable(f"the cache server answered Attach with {type(attached).__name__}")
        close_all(descriptors)
        on_failure.pop_all()
    return Connected(wire, welcome, arena)


def _ask_tcp(options: ClientOptions, wait: Waiter, deadline_s: float) -> Welcome:
    """What the server on the port says of itself."""
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise CacheUnavailable(f"{options.host} is no known host: {error}") from error
    failure: CacheUnavailable | None = None
    for family, kind, number, _, address in found:
        sock = socket.socket(family, kind, number)
        wire = Wire(sock)
        try:
            _finish_connect(sock, sock.connect_ex(address), wait, deadline_s)
            return _welcome(_Exchange(wire, wait, deadline_s, []).ask(_HELLO_ID, _hello(options)), options)
        except OSError as error:
            failure = CacheUnavailable(f"{options.host}:{options.port}: {error.strerror or error}")
        finally:
            wire.close()
    raise failure or CacheUnavailable(f"{options.host} has no address")


def _finish_connect(sock: socket.socket, code: int, wait: Waiter, deadline_s: float) -> None:
    """Raises OSError where the connection cannot be made."""
    if code == errno.EINPROGRESS:
        wait(sock.fileno(), _OUT, deadline_s)
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, os.strerror(code))


def _connect_unix(sock: socket.socket, path: str, wait: Waiter, deadline_s: float) -> None:
    try:
        _finish_connect(sock, sock.connect_ex(path), wait, deadline_s)
    except OSError as error:
        message = f"the cache server's socket {path} cannot be used: {error.strerror or error}"
        if error.errno in (errno.ENOENT, errno.EACCES, errno.EPERM):
            remedy = "run engine and cache server on one host, with one view of that folder, as one user"
            raise Refused(NotLocal(message, remedy=remedy)) from error
        raise CacheUnavailable(message) from error
    except ValueError as error:
        raise CacheUnavailable(f"the cache server's socket {path!r} has no possible name: {error}") from error


def _check_peer(sock: socket.socket) -> None:
    """The socket is of this user or of root, also for root: KV is written to the memory that it passes."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    own = os.geteuid()
    if uid not in (0, own):
        raise Refused(NotLocal(f"the cache server's socket belongs to user {uid}", remedy="run both as one user"))


def _hello(options: ClientOptions) -> Hello:
    return Hello(PROTOCOL_VERSION, f"antiphon {__version__} {options.engine} {options.role}"[:200])


def _attach(options: ClientOptions) -> Attach:
    layout = options.layout
    return Attach(
        engine=options.engine,
        incarnation=options.incarnation,
        role=options.role,
        pid=os.getpid(),
        model=options.model,
        chunk_size_tokens=options.chunk_size_tokens,
        num_slabs=layout.num_slabs,
        slab_bytes=layout.slab_bytes,
        fingerprint=layout.fingerprint,
        slabs=options.slabs,
    )


def _welcome(answer: Answered, options: ClientOptions) -> Welcome:
    if not isinstance(answer, Welcome):
        raise CacheUnavailable(f"the cache server answered Hello with {type(answer).__name__}")
    if answer.version != PROTOCOL_VERSION:
        message = f"the cache server speaks version {answer.version} of the protocol, this client {PROTOCOL_VERSION}"
        raise Refused(VersionMismatch(message, remedy="run the same version of Antiphon in both"))
    if answer.chunk_size_tokens != options.chunk_size_tokens:
        message = f"the cache server has chunks of {answer.chunk_size_tokens} tokens, this client of "
        message += str(options.chunk_size_tokens)
        raise Refused(LayoutMismatch(message, remedy="give both the same --chunk-size"))
    return answer


def _map(descriptor: int, welcome: Welcome) -> ArenaMapping:
    try:
        arena = ArenaMapping.open(descriptor, welcome.instance, welcome.incarnation)
    except CacheError as error:
        raise Refused(error) from error
    except (OSError, ValueError) as error:
        raise CacheUnavailable(f"the cache server's arena cannot be read: {error}") from error
    if arena.data_bytes != welcome.arena_bytes - welcome.data_offset_bytes:
        arena.close()
        raise CacheUnavailable(f"the cache server's arena has {arena.data_bytes} bytes of data, not what it says")
    return arena


@dataclass(frozen=True)
class _Exchange:
    """Calls of the handshake: one at a time, each answered before the next."""

    wire: Wire
    wait: Waiter
    deadline_s: float
    descriptors: list[int]

    def ask(self, call_id: int, body: Body) -> Answered:
        """The answer. Raises Refused for a ``Failure``."""
        self.wire.send(frame(Call(call_id, body)))
        while self.wire.num_unsent_bytes and self.wire.end_reason is None:
            self.wait(self.wire.fileno(), _OUT, self.deadline_s)
            self.wire.flush()
        while True:
            if frames := self.wire.receive(self.descriptors):
                break
            if self.wire.end_reason is not None:
                raise CacheUnavailable(f"the connection to the cache server ended: {self.wire.end_reason}")
            self.wait(self.wire.fileno(), _IN, self.deadline_s)
        answer = decode_answer(frames[0])
        if isinstance(answer.body, Failure):
            raise Refused(error_of(answer.body))
        if answer.id != call_id or len(frames) != 1:
            raise CacheUnavailable("the cache server sent what nobody asked for")
        return answer.body
