"""Log files: rotation, limits, and following them."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from antiphon.supervisor import logs


def write(path: Path, text: str | bytes) -> None:
    with open(path, "ab") as file:
        file.write(text if isinstance(text, bytes) else text.encode())


def follow(path: Path, seen: list[str], *, start: int, **options: int) -> logs.LogFollower:
    """A follower of a file system without faults."""
    return logs.LogFollower(path, seen.append, start=start, on_trouble=pytest.fail, **options)


def append_and_close(path: Path, text: bytes, rotate_bytes: int) -> None:
    fd = logs.open_log(path, rotate_bytes=rotate_bytes)
    os.write(fd, text)
    os.close(fd)


def test_small_log_is_appended_to_and_large_ones_are_kept_in_number(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a.log"
    append_and_close(path, b"one\n", 100)
    append_and_close(path, b"two\n", 100)
    assert path.read_text() == "one\ntwo\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for index in range(6):
        append_and_close(path, f"{index}".encode(), 0)
    kept = sorted(entry.name for entry in path.parent.iterdir())
    assert kept == ["a.log", "a.log.1", "a.log.2", "a.log.3"]
    assert [(path.parent / name).read_text() for name in kept] == ["5", "4", "3", "2"]


def test_tail_begins_at_the_run_and_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    write(path, "old run\n")
    start = path.stat().st_size
    write(path, "".join(f"line {index}\n" for index in range(100)) + "no newline \xff")
    lines = logs.tail_lines(path, start=start)
    assert lines[0] == "line 0"
    assert lines[-1].startswith("no newline")
    bounded = logs.tail_lines(path, start=start, bytes_max=60)
    assert 0 < len(bounded) < 10
    assert all(line in lines for line in bounded)
    # A file that was cut since begins at zero again.
    path.write_text("after the cut\n")
    assert logs.tail_lines(path, start=10_000) == ["after the cut"]
    assert logs.tail_lines(tmp_path / "missing", start=0) == []


async def test_follower_gives_each_line_once(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    write(path, "before\n")
    seen: list[str] = []
    follower = follow(path, seen, start=path.stat().st_size)
    write(path, "one\ntw")
    await follower.poll()
    assert seen == ["one"]
    write(path, b"o\n\n 10%\r 50%\r100%\nthree\xff\n")
    await follower.poll()
    await follower.poll()
    assert seen == ["one", "two", "100%", "three�"]


async def test_follower_bounds_lines_and_backlog(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    seen: list[str] = []
    follower = follow(path, seen, start=0)
    write(path, "x" * 200_000)
    await follower.poll()
    assert sum(map(len, seen)) <= 200_000
    assert max(map(len, seen)) <= 16 * 1024
    seen.clear()
    write(path, "\n" + "y\n" * (logs.BACKLOG_BYTES_MAX // 2 + 1000) + "last\n")
    await follower.poll()
    assert follower.num_skipped_bytes > 0
    assert seen[-1] == "last"
    assert len(seen) < 100_000


async def test_file_that_grows_too_large_is_cut_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    fd = logs.open_log(path)
    seen: list[str] = []
    follower = follow(path, seen, start=0, bytes_max=100)
    try:
        for index in range(30):
            os.write(fd, f"line {index:02} of the child\n".encode())
            await follower.poll()
    finally:
        os.close(fd)
    assert seen == [f"line {index:02} of the child" for index in range(30)]
    assert follower.num_cuts == 6
    assert path.stat().st_size <= 100
    assert sorted(os.listdir(tmp_path)) == ["a.log", "a.log.1", "a.log.2", "a.log.3"]
    assert stat.S_IMODE((tmp_path / "a.log.1").stat().st_mode) == 0o600


async def test_removed_file_is_survived(tmp_path: Path) -> None:
    seen: list[str] = []
    await follow(tmp_path / "missing", seen, start=0).poll()
    assert seen == []


async def test_full_disk_ends_neither_following_nor_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.log"
    seen: list[str] = []
    troubles: list[str] = []

    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half a copy")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(logs.shutil, "copyfile", full)
    follower = logs.LogFollower(path, seen.append, start=0, on_trouble=troubles.append, bytes_max=100)
    fd = logs.open_log(path)
    try:
        for index in range(6):
            os.write(fd, f"line {index} {'x' * 120}\n".encode())
            await follower.poll()
    finally:
        os.close(fd)
    assert [line[:6] for line in seen] == [f"line {index}" for index in range(6)]
    assert troubles == [f"its log {path} cannot be put aside, and was emptied: No space left on device"]
    assert sorted(os.listdir(tmp_path)) == ["a.log"], "half a copy was left"
    assert (follower.num_cuts, path.stat().st_size) == (6, 0)


async def test_file_that_cannot_be_emptied_is_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.log"
    write(path, "x" * 200)
    troubles: list[str] = []
    copies: list[Path] = []

    def broken(path: Path) -> None:
        copies.append(path)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(logs, "cut_log", broken)
    follower = logs.LogFollower(path, [].append, start=0, on_trouble=troubles.append, bytes_max=100)
    for _ in range(3):
        await follower.poll()
    assert (len(copies), len(troubles)) == (1, 1)
    monkeypatch.setattr(logs, "CUT_RETRY_S", 0.0)
    monkeypatch.setattr(follower, "_next_cut_s", 0.0)
    await follower.poll()
    await follower.poll()
    assert (len(copies), len(troubles)) == (3, 1)


async def test_faults_of_reading_are_told_once_and_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.log"
    write(path, "one\n")
    seen: list[str] = []
    troubles: list[str] = []
    follower = logs.LogFollower(path, seen.append, start=0, on_trouble=troubles.append)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    for owner, name in ((logs.os, "stat"), (logs, "open")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, broken, raising=False)
            await follower.poll()
    assert (seen, troubles) == ([], [f"its log {path} cannot be followed: Input/output error"])
    await follower.poll()
    assert seen == ["one"]
