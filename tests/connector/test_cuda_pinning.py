"""Memory is registered piece by piece, as it is populated or needed, and taken back before it is unmapped."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from antiphon.connector import cuda_pinning
from antiphon.connector.cuda_layout import Span
from antiphon.connector.cuda_pinning import Pinning
from antiphon.storage.arena import ArenaMapping, ArenaOwner
from tests.connector.fake_cuda import FakePinDriver
from tests.connector.test_worker import wait_until

PIECE = 64 << 10
NUM_PIECES = 5
TOTAL = NUM_PIECES * PIECE - 4096


@pytest.fixture
def owner() -> Iterator[ArenaOwner]:
    made = ArenaOwner.create(TOTAL, "fake", "1")
    yield made
    made.close()


@pytest.fixture
def mapping(owner: ArenaOwner) -> ArenaMapping:
    """As a worker maps it."""
    return ArenaMapping.open(owner.fd, "fake", "1")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pinning, "PAUSE_MIN_S", 0.001)


def begun(driver: FakePinDriver) -> Pinning:
    """Of an engine that has started."""
    made = Pinning(driver, PIECE)
    made.begin()
    return made


def test_pieces_follow_the_population(owner: ArenaOwner, mapping: ArenaMapping) -> None:
    driver = FakePinDriver()
    pinning = begun(driver)
    owner.populate(0, 2 * PIECE)
    pinning.add(mapping)
    pinning.add(mapping)  # every connection tells of it
    wait_until(lambda: pinning.num_pinned_bytes == 2 * PIECE)
    assert driver.registered == {mapping.address: PIECE, mapping.address + PIECE: PIECE}
    owner.populate(2 * PIECE, TOTAL - 2 * PIECE)
    wait_until(lambda: pinning.num_pinned_bytes == TOTAL)
    assert [call for call, _ in driver.calls] == ["register"] * NUM_PIECES
    mapping.close()
    wait_until(lambda: not driver.registered)


def test_a_copy_gets_its_pieces_first(mapping: ArenaMapping) -> None:
    driver = FakePinDriver()
    pinning = begun(driver)
    pinning.add(mapping)  # nothing is populated, so that nothing is registered by itself
    span = Span(0, mapping.address + 3 * PIECE - 4096, 8192)
    assert not pinning.is_ready([span])
    assert [part.num_bytes for part in pinning.cut([span])] == [4096, 4096]
    pinning.prepare([span])
    assert set(driver.registered) == {mapping.address + 2 * PIECE, mapping.address + 3 * PIECE}
    assert pinning.is_ready([span])
    foreign = Span(0, mapping.address + TOTAL + (1 << 30), 10)
    assert list(pinning.cut([foreign])) == [foreign]
    pinning.prepare([foreign])
    assert not pinning.is_ready([foreign]), "its copy would keep the step waiting"
    mapping.close()
    wait_until(lambda: not driver.registered)


def test_the_mapping_goes_after_the_last_piece_was_taken_back(
    owner: ArenaOwner, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakePinDriver()
    pinning = begun(driver)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    wait_until(lambda: pinning.num_pinned_bytes == TOTAL)
    order: list[str] = []
    unregister = driver.unregister
    monkeypatch.setattr(driver, "unregister", lambda address: order.append("unregister") or unregister(address))
    inner = mapping.unmap_with

    def noted(unmap: Callable[[], None]) -> None:
        inner(lambda: order.append("unmap") or unmap())

    mapping.unmap_with = noted
    mapping.close()
    wait_until(lambda: order[-1:] == ["unmap"])
    assert order == ["unregister"] * NUM_PIECES + ["unmap"]
    assert not driver.registered


def test_closing_does_not_wait_for_the_driver(owner: ArenaOwner, mapping: ArenaMapping) -> None:
    """An ended session is disposed of by the thread that also serves the next one."""
    driver, may_go = FakePinDriver(), threading.Event()
    register = driver.register
    driver.register = lambda address, size: register(address, size) if may_go.wait(10) else "late"  # type: ignore[method-assign]
    pinning = begun(driver)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    mapping.close()  # while a piece is being registered
    may_go.set()
    wait_until(lambda: ("unregister", mapping._base_address + 4096) in driver.calls and not driver.registered)


def test_a_piece_that_is_refused_is_used_all_the_same(owner: ArenaOwner, mapping: ArenaMapping) -> None:
    driver = FakePinDriver()
    driver.refuses = lambda address: address == mapping.address + PIECE
    pinning = begun(driver)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    span = Span(0, mapping.address + PIECE, 100)
    assert list(pinning.cut([span])) == [span]
    pinning.prepare([span])
    assert not pinning.is_ready([span]), "its copy would keep the step waiting"
    wait_until(lambda: pinning.num_pinned_bytes == TOTAL - PIECE)
    mapping.close()
    wait_until(lambda: not driver.registered)
    assert ("unregister", mapping._base_address + 4096 + PIECE) not in driver.calls


def test_two_lives_of_a_server_are_registered_beside_each_other(owner: ArenaOwner, mapping: ArenaMapping) -> None:
    driver = FakePinDriver()
    pinning = begun(driver)
    later = ArenaOwner.create(PIECE, "fake", "2")
    for one in (owner, later):
        one.populate(0, one.data_bytes)
    pinning.add(mapping)
    pinning.add(later.mapping)
    wait_until(lambda: pinning.num_pinned_bytes == TOTAL + PIECE)
    mapping.close()
    wait_until(lambda: list(driver.registered) == [later.mapping.address])
    later.close()
    wait_until(lambda: not driver.registered)


def span_of(mapping: ArenaMapping, piece: int) -> Span:
    """A few bytes in a piece."""
    return Span(0, mapping.address + piece * PIECE, 100)


def test_before_the_engine_has_started_only_what_copies_need_is_registered(
    owner: ArenaOwner, mapping: ArenaMapping
) -> None:
    """The engine captures CUDA graphs, and the gate waits for its own pieces only."""
    driver = FakePinDriver()
    pinning = Pinning(driver, PIECE)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    for piece in (3, 1):
        pinning.prepare([span_of(mapping, piece)])
    assert driver.calls == [("register", mapping.address + 3 * PIECE), ("register", mapping.address + PIECE)]
    pinning.begin()
    pinning.begin()
    wait_until(lambda: pinning.num_pinned_bytes == TOTAL)
    later = ArenaOwner.create(PIECE, "fake", "2")
    later.populate(0, PIECE)
    pinning.add(later.mapping)  # the server has restarted, the engine has not
    wait_until(lambda: pinning.num_pinned_bytes == TOTAL + PIECE)
    for one in (mapping, later):
        one.close()
    wait_until(lambda: not driver.registered)


def test_nothing_is_taken_back_before_the_engine_has_started(mapping: ArenaMapping) -> None:
    """The server ends while the engine captures."""
    driver = FakePinDriver()
    pinning = Pinning(driver, PIECE)
    pinning.add(mapping)
    pinning.prepare([span_of(mapping, 2)])
    (arena,) = pinning._arenas.values()
    mapping.close()
    assert not arena.wait_unmapped(0.1)
    assert [call for call, _ in driver.calls] == ["register"]
    pinning.begin()
    assert arena.wait_unmapped(10)
    assert not driver.registered


def test_in_a_pause_only_what_copies_need_is_registered(
    owner: ArenaOwner, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pinning, "PAUSE_MIN_S", 3600.0)
    driver = FakePinDriver()
    pinning = begun(driver)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    wait_until(lambda: pinning.num_pinned_bytes == PIECE)
    for piece in (4, 2):
        pinning.prepare([span_of(mapping, piece)])
    assert [(address - mapping.address) // PIECE for _, address in driver.calls] == [0, 4, 2]
    mapping.close()
    wait_until(lambda: not driver.registered)


def test_a_refused_piece_is_tried_again(
    owner: ArenaOwner, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pinning, "RETRY_S", 0.001)
    driver = FakePinDriver()
    refused = mapping.address + PIECE
    driver.refuses = lambda address: address == refused and driver.calls.count(("register", refused)) < 4
    pinning = begun(driver)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    wait_until(lambda: pinning.num_pinned_bytes == TOTAL)
    assert pinning.is_ready([span_of(mapping, 1)])
    assert driver.calls.count(("register", refused)) == 4
    mapping.close()
    wait_until(lambda: not driver.registered)


def test_the_tries_of_a_piece_are_bounded(
    owner: ArenaOwner, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "antiphon.connector")
    monkeypatch.setattr(cuda_pinning, "RETRY_S", 0.001)
    driver = FakePinDriver()
    driver.refuses = lambda _address: True
    pinning = begun(driver)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    wait_until(lambda: "refused for good" in caplog.text)
    assert len(driver.calls) == NUM_PIECES * cuda_pinning.TRIES_MAX
    assert caplog.text.count("does not register") == 1
    mapping.close()


@pytest.mark.parametrize("broken", ["register", "unregister"])
def test_a_driver_that_raises_refuses(
    owner: ArenaOwner, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    driver = FakePinDriver()
    works = getattr(driver, broken)

    def fails_once(address: int, *rest: int) -> str | None:
        if address == mapping._base_address + 4096 + 2 * PIECE:
            raise RuntimeError("no context")
        return works(address, *rest)  # type: ignore[no-any-return]

    monkeypatch.setattr(driver, broken, fails_once)
    pinning = begun(driver)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    (arena,) = pinning._arenas.values()
    pinning.prepare([span_of(mapping, 2)])
    assert pinning.is_ready([span_of(mapping, 2)]) == (broken == "unregister")
    wait_until(lambda: pinning.num_pinned_bytes >= TOTAL - PIECE)
    mapping.close()
    assert arena.wait_unmapped(10)
    assert len(driver.registered) == (broken == "unregister")


def test_no_copy_waits_for_a_thread_that_has_failed(
    owner: ArenaOwner, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pinning, "ENSURE_TIMEOUT_S", 3600.0)
    driver = FakePinDriver()
    monkeypatch.setattr(mapping, "is_populated", lambda _place: 1 // 0)
    pinning = begun(driver)
    pinning.add(mapping)
    (arena,) = pinning._arenas.values()
    copying = threading.Thread(target=pinning.prepare, args=([span_of(mapping, 2)],), daemon=True)
    copying.start()
    copying.join(10)
    assert not copying.is_alive()
    mapping.close()
    assert arena.wait_unmapped(10)
    assert not driver.registered


def test_pieces_that_a_copy_needs_leave_gaps_for_launches(
    owner: ArenaOwner, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pinning, "URGENT_PAUSE_S", 0.05)
    driver = FakePinDriver()
    times_s: list[float] = []
    register = driver.register
    monkeypatch.setattr(driver, "register", lambda *args: times_s.append(time.monotonic()) or register(*args))
    pinning = Pinning(driver, PIECE)
    pinning.add(mapping)
    pinning.prepare([Span(0, mapping.address, 3 * PIECE)])
    assert pinning.is_ready([Span(0, mapping.address, 3 * PIECE)])
    assert all(later - earlier >= 0.05 for earlier, later in itertools.pairwise(times_s))
    assert len(times_s) == 3
    pinning.begin()
    mapping.close()
    wait_until(lambda: not driver.registered)
