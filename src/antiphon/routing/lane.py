"""Which prefill engines cold prompts are kept to, and how many of them are on each.

A prefill engine serves in turn: behind one long prompt all others wait for seconds. So cold prompts have a lane of a
few engines, and warm requests pass over an engine while a cold prompt is on it. How wide the lane is goes by what warm
requests need: as many engines stay out of it as there were warm prefills at once lately, and one more. So cold prompts
alone have most of the pool, and next to warm ones never less than ``lane_share`` of it.

Always true: the lane has between ``lane_share`` and ``lane_share_max`` of the engines, and one if there is any; neither
kind of request is told to pass over all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from antiphon.routing.cold import AdmissionOptions
from antiphon.routing.endpoint import Endpoint


class PrefillLane:
    """The lane of a prefill pool.

    Args:
        options: how wide it is, and how many cold prompts an engine of it has at once.
    """

    def __init__(self, options: AdmissionOptions) -> None:
        self._share = options.lane_share
        self._share_max = options.lane_share_max
        self._window_s = options.lane_window_s
        self._cold_per_engine = options.cold_per_engine
        self._all: tuple[Endpoint, ...] = ()
        self.engines: tuple[Endpoint, ...] = ()
        self._others: tuple[Endpoint, ...] = ()
        self._num_on: dict[Endpoint, int] = {}
        """Cold prompts on an engine, where there are any."""
        self.busy: tuple[Endpoint, ...] = ()
        """What warm requests pass over."""
        self.num_warm = 0
        """Warm requests in their prefill."""
        self._peak = 0
        """Most of them at once in this window."""
        self._peak_before = 0
        """In the one before."""
        self._window_began_s = 0.0

    def set_members(self, endpoints: Iterable[Endpoint]) -> None:
        """The engines that can be used now."""
        self._all = tuple(endpoints)
        self._set_lane(self._width())
        self._set_busy()

    def look(self, now_s: float) -> None:
        """Time has gone by: the lane grows when warm requests have become fewer."""
        if now_s - self._window_began_s >= self._window_s:
            has_skipped = now_s - self._window_began_s >= 2 * self._window_s
            self._peak_before = self.num_warm if has_skipped else self._peak
            self._peak = self.num_warm
            self._window_began_s = now_s
            self._widen()

    def warm_began(self, now_s: float) -> None:
        """One more warm request is in its prefill."""
        self.look(now_s)
        self.num_warm += 1
        if self.num_warm > self._peak:
            self._peak = self.num_warm
            self._widen()

    def warm_ended(self) -> None:
        """One less."""
        assert self.num_warm > 0
        self.num_warm -= 1

    @property
    def cold_max(self) -> int:
        """Cold prompts at once, on all engines together."""
        return max(1, len(self.engines)) * self._cold_per_engine

    def avoided_by_cold(self) -> tuple[Endpoint, ...]:
        """What cold requests pass over: what is not in the lane, and what is full there, if not all of it is."""
        full = tuple(one for one in self.engines if self._num_on.get(one, 0) >= self._cold_per_engine)
        return self._others + full if len(full) < len(self.engines) else self._others

    def take(self, endpoint: Endpoint) -> None:
        """A cold prompt goes to an engine, of the lane or not."""
        num = self._num_on.get(endpoint, 0)
        self._num_on[endpoint] = num + 1
        if not num:
            self._set_busy()

    def give_back(self, endpoint: Endpoint) -> None:
        """It is not there any more."""
        num = self._num_on[endpoint] - 1
        if num:
            self._num_on[endpoint] = num
        else:
            del self._num_on[endpoint]
            self._set_busy()

    @property
    def num_cold(self) -> int:
        """Cold prompts on all engines. O(engines)."""
        return sum(self._num_on.values())

    def num_on(self, endpoint: Endpoint) -> int:
        """Cold prompts on an engine."""
        return self._num_on.get(endpoint, 0)

    def validate(self) -> None:
        """Assert the invariants."""
        num = len(self._all)
        assert self.engines + self._others == self._all
        assert min(num, max(1, int(num * self._share))) <= len(self.engines) <= max(1, int(num * self._share_max))
        assert len(self.engines) == min(num, self._width()), "the lane is not as wide as it should be"
        assert self._peak >= self.num_warm >= 0
        assert all(num > 0 for num in self._num_on.values())
        assert set(self.busy) <= set(self._num_on)
        for avoided in (self.busy, self.avoided_by_cold()):
            assert not self._all or set(avoided) < set(self._all)

    def _width(self) -> int:
        num = len(self._all)
        least = max(1, int(num * self._share))
        peak = max(self._peak, self._peak_before)
        return max(least, min(int(num * self._share_max), num - peak - 1 if peak else num))

    def _widen(self) -> None:
        width = self._width()
        if width != len(self.engines):
            self._set_lane(width)

    def _set_lane(self, width: int) -> None:
        self.engines, self._others = self._all[:width], self._all[width:]

    def _set_busy(self) -> None:
        num_on = self._num_on
        busy = tuple(one for one in self._all if one in num_on) if num_on else ()
        self.busy = busy if len(busy) < len(self._all) else ()
