"""How fast chunks go into the cache and out of it, beside a plain copy of the same memory in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial

from antiphon.bench.figures import Rows, Say
from antiphon.bench.rig import Buffer, Prompt, Shape, Target, attached, layout_of, retrieve, store
from antiphon.core.errors import CacheError
from antiphon.storage.arena import copy_bytes

GOAL = 0.8
"""Share of a plain copy's rate."""
_WARM_ROUNDS_MAX = 64


def measure_copies(target: Target, shape: Shape, num_rounds: int, rows: Rows, say: Say) -> None:
    """Adds the rates of copy, store and retrieve, and the two ratios.

    One thread, warm buffers; in each round a copy, a store of chunks that the server has not seen, and a retrieve; the
    best round counts. A store is reserve, copy and commit; a retrieve is lookup, copy and release. The ratios are to a
    copy of the same pieces: from some 200 MB on, a C library copies one piece past the processor's caches, faster.
    """
    chunk_bytes = shape.chunk_bytes
    with (
        closing(Buffer(shape.num_bytes)) as source,
        closing(Buffer(shape.num_bytes)) as destination,
        attached(target, layout_of(shape), "copies") as session,
    ):
        source.fill_random()
        assert session.arena is not None
        # Every page of the arena is in this process's page table after as many stores as fill it.
        num_warm = min(_WARM_ROUNDS_MAX, 1 + session.arena.data_bytes // shape.num_bytes)
        say(f"{shape}: warming the arena with {num_warm} stores")
        for _ in range(num_warm):
            prompt = Prompt.new(shape.num_chunks * target.chunk_size_tokens, target.chunk_size_tokens)
            store(session, prompt, source.address, chunk_bytes)
        times_s: dict[str, list[float]] = {}
        for number in range(num_rounds):
            prompt = Prompt.new(shape.num_chunks * target.chunk_size_tokens, target.chunk_size_tokens)
            works: dict[str, Callable[[], None]] = {
                "copy, whole": partial(copy_bytes, destination.address, source.address, shape.num_bytes),
                "copy, by chunk": partial(_copy_by_chunk, destination, source, chunk_bytes),
                "store": partial(store, session, prompt, source.address, chunk_bytes),
                "retrieve": partial(retrieve, session, prompt, "copies", destination.address, chunk_bytes),
            }
            for name, work in works.items():
                if name == "retrieve":
                    destination.clear()
                began_s = time.perf_counter()
                work()
                times_s.setdefault(name, []).append(time.perf_counter() - began_s)
            if not destination.equals(source):
                raise CacheError("the bytes that were retrieved are not those that were stored")
            rates = ", ".join(f"{name} {shape.num_bytes / each[-1] / 1e9:.1f}" for name, each in times_s.items())
            say(f"{shape}: round {number + 1} of {num_rounds}, GB/s: {rates}")
    rates_gb = {name: shape.num_bytes / min(each) / 1e9 for name, each in times_s.items()}
    for name, rate in rates_gb.items():
        rows.add(f"{name}, {shape}", rate, "GB/s", f"best of {num_rounds}")
    for name in ("store", "retrieve"):
        rows.at_least(f"{name} over copy, {shape}", rates_gb[name] / rates_gb["copy, by chunk"], "x", GOAL)


def _copy_by_chunk(destination: Buffer, source: Buffer, chunk_bytes: int) -> None:
    for start in range(0, source.num_bytes, chunk_bytes):
        copy_bytes(destination.address + start, source.address + start, chunk_bytes)
