"""The scheduler of the fake engine: requests, blocks, steps; and what it promises them of the cache.

Prompts are computed in pieces, several requests a step. Where blocks run out the youngest request is preempted. Freed
blocks are the next to be given away, so that a copy that should have been waited for shows.

Always true: blocks of a request that has finished, was aborted or preempted are free only when every order on them is
reported by every worker (``Table``); a lease is released once, after all loads under it, or at once where the workers
announce their copies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from antiphon.cache.effects import Found, Reply
from antiphon.cache.events import Attach, Lookup
from antiphon.core.chunks import ChunkChain
from antiphon.engine.simulated.kv import pack
from antiphon.sim.client import UNKNOWN, Answer, CacheClient, Call, Pending, Promise
from antiphon.sim.network import Channel, Process
from antiphon.sim.values import (
    BLOCKS_PER_CHUNK,
    CHUNK_SIZE_TOKENS,
    SimulatedModel,
    Tokens,
    namespace_of,
    next_token,
    num_blocks_for,
    root_of,
)
from antiphon.sim.worker import LoadOrder, StoreOrder, Worker

STEP_TOKENS_MAX = 10
"""Tokens that one step computes, over all requests."""

STEP_S = 0.004
TOKEN_S = 0.001


class Stage(Enum):
    """Where a request is."""

    ASKING = "asking"
    """Its lookup has no answer yet."""
    READY = "ready"
    LOADING = "loading"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(eq=False)
class Table:
    """The blocks of one run of a request.

    Args:
        num_copies: orders on these blocks that are not reported, each counted once for each worker.
        is_dropped: the request needs the blocks no more.
    """

    blocks: list[int] = field(default_factory=list)
    num_copies: int = 0
    is_dropped: bool = False

    @property
    def is_free(self) -> bool:
        """Whether the blocks may be used by others."""
        return self.is_dropped and not self.num_copies


@dataclass(eq=False)
class Request:
    """One request of one life of an engine.

    Args:
        id: unique.
        on_output: takes the output when it is complete.
        num_loaded: tokens loaded at the last admission.
    """

    id: str
    tenant: str
    prompt: Tokens
    num_output: int
    on_output: Callable[[Request], None]
    tokens: list[int] = field(default_factory=list)
    stage: Stage = Stage.ASKING
    table: Table = field(default_factory=Table)
    num_computed: int = 0
    num_stored_chunks: int = 0
    num_loaded: int = 0
    num_runs: int = 0
    promise: Promise | None = None
    pending: Pending | None = None
    is_aborted: bool = False
    chain: ChunkChain | None = None

    @property
    def output(self) -> Tokens:
        """The tokens generated so far."""
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def is_complete(self) -> bool:
        """Whether all output is there."""
        return len(self.tokens) == len(self.prompt) + self.num_output


class Scheduler:
    """One life of an engine's scheduler.

    Args:
        process: its process.
        model: what it serves.
        connect, attach: for its client.
        releases_early: an aborted request's lease is released while its announced loads run.
    """

    def __init__(
        self,
        process: Process,
        model: SimulatedModel,
        connect: Callable[[Process], tuple[Channel[Call], Channel[Answer]] | None],
        attach: Attach,
        releases_early: bool,
    ) -> None:
        self.process = process
        self.model = model
        self.client = CacheClient(process, connect, attach)
        self.workers: list[tuple[Worker, Channel[Callable[[], None]]]] = []
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.free: list[int] = []
        self.num_held = 0
        """Blocks that wait for the end of copies."""
        self.waits = (0.0, 0.0)
        """What lookups say of how long they wait for tiers, and of the speed of this engine."""
        self._releases_early = releases_early
        self._is_stepping = False
        self._timeline = process.timeline

    def start(self, workers: list[tuple[Worker, Channel[Callable[[], None]]]], num_blocks: int) -> None:
        """The workers are there."""
        self.workers = workers
        self.free = list(range(num_blocks))

    # ---- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """A request arrives."""
        request.tokens = list(request.prompt)
        self.waiting.append(request)
        self._look_up(request)

    def abort(self, request: Request) -> None:
        """The client has left."""
        if request.stage is Stage.ENDED or request.is_aborted:
            return
        self._timeline.count(f"abort {request.stage.value}")
        self._timeline.note(f"{self.process.name} abort {request.id} {request.stage.value}")
        request.is_aborted = True
        if request.stage is Stage.LOADING and self._releases_early:
            self._release(request)
        if request.stage is not Stage.RUNNING or not self._is_stepping:
            self._end(request)  # else when the step has ended

    def _end(self, request: Request) -> None:
        """The request is over, by itself or by its client."""
        for place in (self.waiting, self.running):
            if request in place:
                place.remove(request)
        if request.stage is Stage.ASKING and request.pending is not None:
            self.client.abandon(request.pending)
        if request.stage is Stage.READY:
            self._release(request)
        if request.stage is not Stage.LOADING:  # a load goes on until every worker has reported it
            request.stage = Stage.ENDED
        self._drop(request.table)
        request.on_output(request)
        self._wake()

    def _drop(self, table: Table) -> None:
        """The table's blocks are free when no copy needs them."""
        table.is_dropped = True
        if table.is_free:
            self.free += table.blocks
        else:
            self._timeline.count("blocks held for a copy")
            self.num_held += len(table.blocks)

    def _copy_ended(self, table: Table) -> None:
        """A worker has reported an order on the table's blocks."""
        assert table.num_copies > 0
        was_free = table.is_free
        table.num_copies -= 1
        if table.is_free and not was_free:
            self.num_held -= len(table.blocks)
            self.free += table.blocks
            self._wake()

    # ---- lookups -----------------------------------------------------------------------------------------------------

    def _look_up(self, request: Request) -> None:
        """Asks what is stored. No answer in time is a miss, and the server is not waited for."""
        request.stage = Stage.ASKING
        request.num_runs += 1
        request.num_computed = request.num_loaded = request.num_stored_chunks = 0
        request.table = Table()
        chain = request.chain = ChunkChain(namespace_of(self.model, request.tenant), CHUNK_SIZE_TOKENS)
        keys = tuple(chain.extend(request.tokens))[: (len(request.tokens) - 1) // CHUNK_SIZE_TOKENS]
        session = self.client.usable
        if session is None or not keys:
            self._timeline.count("lookup left out" if keys else "prompt without a chunk")
            self._ready(request, None)
            return
        incarnation = session.incarnation
        owner = f"{request.id}.{request.num_runs}"

        def answered(reply: Reply | None) -> None:
            request.pending = None
            promise = None
            if isinstance(reply, Found) and reply.lease is not None:
                self._timeline.count("promise", self.process.name)
                if reply.fetched:
                    self._timeline.count("promise with fetched chunks")
                promise = Promise(incarnation, self._timeline.now_s, owner, reply.lease, reply.regions)
            self._ready(request, promise)

        event = Lookup(UNKNOWN, owner, chain.namespace, request.tenant, keys, *self.waits)
        request.pending = self.client.ask(session, event, answered)
        self._timeline.count("lookup", self.process.name)

    def _ready(self, request: Request, promise: Promise | None) -> None:
        request.stage = Stage.READY
        request.promise = promise
        self._wake()

    def _release(self, request: Request) -> None:
        """The request needs its promise no more."""
        promise, request.promise = request.promise, None
        if promise is not None:
            self.client.release(promise.incarnation, promise.lease, promise.request)

    # ---- loads -------------------------------------------------------------------------------------------------------

    def _load(self, request: Request, promise: Promise) -> None:
        """Orders all workers to load what was promised."""
        request.stage = Stage.LOADING
        table = request.table
        reports: list[bool] = []
        num_announced = 0

        def report(is_ok: bool) -> None:
            reports.append(is_ok)
            if len(reports) == len(self.workers):
                self._loaded(request, all(reports))
            self._copy_ended(table)

        def announced() -> None:
            nonlocal num_announced
            num_announced += 1
            if num_announced == len(self.workers):
                self._release(request)

        order = LoadOrder(promise, self._chunks(table), report, announced)
        self._order(table, lambda worker: worker.load(order))

    def _loaded(self, request: Request, is_ok: bool) -> None:
        self._timeline.count("load ended" if is_ok else "load failed")
        self._release(request)
        if request.is_aborted:
            request.stage = Stage.ENDED
            return
        request.stage = Stage.RUNNING
        if is_ok:
            request.num_computed = request.num_loaded = (
                len(request.table.blocks) // BLOCKS_PER_CHUNK * CHUNK_SIZE_TOKENS
            )
            request.num_stored_chunks = request.num_computed // CHUNK_SIZE_TOKENS
        self.running.append(request)
        self._wake()

    @staticmethod
    def _chunks(table: Table, first: int = 0, last: int | None = None) -> tuple[tuple[int, ...], ...]:
        """The blocks of chunks ``first`` up to ``last``."""
        last = len(table.blocks) // BLOCKS_PER_CHUNK if last is None else last
        return tuple(
            tuple(table.blocks[chunk * BLOCKS_PER_CHUNK : (chunk + 1) * BLOCKS_PER_CHUNK])
            for chunk in range(first, last)
        )

    def _order(self, table: Table, give: Callable[[Worker], None]) -> None:
        """Gives every worker an order on the table's blocks."""
        for worker, channel in self.workers:
            table.num_copies += 1
            channel.send(lambda worker=worker: give(worker))  # type: ignore[misc]

    # ---- stores ------------------------------------------------------------------------------------------------------

    def _store(self, request: Request) -> None:
        """Orders all workers to store the chunks that are newly complete."""
        first, last = request.num_stored_chunks, request.num_computed // CHUNK_SIZE_TOKENS
        if last <= first:
            return
        request.num_stored_chunks = last
        chain = request.chain
        assert chain is not None
        chain.extend(request.tokens[chain.num_tokens :])
        table = request.table
        order = StoreOrder(
            chain.namespace,
            request.tenant,
            chain.keys[first - 1] if first else None,
            tuple(chain.keys[first:last]),
            self._chunks(table, first, last),
            lambda is_ok: self._copy_ended(table),
        )
        self._order(table, lambda worker: worker.store(order))

    # ---- steps -------------------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        """There may be work."""
        if not self._is_stepping:
            self._is_stepping = True
            self.process.after(0.0, self._begin_step)

    def _begin_step(self) -> None:
        for request in [request for request in self.running if request.is_aborted]:
            self._end(request)
        work = self._schedule()
        if not work:
            self._is_stepping = False
            return
        duration_s = STEP_S + TOKEN_S * sum(count for _, count in work)
        self.process.after(duration_s, lambda: self._end_step(work))

    def _schedule(self) -> list[tuple[Request, int]]:
        """What the next step computes: for each request, how many tokens."""
        budget = STEP_TOKENS_MAX
        work: list[tuple[Request, int]] = []
        self._admit()
        for request in list(self.running):
            count = min(budget, len(request.tokens) - request.num_computed)
            if request in self.running and count and self._grow(request, request.num_computed + count, work):
                work.append((request, count))
                budget -= count
        return work

    def _admit(self) -> None:
        """Takes waiting requests on, in order, while there are blocks."""
        while self.waiting and self.waiting[0].stage is Stage.READY:
            request = self.waiting[0]
            promise = request.promise
            num_chunks = 1 if promise is None else len(promise.regions)
            num_blocks = min(num_chunks * BLOCKS_PER_CHUNK, num_blocks_for(len(request.tokens)))
            if len(self.free) < num_blocks:
                return
            self.waiting.pop(0)
            request.table.blocks = self._take(num_blocks)
            if promise is None:
                request.stage = Stage.RUNNING
                self.running.append(request)
            else:
                self._load(request, promise)

    def _take(self, num_blocks: int) -> list[int]:
        return [self.free.pop() for _ in range(num_blocks)]

    def _grow(self, request: Request, num_tokens: int, work: list[tuple[Request, int]]) -> bool:
        """Gives the request blocks for ``num_tokens`` tokens, preempting younger ones. Returns whether it has them."""
        table = request.table
        missing = num_blocks_for(num_tokens) - len(table.blocks)
        while len(self.free) < missing:
            if len(self.free) + self.num_held >= missing:
                return False  # they come when copies have ended
            victim = self.running[-1]
            if any(victim is other for other, _ in work):
                return False
            self._preempt(victim)
            if victim is request:
                return False
        table.blocks += self._take(max(0, missing))
        return True

    def _preempt(self, request: Request) -> None:
        """Takes a request's blocks away; it begins again, with another lookup."""
        self._timeline.count("preemption")
        self._timeline.note(f"{self.process.name} preempts {request.id}")
        self.running.remove(request)
        self._drop(request.table)
        self.waiting.insert(0, request)
        self._look_up(request)

    def _end_step(self, work: list[tuple[Request, int]]) -> None:
        """The step has ended in every worker: tokens are computed, the next one is sampled."""
        if not all(worker.process.is_running for worker, _ in self.workers):
            self.process.after(0.01, lambda: self._end_step(work))
            return
        self._is_stepping = False
        for request, count in work:
            self._compute(request, count)
            if request.is_aborted:
                self._end(request)
                continue
            if request.num_computed == len(request.tokens):
                request.tokens.append(self._sample(request))
            self._store(request)
            if request.is_complete:
                self._end(request)
        self._wake()

    def _compute(self, request: Request, count: int) -> None:
        """The forward pass: each rank writes the KV of the next ``count`` tokens of its slabs."""
        start = request.num_computed
        packed = pack(request.tokens[start : start + count])
        for worker, _ in self.workers:
            for slab, kv in worker.memory.slabs.items():
                kv.compute(root_of(self.model, request.tenant, slab), request.table.blocks, start, packed)
        request.num_computed = start + count

    def _sample(self, request: Request) -> int:
        """The next token, by the bytes that the request's blocks hold; ranks that repeat a slab must agree."""
        blocks = request.table.blocks[: num_blocks_for(len(request.tokens))]
        slabs: list[bytes] = []
        for slab in range(self.model.num_slabs):
            seen = [
                b"".join(worker.memory.slabs[slab].read(blocks))
                for worker, _ in self.workers
                if slab in worker.memory.slabs
            ]
            slabs.append(seen[0] if all(other == seen[0] for other in seen) else b"".join(seen))
        return next_token(slabs)
