"""Streams, events, memory and the driver of one NVIDIA GPU, through ``torch.cuda``. The only file that imports it.

It decides nothing; ``cuda_copy`` says what is done on which stream. Each call sets nothing that lasts: the device and
the stream of the calling thread are as before.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import torch

from antiphon.connector.cuda_copy import CudaCopier, Event
from antiphon.connector.cuda_paged import Mover, PagedKv, PlainMover
from antiphon.connector.cuda_pinning import Pinning

log = logging.getLogger("antiphon.connector")

URGENT = -1
REGISTER_PORTABLE = 1
"""``cudaHostRegisterPortable``: for every context of the process."""


class TorchDevice:
    """One GPU.

    Args:
        device: of the engine's tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stream(self, *, is_urgent: bool = False) -> Any:
        """A new stream."""
        return torch.cuda.Stream(self._device, priority=URGENT if is_urgent else 0)  # type: ignore[no-untyped-call]

    def current(self) -> Any:
        """The calling thread's."""
        return torch.cuda.current_stream(self._device)

    def run(self, stream: Any, work: Callable[[], None]) -> None:
        """With ``stream`` as the current one."""
        with torch.cuda.stream(stream):
            work()

    def record(self, stream: Any) -> Event:
        """An event for which a host thread waits asleep."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Event) -> None:
        """On the GPU."""
        stream.wait_event(event)

    def staging(self, num_words: int) -> torch.Tensor:
        """Not initialised."""
        return torch.empty(num_words, dtype=torch.int64, device=self._device)

    def host(self, address: int, num_bytes: int) -> torch.Tensor:
        """Over the memory itself, which must stay mapped."""
        return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)

    def upload(self, stream: Any, rows: list[list[int]]) -> torch.Tensor:
        """By way of pinned memory, so that nothing waits."""
        with torch.cuda.stream(stream):
            return torch.tensor(rows, dtype=torch.int32, pin_memory=True).to(self._device, non_blocking=True)


class CudaPinDriver:
    """``cudaHostRegister``, of the device's context."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> str | None:
        """As ``PinDriver.register``."""
        with torch.cuda.device(self._device):
            return self._error(_cudart().cudaHostRegister(address, num_bytes, REGISTER_PORTABLE))

    def unregister(self, address: int) -> str | None:
        """As ``PinDriver.unregister``."""
        with torch.cuda.device(self._device):
            return self._error(_cudart().cudaHostUnregister(address))

    @staticmethod
    def _error(result: Any) -> str | None:
        code = int(result)
        return None if code == 0 else f"CUDA error {code}"


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def new_mover(paged: PagedKv) -> Mover:
    """The kernel where Triton works, plain PyTorch otherwise."""
    try:
        from antiphon.connector.cuda_kernels import TritonMover

        return TritonMover(paged)
    except ImportError as error:
        log.warning("KV is gathered by PyTorch, layer by layer, which is slower than one kernel: %s", error)
        return PlainMover(paged)


def cuda_copier(tensors: list[torch.Tensor], num_blocks: int, blocks_per_chunk: int) -> CudaCopier:
    """The copier of a GPU engine.

    Args:
        tensors: of the layers, in order.
        num_blocks: of vLLM's block table.
        blocks_per_chunk: of vLLM's block table.

    Raises:
        LayoutMismatch: the tensors are not understood.
    """
    paged = PagedKv(tensors, num_blocks)
    log.info("KV layout: %s", paged.layout.fingerprint(paged.dtype, paged.num_layers))
    return CudaCopier(
        paged, blocks_per_chunk, new_mover(paged), TorchDevice(paged.device), Pinning(CudaPinDriver(paged.device))
    )
