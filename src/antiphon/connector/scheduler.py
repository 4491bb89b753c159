"""The scheduler side of the connector: what to ask, what to promise, what to load and store, what to report.

It runs inside the engine's scheduling loop: a lookup is sent when a request comes, and an answer is used when the
scheduler asks. It waits for none but ``LOOKUP_WAIT_S`` once, as a request without its answer loses a whole step. It
imports no vLLM; ``vllm_connector`` calls it from vLLM's hooks.

Always true:

- Only leased chunks of a connected server are promised, and only once every worker's gate has passed.
- A lease is given back once: when its load has ended, or when nothing will be loaded. The client owes it from there on.
- A load is planned with a time at which its lease was held for certain: the session that leased it was open then.
- Requests that are not scheduled hold promises up to a number: beyond it a lookup waits until the scheduler asks.
- Chunks are offered only under the same conditions: what a gate has not proven is not stored either.
- Blocks of a finished request are held back while a store of it runs; a preempted request is named to the workers
  before its blocks are used again, and its stores are waited for no more. A request that is being loaded is held back
  by vLLM until the load is reported, and by nothing else: vLLM frees it at the first report.
- A request whose load has failed is not promised anything again, and nothing is promised to others until the workers
  have been found well: they are asked again.
- Once a worker is out of service nothing more is promised or offered. Its loads that were promised before are done.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from antiphon.connector.compat import RequestFields, is_remote_prefill, traceparent_of
from antiphon.connector.gate_watch import GateWatch
from antiphon.connector.handing_over import answer_timeout_s, handoff_params
from antiphon.connector.onboarding import PrefillRate, is_late
from antiphon.connector.options import SchedulerOptions, SessionSource
from antiphon.connector.plan import LoadPlan, StepPlan, StorePlan, WorkerNews
from antiphon.connector.reporting import report_of
from antiphon.connector.requests import LookupCall, Pins, Promise, RequestIdentity, TrackedRequest
from antiphon.core.chunks import ChunkChain
from antiphon.core.errors import AntiphonError
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol import cache as calls
from antiphon.protocol.cache_handoff import read_key

log = logging.getLogger("antiphon.connector")

LOOKUP_WAIT_S = 0.001
"""How long after a lookup was sent its answer is waited for. It takes a tenth to a half of that from a server that is
well; a step, which is lost without it, takes a millisecond or two when the engine idles and ten when it is busy."""
LOOKUP_FRESH_S = 1.0
"""A miss or a capped answer older than this when the scheduler asks is looked up once more: the request has queued."""


class SchedulerSide:
    """The scheduler side of one engine.

    Args:
        options: bounds and names.
        client: the connection to the cache server.
        identify: what a request's KV means, or the reason why reuse is bypassed for it.
        now_s: the monotonic clock.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        client: SessionSource,
        identify: Callable[[RequestFields], RequestIdentity | str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._client = client
        self._identify = identify
        self._now_s = now_s
        self._requests: dict[str, TrackedRequest] = {}
        self._jobs: dict[int, tuple[str, int]] = {}
        self._job_numbers = itertools.count(1)
        self._plan = StepPlan()
        self._gate = GateWatch(options.num_ranks, options.lookup_timeout_s, now_s)
        self._pins = Pins()
        self._rate = PrefillRate(is_async=options.is_async)
        self._quiet = QuietLog(log, now_s)
        self._sick: str | None = None  # why a worker is out of service

    # ---- questions of the scheduler --------------------------------------------------------------------------------

    def new_request(self, request: RequestFields) -> None:
        """A request has come: its lookup is sent, so that the answer is there when it is scheduled."""
        tracked = self._track(request)
        if self._may_load(tracked) and self._pins.has_room_ahead:
            self._send_lookup(tracked)
            self._pins.note(tracked)

    def num_matched_tokens(self, request: RequestFields, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond ``num_computed_tokens`` that can be loaded, and whether the load is asynchronous.

        Returns:
            (None, False) while an answer may still come; (0, False) for a miss.
        """
        tracked = self._track(request)
        # An admission begins: what an earlier one left (a preemption, a load that failed) is no longer there. It is not
        # done when the preemption is told of, since that can be after the request has new blocks.
        tracked.local_tokens = num_computed_tokens
        tracked.is_from_l1 = False
        tracked.fetched_tokens = (0, 0)
        tracked.num_stored_chunks = 0
        if not self._may_load(tracked) or num_computed_tokens >= self._loadable_tokens(request):
            return 0, False  # what was found is given back when the request has its blocks
        tracked.is_asked = True
        promise = self._promise_of(tracked)
        self._pins.note(tracked)
        if promise is None:
            return None, False
        num_tokens = min(promise.num_tokens, request.num_tokens) - num_computed_tokens
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def allocated(self, request: RequestFields, block_ids: list[int], num_external_tokens: int) -> LoadPlan | None:
        """The request has its blocks; ``num_external_tokens`` of them are to be loaded from here.

        Returns:
            The load, which the plan of this step has too; None where nothing is loaded.
        """
        tracked = self._track(request)
        tracked.block_ids = list(block_ids)
        promise, tracked.promise = tracked.promise, None
        tracked.no_room_since_s = None
        self._drop_lookup(tracked)
        if num_external_tokens <= 0:
            if promise is not None and not tracked.loading:
                self._release(promise, request.request_id)
            elif promise is not None:
                tracked.promise = promise  # the second call after a load: it ends with the load
            self._pins.note(tracked)
            return None
        assert promise is not None and promise.lease is not None, "the scheduler loads what was not promised"
        assert promise.session is not None
        size, block_size = self._options.chunk_size_tokens, self._options.block_size_tokens
        start, end = tracked.local_tokens, tracked.local_tokens + num_external_tokens
        first, last = start // size, -(-end // size)
        to_fill = tuple(block_ids[start // block_size : -(-end // block_size)])
        load = LoadPlan(
            request=request.request_id,
            incarnation=promise.session.incarnation,
            regions=promise.regions[first:last],
            skip_blocks=(start - first * size) // block_size,
            block_ids=to_fill,
            promised_at_s=promise.held_at_s,
        )
        self._plan.loads.append(load)
        tracked.promise = promise
        tracked.loading = frozenset(to_fill)
        self._pins.note(tracked)
        tracked.is_from_l1 = tracked.handed_over is None
        tracked.fetched_tokens = promise.num_fetched_tokens(start, end, size)
        tracked.num_stored_chunks = max(tracked.num_stored_chunks, last)
        return load

    # ---- the steps -------------------------------------------------------------------------------------------------

    def scheduled(self, request_id: str, block_ids: list[int] | None, num_computed: int, num_scheduled: int) -> None:
        """A request is part of this step.

        Args:
            block_ids: its whole block table where it is new or resumed; None where ``more_blocks`` has told it.
            num_computed: tokens computed before this step.
            num_scheduled: tokens that this step computes.
        """
        self._rate.scheduled(num_scheduled)
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        if block_ids is not None:
            tracked.block_ids = list(block_ids)
        tracked.sources.step(
            num_computed,
            num_scheduled,
            local_tokens=tracked.local_tokens,
            is_from_l1=tracked.is_from_l1,
            fetched_tokens=tracked.fetched_tokens,
            prompt=tracked.request.num_prompt_tokens,
        )
        self._plan_stores(tracked, num_computed + num_scheduled)

    def more_blocks(self, request_id: str, block_ids: Iterable[int]) -> None:
        """A running request got further blocks."""
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.block_ids.extend(block_ids)

    def preempted(self, request_id: str) -> None:
        """A request lost its blocks; they may be used again in this step."""
        tracked = self._requests.get(request_id)
        if tracked is None:
            return
        tracked.sources.num_preemptions += 1
        tracked.jobs.clear()  # they end before the step and read no block afterwards: nothing is held back for them
        self._plan.preempted.append(request_id)
        self._forget_if_done(tracked)

    def take_plan(self) -> StepPlan:
        """The plan of this step; the next one is begun."""
        plan, self._plan = self._plan, StepPlan()
        session = self._client.session
        plan.incarnation = session.incarnation if session is not None else None
        plan.made_at_s = self._now_s()
        self._rate.step(plan.made_at_s)
        return plan

    def handed_over(self, request: RequestFields) -> dict[str, Any] | None:
        """What a prefill that is about to be ``finished`` tells the decode engine; see ``handing_over``."""
        tracked = self._requests.get(request.request_id)
        session, size = self._client.session, self._options.chunk_size_tokens
        return None if tracked is None or self._sick is not None else handoff_params(tracked, session, size)

    def finished(self, request: RequestFields, is_aborted: bool) -> bool:
        """vLLM is done with the request. Returns whether its blocks must be held back for running stores."""
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            return False
        tracked.is_finished = True
        self._report(tracked, is_aborted)
        self._drop_lookup(tracked)
        if tracked.promise is not None and not tracked.loading:
            self._release(tracked.promise, request.request_id)
            tracked.promise = None
        self._pins.note(tracked)
        is_held_back = bool(tracked.jobs) and not tracked.loading
        self._forget_if_done(tracked)
        return is_held_back

    def worker_news(self, news: WorkerNews | None, received: Iterable[str], invalid_blocks: Iterable[int]) -> None:
        """What the workers have done.

        Args:
            received: requests whose loads ended, ours and those of other connectors.
            invalid_blocks: blocks whose load failed.
        """
        invalid = frozenset(invalid_blocks)
        if invalid:
            for tracked in self._requests.values():
                if tracked.loading & invalid:
                    self._gate.doubt()
                    tracked.no_load = True
                    tracked.num_stored_chunks = 0  # what is computed instead is offered
        for request_id in received:
            loaded = self._requests.get(request_id)
            if loaded is None or not loaded.loading:
                continue
            loaded.loading = frozenset()
            if loaded.promise is not None:
                self._release(loaded.promise, request_id)
                loaded.promise = None
            self._forget_if_done(loaded)
        if news is None:
            return
        for job, num_ranks in news.stored.items():
            self._job_ended(job, num_ranks)
        if news.out_of_service is not None and self._sick is None:
            self._sick = news.out_of_service
            log.error("reuse is off until this engine is restarted, a worker is out of service: %s", self._sick)

    def clear(self) -> bool:
        """Forget this model's chunks on the server. Returns whether that was done, or there is no server."""
        session = self._client.session
        if session is None:
            return True
        try:
            session.call(calls.Clear(model=self._options.model))
        except AntiphonError as error:
            log.warning("the cache server did not clear %s: %s", self._options.model, error)
            return False
        return True

    @property
    def num_tracked(self) -> int:
        """Requests that are known: zero when the engine is idle."""
        return len(self._requests)

    # ---- parts -----------------------------------------------------------------------------------------------------

    def _track(self, request: RequestFields) -> TrackedRequest:
        tracked = self._requests.get(request.request_id)
        if tracked is None:
            identity = self._identity_of(request)
            if isinstance(identity, str):
                log.debug("request %s goes without reuse: %s", request.request_id, identity)
                tracked = TrackedRequest(request, None, None)
            else:
                chain = ChunkChain(identity.namespace, self._options.chunk_size_tokens, identity.items)
                handed_over = read_key(request.kv_transfer_params)
                tracked = TrackedRequest(request, identity, chain, handed_over=handed_over)
            self._requests[request.request_id] = tracked
        return tracked

    def _loadable_tokens(self, request: RequestFields) -> int:
        """Tokens of whole chunks: no answer can promise more."""
        size = self._options.chunk_size_tokens
        return request.num_tokens // size * size

    def _identity_of(self, request: RequestFields) -> RequestIdentity | str:
        try:
            return self._identify(request)
        except Exception as error:  # supervised: one odd request goes without reuse, the others keep it
            message = f"what the KV of request {request.request_id} means cannot be told"
            self._quiet.error(f"identity: {type(error).__name__}", message, error)
            return f"what its KV means cannot be told: {error!r}"

    def _may_load(self, tracked: TrackedRequest) -> bool:
        """Whether a lookup makes sense: not where another connector will load, or a load has failed before."""
        return (
            self._options.can_load
            and self._sick is None
            and tracked.chain is not None
            and not tracked.no_load
            and not tracked.loading
            and tracked.request.num_tokens >= self._options.chunk_size_tokens
            and not is_remote_prefill(tracked.request)
        )

    def _send_lookup(self, tracked: TrackedRequest) -> None:
        session = self._client.session
        if session is None or self._gate_state() != "passed":
            return
        num_keys = tracked.extend_chain(tracked.request.num_tokens)
        assert tracked.chain is not None and tracked.identity is not None
        identity = tracked.identity
        keys = b"".join(tracked.chain.keys[:num_keys])
        names = (tracked.request.request_id, identity.namespace, identity.tenant)
        waits = (self._options.onboard_max_s, self._rate.tokens_per_s)
        body = calls.Lookup(*names, keys, *waits, tracked.handed_over, traceparent_of(tracked.request))
        tracked.lookup = LookupCall(session, session.submit(body), self._now_s())

    def _promise_of(self, tracked: TrackedRequest) -> Promise | None:
        """What can be promised; None while the answer may still come. A miss is an empty promise."""
        if self._gate.is_doubted and (state := self._gate_state()) != "passed":
            return None if state == "asked" else self._miss()
        if tracked.promise is None and tracked.lookup is not None and not self._take_answer(tracked):
            return None
        promise = tracked.promise
        if promise is not None:
            if (good := self._good(promise)) is not None:
                tracked.promise = good
                return good
            self._release(promise, tracked.request.request_id)
            tracked.promise = None
        if not self._pins.has_room_for(tracked):
            return self._without_room(tracked)
        tracked.no_room_since_s = None
        self._send_lookup(tracked)
        if tracked.lookup is None:
            return None if self._gate_state() == "asked" else self._miss()
        if not self._take_answer(tracked):
            return None
        assert tracked.promise is not None
        good = self._good(tracked.promise)
        if good is None:  # its session has ended in between
            self._release(tracked.promise, tracked.request.request_id)
        tracked.promise = good or self._miss()
        return tracked.promise

    def _gate_state(self) -> Literal["passed", "asked", "closed"]:
        session = self._client.session
        return self._gate.state(session) if session is not None and session.is_responsive else "closed"

    def _good(self, promise: Promise) -> Promise | None:
        """The promise, if it can be used when the scheduler asks: its connection is there, a poor answer is not old.

        An open session has not been closed by this process, so that the server holds its lease.
        """
        now_s = self._now_s()  # before the session is looked at
        if promise.session is not None and not promise.session.is_open:
            return None  # the server is gone, or only the connection is
        is_poor = promise.lease is None or promise.is_capped
        fresh_s = max(LOOKUP_FRESH_S, self._options.lookup_timeout_s)
        if is_poor and now_s - promise.found_s >= fresh_s:
            return None
        return replace(promise, held_at_s=now_s)

    def _without_room(self, tracked: TrackedRequest) -> Promise | None:
        """Too many others hold promises: it waits for them to be scheduled, as long as for an answer."""
        now_s = self._now_s()
        if tracked.no_room_since_s is None:
            tracked.no_room_since_s = now_s
        return None if now_s - tracked.no_room_since_s < self._options.lookup_timeout_s else self._miss()

    def _take_answer(self, tracked: TrackedRequest) -> bool:
        """Makes the answer of the lookup the promise. Returns False while it may still come."""
        assert tracked.lookup is not None
        tracked.promise = self._answer(tracked, tracked.lookup)
        if tracked.promise is None:
            return False
        tracked.lookup = None
        return True

    def _answer(self, tracked: TrackedRequest, lookup: LookupCall) -> Promise | None:
        now_s = self._now_s()
        if not lookup.pending.is_done and not lookup.pending.wait(max(0.0, lookup.sent_s + LOOKUP_WAIT_S - now_s)):
            is_overdue = is_late(lookup, now_s, answer_timeout_s(tracked, self._options.lookup_timeout_s))
            is_hung = tracked.handed_over is None and not lookup.session.is_responsive
            if lookup.session.is_open and not is_hung and not is_overdue:
                return None
            lookup.pending.abandon()
            return self._miss()
        try:
            found = lookup.pending.result()
        except AntiphonError as error:
            log.debug("lookup of %s: %s", tracked.request.request_id, error)
            return self._miss()
        assert isinstance(found, calls.Found)
        is_capped = found.num_chunks_capped > 0
        asked_s = lookup.sent_s if lookup.pending.onboarding is None else now_s
        promise = Promise(lookup.session, found.lease, found.regions, found.num_tokens, asked_s, is_capped)
        return promise.with_fetched(found.fetched)

    def _drop_lookup(self, tracked: TrackedRequest) -> None:
        """The answer is not wanted. One that is here is given back like a promise, since its session may have ended."""
        lookup, tracked.lookup = tracked.lookup, None
        if lookup is None:
            return
        if not lookup.pending.is_done:  # nobody waits for what is not wanted
            lookup.pending.abandon()
            return
        answer = self._answer(tracked, lookup)
        assert answer is not None, "a call that is done has an answer, or is a miss"
        self._release(answer, tracked.request.request_id)

    def _miss(self) -> Promise:
        return Promise(None, None, (), 0, self._now_s())

    def _release(self, promise: Promise, request_id: str) -> None:
        if promise.lease is not None:
            assert promise.session is not None
            self._client.release(promise.session.incarnation, request_id, promise.lease)

    def _plan_stores(self, tracked: TrackedRequest, num_tokens: int) -> None:
        """Plans to offer the chunks that this step completes; tokens that may yet be rejected are not stored."""
        if tracked.chain is None or not self._options.can_store or self._sick is not None:
            return
        if self._gate_state() != "passed":
            return  # before anything is hashed
        if len(self._jobs) >= self._options.store_jobs_max:
            return  # the next step offers them
        num_chunks = tracked.extend_chain(min(num_tokens, tracked.request.num_tokens))
        first = tracked.num_stored_chunks
        blocks_per_chunk = self._options.chunk_size_tokens // self._options.block_size_tokens
        num_chunks = min(num_chunks, len(tracked.block_ids) // blocks_per_chunk)
        if num_chunks <= first:
            return
        assert tracked.identity is not None
        job = next(self._job_numbers)
        keys = tracked.chain.keys
        self._plan.stores.append(
            StorePlan(
                job=job,
                request=tracked.request.request_id,
                namespace=tracked.identity.namespace,
                tenant=tracked.identity.tenant,
                parent=keys[first - 1] if first else None,
                keys=tuple(keys[first:num_chunks]),
                block_ids=tuple(tracked.block_ids[first * blocks_per_chunk : num_chunks * blocks_per_chunk]),
                traceparent=traceparent_of(tracked.request),
            )
        )
        self._jobs[job] = (tracked.request.request_id, self._options.num_ranks)
        tracked.jobs.add(job)
        tracked.num_stored_chunks = num_chunks

    def _job_ended(self, job: int, num_ranks: int) -> None:
        known = self._jobs.get(job)
        if known is None:
            return
        request_id, left = known[0], known[1] - num_ranks
        if left > 0:
            self._jobs[job] = (request_id, left)
            return
        del self._jobs[job]
        tracked = self._requests.get(request_id)
        if tracked is not None:
            tracked.jobs.discard(job)
            self._forget_if_done(tracked)

    def _forget_if_done(self, tracked: TrackedRequest) -> None:
        if tracked.is_finished and not tracked.loading and not tracked.jobs:
            self._requests.pop(tracked.request.request_id, None)

    def _report(self, tracked: TrackedRequest, is_aborted: bool) -> None:
        session, sources = self._client.session, tracked.sources
        if session is None or sources.num_known == 0:
            return
        has_ended_early = is_aborted and sources.num_known < tracked.request.num_prompt_tokens
        session.submit(report_of(tracked, self._options, "aborted" if has_ended_early else "finished"))
