"""Pools that grow and shrink with their load, on a local Ray with simulated engines.

Goal: P goes from one engine to two and D from two to three under load, and back, and no request fails; a new engine
takes requests only when it is warm; one that leaves ends its streams first; what is killed under load comes back, no
request hangs, and the pools keep the size that their load asks for. Method: one application for the file, whose targets
are the ones that are filled in; clients that stream from the router; every change is read from Serve's log, as an
operator would. Times are printed, not judged, but for bounds.

Out of scope: the rule itself (tests/ray/test_autoscaling.py); what is right in an answer (test_ray_app.py).
"""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.deployment import Load, marked_pids
from tests.process.ray_cluster import RayCluster, model_config, simulated
from tests.router.stack import Answer, ask, quiet_ports, text_of, wait_for

pytestmark = [pytest.mark.process, pytest.mark.timeout(200)]

APP = "scaled"
GROWN_WITHIN_S, SHRUNK_WITHIN_S, BACK_WITHIN_S = 60.0, 60.0, 40.0
NUM_TOKENS = 90
DELAYS = {
    "upscale_delay_s": 2,
    "downscale_delay_s": 6,
    "look_back_period_s": 4,
    "metrics_interval_s": 0.5,
}
CHANGE = re.compile(
    r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),(\d+).* -- Antiphon scales (\w+) from (\d+) to (\d+) engines: (.*)"
)


class Streams(Load):
    """Clients with a prompt of its own for each request, so that no prefix cache helps, and answers of some seconds."""

    def __enter__(self) -> Streams:
        for client in self._clients:
            client.start()
        return self

    @staticmethod
    def _body(number: int) -> dict[str, Any]:
        words = " ".join(f"{number:08}-{word:03}" for word in range(100))
        return {"model": "m", "prompt": words, "max_tokens": NUM_TOKENS, "stream": True}

    def _run(self, number: int) -> None:
        super()._run(number * 1_000_000)

    def _judge(self, body: dict[str, Any], answer: Answer) -> tuple[str, str]:
        events = answer.events if answer.status == 200 else []
        is_whole = len(events) > 1 and "error" not in events[-2]
        self._right[body["prompt"]] = text_of(events) if is_whole else ""
        return super()._judge(body, answer)


class App:
    """The application, and what is seen of it."""

    def __init__(self, cluster: RayCluster, router_port: int) -> None:
        self.cluster = cluster
        self.router_port = router_port

    def rows(self, role: str) -> list[dict[str, Any]]:
        rows = ask(self.router_port, "GET", "/endpoints").json["endpoints"]
        return [row for row in rows if row["role"] == role]

    def num_ready(self, role: str) -> int:
        return sum(row["state"] == "ready" and not row["is_warming"] for row in self.rows(role))

    def sizes(self) -> tuple[int, int]:
        return self.num_ready("prefill"), self.num_ready("decode")

    def engines(self, role: str) -> list[dict[str, Any]]:
        return [info for info in self.cluster.engines(APP).values() if info["role"] == role]

    def changes(self) -> list[tuple[float, str, int, int, str]]:
        """What the policy has decided: when, for which pool, from and to how many, and why."""
        found = []
        for path in sorted((self.cluster.folder / "session_latest" / "logs" / "serve").glob("controller_*.log")):
            for match in CHANGE.finditer(path.read_text(errors="replace")):
                at_s = time.mktime(time.strptime(match[1], "%Y-%m-%d %H:%M:%S")) + int(match[2]) / 1000
                found.append((at_s, match[3], int(match[4]), int(match[5]), match[6]))
        return found


@pytest.fixture(scope="module")
def app(ray_cluster: RayCluster) -> Iterator[App]:
    """P from one to two engines, D from two to three. A prefill engine does five of these prompts a second, a decode
    engine has room for six of the answers, which take two seconds."""
    port = quiet_ports(1)
    bounds = {"prefill": (1, 2), "decode": (2, 3)}
    config: dict[str, Any] = {
        f"{role}_config": model_config(
            autoscaling_config=DELAYS | {"min_replicas": lowest, "max_replicas": most}, graceful_shutdown_timeout_s=30
        )
        for role, (lowest, most) in bounds.items()
    }
    config["antiphon"] = simulated(port)
    config["antiphon"]["engine"]["simulated"] = {
        "prefill_overhead_ms": 0,
        "prefill_tokens_per_s": 1600,
        "decode_token_ms": 20,
    }
    config["antiphon"]["decode"] = {"simulated": {"kv_blocks": 160}}
    ray_cluster.call("run", pd_config=config, name=APP)
    yield App(ray_cluster, port)
    ray_cluster.delete(APP)


class Watch:
    """Looks at the router's engines until it is left."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.seen: list[tuple[float, str, int]] = []
        """By the wall clock, when a pool had how many engines that take requests: each change."""
        self.too_early: list[dict[str, Any]] = []
        """Engines that had a request while they were warmed."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)

    def ready_s(self, since_s: float, role: str, num: int) -> float:
        """Seconds until a pool had so many."""
        return next(at_s for at_s, *pool in self.seen if at_s >= since_s and pool == [role, num]) - since_s

    def _look(self) -> None:
        before: dict[str, int] = {}
        while not self._over.wait(0.05):
            rows = ask(self.app.router_port, "GET", "/endpoints").json["endpoints"]
            self.too_early += [row for row in rows if row["is_warming"] and row["active_requests"]]
            for role in ("prefill", "decode"):
                num = sum(row["role"] == role and row["state"] == "ready" and not row["is_warming"] for row in rows)
                if before.get(role) != num:
                    self.seen.append((time.time(), role, num))
                    before[role] = num


def test_pools_grow_and_shrink_without_a_failed_request(app: App) -> None:
    assert app.sizes() == (1, 2)
    with Watch(app) as watch:
        with Streams(app.router_port, num_clients=24) as load:
            wait_for(lambda: app.sizes() == (2, 3), "both pools have grown", GROWN_WITHIN_S)
            load.wait_answers(40, time.monotonic())
        grown = load.check(may_lose_connection=False)
        assert set(grown) == {"answer"}, grown
        served = {row["url"]: row["answered"] for role in ("prefill", "decode") for row in app.rows(role)}
        assert all(served.values()), "an engine that came has taken no requests"
        with Streams(app.router_port, num_clients=3) as load:
            wait_for(lambda: app.sizes() == (1, 2), "both pools have shrunk", SHRUNK_WITHIN_S)
            wait_for(lambda: len(marked_pids(APP)) == 4, "the engines that left have ended", SHRUNK_WITHIN_S)
            load.wait_answers(3, time.monotonic())
        shrunk = load.check(may_lose_connection=False)
        assert set(shrunk) == {"answer"}, shrunk
    assert watch.too_early == []
    changes = app.changes()
    assert [(name, size, after) for _, name, size, after, _ in changes if after > size] == [
        ("prefill", 1, 2),
        ("decode", 2, 3),
    ]
    assert sorted((name, size, after) for _, name, size, after, _ in changes if after < size) == [
        ("decode", 3, 2),
        ("prefill", 2, 1),
    ]
    for at_s, name, size, after, why in changes:
        print(f"{name} from {size} to {after}: {watch.ready_s(at_s, name, after):.1f} s from decision to ready; {why}")
    print(f"{grown['answer']} requests while the pools grew, {shrunk['answer']} while they shrank, none failed")


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.parametrize("victim", ["decode engine", "prefill replica", "router replica"])
def test_what_is_killed_under_load_comes_back(app: App, victim: str) -> None:
    """Every request ends in its time, well or with an error that has a name, and the pools keep their size."""
    role, part = victim.split()
    num_changes = len(app.changes())
    pid = app.cluster.call("engines", app=APP)["router"]["pid"] if role == "router" else app.engines(role)[0]["pid"]
    with Streams(app.router_port, num_clients=4) as load:
        load.wait_answers(4, 0.0)
        began_s = time.monotonic()
        os.kill(pid if part == "engine" else parent_of(pid), signal.SIGKILL)
        wait_for(lambda: pid not in marked_pids(APP), "its process ends", 10.0)
        gone_s = time.monotonic() - began_s
        wait_for(lambda: is_whole(app, pid), "the pools are whole", BACK_WITHIN_S)
        back_s = time.monotonic() - began_s
        load.wait_answers(4, time.monotonic())
    counts = load.check(may_lose_connection=role == "router")
    print(f"{victim}: gone after {gone_s:.1f} s, all whole after {back_s:.1f} s; {dict(counts)}")
    wait_for(lambda: len(marked_pids(APP)) == 4, "one process for each engine, and the router", 10.0)
    assert len(app.changes()) == num_changes, "a loss is no reason to change the size"


def is_whole(app: App, dead_pid: int) -> bool:
    try:
        if app.sizes() != (1, 2):
            return False
        known = app.cluster.call("engines", app=APP)
    except (OSError, AssertionError):
        return False
    pids = [known["router"]["pid"], *(info["pid"] for info in known["engines"])]
    return dead_pid not in pids and len(pids) == 4
