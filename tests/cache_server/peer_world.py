"""A coordinator and peer hosts as processes, for tests: each ends with the test, whatever happens."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from antiphon.supervisor import launch
from tests.cache_server.world import wait_for

CHUNK_BYTES = 1 << 20
ANSWER_TIMEOUT_S = 30.0


def secret_file(folder: Path, name: str = "secret") -> str:
    path = folder / name
    path.write_text(name * 8 + "0123456789abcdef0123456789abcdef\n")
    return str(path)


class Process:
    """A child whose errors go to a file; it ends when its standard input does, or by ``PR_SET_PDEATHSIG``."""

    def __init__(self, program: list[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self._file = log.open("ab")
        self.child = subprocess.Popen(
            program,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._file,
            cwd=Path(__file__).parents[2],
            env=os.environ | (environment or {}),
        )

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
        self.child.wait()
        for stream in (self.child.stdin, self.child.stdout):
            assert stream is not None
            try:
                stream.close()
            except BrokenPipeError:
                pass
        self._file.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class CoordinatorProcess(Process):
    """``antiphon coordinator`` on loopback."""

    READY = re.compile(r"ready: incarnation=(\S+) port=(\d+) http_port=(\d+)")

    def __init__(self, folder: Path, secret: str, port: int = 0, **flags: Any) -> None:
        flags = {"port": port, "http-port": 0, "cluster-secret-file": secret, "runtime-dir": folder} | flags
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        number = len(list(folder.glob("coordinator*.log")))
        log = folder / f"coordinator{number}.log"
        gate = [sys.executable, "-I", launch.__file__, str(os.getpid())]
        super().__init__([*gate, sys.executable, "-m", "antiphon", "coordinator", *words], log)
        assert self.child.stdin is not None
        self.child.stdin.write(b"g")
        self.child.stdin.flush()
        found = wait_for(lambda: self.READY.search(log.read_text()), "a coordinator that listens", 20.0)
        self.incarnation, self.port, self.http_port = found[1], int(found[2]), int(found[3])
        self.url = f"127.0.0.1:{self.port}"

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=5)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            body = answer.read()
            return answer.status, json.loads(body) if body[:1] == b"{" else body.decode()
        finally:
            connection.close()

    def placements(self) -> int:
        return int(self.get("/status")[1]["placements"])


class HostProcess(Process):
    """A ``peer_host``."""

    def __init__(self, folder: Path, instance: str, coordinator: str, secret: str, **options: Any) -> None:
        options = {
            "coordinator_url": coordinator,
            "p2p_advertise_url": "127.0.0.1:0",
            "cluster_secret_file": secret,
            "instance_id": instance,
            "l1_size_gb": 0.1,
            "runtime_dir": str(folder),
            "p2p_transport": "tcp",
            "chunk_bytes": CHUNK_BYTES,
        } | options
        log = folder / f"{instance}.log"
        environment = options.pop("environment", None)
        program = [sys.executable, "-m", "tests.cache_server.peer_host", json.dumps(options)]
        super().__init__(program, log, environment)
        self.url = self._answer()["url"]

    def _answer(self) -> Any:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"the host has ended: {self.log.read_text()[-3000:]}"
        return json.loads(line)

    def ask(self, verb: str, **arguments: Any) -> Any:
        self.begin(verb, **arguments)
        return self._answer()

    def begin(self, verb: str, **arguments: Any) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps([verb, arguments]).encode() + b"\n")
        self.child.stdin.flush()

    def end(self) -> Any:
        """The answer to what was begun."""
        return self._answer()

    def wait_status(self, what: str, timeout_s: float = 10.0, **values: Any) -> Any:
        """Its status, once it has these values."""

        def holds() -> Any:
            status = self.ask("status")
            return status if all(status[name] == value for name, value in values.items()) else None

        return wait_for(holds, what, timeout_s)

    def stop(self) -> Any:
        """Ends it in order; returns its last words."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        last = self._answer()
        wait_for(lambda: self.child.poll() is not None, "the end of the host", 10.0)
        return last
