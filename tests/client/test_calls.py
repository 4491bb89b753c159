"""Calls on a session: answers by id, hangs, late answers, limits, nonsense, many threads."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable

import pytest

from antiphon.client import CacheClient, Session
from antiphon.core.errors import CacheUnavailable, CallTimeout, LeaseUnknown, ProtocolError
from antiphon.protocol import cache as protocol
from antiphon.protocol.cache import Abort, Call, Failure, Found, LeaseNoted, Lookup, Noted, Ping, Release, Reserved
from tests.client.fake_server import KEY, Connection, FakeServer, lookup, reserve, running, wait_until

MakeServer = Callable[..., FakeServer]


def session_of(client: CacheClient) -> Session:
    assert client.wait_connected(5)
    session = client.session
    assert session is not None
    return session


def test_a_call_is_answered(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        found = session.call(lookup("four", 3))
        assert isinstance(found, Found)
        assert (found.lease, len(found.regions)) == (4, 3)
        pending = session.submit(Ping())
        assert pending.wait(5)
        assert pending.is_done
        assert pending.result() == Noted()
        assert session.num_unanswered == 0


def test_a_failure_is_raised_in_its_class(make_server: MakeServer) -> None:
    def script(connection: Connection, call: Call) -> bool:
        if isinstance(call.body, Release):
            connection.answer(call.id, Failure("lease_unknown", "there is no lease 7"))
            return True
        return False

    with running(make_server(script=script)) as client:
        session = session_of(client)
        with pytest.raises(LeaseUnknown, match="no lease 7"):
            session.call(Release("r", 7))
        assert session.is_open


def test_answers_in_another_order_reach_their_calls(make_server: MakeServer) -> None:
    held: list[Call] = []

    def script(connection: Connection, call: Call) -> bool:
        if not isinstance(call.body, Release):
            return False
        held.append(call)
        if len(held) == 20:
            for each in random.sample(held, len(held)):
                connection.answer(each.id, LeaseNoted(each.body.lease, "ended"))  # type: ignore[union-attr]
        return True

    with running(make_server(script=script)) as client:
        session = session_of(client)
        pendings = [session.submit(Release("r", lease)) for lease in range(20)]
        for lease, pending in enumerate(pendings):
            assert pending.wait(5)
            assert pending.result() == LeaseNoted(lease, "ended")


def test_eight_threads_each_get_their_own_answers(server: FakeServer) -> None:
    wrong: list[object] = []
    with running(server) as client:
        session = session_of(client)

        def run(thread: int) -> None:
            for number in range(200):
                lease = thread * 1000 + number
                answer = session.call(Release("r", lease), timeout_s=30)
                if answer != LeaseNoted(lease, "ended"):
                    wrong.append(answer)

        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert session.is_open
    assert wrong == []
    assert len(server.of_type(Release)) == 1600


def test_the_end_of_the_connection_fails_what_waits(make_server: MakeServer) -> None:
    def script(connection: Connection, call: Call) -> bool:
        if isinstance(call.body, Ping):
            connection.end()
            return True
        return False

    server = make_server(script=script)
    with running(server) as client:
        session = session_of(client)
        began_s = time.monotonic()
        with pytest.raises(CacheUnavailable, match="the server closed it"):
            session.call(Ping(), timeout_s=30)
        assert time.monotonic() - began_s < 1
        assert not session.is_open
        with pytest.raises(CacheUnavailable, match="has ended"):
            session.call(Ping())
        assert session.submit(Ping()).is_done
        wait_until(lambda: client.session not in (None, session))
        assert client.session is not None


def test_a_server_that_hangs_is_noticed_and_heard_again(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        assert session.is_responsive
        server.may_read.clear()
        assert session.is_responsive  # nothing is asked
        pending = session.submit(lookup("hang"))
        assert session.is_responsive
        wait_until(lambda: not session.is_responsive, 1)
        assert not pending.is_done
        assert session.is_open
        with pytest.raises(CallTimeout, match=r"Lookup within 0\.05 s"):
            session.call(lookup("late"), timeout_s=0.05)
        pending.abandon()
        pending.abandon()
        assert not server.of_type(Release)
        server.may_read.set()
        wait_until(lambda: len(server.of_type(Release)) == 2)
        assert {call.request: call.lease for call in server.of_type(Release)} == {"hang": 4, "late": 4}
        wait_until(lambda: session.is_responsive)
        assert session.call(Ping()) == Noted()


def test_a_late_reservation_is_aborted_and_its_caller_told(server: FakeServer) -> None:
    told: list[object] = []
    with running(server) as client:
        session = session_of(client)
        server.may_read.clear()
        pending = session.submit(reserve(2), on_late=told.append)
        pending.abandon()
        server.may_read.set()
        wait_until(lambda: server.of_type(Abort))
        (abort,) = server.of_type(Abort)
        wait_until(lambda: told)
        assert isinstance(told[0], Reserved)
        assert isinstance(abort, Abort)
        assert abort.regions == tuple(grant.region for grant in told[0].grants)


def test_an_answer_that_came_unread_is_given_back(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        unread = session.submit(lookup("unread"))
        read = session.submit(lookup("read"))
        assert unread.wait(5)
        assert read.wait(5)
        read.result()
        read.abandon()
        unread.abandon()
        wait_until(lambda: server.of_type(Release))
        session.call(Ping())
        assert [call.request for call in server.of_type(Release)] == ["unread"]


def test_nothing_is_given_back_for_a_miss(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        server.may_read.clear()
        session.submit(lookup("miss", 0)).abandon()
        server.may_read.set()
        session.call(Ping())
        session.call(Ping())
        assert not server.of_type(Release)


def test_a_failing_late_handler_costs_nothing(server: FakeServer, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("a mistake of the caller")

    with running(server) as client:
        session = session_of(client)
        server.may_read.clear()
        session.submit(lookup(), on_late=fail).abandon()
        server.may_read.set()
        assert session.call(Ping()) == Noted()
    assert "handler of a late answer" in caplog.text


OVERSIZED = (protocol.FRAME_BYTES_MAX + 1).to_bytes(4, "little")
NONSENSE = {
    "no msgpack": b"\x04\x00\x00\x00\xc1\xc1\xc1\xc1",
    "oversized": OVERSIZED,
    "100 MB": (100 << 20).to_bytes(4, "little") + b"x" * 1000,
    "empty": b"\x00\x00\x00\x00",
    "a call, not an answer": protocol.frame(Call(1, Ping())),
    "to nobody": protocol.frame(protocol.Answer(123456, Noted())),
    "unreadable": protocol.frame(protocol.Answer(0, Failure("protocol_error", "a frame is no call"))),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
def test_nonsense_costs_the_session_and_nothing_else(make_server: MakeServer, data: bytes) -> None:
    def script(connection: Connection, call: Call) -> bool:
        if isinstance(call.body, Ping):
            connection.send(data)
            return True
        return False

    server = make_server(script=script)
    with running(server) as client:
        session = session_of(client)
        with pytest.raises(CacheUnavailable, match="garbage was received"):
            session.call(Ping(), timeout_s=10)
        wait_until(lambda: client.session is not None)
        assert client.session is not session
        assert isinstance(session_of(client).call(lookup()), Found)


WRONG_ANSWERS = {
    "another kind": (lookup(), Noted()),
    "more than was asked": (lookup(), Found(1, (protocol.Region(0, 8192, 1),) * 2, 512, 0)),
    "a lease on nothing": (lookup(), Found(1, (), 0, 0)),
    "chunks without a lease": (lookup(), Found(None, (protocol.Region(0, 8192, 1),), 256, 0)),
    "another number of verdicts": (reserve(2), Reserved(("resident",), (), None)),
    "a grant without verdict": (
        reserve(1),
        Reserved(("resident",), (protocol.Grant(0, protocol.Region(0, 8192, 1), (0,)),), None),
    ),
    "another number of outcomes": (protocol.Commit((protocol.Region(0, 8192, 1),)), protocol.Committed(())),
}


@pytest.mark.parametrize(("call", "answer"), WRONG_ANSWERS.values(), ids=WRONG_ANSWERS.keys())
def test_an_answer_that_does_not_fit_costs_the_session(
    make_server: MakeServer, call: protocol.Body, answer: protocol.Answered
) -> None:
    def script(connection: Connection, received: Call) -> bool:
        if received.body != call:
            return False
        connection.answer(received.id, answer)
        return True

    with running(make_server(script=script)) as client:
        session = session_of(client)
        with pytest.raises(CacheUnavailable, match="garbage was received"):
            session.call(call, timeout_s=10)


def test_an_answer_in_pieces_is_one_answer(make_server: MakeServer) -> None:
    def script(connection: Connection, call: Call) -> bool:
        if not isinstance(call.body, Ping):
            return False
        for byte in protocol.frame(protocol.Answer(call.id, Noted())):
            connection.send(bytes([byte]))
        return True

    with running(make_server(script=script)) as client:
        assert session_of(client).call(Ping(), timeout_s=10) == Noted()


def test_a_full_send_buffer_refuses_and_recovers(server: FakeServer) -> None:
    big = lookup("big", 16_384)
    with running(server) as client:
        session = session_of(client)
        server.may_read.clear()
        began_s = time.monotonic()
        pendings = [session.submit(big) for _ in range(20)]
        assert time.monotonic() - began_s < 1  # never blocks
        failed = [pending for pending in pendings if pending.is_done]
        assert 4 <= len(failed) <= 14
        with pytest.raises(CacheUnavailable, match="wait to be sent"):
            failed[-1].result()
        assert session.is_open
        server.may_read.set()
        for pending in pendings:
            assert pending.wait(20)
        assert sum(not pending.has_failed for pending in pendings) == 20 - len(failed)
        assert session.call(Ping(), timeout_s=10) == Noted()


def test_giving_back_does_not_need_room(server: FakeServer) -> None:
    """The server answers what it has read and then takes no more: the undoing is kept beyond the limit."""
    with running(server, send_buffer_bytes=100_000, unanswered_calls_max=50) as client:
        session = session_of(client)
        server.may_read.clear()
        for number in range(50):
            session.submit(lookup(f"r{number}")).abandon()
        assert session.submit(Ping()).has_failed
        server.may_read.set()
        wait_until(lambda: len(server.of_type(Release)) == 50)
        wait_until(lambda: session.num_unanswered == 0)
        assert session.is_open


def test_a_frame_beyond_the_limit_is_a_failed_pending(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        pending = session.submit(lookup("huge", 40_000))
        assert pending.is_done
        with pytest.raises(ProtocolError, match="exceeds the limit"):
            pending.result()
        assert session.call(Ping()) == Noted()


def test_too_many_unanswered_calls_are_refused(server: FakeServer) -> None:
    with running(server, unanswered_calls_max=3) as client:
        session = session_of(client)
        server.may_read.clear()
        pendings = [session.submit(Ping()) for _ in range(4)]
        with pytest.raises(CacheUnavailable, match="3 calls to the cache server are unanswered"):
            pendings[3].result()
        server.may_read.set()
        assert all(pending.wait(5) for pending in pendings)


def test_closing_fails_what_waits(server: FakeServer) -> None:
    with running(server) as client:
        session = session_of(client)
        server.may_read.clear()
        pendings = [session.submit(Ping()) for _ in range(10)]
        waiter_error: list[BaseException] = []

        def wait() -> None:
            try:
                session.call(Ping(), timeout_s=30)
            except CacheUnavailable as error:
                waiter_error.append(error)

        waiter = threading.Thread(target=wait)
        waiter.start()
        wait_until(lambda: session.num_unanswered == 11)
    waiter.join(5)
    assert not waiter.is_alive()
    assert len(waiter_error) == 1
    for pending in pendings:
        with pytest.raises(CacheUnavailable, match="client was closed"):
            pending.result()


def test_a_call_never_answered_ends_the_session_at_last(
    make_server: MakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("antiphon.client.client._TICK_S", 0.05)
    server = make_server(script=lambda _, call: isinstance(call.body, Lookup))
    with running(server, give_up_after_s=0.3) as client:
        session = session_of(client)
        with pytest.raises(CacheUnavailable, match=r"not answered for 0\.3 s"):
            session.call(lookup(), timeout_s=10)
        wait_until(lambda: client.session is not None)


def test_the_sockets_are_buffered_as_the_system_has_it(server: FakeServer) -> None:
    """What the other tests rely on: a socket that nobody reads takes less than the send buffer's limit."""
    with running(server) as client:
        session = session_of(client)
        with socket.fromfd(session.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) < 4 << 20
    assert len(KEY) == protocol.KEY_BYTES
