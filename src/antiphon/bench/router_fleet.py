"""The processes of the router bench: simulated engines, the router before them, and what makes load.

Owns their start and their end. They listen on free ports of this machine, and say which.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from antiphon.bench.processes import BenchProcess
from antiphon.bench.router_load import LoadPlan, LoadResult
from antiphon.core.errors import StartError, UpstreamGarbage

START_TIMEOUT_S: Final = 30.0
LOAD_SLACK_S: Final = 60.0
_LOG_TAIL_BYTES: Final = 2000
_ENGINE_LISTENS: Final = re.compile(rb"simulated engine ready: http=\S+:(\d+)")
_ROUTER_LISTENS: Final = re.compile(rb"engines on http://\S+:(\d+)")


class Listener:
    """A process that listens on a port.

    Args:
        arguments: of ``antiphon``.
        said: finds the port in what it prints.
        log_path: where that goes.
    """

    def __init__(self, arguments: list[str], said: re.Pattern[bytes], log_path: Path) -> None:
        self._said = said
        self._log_path = log_path
        with log_path.open("wb") as log:
            self.process = BenchProcess([sys.executable, "-m", "antiphon", *arguments], log)
        self.port = 0

    def wait(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it listens.

        Raises:
            StartError: it ended, or does not listen in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while (found := self._said.search(self._log_path.read_bytes())) is None:
            code = self.process.exit_code
            if code is not None or time.monotonic() > deadline_s:
                state = f"ended with code {code}" if code is not None else f"does not listen after {timeout_s:g} s"
                tail = self._log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")
                raise StartError(f"{self._log_path.stem} {state}:\n{tail}")
            time.sleep(0.02)
        self.port = int(found[1])


class RouterFleet:
    """Two prefill engines, two decode engines and a router, for one bench.

    Args:
        token_ms: between two tokens of a decode engine.
    """

    def __init__(self, token_ms: float) -> None:
        self._token_ms = token_ms

    def __enter__(self) -> RouterFleet:
        """Start everything.

        Raises:
            StartError: something does not run.
        """
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="antiphon-bench-")))
            engines = [self._engine(stack, role, number) for role in ("prefill", "decode") for number in (1, 2)]
            for engine in engines:
                engine.wait()
            self.engine = engines[2]
            """A decode engine: what a client asks that goes straight to one."""
            urls = [f"http://127.0.0.1:{engine.port}" for engine in engines]
            flags = [word for url in urls[:2] for word in ("--prefill", url)]
            flags += [word for url in urls[2:] for word in ("--decode", url)]
            self.router = self._start(stack, ["router", "--port", "0", *flags], _ROUTER_LISTENS, "router")
            self.router.wait()
            self._stack = stack.pop_all()
        return self

    def _engine(self, stack: ExitStack, role: str, number: int) -> Listener:
        flags = {"role": role, "port": 0, "prefill-overhead-ms": 0, "prefill-tokens-per-s": 1e9}
        flags |= {"decode-token-ms": self._token_ms, "transfer-gb-per-s": 10_000, "kv-blocks": 1_000_000}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        return self._start(stack, ["sim-engine", *words], _ENGINE_LISTENS, f"{role}-{number}")

    def _start(self, stack: ExitStack, arguments: list[str], said: re.Pattern[bytes], name: str) -> Listener:
        listener = Listener(arguments, said, self._folder / f"{name}.log")
        stack.callback(listener.process.stop)
        return listener

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def status(self) -> dict[str, Any]:
        """The router's ``/status``."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.router.port}/status", timeout=10) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found


def generate_load(plan: LoadPlan) -> LoadResult:
    """Run the clients in a process of their own, to their end.

    Raises:
        StartError: it does not run.
        UpstreamGarbage: a request was not answered as it should be: what was measured says nothing.
    """
    command = [sys.executable, "-m", "antiphon.bench.router_load", json.dumps(asdict(plan))]
    try:
        done = subprocess.run(command, capture_output=True, timeout=plan.seconds + LOAD_SLACK_S, check=False)
    except subprocess.TimeoutExpired:
        raise StartError("the clients did not end") from None
    if done.returncode != 0:
        raise StartError(f"the clients do not run:\n{done.stderr[-_LOG_TAIL_BYTES:].decode(errors='replace')}")
    result = LoadResult(**json.loads(done.stdout))
    if result.num_failed or not result.num_answered:
        raise UpstreamGarbage(f"{result.num_failed} requests failed, {result.num_answered} did not: {result.failure}")
    return result
