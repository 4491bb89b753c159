"""Spans of a cache server: lookups, what tiers and peers were asked for on their behalf, and stores.

Owns which lookup a job of a tier is for, and which store a region is written for. A lookup that brings a
``traceparent`` that is sampled has a span, which ends with its final answer; the jobs that begin meanwhile for chunks
that it waits for are parts of it. A chunk that several lookups wait for is fetched once: it is part of the one that
asked for it last.

Always true: what is remembered of a lookup or a store goes when it is over; of one that is not traced nothing is. A
mistake here costs the trace, and never the answer or the end of a job. Used on the cache's thread, but for
``begin_part`` and ``record`` of a job, which are called where it runs.
"""

from __future__ import annotations

import functools
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Concatenate, Final, ParamSpec, TypeVar

from antiphon.cache.events import TierDone
from antiphon.cache.tier_jobs import JobKind, Outcome, TierJob
from antiphon.cache.tier_key import TierKey
from antiphon.core.quiet_log import QuietLog
from antiphon.observe.trace_context import SpanContext, parse_traceparent
from antiphon.observe.tracing import ActiveSpan, Span, Tracing
from antiphon.protocol import cache as wire

log = logging.getLogger("antiphon.cache_server")

PARTS_MAX: Final = 32
"""Spans of chunks that are read for one lookup: a long prompt has hundreds, of which the first say enough."""
QUESTIONS_MAX: Final = 32
"""Questions which chunks are there that may become spans of one lookup. Most find nothing, and become none, but for
those of which the coordinator has a span."""
REGIONS_MAX: Final = 65_536
"""Regions that are being written for traced requests; stores beyond them leave no span."""

_JOB_NAMES: Final = {
    ("tier", JobKind.FETCH): "tier.get",
    ("tier", JobKind.ASK): "tier.ask",
    ("peer", JobKind.FETCH): "peer.pull",
    ("peer", JobKind.ASK): "peer.locate",
}


Part = tuple[ActiveSpan, SpanContext, float]
"""A job that is a part of a lookup: its span, the lookup's, and when it began, in seconds since 1970."""

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S", bound="_Supervised")


class _Supervised:
    """What may fail, and then says so in the log alone."""

    def __init__(self) -> None:
        self.quiet = QuietLog(log)


def _costs_the_trace(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T | None]:
    """A bug in ``method`` costs the trace, and not what is traced: None is returned."""

    @functools.wraps(method)
    def supervised(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T | None:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # supervised: a bug costs the trace, and not the call or the job that it tells of
            self.quiet.error("trace", f"a trace is given up after an internal error in {method.__name__}", error)
            return None

    return supervised


@dataclass(slots=True, eq=False)
class LookupTrace:
    """One lookup that is traced.

    Args:
        body: the call.
        context: of its span.
        parent: of the request that it is for.
        began_s: seconds since 1970.
        keys: of the chunks that it waits for.
        num_parts: chunks that were begun to be read for it.
        num_questions: jobs that asked which chunks are there.
    """

    body: wire.Lookup
    context: SpanContext
    parent: SpanContext
    began_s: float
    keys: Sequence[TierKey] = ()
    num_parts: int = 0
    num_questions: int = 0


class ServerTraces(_Supervised):
    """The spans of one server.

    Args:
        tracing: takes them.
        instance: name of the server.
        chunk_size_tokens: of the server.
    """

    def __init__(self, tracing: Tracing, instance: str, chunk_size_tokens: int) -> None:
        super().__init__()
        self.tracing = tracing
        self._instance = instance
        self._chunk_size_tokens = chunk_size_tokens
        self._now: LookupTrace | None = None
        self._waiting: dict[TierKey, LookupTrace] = {}
        self.stores = StoreTraces(tracing, instance)

    # ---- lookups -----------------------------------------------------------------------------------------------------

    @_costs_the_trace
    def begin(self, body: wire.Lookup) -> LookupTrace | None:
        """A lookup is about to be answered, and the jobs that begin until ``stepped`` are its own; None where it is
        not traced."""
        parent = parse_traceparent(body.traceparent)
        if parent is None or not parent.is_sampled:
            return None
        self._now = trace = LookupTrace(body, self.tracing.begin(parent), parent, time.time())
        return trace

    def stepped(self) -> None:
        """The cache has answered it, for now."""
        self._now = None

    @_costs_the_trace
    def waits(self, trace: LookupTrace, keys: Iterable[TierKey]) -> None:
        """It waits for the chunks of these keys, which are made here."""
        trace.keys = tuple(keys)
        for key in trace.keys:
            self._waiting[key] = trace

    @_costs_the_trace
    def over(self, trace: LookupTrace, answer: wire.Answered | None) -> None:
        """It is over.

        Args:
            answer: the last one; None where its caller has gone.
        """
        for key in trace.keys:
            if self._waiting.get(key) is trace:
                del self._waiting[key]
        attributes: dict[str, str | int | float | bool | None] = {
            "antiphon.instance": self._instance,
            "antiphon.request": trace.body.request,
            "antiphon.tokens.asked": len(trace.body.keys) // wire.KEY_BYTES * self._chunk_size_tokens,
            "antiphon.parts_left_out": max(0, trace.num_parts - PARTS_MAX) or None,
            "antiphon.handed_over_by": trace.body.handoff.server if trace.body.handoff is not None else None,
        }
        error = "the caller has gone" if answer is None else None
        if isinstance(answer, wire.Found):
            by_source = Counter({source: len(places) for source, places in answer.fetched})
            by_source["l1"] = len(answer.regions) - by_source.total()
            attributes["antiphon.tokens.found"] = answer.num_tokens
            attributes |= {
                f"antiphon.tokens.{name}": num * self._chunk_size_tokens for name, num in by_source.items() if num
            }
            attributes["antiphon.chunks.capped"] = answer.num_chunks_capped or None
        elif isinstance(answer, wire.Failure):
            error = answer.message
        span = Span(
            "cache.lookup", trace.context, trace.parent, trace.began_s, time.time(), "server", attributes, error
        )
        self.tracing.record(span)

    @property
    def num_waiting(self) -> int:
        """Chunks that traced lookups wait for."""
        return len(self._waiting)

    # ---- jobs --------------------------------------------------------------------------------------------------------

    @_costs_the_trace
    def parent_of(self, job: TierJob) -> SpanContext | None:
        """The lookup that a job which begins now is for; None where that is not traced, or it is for none."""
        if job.kind not in (JobKind.FETCH, JobKind.ASK):
            return None
        waiting = next((self._waiting[key] for key in job.keys if key in self._waiting), None)
        trace = waiting or self._now  # a step may begin what another lookup waits for
        if trace is None:
            return None
        if job.kind is JobKind.ASK:
            trace.num_questions += 1
            return trace.context if trace.num_questions <= QUESTIONS_MAX else None
        trace.num_parts += 1
        return trace.context if trace.num_parts <= PARTS_MAX else None

    @_costs_the_trace
    def begin_part(self, parent: SpanContext) -> Part | None:
        """A job of a lookup begins. Of any thread."""
        return ActiveSpan(self.tracing.begin(parent)), parent, time.time()

    @_costs_the_trace
    def record(self, job: TierJob, tier: str, part: Part, done: TierDone) -> None:
        """A job has ended. Of any thread.

        Args:
            tier: its name.
            part: as it began.
        """
        span, parent, began_s = part
        source = "peer" if tier == "peer" else "tier"
        attributes = {"antiphon.instance": self._instance, "antiphon.tier": tier, "antiphon.result": done.outcome.value}
        told = attributes | span.attributes
        if job.kind is JobKind.ASK:
            if done.outcome is Outcome.DONE and not any(done.found) and not span.has_parts:
                return  # what is being stored elsewhere is asked for again and again
            told |= {"antiphon.chunks.asked": len(job.keys), "antiphon.chunks.found": sum(done.found)}
        else:
            told |= {"antiphon.bytes": job.num_bytes}
        error = done.reason or None
        name = _JOB_NAMES[source, job.kind]
        self.tracing.record(Span(name, span.context, parent, began_s, time.time(), "client", told, error))


@dataclass(slots=True, eq=False)
class _StoreTrace:
    """One store that is traced: its regions are written, and then committed or given up."""

    context: SpanContext
    parent: SpanContext
    began_s: float
    num_chunks: int
    num_left: int
    num_bytes: int
    num_committed: int = 0


class StoreTraces(_Supervised):
    """Stores, from ``Reserve`` to the last ``Commit`` or ``Abort`` of what it granted.

    Args:
        tracing: takes their spans.
        instance: name of the server.
    """

    def __init__(self, tracing: Tracing, instance: str) -> None:
        super().__init__()
        self._tracing = tracing
        self._instance = instance
        self._regions: dict[tuple[int, int, int], _StoreTrace] = {}
        """By connection, offset and generation."""

    @_costs_the_trace
    def called(self, connection: int, body: wire.Body, answer: wire.Answered) -> None:
        """A call was answered."""
        if isinstance(body, wire.Reserve):
            if body.traceparent and isinstance(answer, wire.Reserved) and answer.grants:
                self._reserved(connection, body, answer)
        elif self._regions and isinstance(body, wire.Commit | wire.Abort) and not isinstance(answer, wire.Failure):
            for region in body.regions:
                self._ended(connection, region, is_committed=isinstance(body, wire.Commit))

    @_costs_the_trace
    def gone(self, connection: int) -> None:
        """Who wrote has hung up: what it was writing is given up."""
        for key in [key for key in self._regions if key[0] == connection]:
            _, offset, generation = key
            self._ended(connection, wire.Region(offset, 0, generation), is_committed=False)

    @property
    def num_regions(self) -> int:
        """Regions that are being written."""
        return len(self._regions)

    def _reserved(self, connection: int, body: wire.Reserve, answer: wire.Reserved) -> None:
        parent = parse_traceparent(body.traceparent)
        num = len(answer.grants)
        if parent is None or not parent.is_sampled or len(self._regions) + num > REGIONS_MAX:
            return
        num_bytes = sum(grant.region.size for grant in answer.grants)
        trace = _StoreTrace(self._tracing.begin(parent), parent, time.time(), len(answer.verdicts), num, num_bytes)
        for grant in answer.grants:
            self._regions[connection, grant.region.offset, grant.region.generation] = trace

    def _ended(self, connection: int, region: wire.Region, *, is_committed: bool) -> None:
        trace = self._regions.pop((connection, region.offset, region.generation), None)
        if trace is None:
            return
        trace.num_left -= 1
        trace.num_committed += is_committed
        if trace.num_left:
            return
        attributes: dict[str, str | int] = {
            "antiphon.instance": self._instance,
            "antiphon.chunks.asked": trace.num_chunks,
            "antiphon.chunks.stored": trace.num_committed,
            "antiphon.bytes": trace.num_bytes,
        }
        error = None if trace.num_committed else "given up"
        times = (trace.began_s, time.time())
        self._tracing.record(Span("cache.store", trace.context, trace.parent, *times, "server", attributes, error))
