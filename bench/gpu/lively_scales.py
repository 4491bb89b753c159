"""How large random weights are, so that every token depends on the whole prompt."""

from __future__ import annotations

SCALE = 0.02
SCALES = {"o_proj": 0.16, "down_proj": 0.002}


def scale_of(name: str) -> float:
    """The standard deviation of a tensor: as at the start of a training, attention stronger than the rest."""
    return next((value for part, value in SCALES.items() if part in name), SCALE)
