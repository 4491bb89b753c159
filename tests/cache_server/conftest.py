"""A server that stands in for a real one, and the admin side before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from antiphon.cache_server.admin import AdminServer, start_admin
from tests.cache_server.admin_standin import StandIn, standing_in


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[StandIn]:
    async with standing_in(tmp_path) as server:
        yield server


@pytest.fixture
async def admin(server: StandIn) -> AsyncIterator[AdminServer]:
    admin = await start_admin(server, "127.0.0.1", 0)
    yield admin
    await admin.close()
