"""Taking a deployment down: what is not there any more at the moment of asking is down."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

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
