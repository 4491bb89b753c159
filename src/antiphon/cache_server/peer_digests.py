"""Digests of chunks in the arena, for peers: each is taken once, since a readable chunk does not change.

Owns the threads that take them. They are taken soon after the store, so that a peer does not wait for it; not those of
chunks that came from a peer themselves, and not when many wait. What a peer asks for goes before those, and what it
waits for goes first.

Always true:

- No chunk is queued twice, nor while its digest is being taken. What is queued is bounded.
- A wait for a digest ends after ``WAIT_S``, whatever the threads do.
- A digest that cannot be taken is known to nobody, and keeps no thread.

It does not know whether a chunk is still there: whoever asks has a lease, and the generation of a chunk that has gone
is never asked for.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from antiphon.cache.arena import RegionHandle
from antiphon.cache.lending import Loan
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server.giving_way import give_way
from antiphon.core.quiet_log import QuietLog
from antiphon.storage.arena import ArenaMapping
from antiphon.storage.record import PayloadDigest

log = logging.getLogger("antiphon.peers")

THREADS: Final = 2
KNOWN_MAX: Final = 65_536
AHEAD_MAX: Final = 256
"""Chunks whose digests may wait to be taken before anybody asks; those of others are taken when they are lent."""
QUEUED_MAX: Final = 256
"""Chunks that were asked for and wait for a thread: as many as a call names. What is past it is asked for again."""
WAIT_S: Final = 0.1
"""For one digest: with the call itself it is below what a peer waits for loans, a quarter of a second."""
PULLED_MAX: Final = 4_096


class Digests:
    """The digests that are known, and those that are to be taken. Of any thread but for ``first``.

    Args:
        arena: where the chunks are.
    """

    def __init__(self, arena: ArenaMapping) -> None:
        self._arena = arena
        self._known: OrderedDict[int, bytes] = OrderedDict()
        """By generation of the region; under ``lock``, as all that follows."""
        self._taking: dict[int, Future[None]] = {}
        """What is queued or being taken, by generation: ends when it is known, is cancelled where it never is."""
        self._queue: OrderedDict[int, tuple[RegionHandle, int]] = OrderedDict()
        """What was asked for and is not being taken: what is taken next is first."""
        self._num_running = 0
        """Threads that take what is queued."""
        self._pulled: OrderedDict[bytes, None] = OrderedDict()
        """Tier keys of what came from a peer lately."""
        self._num_ahead = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(THREADS, "antiphon-digest", initializer=give_way)
        self._ahead = ThreadPoolExecutor(1, "antiphon-digest-ahead", initializer=give_way)
        self._quiet = QuietLog(log, num_lines=5)

    def known(self, loan: Loan) -> bytes | None:
        """The digest of a leased chunk, 16 bytes, where it was taken."""
        with self._lock:
            return self._known.get(loan.region.generation)

    def begin(self, loan: Loan) -> None:
        """The digest of a leased chunk will be asked for. Does not wait; nothing where too many wait already."""
        with self._lock:
            if len(self._queue) < QUEUED_MAX:
                self._enqueue(loan)

    async def first(self, loans: Sequence[Loan]) -> None:
        """Waits for the digest of one of these leased chunks: the one that is being taken, or else the one that was
        asked for first. ``WAIT_S`` at most."""
        with self._lock:
            if any(loan.region.generation in self._known for loan in loans):
                return
            place = {generation: number for number, generation in enumerate(self._queue)}
            chosen = min(loans, key=lambda loan: self._distance(loan.region.generation, place))
            self._enqueue(chosen)
            generation = chosen.region.generation
            if generation in self._queue:
                self._queue.move_to_end(generation, last=False)
            if len(self._queue) > QUEUED_MAX:
                dropped, _ = self._queue.popitem()
                self._taking.pop(dropped).cancel()
            taking = self._taking.get(generation)
        if taking is not None:
            await asyncio.wait([asyncio.wrap_future(taking)], timeout=WAIT_S)

    def _distance(self, generation: int, place: dict[int, int]) -> int:
        """How far from being known: being taken, queued, or neither. Under ``lock``."""
        if generation in self._taking:
            return place.get(generation, -1)
        return len(place)

    def _enqueue(self, loan: Loan) -> None:
        """Under ``lock``."""
        generation = loan.region.generation
        if self._is_closed or generation in self._known or generation in self._taking:
            return
        self._taking[generation] = Future()
        self._queue[generation] = loan.region, loan.num_bytes
        if self._num_running < THREADS:
            self._num_running += 1
            self._threads.submit(self._take_queued)

    def pulled(self, key: bytes) -> None:
        """The chunk of that tier key comes from a peer, which has its digest: nobody is likely to ask here."""
        with self._lock:
            self._pulled[key] = None
            while len(self._pulled) > PULLED_MAX:
                self._pulled.popitem(last=False)

    def stored(self, key: TierKey, region: RegionHandle, num_bytes: int) -> None:
        """The chunk is readable: its digest is taken soon. Does not wait."""
        with self._lock:
            if key in self._pulled or self._num_ahead >= AHEAD_MAX:
                self._pulled.pop(key, None)
                return
            if self._is_closed:
                return
            self._num_ahead += 1
            self._ahead.submit(self._take_ahead, region, num_bytes)

    @property
    def num_waiting(self) -> int:
        """Digests that are still to be taken, whether anybody has asked for them or not."""
        with self._lock:
            return self._num_ahead + len(self._queue) + self._num_running

    # ---- of the threads ----------------------------------------------------------------------------------------------

    def _take_ahead(self, region: RegionHandle, num_bytes: int) -> None:
        generation = region.generation
        with self._lock:
            is_wanted = not self._is_closed and generation not in self._known and generation not in self._taking
            if is_wanted:
                self._taking[generation] = Future()
        if is_wanted:
            self._take(region, num_bytes)
        with self._lock:
            self._num_ahead -= 1

    def _take_queued(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._num_running -= 1
                    return
                _, (region, num_bytes) = self._queue.popitem(last=False)
            self._take(region, num_bytes)

    def _take(self, region: RegionHandle, num_bytes: int) -> None:
        found: bytes | None = None
        try:
            digest = PayloadDigest()
            digest.update(self._arena.view(region.offset_bytes, num_bytes))
            found = digest.digest()
        except Exception as error:  # supervised: who waits is told that there is none, and the thread goes on
            reason = f"{type(error).__name__}: {error}"
            self._quiet.say(logging.WARNING, "digests", "the digest of a chunk cannot be taken: %s", reason)
        with self._lock:
            taking = self._taking.pop(region.generation)
            if found is not None:
                self._known[region.generation] = found
                while len(self._known) > KNOWN_MAX:
                    self._known.popitem(last=False)
        if found is None:
            taking.cancel()
        elif taking.set_running_or_notify_cancel():
            taking.set_result(None)

    def close(self) -> None:
        """Waits for the digests that are being taken: the arena must not be unmapped before."""
        with self._lock:
            self._is_closed = True
            dropped = [self._taking.pop(generation) for generation in self._queue]
            self._queue.clear()
        for taking in dropped:
            taking.cancel()
        self._ahead.shutdown(wait=True)
        self._threads.shutdown(wait=True)
