"""The life of one routed request: a table of stages, and exactly one outcome.

    RECEIVED ─▶ PREFILLING ─▶ HANDING_OVER ─▶ DECODING ─▶ COMPLETED | FAILED | CANCELLED
        └──────────────(local)────────────────────▲
    (each stage may end in FAILED or CANCELLED)

From HANDING_OVER on the prefill engine holds blocks for this request, so a client that leaves no longer cancels it at
once: the hand-over is completed first. A stage that the table does not list is a bug and raises.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class Stage(Enum):
    """Where a request is."""

    __hash__ = object.__hash__  # its members are single objects, and Enum's own hash is a call into Python

    def __init__(self, word: str) -> None:
        self.word = word
        """The value again: Enum's ``value`` is two calls into Python."""

    RECEIVED = "received"
    PREFILLING = "prefilling"
    HANDING_OVER = "handing_over"
    DECODING = "decoding"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


TRANSITIONS: dict[Stage, frozenset[Stage]] = {
    Stage.RECEIVED: frozenset({Stage.PREFILLING, Stage.DECODING, Stage.FAILED, Stage.CANCELLED}),
    Stage.PREFILLING: frozenset({Stage.HANDING_OVER, Stage.COMPLETED, Stage.FAILED, Stage.CANCELLED}),
    Stage.HANDING_OVER: frozenset({Stage.DECODING, Stage.FAILED, Stage.CANCELLED}),
    Stage.DECODING: frozenset({Stage.COMPLETED, Stage.FAILED, Stage.CANCELLED}),
    Stage.COMPLETED: frozenset(),
    Stage.FAILED: frozenset(),
    Stage.CANCELLED: frozenset(),
}
"""PREFILLING may end in COMPLETED: a prefill engine that refuses a request as invalid has answered it."""


@dataclass(slots=True)
class RequestLife:
    """The stage of one request and when each stage began (seconds of the caller's clock)."""

    began_s: float
    stage: Stage = Stage.RECEIVED
    times: dict[Stage, float] = field(default_factory=dict)

    def enter(self, stage: Stage, now_s: float) -> None:
        """Go on to ``stage``."""
        assert stage in TRANSITIONS[self.stage], f"a request cannot go from {self.stage.value} to {stage.value}"
        self.stage = stage
        self.times[stage] = now_s

    @property
    def is_over(self) -> bool:
        """Whether the outcome is known."""
        return not TRANSITIONS[self.stage]

    @property
    def holds_prefill_blocks(self) -> bool:
        """Whether a prefill engine holds blocks that a decode engine has not pulled yet, as far as the router knows."""
        return self.stage is Stage.HANDING_OVER
