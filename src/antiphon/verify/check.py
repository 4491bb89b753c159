"""One thing that must hold, and what was seen."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """``name`` for people, whether it ``holds``, and what was ``seen``, with its numbers."""

    name: str
    holds: bool
    seen: str
