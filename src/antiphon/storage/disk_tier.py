"""The tier on a local disk: a file for each chunk, bounded, and still there after a restart.

Always true:

- A record gets its name only after all of it was forced to the disk, so that a crash leaves a whole record or none:
  none for what was stored in the last seconds before the machine crashed. What is unfinished is removed at the next
  start.
- Records, and room reserved for those being written, take at most ``capacity_bytes``. What was used longest ago goes
  first; after a restart, what was written longest ago.
- The books are of this process, which alone uses the folder: a file that vanished is a miss, and leaves them. A record
  leaves them after its file has gone, or, where it makes room, just before; one that took its place meanwhile stays.

A file's digest is checked whenever it is read, not at the start, where only heads are.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from antiphon.core.errors import TierCorrupt, TierError, TierFull, TierUnavailable
from antiphon.core.units import MIB, align_up
from antiphon.storage.calls import Deadline, Piece, Pieces, Transfers
from antiphon.storage.disk_files import BLOCK_BYTES, DiskFolder, tier_error
from antiphon.storage.record import HEAD_BYTES, RecordReader, RecordWriter, address_of, record_bytes
from antiphon.storage.tier import ChunkMeta, TierUsage

__all__ = ["DiskTier", "DiskTierOptions"]

OPEN_TIMEOUT_S: Final = 120.0
"""To read the head of every record that a full disk holds; a disk that hangs ends it with an error."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class DiskTierOptions:
    """How a disk tier works.

    Args:
        path: of its folder, its own.
        capacity_bytes: most bytes on the disk.
        timeout_s: of each call.
        num_threads: calls at the disk at once.
        piece_bytes: of one read or write, a multiple of 4096.
    """

    path: str
    capacity_bytes: int
    timeout_s: float = 5.0
    num_threads: int = 4
    piece_bytes: int = 4 * MIB + HEAD_BYTES


class _Held(NamedTuple):
    """A record: its bytes on the disk, and its number in the order of all that were stored."""

    num_bytes: int
    number: int


class DiskIndex:
    """What is on the disk, least recently used first, and room that is reserved. Thread-safe.

    Args:
        capacity_bytes: of records and reservations together.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._records: OrderedDict[bytes, _Held] = OrderedDict()
        self._num_committed = 0
        self._held_bytes = 0
        self._reserved_bytes = 0

    def reserve(self, num_bytes: int) -> list[bytes] | None:
        """Makes room. Returns the keys whose files must go for it; None where it cannot be had."""
        with self._lock:
            if num_bytes > self.capacity_bytes - self._reserved_bytes:
                return None
            gone = []
            while self._held_bytes + self._reserved_bytes + num_bytes > self.capacity_bytes:
                key, held = self._records.popitem(last=False)
                self._held_bytes -= held.num_bytes
                gone.append(key)
            self._reserved_bytes += num_bytes
            return gone

    def release(self, num_bytes: int) -> None:
        """Gives a reservation back."""
        with self._lock:
            self._reserved_bytes -= num_bytes
            assert self._reserved_bytes >= 0, self._reserved_bytes

    def commit(self, key: bytes, num_bytes: int) -> None:
        """Makes a reservation the record of ``key``, as the one used last."""
        with self._lock:
            self._reserved_bytes -= num_bytes
            assert self._reserved_bytes >= 0, self._reserved_bytes
            replaced = self._records.pop(key, None)
            self._held_bytes += num_bytes - (0 if replaced is None else replaced.num_bytes)
            self._num_committed += 1
            self._records[key] = _Held(num_bytes, self._num_committed)

    def touch(self, key: bytes) -> int | None:
        """The number of the record of ``key``, which is the one used last then; None where there is none."""
        with self._lock:
            held = self._records.get(key)
            if held is not None:
                self._records.move_to_end(key)
            return None if held is None else held.number

    def number_of(self, key: bytes) -> int | None:
        """The same, and it is not used."""
        with self._lock:
            held = self._records.get(key)
            return None if held is None else held.number

    def forget(self, key: bytes, number: int | None) -> bool:
        """Strikes ``key`` out, unless another record than that of ``number`` is there; whether it was there."""
        with self._lock:
            held = self._records.get(key)
            if held is None or held.number != number:
                return False
            del self._records[key]
            self._held_bytes -= held.num_bytes
            return True

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        with self._lock:
            return [key in self._records for key in keys]

    def keys(self) -> list[bytes]:
        with self._lock:
            return list(self._records)

    def usage(self) -> TierUsage:
        with self._lock:
            return TierUsage(len(self._records), self._held_bytes + self._reserved_bytes, self.capacity_bytes)

    def validate(self) -> None:
        """That the sums are right."""
        with self._lock:
            held_bytes = sum(held.num_bytes for held in self._records.values())
            assert self._held_bytes == held_bytes, (self._held_bytes, len(self._records))
            assert 0 <= self._held_bytes + self._reserved_bytes <= self.capacity_bytes


class DiskTier:
    """See the module.

    Args:
        name: of the tier.
        options: where it is and how it works.

    Raises:
        ConfigError: another server uses the folder, or it holds what is not ours.
        TierUnavailable, TierTimeout: the disk does not answer.
    """

    def __init__(self, name: str, options: DiskTierOptions) -> None:
        self.name = name
        self._options = options
        self.index = DiskIndex(options.capacity_bytes)
        self._transfers = Transfers(name, options.num_threads, options.piece_bytes)
        self._pool = self._transfers.pool
        self._count_lock = threading.Lock()
        self._num_written = 0
        self.num_left_behind = 0
        """Files that were evicted or forgotten and could not be removed: they take room that the books do not show."""
        with contextlib.ExitStack() as undo:
            undo.callback(self._transfers.close)
            self._folder = self._pool.call(self._open, Deadline(OPEN_TIMEOUT_S, f"the disk of tier {name}"))
            undo.pop_all()

    def _open(self) -> DiskFolder:
        folder = DiskFolder.open(Path(self._options.path))
        with contextlib.ExitStack() as undo:
            undo.callback(folder.close)
            found = sorted(folder.scan(), key=lambda record: record.written_ns)
            self._folder = folder
            for record in found:
                gone = self.index.reserve(record.file_bytes)
                if gone is None:  # larger than all of a capacity that was made smaller
                    self._unlink([record.key])
                    continue
                self._unlink(gone)
                self.index.commit(record.key, record.file_bytes)
            undo.pop_all()
        return folder

    def _deadline(self) -> Deadline:
        return Deadline(self._options.timeout_s, f"the disk of tier {self.name}")

    # ---- the calls ---------------------------------------------------------------------------------------------------

    def put(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        """See ``TierStore.put``."""
        deadline = self._deadline()
        writer = RecordWriter(key, payload, meta)
        total_bytes = writer.total_bytes
        if address_of(payload) % BLOCK_BYTES == 0 and len(payload) % BLOCK_BYTES == 0:
            # Without a copy. A thread that a hung disk keeps may read the payload after the caller has left: it then
            # finds that it changed, and does not publish.
            self._pool.call(
                lambda: self._write(key, total_bytes, lambda fd: self._write_at_once(fd, writer, payload, deadline)),
                deadline,
            )
        else:
            self._transfers.send(
                writer,
                lambda pieces: self._write(key, total_bytes, lambda fd: self._write_pieces(fd, pieces)),
                deadline,
            )

    def get_into(self, key: bytes, meta: ChunkMeta, into: memoryview) -> bool:
        """See ``TierStore.get_into``."""
        if self._pool.is_closed:
            raise TierUnavailable(f"the tier {self.name} is closed")
        number = self.index.touch(key)
        if number is None:
            return False
        deadline = self._deadline()
        reader = RecordReader(key, meta, into)

        def read(pieces: Pieces[Piece]) -> bool:
            return self._guarded(lambda: self._read_file(key, record_bytes(meta), pieces, deadline))

        try:
            is_there = self._transfers.receive(reader, read, deadline)
        except TierCorrupt:
            with contextlib.suppress(TierError):
                self._pool.call(lambda: self._take_out([key]), deadline)
            raise
        if not is_there:
            self.index.forget(key, number)
        return is_there

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``TierStore.contains``. From the books: the disk is not asked."""
        return self.index.contains(keys)

    def remove(self, keys: Sequence[bytes]) -> None:
        """See ``TierStore.remove``. They stay removed after a crash of the machine. After an error some may stay."""
        present = [key for key, is_there in zip(keys, self.index.contains(keys), strict=True) if is_there]
        if present:
            self._pool.call(lambda: self._remove_for_good(present), self._deadline())

    def keys(self) -> Iterator[bytes]:
        """See ``TierStore.keys``. Least recently used first."""
        return iter(self.index.keys())

    def usage(self) -> TierUsage:
        """See ``TierStore.usage``."""
        return self.index.usage()

    def probe(self) -> None:
        """See ``TierStore.probe``."""
        self._pool.call(lambda: self._guarded(self._folder.probe), self._deadline())

    def close(self) -> None:
        """See ``TierStore.close``. The folder is free for another server."""
        if not self._pool.is_closed:
            self._transfers.close()
            self._folder.close()

    # ---- in the threads ----------------------------------------------------------------------------------------------

    def _write(self, key: bytes, total_bytes: int, fill: Callable[[int], None]) -> None:
        file_bytes = align_up(total_bytes, BLOCK_BYTES)
        gone = self.index.reserve(file_bytes)
        if gone is None:
            raise TierFull(
                f"a chunk of {file_bytes} bytes does not fit beside what is being written into the "
                f"{self._options.capacity_bytes} bytes of tier {self.name}",
                remedy="give the tier more capacity",
            )
        with contextlib.ExitStack() as undo:
            undo.callback(self.index.release, file_bytes)
            self._unlink(gone)
            self._guarded(lambda: self._write_file(key, total_bytes, fill))
            undo.pop_all()
        self.index.commit(key, file_bytes)

    def _write_file(self, key: bytes, total_bytes: int, fill: Callable[[int], None]) -> None:
        path = self._folder.path(key)
        with self._count_lock:
            self._num_written += 1
            unfinished = path.with_name(f"{path.name}.{self._num_written}.tmp")
        fd = self._folder.open_file(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard, unfinished)
            try:
                fill(fd)
                os.ftruncate(fd, total_bytes)
                os.fdatasync(fd)
            finally:
                os.close(fd)
            os.rename(unfinished, path)
            # The name is not forced to the disk: after a crash of the machine it may be missing, which is a miss.
            undo.pop_all()

    def _write_pieces(self, fd: int, pieces: Pieces[Piece]) -> None:
        while (piece := pieces.take()) is not None:
            try:
                whole_blocks = align_up(piece.num_bytes, BLOCK_BYTES)
                self._folder.write(fd, piece.slot[:whole_blocks], piece.offset_bytes)
            finally:
                self._transfers.slots.give_back(piece.slot)

    def _write_at_once(self, fd: int, writer: RecordWriter, payload: memoryview, deadline: Deadline) -> None:
        slot = self._transfers.slots.take(deadline)
        try:
            slot[:HEAD_BYTES] = writer.head
            self._folder.write(fd, slot[:HEAD_BYTES], 0)
        finally:
            self._transfers.slots.give_back(slot)
        self._folder.write(fd, payload, HEAD_BYTES)
        writer.check_source()

    @staticmethod
    def _discard(path: Path) -> None:
        with contextlib.suppress(OSError):
            os.unlink(path)

    def _read_file(self, key: bytes, total_bytes: int, pieces: Pieces[Piece], deadline: Deadline) -> bool:
        try:
            fd = self._folder.open_file(self._folder.path(key), os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            size_bytes = os.fstat(fd).st_size
            if size_bytes != total_bytes:
                raise TierCorrupt(f"the record of chunk {key.hex()[:16]} has {size_bytes} bytes, not {total_bytes}")
            offset_bytes = 0
            while offset_bytes < total_bytes:
                slot = self._transfers.slots.take(deadline)
                with contextlib.ExitStack() as undo:
                    undo.callback(self._transfers.slots.give_back, slot)
                    wanted = min(len(slot), align_up(total_bytes - offset_bytes, BLOCK_BYTES))
                    num_bytes = self._folder.read(fd, slot[:wanted], offset_bytes)
                    undo.pop_all()
                pieces.put(Piece(slot, offset_bytes, num_bytes))
                offset_bytes += num_bytes
                if num_bytes < wanted:
                    break
        finally:
            os.close(fd)
        return True

    def _unlink(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            try:
                os.unlink(self._folder.path(key))
            except FileNotFoundError:
                continue
            except OSError:
                self.num_left_behind += 1

    def _take_out(self, keys: Sequence[bytes]) -> None:
        """Off the disk, then out of the books: what is put meanwhile is in both, or in the books alone, a miss."""
        for key in keys:
            number = self.index.number_of(key)
            self._unlink([key])
            self.index.forget(key, number)

    def _remove_for_good(self, keys: Sequence[bytes]) -> None:
        self._take_out(keys)
        for folder in {self._folder.path(key).parent for key in keys}:
            self._guarded(partial(self._folder.sync_folder, folder))

    def _guarded(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except OSError as error:
            raise tier_error(error, Path(self._options.path)) from error
