"""Frames over a non-blocking stream socket, received and sent by whoever finds it ready.

Owns one socket, what it has received of an unfinished frame, and what it could not send yet. Sending and receiving are
independent; each is done by one thread at a time, which the caller sees to. It never blocks, and never raises for what
the peer does: once the stream is over, ``end_reason`` says why.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Final

from antiphon.core.errors import ProtocolError
from antiphon.protocol.cache import LENGTH_BYTES, frame_length

_RECEIVE_BYTES: Final = 256 << 10
_RECEIVES_MAX: Final = 64
"""Receives in one go: a peer that sends without a pause must not keep its reader from everything else."""
_DESCRIPTORS_MAX: Final = 4


class Wire:
    """One stream of frames.

    Args:
        sock: a connected stream socket; it belongs to the wire from here on.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._unsent = bytearray()
        self._received = bytearray()
        self.end_reason: str | None = None

    def fileno(self) -> int:
        """Of the socket; -1 once it is closed."""
        return self._socket.fileno()

    @property
    def num_unsent_bytes(self) -> int:
        """Bytes that wait for the socket."""
        return len(self._unsent)

    def send(self, data: bytes) -> None:
        """Sends what the socket takes now and keeps the rest for ``flush``."""
        sent = 0
        if not self._unsent:
            sent = self._send_some(data)
        if sent < len(data):
            self._unsent += data[sent:] if sent else data

    def flush(self) -> None:
        """Sends what was kept, as far as the socket takes it."""
        while self._unsent:
            with memoryview(self._unsent) as view:
                sent = self._send_some(view)
            if not sent:
                return
            del self._unsent[:sent]

    def _send_some(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self.end_reason = self.end_reason or f"sending failed: {error.strerror or error}"
            return 0

    def receive(self, descriptors: list[int] | None = None) -> list[bytes]:
        """The frames that have arrived, without their lengths.

        Args:
            descriptors: descriptors that came along are put here, closed on exec; without it the kernel closes them.
        """
        for _ in range(_RECEIVES_MAX):
            try:
                data = self._receive_some(descriptors)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self.end_reason = self.end_reason or f"receiving failed: {error.strerror or error}"
                break
            if not data:
                self.end_reason = self.end_reason or "the server closed it"
                break
            self._received += data
            if len(data) < _RECEIVE_BYTES:
                break  # the socket is empty, most likely; if not, it is still ready
        return self._take_frames()

    def _receive_some(self, descriptors: list[int] | None) -> bytes:
        if descriptors is None:
            return self._socket.recv(_RECEIVE_BYTES)
        data, found, _, _ = socket.recv_fds(self._socket, _RECEIVE_BYTES, _DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC)
        descriptors += found
        return data

    def _take_frames(self) -> list[bytes]:
        received, frames, start = self._received, [], 0
        while len(received) - start >= LENGTH_BYTES:
            body = start + LENGTH_BYTES
            try:
                end = body + frame_length(received[start:body])
            except ProtocolError as error:
                self.end_reason = f"garbage was received: {error}"
                start = len(received)
                break
            if len(received) < end:
                break
            frames.append(bytes(received[body:end]))
            start = end
        del received[:start]
        return frames

    def shut_down(self) -> None:
        """Sends nothing more: the peer sees the end of file. What it still sends is received."""
        self._unsent.clear()
        with contextlib.suppress(OSError):  # the peer is gone already
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Closes the socket; the peer sees the end of file."""
        self._socket.close()


def close_all(descriptors: list[int]) -> None:
    """Closes descriptors that nobody owns."""
    while descriptors:
        os.close(descriptors.pop())
