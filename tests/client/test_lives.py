"""A server that ends and comes back: sessions that drain, holds, mappings, forks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from antiphon.core.errors import CacheUnavailable
from antiphon.protocol.cache import Attach, Call, Noted, Ping
from tests.client.conftest import num_arena_mappings
from tests.client.fake_server import Connection, FakeServer, running, wait_until
from tests.client.test_calls import session_of

MakeServer = Callable[..., FakeServer]


def test_another_life_is_another_session_and_the_old_one_drains_while_held(make_server: MakeServer) -> None:
    server = make_server()
    server.arena.mapping.view(0, 3)[:] = b"old"
    with running(server, drain_quiet_s=0.1) as client:
        old = session_of(client)
        assert old.hold()
        server.stop()
        wait_until(lambda: not old.is_open)
        assert client.session is None
        assert client.state.name == "connecting"
        server = make_server(port=server.port)
        assert client.wait_connected(1.0)
        new = session_of(client)
        assert new is not old
        assert new.incarnation == server.incarnation != old.incarnation
        assert new.call(Ping()) == Noted()
        # The old arena outlives its server, and the quiet time, while it is held.
        deadline_s = time.monotonic() + 0.4
        while time.monotonic() < deadline_s:
            assert not old.is_disposed
            assert old.arena is not None
            assert bytes(old.arena.view(0, 3)) == b"old"
        old.unhold()
        wait_until(lambda: old.is_disposed, 1)
        assert not old.hold()
        assert new.is_open
        assert num_arena_mappings() == 2  # the fake server's and the new session's


def test_an_ended_session_is_kept_for_the_quiet_time(make_server: MakeServer) -> None:
    """The server ends its side only: it sees this side's end of file when the quiet time is over, not before."""
    server = make_server()
    with running(server, drain_quiet_s=0.4) as client:
        old = session_of(client)
        connection = server.unix[0]
        connection.end()
        wait_until(lambda: not old.is_open)
        ended_s = time.monotonic()
        assert client.wait_connected(1)  # a new one beside it
        assert connection not in server.peers_ended
        wait_until(lambda: connection in server.peers_ended)
        assert 0.3 < time.monotonic() - ended_s < 1.5
        assert old.is_disposed


def test_retire_ends_the_quiet_time(make_server: MakeServer) -> None:
    server = make_server()
    with running(server, drain_quiet_s=30) as client:
        old = session_of(client)
        server.unix[0].end()
        wait_until(lambda: not old.is_open)
        assert not old.is_disposed
        assert old.hold()
        old.retire()
        assert client.wait_connected(1)
        assert not old.is_disposed
        old.unhold()
        wait_until(lambda: old.is_disposed, 1)
        wait_until(lambda: server.unix[0] in server.peers_ended)


def test_retiring_an_open_session_ends_it(server: FakeServer) -> None:
    with running(server, drain_quiet_s=30) as client:
        old = session_of(client)
        old.retire()
        assert not old.is_open
        with pytest.raises(CacheUnavailable, match="retired"):
            old.call(Ping())
        wait_until(lambda: old.is_disposed and client.session is not None, 2)


def test_who_maps_nothing_has_nothing_to_drain(server: FakeServer) -> None:
    with running(server, drain_quiet_s=30, needs_arena=False, slabs=()) as client:
        old = session_of(client)
        server.unix[0].end()
        wait_until(lambda: old.is_disposed, 1)


def test_ended_sessions_are_bounded(make_server: MakeServer) -> None:
    server = make_server()
    with running(server, drain_quiet_s=0.05, ended_sessions_max=2) as client:
        held = []
        for _ in range(2):
            session = session_of(client)
            assert session.hold()
            held.append(session)
            server.unix[-1].end()
            wait_until(lambda session=session: not session.is_open)
        assert not client.wait_connected(0.8)
        held[0].unhold()
        assert client.wait_connected(1.5)
        held[1].unhold()


def test_a_view_of_a_drained_arena_delays_the_unmapping(
    make_server: MakeServer, caplog: pytest.LogCaptureFixture
) -> None:
    server = make_server()
    with running(server, drain_quiet_s=0.05) as client:
        old = session_of(client)
        assert old.arena is not None
        view = old.arena.view(0, 10)
        server.unix[0].end()
        wait_until(lambda: "cannot be unmapped yet" in caplog.text)
        assert not old.is_disposed
        view.release()
        del view
        wait_until(lambda: old.is_disposed)


def test_a_session_held_at_close_is_closed_by_its_last_unhold(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        assert session.hold()
        assert session.hold()
    assert not session.is_disposed
    session.unhold()
    assert not session.is_disposed
    assert session.arena is not None
    assert len(bytes(session.arena.view(0, 100))) == 100
    session.unhold()
    assert session.is_disposed


def test_a_server_that_ends_every_session_is_not_hammered(make_server: MakeServer) -> None:
    def attach_and_end(connection: Connection, call: Call) -> bool:
        server.behave(connection, call)
        if isinstance(call.body, Attach):
            connection.end()
        return True

    server = make_server(script=attach_and_end)
    with running(server, needs_arena=False, slabs=()):
        wait_until(lambda: len(server.unix) >= 3)
        time.sleep(1.0)  # how often it connects in a second is what is measured
        assert len(server.unix) <= 9


def test_children_inherit_nothing(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        code = "import os; print(sorted(os.listdir('/proc/self/fd'))); print(open('/proc/self/maps').read())"
        done = subprocess.run(
            [sys.executable, "-S", "-c", code], capture_output=True, text=True, close_fds=False, check=True, timeout=30
        )
        inherited = done.stdout.splitlines()[0]
        assert f"'{session.fileno()}'" not in inherited
        assert "memfd:antiphon" not in done.stdout


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the point of the test
def test_a_forked_child_has_no_connection(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        descriptor = session.fileno()
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            verdict = b"failed"
            try:
                assert not session.is_open
                assert client.session is None
                assert client.state.name == "closed"
                assert num_arena_mappings() == 0
                assert not os.path.exists(f"/proc/self/fd/{descriptor}")
                client.close()
                assert session.submit(Ping()).has_failed
                verdict = b"ok"
            finally:
                os.write(write_end, verdict)
                os._exit(0)
        os.close(write_end)
        with os.fdopen(read_end, "rb") as pipe:
            assert pipe.read() == b"ok"
        os.waitpid(pid, 0)
        assert session.call(Ping()) == Noted()  # the parent's connection is untouched
