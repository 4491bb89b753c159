"""What the worker side asks of whatever copies between an engine's KV blocks and the arena.

Two things do: ``copy.BlockCopier`` (whole blocks of a CPU engine, done when the call returns) and
``cuda_copy.CudaCopier`` (head-major slabs of a GPU, begun by the call and done later). Values and protocols only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from antiphon.storage.arena import ArenaMapping


@dataclass(frozen=True, slots=True)
class Part:
    """A chunk, or the blocks of it that one load fills.

    Args:
        address: of this rank's part of the chunk, in the mapped arena.
        block_ids: the engine's blocks, in order.
        skip_blocks: blocks of the chunk before the first of them.
        slabs: for a store, those of this rank's slabs that it may write, counted from its first; None for all.
    """

    address: int
    block_ids: tuple[int, ...]
    skip_blocks: int = 0
    slabs: tuple[int, ...] | None = None


class Mark(Protocol):
    """A place in the engine's compute."""


class Copying(Protocol):
    """Copies that were begun. Until they are done the arena stays mapped, and nothing else uses what they touch."""

    @property
    def is_done(self) -> bool:
        """Whether all have ended. Never waits."""

    def wait(self) -> None:
        """Returns when all have ended."""


class Copier(Protocol):
    """Copies chunks of one rank."""

    blocks_per_chunk: int
    slab_bytes: int
    """Bytes of this rank's part of a chunk: all its slabs, which lie next to each other."""
    num_chunks_at_once: int
    """Chunks that one ``begin_store`` takes at most."""

    num_batches_in_step: int
    """Of ``num_chunks_at_once`` chunks, or the rest of a load: as many at most are begun by a step itself, of all its
    loads, if ``can_begin_in_step``. Handing a short load to another thread would take longer."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine."""

    @property
    def block_bytes(self) -> Sequence[int]:
        """Bytes of a block, by layer."""

    def can_begin_in_step(self, parts: Sequence[Part]) -> bool:
        """Whether ``prepare`` and ``begin_load`` wait for nothing."""

    def prepare(self, parts: Sequence[Part]) -> None:
        """Makes memory of the arena ready for copies that are begun next. May wait for seconds: who calls it holds
        nothing that a step waits for."""

    def mark(self) -> Mark | None:
        """The place that the engine's compute has reached, in the thread that launches it; None where it is done."""

    def begin_load(self, parts: Iterable[Part], after: Mark | None) -> Copying:
        """Begins to fill blocks, once compute has come to ``after``."""

    def begin_store(self, parts: Iterable[Part], after: Mark | None) -> Copying:
        """Begins to copy whole chunks out, once compute has come to ``after``."""

    def hold_compute(self) -> None:
        """Blocks that begun stores read may be overwritten by what is launched from here on: that waits for them."""

    def store(self, slab_address: int, block_ids: Sequence[int]) -> None:
        """One whole chunk, done when it returns."""

    def load(self, slab_address: int, skip_blocks: int, block_ids: Sequence[int]) -> None:
        """Blocks of one chunk from ``skip_blocks`` on, done when it returns."""

    def read_block(self, block_id: int) -> list[bytes]:
        """The bytes of a block, by layer. For the gate."""

    def write_block(self, block_id: int, content: Sequence[bytes]) -> None:
        """Overwrites a block. For the gate."""

    def expected_slab(self, block_ids: Sequence[int]) -> bytes | None:
        """What a store of these blocks must write, told by the engine's own view of them; None for opaque bytes."""

    def arena_mapped(self, arena: ArenaMapping) -> None:
        """This process has mapped an arena. Never waits."""

    def engine_started(self) -> None:
        """The engine has captured its CUDA graphs, so that work in the background may begin. Never waits."""

    def close(self) -> None:
        """Ends what runs in the background. Nothing is copied any more."""


class Done:
    """Copies that have ended."""

    is_done = True

    def wait(self) -> None:
        """Returns at once."""


DONE = Done()
