"""Leases that are given back: owed until the server has answered, on whichever connection; and what a session that was
given up still finds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from antiphon.client.options import ClientOptions
from antiphon.client.releases import Releases
from antiphon.core.errors import CacheUnavailable
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol.cache import Call, Failure, Lookup, Ping, Release
from tests.client.fake_server import Connection, FakeServer, lookup, running, wait_until
from tests.client.test_calls import session_of

MakeServer = Callable[..., FakeServer]
SCHEDULER = {"needs_arena": False, "slabs": ()}


class Script:
    """Answers no call of one kind while ``may_answer`` is not set; keeps it."""

    def __init__(self, kind: type[Lookup] | type[Release]) -> None:
        self.kind = kind
        self.may_answer = threading.Event()
        self.kept: list[tuple[Connection, Call]] = []

    def __call__(self, connection: Connection, call: Call) -> bool:
        if not isinstance(call.body, self.kind) or self.may_answer.is_set():
            return False
        self.kept.append((connection, call))
        return True


def test_a_release_without_an_answer_is_sent_on_the_next_connection(make_server: MakeServer) -> None:
    script = Script(Release)
    server = make_server(script=script)
    with running(server, **SCHEDULER) as client:
        session = session_of(client)
        client.release(session.incarnation, "one", 7)
        wait_until(lambda: len(script.kept) == 1)
        script.may_answer.set()
        script.kept[0][0].end()
        wait_until(lambda: client.num_owed_releases == 0)
        assert server.of_type(Release) == [Release("one", 7)] * 2
        again = session_of(client)
        assert again is not session
        server.unix[-1].end()
        wait_until(lambda: not again.is_open)
        session_of(client).call(Ping())
        assert len(server.of_type(Release)) == 2, "it was answered"


def test_a_release_without_a_connection_waits_for_one(server: FakeServer) -> None:
    with running(server, **SCHEDULER) as client:
        session = session_of(client)
        session.retire()
        client.release(session.incarnation, "one", 7)
        wait_until(lambda: server.of_type(Release) == [Release("one", 7)])
        wait_until(lambda: client.num_owed_releases == 0)


def test_a_refused_release_is_over(make_server: MakeServer) -> None:
    def refuse(connection: Connection, call: Call) -> bool:
        if isinstance(call.body, Release):
            connection.answer(call.id, Failure("lease_unknown", "lease 7 does not exist, or has ended"))
        return isinstance(call.body, Release)

    server = make_server(script=refuse)
    with running(server, **SCHEDULER) as client:
        session = session_of(client)
        client.release(session.incarnation, "one", 7)
        wait_until(lambda: client.num_owed_releases == 0)
        assert session.is_open


def test_nothing_is_owed_to_another_life_of_the_server(make_server: MakeServer) -> None:
    script = Script(Release)
    server = make_server(script=script)
    with running(server, **SCHEDULER) as client:
        old = session_of(client)
        client.release(old.incarnation, "one", 7)
        wait_until(lambda: script.kept)
        server.stop()
        wait_until(lambda: not old.is_open)
        server = make_server(port=server.port)
        new = session_of(client)
        wait_until(lambda: client.num_owed_releases == 0)
        client.release(old.incarnation, "two", 8)
        assert client.num_owed_releases == 0
        new.call(Ping())
        assert server.of_type(Release) == []


def test_the_release_of_a_late_answer_is_owed_like_any_other(make_server: MakeServer) -> None:
    script = Script(Release)
    server = make_server(script=script)
    with running(server, **SCHEDULER) as client:
        session = session_of(client)
        session.submit(lookup("late")).abandon()
        wait_until(lambda: script.kept)
        script.may_answer.set()
        script.kept[0][0].end()
        wait_until(lambda: len(server.of_type(Release)) == 2)
        wait_until(lambda: client.num_owed_releases == 0)


def test_what_is_owed_is_bounded_and_told(caplog: pytest.LogCaptureFixture) -> None:
    releases = Releases(lambda: None, 3, QuietLog(logging.getLogger("antiphon.client")))
    for lease in range(5):
        releases.owe("life", "one", lease)
    assert len(releases) == 3
    assert "3 leases are to be released: the oldest is given up" in caplog.text
    assert ClientOptions.owed_releases_max > 2 * 256, "more than a scheduler side promises ahead"


# ---- a session that was given up -------------------------------------------------------------------------------------


@pytest.fixture
def _short_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.client.client._TICK_S", 0.05)


@pytest.mark.usefixtures("_short_ticks")
def test_what_a_lookup_found_after_the_session_was_given_up_is_released(make_server: MakeServer) -> None:
    script = Script(Lookup)
    server = make_server(script=script)
    with running(server, give_up_after_s=0.2, **SCHEDULER) as client:
        old = session_of(client)
        with pytest.raises(CacheUnavailable, match="not answered"):
            old.call(lookup("late"), timeout_s=10)
        connection, call = script.kept[0]
        wait_until(lambda: connection in server.peers_ended)  # it says at once that nothing more comes
        assert session_of(client) is not old
        assert old.is_read_on
        assert not old.is_disposed
        server.behave(connection, call)
        wait_until(lambda: server.of_type(Release) == [Release("late", 4)])
        wait_until(lambda: client.num_owed_releases == 0)
        connection.end()
        wait_until(lambda: old.is_disposed)


@pytest.mark.usefixtures("_short_ticks")
def test_a_server_that_does_not_hang_up_is_not_waited_for_without_end(make_server: MakeServer) -> None:
    server = make_server(script=Script(Lookup))
    with running(server, give_up_after_s=0.1, read_on_max_s=0.3, **SCHEDULER) as client:
        old = session_of(client)
        old.submit(lookup("late"))
        wait_until(lambda: old.is_read_on)
        wait_until(lambda: old.is_disposed)
        assert not old.is_read_on


@pytest.mark.usefixtures("_short_ticks")
def test_nonsense_ends_the_reading(make_server: MakeServer) -> None:
    script = Script(Lookup)
    server = make_server(script=script)
    with running(server, give_up_after_s=0.1, **SCHEDULER) as client:
        old = session_of(client)
        old.submit(lookup("late"))
        wait_until(lambda: old.is_read_on)
        script.kept[0][0].send(b"\xff" * 64)
        wait_until(lambda: old.is_disposed)
        assert session_of(client).is_open


@pytest.mark.usefixtures("_short_ticks")
def test_who_maps_the_arena_does_not_say_that_it_is_done_with_it(make_server: MakeServer) -> None:
    script = Script(Lookup)
    server = make_server(script=script)
    with running(server, give_up_after_s=0.1, drain_quiet_s=30.0) as client:
        old = session_of(client)
        old.submit(lookup("late"))
        wait_until(lambda: not old.is_open)
        assert session_of(client) is not old
        assert not old.is_read_on
        assert script.kept[0][0] not in server.peers_ended


@pytest.mark.usefixtures("_short_ticks")
def test_without_a_lookup_there_is_nothing_to_read_on_for(make_server: MakeServer) -> None:
    server = make_server(script=Script(Release))
    with running(server, give_up_after_s=0.1, **SCHEDULER) as client:
        old = session_of(client)
        old.submit(Release("one", 7))
        wait_until(lambda: old.is_disposed)
