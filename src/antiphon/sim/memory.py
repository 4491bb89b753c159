"""Bytes: the arena of one life of a server, a process's mapping of it, a rank's KV blocks, and the copies between them.

A copy takes virtual time and happens in pieces, so that what is written or given away meanwhile tears it. Some copies
are DMA: they go on while their process is stopped, and a store also for less than the quarantine after its death, when
what it writes is noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.engine.simulated.kv import BLOCK_BYTES, SimulatedKv
from antiphon.sim.network import Process
from antiphon.sim.timeline import Action
from antiphon.sim.values import BLOCK_SIZE_TOKENS

QUARANTINE_S = 0.4
"""Of the simulated cache: shorter than the real one, so that the copies that outlast it are not rare."""
DMA_AFTER_DEATH_S = 0.95 * QUARANTINE_S
"""The DMA of a dead process ends within this time."""
NUM_WRITES_AFTER_DEATH = 8

PIECES_MAX = 4
PIECE_TIMES_S = ((0.45, 0.001), (0.77, 0.015), (0.95, 0.120), (1.00, 0.700))
"""Mean time of a piece, with the running share of the copies that have it: most copies are fast, a few span a fault,
and what comes of it."""
PIECE_S_MAX = 1.5

UNMAPPED = bytes([0xDD]) * BLOCK_BYTES


class Arena:
    """The memory of one life of a server; it lives as long as somebody maps it."""

    def __init__(self, incarnation: str, size_bytes: int) -> None:
        self.incarnation = incarnation
        self.data = bytearray(size_bytes)


class Mapping:
    """One process's mapping of an arena. After ``close`` its addresses hold something else."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.is_open = True

    def read(self, offset_bytes: int) -> bytes:
        """One block at ``offset_bytes``."""
        return bytes(self._arena.data[offset_bytes : offset_bytes + BLOCK_BYTES]) if self.is_open else UNMAPPED

    def write(self, offset_bytes: int, content: bytes) -> None:
        """Writes one block."""
        assert len(content) == BLOCK_BYTES, len(content)
        if self.is_open:
            self._arena.data[offset_bytes : offset_bytes + BLOCK_BYTES] = content

    def close(self) -> None:
        """Unmaps."""
        self.is_open = False


class RankMemory:
    """The KV blocks of one rank: those of its slabs."""

    def __init__(self, num_blocks: int, slabs: Sequence[int]) -> None:
        self.slabs = {slab: SimulatedKv(num_blocks, BLOCK_SIZE_TOKENS) for slab in slabs}


Unit = tuple[int, int, int]
"""A block to copy: offset in the arena, slab, block."""


class Copy:
    """One copy between the arena and a rank's blocks. Runs from its creation on.

    Args:
        process: the process that copies.
        mapping: its mapping.
        memory: its blocks.
        units: what to copy, in order.
        on_end: done in the process when all is copied.
    """

    dma_share: float
    """Share of these copies that are DMA."""

    def __init__(
        self, process: Process, mapping: Mapping, memory: RankMemory, units: Sequence[Unit], on_end: Action
    ) -> None:
        self._process = process
        self._mapping = mapping
        self._memory = memory
        self._on_end = on_end
        chance = process.timeline.random
        self._is_dma = chance.random() < self.dma_share
        share = 0.0 if process.timeline.is_calm else chance.random()
        self._piece_s = next(time_s for upto, time_s in PIECE_TIMES_S if share <= upto)
        size = -(-len(units) // chance.randint(1, PIECES_MAX))
        process.on_death.append(self._process_died)
        self._pieces = [units[start : start + size] for start in range(0, len(units), size)]
        self._go_on()

    def _go_on(self) -> None:
        """Waits for the next piece, or ends."""
        process = self._process
        if not self._pieces:
            process.on_death.remove(self._process_died)
            process.run(self._on_end)
            return
        delay_s = min(PIECE_S_MAX, process.timeline.random.expovariate(1 / self._piece_s))
        if self._is_dma:
            process.timeline.after(delay_s, self._copy_piece)
        else:
            process.after(delay_s, self._copy_piece)

    def _copy_piece(self) -> None:
        if not self._process.is_alive:
            return
        for offset_bytes, slab, block in self._pieces.pop(0):
            self._copy_block(offset_bytes, self._memory.slabs[slab], block)
        self._go_on()

    def _copy_block(self, offset_bytes: int, kv: SimulatedKv, block: int) -> None:
        raise NotImplementedError

    def _process_died(self) -> None:
        """A load that dies changes nothing that anybody can see."""


class Load(Copy):
    """From the arena into blocks."""

    dma_share = 0.4

    def _copy_block(self, offset_bytes: int, kv: SimulatedKv, block: int) -> None:
        kv.write(block, self._mapping.read(offset_bytes))


class Store(Copy):
    """From blocks into the arena."""

    dma_share = 0.7

    def _copy_block(self, offset_bytes: int, kv: SimulatedKv, block: int) -> None:
        self._mapping.write(offset_bytes, kv.read((block,))[0])

    def _process_died(self) -> None:
        """What the DMA had before it, it may still write."""
        timeline = self._process.timeline
        left = [unit for piece in self._pieces for unit in piece]
        if self._is_dma and left:
            for _ in range(NUM_WRITES_AFTER_DEATH):
                timeline.after(timeline.random.uniform(0, DMA_AFTER_DEATH_S), lambda: self._write_noise(left))

    def _write_noise(self, units: Sequence[Unit]) -> None:
        timeline = self._process.timeline
        timeline.count("write by a dead process")
        for offset_bytes, _, _ in units:
            self._mapping.write(offset_bytes, timeline.random.randbytes(BLOCK_BYTES))
