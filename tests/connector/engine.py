"""A small vLLM: its scheduler's order of calls, its worker's order of hooks, and its assertions.

What is modelled is what a connector can get wrong: blocks that are allocated, shared, freed and used again at once;
chunked prefill; preemption and resumption; loads that hold blocks; failed loads under both policies; requests that end
at any moment. Every token that is computed first checks the KV of every token before it.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

from tests.connector.blocks import BLOCK_SIZE, BlockPool, KvMemory, next_state, states_of


class Status(Enum):
    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED_STOPPED = auto()
    FINISHED_ABORTED = auto()
    FINISHED_ERROR = auto()


@dataclass(eq=False)
class EngineRequest:
    """As vLLM's ``Request``, as far as it is read."""

    request_id: str
    all_token_ids: list[int]
    max_new_tokens: int
    salt: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    trace_headers: dict[str, str] | None = None
    answered: dict[str, Any] | None = None
    """``kv_transfer_params`` of its answer."""
    num_prompt_tokens: int = 0
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    table: list[int] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    reads_no_cache: bool = False
    num_local: int = 0
    loads_from: str = ""
    sources: list[str] = field(default_factory=list)
    """Where each prompt token came from when it was there for the first time."""

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.all_token_ids)
        self.states = states_of(self.salt, self.all_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status.name.startswith("FINISHED")

    def note_sources(self, num_scheduled: int) -> None:
        """A step computes these tokens; the ones before are there."""
        for token in range(len(self.sources), min(self.num_computed_tokens, self.num_prompt_tokens)):
            self.sources.append("device" if token < self.num_local else self.loads_from)
        for _ in range(len(self.sources), min(self.num_computed_tokens + num_scheduled, self.num_prompt_tokens)):
            self.sources.append("computed")

    def append(self, token: int) -> None:
        self.all_token_ids.append(token)
        self.states.append(next_state(self.states[-1] if self.states else self.salt, token))


@dataclass
class EngineOptions:
    """Sizes and behaviour of an engine."""

    num_blocks: int = 40
    num_ranks: int = 1
    step_tokens_max: int = 16
    running_max: int = 4
    recomputes_failed_loads: bool = True
    is_026: bool = False


@dataclass
class Pull:
    """A load of the other connector, which brings KV from a prefill engine."""

    request: EngineRequest
    blocks: list[int]
    start: int
    end: int
    steps_left: int
    fails: bool


class Engine:
    """One engine with its connector, inside a MultiConnector[other, ours].

    Args:
        scheduler: ours, on the scheduler's side.
        workers: ours, one a rank.
    """

    def __init__(
        self,
        options: EngineOptions,
        scheduler: Any,
        workers: list[Any],
        memories: list[KvMemory],
        chance: random.Random,
    ) -> None:
        self.options = options
        self.scheduler = scheduler
        self.workers = workers
        self.memories = memories
        self.chance = chance
        self.pool = BlockPool(options.num_blocks)
        self.requests: dict[str, EngineRequest] = {}
        self.waiting: deque[EngineRequest] = deque()
        self.holding: deque[EngineRequest] = deque()
        self.running: list[EngineRequest] = []
        self.loaded: set[str] = set()
        self.failed: set[str] = set()
        self.preempted: set[str] = set()
        self.pulls: list[Pull] = []
        self.pull_failure_chance = 0.0
        self.outputs: dict[str, list[int]] = {}
        self.num_loads = 0
        self.num_failed_loads = 0
        self.loads_of: dict[str, int] = {}
        self._remaining: dict[tuple[str, str], int] = {}

    # ---- requests --------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest) -> None:
        assert request.request_id not in self.requests
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.on_new_request(request)

    def abort(self, request_id: str) -> None:
        self._end_now(request_id, Status.FINISHED_ABORTED)

    def _end_now(self, request_id: str, status: Status) -> None:
        request = self.requests.get(request_id)
        if request is None or request.is_finished:
            return
        for queue in (self.waiting, self.holding, self.running):
            if request in queue:
                queue.remove(request)
        is_delayed = False
        if request.status is Status.WAITING_FOR_REMOTE_KVS:
            is_delayed = request_id not in self.loaded
            self.loaded.discard(request_id)
            self.failed.discard(request_id)
        self._finish(request, status, is_delayed=is_delayed)

    def _finish(self, request: EngineRequest, status: Status, *, is_delayed: bool = False) -> None:
        request.status = status
        computed = request.table[: -(-request.num_computed_tokens // BLOCK_SIZE)]
        is_held_back, params = self.scheduler.request_finished_all_groups(request, (computed,))
        request.answered = params
        self.outputs[request.request_id] = request.all_token_ids[request.num_prompt_tokens :]
        if not (is_delayed or is_held_back):
            self._free_finished(request)

    def _free_finished(self, request: EngineRequest) -> None:
        assert request.is_finished
        self._free_table(request)
        del self.requests[request.request_id]

    def _free_table(self, request: EngineRequest) -> None:
        self.pool.give_back(request.table)
        request.table = []

    def _preempt(self, request: EngineRequest) -> None:
        self.running.remove(request)
        self._free_table(request)
        request.status = Status.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.waiting.appendleft(request)
        self.preempted.add(request.request_id)

    def reset_prefix_cache(self) -> None:
        """As vLLM's, with ``reset_running_requests``: all running requests are preempted between two steps."""
        for request in reversed(list(self.running)):
            self._preempt(request)
        self.pool.reset()

    # ---- a step ----------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def step(self) -> None:
        output = self._schedule()
        reports = [self._execute(rank, output) for rank in range(self.options.num_ranks)]
        self._update(output, self._merge(reports))

    def _allocate(self, request: EngineRequest, num_tokens: int, hit: list[int], *, reserved: int = 0) -> bool:
        """Blocks for the first ``num_tokens`` tokens, ``hit`` among them."""
        needed = -(-num_tokens // BLOCK_SIZE) - len(request.table) - len(hit)
        idle_hits = sum(self.pool.references[block] == 0 for block in hit)
        if needed + idle_hits + reserved > len(self.pool.free):
            return False
        self.pool.touch(hit)
        request.table += hit
        request.table += self.pool.take(max(needed, 0))
        return True

    def _cache_blocks(self, request: EngineRequest, num_tokens: int) -> None:
        for index in range(min(num_tokens, request.num_tokens) // BLOCK_SIZE):
            self.pool.cache(request.table[index], request.states[(index + 1) * BLOCK_SIZE - 1])

    def _reserved_blocks(self) -> int:
        """What requests in prefill, and those that load, still need."""
        busy = [one for one in self.requests.values() if one.table and not one.is_finished]
        return sum(max(0, -(-(one.num_tokens + 1) // BLOCK_SIZE) - len(one.table)) for one in busy)

    def _schedule(self) -> SimpleNamespace:
        plan = SimpleNamespace(new=[], resumed=[], running=[], scheduled={}, computed={}, added={})
        budget = self.options.step_tokens_max
        has_preempted = False
        for request in list(self.running):
            if request not in self.running or budget == 0:
                continue
            number = min(request.num_tokens - request.num_computed_tokens, budget)
            assert number > 0
            before = len(request.table)
            while not self._allocate(request, request.num_computed_tokens + number, []):
                victim = self.running[-1]
                has_preempted = True
                self._preempt(victim)
                if plan.scheduled.pop(victim.request_id, None) is not None:
                    plan.running.remove(victim)
                if victim is request:
                    break
            if request not in self.running:
                break
            self._cache_blocks(request, request.num_computed_tokens + number)
            plan.running.append(request)
            plan.added[request.request_id] = request.table[before:]
            plan.scheduled[request.request_id] = number
            budget -= number
        if not has_preempted:
            self._schedule_waiting(plan, budget)
        return self._output(plan)

    def _schedule_waiting(self, plan: SimpleNamespace, budget: int) -> None:
        skipped: deque[EngineRequest] = deque()
        skipped_holding: deque[EngineRequest] = deque()
        while budget > 0 and len(self.running) < self.options.running_max:
            queue = self.holding or self.waiting
            if not queue:
                break
            request = queue[0]
            verdict, used = self._admit(request, plan, budget)
            if verdict == "stop":
                break
            queue.popleft()
            if verdict == "skip":
                (skipped_holding if request.table else skipped).append(request)
                continue
            self.running.append(request)
            budget -= used
        self.holding.extendleft(reversed(skipped_holding))
        self.waiting.extendleft(reversed(skipped))

    def _admit(self, request: EngineRequest, plan: SimpleNamespace, budget: int) -> tuple[str, int]:
        if request.status is Status.WAITING_FOR_REMOTE_KVS and not self._promote(request):
            return "skip", 0
        hit: list[int] = []
        num_external, is_async = 0, False
        num_computed = request.num_computed_tokens
        if num_computed == 0:
            hit = [] if request.reads_no_cache else self.pool.find(request.states, request.num_tokens - 1)
            request.num_local = len(hit) * BLOCK_SIZE
            found, is_async = self._ask(request, len(hit) * BLOCK_SIZE)
            if request.reads_no_cache:
                found, is_async = 0, False
            if found is None:
                return "skip", 0
            num_external = found
            num_computed = len(hit) * BLOCK_SIZE + num_external
            assert num_computed <= request.num_tokens
        if is_async:
            assert num_external > 0
            later = -(-(request.num_tokens + 1) // BLOCK_SIZE) - -(-num_computed // BLOCK_SIZE)
            if not self._allocate(request, num_computed, hit, reserved=self._reserved_blocks() + later):
                return "stop", 0
            self._after_alloc(request, num_external)
            request.status = Status.WAITING_FOR_REMOTE_KVS
            request.num_computed_tokens = num_computed
            return "skip", 0
        number = min(request.num_tokens - num_computed, budget)
        assert number > 0
        if not self._allocate(request, num_computed + number, hit):
            return "stop", 0
        self._after_alloc(request, 0)
        self._cache_blocks(request, num_computed + number)
        (plan.resumed if request.status is Status.PREEMPTED else plan.new).append(request)
        request.status = Status.RUNNING
        request.num_computed_tokens = num_computed
        plan.scheduled[request.request_id] = number
        return "run", number

    def _promote(self, request: EngineRequest) -> bool:
        if request.request_id not in self.loaded:
            return False
        self.loaded.remove(request.request_id)
        if request.request_id in self.failed:
            self.failed.remove(request.request_id)
            if request.num_computed_tokens:
                self._cache_blocks(request, request.num_computed_tokens)
            else:
                self._free_table(request)
        else:
            self._cache_blocks(request, request.num_computed_tokens)
        if request.num_computed_tokens == request.num_tokens:
            request.num_computed_tokens -= 1
        request.status = Status.PREEMPTED if request.num_preemptions else Status.WAITING
        return True

    def _ask(self, request: EngineRequest, num_local: int) -> tuple[int | None, bool]:
        """As ``MultiConnector``: every child is asked, the first with tokens loads."""
        params = request.kv_transfer_params
        other = request.num_tokens - num_local if params and params.get("do_remote_prefill") else 0
        ours, is_async = self.scheduler.get_num_new_matched_tokens(request, num_local)
        if ours is None:
            return None, False
        assert is_async == (ours > 0)
        self._is_other = other > 0
        return (other, True) if other else (ours, is_async)

    def _after_alloc(self, request: EngineRequest, num_external: int) -> None:
        blocks = SimpleNamespace(get_block_ids=lambda: (list(request.table),))
        is_other = num_external > 0 and self._is_other
        if num_external:
            request.loads_from = "remote_prefill" if is_other else "l1"
        params = request.kv_transfer_params
        if params and params.get("do_remote_prefill"):
            params["do_remote_prefill"] = False
        if is_other:
            end = request.num_tokens
            fails = self.chance.random() < self.pull_failure_chance
            steps = self.chance.randint(1, 3)
            self.pulls.append(Pull(request, list(request.table), end - num_external, end, steps, fails))
        elif num_external:
            self.num_loads += 1
            self.loads_of[request.request_id] = self.loads_of.get(request.request_id, 0) + 1
        self.scheduler.update_state_after_alloc(request, blocks, 0 if is_other else num_external)

    def _output(self, plan: SimpleNamespace) -> SimpleNamespace:
        cached = [*plan.running, *plan.resumed]
        resumed = {request.request_id for request in plan.resumed}
        added: list[tuple[list[int]] | None] = []
        for request in cached:
            blocks = request.table if request in plan.resumed else plan.added[request.request_id]
            added.append((list(blocks),) if blocks else None)
        output = SimpleNamespace(
            num_scheduled_tokens=plan.scheduled,
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=one.request_id, block_ids=(list(one.table),), num_computed_tokens=one.num_computed_tokens
                )
                for one in plan.new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one in cached],
                new_block_ids=added,
                resumed_req_ids=resumed,
                num_computed_tokens=[one.num_computed_tokens for one in cached],
            ),
            preempted_req_ids=self.preempted,
        )
        output.metadata = self.scheduler.build_connector_meta(output)
        output.fresh, self.pool.fresh = self.pool.fresh, []
        output.work = [
            (self.requests[name], list(self.requests[name].table), self.requests[name].num_computed_tokens, number)
            for name, number in plan.scheduled.items()
        ]
        for name, number in plan.scheduled.items():
            self.requests[name].note_sources(number)
            self.requests[name].num_computed_tokens += number
        self.preempted = set()
        return output

    # ---- the worker ------------------------------------------------------------------------------------------------

    def _execute(self, rank: int, output: SimpleNamespace) -> SimpleNamespace:
        worker, memory = self.workers[rank], self.memories[rank]
        metadata = pickle.loads(pickle.dumps(output.metadata))
        worker.handle_preemptions(metadata)
        memory.spoil(output.fresh)
        worker.bind_connector_metadata(metadata)
        if self.options.is_026:
            worker.start_load_kv(None)
        for request, table, computed, number in output.work:
            memory.check(table, request.states, computed, f"{request.request_id} reads")
            memory.write(table, request.states, computed, computed + number)
        if not self.options.is_026:
            worker.start_load_kv(None, scheduler_output=output)
        if output.work or not self.options.is_026:
            worker.wait_for_save()
        sent, received = worker.get_finished(set())
        report = SimpleNamespace(sent=sent or set(), received=received or set())
        report.invalid = worker.get_block_ids_with_load_errors()
        report.meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        return report

    def _merge(self, reports: list[SimpleNamespace]) -> SimpleNamespace:
        """As ``KVOutputAggregator``: a request is reported when every rank has reported it."""
        merged = SimpleNamespace(finished_sending=set(), finished_recving=set(), invalid_block_ids=set())
        merged.kv_connector_worker_meta = None
        for report in reports:
            merged.invalid_block_ids |= report.invalid
            for kind, names, to in (
                ("sent", report.sent, merged.finished_sending),
                ("received", report.received, merged.finished_recving),
            ):
                for name in names:
                    left = self._remaining.pop((kind, name), len(reports)) - 1
                    if left:
                        self._remaining[kind, name] = left
                    else:
                        to.add(name)
            if merged.kv_connector_worker_meta is None:
                merged.kv_connector_worker_meta = report.meta
            elif report.meta is not None:
                merged.kv_connector_worker_meta = merged.kv_connector_worker_meta.aggregate(report.meta)
        for pull in list(self.pulls):
            pull.steps_left -= 1
            if pull.steps_left <= 0:
                self._end_pull(pull, merged)
        return merged

    def _end_pull(self, pull: Pull, merged: SimpleNamespace) -> None:
        self.pulls.remove(pull)
        merged.finished_recving.add(pull.request.request_id)
        if pull.fails:
            merged.invalid_block_ids |= set(pull.blocks[pull.start // BLOCK_SIZE :])
            return
        for memory in self.memories:
            memory.write(pull.blocks, pull.request.states, pull.start, pull.end)

    # ---- after the step --------------------------------------------------------------------------------------------

    def _update(self, output: SimpleNamespace, merged: SimpleNamespace) -> None:
        lost = self._lose_invalid(merged.invalid_block_ids)
        for request, _table, _computed, _number in output.work:
            if request.is_finished or request.status is not Status.RUNNING:
                continue
            if request.num_computed_tokens == request.num_tokens:
                request.append(request.states[-1] % 7)
                if request.num_tokens >= request.num_prompt_tokens + request.max_new_tokens:
                    self.running.remove(request)
                    self._finish(request, Status.FINISHED_STOPPED)
        if not self.options.recomputes_failed_loads:
            for name in lost:
                self._end_now(name, Status.FINISHED_ERROR)
        self.scheduler.update_connector_output(merged)
        for name in merged.finished_recving:
            assert name in self.requests, "a load is reported of a request that is not known"
            request = self.requests[name]
            if request.status is Status.WAITING_FOR_REMOTE_KVS:
                self.loaded.add(name)
            else:
                assert request.is_finished, "a load is reported of a request that does not wait for one"
                self._free_finished(request)
        for name in merged.finished_sending:
            assert name in self.requests, "a store is reported of a request that is not known"
            self._free_finished(self.requests[name])

    def _lose_invalid(self, invalid: set[int]) -> set[str]:
        lost: set[str] = set()
        for request in self.running:
            assert not invalid & set(request.table), "blocks of a running request are reported as lost"
        for request in self.holding:
            if request.status is not Status.WAITING_FOR_REMOTE_KVS:
                continue
            for index, block in enumerate(request.table[: -(-request.num_computed_tokens // BLOCK_SIZE)]):
                if block in invalid:
                    request.num_computed_tokens = index * BLOCK_SIZE
                    lost.add(request.request_id)
                    break
        self.num_failed_loads += len(lost)
        if self.options.recomputes_failed_loads:
            self.failed |= lost
        return lost
