"""What is wrong with a spec, as values: all of it at once, each with the field and the remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from antiphon.core.errors import ConfigError


@dataclass(frozen=True)
class Problem:
    """One thing that cannot work."""

    field: str
    """Dotted path of the spec field (``prefill.port``), or the file."""
    message: str
    """What is wrong, one sentence without a full stop."""
    fix: str
    """What to do about it, one sentence without a full stop."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}\n  fix: {self.fix}"


@dataclass(frozen=True)
class Notice:
    """One thing that was changed or filled in, or that works but surprises."""

    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class SpecError(ConfigError):
    """A spec that cannot work. ``problems`` holds all that is wrong, at least one."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems, "a SpecError needs a problem"
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))
