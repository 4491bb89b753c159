"""SIGKILL of the supervisor and the commands of another terminal: nothing stays, and ``status`` tells the truth."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from antiphon.cli.down import down
from antiphon.cli.status import status
from antiphon.supervisor import procfs, store
from antiphon.supervisor.report import judge

HERE = Path(__file__).parent
READY_TIMEOUT_S = 20.0
GONE_TIMEOUT_S = 5.0

pytestmark = pytest.mark.process


def marked_pids(deployment: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_marked = f"{procfs.MARKER_VARIABLE}={deployment}/".encode() in path.read_bytes()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if is_marked and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def watchdog_pids(deployment: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"antiphon.supervisor.watchdog" in words and deployment.encode() in words:
                found.append(int(path.parent.name))
    return found


def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = GONE_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)


class Host:
    """One supervisor process for the test, and what it printed."""

    def __init__(self, folder: Path, name: str, plans: list[dict[str, Any]], **spec: Any) -> None:
        self.name = name
        self.state_dir = folder / "state"
        values = {"state_dir": str(self.state_dir), "stop_grace_s": 2.0, "start_timeout_s": READY_TIMEOUT_S} | spec
        self.dropped_mark = folder / "dropped"
        document = json.dumps({"name": name, "spec": values, "plans": plans, "dropped_mark": str(self.dropped_mark)})
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "supervisor_host.py"), document],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.output = b""

    def read_until(self, text: str, timeout_s: float = READY_TIMEOUT_S) -> str:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while text.encode() not in self.output:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"{text!r} did not come; there was: {self.output.decode()}"
            if select.select([self.process.stdout], [], [], left_s)[0]:
                part = os.read(self.process.stdout.fileno(), 65536)
                assert part, f"the supervisor ended; it said: {self.output.decode()}"
                self.output += part
        return self.output.decode()

    def read_to_end(self) -> str:
        rest, _ = self.process.communicate(timeout=READY_TIMEOUT_S)
        self.output += rest
        return self.output.decode()

    def pid_of(self, process: str) -> int:
        state = store.read_state(self.state_dir / self.name)
        assert state is not None
        pid = next(each.pid for each in state.processes if each.name == process)
        assert pid is not None
        return pid

    def states(self) -> list[str]:
        state = store.read_state(self.state_dir / self.name)
        assert state is not None
        return [row.state for row in judge(state).processes]

    def status(self, *extra: str) -> tuple[int, str]:
        ran = CliRunner().invoke(status, ["--state-dir", str(self.state_dir), *extra])
        return ran.exit_code, ran.output

    def down(self, *extra: str) -> tuple[int, str]:
        ran = CliRunner().invoke(down, ["--state-dir", str(self.state_dir), *extra])
        return ran.exit_code, ran.output

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=READY_TIMEOUT_S)

    def check_gone(self) -> None:
        wait_until(lambda: not marked_pids(self.name) and not watchdog_pids(self.name), "clean host", READY_TIMEOUT_S)


MakeHost = Callable[..., Host]


@pytest.fixture
def make_host(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> Iterator[MakeHost]:
    made: list[Host] = []
    name = f"d{os.getpid()}-{free_ports(1)[0]}"

    def make(*children: tuple[str, list[str]], **spec: Any) -> Host:
        plans = []
        for child, extra in children:
            (port,) = free_ports(1)
            role = child.split("-")[0]
            plans.append(
                {
                    "name": child,
                    "role": role,
                    "kind": "router" if role == "router" else "vllm",
                    "host": "127.0.0.1",
                    "argv": [sys.executable, "-S", str(HERE / "fake_engine.py"), "--port", str(port), *extra],
                    "ports": {"http": port},
                    "base_url": f"http://127.0.0.1:{port}",
                }
            )
        made.append(Host(tmp_path, name, plans, **spec))
        return made[-1]

    yield make
    for host in made:
        host.kill()
    for host in made:
        host.check_gone()


def test_sigkill_of_the_supervisor_leaves_nothing(make_host: MakeHost) -> None:
    stubborn = ["--ignore-term", "--grandchildren", "2", "--escape"]
    host = make_host(("prefill-0", stubborn), ("decode-0", ["--grandchildren", "1"]), ("router", []))
    host.read_until("ALL READY")
    assert len(marked_pids(host.name)) == 7
    assert host.status()[0] == 0
    host.process.kill()
    host.process.wait()
    code, text = host.status()
    assert code != 0
    assert f"supervisor gone (was pid {host.process.pid})" in text
    wait_until(lambda: not marked_pids(host.name), "every process of every session gone")
    wait_until(lambda: not watchdog_pids(host.name), "the watchdog gone")
    code, text = host.status()
    assert code == 3
    assert "ready" not in text
    assert text.count("dead") == 3
    assert "supervisor gone" in text


def test_sigkill_of_the_supervisor_while_children_start(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", ["--never-ready", "--grandchildren", "2"]))
    wait_until(lambda: len(marked_pids(host.name)) == 3, "the start", READY_TIMEOUT_S)
    host.process.kill()
    wait_until(lambda: not marked_pids(host.name) and not watchdog_pids(host.name), "everything gone")
    assert host.states() == ["dead"]


def test_after_sigkill_of_supervisor_and_watchdog_down_ends_the_rest(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", ["--grandchildren", "2"]))
    host.read_until("ALL READY")
    leader = host.pid_of("prefill-0")
    for pid in watchdog_pids(host.name):
        os.kill(pid, signal.SIGSTOP)
    watchdogs = watchdog_pids(host.name)
    host.process.kill()
    host.process.wait()
    for pid in watchdogs:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: procfs.start_ticks_of(leader) is None, "the leader, which dies with the supervisor")
    left = marked_pids(host.name)
    assert len(left) == 2
    code, text = host.status()
    assert code == 1
    assert "still running without a supervisor" in text
    assert str(left[0]) in text
    code, text = host.down()
    assert code == 0, text
    assert "ending 2 processes" in text
    assert marked_pids(host.name) == []


def test_next_start_ends_what_an_earlier_run_left(make_host: MakeHost) -> None:
    first = make_host(("prefill-0", ["--grandchildren", "1"]))
    first.read_until("ALL READY")
    watchdogs = watchdog_pids(first.name)
    for pid in watchdogs:
        os.kill(pid, signal.SIGSTOP)
    first.process.kill()
    first.process.wait()
    for pid in watchdogs:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: len(marked_pids(first.name)) == 1, "the leader gone")
    left = marked_pids(first.name)
    second = make_host(("prefill-0", []))
    said = second.read_until("ALL READY")
    assert "ending 1 processes that an earlier run left behind" in said
    assert not set(left) & set(marked_pids(second.name))


def test_second_up_of_one_name_names_the_first(make_host: MakeHost) -> None:
    first = make_host(("prefill-0", []))
    first.read_until("ALL READY")
    second = make_host(("prefill-0", []))
    assert f"already up on this host (supervisor pid {first.process.pid})" in second.read_to_end()
    assert second.process.returncode == 1
    assert first.status()[0] == 0


@contextlib.contextmanager
def hangup(action: signal.Handlers) -> Iterator[None]:
    """What a process that is started now inherits for SIGHUP; the tests themselves may run under nohup."""
    previous = signal.signal(signal.SIGHUP, action)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_cleanly_with_exit_code_0(make_host: MakeHost, number: signal.Signals) -> None:
    with hangup(signal.SIG_DFL):
        host = make_host(("prefill-0", []), ("router", []))
    host.read_until("ALL READY")
    host.process.send_signal(number)
    said = host.read_to_end()
    assert host.process.returncode == 0
    assert said.index("router stopped") < said.index("prefill-0 stopped")
    assert "everything is stopped" in said
    assert marked_pids(host.name) == []
    assert host.status() == (3, f"nothing is up (state folder: {host.state_dir})\n")
    code, text = host.status("--name", host.name)
    assert code == 3
    assert text.startswith(f"{host.name}: stopped\n")


def test_ignored_hangup_stays_ignored(make_host: MakeHost) -> None:
    with hangup(signal.SIG_IGN):  # as from nohup
        host = make_host(("prefill-0", []))
    host.read_until("ALL READY")
    host.process.send_signal(signal.SIGHUP)
    assert host.status()[0] == 0
    # The child has the default again.
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{host.pid_of('prefill-0')}/status").read_text())
    assert ignored is not None
    assert not int(ignored[1], 16) & 1 << (signal.SIGHUP - 1)
    host.process.send_signal(signal.SIGTERM)
    assert "everything is stopped" in host.read_to_end()


def test_second_ctrl_c_kills_at_once(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", ["--ignore-term"]), stop_grace_s=60.0)
    host.read_until("ALL READY")
    host.process.send_signal(signal.SIGINT)
    host.read_until("stopping:")
    host.process.send_signal(signal.SIGINT)
    started = time.monotonic()
    assert "killing at once" in host.read_to_end()
    assert time.monotonic() - started < 5.0
    assert host.process.returncode == 0


def test_failed_start_exits_1_and_shows_why(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", ["--fail", "[Errno 28] No space left on device"]), ("decode-0", ["--never-ready"]))
    said = host.read_to_end()
    assert host.process.returncode == 1
    assert "prefill-0 ended with exit code 1" in said
    assert "RuntimeError: [Errno 28] No space left on device" in said
    assert "free space in /dev/shm" in said


def test_down_stops_from_another_terminal(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", []), ("router", []))
    host.read_until("ALL READY")
    code, text = host.down()
    assert code == 0, text
    assert f"stopping (supervisor pid {host.process.pid})" in text
    assert "nothing of it is left" in text
    host.read_to_end()
    assert host.process.returncode == 0
    code, text = host.down("--name", host.name)
    assert (code, "is not up" in text) == (0, True)


def test_down_with_too_little_time_says_what_remains(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", ["--ignore-term"]), stop_grace_s=30.0)
    host.read_until("ALL READY")
    code, text = host.down("--timeout-s", "0.3")
    assert code == 1
    assert "still stopping" in text
    assert str(host.pid_of("prefill-0")) in text
    host.process.send_signal(signal.SIGINT)
    host.read_to_end()


def test_status_shows_every_state_as_it_is(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", []), ("decode-0", ["--metrics-delay-s", "5"]), restart={"enabled": False})
    host.read_until("ALL READY")
    code, text = host.status()
    assert code == 0
    rows = {line.split()[0]: line.split() for line in text.splitlines()}
    assert rows["prefill-0"][2:5] == [str(host.pid_of("prefill-0")), "ready", rows["prefill-0"][4]]
    assert rows["prefill-0"][6:8] == ["2", "1"]
    assert rows["decode-0"][3] == "ready"
    assert rows["decode-0"][6:8] == ["?", "?"]
    os.kill(host.pid_of("prefill-0"), signal.SIGKILL)
    host.read_until("failed for good: restarts are off")
    code, text = host.status("--format", "json")
    assert code == 1
    (deployment,) = json.loads(text)["deployments"]
    assert [row["state"] for row in deployment["processes"]] == ["failed", "ready"]
    assert "SIGKILL" in deployment["processes"][0]["last_exit"]
    assert "SIGKILL" in host.status()[1]


def test_console_that_nobody_reads_blocks_nobody(make_host: MakeHost) -> None:
    # 20,000 lines of 90 bytes are far more than a pipe and the console's queue hold.
    host = make_host(("prefill-0", ["--chatter", "20000"]), ("router", []))
    wait_until(lambda: (host.state_dir / host.name / store.STATE_FILE).exists(), "the state file", READY_TIMEOUT_S)
    wait_until(lambda: host.states() == ["ready", "ready"], "readiness although nobody reads", READY_TIMEOUT_S)
    log = (host.state_dir / host.name / "logs" / "prefill-0.log").read_text()
    assert "chatter 19999 " in log
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(timeout=10) == 0
    assert marked_pids(host.name) == []


def test_dropped_console_lines_are_counted(make_host: MakeHost, tmp_path: Path) -> None:
    go = tmp_path / "go"
    host = make_host(("prefill-0", ["--chatter", "20000", "--say", "the end", "--say-when", str(go)]))
    wait_until(lambda: (host.state_dir / host.name / store.STATE_FILE).exists(), "the state file", READY_TIMEOUT_S)
    wait_until(host.dropped_mark.exists, "a dropped line, as nobody reads", READY_TIMEOUT_S)
    host.read_until("chatter 3000 ")
    go.touch()
    said = host.read_until("the end")
    assert re.search(r"\[antiphon\] \d+ lines were not shown", said)


def test_reused_pid_is_not_believed(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", []))
    host.read_until("ALL READY")
    host.process.kill()
    host.process.wait()
    wait_until(lambda: not marked_pids(host.name), "everything gone")
    folder = host.state_dir / host.name
    state = store.read_state(folder)
    assert state is not None
    # As if this test's own process had been given the pids of both.
    state.supervisor_pid = state.processes[0].pid = os.getpid()
    store.write_state(folder, state)
    report = judge(state)
    assert not report.is_up
    assert [row.state for row in report.processes] == ["dead"]
    code, text = host.down("--name", host.name)
    assert (code, "it is put away" in text) == (0, True)


def test_gone_reader_of_the_console_does_not_end_the_run(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", []))
    host.read_until("ALL READY")
    assert host.process.stdout is not None
    host.process.stdout.close()
    os.kill(host.pid_of("prefill-0"), signal.SIGKILL)
    state_path = host.state_dir / host.name

    def is_ready_again() -> bool:
        state = store.read_state(state_path)
        assert state is not None
        return state.processes[0].restarts == 1 and state.processes[0].state == "ready"

    wait_until(is_ready_again, "the restart", 10.0)
    host.process.stdout = None
    host.process.send_signal(signal.SIGTERM)
    assert host.process.wait(timeout=10) == 0


def test_ports_are_free_after_the_stop(make_host: MakeHost) -> None:
    host = make_host(("prefill-0", []))
    host.read_until("ALL READY")
    state = store.read_state(host.state_dir / host.name)
    assert state is not None
    assert host.down()[0] == 0
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", state.processes[0].ports["http"]))
