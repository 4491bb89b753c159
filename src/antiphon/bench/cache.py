"""The bench of the cache server: which measurements, in which order, against which server, and their result."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from antiphon.bench.cache_calls import measure_hashing, measure_lookups, measure_ping, measure_read_after_write
from antiphon.bench.cache_contention import NUM_WRITERS, measure_contention
from antiphon.bench.cache_copies import measure_copies
from antiphon.bench.figures import BenchResult, Rows, Say
from antiphon.bench.processes import BenchProcess, OwnServer
from antiphon.bench.rig import Shape, Target
from antiphon.core.chunks import CHUNK_SIZE_TOKENS
from antiphon.core.errors import CapacityExceeded
from antiphon.core.memory import available_memory_bytes

DEFAULT_SHAPES: Final = (Shape(32, 5_898_240), Shape(8, 33_554_432))
"""190 MB in chunks of a 135M model's 256 tokens; 256 MiB in chunks of 256 tokens of 128 KiB, as an 8B model's."""
WRITER_SHAPE: Final = Shape(8, 5_898_240)
_ARENA_SHAPES: Final = 3
"""One writer may reserve half of an arena, one reader lease half: a third leaves room for both."""


@dataclass(frozen=True)
class CacheBenchOptions:
    """What to measure.

    Args:
        server: host and port of a running server; None starts one.
        chunk_size_tokens: of that server.
        shapes: what is stored and retrieved at once, one after the other.
        writer_shape: what each of the writers stores at once.
        num_rounds: rounds of copy, store and retrieve; the best counts.
        lookup_tokens: lengths of prompts.
        num_calls: calls of each latency.
        num_read_after_write: lookups right after a store.
    """

    server: tuple[str, int] | None = None
    chunk_size_tokens: int = CHUNK_SIZE_TOKENS
    shapes: tuple[Shape, ...] = DEFAULT_SHAPES
    writer_shape: Shape = WRITER_SHAPE
    num_rounds: int = 5
    lookup_tokens: tuple[int, ...] = (1_024, 2_048, 8_192, 32_768, 131_072)
    num_calls: int = 1_000
    num_read_after_write: int = 1_000

    @classmethod
    def quick(
        cls, server: tuple[str, int] | None = None, chunk_size_tokens: int = CHUNK_SIZE_TOKENS
    ) -> CacheBenchOptions:
        """Seconds instead of minutes: the figures say that it runs, not how fast it is."""
        return cls(
            server=server,
            chunk_size_tokens=chunk_size_tokens,
            shapes=(Shape(8, 262_144),),
            writer_shape=Shape(4, 262_144),
            num_rounds=2,
            lookup_tokens=(1_024, 8_192),
            num_calls=50,
            num_read_after_write=100,
        )

    @property
    def arena_bytes(self) -> int:
        """Of the server that is started."""
        largest = max(shape.num_bytes for shape in self.shapes)
        return max(_ARENA_SHAPES * largest, 2 * (NUM_WRITERS + 1) * self.writer_shape.num_bytes, 64 << 20)

    @property
    def memory_bytes(self) -> int:
        """Of everything."""
        largest = max(shape.num_bytes for shape in self.shapes)
        return self.arena_bytes + 2 * largest + NUM_WRITERS * self.writer_shape.num_bytes + (512 << 20)


def run_cache_bench(options: CacheBenchOptions, say: Say) -> BenchResult:
    """Measures everything, one after the other.

    Raises:
        CapacityExceeded: there is too little memory.
        StartError: the server, or a writer, does not run.
        CacheError: the server cannot be reached, or does not do what it should.
    """
    if options.memory_bytes > (free := available_memory_bytes()):
        raise CapacityExceeded(
            f"the bench needs {options.memory_bytes / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free",
            remedy="end other programs, or run it with --quick",
        )
    rows = Rows()
    with ExitStack() as stack:
        process: BenchProcess | None = None
        if options.server is None:
            say(f"starting a cache server with {options.arena_bytes / 1e9:.1f} GB")
            own = stack.enter_context(OwnServer(math.ceil(options.arena_bytes / 1e6) / 1e3))
            process, address = own.process, (own.host, own.port)
        else:
            address = options.server
        target = Target(*address, options.chunk_size_tokens)
        for shape in options.shapes:
            measure_copies(target, shape, options.num_rounds, rows, say)
        measure_hashing(max(options.lookup_tokens), options.chunk_size_tokens, rows, say)
        measure_ping(target, options.num_calls, rows, say)
        measure_lookups(target, options.lookup_tokens, options.num_calls, rows, say)
        measure_read_after_write(target, options.num_read_after_write, rows, say)
        measure_contention(target, process, options.writer_shape, options.num_calls, rows, say)
    return BenchResult.here(rows)
