"""One local Ray a test session, and one application on it, for the tests of the Ray Serve application: small, on
loopback, without dashboard.

It runs in a process of its own (``ray_host.py``), so that pytest imports no Ray. What Ray starts ends with that
process, and that with the tests.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.ray.listeners import app_listeners
from tests.process.deployment import marked_pids
from tests.router.stack import Answer, ask, quiet_ports, wait_for

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0
CALL_TIMEOUT_S = 100.0
NUM_CPUS = 4
NUM_GPUS = 3
"""Of which Ray is told; there are none."""
APP = f"pd-{os.getpid()}"
"""Processes are found by it, on a machine that may have other applications."""
DELAYS = {
    "upscale_delay_s": 2,
    "downscale_delay_s": 4,
    "look_back_period_s": 3,
    "metrics_interval_s": 0.5,
}
CHANGE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d+).* -- Antiphon scales (\w+) from (\d+) to (\d+) engines: (.*)"
)
HOST = Path(__file__).parent / "ray_host.py"


class RayCallFailed(AssertionError):
    """The host answered with an error, which is the message."""


class RayCluster:
    """A Ray of one node, and Serve on it.

    Args:
        preexec: in the child, before it runs.
        num_gpus: of which Ray is told.
        address: of the node; other nodes may join one that is not loopback.
        resources: what Ray is told that the node has besides.
    """

    def __init__(
        self,
        preexec: Callable[[], None],
        num_gpus: int = 0,
        *,
        address: str = "127.0.0.1",
        resources: dict[str, float] | None = None,
    ) -> None:
        # Not below the folder of the test, whose name is too long for the path of a socket.
        self.folder = Path(tempfile.mkdtemp(prefix="ar-"))
        self.http_port = quiet_ports(1)
        self.call_timeout_s = CALL_TIMEOUT_S
        env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if address == "127.0.0.1":
            env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        env |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "RAY_AUTH_TOKEN": secrets.token_hex(16),
            "HOME": str(self.folder),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(HOST.parents[2]), os.environ.get("PYTHONPATH")))),
        }
        options = {
            "num_cpus": NUM_CPUS,
            "num_gpus": num_gpus,
            "temp_dir": str(self.folder),
            "http_port": self.http_port,
            "address": address,
            "resources": resources or {},
        }
        self.env = env
        self._log = self.folder / "host.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(HOST), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=env,
                preexec_fn=preexec,
            )
        assert self._read(START_TIMEOUT_S) == "ready"

    @property
    def log(self) -> str:
        """What the host has written."""
        return self._log.read_text(errors="replace")

    def call(self, name: str, /, **args: Any) -> Any:
        """Call a function of the host, or ``module:function``, with arguments of JSON.

        Raises:
            RayCallFailed: with the traceback.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, "args": args}).encode() + b"\n")
        self._process.stdin.flush()
        return self._read(self.call_timeout_s)

    def ask(self, method: str, path: str, body: Any = None, **rest: Any) -> Answer:
        """One request to Serve's HTTP address."""
        return ask(self.http_port, method, path, body, **rest)

    def engines(self, app: str) -> dict[str, dict[str, Any]]:
        """What the router's replica knows of the engines, by name."""
        return {info["name"]: info for info in self.call("engines", app=app)["engines"]}

    def wait_running(self, app: str, timeout_s: float) -> None:
        """Wait until Serve says that the application runs."""

        def runs() -> bool:
            said = self.call("application", app=app)
            assert said["status"] != "DEPLOY_FAILED", said["message"]
            return bool(said["status"] == "RUNNING")

        wait_for(runs, f"{app} runs", timeout_s)

    def delete(self, app: str) -> None:
        """Delete an application; nothing of it may be left."""
        self.call("delete", name=app)
        wait_for(lambda: not marked_pids(app), f"nothing of {app} is left", 30.0)

    def stop(self) -> None:
        """End everything."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(STOP_TIMEOUT_S)
        finally:
            self._process.kill()
            self._process.wait(10)
            assert self._process.stdout is not None
            self._process.stdout.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, timeout_s: float) -> Any:
        """The answer of the host; it is killed if there is none in time."""
        assert self._process.stdout is not None
        late = threading.Timer(timeout_s, self._process.kill)
        late.start()
        try:
            line = self._process.stdout.readline()
        finally:
            late.cancel()
        assert line, f"Ray's host has ended, or was killed after {timeout_s:g} s:\n{self.log[-6000:]}"
        answer = json.loads(line)
        if "error" in answer:
            raise RayCallFailed(f"{answer['error']}\n{self.log[-3000:]}")
        return answer["result"]


@pytest.fixture(scope="session")
def ray_cluster(die_with_parent: Callable[[], None]) -> Iterator[RayCluster]:
    """The one Ray of the session."""
    cluster = RayCluster(die_with_parent, NUM_GPUS)
    try:
        yield cluster
    finally:
        cluster.stop()


class App:
    """The application, and the ways to it."""

    def __init__(self, cluster: RayCluster, router_port: int, config: dict[str, Any]) -> None:
        self.cluster = cluster
        self.router_port = router_port
        self.config = config

    @property
    def ports(self) -> dict[str, int]:
        return {"serve": self.cluster.http_port, "router": self.router_port}

    def post(self, path: str, body: Any, **rest: Any) -> Answer:
        return self.cluster.ask("POST", path, body, **rest)

    def engines(self, role: str) -> list[dict[str, Any]]:
        return [info for info in self.cluster.engines(APP).values() if info["role"] == role]

    def rows(self, role: str) -> list[dict[str, Any]]:
        rows = ask(self.router_port, "GET", "/endpoints").json["endpoints"]
        return [row for row in rows if row["role"] == role]

    def num_ready(self, role: str) -> int:
        return sum(row["state"] == "ready" and not row["is_warming"] for row in self.rows(role))

    def sizes(self) -> tuple[int, int]:
        return self.num_ready("prefill"), self.num_ready("decode")

    def wait_size(self, role: str, num: int, timeout_s: float) -> None:
        """Wait until so many engines of a pool take requests; what Serve's controller said last is in the error."""
        try:
            wait_for(lambda: self.num_ready(role) == num, f"{num} {role} engines", timeout_s)
        except AssertionError as error:
            logs = sorted((self.cluster.folder / "session_latest" / "logs" / "serve").glob("controller_*.log"))
            said = [
                line for path in logs for line in path.read_text(errors="replace").splitlines() if "GET" not in line
            ]
            rows = json.dumps(self.rows(role), indent=1)
            raise AssertionError("\n".join([str(error), rows, *said[-40:]])) from None

    def changes(self) -> list[tuple[float, str, int, int, str]]:
        """What the policy has decided: when, for which pool, from and to how many, and why."""
        found = []
        for path in sorted((self.cluster.folder / "session_latest" / "logs" / "serve").glob("controller_*.log")):
            for match in CHANGE.finditer(path.read_text(errors="replace")):
                at_s = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + int(match[2]) / 1000
                found.append((at_s, match[3], int(match[4]), int(match[5]), match[6]))
        return found


@pytest.fixture(scope="session")
def ray_app(ray_cluster: RayCluster) -> Iterator[App]:
    """P from one to two engines, D from two to three, as ``LLMConfig``s and ``serve.run`` make them. A prefill engine
    does five prompts of the load of test_ray_scaling.py a second, a decode engine has room for nine of the answers."""
    port = quiet_ports(1)
    config: dict[str, Any] = {
        f"{role}_config": model_config(
            autoscaling_config=DELAYS | {"min_replicas": lowest, "max_replicas": most}, graceful_shutdown_timeout_s=30
        )
        for role, (lowest, most) in {"prefill": (1, 2), "decode": (2, 3)}.items()
    }
    config["decode_config"]["deployment_config"]["ray_actor_options"] = {"num_gpus": 1}
    config["antiphon"] = simulated(port)
    config["antiphon"]["engine"]["simulated"] = {
        "prefill_overhead_ms": 0,
        "prefill_tokens_per_s": 1600,
        "decode_token_ms": 20,
    }
    config["antiphon"]["decode"] = {"simulated": {"kv_blocks": 100}}
    ray_cluster.call("run", pd_config=config, name=APP)
    yield App(ray_cluster, port, config)
    ray_cluster.delete(APP)
    assert not [each for each in app_listeners(APP) if each.owner != "ray"]


def model_config(**deployment: Any) -> dict[str, Any]:
    """``prefill_config`` or ``decode_config`` of the seed, with options of its deployment."""
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    return {
        "model_loading_config": {"model_id": "m"},
        "engine_kwargs": {"kv_transfer_config": transfer},
        "deployment_config": deployment,
    }


def fixed(num: int) -> dict[str, Any]:
    """``autoscaling_config`` of a pool that keeps its size."""
    return {"autoscaling_config": {"min_replicas": num, "max_replicas": num}}


def simulated(router_port: int, **router: Any) -> dict[str, Any]:
    """The part under ``antiphon`` for engines that cost nothing."""
    return {
        "engine": {"kind": "simulated", "simulated": {"prefill_overhead_ms": 4, "decode_token_ms": 4}},
        "handoff": {"lease_s": 6},
        "router": {"port": router_port, "health_interval_s": 0.2, "health_timeout_s": 1.0, **router},
    }
