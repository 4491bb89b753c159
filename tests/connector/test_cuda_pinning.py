"""Memory is registered piece by piece, as it is populated or needed, and taken back before it is unmapped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

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


def test_pieces_follow_the_population(owner: ArenaOwner, mapping: ArenaMapping) -> None:
    driver = FakePinDriver()
    pinning = Pinning(driver, PIECE)
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
    pinning = Pinning(driver, PIECE)
    pinning.add(mapping)  # nothing is populated, so that nothing is registered by itself
    span = Span(0, mapping.address + 3 * PIECE - 4096, 8192)
    assert not pinning.is_ready([span])
    parts = list(pinning.prepared([span]))
    assert [part.num_bytes for part in parts] == [4096, 4096]
    assert set(driver.registered) == {mapping.address + 2 * PIECE, mapping.address + 3 * PIECE}
    assert pinning.is_ready([span])
    foreign = Span(0, mapping.address + TOTAL + (1 << 30), 10)
    assert list(pinning.prepared([foreign])) == [foreign]
    mapping.close()
    wait_until(lambda: not driver.registered)


def test_the_mapping_goes_after_the_last_piece_was_taken_back(
    owner: ArenaOwner, mapping: ArenaMapping, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakePinDriver()
    pinning = Pinning(driver, PIECE)
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
    pinning = Pinning(driver, PIECE)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    mapping.close()  # while a piece is being registered
    may_go.set()
    wait_until(lambda: ("unregister", mapping._base_address + 4096) in driver.calls and not driver.registered)


def test_a_piece_that_is_refused_is_used_all_the_same(owner: ArenaOwner, mapping: ArenaMapping) -> None:
    driver = FakePinDriver()
    driver.refuses = lambda address: address == mapping.address + PIECE
    pinning = Pinning(driver, PIECE)
    owner.populate(0, TOTAL)
    pinning.add(mapping)
    span = Span(0, mapping.address + PIECE, 100)
    assert list(pinning.prepared([span])) == [span]
    wait_until(lambda: pinning.num_pinned_bytes == TOTAL - PIECE)
    mapping.close()
    wait_until(lambda: not driver.registered)
    assert ("unregister", mapping._base_address + 4096 + PIECE) not in driver.calls


def test_two_lives_of_a_server_are_registered_beside_each_other(owner: ArenaOwner, mapping: ArenaMapping) -> None:
    driver = FakePinDriver()
    pinning = Pinning(driver, PIECE)
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
