"""The sockets that a cache server listens on, and the lock that makes its name its own.

Owns two files of the runtime folder: ``cache-INSTANCE-INCARNATION.sock``, for this user only, and
``cache-INSTANCE.lock``, locked for the life of the process. The kernel drops the lock at any kind of death, so that a
socket file of that instance found under the lock belongs to nobody.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import stat
from pathlib import Path
from typing import Final

from antiphon.core.errors import ConfigError, StartError
from antiphon.transport.listening import BACKLOG

SOCKET_PATH_BYTES_MAX: Final = 107


class RuntimeFolder:
    """One instance's place in a runtime folder. Made by ``open``; ``close`` gives it back.

    Args:
        folder: it exists and is safe.
        instance: name of the server.
        lock_fd: holds the lock.
    """

    def __init__(self, folder: Path, instance: str, lock_fd: int) -> None:
        self._folder = folder
        self._instance = instance
        self._lock_fd = lock_fd
        self._listening: Path | None = None

    @classmethod
    def open(cls, folder: Path, instance: str) -> RuntimeFolder:
        """Takes the instance's name in ``folder``, which is made if it is absent, and removes its dead sockets.

        Raises:
            ConfigError: the folder cannot be used, or others could change what is in it.
            StartError: a living server has the name.
        """
        folder_fd = _open_folder(folder)
        lock_path = folder / f"cache-{instance}.lock"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            lock_fd = os.open(lock_path.name, flags, 0o600, dir_fd=folder_fd)
        except OSError as error:
            raise ConfigError(
                f"{lock_path} cannot be made: {error.strerror}",
                field="runtime_dir",
                remedy="choose a --runtime-dir that this user can write to",
            ) from error
        finally:
            os.close(folder_fd)
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock_fd)
            raise StartError(
                f"a cache server named {instance} runs already (its lock is {lock_path})",
                remedy="choose another --instance-id, or stop that server",
            ) from error
        taken = cls(folder, instance, lock_fd)
        taken._remove_dead()
        return taken

    def _remove_dead(self) -> None:
        name = re.compile(rf"cache-{re.escape(self._instance)}-[0-9a-f]{{12}}\.sock")
        for path in self._folder.iterdir():
            if name.fullmatch(path.name):
                path.unlink(missing_ok=True)

    def listen(self, incarnation: str) -> tuple[socket.socket, str]:
        """The unix socket of this life of the server, listening, and its path.

        Raises:
            ConfigError: the path is longer than a unix socket's may be.
            StartError: it cannot be bound.
        """
        path = self._folder / f"cache-{self._instance}-{incarnation}.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigError(
                f"the path of the unix socket is longer than {SOCKET_PATH_BYTES_MAX} bytes: {path}",
                field="runtime_dir",
                remedy="choose a shorter --runtime-dir or --instance-id",
            )
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(str(path))
            self._listening = path
            os.chmod(path, 0o600)  # before it listens: until then nobody can connect
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise StartError(
                f"cannot listen on {path}: {error.strerror}", remedy="choose another --runtime-dir"
            ) from error
        return sock, str(path)

    def close(self) -> None:
        """Removes the socket's file and gives the name back."""
        if self._listening is not None:
            self._listening.unlink(missing_ok=True)
        os.close(self._lock_fd)


def _open_folder(folder: Path) -> int:
    """A descriptor of the folder, which is made if it is absent.

    What is checked is what is open: a folder that only this user or root can change, and no link to one, since whoever
    made the link could turn it elsewhere.
    """
    remedy = "choose a --runtime-dir that this user can make"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if folder.is_symlink():
            raise ConfigError(
                f"{folder} is a symbolic link, which may lead elsewhere at any time",
                field="runtime_dir",
                remedy=f"write --runtime-dir {folder.resolve()}, or remove the link",
            ) from error
        raise ConfigError(f"{folder} cannot be made: {error.strerror}", field="runtime_dir", remedy=remedy) from error
    found = os.fstat(descriptor)
    if found.st_uid not in (os.geteuid(), 0) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        os.close(descriptor)
        raise ConfigError(
            f"others can change what is in {folder} (owner {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o})",
            field="runtime_dir",
            remedy=f"chmod 700 {folder}, or choose another --runtime-dir",
        )
    return descriptor
