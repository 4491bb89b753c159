"""The guard against watchdogs that start late, not at all, or keep dying: healthy sessions live on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from antiphon.core.errors import StartError
from antiphon.supervisor import guard as guard_module
from antiphon.supervisor import procfs, watchdog
from antiphon.supervisor.guard import Guard

pytestmark = pytest.mark.process

DEADLINE_S = 20.0
PLAYED = """
import ctypes, pathlib, signal, sys, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # it dies with the test
here = pathlib.Path(__file__).parent
with open(here / "starts", "a") as file:
    file.write(f"{__import__('os').getpid()}\\n")
script = here / "script"
step = script.read_text().splitlines() if script.exists() else []
if step:
    script.write_text("\\n".join(step[1:]))
if step[:1] == ["fail"]:
    sys.exit(3)
if step[:1] == ["late"]:
    while not (here / "go").exists():
        time.sleep(0.01)
from antiphon.supervisor.watchdog import main
sys.exit(main())
"""


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The watchdog is played: each line of the file ``script`` says how one start goes, ``late`` or ``fail``."""
    (tmp_path / "played_watchdog.py").write_text(PLAYED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    name = SimpleNamespace(__name__="played_watchdog", READY_LINE=watchdog.READY_LINE)
    monkeypatch.setattr(guard_module, "watchdog", name)
    monkeypatch.setattr(guard_module, "RETRY_FIRST_S", 0.05)
    return tmp_path


@pytest.fixture
def session(die_with_parent: Callable[[], None]) -> Iterator[procfs.Session]:
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True, preexec_fn=die_with_parent
    )
    ticks = procfs.start_ticks_of(child.pid)
    assert ticks is not None
    yield procfs.Session(child.pid, ticks, "d/p/none")
    child.kill()
    child.wait()


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.notices: list[str] = []
        self.guard = Guard("played", folder / "logs" / "watchdog.log", self.notices.append)

    def starts(self) -> list[int]:
        """Pids of every watchdog that was started."""
        return [int(line) for line in (self.folder / "starts").read_text().split()]

    async def kill_watchdog(self) -> None:
        assert self.guard.pid is not None
        os.kill(self.guard.pid, signal.SIGKILL)

    async def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert time.monotonic() < deadline, f"{what}; notices: {self.notices}"
            await asyncio.sleep(0.02)


@pytest.fixture
async def bench(played: Path) -> AsyncIterator[Bench]:
    made = Bench(played)
    yield made
    (played / "go").touch()
    for entry in made.starts() if (played / "starts").exists() else []:
        if procfs.start_ticks_of(entry) is not None and entry != made.guard.pid:
            os.kill(entry, signal.SIGKILL)
            pytest.fail(f"a watchdog was left behind: pid {entry}")
    await made.guard.stop()


async def test_a_late_watchdog_is_killed_before_it_can_end_a_healthy_session(
    bench: Bench, session: procfs.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.guard.start()
    bench.guard.add(session)
    (bench.folder / "script").write_text("late")
    monkeypatch.setattr(guard_module, "START_TIMEOUT_S", 3.0)
    await bench.kill_watchdog()
    await bench.until(lambda: len(bench.starts()) == 3 and bench.guard.pid == bench.starts()[2], "a third watchdog")
    (bench.folder / "go").touch()
    late = bench.starts()[1]
    await bench.until(lambda: procfs.start_ticks_of(late) is None, "the end of the late watchdog")
    assert procfs.is_same_process(session.sid, session.start_ticks)
    assert any("did not start" in text and "trying again in 0.05 s" in text for text in bench.notices)
    # The one that runs in the end knows the session: it ends it when the pipe closes.
    await bench.guard.stop()
    assert procfs.start_ticks_of(session.sid) is None


async def test_start_is_tried_again_and_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    (bench.folder / "script").write_text("fail\nfail")
    await bench.guard.start()
    assert bench.guard.pid == bench.starts()[2]
    await bench.guard.stop()
    (bench.folder / "script").write_text("fail\n" * 10)
    with pytest.raises(StartError, match=r"did not start: see .*watchdog\.log"):
        await bench.guard.start()
    assert len(bench.starts()) == 3 + guard_module.START_ATTEMPTS


async def test_a_dead_watchdog_is_replaced_however_often_that_fails(bench: Bench, session: procfs.Session) -> None:
    await bench.guard.start()
    bench.guard.add(session)
    (bench.folder / "script").write_text("fail\nfail\nfail\nfail")
    await bench.kill_watchdog()
    await bench.until(lambda: len(bench.starts()) == 6 and bench.guard.pid == bench.starts()[5], "a working watchdog")
    waits = [text.split("trying again in ")[1].split(" s")[0] for text in bench.notices if "trying again" in text]
    assert waits == ["0.05", "0.1", "0.2", "0.4"]
    assert procfs.is_same_process(session.sid, session.start_ticks)
    bench.guard.drop(session)


async def test_log_folder_that_cannot_be_written_is_a_start_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="cannot be written") as caught:
        await Guard("played", tmp_path / "file" / "watchdog.log", print).start()
    assert caught.value.field == "supervisor.log_dir"


async def test_a_watchdog_that_stands_still_is_killed_in_the_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard_module, "STOP_TIMEOUT_S", 0.2)
    await bench.guard.start()
    pid = bench.guard.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await bench.guard.stop()
    assert procfs.start_ticks_of(pid) is None
    assert bench.guard.pid is None
    assert bench.notices == ["the watchdog did not end within 0.2 s, and is killed"]
