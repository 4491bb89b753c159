"""A server that is no member says why, once a reason, and the coordinator says whom it refuses. On one event loop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import pytest

from antiphon.cache.lending import Shelf
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache_server import peer_membership
from antiphon.cache_server.peer_feed import Feed
from antiphon.cache_server.peer_membership import Membership
from antiphon.cache_server.peer_serving import PeerSelf
from antiphon.cache_server.peer_threads import CacheThread
from antiphon.coordinator.directory import DirectoryOptions
from antiphon.coordinator.server import Coordinator
from antiphon.transport.listening import listen_tcp

SECRET, OTHER = b"s" * 32, b"o" * 32
NUM_TRIES = 5


async def until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + 20.0
    while not holds():
        assert time.monotonic() < deadline_s, f"not within 20 s: {what}"
        await asyncio.sleep(0.005)


def member_of(port: int) -> Membership:
    async def nothing_changes(timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)

    cache = Cache(CacheOptions(arena_bytes=1 << 20))
    urls = (f"127.0.0.1:{port}", "127.0.0.1:1")
    thread = CacheThread(asyncio.get_running_loop())
    return Membership(PeerSelf("kv", "life", SECRET), urls, lambda: Feed(Shelf(cache)), nothing_changes, thread)


def said(caplog: pytest.LogCaptureFixture, name: str, text: str) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.name == name and text in each.getMessage()]


async def test_another_secret_is_said_once_by_both_sides_and_so_is_the_return(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_membership, "RETRY_MAX_S", 0.02)
    caplog.set_level(logging.INFO)
    wrong = Coordinator(OTHER, DirectoryOptions())
    wrong.listen(listen_tcp("127.0.0.1", 0))
    member = member_of(wrong.port)
    running = asyncio.create_task(member.run())
    try:
        await until(lambda: wrong.counts["refused"] >= NUM_TRIES, "it has tried several times")
        assert "another cluster secret" in member.reason
        await wrong.close()
        right = Coordinator(SECRET, DirectoryOptions())
        right.listen(listen_tcp("127.0.0.1", wrong.port))
        await until(lambda: member.is_member, "it is a member again")
        assert member.reason == ""
        assert right.counts["refused"] == 0
        await right.close()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    (line,) = said(caplog, "antiphon.peers", "has another cluster secret")
    assert line.startswith("no member of the cluster: ")
    assert len(said(caplog, "antiphon.peers", "a member of the cluster at ")) == 1
    lines = said(caplog, "antiphon.coordinator", "a connection is refused: kv has not shown the cluster secret")
    assert 1 <= len(lines) <= 3 < NUM_TRIES


async def test_a_connection_that_says_nothing_is_no_refusal(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    coordinator = Coordinator(SECRET, DirectoryOptions())
    coordinator.listen(listen_tcp("127.0.0.1", 0))
    _, writer = await asyncio.open_connection("127.0.0.1", coordinator.port)
    await until(lambda: coordinator.num_connections == 1, "it is accepted")
    writer.close()
    await until(lambda: coordinator.num_connections == 0, "it is over")
    await coordinator.close()
    assert coordinator.counts["refused"] == 0
    assert not said(caplog, "antiphon.coordinator", "refused")
