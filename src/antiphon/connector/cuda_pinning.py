"""Tells the GPU's driver of the mapped arena, piece by piece, so that copies run at the full rate and beside the host.

Registering memory takes as long as touching it, 60 ms a GB and ten times that where it was never touched. So a thread
does it beside everything else, as the cache server populates the arena; a piece that a copy needs comes first.

Always true:

- A piece is registered once, and never again after it was taken back; a piece that is refused is copied to and from all
  the same, slowly, and that is said.
- The mapping goes only when nothing of it is registered: a driver that still knows the addresses refuses the next
  mapping there.
- Registering happens on the thread of the arena only, as an error of the driver sticks to the thread that met it.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from antiphon.connector.cuda_layout import Span, cut
from antiphon.storage.arena import ArenaMapping

log = logging.getLogger("antiphon.connector")

PIECE_BYTES = 256 << 20
"""Registered at once, 16 ms or so, in which the driver may keep launches of other threads waiting."""

POLL_S = 0.05
"""Between two looks whether the server has populated more."""

ENSURE_TIMEOUT_S = 10.0
"""How long a copy waits for its piece; then it is made as to any memory."""


class PinDriver(Protocol):
    """The driver's part. Both return None, or why it refuses."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Pages stay where they are, and the GPU may reach them."""

    def unregister(self, address: int) -> str | None:
        """Takes that back."""


class _State(enum.Enum):
    UNKNOWN = enum.auto()
    PINNED = enum.auto()
    REFUSED = enum.auto()


class PinnedArena:
    """One mapping, registered by a thread of its own from here on, until it is unmapped.

    Args:
        arena: open; its ``unmap_with`` is taken over.
        driver: of the GPU.
    """

    def __init__(self, arena: ArenaMapping, driver: PinDriver, piece_bytes: int = PIECE_BYTES) -> None:
        self.origin = arena.address
        self.num_bytes = arena.data_bytes
        self.piece_bytes = piece_bytes
        self._arena = arena
        self._driver = driver
        self._states = [_State.UNKNOWN] * -(-arena.data_bytes // piece_bytes)
        self._wanted: list[int] = []
        self._changed = threading.Condition()
        self._unmap: Callable[[], None] | None = None
        self._is_ending = False
        self._next = 0
        self._thread = threading.Thread(target=self._run, name="antiphon-pin", daemon=True)
        arena.unmap_with = self._take_over
        self._thread.start()

    # ---- for copies ------------------------------------------------------------------------------------------------

    def covers(self, address: int) -> bool:
        """Whether an address lies in this arena."""
        return self.origin <= address < self.origin + self.num_bytes

    def prepared(self, span: Span) -> Iterator[Span]:
        """The span, cut so that no part lies across two pieces; each piece is registered when its part is given."""
        for part in cut(span, self.origin, self.piece_bytes):
            self._ensure((part.address - self.origin) // self.piece_bytes)
            yield part

    def is_ready(self, span: Span) -> bool:
        """Whether ``prepared`` would wait for nothing."""
        first = (span.address - self.origin) // self.piece_bytes
        last = (span.address + span.num_bytes - 1 - self.origin) // self.piece_bytes
        return all(state is not _State.UNKNOWN for state in self._states[first : last + 1])

    def _ensure(self, piece: int) -> None:
        if self._states[piece] is not _State.UNKNOWN:
            return
        with self._changed:
            self._wanted.append(piece)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._states[piece] is not _State.UNKNOWN, ENSURE_TIMEOUT_S)

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes registered so far."""
        pinned = [piece for piece, state in enumerate(self._states) if state is _State.PINNED]
        return sum(self._size(piece) for piece in pinned)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        began_s = time.monotonic()
        while (piece := self._choose()) is not None:
            error = self._driver.register(self.origin + piece * self.piece_bytes, self._size(piece))
            if error is not None:
                log.warning("the driver does not register memory of the arena, copies there are slow: %s", error)
            with self._changed:
                self._states[piece] = _State.PINNED if error is None else _State.REFUSED
                self._changed.notify_all()
            if self._next == len(self._states):
                took_s = time.monotonic() - began_s
                log.info("%d MB of the arena are registered, in %.1f s", self.num_pinned_bytes // 10**6, took_s)
                self._next += 1  # said once
        self._take_back()

    def _choose(self) -> int | None:
        """The next piece; waits for one. None at the end."""
        with self._changed:
            while not self._is_ending:
                self._wanted = [piece for piece in self._wanted if self._states[piece] is _State.UNKNOWN]
                if self._wanted:
                    return self._wanted[0]
                while self._next < len(self._states) and self._states[self._next] is not _State.UNKNOWN:
                    self._next += 1
                if self._next >= len(self._states):
                    self._changed.wait()
                elif self._is_there(self._next):
                    self._next += 1
                    return self._next - 1
                else:
                    self._changed.wait(POLL_S)
        return None

    def _is_there(self, piece: int) -> bool:
        """Whether the server has populated a piece: it goes from the front to the back."""
        return self._arena.is_populated(piece * self.piece_bytes + self._size(piece) - 1)

    def _size(self, piece: int) -> int:
        return min(self.piece_bytes, self.num_bytes - piece * self.piece_bytes)

    # ---- the end ---------------------------------------------------------------------------------------------------

    def _take_over(self, unmap: Callable[[], None]) -> None:
        """The arena is closed: nothing is copied any more. Returns at once; the thread unmaps."""
        with self._changed:
            self._unmap = unmap
            self._is_ending = True
            self._changed.notify_all()

    def _take_back(self) -> None:
        for piece, state in enumerate(self._states):
            if state is _State.PINNED:
                error = self._driver.unregister(self.origin + piece * self.piece_bytes)
                if error is not None:
                    log.warning("the driver keeps memory of an arena that is gone: %s", error)
        assert self._unmap is not None
        self._unmap()

    def wait_unmapped(self, timeout_s: float) -> bool:
        """Waits for the end of the thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


class Pinning:
    """The arenas of one worker: the present one, and those of ended sessions while they are mapped.

    Args:
        driver: of the GPU.
    """

    def __init__(self, driver: PinDriver, piece_bytes: int = PIECE_BYTES) -> None:
        self._driver = driver
        self._piece_bytes = piece_bytes
        self._lock = threading.Lock()
        self._arenas: dict[int, PinnedArena] = {}  # by address: two mappings that are there have two

    def add(self, arena: ArenaMapping) -> None:
        """A mapped arena; it may be known."""
        with self._lock:
            if arena.is_closed:
                return
            known = self._arenas.get(arena.address)
            if known is None or known._is_ending:
                self._arenas = {at: one for at, one in self._arenas.items() if not one._is_ending}
                self._arenas[arena.address] = PinnedArena(arena, self._driver, self._piece_bytes)

    def is_ready(self, spans: Iterable[Span]) -> bool:
        """Whether ``prepared`` would wait for nothing."""
        arenas = tuple(self._arenas.values())
        return all(one.is_ready(span) for span in spans for one in arenas if one.covers(span.address))

    def prepared(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Spans of arenas cut into copies, their memory registered; others as they are."""
        for span in spans:
            found = next((one for one in tuple(self._arenas.values()) if one.covers(span.address)), None)
            if found is None:
                yield span
            else:
                yield from found.prepared(span)

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes registered, of all arenas."""
        return sum(one.num_pinned_bytes for one in tuple(self._arenas.values()))
