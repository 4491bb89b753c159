"""A process that a replica holds never outlives it, whichever way the replica ends; real processes, no Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.ray.holder import unset_names
from antiphon.supervisor import procfs
from tests.router.stack import wait_for

HOLDING = Path(__file__).parent / "holding.py"


class Held:
    def __init__(self, folder: Path, port: int, preexec: Callable[[], None]) -> None:
        env = os.environ | {"RAY_X": "1", "OMP_NUM_THREADS": "3"}
        self.host = subprocess.Popen(
            [sys.executable, str(HOLDING), str(folder), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            preexec_fn=preexec,
        )
        assert self.host.stdout is not None
        line = self.host.stdout.readline()
        assert line, self.host.stderr and self.host.stderr.read()
        self.pids = [int(word) for word in line.split()]

    def close(self) -> None:
        self.host.kill()
        self.host.wait()
        for pipe in (self.host.stdin, self.host.stdout, self.host.stderr):
            assert pipe is not None
            pipe.close()

    def wait_gone(self) -> None:
        wait_for(lambda: not any(procfs.start_ticks_of(pid) for pid in self.pids), "nothing is left", 30.0)


@pytest.fixture
def held(tmp_path: Path, free_port: int, die_with_parent: Callable[[], None]) -> Iterator[Held]:
    found = Held(tmp_path, free_port, die_with_parent)
    yield found
    found.close()
    found.wait_gone()


@pytest.mark.process
def test_what_is_held_ends_when_the_replica_and_its_children_are_killed_at_once(held: Held) -> None:
    """As Ray ends a worker: the watchdog must be none of its children."""
    children = [
        stat.pid
        for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
        if (stat := procfs.read_stat(pid)) is not None and stat.ppid == held.host.pid
    ]
    assert held.pids[0] in children
    assert held.pids[1] not in children
    held.host.send_signal(signal.SIGSTOP)
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    held.host.kill()
    held.wait_gone()


@pytest.mark.process
def test_what_is_held_ends_when_the_replica_is_killed(held: Held) -> None:
    held.host.kill()
    held.wait_gone()


@pytest.mark.process
@pytest.mark.parametrize("num_stops", [1, 3])
def test_stop_ends_everything(held: Held, num_stops: int) -> None:
    """Also by several at once: a replica that ends while it starts is stopped by the start that is cancelled, too."""
    assert held.host.stdin is not None
    assert held.host.stdout is not None
    assert held.host.stderr is not None
    held.host.stdin.write(f"{num_stops}\n")
    held.host.stdin.flush()
    assert held.host.stdout.readline() == "stopped\n", held.host.stderr.read()
    held.wait_gone()


@pytest.mark.process
def test_what_is_held_sees_nothing_that_ray_sets(held: Held) -> None:
    with open(f"/proc/{held.pids[0]}/environ", "rb") as file:
        names = {item.partition(b"=")[0].decode() for item in file.read().split(b"\0") if item}
    assert procfs.MARKER_VARIABLE in names
    assert not unset_names(dict.fromkeys(names, "")), names
    assert unset_names({"RAY_X": "1", "PATH": "", "OMP_NUM_THREADS": "1"}) == ("RAY_X", "OMP_NUM_THREADS")
