"""The files of a disk tier: names, whole reads and writes past the page cache, and what a crash may have left.

    ROOT/antiphon-tier          marks the folder as ours; locked by the one server that uses it
    ROOT/<2 hex>/<64 hex>       a record, under its key
    ROOT/<2 hex>/<64 hex>.<n>.tmp   a record that is being written, or was when a server died

Always true:

- A file under a record's name was written and forced to the disk whole before it got the name.
- Nothing is removed but records and unfinished records, by their names, in a folder that is marked as ours.

It keeps no books (``disk_tier``) and does not look into payloads.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from antiphon.core.errors import ConfigError, TierCorrupt, TierError, TierFull, TierUnavailable
from antiphon.core.units import align_up
from antiphon.storage.record import HEAD_BYTES, unpack_head

__all__ = ["BLOCK_BYTES", "DiskFolder", "FoundRecord", "tier_error"]

BLOCK_BYTES: Final = 4096
MARKER_NAME: Final = "antiphon-tier"
_MARKER_TEXT: Final = b"The chunks of an Antiphon cache server. What is in here may be removed while none runs.\n"
_ALLOWED_BESIDE: Final = frozenset({"lost+found"})
"""A fresh file system has it."""
_SUBFOLDER: Final = re.compile(r"[0-9a-f]{2}")
_RECORD: Final = re.compile(r"[0-9a-f]{64}")
_UNFINISHED: Final = re.compile(r"[0-9a-f]{64}\.[0-9]+\.tmp")
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NOT_DIRECT: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record with a sound head.

    Args:
        key: 32 bytes.
        file_bytes: what it takes on the disk.
        written_ns: when, by the clock of the file system.
    """

    key: bytes
    file_bytes: int
    written_ns: int


def tier_error(error: OSError, path: Path) -> TierError:
    """What a failed call of the system means for the tier."""
    text = f"{path}: {error.strerror}"
    if error.errno in _FULL:
        return TierFull(text, remedy="give the tier a smaller capacity than its disk has room for")
    return TierUnavailable(text)


def _folder_error(error: OSError, root: Path) -> TierError:
    """The same where the folder itself cannot be had."""
    found = tier_error(error, root)
    found.remedy = found.remedy or "name a folder that this user can make and write"
    return found


def _refuse_foreign(root: Path) -> None:
    """Raises ConfigError where the folder holds what no tier has put there, OSError where it cannot be read."""
    if (root / MARKER_NAME).exists():
        return
    others = sorted(set(os.listdir(root)) - _ALLOWED_BESIDE)
    if others:
        raise ConfigError(
            f"the folder {root} holds {others[0]!r} and is not that of a tier",
            remedy="name an empty folder, or one that a tier has made",
        )


def _remove_empty(folder: Path) -> None:
    """Another process may have begun to use it."""
    with contextlib.suppress(OSError):
        folder.rmdir()


class DiskFolder:
    """The folder of one tier, held by this process alone. Made by ``open``.

    Args:
        root: of it.
        marker_fd: of the marker, which is locked.
    """

    def __init__(self, root: Path, marker_fd: int) -> None:
        self.root = root
        self._marker_fd = marker_fd
        self.is_direct = True
        """Whether the page cache is passed by; some file systems cannot."""

    @classmethod
    def open(cls, root: Path) -> DiskFolder:
        """The folder, made if it is not there, for this process alone.

        Raises:
            ConfigError: another server uses it, or it holds what is not ours.
            TierUnavailable: it cannot be made or written.
        """
        marker = root / MARKER_NAME
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _refuse_foreign(root)
            fd = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _folder_error(error, root) from error
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.pwrite(fd, _MARKER_TEXT, 0)
                for number in range(256):
                    (root / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)
            except BlockingIOError:
                raise ConfigError(
                    f"the folder {root} is used by another cache server", remedy="give each server a folder of its own"
                ) from None
            except OSError as error:
                raise _folder_error(error, root) from error
            undo.pop_all()
        return cls(root, fd)

    @staticmethod
    def try_out(root: Path) -> None:
        """Whether ``open`` could make and write the folder; what is made for that is removed again.

        Who else uses it is not asked.

        Raises:
            ConfigError: it holds what is not ours.
            TierUnavailable: it cannot be made or written.
        """
        missing = [folder for folder in (root, *root.parents) if not folder.exists()]
        with contextlib.ExitStack() as undo:
            try:
                for folder in reversed(missing):
                    folder.mkdir(mode=0o700)
                    undo.callback(_remove_empty, folder)
                _refuse_foreign(root)
                with tempfile.TemporaryFile(dir=root):
                    pass
            except OSError as error:
                raise _folder_error(error, root) from error

    def path(self, key: bytes) -> Path:
        """Where the record of ``key`` is, if there is one."""
        name = key.hex()
        return self.root / name[:2] / name

    # ---- what a crash left -------------------------------------------------------------------------------------------

    def scan(self) -> Iterator[FoundRecord]:
        """Every record with a sound head of the right size, in no order. Others of our names are removed.

        Raises:
            TierUnavailable: the folder cannot be read.
        """
        try:
            for folder in sorted(self.root.iterdir()):
                if not _SUBFOLDER.fullmatch(folder.name) or not folder.is_dir():
                    continue
                with os.scandir(folder) as entries:
                    for entry in entries:
                        found = self._look(entry, folder.name)
                        if found is not None:
                            yield found
        except OSError as error:
            raise tier_error(error, self.root) from error

    @staticmethod
    def _look(entry: os.DirEntry[str], prefix: str) -> FoundRecord | None:
        """The record of a file; None after it was removed, or where it is none of ours."""
        is_record = _RECORD.fullmatch(entry.name) is not None
        if not (is_record or _UNFINISHED.fullmatch(entry.name)) or not entry.name.startswith(prefix):
            return None
        if not entry.is_file(follow_symlinks=False):
            return None
        if is_record:
            state = entry.stat(follow_symlinks=False)
            with open(entry.path, "rb", buffering=0) as file, contextlib.suppress(TierCorrupt):
                head = unpack_head(file.read(HEAD_BYTES))
                if head.key.hex() == entry.name and head.total_bytes == state.st_size:
                    return FoundRecord(head.key, align_up(state.st_size, BLOCK_BYTES), state.st_mtime_ns)
        os.unlink(entry.path)
        return None

    # ---- files -------------------------------------------------------------------------------------------------------

    def open_file(self, path: Path, flags: int) -> int:
        """``os.open`` past the page cache where the file system allows it.

        Raises:
            OSError: of the system.
        """
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        if self.is_direct:
            try:
                return os.open(path, flags | os.O_DIRECT, 0o600)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self.is_direct = False
                with contextlib.suppress(FileNotFoundError):
                    if flags & os.O_CREAT:  # some kernels make the file before they refuse
                        os.unlink(path)
        return os.open(path, flags, 0o600)

    def write(self, fd: int, piece: memoryview, offset_bytes: int) -> None:
        """Writes all of ``piece``, whole blocks from a page-aligned buffer.

        Raises:
            OSError: of the system.
        """
        done = 0
        while done < len(piece):
            try:
                done += os.pwrite(fd, piece[done:], offset_bytes + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._drop_direct(fd):
                    raise
            done -= done % BLOCK_BYTES if done < len(piece) else 0

    def read(self, fd: int, into: memoryview, offset_bytes: int) -> int:
        """Reads until ``into`` is full or the file ends. Returns the bytes read.

        Raises:
            OSError: of the system.
        """
        done = 0
        while done < len(into):
            try:
                num_bytes = os.preadv(fd, [into[done:]], offset_bytes + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._drop_direct(fd):
                    raise
                continue
            done += num_bytes
            if num_bytes == 0 or done % BLOCK_BYTES:  # a part of a block is the end of the file
                break
        return done

    def _drop_direct(self, fd: int) -> bool:
        """Goes on through the page cache where that may help; False where it was so already."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if not flags & os.O_DIRECT:
            return False
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        self.is_direct = False
        return True

    def sync_folder(self, path: Path) -> None:
        """Forces the names of ``path`` to the disk.

        Raises:
            OSError: of the system.
        """
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def probe(self) -> None:
        """That the folder can be read and written.

        Raises:
            OSError: it cannot.
        """
        os.statvfs(self.root)
        os.utime(self._marker_fd)
        if not os.pread(self._marker_fd, 1, 0):
            raise OSError(errno.EIO, "the marker of the folder is empty")
        os.stat(self.root / MARKER_NAME)

    def close(self) -> None:
        """Lets the folder go."""
        os.close(self._marker_fd)
