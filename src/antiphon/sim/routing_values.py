"""What is sent between a simulated router and simulated engines, and the figures of that world.

Times are short versions of real ones, in their real order: a hand-over may take less than a lease lasts, a lease less
than a fault does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from antiphon.routing.options import LifeOptions

LEASE_S = 1.6
"""A prefill engine frees blocks that nobody has pulled for so long."""
LIFE_OPTIONS = LifeOptions(
    connect_s=0.2,
    prefill_s=0.8,
    handover_s=1.0,
    first_token_s=0.8,
    idle_s=0.4,
    abort_grace_s=0.08,
    prefills_max=3,
    backoff_min_s=0.02,
    backoff_max_s=0.1,
)
HEALTH_INTERVAL_S = 0.3
HEALTH_TIMEOUT_S = 0.15
COMPUTE_S = (0.005, 0.06)
"""A prefill, and the time until a decode engine admits a request."""
ADMIT_S = (0.002, 0.05)
TOKEN_S = (0.004, 0.03)


class RoutingFault(Enum):
    """A kind of fault."""

    KILL = "kill"
    """An engine dies at once, and another life follows behind the same address."""
    FLAP = "flap"
    """It does so several times in a row."""
    HANG = "hang"
    """SIGSTOP, and SIGCONT after a while: connections are accepted and nothing is answered."""
    UNREACHABLE = "unreachable"
    """Connections are neither accepted nor refused."""
    SLOW = "slow"
    ERRORS = "errors"
    """It answers 500; and so on for the next ones."""
    OVERLOAD = "overload"
    """503 or 429."""
    GARBAGE = "garbage"
    """An answer that cannot be used."""
    NO_HANDLE = "no_handle"
    """A prefill's answer without a handle."""
    RESET = "reset"
    """It ends the connection instead of an answer, or in the middle of one."""
    LOSE = "lose"
    """Its answers are lost."""
    MUTE = "mute"
    """A stream stops, its connection stays."""
    TRUNCATE = "truncate"
    """A stream ends without its end mark."""
    DUPLICATE = "duplicate"
    """Every message comes twice."""
    STALE_CONNECTION = "stale_connection"
    """A connection turns out to be dead before a byte is written."""
    STALE_HEALTH = "stale_health"
    """Results of health checks come late, after newer ones."""
    SICK = "sick"
    """Health checks fail, requests do not."""
    OWN_LIMIT = "own_limit"
    """The router has no connection left."""
    DRAIN = "drain"
    """An operator drains an engine and opens it again."""
    REMOVE = "remove"
    """An operator removes an engine, and adds it again."""
    CLIENTS_LEAVE = "clients_leave"
    """Clients leave, at any time or at the entry of a stage."""


ALL_ROUTING_FAULTS = tuple(RoutingFault)

MODES = frozenset(
    {
        RoutingFault.UNREACHABLE,
        RoutingFault.ERRORS,
        RoutingFault.OVERLOAD,
        RoutingFault.GARBAGE,
        RoutingFault.NO_HANDLE,
        RoutingFault.RESET,
        RoutingFault.LOSE,
        RoutingFault.MUTE,
        RoutingFault.TRUNCATE,
        RoutingFault.DUPLICATE,
        RoutingFault.STALE_CONNECTION,
        RoutingFault.STALE_HEALTH,
        RoutingFault.SICK,
        RoutingFault.SLOW,
    }
)
"""Faults that are a way for an engine to behave for a while."""


class Invalid(Enum):
    """Whether an engine refuses a client's request as invalid."""

    NO = "no"
    FOR_PREFILL = "for_prefill"
    FOR_DECODE = "for_decode"
    """The prefill engine takes it, the decode engine does not."""
    POISON = "poison"
    """Every engine answers 500."""


@dataclass(frozen=True, slots=True)
class SimHandle:
    """A prefill's KV: of which life of which engine, and which."""

    engine: str
    incarnation: int
    number: int

    @property
    def engine_id(self) -> str:
        """As vLLM's: new in each life."""
        return f"{self.engine}#{self.incarnation}"


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to an engine.

    Args:
        id: unique at the engine.
        num_tokens: of the answer.
        handle: None for a prefill, and for a decode engine that is to compute the prompt.
        is_salted: what is read may be other data and is not kept.
    """

    id: str
    invalid: Invalid
    num_tokens: int
    is_stream: bool = True
    handle: SimHandle | None = None
    is_salted: bool = False


@dataclass(frozen=True, slots=True)
class Head:
    """The head of a prefill's answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer: of a prefill engine, or a decode engine's error."""

    status: int
    handle: SimHandle | None = None
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Garbage:
    """Bytes that are no answer."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token of a stream.

    Args:
        index: 0 and up.
        is_right: whether it was computed from the prompt's own KV.
    """

    index: int
    is_right: bool


@dataclass(frozen=True, slots=True)
class Done:
    """The end mark of a stream; of an answer that is no stream, the whole of it."""

    is_right: bool = True


Said = Head | Answer | Garbage | Token | Done
