"""A fleet in virtual time: requests come, the real policies choose engines, modelled engines serve them.

A request goes to a prefill engine, waits there, is computed, goes to a decode engine chosen then, which pulls what it
lacks of the KV, and has its first token after one step of that engine's batch. The loads that the policies see are
those of the real ``Pool``; what they see of the engines' KV comes through KV events, with their delay.

Always true: every request ends; a prompt's tokens are each held or computed, once; no engine holds more KV than it has.
It does not simulate failures: ``antiphon sim routing`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random

from antiphon.routing.ask import Ask, Prompt
from antiphon.routing.endpoint import Endpoint
from antiphon.routing.pickers import affinity_key
from antiphon.sim.fleet_engine import DecodeEngine, EngineModel, Job, PrefillEngine, Stages
from antiphon.sim.fleet_link import Links
from antiphon.sim.fleet_oracle import Knowledge
from antiphon.sim.fleet_policies import SCOPE, Policies
from antiphon.sim.fleet_trace import Arrival, block_keys, prompt_bytes, token_ids
from antiphon.sim.timeline import Timeline

ROUTER_S = 0.001
"""From a request's coming until it is sent to an engine, and the same for its second stage; assumed."""


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """A fleet.

    Args:
        num_prefill, num_decode: engines.
        model: of each, scaled as the arrivals are.
        policy: a name from ``fleet_policies.NAMES``, for both pools.
        load_factor: how far affinity may go beyond the mean load.
        seed: of what is left to chance.
    """

    num_prefill: int
    num_decode: int
    model: EngineModel
    policy: str
    load_factor: float = 1.25
    seed: int = 1


class Ride:
    """One request on its way.

    Args:
        label: by which results are told apart.
    """

    def __init__(self, job: Job, ask: Ask, arrival: Arrival, label: str) -> None:
        self.job = job
        self.ask = ask
        self.arrival = arrival
        self.label = label
        self.prefill: Endpoint | None = None
        self.num_added = 0
        """Tokens added to what the prefill engine has to compute."""
        self.trial = 0
        self.first_s = 0.0
        """When its first token was there."""


@dataclass(slots=True)
class FleetResult:
    """What a policy gave.

    Args:
        num_tokens, num_hit: of all prompts, and how many of them their prefill engines held.
        num_pulled: tokens that decode engines pulled.
        first_token_s: of each request, by label, in the order of their ends.
        shares, decode_shares: requests that each prefill engine and each decode engine got.
        work_s: of the prefill engines, time in which they computed.
        span_s: from the first request to the end of the last.
    """

    policy: str
    num_tokens: int = 0
    num_hit: int = 0
    num_pulled: int = 0
    first_token_s: dict[str, list[float]] = field(default_factory=dict)
    shares: list[int] = field(default_factory=list)
    decode_shares: list[int] = field(default_factory=list)
    work_s: list[float] = field(default_factory=list)
    span_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """Of the prompts' tokens."""
        return self.num_hit / self.num_tokens

    def quantile_s(self, share: float, label: str = "") -> float:
        """Of the times to first token; ``share`` is in [0, 1]."""
        times = sorted(self.first_token_s[label])
        return times[min(len(times) - 1, int(share * len(times)))]

    @property
    def skew(self) -> float:
        """The most requests of a prefill engine over their mean."""
        return max(self.shares) * len(self.shares) / sum(self.shares)

    @property
    def decode_skew(self) -> float:
        """The same of the decode engines."""
        return max(self.decode_shares) * len(self.decode_shares) / sum(self.decode_shares)

    @property
    def work_skew(self) -> float:
        """The most work of a prefill engine over the mean."""
        return max(self.work_s) * len(self.work_s) / sum(self.work_s)

    @property
    def utilisation(self) -> float:
        """The part of the time in which prefill engines computed."""
        return sum(self.work_s) / len(self.work_s) / self.span_s


class FleetSimulation:
    """One run.

    Args:
        arrivals: in the order of their times, each with a label.
        on_progress: told now and then how many requests have ended.
    """

    def __init__(
        self,
        options: FleetOptions,
        arrivals: Sequence[tuple[Arrival, str]],
        on_progress: Callable[[int], None] | None = None,
    ) -> None:
        self.options = options
        self.timeline = Timeline(options.seed)
        self.result = FleetResult(options.policy)
        self.num_ended = 0
        self._arrivals = arrivals
        self._on_progress = on_progress
        self._chance = Random(options.seed)
        model = options.model
        self.knowledge = Knowledge()
        self.policies = Policies(options.policy, options.load_factor, model.kv_tokens, self.knowledge)
        self.links = Links(self.timeline, model.transfer_s)
        self.prefills: dict[Endpoint, PrefillEngine] = {}
        self.decodes: dict[Endpoint, DecodeEngine] = {}
        for number in range(options.num_prefill):
            endpoint = self.policies.add("prefill", f"http://p{number}:8000")
            listener = self.policies.listener(endpoint)
            self.prefills[endpoint] = PrefillEngine(f"P{number}", model, self.timeline, listener)
        for number in range(options.num_decode):
            endpoint = self.policies.add("decode", f"http://d{number}:8000")
            listener = self.policies.listener(endpoint)
            self.decodes[endpoint] = DecodeEngine(f"D{number}", model, self.timeline, listener, self.links)
        self.knowledge.blocks = {
            **{endpoint: engine.blocks for endpoint, engine in self.prefills.items()},
            **{endpoint: engine.blocks for endpoint, engine in self.decodes.items()},
        }

    def run(self) -> FleetResult:
        """To the end of the last request."""
        self._next_arrival(0)
        total = len(self._arrivals)
        is_over = self.timeline.run_until(inf, lambda: self.num_ended == total)
        assert is_over, f"{total - self.num_ended} requests never end"
        result = self.result
        result.span_s = self.timeline.now_s - self._arrivals[0][0].at_s
        result.shares = [engine.num_requests for engine in self.prefills.values()]
        result.decode_shares = [engine.num_requests for engine in self.decodes.values()]
        result.work_s = [engine.busy_s for engine in self.prefills.values()]
        return result

    def validate(self) -> None:
        """Assert the invariants."""
        for prefill in self.prefills.values():
            prefill.validate()
        for decode in self.decodes.values():
            decode.validate()
        self.policies.validate()

    # ---- a request's way ---------------------------------------------------------------------------------------------

    def _next_arrival(self, number: int) -> None:
        if number < len(self._arrivals):
            at_s = self._arrivals[number][0].at_s
            self.timeline.after(max(0.0, at_s - self.timeline.now_s), lambda: self._arrive(number))

    def _arrive(self, number: int) -> None:
        arrival, label = self._arrivals[number]
        scale = self.options.model.scale
        job = Job(number, arrival.num_tokens, arrival.num_output, block_keys(arrival, scale))
        tokens = token_ids(arrival, scale)
        data = prompt_bytes(tokens)
        ask = Ask(affinity_key(None, None, data), Prompt(SCOPE, data, len(tokens), tokens))
        self._read(Ride(job, ask, arrival, label))
        self._next_arrival(number + 1)

    def _read(self, ride: Ride) -> None:
        self.timeline.after(ROUTER_S, lambda: self.begin(ride))

    def begin(self, ride: Ride) -> None:
        """The router has read a request."""
        self.prefill(ride)

    def prefill(self, ride: Ride, shunned: tuple[Endpoint, ...] = ()) -> Endpoint:
        """Send it to a prefill engine, none of ``shunned`` if there is another."""
        pool = self.policies.prefill
        self.knowledge.keys = ride.job.keys
        now_s, chance, job = self.timeline.now_s, self._chance.random(), ride.job
        ride.ask.shunned = shunned
        endpoint = pool.pick_sparing(now_s, chance, ride.ask) if shunned else pool.pick(now_s, chance, ride.ask)
        assert endpoint is not None
        ride.prefill = endpoint
        ride.num_added = max(0, job.num_tokens - ride.ask.num_matched_tokens)
        ride.trial = pool.begin(endpoint, ride.num_added)
        self.knowledge.submitted(endpoint, job.keys)
        self.prefills[endpoint].submit(job, lambda: self._computed(ride))
        return endpoint

    def _computed(self, ride: Ride) -> None:
        endpoint = ride.prefill
        assert endpoint is not None
        job = ride.job
        assert 0 <= job.num_hit < job.num_tokens == job.num_computed
        self.policies.prefill.end(endpoint, ride.trial, ride.num_added)
        self.knowledge.computed(endpoint, job.keys)
        self.timeline.after(ROUTER_S, lambda: self.computed(ride))

    def computed(self, ride: Ride) -> None:
        """Its prefill has answered."""
        self.decode(ride, self.pick_decode(ride))

    def pick_decode(self, ride: Ride) -> Endpoint:
        """The decode engine for it."""
        self.knowledge.keys = ride.job.keys
        endpoint = self.policies.decode.pick(self.timeline.now_s, self._chance.random(), ride.ask, ())
        assert endpoint is not None
        return endpoint

    def decode(self, ride: Ride, endpoint: Endpoint) -> None:
        """Send it there."""
        assert ride.prefill is not None
        pool = self.policies.decode
        trial = pool.begin(endpoint)

        def first() -> None:
            ride.first_s = self.timeline.now_s
            self.first_token(ride)

        def done() -> None:
            pool.end(endpoint, trial)
            self._end(ride)

        self.decodes[endpoint].submit(ride.job, self.prefills[ride.prefill], Stages(first, done))

    def first_token(self, ride: Ride) -> None:
        """It has its first token: for those who watch."""

    def _end(self, ride: Ride) -> None:
        result, job = self.result, ride.job
        result.num_tokens += job.num_tokens
        result.num_hit += job.num_hit
        result.num_pulled += job.num_pulled
        result.first_token_s.setdefault(ride.label, []).append(ride.first_s - ride.arrival.at_s)
        self.num_ended += 1
        if self._on_progress is not None and self.num_ended % 500 == 0:
            self._on_progress(self.num_ended)
