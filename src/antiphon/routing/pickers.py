"""The plain policies: which engine of a pool a request goes to. ``policies`` has the names of all.

    round_robin       in turn, a counter for each pool
    random            by chance
    least_load        the one with the fewest requests in flight from here, in turn among equals
    power_of_two      the less loaded of two taken by chance
    consistent_hash   by session, user or beginning of the prompt, unless that engine has too much to do

Loads are this router's own exact counts, never polled ones: a polled load is stale by the time it is used. With n
endpoints a pick costs O(1), consistent_hash O(log n). Where no engine is ready, or some are to be avoided, picking is
O(n): those are exceptions.

A picker is given the endpoints to choose from, all of one tier; the pool decides which. Where it is not given all of
the ready ones, picking is O(n) too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import blake2b
from math import ceil
from typing import Protocol

from antiphon.routing.ask import Ask
from antiphon.routing.endpoint import TIER_READY, Endpoint, Role
from antiphon.routing.kv_index import IndexOptions, KvIndex
from antiphon.routing.prefix_index import PrefixIndex

POINTS_PER_ENDPOINT = 64
"""Places of an endpoint on the ring: enough that shares differ by some tens of percent, which load evens out."""

PROMPT_PREFIX_BYTES = 1024
"""Of the prompt, where neither session nor user is given: long enough to tell system prompts apart."""


@dataclass(frozen=True, slots=True)
class PickerOptions:
    """What policies are made of; each takes what it needs.

    Args:
        role: of the pool.
        load_factor: affinity yields to load at an engine that has this many times the mean.
        prefixes: what the engines of both pools have been sent; shared by the policies of a fleet.
        kv_index: what the engines of both pools say they hold; shared too.
    """

    role: Role = "prefill"
    load_factor: float = 1.25
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    kv_index: KvIndex = field(default_factory=lambda: KvIndex(IndexOptions()))


class Picker(Protocol):
    """A policy for one pool."""

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        """One of ``candidates`` (not empty); ``chance`` is in [0, 1).

        Sets ``ask.num_matched_tokens`` if it knows; the pool has set it to 0 before.
        """
        ...

    def set_members(self, endpoints: list[Endpoint]) -> None:
        """The endpoints of the pool, whatever their state, are these."""
        ...

    def set_ready(self, endpoint: Endpoint) -> None:
        """It is ready or no longer is, as its tier says."""
        ...

    def load_changed(self, endpoint: Endpoint, before: int) -> None:
        """Its load was ``before`` and is ``num_active``."""
        ...


class _Memoryless:
    """A policy that needs to know nothing between two picks."""

    def set_members(self, endpoints: list[Endpoint]) -> None:
        """Of no concern."""

    def set_ready(self, endpoint: Endpoint) -> None:
        """Of no concern."""

    def load_changed(self, endpoint: Endpoint, before: int) -> None:
        """Of no concern."""


class RoundRobin(_Memoryless):
    """In turn."""

    def __init__(self, options: PickerOptions) -> None:
        self._turn = -1

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        self._turn = turn = (self._turn + 1) % len(candidates)
        return candidates[turn]


class Random(_Memoryless):
    """By chance."""

    def __init__(self, options: PickerOptions) -> None:
        pass

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        return candidates[int(chance * len(candidates))]


class PowerOfTwo(_Memoryless):
    """The less loaded of two."""

    def __init__(self, options: PickerOptions) -> None:
        pass

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        return less_loaded_of_two(candidates, chance)


def less_loaded_of_two(candidates: list[Endpoint], chance: float) -> Endpoint:
    """Of two different candidates taken by one chance: its whole part names the first, the rest the second."""
    num = len(candidates)
    if num == 1:
        return candidates[0]
    scaled = chance * num
    first = int(scaled)
    second = int((scaled - first) * (num - 1))
    if second >= first:
        second += 1
    one, other = candidates[first], candidates[second]
    return one if one.num_active <= other.num_active else other


class LeastLoad:
    """The least loaded, in turn among equals: ready endpoints stand in a queue for each load."""

    def __init__(self, options: PickerOptions) -> None:
        self._queues: list[OrderedDict[Endpoint, None]] = [OrderedDict()]
        self._num = 0
        self._lowest = 0

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        if candidates[0].tier != TIER_READY:
            return min(candidates, key=_load)
        if len(candidates) != self._num:
            start = int(chance * len(candidates))
            return min(candidates[start:] + candidates[:start], key=_load)
        queues, lowest = self._queues, self._lowest
        while not queues[lowest]:  # rises by one for each request that was added: O(1) for each
            lowest += 1
        self._lowest = lowest
        queue = queues[lowest]
        endpoint = next(iter(queue))
        queue.move_to_end(endpoint)
        return endpoint

    def set_members(self, endpoints: list[Endpoint]) -> None:
        """Of no concern: ready ones are told by :meth:`set_ready`."""

    def set_ready(self, endpoint: Endpoint) -> None:
        if endpoint.tier == TIER_READY:
            self._add(endpoint, endpoint.num_active)
            self._num += 1
        else:
            del self._queues[endpoint.num_active][endpoint]
            self._num -= 1

    def load_changed(self, endpoint: Endpoint, before: int) -> None:
        if endpoint.tier == TIER_READY:
            del self._queues[before][endpoint]
            self._add(endpoint, endpoint.num_active)

    def _add(self, endpoint: Endpoint, load: int) -> None:
        while load >= len(self._queues):
            self._queues.append(OrderedDict())
        self._queues[load][endpoint] = None
        if load < self._lowest:
            self._lowest = load

    def validate(self) -> None:
        """Assert the invariants."""
        assert sum(map(len, self._queues)) == self._num
        for load, queue in enumerate(self._queues):
            for endpoint in queue:
                assert endpoint.num_active == load, "an endpoint stands in the queue of another load"
                assert load >= self._lowest


class ConsistentHash:
    """By key, with bounded load: an engine that has ``load_factor`` times the mean, this request counted, is passed
    over for the next one on the ring. Without a key, the less loaded of two.
    """

    def __init__(self, options: PickerOptions) -> None:
        assert options.load_factor >= 1
        self._load_factor = options.load_factor
        self._points: list[int] = []
        self._owners: list[Endpoint] = []
        self._unplaced: list[Endpoint] | None = None
        """The members, while the ring is not made of them yet."""
        self._total = 0
        self._num_ready = 0

    def pick(self, candidates: list[Endpoint], chance: float, ask: Ask | None) -> Endpoint:
        key = ask.key if ask is not None else None
        if key is None:
            return less_loaded_of_two(candidates, chance)
        tier = candidates[0].tier
        is_all = tier != TIER_READY or len(candidates) == self._num_ready
        allowed = None if is_all else set(candidates)
        total = self._total if is_all and tier == TIER_READY else sum(map(_load, candidates))
        bound = load_bound(total, len(candidates), self._load_factor)
        if self._unplaced is not None:
            self._place(self._unplaced)
        owners = self._owners
        start = bisect_left(self._points, key)
        for index in range(start, start + len(owners)):
            endpoint = owners[index % len(owners)]
            if endpoint.tier == tier and endpoint.num_active < bound and (allowed is None or endpoint in allowed):
                return endpoint
        raise AssertionError("some engine has at most the mean load")

    def set_members(self, endpoints: list[Endpoint]) -> None:
        self._unplaced = list(endpoints)  # a ring takes time to make: once for many changes

    def _place(self, endpoints: list[Endpoint]) -> None:
        self._unplaced = None
        placed = [
            (_hash(b"%b %d" % (endpoint.url.encode(), number)), index)
            for index, endpoint in enumerate(endpoints)
            for number in range(POINTS_PER_ENDPOINT)
        ]
        placed.sort()
        self._points = [point for point, _ in placed]
        self._owners = [endpoints[index] for _, index in placed]

    def set_ready(self, endpoint: Endpoint) -> None:
        is_ready = endpoint.tier == TIER_READY
        self._total += endpoint.num_active if is_ready else -endpoint.num_active
        self._num_ready += 1 if is_ready else -1

    def load_changed(self, endpoint: Endpoint, before: int) -> None:
        if endpoint.tier == TIER_READY:
            self._total += endpoint.num_active - before


def load_bound(total: int, num: int, load_factor: float) -> int:
    """The most requests that one of ``num`` engines may have, with ``total`` in flight and one more to place."""
    return ceil(load_factor * (total + 1) / num)


def affinity_key(session: bytes | None, user: bytes | None, prompt: bytes | memoryview | None) -> int | None:
    """The key of a request: of its session header, else of the user it names, else of the prompt's beginning.

    A request id is no key: it is new each time, and would make the choice random.
    """
    if session:
        return _hash(b"session " + session)
    if user:
        return _hash(b"user " + user)
    if prompt:
        return _hash(b"prompt " + bytes(prompt[:PROMPT_PREFIX_BYTES]))
    return None


def _hash(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "big")


def _load(endpoint: Endpoint) -> int:
    return endpoint.num_active
