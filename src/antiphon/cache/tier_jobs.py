"""What the tier plan asks of the shell, and what comes back. Values only.

A ``TierJob`` is done by the shell on a thread of that tier, and answered by exactly one ``TierDone``, however late: its
memory is held until then. The plan bounds how many of each kind run, so that the shell needs no queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NewType

from antiphon.cache.arena import RegionHandle
from antiphon.cache.tier_key import Selection, TierKey
from antiphon.core.namespace import NamespaceDigest

JobId = NewType("JobId", int)


class JobKind(Enum):
    """What a job does."""

    __hash__ = object.__hash__
    LIST = "list"
    """Which keys are there?"""
    ASK = "ask"
    """Which of ``keys`` are there?"""
    FETCH = "fetch"
    """Read the chunk of the one key into ``region``, and check its digest."""
    PUBLISH = "publish"
    """Store the chunk in ``region`` under the one key, with its digest."""
    CLEAR = "clear"
    """Remove ``keys``, and what ``selection`` means as far as the tier can be listed; a long one in several jobs."""
    PROBE = "probe"
    """Is it in service?"""


class Outcome(Enum):
    """How a job ended."""

    __hash__ = object.__hash__
    DONE = "done"
    """As asked; a fetch has checked what it read."""
    MISSING = "missing"
    """A fetch found nothing under the key."""
    CORRUPT = "corrupt"
    """A fetch found a record that is damaged, or means something else."""
    FULL = "full"
    """A publication found no room."""
    FAILED = "failed"
    """Out of service, or no answer in time."""


@dataclass(frozen=True, slots=True)
class TierJob:
    """An order to the shell.

    Args:
        tier: number of the tier, in the order of the options.
        keys: one for a fetch or a publication; those asked for; those to remove.
        region: of the arena, for a fetch or a publication: ``num_bytes`` from its start.
        namespace, fingerprint, num_bytes: what the record must mean; the namespace is None where there is no record.
        selection: of a clear.
        is_continued: of a clear: it goes on where the one before it, which was not whole, has ended.
        patience_s: of a probe: for so long it is repeated while the store has no answer in time, as one that still
            starts; any other failure ends it at once.
    """

    id: JobId
    tier: int
    kind: JobKind
    keys: tuple[TierKey, ...] = ()
    region: RegionHandle | None = None
    namespace: NamespaceDigest | None = None
    fingerprint: str | None = None
    num_bytes: int = 0
    selection: Selection | None = None
    is_continued: bool = False
    patience_s: float = 0.0
