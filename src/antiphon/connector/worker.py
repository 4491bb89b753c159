"""The worker side of the connector: copies between the engine's blocks and the arena, on threads of their own.

One thread loads and one stores, so that neither waits for the other and no step waits for either. vLLM's step comes in
four parts: ``begin_step`` before any block is overwritten, ``start_loads``, ``start_stores`` after the forward, and the
``take_…`` calls. It imports no vLLM.

Always true:

- A load begins when the compute of earlier steps has ended, and its blocks belong to no running request: vLLM gives
  them to the request that waits for it, and keeps them until it is reported, also after an abort.
- Every load that is begun is reported once, well or not.
- Blocks are read by a store only until ``begin_step`` has named their request as preempted, or the request is reported
  as stored.
- A load goes through a session that was there when its lease was known to be held, and has not been closed since: the
  engine was never without a connection, so that the lease has not ended. Where there is none, the load fails.
- A session that ended is kept for that, with its arena, while a load that needs it may still come.
- Once it has failed (``fail``) nothing is committed, as blocks may have been used again under a copy. Loads go on:
  their blocks are safe, and vLLM may end a request whose load fails.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from antiphon.client.client import CacheClient
from antiphon.client.session import Session
from antiphon.connector.copy import BlockCopier
from antiphon.connector.plan import LoadPlan, StepPlan, StorePlan, WorkerNews
from antiphon.connector.sessions import Sessions
from antiphon.core.errors import AntiphonError
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol import cache as calls

log = logging.getLogger("antiphon.connector")

HOUSEKEEPING_S = 0.5
"""How often an idle load thread looks whether an old arena can go."""

STOP_TIMEOUT_S = 5.0

NOTE_MAX = 500
"""Characters of what the server is told."""


@dataclass(slots=True, eq=False)
class StoreJob:
    """A store that was begun. ``copying`` is held during each copy, so that who cancels can wait for its end."""

    plan: StorePlan
    copying: threading.Lock = field(default_factory=threading.Lock)
    is_cancelled: bool = False


class NoReuse:
    """Answers the plans of a worker that copies nothing, so that no request waits and no block is kept for ever."""

    def __init__(self) -> None:
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._news = WorkerNews()

    def begin_step(self, plan: StepPlan) -> None:
        """Nothing is stored, so that nothing is awaited."""
        self._sent.update(plan.finished)

    def start_loads(self, plan: StepPlan) -> None:
        """Every load fails."""
        for load in plan.loads:
            self._received.add(load.request)
            self._failed_blocks.update(load.block_ids)

    def start_stores(self, plan: StepPlan) -> None:
        """Every store ends."""
        self._news.stored.update((store.job, 1) for store in plan.stores)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """As ``WorkerSide.take_finished``."""
        sent, self._sent = self._sent, set()
        received, self._received = self._received, set()
        return sent, received

    def take_failed_blocks(self) -> set[int]:
        """As ``WorkerSide.take_failed_blocks``."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_news(self) -> WorkerNews:
        """The stores that ended."""
        news, self._news = self._news, WorkerNews()
        return news


class WorkerSide:
    """The worker side of one rank.

    Args:
        client: the connection to the cache server; its ``on_change`` must call ``session_changed``.
        copier: of this rank's blocks.
        slab: the slab of every chunk that this rank writes and reads.
    """

    def __init__(
        self, client: CacheClient, copier: BlockCopier, slab: int, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._copier = copier
        self._slab_offset = slab * copier.slab_bytes
        self._sessions = Sessions(now_s)
        self._quiet = QuietLog(log, now_s)
        self._note: calls.EngineNote | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._loads: queue.SimpleQueue[LoadPlan | None] = queue.SimpleQueue()
        self._loading: list[LoadPlan] = []
        self._received: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._stores: queue.SimpleQueue[StoreJob | None] = queue.SimpleQueue()
        self._jobs: dict[str, list[StoreJob]] = {}
        self._news = WorkerNews()
        self._awaited: set[str] = set()
        self._promised: str | None = None
        self._planned_s = 0.0
        self._is_in_step = False
        self._is_closing = False
        self._threads = [
            threading.Thread(target=self._load_thread, name="antiphon-load", daemon=True),
            threading.Thread(target=self._store_thread, name="antiphon-store", daemon=True),
        ]

    # ---- life ------------------------------------------------------------------------------------------------------

    def start(self, gate: str, detail: str) -> None:
        """Starts the threads, and tells the server what the gate found, on this connection and every later one."""
        self._note = calls.EngineNote(gate, detail)
        for thread in self._threads:
            thread.start()
        self.session_changed()

    def session_changed(self) -> None:
        """A connection came or went; called from the client's thread too."""
        session = self._client.session
        if session is None:
            return
        self._sessions.seen(session)
        if self._note is not None:
            session.submit(self._note)

    def fail(self, reason: str) -> None:
        """A bug was met: nothing is stored any more, and server and scheduler side are told. The first reason counts.

        What a store has copied when this returns, and not yet sent to be committed, is given back.
        """
        if self._failure is not None:
            return
        self._failure = reason
        self._note = calls.EngineNote("failed", reason[:NOTE_MAX])
        session = self._client.session
        if session is not None:
            session.submit(self._note)

    def close(self) -> None:
        """Ends the threads after the copy that each is at. What is queued is dropped."""
        self._is_closing = True
        self._cancel(lambda _request: True)
        self._loads.put(None)
        self._stores.put(None)
        for thread in self._threads:
            if thread.is_alive():
                thread.join(STOP_TIMEOUT_S)
        self._sessions.close()

    # ---- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Before any block is overwritten: copies out of the blocks of preempted requests end.

        What the plan awaits is noted here, as this part comes in every step: vLLM 0.26 leaves ``start_stores`` out of a
        step without a forward. A finished request has no store in the same plan.
        """
        self._is_in_step = True
        with self._lock:
            self._awaited.update(plan.finished)
        if plan.cancel_stores:
            self._cancel(lambda _request: True)
        elif plan.preempted:
            preempted = frozenset(plan.preempted)
            self._cancel(lambda request: request in preempted)

    def start_loads(self, plan: StepPlan) -> None:
        """The loads of this step; none of their blocks is touched by the step's own compute."""
        for load in plan.loads:
            with self._lock:
                self._loading.append(load)
            self._loads.put(load)
        # Not before: these loads may need a session that none of a later plan does.
        self._promised, self._planned_s = plan.incarnation, plan.made_at_s

    def start_stores(self, plan: StepPlan) -> None:
        """The stores of this step, whose chunks the forward has completed."""
        for store in plan.stores:
            job = StoreJob(store)
            with self._lock:
                self._jobs.setdefault(store.request, []).append(job)
            self._stores.put(job)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose stores have all ended, of those awaited; and requests whose loads have ended."""
        with self._lock:
            sent = {request for request in self._awaited if request not in self._jobs}
            self._awaited -= sent
            received, self._received = self._received, set()
        self._is_in_step = False
        return sent, received

    def take_failed_blocks(self) -> set[int]:
        """Blocks whose load failed, of the requests that ``take_finished`` reported or will report."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_news(self) -> WorkerNews:
        """Stores that ended since the last call, and whether this side has failed."""
        with self._lock:
            news, self._news = self._news, WorkerNews()
        news.out_of_service = self._failure
        return news

    # ---- loads -----------------------------------------------------------------------------------------------------

    def _load_thread(self) -> None:
        while True:
            try:
                load = self._loads.get(timeout=HOUSEKEEPING_S)
            except queue.Empty:
                self._let_go()
                continue
            if load is None or self._is_closing:
                return
            self._run_load(load)
            self._let_go()

    def _run_load(self, load: LoadPlan) -> None:
        is_loaded = False
        try:
            is_loaded = self._load(load)
        except AntiphonError as error:
            message = f"chunks of a request were not loaded, and are computed: {error}"
            self._quiet.warning(f"load: {type(error).__name__}", message)
        except Exception as error:  # supervised: a load is reported whatever happens, or its request waits for ever
            self._quiet.error("load", "a load failed", error)
            self.fail(f"a load failed: {error!r}")
        with self._lock:
            self._loading.remove(load)
            if not is_loaded:
                self._failed_blocks.update(load.block_ids)
            self._received.add(load.request)

    def _let_go(self) -> None:
        # What is known of plans is read first: their loads are then among those that are queued.
        promised, planned_s, is_idle = self._promised, self._planned_s, not self._is_in_step
        with self._lock:
            in_use = {load.incarnation for load in self._loading}
        self._sessions.let_go(promised, planned_s, in_use, is_idle)

    def _load(self, load: LoadPlan) -> bool:
        session = self._sessions.borrow(load.incarnation, load.promised_at_s)
        if session is None:
            message = f"no connection to cache server life {load.incarnation} lasts since chunks on it were promised"
            self._quiet.warning("no session", f"{message}: they are computed")
            return False
        try:
            self._load_from(session, load)
        finally:
            session.unhold()
        return True

    def _load_from(self, session: Session, load: LoadPlan) -> None:
        number = self._copier.blocks_per_chunk
        skip, block_ids = load.skip_blocks, load.block_ids
        for region in load.regions:
            take = min(number - skip, len(block_ids))
            self._copier.load(session.address_of(region) + self._slab_offset, skip, block_ids[:take])
            skip, block_ids = 0, block_ids[take:]
        assert not block_ids, "more blocks than regions"

    # ---- stores ----------------------------------------------------------------------------------------------------

    def _store_thread(self) -> None:
        while (job := self._stores.get()) is not None:
            self._run_store(job)

    def _run_store(self, job: StoreJob) -> None:
        try:
            self._store(job)
        except AntiphonError as error:
            self._quiet.info(f"store: {type(error).__name__}", f"chunks of a request were not stored: {error}")
        except Exception as error:  # supervised: a job ends whatever happens, or its request's blocks are never freed
            self._quiet.error("store", "a store failed", error)
        request = job.plan.request
        with self._lock:
            jobs = self._jobs[request]
            jobs.remove(job)
            if not jobs:
                del self._jobs[request]
            self._news.stored[job.plan.job] = 1

    def _store(self, job: StoreJob) -> None:
        session = self._client.session
        if self._failure is not None:
            return
        # A server that does not answer now is not waited for: blocks are held back meanwhile.
        if session is None or job.is_cancelled or not session.is_responsive or not session.hold():
            return
        try:
            self._store_on(session, job)
        finally:
            session.unhold()

    def _store_on(self, session: Session, job: StoreJob) -> None:
        plan = job.plan
        reserved = session.call(calls.Reserve(plan.namespace, plan.tenant, plan.parent, b"".join(plan.keys)))
        assert isinstance(reserved, calls.Reserved)
        number = self._copier.blocks_per_chunk
        granted = [grant.region for grant in reserved.grants]
        num_written = 0
        try:
            for grant in reserved.grants:
                with job.copying:
                    if job.is_cancelled:
                        break
                    blocks = plan.block_ids[grant.index * number : (grant.index + 1) * number]
                    self._copier.store(session.address_of(grant.region) + self._slab_offset, blocks)
                num_written += 1
        finally:
            if self._failure is not None:
                num_written = 0
            # Given back also where a copy failed, with what was written before it committed all the same.
            if num_written < len(granted):
                session.submit(calls.Abort(tuple(granted[num_written:])))
            if num_written:
                session.call(calls.Commit(tuple(granted[:num_written])))

    def _cancel(self, concerns: Callable[[str], bool]) -> None:
        """Ends stores of the requests concerned; returns when none of them reads a block any more."""
        with self._lock:
            jobs = [job for request, jobs in self._jobs.items() if concerns(request) for job in jobs]
        for job in jobs:  # all before the first wait, so that at most the copy of one chunk is waited for
            job.is_cancelled = True
        for job in jobs:
            with job.copying:
                pass
