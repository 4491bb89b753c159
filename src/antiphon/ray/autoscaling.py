"""How many engines a pool should have: what its engines measure in, a number out; and the policy that Ray Serve calls.

Serve pickles this module by value and runs it in its controller, which need not have Antiphon: so it imports the
standard library alone. It reads no clock; time comes with each look.

The rule. Each signal (:data:`ADDITIVE`, and the waiting of prefill) says how many engines the pool needs; the most
counts. Values are means over the look-back period:

- The pool grows when more are needed for ``upscale_delay_s`` without a break, by the whole period and by its latest
  third, so that a peak that has passed and a backlog that is being worked off do not count. It at most doubles at a
  time, and does not grow again before those that come have come.
- It shrinks to the most that was needed in the last ``downscale_delay_s``, when that was less than it has all the time,
  by the period and by its latest third, with ``SHRINK_SHARE`` of the target as the measure. What lies between the two
  measures holds the size.
- An engine whose values are missing or old is **unknown**. It may carry anything: the pool does not shrink, and grows
  by what the others carry alone.
- An engine that starts is **coming**: it is part of the size, and carries nothing. The pool does not shrink meanwhile,
  for ``START_MAX_S`` at most.

Which engine leaves is Serve's choice, and that it ends its requests first the business of its replica.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

log = logging.getLogger("ray.serve")
"""Serve's own, since the policy runs in its controller: what it writes is among the controller's logs."""

RUNNING = "engine_running"
WAITING = "engine_waiting"
DEFERRED = "engine_deferred"
KV_USAGE = "engine_kv_usage"
FIRST_TOKENS = "engine_first_tokens"
FIRST_TOKEN_S = "engine_first_token_s"
PREFILLS = "engine_prefills"
PREFILL_S = "engine_prefill_s"
COMPUTED_TOKENS = "engine_computed_tokens"
STATISTICS = (
    *(RUNNING, WAITING, DEFERRED, KV_USAGE),
    *(FIRST_TOKENS, FIRST_TOKEN_S, PREFILLS, PREFILL_S, COMPUTED_TOKENS),
)
"""What an engine reports: requests that run, wait for room, and wait for something else; the share of KV blocks in use;
then sums since its start: first tokens and the seconds to them, prefills that ended, their seconds without waiting, and
the prompt tokens that they computed."""

ADDITIVE = ("ongoing_requests", "uncached_tokens", "kv_usage")
"""Signals of which the pool's total is shared by its engines."""
SHRINK_SHARE = 0.85
"""Of a target: fewer engines must carry the load below that."""
BUSY_SHARE_MAX = 0.7
"""Of the time that a prefill engine works, after the pool has shrunk: above, requests queue."""
WAIT_SHARE_MIN = 0.25
"""Of ``target_first_token_s`` that a prompt may wait even where its prefill alone takes longer than that."""
FULL_WAIT_S = 1.0
"""A decode engine on which requests wait for room, and this long for their first token, is full: a step of an engine
that has room takes less."""
GROWTH_MAX = 2.0
"""Times the size, at most, that a pool grows to at once."""
START_MAX_S = 1800.0
"""An engine that has not come after this time no longer keeps the pool from changing."""
LOOK_INTERVAL_S = 0.5
"""Serve asks ten times a second; between looks the size is held."""
STALE_MIN_S, STALE_INTERVALS = 10.0, 3
"""Values are old when none has come for so many intervals, and for so long at least."""
_EPSILON = 1e-9

Series = Sequence[tuple[float, float]]
"""(seconds, value), in order of time, by the clock of the engine's node."""


@dataclass(frozen=True)
class Load:
    """What one engine carries, as means over the period and over its latest third. None: cannot be told."""

    values: Mapping[str, tuple[float, float] | None] = field(default_factory=dict)
    """By signal of ``ADDITIVE``."""
    busy_share: float = 0.0
    """Of the time, 0 to 1, that it had a request."""
    num_first_tokens: float = 0.0
    waited_s: float = 0.0
    """Sum over those of the time to the first token that was not prefill."""
    prefill_s: float = 0.0
    """Sum over those of the rest."""


@dataclass(frozen=True)
class Rule:
    """By what a pool is scaled, and how fast. ``targets`` are those of ``scaling.Targets`` that are set."""

    role: str
    targets: Mapping[str, float]
    upscale_delay_s: float
    downscale_delay_s: float
    upscaling_factor: float = 1.0
    downscaling_factor: float = 1.0


@dataclass(frozen=True)
class Look:
    """One look at a pool.

    Args:
        size: engines that it should have, those that come included.
        loads: of those that run; None for one that is unknown.
    """

    at_s: float
    size: int
    lowest: int
    most: int
    loads: Sequence[Load | None]


@dataclass
class Memory:
    """What is remembered of a pool between two looks."""

    size: int | None = None
    short_since_s: float | None = None
    """Since when fewer run."""
    above_since_s: float | None = None
    below_since_s: float | None = None
    below_most: int = 0
    """The most engines that were needed since then."""


@dataclass(frozen=True)
class Needs:
    """How many engines each signal asks for, and the words for it."""

    to_grow: Mapping[str, float]
    to_shrink: Mapping[str, float]
    words: Mapping[str, str]
    is_known: bool

    @property
    def up(self) -> int:
        return _ceil(max(self.to_grow.values(), default=0.0))

    @property
    def down(self) -> int:
        return max(1, _ceil(max(self.to_shrink.values(), default=0.0)))

    def why(self, needs: Mapping[str, float]) -> str:
        """The signal that asks for the most."""
        first = max(needs, key=lambda name: needs[name], default="")
        return self.words.get(first, "")


@dataclass(frozen=True)
class Decision:
    """The size that the pool should have, and why it is another one; empty where it is not."""

    size: int
    why: str = ""


def decide(rule: Rule, memory: Memory, look: Look) -> Decision:
    """The size after ``look``; ``memory`` is brought up to date."""
    assert 1 <= look.lowest <= look.most
    size = min(max(look.size, look.lowest), look.most)
    if size != memory.size:  # the first look, or bounds or Serve changed it
        _change(memory, size)
    needs = needed(rule, look.loads)
    is_coming = _is_coming(memory, look, size)
    if needs.up > size and size < look.most and not is_coming:
        memory.below_since_s = None
        if memory.above_since_s is None:
            memory.above_since_s = look.at_s
        if look.at_s - memory.above_since_s + _EPSILON >= rule.upscale_delay_s:
            step = min(float(needs.up), size * GROWTH_MAX) - size
            wanted = min(look.most, size + max(1, _ceil(step * rule.upscaling_factor)))
            _change(memory, wanted)
            return Decision(wanted, needs.why(needs.to_grow))
        return Decision(size)
    memory.above_since_s = None
    if not (needs.is_known and look.loads and needs.down < size and size > look.lowest and not is_coming):
        memory.below_since_s = None
        return Decision(size)
    if memory.below_since_s is None:
        memory.below_since_s, memory.below_most = look.at_s, 0
    memory.below_most = max(memory.below_most, needs.down)
    if look.at_s - memory.below_since_s + _EPSILON < rule.downscale_delay_s:
        return Decision(size)
    step = size - memory.below_most
    wanted = max(look.lowest, size - max(1, math.floor(step * rule.downscaling_factor + _EPSILON)))
    _change(memory, wanted)
    return Decision(wanted, f"{memory.below_most} would do: {needs.why(needs.to_shrink)}")


def needed(rule: Rule, loads: Sequence[Load | None]) -> Needs:
    """How many engines ``loads`` ask for by each target."""
    known = [load for load in loads if load is not None]
    is_known = len(known) == len(loads)
    grow: dict[str, float] = {}
    shrink: dict[str, float] = {}
    words: dict[str, str] = {}
    for name in ADDITIVE:
        target = rule.targets.get(name)
        if target is None:
            continue
        pairs = [pair for load in known if (pair := load.values.get(name)) is not None]
        is_known = is_known and len(pairs) == len(known)
        totals = (sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs))
        grow[name] = min(totals) / target
        shrink[name] = max(totals) / (target * SHRINK_SHARE)
        words[name] = f"{name} {totals[0]:.4g} in all, {totals[1]:.4g} at last, {target:g} an engine"
    target = rule.targets.get("first_token_s")
    if target is not None and known:
        ratio, text = _waiting(known, target)
        words["first_token_s"] = text
        if ratio > 1:
            grow["first_token_s"] = len(known) * ratio
        shrink["first_token_s"] = float(len(known)) if ratio > SHRINK_SHARE else 0.0
    if rule.role == "prefill":
        busy = sum(load.busy_share for load in known)
        shrink["busy"] = busy / BUSY_SHARE_MAX
        words["busy"] = f"{busy:.2f} engines were busy"
    return Needs(grow, shrink, words, is_known)


def load_of(role: str, series: Mapping[str, Series], look_back_s: float) -> Load | None:
    """What an engine carries by its statistics; None where one of them is missing.

    Args:
        series: the values of each of ``STATISTICS``, over ``look_back_s`` or longer.
    """
    if any(not series.get(name) for name in STATISTICS):
        return None
    newest_s = series[RUNNING][-1][0]
    if not all(math.isfinite(value) for name in STATISTICS for _, value in series[name]):
        return None
    window = {name: _latest(series[name], newest_s - look_back_s) for name in STATISTICS}
    num_ongoing = _added(window[RUNNING], window[WAITING], window[DEFERRED])
    recent_s = newest_s - look_back_s / 3
    values: dict[str, tuple[float, float] | None] = {"ongoing_requests": _means(num_ongoing, recent_s)}
    num_first, first_s = _gained(window[FIRST_TOKENS]), _gained(window[FIRST_TOKEN_S])
    if role != "prefill":
        is_full = num_first == 0 or first_s / num_first > FULL_WAIT_S
        values["kv_usage"] = _means(list(_occupancy(window, is_full)), recent_s)
        return Load(values)
    busy_share = sum(value > 0 for _, value in num_ongoing) / len(num_ongoing)
    tokens_each = _tokens_each(window)
    if tokens_each is not None:
        values["uncached_tokens"] = _means([(at, value * tokens_each) for at, value in num_ongoing], recent_s)
    else:
        values["uncached_tokens"] = (0.0, 0.0) if not busy_share else None
    num_prefills = _gained(window[PREFILLS])
    prefill_s = _gained(window[PREFILL_S]) / num_prefills * num_first if num_prefills else 0.0
    if not num_first and all(value > 0 for _, value in window[WAITING]):
        # None has come out, and some wait all the time: they have waited that long at least.
        num_first, first_s = 1.0, num_ongoing[-1][0] - num_ongoing[0][0]
    return Load(values, busy_share, num_first, max(0.0, first_s - prefill_s), prefill_s)


@dataclass(frozen=True)
class _Seen:
    """The newest values of an engine: their time by its clock, when they came by ours, and what they mean."""

    newest_s: float
    at_s: float
    load: Load | None


class PoolScaling:
    """The policy of one pool, as Serve calls it: made once for each deployment, from plain values.

    Serve's own delays and factors are to be 0 and 1, since these are the rule's.

    Args:
        role: prefill or decode.
        targets: what an engine should carry, by signal.
        interval_s: between two values of an engine.
    """

    def __init__(
        self,
        role: str,
        targets: dict[str, float],
        delays_s: Sequence[float],
        factors: Sequence[float] = (1.0, 1.0),
        look_back_s: float = 30.0,
        interval_s: float = 2.0,
    ) -> None:
        self.rule = Rule(role, dict(targets), delays_s[0], delays_s[1], factors[0], factors[1])
        self.memory = Memory()
        self._look_back_s = look_back_s
        self._stale_s = max(STALE_MIN_S, STALE_INTERVALS * interval_s)
        self._seen: dict[Any, _Seen] = {}
        """Of each engine that runs, what came last."""
        self._next_look_s = -math.inf
        self._num_unknown = 0

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """The size for Serve's ``AutoscalingContext``, and no state that Serve keeps."""
        now_s, size = context.current_time, context.target_num_replicas
        if now_s < self._next_look_s and size == self.memory.size:
            return size, {}
        self._next_look_s = now_s + LOOK_INTERVAL_S
        raw = context.raw_metrics or {}
        loads = [self._load(raw, replica, now_s) for replica in context.running_replicas]
        self._seen = {replica: self._seen[replica] for replica in context.running_replicas if replica in self._seen}
        self._say_unknown(context.deployment_name, loads)
        lowest = max(1, context.capacity_adjusted_min_replicas)
        look = Look(now_s, size, lowest, max(lowest, context.capacity_adjusted_max_replicas), loads)
        decision = decide(self.rule, self.memory, look)
        if decision.why:
            text = "Antiphon scales %s from %d to %d engines: %s (%d run, mean of %g s)."
            log.info(text, context.deployment_name, size, decision.size, decision.why, len(loads), self._look_back_s)
        return decision.size, {}

    def _load(self, raw: Mapping[str, Mapping[Any, Any]], replica: Any, now_s: float) -> Load | None:
        points = raw.get(RUNNING, {}).get(replica)
        if not points:
            return None
        newest_s = points[-1].timestamp
        seen = self._seen.get(replica)
        if seen is None or seen.newest_s != newest_s:
            series = {
                name: [(point.timestamp, point.value) for point in raw.get(name, {}).get(replica, ())]
                for name in STATISTICS
            }
            seen = _Seen(newest_s, now_s, load_of(self.rule.role, series, self._look_back_s))
            self._seen[replica] = seen
        return None if now_s - seen.at_s > self._stale_s else seen.load

    def _say_unknown(self, name: str, loads: Sequence[Load | None]) -> None:
        num_unknown = sum(load is None for load in loads)
        if num_unknown != self._num_unknown:
            self._num_unknown = num_unknown
            text = "Antiphon: %d of %d engines of %s are unknown%s."
            log.info(text, num_unknown, len(loads), name, ": it does not shrink" if num_unknown else "")


def _change(memory: Memory, size: int) -> None:
    memory.size = size
    memory.above_since_s = memory.below_since_s = memory.short_since_s = None


def _is_coming(memory: Memory, look: Look, size: int) -> bool:
    if len(look.loads) >= size:
        memory.short_since_s = None
        return False
    if memory.short_since_s is None:
        memory.short_since_s = look.at_s
    return look.at_s - memory.short_since_s < START_MAX_S


def _waiting(known: Sequence[Load], target_s: float) -> tuple[float, str]:
    """How the time that prompts wait compares with the time that they may, and the words for it.

    More engines shorten the waiting, not the prefill: where that alone takes longer than the target, a share of the
    target may still be waited.
    """
    num = sum(load.num_first_tokens for load in known)
    if not num:
        return 0.0, "no first token"
    waited_s = sum(load.waited_s for load in known) / num
    prefill_s = sum(load.prefill_s for load in known) / num
    allowed_s = max(target_s - prefill_s, target_s * WAIT_SHARE_MIN)
    return waited_s / allowed_s, f"first token after {waited_s:.3g} s of waiting and {prefill_s:.3g} s of prefill"


def _occupancy(window: Mapping[str, Series], is_full: bool) -> Iterable[tuple[float, float]]:
    """The share of a decode engine in use, above 1 where requests wait for room.

    KV is not all that an engine has: with all of its sequences in use it is full, whatever its KV.
    """
    columns = zip(window[KV_USAGE], window[RUNNING], window[WAITING], strict=False)
    for (at, usage), (_, running), (_, waiting) in columns:
        if is_full and waiting > 0:
            usage = max(usage, 1.0) * (1 + waiting / max(running, 1.0))
        yield at, usage


def _tokens_each(window: Mapping[str, Series]) -> float | None:
    """Prompt tokens that a request computes, by those that ended in the period, else ever; None where there is none."""
    num, tokens = _gained(window[PREFILLS]), _gained(window[COMPUTED_TOKENS])
    if not num:
        num, tokens = window[PREFILLS][-1][1], window[COMPUTED_TOKENS][-1][1]
    return tokens / num if num > 0 else None


def _latest(series: Series, since_s: float) -> Series:
    found = [point for point in series if point[0] >= since_s]
    return found or series[-1:]


def _added(*many: Series) -> list[tuple[float, float]]:
    return [(points[0][0], sum(value for _, value in points)) for points in zip(*many, strict=False)]


def _means(series: Series, recent_s: float) -> tuple[float, float]:
    """Of all, and of what is not older than ``recent_s``."""
    recent = [value for at, value in series if at >= recent_s] or [series[-1][1]]
    return sum(value for _, value in series) / len(series), sum(recent) / len(recent)


def _gained(series: Series) -> float:
    """What a sum has gained; one that falls has begun anew, with the engine."""
    gained = 0.0
    for (_, before), (_, after) in pairwise(series):
        gained += after - before if after >= before else after
    return gained


def _ceil(value: float) -> int:
    return math.ceil(value - _EPSILON)
