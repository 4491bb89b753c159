"""What every measurement on a GPU machine uses: processes, requests, medians, and the table and JSON at the end.

Standard library only, so that it runs with whatever Python has PyTorch. Every process that is started here is ended
here, with its children; everything listens on loopback.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 180.0
LIVELY = ("--worker-extension-cls", "lively_weights.LivelyWeights")
"""For an engine whose tokens depend on its KV."""
KV_BYTES_PER_TOKEN = 32 * 8 * 2 * 128 * 2
"""Of the 8B shape in bf16: layers, KV heads, K and V, elements of a head, bytes."""
FATAL = re.compile(r"Engine core initialization failed|EngineCore encountered a fatal error|EngineDeadError")


def say(text: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


class Failed(Exception):
    """The measurement cannot go on; the message says why."""


class OutOfTime(Exception):
    """Neither this measurement nor those after it can go on."""


# ---- processes -------------------------------------------------------------------------------------------------------


@dataclass
class Paths:
    """Where things are.

    Args:
        site: folder with vLLM and its packages, in front of the ones of the machine; None where they are installed.
        source: folder with Antiphon's source, in front of an installed one; None for the installed one.
        model: folder with ``config.json`` and perhaps a tokenizer.
        out: logs and figures.
    """

    site: Path | None
    source: Path | None
    model: Path
    out: Path

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
    """A child with a log; ``end`` ends its whole session."""

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

    def cpu_s(self) -> float:
        """Seconds of processor time that it has used, without its children."""
        fields = Path(f"/proc/{self.child.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        """Ends it, at last by force."""
        for number, wait_s in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
            try:
                os.killpg(self.child.pid, number)
            except ProcessLookupError:
                break
            try:
                self.child.wait(wait_s)
            except subprocess.TimeoutExpired:
                continue
        self.child.wait(5.0)


@dataclass
class Stack:
    """The processes of one measurement, ended when the block is left.

    Args:
        checkpoint: folder with weights that engines load; None for random ones in the model's shape.
    """

    paths: Paths
    processes: list[Process] = field(default_factory=list)
    checkpoint: Path | None = None

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_unused: object) -> None:
        for process in reversed(self.processes):
            process.end()

    def start(self, name: str, port: int, argv: Sequence[str], **environment: str) -> Process:
        """Starts a Python module in a session of its own."""
        log = self.paths.out / f"{name}.log"
        with log.open("wb") as sink:
            child = subprocess.Popen(
                [sys.executable, "-m", *argv],
                stdout=sink,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**self.paths.environment(), **environment},
                start_new_session=True,
            )
        process = Process(name, port, child, log)
        self.processes.append(process)
        return process

    def cache_server(self, port: int, size_gb: float) -> Process:
        """A cache server; its page is one port above."""
        argv = ("antiphon", "cache-server", "--port", str(port), "--http-port", str(port + 1))
        more = ("--l1-size-gb", f"{size_gb:g}", "--instance-id", f"gpu-{port}", "--runtime-dir", "/tmp/antiphon-gpu")
        return self.start(f"cache-{port}", port + 1, (*argv, *more))

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
        return self.start(name, port, argv, **environment)

    def router(self, name: str, port: int, *args: str) -> Process:
        """A router; ready at ``/readiness``."""
        return self.start(name, port, ("antiphon", "router", "--port", str(port), "--log-level", "warning", *args))

    def wait_ready(self, processes: Iterable[Process], path: str = "/health") -> None:
        """Until each answers. Raises Failed where one has failed, or at the deadline."""
        until_s = time.monotonic() + START_TIMEOUT_S
        for process in processes:
            while True:
                try:
                    if get(process.port, path)[0] == 200:
                        break
                except OSError:
                    pass
                process.check()
                if time.monotonic() > until_s:
                    raise Failed(f"{process.name} was not ready within {START_TIMEOUT_S:g} s")
                time.sleep(0.5)


def antiphon(port: int, role: str = "kv_both", **extra: object) -> dict[str, Any]:
    """The ``--kv-transfer-config`` of an engine beside the cache server on ``port``."""
    return {
        "kv_connector": "AntiphonConnector",
        "kv_connector_module_path": "antiphon.connector.vllm_connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"antiphon.host": "127.0.0.1", "antiphon.port": port, **extra},
    }


# ---- requests --------------------------------------------------------------------------------------------------------


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def metric(port: int, name: str, label: str = "") -> float:
    """The sum of a metric over its labels, of those that have ``label``."""
    lines = get(port, "/metrics")[1].splitlines()
    found = [line for line in lines if re.match(rf"{re.escape(name)}[{{ ]", line) and label in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def external_hits(port: int) -> float:
    """Tokens that came from the connector."""
    return metric(port, "vllm:external_prefix_cache_hits_total")


def num_chunks(cache: Process) -> int:
    """Chunks in the cache server."""
    return int(json.loads(get(cache.port, "/status")[1])["storage_manager"]["l1_manager"]["total_object_count"])


def wait_stored(cache: Process, at_least: int, quiet_s: float = 1.0) -> None:
    """Until the server holds that many chunks, or their number has not changed for a while: it may be full."""
    number, since_s = num_chunks(cache), time.monotonic()
    while number < at_least and time.monotonic() - since_s < quiet_s:
        time.sleep(0.05)
        now = num_chunks(cache)
        if now != number:
            number, since_s = now, time.monotonic()


def reset(port: int, query: str = "", timeout_s: float = 20.0) -> None:
    """Empties the engine's own prefix cache. Raises Failed where blocks stay in use."""
    until_s = time.monotonic() + timeout_s
    while True:
        status, text = get(port, f"/reset_prefix_cache{query}", "POST")
        if status == 200 and '"success":false' not in text.replace(" ", ""):
            return
        if time.monotonic() > until_s:
            raise Failed(f"the prefix cache of port {port} cannot be emptied, blocks are in use: {text}")
        time.sleep(0.05)


def prompt(num_tokens: int, seed: int) -> list[int]:
    """Token ids; another seed shares no prefix."""
    chance = random.Random(seed * 1_000_003 + num_tokens)
    return [chance.randrange(100, 48_000) for _ in range(num_tokens)]


@dataclass
class Answer:
    """What a request gave.

    Args:
        tokens: their ids.
        times_s: of each event, from sending the request; a busy engine puts several tokens into one.
        num_tokens: of a stream.
    """

    tokens: list[int]
    times_s: list[float]
    params: dict[str, Any] | None = None
    num_tokens: int = 0


def ask(port: int, ids: list[int], max_tokens: int = 16, **fields: object) -> Answer:
    """A greedy completion in one piece, with its token ids."""
    body = {
        "model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise Failed(f"{answer.status}: {text[:500]!r}")
    found = json.loads(text)
    return Answer(list(found["choices"][0]["token_ids"]), [], found.get("kv_transfer_params"))


def stream_body(ids: list[int], max_tokens: int, **fields: object) -> bytes:
    """What ``stream`` sends."""
    return json.dumps(
        {"model": "m", "prompt": ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
         "stream_options": {"include_usage": True}, **fields}
    ).encode()  # fmt: skip


def stream(port: int, ids: list[int], max_tokens: int, leave_after_s: float | None = None, **fields: object) -> Answer:
    """A greedy completion as a stream, with the time of each token; given up after ``leave_after_s``."""
    return send(port, stream_body(ids, max_tokens, **fields), leave_after_s)


def send(port: int, body: bytes, leave_after_s: float | None = None) -> Answer:
    """As ``stream``, of a body that is made."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    times_s: list[float] = []
    num_tokens = 0
    began_s = time.perf_counter()
    try:
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        if leave_after_s is not None:
            time.sleep(leave_after_s)
            return Answer([], [])
        answer = connection.getresponse()
        if answer.status != 200:
            raise Failed(f"{answer.status}: {answer.read()[:500]!r}")
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            now_s = time.perf_counter() - began_s
            if b'"choices":[]' in line:  # the last event has the usage
                num_tokens = int(json.loads(line[6:])["usage"]["completion_tokens"])
            else:
                times_s.append(now_s)
    finally:
        connection.close()
    return Answer([], times_s, num_tokens=num_tokens)


def ttft_ms(port: int, ids: list[int]) -> float:
    """Milliseconds to the first token."""
    return stream(port, ids, 2).times_s[0] * 1e3


def at_once(jobs: Sequence[Callable[[], Any]], concurrency: int) -> list[Any]:
    """The results, in order; at most ``concurrency`` run at a time."""
    with ThreadPoolExecutor(concurrency) as pool:
        return [one.result() for one in [pool.submit(job) for job in jobs]]


# ---- figures ---------------------------------------------------------------------------------------------------------


def median(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass
class Report:
    """Figures, and what was asked of them. ``rows``: what, figure, limit, verdict."""

    point: str
    out: Path
    figures: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def note(self, name: str, value: Any, shown: str = "", limit: str = "", is_met: bool | None = None) -> None:
        """One figure, with a line in the table where ``shown`` is given."""
        self.figures[name] = value
        if shown:
            verdict = "" if is_met is None else ("met" if is_met else "MISSED")
            self.rows.append((name, shown, limit, verdict))
            say(f"  {name}: {shown} {limit} {verdict}".rstrip())
            self._write()

    def _write(self) -> Path:
        """Whatever ends the measurement, the figures so far are there."""
        path = self.out / f"{self.point}.json"
        path.write_text(json.dumps(self.figures, indent=1, default=str) + "\n")
        return path

    def close(self, failure: str | None = None) -> bool:
        """Prints the table and writes ``POINT.json``. Returns whether nothing failed and nothing was missed."""
        self.figures["seconds"] = round(time.monotonic() - self.began_s, 1)
        self.figures["failure"] = failure
        is_good = failure is None and all(row[3] != "MISSED" for row in self.rows)
        self.figures["good"] = is_good
        path = self._write()
        widths = [max([len(row[column]) for row in self.rows] or [0]) for column in range(4)]
        for row in self.rows:
            say("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
        if failure is not None:
            say(f"FAILED: {failure}")
        say(f"{self.figures['seconds']} s, figures in {path}")
        return is_good


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
