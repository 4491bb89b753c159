"""A real deployment for tests: ``antiphon up`` in a process of its own, with real vLLM engines and the demo model."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from antiphon.config.kv_events import kv_events_config
from antiphon.engine.vllm import EngineMetrics, parse_metrics

START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 90.0
LEASE_S = 20

SPEC = """\
name: real
model:
  path: {model}
  served_name: smollm2
  dtype: float32
  max_model_len: 4096
engine:
  device: cpu
  kv_memory_bytes: 400MB
  max_num_seqs: 16
  dev_mode: true
  args:
    generation-config: vllm
    enable-auto-tool-choice: true
    tool-call-parser: hermes
    enable-scale-out: true
prefill:
  port: {prefill}
  side_channel_port: {prefill_side}
  args: {{kv-events-config: '{prefill_events}'}}
decode:
  port: {decode}
  side_channel_port: {decode_side}
  args: {{kv-events-config: '{decode_events}'}}
handoff: {{lease_s: {lease_s}}}
cache: {{shared: true, l1_size_bytes: 1GiB, port: {cache}, http_port: {cache_http}, runtime_dir: "{runtime_dir}"}}
router: {{port: {router}}}
supervisor: {{state_dir: "{state_dir}"}}
"""


def wait_for(holds: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """What ``holds`` returns as soon as it is true; fails the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = holds()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.1)


class Deployment:
    """One prefill engine, one decode engine, a cache server for both, one router.

    Both engines publish their KV events to ``ports["events"]``, where the deployment's own router does not listen: a
    router that a test starts there hears them.
    """

    NUM_PORTS = 10

    def __init__(self, folder: Path, model: Path, ports: list[int], preexec: Callable[[], None]) -> None:
        names = ("prefill", "prefill_side", "decode", "decode_side", "router", "cache", "cache_http")
        names += ("events", "prefill_replay", "decode_replay")
        self.ports = dict(zip(names, ports, strict=True))
        self.state_dir = folder / "state"
        self.spec_path = folder / "antiphon.yaml"
        folders = {"state_dir": self.state_dir, "runtime_dir": folder}
        events = {f"{pool}_events": json.dumps(self.kv_events_config(pool)) for pool in ("prefill", "decode")}
        self.spec_path.write_text(SPEC.format(model=model, lease_s=LEASE_S, **folders, **events, **self.ports))
        self.output = folder / "up.log"
        self.url = f"http://127.0.0.1:{self.ports['router']}"
        self.prefill_url = f"http://127.0.0.1:{self.ports['prefill']}"
        self.decode_url = f"http://127.0.0.1:{self.ports['decode']}"
        self.cache_url = f"http://127.0.0.1:{self.ports['cache_http']}"
        self._preexec = preexec
        self.process: subprocess.Popen[bytes] | None = None

    def kv_events_config(self, pool: str) -> dict[str, Any]:
        """What the engine of a pool is told."""
        url = f"http://127.0.0.1:{self.ports[pool]}"
        listening = f"tcp://127.0.0.1:{self.ports['events']}"
        return kv_events_config(url, listening, self.ports[f"{pool}_replay"], "127.0.0.1")

    def start(self) -> None:
        """Start it and wait until every process is ready."""
        command = [sys.executable, "-m", "antiphon", "up", "--config", str(self.spec_path), "--quiet-logs"]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, preexec_fn=self._preexec
            )
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the router says that both pools have a usable engine."""

        def is_ready() -> bool:
            assert self.process is not None
            assert self.process.poll() is None, f"antiphon up ended:\n{self.output.read_text()[-4000:]}"
            return self.get("/readiness")[0] == 200

        wait_for(is_ready, "the deployment is ready", START_TIMEOUT_S)

    def stop(self) -> int:
        """Stop it as Ctrl-C does; returns the exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_TIMEOUT_S)

    def get(self, path: str, url: str | None = None) -> tuple[int, bytes]:
        """GET; status 0 where nothing answers."""
        try:
            with urllib.request.urlopen((url or self.url) + path, timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()
        except OSError:
            return 0, b""

    def receipt(self, receipt_id: str) -> dict[str, Any]:
        """A closed receipt."""

        def closed() -> dict[str, Any] | None:
            found: dict[str, Any] = json.loads(self.get(f"/receipts/{receipt_id}")[1])
            return found if found["outcome"] is not None else None

        receipt: dict[str, Any] = wait_for(closed, "the receipt is closed", 10.0)
        return receipt

    def router_metric(self, name: str) -> float:
        """The sum of a series of the router over its labels."""
        text = self.get("/metrics")[1].decode()
        lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    def prefill_metrics(self) -> EngineMetrics:
        """The prefill engine's metrics."""
        return parse_metrics(self.get("/metrics", self.prefill_url)[1].decode())

    def decode_metrics(self) -> EngineMetrics:
        """The decode engine's metrics."""
        return parse_metrics(self.get("/metrics", self.decode_url)[1].decode())

    def status(self) -> dict[str, dict[str, Any]]:
        """What ``antiphon status`` says, by process."""
        command = [sys.executable, "-m", "antiphon", "status", "--name", "real", "--format", "json"]
        done = subprocess.run(
            [*command, "--state-dir", str(self.state_dir)], capture_output=True, text=True, check=False
        )
        (deployment,) = json.loads(done.stdout)["deployments"]
        return {row["name"]: row for row in deployment["processes"]}

    def check_live(self) -> subprocess.CompletedProcess[str]:
        """``antiphon config check --live``."""
        command = [sys.executable, "-m", "antiphon", "config", "check", "--live", "--config", str(self.spec_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)
