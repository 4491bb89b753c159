"""Tracing for as long as a process runs: from its options to its end, and its metrics from its event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Final

from antiphon.observe.tracing import Tracing, TracingOptions

PAGE_TIMEOUT_S: Final = 0.5
"""An event loop that makes no page in this time is busy: the metrics are sent the next time."""


def process_name(name: str | None = None) -> str:
    """A name for this process that others do not have: its own if it has one, else of its host and its number."""
    return f"{name or os.getpid()}@{socket.gethostname()}"


@contextlib.contextmanager
def traced(options: TracingOptions | None) -> Iterator[Tracing | None]:
    """Tracing inside; None where there are no options.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    if options is None:
        yield None
        return
    tracing = Tracing.start(options)
    try:
        yield tracing
    finally:
        tracing.close()


def page_of(loop: asyncio.AbstractEventLoop, make: Callable[[], bytes | None]) -> Callable[[], bytes | None]:
    """What asks for a page of metrics from another thread than that of ``loop``, which makes it; None where it does not
    in time, or makes none. What goes wrong there is raised here."""

    def page() -> bytes | None:
        made: concurrent.futures.Future[bytes | None] = concurrent.futures.Future()

        def run() -> None:
            if made.set_running_or_notify_cancel():
                try:
                    made.set_result(make())
                except Exception as error:  # supervised: a bug costs the metrics, and not the loop
                    made.set_exception(error)

        try:
            loop.call_soon_threadsafe(run)
        except RuntimeError:  # the loop is closed
            return None
        try:
            return made.result(PAGE_TIMEOUT_S)
        except TimeoutError:
            made.cancel()
            return None

    return page
