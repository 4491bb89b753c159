"""The tier on a disk: the contract, and what only a disk has: crashes, restarts, room, other owners of the folder.

Out of scope: power loss under the file system, which no test here can make; the order of the calls that guards against
it is checked instead.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.core.errors import ConfigError, TierError, TierFull, TierTimeout, TierUnavailable
from antiphon.core.units import KIB, MIB, align_up
from antiphon.storage import disk_files
from antiphon.storage.disk_files import DiskFolder
from antiphon.storage.disk_tier import DiskIndex, DiskTier, DiskTierOptions
from antiphon.storage.record import HEAD_BYTES
from tests.storage.tier_kit import Rig, TierContract, key_of, meta_of, outcome, payload_of

CAPACITY_BYTES = 96 * MIB


def open_tier(path: Path, capacity_bytes: int = CAPACITY_BYTES, timeout_s: float = 5.0) -> DiskTier:
    return DiskTier("disk", DiskTierOptions(str(path), capacity_bytes, timeout_s))


def make_rig(path: Path, capacity_bytes: int = CAPACITY_BYTES, timeout_s: float = 5.0) -> Rig:
    def reopen() -> DiskTier:
        rig.store.close()
        return open_tier(path, capacity_bytes, timeout_s)

    def raw_path(key: bytes) -> Path:
        return path / key.hex()[:2] / key.hex()

    def set_raw(key: bytes, record: bytes) -> None:
        raw_path(key).write_bytes(record)

    rig = Rig(open_tier(path, capacity_bytes, timeout_s), lambda key: raw_path(key).read_bytes(), set_raw, reopen)
    return rig


def checked_rig(path: Path) -> Iterator[Rig]:
    """For a fixture: its books are right in the end."""
    made = make_rig(path)
    yield made
    assert isinstance(made.store, DiskTier)
    made.store.index.validate()
    made.store.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    yield from checked_rig(tmp_path / "tier")


class TestContract(TierContract):
    pass


class TestContractThroughThePageCache(TierContract):
    @pytest.fixture(autouse=True)
    def no_direct(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def refuse(path: str, flags: int, mode: int = 0o777) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no direct access")
            return real(path, flags, mode)

        monkeypatch.setattr(disk_files.os, "open", refuse)

    def test_it_was_switched(self, rig: Rig) -> None:
        rig.put(1)
        assert rig.get(1) is not None
        assert isinstance(rig.store, DiskTier)
        assert not rig.store._folder.is_direct


def files_of(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != "antiphon-tier")


# ---- room ------------------------------------------------------------------------------------------------------------


def test_room_is_bounded_and_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, 3 * (MIB + HEAD_BYTES))
    for number in range(3):
        rig.put(number, MIB)
    assert rig.get(0, MIB) is not None
    rig.put(3, MIB)
    assert [rig.get(number, MIB) is not None for number in range(4)] == [True, False, True, True]
    assert sum(file.stat().st_size for file in files_of(tmp_path)) == 3 * (MIB + HEAD_BYTES)
    assert rig.store.usage().held_bytes == rig.store.usage().capacity_bytes
    with pytest.raises(TierFull, match="does not fit"):
        rig.put(4, 4 * MIB)
    assert rig.store.usage().num_chunks == 3
    rig.store.close()


def test_many_writers_stay_within_the_room(tmp_path: Path) -> None:
    rig = make_rig(tmp_path, 6 * (MIB + HEAD_BYTES))
    errors: list[TierError] = []

    def work(worker: int) -> None:
        for number in range(6):
            try:
                rig.put(worker * 10 + number, MIB)
            except TierFull as error:
                errors.append(error)
            assert isinstance(rig.store, DiskTier)
            rig.store.index.validate()

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, "four writers at once fit into the room of six"
    assert sum(file.stat().st_size for file in files_of(tmp_path)) <= 6 * (MIB + HEAD_BYTES)
    assert len(files_of(tmp_path)) == rig.store.usage().num_chunks == 6
    rig.store.close()


@given(st.lists(st.tuples(st.sampled_from("prcft"), st.integers(0, 5), st.integers(1, 9)), max_size=60))
def test_the_books_against_a_plain_model(steps: list[tuple[str, int, int]]) -> None:
    index, model, reserved = DiskIndex(12), dict[bytes, int](), list[int]()
    for step, number, size in steps:
        key = key_of(number)
        if step == "p":
            gone = index.reserve(size)
            if gone is None:
                assert size + sum(reserved) > 12
                continue
            expected = []
            while sum(model.values()) + sum(reserved) + size > 12:
                oldest = next(iter(model))
                del model[oldest]
                expected.append(oldest)
            assert gone == expected
            reserved.append(size)
        elif step == "c" and reserved:
            size = reserved.pop()
            index.commit(key, size)
            model.pop(key, None)
            model[key] = size
        elif step == "r" and reserved:
            index.release(reserved.pop())
        elif step == "f":
            assert not index.forget(key, -1)
            assert index.forget(key, index.number_of(key)) == (model.pop(key, None) is not None)
        elif step == "t":
            assert (index.touch(key) is not None) == (key in model)
            if key in model:
                model[key] = model.pop(key)
        index.validate()
        assert index.keys() == list(model)
        assert index.usage().held_bytes == sum(model.values()) + sum(reserved)


def test_a_full_disk_is_a_typed_error_and_leaves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.put(1)
    assert isinstance(rig.store, DiskTier)
    real = os.pwrite

    def full(fd: int, piece: memoryview, offset: int) -> int:
        if offset >= 2 * MIB:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, piece, offset)

    monkeypatch.setattr(disk_files.os, "pwrite", full)
    with pytest.raises(TierFull, match="No space left"):
        rig.put(2, 8 * MIB)
    monkeypatch.undo()
    assert len(files_of(rig.store._folder.root)) == 1
    assert rig.get(1) is not None
    assert rig.store.usage().num_chunks == 1
    assert rig.put(2, 8 * MIB) == rig.get(2, 8 * MIB)


def mounted(folder: Path) -> bool:
    folder.mkdir()
    return (
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True).returncode == 0
    )


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    folder = tmp_path / "small"
    if not mounted(folder):
        pytest.skip("needs the right to mount a file system")
    try:
        rig = make_rig(folder / "tier")
        rig.put(1, MIB)
        with pytest.raises(TierFull):
            rig.put(2, 8 * MIB)
        assert rig.get(1, MIB) is not None
        rig.put(3, MIB)
        rig.store.close()
    finally:
        subprocess.run(["umount", folder], check=True)


# ---- restarts and crashes --------------------------------------------------------------------------------------------


def test_a_restart_keeps_the_order_of_writing(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    for number in (3, 1, 2):
        rig.put(number)
        os.utime(tmp_path / key_of(number).hex()[:2] / key_of(number).hex(), ns=(0, number))
    rig.store = rig.reopen()
    assert list(rig.store.keys() or ()) == [key_of(1), key_of(2), key_of(3)]
    rig.store.close()
    rig.store = open_tier(tmp_path, 2 * (64 * KIB + HEAD_BYTES))
    assert rig.store.contains([key_of(n) for n in (1, 2, 3)]) == [False, True, True]
    assert len(files_of(tmp_path)) == 2
    rig.store.close()


def test_what_a_crash_left_is_removed_and_what_is_not_ours_is_left(tmp_path: Path) -> None:
    rig = make_rig(tmp_path)
    for number in range(4):
        rig.put(number)
    rig.store.close()
    names = [tmp_path / key_of(number).hex()[:2] / key_of(number).hex() for number in range(5)]
    with names[0].open("r+b") as file:
        file.truncate(HEAD_BYTES + 64 * KIB - 1)  # torn
    with names[1].open("r+b") as file:
        file.write(b"x")  # a damaged head
    names[4].write_bytes(names[2].read_bytes())  # a sound record under another key
    unfinished = names[2].with_name(f"{names[2].name}.17.tmp")
    unfinished.write_bytes(b"half")
    kept = [tmp_path / "notes.txt", names[2].parent / "notes", names[2].parent / f"{names[2].name}.bak", names[3]]
    for path in kept[:3]:
        path.write_text("mine")
    linked = tmp_path / "00" / ("0" * 64)
    linked.symlink_to(kept[0])
    rig.store = open_tier(tmp_path)
    assert set(rig.store.keys() or ()) == {key_of(2), key_of(3)}
    assert not unfinished.exists()
    assert not any(names[number].exists() for number in (0, 1, 4))
    assert all(path.exists() for path in kept)
    assert linked.is_symlink()
    rig.store.close()


CRASHER = """
import sys
from tests.storage.test_disk_tier import make_rig
from pathlib import Path
rig = make_rig(Path(sys.argv[1]))
number = 0
while True:
    rig.put(number, 300_000 + number)
    print(number, flush=True)
    number += 1
"""


def test_killed_while_it_writes(tmp_path: Path, die_with_parent: Callable[[], None]) -> None:
    argv = [sys.executable, "-c", CRASHER, str(tmp_path / "tier")]
    for _ in range(4):
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent)
        assert child.stdout is not None
        done = [int(child.stdout.readline()) for _ in range(12)][-1]
        child.send_signal(signal.SIGKILL)
        child.communicate()
        rig = make_rig(tmp_path / "tier")
        for number in range(done + 1):
            assert rig.get(number, 300_000 + number) == payload_of(number, 300_000 + number)
        assert len(files_of(tmp_path / "tier")) == rig.store.usage().num_chunks
        rig.store.close()


def test_a_record_gets_its_name_after_it_is_on_the_disk(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("pwrite", "ftruncate", "fdatasync", "rename", "fsync"):
        real = getattr(os, name)

        def noted(*args: object, name: str = name, real: Callable[..., object] = real) -> object:
            order.append(name)
            return real(*args)

        monkeypatch.setattr(disk_files.os, name, noted)
    rig.put(1)
    assert order == ["pwrite", "pwrite", "ftruncate", "fdatasync", "rename"]
    rig.store.remove([key_of(1)])
    assert order[-1] == "fsync", "what was removed stays removed"


@pytest.mark.parametrize("failing", ["fdatasync", "rename", "ftruncate"])
def test_a_put_that_fails_leaves_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(disk_files.os, failing, fail)
    with pytest.raises(TierUnavailable, match="Input/output error"):
        rig.put(1)
    monkeypatch.undo()
    assert isinstance(rig.store, DiskTier)
    assert files_of(rig.store._folder.root) == []
    assert rig.store.usage().held_bytes == 0
    assert rig.get(1) is None


def test_a_file_that_vanished_is_a_miss(rig: Rig) -> None:
    rig.put(1)
    assert isinstance(rig.store, DiskTier)
    rig.store._folder.path(key_of(1)).unlink()
    assert rig.get(1) is None
    assert rig.store.usage().num_chunks == 0


@pytest.mark.parametrize("number", [1, 2], ids=["aligned", "copied"])
def test_a_source_that_changes_is_not_published(rig: Rig, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    from antiphon.storage.calls import Slots

    payload = payload_of(number, 8 * MIB)
    real = Slots.take

    def take_and_change(self: Slots, deadline: object) -> memoryview:
        payload[-1] = (payload[-1] + 1) % 256
        return real(self, deadline)  # type: ignore[arg-type]

    monkeypatch.setattr(Slots, "take", take_and_change)
    with pytest.raises(TierError, match="changed while it was stored"):
        rig.store.put(key_of(1), payload, meta_of(8 * MIB))
    monkeypatch.undo()
    assert rig.get(1, 8 * MIB) is None
    assert isinstance(rig.store, DiskTier)
    assert files_of(rig.store._folder.root) == []


# ---- a disk that hangs -----------------------------------------------------------------------------------------------


def test_a_hung_disk_ends_calls_at_their_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(tmp_path, timeout_s=0.4)
    kept = rig.put(1, 5 * MIB)
    hang = threading.Event()
    for name in ("pwrite", "preadv", "statvfs"):
        real = getattr(os, name)

        def late(*args: object, real: Callable[..., object] = real) -> object:
            hang.wait(20)
            return real(*args)

        monkeypatch.setattr(disk_files.os, name, late)
    buffers = [memoryview(bytearray(5 * MIB)) for _ in range(6)]
    outcomes = [outcome(lambda: rig.put(4, 5 * MIB))]
    for into in buffers:
        outcomes.append(outcome(lambda into=into: rig.store.get_into(key_of(1), meta_of(5 * MIB), into)))  # type: ignore[misc]
        outcomes.append(outcome(lambda: rig.put(2, 5 * MIB)))
        outcomes.append(outcome(rig.store.probe))
    for found in outcomes:
        assert isinstance(found.error, TierTimeout), found
        assert found.took_s < 0.9
    for into in buffers:
        into[:] = b"\x5a" * len(into)
    assert rig.store.contains([key_of(1)]) == [True]
    hang.set()
    monkeypatch.undo()
    wait_until(lambda: outcome(rig.store.probe).error is None)
    assert rig.get(1, 5 * MIB) == kept
    assert all(into == b"\x5a" * len(into) for into in buffers), "a late thread wrote into a buffer of the caller"
    wait_until(lambda: outcome(lambda: rig.put(3, 5 * MIB)).error is None)
    assert isinstance(rig.store, DiskTier)
    wait_until(lambda: rig.store.usage().held_bytes % align_up(5 * MIB + HEAD_BYTES, 4096) == 0)
    rig.store.close()


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(200):
        if condition():
            return
        pause.wait(0.05)
    raise AssertionError("it did not come to be")


# ---- the folder ------------------------------------------------------------------------------------------------------


def test_two_servers_on_one_folder_are_refused(rig: Rig) -> None:
    assert isinstance(rig.store, DiskTier)
    path = rig.store._folder.root
    with pytest.raises(ConfigError, match="used by another cache server"):
        open_tier(path)
    rig.put(1)
    rig.store = rig.reopen()
    assert rig.get(1) is not None


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all my work")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        open_tier(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    (tmp_path / "new" / "lost+found").mkdir(parents=True)
    open_tier(tmp_path / "new").close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierUnavailable, match="Not a directory"):
        open_tier(tmp_path / "file" / "tier")


def test_the_folder_is_for_its_user_alone(rig: Rig) -> None:
    rig.put(1)
    assert isinstance(rig.store, DiskTier)
    path = rig.store._folder.path(key_of(1))
    assert path.stat().st_mode & 0o077 == 0
    assert rig.store._folder.root.stat().st_mode & 0o077 == 0


def test_a_probe_finds_a_folder_that_vanished(tmp_path: Path) -> None:
    rig = make_rig(tmp_path / "tier")
    rig.store.probe()
    (tmp_path / "tier").rename(tmp_path / "elsewhere")
    with pytest.raises(TierUnavailable):
        rig.store.probe()
    with pytest.raises(TierUnavailable):
        rig.put(1)
    (tmp_path / "elsewhere").rename(tmp_path / "tier")
    rig.store.probe()
    rig.store.close()


def test_part_reads_and_writes_are_finished(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write, real_read = os.pwrite, os.preadv

    def write(fd: int, piece: memoryview, offset: int) -> int:
        return real_write(fd, piece[:8192], offset)

    def read(fd: int, into: list[memoryview], offset: int) -> int:
        return real_read(fd, [into[0][:8192]], offset)

    monkeypatch.setattr(disk_files.os, "pwrite", write)
    monkeypatch.setattr(disk_files.os, "preadv", read)
    assert rig.put(1, 100_001) == rig.get(1, 100_001)


def test_scanning_does_not_follow_what_is_no_folder(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    (tmp_path / "ab").rmdir()
    (tmp_path / "ab").write_text("a file where a folder was")
    with pytest.raises(TierUnavailable, match="File exists"):
        DiskFolder.open(tmp_path)
