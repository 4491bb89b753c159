"""The probe's connection: one unix socket, one call at a time, a mapping of the arena. The deadline is the caller's.

It is a client of its own, small enough to be read at once: the one of engines (``antiphon.client``) runs a thread,
reconnects by itself, and waits where a probe must fail.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from typing import Final, TypeVar

from antiphon.core.errors import CacheUnavailable, ProtocolError
from antiphon.protocol import cache as wire
from antiphon.protocol.cache import LENGTH_BYTES, AnswerBody, Failure, decode_answer, error_of, frame, frame_length
from antiphon.storage.arena import ArenaMapping

A = TypeVar("A", bound=AnswerBody)

_READ_BYTES: Final = 65_536
_FDS_MAX: Final = 4
"""Descriptors taken with one read: one is expected; more are closed and named rather than leaked."""


class ProbeConnection:
    """Made by ``connect``. After an error, or a call that was cancelled, it is out of step and to be closed."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._received = bytearray()
        self._fds: list[int] = []
        self._mapping: ArenaMapping | None = None
        self._last_id = 0

    @classmethod
    async def connect(cls, path: str) -> ProbeConnection:
        """Connect to the unix socket at ``path``.

        Raises:
            CacheUnavailable: nobody listens there.
        """
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            sock.setblocking(False)
            try:
                await asyncio.get_running_loop().sock_connect(sock, path)
            except OSError as error:
                raise CacheUnavailable(f"{path} cannot be connected to: {error.strerror or error}") from error
            stack.pop_all()  # it is the connection's to close
        return cls(sock)

    @property
    def is_open(self) -> bool:
        """Whether the other end has neither closed nor sent what nobody asked for."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return not self._received
        except OSError:
            return False
        return False

    async def hello(self, hello: wire.Hello) -> wire.Welcome:
        """Greet the server, and map the arena that comes with its answer.

        Raises:
            CacheError: the arena did not come or cannot be mapped, or as ``call``.
            ProtocolError: as ``call``.
        """
        welcome = await self.call(hello, wire.Welcome)
        if len(self._fds) != 1:
            raise ProtocolError(f"the welcome came with {len(self._fds)} descriptors instead of one")
        fd = self._fds.pop()
        try:
            self._mapping = ArenaMapping.open(fd, welcome.instance, welcome.incarnation)
        finally:
            os.close(fd)
        return welcome

    async def call(self, body: wire.Body, expected: type[A]) -> A:
        """Send one call and await its answer, of the type ``expected``.

        Raises:
            CacheUnavailable: the connection ended.
            CacheError: the server refused the call.
            ProtocolError: the answer cannot be used.
        """
        self._last_id += 1
        try:
            await self._loop.sock_sendall(self._socket, frame(wire.Call(self._last_id, body)))
            answer = decode_answer(await self._receive_frame())
        except OSError as error:
            raise CacheUnavailable(f"the connection broke: {error.strerror or error}") from error
        if isinstance(answer.body, Failure):
            raise error_of(answer.body)
        if answer.id != self._last_id or not isinstance(answer.body, expected):
            raise ProtocolError(f"{type(body).__name__} was answered by {type(answer.body).__name__}")
        return answer.body

    def write(self, region: wire.Region, data: bytes) -> None:
        """Write ``data`` at the start of a region. Raises ProtocolError where the region is not in the arena."""
        self._arena(region).view(region.offset, len(data))[:] = data

    def read(self, region: wire.Region, num_bytes: int) -> bytes:
        """The first bytes of a region. Raises ProtocolError where the region is not in the arena."""
        return bytes(self._arena(region).view(region.offset, num_bytes))

    def _arena(self, region: wire.Region) -> ArenaMapping:
        assert self._mapping is not None, "hello comes first"
        if not 0 <= region.offset <= region.offset + region.size <= self._mapping.data_bytes:
            raise ProtocolError(f"{region} does not lie in the arena of {self._mapping.data_bytes} bytes")
        return self._mapping

    async def _receive_frame(self) -> bytes:
        """The next frame without its length."""
        await self._receive(LENGTH_BYTES)
        end = LENGTH_BYTES + frame_length(self._received[:LENGTH_BYTES])
        await self._receive(end)
        payload = bytes(self._received[LENGTH_BYTES:end])
        del self._received[:end]
        return payload

    async def _receive(self, num_bytes: int) -> None:
        """Read until ``num_bytes`` are there, keeping the descriptors that come along."""
        while len(self._received) < num_bytes:
            try:
                data, ancillary, _, _ = self._socket.recvmsg(
                    _READ_BYTES, socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                await self._readable()
                continue
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    fds = array.array("i")
                    fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                    self._fds.extend(fds)
            if not data:
                raise CacheUnavailable("the server closed the connection")
            self._received += data

    async def _readable(self) -> None:
        """Wait until there is something to read, or the end."""
        ready: asyncio.Future[None] = self._loop.create_future()

        def wake() -> None:
            if not ready.done():
                ready.set_result(None)

        self._loop.add_reader(self._socket, wake)
        try:
            await ready
        finally:
            self._loop.remove_reader(self._socket)

    def close(self) -> None:
        """End the connection, and unmap the arena."""
        self._socket.close()
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None
