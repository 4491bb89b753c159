"""The processes of a bench. They end with the bench, however it ends.

Owns their start, their end and what the kernel says of the processor time and the memory that they used.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final

from antiphon.core.errors import StartError
from antiphon.supervisor import launch

STOP_GRACE_S: Final = 5.0
_LOG_TAIL_BYTES: Final = 2000


class BenchProcess:
    """A child that the kernel ends with this process.

    Args:
        program: argv.
        log: where its output goes.
    """

    def __init__(self, program: list[str], log: IO[bytes]) -> None:
        command = [sys.executable, "-I", launch.__file__, str(os.getpid()), *program]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
        assert self._child.stdin is not None
        self._child.stdin.write(b"g")
        self._child.stdin.close()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return self._child.poll()

    def cpu_s(self) -> float:
        """See :func:`cpu_s_of`."""
        return cpu_s_of(self.pid)

    def memory_bytes(self) -> tuple[int, int]:
        """Resident memory now, and the most that it was.

        Raises:
            StartError: the process has ended.
        """
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        except OSError:
            lines = []
        found = {line.split()[0]: line.split()[1] for line in lines if line.startswith(("VmRSS:", "VmHWM:"))}
        if len(found) < 2:
            raise StartError(f"the process ended with code {self.exit_code}")
        return int(found["VmRSS:"]) * 1024, int(found["VmHWM:"]) * 1024

    def stop(self) -> None:
        """SIGTERM, and SIGKILL after a grace period."""
        if self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)
            try:
                self._child.wait(STOP_GRACE_S)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()


class OwnServer:
    """A cache server for one bench, on free ports, with a runtime folder of its own.

    Args:
        l1_size_gb: of its arena, 10^9 bytes.
        start_timeout_s: until its whole arena is populated, so that no measurement runs beside that.
        further: flags, by name.
    """

    def __init__(self, l1_size_gb: float, start_timeout_s: float = 60.0, further: dict[str, str] | None = None) -> None:
        self.l1_size_gb = l1_size_gb
        self.further = further or {}
        self.start_timeout_s = start_timeout_s
        self.host = "127.0.0.1"
        self.port = self.http_port = 0

    def __enter__(self) -> OwnServer:
        self._folder = tempfile.TemporaryDirectory(prefix="antiphon-bench-")
        self._log_path = Path(self._folder.name) / "server.log"
        self.port, self.http_port = free_ports()
        flags = {"port": self.port, "http-port": self.http_port, "l1-size-gb": self.l1_size_gb, "instance-id": "bench"}
        flags |= {"runtime-dir": self._folder.name, "log-level": "warning"} | self.further
        program = [sys.executable, "-m", "antiphon", "cache-server"]
        program += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        try:
            with self._log_path.open("wb") as log:
                self.process = BenchProcess(program, log)
            try:
                self._wait_populated()
            except StartError:
                self.process.stop()
                raise
        except BaseException:  # supervised: raised again, once the folder is gone
            self._folder.cleanup()
            raise
        return self

    def _wait_populated(self) -> None:
        deadline_s = time.monotonic() + self.start_timeout_s
        while True:
            if self.process.exit_code is not None:
                raise StartError(f"the cache server ended with code {self.process.exit_code}:\n{self._log_tail()}")
            status = status_of(self.http_port)
            memory = status["storage_manager"]["l1_manager"] if status else None
            if memory and memory["memory_usable_bytes"] == memory["memory_total_bytes"]:
                return
            if time.monotonic() > deadline_s:
                state = f"{memory['memory_usable_bytes']} bytes are populated" if memory else "it does not answer"
                raise StartError(
                    f"the cache server is not ready after {self.start_timeout_s:g} s: {state}\n{self._log_tail()}"
                )
            time.sleep(0.05)

    def _log_tail(self) -> str:
        return self._log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.process.stop()
        self._folder.cleanup()


def cpu_s_of(pid: int) -> float:
    """Processor time of all living threads of a process, in seconds, to the nanosecond."""
    total_ns = 0
    for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        try:
            total_ns += int(path.read_text().split()[0])
        except (OSError, IndexError):
            continue  # the thread has ended since
    return total_ns / 1e9


def status_of(http_port: int) -> dict[str, Any]:
    """``/status`` of a process on loopback; empty while it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", http_port, timeout=5)
    try:
        connection.request("GET", "/status")
        status: dict[str, Any] = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()
    return status


def free_ports() -> tuple[int, int]:
    """Two free loopback ports, both held while they are chosen."""
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
