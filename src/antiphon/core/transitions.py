"""Tables of states and transitions as Markdown, for the documents that are held against them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any


def transition_tables(
    machines: Iterable[tuple[str, type[Enum]]],
    meanings: Mapping[Any, str],
    transitions: Mapping[tuple[Any, Any], str],
) -> str:
    """For each machine its states, then its transitions.

    Args:
        machines: title and states of each.
        meanings: what each state is; every state has one.
        transitions: from and to, and when.
    """
    parts = []
    for title, kind in machines:
        lines = [f"### {title}", "", "| state | meaning |", "|---|---|"]
        lines += [f"| {state.value} | {meanings[state]} |" for state in kind]
        lines += ["", "| from | to | when |", "|---|---|---|"]
        pairs = ((old, new, why) for (old, new), why in transitions.items() if isinstance(old, kind))
        lines += [f"| {old.value} | {new.value} | {why} |" for old, new, why in pairs]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)
