"""Cache servers in a deployment by ``antiphon up``: real ones, beside simulated engines, which do not speak to them.

In scope: that they run, are shown, come back when they are killed, and end without a trace; and that ``config check``
of a running deployment does not report its own ports. Out of scope: what they store (tests/cache_server, tests/real).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from antiphon.cli.config import config
from antiphon.cli.status import status
from antiphon.config.cache_server_spec import CacheServerSpec
from tests.process.deployment import Deployment, marked_pids
from tests.router.stack import quiet_ports, wait_for

pytestmark = pytest.mark.process

SECTIONS = """
cache:
  enabled: true
  l1_size_bytes: 32MB
  port: {port}
  http_port: {http_port}
  runtime_dir: {folder}
  quota_bytes: {{alice: 4MB}}
"""
PEERS = """\
  peers: true
  peer_port: {peer_port}
  coordinator_port: {coordinator}
  coordinator_http_port: {coordinator_http}
"""
BACK_WITHIN_S = 5.0
CACHES = ("cache-prefill", "cache-decode")


class Cached:
    """A deployment whose cache servers have known ports and a runtime folder of their own."""

    def __init__(self, folder: Path, preexec: Callable[[], None], more: str = "") -> None:
        self.calls_port, self.http_port = quiet_ports(2), quiet_ports(2)
        # Not below the folder of the test, whose name is too long for the path of a socket.
        self._short = tempfile.TemporaryDirectory(prefix="a-")
        self.runtime_dir = Path(self._short.name)
        self.sections = SECTIONS.format(port=self.calls_port, http_port=self.http_port, folder=self.runtime_dir) + more
        self.up = Deployment(folder, preexec, self.sections)

    def told(self, index: int) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port + index}/status", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def end(self) -> None:
        self.up.stop()
        self._short.cleanup()

    def pids(self) -> dict[str, int]:
        return {name: row["pid"] for name, row in self.up.rows().items()}


@pytest.fixture
def cached(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[Cached]:
    made = Cached(tmp_path, die_with_parent)
    try:
        made.up.wait_ready()
        yield made
    finally:
        made.end()


def test_they_run_are_shown_and_leave_nothing(cached: Cached) -> None:
    rows = cached.up.rows()
    assert list(rows)[:2] == list(CACHES)
    for index, name in enumerate(CACHES):
        row, told = rows[name], cached.told(index)
        assert (row["state"], row["role"], row["port"]) == ("ready", "cache_server", cached.http_port + index)
        assert (row["num_objects"], row["used_bytes"]) == (0, 0)
        assert row["total_bytes"] == told["storage_manager"]["l1_manager"]["memory_total_bytes"]
        assert told["instance"] == f"{cached.up.name}-{('prefiller', 'decoder')[index]}"
        assert told["chunk_size_tokens"] == 256
        with socket.create_connection(("127.0.0.1", cached.calls_port + index), timeout=5):
            pass
    text = CliRunner().invoke(status, ["--state-dir", str(cached.up.state_dir), "--name", cached.up.name]).output
    assert "cache-prefill holds 0 objects, 0 bytes of 32 MB" in text
    assert len(list(cached.runtime_dir.glob("*.sock"))) == 2
    # The router was told where to read their reports.
    argv = Path(f"/proc/{rows['router']['pid']}/cmdline").read_text().split("\0")
    assert [argv[i + 1] for i, arg in enumerate(argv) if arg == "--cache-server"] == [
        f"http://127.0.0.1:{cached.http_port + index}" for index in (0, 1)
    ]
    assert cached.up.stop() == 0
    assert marked_pids(cached.up.name) == []
    assert list(cached.runtime_dir.glob("*.sock")) == []


def test_a_killed_one_is_back_and_nothing_else_is_restarted(cached: Cached) -> None:
    before, incarnation = cached.pids(), cached.told(0)["incarnation"]
    killed_s = time.monotonic()
    os.kill(before["cache-prefill"], signal.SIGKILL)
    wait_for(lambda: cached.up.rows()["cache-prefill"]["restarts"] == 1, "the restart", BACK_WITHIN_S)
    wait_for(lambda: cached.up.rows()["cache-prefill"]["state"] == "ready", "readiness", BACK_WITHIN_S)
    assert time.monotonic() - killed_s < BACK_WITHIN_S
    assert cached.told(0)["incarnation"] != incarnation
    after = cached.pids()
    assert {name for name in before if before[name] != after[name]} == {"cache-prefill"}
    answer = cached.up.ask("POST", "/v1/completions", {"model": "m", "prompt": "still here", "max_tokens": 4})
    assert answer.status == 200
    # The socket of the life before was removed by the next one.
    assert len(list(cached.runtime_dir.glob(f"cache-{cached.up.name}-prefiller-*.sock"))) == 1


def test_a_silent_one_does_not_hold_up_status(cached: Cached) -> None:
    pid = cached.pids()["cache-decode"]
    os.kill(pid, signal.SIGSTOP)
    try:
        began_s = time.monotonic()
        row = cached.up.rows()["cache-decode"]
        assert time.monotonic() - began_s < 2.0
        assert (row["state"], row["num_objects"], row["is_load_unknown"]) == ("ready", None, True)
    finally:
        os.kill(pid, signal.SIGCONT)


def test_check_of_a_running_deployment_does_not_report_its_own_ports(
    cached: Cached, die_with_parent: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cached.up.spec.parent)
    result = CliRunner().invoke(config, ["check"])
    assert result.exit_code == 0, result.output
    assert f"memory that {cached.up.name} holds were not counted, since it is up" in result.output
    # A port that the spec does not have yet, and somebody else does, is found all the same.
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = CliRunner().invoke(config, ["check", "--set", f"router.port={port}"])
    assert result.exit_code == 2
    assert f"router.port: port {port} of router is already in use" in result.output
    # Another deployment with the same ports is told.
    result = CliRunner().invoke(config, ["check", "--set", "name=another"])
    assert result.exit_code == 2
    taken = f"cache.http_port: port {cached.http_port} of cache-prefill is already in use on this host"
    assert taken in result.output
    live = CliRunner().invoke(config, ["check", "--live"])
    assert live.exit_code == 0, live.output
    assert live.output.count("/healthz  200") == 2


def test_what_render_prints_for_a_server_starts_one(
    tmp_path: Path, die_with_parent: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    port, http_port = quiet_ports(1), quiet_ports(1)
    sections = SECTIONS.format(port=port, http_port=http_port, folder=tmp_path / "run")
    spec = f"name: r\nmodel: {{path: x}}\nengine: {{kind: simulated}}\n{sections}  shared: true\n"
    (tmp_path / "antiphon.yaml").write_text(spec)
    argv = [sys.executable, "-m", "antiphon", "config", "render", "--only", "cache"]
    text = subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=60, preexec_fn=die_with_parent
    ).stdout
    assert f"calls port {port}" in text.splitlines()[0]
    with subprocess.Popen(["sh", "-c", f"exec {text.partition(chr(10))[2]}"], preexec_fn=die_with_parent) as server:
        try:

            def is_ready() -> bool:
                assert server.poll() is None
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/readiness", timeout=5) as answer:
                        return bool(answer.status == 200)
                except OSError:
                    return False

            wait_for(is_ready, "the server", 20.0)
        finally:
            server.terminate()
        assert server.wait(10) == 0
    assert CacheServerSpec(l1_size_gb=0.032).l1_size_bytes == 32_000_000


def test_they_share_through_a_coordinator_that_is_started_with_them(
    tmp_path: Path, die_with_parent: Callable[[], None]
) -> None:
    """It is shown with what it knows; killed, it is back, and both servers join again; it ends with the others."""
    peer_port, coordinator = quiet_ports(2), quiet_ports(2)
    more = PEERS.format(peer_port=peer_port, coordinator=coordinator, coordinator_http=coordinator + 1)
    made = Cached(tmp_path, die_with_parent, more)
    try:
        made.up.wait_ready()

        def has_members() -> bool:
            return made.up.rows()["coordinator"]["num_members"] == 2

        wait_for(has_members, "both are members", BACK_WITHIN_S)
        row = made.up.rows()["coordinator"]
        assert (row["state"], row["role"], row["port"]) == ("ready", "coordinator", coordinator + 1)
        assert all(made.told(index)["peers"]["is_member"] for index in (0, 1))
        text = CliRunner().invoke(status, ["--state-dir", str(made.up.state_dir), "--name", made.up.name]).output
        assert "coordinator knows 2 cache servers, which hold 0 different objects" in text
        before = made.pids()
        os.kill(before["coordinator"], signal.SIGKILL)
        wait_for(lambda: made.up.rows()["coordinator"]["restarts"] == 1, "the restart", BACK_WITHIN_S)
        wait_for(has_members, "both are members again", BACK_WITHIN_S)
        after = made.pids()
        assert {name for name in before if before[name] != after[name]} == {"coordinator"}
        assert made.up.stop() == 0
        assert marked_pids(made.up.name) == []
    finally:
        made.end()
