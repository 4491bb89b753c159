"""A tier in this process's memory: what stands in for a service, with its faults.

It stores whole records, as the real stores do, so that damage shows in the same way. A test says what goes wrong with
``faults``; what a call does when nothing does is what every store does.

Always true: records take at most ``capacity_bytes``; what was used longest ago goes first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from antiphon.core.errors import TierCorrupt, TierFull, TierUnavailable
from antiphon.storage.calls import Deadline
from antiphon.storage.record import RecordReader, RecordWriter
from antiphon.storage.tier import ChunkMeta, TierUsage

__all__ = ["MemoryTier", "MemoryTierFaults"]

_FILL_BYTES = 1 << 20


@dataclass(slots=True)
class MemoryTierFaults:
    """What goes wrong, from now until it is changed.

    Args:
        is_down: every call is refused.
        is_hung: every call waits for its deadline, or for ``MemoryTier.wake``.
        is_full: nothing can be put.
        delay_s: that each call takes longer.
        flip_bit: of the record, changed in each get; None: none.
        kept_bytes: of a record, more are lost in each put; None: all are kept.
    """

    is_down: bool = False
    is_hung: bool = False
    is_full: bool = False
    delay_s: float = 0.0
    flip_bit: int | None = None
    kept_bytes: int | None = None


class MemoryTier:
    """See the module.

    Args:
        name: of the tier.
        capacity_bytes: of records, heads included.
        timeout_s: of each call.
    """

    def __init__(self, name: str, capacity_bytes: int, timeout_s: float = 5.0) -> None:
        self.name = name
        self.faults = MemoryTierFaults()
        self.num_calls = 0
        """Calls to what stands for the service."""
        self._capacity_bytes = capacity_bytes
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._records: OrderedDict[bytes, bytearray] = OrderedDict()
        self._held_bytes = 0
        self._is_closed = False

    # ---- the calls ---------------------------------------------------------------------------------------------------

    def put(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        """See ``TierStore.put``."""
        self._enter()
        writer = RecordWriter(key, payload, meta)
        record = bytearray(writer.total_bytes)
        view, done = memoryview(record), 0
        while done < len(record):
            done += writer.fill(view[done : done + _FILL_BYTES])
        view.release()
        writer.check()
        if self.faults.is_full or len(record) > self._capacity_bytes:
            raise TierFull(f"a chunk of {len(record)} bytes does not fit into the tier {self.name}")
        if self.faults.kept_bytes is not None:
            del record[self.faults.kept_bytes :]
        with self._changed:
            self._drop(key)
            while self._held_bytes + len(record) > self._capacity_bytes:
                self._drop(next(iter(self._records)))
            self._records[key] = record
            self._held_bytes += len(record)

    def get_into(self, key: bytes, meta: ChunkMeta, into: memoryview) -> bool:
        """See ``TierStore.get_into``."""
        self._enter()
        with self._changed:
            record = self._records.get(key)
            if record is None:
                return False
            self._records.move_to_end(key)
            flip = self.faults.flip_bit
            if flip is not None:
                record[flip // 8 % len(record)] ^= 1 << flip % 8
        reader = RecordReader(key, meta, into)
        try:
            reader.feed(memoryview(record))
            reader.finish()
        except TierCorrupt:
            with self._changed:
                if self._records.get(key) is record:
                    self._drop(key)
            raise
        return True

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``TierStore.contains``."""
        self._enter()
        with self._changed:
            return [key in self._records for key in keys]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See ``TierStore.remove``."""
        self._enter()
        with self._changed:
            for key in keys:
                self._drop(key)

    def keys(self) -> Iterator[bytes]:
        """See ``TierStore.keys``."""
        with self._changed:
            return iter(list(self._records))

    def usage(self) -> TierUsage:
        """See ``TierStore.usage``."""
        with self._changed:
            return TierUsage(len(self._records), self._held_bytes, self._capacity_bytes)

    def probe(self) -> None:
        """See ``TierStore.probe``."""
        self._enter()

    def close(self) -> None:
        """See ``TierStore.close``."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # ---- for tests ---------------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """The service goes on: calls that hang return."""
        with self._changed:
            self.faults.is_hung = False
            self._changed.notify_all()

    def record(self, key: bytes) -> bytearray:
        """The stored record itself, to be damaged in place.

        Raises:
            KeyError: there is none.
        """
        return self._records[key]

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _drop(self, key: bytes) -> None:
        self._held_bytes -= len(self._records.pop(key, b""))

    def _enter(self) -> None:
        deadline = Deadline(self._timeout_s, f"the tier {self.name}")
        with self._changed:
            self._check_open()
            self.num_calls += 1
            if self.faults.delay_s:
                slow = Deadline(self.faults.delay_s, self.name)
                while (left_s := slow.remaining_s()) > 0 and not self._is_closed:
                    self._changed.wait(min(left_s, deadline.left_s()))
            while self.faults.is_hung and not self._is_closed:
                self._changed.wait(deadline.left_s())
            self._check_open()

    def _check_open(self) -> None:
        if self._is_closed:
            raise TierUnavailable(f"the tier {self.name} is closed")
        if self.faults.is_down:
            raise TierUnavailable(f"the tier {self.name} is down")
