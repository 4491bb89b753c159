"""One tier: what is known to be there, what runs, what waits to be published, and whether it is used.

Always true:

- Of each kind of job no more run than ``_max_of`` allows; a job that is overdue runs until it has really ended.
- The bytes that wait to be published, or are being published, stay within ``queue_bytes_max``.
- While a ``Clear`` has not reached the tier, nothing that it means counts as being there, and nothing is published.

It decides nothing about lookups (``onboarding``) nor which chunks are published (``publishing``).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from antiphon.cache.breaker import Breaker, BreakerState
from antiphon.cache.index import Chunk
from antiphon.cache.tier_jobs import JobKind, TierJob
from antiphon.cache.tier_key import TAG_BYTES, Selection, TierKey
from antiphon.cache.tier_options import ASKS_MAX, TierOptions

if TYPE_CHECKING:
    from antiphon.cache.onboarding import Ask, Fetch

_CLEARS_MAX: Final = 16
"""Clears that wait for a tier; past it all that it has is cleared."""


@dataclass(slots=True)
class TierCounts:
    """Totals of one tier since the start. Times are those of the jobs that ended well, in seconds."""

    num_fetched: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    num_missing: int = 0
    num_corrupt: int = 0
    num_published: int = 0
    published_bytes: int = 0
    publish_s: float = 0.0
    num_refused: int = 0
    """Chunks that were not published since the queue was full."""
    num_lost: int = 0
    """Chunks that left the arena before they were published."""
    num_full: int = 0
    num_failed: int = 0
    num_overdue: int = 0
    num_asked_keys: int = 0
    num_promoted: int = 0
    num_cleared: int = 0


@dataclass(slots=True, eq=False)
class Publication:
    """A chunk that waits to be published, or is being published.

    Args:
        is_held: it keeps the chunk in the arena already while it waits, since the chunk was to be evicted.
    """

    chunk: Chunk
    key: TierKey
    is_held: bool
    num_tries: int = 0


@dataclass(slots=True, eq=False)
class Running:
    """A job that has not ended.

    Args:
        subject: what it is for.
        is_overdue: its deadline has passed, and it counts as failed; its memory is held.
    """

    job: TierJob
    began_s: float
    deadline_s: float
    subject: Fetch | Ask | Publication | None
    is_overdue: bool = False


@dataclass(slots=True)
class Waiting:
    """What a tier has to do, in order."""

    fetches: deque[Fetch] = field(default_factory=deque)
    asks: deque[Ask] = field(default_factory=deque)
    publications: dict[Chunk, Publication] = field(default_factory=dict)
    clears: list[Selection] = field(default_factory=list)
    dirty: dict[Chunk, float] = field(default_factory=dict)
    """Chunks that ``back`` has not published, by the time they were stored; the oldest first."""


class Tier:
    """One tier.

    Args:
        number: in the order of the options.
        options: its bounds.
    """

    def __init__(self, number: int, options: TierOptions) -> None:
        self.number = number
        self.options = options
        self.breaker = Breaker(options.retry_min_s, options.retry_max_s)
        self.counts = TierCounts()
        self.waiting = Waiting()
        self.running: dict[int, Running] = {}
        self.num_running = dict.fromkeys(JobKind, 0)
        self.known: dict[TierKey, int] = {}
        """Keys that are there, and how often each was fetched; those known longest first."""
        self.num_known_of: dict[bytes, int] = {}
        """How many of them begin with the tags of a tenant and a model."""
        self.is_complete = False
        """Whether what is not in ``known`` is not there, as far as nobody else writes."""
        self.must_list = not options.is_shared
        self.must_probe = options.first_probe_s is not None
        self.queued_bytes = 0
        self.full_until_s = float("-inf")
        """Nothing is published until then."""
        self.is_write_doubted = False
        """Whether a refused publication opened the breaker last, and none has succeeded since."""
        self.write_reason = ""
        """Why publications are refused, while the tier answers all the same; empty where they are not."""
        self.clearing: Selection | None = None
        self.is_clear_cut = False
        """Whether no job runs for ``clearing`` though there is more of it to go through."""

    # ---- what is there ---------------------------------------------------------------------------------------------

    def remember(self, key: TierKey) -> None:
        """The key is there."""
        if key not in self.known:
            self.known[key] = 0
            tags = key[: 2 * TAG_BYTES]
            self.num_known_of[tags] = self.num_known_of.get(tags, 0) + 1
            if len(self.known) > self.options.known_max:
                self.forget(next(iter(self.known)))
                self.is_complete = False

    def forget(self, key: TierKey) -> None:
        """The key is not there."""
        if self.known.pop(key, None) is not None:
            tags = key[: 2 * TAG_BYTES]
            self.num_known_of[tags] -= 1
            if not self.num_known_of[tags]:
                del self.num_known_of[tags]

    def holds(self, key: TierKey) -> bool:
        """Whether a chunk may be fetched from here, as far as is known."""
        return self.breaker.is_closed and key in self.known and not self.is_hidden(key)

    @property
    def must_be_asked(self) -> bool:
        """Whether what is not known may be there."""
        return self.breaker.is_closed and (self.options.is_shared or not self.is_complete)

    def is_hidden(self, key: TierKey) -> bool:
        """Whether a ``Clear`` that has not reached the tier means the key."""
        clears = self.waiting.clears
        if not clears and self.clearing is None:
            return False
        return any(each.matches(key) for each in clears) or (self.clearing is not None and self.clearing.matches(key))

    def clear(self, selection: Selection) -> None:
        """What is selected must go."""
        clears = self.waiting.clears
        if selection not in clears:
            clears.append(selection)
        if len(clears) > _CLEARS_MAX:
            clears[:] = [Selection()]

    # ---- what runs -------------------------------------------------------------------------------------------------

    def has_slot(self, kind: JobKind) -> bool:
        """Whether one more job of that kind may run."""
        return self.num_running[kind] < self._max_of(kind)

    def _max_of(self, kind: JobKind) -> int:
        if kind is JobKind.FETCH:
            return self.options.fetches_max
        if kind is JobKind.PUBLISH:
            return self.options.publishes_max
        return ASKS_MAX if kind is JobKind.ASK else 1

    def begin(self, job: TierJob, now_s: float, subject: Fetch | Ask | Publication | None) -> None:
        """The job was given to the shell."""
        is_long = job.kind in (JobKind.LIST, JobKind.CLEAR)
        # A probe that is repeated ends with a call that began within its patience.
        timeout_s = self.options.list_timeout_s if is_long else job.patience_s + self.options.timeout_s
        self.running[job.id] = Running(job, now_s, now_s + timeout_s, subject)
        self.num_running[job.kind] += 1

    def end(self, job_id: int) -> Running | None:
        """The job has really ended."""
        running = self.running.pop(job_id, None)
        if running is not None:
            self.num_running[running.job.kind] -= 1
        return running

    def overdue(self, now_s: float) -> Iterator[Running]:
        """Yields, once each, the jobs whose deadline has passed."""
        for running in list(self.running.values()):
            if not running.is_overdue and running.deadline_s <= now_s:
                running.is_overdue = True
                self.counts.num_overdue += 1
                yield running

    # ---- time ------------------------------------------------------------------------------------------------------

    def next_deadline_s(self, now_s: float) -> float | None:
        """When there is something to do for the time alone."""
        due_s = math.inf
        for running in self.running.values():
            if running.deadline_s < due_s and not running.is_overdue:
                due_s = running.deadline_s
        breaker, dirty = self.breaker, self.waiting.dirty
        if not breaker.is_closed:
            if breaker.state is BreakerState.OPEN and self.has_slot(JobKind.PROBE):
                due_s = min(due_s, breaker.retry_at_s)
        elif (dirty or self.full_until_s > now_s) and not self.is_clearing and self.has_slot(JobKind.PUBLISH):
            if self.full_until_s > now_s:
                due_s = min(due_s, self.full_until_s)
            elif not self.queued_bytes:
                due_s = min(due_s, next(iter(dirty.values())) + self.options.flush_after_s)
        return due_s if due_s != math.inf else None

    @property
    def is_clearing(self) -> bool:
        """Whether a clear has not ended, or not begun: nothing is published meanwhile."""
        return bool(self.waiting.clears) or self.clearing is not None
