"""Tells the GPU's driver of the mapped arena, piece by piece, so that copies run at the full rate and beside the host.

While the driver registers memory, 0.11 to 0.17 s a GB and longer where it was never touched, it may do nothing else for
this process: launches wait, and an engine that captures CUDA graphs may lose the capture. So before the engine has
started only pieces that a copy needs are registered, which are the gate's. After that a thread registers the rest as
the cache server populates it, with pauses in which the engine launches; pieces that a copy needs come first.

Always true:

- Nothing is registered or taken back by itself before ``begin``.
- A piece is registered once, and never again after it was taken back. One that is refused is tried again, later each
  time, ``TRIES_MAX`` times in all; meanwhile it is copied to and from all the same, slowly, and that is said.
- A thread that fails keeps no copy waiting.
- The mapping goes only when nothing of it is registered: a driver that still knows the addresses refuses the next
  mapping there.
- Registering happens on the thread of the arena only, as an error of the driver sticks to the thread that met it.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

from antiphon.connector.cuda_layout import Span, cut
from antiphon.storage.arena import ArenaMapping

log = logging.getLogger("antiphon.connector")

PIECE_BYTES = 256 << 20
"""Registered at once, 30 to 45 ms beside an engine, in which the driver may keep launches of other threads waiting."""

PAUSES = 2
"""A pause is so many times as long as the piece before it took: two thirds of the time are the engine's."""

PAUSE_MIN_S = 0.02

URGENT_PAUSE_S = 0.004
"""Between two pieces that copies wait for: a step that waits for the driver gets its launches in."""

POLL_S = 0.05
"""Between two looks whether the server has populated more."""

ENSURE_TIMEOUT_S = 10.0
"""How long a copy waits for its pieces; then it is made as to any memory."""

RETRY_S = 1.0
"""After the first refusal of a piece; twice as long after each further one."""

TRIES_MAX = 6
"""Of a piece, over half a minute."""


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
        has_begun: set when more may be registered than copies need, and what is registered taken back.
    """

    def __init__(self, arena: ArenaMapping, driver: PinDriver, piece_bytes: int, has_begun: threading.Event) -> None:
        self.origin = arena.address
        self.num_bytes = arena.data_bytes
        self.piece_bytes = piece_bytes
        self._arena = arena
        self._driver = driver
        self._has_begun = has_begun
        self._states = [_State.UNKNOWN] * -(-arena.data_bytes // piece_bytes)
        self._wanted: list[int] = []
        self._changed = threading.Condition()
        self._unmap: Callable[[], None] | None = None
        self._is_ending = self._is_broken = False
        self._next = 0  # all before it were tried
        self._tries = [0] * len(self._states)
        self._num_urgent = 0  # pieces that copies waited for
        self._again_s: dict[int, float] = {}  # when refused pieces are tried again
        self._ended_s = self._resume_s = -math.inf  # when the last piece was done, and the pause after it ends
        self._thread = threading.Thread(target=self._run, name="antiphon-pin", daemon=True)
        arena.unmap_with = self._take_over
        self._thread.start()

    # ---- for copies ------------------------------------------------------------------------------------------------

    def covers(self, address: int) -> bool:
        """Whether an address lies in this arena."""
        return self.origin <= address < self.origin + self.num_bytes

    def pieces(self, span: Span) -> range:
        """The pieces that a span touches."""
        first = (span.address - self.origin) // self.piece_bytes
        return range(first, (span.address + span.num_bytes - 1 - self.origin) // self.piece_bytes + 1)

    def cut(self, span: Span) -> Iterator[Span]:
        """The span, cut so that no part lies across two pieces."""
        return cut(span, self.origin, self.piece_bytes)

    def is_ready(self, span: Span) -> bool:
        """Whether all of it is registered."""
        return all(self._states[piece] is _State.PINNED for piece in self.pieces(span))

    def prepare(self, pieces: Iterable[int]) -> None:
        """Waits until each was tried, at most ``ENSURE_TIMEOUT_S``."""
        missing = [piece for piece in pieces if self._states[piece] is _State.UNKNOWN]
        if not missing:
            return

        def is_over() -> bool:
            is_tried = all(self._states[piece] is not _State.UNKNOWN for piece in missing)
            return is_tried or self._is_ending or self._is_broken

        with self._changed:
            self._wanted += missing
            self._changed.notify_all()
            self._changed.wait_for(is_over, ENSURE_TIMEOUT_S)

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes registered so far."""
        return self._num_bytes_in(_State.PINNED)

    def _num_bytes_in(self, state: _State) -> int:
        return sum(self._size(piece) for piece, found in enumerate(self._states) if found is state)

    # ---- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._register_all()
        except Exception:  # supervised: no copy waits for a thread that has ended, and the mapping goes all the same
            log.exception("no more memory of the arena is registered: copies there are slow")
            with self._changed:
                self._is_broken = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._is_ending)
        self._has_begun.wait()
        self._take_back()

    def _register_all(self) -> None:
        while (piece := self._choose()) is not None:
            began_s = time.monotonic()
            address = self.origin + piece * self.piece_bytes
            error = _answer(partial(self._driver.register, address, self._size(piece)))
            ended_s = time.monotonic()
            with self._changed:
                self._tried(piece, error, ended_s)
                self._ended_s = ended_s
                self._resume_s = ended_s + max(PAUSE_MIN_S, PAUSES * (ended_s - began_s))
                self._changed.notify_all()
            if _State.UNKNOWN not in self._states and not self._again_s:
                sizes = [self._num_bytes_in(state) // 10**6 for state in (_State.PINNED, _State.REFUSED)]
                message = "%d MB of the arena are registered, %d MB are refused for good; copies waited for %d pieces"
                log.info(message, *sizes, self._num_urgent)

    def _tried(self, piece: int, error: str | None, now_s: float) -> None:
        self._again_s.pop(piece, None)
        self._tries[piece] += 1
        if error is None:
            self._states[piece] = _State.PINNED
            return
        if _State.REFUSED not in self._states:
            log.warning("the driver does not register memory of the arena, copies there are slow: %s", error)
        self._states[piece] = _State.REFUSED
        if self._tries[piece] < TRIES_MAX:
            self._again_s[piece] = now_s + RETRY_S * 2 ** (self._tries[piece] - 1)

    def _choose(self) -> int | None:
        """The next piece; waits for one. None at the end."""
        with self._changed:
            while not self._is_ending:
                self._wanted = [piece for piece in self._wanted if self._states[piece] is _State.UNKNOWN]
                now_s = time.monotonic()
                if self._wanted:
                    if now_s >= self._ended_s + URGENT_PAUSE_S:
                        self._num_urgent += 1
                        return self._wanted[0]
                    self._changed.wait(self._ended_s + URGENT_PAUSE_S - now_s)
                    continue
                rest_s = self._resume_s - now_s
                if self._has_begun.is_set() and rest_s <= 0 and (piece := self._choose_by_itself()) is not None:
                    return piece
                is_complete = self._next >= len(self._states) and not self._again_s
                self._changed.wait(None if is_complete else min(rest_s, POLL_S) if rest_s > 0 else POLL_S)
        return None

    def _choose_by_itself(self) -> int | None:
        """A piece that no copy waits for: the first that was not tried, if it is populated, else one to try again."""
        while self._next < len(self._states) and self._states[self._next] is not _State.UNKNOWN:
            self._next += 1
        if self._next < len(self._states) and self._is_there(self._next):
            return self._next
        now_s = time.monotonic()
        return next((piece for piece, due_s in self._again_s.items() if due_s <= now_s), None)

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
                error = _answer(partial(self._driver.unregister, self.origin + piece * self.piece_bytes))
                if error is not None:
                    log.warning("the driver keeps memory of an arena that is gone: %s", error)
        assert self._unmap is not None
        self._unmap()

    @property
    def is_ending(self) -> bool:
        """Whether the arena was closed."""
        return self._is_ending

    def wait_unmapped(self, timeout_s: float) -> bool:
        """Waits for the end of the thread; whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


def _answer(call: Callable[[], str | None]) -> str | None:
    """What the driver says; an error of the way to it is a refusal too."""
    try:
        return call()
    except Exception as error:  # supervised: the thread of the arena has other pieces to register and to take back
        return repr(error)


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
        self._has_begun = threading.Event()

    def begin(self) -> None:
        """Registers all memory of all arenas from here on, also those that come later. It may have begun."""
        self._has_begun.set()

    def add(self, arena: ArenaMapping) -> None:
        """A mapped arena; it may be known."""
        with self._lock:
            if arena.is_closed:
                return
            known = self._arenas.get(arena.address)
            if known is None or known.is_ending:
                self._arenas = {at: one for at, one in self._arenas.items() if not one.is_ending}
                made = PinnedArena(arena, self._driver, self._piece_bytes, self._has_begun)
                self._arenas[arena.address] = made

    def is_ready(self, spans: Iterable[Span]) -> bool:
        """Whether all memory of the spans is registered."""
        return all(one is not None and one.is_ready(span) for span, one in self._found(spans))

    def prepare(self, spans: Iterable[Span]) -> None:
        """Waits until the driver was asked for all memory of the spans, at most ``ENSURE_TIMEOUT_S`` for each arena."""
        pieces: dict[PinnedArena, set[int]] = {}
        for span, one in self._found(spans):
            if one is not None:
                pieces.setdefault(one, set()).update(one.pieces(span))
        for one, its in pieces.items():
            one.prepare(sorted(its))

    def cut(self, spans: Iterable[Span]) -> Iterator[Span]:
        """Spans of arenas cut into copies, those of other memory as they are. Waits for nothing."""
        for span, one in self._found(spans):
            if one is None:
                yield span
            else:
                yield from one.cut(span)

    def _found(self, spans: Iterable[Span]) -> Iterator[tuple[Span, PinnedArena | None]]:
        arenas = tuple(self._arenas.values())
        for span in spans:
            yield span, next((one for one in arenas if one.covers(span.address)), None)

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes registered, of all arenas."""
        return sum(one.num_pinned_bytes for one in tuple(self._arenas.values()))
