"""Tables and names on a terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells in columns; the first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def printable(text: str) -> str:
    """Names come from clients: what would move a terminal's cursor is shown, not sent."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
