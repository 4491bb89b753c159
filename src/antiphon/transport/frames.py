"""Frames on a stream socket: finding them in what has arrived, and receiving one at a time.

A frame is a length and a payload (``antiphon.protocol.cache``). Its length is judged as soon as it is announced, so
that nobody can make the other side hold more than one frame of the largest size.

``FrameBuffer`` does no input or output. The other functions block, for clients without an event loop; the serving side
is ``frames_server``.
"""

from __future__ import annotations

import array
import os
import socket
from typing import Final

from antiphon.core.errors import CacheUnavailable
from antiphon.protocol.cache import LENGTH_BYTES, frame_length

_DESCRIPTORS_MAX: Final = 4
"""Room for descriptors that come with one receive: one is expected, and what is not expected must be closed."""


class FrameBuffer:
    """Bytes that have arrived and are not a whole frame yet. Holds at most what was fed at once and one frame."""

    __slots__ = ("_bytes", "_length")

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._length: int | None = None

    def __len__(self) -> int:
        return len(self._bytes)

    def feed(self, data: bytes) -> None:
        """Adds what has arrived."""
        self._bytes += data

    def next(self) -> bytes | None:
        """The payload of the next whole frame; None where it is not complete.

        Raises:
            ProtocolError: the frame announces a length that is not allowed. What follows in the stream means nothing.
        """
        buffered = self._bytes
        if self._length is None:
            if len(buffered) < LENGTH_BYTES:
                return None
            self._length = frame_length(buffered[:LENGTH_BYTES])
        end = LENGTH_BYTES + self._length
        if len(buffered) < end:
            return None
        payload = bytes(buffered[LENGTH_BYTES:end])
        del buffered[:end]
        self._length = None
        return payload


def recv_frame(sock: socket.socket) -> bytes:
    """The payload of the next frame, from a blocking socket.

    Raises:
        CacheUnavailable: the stream ended.
        ProtocolError: a length that is not allowed.
        TimeoutError: the socket's own time limit.
    """
    return recv_exactly(sock, frame_length(recv_exactly(sock, LENGTH_BYTES)))


def recv_frame_with_fd(sock: socket.socket) -> tuple[bytes, int | None]:
    """As ``recv_frame``, with the descriptor that came along, closed on exec; it is the caller's to close.

    A second descriptor is closed: no message has one.
    """
    room = socket.CMSG_LEN(_DESCRIPTORS_MAX * array.array("i").itemsize)
    prefix, ancillary, _, _ = sock.recvmsg(LENGTH_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    found = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    descriptors = list(found)
    try:
        if not prefix:
            raise CacheUnavailable("the cache server closed the connection")
        prefix += recv_exactly(sock, LENGTH_BYTES - len(prefix))
        payload = recv_exactly(sock, frame_length(prefix))
        return payload, descriptors.pop(0) if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def recv_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """``num_bytes`` from a blocking socket.

    Raises:
        CacheUnavailable: the stream ended before.
        TimeoutError: the socket's own time limit.
    """
    received = bytearray()
    while len(received) < num_bytes:
        data = sock.recv(num_bytes - len(received))
        if not data:
            raise CacheUnavailable("the cache server closed the connection")
        received += data
    return bytes(received)
