"""Frames on a stream socket: finding them in what has arrived.

A frame is a length and a payload (``antiphon.protocol.cache``). Its length is judged as soon as it is announced, so
that nobody can make the other side hold more than one frame of the largest size.

It does no input or output; the serving side is ``frames_server``.
"""

from __future__ import annotations

from antiphon.protocol.cache import LENGTH_BYTES, frame_length


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
