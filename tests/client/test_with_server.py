"""Clients of a real cache server: bytes through the arena, a server that is killed, stopped and started again."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.client import CacheClient, Session
from antiphon.core.errors import CacheUnavailable, CallTimeout
from antiphon.protocol import cache as protocol
from antiphon.protocol.cache import Commit, Committed, Found, Lookup, Noted, Ping, Release, Reserve, Reserved
from tests.client.fake_server import LAYOUT, running, wait_until
from tests.client.test_calls import session_of

pytestmark = pytest.mark.process

CHUNK_BYTES = LAYOUT.chunk_bytes


class RealServer:
    """``antiphon cache-server`` as a process that can be killed and started again on its port."""

    def __init__(self, port: int, folder: Path, die_with_parent: Callable[[], None]) -> None:
        self.port = port
        self._folder = folder
        self._die_with_parent = die_with_parent
        self.start()

    def start(self) -> None:
        flags = {"port": self.port, "http-port": 0, "l1-size-gb": 0.03, "instance-id": "real"}
        flags |= {"runtime-dir": self._folder}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "antiphon", "cache-server", *(f"--{k}={v}" for k, v in flags.items())],
            preexec_fn=self._die_with_parent,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if "ready:" in line:
                break
        # Nobody reads the rest, which is short.

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        self.process.wait(10)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def real(free_port: int, tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[RealServer]:
    server = RealServer(free_port, tmp_path, die_with_parent)
    yield server
    with contextlib.suppress(ProcessLookupError):
        server.process.send_signal(signal.SIGCONT)
    if server.process.poll() is None:
        server.kill()


class Prompt:
    """Keys and random bytes of some chunks."""

    def __init__(self, num_chunks: int) -> None:
        self.namespace = secrets.token_bytes(32)
        self.keys = [secrets.token_bytes(32) for _ in range(num_chunks)]
        self.bytes = [secrets.token_bytes(CHUNK_BYTES) for _ in range(num_chunks)]

    def reserve(self) -> Reserve:
        return Reserve(self.namespace, "t", None, b"".join(self.keys))

    def lookup(self, request: str) -> Lookup:
        return Lookup(request, self.namespace, "t", b"".join(self.keys))


def store(session: Session, prompt: Prompt) -> None:
    reserved = session.call(prompt.reserve(), timeout_s=10)
    assert isinstance(reserved, Reserved)
    assert set(reserved.verdicts) == {"write"}, reserved
    assert session.arena is not None
    for grant in reserved.grants:
        assert grant.slabs == (0, 1)
        session.address_of(grant.region)  # the server's regions are inside the arena
        session.arena.view(grant.region.offset, CHUNK_BYTES)[:] = prompt.bytes[grant.index]
    committed = session.call(Commit(tuple(grant.region for grant in reserved.grants)), timeout_s=10)
    assert isinstance(committed, Committed)
    assert set(committed.outcomes) == {"readable"}


def load(session: Session, prompt: Prompt, request: str) -> tuple[Found, list[bytes]]:
    found = session.call(prompt.lookup(request), timeout_s=10)
    assert isinstance(found, Found)
    return found, read(session, found)


def read(session: Session, found: Found) -> list[bytes]:
    assert session.arena is not None
    return [bytes(session.arena.view(region.offset, CHUNK_BYTES)) for region in found.regions]


def populated(session: Session) -> Session:
    """Waits until the server has memory to give."""

    def has_room() -> bool:
        probe = Prompt(1)
        reserved = session.call(probe.reserve(), timeout_s=10)
        assert isinstance(reserved, Reserved)
        if reserved.grants:
            session.call(protocol.Abort(tuple(grant.region for grant in reserved.grants)))
        return bool(reserved.grants)

    wait_until(has_room, 20)
    return session


def test_what_one_stores_another_loads(real: RealServer) -> None:
    with running(real.port, engine="p") as p, running(real.port, engine="d") as d:
        writer, reader = populated(session_of(p)), session_of(d)
        prompts = [Prompt(num_chunks) for num_chunks in (1, 3, 8)]
        for number, prompt in enumerate(prompts):
            store(writer, prompt)
            found, data = load(reader, prompt, f"r{number}")
            assert data == prompt.bytes
            assert found.num_tokens == 256 * len(prompt.keys)
            assert found.lease is not None
            reader.call(Release(f"r{number}", found.lease))
        found, data = load(reader, Prompt(2), "miss")
        assert (found.lease, data) == (None, [])


def test_a_late_lookup_is_released_by_the_client(real: RealServer) -> None:
    with running(real.port) as client:
        session = populated(session_of(client))
        prompt = Prompt(2)
        store(session, prompt)
        real.process.send_signal(signal.SIGSTOP)
        pending = session.submit(prompt.lookup("late"))
        with pytest.raises(CallTimeout):
            session.call(Ping(), timeout_s=0.1)
        assert not session.is_responsive
        assert not pending.is_done
        pending.abandon()
        real.process.send_signal(signal.SIGCONT)
        wait_until(lambda: session.num_unanswered == 0)
        assert session.is_responsive
        # Nothing is leased any more: clearing leaves no byte held.
        cleared = session.call(protocol.Clear())
        assert isinstance(cleared, protocol.Cleared)
        assert (cleared.num_chunks, cleared.held_bytes) == (2, 0)


def test_a_scheduler_that_gives_a_stopped_server_up_leaves_no_lease(
    real: RealServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker stays attached, so that what is leased to nobody would last as long as the engine."""
    monkeypatch.setattr("antiphon.client.client._TICK_S", 0.05)
    scheduler_options = {"role": "scheduler", "slabs": (), "needs_arena": False, "give_up_after_s": 0.3}
    with running(real.port) as worker, running(real.port, **scheduler_options) as scheduler:
        prompt = Prompt(2)
        store(populated(session_of(worker)), prompt)
        first = session_of(scheduler)
        early = first.call(prompt.lookup("early"))
        assert isinstance(early, Found)
        assert early.lease is not None
        real.process.send_signal(signal.SIGSTOP)
        late = [first.submit(prompt.lookup(f"late {number}")) for number in range(40)]
        scheduler.release(first.incarnation, "early", early.lease)
        # The session's end is one step of its thread, which this one may look into the middle of.
        wait_until(lambda: all(pending.has_failed for pending in late) and first.is_read_on)
        assert not first.is_open
        real.process.send_signal(signal.SIGCONT)
        assert scheduler.wait_connected(5)
        wait_until(lambda: first.is_disposed and scheduler.num_owed_releases == 0)
        assert session_of(scheduler).incarnation == first.incarnation
        cleared = session_of(worker).call(protocol.Clear())
        assert isinstance(cleared, protocol.Cleared)
        assert (cleared.num_chunks, cleared.held_bytes) == (2, 0)


def test_a_server_killed_under_load(real: RealServer) -> None:
    """Calls fail typed and at once, what was leased is readable while it is held, and the server's return is used."""
    with running(real.port, engine="p", drain_quiet_s=0.1) as p, running(real.port, engine="d", drain_quiet_s=0.1) as d:
        writer, reader = populated(session_of(p)), session_of(d)
        prompt = Prompt(4)
        store(writer, prompt)
        found, _ = load(reader, prompt, "held")
        assert reader.hold()
        slowest_s, unexpected, stop = [0.0], [], threading.Event()

        def work(client: CacheClient) -> None:
            while not stop.is_set():
                session = client.session
                if session is None:
                    time.sleep(0.001)
                    continue
                began_s = time.monotonic()
                try:
                    session.call(Prompt(1).lookup("load"), timeout_s=5)
                except CacheUnavailable:
                    pass
                except Exception as error:
                    unexpected.append(error)
                slowest_s[0] = max(slowest_s[0], time.monotonic() - began_s)

        threads = [threading.Thread(target=work, args=(client,)) for client in (p, d, p, d)]
        for thread in threads:
            thread.start()
        real.kill()
        wait_until(lambda: p.session is None and d.session is None, 1)
        assert read(reader, found) == prompt.bytes
        time.sleep(0.3)  # beyond the quiet time, with the server gone
        assert read(reader, found) == prompt.bytes
        real.start()
        assert p.wait_connected(1)
        assert d.wait_connected(1)
        stop.set()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert unexpected == []
        assert slowest_s[0] < 2
        assert read(reader, found) == prompt.bytes
        new = populated(session_of(p))
        assert new.incarnation != writer.incarnation
        store(new, prompt)
        assert load(session_of(d), prompt, "again")[1] == prompt.bytes
        reader.unhold()
        wait_until(lambda: reader.is_disposed)


def test_a_stopped_server_is_one_more_restart(real: RealServer) -> None:
    with running(real.port) as client:
        session = session_of(client)
        real.kill(signal.SIGTERM)
        assert real.process.returncode == 0
        wait_until(lambda: not session.is_open)
        real.start()
        assert client.wait_connected(1)
        assert session_of(client).call(Ping()) == Noted()


def test_another_chunk_size_is_refused_by_name(real: RealServer) -> None:
    with running(real.port, chunk_size_tokens=128) as client:
        wait_until(lambda: client.state.name == "refused")
        assert "--chunk-size" in str(client.state)


def test_the_server_sees_this_process(real: RealServer) -> None:
    with running(real.port) as client:
        session = session_of(client)
        answer = session.call(protocol.EngineNote("passed", f"pid {os.getpid()}"))
        assert answer == Noted()
