"""A fake engine: lives of a scheduler and its workers, one after the other, and the requests that it owes an answer.

When a process of it dies the others follow, after a while: a scheduler notices that a worker is gone, a worker that its
scheduler is. Then the next life begins, with another incarnation, and what was not answered is asked again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from antiphon.cache.events import Attach, ConnectionId, EngineId
from antiphon.core.chunks_layout import slabs_of_rank
from antiphon.sim.client import UNKNOWN, Answer, CacheClient, Call
from antiphon.sim.network import Channel, Process
from antiphon.sim.scheduler import Request, Scheduler
from antiphon.sim.timeline import CheckFailed, Timeline
from antiphon.sim.values import CHUNK_SIZE_TOKENS, SimulatedModel, Tokens, expected_output
from antiphon.sim.worker import Worker, WorkerOptions

NOTICE_S = (0.0, 0.6)
"""From the death of one process to that of the last."""
RESTART_S = (0.05, 0.4)

Connect = Callable[[Process], tuple[Channel[Call], Channel[Answer]] | None]


@dataclass(eq=False)
class Job:
    """What a client wants.

    Args:
        num_tries: requests made of it; one a life of an engine.
        num_loaded: tokens that the answered request loaded.
    """

    name: str
    model: str
    tenant: str
    prompt: Tokens
    num_output: int
    num_tries: int = 0
    output: Tokens | None = None
    num_loaded: int = 0
    is_over: bool = False
    request: Request | None = None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How an engine is built.

    Args:
        num_ranks: tensor-parallel size.
        releases_early: as ``Scheduler``.
        onboard_s, prefill_tokens_per_s: what its lookups say.
    """

    name: str
    model: SimulatedModel
    num_ranks: int
    worker: WorkerOptions
    releases_early: bool
    onboard_s: float = 0.0
    prefill_tokens_per_s: float = 0.0


class Engine:
    """All lives of one engine.

    Args:
        options: how it is built.
        connect: opens a connection to the cache server.
        on_end: takes each job that is over.
    """

    def __init__(
        self, timeline: Timeline, options: EngineOptions, connect: Connect, on_end: Callable[[Engine, Job], None]
    ) -> None:
        self.options = options
        self.jobs: dict[str, Job] = {}
        """Those that are not over, by name."""
        self.num_lives = 0
        self._timeline = timeline
        self._connect = connect
        self._on_end = on_end
        self._is_ending = False
        self.start()

    def start(self) -> None:
        """The next life."""
        options, timeline = self.options, self._timeline
        self.num_lives += 1
        self._is_ending = False
        name = f"{options.name}#{self.num_lives}"
        timeline.note(f"{name} starts")
        process = Process(timeline, f"{name}/scheduler")
        self.scheduler = Scheduler(process, options.model, self._connect, self._attach(()), options.releases_early)
        self.scheduler.waits = (options.onboard_s, options.prefill_tokens_per_s)
        workers = []
        for rank in range(options.num_ranks):
            worker_process = Process(timeline, f"{name}/worker-{rank}")
            orders: Channel[Callable[[], None]] = Channel(process, worker_process)
            reports: Channel[Callable[[], None]] = Channel(worker_process, process)
            for channel in (orders, reports):
                channel.has_hiccups = False
                channel.on_message = _do
            slabs = tuple(slabs_of_rank(options.model.num_slabs, rank, options.num_ranks))
            worker = Worker(worker_process, options.worker, self._connect, self._attach(slabs), reports)
            workers.append((worker, orders))
        self.scheduler.start(workers, options.worker.num_blocks)
        for job in list(self.jobs.values()):
            self._try(job)

    def _attach(self, slabs: tuple[int, ...]) -> Attach:
        model = self.options.model
        engine = EngineId(self.options.name, str(self.num_lives))
        return Attach(ConnectionId(UNKNOWN), engine, model.name, CHUNK_SIZE_TOKENS, model.layout, slabs)

    @property
    def processes(self) -> list[Process]:
        """Its processes: the scheduler, then the workers."""
        return [self.scheduler.process, *(worker.process for worker, _ in self.scheduler.workers)]

    @property
    def clients(self) -> list[CacheClient]:
        """The clients of its processes, in the same order."""
        return [self.scheduler.client, *(worker.client for worker, _ in self.scheduler.workers)]

    # ---- requests ----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Asks for a job; again in each life until it is answered."""
        self.jobs[job.name] = job
        if not self._is_ending:
            self._try(job)

    def _try(self, job: Job) -> None:
        job.num_tries += 1
        request = Request(f"{job.name}.{job.num_tries}", job.tenant, job.prompt, job.num_output, self._ended(job))
        job.request = request
        self._timeline.note(f"{self.options.name} {request.id} {job.tenant!r} {len(job.prompt)} tokens")
        self.scheduler.process.run(lambda: self.scheduler.add(request))

    def _ended(self, job: Job) -> Callable[[Request], None]:
        def ended(request: Request) -> None:
            assert request is job.request
            assert not job.is_over, f"{job.name} ends twice"
            if not request.is_aborted:
                self._check(job, request)
                job.output = request.output
                job.num_loaded = request.num_loaded
            job.is_over = True
            del self.jobs[job.name]
            self._on_end(self, job)

        return ended

    def _check(self, job: Job, request: Request) -> None:
        """The oracle: the output is the one that the prompt alone gives."""
        expected = expected_output(self.options.model, job.tenant, job.prompt, job.num_output)
        self._timeline.note(f"{self.options.name} {request.id} answers {request.output} {request.num_loaded} loaded")
        self._timeline.count("answer with loaded KV" if request.num_loaded else "answer without loaded KV")
        if request.output != expected:
            raise CheckFailed(
                f"{request.id} on {self.options.name} answers {request.output}, right is {expected}: "
                f"its KV is wrong ({request.num_loaded} tokens were loaded)"
            )

    def abort(self, job: Job) -> None:
        """The client of the job leaves."""
        request = job.request
        if request is not None and not job.is_over and not self._is_ending:
            self.scheduler.process.run(lambda: self.scheduler.abort(request))

    # ---- deaths ------------------------------------------------------------------------------------------------------

    def kill(self, victims: list[Process]) -> None:
        """Kills some of its processes; the others follow, and the next life begins."""
        if self._is_ending:
            return
        self._is_ending = True
        for process in victims:
            self._timeline.note(f"{process.name} is killed")
            process.kill()
        life = self.processes
        self._timeline.after(self._timeline.random.uniform(*NOTICE_S), lambda: self._end_life(life))

    def _end_life(self, life: list[Process]) -> None:
        for process in life:
            process.kill()
        self._timeline.after(self._timeline.random.uniform(*RESTART_S), self.start)

    def check_idle(self) -> None:
        """All blocks are free, and no session is left that should be closed."""
        scheduler = self.scheduler
        num_free, num_blocks = len(scheduler.free), self.options.worker.num_blocks
        if sorted(scheduler.free) != list(range(num_blocks)):
            raise CheckFailed(
                f"{self.options.name}: {num_free} of {num_blocks} blocks are free, and no request is left"
            )
        for client in self.clients:
            if client.draining:
                raise CheckFailed(f"{self.options.name}: a connection that ended long ago is still open")


def _do(action: Callable[[], None]) -> None:
    action()
