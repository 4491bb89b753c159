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
    PIN = "pin"
    """An operator pins what is stored, or ends a pin."""
    QUOTA = "quota"
    """An operator changes the quota of a tenant."""
    TIER_DOWN = "tier-down"
    """A tier refuses every call for a while; likewise the next three."""
    TIER_HANG = "tier-hang"
    TIER_SLOW = "tier-slow"
    TIER_FULL = "tier-full"
    TIER_FLIP = "tier-flip"
    """A bit of a record in a tier flips. (Torn records come with ``KILL_SERVER``.)"""


TIER_FAULTS = tuple(fault for fault in Fault if fault.value.startswith("tier-"))
ALL_FAULTS = tuple(fault for fault in Fault if fault not in TIER_FAULTS)
"""Those of a host without tiers."""


@dataclass(frozen=True, slots=True)
class SimulationOptions:
    """How a seed is run.

    Args:
        faults: kinds that may occur.
        validate_every: the cache is validated after each step of this many.
        has_tiers: whether there are tiers behind the arena.
    """

    faults: tuple[Fault, ...] = ALL_FAULTS
    validate_every: int = 1
    has_tiers: bool = False

    @classmethod
    def with_tiers(cls, validate_every: int = 1) -> SimulationOptions:
        """A host with tiers, and all faults."""
        return cls(ALL_FAULTS + TIER_FAULTS, validate_every, has_tiers=True)
