"""The keeper of Mooncake's child: it goes on when a child cannot be started, and calls say why none runs.

Children are stand-ins, and no master runs. Out of scope: the store itself, and children that die or hang
(test_mooncake_tier.py).
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.errors import AntiphonError, ConfigError, TierUnavailable
from antiphon.storage import mooncake_tier
from antiphon.storage.mooncake_loader import free_port
from antiphon.storage.mooncake_tier import MooncakeTier, MooncakeTierOptions, start_pause_s

OTHER_MACHINE = "203.0.113.7"
"""Of the addresses for documentation: no machine has it."""
TIMEOUT_S = 20.0
"""Of a call. A test that waits for it has failed."""


class FakeChild:
    """A child that is set up and answers everything with 0."""

    def __init__(self) -> None:
        self.is_dead = False
        self.ready = answered(1)

    def send(self, operation: int, keys: Sequence[str], slot: int = 0, num_bytes: int = 0) -> Future[list[int]]:
        return answered(len(keys))

    def late_s(self) -> float:
        return 0.0

    def end(self) -> None:
        self.is_dead = True


class Starts:
    """Starts of a child: ``errors`` one after the other, the last for ever, until ``heal``."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_tries = 0
        self.is_healed = threading.Event()
        self.children: list[FakeChild] = []

    def __call__(self, *_: object) -> FakeChild:
        self.num_tries += 1
        if not self.is_healed.is_set():
            raise self.errors.pop(0) if len(self.errors) > 1 else self.errors[0]
        self.children.append(FakeChild())
        return self.children[-1]


def answered(num_codes: int) -> Future[list[int]]:
    future: Future[list[int]] = Future()
    future.set_result([0] * num_codes)
    return future


def options_of(local_host: str = "127.0.0.1") -> MooncakeTierOptions:
    return MooncakeTierOptions("127.0.0.1:1", local_host=local_host, timeout_s=TIMEOUT_S, num_threads=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_tier, "require_mooncake", lambda: None)
    monkeypatch.setattr(mooncake_tier, "RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(mooncake_tier, "START_PAUSE_MAX_S", 0.02)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Starts], MooncakeTier]]:
    stores: list[MooncakeTier] = []

    def open_store(starts: Starts) -> MooncakeTier:
        monkeypatch.setattr(mooncake_tier, "_Child", starts)
        stores.append(MooncakeTier("mooncake", options_of()))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end_s
        threading.Event().wait(0.005)


def reason_of(store: MooncakeTier) -> str:
    """Why a probe fails, which it does at once."""
    began_s = time.monotonic()
    with pytest.raises(TierUnavailable) as caught:
        store.probe()
    assert time.monotonic() - began_s < TIMEOUT_S / 2
    return caught.value.message


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address"), "Cannot assign requested address"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"), "Resource temporarily unavailable"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "Cannot allocate memory"),
        (RuntimeError("can't start new thread"), "can't start new thread"),
        (ConfigError("local_host x is no address", field="local_host"), "local_host x is no address"),
    ],
)
def test_a_child_that_cannot_be_started_is_tried_again_and_the_reason_is_said(
    error: Exception, says: str, opened: Callable[[Starts], MooncakeTier]
) -> None:
    starts = Starts(error)
    store = opened(starts)
    assert says in reason_of(store)
    until(lambda: starts.num_tries > 3)
    assert says in reason_of(store)
    starts.is_healed.set()
    until(lambda: bool(starts.children))
    store.probe()


def test_so_is_one_that_cannot_be_started_again(opened: Callable[[Starts], MooncakeTier]) -> None:
    starts = Starts(OSError(errno.ENOMEM, "Cannot allocate memory"))
    starts.is_healed.set()
    store = opened(starts)
    store.probe()
    starts.is_healed.clear()
    starts.children[0].is_dead = True
    until(lambda: starts.num_tries > 3)
    assert "Cannot allocate memory" in reason_of(store)
    starts.is_healed.set()
    until(lambda: len(starts.children) == 2)
    store.probe()


def test_a_call_that_waits_for_the_first_start_is_told_when_it_fails(
    opened: Callable[[Starts], MooncakeTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_called, is_waiting = threading.Event(), threading.Event()

    class Slow(Starts):
        def __call__(self, *_: object) -> FakeChild:
            is_called.set()
            assert is_waiting.wait(TIMEOUT_S)
            return super().__call__()

    store = opened(Slow(OSError(errno.ENOMEM, "Cannot allocate memory")))
    assert is_called.wait(TIMEOUT_S)
    wait = store._changed.wait

    def wait_for_start(timeout_s: float | None = None) -> bool:
        is_waiting.set()
        return wait(timeout_s)

    monkeypatch.setattr(store._changed, "wait", wait_for_start)
    assert "Cannot allocate memory" in reason_of(store)


def test_the_latest_reason_is_said(opened: Callable[[Starts], MooncakeTier]) -> None:
    starts = Starts(OSError(errno.ENOMEM, "Cannot allocate memory"), OSError(errno.EMFILE, "Too many open files"))
    store = opened(starts)
    until(lambda: starts.num_tries > 2)
    assert "Too many open files" in reason_of(store)


def test_it_is_closed_at_once_while_no_child_can_be_started(
    opened: Callable[[Starts], MooncakeTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_tier, "RESTART_PAUSE_S", 600.0)
    monkeypatch.setattr(mooncake_tier, "START_PAUSE_MAX_S", 600.0)
    store = opened(Starts(OSError(errno.ENOMEM, "Cannot allocate memory")))
    assert "Cannot allocate memory" in reason_of(store)
    began_s = time.monotonic()
    store.close()
    assert time.monotonic() - began_s < TIMEOUT_S
    assert "is closed" in reason_of(store)


def test_pauses_grow_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_tier, "RESTART_PAUSE_S", 1.0)
    monkeypatch.setattr(mooncake_tier, "START_PAUSE_MAX_S", 10.0)
    assert [start_pause_s(number) for number in (0, 1, 2, 3, 4, 5, 10_000)] == [1.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


# ---- a start that fails half-way leaves nothing ----------------------------------------------------------------------


def num_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_without_a_process_no_socket_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    kept = []
    before = num_files()
    for _ in range(10):
        with pytest.raises(BlockingIOError) as caught:
            mooncake_tier._Child(options_of(), "P2PHANDSHAKE", 0, 1)
        kept.append(caught)  # the traceback holds what was made
    assert num_files() == before


def test_without_a_thread_no_process_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[subprocess.Popen[bytes]] = []

    class Sleeper(subprocess.Popen[bytes]):
        def __init__(self, argv: list[str], **options: Any) -> None:
            super().__init__(["sleep", "600"], **options)
            made.append(self)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(subprocess, "Popen", Sleeper)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    memory_fd = os.memfd_create("test")
    try:
        with pytest.raises(RuntimeError):
            mooncake_tier._Child(options_of(), "P2PHANDSHAKE", memory_fd, 1)
        assert [process.returncode for process in made] == [-9]
    finally:
        for process in made:
            process.kill()
            process.wait()
        os.close(memory_fd)


# ---- what is known beforehand ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", [OTHER_MACHINE, "no-such-name.invalid", "ü..b", "x\0y", "2001:db8::1", "0.0.0.0", "::"]
)
def test_an_address_of_no_machine_or_another_one_is_refused(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if "invalid" in host:  # a machine without a name server says something else
        monkeypatch.setattr(socket.socket, "bind", look_up)
    for call in (lambda: free_port(host), lambda: MooncakeTier("mooncake", options_of(host))):
        with pytest.raises(ConfigError) as caught:
            call()
        error: AntiphonError = caught.value
        assert error.field == "local_host"
        assert error.message.startswith(f"local_host {host!r} ")
        assert error.remedy is not None
        assert "address of this machine" in error.remedy
    assert not [each for each in threading.enumerate() if each.name == "antiphon-tier-mooncake"]


@pytest.mark.parametrize(
    "error",
    [
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError(errno.ENOBUFS, "No buffer space available"),
    ],
)
def test_what_passes_refuses_no_start(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that starts before its name server goes on, and says what is missing."""

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(socket.socket, "bind", fail)
        with pytest.raises(TierUnavailable, match=f"local_host 'node-1'.*{error.strerror}"):
            free_port("node-1")
        store = MooncakeTier("mooncake", options_of("node-1"))
        assert str(error.strerror) in reason_of(store)
        starts = Starts(error)
        starts.is_healed.set()
        failing.setattr(mooncake_tier, "_Child", starts)
        until(lambda: bool(starts.children))
    store.probe()
    store.close()


def test_an_address_of_this_machine_has_a_port() -> None:
    assert 0 < free_port("127.0.0.1") < 65536
    assert 0 < free_port("localhost") < 65536
