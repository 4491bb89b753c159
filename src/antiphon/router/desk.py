"""What the requests of a router share."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from antiphon.observe.router_metrics import RouterMetrics
from antiphon.router.access_log import AccessLog
from antiphon.router.engines import Engines

if TYPE_CHECKING:
    from antiphon.router.flight import Flight


@dataclass(slots=True)
class Desk:
    """What the flights of a router share.

    Args:
        is_tagged: engines are named in request ids.
        handoff: how KV gets from prefill to decode: ``nixl`` or ``cache``.
        flights: those in progress, waiting ones among them.
    """

    engines: Engines
    metrics: RouterMetrics
    is_tagged: bool
    access_log: AccessLog | None
    handoff: str = "nixl"
    flights: set[Flight] = field(default_factory=set)
    clock: Callable[[], float] = time.monotonic  # uvloop's own clock counts whole milliseconds
    chance: Callable[[], float] = random.random
