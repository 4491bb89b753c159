"""The tier in a Mooncake store: the contract against a real master, with its metadata server, with etcd, and with an
etcd that wants a user and a certificate; faults.

Another process gives the memory to the store, as another machine would. A master that was killed has forgotten all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError, TierFull, TierTimeout, TierUnavailable
from antiphon.core.units import GIB, KIB, MIB
from antiphon.storage import mooncake_tier
from antiphon.storage.etcd_metadata import EtcdAccess
from antiphon.storage.mooncake_child import Operation
from antiphon.storage.mooncake_tier import MooncakeTier, MooncakeTierOptions
from tests.storage.conftest import MooncakeStore
from tests.storage.servers import MooncakeMaster, Service
from tests.storage.tier_kit import (
    TIMEOUT_S,
    Rig,
    ServiceContract,
    TierContract,
    fill,
    key_of,
    meta_of,
    outcome,
    recovers,
)

pytestmark = pytest.mark.process
START_TIMEOUT_S = 20.0


def options_of(master: str, metadata: str | EtcdAccess, segment_bytes: int = 0) -> MooncakeTierOptions:
    return MooncakeTierOptions(
        master, metadata, segment_bytes=segment_bytes, timeout_s=TIMEOUT_S, chunk_bytes_max=32 * MIB
    )


def ready(store: MooncakeTier) -> MooncakeTier:
    """``store``, when its child is set up."""
    deadline = mooncake_tier.Deadline(START_TIMEOUT_S, "Mooncake's client")
    while True:
        try:
            store._ready(deadline)
        except TierUnavailable:  # it is started again
            threading.Event().wait(min(0.1, deadline.left_s()))
        else:
            return store


def make_rig(options: MooncakeTierOptions) -> Rig:
    def codes(operation: int, key: bytes, slot: int, num_bytes: int) -> int:
        store = rig.store
        assert isinstance(store, MooncakeTier)
        deadline = store._deadline()
        (code,) = store._answer(
            store._ready(deadline).send(operation, [store._name_of(key)], slot, num_bytes), deadline, None
        )
        return code

    def raw(key: bytes) -> bytes:
        store = rig.store
        assert isinstance(store, MooncakeTier)
        slot = store._free.get()
        size = codes(Operation.GET, key, slot, store._slot_bytes)
        record = bytes(store._slot(slot)[:size])
        store._free.put(slot)
        return record

    def set_raw(key: bytes, record: bytes) -> None:
        store = rig.store
        assert isinstance(store, MooncakeTier)
        store.remove([key])
        slot = store._free.get()
        store._slot(slot)[: len(record)] = record
        assert codes(Operation.PUT, key, slot, len(record)) == 0
        store._free.put(slot)

    def reopen() -> MooncakeTier:
        rig.store.close()
        return ready(MooncakeTier("mooncake", options))

    rig = Rig(ready(MooncakeTier("mooncake", options)), raw, set_raw, reopen)
    return rig


@pytest.fixture(scope="module", params=["http", "etcd", "secured"])
def mooncake(request: pytest.FixtureRequest, start_mooncake: Callable[[str], MooncakeStore]) -> MooncakeStore:
    return start_mooncake(request.param)


@pytest.fixture
def rig(mooncake: MooncakeStore) -> Iterator[Rig]:
    made = make_rig(options_of(mooncake.master.address, mooncake.metadata))
    yield made
    with contextlib.suppress(TierUnavailable):
        made.store.remove([key_of(number) for number in (*range(100), *range(1000, 1100))])
    made.store.close()


@pytest.fixture
def service(mooncake: MooncakeStore) -> Service:
    return mooncake.master


class TestContract(TierContract):
    pass


class TestFaults(ServiceContract):
    pass


def test_a_full_store(rig: Rig) -> None:
    error = fill(rig, 16 * MIB, 40)
    assert error is not None
    assert "no room" in str(error)
    rig.store.remove([key_of(number) for number in range(1000, 1040)])
    assert rig.put(5, MIB) == rig.get(5, MIB)


def test_a_chunk_that_is_larger_than_a_slot(rig: Rig) -> None:
    with pytest.raises(TierFull, match="chunk_bytes_max"):
        rig.put(1, 32 * MIB + 1)
    assert rig.get(1, 32 * MIB + 1) is None
    assert rig.put(1, 32 * MIB) == rig.get(1, 32 * MIB)


def test_a_client_that_crashes_is_started_again(rig: Rig) -> None:
    payload = rig.put(1)
    store = rig.store
    assert isinstance(store, MooncakeTier)
    child = store._child
    assert child is not None
    child.process.kill()
    child._reader.join(5)
    found = outcome(lambda: rig.get(1))
    assert isinstance(found.error, TierUnavailable | TierTimeout | None)
    assert recovers(rig) < 5.0
    assert rig.get(1) == payload


def test_a_client_that_hangs_is_given_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_tier, "LATE_MAX_S", 2.5)
    payload = rig.put(1)
    store = rig.store
    assert isinstance(store, MooncakeTier)
    assert store._child is not None
    first = store._child.process.pid
    os.kill(first, signal.SIGSTOP)
    into = memoryview(bytearray(64 * KIB))
    found = outcome(lambda: store.get_into(key_of(1), meta_of(64 * KIB), into))
    assert isinstance(found.error, TierTimeout)
    assert found.took_s < TIMEOUT_S + 0.5
    assert recovers(rig) < 5.0
    assert store._child.process.pid != first
    assert rig.get(1) == payload
    assert store._free.qsize() == 4, "a slot was lost with the client"


def test_without_metadata_server(start_mooncake: Callable[[str], MooncakeStore]) -> None:
    store = start_mooncake("none")
    rig = make_rig(options_of(store.master.address, store.metadata))
    try:
        assert rig.put(1, MIB) == rig.get(1, MIB)
    finally:
        rig.store.close()


def test_no_master_is_there(take_ports: Callable[[int], list[int]]) -> None:
    port, other = take_ports(2)
    store = MooncakeTier("mooncake", options_of(f"127.0.0.1:{port}", f"http://127.0.0.1:{other}/metadata"))
    rig = Rig(store, bytes, lambda key, record: None, lambda: store)
    for call in (lambda: rig.put(1), lambda: rig.get(1), store.probe):
        found = outcome(call)
        assert isinstance(found.error, TierUnavailable | TierTimeout)
        assert found.took_s < TIMEOUT_S + 0.5
    store.close()


def test_a_master_that_comes_late(tmp_path: Path, adopted: set[int], take_ports: Callable[[int], list[int]]) -> None:
    master = MooncakeMaster(tmp_path, adopted, take_ports)
    store = MooncakeTier("mooncake", options_of(master.address, master.metadata, 64 * MIB))
    rig = Rig(store, bytes, lambda key, record: None, lambda: store)
    assert outcome(store.probe).error is not None
    master.start()
    try:
        assert recovers(rig) < 7.0
    finally:
        store.close()
        master.kill()


def test_memory_is_taken_only_as_it_is_used(mooncake: MooncakeStore) -> None:
    options = MooncakeTierOptions(mooncake.master.address, mooncake.metadata, timeout_s=TIMEOUT_S, chunk_bytes_max=GIB)
    store = ready(MooncakeTier("mooncake", options))
    assert os.fstat(store._memory_fd).st_blocks * 512 < MIB
    store.close()


def test_a_machine_without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_tier.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install"):
        MooncakeTier("mooncake", options_of("127.0.0.1:1", "P2PHANDSHAKE"))
