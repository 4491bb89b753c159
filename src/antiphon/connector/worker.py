"""The worker side of the connector: copies between the engine's blocks and the arena, on threads of their own.

One thread loads and one stores, so that neither waits for the other and no step waits for either; a short load whose
copies only have to be launched is begun by the step itself. vLLM's step comes in
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from antiphon.client.client import CacheClient
from antiphon.client.session import Session
from antiphon.connector.copier import Copier, Copying, Mark, Part
from antiphon.connector.plan import LoadPlan, StepPlan, StorePlan, WorkerNews
from antiphon.connector.sessions import Sessions
from antiphon.connector.start_watch import StartWatch
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
    """A store that was begun. ``copying`` is held while copies are begun, so that who cancels can wait for that.

    Args:
        after: where compute has filled the blocks.
    """

    plan: StorePlan
    after: Mark | None = None
    copying: threading.Lock = field(default_factory=threading.Lock)
    is_cancelled: bool = False
    num_written: int = 0


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load that was asked for, and from when its copies are begun what they need.

    Args:
        after: where compute has left the blocks.
        session: held until the copies have ended.
    """

    plan: LoadPlan
    after: Mark | None = None
    session: Session | None = None
    copying: Copying | None = None


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
        slab: place of this rank's part in every chunk, in parts of its size.
        slabs: the slabs of that part that this rank writes, all or none; None: its part is one slab, and it does.
    """

    def __init__(
        self,
        client: CacheClient,
        copier: Copier,
        slab: int,
        now_s: Callable[[], float] = time.monotonic,
        *,
        slabs: tuple[int, ...] | None = None,
    ) -> None:
        self._client = client
        self._copier = copier
        self._slab_offset = slab * copier.slab_bytes
        self._slabs = (slab,) if slabs is None else slabs
        self._sessions = Sessions(now_s)
        self._start_watch = StartWatch()
        self._quiet = QuietLog(log, now_s)
        self._note: calls.EngineNote | None = None
        self._failure: str | None = None
        self._lock = threading.Lock()
        self._loads: queue.SimpleQueue[LoadJob | None] = queue.SimpleQueue()
        self._loading: list[LoadJob] = []
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
        if session.arena is not None:
            self._copier.arena_mapped(session.arena)
        if self._note is not None:
            session.submit(self._note)

    def engine_started(self) -> None:
        """The engine has captured its CUDA graphs. It may be known."""
        if not self._start_watch.has_started:
            self._start_watch.has_started = True
            self._copier.engine_started()

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
        with self._lock:
            begun = [job for job in self._loading if job.copying is not None]
        for job in begun:
            assert job.copying is not None
            job.copying.wait()
            self._end_load(job, is_loaded=True)
        self._copier.close()
        self._sessions.close()

    # ---- a step ----------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Before any block is overwritten: copies out of the blocks of preempted requests end.

        With the first step the engine has started: vLLM hides what it runs to warm up and to capture from connectors.
        What the plan awaits is noted here, as this part comes in every step: vLLM 0.26 leaves ``start_stores`` out of a
        step without a forward. A finished request has no store in the same plan.
        """
        self._is_in_step = True
        self.engine_started()
        with self._lock:
            self._awaited.update(plan.finished)
        if plan.cancel_stores:
            self._cancel(lambda _request: True)
        elif plan.preempted:
            preempted = frozenset(plan.preempted)
            self._cancel(lambda request: request in preempted)

    def start_loads(self, plan: StepPlan) -> None:
        """The loads of this step; none of their blocks is touched by the step's own compute."""
        after: Mark | None = None
        num_left = self._copier.num_batches_in_step
        for load in plan.loads:
            job = LoadJob(load)
            num_batches = -(-len(load.regions) // self._copier.num_chunks_at_once)
            with self._lock:
                is_first = all(other.copying is not None for other in self._loading)
                self._loading.append(job)
            try:
                job.after = after = after or self._copier.mark()
                is_begun = is_first and num_batches <= num_left and self._begin_in_step(job)
            except Exception as error:  # supervised: as in ``_run_load``
                self._load_failed(error)
                self._end_load(job, is_loaded=False)
                continue
            if is_begun:
                num_left -= num_batches
            else:
                self._loads.put(job)
        # Not before: these loads may need a session that none of a later plan does.
        self._promised, self._planned_s = plan.incarnation, plan.made_at_s

    def _begin_in_step(self, job: LoadJob) -> bool:
        """Begins a load that waits for nothing. Returns whether it did. The load thread has none to begin."""
        session = self._sessions.borrow(job.plan.incarnation, job.plan.promised_at_s)
        if session is None:
            return False
        try:
            if not self._copier.can_begin_in_step(list(self._parts_of(session, job.plan))):
                return False
        except AntiphonError:
            return False  # the load thread says why
        finally:
            session.unhold()
        self._run_load(job)
        return True

    def start_stores(self, plan: StepPlan) -> None:
        """The stores of this step, whose chunks the forward has completed."""
        try:
            after = self._copier.mark() if plan.stores else None
        except Exception as error:  # supervised: as in ``_run_store``
            self._quiet.error("store", "stores failed", error)
            with self._lock:
                self._news.stored.update((store.job, 1) for store in plan.stores)
            return
        for store in plan.stores:
            job = StoreJob(store, after)
            with self._lock:
                self._jobs.setdefault(store.request, []).append(job)
            self._stores.put(job)

    def take_finished(self) -> tuple[set[str], set[str]]:
        """Requests whose stores have all ended, of those awaited; and requests whose loads have ended. Never waits."""
        self._end_loads()
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

    def _run_load(self, job: LoadJob) -> None:
        is_begun = is_done = False
        try:
            is_begun = self._load(job)
            is_done = job.copying is not None and job.copying.is_done
        except AntiphonError as error:
            message = f"chunks of a request were not loaded, and are computed: {error}"
            self._quiet.warning(f"load: {type(error).__name__}", message)
        except Exception as error:  # supervised: a load is reported whatever happens, or its request waits for ever
            self._load_failed(error)
        if not is_begun:
            self._end_load(job, is_loaded=False)
        elif is_done:
            self._end_load(job, is_loaded=True)

    def _load_failed(self, error: Exception) -> None:
        self._quiet.error("load", "a load failed", error)
        self.fail(f"a load failed: {error!r}")

    def _end_loads(self) -> None:
        """Reports the loads whose copies have ended since."""
        if not self._loading:
            return
        with self._lock:
            begun = [job for job in self._loading if job.copying is not None]
        for job in begun:
            assert job.copying is not None
            try:
                if job.copying.is_done:
                    self._end_load(job, is_loaded=True)
            except Exception as error:  # supervised: as in ``_run_load``
                self._load_failed(error)
                self._end_load(job, is_loaded=False)

    def _end_load(self, job: LoadJob, *, is_loaded: bool) -> None:
        with self._lock:
            if job not in self._loading:
                return  # the other thread was first
            self._loading.remove(job)
            session, job.session = job.session, None
            if not is_loaded:
                self._failed_blocks.update(job.plan.block_ids)
            self._received.add(job.plan.request)
        if session is not None:
            session.unhold()

    def _let_go(self) -> None:
        if not self._start_watch.has_started and self._start_watch.look(self._client.session):
            self.engine_started()
        # What is known of plans is read first: their loads are then among those that are queued.
        promised, planned_s, is_idle = self._promised, self._planned_s, not self._is_in_step
        with self._lock:
            in_use = {job.plan.incarnation for job in self._loading}
        self._sessions.let_go(promised, planned_s, in_use, is_idle)

    def _load(self, job: LoadJob) -> bool:
        """Begins the copies of a load. Returns False where the arena cannot be used."""
        load = job.plan
        session = self._sessions.borrow(load.incarnation, load.promised_at_s)
        if session is None:
            message = f"no connection to cache server life {load.incarnation} lasts since chunks on it were promised"
            self._quiet.warning("no session", f"{message}: they are computed")
            return False
        job.session = session
        parts = list(self._parts_of(session, load))
        self._copier.prepare(parts)
        job.copying = self._copier.begin_load(parts, job.after)
        return True

    def _parts_of(self, session: Session, load: LoadPlan) -> Iterator[Part]:
        number = self._copier.blocks_per_chunk
        skip, block_ids = load.skip_blocks, load.block_ids
        for region in load.regions:
            take = min(number - skip, len(block_ids))
            yield Part(session.address_of(region) + self._slab_offset, tuple(block_ids[:take]), skip)
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
        if self._failure is not None or not self._slabs:
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
        body = calls.Reserve(plan.namespace, plan.tenant, plan.parent, b"".join(plan.keys), plan.traceparent)
        reserved = session.call(body)
        assert isinstance(reserved, calls.Reserved)
        granted = [grant.region for grant in reserved.grants]
        try:
            self._copy_out(session, job, reserved.grants)
        finally:
            num_written = 0 if self._failure is not None else job.num_written
            # Given back also where a copy failed, with what was written before it committed all the same.
            if num_written < len(granted):
                session.submit(calls.Abort(tuple(granted[num_written:])))
            if num_written:
                session.call(calls.Commit(tuple(granted[:num_written])))

    def _copy_out(self, session: Session, job: StoreJob, grants: tuple[calls.Grant, ...]) -> None:
        """Copies chunks until all are out or the job is cancelled; ``job.num_written`` says how many are."""
        at_once = self._copier.num_chunks_at_once
        begun: list[tuple[int, Copying]] = []
        try:
            for first in range(0, len(grants), at_once):
                parts = list(self._parts_out(session, job, grants[first : first + at_once]))
                if not job.is_cancelled:
                    self._copier.prepare(parts)  # before the lock, for which a step may wait
                with job.copying:
                    if job.is_cancelled:
                        break
                    begun.append((len(parts), self._copier.begin_store(parts, job.after)))
        finally:
            for num_chunks, copying in begun:
                copying.wait()
                job.num_written += num_chunks

    def _parts_out(self, session: Session, job: StoreJob, grants: tuple[calls.Grant, ...]) -> Iterator[Part]:
        number, blocks = self._copier.blocks_per_chunk, job.plan.block_ids
        for grant in grants:
            address = session.address_of(grant.region) + self._slab_offset
            # Other writers may have stored some of its slabs: those may be read by now.
            some = None if grant.slabs == self._slabs else tuple(slab - self._slabs[0] for slab in grant.slabs)
            yield Part(address, tuple(blocks[grant.index * number : (grant.index + 1) * number]), 0, some)

    def _cancel(self, concerns: Callable[[str], bool]) -> None:
        """Ends stores of the requests concerned: compute that is launched from here on may overwrite their blocks."""
        with self._lock:
            jobs = [job for request, jobs in self._jobs.items() if concerns(request) for job in jobs]
        for job in jobs:  # all before the first wait, so that at most one ``begin_store`` is waited for
            job.is_cancelled = True
        for job in jobs:
            with job.copying:
                pass
        if jobs:
            self._copier.hold_compute()
