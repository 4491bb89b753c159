"""The state file, the lock, and what a report makes of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from antiphon.core.errors import ConfigError, ProtocolError, StartError
from antiphon.protocol.state import DeploymentState, ProcessState, decode_state, encode_state
from antiphon.supervisor import procfs, store
from antiphon.supervisor.report import judge, running_ports


def state_of(**changes: object) -> DeploymentState:
    values: dict[str, object] = {
        "name": "demo",
        "boot_id": procfs.boot_id(),
        "supervisor_pid": os.getpid(),
        "supervisor_start_ticks": procfs.start_ticks_of(os.getpid()),
        "started_at": 1.0,
        "stop_grace_s": 2.0,
    }
    return DeploymentState(**(values | changes))  # type: ignore[arg-type]


def own_process(**changes: object) -> ProcessState:
    """A record that points at this very process."""
    values: dict[str, object] = {
        "name": "prefill-0",
        "role": "prefill",
        "kind": "vllm",
        "state": "ready",
        "pid": os.getpid(),
        "start_ticks": procfs.start_ticks_of(os.getpid()),
        "ports": {"http": 8001},
    }
    return ProcessState(**(values | changes))  # type: ignore[arg-type]


def test_state_round_trip_and_mode(tmp_path: Path) -> None:
    state = state_of(processes=[own_process(last_exit="was killed by SIGKILL")])
    store.write_state(tmp_path, state)
    assert store.read_state(tmp_path) == state
    assert stat.S_IMODE((tmp_path / store.STATE_FILE).stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == [store.STATE_FILE]


def test_state_that_cannot_be_understood(tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match="not a state file"):
        decode_state(b"{")
    with pytest.raises(ProtocolError, match="version 99"):
        decode_state(encode_state(state_of(version=99)))
    (tmp_path / store.STATE_FILE).write_bytes(b"[]")
    with pytest.raises(ProtocolError):
        store.read_state(tmp_path)
    assert store.load_previous(tmp_path) is None
    assert store.read_state(tmp_path / "missing") is None


def test_lock_names_its_holder_and_is_free_after_release(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    first, second = store.DeploymentLock(folder), store.DeploymentLock(folder)
    first.acquire()
    with pytest.raises(StartError, match=rf"'demo' is already up .*pid {os.getpid()}") as caught:
        second.acquire()
    assert caught.value.remedy is not None
    assert "one command that names them all: antiphon up --only prefill --only router" in caught.value.remedy
    first.release()
    second.acquire()
    second.release()
    second.release()


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartError, match="cannot be written") as caught:
        store.DeploymentLock(tmp_path / "file" / "demo").acquire()
    assert caught.value.field == "supervisor.state_dir"


@pytest.mark.parametrize("name", ["", "..", "a/b", ".hidden", "x" * 65])
def test_names_that_are_no_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        store.deployment_dir(str(tmp_path), name)


def test_known_names(tmp_path: Path) -> None:
    assert store.known_names(str(tmp_path / "missing")) == []
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        store.write_state(tmp_path / name, state_of(name=name))
    (tmp_path / "empty").mkdir()
    assert store.known_names(str(tmp_path)) == ["a", "b"]


def test_report_believes_pid_and_start_time_only_in_this_boot() -> None:
    ticks = procfs.start_ticks_of(os.getpid())
    assert ticks is not None
    alive = judge(state_of(processes=[own_process()]))
    assert (alive.is_supervisor_alive, alive.is_all_ready, alive.processes[0].state) == (True, True, "ready")
    reused = judge(state_of(processes=[own_process(start_ticks=ticks - 1)]))
    assert (reused.is_up, reused.is_all_ready, reused.processes[0].state) == (True, False, "dead")
    other_boot = judge(state_of(boot_id="another", processes=[own_process()]))
    assert (other_boot.is_up, other_boot.processes[0].state, other_boot.processes[0].pid) == (False, "dead", None)
    gone = judge(state_of(supervisor_start_ticks=ticks - 1, processes=[own_process(state="restarting", pid=None)]))
    assert (gone.is_up, gone.processes[0].state) == (False, "dead")
    stopped = judge(state_of(stopped_at=2.0, processes=[own_process(state="stopped", pid=None)]))
    assert (stopped.is_up, stopped.processes[0].state) == (False, "stopped")
    failed = judge(state_of(processes=[own_process(state="failed", pid=None), own_process(name="decode-0")]))
    assert (failed.is_up, failed.is_all_ready) == (True, False)
    assert not judge(state_of(processes=[])).is_all_ready


def test_own_ports_are_those_that_a_living_supervisor_keeps_up(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    assert running_ports(str(tmp_path), "demo") == {}
    up = [own_process(), own_process(name="cache", state="restarting", ports={"http": 8090, "calls": 6555}, pid=None)]
    gone = [own_process(name="decode-0", state="failed"), own_process(name="router", state="stopped")]
    store.write_state(folder, state_of(processes=[*up, *gone]))
    assert running_ports(str(tmp_path), "demo") == {"prefill-0": frozenset({8001}), "cache": frozenset({8090, 6555})}
    for changes in ({"stopped_at": 2.0}, {"boot_id": "another"}, {"supervisor_start_ticks": 1}):
        store.write_state(folder, state_of(processes=up, **changes))
        assert running_ports(str(tmp_path), "demo") == {}, changes
    (folder / store.STATE_FILE).write_text("garbage")
    assert running_ports(str(tmp_path), "demo") == {}
