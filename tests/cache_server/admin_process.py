"""A cache server as the process that people start, and a small engine for it.

The engine is the probe's connection: without a thread, and at hand.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.cache_server.probe_connection import ProbeConnection
from antiphon.protocol import cache as wire

MIB = 1 << 20
NAMESPACE = b"n" * 32
READY = re.compile(r"http_port=(\d+) socket=(\S+)")


@contextlib.asynccontextmanager
async def engine_at(socket_path: str, slab_bytes: int, role: str = "worker-0") -> AsyncIterator[ProbeConnection]:
    connection = await ProbeConnection.connect(socket_path)
    try:
        await connection.hello(wire.Hello(wire.PROTOCOL_VERSION, "test"))
        attach = wire.Attach("P", "life", role, os.getpid(), "m", 256, 1, slab_bytes, None, (0,))
        await connection.call(attach, wire.Attached)
        yield connection
    finally:
        connection.close()


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(32, "big") for number in numbers)


async def store(connection: ProbeConnection, *numbers: int) -> tuple[str, ...]:
    """One sequence of one chunk for each number; returns the verdicts."""
    verdicts: tuple[str, ...] = ()
    for number in numbers:
        reserved = await connection.call(wire.Reserve(NAMESPACE, "", None, keys(number)), wire.Reserved)
        verdicts += reserved.verdicts
        for grant in reserved.grants:
            connection.write(grant.region, bytes([number % 256]) * 64)
            await connection.call(wire.Commit((grant.region,)), wire.Committed)
    return verdicts


@dataclass
class Process:
    """A server that was started as people start it."""

    child: subprocess.Popen[str]
    port: int
    socket_path: str

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def has_room(self) -> bool:
        """Whether all of its memory is there: it grows beside the first calls, which are refused for want of room."""
        _, body = self.ask("/healthz")
        return bool(body["populated_ratio"] == 1)

    def ask(self, path: str) -> tuple[int, Any]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(self.url + path, timeout=10) as response:
                return response.status, json.loads(response.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())


@contextlib.contextmanager
def started(folder: Path, die_with_parent: Callable[[], None], *more: str) -> Iterator[Process]:
    """A server of 4 MiB, ready; killed at the end if it still runs."""
    path = folder / "server.log"
    flags = ["--port", "0", "--http-port", "0", "--l1-size-gb", "0.0042", "--runtime-dir", str(folder / "run"), *more]
    with path.open("w") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "antiphon", "cache-server", *flags],
            stdout=log,
            stderr=log,
            text=True,
            preexec_fn=die_with_parent,
        )
    try:
        yield _ready(child, path)
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.send_signal(signal.SIGCONT)
        child.kill()
        child.wait(timeout=10)


def _ready(child: subprocess.Popen[str], path: Path) -> Process:
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s and child.poll() is None:
        match = READY.search(path.read_text())
        if match:
            found = Process(child, int(match.group(1)), match.group(2))
            if found.has_room:
                return found
        time.sleep(0.02)
    raise AssertionError(f"the server did not become ready: {path.read_text()}")
