"""A real server with tiers: what is stored outlives it, a tier that hangs delays nothing, and what is seen of it."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from antiphon.cache.events import Clear
from antiphon.cache_server import tier_setup
from antiphon.cache_server.server import CacheServer
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.protocol import cache as wire
from antiphon.storage.memory_tier import MemoryTier
from tests.cache_server.world import SLAB_BYTES, Client, ServerProcess, keys_of, namespace_of, wait_for

pytest.importorskip("xxhash", reason="needs xxhash")


def onboard(client: Client, name: str, keys: list[bytes], onboard_s: float = 5.0, tenant: str = "t") -> Any:
    """The answers to a lookup that may wait: the last one, and whether another came first."""
    body = wire.Lookup("r", namespace_of(name), tenant, b"".join(keys), onboard_s)
    call_id = client.send(body)
    first = client.receive()
    assert first.id == call_id
    if not isinstance(first.body, wire.Onboarding):
        return first.body, None
    last = client.receive()
    assert last.id == call_id
    return last.body, first.body


def fill(client: Client, name: str, keys: list[bytes]) -> None:
    """Stores chunks, each wholly filled with bytes of its key."""
    reserved = client.reserve(name, keys)
    for grant in reserved.grants:
        client.write(grant.region, keys[grant.index] * (SLAB_BYTES // 32))
    regions = tuple(grant.region for grant in reserved.grants)
    assert set(client.call(wire.Commit(regions), wire.Committed).outcomes) == {"readable"}


def is_right(client: Client, found: wire.Found, keys: list[bytes]) -> bool:
    whole = [client.read(region, SLAB_BYTES) for region in found.regions]
    return whole == [key * (SLAB_BYTES // 32) for key in keys[: len(whole)]]


@pytest.fixture
def start(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def starting(*flags: str, **changes: Any) -> ServerProcess:
        server = ServerProcess(tmp_path, die_with_parent, *flags, **changes)
        servers.append(server)
        return server.wait_populated()

    yield starting
    for server in servers:
        server.kill()


def tier_of(server: ServerProcess) -> dict[str, Any]:
    return server.get("/status")["storage_manager"]["l2_tiers"][0]  # type: ignore[no-any-return]


@pytest.mark.process
@pytest.mark.parametrize("policy", ["through", "back"])
def test_what_was_stored_is_found_after_a_restart(
    start: Callable[..., ServerProcess], tmp_path: Path, policy: str
) -> None:
    url = f"disk://{tmp_path}/kv?capacity_gb=0.1&store={policy}"
    keys = keys_of("p", 8)
    server = start("--l2", url, "--instance-id", "one", size_gb=0.016)
    with server.connect().attach() as client:
        fill(client, "p", keys)
        others = keys_of("q", 230) if policy == "back" else []
        for first in range(0, len(others), 10):  # so many that little of the arena is free
            fill(client, f"q{first}", keys_of(f"q{first}", 10))
        wait_for(lambda: tier_of(server)["publications"]["published"] >= 8, "the chunks are published", 15)
    server.kill()
    again = start("--l2", url, "--instance-id", "one", size_gb=0.016)
    wait_for(lambda: tier_of(again)["known_count"] >= 8, "the tier is listed")
    with again.connect().attach(incarnation="2") as client:
        assert client.lookup("p", keys).lease is None  # who does not wait gets what is in memory
        found, first = onboard(client, "p", keys)
        assert (first.num_tokens, first.num_tokens_max) == (0, 8 * 256)
        assert found.num_tokens == 8 * 256
        assert found.fetched == (("l2", tuple(range(8))),)
        assert is_right(client, found, keys)
        client.release(found)
        at_once, first = onboard(client, "p", keys)
        assert (at_once.num_tokens, at_once.fetched, first) == (8 * 256, (), None)
        client.release(at_once)
        client.call(wire.Report("r", "e", "2", 2100, 0, 0, 0, 52, 0, "finished", b"", 2048), wire.Noted)
    status = again.get("/status")
    assert status["tokens"]["reported"]["l2"] == 2048
    assert status["reports"]["mismatched"] == 0
    assert tier_of(again)["fetches"]["hit"] == 8
    assert again.stop() == 0


@pytest.mark.process
def test_what_was_cleared_is_not_found_in_the_tier(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    server = start("--l2", f"disk://{tmp_path}/kv?capacity_gb=0.1")
    with server.connect().attach() as client:
        mine, others = keys_of("p", 2), keys_of("o", 2)
        fill(client, "p", mine)
        client.store("o", others, tenant="other")
        wait_for(lambda: tier_of(server)["publications"]["published"] == 4, "the chunks are published")
        client.call(wire.Clear(tenant="t"), wire.Cleared)
        wait_for(lambda: tier_of(server)["clears_pending"] == 0, "the clear has reached the tier")
        assert tier_of(server)["total_object_count"] == 2
        assert onboard(client, "p", mine)[0].num_tokens == 0
        client.call(wire.Clear(), wire.Cleared)
        wait_for(lambda: tier_of(server)["total_object_count"] == 0, "nothing is left")


@pytest.mark.process
def test_a_damaged_record_is_a_miss(start: Callable[..., ServerProcess], tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    server = start("--l2", f"disk://{folder}?capacity_gb=0.1", "--instance-id", "one")
    keys = keys_of("p", 3)
    with server.connect().attach() as client:
        fill(client, "p", keys)
        wait_for(lambda: tier_of(server)["publications"]["published"] == 3, "the chunks are published")
    server.stop()
    for path in [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > SLAB_BYTES]:
        data = bytearray(path.read_bytes())
        data[len(data) - SLAB_BYTES // 2] ^= 1
        path.write_bytes(data)
    again = start("--l2", f"disk://{folder}?capacity_gb=0.1", "--instance-id", "one")
    with again.connect().attach() as client:
        wait_for(lambda: tier_of(again)["is_known_complete"], "the tier is listed")
        found, _ = onboard(client, "p", keys)
        assert (found.num_tokens, found.lease) == (0, None)
    assert tier_of(again)["fetches"]["corrupt"] >= 1
    assert tier_of(again)["breaker"] == "closed"


@pytest.mark.process
def test_a_tier_that_cannot_be_opened_is_refused(tmp_path: Path, die_with_parent: Callable[[], None]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match="--l2"):
        ServerProcess(tmp_path, die_with_parent, "--l2", f"disk://{tmp_path}/file?capacity_gb=0.1")


# ---- in this process, with a tier whose faults are at hand ----------------------------------------------------------


class Served:
    """A server in this process over a tier in memory, and a client on a thread."""

    def __init__(self, server: CacheServer, tier: MemoryTier, client: Client) -> None:
        self.server, self.tier, self.client = server, tier, client

    @property
    def breaker(self) -> str:
        return self.server.tiers()[0][0].breaker.value

    async def hang(self) -> None:
        """Let the tier hang once nothing is published any more: what was under way would be overdue by then."""
        await self.until(lambda: not self._has_jobs, "all is published")
        self.tier.faults.is_hung = True

    @property
    def _has_jobs(self) -> bool:
        plan = self.server.tiers()[0][0]
        return bool(plan.num_running or plan.num_waiting)

    async def until(self, holds: Callable[[], bool], what: str, timeout_s: float = 5.0) -> float:
        """Waits for it; returns the seconds that it took."""
        began_s = time.monotonic()
        while not holds():
            assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s:g} s: {what}"
            await asyncio.sleep(0.005)
        return time.monotonic() - began_s

    async def call(self, action: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(action, *args)


async def serve(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    test: Callable[[Served], Awaitable[None]],
    **faults: bool,
) -> None:
    """Runs ``test`` with a server whose tier has ``faults`` from the start."""
    tier = MemoryTier("memory", 10**9, timeout_s=0.3)
    for name, value in faults.items():
        setattr(tier.faults, name, value)
    monkeypatch.setattr(tier_setup, "open_tier", lambda spec: tier)
    spec = CacheServerSpec(
        port=0,
        http_port=0,
        l1_size_gb=0.016,
        instance_id="t",
        runtime_dir=str(tmp_path / "run"),
        l2=["memory://?capacity_gb=1&timeout_s=0.3"],
    )
    server = await CacheServer.start(spec)
    try:
        client = await asyncio.to_thread(lambda: Client(server.socket_path).hello().attach())
        with client:
            served = Served(server, tier, client)
            await served.until(lambda: server.population.is_complete, "the arena is populated", 20)
            await test(served)
    finally:
        await server.close()


async def test_a_tier_that_hangs_delays_no_hit_and_is_back_within_five_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(served: Served) -> None:
        here, there = keys_of("p", 4), keys_of("q", 4)
        await served.call(fill, served.client, "p", here)
        await served.call(fill, served.client, "q", there)
        await served.until(lambda: served.tier.usage().num_chunks == 8, "the chunks are published")
        served.server.control(Clear(None, "nobody's"))

        def hits(number: int) -> list[float]:
            times = []
            for _ in range(number):
                began_s = time.perf_counter()
                found, first = onboard(served.client, "p", here)
                times.append(time.perf_counter() - began_s)
                assert (found.num_tokens, first) == (4 * 256, None)
                served.client.release(found)
            return times

        usual = await served.call(hits, 200)
        await served.hang()
        missing = keys_of("p", 4)[:2] + keys_of("z", 2)
        found, first = await served.call(onboard, served.client, "p", missing)
        assert (found.num_tokens, first) == (2 * 256, None)  # nothing of the rest is known to be anywhere
        await served.call(served.client.release, found)
        await served.call(fill, served.client, "n", keys_of("n", 4))  # is to be published, and hangs
        hung = await served.call(hits, 200)
        await served.until(lambda: served.breaker != "closed", "the breaker is open")
        hung += await served.call(hits, 200)
        assert statistics.median(hung) < statistics.median(usual) + 0.002
        served.tier.wake()
        took_s = await served.until(lambda: served.breaker == "closed", "the breaker is closed")
        assert took_s < 5
        await served.until(lambda: served.tier.usage().num_chunks == 12, "what waited is published")

    await serve(tmp_path, monkeypatch, test)


async def test_a_lookup_that_waits_for_a_tier_that_hangs_gets_what_is_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(served: Served) -> None:
        keys = keys_of("p", 120)  # 7.9 of 16 MB
        await served.call(fill, served.client, "p", keys[:60])
        await served.call(lambda: served.client.call(wire.Ping(), wire.Noted))
        await served.until(lambda: served.tier.usage().num_chunks == 60, "the chunks are published")
        for name in ("a", "b", "c", "d"):  # they take the room of the first
            await served.call(fill, served.client, name, keys_of(name, 60))
        there = await served.call(served.client.lookup, "p", keys[:60])
        assert there.num_tokens < 60 * 256
        await served.call(served.client.release, there)
        await served.hang()
        began_s = time.monotonic()
        found, first = await served.call(onboard, served.client, "p", keys[:60], 0.1)
        assert first is not None
        assert first.wait_s == pytest.approx(0.1)
        assert 0.05 < time.monotonic() - began_s < 1
        assert found.num_tokens == there.num_tokens
        await served.call(served.client.release, found)
        served.tier.wake()
        await served.until(lambda: served.breaker == "closed", "the breaker is closed")
        found, _ = await served.call(onboard, served.client, "p", keys[:60])
        assert found.num_tokens == 60 * 256
        assert is_right(served.client, found, keys)
        await served.call(served.client.release, found)

    await serve(tmp_path, monkeypatch, test)


async def test_a_peer_that_leaves_while_its_lookup_waits_leaves_no_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(served: Served) -> None:
        keys = keys_of("p", 2)
        await served.call(fill, served.client, "p", keys)
        await served.until(lambda: served.tier.usage().num_chunks == 2, "the chunks are published")
        for number in range(8):  # evicts what was stored first
            await served.call(fill, served.client, f"a{number}", keys_of(f"a{number}", 60))
        await served.hang()
        other = await served.call(lambda: Client(served.server.socket_path).hello().attach(slabs=()))
        await served.call(lambda: other.send(wire.Lookup("r", namespace_of("p"), "t", b"".join(keys), onboard_s=5.0)))
        assert isinstance((await served.call(other.receive)).body, wire.Onboarding)
        other.close()
        await served.until(lambda: served.server.statistics().num_connections == 1, "the peer has detached")
        served.tier.wake()
        await served.until(lambda: served.breaker == "closed", "the breaker is closed")
        assert sum(served.server.statistics().num_leases.values()) == 0

    await serve(tmp_path, monkeypatch, test)
