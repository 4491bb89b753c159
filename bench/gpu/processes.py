"""The processes of a measurement: started with a log, waited for, ended with their children.

Always true:

- What is started dies with the measurement: at its end, at SIGTERM, at its time limit, and also if it is killed
  (``guard``; ``PR_SET_PDEATHSIG`` besides).
- A port that something else listens on is refused before a process is started there, and a process that has ended is
  never ready: what answers is what was started.
- ``OutOfTime`` is raised once; from then on nothing disturbs the clean-up, which has limits of its own.

Everything listens on loopback. Standard library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import guard
import memory

START_TIMEOUT_S = 300.0
TERM_S, KILL_S = 10.0, 5.0
"""How long processes have to end after SIGTERM, all together, and after SIGKILL."""
PORT_FREE_S = 5.0
FATAL = re.compile(r"Engine core initialization failed|EngineCore encountered a fatal error|EngineDeadError")
REGISTERED = re.compile(r"MB of the arena are registered, (\d+) MB are refused for good(?:; copies waited for (\d+))?")
CAPTURE = re.compile(r"CUDA error 90[0-9]\b|cudaErrorStreamCapture|operation .{0,60}captur", re.IGNORECASE)
"""Errors of a stream that is capturing, and of what is not allowed meanwhile."""
PR_SET_PDEATHSIG = 1
STOPPING = (signal.SIGALRM, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_libc = ctypes.CDLL(None)


def say(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Failed(Exception):
    """The measurement cannot go on; the message says why."""


class OutOfTime(BaseException):
    """Neither this measurement nor those after it can go on: the time is over, or it was told to stop."""


# ---- the end ---------------------------------------------------------------------------------------------------------


def stop_at(limit_s: int) -> None:
    """Raises OutOfTime in the main thread at the limit, or at SIGTERM, SIGINT or SIGHUP; once."""

    def stop(number: int, _frame: object) -> None:
        signal.alarm(0)
        for other in STOPPING:
            signal.signal(other, signal.SIG_IGN)
        is_over = number == signal.SIGALRM
        raise OutOfTime(f"it took longer than {limit_s} s" if is_over else f"it got {signal.Signals(number).name}")

    for number in STOPPING:
        if number == signal.SIGALRM or signal.getsignal(number) != signal.SIG_IGN:  # ``nohup`` is respected
            signal.signal(number, stop)
    signal.alarm(limit_s)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """No alarm and no signal to stop comes in between. In the main thread."""
    signal.alarm(0)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in STOPPING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def die_with(parent: int) -> None:
    """In a child: SIGKILL when the thread that started it ends, at once if its process has ended already."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _begin_client(parent: int) -> None:
    """In a client process: it has inherited how the measurement takes signals."""
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(parent)


@contextlib.contextmanager
def client_processes(number: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that send requests. After an error nothing is waited for: they end with this process."""
    pool = ProcessPoolExecutor(number, initializer=_begin_client, initargs=(os.getpid(),))
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


# ---- processes -------------------------------------------------------------------------------------------------------


@dataclass
class Paths:
    """Where things are.

    Args:
        site: folder with vLLM and its packages, in front of the ones of the machine; None where they are installed.
        source: folder with Antiphon's source, in front of an installed one; None for the installed one.
        model: folder with ``config.json`` and a tokenizer.
        out: logs and figures.
        memory_grows: the machine has more memory than it says, and gets it as it is used.
    """

    site: Path | None
    source: Path | None
    model: Path
    out: Path
    memory_grows: bool = False

    def environment(self) -> dict[str, str]:
        """For processes."""
        parts = [str(part.resolve()) for part in (self.source, self.site, Path(__file__).parent) if part is not None]
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*parts, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
            "PYTHONUNBUFFERED": "1",
            "PYTHONHASHSEED": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }


@dataclass
class Process:
    """A child with a log, the leader of a session. ``port``: where it answers over HTTP."""

    name: str
    port: int
    child: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """Raises Failed where it has ended or its log says that it will not go on."""
        text = self.log.read_text(errors="replace")
        if self.child.poll() is not None or FATAL.search(text):
            reason = "\n".join(line for line in text.splitlines() if "ERROR" in line or "Error" in line)[-3000:]
            raise Failed(f"{self.name} has failed:\n{reason or text[-3000:]}")

    def check_reuse(self, num_workers: int = 1) -> None:
        """Of an engine that is ready: raises Failed where the connector has not turned reuse on in each worker."""
        text = self.log.read_text(errors="replace")
        if text.count("KV reuse is on") < num_workers:
            lines = [line for line in text.splitlines() if "antiphon" in line.lower() or "reuse" in line]
            raise Failed(f"the gate has not passed, see {self.log}:\n" + "\n".join(lines[-20:]))

    def is_registered(self, num_workers: int = 1) -> bool:
        """Of an engine: whether its driver knows all of the arena."""
        found = REGISTERED.findall(self.log.read_text(errors="replace"))
        return len(found) >= num_workers and not any(int(refused) for refused, _ in found)

    def num_waited(self) -> int:
        """Of an engine: pieces of the arena that copies waited for, as its log says when all are registered."""
        found = REGISTERED.findall(self.log.read_text(errors="replace"))
        return sum(int(waited or 0) for _, waited in found)

    def cpu_s(self) -> float:
        """Seconds of processor time that it has used, without its children."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Ends its whole session, at last by force."""
        end_all([self])


def end_all(processes: Sequence[Process]) -> None:
    """Ends their sessions, all at once, at last by force. What cannot be ended is said, and raises nothing."""
    sessions = {process.child.pid for process in processes}
    for number, wait_s in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        guard.kill(sessions, number)
        until_s = time.monotonic() + wait_s
        while True:
            left = guard.members(sessions)
            # After the look. One that ends is no member from its main thread's end on, and reaped after the last one's.
            unreaped = [process.name for process in processes if process.child.poll() is None]
            if not left and not unreaped:
                return
            if time.monotonic() > until_s:
                break
            time.sleep(0.05)
    say(f"processes {left} do not end")


@dataclass
class Stack:
    """The processes of one measurement, ended when the block is left.

    Args:
        checkpoint: folder with weights that engines load; None for random ones in the model's shape.
    """

    paths: Paths
    processes: list[Process] = field(default_factory=list)
    checkpoint: Path | None = None
    _guard: subprocess.Popen[bytes] | None = None
    _runtime: Path | None = None

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_unused: object) -> None:
        with undisturbed():
            end_all(self.processes)
            with contextlib.suppress(OSError):
                # Not by closing the pipe alone: clients that were left after an error hold it too.
                self._tell(*(f"gone {process.child.pid}" for process in self.processes), "end")
            if self._guard is not None and self._guard.stdin is not None:
                with contextlib.suppress(OSError):
                    self._guard.stdin.close()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._guard.wait(30.0)

    def start(self, name: str, port: int, argv: Sequence[str], *more_ports: int, **environment: str) -> Process:
        """Starts a Python module in a session of its own; it answers on ``port``, and listens on ``more_ports`` too.

        Raises Failed where something else listens there.
        """
        for each in (port, *more_ports):
            wait_free(each, name)
        self._start_guard()
        parent = os.getpid()
        log = self.paths.out / f"{name}.log"
        with log.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", *argv],
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.paths.environment(), **environment},
                start_new_session=True,
                preexec_fn=lambda: die_with(parent),
            )
        process = Process(name, port, child, log)
        self.processes.append(process)
        self._tell(f"session {child.pid}")
        return process

    def folder(self, name: str) -> Path:
        """A temporary folder, removed at the end."""
        self._start_guard()
        made = Path(tempfile.mkdtemp(prefix=f"antiphon-{name}-"))
        self._tell(f"folder {made}")
        return made

    def _start_guard(self) -> None:
        if self._guard is None:
            self._guard = subprocess.Popen(
                [sys.executable, guard.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _tell(self, *lines: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write("".join(f"{line}\n" for line in lines).encode())
            self._guard.stdin.flush()

    def make_room(self, size_gb: float) -> None:
        """Brings a machine whose memory grows to have so much free."""
        if self.paths.memory_grows:
            memory.make_room(int(size_gb * 1e9))

    def cache_server(self, port: int, size_gb: float) -> Process:
        """A cache server; its page is one port above."""
        self.make_room(size_gb)
        self._runtime = self._runtime or self.folder("gpu")
        argv = ("antiphon", "cache-server", "--port", str(port), "--http-port", str(port + 1))
        more = ("--l1-size-gb", f"{size_gb:g}", "--instance-id", f"gpu-{port}", "--runtime-dir", str(self._runtime))
        return self.start(f"cache-{port}", port + 1, (*argv, *more), port)

    def engine(self, name: str, port: int, transfer: dict[str, Any] | None, *args: str, **environment: str) -> Process:
        """A vLLM engine with random weights in the model's shape, or with the checkpoint's."""
        model, load_format = (self.paths.model, "dummy") if self.checkpoint is None else (self.checkpoint, "auto")
        argv = [
            "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "m",
            "--host", "127.0.0.1", "--port", str(port), "--load-format", load_format, "--generation-config", "vllm",
            "--max-model-len", "40960", "--uvicorn-log-level", "warning", *args,
        ]  # fmt: skip
        if transfer is not None:
            argv += ["--kv-transfer-config", json.dumps(transfer)]
        side_channel = environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT")
        return self.start(name, port, argv, *([int(side_channel)] if side_channel else []), **environment)

    def router(self, name: str, port: int, *args: str) -> Process:
        """A router; ready at ``/readiness``."""
        return self.start(name, port, ("antiphon", "router", "--port", str(port), "--log-level", "warning", *args))

    def wait_ready(self, processes: Iterable[Process], path: str = "/health") -> None:
        """Until each answers. Raises Failed where one has failed, or at the deadline."""
        until_s = time.monotonic() + START_TIMEOUT_S
        for process in processes:
            while True:
                process.check()
                is_ready = _answers(process.port, path)
                process.check()  # what answered is alive still, so it was this process
                if is_ready:
                    break
                if time.monotonic() > until_s:
                    raise Failed(f"{process.name} was not ready within {START_TIMEOUT_S:g} s")
                time.sleep(0.5)


def _answers(port: int, path: str) -> bool:
    try:
        return get(port, path)[0] == 200
    except (OSError, http.client.HTTPException):
        return False


def is_free(port: int) -> bool:
    """Whether nothing listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def wait_free(port: int, name: str) -> None:
    """Raises Failed where something listens on the port, also a little later: what was just killed may still end."""
    until_s = time.monotonic() + PORT_FREE_S
    while not is_free(port):
        if time.monotonic() > until_s:
            raise Failed(f"port {port} of {name} is in use: another measurement runs here, or an earlier one was left")
        time.sleep(0.1)


def antiphon(port: int, role: str = "kv_both", **extra: object) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of an engine beside the cache server on ``port``."""
    return {
        "kv_connector": "AntiphonConnector",
        "kv_connector_module_path": "antiphon.connector.vllm_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"antiphon.host": "127.0.0.1", "antiphon.port": port, **extra},
    }


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def machine() -> dict[str, str]:
    """Versions and GPU, as far as they can be told."""
    found = {"python": sys.version.split()[0], "cpus": str(os.cpu_count())}
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        found["gpus"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    except OSError as error:
        found["gpus"] = f"none: {error}"
    for package in ("torch", "triton", "vllm", "nixl"):
        try:
            from importlib.metadata import version

            found[package] = version(package)
        except ImportError:
            found[package] = "none"
    return found


def num_gpus() -> int:
    """GPUs of this machine, as far as they can be told."""
    return sum(not line.startswith("none") for line in machine()["gpus"].splitlines())


def need_gpus(number: int) -> None:
    """Raises Failed where there are fewer."""
    if (found := num_gpus()) < number:
        raise Failed(f"{number} GPUs are needed, {found} found")
