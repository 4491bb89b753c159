"""Real processes of the simulated engine, and a client of the standard library that knows nothing of ours."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

FAST = {"prefill-overhead-ms": 0, "prefill-tokens-per-s": 1e9, "decode-token-ms": 0, "transfer-gb-per-s": 10000}
"""Flags of an engine that costs no time."""


class EngineProcess:
    """One running engine."""

    def __init__(self, process: subprocess.Popen[str], port: int, side_channel_port: int) -> None:
        self.process = process
        self.port = port
        self.side_channel_port = side_channel_port

    @classmethod
    def start(cls, preexec: Callable[[], None], **flags: Any) -> EngineProcess:
        """Start an engine with ``flags`` (underscores for dashes) on free ports and wait until it is ready."""
        merged = FAST | {"model-name": "m", "block-size-tokens": 4} | {k.replace("_", "-"): v for k, v in flags.items()}
        argv = [sys.executable, "-m", "antiphon", "sim-engine"]
        argv += [part for name, value in merged.items() for part in (f"--{name}", str(value))]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=preexec)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("simulated engine ready: http="), line
        http_part, side_part = line.split()[3:]
        return cls(process, int(http_part.rsplit(":", 1)[1]), int(side_part.rsplit("=", 1)[1]))

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(10)
        finally:
            assert self.process.stdout is not None
            self.process.stdout.close()

    def kill(self) -> None:
        """SIGKILL."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @contextlib.contextmanager
    def connection(self, timeout_s: float = 20.0) -> Iterator[http.client.HTTPConnection]:
        """One connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            yield connection
        finally:
            connection.close()

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, bytes]:
        """One request on its own connection: (status, body). Bytes go as they are, anything else as JSON."""
        with self.connection() as connection:
            self.send(connection, method, path, body, **headers)
            response = connection.getresponse()
            return response.status, response.read()

    @staticmethod
    def send(connection: http.client.HTTPConnection, method: str, path: str, body: Any = None, **headers: str) -> None:
        """Write a request and do not wait."""
        fields = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, fields)

    def exchange(self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None) -> bytes:
        """Send, and read the whole answer, whatever its status."""
        self.send(connection, method, path, body)
        return connection.getresponse().read()

    def json(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """As :meth:`ask`, where the answer must be 200 and JSON."""
        status, data = self.ask(method, path, body, **headers)
        assert status == 200, (status, data)
        return json.loads(data)

    def state(self) -> Any:
        """GET /simulated/state."""
        return self.json("GET", "/simulated/state")

    def fault(self, kind: str, **fields: Any) -> None:
        """Arm a fault."""
        self.json("POST", "/simulated/fault", {"kind": kind} | fields)

    def complete(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> Any:
        """POST /v1/completions."""
        return self.json("POST", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens} | fields)

    def text(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> str:
        """The text of one completion."""
        text: str = self.complete(prompt, max_tokens, **fields)["choices"][0]["text"]
        return text

    def prefill(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """Prefill for a hand-over; the handle."""
        params = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
        handle: dict[str, Any] = self.complete(prompt, 1, kv_transfer_params=params, **fields)["kv_transfer_params"]
        return handle

    def wait_state(self, timeout_s: float = 10.0, **expected: Any) -> Any:
        """Wait until the state has the expected values."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            state = self.state()
            if all(state[key] == value for key, value in expected.items()):
                return state
            assert time.monotonic() < deadline_s, {key: state[key] for key in expected}
            time.sleep(0.01)


def sse_events(data: bytes) -> list[Any]:
    """The events of a stream: JSON values, and ``"[DONE]"``."""
    pieces = [piece[6:] for piece in data.decode().split("\n\n") if piece]
    return [piece if piece == "[DONE]" else json.loads(piece) for piece in pieces]
