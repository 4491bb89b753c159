"""The flood: many large cold prompts at once among steady warm traffic, with cold-transfer admission off and on.

Warm requests end conversations whose beginnings the engines hold; they come at random, evenly, before, during and after
the flood. What is measured is the time to first token of those that come while the flood is served, and of the same
requests without a flood. Admission is the real ``ColdAdmission``: it sees the uncached tokens that the policy expects,
and measures the links by the transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from random import Random

from antiphon.routing.admission import ColdAdmission
from antiphon.routing.cold import AdmissionOptions, Admit, ColdItem, Refuse, Wait
from antiphon.sim.fleet_engine import EngineModel
from antiphon.sim.fleet_policies import KV_AWARE
from antiphon.sim.fleet_report import table, time_text
from antiphon.sim.fleet_run import FleetOptions, FleetResult, FleetSimulation, Ride
from antiphon.sim.fleet_trace import BLOCK_TOKENS, HASH_ID_MAX, TRACE_BLOCK_TOKENS, Arrival

WARM = "warm"
COLD = "cold"
WARM_UP = "warm-up"

POLL_S = 1.0
"""Between two readings of the decode engines' metrics."""

NUM_COLD = 64
"""Prompts of a flood, where nothing else is asked for."""

WARM_UP_S = 60.0
"""Virtual seconds before the flood, in which the engines come to hold the beginnings."""


@dataclass(frozen=True, slots=True)
class FloodOptions:
    """A flood; lengths in tokens of a trace.

    Args:
        num_cold, cold_tokens: prompts that come at once, all different, and their length.
        warm_rate_per_s, num_beginnings: warm requests a second, and the conversations that they end.
        warm_tokens, new_tokens: of a beginning, and of what follows it.
        output_tokens: of all.
        window_s: from the flood on, in which warm requests are measured: about as long as it is served with admission
            on.
    """

    num_cold: int = NUM_COLD
    cold_tokens: int = 32_768
    warm_rate_per_s: float = 20.0
    num_beginnings: int = 32
    warm_tokens: int = 8192
    new_tokens: int = 200
    output_tokens: int = 150
    window_s: float = 75.0


def flood_arrivals(options: FloodOptions, scale: int, seed: int, *, has_flood: bool) -> list[tuple[Arrival, str]]:
    """The requests; the warm ones are the same with the flood and without."""
    chance = Random(seed)
    ids = iter(range(HASH_ID_MAX))
    num_begun = options.warm_tokens // TRACE_BLOCK_TOKENS
    beginnings = [tuple(islice(ids, num_begun)) for _ in range(options.num_beginnings)]
    output = max(1, options.output_tokens // scale)
    num_warm_tokens = num_begun * TRACE_BLOCK_TOKENS + options.new_tokens
    num_new = -(-num_warm_tokens // TRACE_BLOCK_TOKENS) - num_begun
    arrivals: list[tuple[Arrival, str]] = []
    at_s = 0.0
    while (at_s := at_s + chance.expovariate(options.warm_rate_per_s)) < WARM_UP_S + options.window_s:
        hash_ids = (*beginnings[chance.randrange(len(beginnings))], *islice(ids, num_new))
        label = WARM if at_s >= WARM_UP_S else WARM_UP
        arrivals.append((Arrival(at_s, num_warm_tokens // scale, output, hash_ids), label))
    num_cold_ids = -(-options.cold_tokens // TRACE_BLOCK_TOKENS)
    for _ in range(options.num_cold if has_flood else 0):
        hash_ids = tuple(islice(ids, num_cold_ids))
        arrivals.append((Arrival(WARM_UP_S, options.cold_tokens // scale, output, hash_ids), COLD))
    return sorted(arrivals, key=lambda one: one[0].at_s)


class FloodSimulation(FleetSimulation):
    """A fleet with or without admission.

    Args:
        admission: None is off.
    """

    def __init__(
        self, options: FleetOptions, arrivals: Sequence[tuple[Arrival, str]], admission: AdmissionOptions | None
    ) -> None:
        super().__init__(options, arrivals)
        self.num_refused = 0
        self.num_warm_hit = self.num_warm_tokens = 0
        self._admission = None if admission is None else ColdAdmission(admission)
        self._items: dict[Ride, ColdItem] = {}
        self._tick_s = inf
        if self._admission is not None:
            self._admission.set_prefills(list(self.prefills))
            self._admission.set_decodes(list(self.decodes))
            self._poll()

    def begin(self, ride: Ride) -> None:
        admission = self._admission
        if admission is None:
            super().begin(ride)
            return
        prompt = ride.ask.prompt
        assert prompt is not None
        now_s = self.timeline.now_s
        num_uncached = prompt.num_tokens - self.policies.num_held("prefill", prompt)
        num_pull = prompt.num_tokens - self.policies.num_held("decode", prompt)
        item = self._items[ride] = ColdItem(num_uncached, num_pull, num_body_bytes=len(prompt.data), tag=ride)
        self._act(item, admission.offer(item, now_s))
        self._tick()

    def _act(self, item: ColdItem, answer: Admit | Wait | Refuse) -> None:
        """Go on as admission says: to the prefill, or with the KV of one to the decode engine."""
        ride, admission = item.tag, self._admission
        assert isinstance(ride, Ride) and admission is not None
        if isinstance(answer, Refuse):
            del self._items[ride]
            self.num_refused += 1
            self.num_ended += 1
        elif isinstance(answer, Wait):
            return
        elif ride.prefill is None:
            endpoint = self.prefill(ride, admission.avoid_for(item))
            admission.prefill_chosen(item, endpoint, self.timeline.now_s)
        else:
            assert item.decode is not None
            self.decode(ride, item.decode)

    def computed(self, ride: Ride) -> None:
        admission = self._admission
        if admission is None:
            super().computed(ride)
            return
        item, endpoint, prompt = self._items[ride], self.pick_decode(ride), ride.ask.prompt
        assert prompt is not None
        num_pull = max(0, prompt.num_tokens - ride.ask.num_matched_tokens)
        item.decode = endpoint
        self._act(item, admission.prefill_answered(item, endpoint, self.timeline.now_s, num_pull))
        self._tick()

    def first_token(self, ride: Ride) -> None:
        job = ride.job
        if ride.label == WARM:
            self.num_warm_hit += job.num_hit
            self.num_warm_tokens += job.num_tokens
        admission = self._admission
        if admission is not None:
            item, now_s = self._items.pop(ride), self.timeline.now_s
            num_bytes = job.num_pulled * self.options.model.kv_bytes
            admission.pulled(item, num_bytes, now_s - item.pull_began_s, now_s)
            self._tick()

    def _poll(self) -> None:
        """The metrics of the decode engines are read, now and then."""
        admission, model = self._admission, self.options.model
        assert admission is not None
        for endpoint, engine in self.decodes.items():
            num_free = engine.blocks.capacity - engine.blocks.num_used
            admission.free_kv(endpoint, num_free * BLOCK_TOKENS * model.kv_bytes)
        self._tick()
        self.timeline.after(POLL_S, self._poll)

    def _tick(self) -> None:
        """Items that may go on now, and the next time to ask."""
        admission, now_s = self._admission, self.timeline.now_s
        assert admission is not None
        for item in admission.tick(now_s):
            assert item.answer is not None
            self._act(item, item.answer)
        if admission.due_s < self._tick_s or self._tick_s <= now_s:
            self._tick_s = admission.due_s
            if self._tick_s < inf:
                self.timeline.after(max(0.001, self._tick_s - now_s), self._tick)


@dataclass(frozen=True, slots=True)
class FloodRun:
    """A fleet, and which runs of the flood to make.

    Args:
        prefill, decode: engines.
        prompts: cold ones at once.
        has_off, has_on: runs with admission off and on; one without a flood goes before them.
        queue_s: the longest wait before a prefill; a router's own bound is shorter, and refuses the last of a flood.
    """

    prefill: int
    decode: int
    model: EngineModel
    seed: int = 1
    prompts: int = NUM_COLD
    has_off: bool = True
    has_on: bool = True
    policy: str = KV_AWARE
    queue_s: float = 120.0


def run_flood(run: FloodRun, options: FloodOptions, say: Callable[[str], None]) -> list[FloodResult]:
    """Without a flood first, then with it, admission off and on as asked."""
    bounds = AdmissionOptions(kv_bytes_per_token=run.model.kv_bytes, queue_s=run.queue_s)
    runs: list[tuple[str, bool, AdmissionOptions | None]] = [("no flood", False, None)]
    if run.has_off:
        runs.append(("flood, admission off", True, None))
    if run.has_on:
        runs.append(("flood, admission on", True, bounds))
    results = []
    for name, has_flood, admission in runs:
        say(name)
        arrivals = flood_arrivals(options, run.model.scale, run.seed, has_flood=has_flood)
        fleet = FleetOptions(run.prefill, run.decode, run.model, run.policy, seed=run.seed)
        simulation = FloodSimulation(fleet, arrivals, admission)
        result = simulation.run()
        simulation.validate()
        hit_rate = simulation.num_warm_hit / max(1, simulation.num_warm_tokens)
        results.append(FloodResult(name, result, simulation.num_refused, hit_rate))
    say("")
    return results


def flood_lines(run: FloodRun, say: Callable[[str], None]) -> list[str]:
    """What ``antiphon sim flood`` prints."""
    options = replace(FloodOptions(), num_cold=run.prompts)
    results = run_flood(run, options, say)
    bytes_each = options.cold_tokens // run.model.scale * run.model.kv_bytes
    engines = f"{run.prefill} prefill and {run.decode} decode engines"
    lengths = f"of {options.warm_tokens} + {options.new_tokens} tokens, {options.num_beginnings} beginnings"
    measured = f"measured for {options.window_s:g} s from the flood on"
    return [
        f"{engines}, policy {run.policy}, network cards of {run.model.card_bytes_per_s / 1e9:g} GB/s",
        f"warm: {options.warm_rate_per_s:g} requests a second {lengths}; {measured}",
        f"flood: {options.num_cold} prompts of {options.cold_tokens} tokens at once, {bytes_each / 1e9:.1f} GB each",
        "",
        *flood_table(results),
    ]


@dataclass(frozen=True, slots=True)
class FloodResult:
    """One run of the flood.

    Args:
        name: of the run.
        num_refused: requests that were told to come back.
        warm_hit_rate: of the prompts of warm requests that were measured.
    """

    name: str
    result: FleetResult
    num_refused: int
    warm_hit_rate: float


_HEAD = ("", "warm p50", "warm p99", "of unloaded", "cold p50", "cold last", "refused", "warm hits")


def flood_table(results: Sequence[FloodResult]) -> list[str]:
    """A line for each run; the first is the one without a flood, which the others are compared with."""
    unloaded_s = results[0].result.quantile_s(0.99, WARM)
    rows = []
    for one in results:
        result = one.result
        cold = result.first_token_s.get(COLD)
        rows.append(
            (
                one.name,
                time_text(result.quantile_s(0.5, WARM)),
                time_text(result.quantile_s(0.99, WARM)),
                f"{result.quantile_s(0.99, WARM) / unloaded_s:.2f}",
                time_text(result.quantile_s(0.5, COLD)) if cold else "",
                time_text(max(cold)) if cold else "",
                str(one.num_refused),
                f"{one.warm_hit_rate:.1%}",
            )
        )
    return table(_HEAD, rows)
