"""The tier in a Mooncake store: memory of many machines under one master.

Mooncake's client runs in a child process (``mooncake_child``), which is started in the background and started again
when it died, was late for ``LATE_MAX_S`` or could not be started. A call copies a record into a slot of memory that
both share, or out of it.

Always true:

- A slot belongs to one call until the child answered it or was killed, also when the caller left earlier.
- A call waits at most ``timeout_s``, also while the child starts or the master hangs.
- Until the tier is closed, there is a child or one is tried to be started; where the last try failed, calls say why.

What is in the store is the master's matter: it evicts by its own rules, forgets everything when it starts again, and
cannot list keys. Access to it is not authenticated.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import mmap
import os
import queue
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

from antiphon.core.errors import AntiphonError, ConfigError, TierCorrupt, TierError, TierFull, TierUnavailable
from antiphon.core.extras import install_remedy
from antiphon.core.units import MIB, align_up
from antiphon.storage.calls import Deadline
from antiphon.storage.etcd_metadata import EtcdAccess, EtcdMetadata
from antiphon.storage.known_keys import KnownKeys
from antiphon.storage.mooncake_child import ANSWER, CALL, MESSAGE_MAX_BYTES, MooncakeSetup, Operation
from antiphon.storage.mooncake_loader import free_port, loader_environment
from antiphon.storage.record import HEAD_BYTES, RecordReader, RecordWriter, record_bytes
from antiphon.storage.tier import ChunkMeta, TierUsage, removed_if_corrupt

__all__ = ["MooncakeTier", "MooncakeTierOptions", "require_mooncake", "start_pause_s"]

LATE_MAX_S: Final = 10.0
"""A child that owes an answer for longer is given up: Mooncake's own limit for a call, with some slack."""
RESTART_PAUSE_S: Final = 1.0
"""Between two starts of the child, so that one that cannot work does not take a processor."""
START_PAUSE_MAX_S: Final = 10.0
"""Between two starts that fail: the pause doubles from ``RESTART_PAUSE_S`` to this."""
KEYS_PER_CALL: Final = 500
_RPC_TIMEOUT_MS: Final = 5000
_NOT_FOUND: Final = -704
_MISSES: Final = frozenset({-703, _NOT_FOUND, -707})
"""Not whole yet, not there, or evicted while it was read."""
_BUSY: Final = frozenset({-703, _NOT_FOUND, -705, -706})
"""Somebody else writes, reads or removes the object at the moment."""
BUSY_PAUSE_S: Final = 0.02
_FULL: Final = frozenset({-200, -201})
_WRONG_SIZE: Final = frozenset({-600})
"""The object is larger than the buffer that it is to be read into."""


def require_mooncake() -> None:
    """Raises ConfigError where Mooncake is not installed."""
    if importlib.util.find_spec("mooncake") is None:
        raise ConfigError(
            "the package for Mooncake is not installed",
            remedy=f"{install_remedy('mooncake')}, or mooncake-transfer-engine on a machine with CUDA",
        )


def start_pause_s(num_failed: int) -> float:
    """Before the next start of a child, when the last ``num_failed`` have failed."""
    return float(min(START_PAUSE_MAX_S, RESTART_PAUSE_S * 2 ** min(max(num_failed - 1, 0), 16)))


@dataclass(frozen=True, slots=True)
class MooncakeTierOptions:
    """How the tier reaches its store.

    Args:
        master: host and port.
        metadata: URL of an HTTP or etcd metadata server, ``P2PHANDSHAKE``, or an etcd with users or TLS.
        local_host: address of this machine that other nodes of the store reach.
        segment_bytes: memory of this process's child that it gives to the store; 0: others give it.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, separated by commas.
        prefix: of every key.
        timeout_s: of each call.
        num_threads: calls at once, each with a slot.
        chunk_bytes_max: of a chunk; memory is taken only as it is used.
    """

    master: str
    metadata: str | EtcdAccess = "P2PHANDSHAKE"
    local_host: str = "127.0.0.1"
    segment_bytes: int = 0
    protocol: str = "tcp"
    devices: str = ""
    prefix: str = "antiphon"
    timeout_s: float = 5.0
    num_threads: int = 4
    chunk_bytes_max: int = 256 * MIB


class _Child:
    """One life of the child.

    Args:
        options: of the tier.
        metadata: for its setup.
        memory_fd: of the slots.
        slot_bytes: of each.

    Raises:
        ConfigError, TierUnavailable, OSError, RuntimeError: it cannot be started; nothing is left behind.
    """

    def __init__(self, options: MooncakeTierOptions, metadata: str, memory_fd: int, slot_bytes: int) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[Future[list[int]], float]] = {}
        self.ready: Future[list[int]] = Future()
        self._waiting[0] = (self.ready, time.monotonic())
        self.is_dead = False
        setup = MooncakeSetup(
            parent_pid=os.getpid(),
            memory_fd=memory_fd,
            num_slots=options.num_threads,
            slot_bytes=slot_bytes,
            local_host=f"{options.local_host}:{free_port(options.local_host)}",
            metadata=metadata,
            master=options.master,
            segment_bytes=options.segment_bytes,
            protocol=options.protocol,
            devices=options.devices,
        )
        environment = _environment(options)
        with contextlib.ExitStack() as undo:
            self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._link.close)
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "antiphon.storage.mooncake_child"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    pass_fds=[memory_fd],
                    env=environment,
                    start_new_session=True,
                )
            undo.callback(self._kill)
            with contextlib.suppress(OSError):  # it has ended, which the reader notices
                self._link.send(setup.to_json().encode())
            self._reader = threading.Thread(target=self._read, name="antiphon-tier-mooncake-answers", daemon=True)
            self._reader.start()
            undo.pop_all()

    def send(self, operation: int, keys: Sequence[str], slot: int = 0, num_bytes: int = 0) -> Future[list[int]]:
        """Sends a call; the future has the codes, or ``TierUnavailable`` when the child ends first."""
        future: Future[list[int]] = Future()
        with self._lock:
            if self.is_dead:
                raise TierUnavailable("the client of Mooncake has ended; it is started again")
            number = next(self._numbers)
            self._waiting[number] = (future, time.monotonic())
            try:
                self._link.send(CALL.pack(number, operation, slot, num_bytes) + "\n".join(keys).encode())
            except OSError as error:
                del self._waiting[number]
                raise TierUnavailable(f"the client of Mooncake does not take calls: {error.strerror}") from error
        return future

    def late_s(self) -> float:
        """For how long the oldest call has waited; 0 without one."""
        with self._lock:
            oldest_s = min((since_s for _, since_s in self._waiting.values()), default=None)
        return 0.0 if oldest_s is None else time.monotonic() - oldest_s

    def end(self) -> None:
        """Kills it. Every call that waits gets an error."""
        self._kill()
        self._reader.join()

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _read(self) -> None:
        while True:
            try:
                message = self._link.recv(MESSAGE_MAX_BYTES)
            except OSError:
                message = b""
            if not message:
                break
            (number,) = ANSWER.unpack_from(message)
            codes = list(struct.unpack(f"<{(len(message) - ANSWER.size) // 4}i", message[ANSWER.size :]))
            with self._lock:
                future, _ = self._waiting.pop(number)
            future.set_result(codes)
        with self._lock:
            self.is_dead = True
            left = list(self._waiting.values())
            self._waiting.clear()
            self._link.close()
        for future, _ in left:
            future.set_exception(TierUnavailable("the client of Mooncake has ended; it is started again"))


class MooncakeTier:
    """See the module. It starts its child at once, and does not wait for it.

    Args:
        name: of the tier.
        options: where the store is.

    Raises:
        ConfigError: Mooncake is not installed, ``local_host`` is no address of this machine, or a certificate or key of
            etcd cannot be used.
    """

    def __init__(self, name: str, options: MooncakeTierOptions) -> None:
        require_mooncake()
        with contextlib.suppress(TierUnavailable):  # a name that cannot be looked up yet: calls say so
            free_port(options.local_host)
        self.name = name
        self._options = options
        given = options.metadata
        self._etcd = EtcdMetadata(given) if isinstance(given, EtcdAccess) else None
        self._metadata = given if isinstance(given, str) else self._etcd.url if self._etcd else ""
        self._slot_bytes = align_up(HEAD_BYTES + options.chunk_bytes_max, mmap.PAGESIZE)
        self._memory_fd = os.memfd_create("antiphon-mooncake", os.MFD_CLOEXEC)
        total_bytes = options.num_threads * self._slot_bytes
        os.ftruncate(self._memory_fd, total_bytes)
        self._memory = memoryview(mmap.mmap(self._memory_fd, total_bytes))
        self._free: queue.LifoQueue[int] = queue.LifoQueue()
        for slot in range(options.num_threads):
            self._free.put(slot)
        self._known = KnownKeys()
        self._changed = threading.Condition()
        self._child: _Child | None = None
        self._start_fault = ""
        self._is_closed = False
        self._keeper = threading.Thread(target=self._keep, name="antiphon-tier-mooncake", daemon=True)
        self._keeper.start()

    # ---- the calls ---------------------------------------------------------------------------------------------------

    def put(self, key: bytes, payload: memoryview, meta: ChunkMeta) -> None:
        """See ``TierStore.put``. ``TierFull``: the store has no room, or a chunk is larger than a slot."""
        deadline = self._deadline()
        num_bytes = record_bytes(meta)
        if num_bytes > self._slot_bytes:
            raise TierFull(
                f"a chunk of {meta.num_bytes} bytes does not fit into a slot of {self._options.chunk_bytes_max}",
                remedy="raise chunk_bytes_max of the tier",
            )
        writer = RecordWriter(key, payload, meta)
        slot, child = self._begin(deadline)
        with contextlib.ExitStack() as undo:
            undo.callback(self._free.put, slot)
            writer.fill(self._slot(slot))
            writer.check()
            future = child.send(Operation.PUT, [self._name_of(key)], slot, num_bytes)
            undo.pop_all()
        (code,) = self._answer(future, deadline, slot)
        try:
            while code in _BUSY:
                time.sleep(min(BUSY_PAUSE_S, deadline.left_s()))
                future = child.send(Operation.PUT, [self._name_of(key)], slot, num_bytes)
                (code,) = self._answer(future, deadline, None)
        finally:
            self._free_when_done(future, slot)
        if code in _FULL:
            raise TierFull(f"the Mooncake store has no room for {num_bytes} bytes (code {code})")
        self._check(code)
        self._known.add(key, num_bytes)

    def get_into(self, key: bytes, meta: ChunkMeta, into: memoryview) -> bool:
        """See ``TierStore.get_into``."""
        deadline = self._deadline()
        num_bytes = record_bytes(meta)
        if num_bytes > self._slot_bytes:
            return False  # never put
        with contextlib.suppress(TierCorrupt):
            return self._read(key, RecordReader(key, meta, into), num_bytes, deadline)
        # The store frees what is removed while it is read: a second look tells that from a damaged record.
        with removed_if_corrupt(self, key):
            return self._read(key, RecordReader(key, meta, into), num_bytes, deadline)

    def _read(self, key: bytes, reader: RecordReader, num_bytes: int, deadline: Deadline) -> bool:
        """One look at the record. Raises TierCorrupt where it is not what it should be."""
        slot, child = self._begin(deadline)
        with contextlib.ExitStack() as undo:
            undo.callback(self._free.put, slot)
            future = child.send(Operation.GET, [self._name_of(key)], slot, num_bytes)
            undo.pop_all()
        (code,) = self._answer(future, deadline, slot)
        try:
            if code in _MISSES:
                self._known.discard(key)
                return False
            if code in _WRONG_SIZE:
                raise TierCorrupt(f"the record of chunk {key.hex()[:16]} is larger than {num_bytes} bytes")
            self._check(min(code, 0))
            reader.feed(self._slot(slot)[: min(code, num_bytes)])
            reader.finish()
        finally:
            self._free.put(slot)
        return True

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """See ``TierStore.contains``."""
        codes = self._each(Operation.EXIST, keys)
        for code in codes:
            self._check(min(code, 0))
        return [code == 1 for code in codes]

    def remove(self, keys: Sequence[bytes]) -> None:
        """See ``TierStore.remove``. What somebody reads at the moment goes too."""
        for key in keys:
            self._known.discard(key)
        for code in self._each(Operation.REMOVE, keys):
            self._check(0 if code in _MISSES else min(code, 0))

    def keys(self) -> None:
        """See ``TierStore.keys``: the store cannot list."""

    def usage(self) -> TierUsage:
        """See ``TierStore.usage``: what this process has put."""
        return self._known.usage(None)

    def probe(self) -> None:
        """See ``TierStore.probe``."""
        deadline = self._deadline()
        (code,) = self._answer(self._ready(deadline).send(Operation.PROBE, ["antiphon-probe"]), deadline, None)
        self._check(min(code, 0))

    def close(self) -> None:
        """See ``TierStore.close``. What the child gave to the store is lost."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._keeper.join()
        if self._etcd is not None:
            self._etcd.close()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1

    # ---- one call ----------------------------------------------------------------------------------------------------

    def _deadline(self) -> Deadline:
        return Deadline(self._options.timeout_s, f"the Mooncake store of tier {self.name}")

    def _name_of(self, key: bytes) -> str:
        return f"{self._options.prefix}-{key.hex()}"

    def _slot(self, slot: int) -> memoryview:
        return self._memory[slot * self._slot_bytes : (slot + 1) * self._slot_bytes]

    def _begin(self, deadline: Deadline) -> tuple[int, _Child]:
        child = self._ready(deadline)
        try:
            return self._free.get(timeout=deadline.left_s()), child
        except queue.Empty:
            raise deadline.passed() from None

    def _ready(self, deadline: Deadline) -> _Child:
        """The child, when it is set up."""
        with self._changed:
            while not self._is_closed and (self._child is None or self._child.is_dead):
                if self._start_fault:
                    raise TierUnavailable(f"Mooncake's client cannot be started: {self._start_fault}")
                self._changed.wait(deadline.left_s())
            if self._is_closed:
                raise TierUnavailable(f"the tier {self.name} is closed")
            child = self._child
        assert child is not None
        (code,) = self._answer(child.ready, deadline, None)
        if code != 0:
            raise TierUnavailable(
                f"Mooncake's client cannot be set up (code {code})",
                remedy=f"check that the master {self._options.master} and the metadata server run",
            )
        return child

    def _answer(self, future: Future[list[int]], deadline: Deadline, slot: int | None) -> list[int]:
        """The codes of a call; its slot is the caller's again. After an error it is free when the child is done."""
        try:
            return future.result(deadline.left_s())
        except (TimeoutError, TierError) as error:
            if slot is not None:
                self._free_when_done(future, slot)
            if isinstance(error, TierError):
                raise
            raise deadline.passed() from None

    def _free_when_done(self, future: Future[list[int]], slot: int) -> None:
        """At once, where the child is done with it."""
        future.add_done_callback(lambda _: self._free.put(slot))

    def _each(self, operation: int, keys: Sequence[bytes]) -> list[int]:
        deadline = self._deadline()
        codes: list[int] = []
        for start in range(0, len(keys), KEYS_PER_CALL):
            names = [self._name_of(key) for key in keys[start : start + KEYS_PER_CALL]]
            codes += self._answer(self._ready(deadline).send(operation, names), deadline, None)
        return codes

    def _check(self, code: int) -> None:
        if code != 0:
            raise TierUnavailable(f"the Mooncake store answered with code {code}")

    # ---- the child ---------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Has a child that works, until the tier is closed."""
        num_failed = 0
        while True:
            child = self._started()
            num_failed = 0 if child is not None else num_failed + 1
            if child is not None:
                self._watch(child)
                child.end()
            with self._changed:
                if self._changed.wait_for(lambda: self._is_closed, start_pause_s(num_failed)):
                    return

    def _started(self) -> _Child | None:
        """A new child; None where it cannot be started, which calls are told."""
        try:
            child = _Child(self._options, self._metadata, self._memory_fd, self._slot_bytes)
        except Exception as error:  # supervised: the next try comes, and meanwhile every call has the reason
            said = error.message if isinstance(error, AntiphonError) else getattr(error, "strerror", None)
            with self._changed:
                self._start_fault = said or str(error) or repr(error)
                self._changed.notify_all()
            return None
        with self._changed:
            self._child, self._start_fault = child, ""
            self._changed.notify_all()
        return child

    def _watch(self, child: _Child) -> None:
        """Until the child is dead, late or of no use, or the tier is closed."""
        while True:
            with self._changed:
                if self._is_closed or child.is_dead or child.late_s() > LATE_MAX_S:
                    return
                if child.ready.done() and child.ready.exception() is None and child.ready.result() != [0]:
                    return
                self._changed.wait(0.2)


def _environment(options: MooncakeTierOptions) -> dict[str, str]:
    environment = {
        "MC_RPC_TIMEOUT_MS": str(_RPC_TIMEOUT_MS),
        "MC_RPC_CONNECT_TIMEOUT_MS": str(_RPC_TIMEOUT_MS),
        "MC_TCP_BIND_ADDRESS": options.local_host,
        **os.environ,
    }
    return loader_environment(environment)
