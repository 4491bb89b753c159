"""The parts of a cache server that no process test can bring about at will: shortage, time, full rings, other files.

In scope: population, preflight, reports, waiters, ticks, runtime folder. Out of scope: calls (``process``).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from antiphon.cache.events import ConnectionId, Detach
from antiphon.cache.machine import Cache
from antiphon.cache.options import CacheOptions
from antiphon.cache_server import population
from antiphon.cache_server.driver import CacheDriver
from antiphon.cache_server.metrics import CallTallies
from antiphon.cache_server.population import PIECE_BYTES, Population
from antiphon.cache_server.preflight import check_memory, earlier_arenas_bytes
from antiphon.cache_server.reports import REPORTS_MAX, Reports
from antiphon.cache_server.sockets import RuntimeFolder
from antiphon.cache_server.translate import event_of
from antiphon.config.cache_server_spec import CacheServerSpec
from antiphon.core.errors import CapacityExceeded, ConfigError, ProtocolError, StartError
from antiphon.core.memory import KEPT_FREE_BYTES
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol import cache as wire
from antiphon.storage.arena import ArenaOwner
from tests.cache_server.world import keys_of, namespace_of

LIFE = "0123456789ab"


# ---- population ------------------------------------------------------------------------------------------------------


@pytest.fixture
def arena() -> Iterator[ArenaOwner]:
    made = ArenaOwner.create(2 * PIECE_BYTES + 4096, "a-node", LIFE)
    yield made
    made.close()


async def until(holds: object, timeout_s: float = 5.0) -> None:
    assert callable(holds)
    for _ in range(int(timeout_s / 0.01)):
        if holds():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not within {timeout_s:g} s")


async def test_memory_is_taken_in_pieces_and_told_on_the_loop(arena: ArenaOwner) -> None:
    told: list[int] = []
    populating = Population(arena, told.append)
    populating.start()
    await until(lambda: len(told) == 3)
    assert told == [PIECE_BYTES, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 4096]
    assert os.fstat(arena.fd).st_blocks * 512 == arena.data_bytes + 4096
    populating.stop()
    assert populating.is_alive, "complete is as good as alive"


async def test_a_sandbox_that_lets_no_thread_give_way_costs_no_memory(
    arena: ArenaOwner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_unused: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "setpriority", refuse)
    told: list[int] = []
    populating = Population(arena, told.append)
    populating.start()
    await until(lambda: len(told) == 3)
    populating.stop()
    assert populating.populated_bytes == arena.data_bytes


async def test_a_shortage_stops_it_with_an_alarm_and_it_goes_on_after(
    arena: ArenaOwner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(population, "_RETRY_S", 0.05)
    caplog.set_level(logging.INFO)
    free_bytes = [KEPT_FREE_BYTES + PIECE_BYTES]
    told: list[int] = []

    def tell(populated_bytes: int) -> None:
        told.append(populated_bytes)
        if populated_bytes == PIECE_BYTES:
            free_bytes[0] = KEPT_FREE_BYTES + PIECE_BYTES - 1

    def available() -> int:
        # The first piece is passed on before the second is judged.
        return free_bytes[0] if told or populating.populated_bytes == 0 else 0

    populating = Population(arena, tell, available)
    populating.start()
    await until(lambda: populating.error is not None and told)
    assert told == [PIECE_BYTES]
    assert "MB of memory are free" in (populating.error or "")
    await asyncio.sleep(0.2)
    assert told == [PIECE_BYTES], "it waits"
    assert populating.is_alive
    free_bytes[0] = KEPT_FREE_BYTES + PIECE_BYTES
    await until(lambda: len(told) == 3)
    populating.stop()
    assert populating.error is None
    levels = [(record.levelname, record.message) for record in caplog.records]
    assert [text for level, text in levels if level == "ERROR"] == [
        text for level, text in levels if "the arena stays at 16 MB for now" in text
    ], "one alarm, not one a try"
    assert any("the arena grows again" in text for _, text in levels)


async def test_a_refusal_of_the_kernel_is_a_shortage_too(arena: ArenaOwner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(population, "_RETRY_S", 0.05)

    def refuse(offset_bytes: int, num_bytes: int) -> None:
        raise CapacityExceeded("no memory for this piece")

    monkeypatch.setattr(arena, "populate", refuse)
    populating = Population(arena, lambda _: None)
    populating.start()
    await until(lambda: populating.error == "no memory for this piece")
    populating.stop()
    assert populating.populated_bytes == 0
    assert not populating.is_alive


# ---- before the start ------------------------------------------------------------------------------------------------


def test_the_arena_must_leave_memory_to_others() -> None:
    spec = CacheServerSpec(l1_size_gb=4.0)
    check_memory(spec, "a-node", available_bytes=4 * 10**9 + KEPT_FREE_BYTES)
    with pytest.raises(ConfigError, match="4 GB are asked for") as refused:
        check_memory(spec, "a-node", available_bytes=4 * 10**9 + KEPT_FREE_BYTES - 1)
    assert refused.value.remedy == "give at most --l1-size-gb 3.9, or free memory"
    with pytest.raises(ConfigError) as refused:
        check_memory(spec, "a-node", available_bytes=10**8)
    assert refused.value.remedy == "free memory"


def test_memory_of_an_earlier_life_counts_as_free(tmp_path: Path) -> None:
    line = "7f0000000000-7f0000{:06x} rw-s 00000000 00:01 77 /memfd:antiphon:{}:{} (deleted)\n"
    maps = {
        "10": line.format(0x3000, "a-node", LIFE) + "7f1000000000-7f1000001000 r--p 0 08:01 9 /usr/lib/libc.so.6\n",
        "11": line.format(0x3000, "a-node", LIFE),
        "12": line.format(0x5000, "a-node", "ba9876543210"),
        "13": line.format(0x7000, "a-node-too", LIFE),
    }
    for pid, text in maps.items():
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "maps").write_text(text)
    assert earlier_arenas_bytes("a-node", tmp_path) == 0x3000 + 0x5000
    own = ArenaOwner.create(1 << 20, "a-test", LIFE)
    assert earlier_arenas_bytes("a-test") == (1 << 20) + 4096
    spec = CacheServerSpec(l1_size_gb=0.001)
    check_memory(spec, "a-test", available_bytes=KEPT_FREE_BYTES)
    own.close()
    with pytest.raises(ConfigError):
        check_memory(spec, "a-test", available_bytes=KEPT_FREE_BYTES)


def test_the_name_is_taken_once_and_only_dead_sockets_go(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    taken = RuntimeFolder.open(folder, "a")
    sock, path = taken.listen(LIFE)
    assert os.stat(path).st_mode & 0o777 == 0o600
    with pytest.raises(StartError, match="a cache server named a runs already"):
        RuntimeFolder.open(folder, "a")
    assert Path(path).exists()
    other = RuntimeFolder.open(folder, "a-b")
    kept = [folder / f"cache-a-b-{LIFE}.sock", folder / "cache-a-notes.sock"]
    for file in kept:
        file.touch()
    sock.close()
    taken.close()
    assert not Path(path).exists()
    (folder / "cache-a-ba9876543210.sock").touch()
    again = RuntimeFolder.open(folder, "a")
    assert sorted(folder.glob("*.sock")) == sorted(kept)
    again.close()
    other.close()


# ---- reports and waits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["folder", "nothing", "file"])
def test_a_folder_that_is_a_link_is_refused(tmp_path: Path, target: str) -> None:
    """Whoever made it can turn it elsewhere; /tmp is everybody's."""
    if target == "folder":
        (tmp_path / target).mkdir(mode=0o700)
    elif target == "file":
        (tmp_path / target).write_text("")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    with pytest.raises(ConfigError, match="symbolic link") as caught:
        RuntimeFolder.open(link, "x")
    assert f"{tmp_path / target}" in (caught.value.remedy or "")
    assert not (tmp_path / "folder").exists() or list((tmp_path / "folder").iterdir()) == []


@pytest.mark.parametrize("mode", [0o770, 0o702])
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(ConfigError, match="others can change"):
        RuntimeFolder.open(folder, "x")
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be made"):
        RuntimeFolder.open(tmp_path / "file", "x")


def report(number: int, **changes: object) -> wire.Report:
    values = (f"r{number}", "e", "i", 10, 1, 2, 3, 4, 0, "finished", bytes(32), 0, 0)
    names = wire.Report.__struct_fields__
    return wire.Report(**(dict(zip(names, values, strict=True)) | changes))  # type: ignore[arg-type]


async def test_the_ring_keeps_the_last_reports_and_counts_the_lost() -> None:
    reports = Reports()
    for number in range(REPORTS_MAX + 5):
        reports.add(report(number))
    page = reports.since(3, 4)
    assert page.num_lost == 3
    assert [kept.sequence for kept in page.reports] == [6, 7, 8, 9]
    assert page.next_sequence == 10
    assert reports.since(REPORTS_MAX + 6, 10).reports == ()
    for beyond in (0, REPORTS_MAX + 7):
        with pytest.raises(ValueError, match="report numbers go from 1"):
            reports.since(beyond, 10)


async def test_totals_are_sums_and_mismatches_are_counted() -> None:
    reports = Reports()
    reports.add(report(1))
    reports.add(report(2, computed=9))
    reports.add(report(3, computed=0, finish="aborted"))
    totals = reports.totals
    assert (totals.num_reports, totals.num_mismatched, totals.num_aborted) == (3, 1, 1)
    assert (totals.device, totals.l1, totals.remote_prefill, totals.computed) == (3, 6, 9, 13)
    with pytest.raises(ProtocolError):
        reports.add(report(4, l1=1 << 41))
    assert totals.num_reports == 3


async def test_a_report_names_a_namespace_or_none() -> None:
    reports = Reports()
    assert reports.add(report(1, namespace=b"\xab" * 32)).namespace == "ab" * 32
    assert reports.add(report(2, namespace=b"")).namespace == ""
    for wrong in (b"x", b"x" * 31, b"x" * 33):
        with pytest.raises(ProtocolError, match="32 bytes"):
            reports.add(report(3, namespace=wrong))
    assert reports.next_sequence == 3


async def test_a_wait_ends_with_its_entry_or_its_time() -> None:
    reports = Reports()
    assert await reports.waiters.wait(1, 0.01) is False
    waiting = [asyncio.create_task(reports.waiters.wait(sequence, 5)) for sequence in (1, 1, 2)]
    await asyncio.sleep(0)
    reports.add(report(1))
    assert await asyncio.gather(*waiting[:2]) == [True, True]
    assert not waiting[2].done()
    reports.add(report(2))
    assert await waiting[2] is True
    assert await reports.waiters.wait(2, 0) is True
    gone = asyncio.create_task(reports.waiters.wait(3, 5))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.wait([gone])
    reports.add(report(3))
    assert gone.cancelled()


# ---- time ------------------------------------------------------------------------------------------------------------


async def test_a_quarantine_ends_on_time_on_an_idle_server() -> None:
    options = CacheOptions(arena_bytes=1 << 20, quarantine_s=0.2)
    driver = CacheDriver(Cache(options), CallTallies(), QuietLog(logging.getLogger("quiet")))
    attach = wire.Attach("e", "i", "w", 1, "m", 256, 1, 4096, None, (0,))
    namespace, keys = namespace_of("n"), b"".join(keys_of("n", 2))

    def step(body: object, connection: int) -> object:
        return driver.step(event_of(body, connection, 1))  # type: ignore[arg-type]

    step(attach, 1)
    reserved = step(wire.Reserve(namespace, "t", None, keys), 1)
    regions = tuple(
        wire.Region(g.region.offset_bytes, g.region.size_bytes, g.region.generation)
        for g in reserved.grants  # type: ignore[attr-defined]
    )
    step(wire.Commit(regions), 1)
    step(wire.Lookup("r", namespace, "t", keys), 1)
    assert await driver.waiters.wait(2, 0) is True
    driver.step(Detach(ConnectionId(1)))
    assert len(driver.cache.leases()) == 1
    began_s = driver.now_s
    await until(lambda: not driver.cache.leases())
    assert 0.15 < driver.now_s - began_s < 1.0
    driver.close()
