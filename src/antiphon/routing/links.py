"""How fast KV moves from prefill engines to decode engines, as measured.

Owns the rate of each pair, of each decode engine, and of the pool. A rate is bytes over seconds, both forgotten
exponentially, so that a long transfer says more than a short one. Where a pair has no rate yet, that of its decode
engine stands for it, then that of the pool, then the option's.

Always true: a rate that is told is at least ``rate_min_bytes_s``, so that no bad measurement stops transfers for good,
and is finite; at most ``PAIRS_MAX`` pairs are kept, those used last. The first transfer of a pair is not counted: it
includes the handshake, which takes seconds. Transfers of less than ``sample_min_bytes`` are not either.

What is measured is the shell's business; nothing here knows the time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from antiphon.routing.endpoint import Endpoint

PAIRS_MAX = 8192
"""A hundred bytes each. Of more pairs, what has moved least lately is told by its decode engine."""

KEPT_SHARE: Final = 0.8
"""What a new sample leaves of the old ones: the last five weigh two thirds."""

SAMPLE_FACTOR_MAX: Final = 4.0
"""A sample counts as no more than so many times faster or slower than the mean: one request that waited long in its
engine, or found its KV there, moves the mean by half at most, and a link that has changed is known after some."""


class Rate:
    """Bytes a second: an exponential mean in which each sample weighs as long as it took."""

    __slots__ = ("num_bytes", "num_samples", "seconds")

    def __init__(self) -> None:
        self.num_bytes = 0.0
        self.seconds = 0.0
        self.num_samples = 0

    def add(self, num_bytes: float, seconds: float) -> None:
        """``num_bytes`` took ``seconds`` (none or more)."""
        assert num_bytes >= 0 and seconds >= 0
        self.num_bytes = self.num_bytes * KEPT_SHARE + num_bytes
        self.seconds = self.seconds * KEPT_SHARE + seconds
        self.num_samples += 1

    def bytes_s(self, open_s: float = 0.0) -> float:
        """The mean, 0 where nothing is known. ``open_s`` have gone by since the last sample without a byte."""
        seconds = self.seconds + open_s
        return self.num_bytes / seconds if seconds > 0 else 0.0


class SharedTime:
    """The time that one of several equal transfers at once has had the link for itself.

    ``seconds`` grows by 1/n a second while n transfers run. A transfer that began at a and ended at b had the link for
    ``seconds`` at b less ``seconds`` at a: its bytes over that are the rate of the link, however many shared it.
    """

    __slots__ = ("_at_s", "num", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num = 0
        self._at_s = 0.0

    def advance(self, now_s: float) -> float:
        """``seconds`` at this time."""
        if now_s > self._at_s:
            if self.num:
                self.seconds += (now_s - self._at_s) / self.num
            self._at_s = now_s
        return self.seconds

    def begin(self, now_s: float) -> float:
        """One more; returns ``seconds`` at its begin."""
        seconds = self.advance(now_s)
        self.num += 1
        return seconds

    def end(self, now_s: float) -> float:
        """One less; returns ``seconds`` at its end."""
        seconds = self.advance(now_s)
        assert self.num > 0
        self.num -= 1
        return seconds


class Links:
    """Measured rates.

    Args:
        rate_bytes_s: where nothing is measured.
        rate_min_bytes_s: the least that is ever told.
        sample_min_bytes: a shorter transfer is not counted.
    """

    def __init__(self, rate_bytes_s: float, rate_min_bytes_s: float, sample_min_bytes: int) -> None:
        assert rate_bytes_s >= rate_min_bytes_s > 0
        self._unknown_bytes_s = rate_bytes_s
        self._min_bytes_s = rate_min_bytes_s
        self._sample_min_bytes = sample_min_bytes
        self._pairs: OrderedDict[tuple[Endpoint, Endpoint], Rate | None] = OrderedDict()
        """None: its handshake is done, and nothing is measured yet. Least lately used first."""
        self._decodes: dict[Endpoint, Rate] = {}
        self._pool = Rate()

    def measured(self, prefill: Endpoint, decode: Endpoint, num_bytes: int, seconds: float) -> bool:
        """``decode`` has pulled from ``prefill``, alone on its link for ``seconds``. Returns whether it counts."""
        pair = (prefill, decode)
        pairs = self._pairs
        if pair not in pairs:
            pairs[pair] = None
            if len(pairs) > PAIRS_MAX:
                pairs.popitem(last=False)
            return False
        pairs.move_to_end(pair)
        if num_bytes < self._sample_min_bytes or seconds <= 0:
            return False
        rate = pairs[pair]
        if rate is None:
            pairs[pair] = rate = Rate()
        of_decode = self._decodes.get(decode)
        if of_decode is None:
            self._decodes[decode] = of_decode = Rate()
        seconds = min(seconds, num_bytes / self._min_bytes_s)
        for one in (rate, of_decode, self._pool):
            _add_bounded(one, num_bytes, seconds)
        return True

    def bytes_s(self, prefill: Endpoint | None, decode: Endpoint) -> float:
        """The rate of the pair, or of what stands for it."""
        if prefill is not None:
            rate = self._pairs.get((prefill, decode))
            if rate is not None:
                return self._at_least(rate)
        of_decode = self._decodes.get(decode)
        return self.pool_bytes_s if of_decode is None else self._at_least(of_decode)

    @property
    def pool_bytes_s(self) -> float:
        """The rate of one decode engine, taken over all."""
        return self._at_least(self._pool) if self._pool.num_samples else self._unknown_bytes_s

    def pairs(self) -> dict[tuple[str, str], float]:
        """The pairs that have a rate of their own, by URLs."""
        return {
            (prefill.url, decode.url): self._at_least(rate)
            for (prefill, decode), rate in self._pairs.items()
            if rate is not None
        }

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint is gone, or has restarted: its next transfer needs a handshake. Takes O(pairs)."""
        self._decodes.pop(endpoint, None)
        for pair in [pair for pair in self._pairs if endpoint in pair]:
            del self._pairs[pair]

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._pairs) <= PAIRS_MAX
        with_rate = {decode for (_, decode), rate in self._pairs.items() if rate is not None}
        assert with_rate <= self._decodes.keys()
        for rate in (*self._decodes.values(), *(rate for rate in self._pairs.values() if rate is not None)):
            assert rate.num_samples and rate.seconds > 0 and rate.num_bytes >= 0
            assert rate.num_samples <= self._pool.num_samples

    def _at_least(self, rate: Rate) -> float:
        bytes_s = rate.bytes_s()
        return bytes_s if bytes_s > self._min_bytes_s else self._min_bytes_s


def _add_bounded(rate: Rate, num_bytes: int, seconds: float) -> None:
    if rate.num_samples:
        expected_s = num_bytes / rate.bytes_s()
        seconds = max(expected_s / SAMPLE_FACTOR_MAX, min(expected_s * SAMPLE_FACTOR_MAX, seconds))
    rate.add(num_bytes, seconds)
