"""One engine as routing sees it: a record. ``pool.Pool`` alone changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Literal

from antiphon.routing.states import EndpointState

Role = Literal["prefill", "decode"]

TIER_READY: Final = 0
TIER_WAITING: Final = 1
TIER_DOWN: Final = 2
TIER_OUT: Final = 3

TIERS: dict[EndpointState, int] = {
    EndpointState.READY: TIER_READY,
    EndpointState.UNKNOWN: TIER_WAITING,
    EndpointState.SUSPECT: TIER_WAITING,
    EndpointState.DOWN: TIER_DOWN,
    EndpointState.DRAINING: TIER_OUT,
    EndpointState.REMOVED: TIER_OUT,
}


class Verdict(Enum):
    """What a request to an engine says about the engine."""

    SUCCEEDED = "succeeded"
    """It answered: with a result, or by refusing an invalid request."""
    FAILED = "failed"
    """It answered with an internal error: it lives."""
    LOST = "lost"
    """The connection ended early, or the answer cannot be used."""
    TIMED_OUT = "timed_out"
    """A stage deadline passed."""
    REFUSED = "refused"
    """Nothing listens at its address: that life of the engine is over."""
    UNREACHABLE = "unreachable"
    """No connection in time."""


class Cause(Enum):
    """What made an engine suspect or down, which decides what brings it back."""

    NONE = "none"
    CONNECTION = "connection"
    """Refused or unreachable."""
    HEALTH = "health"
    REQUEST = "request"
    """Only a request can show that it is over: an engine that hangs may still answer health checks."""


@dataclass(slots=True, eq=False)
class Endpoint:
    """An engine at an address, through all its lives."""

    url: str
    role: Role
    state: EndpointState = EndpointState.UNKNOWN
    tier: int = TIER_WAITING
    """Of its state, for picking."""
    cause: Cause = Cause.NONE
    address: str = field(init=False)
    """``host:port``."""
    engine_id: str = ""
    """Of its present life, as it last said; empty if it never did."""
    life: int = 0
    """Goes up when it is seen to have restarted: handles of an earlier life are not sent."""
    num_active: int = 0
    """Requests that this router has in flight there, those that are connecting counted."""
    num_uncached_tokens: int = 0
    """Prompt tokens that these requests still have to compute there, as far as it is known."""
    trial: int = 0
    """The number of the request that tries it, 0 if none does."""
    num_trials: int = 0
    num_failures: int = 0
    """Failed in a row."""
    error_share: float = 0.0
    """Exponential mean over its requests, 0 to 1."""
    num_judged: int = 0
    """Requests that the share is made of, up to the window."""
    num_opened: int = 0
    """How often in a row it was left alone: the exponent of the wait."""
    retry_at_s: float = 0.0
    """Not tried before, while there is a better one."""
    num_failed_probes: int = 0
    num_good_probes: int = 0
    num_succeeded: int = 0
    """Requests that it has answered, ever."""
    num_ejections: int = 0
    """How often it went from ready to suspect or down, ever."""
    is_held: bool = False
    """Added closed: it drains only until it is opened for the first time."""
    is_leaving: bool = False
    """Removed once its last request has ended."""

    def __post_init__(self) -> None:
        self.address = self.url.partition("://")[2] or self.url

    @property
    def shown_state(self) -> EndpointState:
        """What operators see: one that is held has not been tried yet."""
        return EndpointState.UNKNOWN if self.is_held else self.state

    @property
    def is_usable(self) -> bool:
        """Whether it is taken to answer: not down, draining or removed."""
        return self.tier <= TIER_WAITING

    def __repr__(self) -> str:
        return f"<{self.role} {self.address} {self.state.value} active={self.num_active}>"
