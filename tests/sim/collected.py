"""Consecutive seeds of the cache's simulation, run once, and what was seen in them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from antiphon.sim.faults import SimulationOptions
from antiphon.sim.run import describe_failure, run_seeds
from antiphon.sim.seeds import SeedResult


@dataclass
class Run:
    failures: list[str] = field(default_factory=list)
    num_seeds: int = 0
    seen: Counter[str] = field(default_factory=Counter)


def collect(num_seeds: int, options: SimulationOptions) -> Run:
    """The seeds from 1 on."""
    found = Run()
    for result in run_seeds(1, num_seeds, options):
        found.num_seeds += 1
        found.seen += result.seen
        if result.failure is not None:
            found.failures.append(describe_failure(result, options))
    return found


def assert_caught(last: SeedResult, num_seeds: int) -> None:
    """A planted bug was noticed by a check or an assertion: a plant that merely breaks shows nothing."""
    assert last.failure is not None, f"{num_seeds} seeds passed"
    assert last.failure.startswith(("CheckFailed", "AssertionError")), last.failure
