"""Spans of a router's requests: whose part they are, what engines are told, and what a failed attempt leaves."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator

from antiphon.observe.receipt import Receipt
from antiphon.observe.trace_context import SpanContext, parse_traceparent
from antiphon.observe.tracing import Span, Tracing
from antiphon.router.app import Router
from antiphon.router.traces import SPANS_PER_REQUEST_MAX, RouterTraces
from antiphon.routing.commands import ConnectPrefill
from antiphon.routing.events import PrefillAnswered, Received, UpstreamLost
from tests.router.scripted import (
    EVENT,
    Reply,
    ScriptedEngine,
    Seen,
    Wire,
    connected,
    endpoints,
    engine,
    prefills,
    routing,
    streams,
    until,
)

CLIENT = SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, is_sampled=True)


class Nobody:
    """A collector that is never sent anything: its thread is not started."""

    def send_spans(self, spans: list[Span]) -> str | None:
        raise AssertionError("nothing is sent")

    def send_metrics(self, page: bytes) -> str | None:
        raise AssertionError("nothing is sent")

    def close(self) -> None:
        pass


class Traced:
    """A router that traces, and its spans."""

    def __init__(self, router: Router, tracing: Tracing) -> None:
        self.router = router
        self.tracing = tracing

    @property
    def spans(self) -> list[Span]:
        return [*self.tracing._waiting, *(span for _, span in self.tracing._settling)]

    async def ask(self, *lines: str, is_whole: bool = True, **fields: object) -> Reply:
        """One request with these header lines, and its spans once it has ended."""
        before = len(self.tracing._settling)
        async with connected(self.router) as client:
            body = json.dumps({"prompt": "x", "model": "m", "stream": True} | fields).encode()
            head = "".join(f"{line}\r\n" for line in ("POST /v1/completions HTTP/1.1", "host: x", *lines))
            client.writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
            reply = await client.reply()
        if is_whole:
            await until(lambda: len(self.tracing._settling) > before, "the request's span")
        return reply


@contextlib.asynccontextmanager
async def traced(prefill: list[ScriptedEngine], decode: list[ScriptedEngine], **knobs: object) -> AsyncIterator[Traced]:
    tracing = Tracing(Nobody())
    async with routing(prefill, decode, tracing, **knobs) as router:
        yield Traced(router, tracing)


def sent_to(each: ScriptedEngine) -> list[SpanContext]:
    """The contexts that an engine was told with its inference requests."""
    found = []
    for head in each.heads:
        lines = head.decode().lower().split("\r\n")
        values = [line.partition(": ")[2] for line in lines if line.startswith("traceparent:")]
        if lines[0].startswith("post"):
            assert len(values) == 1, lines
            context = parse_traceparent(values[0])
            assert context is not None, values
            found.append(context)
    return found


def by_name(spans: list[Span]) -> dict[str, Span]:
    assert len({span.name for span in spans}) == len(spans), [span.name for span in spans]
    return {span.name: span for span in spans}


async def test_a_request_is_a_part_of_the_clients_trace() -> None:
    async with engine(prefills) as p, engine(streams) as d, traced([p], [d]) as made:
        reply = await made.ask(f"traceparent: {CLIENT.traceparent}", "tracestate: a=1")
        spans = by_name(made.spans)
        assert spans.keys() == {"POST /v1/completions", "prefill", "hand-over", "decode"}
        whole = spans["POST /v1/completions"]
        assert whole.parent == CLIENT
        assert {span.context.trace_id for span in spans.values()} == {CLIENT.trace_id}
        for name in ("prefill", "hand-over", "decode"):
            assert spans[name].parent == whole.context, name
            assert whole.start_s <= spans[name].start_s <= spans[name].end_s <= whole.end_s
            assert spans[name].error is None
        assert sent_to(p) == [spans["prefill"].context]
        assert sent_to(d) == [spans["decode"].context]
        assert b"tracestate: a=1\r\n" in p.heads[-1]
        assert spans["prefill"].attributes == {"antiphon.engine": p.address, "antiphon.attempt": 1}
        told = whole.attributes() if callable(whole.attributes) else {}
        assert told["antiphon.receipt"] == reply.headers["x-antiphon-receipt"]
        assert told["gen_ai.request.model"] == "m"
        expected = {"path": "pd", "outcome": "completed", "prefill": p.address, "decode": d.address, "stream": True}
        assert {name: told[f"antiphon.{name}"] for name in expected} == expected
        assert told["antiphon.tokens.unknown"] == 3


async def test_a_request_without_a_trace_begins_one() -> None:
    async with engine(prefills) as p, engine(streams) as d, traced([p], [d]) as made:
        reply = await made.ask(is_whole=True)
        spans = by_name(made.spans)
        whole = spans["POST /v1/completions"]
        assert whole.parent is None
        receipt = made.router.receipts.get(reply.headers["x-antiphon-receipt"])
        assert receipt is not None
        assert receipt.trace_id == f"{whole.context.trace_id:032x}"
        await made.ask("traceparent: 00-broken")
        assert len({span.context.trace_id for span in made.spans}) == 2


async def test_a_trace_that_is_not_sampled_goes_on_as_it_came() -> None:
    silent = CLIENT._replace(is_sampled=False)
    async with engine(prefills) as p, engine(streams) as d, traced([p], [d]) as made:
        await made.ask(f"traceparent: {silent.traceparent}", is_whole=False)
        assert sent_to(p) == sent_to(d) == [silent]
        assert made.spans == []


async def test_a_share_of_the_requests_is_traced() -> None:
    async with engine(prefills) as p, engine(streams) as d, traced([p], [d], trace_sample_share=0.0) as made:
        await made.ask(is_whole=False)
        assert [context.is_sampled for context in sent_to(p)] == [False]
        assert made.spans == []
        await made.ask(f"traceparent: {CLIENT.traceparent}")
        assert by_name(made.spans)["prefill"].parent is not None


async def test_a_retry_is_a_span_of_its_own() -> None:
    async def refuses(_: Seen, wire: Wire) -> None:
        wire.whole(b"{}", status=500)

    async with (
        engine(refuses) as bad,
        engine(prefills) as good,
        engine(streams) as d,
        traced([bad, good], [d]) as made,
    ):
        await made.ask()
        tried = [span for span in made.spans if span.name == "prefill"]
        assert [span.attributes["antiphon.engine"] for span in tried] == [bad.address, good.address]  # type: ignore[index]
        assert [span.attributes["antiphon.attempt"] for span in tried] == [1, 2]  # type: ignore[index]
        assert [span.error for span in tried] == ["status 500", None]
        assert sent_to(bad) == [tried[0].context]
        assert sent_to(good) == [tried[1].context]


async def test_what_fails_says_so() -> None:
    async def cuts(_: Seen, wire: Wire) -> None:
        wire.begin()
        wire.piece(EVENT)
        await wire.writer.drain()
        wire.cut()

    async with engine(prefills) as p, engine(cuts) as d, traced([p], [d]) as made:
        await made.ask()
        spans = by_name(made.spans)
        assert spans["prefill"].error is None
        assert spans["decode"].error
        assert spans["POST /v1/completions"].error


async def test_a_client_that_leaves_ends_its_spans() -> None:
    async def hangs(_: Seen, wire: Wire) -> None:
        await wire.until_closed()

    async with engine(hangs) as p, engine(streams) as d, traced([p], [d]) as made:
        async with connected(made.router) as client:
            client.send()
            await until(lambda: p.seen, "the prefill has begun")
        await until(lambda: made.tracing._settling, "the request's span")
        spans = by_name(made.spans)
        assert spans["prefill"].error == "the client left"
        assert spans["POST /v1/completions"].error == "cancelled"


async def test_a_refused_request_has_a_span() -> None:
    async with engine(prefills) as p, engine(streams) as d, traced([p], [d]) as made:
        reply = await made.ask(kv_transfer_params={"do_remote_prefill": True})
        assert reply.status == 400
        assert made.spans[0].error is not None
        assert [span.name for span in made.spans] == ["POST /v1/completions"]


async def test_off_the_clients_fields_go_through() -> None:
    async with engine(prefills) as p, engine(streams) as d, routing([p], [d]) as router, connected(router) as client:
        body = json.dumps({"prompt": "x"}).encode()
        text = (
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntraceparent: whatever\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        client.writer.write(text.encode() + body)
        await client.reply()
        assert b"traceparent: whatever\r\n" in p.heads[-1]


async def test_a_bug_costs_the_trace_alone() -> None:
    async with engine(prefills) as p, engine(streams) as d, traced([p], [d]) as made:
        made.tracing.begin = None  # type: ignore[assignment,method-assign]
        begun = RouterTraces(made.tracing, 1.0, lambda: 0.0, lambda receipt: {})
        begun.tracing = _Broken()  # type: ignore[assignment]
        made.router.inference.traces = begun
        reply = await made.ask(is_whole=False)
        assert reply.status == 200
        assert made.spans == []


class _Broken:
    """Gives ids to requests, and to nothing else."""

    def __init__(self) -> None:
        self.num = 0

    def begin(self, parent: SpanContext | None, *, is_sampled: bool = True) -> SpanContext:
        self.num += 1
        if self.num > 1:
            raise RuntimeError("a bug")
        return CLIENT


async def test_spans_of_one_request_are_bounded() -> None:
    async with engine(prefills) as p, engine(streams) as d, traced([p], [d]) as made:
        traces = made.router.inference.traces
        assert traces is not None
        receipt = Receipt("id", "/v1/completions", time.time())
        trace = traces.begin(receipt, time.monotonic())
        endpoint = endpoints(made.router)[0]
        for attempt in range(2 * SPANS_PER_REQUEST_MAX):
            now_s = time.monotonic()
            trace.stepped(UpstreamLost(attempt - 1), [ConnectPrefill(attempt, endpoint, "r")], now_s, receipt)
        receipt.outcome = "failed"
        trace.close(receipt, now_s, now_s)
        assert len(made.spans) == SPANS_PER_REQUEST_MAX + 1


async def test_what_comes_late_of_an_earlier_attempt_ends_nothing() -> None:
    async with engine(prefills) as p, engine(streams) as d, traced([p], [d]) as made:
        traces = made.router.inference.traces
        assert traces is not None
        receipt = Receipt("id", "/v1/completions", time.time())
        trace = traces.begin(receipt, time.monotonic())
        endpoint = endpoints(made.router)[0]
        trace.stepped(Received(), [ConnectPrefill(2, endpoint, "r")], 1.0, receipt)
        line = trace.line
        trace.stepped(UpstreamLost(1), [], 2.0, receipt)
        trace.stepped(PrefillAnswered(2, 200), [], 3.0, receipt)
        receipt.outcome = "completed"
        trace.close(receipt, 0.0, 4.0)
        (prefill,) = [span for span in made.spans if span.name == "prefill"]
        assert prefill.error is None
        assert round(prefill.end_s - prefill.start_s, 3) == 2.0
        assert prefill.context.traceparent in line
