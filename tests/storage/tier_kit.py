"""What every tier store is held to: one suite for all of them, and for the fake.

A test module makes a class of ``TierContract`` with a fixture ``rig``. A store behind a service that the tests start is
held to ``ServiceContract`` too.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest

from antiphon.core.errors import TierCorrupt, TierError, TierFull, TierTimeout, TierUnavailable
from antiphon.core.namespace import NamespaceDigest
from antiphon.core.units import KIB, MIB
from antiphon.storage.record import HEAD_BYTES
from antiphon.storage.tier import ChunkMeta, PagedStore, TierStore

SIZES = [4 * KIB, 5000, 1 * MIB, 3 * MIB + 17, 16 * MIB]
TIMEOUT_S = 2.0
"""Of the stores under test."""
SLACK_S = 1.0
"""What a busy machine adds to a deadline."""
RECOVERY_S = 5.0


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"key %d" % number).digest()


def meta_of(num_bytes: int, namespace: int = 0) -> ChunkMeta:
    return ChunkMeta(NamespaceDigest(hashlib.sha256(b"namespace %d" % namespace).digest()), "cpu-avx2", num_bytes)


def payload_of(number: int, num_bytes: int) -> memoryview:
    """Writable and page-aligned, as a view of an arena is; every third one is not aligned."""
    shift = 96 if number % 3 == 2 else 0
    view = memoryview(mmap.mmap(-1, num_bytes + shift))[shift:]
    view[:] = random.Random(number).randbytes(num_bytes)
    return view


@dataclass
class Rig:
    """A store under test, and ways past it.

    Args:
        store: with a timeout of ``TIMEOUT_S``.
        raw: the stored record of a key.
        set_raw: replaces it.
        reopen: closes the store and opens another one on the same place.
        is_kept: whether what is stored outlives the store.
    """

    store: TierStore
    raw: Callable[[bytes], bytes]
    set_raw: Callable[[bytes, bytes], None]
    reopen: Callable[[], TierStore]
    is_kept: bool = True
    closers: list[Callable[[], None]] = field(default_factory=list)

    def put(self, number: int, num_bytes: int = 64 * KIB) -> memoryview:
        payload = payload_of(number, num_bytes)
        self.store.put(key_of(number), payload, meta_of(num_bytes))
        return payload

    def get(self, number: int, num_bytes: int = 64 * KIB) -> bytes | None:
        into = bytearray(num_bytes)
        found = self.store.get_into(key_of(number), meta_of(num_bytes), memoryview(into))
        return bytes(into) if found else None

    def is_refused(self, number: int, num_bytes: int = 64 * KIB) -> bool:
        """Whether a get raises ``TierCorrupt``, and the record is gone after it."""
        with pytest.raises(TierCorrupt):
            self.get(number, num_bytes)
        return self.store.contains([key_of(number)]) == [False] and self.get(number, num_bytes) is None


class TierContract:
    """Every store, with and without a service behind it."""

    @pytest.mark.parametrize("num_bytes", SIZES)
    def test_round_trip(self, rig: Rig, num_bytes: int) -> None:
        payload = rig.put(1, num_bytes)
        assert rig.get(1, num_bytes) == payload
        assert len(rig.raw(key_of(1))) == HEAD_BYTES + num_bytes

    def test_a_key_that_is_not_there_is_a_miss(self, rig: Rig) -> None:
        assert rig.get(1) is None
        assert rig.store.contains([key_of(1)]) == [False]

    def test_empty_lists_are_nothing(self, rig: Rig) -> None:
        assert rig.store.contains([]) == []
        rig.store.remove([])

    @pytest.mark.parametrize(
        "change",
        [
            {"namespace": meta_of(1, 7).namespace},
            {"layout_fingerprint": "another"},
            {"layout_fingerprint": None},
            {"layout_fingerprint": ""},
            {"format_version": 99},
        ],
    )
    def test_bytes_that_mean_something_else_are_not_served(self, rig: Rig, change: dict[str, object]) -> None:
        rig.put(1)
        into = memoryview(bytearray(64 * KIB))
        with pytest.raises(TierCorrupt, match="differs in"):
            rig.store.get_into(key_of(1), replace(meta_of(64 * KIB), **change), into)
        assert rig.store.contains([key_of(1)]) == [False]

    @pytest.mark.parametrize("num_bytes", [64 * KIB - 4096, 64 * KIB - 1, 64 * KIB + 1, 64 * KIB + 4096, 8 * MIB])
    def test_a_record_of_another_size_is_not_served(self, rig: Rig, num_bytes: int) -> None:
        rig.put(1, num_bytes)
        assert rig.is_refused(1)

    def test_a_record_under_a_wrong_key_is_not_served(self, rig: Rig) -> None:
        rig.put(1)
        rig.put(2)
        rig.set_raw(key_of(2), rig.raw(key_of(1)))
        assert rig.is_refused(2)
        assert rig.get(1) is not None

    def test_a_flipped_bit_anywhere_is_not_served(self, rig: Rig) -> None:
        num_bytes = 8 * KIB
        chance = random.Random(3)
        total_bits = 8 * (HEAD_BYTES + num_bytes)
        edges = [0, 64, 96, 8 * HEAD_BYTES - 1, 8 * HEAD_BYTES, 8 * 700, total_bits - 1]
        for bit in edges + [chance.randrange(total_bits) for _ in range(25)]:
            rig.put(1, num_bytes)
            record = bytearray(rig.raw(key_of(1)))
            record[bit // 8] ^= 1 << bit % 8
            rig.set_raw(key_of(1), bytes(record))
            assert rig.is_refused(1, num_bytes), bit

    @pytest.mark.parametrize(
        "kept_bytes", [1, 100, HEAD_BYTES - 1, HEAD_BYTES, HEAD_BYTES + 1, HEAD_BYTES + 64 * KIB - 1]
    )
    def test_a_record_that_was_cut_is_not_served(self, rig: Rig, kept_bytes: int) -> None:
        rig.put(1)
        rig.set_raw(key_of(1), rig.raw(key_of(1))[:kept_bytes])
        assert rig.is_refused(1)

    def test_a_record_with_something_behind_it_is_not_served(self, rig: Rig) -> None:
        rig.put(1)
        rig.set_raw(key_of(1), rig.raw(key_of(1)) + b"x")
        assert rig.is_refused(1)

    def test_putting_again_replaces(self, rig: Rig) -> None:
        rig.put(1, 64 * KIB)
        other = payload_of(99, 32 * KIB)
        rig.store.put(key_of(1), other, meta_of(32 * KIB))
        assert rig.get(1, 32 * KIB) == other
        assert rig.store.usage().num_chunks == 1

    def test_a_damaged_record_can_be_put_again(self, rig: Rig) -> None:
        payload = rig.put(1)
        rig.set_raw(key_of(1), bytes(HEAD_BYTES + 64 * KIB))
        assert rig.is_refused(1)
        rig.put(1)
        assert rig.get(1) == payload

    def test_remove(self, rig: Rig) -> None:
        for number in range(4):
            rig.put(number)
        rig.store.remove([key_of(0), key_of(2), key_of(77)])
        assert rig.store.contains([key_of(n) for n in range(5)]) == [False, True, False, True, False]
        assert [rig.get(number) is None for number in range(4)] == [True, False, True, False]
        assert rig.store.usage().num_chunks == 2

    def test_usage_counts(self, rig: Rig) -> None:
        assert rig.store.usage().num_chunks == 0
        rig.put(1)
        rig.put(2)
        usage = rig.store.usage()
        assert usage.num_chunks == 2
        assert 2 * 64 * KIB < usage.held_bytes <= 2 * (64 * KIB + 2 * HEAD_BYTES)

    def test_the_payload_and_the_buffer_are_the_callers(self, rig: Rig) -> None:
        payload = rig.put(1)
        kept = bytes(payload)
        payload[:] = bytes(len(payload))
        assert rig.get(1) == kept
        read_only = memoryview(kept).toreadonly()
        rig.store.put(key_of(2), read_only, meta_of(len(kept)))
        assert rig.get(2) == kept

    def test_a_part_of_a_larger_buffer(self, rig: Rig) -> None:
        arena = memoryview(bytearray(random.Random(5).randbytes(300 * KIB)))
        rig.store.put(key_of(1), arena[1001 : 1001 + 64 * KIB], meta_of(64 * KIB))
        into = memoryview(bytearray(300 * KIB))
        assert rig.store.get_into(key_of(1), meta_of(64 * KIB), into[77 : 77 + 64 * KIB])
        assert into[77 : 77 + 64 * KIB] == arena[1001 : 1001 + 64 * KIB]
        assert not any(into[:77])
        assert not any(into[77 + 64 * KIB :])

    def test_buffers_of_the_wrong_size_are_refused(self, rig: Rig) -> None:
        with pytest.raises(ValueError, match="bytes"):
            rig.store.put(key_of(1), payload_of(1, 100), meta_of(101))
        rig.put(1)
        with pytest.raises(ValueError, match="bytes"):
            rig.store.get_into(key_of(1), meta_of(64 * KIB), memoryview(bytearray(99)))

    def test_many_threads(self, rig: Rig) -> None:
        sizes = [4 * KIB, 100_000, 2 * MIB]

        def work(worker: int) -> int:
            chance, num_hits = random.Random(worker), 0
            for _ in range(12):
                number = chance.randrange(6)
                size = sizes[number % len(sizes)]
                if chance.random() < 0.4:
                    rig.put(number, size)
                elif chance.random() < 0.2:
                    rig.store.remove([key_of(number)])
                elif (found := rig.get(number, size)) is not None:
                    assert found == payload_of(number, size)
                    num_hits += 1
            return num_hits

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(work, range(8))) > 0

    def test_it_probes(self, rig: Rig) -> None:
        rig.store.probe()

    def test_a_restart(self, rig: Rig) -> None:
        payload = rig.put(1, 100_000)
        rig.store = rig.reopen()
        if not rig.is_kept:
            assert rig.get(1, 100_000) is None
            return
        assert rig.get(1, 100_000) == payload
        listed = rig.store.keys()
        assert listed is None or list(listed) == [key_of(1)]

    def test_closed_is_closed(self, rig: Rig) -> None:
        rig.put(1)
        rig.store.close()
        rig.store.close()
        calls: list[Callable[[], object]] = [lambda: rig.put(2), lambda: rig.get(1), rig.store.probe]
        for call in calls:
            with pytest.raises(TierUnavailable):
                call()


class ListingContract:
    """A store behind a service that lists what is there page by page (``PagedStore``), also what others have put."""

    def _listed(self, rig: Rig, part: bytes = b"", at: int = 0) -> set[bytes]:
        assert isinstance(rig.store, PagedStore)
        return {key for page in rig.store.pages(part, at) for key in page}

    def test_what_an_earlier_life_has_put_is_listed(self, rig: Rig) -> None:
        keys = [bytes([tenant]) * 4 + bytes([model]) * 4 + key_of(tenant)[8:] for tenant in (7, 8) for model in (1, 9)]
        for key in keys:
            rig.store.put(key, payload_of(1, 4 * KIB), meta_of(4 * KIB))
        rig.store = rig.reopen()
        assert self._listed(rig) == set(keys)
        assert self._listed(rig, b"\x07" * 4) == set(keys[:2])
        assert self._listed(rig, b"\x09" * 4, 4) == {keys[1], keys[3]}
        assert self._listed(rig, b"\x08" * 4 + b"\x01" * 4) == {keys[2]}
        assert self._listed(rig, b"\x07" * 3 + b"\x08") == set()

    def test_what_is_removed_while_it_is_listed(self, rig: Rig) -> None:
        assert isinstance(rig.store, PagedStore)
        keys = [key_of(number) for number in range(40)]
        for key in keys:
            rig.store.put(key, payload_of(1, 4 * KIB), meta_of(4 * KIB))
        for page in rig.store.pages(b""):
            rig.store.remove(page)
        assert not any(rig.store.contains(keys))

    def test_a_listing_of_a_hung_service(self, rig: Rig, service: object) -> None:
        from tests.storage.servers import Service

        assert isinstance(service, Service)
        rig.put(1)
        service.hang()
        try:
            found = outcome(lambda: self._listed(rig))
            assert isinstance(found.error, TierTimeout | TierUnavailable)
            assert found.took_s < TIMEOUT_S + SLACK_S
        finally:
            service.restore()
        assert recovers(rig) < RECOVERY_S


@dataclass
class Outcome:
    """What a call came to, and how long it took."""

    error: TierError | None
    took_s: float


def outcome(call: Callable[[], object]) -> Outcome:
    start_s = time.monotonic()
    error: TierError | None = None
    try:
        call()
    except TierError as found:
        error = found
    return Outcome(error, time.monotonic() - start_s)


def recovers(rig: Rig) -> float:
    """Seconds until a chunk can be put and read again."""
    start_s = time.monotonic()
    while True:
        with contextlib.suppress(TierError):
            payload = rig.put(50)
            if rig.get(50) == payload:
                return time.monotonic() - start_s
        assert time.monotonic() - start_s < RECOVERY_S + TIMEOUT_S, "it does not recover"
        threading.Event().wait(0.05)


class ServiceContract:
    """A store behind a service, given by a fixture ``service`` (``tests.storage.servers.Service``)."""

    def _calls(self, rig: Rig) -> list[Callable[[], object]]:
        return [
            lambda: rig.put(2),
            lambda: rig.put(3, 8 * MIB),
            lambda: rig.get(1),
            lambda: rig.store.contains([key_of(1), key_of(2)]),
            lambda: rig.store.remove([key_of(1)]),
            rig.store.probe,
        ]

    def test_a_killed_service(self, rig: Rig, service: object) -> None:
        from tests.storage.servers import Service

        assert isinstance(service, Service)
        rig.put(1)
        service.kill()
        try:
            for call in self._calls(rig):
                found = outcome(call)
                assert isinstance(found.error, TierUnavailable | TierTimeout), found
                assert found.took_s < TIMEOUT_S + SLACK_S
        finally:
            service.restore()
        assert recovers(rig) < RECOVERY_S
        rig.store.probe()

    def test_a_hung_service(self, rig: Rig, service: object) -> None:
        from tests.storage.servers import Service

        assert isinstance(service, Service)
        rig.put(1)
        service.hang()
        try:
            for call in self._calls(rig):
                found = outcome(call)
                assert isinstance(found.error, TierTimeout | TierUnavailable), found
                assert found.took_s < TIMEOUT_S + SLACK_S
            with ThreadPoolExecutor(8) as pool:
                for found in pool.map(lambda number: outcome(lambda: rig.get(number)), range(8)):
                    assert found.error is not None
                    assert found.took_s < TIMEOUT_S + SLACK_S
        finally:
            service.go_on()
        assert recovers(rig) < RECOVERY_S
        rig.store.probe()


def fill(rig: Rig, num_bytes: int, most: int) -> TierFull | None:
    """Puts chunks until the store is full; None when ``most`` fitted."""
    for number in range(1000, 1000 + most):
        try:
            rig.put(number, num_bytes)
        except TierFull as error:
            return error
    return None
