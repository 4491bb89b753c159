"""Digests of whole files: read once, kept while the file is the same, shared by processes that need them together."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from antiphon.connector import weights_digests
from antiphon.connector.weights_digests import PIECE_BYTES, file_digests


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read, in order. What was just written is kept too."""
    monkeypatch.setattr(weights_digests, "SETTLED_S", -1.0)
    names: list[str] = []
    read = weights_digests._hashed

    def seen(paths: Sequence[Path]) -> dict[Path, str]:
        names.extend(path.name for path in paths)
        return read(paths)

    monkeypatch.setattr(weights_digests, "_hashed", seen)
    return names


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(path.name.encode() * 100_000)
    return paths


def test_a_file_is_read_once(files: list[Path], hashed: list[str]) -> None:
    first = file_digests(files)
    assert file_digests(files) == first
    assert hashed == ["a", "b"]
    assert first[0] != first[1]


@pytest.mark.parametrize("change", ["content", "touched", "replaced", "longer"])
def test_a_file_that_is_another_is_read_again(files: list[Path], hashed: list[str], change: str) -> None:
    before = file_digests(files)
    file = files[0]
    status = file.stat()
    if change == "content":
        with file.open("r+b") as opened:
            opened.write(b"z")
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # its change time tells
    elif change == "touched":
        os.utime(file, (1, 1))
    elif change == "replaced":
        other = file.with_name("other")
        other.write_bytes(b"c" * status.st_size)
        os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
        other.replace(file)
    else:
        file.write_bytes(file.read_bytes() + b"a")
    after = file_digests(files)
    assert hashed == ["a", "b", "a"]
    assert (after[0] == before[0]) == (change == "touched")
    assert after[1] == before[1]


def test_what_was_written_a_moment_ago_is_not_kept(
    files: list[Path], hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_digests, "SETTLED_S", 60.0)
    assert file_digests(files) == file_digests(files)
    assert hashed == ["a", "b", "a", "b"]


def test_a_change_while_it_is_read_is_an_error(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    read = weights_digests._digest_of

    def changed_meanwhile(descriptor: int, *others: object) -> str:
        digest = read(descriptor, *others)  # type: ignore[arg-type]
        os.utime(files[0], (1, 1))
        return digest

    monkeypatch.setattr(weights_digests, "_digest_of", changed_meanwhile)
    with pytest.raises(ValueError, match="changes while it is read"):
        file_digests(files[:1])


def test_the_digest_does_not_depend_on_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "large"
    file.write_bytes(os.urandom(1024) * (3 * PIECE_BYTES // 1024) + b"end")
    many = file_digests([file])
    monkeypatch.setattr(weights_digests, "THREADS_MAX", 1)
    assert file_digests([file]) == many


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 1}', "\xff{", None])
def test_a_folder_that_is_of_no_use_costs_only_time(
    files: list[Path], hashed: list[str], weights_folder: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    if text is None:
        weights_folder.write_text("a file where the folder would be")
    else:
        weights_folder.mkdir()
        (weights_folder / "weights.json").write_bytes(text.encode("latin-1"))
    assert file_digests(files) == file_digests(files)
    assert hashed == (["a", "b"] if text is not None else ["a", "b", "a", "b"])
    assert ("are not kept" in caplog.text) == (text is None)


def test_what_is_kept_is_bounded(
    files: list[Path], hashed: list[str], weights_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_digests, "ENTRIES_MAX", 1)
    file_digests(files)
    assert len(json.loads((weights_folder / "weights.json").read_text())) == 1
    file_digests([files[1]])
    assert hashed == ["a", "b"], "the newest stays"
    assert {path.name for path in weights_folder.iterdir()} == {"weights.json", "weights.lock"}


def test_who_comes_second_waits_and_reads_nothing(
    files: list[Path], hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, waiting, go_on = threading.Event(), threading.Event(), threading.Event()
    read = weights_digests._hashed

    def slow(paths: Sequence[Path]) -> dict[Path, str]:
        reading.set()
        assert go_on.wait(5)
        return read(paths)

    def tried(descriptor: int) -> bool:
        has_lock = try_lock(descriptor)
        if not has_lock:
            waiting.set()
        return has_lock

    try_lock = weights_digests._try_lock
    monkeypatch.setattr(weights_digests, "_try_lock", tried)
    weights_digests._hashed = slow  # the fixture puts the real one back
    results: list[list[str]] = []
    threads = [threading.Thread(target=lambda: results.append(file_digests(files))) for _ in range(2)]
    threads[0].start()
    assert reading.wait(5)
    threads[1].start()
    assert waiting.wait(5)
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert hashed == ["a", "b"]
    assert results[0] == results[1]


def test_nobody_waits_for_ever(
    files: list[Path], hashed: list[str], weights_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_digests, "WAIT_MAX_S", 0.2)
    weights_folder.mkdir()
    with (weights_folder / "weights.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        file_digests(files)
    assert hashed == ["a", "b"]


def test_reading_for_long_is_told(
    files: list[Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(weights_digests, "PROGRESS_S", 0.0)
    with caplog.at_level(logging.INFO, "antiphon.connector"):
        file_digests(files)
    assert "reading the weights once, to name them: 0.0 of 0.0 GB" in caplog.text
