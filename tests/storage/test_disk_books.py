"""The books of the tier on a disk: a file that is there stays in them, whatever happens at once or fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.core.errors import TierCorrupt, TierTimeout
from antiphon.core.units import KIB
from antiphon.storage.disk_tier import DiskTier
from antiphon.storage.record import HEAD_BYTES
from tests.storage.test_disk_tier import checked_rig
from tests.storage.tier_kit import Rig, key_of


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield from checked_rig(tmp_path / "tier")


def test_a_record_that_is_put_while_a_get_misses_it_stays_in_the_books(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload = rig.put(1)
    assert isinstance(rig.store, DiskTier)
    store, real = rig.store, rig.store._read_file
    store._folder.path(key_of(1)).unlink()

    def read_file(*args: Any) -> bool:
        is_there = real(*args)
        rig.put(1)  # after the miss, before the get has ended
        return is_there

    monkeypatch.setattr(store, "_read_file", read_file)
    assert rig.get(1) is None
    monkeypatch.undo()
    assert rig.get(1) == payload
    assert store.usage().num_chunks == 1
    store.remove([key_of(1)])
    assert not store._folder.path(key_of(1)).exists()


def test_a_damaged_record_that_cannot_be_removed_in_time_stays_in_the_books(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.put(1)
    rig.set_raw(key_of(1), bytes(HEAD_BYTES + 64 * KIB))
    assert isinstance(rig.store, DiskTier)
    with monkeypatch.context() as patched:
        patched.setattr(rig.store, "_take_out", _late)
        with pytest.raises(TierCorrupt):
            rig.get(1)
    assert rig.store._folder.path(key_of(1)).exists() == (rig.store.usage().num_chunks == 1)
    assert rig.is_refused(1)
    assert not rig.store._folder.path(key_of(1)).exists()


def test_a_removal_that_failed_can_be_made_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(1)
    assert isinstance(rig.store, DiskTier)
    with monkeypatch.context() as patched:
        patched.setattr(rig.store, "_take_out", _late)
        with pytest.raises(TierTimeout):
            rig.store.remove([key_of(1)])
    assert rig.store.contains([key_of(1)]) == [True]
    rig.store.remove([key_of(1)])
    assert rig.store.contains([key_of(1)]) == [False]
    assert not rig.store._folder.path(key_of(1)).exists()


def _late(*args: object) -> None:
    raise TierTimeout("late")
