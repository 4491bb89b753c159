"""SIGKILL of each process of a deployment under load: clients are told the truth, and what can come back does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.process.deployment import LEASE_S, Deployment, Load
from tests.router.stack import NOTHING_HELD, ask, wait_for

pytestmark = pytest.mark.process

TRUTH_TIMEOUT_S = 5.0
BACK_TIMEOUT_S = 15.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, die_with_parent: Callable[[], None]) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("up"), die_with_parent)
    try:
        deployment.wait_ready()
        yield deployment
    finally:
        code = deployment.stop()
    assert code == 0, deployment.output.read_text()


@pytest.fixture
def up(shared: Deployment) -> Deployment:
    """The shared deployment, whole."""
    wait_for(lambda: shared.status()[0] == 0, "every process is ready", BACK_TIMEOUT_S)
    wait_for(lambda: is_whole(shared), "the router knows every engine", BACK_TIMEOUT_S)
    return shared


def is_whole(up: Deployment) -> bool:
    try:
        readiness = up.ask("GET", "/readiness").json
    except ConnectionError:
        return False
    return bool(readiness["prefill"]["usable"] == readiness["decode"]["usable"] == 2)


def engine_state(up: Deployment, name: str) -> dict[str, Any]:
    state: dict[str, Any] = ask(up.rows()[name]["port"], "GET", "/simulated/state").json
    return state


def kill(up: Deployment, name: str) -> tuple[dict[str, Any], float]:
    """Kill a process; its row before, and when it was killed."""
    row = up.rows()[name]
    assert row["state"] == "ready"
    os.kill(row["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    wait_for(lambda: is_dead(row["pid"]), "the kernel has ended it")
    return row, killed_s


def is_dead(pid: int) -> bool:
    """Whether a process has ended, waited for or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def check_status_follows(up: Deployment, before: dict[str, Any]) -> None:
    """``antiphon status`` never shows the dead life as alive, and shows the next one once it is ready."""
    deadline_s = time.monotonic() + BACK_TIMEOUT_S
    shown: list[str] = []
    while True:
        row = up.rows()[before["name"]]
        shown.append(row["state"])
        assert row["pid"] != before["pid"], "a dead process is shown as alive"
        if row["state"] == "ready":
            break
        assert row["state"] in ("dead", "restarting", "starting"), shown
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.05)
    assert row["restarts"] == before["restarts"] + 1
    assert "SIGKILL" in row["last_exit"]


def check_at_rest(up: Deployment) -> None:
    """No engine holds anything, at the latest when the leases of killed peers have ended."""
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"):
        wait_for(
            lambda name=name: NOTHING_HELD.items() <= engine_state(up, name).items(), f"{name} at rest", LEASE_S + 5.0
        )


@pytest.mark.parametrize("name", ["prefill-0", "decode-1"])
def test_engine_is_killed(up: Deployment, name: str) -> None:
    with Load(up.router_port) as load:
        load.wait_answers(40, 0.0)
        before, killed_s = kill(up, name)
        # The other engine of the pool goes on.
        load.wait_answers(20, killed_s)
        check_status_follows(up, before)
        wait_for(lambda: is_whole(up), "the router uses it again", TRUTH_TIMEOUT_S)
        back_s = time.monotonic()
        wait_for(lambda: engine_state(up, name)["requests"] >= 5, "the next life serves")
        load.wait_answers(40, back_s)
    counts = load.check(may_lose_connection=False)
    assert counts["error"] + counts["error_event"] <= 40, counts
    assert load.counts(back_s)["answer"] == load.counts(back_s).total(), "errors after it was back"
    check_at_rest(up)


def test_router_is_killed(up: Deployment) -> None:
    with Load(up.router_port) as load:
        load.wait_answers(40, 0.0)
        before, killed_s = kill(up, "router")
        check_status_follows(up, before)
        wait_for(lambda: is_whole(up), "the next router knows every engine", TRUTH_TIMEOUT_S)
        back_s = time.monotonic()
        load.wait_answers(40, back_s)
    counts = load.check(may_lose_connection=True)
    assert counts["connection"] > 0
    assert counts["error"] + counts["error_event"] == 0
    assert load.counts(back_s)["answer"] == load.counts(back_s).total(), "errors after it was back"
    assert load.counts(killed_s)["answer"] >= 40
    check_at_rest(up)


def test_supervisor_is_killed(tmp_path: Path, die_with_parent: Callable[[], None]) -> None:
    up = Deployment(tmp_path, die_with_parent)
    try:
        up.wait_ready()
        with Load(up.router_port) as load:
            load.wait_answers(40, 0.0)
            up.process.kill()
            up.process.wait(5)
            code, report = up.status()
            assert code != 0
            assert not report["is_supervisor_alive"]
            up.check_gone()
            gone_s = time.monotonic()
            wait_for(lambda: load.counts(gone_s)["connection"] >= 16, "every client is refused")
        load.check(may_lose_connection=True)
        assert set(load.counts(gone_s)) == {"connection"}
        code, report = up.status()
        assert code == 3
        assert {row["state"] for row in report["processes"]} == {"dead"}
        assert {row["pid"] for row in report["processes"]} == {None}
        assert report["orphan_pids"] == []
    finally:
        up.stop()
