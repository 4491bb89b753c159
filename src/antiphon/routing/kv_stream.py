"""The order of one engine's KV events: what of a stream with losses, repeats and restarts may be believed.

Owns the place reached in one stream: the number expected next and the time stamp of the newest batch that was taken.
It looks into no batch and holds no block; it says what to do with both (:class:`Advice`).

An engine numbers its batches from 0 in each life, and stamps each with its clock. Its stream from any batch on, applied
to an empty record, claims nothing that the engine does not hold: what was stored before is not claimed, and what goes
is not missed. So wherever something may be missing, the record is emptied and begun anew with the next batch; before
that, a replay is waited for, ``doubt_s`` at most.

    number expected, newer stamp        take it; after a pause of ``pause_s``, in which an engine may have restarted and
                                        its first batches been lost, hold it and see whether the last one comes again
    higher number                       batches are missing, or it is another life: hold it, ask for a replay from the
                                        last one taken, which must come again with its stamp
    lower number, newer stamp           another life: forget
    older or equal stamp                a repeat, or late: dropped; unless a newer batch follows within ``doubt_s`` the
                                        clock was set back: forget, and begin with whatever comes
    number 0, older stamp               the same at once, unless it is the one that was taken

Without a replay two lives cannot be told apart where the later one's first batches are lost up to exactly the number
expected: whoever knows of the restart from elsewhere calls :meth:`KvStream.restart`.

Invariants (:meth:`KvStream.validate`): batches are advised in the order of their stamps and without a gap since the
last ``is_forget``; at most ``held_max`` batches are held, and none longer than ``doubt_s``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

_NEVER: Final = -1e300
NO_REPLAY: Final = -1


@dataclass(frozen=True)
class StreamOptions:
    """How one stream is followed.

    Args:
        doubt_s: how long claims are kept, and batches held, that a replay may still bear out.
        verify_s: a quiet stream is asked this often whether it is still the same life and has nothing newer.
        pause_s: no engine restarts within so long.
        held_max: batches held at most while a replay is waited for.
        has_replay: the engine can be asked for what it sent earlier.
    """

    doubt_s: float = 0.5
    verify_s: float = 10.0
    pause_s: float = 2.0
    held_max: int = 10_000
    has_replay: bool = True


class Advice:
    """What to do now: forget what the engine holds if ``is_forget``, then apply ``batches`` in order, then ask for a
    replay from ``replay_from`` on unless it is :data:`NO_REPLAY`."""

    def __init__(self) -> None:
        self.is_forget = False
        self.batches: list[object] = []
        self.replay_from = NO_REPLAY


class _Held:
    def __init__(self, stamp_s: float, sequence: int, batch: object) -> None:
        self.stamp_s = stamp_s
        self.sequence = sequence
        self.batch = batch


class KvStream:
    """One stream: of one engine, or of one of its data-parallel ranks. ``now_s`` is any clock that does not go back."""

    def __init__(self, options: StreamOptions) -> None:
        self._options = options
        self._next = 0
        self._newest_s = _NEVER
        self._first_s = _NEVER
        """Stamp of number 0 of this life, if it was taken."""
        self._is_begun = False
        """A batch was taken since the record was last empty."""
        self._held: list[_Held] = []
        self._is_waiting = False
        """For a replay."""
        self._waits_until_s = 0.0
        self._echo = NO_REPLAY
        """Number of the batch that the replay must begin with, unless the engine has another life."""
        self._echo_s = _NEVER
        self._is_echoed = False
        self._doubted_until_s = 0.0
        """Something old has come: unless a newer batch comes by then, the clock was set back. 0: nothing has."""
        self._heard_s = 0.0
        self.num_taken = 0
        self.num_dropped = 0
        self.num_gaps = 0
        self.num_restarts = 0
        self.num_forgotten = 0

    def take(self, sequence: int, stamp_s: float, batch: object, now_s: float) -> Advice:
        """A batch has come by itself."""
        advice = Advice()
        self._heard_s = now_s
        if stamp_s <= self._newest_s:
            self._take_old(sequence, stamp_s, now_s, advice)
        elif self._is_begun and sequence == self._next and not self._is_after_pause(stamp_s):
            self._apply(sequence, stamp_s, batch, advice)
            if self._held:
                self._apply_held(advice)
        elif self._is_waiting:
            self._hold(sequence, stamp_s, batch, advice)
        elif self._is_begun and sequence < self._next:
            self.num_restarts += 1
            self._begin_anew(advice)
            self._begin(sequence, stamp_s, batch, now_s, advice)
        elif self._is_begun:
            self.num_gaps += sequence > self._next
            if self._options.has_replay:
                self._hold(sequence, stamp_s, batch, advice)
                self._ask(now_s, advice)
            else:
                self._apply_after_gap(sequence, stamp_s, batch, advice)
        else:
            self._begin(sequence, stamp_s, batch, now_s, advice)
        return advice

    def take_replayed(self, sequence: int, stamp_s: float, batch: object) -> Advice:
        """A batch of the replay that was asked for has come."""
        advice = Advice()
        if not self._is_waiting:
            self.num_dropped += 1
        elif sequence == self._echo and stamp_s == self._echo_s:
            self._is_echoed = True
        elif stamp_s <= self._newest_s:
            self.num_dropped += 1
        else:
            self._hold(sequence, stamp_s, batch, advice)
        return advice

    def end_replay(self, *, is_whole: bool) -> Advice:
        """The replay has ended: the engine has nothing newer, or (not ``is_whole``) it could not be had."""
        advice = Advice()
        if self._is_waiting:
            if is_whole and self._echo != NO_REPLAY and not self._is_echoed:
                self.num_restarts += 1
                self._begin_anew(advice)
                self._echo = NO_REPLAY
            self._settle(advice, is_whole=is_whole)
        return advice

    def tick(self, now_s: float) -> Advice:
        """Time has passed."""
        advice = Advice()
        options = self._options
        if self._is_waiting and now_s >= self._waits_until_s:
            self._settle(advice, is_whole=False)
        if self._doubted_until_s and now_s >= self._doubted_until_s:
            self._begin_anew(advice)
            self._newest_s = _NEVER
        if not self._is_waiting and options.has_replay and self._is_begun and now_s >= self._heard_s + options.verify_s:
            self._heard_s = now_s
            self._ask(now_s, advice)
        return advice

    def is_outdone(self, stamp_s: float, now_s: float) -> bool:
        """Whether another stream that names the same engine, and has a batch of this stamp, is the one to follow: it is
        newer than anything that was taken here, or this one is silent."""
        return stamp_s > self._newest_s or now_s >= self._heard_s + self._options.pause_s

    def restart(self, now_s: float) -> Advice:
        """The engine is known, from elsewhere, to have begun another life. What it has said of the life that is over
        is not believed any more; what it has said of the new one comes again with a replay."""
        advice = Advice()
        self.num_restarts += 1
        self._settle(advice, is_whole=False)
        advice.batches.clear()
        self._begin_anew(advice)
        if self._options.has_replay:
            self._newest_s = _NEVER  # the replay is of the new life alone, and may hold what was taken already
            self._ask(now_s, advice)
        return advice

    def _take_old(self, sequence: int, stamp_s: float, now_s: float, advice: Advice) -> None:
        self.num_dropped += 1
        if stamp_s == self._newest_s and sequence == self._next - 1:
            return  # a repeat of the newest
        if sequence == 0 and stamp_s != self._first_s:
            self._begin_anew(advice)
            self._newest_s = _NEVER
        elif not self._doubted_until_s:
            self._doubted_until_s = now_s + self._options.doubt_s

    def _begin(self, sequence: int, stamp_s: float, batch: object, now_s: float, advice: Advice) -> None:
        """The first batch that is heard of a life."""
        if sequence and self._options.has_replay:
            self._hold(sequence, stamp_s, batch, advice)
            self._ask(now_s, advice)
        else:
            self._apply(sequence, stamp_s, batch, advice)

    def _is_after_pause(self, stamp_s: float) -> bool:
        return self._options.has_replay and stamp_s - self._newest_s >= self._options.pause_s

    def _ask(self, now_s: float, advice: Advice) -> None:
        self._is_waiting = True
        self._is_echoed = False
        self._echo = self._next - 1 if self._is_begun else NO_REPLAY
        self._echo_s = self._newest_s
        self._waits_until_s = now_s + self._options.doubt_s
        advice.replay_from = max(0, self._next - 1)

    def _hold(self, sequence: int, stamp_s: float, batch: object, advice: Advice) -> None:
        self._held.append(_Held(stamp_s, sequence, batch))
        if len(self._held) >= self._options.held_max:
            self._settle(advice, is_whole=False)

    def _apply(self, sequence: int, stamp_s: float, batch: object, advice: Advice) -> None:
        assert stamp_s > self._newest_s
        advice.batches.append(batch)
        self._next = sequence + 1
        self._newest_s = stamp_s
        if sequence == 0:
            self._first_s = stamp_s
        self._is_begun = True
        self._doubted_until_s = 0.0
        self.num_taken += 1

    def _apply_after_gap(self, sequence: int, stamp_s: float, batch: object, advice: Advice) -> None:
        self._begin_anew(advice)
        self._apply(sequence, stamp_s, batch, advice)

    def _apply_held(self, advice: Advice) -> None:
        """What is held and follows now without a gap; when nothing is left, the replay is not waited for."""
        self._held.sort(key=_order)
        count = 0
        for held in self._held:
            if held.stamp_s > self._newest_s:
                if held.sequence != self._next or self._is_after_pause(held.stamp_s):
                    break
                self._apply(held.sequence, held.stamp_s, held.batch, advice)
            count += 1
        del self._held[:count]
        if not self._held:
            self._is_waiting = False

    def _settle(self, advice: Advice, *, is_whole: bool) -> None:
        """Wait no longer: take what is held, and forget wherever something is missing or was not borne out."""
        self._is_waiting = False
        if self._held and self._echo != NO_REPLAY and not self._is_echoed:
            self._begin_anew(advice)
        held, self._held = self._held, []
        held.sort(key=_order)
        for one in held:
            if one.stamp_s <= self._newest_s:
                self.num_dropped += 1
            elif self._is_begun and one.sequence == self._next and (is_whole or not self._is_after_pause(one.stamp_s)):
                self._apply(one.sequence, one.stamp_s, one.batch, advice)
            else:
                self._apply_after_gap(one.sequence, one.stamp_s, one.batch, advice)

    def _begin_anew(self, advice: Advice) -> None:
        """Empty the record; batches advised before go with it."""
        if self._is_begun:
            self.num_forgotten += 1
        advice.is_forget = True
        advice.batches.clear()
        self._is_begun = False
        self._next = 0
        self._first_s = _NEVER
        self._doubted_until_s = 0.0

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._held) < max(1, self._options.held_max)
        assert self._is_waiting or not self._held
        assert self._next >= 0 and (self._is_begun or self._next == 0)
        assert not self._is_begun or self._newest_s > _NEVER


def _order(held: _Held) -> tuple[float, int]:
    return held.stamp_s, held.sequence
