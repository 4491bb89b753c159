"""Servers that end with the test, and the check that nothing of a client is left."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.client.fake_server import FakeServer, wait_until


@pytest.fixture
def make_server() -> Iterator[Callable[..., FakeServer]]:
    """``make_server(port=..., script=...)``: a fake server that is stopped at the end."""
    made: list[FakeServer] = []

    def make(**arguments: object) -> FakeServer:
        made.append(FakeServer(**arguments))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture
def server(make_server: Callable[..., FakeServer]) -> FakeServer:
    return make_server()


@pytest.fixture(autouse=True)
def _nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """No thread, no descriptor and no mapping of an arena stays behind."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    wait_until(lambda: not [t for t in threading.enumerate() if t.name == "antiphon-cache-client"])
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    wait_until(lambda: num_arena_mappings() == 0)


def num_arena_mappings() -> int:
    """Mappings of arenas in this process."""
    with open("/proc/self/maps") as maps:
        return sum("memfd:antiphon" in line for line in maps)
