"""A lookup of which the server says first that it waits for tiers: its answer may take, and nothing else is held up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from antiphon.core.errors import CacheUnavailable
from antiphon.protocol.cache import Call, Found, Lookup, Onboarding, Ping, Region, Release
from tests.client.fake_server import KEY, Connection, FakeServer, running, wait_until
from tests.client.test_calls import session_of

MakeServer = Callable[..., FakeServer]

FOUND = Found(9, (Region(0, 4096, 1), Region(4096, 4096, 2)), 512, 0, (("l2", (1,)),))


def waiting_lookup(onboard_s: float = 5.0) -> Lookup:
    return Lookup("r", bytes(32), "t", KEY * 2, onboard_s)


class Script:
    """Says of each lookup that it waits; the last answer is the test's."""

    def __init__(self) -> None:
        self.held: list[tuple[Connection, int]] = []

    def __call__(self, connection: Connection, call: Call) -> bool:
        if not isinstance(call.body, Lookup):
            return False
        self.held.append((connection, call.id))
        connection.answer(call.id, Onboarding(256, 512, 3.0))
        return True

    def answer(self, found: Found = FOUND) -> None:
        connection, call_id = self.held.pop(0)
        connection.answer(call_id, found)


def test_both_answers_reach_the_caller_and_the_server_counts_as_responsive(make_server: MakeServer) -> None:
    script = Script()
    with running(make_server(script=script), unresponsive_after_s=0.0) as client:
        session = session_of(client)
        pending = session.submit(waiting_lookup())
        wait_until(lambda: pending.onboarding is not None or pending.is_done)
        assert pending.onboarding is not None
        assert pending.onboarding[0] == Onboarding(256, 512, 3.0)
        assert not pending.is_done
        assert (session.is_responsive, session.oldest_unanswered_s, session.num_unanswered) == (True, 0.0, 1)
        assert session.call(Ping()) is not None
        script.answer()
        assert pending.wait(5)
        assert pending.result() == FOUND
        assert session.num_unanswered == 0


def test_what_an_abandoned_one_finds_is_given_back(make_server: MakeServer) -> None:
    script = Script()
    server = make_server(script=script)
    with running(server) as client:
        session = session_of(client)
        pending = session.submit(waiting_lookup())
        wait_until(lambda: pending.onboarding is not None or pending.is_done)
        pending.abandon()
        script.answer()
        wait_until(lambda: server.of_type(Release))
        assert server.of_type(Release) == [Release("r", 9)]


def test_the_end_of_the_connection_fails_it(make_server: MakeServer) -> None:
    script = Script()
    with running(make_server(script=script)) as client:
        session = session_of(client)
        pending = session.submit(waiting_lookup())
        wait_until(lambda: pending.onboarding is not None or pending.is_done)
        script.held[0][0].end()
        assert pending.wait(5)
        with pytest.raises(CacheUnavailable):
            pending.result()


def test_a_lookup_that_may_not_wait_ends_the_session_of_who_lets_it(make_server: MakeServer) -> None:
    with running(make_server(script=Script())) as client:
        session = session_of(client)
        pending = session.submit(waiting_lookup(onboard_s=0.0))
        assert pending.wait(5)
        assert session.end_reason is not None
        assert "may" in session.end_reason


def test_sources_of_chunks_that_were_not_found_end_the_session(make_server: MakeServer) -> None:
    script = Script()
    with running(make_server(script=script)) as client:
        session = session_of(client)
        pending = session.submit(waiting_lookup())
        wait_until(lambda: pending.onboarding is not None or pending.is_done)
        script.answer(Found(9, FOUND.regions[:1], 256, 0, (("l2", (1,)),)))
        assert pending.wait(5)
        assert not session.is_open
