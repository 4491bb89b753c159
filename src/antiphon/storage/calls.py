"""Calls with a deadline into what may hang: threads of our own, and the pieces that go in and out of them.

A thread that waits for a disk or a service cannot be stopped. So the work of a call runs in a thread of the store, and
the caller waits for it until the deadline, then leaves. The thread never sees the caller's buffers: bytes pass in
pieces, which belong to one side at a time, and the caller copies. Copy and digest of one piece overlap with the
transfer of the next.

Always true:

- A wait of a caller ends by its deadline, with ``TierTimeout``.
- At most ``num_threads`` pieces of work run and ``QUEUED_MAX`` wait; past that a call is refused.
- What a late thread still does touches nothing of the caller's.

It does not know what the work is, and does not repeat it.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Final, Generic, NamedTuple, TypeVar

from antiphon.core.errors import TierTimeout, TierUnavailable
from antiphon.storage.record import RecordReader, RecordWriter

__all__ = ["CallPool", "Deadline", "Piece", "Pieces", "Slots", "Transfers"]

QUEUED_MAX: Final = 256
"""Calls that wait for a thread: more than a server's own pool makes at once."""
CLOSE_TIMEOUT_S: Final = 1.0

T = TypeVar("T")
P = TypeVar("P")


class Deadline:
    """The moment by which a call must be over.

    Args:
        timeout_s: from now.
        what: is waited for, to name it in the error.
    """

    __slots__ = ("_end_s", "timeout_s", "what")

    def __init__(self, timeout_s: float, what: str) -> None:
        self.timeout_s = timeout_s
        self.what = what
        self._end_s = time.monotonic() + timeout_s

    def remaining_s(self) -> float:
        """Seconds that are left; 0 or less: none."""
        return self._end_s - time.monotonic()

    def left_s(self) -> float:
        """Seconds that are left, more than 0.

        Raises:
            TierTimeout: none.
        """
        left_s = self.remaining_s()
        if left_s <= 0:
            raise self.passed()
        return left_s

    def passed(self) -> TierTimeout:
        """The error that says so."""
        return TierTimeout(f"{self.what} did not answer within {self.timeout_s:g} s")


class CallPool:
    """The threads of one store. They are daemons: one that hangs does not keep the process from ending.

    Args:
        name: of the store.
        num_threads: at least 1.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._queue: queue.Queue[tuple[Future[object], Callable[[], object]] | None] = queue.Queue(QUEUED_MAX)
        self._lock = threading.Lock()
        self.is_closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"antiphon-tier-{name}-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Has ``work`` run by the next free thread.

        Raises:
            TierUnavailable: the store is closed, or too many calls wait.
        """
        future: Future[T] = Future()
        with self._lock:
            if self.is_closed:
                raise TierUnavailable(f"the tier {self._name} is closed")
            try:
                self._queue.put_nowait((future, work))  # type: ignore[arg-type]  # Future is invariant
            except queue.Full:
                raise TierUnavailable(f"{QUEUED_MAX} calls of the tier {self._name} wait already") from None
        return future

    def call(self, work: Callable[[], T], deadline: Deadline) -> T:
        """What ``work`` returns or raises, if it does so by the deadline."""
        return self.result(self.start(work), deadline)

    @staticmethod
    def result(future: Future[T], deadline: Deadline) -> T:
        """The result of started work.

        Raises:
            TierTimeout: there is none by the deadline; work that has not begun will not.
        """
        try:
            return future.result(deadline.left_s())
        except TimeoutError:
            future.cancel()
            raise deadline.passed() from None
        except CancelledError:
            raise TierUnavailable("the tier was closed") from None
        except TierTimeout:
            future.cancel()
            raise

    def close(self) -> None:
        """Refuses new work, cancels what waits, and ends the threads that do not hang."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            while not self._queue.empty():
                if (waiting := self._queue.get_nowait()) is not None:
                    waiting[0].cancel()
            for _ in self._threads:
                self._queue.put_nowait(None)
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = work()
            except BaseException as error:  # supervised: the caller of the call gets it
                future.set_exception(error)
            else:
                future.set_result(result)
            del item, future, work


class Pieces(Generic[P]):
    """A short queue of pieces from one thread to another. What stays in it at its end is given to ``drop``.

    Args:
        deadline: for both sides.
        drop: takes a piece that nobody takes any more.
        limit: pieces at most.
    """

    def __init__(self, deadline: Deadline, drop: Callable[[P], None] | None = None, limit: int = 2) -> None:
        self._deadline = deadline
        self._drop = drop
        self._limit = limit
        self._pieces: deque[P] = deque()
        self._changed = threading.Condition()
        self._has_begun = False
        self._is_ended = False
        self._is_closed = False
        self._error: BaseException | None = None

    def put(self, piece: P) -> None:
        """Appends ``piece``; it is the other side's from then on, also when this raises.

        Raises:
            TierTimeout: there is no room by the deadline.
            BaseException: what the other side gave to ``close``.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self._discard, piece)
            with self._changed:
                while len(self._pieces) >= self._limit and not self._is_closed:
                    self._changed.wait(self._deadline.left_s())
                if self._is_closed:
                    assert self._error is not None
                    raise self._error
                self._pieces.append(piece)
                self._changed.notify_all()
            undo.pop_all()

    def take(self) -> P | None:
        """The next piece, the taker's from then on; None at the end.

        Raises:
            TierTimeout: there is none by the deadline.
            BaseException: what the other side gave to ``close``.
        """
        with self._changed:
            while not self._pieces:
                if self._error is not None:
                    raise self._error
                if self._is_ended:
                    return None
                self._changed.wait(self._deadline.left_s())
            piece = self._pieces.popleft()
            self._changed.notify_all()
            return piece

    def begin(self) -> None:
        """Of the side that runs in the pool: it is at work."""
        with self._changed:
            self._has_begun = True
            self._changed.notify_all()

    def wait_begun(self) -> None:
        """Until it is, so that nobody holds buffers for work that waits for a thread.

        Raises:
            TierTimeout: it is not by the deadline.
        """
        with self._changed:
            while not self._has_begun and not self._is_closed:
                self._changed.wait(self._deadline.left_s())

    def end(self) -> None:
        """Of the side that puts: all pieces have come."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()

    def close(self, error: BaseException) -> None:
        """Of either side: it leaves because of ``error``, which the other side gets. What is left is dropped."""
        with self._changed:
            self._is_closed = True
            self._error = self._error or error
            left = list(self._pieces)
            self._pieces.clear()
            self._changed.notify_all()
        for piece in left:
            self._discard(piece)

    def _discard(self, piece: P) -> None:
        if self._drop is not None:
            self._drop(piece)


class Slots:
    """Page-aligned buffers of one size, lent to one thread at a time.

    Args:
        num_slots: how many; their memory is taken as it is first used.
        slot_bytes: of each, a multiple of the page size.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        assert slot_bytes % mmap.PAGESIZE == 0, slot_bytes
        self.slot_bytes = slot_bytes
        self._map = mmap.mmap(-1, num_slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = memoryview(self._map)
        self._free: queue.LifoQueue[memoryview] = queue.LifoQueue()
        for start in range(0, num_slots * slot_bytes, slot_bytes):
            self._free.put(whole[start : start + slot_bytes])

    def take(self, deadline: Deadline) -> memoryview:
        """A slot, to be given back by whoever holds it in the end.

        Raises:
            TierTimeout: none is free by the deadline.
        """
        try:
            return self._free.get(timeout=deadline.left_s())
        except queue.Empty:
            raise deadline.passed() from None

    def give_back(self, slot: memoryview) -> None:
        assert len(slot) == self.slot_bytes, "a part of a slot"
        self._free.put(slot)


class Piece(NamedTuple):
    """A part of a record, at the start of a slot.

    Args:
        slot: lent, or memory of its own.
        offset_bytes: of the part in the record.
        num_bytes: of the part.
        is_lent: whether the slot is to be given back.
    """

    slot: memoryview
    offset_bytes: int
    num_bytes: int
    is_lent: bool = True


class Transfers:
    """Records in and out of the threads of a store, in slots.

    Args:
        name: of the store.
        num_threads: calls at once.
        slot_bytes: of a piece.
    """

    SLOTS_PER_CALL: Final = 4
    """One that the caller fills or empties, two in between, one that the thread works on."""

    def __init__(self, name: str, num_threads: int, slot_bytes: int) -> None:
        self.pool = CallPool(name, num_threads)
        self.slots = Slots(num_threads * self.SLOTS_PER_CALL, slot_bytes)

    def _pieces(self, deadline: Deadline) -> Pieces[Piece]:
        return Pieces(deadline, self._drop)

    def _drop(self, piece: Piece) -> None:
        if piece.is_lent:
            self.slots.give_back(piece.slot)

    def send(self, writer: RecordWriter, work: Callable[[Pieces[Piece]], None], deadline: Deadline) -> None:
        """Has ``work`` take all pieces of a record. It publishes when it got the last one, and gives slots back."""
        pieces = self._pieces(deadline)
        future = self.pool.start(lambda: _watched(work, pieces))
        try:
            pieces.wait_begun()
            offset_bytes = 0
            while offset_bytes < writer.total_bytes:
                slot = self.slots.take(deadline)
                num_bytes = writer.fill(slot)
                pieces.put(Piece(slot, offset_bytes, num_bytes))
                offset_bytes += num_bytes
            writer.check()
            pieces.end()
        except BaseException as error:  # supervised: the thread gets it too, and is not left waiting
            pieces.close(error)
            future.cancel()
            raise
        self.pool.result(future, deadline)

    def receive(self, reader: RecordReader, work: Callable[[Pieces[Piece]], bool], deadline: Deadline) -> bool:
        """Feeds the pieces that ``work`` puts, in their order. Returns what it returns: whether there was a record.

        Raises:
            TierCorrupt: there was one that is not whole, or not what it must be.
        """
        pieces = self._pieces(deadline)
        future = self.pool.start(lambda: _watched(work, pieces))
        try:
            while (piece := pieces.take()) is not None:
                try:
                    reader.feed(piece.slot[: piece.num_bytes])
                finally:
                    self._drop(piece)
        except BaseException as error:  # supervised: the thread gets it too, and is not left waiting
            pieces.close(error)
            future.cancel()
            raise
        is_there = self.pool.result(future, deadline)
        if is_there:
            reader.finish()
        return is_there

    def close(self) -> None:
        self.pool.close()


def _watched(work: Callable[[Pieces[Piece]], T], pieces: Pieces[Piece]) -> T:
    """Runs ``work``; its error reaches the other side at once."""
    pieces.begin()
    try:
        result = work(pieces)
    except BaseException as error:  # supervised: the other side gets it too, and is not left waiting
        pieces.close(error)
        raise
    pieces.end()
    return result
