"""The client of a Mooncake store, in a process of its own: ``python -m antiphon.storage.mooncake_child``.

A call of Mooncake's client may wait half a minute for a master that hangs, and its library ends the process on faults
of its own. So the tier runs it here, and gives it up when it is late. Standard input is a socket on which calls come
and answers go; records lie in slots of a shared memory that both processes map.

Always true: each call gets one answer, in any order; a slot is used only for the call that named it; this process ends
when the tier does. It prints nothing, and knows nothing of what is in a record.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import mmap
import os
import signal
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["ANSWER", "CALL", "MESSAGE_MAX_BYTES", "MooncakeSetup", "Operation"]

CALL: Final = struct.Struct("<QBIQ")
"""Number, operation, slot, bytes; the rest of the message is keys, one a line."""
ANSWER: Final = struct.Struct("<Q")
"""Number of the call; the rest is a code of four bytes for each key."""
MESSAGE_MAX_BYTES: Final = 1 << 17
_PR_SET_PDEATHSIG: Final = 1


class Operation:
    """What a call asks for."""

    PUT = 1
    GET = 2
    EXIST = 3
    REMOVE = 4
    PROBE = 5
    READY = 6
    """Of an answer only, with the result of the set-up."""


@dataclass(frozen=True, slots=True)
class MooncakeSetup:
    """What this process is told at its start: JSON, the first message on its socket, which no other user can read.

    Args:
        parent_pid: ends this process by its end.
        memory_fd: of the shared memory.
        num_slots, slot_bytes: of it.
        local_host: address, with port, under which other nodes reach this one.
        metadata: URL of the metadata server, or ``P2PHANDSHAKE``.
        master: host and port.
        segment_bytes: memory that this process gives to the store.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, separated by commas; empty for TCP.
    """

    parent_pid: int
    memory_fd: int
    num_slots: int
    slot_bytes: int
    local_host: str
    metadata: str
    master: str
    segment_bytes: int
    protocol: str
    devices: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))


_LOCAL_BUFFER_BYTES: Final = 16 << 20
"""Mooncake wants a buffer of its own, though all calls here bring theirs."""


class _Client:
    """Mooncake's client and the slots that it was shown.

    Args:
        setup: of this process.
    """

    def __init__(self, setup: MooncakeSetup) -> None:
        self._setup = setup
        total_bytes = setup.num_slots * setup.slot_bytes
        self._memory = mmap.mmap(setup.memory_fd, total_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._store: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        self.code = int(
            self._store.setup(
                *(setup.local_host, setup.metadata, setup.segment_bytes, _LOCAL_BUFFER_BYTES),
                *(setup.protocol, setup.devices, setup.master),
            )
        )
        if self.code == 0:
            self.code = int(self._store.register_buffer(self._address, total_bytes))

    def run(self, operation: int, slot: int, num_bytes: int, keys: list[str]) -> list[int]:
        """The code of each key."""
        address = self._address + slot * self._setup.slot_bytes
        assert num_bytes <= self._setup.slot_bytes, num_bytes
        if operation == Operation.PUT:
            return [int(self._store.upsert_from(keys[0], address, num_bytes))]
        if operation == Operation.GET:
            return [int(self._store.get_into(keys[0], address, num_bytes))]
        if operation == Operation.EXIST:
            return [int(code) for code in self._store.batch_is_exist(keys)]
        if operation == Operation.REMOVE:
            return [int(code) for code in self._store.batch_remove(keys, True)]
        assert operation == Operation.PROBE, operation
        return [int(self._store.is_exist(keys[0]))]


def _serve(client: _Client, link: socket.socket, num_threads: int) -> None:
    sending = threading.Lock()

    def answer(number: int, codes: list[int]) -> None:
        with sending:
            link.send(ANSWER.pack(number) + struct.pack(f"<{len(codes)}i", *codes))

    def work(number: int, operation: int, slot: int, num_bytes: int, keys: list[str]) -> None:
        try:
            answer(number, client.run(operation, slot, num_bytes, keys))
        except OSError:
            os._exit(1)  # the tier has gone

    answer(0, [client.code])
    with ThreadPoolExecutor(num_threads) as pool:
        while message := link.recv(MESSAGE_MAX_BYTES):
            number, operation, slot, num_bytes = CALL.unpack_from(message)
            pool.submit(work, number, operation, slot, num_bytes, message[CALL.size :].decode().split("\n"))
    os._exit(0)  # threads of Mooncake may hang, and its exit handlers wait for them


def main() -> None:
    """Serves until the socket ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with socket.socket(fileno=os.dup(0)) as link:
        told = link.recv(MESSAGE_MAX_BYTES)
        if not told:
            return
        setup = MooncakeSetup(**json.loads(told))
        if os.getppid() != setup.parent_pid:
            return
        client = _Client(setup)
        _serve(client, link, setup.num_slots)


if __name__ == "__main__":
    main()
