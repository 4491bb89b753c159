"""Counts and durations that cost a request next to nothing: plain numbers, made into Prometheus series when read.

A client library's counter takes a lock and several calls for each count. These belong to one thread; the values read
are those of that moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.utils import floatToGoString


class Tally:
    """A counter ``name`` with labels: how often each combination of their values was counted."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, labels: Sequence[str]) -> None:
        self._name = name
        self._text = text
        self._labels = labels
        self._counts: dict[tuple[str | int, ...], list[int]] = {}
        registry.register(self)

    def count(self, *values: str | int) -> None:
        """One more, with these values of the labels in their order."""
        self._add(1, values)

    def add(self, number: int, *values: str | int) -> None:
        """So many more, 0 and up."""
        self._add(number, values)

    def _add(self, number: int, values: tuple[str | int, ...]) -> None:
        counted = self._counts.get(values)
        if counted is None:
            self._counts[values] = [number]
        else:
            counted[0] += number

    def forget(self, *values: str | int) -> None:
        """Drop every combination that begins with these values."""
        for counted in [counted for counted in self._counts if counted[: len(values)] == values]:
            del self._counts[counted]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The series, for a registry."""
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, (number,) in self._counts.items():
            family.add_metric([str(value) for value in values], number)
        yield family


class Durations:
    """A histogram ``name`` of seconds, with the upper ``bounds`` of its buckets in rising order."""

    def __init__(self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = list(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum_s = 0.0
        registry.register(self)

    def observe(self, seconds: float) -> None:
        """One more, which took ``seconds``."""
        index = 0
        for bound in self._bounds:
            if seconds <= bound:
                break
            index += 1
        self._counts[index] += 1
        self._sum_s += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The series, for a registry."""
        bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        family = HistogramMetricFamily(self._name, self._text)
        family.add_metric([], list(zip(bounds, accumulate(self._counts), strict=True)), self._sum_s)
        yield family
