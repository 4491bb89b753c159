"""The edge is tested on both event loops: uvloop, which serves, and asyncio's own, whose transports behave differently."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Runs each asynchronous test of this folder on both loops."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
