"""What is deployed beside an application, or in its place, on a local Ray with simulated engines.

Goal: the seed's YAML runs, beside another application; a deploy of other bounds ends no process of it; an application
that is deployed again with another model serves that one, and what was in flight ends; an engine that cannot start is
said, with its reason, soon, and not tried for ever. Method: the one application of the session, and others beside it;
the last test deploys it again.

Out of scope: answers and what dies (test_ray_app.py); the size of pools (test_ray_scaling.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.process.deployment import marked_pids
from tests.process.ray_cluster import APP, App, RayCluster, fixed, model_config, simulated
from tests.router.stack import Answer, ask, quiet_ports, raw_request, sent, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(150)]

SEED = Path(__file__).parents[1] / "ray" / "data" / "nixl.yaml"
SEED_APP, BROKEN_APP = f"seed-{os.getpid()}", f"broken-{os.getpid()}"
START_WITHIN_S = 100.0
FAILED_WITHIN_S = 60.0
PROMPT = "the quick brown fox jumps over the lazy dog"
COMPLETION = {"model": "m", "prompt": PROMPT, "max_tokens": 12}
CHAT = {"model": "m", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 12}
ROUTES = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


def complete(port: int, model: str) -> Answer:
    return ask(port, "POST", "/v1/completions", COMPLETION | {"model": model}, timeout_s=20.0)


# ---- the seed's file -------------------------------------------------------------------------------------------------


@pytest.mark.timeout(300)
def test_the_seeds_first_file_runs_beside_another_application(ray_app: App, tmp_path: Path) -> None:
    """With another builder and model; simulated engines and ports are all that is said beside it."""
    cluster = ray_app.cluster
    port = quiet_ports(1)
    values = yaml.safe_load(SEED.read_text())
    (application,) = values["applications"]
    application["import_path"] = "antiphon.ray:build_pd_openai_app"
    application["name"], application["route_prefix"] = SEED_APP, "/seed"
    for config in ("prefill_config", "decode_config"):
        application["args"][config]["model_loading_config"]["model_id"] = "m"
    ports, runtime_dir = quiet_ports(2), tempfile.TemporaryDirectory(prefix="ar-")
    cache = {"enabled": True, "l1_size_bytes": "32MB", "port": ports, "http_port": ports + 1}
    cache["runtime_dir"] = runtime_dir.name  # the path of a socket is short
    application["args"]["antiphon"] = simulated(port, prefill_fallback="local") | {"cache": cache}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump(values))
    try:
        cluster.call("deploy", path=str(path))
        cluster.wait_running(SEED_APP, START_WITHIN_S)
        check_seed(cluster, port)
        check_cache_server(port, ports + 1)
        check_rescaled(cluster, values, path)
        assert complete(ray_app.router_port, "m").status == 200
    finally:
        cluster.delete(SEED_APP)
        runtime_dir.cleanup()


def check_seed(cluster: RayCluster, port: int) -> None:
    roles = [info["role"] for info in cluster.engines(SEED_APP).values()]
    assert (roles.count("prefill"), roles.count("decode")) == (2, 6)
    answers = [cluster.ask("POST", f"/seed{path}", body) for path, body in ROUTES.items()]
    assert [answer.status for answer in answers] == [200, 200]
    assert [answer.text for answer in answers] == [ask(port, "POST", path, body).text for path, body in ROUTES.items()]
    assert {answer.headers["x-antiphon-path"] for answer in answers} == {"pd"}
    for info in cluster.engines(SEED_APP).values():
        if info["role"] == "prefill":
            os.kill(info["pid"], signal.SIGKILL)
    local = wait_for(
        lambda: (answer := cluster.ask("POST", "/seed/v1/completions", COMPLETION)).status == 200 and answer,
        "decode engines compute the prompts",
        20.0,
    )
    assert local.headers["x-antiphon-path"] == "local"
    assert local.text == answers[0].text


def check_cache_server(router_port: int, http_port: int) -> None:
    """One for the node, whose reports the router reads; one that is killed is started again."""
    (pid,) = cache_servers()
    assert ask(http_port, "GET", "/readiness").status == 200

    def is_followed() -> bool:
        (server,) = ask(router_port, "GET", "/status").json["cache_servers"]
        return bool(server["is_up"])

    wait_for(is_followed, "the router reads its reports", 10.0)
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: [each for each in cache_servers() if each != pid], "another cache server", 20.0)


def check_rescaled(cluster: RayCluster, values: dict[str, Any], path: Path) -> None:
    """Deployed again with other bounds, no process is replaced, and the pool is as large as it should be."""

    def processes() -> tuple[set[int], set[int]]:
        """Of the prefill engines; of the decode engines and the router."""
        said = cluster.call("engines", app=SEED_APP)
        found: tuple[set[int], set[int]] = set(), {said["router"]["pid"]}
        for info in said["engines"]:
            found[info["role"] == "decode"].add(info["pid"])
        return found

    def are_there() -> bool:
        found = processes()
        return [len(each) for each in found] == [2, 7] and set.union(*found) <= set(marked_pids(SEED_APP))

    wait_for(are_there, "the killed engines are back", START_WITHIN_S)
    prefill, others = processes()
    for config, bounds in {"prefill_config": (3, 4), "decode_config": (6, 8)}.items():
        scaling = values["applications"][0]["args"][config]["deployment_config"]["autoscaling_config"]
        scaling["min_replicas"], scaling["max_replicas"] = bounds
    path.write_text(yaml.safe_dump(values))
    began_s = time.monotonic()
    cluster.call("deploy", path=str(path))
    wait_for(lambda: len(processes()[0]) == 3, "one more prefill engine", START_WITHIN_S)
    print(f"one more prefill engine {time.monotonic() - began_s:.1f} s after the deploy")
    cluster.wait_running(SEED_APP, START_WITHIN_S)
    after = processes()
    assert prefill < after[0]
    assert others == after[1]


def cache_servers() -> list[int]:
    found = []
    for pid in marked_pids(SEED_APP):
        with contextlib.suppress(OSError):
            if b"cache-server" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                found.append(pid)
    return found


# ---- an engine that cannot start -------------------------------------------------------------------------------------


def test_an_engine_that_cannot_start_is_said_with_its_reason(ray_app: App, tmp_path: Path) -> None:
    cluster = ray_app.cluster
    configs = {f"{role}_config": model_config(**fixed(1)) for role in ("prefill", "decode")}
    args: dict[str, Any] = configs | {"antiphon": {"router": {"port": quiet_ports(1)}, "cache": {"enabled": False}}}
    args["antiphon"]["engine"] = {"python": "/bin/false"}
    application = {"name": BROKEN_APP, "route_prefix": "/broken", "import_path": "antiphon.ray:build_pd_openai_app"}
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": [application | {"args": args}]}))
    began_s = time.monotonic()
    try:
        cluster.call("deploy", path=str(path))
        said = wait_for(lambda: failure_of(cluster, BROKEN_APP), "it is given up", FAILED_WITHIN_S)
        print(f"given up after {time.monotonic() - began_s:.1f} s: {said[-600:]}")
        assert "ended with exit code 1" in said
        assert complete(ray_app.router_port, "m").status == 200, "the other application is not concerned"
    finally:
        cluster.delete(BROKEN_APP)


def failure_of(cluster: RayCluster, app: str) -> str:
    said = cluster.call("application", app=app)
    return said["message"] if said["status"] == "DEPLOY_FAILED" else ""


# ---- deployed again --------------------------------------------------------------------------------------------------


class Asking:
    """Asks one model after another, and keeps the status of each answer; use it as a context manager."""

    def __init__(self, port: int, *models: str) -> None:
        self.seen: list[tuple[str, int]] = []
        self._port, self._models = port, models
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(40)
        assert not self._thread.is_alive(), "a request hangs"

    def _ask(self) -> None:
        while not self._over.wait(0.1):
            for model in self._models:
                self.seen.append((model, complete(self._port, model).status))


def test_an_application_deployed_again_serves_the_other_model(ray_app: App) -> None:
    cluster, config = ray_app.cluster, copy.deepcopy(ray_app.config)
    for role in ("prefill", "decode"):
        config[f"{role}_config"]["model_loading_config"] = {"model_id": "other"}
    before = {info["pid"] for info in cluster.engines(APP).values()}
    stream = COMPLETION | {"max_tokens": 150, "stream": True}
    with Asking(cluster.http_port, "m", "other") as asking:
        with sent(cluster.http_port, raw_request("/v1/completions", stream)) as client:
            assert b" 200 " in client.recv(100)
            began_s = time.monotonic()
            cluster.call("run", pd_config=config, name=APP)
            took_s = time.monotonic() - began_s
            rest = b""
            while not rest.endswith(b"0\r\n\r\n") and (piece := client.recv(65536)):
                rest += piece
        wait_for(lambda: ray_app.sizes() == (1, 2), "its engines serve", 30.0)
        wait_for(lambda: ("other", 200) in asking.seen[-4:], "the other model is served", 10.0)
    assert rest.endswith(b"0\r\n\r\n"), "a stream that was in flight was cut"
    assert b"[DONE]" in rest
    assert {status for _, status in asking.seen} <= {200, 404, 502, 503}, asking.seen
    outage = sum(status in (502, 503) for _, status in asking.seen)
    print(f"deployed again in {took_s:.1f} s; {outage} of {len(asking.seen)} requests meanwhile had no engine")
    assert complete(cluster.http_port, "m").status == 404
    assert {info["shape"]["model"] for info in cluster.engines(APP).values()} == {"other"}
    wait_for(lambda: len(marked_pids(APP)) == 4, "one process for each engine, and the router", 30.0)
    assert before.isdisjoint(marked_pids(APP)), "an engine of the earlier deployment still runs"
    cluster.call("run", pd_config=ray_app.config, name=APP)  # as the other tests of the application find it
    wait_for(lambda: complete(cluster.http_port, "m").status == 200, "the first model is served again", 30.0)
    wait_for(lambda: ray_app.sizes() == (1, 2), "its engines serve", 30.0)
