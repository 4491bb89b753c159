"""What a lookup costs while others store without a pause: processor time of client and server, and how long it takes.

The server's share is what it used, less what the writers' calls cost it when nobody looks up: each of those is counted.
The difference is shown as it is; where noise makes it nothing or less, the goal counts as missed.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from antiphon.bench.cache_calls import SMALL_LAYOUT
from antiphon.bench.figures import Row, Rows, Say, percentile
from antiphon.bench.processes import BenchProcess
from antiphon.bench.rig import (
    Buffer,
    CacheMiss,
    Prompt,
    Shape,
    Target,
    ask,
    attached,
    layout_of,
    lookup,
    model_of,
    release,
    store,
)
from antiphon.bench.writer import Writer
from antiphon.client import Session
from antiphon.core.errors import StartError
from antiphon.protocol import cache as protocol

NUM_WRITERS: Final = 3
CPU_GOAL: Final = 1.5
"""Processor time of a lookup beside writers over that of a lookup alone."""
WRITER_START_TIMEOUT_S: Final = 30.0
_TOKENS: Final = 8_192


@dataclass(frozen=True)
class _Lookups:
    """What ``num_calls`` lookups, each released, took."""

    times_s: list[float]
    client_cpu_s: float
    server_cpu_s: float
    num_writer_calls: int

    @property
    def num_calls(self) -> int:
        return len(self.times_s)


def measure_contention(
    target: Target, server: BenchProcess | None, shape: Shape, num_calls: int, rows: Rows, say: Say
) -> None:
    """Adds processor time and latency of lookups, alone and beside writers.

    Args:
        server: None for one that is not ours; the server's share is then left out.
        shape: what each writer stores at once.
        num_calls: lookups in each of the two parts.

    Raises:
        StartError: a writer does not store.
    """
    chunk_bytes = SMALL_LAYOUT.chunk_bytes
    prompt = Prompt.new(_TOKENS, target.chunk_size_tokens)
    with ExitStack() as stack:
        session = stack.enter_context(attached(target, SMALL_LAYOUT, "beside"))
        with closing(Buffer(len(prompt.keys) * chunk_bytes)) as source:
            store(session, prompt, source.address, chunk_bytes)
        kept = lookup(session, prompt, "kept")  # the writers must not evict what is looked up
        say(f"{num_calls} lookups alone")
        _look_up(session, prompt, max(20, num_calls // 10), server, [])
        alone = _look_up(session, prompt, num_calls, server, [])
        say(f"{NUM_WRITERS} processes begin to store {shape} without a pause")
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="antiphon-bench-")))
        with ExitStack() as storing:
            writers = [storing.enter_context(Writer(target, shape, number, folder)) for number in range(NUM_WRITERS)]
            _wait_storing(writers)
            idle = _watch_writers(max(0.2, sum(alone.times_s)), server, writers)
            say(f"{num_calls} lookups beside them")
            beside = _look_up(session, prompt, num_calls, server, writers)
        release(session, "kept", kept)
        ask(session, protocol.Clear(model=model_of(layout_of(shape))), protocol.Cleared)
    _add_rows(rows, alone, beside, idle if server else None)


def _look_up(
    session: Session, prompt: Prompt, num_calls: int, server: BenchProcess | None, writers: list[Writer]
) -> _Lookups:
    times_s = []
    calls = sum(writer.num_calls for writer in writers)
    server_s = server.cpu_s() if server else 0.0
    client_s = time.process_time()
    for number in range(num_calls):
        began_s = time.perf_counter()
        found = lookup(session, prompt, f"beside-{number}")
        times_s.append(time.perf_counter() - began_s)
        if len(found.regions) != len(prompt.keys):
            raise CacheMiss(f"{len(found.regions)} of {len(prompt.keys)} chunks were found")
        release(session, f"beside-{number}", found)
    client_s = time.process_time() - client_s
    server_s = server.cpu_s() - server_s if server else 0.0
    return _Lookups(times_s, client_s, server_s, sum(writer.num_calls for writer in writers) - calls)


def _wait_storing(writers: list[Writer]) -> None:
    deadline_s = time.monotonic() + WRITER_START_TIMEOUT_S
    while not all(writer.num_calls for writer in writers):
        if time.monotonic() > deadline_s or any(writer.process.exit_code is not None for writer in writers):
            logs = "\n".join(writer.log_path.read_text(errors="replace")[-500:] for writer in writers)
            raise StartError(f"a writer does not store:\n{logs}")
        time.sleep(0.02)


def _watch_writers(duration_s: float, server: BenchProcess | None, writers: list[Writer]) -> float:
    """Processor seconds of the server for one call of a writer, when nobody looks up."""
    calls = sum(writer.num_calls for writer in writers)
    server_s = server.cpu_s() if server else 0.0
    deadline_s = time.monotonic() + duration_s
    # At least this many calls, so that one that straddles the ends does not count.
    while time.monotonic() < deadline_s or sum(writer.num_calls for writer in writers) - calls < 100:
        if any(writer.process.exit_code is not None for writer in writers):
            raise StartError("a writer has ended")
        time.sleep(0.02)
    server_s = server.cpu_s() - server_s if server else 0.0
    return server_s / (sum(writer.num_calls for writer in writers) - calls)


def _add_rows(rows: Rows, alone: _Lookups, beside: _Lookups, writer_call_s: float | None) -> None:
    client_us, beside_us = (each.client_cpu_s / each.num_calls * 1e6 for each in (alone, beside))
    rows.add("processor time of a lookup and its release, client, alone", client_us, "us")
    rows.add("processor time of a lookup and its release, client, beside 3 writers", beside_us, "us")
    note = ""
    if writer_call_s is not None:
        own_us = alone.server_cpu_s / alone.num_calls * 1e6
        share_s = beside.server_cpu_s - beside.num_writer_calls * writer_call_s
        share_us = share_s / beside.num_calls * 1e6
        if share_s <= 0:
            note = "noise: the writers' calls took all of the server's time"
        rows.add("processor time of a lookup and its release, server, alone", own_us, "us")
        rows.add("processor time of a lookup and its release, server, beside 3 writers", share_us, "us", note)
        rows.add("processor time of a writer's call, server", writer_call_s * 1e6, "us")
        client_us, beside_us = client_us + own_us, beside_us + share_us
    ratio = beside_us / client_us
    is_met = ratio <= CPU_GOAL and not note  # a difference that is nothing or less measures nothing
    name = "processor time of a lookup beside 3 writers over alone"
    rows.rows.append(Row(name, ratio, "x", f"<= {CPU_GOAL:g}", is_met, note))
    for name, each in (("alone", alone), ("beside 3 writers", beside)):
        rows.add(f"lookup of {_TOKENS} tokens, keys given, {name}, p50", percentile(each.times_s, 50) * 1e3, "ms")
        rows.add(f"lookup of {_TOKENS} tokens, keys given, {name}, p99", percentile(each.times_s, 99) * 1e3, "ms")
