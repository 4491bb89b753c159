"""The choice of an engine by what it holds and by what it has to do: the rule of the policies that go by prefixes.

The expected work at an engine, in prompt tokens:

    work     tokens of the prompt - tokens that it is expected to hold + load
    load     tokens that it still has to compute for requests in flight + weight x requests in flight
    weight   prefill: ``REQUEST_TOKENS``, since no request is free. decode: the mean prompt of late, so that one request
             more in a batch is as bad as a whole prompt that is not there

The engine with the least work gets the request; equal ones by chance. Affinity yields to load: what an engine holds
counts for nothing while

- it has ``load_factor`` times the mean of requests in flight, rounded up to a whole request, this one counted; or
- it has had ``SHARE_FACTOR`` times the mean of the last requests, and requests in flight are at least half as many as
  engines. With fewer, nobody waits for anybody, and a chat stays where it is.

So a prefix that all requests begin with is soon held everywhere, and no engine gets more than its share but by being
the least loaded.

Owns the counts of the last requests of a pool. It does not know who holds what: that is an argument.
"""

from __future__ import annotations

from typing import Final

from antiphon.routing.endpoint import Endpoint, Role
from antiphon.routing.pickers import PickerOptions, load_bound

REQUEST_TOKENS: Final = 64.0
"""What a request costs a prefill engine beside its tokens: a step of its own, as so many tokens."""
SHARE_FACTOR: Final = 1.35
SHARE_SLACK: Final = 8
"""Requests beyond ``SHARE_FACTOR`` times the mean: the mean of a few is no measure."""
SHARE_WINDOW: Final = 128
"""Requests for each engine, after which all counts are halved: means are over the last 64 to 128."""
MEAN_WEIGHT: Final = 1 / 64
"""Of one prompt in the mean prompt."""


class Affinity:
    """The rule for one pool.

    Args:
        options: the role, and where affinity yields.
    """

    def __init__(self, options: PickerOptions) -> None:
        assert options.load_factor >= 1
        self.role: Role = options.role
        self._load_factor = options.load_factor
        self._share_factor = max(SHARE_FACTOR, options.load_factor)
        self._recent: dict[Endpoint, int] = {}
        self._num_recent = 0
        self._mean_tokens = 0.0

    def choose(self, candidates: list[Endpoint], chance: float, num_tokens: int, held: dict[Endpoint, int]) -> Endpoint:
        """The candidate with the least work, which is counted as having got the request. O(candidates).

        Args:
            candidates: not empty, all of one tier.
            chance: in [0, 1).
            num_tokens: of the prompt.
            held: tokens of the prompt that engines of the pool are expected to hold; those that are no candidates are
                passed over.
        """
        num = len(candidates)
        self._mean_tokens += (num_tokens - self._mean_tokens) * (MEAN_WEIGHT if self._mean_tokens else 1.0)
        weight = REQUEST_TOKENS
        if self.role == "decode" and self._mean_tokens > weight:
            weight = self._mean_tokens
        scaled = chance * num
        first = int(scaled)
        best = candidates[first]
        least = best.num_uncached_tokens + weight * best.num_active
        num_active = 0
        for index in range(first - num, first):
            endpoint = candidates[index]
            active = endpoint.num_active
            num_active += active
            load = endpoint.num_uncached_tokens + weight * active
            if load < least:
                best, least = endpoint, load
        if held:
            most_active = load_bound(num_active, num, self._load_factor)
            most_recent = self._most_recent(num_active, num)
            holders = [(endpoint, held[endpoint]) for endpoint in candidates if endpoint in held]
            start = int((scaled - first) * len(holders))
            for index in range(start - len(holders), start):
                endpoint, num_held = holders[index]
                active = endpoint.num_active
                if active >= most_active:
                    continue
                work = endpoint.num_uncached_tokens + weight * active - num_held
                if work < least and self._recent.get(endpoint, 0) < most_recent:
                    best, least = endpoint, work
        self._count(best, num)
        return best

    def set_members(self, endpoints: list[Endpoint]) -> None:
        """The endpoints of the pool are these."""
        recent = self._recent
        self._recent = {endpoint: recent[endpoint] for endpoint in endpoints if endpoint in recent}
        self._num_recent = sum(self._recent.values())

    def validate(self) -> None:
        """Assert the invariants."""
        assert self._num_recent == sum(self._recent.values())
        assert all(number > 0 for number in self._recent.values())
        assert self._mean_tokens >= 0

    def _most_recent(self, num_active: int, num: int) -> float:
        """An engine with fewer of the last requests is given credit for what it holds."""
        if 2 * (num_active + 1) < num:
            return float(self._num_recent + 1)
        return SHARE_SLACK + self._share_factor * self._num_recent / num

    def _count(self, endpoint: Endpoint, num: int) -> None:
        recent = self._recent
        recent[endpoint] = recent.get(endpoint, 0) + 1
        self._num_recent += 1
        if self._num_recent >= SHARE_WINDOW * num:
            self._recent = {one: number // 2 for one, number in recent.items() if number > 1}
            self._num_recent = sum(self._recent.values())
