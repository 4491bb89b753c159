"""A scripted cache server in threads: it answers as a test says, hangs when told, and sends nonsense on request."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from antiphon.client import CacheClient, ClientOptions
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.protocol import cache as protocol
from antiphon.protocol.cache import Answer, Answered, Body, Call
from antiphon.storage.arena import HEADER_BYTES, ArenaOwner

CHUNK_SIZE_TOKENS = 256
LAYOUT = ChunkLayout(num_slabs=2, slab_bytes=4096)
ARENA_BYTES = 1 << 20
KEY = bytes(range(32))

_numbers = itertools.count(1)

Script = Callable[["Connection", Call], bool]
"""Sees each call first; True means that it has dealt with it."""


class Connection:
    """One accepted connection."""

    def __init__(self, sock: socket.socket, is_unix: bool) -> None:
        self.sock = sock
        self.is_unix = is_unix

    def answer(self, call_id: int, body: Answered) -> None:
        self.send(protocol.frame(Answer(call_id, body)))

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.sock.sendall(data)

    def read_exactly(self, num_bytes: int) -> bytes:
        data = b""
        while len(data) < num_bytes:
            piece = self.sock.recv(num_bytes - len(data))
            if not piece:
                raise EOFError
            data += piece
        return data

    def end(self) -> None:
        """The peer sees the end of file, while this side still sees what the peer does."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_WR)


class FakeServer:
    """Listens at once.

    Args:
        port: 0 for any free one.
        script: as ``Script``.
        chunk_size_tokens: what it says of itself.
    """

    def __init__(
        self, *, port: int = 0, script: Script | None = None, chunk_size_tokens: int = CHUNK_SIZE_TOKENS
    ) -> None:
        self.script = script
        self.instance = "fake"
        self.incarnation = f"life{next(_numbers)}"
        self.chunk_size_tokens = chunk_size_tokens
        self.arena = ArenaOwner.create(ARENA_BYTES, self.instance, self.incarnation)
        self.calls: list[Body] = []
        self.connections: list[Connection] = []
        self.peers_ended: list[Connection] = []
        self.may_read = threading.Event()
        self.may_read.set()
        self._folder = tempfile.mkdtemp(prefix="fake-cache-")
        self.socket_path = str(Path(self._folder) / "s.sock")
        self._threads: list[threading.Thread] = []
        self._is_stopping = False
        tcp = socket.create_server(("127.0.0.1", port))
        unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unix.bind(self.socket_path)
        unix.listen()
        self.port: int = tcp.getsockname()[1]
        self._listeners = [tcp, unix]
        for listener in self._listeners:
            self._start(self._accept, listener)

    # ---- what tests do with it -----------------------------------------------------------------------------------

    def of_type(self, kind: type[Body]) -> list[Body]:
        return [call for call in tuple(self.calls) if isinstance(call, kind)]

    @property
    def unix(self) -> list[Connection]:
        return [connection for connection in tuple(self.connections) if connection.is_unix]

    def stop(self) -> None:
        """As a process that is killed: every socket ends, the arena lives on in who maps it."""
        if self._is_stopping:
            return
        self._is_stopping = True
        self.may_read.set()
        for listener in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in tuple(self.connections):
            with contextlib.suppress(OSError):
                connection.sock.shutdown(socket.SHUT_RDWR)
        for thread in tuple(self._threads):
            thread.join(5)
            assert not thread.is_alive()
        for connection in self.connections:
            connection.sock.close()
        self.arena.close()
        shutil.rmtree(self._folder)

    def welcome(self) -> protocol.Welcome:
        return protocol.Welcome(
            version=protocol.PROTOCOL_VERSION,
            instance=self.instance,
            incarnation=self.incarnation,
            socket_path=self.socket_path,
            chunk_size_tokens=self.chunk_size_tokens,
            arena_bytes=self.arena.data_bytes + HEADER_BYTES,
            data_offset_bytes=HEADER_BYTES,
        )

    # ---- the server ----------------------------------------------------------------------------------------------

    def _start(self, target: Callable[..., None], argument: object) -> None:
        thread = threading.Thread(target=target, args=(argument,), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            connection = Connection(sock, sock.family == socket.AF_UNIX)
            self.connections.append(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: Connection) -> None:
        try:
            while True:
                self.may_read.wait()
                length = protocol.frame_length(connection.read_exactly(protocol.LENGTH_BYTES))
                call = protocol.decode_call(connection.read_exactly(length))
                self.may_read.wait()
                self.calls.append(call.body)
                if self.script is None or not self.script(connection, call):
                    self.behave(connection, call)
        except (EOFError, OSError):
            self.peers_ended.append(connection)

    def behave(self, connection: Connection, call: Call) -> None:
        """What a well-behaved server answers."""
        body = call.body
        if isinstance(body, protocol.Hello) and connection.is_unix:
            data = protocol.frame(Answer(call.id, self.welcome()))
            with contextlib.suppress(OSError):
                socket.send_fds(connection.sock, [data], [self.arena.fd])
        elif isinstance(body, protocol.Hello):
            connection.answer(call.id, self.welcome())
        elif isinstance(body, protocol.Attach):
            connection.answer(call.id, protocol.Attached(usable_bytes=ARENA_BYTES))
        elif isinstance(body, protocol.Lookup):
            region = protocol.Region(0, LAYOUT.chunk_bytes, 1)
            num_chunks = len(body.keys) // protocol.KEY_BYTES
            found = protocol.Found(len(body.request), (region,) * num_chunks, num_chunks * CHUNK_SIZE_TOKENS, 0)
            connection.answer(call.id, found if num_chunks else protocol.Found(None, (), 0, 0))
        elif isinstance(body, protocol.Reserve):
            num_chunks = len(body.keys) // protocol.KEY_BYTES
            grants = tuple(
                protocol.Grant(i, protocol.Region(i * 8192, LAYOUT.chunk_bytes, i + 1), (0, 1))
                for i in range(num_chunks)
            )
            connection.answer(call.id, protocol.Reserved(("write",) * num_chunks, grants, None))
        elif isinstance(body, protocol.Release | protocol.CopyBegan | protocol.CopyEnded):
            connection.answer(call.id, protocol.LeaseNoted(body.lease, "ended"))
        elif isinstance(body, protocol.Abort):
            connection.answer(call.id, protocol.Aborted(len(body.regions)))
        else:
            connection.answer(call.id, protocol.Noted())


def options(port: int, **changes: object) -> ClientOptions:
    """Of a worker of engine ``e``; ``changes`` are fields."""
    fields: dict[str, object] = {
        "host": "127.0.0.1",
        "port": port,
        "role": "worker-0",
        "engine": "e",
        "incarnation": "i",
        "model": "m",
        "layout": LAYOUT,
        "chunk_size_tokens": CHUNK_SIZE_TOKENS,
        "slabs": (0, 1),
        "needs_arena": True,
    }
    return ClientOptions(**(fields | changes))  # type: ignore[arg-type]


@contextlib.contextmanager
def running(server: FakeServer | int, on_change: Callable[[], None] = lambda: None, **changes: object):
    """A started client of ``server`` (or of a port), closed at the end."""
    port = server if isinstance(server, int) else server.port
    client = CacheClient(options(port, **changes), on_change)
    client.start()
    try:
        yield client
    finally:
        client.close()


def wait_until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Polls; fails at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.002)


def lookup(request: str = "r", num_keys: int = 1) -> protocol.Lookup:
    return protocol.Lookup(request=request, namespace=KEY, tenant="t", keys=KEY * num_keys)


def reserve(num_keys: int = 1) -> protocol.Reserve:
    return protocol.Reserve(namespace=KEY, tenant="t", parent=None, keys=KEY * num_keys)
