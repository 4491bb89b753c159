"""Byte counts as people write them: ``400MB``, ``2GiB``, or a plain number of bytes."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BYTES = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*([kmgt]?i?)(?:bytes|b)?\s*", re.IGNORECASE)


def parse_bytes(value: object) -> object:
    """``value`` as a number of bytes where it is text; ValueError for text that is none; anything else as it is."""
    if not isinstance(value, str):
        return value
    match = _BYTES.fullmatch(value)
    unit = match.group(2).lower() if match else ""
    if match is None or unit not in _UNITS:
        raise ValueError(f"{value!r} is not a size: write bytes, or a number with KB, MB, GB, TB, KiB, MiB, GiB or TiB")
    if match.group(1).startswith("-"):
        raise ValueError(f"{value!r} is not a size, it must be positive: write bytes, or a number with MB or GB")
    return int(float(match.group(1)) * _UNITS[unit])


def format_bytes(num_bytes: int) -> str:
    """A size for people, in the decimal units that ``kv_memory_bytes`` accepts back: ``400 MB``, ``1.5 GB``."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.4g} {unit}"
    return f"{num_bytes} bytes"


Bytes = Annotated[int, BeforeValidator(parse_bytes)]
