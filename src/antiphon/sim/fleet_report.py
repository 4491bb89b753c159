"""What policies gave, in a table."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.sim.fleet_oracle import ORACLE
from antiphon.sim.fleet_run import FleetResult

_HEAD = (
    "policy",
    "hits",
    "of oracle",
    "ttft p50",
    "ttft p99",
    "P requests",
    "P work",
    "D requests",
    "P busy",
    "pulled",
)


def share_of_oracle(result: FleetResult, results: Sequence[FleetResult]) -> float | None:
    """Its hit rate over that of the oracle of the same rule, None where that has not run, or has hit nothing."""
    for other in results:
        if other.policy == ORACLE and other.num_hit:
            return result.hit_rate / other.hit_rate
    return None


def policy_table(results: Sequence[FleetResult]) -> list[str]:
    """A line for each policy: hits by tokens on prefill engines, times to first token, the most loaded engine of each
    pool over the mean, the part of the time in which prefill engines compute, and the part of the tokens that decode
    engines pull."""
    rows = []
    for result in results:
        share = share_of_oracle(result, results)
        rows.append(
            (
                result.policy,
                f"{result.hit_rate:.1%}",
                "" if share is None else f"{share:.3f}",
                time_text(result.quantile_s(0.5)),
                time_text(result.quantile_s(0.99)),
                f"{result.skew:.2f}",
                f"{result.work_skew:.2f}",
                f"{result.decode_skew:.2f}",
                f"{result.utilisation:.0%}",
                f"{result.num_pulled / result.num_tokens:.0%}",
            )
        )
    return table(_HEAD, rows)


def time_text(seconds: float) -> str:
    """Milliseconds, or seconds from one on."""
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of columns: the first to the left, numbers to the right."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = []
    for row in (head, *rows):
        cells = [
            text.ljust(width) if not column else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
