"""How fast chunks come from another cache server, beside plain NIXL between two processes in the same run.

It starts a coordinator, two cache servers and, where NIXL is, a process with plain registered memory. In each round a
prompt is stored at one server and looked up at the other, which has never seen it: from the call to the answer that all
of it is there, checked and kept. This is done twice: at once, while the holder still takes digests of what it stored
(``pull just stored``), and when it has them (``pull``). Then the same number of bytes is read over plain NIXL in pieces
of the same size.

Both read memory that lies still, and neither disturbs the other: the process that plain NIXL reads from polls while it
is read, and is stopped otherwise. Plain NIXL checks nothing, and asks nobody.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from antiphon.bench.figures import BenchResult, Rows, Say
from antiphon.bench.peers_raw import RawReader
from antiphon.bench.processes import BenchProcess, OwnServer, free_ports, status_of
from antiphon.bench.rig import TENANT, Buffer, Prompt, Shape, Target, ask, attached, layout_of, release, store
from antiphon.client import Session
from antiphon.core.chunks import CHUNK_SIZE_TOKENS
from antiphon.core.errors import CacheError, CapacityExceeded, StartError
from antiphon.core.memory import available_memory_bytes
from antiphon.protocol import cache as protocol

GOAL: Final = 0.7
"""Share of plain NIXL's rate."""
WAIT_S: Final = 60.0
_ARENA_SHAPES: Final = 3
_PULL: Final = "pull"
_JUST_STORED: Final = "pull just stored"


@dataclass(frozen=True)
class PeersBenchOptions:
    """What to measure.

    Args:
        shapes: what is stored and pulled at once.
        num_rounds: of each; the best counts.
        transports: ``nixl`` or ``tcp``, one after the other.
    """

    shapes: tuple[Shape, ...] = (Shape(32, 5_898_240), Shape(8, 33_554_432))
    num_rounds: int = 10
    transports: tuple[str, ...] = ("nixl", "tcp")

    @classmethod
    def quick(cls) -> PeersBenchOptions:
        """Seconds: the figures say that it runs, not how fast it is."""
        return cls((Shape(8, 262_144),), 2)

    @property
    def arena_bytes(self) -> int:
        """Of each server."""
        return max(_ARENA_SHAPES * max(shape.num_bytes for shape in self.shapes), 64 << 20)

    @property
    def memory_bytes(self) -> int:
        """Of everything."""
        return 2 * self.arena_bytes + 3 * max(shape.num_bytes for shape in self.shapes) + (1 << 30)


def run_peers_bench(options: PeersBenchOptions, say: Say) -> BenchResult:
    """Measures everything, one after the other.

    Raises:
        CapacityExceeded: there is too little memory.
        StartError: a process does not run.
        CacheError: a chunk did not come.
    """
    if options.memory_bytes > (free := available_memory_bytes()):
        raise CapacityExceeded(
            f"the bench needs {options.memory_bytes / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free",
            remedy="end other programs, or run it with --quick",
        )
    rows = Rows()
    has_nixl = importlib.util.find_spec("nixl") is not None
    for transport in options.transports:
        if transport == "nixl" and not has_nixl:
            say("NIXL is not installed: peers are measured over TCP only")
            continue
        with _pair(options, transport, say) as pair:
            for shape in options.shapes:
                _measure(pair, shape, options.num_rounds, rows, say)
    return BenchResult.here(rows)


class _Pair:
    """Two servers that share.

    Args:
        holder, puller: the servers.
        coordinator_port: of its HTTP.
        transport: between the two.
        folder: for files.
    """

    def __init__(
        self, holder: OwnServer, puller: OwnServer, coordinator_port: int, transport: str, folder: Path
    ) -> None:
        self.holder = holder
        self.puller = puller
        self.coordinator_port = coordinator_port
        self.transport = transport
        self.folder = folder

    @property
    def num_placed(self) -> int:
        """Pairs of server and chunk that the directory has."""
        return int(status_of(self.coordinator_port)["placements"])

    @property
    def num_undigested(self) -> int:
        """Chunks whose digests the holder is about to take."""
        return int(status_of(self.holder.http_port)["peers"]["num_undigested"])


@contextmanager
def _pair(options: PeersBenchOptions, transport: str, say: Say) -> Iterator[_Pair]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="antiphon-bench-")))
        secret = folder / "secret"
        secret.write_text(secrets.token_hex(32))
        port, http_port = free_ports()
        flags = {"port": port, "http-port": http_port, "cluster-secret-file": secret, "runtime-dir": folder}
        flags |= {"log-level": "warning"}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        with (folder / "log").open("wb") as log:
            coordinator = BenchProcess([sys.executable, "-m", "antiphon", "coordinator", *words], log)
        stack.callback(coordinator.stop)
        _wait(lambda: status_of(http_port) or None, "the coordinator")
        size_gb = math.ceil(options.arena_bytes / 1e6) / 1e3
        say(f"starting two cache servers with {size_gb:g} GB each, over {transport}")
        servers = []
        for name in ("holder", "puller"):
            own = {
                "instance-id": name,
                "coordinator-url": f"127.0.0.1:{port}",
                "p2p-advertise-url": "127.0.0.1:0",
                "cluster-secret-file": str(secret),
                "p2p-transport": transport,
            }
            server = stack.enter_context(OwnServer(size_gb, further=own))
            _wait(lambda server=server: _is_sharing(server, transport), f"{name} shares")
            servers.append(server)
        yield _Pair(servers[0], servers[1], http_port, transport, folder)


def _is_sharing(server: OwnServer, transport: str) -> bool:
    peers: dict[str, Any] = status_of(server.http_port).get("peers") or {}
    return bool(peers.get("is_listed")) and (transport != "nixl" or peers.get("nixl") == "in use")


def _wait(holds: Any, what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > deadline_s:
            raise StartError(f"not within {WAIT_S:g} s: {what}")
        time.sleep(0.02)


def _measure(pair: _Pair, shape: Shape, num_rounds: int, rows: Rows, say: Say) -> None:
    """Adds the rates of pulls and of plain NIXL, and their ratio."""
    layout = layout_of(shape)
    targets = [Target(server.host, server.port, CHUNK_SIZE_TOKENS) for server in (pair.holder, pair.puller)]
    times_s: dict[str, list[float]] = {_PULL: [], _JUST_STORED: []}
    with (
        closing(Buffer(shape.num_bytes)) as source,
        closing(Buffer(shape.num_bytes)) as destination,
        attached(targets[0], layout, "peers") as at_holder,
        attached(targets[1], layout, "peers") as at_puller,
        ExitStack() as stack,
    ):
        source.fill_random()
        raw = _Raw(stack, pair, shape, destination) if pair.transport == "nixl" else None
        for number in range(num_rounds):
            for name in (_PULL, _JUST_STORED):
                prompt = Prompt.new(shape.num_chunks * CHUNK_SIZE_TOKENS, CHUNK_SIZE_TOKENS)
                store(at_holder, prompt, source.address, shape.chunk_bytes)
                _wait(lambda: pair.num_placed == shape.num_chunks, "the directory has all chunks")
                if name == _PULL:
                    _wait(lambda: pair.num_undigested == 0, "the holder has all digests")
                times_s[name].append(_pull(at_puller, prompt))
                ask(at_puller, protocol.Clear(), protocol.Cleared)
                ask(at_holder, protocol.Clear(), protocol.Cleared)
                _wait(lambda: pair.num_placed == 0, "the directory empties")
            if raw is not None:
                times_s.setdefault("plain NIXL", []).append(raw.read(shape.num_bytes, shape.chunk_bytes))
            rates = ", ".join(f"{name} {shape.num_bytes / each[-1] / 1e9:.2f}" for name, each in times_s.items())
            say(f"{shape} over {pair.transport}: round {number + 1} of {num_rounds}, GB/s: {rates}")
    rates_gb = {name: shape.num_bytes / min(each) / 1e9 for name, each in times_s.items()}
    for name, rate in rates_gb.items():
        rows.add(f"{name}, {shape}, {pair.transport}", rate, "GB/s", f"best of {num_rounds}")
    if "plain NIXL" in rates_gb:
        rows.at_least(f"pull over plain NIXL, {shape}", rates_gb[_PULL] / rates_gb["plain NIXL"], "x", GOAL)


class _Raw:
    """Plain NIXL, with the process that it reads from, which is stopped while nothing is read."""

    def __init__(self, stack: ExitStack, pair: _Pair, shape: Shape, destination: Buffer) -> None:
        path = pair.folder / f"raw-{shape.chunk_bytes}"
        with (pair.folder / "log").open("ab") as log:
            program = [sys.executable, "-m", "antiphon.bench.peers_raw", str(path), str(shape.num_bytes)]
            self._process = BenchProcess(program, log)
        stack.callback(self._process.stop)
        stack.callback(self._signal, signal.SIGCONT)  # done before it is asked to end
        _wait(path.exists, "the target of plain NIXL")
        self._reader = RawReader(json.loads(path.read_text()), destination)
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.exit_code is None:
            os.kill(self._process.pid, number)

    def read(self, num_bytes: int, piece_bytes: int) -> float:
        """Seconds that it takes."""
        self._signal(signal.SIGCONT)
        try:
            return self._reader.read(num_bytes, piece_bytes)
        finally:
            self._signal(signal.SIGSTOP)


def _pull(session: Session, prompt: Prompt) -> float:
    """Seconds from the lookup until all chunks are there; raises CacheError where one is not."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        began_s = time.perf_counter()
        body = protocol.Lookup("peers", prompt.namespace, TENANT, prompt.joined, 9.0)
        found = ask(session, body, protocol.Found)
        took_s = time.perf_counter() - began_s
        num = len(found.regions)
        num_pulled = sum(len(indexes) for name, indexes in found.fetched if name == "peer")
        release(session, "peers", found)
        if num == num_pulled == len(prompt.keys):
            return took_s
        # The directory may not have all of it yet: what came is cleared, and asked for again.
        ask(session, protocol.Clear(), protocol.Cleared)
        if time.monotonic() > deadline_s:
            raise CacheError(f"{num} of {len(prompt.keys)} chunks came, {num_pulled} of them from a peer")
        time.sleep(0.05)
