"""Frames found in a stream, and received one at a time by a blocking client.

In scope: ``transport.frames``. Out of scope: the serving side (``test_frames_server``), and what a frame means.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import CacheUnavailable, ProtocolError
from antiphon.protocol.cache import FRAME_BYTES_MAX
from antiphon.transport.frames import FrameBuffer
from tests.transport.blocking_frames import recv_frame, recv_frame_with_fd


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=8), st.data())
def test_frames_come_out_as_they_went_in_however_they_were_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    buffer = FrameBuffer()
    found = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        buffer.feed(stream[start:end])
        while (payload := buffer.next()) is not None:
            found.append(payload)
    assert found == payloads
    assert len(buffer) == 0


@pytest.mark.parametrize("length", [0, FRAME_BYTES_MAX + 1, 100_000_000, 2**32 - 1])
def test_a_length_is_judged_when_it_is_announced(length: int) -> None:
    buffer = FrameBuffer()
    buffer.feed(length.to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match=f"a frame of {length} bytes"):
        buffer.next()


def test_the_largest_frame_passes() -> None:
    buffer = FrameBuffer()
    buffer.feed(framed(b"x" * FRAME_BYTES_MAX))
    assert buffer.next() == b"x" * FRAME_BYTES_MAX


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(5)
    with ours, theirs:
        yield ours, theirs


def test_one_frame_is_received_and_nothing_after_it(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.sendall(framed(b"first") + framed(b"second") + b"\x07")
    assert recv_frame(ours) == b"first"
    assert recv_frame(ours) == b"second"
    theirs.close()
    with pytest.raises(CacheUnavailable, match="closed"):
        recv_frame(ours)


def test_a_descriptor_comes_with_its_frame(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    reading, writing = os.pipe()
    socket.send_fds(theirs, [framed(b"here") + framed(b"plain")], [writing])
    payload, descriptor = recv_frame_with_fd(ours)
    assert payload == b"here"
    assert descriptor is not None
    assert not os.get_inheritable(descriptor)
    os.write(descriptor, b"through")
    assert os.read(reading, 10) == b"through"
    assert recv_frame_with_fd(ours) == (b"plain", None)
    for fd in (reading, writing, descriptor):
        os.close(fd)


def test_descriptors_that_no_message_has_are_closed(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    before = set(os.listdir("/proc/self/fd"))
    socket.send_fds(theirs, [framed(b"three")], [theirs.fileno()] * 3)
    _, descriptor = recv_frame_with_fd(ours)
    assert descriptor is not None
    os.close(descriptor)
    socket.send_fds(theirs, [(0).to_bytes(4, "little")], [theirs.fileno()])
    with pytest.raises(ProtocolError):
        recv_frame_with_fd(ours)
    theirs.close()
    with pytest.raises(CacheUnavailable):
        recv_frame_with_fd(ours)
    assert set(os.listdir("/proc/self/fd")) <= before
