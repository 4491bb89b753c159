"""Spans on their way to a collector, as seen from who is traced: nothing waits, and everything is counted."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from antiphon.observe import tracing as under_test
from antiphon.observe.process_tracing import page_of, traced
from antiphon.observe.trace_context import SpanContext
from antiphon.observe.tracing import (
    CLOSE_TIMEOUT_S,
    SPANS_MAX,
    ActiveSpan,
    Span,
    Tracing,
    activated,
    active_span,
    active_traceparent,
)
from tests.router.stack import wait_for

CONTEXT = SpanContext(1, 2, is_sampled=True)
NOT_SAMPLED = SpanContext(1, 2, is_sampled=False)


class FakeTarget:
    """A collector that a test makes fail or hang."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.pages: list[bytes] = []
        self.num_pages = 0
        self.reason: str | None = None
        self.metrics_reason: str | None = None
        self.bad = ""
        self.may_go = threading.Event()
        self.may_go.set()
        self.num_calls = 0
        self.is_closed = False
        self.bug: Exception | None = None

    def send_spans(self, spans: list[Span]) -> str | None:
        self.num_calls += 1
        self.may_go.wait(30)
        if self.bug is not None:
            raise self.bug
        spans[:] = [span for span in spans if span.name != self.bad]
        if self.reason is None:
            self.spans += spans
        return self.reason

    def send_metrics(self, page: bytes) -> str | None:
        self.num_pages += 1
        if self.metrics_reason is None:
            self.pages.append(page)
        return self.metrics_reason

    def close(self) -> None:
        self.is_closed = True
        self.may_go.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("SEND_INTERVAL_S", 0.01), ("RETRY_MIN_S", 0.02), ("RETRY_MAX_S", 0.05), ("SETTLE_S", 0.2)):
        monkeypatch.setattr(under_test, name, value)


@pytest.fixture
def target() -> FakeTarget:
    return FakeTarget()


@pytest.fixture
def made(target: FakeTarget) -> Iterator[Tracing]:
    tracing = Tracing(target)
    tracing.run()
    yield tracing
    target.may_go.set()
    tracing.close()


def span(name: str = "x", context: SpanContext = CONTEXT, *, settles: bool = False) -> Span:
    now_s = time.time()
    return Span(name, context, None, now_s - 0.001, now_s, settles=settles)


def test_a_span_arrives(made: Tracing, target: FakeTarget) -> None:
    made.record(span("one"))
    wait_for(lambda: [each.name for each in target.spans] == ["one"], "it is sent")
    wait_for(lambda: made.counts["sent"], "it is counted")
    assert made.counts == {"sent": 1, "dropped": 0}


def test_what_is_not_sampled_is_not_kept(made: Tracing, target: FakeTarget) -> None:
    made.record(span("silent", NOT_SAMPLED))
    made.record(span("one"))
    wait_for(lambda: target.spans, "the other is sent")
    assert [each.name for each in target.spans] == ["one"]


def test_a_span_that_settles_is_sent_later(made: Tracing, target: FakeTarget) -> None:
    began_s = time.time()
    made.record(span("late", settles=True))
    made.record(span("early"))
    wait_for(lambda: len(target.spans) == 2, "both are sent")
    assert [each.name for each in target.spans] == ["early", "late"]
    assert time.time() - began_s >= under_test.SETTLE_S


def test_a_collector_that_hangs_costs_spans_and_no_time(made: Tracing, target: FakeTarget) -> None:
    target.may_go.clear()
    made.record(span())
    wait_for(lambda: target.num_calls, "it hangs")
    began_s = time.perf_counter()
    for _ in range(SPANS_MAX + 100):
        made.record(span())
    assert time.perf_counter() - began_s < 2.0
    assert made.counts["dropped"] == 100
    target.may_go.set()
    wait_for(lambda: made.counts["sent"] == SPANS_MAX + 1, "what was kept is sent")
    assert made.counts["dropped"] == 100


def test_one_line_when_it_fails_and_one_when_it_is_back(
    made: Tracing, target: FakeTarget, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "antiphon.tracing")
    target.reason = "nobody listens"
    for number in range(5):
        made.record(span())
        wait_for(lambda number=number: made.counts["dropped"] == number + 1, "it is dropped")  # type: ignore[misc]
    target.reason = None
    made.record(span())
    wait_for(lambda: made.counts["sent"] == 1, "it is back")
    made.record(span())
    wait_for(lambda: made.counts["sent"] == 2, "it stays")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2, lines
    assert "nobody listens" in lines[0]
    assert lines[1] == "spans are taken again; 5 were dropped so far"


def test_a_failing_collector_is_left_alone_for_a_while(
    made: Tracing, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "RETRY_MIN_S", 30.0)
    monkeypatch.setattr(under_test, "RETRY_MAX_S", 30.0)
    made._spans.retry_s = 30.0
    target.reason = "full"
    made.record(span())
    wait_for(lambda: made.counts["dropped"] == 1, "it failed")
    for _ in range(50):
        made.record(span())
        made._wake.set()
        wait_for(lambda: not made._wake.is_set(), "the thread has looked")
    assert target.num_calls == 1


def test_a_bug_costs_the_spans_it_met(made: Tracing, target: FakeTarget) -> None:
    target.bug = ValueError("oops")
    made.record(span())
    wait_for(lambda: target.num_calls, "it was met")
    target.bug = None
    made.record(span("after"))
    wait_for(lambda: [each.name for each in target.spans] == ["after"], "the next is sent")


@pytest.mark.parametrize("hangs", [True, False])
def test_the_end_sends_the_rest_and_is_bounded(target: FakeTarget, hangs: bool) -> None:
    tracing = Tracing(target)
    tracing.run()
    if hangs:
        target.may_go.clear()
        tracing.record(span())
        wait_for(lambda: target.num_calls, "it hangs")
    else:
        tracing.record(span("last", settles=True))
    began_s = time.monotonic()
    tracing.close()
    assert time.monotonic() - began_s < CLOSE_TIMEOUT_S + 1
    assert target.is_closed
    if not hangs:
        assert [each.name for each in target.spans] == ["last"]


def test_metrics_are_sent_again_and_again(target: FakeTarget) -> None:
    tracing = Tracing(target, 0.02)
    pages: Callable[[], bytes] = lambda: b"page"  # noqa: E731 - a value
    tracing.measure(pages)
    tracing.run()
    wait_for(lambda: len(target.pages) >= 3, "three pages")
    tracing.close()
    assert set(target.pages) == {b"page"}


@pytest.mark.parametrize("is_taken", ["spans", "metrics"])
def test_a_collector_of_one_signal_gets_that(
    target: FakeTarget, caplog: pytest.LogCaptureFixture, is_taken: str
) -> None:
    """The other is said once, however often it is tried, and the last spans are sent."""
    caplog.set_level(logging.INFO, "antiphon.tracing")
    if is_taken == "spans":
        target.metrics_reason = "UNIMPLEMENTED"
    else:
        target.reason = "UNIMPLEMENTED"
    tracing = Tracing(target, 0.01)
    tracing.measure(lambda: b"page")
    tracing.run()
    for number in range(4):
        tracing.record(span())
        wait_for(lambda number=number: tracing.counts.total() > number, "spans are tried")  # type: ignore[misc]
        wait_for(lambda number=number: target.num_pages > number, "metrics are tried")  # type: ignore[misc]
    tracing.record(span("last"))
    tracing.close()
    (line,) = [record.getMessage() for record in caplog.records]
    if is_taken == "spans":
        assert line == "metrics are not taken and are dropped until they are: UNIMPLEMENTED"
        assert [each.name for each in target.spans] == ["x"] * 4 + ["last"]
    else:
        assert line == "spans are not taken and are dropped until they are: UNIMPLEMENTED"
        assert len(target.pages) >= 4


def test_metrics_get_their_turn_however_many_spans_wait(target: FakeTarget) -> None:
    tracing = Tracing(target, 0.01)
    tracing.measure(lambda: b"page")
    num_left: list[int] = []

    def slow(spans: list[Span]) -> str | None:
        """As many come as are sent."""
        until_s = time.monotonic() + under_test.SEND_INTERVAL_S
        wait_for(lambda: time.monotonic() >= until_s, "it is slow")
        if not target.pages:
            for _ in spans:
                tracing.record(span())
        num_left.append(len(spans))
        return None

    target.send_spans = slow  # type: ignore[method-assign]
    for _ in range(4 * under_test.BATCH_SPANS):
        tracing.record(span())
    tracing.run()
    wait_for(lambda: target.pages, "metrics are sent")
    wait_for(lambda: not tracing._waiting, "and the rest")
    tracing.close()
    assert sum(num_left) == tracing.counts["sent"]


def test_a_span_settles_whatever_its_times_are(made: Tracing, target: FakeTarget) -> None:
    """A clock that was set back, or a span of the future, holds none up."""
    odd = span("odd", settles=True)
    odd.end_s += 3600
    made.record(odd)
    made.record(span("next", settles=True))
    wait_for(lambda: [each.name for each in target.spans] == ["odd", "next"], "both are sent")


def test_a_span_that_cannot_be_sent_is_counted(made: Tracing, target: FakeTarget) -> None:
    target.bad = "bad"
    target.may_go.clear()
    made.record(span("first"))
    wait_for(lambda: target.num_calls, "it hangs")
    for name in ("a", "bad", "b"):
        made.record(span(name))
    target.may_go.set()
    wait_for(lambda: len(target.spans) == 3, "the others are sent")
    wait_for(lambda: made.counts.total() == 4, "all are counted")
    assert made.counts == {"sent": 3, "dropped": 1}


def test_a_bad_span_costs_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.sdk.trace.export import SpanExportResult

    from antiphon.observe.otlp import OtlpTarget

    quiet = logging.getLogger("opentelemetry.exporter")
    monkeypatch.setattr(quiet, "handlers", quiet.handlers)
    monkeypatch.setattr(quiet, "propagate", quiet.propagate)
    target = OtlpTarget(under_test.TracingOptions("s", "i", "http", "http://127.0.0.1:1/x", "http://127.0.0.1:1/y"))
    sent: list[str] = []

    class Exporter:
        def export(self, spans: list[Any]) -> SpanExportResult:
            assert encode_spans(spans).SerializeToString()
            sent.extend(each.name for each in spans)
            return SpanExportResult.SUCCESS

    target._spans = Exporter()  # type: ignore[assignment]
    bad, odd = span("bad"), span("odd")
    bad.attributes = lambda: {}["no"]
    odd.error = "no file \udcff"
    batch = [span("a"), bad, odd]
    assert target.send_spans(batch) is None
    assert sent == [each.name for each in batch] == ["a", "odd"]


def test_counts_of_many_threads_add_up(target: FakeTarget) -> None:
    """A read, and a write that others come between."""

    class Slow(dict[str, int]):
        def __getitem__(self, name: str) -> int:
            value = super().__getitem__(name)
            assert tracing._counting.locked()
            return value

    tracing = Tracing(target)
    tracing.counts = Slow(sent=0, dropped=0)  # type: ignore[assignment]
    for _ in range(SPANS_MAX + 3):
        tracing.record(span())
    assert dict.__getitem__(tracing.counts, "dropped") == 3


def test_the_log_shows_no_more_of_the_address_than_its_host(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "antiphon.tracing")
    urls = ("http", "http://127.0.0.1:9/secret/v1/traces", "http://127.0.0.1:9/secret/v1/metrics")
    with traced(under_test.options_of("s", "i", urls, 0.0)):  # type: ignore[arg-type]
        pass
    assert caplog.messages == ["spans and metrics go to http://127.0.0.1:9 (http)"]


async def test_a_bug_in_a_page_costs_the_metrics_alone() -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    faults: list[object] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))

    def make() -> bytes:
        raise ValueError("oops")

    with pytest.raises(ValueError, match="oops"):
        await asyncio.to_thread(page_of(loop, make))
    assert faults == []


def test_a_page_that_cannot_be_made_costs_no_span(
    made: Tracing, target: FakeTarget, caplog: pytest.LogCaptureFixture
) -> None:
    def page() -> bytes:
        raise ValueError("oops")

    made._metrics_interval_s = 0.01
    made.measure(page)
    wait_for(lambda: made._metrics.reason, "it was met")
    made.record(span("after"))
    wait_for(lambda: target.spans, "spans are sent")
    (line,) = caplog.messages
    assert line.startswith("metrics are not taken")
    assert "oops" in line


async def test_a_page_is_made_on_the_loop() -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    thread = threading.get_ident()
    page = page_of(loop, lambda: b"here" if threading.get_ident() == thread else b"elsewhere")
    assert await asyncio.to_thread(page) == b"here"


def test_a_loop_that_is_over_makes_no_page() -> None:
    import asyncio

    loop = asyncio.new_event_loop()
    loop.close()
    assert page_of(loop, lambda: b"x")() is None


def test_the_span_that_runs_is_known_inside_alone() -> None:
    assert active_span() is None
    assert active_traceparent() == ""
    running = ActiveSpan(CONTEXT)
    with activated(running):
        assert active_span() is running
        assert active_traceparent() == CONTEXT.traceparent
        seen: list[object] = []
        other = threading.Thread(target=lambda: seen.append(active_span()))
        other.start()
        other.join()
        assert seen == [None]
    assert active_span() is None


def test_without_options_nothing_is_traced() -> None:
    with traced(None) as tracing:
        assert tracing is None


def test_off_imports_nothing_of_opentelemetry() -> None:
    program = (
        "import sys\n"
        "import antiphon.cache_server.app, antiphon.coordinator.app, antiphon.router.app, antiphon.cli.main\n"
        "import antiphon.connector.scheduler\n"
        "found = sorted(name for name in sys.modules if name.split('.')[0] in ('opentelemetry', 'grpc', 'google'))\n"
        "print(found)\n"
        "import antiphon.observe.otlp\n"
        "print('opentelemetry.sdk.trace' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "True"], done.stdout
