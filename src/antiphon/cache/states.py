"""The states of slabs, chunks and leases, and every transition between them, as tables.

The code changes a state only through ``enter``, which asserts that the table lists the pair; ``docs/cache.md`` shows
these tables (``transition_tables``), and a test holds it in step.
"""

from __future__ import annotations

from enum import Enum

from antiphon.core import transitions


class SlabState(Enum):
    """A slab of a chunk that has a region."""

    __hash__ = object.__hash__  # members are single objects; Enum's own hash is Python code, on every count
    ABSENT = "absent"
    RESERVED = "reserved"
    COMMITTED = "committed"


class ChunkState(Enum):
    """A chunk that has, or had, a region."""

    __hash__ = object.__hash__
    INCOMPLETE = "incomplete"
    READABLE = "readable"
    RETIRED = "retired"
    QUARANTINED = "quarantined"
    FREED = "freed"


class LeaseState(Enum):
    """A lease."""

    __hash__ = object.__hash__
    HELD = "held"
    RELEASING = "releasing"
    ORPHANED = "orphaned"
    QUARANTINED = "quarantined"
    ENDED = "ended"


State = SlabState | ChunkState | LeaseState

MEANINGS: dict[State, str] = {
    SlabState.ABSENT: "nobody has written it",
    SlabState.RESERVED: "one writer may write it",
    SlabState.COMMITTED: "its bytes are complete",
    ChunkState.INCOMPLETE: "in the index, some slab not committed: a lookup misses it, another rank can fill it",
    ChunkState.READABLE: "in the index, all slabs committed: a lookup reports it",
    ChunkState.RETIRED: "out of the index, its bytes held by a lease, a writer or a tier",
    ChunkState.QUARANTINED: "out of the index, a dead writer may still be writing",
    ChunkState.FREED: "its bytes are free",
    LeaseState.HELD: "the owner has it",
    LeaseState.RELEASING: "the owner has released it, an announced copy has not ended",
    LeaseState.ORPHANED: "the owner's connection ended, other processes of its engine may be copying",
    LeaseState.QUARANTINED: "nobody alive can be copying, the DMA of a dead process might",
    LeaseState.ENDED: "it protects nothing",
}

TRANSITIONS: dict[tuple[State, State], str] = {
    (SlabState.ABSENT, SlabState.RESERVED): "reserved",
    (SlabState.RESERVED, SlabState.COMMITTED): "committed",
    (SlabState.RESERVED, SlabState.ABSENT): "aborted",
    (ChunkState.INCOMPLETE, ChunkState.READABLE): "the last slab is committed",
    (ChunkState.INCOMPLETE, ChunkState.RETIRED): "a writer's connection ended, it was cleared, or a tier is late",
    (ChunkState.INCOMPLETE, ChunkState.FREED): "evicted, cleared, or the only writer aborted with nothing committed",
    (ChunkState.READABLE, ChunkState.RETIRED): "cleared while leased or held",
    (ChunkState.READABLE, ChunkState.FREED): "evicted or cleared",
    (
        ChunkState.RETIRED,
        ChunkState.QUARANTINED,
    ): "the last lease or writer ended, less than the quarantine after a death",
    (ChunkState.RETIRED, ChunkState.FREED): "the last lease or writer ended",
    (ChunkState.QUARANTINED, ChunkState.FREED): "the quarantine is over",
    (LeaseState.HELD, LeaseState.ENDED): "released, no copy announced",
    (LeaseState.HELD, LeaseState.RELEASING): "released, a copy announced",
    (LeaseState.HELD, LeaseState.ORPHANED): "the owner's connection ended, others of its engine are attached",
    (
        LeaseState.HELD,
        LeaseState.QUARANTINED,
    ): "the engine's last connection ended, or released soon after a copier's death",
    (LeaseState.RELEASING, LeaseState.ENDED): "the last announced copy ended",
    (LeaseState.RELEASING, LeaseState.QUARANTINED): "the connection of the last copier ended",
    (LeaseState.ORPHANED, LeaseState.ENDED): "released by another process of the engine, no copy announced",
    (LeaseState.ORPHANED, LeaseState.RELEASING): "released by another process of the engine, a copy announced",
    (
        LeaseState.ORPHANED,
        LeaseState.QUARANTINED,
    ): "the engine's last connection ended, or released within the quarantine",
    (LeaseState.QUARANTINED, LeaseState.ENDED): "the quarantine is over",
}


def assert_listed(old: State, new: State) -> None:
    """Asserts that the tables list the transition."""
    assert (old, new) in TRANSITIONS, f"{type(old).__name__}: no transition from {old.value} to {new.value}"


def transition_tables() -> str:
    """The tables as Markdown: for each machine its states, then its transitions."""
    return transitions.transition_tables(
        (("Slab", SlabState), ("Chunk", ChunkState), ("Lease", LeaseState)), MEANINGS, TRANSITIONS
    )
