"""Copies between a GPU engine's paged KV and the arena: head-major slabs, staged, beside the engine's compute.

Each direction has two streams and two pieces of staging memory: while one piece crosses the bus, the other is gathered
from, or scattered to, the engine's blocks. Order between streams is kept by events; the host waits for nothing but the
end of a store, on the store thread.

    load:   arena ──copy──▶ staging ──scatter──▶ blocks, after the compute that was launched before
    store:  blocks ──gather──▶ staging ──copy──▶ arena, after the forward that filled them

Always true:

- A piece of staging memory is overwritten only when what read it last has ended.
- The scatters of a load follow all compute that was launched when its step began: a block is written by one at a time,
  also on a producer, whose freed blocks vLLM does not keep from steps in flight.
- After ``hold_compute`` no compute that is launched later overwrites a block before a begun store has read it.
- If beginning fails, what was begun has ended before the error is raised.
- Beginning a copy does not wait for memory to be registered; ``prepare`` does. What is not registered then is copied as
  any memory: the driver keeps the host while it does that.

``Device`` is what of torch it needs: ``cuda_device.TorchDevice``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from antiphon.connector.copier import Copying, Mark, Part
from antiphon.connector.cuda_layout import WORD_BYTES, Span, joined, slab_spans, tensor_blocks
from antiphon.connector.cuda_paged import Mover, PagedKv
from antiphon.connector.cuda_pinning import Pinning
from antiphon.storage.arena import ArenaMapping

STAGING_BYTES = 128 << 20
"""Of each of the two pieces of a direction, or one chunk where that is more."""

BATCHES_IN_STEP = 2
"""Pieces of staging memory that a step fills itself, for all its loads: half a millisecond to two of launches."""


class Event(Protocol):
    """A place in a stream, as ``torch.cuda.Event``."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def synchronize(self) -> None:
        """Waits until it has."""


class Device(Protocol):
    """Streams and memory of one GPU."""

    def stream(self, *, is_urgent: bool = False) -> Any:
        """A new stream; urgent work goes before the engine's."""

    def current(self) -> Any:
        """The stream of the calling thread, the engine's compute in its thread."""

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """``work`` launches on that stream."""

    def record(self, stream: Any) -> Event:
        """The place that the stream has now."""

    def wait(self, stream: Any, event: Event) -> None:
        """What is launched on the stream from here on waits for the event."""

    def staging(self, num_words: int) -> torch.Tensor:
        """Memory of the GPU, int64."""

    def host(self, address: int, num_bytes: int) -> torch.Tensor:
        """Memory of this process, uint8."""

    def upload(self, stream: Any, rows: list[list[int]]) -> torch.Tensor:
        """Numbers on the GPU, int32, there when the stream comes to what is launched next."""


@dataclass(slots=True, eq=False)
class _Piece:
    """Staging memory. ``free``: when what read it last has ended."""

    words: torch.Tensor
    octets: torch.Tensor
    free: Event | None = None


class _Lane:
    """One direction: a stream that crosses the bus, one that moves between staging and blocks, two pieces."""

    def __init__(self, device: Device, num_words: int, *, is_urgent: bool) -> None:
        self.bus = device.stream()
        self.move = device.stream(is_urgent=is_urgent)
        self._pieces = []
        for _ in range(2):
            words = device.staging(num_words)
            self._pieces.append(_Piece(words, words.view(torch.uint8)))

    def take(self) -> _Piece:
        """The piece whose turn it is."""
        self._pieces.reverse()
        return self._pieces[0]


class CudaCopying:
    """Copies that were begun; they end when ``event`` is passed. ``kept`` is in use until then."""

    def __init__(self, event: Event, kept: object) -> None:
        self._event = event
        self._kept = kept

    @property
    def is_done(self) -> bool:
        """Polled, never waited for."""
        return self._event.query()

    def wait(self) -> None:
        """Waits on the host."""
        self._event.synchronize()


class CudaCopier:
    """Copies chunks of one rank.

    Args:
        paged: the engine's blocks.
        blocks_per_chunk: of vLLM's block table.
        mover: of ``paged``.
        device: where they are.
        pinning: of the arenas that this process maps.
    """

    def __init__(self, paged: PagedKv, blocks_per_chunk: int, mover: Mover, device: Device, pinning: Pinning) -> None:
        layout = paged.layout
        self.blocks_per_chunk = blocks_per_chunk
        self._chunk_tokens = blocks_per_chunk * layout.block_size_tokens * layout.blocks_per_table_block
        self._head_bytes = paged.slab_words(self._chunk_tokens) * WORD_BYTES
        self.slab_bytes = layout.num_heads * self._head_bytes
        self.num_chunks_at_once = max(1, STAGING_BYTES // self.slab_bytes)
        self.num_batches_in_step = BATCHES_IN_STEP
        self._paged, self._mover, self._device = paged, mover, device
        self.pinning = pinning
        num_words = self.num_chunks_at_once * self.slab_bytes // WORD_BYTES
        self._loads = _Lane(device, num_words, is_urgent=True)
        self._stores = _Lane(device, num_words, is_urgent=False)
        self._all_read: Event | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the engine."""
        return self._paged.layout.num_blocks // self._paged.layout.blocks_per_table_block

    @property
    def block_bytes(self) -> Sequence[int]:
        """Bytes of a block, by layer."""
        return [self._paged.layout.block_bytes] * self._paged.num_layers

    def can_begin_in_step(self, parts: Sequence[Part]) -> bool:
        """Whether all memory of the arena that these need is registered."""
        return self.pinning.is_ready(self._spans(parts))

    def prepare(self, parts: Sequence[Part]) -> None:
        """Waits until the driver was asked to register the memory of the arena that these need."""
        self.pinning.prepare(self._spans(parts))

    def mark(self) -> Mark:
        """The place that compute has reached."""
        return self._device.record(self._device.current())

    # ---- loads -----------------------------------------------------------------------------------------------------

    def begin_load(self, parts: Iterable[Part], after: Mark | None) -> Copying:
        """As ``Copier.begin_load``. One thread at a time."""
        lane, device = self._loads, self._device
        chunks = list(parts)
        try:
            blocks = self._upload(lane, chunks)
            if after is not None:
                device.wait(lane.move, after)  # type: ignore[arg-type]
            for first in range(0, len(chunks), self.num_chunks_at_once):
                batch, piece = chunks[first : first + self.num_chunks_at_once], lane.take()
                if piece.free is not None:
                    device.wait(lane.bus, piece.free)
                self._cross(lane, batch, piece, is_load=True)
                device.wait(lane.move, device.record(lane.bus))
                dense = self._paged.dense(piece.words, len(batch), self._chunk_tokens)
                rows = blocks[first : first + len(batch)]
                device.run(lane.move, partial(self._mover.scatter, dense, rows))
                piece.free = device.record(lane.move)
        except BaseException:  # supervised: what was begun ends, then it is raised on
            self._settle(lane)
            raise
        return CudaCopying(device.record(lane.move), blocks)

    # ---- stores ----------------------------------------------------------------------------------------------------

    def begin_store(self, parts: Iterable[Part], after: Mark | None) -> Copying:
        """As ``Copier.begin_store``, of at most ``num_chunks_at_once`` chunks. One thread at a time."""
        lane, device = self._stores, self._device
        chunks = list(parts)
        assert len(chunks) <= self.num_chunks_at_once, len(chunks)
        try:
            blocks = self._upload(lane, chunks)
            if after is not None:
                device.wait(lane.move, after)  # type: ignore[arg-type]
            piece = lane.take()
            if piece.free is not None:
                device.wait(lane.move, piece.free)
            dense = self._paged.dense(piece.words, len(chunks), self._chunk_tokens)
            device.run(lane.move, partial(self._mover.gather, dense, blocks))
            self._all_read = device.record(lane.move)
            device.wait(lane.bus, self._all_read)
            self._cross(lane, chunks, piece, is_load=False)
            piece.free = device.record(lane.bus)
        except BaseException:  # supervised: what was begun ends, then it is raised on
            self._settle(lane)
            raise
        return CudaCopying(piece.free, blocks)

    def hold_compute(self) -> None:
        """As ``Copier.hold_compute``, in the thread that launches compute."""
        if self._all_read is not None:
            self._device.wait(self._device.current(), self._all_read)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _upload(self, lane: _Lane, chunks: list[Part]) -> torch.Tensor:
        fold = self._paged.layout.blocks_per_table_block
        rows = []
        for part in chunks:
            assert all(0 <= block < self.num_blocks for block in part.block_ids), part.block_ids
            rows.append(tensor_blocks(part.block_ids, part.skip_blocks, self.blocks_per_chunk, fold))
        return self._device.upload(lane.move, rows)

    def _cross(self, lane: _Lane, chunks: list[Part], piece: _Piece, *, is_load: bool) -> None:
        """The copies of a batch over the bus, few and large: chunks that lie next to each other in one."""
        pairs = []
        for span in self.pinning.cut(joined(self._spans(chunks))):
            near = piece.octets[span.place : span.place + span.num_bytes]
            far = self._device.host(span.address, span.num_bytes)
            pairs.append((near, far) if is_load else (far, near))

        def copy() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        self._device.run(lane.bus, copy)

    def _spans(self, chunks: Sequence[Part]) -> Iterator[Span]:
        for number, part in enumerate(chunks):
            place = number * self.slab_bytes
            if part.slabs is None:
                yield Span(place, part.address, self.slab_bytes)
            else:
                yield from slab_spans(place, part.address, self._head_bytes, part.slabs)

    def _settle(self, lane: _Lane) -> None:
        """Waits for what was launched before something failed."""
        for stream in (lane.bus, lane.move):
            self._device.record(stream).synchronize()

    # ---- the gate, and life ----------------------------------------------------------------------------------------

    def store(self, slab_address: int, block_ids: Sequence[int]) -> None:
        """As ``Copier.store``."""
        parts = [Part(slab_address, tuple(block_ids))]
        self.prepare(parts)
        self.begin_store(parts, self.mark()).wait()

    def load(self, slab_address: int, skip_blocks: int, block_ids: Sequence[int]) -> None:
        """As ``Copier.load``."""
        parts = [Part(slab_address, tuple(block_ids), skip_blocks)]
        self.prepare(parts)
        self.begin_load(parts, self.mark()).wait()

    def read_block(self, block_id: int) -> list[bytes]:
        """As ``Copier.read_block``."""
        return self._paged.read_block(block_id)

    def write_block(self, block_id: int, content: Sequence[bytes]) -> None:
        """As ``Copier.write_block``."""
        self._paged.write_block(block_id, content)

    def expected_slab(self, block_ids: Sequence[int]) -> bytes | None:
        """As ``Copier.expected_slab``."""
        fold = self._paged.layout.blocks_per_table_block
        return self._paged.expected_slab(tensor_blocks(block_ids, 0, self.blocks_per_chunk, fold))

    def arena_mapped(self, arena: ArenaMapping) -> None:
        """Its memory is registered in the background, once the engine has started."""
        self.pinning.add(arena)

    def engine_started(self) -> None:
        """As ``Copier.engine_started``."""
        self.pinning.begin()

    def close(self) -> None:
        """The arenas take their memory back as they are unmapped, also if the engine has not started."""
        self.pinning.begin()
