"""The edge is tested on both event loops: uvloop, which serves, and asyncio's own, whose transports differ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from antiphon.transport.http import server
from tests.transport.http_edge import Driver


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs each asynchronous test of this folder on both loops."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def _quick_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are looked at every 50 ms rather than every second."""
    monkeypatch.setattr(server, "_SWEEP_INTERVAL_S", 0.05)


@pytest.fixture(params=[False, True], ids=["tasks", "strands"])
def drivers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Handlers run in tasks, and in strands."""
    monkeypatch.setattr(Driver, "in_strands", request.param)
