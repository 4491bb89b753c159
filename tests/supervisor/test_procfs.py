"""Identity and membership of processes, and the watchdog's way of ending them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from antiphon.supervisor import procfs, watchdog

SLEEP = "import time; time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ok', flush=True); {SLEEP}"
FAMILY = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {STUBBORN!r}]); {STUBBORN}"

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn(die_with_parent: Callable[[], None]) -> Iterator[Spawn]:
    started: list[subprocess.Popen[bytes]] = []

    def make(script: str, *, lines: int = 0, **env: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", script],
            start_new_session=True,
            stdout=subprocess.PIPE,
            env=os.environ | env,
            preexec_fn=die_with_parent,
        )
        started.append(process)
        assert process.stdout is not None
        for _ in range(lines):
            assert process.stdout.readline() == b"ok\n"
        return process

    yield make
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def session_of(process: subprocess.Popen[bytes], marker: str = "d/p/none") -> procfs.Session:
    ticks = procfs.start_ticks_of(process.pid)
    assert ticks is not None
    return procfs.Session(process.pid, ticks, marker)


def test_own_process() -> None:
    own = procfs.read_stat(os.getpid())
    assert own is not None
    assert (own.ppid, own.session) == (os.getppid(), os.getsid(0))
    assert own.is_running
    assert procfs.is_same_process(own.pid, own.start_ticks)
    assert not procfs.is_same_process(own.pid, own.start_ticks + 1)
    assert procfs.read_stat(2**22 + 1) is None


def test_ended_process_is_not_running_before_it_is_reaped(spawn: Spawn) -> None:
    process = spawn(SLEEP)
    session = session_of(process)
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    stat = procfs.read_stat(process.pid)
    assert stat is not None
    assert stat.state == "Z"
    assert procfs.start_ticks_of(process.pid) is None
    assert procfs.members([session]) == []


def test_members_by_session_and_by_marker_and_no_strangers(spawn: Spawn) -> None:
    family = spawn(FAMILY, lines=2)
    escaped = spawn(STUBBORN, lines=1, ANTIPHON_PROCESS="d/p/abc")
    stranger = spawn(STUBBORN, lines=1)
    session = session_of(family, "d/p/abc")
    found = {stat.pid for stat in procfs.members([session])}
    assert len(found) == 3
    assert {family.pid, escaped.pid} <= found
    assert stranger.pid not in found
    assert procfs.members([]) == []
    # The same session number with another start time of the leader is somebody else's.
    reused = procfs.Session(family.pid, session.start_ticks - 1, "d/p/none")
    assert procfs.members([reused]) == []


def test_end_sessions_kills_what_ignores_sigterm(spawn: Spawn) -> None:
    family = spawn(FAMILY, lines=2)
    session = session_of(family)
    started = time.monotonic()
    assert watchdog.end_sessions([session], term_grace_s=0.3, deadline_s=10.0) == []
    assert 0.25 < time.monotonic() - started < 5.0
    assert procfs.members([session]) == []
    assert family.wait() == -signal.SIGKILL


def test_end_sessions_is_gentle_first_and_wakes_what_is_stopped(spawn: Spawn) -> None:
    process = spawn("print('ok', flush=True); " + SLEEP, lines=1)
    os.kill(process.pid, signal.SIGSTOP)
    assert watchdog.end_sessions([session_of(process)], term_grace_s=5.0, deadline_s=10.0) == []
    assert process.wait() == -signal.SIGTERM


def test_signal_is_not_sent_to_a_reused_pid(spawn: Spawn) -> None:
    process = spawn(STUBBORN, lines=1)
    stat = procfs.read_stat(process.pid)
    assert stat is not None
    procfs.send(procfs.ProcessStat(stat.pid, "S", stat.ppid, stat.session, stat.start_ticks - 1), signal.SIGKILL)
    assert procfs.is_same_process(stat.pid, stat.start_ticks)
    procfs.send(stat, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL


def test_watchdog_lines() -> None:
    sessions: dict[int, procfs.Session] = {}
    watchdog.apply_line(sessions, "add 7 99 demo/prefill-0/abc\n")
    watchdog.apply_line(sessions, "add 8 100 demo/decode-0/def\n")
    watchdog.apply_line(sessions, "drop 7\n")
    watchdog.apply_line(sessions, "drop 7\n")
    assert sessions == {8: procfs.Session(8, 100, "demo/decode-0/def")}
    with pytest.raises(AssertionError):
        watchdog.apply_line(sessions, "what 7\n")
