"""Figures: what every bench measures into and prints from."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from antiphon import __version__

Say = Callable[[str], None]
"""Takes a line about progress."""


@dataclass
class Row:
    """One figure of a bench.

    Args:
        name: what was measured.
        value: in ``unit``.
        unit: ``GB/s`` (10^9), ``MB`` (10^6), ``ms``, ``us``, ``ns``, ``x`` (a ratio), ``of N`` or what
            was counted.
        goal: what it should be, as ``>= 0.8``; None where nothing is promised.
        is_met: whether it is; None without a goal.
        note: how to read it.
    """

    name: str
    value: float
    unit: str
    goal: str | None = None
    is_met: bool | None = None
    note: str = ""


@dataclass
class Rows:
    """Figures in the order in which they were measured."""

    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, value: float, unit: str, note: str = "") -> None:
        self.rows.append(Row(name, value, unit, note=note))

    def at_least(self, name: str, value: float, unit: str, goal: float) -> None:
        self.rows.append(Row(name, value, unit, f">= {goal:g}", value >= goal))

    def at_most(self, name: str, value: float, unit: str, goal: float) -> None:
        self.rows.append(Row(name, value, unit, f"<= {goal:g}", value <= goal))


@dataclass(frozen=True)
class BenchResult:
    """The figures, and what they were measured on."""

    rows: list[Row]
    num_cpus: int
    machine: str
    python: str
    version: str

    @classmethod
    def here(cls, rows: Rows) -> BenchResult:
        """Measured on this machine, with this Python."""
        num_cpus = len(os.sched_getaffinity(0))
        return cls(rows.rows, num_cpus, platform.machine(), platform.python_version(), __version__)

    @property
    def missed(self) -> list[Row]:
        """The rows whose goal is not met."""
        return [row for row in self.rows if row.is_met is False]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least ``percent`` of the values do not exceed."""
    assert values, "no values"
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]
