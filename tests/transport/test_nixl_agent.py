"""The agent's thread against a NIXL of our own making, which hangs and fails when it is told to."""

from __future__ import annotations

import itertools
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from antiphon.core.errors import PeerTimeout, PeerUnavailable
from antiphon.transport import nixl_agent
from antiphon.transport.nixl_agent import NixlAgent, RemoteMemory
from tests.cache_server.world import wait_for

BASE, SIZE = 1 << 20, 1 << 16
ONE, TWO = (RemoteMemory(name, name.encode(), 4096) for name in ("one", "two"))


def within(seconds: float) -> Callable[[], float]:
    deadline_s = time.monotonic() + seconds
    return lambda: deadline_s


class FakeNixl:
    """One agent: what was called, by which thread, and in which state transfers are."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self.name = name
        self.config = config
        self.calls: list[tuple[str, Any]] = []
        self.threads: set[int] = set()
        self.state: dict[str, str | Exception] = {}
        self.num_polls = 0
        self.is_busy = threading.Event()
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    def _said(self, verb: str, value: Any = None) -> None:
        self.threads.add(threading.get_ident())
        self.calls.append((verb, value))

    def register_memory(self, regions: Any, kind: str) -> object:
        self._said("register", (regions, kind))
        return object()

    def get_agent_metadata(self) -> bytes:
        return b"mine"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._said("add", metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self._said("remove", name)

    def get_xfer_descs(self, regions: Any, kind: str) -> Any:
        return regions

    def initialize_xfer(self, verb: str, here: Any, there: Any, name: str) -> str:
        self._said("begin", (verb, here, there, name))
        return name

    def _now(self, name: str) -> str:
        state = self.state.get(name, "DONE")
        if isinstance(state, Exception):
            raise state
        return state

    def transfer(self, handle: str) -> str:
        self.is_busy.set()
        self._may_go_on.wait(10.0)
        return self._now(handle)

    def check_xfer_state(self, handle: str) -> str:
        self.threads.add(threading.get_ident())
        return self._now(handle)

    def release_xfer_handle(self, handle: str) -> None:
        self._said("release", handle)

    def get_new_notifs(self) -> None:
        self.num_polls += 1

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Transfers begin, and keep their thread, until the end of this."""
        self._may_go_on.clear()
        try:
            yield
        finally:
            self._may_go_on.set()

    def verbs(self, *wanted: str) -> list[tuple[str, Any]]:
        return [(verb, value) for verb, value in list(self.calls) if verb in wanted]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeNixl]:
    made: list[FakeNixl] = []
    api = types.ModuleType("nixl._api")

    def agent(name: str, config: dict[str, Any]) -> FakeNixl:
        made.append(FakeNixl(name, config))
        return made[-1]

    api.nixl_agent = agent  # type: ignore[attr-defined]
    api.nixl_agent_config = lambda **values: values  # type: ignore[attr-defined]
    api.nixl_thread_sync_t = types.SimpleNamespace(NIXL_THREAD_SYNC_STRICT="strict")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nixl", types.ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    monkeypatch.setattr(nixl_agent, "GRACE_S", 0.05)
    monkeypatch.setattr(nixl_agent, "QUARANTINE_S", 0.1)
    return made


@pytest.fixture
def agent(fakes: list[FakeNixl]) -> Iterator[NixlAgent]:
    started = NixlAgent.start(BASE, SIZE)
    yield started
    started.close()


def test_it_is_strict_without_a_progress_thread_and_new_each_time(agent: NixlAgent, fakes: list[FakeNixl]) -> None:
    other = NixlAgent.start(BASE, SIZE)
    assert fakes[0].config == {"enable_prog_thread": False, "sync_mode": "strict", "backends": ["UCX"]}
    assert fakes[0].name != fakes[1].name
    assert agent.metadata == b"mine"
    assert other.close()
    with pytest.raises(PeerUnavailable, match="closed"):
        other.read(ONE, 4096, BASE, 64)


def test_reads_end_and_one_thread_does_it_all(agent: NixlAgent, fakes: list[FakeNixl]) -> None:
    for number in range(3):
        reading = agent.read(ONE, 8192, BASE + 64 * number, 64)
        reading.wait(within(5.0))
        reading.settle()
    assert fakes[0].verbs("add") == [("add", "one")], "a peer is added once"
    assert fakes[0].verbs("begin")[0] == ("begin", ("READ", [(BASE, 64, 0)], [(8192, 64, 0)], "one"))
    wait_for(lambda: len(fakes[0].verbs("release")) == 3, "the transfers are tidied up")
    assert fakes[0].threads == {agent._thread.ident}
    assert agent.counts["bytes"] == 192


def test_an_error_ends_the_read_and_removes_the_peer(agent: NixlAgent, fakes: list[FakeNixl]) -> None:
    fakes[0].state["one"] = RuntimeError("remote disconnect")
    with pytest.raises(PeerUnavailable, match="remote disconnect"):
        agent.read(ONE, 4096, BASE, 64).wait(within(5.0))
    assert fakes[0].verbs("release", "remove") == [("release", "one"), ("remove", "one")]
    fakes[0].state["one"] = "DONE"
    agent.read(ONE, 4096, BASE, 64).wait(within(5.0))
    assert len(fakes[0].verbs("add")) == 2, "it is added anew"


def test_a_peer_that_hangs_is_torn_down_and_its_target_is_quiet_before_it_is_given_back(
    agent: NixlAgent, fakes: list[FakeNixl]
) -> None:
    fakes[0].state["one"] = "PROC"
    first, second = agent.read(ONE, 4096, BASE, 64), agent.read(ONE, 4096, BASE + 64, 64)
    with pytest.raises(PeerTimeout):
        first.wait(within(0.02))
    began_s = time.monotonic()
    agent.expire(first)
    agent.read(TWO, 4096, BASE + 128, 64).wait(within(5.0))  # others go on meanwhile
    first.settle()
    assert time.monotonic() - began_s >= 0.15, "the target was given back at once"
    second.settle()
    ended = [each for each in fakes[0].verbs("release", "remove") if each[1] == "one"]
    num_transfers = len([each for each in fakes[0].verbs("begin") if each[1][3] == "one"])
    assert ended == [("release", "one")] * num_transfers + [("remove", "one")], "a peer is removed after its transfers"
    with pytest.raises(PeerTimeout):
        second.wait(within(5.0))
    assert agent.counts["quarantined"] == 2


def test_reads_that_wait_go_together_as_far_as_they_may(
    agent: NixlAgent, fakes: list[FakeNixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "MERGED_BYTES", 128)
    with fakes[0].busy():
        first = agent.read(TWO, 4096, BASE, 64)
        assert fakes[0].is_busy.wait(5.0)
        many = [
            agent.read(remote, 4096 + 64 * at, BASE + 64 * at, 64) for at, remote in enumerate((ONE, ONE, ONE, TWO))
        ]
        given_up = agent.read(ONE, 4096, BASE + 1024, 64)
        agent.expire(given_up)
    for reading in (first, *many):
        reading.wait(within(5.0))
    with pytest.raises(PeerTimeout, match="given up"):
        given_up.wait(within(5.0))
    begun = [(len(here), name) for _, (_, here, _, name) in fakes[0].verbs("begin")]
    assert begun == [(1, "two"), (2, "one"), (1, "one"), (1, "two")]
    assert fakes[0].verbs("begin")[1][1][1:3] == ([(BASE, 64, 0), (BASE + 64, 64, 0)], [(4096, 64, 0), (4160, 64, 0)])
    assert agent.counts["reads"] == 5
    assert agent.counts["bytes"] == 320


def test_an_error_of_a_transfer_is_one_of_all_its_reads(agent: NixlAgent, fakes: list[FakeNixl]) -> None:
    fakes[0].state["one"] = RuntimeError("remote disconnect")
    with fakes[0].busy():
        first = agent.read(TWO, 4096, BASE, 64)
        assert fakes[0].is_busy.wait(5.0)
        many = [agent.read(ONE, 4096, BASE + 64 * at, 64) for at in range(3)]
    first.wait(within(5.0))
    for reading in many:
        with pytest.raises(PeerUnavailable, match="remote disconnect"):
            reading.wait(within(5.0))
    assert agent.counts["failed"] == 3


@pytest.fixture
def numbered(fakes: list[FakeNixl], agent: NixlAgent) -> FakeNixl:
    """The agent's NIXL, whose transfers have handles of their own: ``one-0``, ``one-1`` and so on."""
    fake, numbers = fakes[0], itertools.count()

    def initialize(verb: str, here: Any, there: Any, name: str) -> str:
        handle = f"{name}-{next(numbers)}"
        fake._said("begin", handle)
        return handle

    fake.initialize_xfer = initialize  # type: ignore[method-assign]
    return fake


def test_a_transfer_that_failed_is_released_before_its_target_is_given_back(
    agent: NixlAgent, numbered: FakeNixl
) -> None:
    """Also where another transfer of that peer is under way, which keeps the peer from being removed."""
    numbered.state.update({"one-0": "PROC", "one-1": "PROC"})
    first = agent.read(ONE, 4096, BASE, 64)
    wait_for(lambda: ("begin", "one-0") in numbered.calls, "the first transfer")
    second = agent.read(ONE, 4160, BASE + 64, 64)
    wait_for(lambda: ("begin", "one-1") in numbered.calls, "the second transfer")
    was_given_back: dict[str, bool] = {}
    release = numbered.release_xfer_handle

    def releasing(handle: str) -> None:
        was_given_back[handle] = first._settled.is_set()
        release(handle)

    numbered.release_xfer_handle = releasing  # type: ignore[method-assign]
    numbered.state["one-0"] = RuntimeError("remote disconnect")
    with pytest.raises(PeerUnavailable, match="remote disconnect"):
        first.wait(within(5.0))
    first.settle()
    wait_for(lambda: "one-0" in was_given_back, "the release")
    assert was_given_back == {"one-0": False}
    numbered.state["one-1"] = "DONE"
    second.wait(within(5.0))
    wait_for(lambda: ("remove", "one") in numbered.calls, "the peer is removed")


@pytest.mark.parametrize("when", ["as it begins", "later"])
def test_where_one_read_of_several_failed_the_targets_are_quiet_before_they_are_given_back(
    agent: NixlAgent, numbered: FakeNixl, when: str
) -> None:
    """NIXL says so of the first that fails, while others of the transfer may still write."""
    numbered.state.update({"one-0": "PROC", "one-2": "PROC"})
    other = agent.read(ONE, 4096, BASE + 1024, 64)
    wait_for(lambda: ("begin", "one-0") in numbered.calls, "a transfer of the same peer")
    error = RuntimeError("remote disconnect")
    if when == "as it begins":
        numbered.state["one-2"] = error
    with numbered.busy():
        numbered.is_busy.clear()
        agent.read(TWO, 4096, BASE, 64)
        assert numbered.is_busy.wait(5.0)
        many = [agent.read(ONE, 4096 + 64 * at, BASE + 64 * at, 64) for at in range(3)]
    wait_for(lambda: ("begin", "one-2") in numbered.calls, "the transfer of several reads")
    began_s = time.monotonic()
    numbered.state["one-2"] = error
    for reading in (*many, other):
        with pytest.raises(PeerUnavailable, match="remote disconnect"):
            reading.wait(within(5.0))
    if when == "later":
        assert not many[0]._settled.is_set(), "a target was given back at once"
    for reading in (*many, other):
        reading.settle()
    if when == "later":
        assert time.monotonic() - began_s >= nixl_agent.QUARANTINE_S
    ended = [each for each in numbered.verbs("release", "remove") if not each[1].startswith("two")]
    assert sorted(ended[:2]) == [("release", "one-0"), ("release", "one-2")]
    assert ended[2:] == [("remove", "one")], "a peer is removed after its transfers"
    with pytest.raises(PeerUnavailable, match="remote disconnect"):
        other.wait(within(5.0))
    assert agent.counts["failed"] == 3
    assert agent.counts["quarantined"] == 4
    agent.read(ONE, 4096, BASE, 64).wait(within(5.0))  # it is added anew


def test_reads_that_are_not_over_are_bounded_and_each_can_be_given_up(
    agent: NixlAgent, fakes: list[FakeNixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl_agent, "READS_MAX", 3)
    monkeypatch.setattr(nixl_agent, "ORDERS_MAX", 3)
    fakes[0].state["one"] = "PROC"
    with fakes[0].busy():
        many = [agent.read(ONE, 4096, BASE, 64)]
        assert fakes[0].is_busy.wait(5.0)
        many += [agent.read(ONE, 4096 + 64 * at, BASE + 64 * at, 64) for at in (1, 2)]
        with pytest.raises(PeerUnavailable, match="not over"):
            agent.read(TWO, 4096, BASE, 64)
        agent.forget("two")
        with pytest.raises(PeerUnavailable, match="orders wait"):
            agent.forget("three")
        for _ in range(2):
            for reading in many:
                agent.expire(reading)
        assert agent._orders.qsize() <= 6, "an order is not doubled"
    for reading in many:
        reading.settle()
    assert agent.counts["expired"] == 3
    agent.read(TWO, 4096, BASE, 64).wait(within(5.0))


def test_a_peer_is_polled_until_reads_end_without_it(agent: NixlAgent, fakes: list[FakeNixl]) -> None:
    for number in range(nixl_agent.ALONE_MIN):
        assert agent.needs_polls("one"), number
        agent.read(ONE, 4096, BASE, 64).wait(within(5.0))
    assert not agent.needs_polls("one")
    assert agent.needs_polls("two")
    fakes[0].state["one"] = "PROC"
    reading = agent.read(ONE, 4096, BASE, 64)
    wait_for(lambda: agent.needs_polls("one"), "a transfer that takes polls")
    fakes[0].state["one"] = "DONE"
    reading.wait(within(5.0))


def test_a_read_that_comes_late_ends_at_once(agent: NixlAgent, fakes: list[FakeNixl]) -> None:
    fakes[0].state["one"] = "PROC"
    reading = agent.read(ONE, 4096, BASE, 64)
    with pytest.raises(PeerTimeout):
        reading.wait(within(0.02))
    agent.expire(reading)
    fakes[0].state["one"] = "DONE"
    reading.settle()
    assert not fakes[0].verbs("remove")
    assert agent.counts["quarantined"] == 0


def test_closing_ends_what_is_under_way(agent: NixlAgent, fakes: list[FakeNixl]) -> None:
    fakes[0].state["one"] = "PROC"
    reading = agent.read(ONE, 4096, BASE, 64)
    assert agent.close()
    reading.settle()
    with pytest.raises(PeerUnavailable, match="closed"):
        reading.wait(within(1.0))
    with pytest.raises(PeerUnavailable, match="closed"):
        agent.expire(reading)


def test_a_read_cannot_be_given_up_when_the_agent_is_closed_alone_and_ends_with_the_agent(
    agent: NixlAgent, fakes: list[FakeNixl], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its thread is busy for longer than the close waits for it."""
    monkeypatch.setattr(nixl_agent, "CLOSE_TIMEOUT_S", 0.05)
    monkeypatch.setattr(nixl_agent, "MERGED_BYTES", 64)
    may_end = threading.Semaphore(0)

    def transfer(handle: str) -> str:
        assert may_end.acquire(timeout=10.0)
        return "DONE"

    fakes[0].transfer = transfer  # type: ignore[method-assign]
    first, *readings = [agent.read(ONE, 4096, BASE + 64 * at, 64) for at in range(3)]
    may_end.release()
    first.wait(within(5.0))
    wait_for(lambda: list(agent._waiting) == readings[1:], "one that is under way, and one that waits")
    readings.append(agent.read(ONE, 4096, BASE + 192, 64))
    agent.expire(readings[-1])
    assert not agent.close()
    for reading in readings:
        with pytest.raises(PeerUnavailable, match="closed"):
            agent.expire(reading)
        assert not reading._settled.is_set(), "its target is still written to"
    may_end.release()
    for reading in readings:
        assert reading._settled.wait(5.0), "nobody ends it"


def test_without_nixl_there_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl._api", None)
    with pytest.raises(PeerUnavailable, match="NIXL cannot be used") as caught:
        NixlAgent.start(BASE, SIZE)
    assert "TCP" in (caught.value.remedy or "")
