"""Spans on their way to a collector, as seen from who is traced: nothing waits, and everything is counted."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

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
        self.reason: str | None = None
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
        if self.reason is None:
            self.spans += spans
        return self.reason

    def send_metrics(self, page: bytes) -> str | None:
        self.pages.append(page)
        return self.reason

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
    assert "5 spans were dropped" in lines[1]


def test_a_failing_collector_is_left_alone_for_a_while(
    made: Tracing, target: FakeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(under_test, "RETRY_MIN_S", 30.0)
    monkeypatch.setattr(under_test, "RETRY_MAX_S", 30.0)
    made._retry_s = 30.0
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
