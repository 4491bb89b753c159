"""What a cache server shows of itself: snapshots for ``/status``, ``/leases`` and ``/reports``. Values only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProcessView:
    """One attached process of an engine.

    Args:
        role: as it said: ``scheduler``, ``worker-0``, ``probe``.
        pid: its process id, as it said.
        gate: ``passed``, ``failed`` or ``not_run``.
        detail: what it said about the gate.
    """

    role: str
    pid: int
    gate: str
    detail: str


@dataclass(frozen=True, slots=True)
class EngineView:
    """One life of an engine. Without processes: it is gone, and leases of it wait for their quarantine.

    Args:
        leased_bytes: bytes that its leases protect, each chunk counted once.
    """

    engine: str
    incarnation: str
    model: str
    processes: tuple[ProcessView, ...]
    leased_bytes: int


@dataclass(frozen=True, slots=True)
class LeaseView:
    """One lease that has not ended. ``state``: held, releasing, orphaned or quarantined."""

    lease: int
    engine: str
    incarnation: str
    request: str
    state: str
    age_s: float
    num_bytes: int
    num_chunks: int


@dataclass(frozen=True, slots=True)
class Population:
    """How much of the arena has its memory.

    Args:
        populated_bytes: bytes that chunks may use.
        total_bytes: bytes of the arena.
        error: why it does not go on; None where it goes on or is complete.
    """

    populated_bytes: int
    total_bytes: int
    error: str | None

    @property
    def is_complete(self) -> bool:
        """Whether all of it has its memory."""
        return self.populated_bytes == self.total_bytes


@dataclass(frozen=True, slots=True)
class TokenReport:
    """Where the prompt tokens of one request came from, as its engine reported.

    Args:
        sequence: number of the report in this life of the server, from 1.
        at: seconds since 1970 when it came.
        namespace: digest of the request's namespace in hex; empty where the engine does not say.
    """

    sequence: int
    request: str
    engine: str
    incarnation: str
    num_prompt_tokens: int
    device: int
    l1: int
    remote_prefill: int
    computed: int
    num_preemptions: int
    finish: str
    at: float
    namespace: str = ""
    l2: int = 0
    peer: int = 0


@dataclass(frozen=True, slots=True)
class ReportPage:
    """A stretch of the reports, as ``antiphon.cache.log.LogPage`` is one of the events.

    Args:
        next_sequence: what to ask for next.
        num_lost: reports that were asked for and are no longer kept.
    """

    reports: tuple[TokenReport, ...]
    next_sequence: int
    num_lost: int


@dataclass(slots=True)
class TokenTotals:
    """Sums over all reports since the start.

    Args:
        num_mismatched: finished requests whose sources did not add up to their prompt.
        num_aborted: requests that ended before their prompt was complete.
    """

    num_reports: int = 0
    num_mismatched: int = 0
    num_aborted: int = 0
    num_prompt_tokens: int = 0
    device: int = 0
    l1: int = 0
    remote_prefill: int = 0
    computed: int = 0
    l2: int = 0
    peer: int = 0
