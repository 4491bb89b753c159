"""The fake is held to what the real stores are held to, and its faults do what they say."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from antiphon.core.errors import TierCorrupt, TierFull, TierTimeout, TierUnavailable
from antiphon.core.units import KIB, MIB
from antiphon.storage.memory_tier import MemoryTier
from antiphon.storage.record import HEAD_BYTES
from tests.storage.tier_kit import Rig, TierContract, key_of, outcome

CAPACITY_BYTES = 40 * MIB


def make_rig(timeout_s: float = 2.0) -> Rig:
    store = MemoryTier("fake", CAPACITY_BYTES, timeout_s)

    def set_raw(key: bytes, record: bytes) -> None:
        store.record(key)[:] = record

    def reopen() -> MemoryTier:
        store.close()
        return MemoryTier("fake", CAPACITY_BYTES)

    return Rig(store, lambda key: bytes(store.record(key)), set_raw, reopen, is_kept=False)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = make_rig()
    yield made
    made.store.close()


class TestContract(TierContract):
    pass


def test_what_was_used_longest_ago_goes_first() -> None:
    rig = make_rig()
    rig.put(1, 16 * MIB)
    rig.put(2, 16 * MIB)
    assert rig.get(1, 16 * MIB) is not None
    rig.put(3, 16 * MIB)
    assert rig.store.contains([key_of(1), key_of(2), key_of(3)]) == [True, False, True]
    assert rig.store.usage().held_bytes == 2 * (16 * MIB + HEAD_BYTES)
    with pytest.raises(TierFull):
        rig.put(4, CAPACITY_BYTES)


def test_faults() -> None:
    rig = make_rig(timeout_s=0.2)
    store = rig.store
    assert isinstance(store, MemoryTier)
    payload = rig.put(1)
    store.faults.is_down = True
    with pytest.raises(TierUnavailable):
        rig.get(1)
    store.faults.is_down = False
    store.faults.is_full = True
    with pytest.raises(TierFull):
        rig.put(2)
    store.faults.is_full = False
    store.faults.delay_s = 0.05
    assert outcome(lambda: rig.get(1)).took_s >= 0.05
    store.faults.delay_s = 5.0
    assert isinstance(outcome(lambda: rig.get(1)).error, TierTimeout)
    store.faults.delay_s = 0.0
    assert rig.get(1) == payload
    store.faults.flip_bit = 8 * (HEAD_BYTES + 5)
    with pytest.raises(TierCorrupt):
        rig.get(1)
    store.faults.flip_bit = None
    store.faults.kept_bytes = 10 * KIB
    rig.put(1)
    with pytest.raises(TierCorrupt):
        rig.get(1)


def test_a_hung_fake_ends_calls_at_their_deadline_or_when_it_goes_on() -> None:
    rig = make_rig(timeout_s=0.3)
    store = rig.store
    assert isinstance(store, MemoryTier)
    rig.put(1)
    store.faults.is_hung = True
    found = outcome(lambda: rig.get(1))
    assert isinstance(found.error, TierTimeout)
    assert 0.3 <= found.took_s < 1.0
    store.faults.is_hung = True
    start_s = time.monotonic()
    waker = threading.Timer(0.05, store.wake)
    waker.start()
    assert rig.get(1) is not None
    assert time.monotonic() - start_s < 0.3
    waker.join()
