"""The faults that a simulation can bring about."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Fault(Enum):
    """A kind of fault."""

    KILL_ENGINE = "kill-engine"
    """All processes of an engine at once."""
    KILL_SCHEDULER = "kill-scheduler"
    KILL_WORKER = "kill-worker"
    KILL_SERVER = "kill-server"
    """Another life follows, with an empty index; engines hold the old arena until they are done with it."""
    STOP_SCHEDULER = "stop-scheduler"
    """SIGSTOP, and SIGCONT after a while; likewise the next two."""
    STOP_WORKER = "stop-worker"
    STOP_SERVER = "stop-server"
    CLOSE_CONNECTIONS = "close-connections"
    """The server closes one connection, or all of an engine's; processes go on."""
    SLOW_LINK = "slow-link"
    """One connection, or all of the server's, become slow for a while."""
    ABORT = "abort"
    """The client of a request leaves."""
    CLEAR = "clear"
    """An operator clears the cache of a tenant, a model, or all."""


ALL_FAULTS = tuple(Fault)


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """How a seed is run.

    Args:
        faults: kinds that may occur.
        validate_every: the cache is validated after each step of this many.
    """

    faults: tuple[Fault, ...] = ALL_FAULTS
    validate_every: int = 1
