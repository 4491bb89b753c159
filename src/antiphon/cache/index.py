"""The chunks that the cache knows, by key, and the order of a prefix among them.

A key commits to its namespace (``core.chunks``), so that the key alone finds a chunk; the namespace is checked
besides, and a key that comes under another namespace is refused. A namespace is bound to a tenant, a model and a
layout for as long as it has chunks.

Always true:

- A chunk is in the index exactly while it is INCOMPLETE or READABLE.
- ``num_children`` counts, for each key, the chunks in the index that name it as their parent, also while the parent
  itself is absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from antiphon.cache.arena import RegionHandle
from antiphon.cache.events import ConnectionId
from antiphon.cache.states import ChunkState, SlabState, assert_listed
from antiphon.cache.tenants import Account
from antiphon.core.chunks import ChunkKey
from antiphon.core.chunks_layout import ChunkLayout
from antiphon.core.namespace import NamespaceDigest


@dataclass(slots=True, eq=False)
class Binding:
    """What a namespace is bound to, and how many chunks hold it there (retired ones too).

    Args:
        tenant: whose it is.
        account: what its bytes count against: the tenant's own, or the one that tenants past the bound share.
        used_bytes: bytes of all of them.
        num_readable, readable_bytes: those that lookups can report.
        num_leased: those that a lease protects.
        num_pinned: those that are pinned.
    """

    namespace: NamespaceDigest
    tenant: str
    account: Account
    model: str
    layout: ChunkLayout
    num_chunks: int = 0
    used_bytes: int = 0
    num_readable: int = 0
    readable_bytes: int = 0
    num_leased: int = 0
    num_pinned: int = 0


@dataclass(slots=True, eq=False)
class Chunk:
    """One chunk and its region.

    Args:
        last_used: number of the step that last used it.
        position: its place in its prefix, from 0; None where the chunk before it was not there when it was added.
        stored_s: when it became readable.
        used_s: when it was last stored, in part too, asked for or reported.
        writers: slabs that each writing connection has reserved.
        num_leases: leases that protect it.
        num_step_holds: holds of the step that is running; zero between steps.
        num_holds: jobs of tiers that read it, and lookups that wait for what follows it.
        num_pins: pins that keep it.
        is_counted_idle: whether ``Books.idle_bytes`` counts it.
        quiet_at_s: until then a dead writer may be writing; 0 where none died.
    """

    key: ChunkKey
    parent: ChunkKey | None
    binding: Binding
    region: RegionHandle
    slabs: list[SlabState]
    last_used: int
    position: int | None = None
    stored_s: float = 0.0
    used_s: float = 0.0
    state: ChunkState = ChunkState.INCOMPLETE
    writers: dict[ConnectionId, tuple[int, ...]] = field(default_factory=dict)
    num_leases: int = 0
    num_step_holds: int = 0
    num_holds: int = 0
    num_pins: int = 0
    is_counted_idle: bool = False
    quiet_at_s: float = 0.0

    def enter(self, state: ChunkState) -> None:
        """Go on to ``state``."""
        assert_listed(self.state, state)
        self.state = state

    def set_slabs(self, slabs: tuple[int, ...], state: SlabState) -> None:
        """Moves ``slabs`` to ``state``."""
        for slab in slabs:
            assert_listed(self.slabs[slab], state)
            self.slabs[slab] = state

    @property
    def num_bytes(self) -> int:
        """Bytes of its region."""
        return self.region.size_bytes

    @property
    def is_indexed(self) -> bool:
        """Whether the index holds it."""
        state = self.state
        return state is ChunkState.READABLE or state is ChunkState.INCOMPLETE

    @property
    def is_idle(self) -> bool:
        """Whether it is in the index and nothing protects it."""
        return self.is_indexed and not (
            self.num_leases or self.num_step_holds or self.num_holds or self.num_pins or self.writers
        )

    @property
    def is_complete(self) -> bool:
        """Whether all slabs are committed."""
        return all(state is SlabState.COMMITTED for state in self.slabs)

    @property
    def has_commits(self) -> bool:
        """Whether any slab is committed."""
        return SlabState.COMMITTED in self.slabs


class Index:
    """Finds chunks and bindings."""

    __slots__ = ("bindings", "chunks", "num_children")

    def __init__(self) -> None:
        self.chunks: dict[ChunkKey, Chunk] = {}
        self.bindings: dict[NamespaceDigest, Binding] = {}
        self.num_children: dict[ChunkKey, int] = {}

    def is_evictable(self, chunk: Chunk) -> bool:
        """Whether nothing protects the chunk and no later chunk of its prefix is in the index."""
        return chunk.is_idle and chunk.key not in self.num_children

    def add(self, chunk: Chunk) -> None:
        """Adds a new chunk."""
        assert chunk.key not in self.chunks, "two chunks of one key"
        assert chunk.is_indexed, chunk.state
        self.chunks[chunk.key] = chunk
        if chunk.parent is not None:
            self.num_children[chunk.parent] = self.num_children.get(chunk.parent, 0) + 1

    def remove(self, chunk: Chunk) -> Chunk | None:
        """Removes a chunk. Returns its parent if that is in the index and has no child left."""
        assert self.chunks.get(chunk.key) is chunk, "not in the index"
        del self.chunks[chunk.key]
        if chunk.parent is None:
            return None
        left = self.num_children[chunk.parent] - 1
        if left:
            self.num_children[chunk.parent] = left
            return None
        del self.num_children[chunk.parent]
        return self.chunks.get(chunk.parent)

    def selected(self, tenant: str | None, model: str | None) -> Iterator[Chunk]:
        """The chunks of a tenant, a model, both, or, with neither, all."""
        for chunk in list(self.chunks.values()):
            binding = chunk.binding
            if tenant in (None, binding.tenant) and model in (None, binding.model):
                yield chunk
