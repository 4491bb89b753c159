"""What a seed of any simulation gave, and seeds run one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

TRACE_LINES_SHOWN = 60


@dataclass(frozen=True, slots=True)
class SeedResult:
    """What a seed gave.

    Args:
        digest: of the trace; equal in every run of the seed.
        failure: what went wrong, None where nothing did.
        seen: what has occurred, by name.
    """

    seed: int
    digest: str
    trace: tuple[str, ...]
    failure: str | None
    seen: Counter[str]

    def failure_lines(self) -> list[str]:
        """The end of the trace, then what went wrong."""
        return [*self.trace[-TRACE_LINES_SHOWN:], f"seed {self.seed} failed: {self.failure}"]


def run_consecutive(run: Callable[[int], SeedResult], first: int, num_seeds: int) -> Iterator[SeedResult]:
    """Runs consecutive seeds; the last result is the first failure, if one fails."""
    for seed in range(first, first + num_seeds):
        result = run(seed)
        yield result
        if result.failure is not None:
            return
