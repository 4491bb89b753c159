"""A pool of engines as Serve's policy sees it: a load, engines that work it off, their statistics, and Serve's part of
scaling, in steps of seconds without a clock. Fluid: requests are numbers, not things."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import ClassVar, NamedTuple

from antiphon.ray import autoscaling as policy

INTERVAL_S = 5.0
LOOK_BACK_S = 30.0


class Point(NamedTuple):
    timestamp: float
    value: float


@dataclass(eq=False)
class Engine:
    """One engine: what it has in hand, what it has done, and what it has reported."""

    role: str
    running: float = 0.0
    waiting: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(policy.STATISTICS, 0.0))
    reports: dict[str, deque[Point]] = field(default_factory=dict)
    is_silent: bool = False

    SECONDS: ClassVar = {"prefill": 0.5, "decode": 20.0}
    """That a request takes alone."""
    ROOM: ClassVar = {"prefill": 1.0, "decode": 50.0}
    """Requests at once."""
    TOKENS: ClassVar = 1000.0

    def step(self, num_new: float, seconds: float) -> None:
        """Requests arrive, run and end."""
        self.waiting += num_new
        each_s, room = self.SECONDS[self.role], self.ROOM[self.role]
        if self.role == "prefill":
            done = min(self.waiting, seconds / each_s)
            self.waiting -= done
            self.running = min(1.0, num_new * each_s / seconds) if not self.waiting else 1.0
            started = done
        else:
            done = min(self.running, self.running * seconds / each_s)
            started = min(self.waiting, room - (self.running - done))
            self.running += started - done
            self.waiting -= started
        waited_s = self.waiting * each_s / room
        self.sums[policy.FIRST_TOKENS] += started
        self.sums[policy.FIRST_TOKEN_S] += started * (waited_s + (each_s if self.role == "prefill" else 0.05))
        self.sums[policy.PREFILLS] += done
        self.sums[policy.PREFILL_S] += done * (each_s if self.role == "prefill" else 0.05)
        self.sums[policy.COMPUTED_TOKENS] += done * self.TOKENS

    def report(self, at_s: float) -> None:
        if self.is_silent:
            return
        values = self.sums | {policy.RUNNING: self.running, policy.WAITING: self.waiting, policy.DEFERRED: 0.0}
        values[policy.KV_USAGE] = self.running / self.ROOM["decode"] * 0.9
        for name, value in values.items():
            series = self.reports.setdefault(name, deque())
            series.append(Point(at_s, value))
            while series[0].timestamp < at_s - LOOK_BACK_S:
                series.popleft()


class Pool:
    """A pool under a load of requests a second, scaled by the policy. New engines take ``start_s`` to come."""

    def __init__(self, scaling: policy.PoolScaling, lowest: int, most: int, start_s: float = 60.0) -> None:
        self.scaling = scaling
        self.bounds = lowest, most
        self.start_s = start_s
        self.now_s = 1000.0
        self.size = lowest
        self.engines = [Engine(scaling.rule.role) for _ in range(lowest)]
        self.coming: list[float] = []
        """When each is there."""
        self.changes: list[tuple[float, int, int]] = []
        """When, from and to how many."""

    def run(self, seconds: float, load: Callable[[float], float]) -> None:
        """``load`` gives the requests a second, by the seconds since this call."""
        begin_s = self.now_s
        while self.now_s < begin_s + seconds:
            self.now_s += INTERVAL_S
            rate = max(0.0, load(self.now_s - begin_s))
            for engine in self.engines:
                engine.step(rate * INTERVAL_S / len(self.engines), INTERVAL_S)
                engine.report(self.now_s)
            for due_s in [due_s for due_s in self.coming if due_s <= self.now_s]:
                self.coming.remove(due_s)
                self.engines.append(Engine(self.scaling.rule.role))
            self.look()

    def look(self) -> None:
        """Serve asks the policy, and does what it says."""
        raw = {
            name: {engine: engine.reports[name] for engine in self.engines if name in engine.reports}
            for name in policy.STATISTICS
        }
        size, _ = self.scaling(
            SimpleNamespace(
                current_time=self.now_s,
                deployment_name=self.scaling.rule.role,
                target_num_replicas=self.size,
                running_replicas=list(self.engines),
                raw_metrics=raw,
                capacity_adjusted_min_replicas=self.bounds[0],
                capacity_adjusted_max_replicas=self.bounds[1],
            )
        )
        if size != self.size:
            self.changes.append((self.now_s, self.size, size))
        for _ in range(size - self.size):
            self.coming.append(self.now_s + self.start_s)
        for _ in range(self.size - size):
            if self.coming:
                self.coming.pop()  # Serve ends first what has not come
            else:
                self.engines.pop()
        self.size = size

    @property
    def num_turns(self) -> int:
        """How often it shrank after it grew, or grew after it shrank."""
        ways = [after > before for _, before, after in self.changes]
        return sum(one != other for one, other in pairwise(ways))


def scaling(role: str, delays_s: tuple[float, float] = (30.0, 600.0), **targets: float) -> policy.PoolScaling:
    """The policy with the targets that are filled in where none is written, or with these."""
    filled = {"prefill": {"uncached_tokens": 16384.0, "first_token_s": 2.0}, "decode": {"kv_usage": 0.8}}
    return policy.PoolScaling(role, targets or filled[role], delays_s, look_back_s=LOOK_BACK_S, interval_s=INTERVAL_S)
