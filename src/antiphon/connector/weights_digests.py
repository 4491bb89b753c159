"""Digests of whole files, kept between starts, so that hundreds of GB are read once and not at every start.

Always true:

- A digest is of every byte of the file as it was between two looks at its status; a file that changes meanwhile is an
  error.
- A digest that is kept is used only while device, inode, size and both times of the file are those that it was made
  under. A file that was changed within ``SETTLED_S`` is not kept: the next change might fall on the same times.
- Of processes that need the same file, one reads it and the others wait for what it writes down, up to ``WAIT_MAX_S``.
- Nothing fails because the folder cannot be written: then every start reads all.

The file is read in pieces by several threads; hashing and reading leave the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

log = logging.getLogger("antiphon.connector")

PIECE_BYTES: Final = 16 << 20
"""Part of the digest: a file's digest is that of its pieces' digests."""
READ_BYTES: Final = 1 << 20
THREADS_MAX: Final = 16
ENTRIES_MAX: Final = 4096
"""Files remembered, some 150 bytes each; past it those are forgotten that were hashed first."""
KEPT_BYTES_MAX: Final = 4 << 20
SETTLED_S: Final = 2.0
"""File systems tell times apart by a few milliseconds, some network ones by a second."""
WAIT_MAX_S: Final = 1800.0
WAIT_STEP_S: Final = 0.05
PROGRESS_S: Final = 10.0


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/antiphon``, or ``~/.cache/antiphon``."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path("~/.cache").expanduser()) / "antiphon"


def file_digests(paths: Sequence[Path]) -> list[str]:
    """The digest of each file's bytes, 64 hex digits.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file changed while it was read.
    """
    with contextlib.ExitStack() as stack:
        found = _known(paths)
        if any(digest is None for digest in found):
            # Another process of the engine is reading the same files at this moment, as a rule.
            with contextlib.suppress(OSError):
                stack.enter_context(_lock(paths))
            found = _known(paths)
        missing = [path for path, digest in zip(paths, found, strict=True) if digest is None]
        fresh = _hashed(missing) if missing else {}
    return [digest or fresh[path] for path, digest in zip(paths, found, strict=True)]


def _status_key(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}:{status.st_size}:{status.st_mtime_ns}:{status.st_ctime_ns}"


def _known(paths: Sequence[Path]) -> list[str | None]:
    kept = _load()
    return [kept.get(_status_key(path.stat())) for path in paths]


def _load() -> dict[str, str]:
    """What is written down; nothing where it cannot be read or makes no sense."""
    try:
        with (cache_folder() / "weights.json").open("rb") as file:
            kept = json.loads(file.read(KEPT_BYTES_MAX))
    except (OSError, ValueError):
        return {}
    if not isinstance(kept, dict):
        return {}
    return {key: digest for key, digest in kept.items() if isinstance(digest, str) and len(digest) == 64}


def _keep(digests: dict[str, str]) -> None:
    """Writes digests down: whole or not at all, whoever else does so."""
    folder = cache_folder()
    kept = {**_load(), **digests}
    text = json.dumps(dict(list(kept.items())[-ENTRIES_MAX:]), indent=0)
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix="weights-")
        try:
            with open(descriptor, "w") as file:
                file.write(text)
            os.replace(name, folder / "weights.json")
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        log.warning("digests of weights are not kept, so that the next start reads them again: %s", error)


@contextlib.contextmanager
def _lock(paths: Sequence[Path]) -> Iterator[None]:
    """One process at a time; ends the wait early where all ``paths`` are known. The kernel drops it at any death."""
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder / "weights.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline_s = time.monotonic() + WAIT_MAX_S
        while not _try_lock(descriptor) and time.monotonic() < deadline_s and None in _known(paths):
            time.sleep(WAIT_STEP_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Progress:
    """Says every ``PROGRESS_S`` how far the reading is. Safe for any thread."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._told_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if time.monotonic() - self._told_s < PROGRESS_S:
                return
            self._told_s = time.monotonic()
        log.info(
            "reading the weights once, to name them: %.1f of %.1f GB", self._done_bytes / 1e9, self._total_bytes / 1e9
        )


def _hashed(paths: Sequence[Path]) -> dict[Path, str]:
    """Reads the files, and writes down each digest when its file is done."""
    digests = {}
    progress = _Progress(sum(path.stat().st_size for path in paths))
    pool = ThreadPoolExecutor(min(THREADS_MAX, len(os.sched_getaffinity(0))), "antiphon-weights")
    try:
        for path in dict.fromkeys(paths):
            with path.open("rb") as file:
                before = os.fstat(file.fileno())
                digests[path] = _digest_of(file.fileno(), before.st_size, pool, progress)
                key = _status_key(before)
                if key != _status_key(os.fstat(file.fileno())):
                    raise ValueError(f"{path.name} changes while it is read")
            if time.time() - max(before.st_mtime, before.st_ctime) > SETTLED_S:
                _keep({key: digests[path]})
    finally:
        pool.shutdown(cancel_futures=True)
    return digests


def _digest_of(descriptor: int, size: int, pool: ThreadPoolExecutor, progress: _Progress) -> str:
    def piece(start: int) -> bytes:
        sha = hashlib.sha256()
        room = memoryview(bytearray(min(READ_BYTES, size - start)))
        at, end = start, min(start + PIECE_BYTES, size)
        while at < end:
            num_read = os.preadv(descriptor, [room[: end - at]], at)
            if num_read == 0:
                raise ValueError(f"a weight file is cut off at byte {at}")
            sha.update(room[:num_read])
            at += num_read
        progress.add(end - start)
        return sha.digest()

    return hashlib.sha256(b"".join(pool.map(piece, range(0, size, PIECE_BYTES)))).hexdigest()
