"""Frames from a blocking socket, one at a time, for tests that are a client."""

from __future__ import annotations

import array
import os
import socket
from typing import Final

from antiphon.core.errors import CacheUnavailable
from antiphon.protocol.cache import LENGTH_BYTES, frame_length

_DESCRIPTORS_MAX: Final = 4
"""Room for descriptors that come with one receive: one is expected, and what is not expected must be closed."""


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
