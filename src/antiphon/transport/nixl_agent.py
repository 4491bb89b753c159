"""Reads from the memory of other processes over NIXL: one thread owns the agent, callers wait with own deadlines.

Owns the NIXL agent and the thread. The agent has no progress thread, so that an idle process costs nothing; it moves
when it is polled: without a pause while a read of its own is under way, every 0.2 ms while a peer reads here that needs
it (``needs_polls``), and slower and slower when nothing happens. Its name is new at each start, since NIXL mixes up
lives of one name.

On one host a transfer keeps its thread until the bytes are there. Between two of them the thread has to get the
interpreter back from others whenever NIXL has let go of it. So reads that wait go in one transfer, up to
``MERGED_BYTES``, and what is to be tidied up after a transfer is left until none waits.

Always true:

- The agent is touched by its own thread alone, with strict locking besides.
- A wait for a read ends by its deadline; NIXL itself never reports a peer that hangs. The target of a read that was not
  over by then may still be written to: it is the caller's again only after ``Reading.settle``, that is when the
  transfer has ended after all, or when the connection is torn down and ``QUARANTINE_S`` has passed.
- A transfer that failed is released before its targets are given back. NIXL reports the first of its reads that failed,
  while others may still be under way: where it has several, the connection is torn down, with the same quarantine.
- A peer is removed from the agent before it is added again.
- No more than ``READS_MAX`` reads are not over, and each of them can be given up, whatever else waits.

It does not know what is read. Whoever has an agent's metadata can write to all memory that it has registered: who gets
it is the caller's matter.
"""

from __future__ import annotations

import importlib
import logging
import queue
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from antiphon.core.errors import PeerTimeout, PeerUnavailable

__all__ = ["NixlAgent", "Reading", "RemoteMemory"]

log = logging.getLogger("antiphon.nixl")

QUARANTINE_S: Final = 1.0
"""After a torn-down connection: what was on its way arrives well within a second."""
GRACE_S: Final = 1.0
"""A read that missed its deadline may still end within this time, before its connection is torn down."""
HOT_S: Final = 0.000_3
"""Polls follow each other without a pause for so long, then with one of ``WARM_S``."""
WARM_S: Final = 0.000_05
SERVING_S: Final = 0.000_2
IDLE_S: Final = 0.001
COLD_AFTER_S: Final = 0.05
COLD_S: Final = 0.02
START_TIMEOUT_S: Final = 120.0
CLOSE_TIMEOUT_S: Final = 1.0
READS_MAX: Final = 1_024
"""Reads that are not over: far more than callers there are."""
ORDERS_MAX: Final = 4 * READS_MAX
"""Orders that wait for the thread: a read is ordered once and given up once."""
MERGED_BYTES: Final = 24 << 20
"""Reads are merged up to so many bytes: it takes some milliseconds, after which the first of them can be checked."""
ALONE_MIN: Final = 4
"""After so many transfers in a row that were over when the call returned, a peer need not be polled for them."""
SPENT_MAX: Final = 32
"""Transfers that are over and not tidied up."""


@dataclass(frozen=True, slots=True)
class RemoteMemory:
    """Registered memory of another process.

    Args:
        name: of the peer and its life: the same for the same metadata.
        metadata: of its agent.
        address: of the first byte, in its memory.
    """

    name: str
    metadata: bytes
    address: int


@dataclass(eq=False)
class Reading:
    """One read, from its order to its end.

    Args:
        remote: where from.
        remote_address: of the first byte, there.
        local_address: of the first byte, here, in the registered memory.
        num_bytes: at least 1.
    """

    remote: RemoteMemory
    remote_address: int
    local_address: int
    num_bytes: int
    _over: threading.Event = field(default_factory=threading.Event)
    _settled: threading.Event = field(default_factory=threading.Event)
    _error: PeerUnavailable | PeerTimeout | None = None
    _is_expired: bool = False
    """It has been ordered to be given up; under the agent's lock."""

    def wait(self, deadline_s: Callable[[], float]) -> None:
        """Waits for the bytes. After an error the target is the caller's again after ``settle`` only.

        Args:
            deadline_s: until when, on the monotonic clock; asked again when it is over, as it may move.

        Raises:
            PeerTimeout: they are not there in time.
            PeerUnavailable: they will not come.
        """
        while not self._over.wait(max(0.0, deadline_s() - time.monotonic())):
            if time.monotonic() >= deadline_s():
                raise PeerTimeout(f"{self.num_bytes} bytes did not come over NIXL in time")
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Waits until nothing writes to the target any more, however long that takes."""
        self._settled.wait()

    def failed(self, error: PeerUnavailable) -> None:
        """Of the agent's thread: the bytes will not come. The target may still be written to."""
        if not self._over.is_set():
            self._error = error
            self._over.set()

    def over(self, error: PeerUnavailable | PeerTimeout | None) -> None:
        """Of the agent's thread: nothing writes to the target any more. ``error``: where it has not failed before."""
        if not self._over.is_set():
            self._error = error
            self._over.set()
        self._settled.set()


def _wake() -> None:
    """An order that has the thread look what is to be done."""


@dataclass(eq=False)
class _Transfer:
    """Reads from one peer that go together. Of the agent's thread."""

    readings: list[Reading]
    handle: Any = None
    deadline_s: float = float("inf")
    quiet_at_s: float | None = None
    """Nothing is on its way any more from then on; None while it has not been aborted."""

    @property
    def name(self) -> str:
        """Of the peer."""
        return self.readings[0].remote.name


class NixlAgent:
    """The agent of this process. Made by ``start``.

    Args:
        address: of the memory to register.
        num_bytes: of it.
    """

    def __init__(self, address: int, num_bytes: int) -> None:
        self.name = f"antiphon-{secrets.token_hex(8)}"
        self.metadata = b""
        self.counts: Counter[str] = Counter()
        self._memory = (address, num_bytes)
        self._agent: Any = None
        self._orders: queue.SimpleQueue[Reading | Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Reading] = deque()
        self._running: list[_Transfer] = []
        self._spent: list[Any] = []
        """Handles of transfers that are over."""
        self._served_s = 0.0
        self._remotes: dict[str, str] = {}  # NIXL's name of each remote that is added, by ours
        self._doomed: set[str] = set()
        self._num_alone: dict[str, int] = {}
        """Transfers in a row that needed nothing of the peer's, by our name of it."""
        self._num_borrowers = 0
        """Under ``_lock``, as the next."""
        self._num_reads = 0
        """Reads that are not over."""
        self._active_s = 0.0
        self._started = threading.Event()
        self._start_error: str | None = None
        self._is_closing = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="antiphon-nixl", daemon=True)

    @classmethod
    def start(cls, address: int, num_bytes: int) -> NixlAgent:
        """An agent with ``num_bytes`` from ``address`` on registered; they stay mapped until ``close`` has returned.

        Raises:
            PeerUnavailable: NIXL is not installed, or has no working UCX here.
        """
        agent = cls(address, num_bytes)
        agent._thread.start()
        if not agent._started.wait(START_TIMEOUT_S):
            agent._is_closing = True
            raise PeerUnavailable(f"NIXL did not start within {START_TIMEOUT_S:g} s")
        if agent._start_error is not None:
            raise PeerUnavailable(agent._start_error, remedy="install nixl, or go on over TCP")
        return agent

    # ---- of any thread -----------------------------------------------------------------------------------------------

    def read(self, remote: RemoteMemory, remote_address: int, local_address: int, num_bytes: int) -> Reading:
        """Orders a read into the registered memory.

        Raises:
            PeerUnavailable: the agent is closed, or too many reads wait.
        """
        first, size = self._memory
        assert first <= local_address <= local_address + num_bytes <= first + size, "outside the registered memory"
        reading = Reading(remote, remote_address, local_address, num_bytes)
        with self._lock:
            self._check_open()
            if self._num_reads >= READS_MAX:
                raise PeerUnavailable(f"{READS_MAX} reads over NIXL are not over")
            self._num_reads += 1
            self._orders.put(reading)
        return reading

    def expire(self, reading: Reading) -> None:
        """The read has missed its deadline: it is given up, and settles. Never refused for what else waits.
        Raises PeerUnavailable: the agent is closed, which settles all reads."""
        with self._lock:
            self._check_open()
            if not reading._is_expired:
                reading._is_expired = True
                self._orders.put(lambda: self._give_up(reading))

    def forget(self, name: str) -> None:
        """The life of that name is over: its connection is torn down. Nothing where it is not known.
        Raises PeerUnavailable: the agent is closed, or too many orders wait."""
        with self._lock:
            self._check_open()
            if self._orders.qsize() >= ORDERS_MAX:
                raise PeerUnavailable(f"{ORDERS_MAX} orders wait for the NIXL agent")
            self._orders.put(lambda: self._remove(name))

    def needs_polls(self, name: str) -> bool:
        """Whether reads from that life of a peer move only while the peer polls, as far as is known here: not those of
        the memory of another process on this host."""
        return self._num_alone.get(name, 0) < ALONE_MIN

    def borrowers(self, change: int) -> None:
        """So many more reads may need this side: the agent is polled for them. Raises PeerUnavailable: it is closed."""
        with self._lock:
            self._check_open()
            self._num_borrowers = max(0, self._num_borrowers + change)
            if self._orders.empty():
                self._orders.put(_wake)

    def _check_open(self) -> None:
        if self._is_closing:
            raise PeerUnavailable("the NIXL agent is closed")

    def close(self) -> bool:
        """Ends the thread; returns whether it has ended, so that the memory may be unmapped."""
        with self._lock:
            self._is_closing = True
        if not self._started.is_set():
            return False
        self._thread.join(CLOSE_TIMEOUT_S)
        return not self._thread.is_alive()

    # ---- of its own thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._agent = self._make()
        except Exception as error:  # supervised: whatever NIXL raises means that there is no NIXL; the starter says so
            self._start_error = f"NIXL cannot be used: {type(error).__name__}: {error}"
            self._started.set()
            return
        self._started.set()
        self._active_s = time.monotonic()
        try:
            while not self._is_closing:
                if self._take_orders(self._pause_s(time.monotonic() - self._active_s)):
                    self._active_s = time.monotonic()
                if self._waiting:
                    self._begin_some()
                self._poll()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """The thread ends: nobody waits for it any more."""
        with self._lock:
            self._is_closing = True  # nothing is ordered from here on
        for transfer in self._running:
            self._release(transfer)
        self._tidy_up()
        for name in list(self._remotes):
            self._remove(name)
        self._agent = None  # frees the agent, and with it its connections
        readings = [reading for transfer in self._running for reading in transfer.readings]
        while not self._orders.empty():
            order = self._orders.get_nowait()
            if isinstance(order, Reading):
                readings.append(order)
        for reading in (*readings, *self._waiting):
            reading.over(PeerUnavailable("the NIXL agent was closed"))

    def _make(self) -> Any:
        api: Any = importlib.import_module("nixl._api")
        for name in list(logging.root.manager.loggerDict):
            if name == "nixl" or name.startswith("nixl."):  # it would write to standard output, past our log
                logger = logging.getLogger(name)
                logger.handlers.clear()
                logger.propagate = True
                logger.setLevel(logging.WARNING)
        config = api.nixl_agent_config(
            enable_prog_thread=False, sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT, backends=["UCX"]
        )
        agent = api.nixl_agent(self.name, config)
        address, num_bytes = self._memory
        if agent.register_memory([(address, num_bytes, 0, "")], "DRAM") is None:
            raise RuntimeError("the memory could not be registered")
        self.metadata = bytes(agent.get_agent_metadata())
        return agent

    def _pause_s(self, quiet_s: float) -> float:
        """How long to wait for orders; ``quiet_s``: since something was done last."""
        if self._waiting:
            return 0.0
        if self._running:
            return 0.0 if quiet_s < HOT_S else WARM_S
        if self._num_borrowers > 0:
            return SERVING_S
        return IDLE_S if quiet_s < COLD_AFTER_S else COLD_S

    def _take_orders(self, pause_s: float) -> bool:
        has_done = False
        while True:
            try:
                order = self._orders.get(timeout=pause_s) if pause_s else self._orders.get_nowait()
            except queue.Empty:
                return has_done
            has_done, pause_s = True, 0.0
            if isinstance(order, Reading):
                self._waiting.append(order)
            else:
                order()

    def _begin_some(self) -> None:
        """Begins the reads that have waited longest, as far as they are from one peer and go together."""
        readings = [self._waiting.popleft()]
        remote, num_bytes = readings[0].remote, readings[0].num_bytes
        while self._waiting and self._waiting[0].remote.name == remote.name:
            num_bytes += self._waiting[0].num_bytes
            if num_bytes > MERGED_BYTES:
                break
            readings.append(self._waiting.popleft())
        transfer = _Transfer(readings)
        try:
            if remote.name in self._doomed:
                raise PeerUnavailable("its connection is being torn down")
            if remote.name not in self._remotes:
                found = self._agent.add_remote_agent(remote.metadata)
                self._remotes[remote.name] = found.decode() if isinstance(found, bytes) else str(found)
            here = [(reading.local_address, reading.num_bytes, 0) for reading in readings]
            there = [(reading.remote_address, reading.num_bytes, 0) for reading in readings]
            local, far = (self._agent.get_xfer_descs(regions, "DRAM") for regions in (here, there))
            transfer.handle = self._agent.initialize_xfer("READ", local, far, self._remotes[remote.name])
            self._running.append(transfer)
            state = self._agent.transfer(transfer.handle)
        except Exception as error:  # supervised: NIXL's errors have no common base; the callers of the reads get it
            self._failed(transfer, f"{type(error).__name__}: {error}")
            return
        self._num_alone[remote.name] = self._num_alone.get(remote.name, 0) + 1 if state == "DONE" else 0
        self._advance(transfer, state)

    def _poll(self) -> None:
        now_s = time.monotonic()
        for transfer in list(self._running):
            if transfer.quiet_at_s is not None:
                if now_s >= transfer.quiet_at_s:
                    self.counts["quarantined"] += len(transfer.readings)
                    self._end(transfer, PeerTimeout("the read was given up"))
                continue
            try:
                state = self._agent.check_xfer_state(transfer.handle)
            except Exception as error:  # supervised: as in _begin_some
                self._failed(transfer, f"{type(error).__name__}: {error}")
                continue
            self._advance(transfer, state)
        for transfer in list(self._running):
            if transfer.quiet_at_s is None and now_s >= transfer.deadline_s:
                self._tear_down(transfer.name, now_s)
        if self._waiting and not self._running and now_s - self._served_s < SERVING_S:
            return
        if not self._waiting or len(self._spent) >= SPENT_MAX:
            self._tidy_up()
        self._served_s = now_s
        try:
            self._agent.get_new_notifs()  # nobody is meant to send any; this is what serves peers
        except Exception as error:  # supervised: a peer that is gone may be told here
            log.debug("polling NIXL: %s", error)

    def _advance(self, transfer: _Transfer, state: str) -> None:
        if state == "DONE":
            self.counts["reads"] += len(transfer.readings)
            self.counts["bytes"] += sum(reading.num_bytes for reading in transfer.readings)
            self._end(transfer, None)
        elif state != "PROC":
            self._failed(transfer, f"state {state}")

    def _failed(self, transfer: _Transfer, reason: str) -> None:
        """NIXL itself has ended the transfer, or the first of its reads."""
        error = PeerUnavailable(f"a read over NIXL failed: {reason}")
        self.counts["failed"] += len(transfer.readings)
        self._doomed.add(transfer.name)
        if transfer.handle is None or len(transfer.readings) == 1:
            self._release(transfer)
            self._end(transfer, error)
            return
        for each in self._running:
            if each.name == transfer.name:
                for reading in each.readings:
                    reading.failed(error)
        self._tear_down(transfer.name, time.monotonic())

    def _end(self, transfer: _Transfer, error: PeerUnavailable | PeerTimeout | None) -> None:
        self._active_s = time.monotonic()
        if transfer in self._running:
            self._running.remove(transfer)
        handle, transfer.handle = transfer.handle, None
        if handle is not None:
            self._spent.append(handle)
        if transfer.name in self._doomed:
            self._remove(transfer.name)
        self._over(transfer.readings, error)

    def _over(self, readings: list[Reading], error: PeerUnavailable | PeerTimeout | None) -> None:
        with self._lock:
            self._num_reads -= len(readings)
        for reading in readings:
            reading.over(error)

    def _give_up(self, reading: Reading) -> None:
        if reading in self._waiting:
            self.counts["expired"] += 1
            self._waiting.remove(reading)
            self._over([reading], PeerTimeout("the read was given up"))
        for transfer in self._running:
            if reading in transfer.readings:
                self.counts["expired"] += 1
                transfer.deadline_s = min(transfer.deadline_s, time.monotonic() + GRACE_S)

    def _tear_down(self, name: str, now_s: float) -> None:
        """All reads from a peer are aborted; their targets are in quarantine from here on."""
        self._doomed.add(name)
        for transfer in self._running:
            if transfer.name == name and transfer.quiet_at_s is None:
                self._release(transfer)
                transfer.quiet_at_s = now_s + QUARANTINE_S
        self._remove(name)

    def _release(self, transfer: _Transfer) -> None:
        """Aborts it, where it is in flight."""
        handle, transfer.handle = transfer.handle, None
        if handle is not None:
            self._spent.append(handle)
            self._tidy_up()

    def _tidy_up(self) -> None:
        """Frees what belongs to transfers that are over."""
        for handle in self._spent:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:  # supervised: a transfer in flight is aborted, which is told so
                log.debug("releasing a transfer: %s", error)
        self._spent.clear()

    def _remove(self, name: str) -> None:
        """Forgets a peer, once no transfer of it is held."""
        if any(transfer.name == name and transfer.handle is not None for transfer in self._running):
            self._doomed.add(name)
            return
        self._tidy_up()
        self._doomed.discard(name)
        self._num_alone.pop(name, None)
        found = self._remotes.pop(name, None)
        if found is not None:
            try:
                self._agent.remove_remote_agent(found)
            except Exception as error:  # supervised: it is forgotten here in any case
                log.debug("removing %s: %s", found, error)
