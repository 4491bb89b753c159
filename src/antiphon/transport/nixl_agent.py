"""Reads from the memory of other processes over NIXL: one thread owns the agent, callers wait with own deadlines.

Owns the NIXL agent and the thread. The agent has no progress thread, so that an idle process costs nothing; it moves
when it is polled: without a pause while a read of its own is under way, every 0.2 ms while a peer may be reading here,
and slower and slower when nothing happens. Its name is new at each start, since NIXL mixes up lives of one name.

Always true:

- The agent is touched by its own thread alone, with strict locking besides.
- A wait for a read ends by its deadline; NIXL itself never reports a peer that hangs. The target of a read that was not
  over by then may still be written to: it is the caller's again only after ``Reading.settle``, that is when the
  transfer has ended after all, or when the connection is torn down and ``QUARANTINE_S`` has passed.
- A peer is removed from the agent before it is added again.

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
from collections import Counter
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
WAITING_MAX: Final = 1_024
"""Reads that wait for the thread: far more than callers there are."""


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
    handle: Any = None
    deadline_s: float = float("inf")
    quiet_at_s: float | None = None

    def wait(self, timeout_s: float) -> None:
        """Waits for the bytes.

        Raises:
            PeerTimeout: they are not there in time. The target is the caller's again after ``settle`` only.
            PeerUnavailable: they will not come, and nothing writes to the target.
        """
        if not self._over.wait(timeout_s):
            raise PeerTimeout(f"{self.num_bytes} bytes did not come over NIXL within {timeout_s:g} s")
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Waits until nothing writes to the target any more, however long that takes."""
        self._settled.wait()

    def over(self, error: PeerUnavailable | PeerTimeout | None) -> None:
        """Of the agent's thread: nothing writes to the target any more."""
        self._error = error
        self._over.set()
        self._settled.set()


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
        self._running: list[Reading] = []
        self._remotes: dict[str, str] = {}  # NIXL's name of each remote that is added, by ours
        self._doomed: set[str] = set()
        self._num_borrowers = 0
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
        self._order(reading)
        return reading

    def expire(self, reading: Reading) -> None:
        """The read has missed its deadline: it is given up, and settles."""
        self._order(lambda: self._give_up(reading))

    def forget(self, name: str) -> None:
        """The life of that name is over: its connection is torn down. Nothing where it is not known."""
        self._order(lambda: self._remove(name))

    def borrowers(self, change: int) -> None:
        """So many more peers may be reading here: the agent is polled for them."""
        self._order(lambda: self._count(change))

    def _order(self, order: Reading | Callable[[], None]) -> None:
        with self._lock:
            if self._is_closing:
                raise PeerUnavailable("the NIXL agent is closed")
            if self._orders.qsize() >= WAITING_MAX:
                raise PeerUnavailable(f"{WAITING_MAX} orders wait for the NIXL agent")
            self._orders.put(order)

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
                self._poll()
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """The thread ends: nobody waits for it any more."""
        with self._lock:
            self._is_closing = True  # nothing is ordered from here on
        for reading in self._running:
            self._release(reading)
        for name in list(self._remotes):
            self._remove(name)
        self._agent = None  # frees the agent, and with it its connections
        for reading in self._running:
            reading.over(PeerUnavailable("the NIXL agent was closed"))
        while not self._orders.empty():
            order = self._orders.get_nowait()
            if isinstance(order, Reading):
                order.over(PeerUnavailable("the NIXL agent was closed"))

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
                self._begin(order)
            else:
                order()

    def _count(self, change: int) -> None:
        self._num_borrowers = max(0, self._num_borrowers + change)

    def _begin(self, reading: Reading) -> None:
        remote = reading.remote
        try:
            if remote.name in self._doomed:
                raise PeerUnavailable("its connection is being torn down")
            if remote.name not in self._remotes:
                found = self._agent.add_remote_agent(remote.metadata)
                self._remotes[remote.name] = found.decode() if isinstance(found, bytes) else str(found)
            local = self._agent.get_xfer_descs([(reading.local_address, reading.num_bytes, 0)], "DRAM")
            there = self._agent.get_xfer_descs([(reading.remote_address, reading.num_bytes, 0)], "DRAM")
            reading.handle = self._agent.initialize_xfer("READ", local, there, self._remotes[remote.name])
            self._running.append(reading)
            state = self._agent.transfer(reading.handle)
        except Exception as error:  # supervised: NIXL's errors have no common base; the caller of the read gets it
            self._failed(reading, f"{type(error).__name__}: {error}")
            return
        self._advance(reading, state)

    def _poll(self) -> None:
        now_s = time.monotonic()
        for reading in list(self._running):
            if reading.quiet_at_s is not None:
                if now_s >= reading.quiet_at_s:
                    self.counts["quarantined"] += 1
                    self._end(reading, PeerTimeout("the read was given up"))
                continue
            try:
                state = self._agent.check_xfer_state(reading.handle)
            except Exception as error:  # supervised: as in _begin
                self._failed(reading, f"{type(error).__name__}: {error}")
                continue
            self._advance(reading, state)
        for reading in list(self._running):
            if reading.quiet_at_s is None and now_s >= reading.deadline_s:
                self._tear_down(reading.remote.name, now_s)
        try:
            self._agent.get_new_notifs()  # nobody is meant to send any; this is what serves peers
        except Exception as error:  # supervised: a peer that is gone may be told here
            log.debug("polling NIXL: %s", error)

    def _advance(self, reading: Reading, state: str) -> None:
        if state == "DONE":
            self.counts["reads"] += 1
            self.counts["bytes"] += reading.num_bytes
            self._end(reading, None)
        elif state != "PROC":
            self._failed(reading, f"state {state}")

    def _failed(self, reading: Reading, reason: str) -> None:
        """NIXL itself has ended the read."""
        self.counts["failed"] += 1
        self._doomed.add(reading.remote.name)
        self._end(reading, PeerUnavailable(f"a read over NIXL failed: {reason}"))

    def _end(self, reading: Reading, error: PeerUnavailable | PeerTimeout | None) -> None:
        self._active_s = time.monotonic()
        self._release(reading)
        if reading in self._running:
            self._running.remove(reading)
        name = reading.remote.name
        if name in self._doomed:
            self._remove(name)
        reading.over(error)

    def _give_up(self, reading: Reading) -> None:
        if reading in self._running:
            self.counts["expired"] += 1
            reading.deadline_s = time.monotonic() + GRACE_S

    def _tear_down(self, name: str, now_s: float) -> None:
        """All reads from a peer that hangs are aborted; their targets are in quarantine from here on."""
        self._doomed.add(name)
        for reading in self._running:
            if reading.remote.name == name:
                self._release(reading)
                reading.quiet_at_s = now_s + QUARANTINE_S
        self._remove(name)

    def _release(self, reading: Reading) -> None:
        handle, reading.handle = reading.handle, None
        if handle is not None:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:  # supervised: a transfer in flight is aborted, which is told so
                log.debug("releasing a transfer: %s", error)

    def _remove(self, name: str) -> None:
        """Forgets a peer, once no transfer of it is held."""
        if any(reading.remote.name == name and reading.handle is not None for reading in self._running):
            self._doomed.add(name)
            return
        self._doomed.discard(name)
        found = self._remotes.pop(name, None)
        if found is not None:
            try:
                self._agent.remove_remote_agent(found)
            except Exception as error:  # supervised: it is forgotten here in any case
                log.debug("removing %s: %s", found, error)
