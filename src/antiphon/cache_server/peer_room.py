"""How much is read from peers at once, and until when: all reads come over this server's one link.

Owns the bytes under way, the queue of those who wait for room, and for each life of a peer that is read from when it
gave a sign last. Always true:

- No more than ``BYTES_MAX`` are under way from all peers together, but for one chunk that is larger.
- Room is given in the order in which it was asked for. Who waits has an end: it is asked whether it still wants any
  after each failure, and waits no longer than a link of ``BYTES_PER_S`` takes for the bytes before it.
- A peer hangs when nothing has come from it for ``SILENT_S``, and for what a link of ``BYTES_PER_S`` takes for what was
  asked of it, while that may share the link with reads from others. All of it counts: a link may serve it evenly, so
  that nothing is seen before nearly all has come. A peer that gives signs and is late does not hang.
- It is slow where it had the link for itself, for as long as it takes at ``BYTES_PER_S`` to bring all that was asked of
  it; or where others brought so much meanwhile that it had its turn. Else a read that is late says nothing of the peer.

It does not read, and does not know why a read ended.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from antiphon.core.units import MIB

BYTES_MAX: Final = 128 * MIB
"""Enough to fill a link."""
BYTES_PER_S: Final = 100e6
"""Of a link, for all reads together: slower than that, computing is faster."""
SILENT_S: Final = 0.5
"""A peer of which nothing has come for so long hangs, once its bytes had their time."""
SHARED_RATIO: Final = 4
"""Of others' bytes so many times as many come as were beside those of a peer before they count as no longer in their
way: a link may serve others first, and what is seen of a read comes all at once."""
READS_MAX: Final = 16
"""Reads at once: each has at least that share of a link that serves all evenly."""
_LOOK_S: Final = 0.1
"""A deadline may come nearer: who waits without a sign looks so often."""

Life = tuple[str, str]
"""Instance and incarnation."""


class Place:
    """What one pull takes of the room. Changed by the room alone.

    Args:
        num_bytes: of the chunk.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_held = False


class _Peer:
    """One life of a peer, while something is read from it."""

    def __init__(self) -> None:
        self.num_turns = 0
        self.num_unseen = 0
        """Bytes that may come before anything is seen of any read, at most."""
        self.sign_s = 0.0
        self.num_beside = 0
        """Such bytes of other peers, at the last sign or since."""
        self.came_at_sign = 0
        self.num_asked = 0
        """Bytes of all of its reads."""
        self.num_left = 0
        """Those of them that have not come, of reads that are not over."""
        self.num_came = 0
        self.alone_s = 0.0
        """When others were read from last."""


class ReadTurn:
    """One read from a peer, from its beginning to its end.

    Args:
        room: whose.
        peer: what all reads from the peer share.
        num_bytes: of the read.
        last_s: until when it is waited for, whatever comes.
    """

    def __init__(self, room: ReadRoom, peer: _Peer, num_bytes: int, last_s: float) -> None:
        self._room = room
        self.peer = peer
        self.last_s = last_s
        self.began_s = room.now_s()
        self.num_left = num_bytes
        """Changed by the room alone, as the next two."""
        self.num_before = 0
        """Bytes that the peer owed when it began, with this read, less all that were asked of it until then."""
        self.num_beside = 0
        """Bytes that had come from others then."""

    def came(self, num_bytes: int) -> None:
        """So many bytes have come."""
        self._room.came(self, num_bytes)

    def deadline_s(self) -> float:
        """Until when it is waited for, on the monotonic clock. It moves with what comes, here and from others."""
        return min(self.last_s, self._room.hangs_at_s(self.peer))

    def look_s(self) -> float:
        """The same, but soon: for one who waits by it, and asks again when it is over."""
        return min(self.deadline_s(), self._room.now_s() + _LOOK_S)

    @property
    def is_hung(self) -> bool:
        """Whether the peer hangs; a read that ends otherwise at its deadline is only late."""
        return self._room.now_s() >= self._room.hangs_at_s(self.peer)

    @property
    def is_slow(self) -> bool:
        """Whether it is the peer's doing that the read is not over, if it gives signs."""
        return self._room.is_slow(self)


class ReadRoom:
    """Room for reads from all peers. Safe for any thread.

    Args:
        now_s: the monotonic clock.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self.now_s = now_s
        self._changed = threading.Condition()
        self._queue: deque[Place] = deque()
        self._num_bytes = 0
        self._num_came = 0
        self._peers: dict[Life, _Peer] = {}

    # ---- room --------------------------------------------------------------------------------------------------------

    def take(self, place: Place, end_s: float, is_wanted: Callable[[], bool]) -> bool:
        """Waits for room; returns whether ``place`` has it, which is to be given back.

        Args:
            place: that has none.
            end_s: by when the bytes have to be there, on the monotonic clock. The wait ends when they would not come
                by then, at the rate of the wait or ``BYTES_PER_S``; half of the time is for the wait in any case.
            is_wanted: asked at the beginning and after each change; where it says no, the wait ends.
        """
        assert not place.is_held
        with self._changed:
            began_s, num_came = self.now_s(), self._num_came
            read_max_s = (end_s - began_s) / 2
            num_before = self._num_bytes + sum(each.num_bytes for each in self._queue)
            last_s = began_s + SILENT_S + num_before / BYTES_PER_S
            self._queue.append(place)
            try:
                while is_wanted():
                    now_s = self.now_s()
                    rate = max(BYTES_PER_S, (self._num_came - num_came) / max(now_s - began_s, SILENT_S))
                    alone_s, shared_s = (
                        min(num_bytes / rate, read_max_s)
                        for num_bytes in (place.num_bytes, place.num_bytes + self._num_bytes)
                    )
                    left_s = min(last_s, end_s - alone_s) - now_s
                    is_next = self._queue[0] is place and self._fits(place)
                    if is_next and now_s + shared_s <= end_s:
                        self._num_bytes += place.num_bytes
                        place.is_held = True
                        return True
                    if left_s <= 0:
                        return False
                    self._changed.wait(left_s)
                return False
            finally:
                self._queue.remove(place)
                if self._queue:
                    self._changed.notify_all()

    def _fits(self, place: Place) -> bool:
        return not self._num_bytes or self._num_bytes + place.num_bytes <= BYTES_MAX

    def give_back(self, place: Place) -> None:
        """The room is free for others; nothing where ``place`` has none."""
        with self._changed:
            if place.is_held:
                place.is_held = False
                self._num_bytes -= place.num_bytes
                assert self._num_bytes >= 0
                self._changed.notify_all()

    def look(self) -> None:
        """A peer has failed: those who wait look whether they still want room."""
        with self._changed:
            self._changed.notify_all()

    # ---- deadlines ---------------------------------------------------------------------------------------------------

    @contextmanager
    def reading(self, life: Life, num_bytes: int, num_unseen: int, end_s: float) -> Iterator[ReadTurn]:
        """A read from that life of a peer, as long as the block lasts.

        Args:
            life: of the peer.
            num_bytes: of the read.
            num_unseen: so many of them may come before ``ReadTurn.came`` is told of any.
            end_s: until when it is waited for at the latest.
        """
        with self._changed:
            peer = self._peers.get(life)
            if peer is None:
                peer = self._peers[life] = _Peer()
                self._sign(peer)
            peer.num_turns += 1
            peer.num_unseen += num_unseen
            peer.num_left += num_bytes
            peer.num_asked += num_bytes
            for other in self._peers.values():
                if other is not peer:
                    other.num_beside = min(BYTES_MAX, other.num_beside + num_unseen)
            turn = ReadTurn(self, peer, num_bytes, end_s)
            turn.last_s = min(end_s, turn.began_s + SILENT_S + max(num_bytes, BYTES_MAX) / BYTES_PER_S)
            turn.num_before = peer.num_left - peer.num_asked
            turn.num_beside = self._num_came - peer.num_came
        try:
            yield turn
        finally:
            with self._changed:
                peer.num_turns -= 1
                peer.num_unseen -= num_unseen
                peer.num_left -= turn.num_left
                if not peer.num_turns:
                    del self._peers[life]
                    for other in self._peers.values():
                        other.alone_s = self.now_s()

    def _sign(self, peer: _Peer) -> None:
        peer.sign_s = self.now_s()
        peer.came_at_sign = self._num_came
        peer.num_beside = sum(other.num_unseen for other in self._peers.values() if other is not peer)

    def came(self, turn: ReadTurn, num_bytes: int) -> None:
        """So many bytes of it have come."""
        with self._changed:
            self._num_came += num_bytes
            turn.num_left -= num_bytes
            turn.peer.num_left -= num_bytes
            turn.peer.num_came += num_bytes
            self._sign(turn.peer)

    def hangs_at_s(self, peer: _Peer) -> float:
        """From when on the peer counts as one that hangs, if nothing comes from it until then."""
        with self._changed:
            num_beside = max(0.0, peer.num_beside - (self._num_came - peer.came_at_sign) / SHARED_RATIO)
            return peer.sign_s + SILENT_S + (peer.num_unseen + num_beside) / BYTES_PER_S

    def is_slow(self, turn: ReadTurn) -> bool:
        """Whether it is the peer's doing that the read is not over. Of what others bring, all that may be under way
        can have been before it, and of the rest each of its bytes is worth one of each other read."""
        peer = turn.peer
        with self._changed:
            num_own = turn.num_before + peer.num_asked
            num_beside = self._num_came - peer.num_came - turn.num_beside
            if num_beside >= BYTES_MAX + (READS_MAX - 1) * num_own:
                return True
            began_s = max(turn.began_s, peer.alone_s)
            return len(self._peers) == 1 and self.now_s() >= began_s + SILENT_S + num_own / BYTES_PER_S

    # ---- for tests ---------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Under way."""
        with self._changed:
            return self._num_bytes

    @property
    def num_waiting(self) -> int:
        """Those who wait for room."""
        with self._changed:
            return len(self._queue)

    def validate(self) -> None:
        """Asserts what always holds between calls."""
        with self._changed:
            assert self._num_bytes >= 0
            assert all(not place.is_held for place in self._queue)
            assert all(peer.num_turns > 0 and peer.num_unseen >= 0 for peer in self._peers.values())
            assert all(0 <= peer.num_left <= peer.num_asked for peer in self._peers.values())
