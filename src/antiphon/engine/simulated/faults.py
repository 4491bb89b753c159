"""Faults on demand: what the next requests will suffer.

Owns the list of armed faults and who consumes them; the shell carries them out. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from antiphon.core.errors import RequestRefused
from antiphon.engine.simulated.requests import Body

INFERENCE_FAULTS = {
    "respond_500": "answer 500 at once",
    "respond_503": "answer 503 at once",
    "respond_429": "answer 429 at once",
    "garbage": "answer with something that is not HTTP",
    "reset": "cut the connection with a TCP reset, before any answer or after `after_events` events",
    "hang": "never answer",
    "hang_mid_stream": "send `after_events` events, then nothing, with the connection open",
    "cut_mid_stream": "send `after_events` events, then close the connection",
    "die_mid_stream": "send `after_events` events, then end the process with SIGKILL",
    "no_kv_params": "answer a prefill without kv_transfer_params and keep nothing",
    "slow": "multiply the times of prefill and decode by `factor`",
}
HEALTH_FAULTS = {
    "health_503": "answer 503 to GET /health",
    "hang_health": "never answer GET /health",
}
MID_STREAM_FAULTS = frozenset(("hang_mid_stream", "cut_mid_stream", "die_mid_stream"))

ARMED_MAX = 64


@dataclass(slots=True)
class Fault:
    """One armed fault. ``count`` requests suffer it; None means all until it is cleared."""

    kind: str
    count: int | None = 1
    after_events: int = 0
    factor: float = 1.0


class FaultPlan:
    """The armed faults. Each request takes at most one: the one that was armed first."""

    def __init__(self) -> None:
        self._armed: list[Fault] = []

    def arm(self, body: Body) -> None:
        """Arm what a request to /simulated/fault asks for; kind ``clear`` disarms everything.

        Raises:
            RequestRefused: an unknown kind, a field of the wrong type, or too many armed faults.
        """
        kind, count = body.get("kind"), body.get("count", 1)
        after_events, factor = body.get("after_events", 0), body.get("factor", 1.0)
        if kind == "clear":
            self._armed.clear()
            return
        if not isinstance(kind, str) or kind not in INFERENCE_FAULTS | HEALTH_FAULTS:
            known = ", ".join(["clear", *INFERENCE_FAULTS, *HEALTH_FAULTS])
            raise RequestRefused(f"there is no fault {kind!r}; the kinds are {known}", param="kind")
        if count is not None and (type(count) is not int or count < 1):
            raise RequestRefused("count must be a number of requests, or null for all", param="count")
        if type(after_events) is not int or after_events < 0:
            raise RequestRefused("after_events must be a number of events", param="after_events")
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor <= 1e6:
            raise RequestRefused("factor must be between 0 and 1000000", param="factor")
        if len(self._armed) >= ARMED_MAX:
            raise RequestRefused(f"{ARMED_MAX} faults are armed already; clear them first")
        self._armed.append(Fault(kind, count, after_events, float(factor)))

    def take_inference(self) -> Fault | None:
        """The fault that the next inference request suffers."""
        return self._take(INFERENCE_FAULTS)

    def take_health(self) -> Fault | None:
        """The fault that the next GET /health suffers."""
        return self._take(HEALTH_FAULTS)

    @property
    def armed(self) -> list[Fault]:
        """What is armed now."""
        return list(self._armed)

    def _take(self, kinds: dict[str, str]) -> Fault | None:
        for fault in self._armed:
            if fault.kind in kinds:
                if fault.count is not None:
                    fault.count -= 1
                    if not fault.count:
                        self._armed.remove(fault)
                return fault
        return None
