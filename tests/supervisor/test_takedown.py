"""Taking a deployment down: what is not there any more at the moment of asking is down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from antiphon.cli.main import main
from antiphon.protocol.state import DeploymentState
from antiphon.supervisor import procfs, store, takedown


def test_supervisor_that_ends_just_before_it_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = procfs.start_ticks_of(os.getpid())
    assert ticks is not None
    state = DeploymentState(
        name="demo",
        boot_id=procfs.boot_id(),
        supervisor_pid=os.getpid(),
        supervisor_start_ticks=ticks,
        started_at=1.0,
        stop_grace_s=2.0,
    )
    store.write_state(tmp_path, state)
    asked: list[int] = []

    def gone(pid: int, number: int) -> None:
        asked.append(pid)
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    monkeypatch.setattr(takedown, "is_supervisor_alive", lambda state: not asked)
    result = takedown.take_down(tmp_path, lambda text: None)
    assert asked == [os.getpid()]
    assert (result.was_up, result.is_down) == (True, True)


def test_what_was_killed_is_put_away_and_said_to_be(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    folder.mkdir()
    state = DeploymentState(
        name="demo",
        boot_id=procfs.boot_id(),
        supervisor_pid=os.getpid(),
        supervisor_start_ticks=1,
        started_at=1.0,
        stop_grace_s=2.0,
    )
    store.write_state(folder, state)

    def down() -> Result:
        return CliRunner().invoke(main, ["down", "--name", "demo", "--state-dir", str(tmp_path)])

    first = down()
    assert first.exit_code == 0
    assert first.output == "demo had ended without being stopped; it is put away, and nothing of it is left\n"
    assert down().output == f"demo is not up (state folder: {tmp_path})\n"
    assert takedown.take_down(folder, lambda text: None).is_put_away is False
