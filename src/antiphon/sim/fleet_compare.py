"""Policies side by side on one fleet and one list of requests: what ``antiphon sim fleet`` runs and prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from antiphon.sim.fleet_engine import EngineModel
from antiphon.sim.fleet_oracle import bound_hit_rate
from antiphon.sim.fleet_report import policy_table
from antiphon.sim.fleet_run import FleetOptions, FleetResult, FleetSimulation
from antiphon.sim.fleet_trace import BLOCK_TOKENS, CHATS, HOT_PREFIX, Arrival, generate, read_trace

WORKLOADS = {"chats": CHATS, "hot-prefix": HOT_PREFIX}

COLD_LOAD = 0.8
"""Part of the prefill engines' time that all prompts would take if nothing were ever held, where no rate is given."""


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """A comparison.

    Args:
        prefill, decode: engines.
        model: of each, scaled.
        policies: names, in the order of the table.
        trace: a file; None generates ``requests`` requests of the ``workload``.
        rate_scale: None chooses one, by ``COLD_LOAD``.
    """

    prefill: int
    decode: int
    model: EngineModel
    policies: tuple[str, ...]
    requests: int = 10_000
    trace: Path | None = None
    workload: str = "chats"
    rate_scale: float | None = None
    load_factor: float = 1.25
    seed: int = 1


def arrivals_of(options: CompareOptions) -> tuple[list[Arrival], float]:
    """The requests, and the rate scale.

    Raises:
        TraceInvalid, OSError: as ``read_trace``.
    """

    def at(rate_scale: float) -> list[Arrival]:
        scale, number = options.model.scale, options.requests
        if options.trace is not None:
            return read_trace(options.trace, number, scale, rate_scale, options.seed)
        return generate(WORKLOADS[options.workload], number, scale, rate_scale, options.seed)

    if options.rate_scale is not None:
        return at(options.rate_scale), options.rate_scale
    arrivals = at(1.0)
    rate_scale = COLD_LOAD / max(1e-9, cold_load(options, arrivals))
    return at(rate_scale), rate_scale


def cold_load(options: CompareOptions, arrivals: list[Arrival]) -> float:
    """Part of the prefill engines' time that computing all of every prompt would take."""
    work_s = sum(options.model.prefill_s(0, arrival.num_tokens) for arrival in arrivals)
    return work_s / max(1e-9, arrivals[-1].at_s - arrivals[0].at_s) / options.prefill


def run_policies(
    options: CompareOptions, arrivals: list[Arrival], say: Callable[[str], None] = lambda _: None
) -> list[FleetResult]:
    """One result for each policy; every engine's books are checked at the end."""
    labelled = [(arrival, "") for arrival in arrivals]
    results = []
    for policy in options.policies:

        def tell(number: int, policy: str = policy) -> None:
            say(f"{policy}: {number} of {len(labelled)} requests")

        fleet = FleetOptions(
            options.prefill, options.decode, options.model, policy, options.load_factor, seed=options.seed
        )
        simulation = FleetSimulation(fleet, labelled, tell)
        results.append(simulation.run())
        simulation.validate()
    say("")
    return results


def compare(options: CompareOptions, say: Callable[[str], None]) -> Iterator[str]:
    """The lines of the comparison. Raises as :func:`arrivals_of`."""
    arrivals, rate_scale = arrivals_of(options)
    model, number = options.model, len(arrivals)
    source = options.workload if options.trace is None else options.trace.name
    num_prompt = sum(arrival.num_tokens for arrival in arrivals) * model.scale / number
    num_output = sum(arrival.num_output for arrival in arrivals) * model.scale / number
    num_blocks = options.prefill * model.kv_tokens // BLOCK_TOKENS
    engines = f"{options.prefill} prefill and {options.decode} decode engines"
    yield f"{engines}; {number} requests of {source}, seed {options.seed}"
    yield (
        f"prompts of {num_prompt:.0f} and answers of {num_output:.0f} tokens on average; "
        f"lengths divided by {model.scale}, times by {rate_scale:.3g}"
    )
    yield f"computing every prompt would take {cold_load(options, arrivals):.2f} of the prefill engines' time"
    yield (
        f"hits of one cache without load: {bound_hit_rate(arrivals, model.scale, num_blocks):.1%} with the KV of all "
        f"prefill engines, {bound_hit_rate(arrivals, model.scale, None):.1%} without end"
    )
    yield ""
    yield "P and D requests, P work: the most loaded engine over the mean"
    yield from policy_table(run_policies(options, arrivals, say))
