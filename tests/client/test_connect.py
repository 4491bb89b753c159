"""Connecting: a server that is there, absent, late, incompatible, or not what it says."""

from __future__ import annotations

import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec
import pytest

from antiphon.client import CacheClient
from antiphon.core.errors import CacheUnavailable
from antiphon.protocol import cache as protocol
from antiphon.protocol.cache import Answer, Attach, Call, Failure, Hello
from antiphon.storage.arena import ArenaOwner
from tests.client.conftest import num_arena_mappings
from tests.client.fake_server import ARENA_BYTES, LAYOUT, Connection, FakeServer, options, running, wait_until

MakeServer = Callable[..., FakeServer]


def test_attaches_and_maps(server: FakeServer) -> None:
    with running(server) as client:
        assert client.wait_connected(5)
        session = client.session
        assert session is not None
        assert (session.instance, session.incarnation) == ("fake", server.incarnation)
        assert session.chunk_size_tokens == server.chunk_size_tokens
        assert str(client.state).startswith("connected: fake")
        assert session.arena is not None
        assert session.arena.data_bytes == ARENA_BYTES
        server.arena.mapping.view(100, 3)[:] = b"abc"
        assert bytes(session.arena.view(100, 3)) == b"abc"
        assert session.address_of(protocol.Region(4096, LAYOUT.chunk_bytes, 1)) == session.arena.address + 4096
        (attach,) = server.of_type(Attach)
        assert isinstance(attach, Attach)
        assert (attach.engine, attach.role, attach.pid, attach.slabs) == ("e", "worker-0", os.getpid(), (0, 1))
        assert (attach.num_slabs, attach.slab_bytes, attach.fingerprint) == (2, 4096, None)
    assert str(client.state) == "closed"
    assert client.session is None


@pytest.mark.parametrize(
    "region", [(-4096, 8192), (0, 8191), (ARENA_BYTES - 4096, 8192), (ARENA_BYTES, 8192), (0, ARENA_BYTES + 1)]
)
def test_a_region_outside_the_arena_has_no_address(server: FakeServer, region: tuple[int, int]) -> None:
    with running(server) as client:
        assert client.wait_connected(5)
        assert client.session is not None
        with pytest.raises(protocol.ProtocolError, match="no place for a chunk"):
            client.session.address_of(protocol.Region(*region, generation=1))


def test_who_only_looks_up_maps_nothing(server: FakeServer) -> None:
    with running(server, needs_arena=False, slabs=(), role="scheduler") as client:
        assert client.wait_connected(5)
        assert client.session is not None
        assert client.session.arena is None
        assert num_arena_mappings() == 1  # the fake server's


def test_an_absent_server_raises_nothing(free_port: int) -> None:
    changes = []
    with running(free_port, on_change=lambda: changes.append(1)) as client:
        assert not client.wait_connected(0.3)
        assert client.session is None
        assert client.state.name == "connecting"
        assert "refused" in client.state.detail  # the system's word
    assert len(changes) == 1  # the state changed once, however often it was tried


def test_a_server_that_comes_later_is_used_within_a_second(free_port: int, make_server: MakeServer) -> None:
    with running(free_port) as client:
        assert not client.wait_connected(0.7)  # the wait between two tries has reached its longest
        make_server(port=free_port)
        assert client.wait_connected(1.0)


def test_an_unknown_host_raises_nothing() -> None:
    for host in ("no-such-host.invalid", "a" * 70 + ".invalid"):
        client = CacheClient(dataclasses.replace(options(1), host=host))
        client.start()
        wait_until(lambda client=client: client.state.detail, 15)
        assert "no known host" in client.state.detail
        client.close()


def refuse_attach(connection: Connection, call: Call) -> bool:
    if isinstance(call.body, Attach):
        connection.answer(call.id, Failure("layout_mismatch", "another layout", "use the same"))
        return True
    return False


def test_a_refused_attach_is_remembered_and_retried_slowly(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server(script=refuse_attach)
    with running(server, refused_retry_s=0.4) as client:
        wait_until(lambda: len(server.of_type(Attach)) == 2)
        began_s = time.monotonic()
        wait_until(lambda: len(server.of_type(Attach)) == 3)
        assert time.monotonic() - began_s > 0.3
        assert str(client.state) == "refused: another layout (use the same)"
        assert client.session is None
        server.script = None
        assert client.wait_connected(2)
        assert client.state.name == "connected"
    assert sum("another layout" in record.message for record in caplog.records) == 1


def test_another_chunk_size_is_refused_before_attach(make_server: MakeServer) -> None:
    server = make_server(chunk_size_tokens=128)
    with running(server) as client:
        wait_until(lambda: client.state.name == "refused")
        assert "chunks of 128 tokens, this client of 256" in client.state.detail
        assert not server.of_type(Attach)


def test_another_version_is_refused(make_server: MakeServer) -> None:
    def script(connection: Connection, call: Call) -> bool:
        connection.answer(call.id, msgspec.structs.replace(server.welcome(), version=99))
        return True

    server = make_server(script=script)
    with running(server) as client:
        wait_until(lambda: client.state.name == "refused")
        assert "version 99" in client.state.detail


def test_a_socket_of_another_host_is_refused(make_server: MakeServer) -> None:
    server = make_server()
    os.unlink(server.socket_path)
    with running(server) as client:
        wait_until(lambda: client.state.name == "refused")
        assert "cannot be used" in client.state.detail


def test_the_arena_of_another_life_is_not_mapped(make_server: MakeServer) -> None:
    server = make_server()
    own, server.arena = server.arena, ArenaOwner.create(ARENA_BYTES, "fake", "earlier")
    with running(server) as client:
        wait_until(lambda: client.state.name == "refused")
        assert "belongs to fake (earlier)" in client.state.detail
        assert num_arena_mappings() == 2  # the fake server's
    own.close()


@pytest.mark.parametrize("num_descriptors", [0, 2])
def test_descriptors_that_nobody_asked_for_are_closed(make_server: MakeServer, num_descriptors: int) -> None:
    def script(connection: Connection, call: Call) -> bool:
        if not isinstance(call.body, Hello) or not connection.is_unix:
            return False
        data = protocol.frame(Answer(call.id, server.welcome()))
        socket.send_fds(connection.sock, [data], [server.arena.fd] * num_descriptors)
        return True

    server = make_server(script=script)
    with running(server) as client:
        wait_until(lambda: f"passed {num_descriptors} descriptors" in client.state.detail)
        assert client.session is None


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\xff" * 64, b"\x01\x00\x00\x00\xc1", b"\x02\x00"]
)
def test_garbage_in_the_handshake_is_another_try(make_server: MakeServer, data: bytes) -> None:
    def script(connection: Connection, call: Call) -> bool:
        connection.send(data)
        connection.end()
        return True

    server = make_server(script=script)
    with running(server) as client:
        wait_until(lambda: len(server.of_type(Hello)) >= 2)
        assert client.session is None
        server.script = None
        assert client.wait_connected(2)


def test_a_server_that_hangs_in_the_handshake_costs_the_timeout(make_server: MakeServer) -> None:
    server = make_server()
    server.may_read.clear()
    with running(server, connect_timeout_s=0.2) as client:
        wait_until(lambda: "said nothing for 0.2 s" in client.state.detail)
        server.may_read.set()
        assert client.wait_connected(1)


def test_close_interrupts_the_handshake(make_server: MakeServer) -> None:
    server = make_server()
    server.may_read.clear()
    client = CacheClient(options(server.port, connect_timeout_s=60))
    client.start()
    wait_until(lambda: server.connections)
    began_s = time.monotonic()
    client.close()
    client.close()
    assert time.monotonic() - began_s < 1


def test_a_failing_handler_does_not_end_the_client(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("a mistake of the caller")

    with running(server, on_change=fail) as client:
        assert client.wait_connected(5)
        assert client.session is not None
        client.session.call(protocol.Ping())
    assert "handler of a change" in caplog.text


def test_a_bug_in_the_thread_is_logged_and_the_client_goes_on(
    server: FakeServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = threading.Event()

    def connect(*_: object) -> None:
        planted.set()
        raise AssertionError("a planted bug")

    with monkeypatch.context() as patch:
        patch.setattr("antiphon.client.client.connect", connect)
        client = CacheClient(options(server.port))
        client.start()
        assert planted.wait(5)
        wait_until(lambda: "a planted bug" in client.state.detail)
    assert client.wait_connected(5)
    client.close()
    assert "begins again" in caplog.text


def test_closing_a_client_that_was_never_started(server: FakeServer) -> None:
    client = CacheClient(options(server.port))
    client.close()
    assert client.state.name == "closed"
    assert not client.wait_connected(0)


def test_calls_on_a_closed_client_fail_typed(server: FakeServer) -> None:
    with running(server) as client:
        assert client.wait_connected(5)
        session = client.session
        assert session is not None
    with pytest.raises(CacheUnavailable, match="client was closed"):
        session.call(protocol.Ping())
    assert not session.hold()
