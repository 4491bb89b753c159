"""The server side of framed calls: what a peer does costs its own connection and nobody else's.

In scope: ``transport.frames_server`` with a handler that echoes. Out of scope: what a frame means (``cache_server``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from antiphon.core.errors import CacheUnavailable, ProtocolError
from antiphon.protocol.cache import FRAME_BYTES_MAX
from antiphon.transport import frames_server
from antiphon.transport.frames_server import FrameConnection, FrameLimits, FrameServer
from tests.transport.blocking_frames import recv_frame, recv_frame_with_fd

LIMITS = FrameLimits(
    connections_max=8,
    first_frame_timeout_s=0.4,
    frame_timeout_s=0.3,
    outbound_high_bytes=65_536,
    stall_timeout_s=0.3,
    linger_s=0.2,
    tcp_connections_max=4,
    tcp_life_s=1.0,
)


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


class Echo:
    """Sends back what comes. ``big``: half a megabyte. ``fd``: with a descriptor. ``hold``: waits for the peer."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.faults: list[str] = []
        self.ended_numbers: list[int] = []
        self.holding: set[int] = set()
        self.connections: dict[int, FrameConnection] = {}

    def frame_received(self, connection: FrameConnection, payload: bytes) -> None:
        self.connections[connection.number] = connection
        if payload == b"hold":
            self.holding.add(connection.number)
        if payload == b"end":
            connection.end(framed(b"bye"), waits_for_peer=connection.number in self.holding)
        elif payload == b"big":
            connection.send(framed(b"x" * 500_000))
        else:
            connection.send(framed(payload), self.descriptor if payload == b"fd" else None)

    def faulted(self, connection: FrameConnection, error: ProtocolError) -> None:
        self.faults.append(error.message)
        connection.end(framed(b"fault"), waits_for_peer=connection.number in self.holding)

    def ended(self, connection: FrameConnection) -> None:
        self.ended_numbers.append(connection.number)


class Stand:
    """A server on a unix socket and a TCP port, and clients of it."""

    def __init__(self, folder: Path) -> None:
        self.echo = Echo()
        self.server = FrameServer(self.echo, LIMITS, frozenset({os.geteuid()}))
        self.path = str(folder / "s.sock")
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(self.path)
        tcp = socket.create_server(("127.0.0.1", 0))
        self.port = tcp.getsockname()[1]
        unix.listen()
        self.server.listen(unix)
        self.server.listen(tcp)
        self._clients = contextlib.ExitStack()

    def connect(self, is_unix: bool = True) -> socket.socket:
        """A blocking client, to be used off the loop's thread where it must wait."""
        sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        sock.settimeout(5)
        self._clients.enter_context(sock)
        sock.connect(self.path if is_unix else ("127.0.0.1", self.port))
        return sock

    async def ask(self, sock: socket.socket, payload: bytes) -> bytes:
        sock.sendall(framed(payload))
        return await asyncio.to_thread(recv_frame, sock)

    async def until(self, holds: Callable[[], bool]) -> None:
        for _ in range(500):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("not within 5 s")

    async def at_end(self, sock: socket.socket) -> bytes:
        """What comes until the server ends the stream."""

        def read() -> bytes:
            parts = []
            while part := sock.recv(65_536):
                parts.append(part)
            return b"".join(parts)

        return await asyncio.to_thread(read)

    def close(self) -> None:
        self._clients.close()
        self.server.close()


@pytest.fixture
async def stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stand]:
    monkeypatch.setattr(frames_server, "_SWEEP_INTERVAL_S", 0.05)
    made = Stand(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("is_unix", [True, False])
async def test_frames_are_answered_in_order(stand: Stand, is_unix: bool) -> None:
    sock = stand.connect(is_unix)
    numbers = [b"%d" % number for number in range(200)]
    sock.sendall(b"".join(map(framed, numbers)))
    assert [await asyncio.to_thread(recv_frame, sock) for _ in numbers] == numbers
    largest = b"y" * FRAME_BYTES_MAX
    sending = asyncio.to_thread(sock.sendall, framed(largest))
    receiving = asyncio.to_thread(recv_frame, sock)
    _, echoed = await asyncio.gather(sending, receiving)
    assert echoed == largest
    sock.close()
    await stand.until(lambda: stand.echo.ended_numbers == [1])
    assert stand.server.num_connections == 0
    assert stand.echo.faults == []


async def test_a_descriptor_travels_with_its_frame(stand: Stand) -> None:
    reading, stand.echo.descriptor = os.pipe()
    sock = stand.connect()
    sock.sendall(framed(b"before") + framed(b"fd") + framed(b"after"))
    received = [await asyncio.to_thread(recv_frame_with_fd, sock) for _ in range(3)]
    assert [payload for payload, _ in received] == [b"before", b"fd", b"after"]
    assert received[0][1] is None
    descriptor = received[1][1]
    assert descriptor is not None
    assert received[2][1] is None
    os.write(descriptor, b"!")
    assert os.read(reading, 2) == b"!"
    for fd in (reading, descriptor, stand.echo.descriptor):
        os.close(fd)


BAD_STREAMS = [
    pytest.param((100_000_000).to_bytes(4, "little"), "100000000 bytes", id="100 MB announced"),
    pytest.param((0).to_bytes(4, "little"), "0 bytes", id="empty"),
    pytest.param(framed(b"whole") + b"\x10\x00\x00\x00half", "no whole frame came in time", id="half a frame"),
    pytest.param(framed(b"whole") + b"\x10", "no whole frame came in time", id="half a length"),
    pytest.param(b"\x10\x00\x00\x00half", "the first frame did not come in time", id="half of the first frame"),
    pytest.param(b"", "the first frame did not come in time", id="silence"),
]


@pytest.mark.parametrize(("stream", "fault"), BAD_STREAMS)
@pytest.mark.parametrize("is_unix", [True, False])
async def test_a_bad_stream_costs_its_connection(stand: Stand, stream: bytes, fault: str, is_unix: bool) -> None:
    good = stand.connect()
    assert await stand.ask(good, b"first") == b"first"
    bad = stand.connect(is_unix)
    bad.sendall(stream)
    said = await stand.at_end(bad)
    assert said.endswith(framed(b"fault"))
    assert [fault in message for message in stand.echo.faults] == [True]
    assert await stand.ask(good, b"still here") == b"still here"
    await stand.until(lambda: stand.echo.ended_numbers == [2])  # it was let go although its peer did not close


async def test_a_peer_that_never_stops_sending_is_let_go(stand: Stand) -> None:
    sock = stand.connect()
    sock.settimeout(0.1)
    await stand.ask(sock, b"x")
    sock.sendall((100_000_000).to_bytes(4, "little"))

    def flood() -> str:
        while True:
            try:
                sock.send(b"z" * 65_536)
            except TimeoutError:
                continue
            except OSError as error:
                return type(error).__name__

    assert await asyncio.to_thread(flood) in ("BrokenPipeError", "ConnectionResetError")
    assert stand.echo.ended_numbers == [1]


async def test_a_long_frame_may_take_its_time_within_the_deadline(stand: Stand) -> None:
    sock = stand.connect()
    await stand.ask(sock, b"hello")
    for byte in framed(b"slow"):
        sock.sendall(bytes([byte]))
        await asyncio.sleep(0.02)
    assert await asyncio.to_thread(recv_frame, sock) == b"slow"
    await asyncio.sleep(0.5)  # silence between frames is allowed for ever
    assert await stand.ask(sock, b"again") == b"again"


async def test_a_slow_reader_holds_little_memory_and_is_given_up(stand: Stand) -> None:
    slow, other = stand.connect(), stand.connect()
    slow.sendall(framed(b"big") * 100)  # 50 MB of answers
    await stand.until(lambda: 1 in stand.echo.connections)
    held = []
    while not stand.echo.faults:
        held.append(stand.echo.connections[1].outbound_bytes)
        assert await stand.ask(other, b"quick") == b"quick"
        await asyncio.sleep(0.02)
    assert max(held) <= LIMITS.outbound_high_bytes + 500_004
    assert stand.echo.faults == ["the peer takes no answers"]
    await stand.until(lambda: 1 in stand.echo.ended_numbers)


async def test_a_reader_that_wakes_up_gets_everything(stand: Stand) -> None:
    slow = stand.connect()
    slow.sendall(framed(b"big") * 10 + framed(b"last"))
    await stand.until(lambda: 1 in stand.echo.connections and stand.echo.connections[1].outbound_bytes > 0)
    await asyncio.sleep(0.2)
    received = [await asyncio.to_thread(recv_frame, slow) for _ in range(11)]
    assert [len(payload) for payload in received[:10]] == [500_000] * 10
    assert received[10] == b"last"
    assert stand.echo.faults == []


async def test_a_held_connection_waits_for_its_peer_however_long(stand: Stand) -> None:
    sock = stand.connect()
    await stand.ask(sock, b"hold")
    sock.sendall(framed(b"end") + framed(b"not taken up") * 1000)
    assert await stand.at_end(sock) == framed(b"bye")
    await asyncio.sleep(LIMITS.linger_s * 3)
    assert stand.echo.ended_numbers == []
    sock.close()
    await stand.until(lambda: stand.echo.ended_numbers == [1])


async def test_a_held_slow_reader_waits_too(stand: Stand) -> None:
    sock = stand.connect()
    await stand.ask(sock, b"hold")
    sock.sendall(framed(b"big") * 10)
    await stand.until(lambda: stand.echo.faults == ["the peer takes no answers"])
    await asyncio.sleep(LIMITS.stall_timeout_s * 2)
    assert stand.echo.ended_numbers == []
    sock.shutdown(socket.SHUT_WR)  # its own end of file counts, whatever it has not read
    await stand.until(lambda: stand.echo.ended_numbers == [1])


async def test_a_peer_that_shuts_its_reading_side_is_not_taken_for_gone(stand: Stand) -> None:
    sock = stand.connect()
    await stand.ask(sock, b"hold")
    sock.shutdown(socket.SHUT_RD)
    sock.sendall(framed(b"cannot be answered"))
    await stand.until(lambda: len(stand.echo.faults) == 1)
    await asyncio.sleep(0.2)
    assert stand.echo.ended_numbers == []
    sock.close()
    await stand.until(lambda: stand.echo.ended_numbers == [1])


@pytest.mark.parametrize("is_unix", [True, False])
async def test_a_peer_that_has_hung_up_is_known_before_its_frames_are_taken_up(stand: Stand, is_unix: bool) -> None:
    sock = stand.connect(is_unix)
    assert await stand.ask(sock, b"one") == b"one"
    connection = stand.echo.connections[1]
    assert not connection.has_hung_up
    sock.shutdown(socket.SHUT_RD)
    assert not connection.has_hung_up
    seen: list[bool] = []
    received = stand.echo.frame_received

    def frame_received(connection: FrameConnection, payload: bytes) -> None:
        seen.append(connection.has_hung_up)
        received(connection, payload)

    stand.echo.frame_received = frame_received  # type: ignore[method-assign]
    sock.sendall(framed(b"two") + framed(b"three"))
    sock.close()
    await stand.until(lambda: stand.echo.ended_numbers == [1])
    assert seen == [True, True]


async def test_connections_are_bounded_and_room_comes_back(stand: Stand) -> None:
    first = [stand.connect() for _ in range(LIMITS.connections_max)]
    for sock in first:
        await stand.ask(sock, b"x")
    extra = stand.connect()
    assert await stand.at_end(extra) == b""
    assert stand.server.num_refused == 1
    first[0].close()
    await stand.until(lambda: stand.server.num_connections == LIMITS.connections_max - 1)
    assert await stand.ask(stand.connect(), b"room") == b"room"


async def test_connections_over_tcp_take_no_room_of_unix_ones_nor_the_reverse(stand: Stand) -> None:
    far = [stand.connect(is_unix=False) for _ in range(LIMITS.tcp_connections_max)]
    near = [stand.connect() for _ in range(LIMITS.connections_max)]
    for sock in (*far, *near):
        assert await stand.ask(sock, b"x") == b"x"
    for is_unix in (True, False):
        assert await stand.at_end(stand.connect(is_unix)) == b""
    assert stand.server.num_refused == 2
    far[0].close()
    await stand.until(lambda: len(stand.echo.ended_numbers) == 1)
    assert await stand.ask(stand.connect(is_unix=False), b"room") == b"room"


async def test_a_tcp_connection_ends_whatever_it_says_and_a_unix_one_stays(stand: Stand) -> None:
    far, near = stand.connect(is_unix=False), stand.connect()
    assert await stand.ask(near, b"x") == b"x"

    async def talk() -> None:
        while True:
            await stand.ask(far, b"more")

    began_s = asyncio.get_running_loop().time()
    with pytest.raises((CacheUnavailable, ConnectionError)):
        await talk()
    assert asyncio.get_running_loop().time() - began_s < LIMITS.tcp_life_s + 1
    await stand.until(lambda: len(stand.echo.ended_numbers) == 1)
    assert stand.echo.faults == []
    assert await stand.ask(near, b"still here") == b"still here"


async def test_another_user_is_turned_away(stand: Stand, tmp_path: Path) -> None:
    server = FrameServer(stand.echo, LIMITS, frozenset({os.geteuid() + 1}))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "other.sock"))
    listener.listen()
    server.listen(listener)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(str(tmp_path / "other.sock"))
        assert await stand.at_end(sock) == b""
    assert server.num_refused == 1
    server.close()


async def test_without_descriptors_connections_wait(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    good = stand.connect()
    await stand.ask(good, b"x")
    waiting = stand.connect()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    top = max(map(int, os.listdir("/proc/self/fd")))
    held = []
    later = socket.socket(socket.AF_UNIX)
    resource.setrlimit(resource.RLIMIT_NOFILE, (top + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(0))
        later.settimeout(5)
        later.connect(stand.path)
        assert await stand.ask(good, b"served meanwhile") == b"served meanwhile"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)
    assert await stand.ask(later, b"accepted later") == b"accepted later"
    assert await stand.ask(waiting, b"too") == b"too"
    later.close()


async def test_closing_ends_everything_at_once(stand: Stand) -> None:
    sock = stand.connect()
    await stand.ask(sock, b"hold")
    stand.server.close()
    assert await stand.at_end(sock) == b""
    assert stand.echo.ended_numbers == []
    assert stand.server.num_connections == 0
    with pytest.raises(ConnectionRefusedError):
        stand.connect()
