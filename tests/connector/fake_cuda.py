"""A GPU on a CPU: streams that run when somebody waits, in an order that chance decides within what events allow.

What is launched on a stream runs after what was launched there before, and after the events that the stream was told to
wait for; nothing else is ordered. So a copy that lacks an event reads or overwrites the wrong bytes, sooner or later.
``FakePinDriver`` is the driver's list of registered memory, with its refusals.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable

import torch


class FakeEvent:
    """A place in a stream."""

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.is_passed = False

    def query(self) -> bool:
        self._device.run_some()
        return self.is_passed

    def synchronize(self) -> None:
        self._device.run_until(lambda: self.is_passed)


class FakeStream:
    def __init__(self) -> None:
        self.work: deque[Callable[[], bool]] = deque()
        """Each returns False where it has to wait."""


class FakeDevice:
    """See above. Any thread may call it.

    Args:
        chance: of the order.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.compute = FakeStream()
        self.streams = [self.compute]
        self.copied_bytes: list[int] = []
        self.fails_after: int | None = None
        """Launches until one raises."""
        self._lock = threading.RLock()

    # ---- as ``Device`` ---------------------------------------------------------------------------------------------

    def stream(self, *, is_urgent: bool = False) -> FakeStream:
        made = FakeStream()
        self.streams.append(made)
        return made

    def current(self) -> FakeStream:
        return self.compute

    def run(self, stream: FakeStream, work: Callable[[], None]) -> None:
        if self.fails_after is not None:
            if self.fails_after == 0:
                raise RuntimeError("CUDA error: a launch failed")
            self.fails_after -= 1

        def done() -> bool:
            work()
            return True

        with self._lock:
            stream.work.append(done)

    def record(self, stream: FakeStream) -> FakeEvent:
        event = FakeEvent(self)

        def passed() -> bool:
            event.is_passed = True
            return True

        with self._lock:
            stream.work.append(passed)
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        with self._lock:
            stream.work.append(lambda: event.is_passed)

    def staging(self, num_words: int) -> torch.Tensor:
        return torch.full((num_words,), -77, dtype=torch.int64)

    def host(self, address: int, num_bytes: int) -> torch.Tensor:
        self.copied_bytes.append(num_bytes)
        return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)

    def upload(self, stream: FakeStream, rows: list[list[int]]) -> torch.Tensor:
        found = torch.full((len(rows), len(rows[0])), -1, dtype=torch.int32)

        def copy() -> None:
            found.copy_(torch.tensor(rows, dtype=torch.int32))

        self.run(stream, copy)
        return found

    # ---- time ------------------------------------------------------------------------------------------------------

    def run_some(self) -> bool:
        """One stream goes one step on. Returns False where none can."""
        with self._lock:
            for stream in self.chance.sample(self.streams, len(self.streams)):
                if stream.work and stream.work[0]():
                    stream.work.popleft()
                    return True
            return False

    def run_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self.run_some(), "streams wait for each other"

    def run_all(self) -> None:
        self.run_until(lambda: not any(stream.work for stream in self.streams))


class FakePinDriver:
    """Registered memory. ``refuses`` says which addresses are refused."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[str, int]] = []
        self.refuses: Callable[[int], bool] = lambda _address: False

    def register(self, address: int, num_bytes: int) -> str | None:
        self.calls.append(("register", address))
        if self.refuses(address):
            return "CUDA error 2"
        for at, size in self.registered.items():
            assert not (at < address + num_bytes and address < at + size), "registered twice"
        self.registered[address] = num_bytes
        return None

    def unregister(self, address: int) -> str | None:
        self.calls.append(("unregister", address))
        return None if self.registered.pop(address, None) is not None else "CUDA error 62"
