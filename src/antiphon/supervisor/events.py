"""What the supervisor tells whoever started it (the console, the demo): one event a change.

Events are for people. Decisions are made from the state of the children, never from events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

EventKind = Literal[
    "starting", "phase", "waiting", "ready", "exited", "restarting", "failed", "stopping", "stopped", "notice"
]


@dataclass(frozen=True)
class SupervisorEvent:
    """One change of one process, or of the whole deployment."""

    kind: EventKind
    process: str
    """Name of the process; empty when the event concerns the deployment."""
    text: str
    """One sentence or phrase without the process's name; an end that is explained has several lines."""
    elapsed_s: float = 0.0
    """Seconds since this start of the process (or of the deployment)."""


OnEvent = Callable[[SupervisorEvent], None]
