"""Spans of a cache server: which lookup a job is for, and what is left when something ends badly. Without a process."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from antiphon.cache.arena import RegionHandle
from antiphon.cache.events import TierDone
from antiphon.cache.tier_jobs import JobId, JobKind, Outcome, TierJob
from antiphon.cache.tier_key import TierKey
from antiphon.cache_server.tier_runner import TierRunner
from antiphon.cache_server.traces import PARTS_MAX, QUESTIONS_MAX, LookupTrace, ServerTraces
from antiphon.observe.trace_context import SpanContext
from antiphon.observe.tracing import ActiveSpan, Span, Tracing
from antiphon.protocol import cache as wire

PARENT = SpanContext(7, 8, is_sampled=True)
SIZE = 256


class Nobody:
    """A collector that is never sent anything."""

    def send_spans(self, spans: list[Span]) -> str | None:
        raise AssertionError("nothing is sent")

    def send_metrics(self, page: bytes) -> str | None:
        raise AssertionError("nothing is sent")

    def close(self) -> None:
        pass


def made() -> tuple[ServerTraces, list[Span]]:
    tracing = Tracing(Nobody())
    spans: list[Span] = []
    tracing.record = spans.append  # type: ignore[method-assign]
    return ServerTraces(tracing, "s", SIZE), spans


def lookup(traceparent: str = PARENT.traceparent, num: int = 3) -> wire.Lookup:
    return wire.Lookup("r", b"n" * 32, "t", b"k" * 32 * num, 1.0, 0.0, None, traceparent)


def key(number: int) -> TierKey:
    return TierKey(bytes([number]) * 32)


def job(kind: JobKind, *keys: TierKey, **values: Any) -> TierJob:
    return TierJob(JobId(1), 0, kind, keys, **values)


def told(span: Span) -> dict[str, Any]:
    assert not callable(span.attributes)
    return {name.removeprefix("antiphon."): value for name, value in span.attributes.items() if value is not None}


def test_a_lookup_that_is_not_traced_leaves_nothing() -> None:
    traces, spans = made()
    for text in ("", "nonsense", PARENT._replace(is_sampled=False).traceparent):
        assert traces.begin(lookup(text)) is None
        assert traces.parent_of(job(JobKind.FETCH, key(1))) is None
    assert spans == []


def test_a_lookup_says_where_its_tokens_were() -> None:
    traces, spans = made()
    trace = traces.begin(lookup(num=5))
    assert trace is not None
    traces.stepped()
    regions = tuple(wire.Region(offset, 10, 1) for offset in range(4))
    traces.over(trace, wire.Found(1, regions, 4 * SIZE, 1, (("peer", (2,)), ("disk", (3,)))))
    (span,) = spans
    assert (span.name, span.parent, span.error) == ("cache.lookup", PARENT, None)
    expected = {"asked": 5, "found": 4, "l1": 2, "peer": 1, "disk": 1}
    assert {name: told(span)[f"tokens.{name}"] // SIZE for name in expected} == expected
    assert told(span)["chunks.capped"] == 1


def test_jobs_are_part_of_the_lookup_that_waits_for_them() -> None:
    traces, spans = made()
    first, second = traces.begin(lookup()), None
    assert first is not None
    assert traces.parent_of(job(JobKind.FETCH, key(9))) == first.context, "within its own step"
    traces.stepped()
    traces.waits(first, [key(1), key(2)])
    assert traces.parent_of(job(JobKind.FETCH, key(2))) == first.context
    assert traces.parent_of(job(JobKind.ASK, key(9), key(1))) == first.context
    assert traces.parent_of(job(JobKind.FETCH, key(3))) is None
    assert traces.parent_of(job(JobKind.PUBLISH, key(1))) is None
    second = traces.begin(lookup())
    assert second is not None
    assert traces.parent_of(job(JobKind.FETCH, key(1))) == first.context, "begun within the step of another lookup"
    traces.stepped()
    traces.waits(second, [key(2), key(3)])
    assert traces.parent_of(job(JobKind.FETCH, key(2))) == second.context
    traces.over(first, None)
    assert spans[-1].error == "the caller has gone"
    assert traces.parent_of(job(JobKind.FETCH, key(1))) is None
    assert traces.parent_of(job(JobKind.FETCH, key(2))) == second.context
    traces.over(second, wire.Failure("cache_error", "no"))
    assert spans[-1].error == "no"
    assert traces.num_waiting == 0


def test_parts_of_one_lookup_are_bounded() -> None:
    traces, spans = made()
    trace = traces.begin(lookup())
    assert trace is not None
    traces.stepped()
    traces.waits(trace, [key(1)])
    parents = [traces.parent_of(job(JobKind.FETCH, key(1))) for _ in range(PARTS_MAX + 5)]
    assert parents == [trace.context] * PARTS_MAX + [None] * 5
    traces.over(trace, wire.Found(None, (), 0, 0))
    assert told(spans[0])["parts_left_out"] == 5


def test_questions_take_no_room_of_what_is_read() -> None:
    traces, spans = made()
    trace = traces.begin(lookup())
    assert trace is not None
    traces.stepped()
    traces.waits(trace, [key(1)])
    questions = [traces.parent_of(job(JobKind.ASK, key(1))) for _ in range(QUESTIONS_MAX + 5)]
    assert questions == [trace.context] * QUESTIONS_MAX + [None] * 5
    assert traces.parent_of(job(JobKind.FETCH, key(1))) == trace.context
    traces.over(trace, wire.Found(None, (), 0, 0))
    assert "parts_left_out" not in told(spans[0])


class Broken:
    """What traces go to, with a bug."""

    def begin(self, parent: SpanContext | None) -> SpanContext:
        raise RuntimeError("a bug")

    def record(self, span: Span) -> None:
        raise RuntimeError("a bug")


def test_a_bug_costs_the_trace_alone(caplog: pytest.LogCaptureFixture) -> None:
    traces, spans = made()
    trace = traces.begin(lookup())
    traces.stores.called(1, reserve(), reserved(0))
    assert trace is not None
    traces.tracing = traces.stores._tracing = Broken()  # type: ignore[assignment]
    part = ActiveSpan(PARENT), PARENT, 1.0
    traces.record(job(JobKind.FETCH, key(1)), "disk", part, TierDone(JobId(1), Outcome.DONE))
    assert traces.begin(lookup()) is None
    assert traces.begin_part(PARENT) is None
    traces.waits(trace, (key(number) for number in (1, 2, -1)))
    traces.over(trace, None)
    traces.stores.called(1, reserve(), reserved(10))
    traces.stores.gone(1)
    assert spans == []
    assert (traces.num_waiting, traces.stores.num_regions) == (0, 0)
    (line, stores_line) = caplog.messages
    assert "internal error in record" in line
    assert "internal error in called" in stores_line


class Store:
    """A tier that has everything."""

    name = "disk"

    def probe(self) -> None:
        pass

    def contains(self, keys: tuple[TierKey, ...]) -> list[bool]:
        return [True] * len(keys)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("part", ["begin", "record"])
async def test_a_bug_in_a_trace_ends_no_job_and_no_thread(part: str) -> None:
    traces, _ = made()
    setattr(traces.tracing, part, getattr(Broken(), part))
    ended: asyncio.Queue[TierDone] = asyncio.Queue()
    runner = TierRunner([Store()], [(1, 10)], None, ended.put_nowait)  # type: ignore[list-item,arg-type]
    runner.traces = traces
    traces._now = LookupTrace(lookup(), PARENT, PARENT, 1.0)
    try:
        for _ in range(2):
            runner.run(job(JobKind.ASK, key(1)))
            done = await asyncio.wait_for(ended.get(), 10)
            assert (done.outcome, done.found) == (Outcome.DONE, (True,))
    finally:
        assert runner.close()


async def test_the_threads_of_tiers_give_way() -> None:
    policies: list[int] = []

    class Telling(Store):
        def contains(self, keys: tuple[TierKey, ...]) -> list[bool]:
            policies.append(os.sched_getscheduler(threading.get_native_id()))
            return [True] * len(keys)

    ended: asyncio.Queue[TierDone] = asyncio.Queue()
    runner = TierRunner([Telling()], [(1, 10)], None, ended.put_nowait)  # type: ignore[list-item,arg-type]
    try:
        runner.run(job(JobKind.ASK, key(1)))
        await asyncio.wait_for(ended.get(), 10)
    finally:
        assert runner.close()
    assert policies == [os.SCHED_BATCH]


def test_a_job_says_how_it_ended() -> None:
    traces, spans = made()
    region = RegionHandle(0, 10, 1)
    part = ActiveSpan(PARENT, {"antiphon.peer": "other"}), PARENT, 1.0
    fetch = job(JobKind.FETCH, key(1), region=region, num_bytes=10)
    traces.record(fetch, "peer", part, TierDone(JobId(1), Outcome.DONE))
    traces.record(fetch, "disk", part, TierDone(JobId(1), Outcome.FAILED, reason="gone"))
    ask = job(JobKind.ASK, key(1), key(2))
    traces.record(ask, "disk", part, TierDone(JobId(1), Outcome.DONE, found=(True, False)))
    traces.record(ask, "peer", part, TierDone(JobId(1), Outcome.DONE, found=(False, False)))
    assert [span.name for span in spans] == ["peer.pull", "tier.get", "tier.ask"], "what finds nothing says nothing"
    assert [span.error for span in spans] == [None, "gone", None]
    assert told(spans[0])["peer"] == "other"
    assert (told(spans[2])["chunks.asked"], told(spans[2])["chunks.found"]) == (2, 1)


def test_a_question_that_another_process_has_a_span_of_is_told_whatever_it_found() -> None:
    traces, spans = made()
    for has_parts in (False, True):
        part = traces.begin_part(PARENT)
        assert part is not None
        part[0].has_parts = has_parts
        traces.record(job(JobKind.ASK, key(1)), "peer", part, TierDone(JobId(1), Outcome.DONE, found=(False,)))
        assert len(spans) == has_parts
    assert spans[0].name == "peer.locate"
    assert (told(spans[0])["chunks.asked"], told(spans[0])["chunks.found"]) == (1, 0)


def reserved(*offsets: int) -> wire.Reserved:
    grants = tuple(wire.Grant(index, wire.Region(offset, 10, 1), (0,)) for index, offset in enumerate(offsets))
    return wire.Reserved(("write",) * len(offsets), grants, None)


def reserve(traceparent: str = PARENT.traceparent) -> wire.Reserve:
    return wire.Reserve(b"n" * 32, "t", None, b"k" * 64, traceparent)


def test_a_store_lasts_until_its_last_commit() -> None:
    traces, spans = made()
    stores = traces.stores
    stores.called(1, reserve(), reserved(0, 10))
    stores.called(1, reserve(""), reserved(20))
    stores.called(1, wire.Commit((wire.Region(0, 10, 1),)), wire.Committed(("readable",)))
    stores.called(2, wire.Commit((wire.Region(10, 10, 1),)), wire.Committed(("readable",)))
    stores.called(1, wire.Commit((wire.Region(10, 10, 1),)), wire.Failure("stale_handle", "no"))
    assert spans == []
    stores.called(1, wire.Abort((wire.Region(10, 10, 1),)), wire.Aborted(1))
    (span,) = spans
    assert (span.name, span.parent, span.error) == ("cache.store", PARENT, None)
    assert (told(span)["chunks.asked"], told(span)["chunks.stored"]) == (2, 1)
    assert stores.num_regions == 0


def test_a_writer_that_goes_leaves_nothing() -> None:
    traces, spans = made()
    traces.stores.called(1, reserve(), reserved(0, 10))
    traces.stores.called(2, reserve(), reserved(0))
    traces.stores.gone(1)
    assert [span.error for span in spans] == ["given up"]
    assert traces.stores.num_regions == 1
    traces.stores.gone(2)
    assert traces.stores.num_regions == 0
