"""One real vLLM engine and one cache server for tests of reuse, started directly, without a supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from antiphon.engine.vllm import EngineMetrics, parse_metrics
from tests.real.deployment import START_TIMEOUT_S, wait_for

CHUNK = 256
BLOCK = 128
VOCABULARY = 40_000
REPORT_TIMEOUT_S = 10.0
GIB = 1 << 30


def tokens(num: int, seed: int) -> list[int]:
    """``num`` token ids; another seed shares no prefix."""
    rng = random.Random(seed)
    return [rng.randrange(100, VOCABULARY) for _ in range(num)]


def get(url: str, timeout_s: float = 30.0, *, key: str = "") -> tuple[int, bytes]:
    """GET, with an API key where one is given; status 0 where nothing answers."""
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def post(url: str, body: dict[str, Any] | None = None, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """POST of JSON; the answer's JSON, an empty one as an empty dict."""
    data = b"" if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"content-type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=300) as response:
        content = response.read()
    return json.loads(content) if content else {}


@dataclass(frozen=True, slots=True)
class Completion:
    """What a prompt gave, and where its tokens came from (None where reuse is not reported)."""

    text: str
    seconds: float
    report: dict[str, Any] | None

    def source(self, name: str) -> int:
        """Prompt tokens from a source."""
        assert self.report is not None, "no report came"
        return int(self.report[name])


class CacheServerProcess:
    """``antiphon cache-server`` on fixed ports, so that it can come back behind them."""

    def __init__(self, folder: Path, port: int, http_port: int, preexec: Callable[[], None], adopted: set[int]) -> None:
        self.folder = folder
        self.port = port
        self.url = f"http://127.0.0.1:{http_port}"
        self._http_port = http_port
        self._adopted = adopted
        self._preexec = preexec
        self._output = folder / "cache-server.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "antiphon", "cache-server", "--port", str(self.port)]
        command += ["--http-port", str(self._http_port), "--l1-size-gb", "1.5", "--eviction-policy", "LRU"]
        command += ["--chunk-size", str(CHUNK), "--instance-id", "real", "--runtime-dir", str(self.folder)]
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=self._preexec
            )
        self._adopted.add(self.process.pid)
        wait_for(lambda: get(f"{self.url}/readiness")[0] == 200, "the cache server is ready", 30.0)

    def kill(self, number: int = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(20)
        self._adopted.discard(self.process.pid)

    @contextlib.contextmanager
    def hung(self) -> Iterator[None]:
        """Stopped, as a process that hangs is, for the time of the context."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def status(self) -> dict[str, Any]:
        code, body = get(f"{self.url}/status")
        assert code == 200, body
        found: dict[str, Any] = json.loads(body)
        return found

    @property
    def num_objects(self) -> int:
        return int(self.status()["storage_manager"]["l1_manager"]["total_object_count"])

    def num_leases(self) -> int:
        code, body = get(f"{self.url}/leases")
        assert code == 200, body
        return len(json.loads(body)["leases"])

    def has_engine(self) -> bool:
        """Whether a worker whose gate has passed is attached."""
        code, body = get(f"{self.url}/status")
        if code != 200:
            return False
        gates = [process["gate"] for engine in json.loads(body)["engines"] for process in engine["processes"]]
        return "passed" in gates

    def clear(self) -> None:
        post(f"{self.url}/clear", {})

    def report_of(self, request_id: str) -> dict[str, Any] | None:
        """The report of the request whose id contains ``request_id``; None where there is none yet."""
        code, body = get(f"{self.url}/reports?since=1")
        if code != 200:
            return None
        found = [report for report in json.loads(body)["events"] if request_id in report["request"]]
        return found[0] if found else None


class Engine:
    """A real vLLM engine with the connector, in float32."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        port: int,
        cache: CacheServerProcess,
        preexec: Callable[[], None],
        adopted: set[int],
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._model = model
        self._cache = cache
        self._adopted = adopted
        self._preexec = preexec
        self.log = folder / "engine.log"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, kv_memory_bytes: int) -> None:
        transfer = {
            "kv_connector": "AntiphonConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self._cache.port},
        }
        options: dict[str, Any] = {
            "model": self._model,
            "served-model-name": "smollm2",
            "dtype": "float32",
            "max-model-len": 4096,
            "host": "127.0.0.1",
            "port": self._port,
            "kv-cache-memory-bytes": kv_memory_bytes,
            "max-num-seqs": 16,
            "kv-transfer-config": json.dumps(transfer),
            "generation-config": "vllm",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        switches = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "2",
            "TORCHDYNAMO_DISABLE": "1",
            "ANTIPHON_SPIN_WAIT": "0",
            "ANTIPHON_NIXL_PROGRESS_THREAD": "0",
        }
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **switches},
                preexec_fn=self._preexec,
                start_new_session=True,
            )
        self._adopted.add(self.process.pid)
        wait_for(self._is_ready, "the engine is ready", START_TIMEOUT_S)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"the engine ended:\n{self.log.read_text()[-4000:]}"
        return get(f"{self.url}/health")[0] == 200

    def kill(self) -> None:
        """SIGKILL to all of its processes."""
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
        self._adopted.discard(self.process.pid)

    def metrics(self) -> EngineMetrics:
        return parse_metrics(get(f"{self.url}/metrics")[1].decode())

    def forget(self) -> None:
        """Empties the engine's own prefix cache; the cache server keeps what it has."""

        def is_reset() -> bool:
            return bool(post(f"{self.url}/reset_prefix_cache")["success"])  # False while blocks are in use

        wait_for(is_reset, "the engine's own cache is empty", 20.0)

    def complete(self, prompt: list[int], max_tokens: int = 16, **fields: Any) -> Completion:
        """The completion of ``prompt``, and its report if there is a server to ask."""
        request_id = uuid.uuid4().hex
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, **fields}
        began = time.perf_counter()
        answer = post(f"{self.url}/v1/completions", body, {"X-Request-Id": request_id})
        seconds = time.perf_counter() - began
        report = self._report(request_id) if get(f"{self._cache.url}/readiness", 1.0)[0] == 200 else None
        return Completion(answer["choices"][0]["text"], seconds, report)

    def _report(self, request_id: str) -> dict[str, Any] | None:
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while (report := self._cache.report_of(request_id)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        return report

    def complete_all(self, prompts: list[list[int]], max_tokens: int = 16, **fields: Any) -> list[Completion]:
        """All at the same time."""
        found: dict[int, Completion] = {}

        def run(index: int) -> None:
            found[index] = self.complete(prompts[index], max_tokens, **fields)

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == len(prompts), "a request failed"
        return [found[index] for index in range(len(prompts))]
