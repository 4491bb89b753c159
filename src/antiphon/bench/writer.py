"""One client that stores without a pause, as a process: ``python -m antiphon.bench.writer``, started by the bench.

It counts its calls in a file that the bench maps too, and ends when it is killed. It prints nothing.
"""

from __future__ import annotations

import mmap
import struct
import sys
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Final

from antiphon.bench.processes import BenchProcess
from antiphon.bench.rig import Buffer, Prompt, Shape, Target, attached, layout_of, store

CALLS_PER_STORE: Final = 2
"""A reservation and a commit."""
_COUNT: Final = struct.Struct("<q")


class Writer:
    """A writer process, seen from the bench.

    Args:
        target: where it stores.
        shape: what it stores at once.
        number: of the writer.
        folder: where its count and its log are.
    """

    def __init__(self, target: Target, shape: Shape, number: int, folder: Path) -> None:
        path = folder / f"writer-{number}.count"
        path.write_bytes(bytes(_COUNT.size))
        with path.open("r+b") as file:
            self._count = mmap.mmap(file.fileno(), _COUNT.size)
        arguments = [target.host, target.port, target.chunk_size_tokens, shape.num_chunks, shape.chunk_bytes, path]
        program = [sys.executable, "-m", "antiphon.bench.writer", *map(str, arguments)]
        self.log_path = folder / f"writer-{number}.log"
        with self.log_path.open("wb") as log:
            self.process = BenchProcess(program, log)

    @property
    def num_calls(self) -> int:
        """Calls that were answered so far."""
        (count,) = _COUNT.unpack_from(self._count)
        assert isinstance(count, int)
        return count

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.stop()
        self._count.close()


def main(arguments: list[str]) -> None:
    """``HOST PORT CHUNK_SIZE_TOKENS NUM_CHUNKS CHUNK_BYTES COUNT_FILE``; does not return."""
    host, (port, chunk_size_tokens, num_chunks, chunk_bytes) = arguments[0], map(int, arguments[1:5])
    target, shape = Target(host, port, chunk_size_tokens), Shape(num_chunks, chunk_bytes)
    with Path(arguments[5]).open("r+b") as file:
        count = mmap.mmap(file.fileno(), _COUNT.size)
    num_calls = 0
    with (
        closing(Buffer(shape.num_bytes)) as source,
        attached(target, layout_of(shape), "storing") as session,
    ):
        while True:
            prompt = Prompt.new(num_chunks * chunk_size_tokens, chunk_size_tokens)
            store(session, prompt, source.address, chunk_bytes)
            num_calls += CALLS_PER_STORE
            _COUNT.pack_into(count, 0, num_calls)


if __name__ == "__main__":
    main(sys.argv[1:])
