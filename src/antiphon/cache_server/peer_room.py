"""How much is read from a peer at once, and until when: reads of one peer share a link, and so what they wait for.

Owns, for each life of a peer, the bytes under way and when some of them came last. Always true: no more than
``BYTES_MAX`` are under way, but for one chunk that is larger; who waits for room ends with the first failure of that
peer; a read ends at the latest when a link of ``BYTES_PER_S`` would have brought all of these bytes, and sooner where
nothing comes from the peer at all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from antiphon.core.errors import PeerTimeout, PeerUnavailable
from antiphon.core.units import MIB

BYTES_MAX: Final = 128 * MIB
"""Enough to fill a link."""
BYTES_PER_S: Final = 100e6
"""Of a link, for all reads of a peer together: slower than that, computing is faster."""
SILENT_S: Final = 0.5
"""A peer of which nothing has come for so long hangs, once its bytes had their time."""

Life = tuple[str, str]
"""Instance and incarnation."""


class _Peer:
    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_waiting = 0
        self.num_failures = 0
        self.came_s = 0.0


class ReadTurn:
    """One read, while it has its room.

    Args:
        peer: what all reads of the peer share.
        num_bytes: of the read.
    """

    def __init__(self, peer: _Peer, num_bytes: int, now_s: Callable[[], float]) -> None:
        self._peer = peer
        self._now_s = now_s
        self._alone_s = now_s() + SILENT_S + num_bytes / BYTES_PER_S
        self._last_s = now_s() + SILENT_S + max(num_bytes, BYTES_MAX) / BYTES_PER_S

    def came(self) -> None:
        """Some bytes have come."""
        self._peer.came_s = self._now_s()

    def deadline_s(self) -> float:
        """Until when it is waited for, on the monotonic clock; later where other reads of the peer get on."""
        return max(self._alone_s, min(self._last_s, self._peer.came_s + SILENT_S))


class ReadRoom:
    """Room for reads from all peers. Safe for any thread.

    Args:
        now_s: the monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._changed = threading.Condition()
        self._peers: dict[Life, _Peer] = {}

    @contextmanager
    def taken(self, life: Life, num_bytes: int, wait_s: float) -> Iterator[ReadTurn]:
        """Room for a read of ``num_bytes``, as long as the block lasts.

        Raises:
            PeerUnavailable: another read of this peer failed meanwhile.
            PeerTimeout: there was none within ``wait_s``.
        """
        with self._changed:
            peer = self._peers.setdefault(life, _Peer())
            failures = peer.num_failures
            peer.num_waiting += 1

            def is_over() -> bool:
                has_room = not peer.num_bytes or peer.num_bytes + num_bytes <= BYTES_MAX
                return has_room or peer.num_failures != failures

            in_time = self._changed.wait_for(is_over, wait_s)
            peer.num_waiting -= 1
            try:
                if peer.num_failures != failures:
                    raise PeerUnavailable("another read from it failed")
                if not in_time:
                    raise PeerTimeout(f"no room for another read within {wait_s:g} s")
                peer.num_bytes += num_bytes
            finally:
                self._forget(life, peer)
            turn = ReadTurn(peer, num_bytes, self._now_s)
        try:
            yield turn
        finally:
            with self._changed:
                peer.num_bytes -= num_bytes
                self._forget(life, peer)
                self._changed.notify_all()

    def failed(self, life: Life) -> None:
        """A read or a call of that peer failed: nobody waits for room to read from it."""
        with self._changed:
            peer = self._peers.get(life)
            if peer is not None:
                peer.num_failures += 1
                self._changed.notify_all()

    def _forget(self, life: Life, peer: _Peer) -> None:
        """Peers from which nothing is read, nor waited for, are not kept."""
        if not peer.num_bytes and not peer.num_waiting:
            self._peers.pop(life, None)

    @property
    def num_bytes(self) -> dict[Life, int]:
        """Under way, by life of a peer."""
        with self._changed:
            return {life: peer.num_bytes for life, peer in self._peers.items()}
