"""The files of a deployment on this host: its state file and its lock.

``STATE_DIR/NAME/state.json`` is replaced atomically and readable by the owner only. ``STATE_DIR/NAME/lock`` is held
with ``flock`` by the supervisor for as long as it lives: the kernel releases it, however the supervisor ends.
"""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path

from antiphon.core.errors import ConfigError, ProtocolError, StartError
from antiphon.protocol.state import DeploymentState, decode_state, encode_state

STATE_FILE = "state.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def deployment_dir(state_dir: str, name: str) -> Path:
    """The folder of the deployment ``name``. Raises ConfigError for a name that cannot be a folder's."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be a deployment's name",
            field="name",
            remedy="use 1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or a digit",
        )
    return Path(state_dir).expanduser() / name


def known_names(state_dir: str) -> list[str]:
    """The deployments that have a state file under ``state_dir``, sorted."""
    root = Path(state_dir).expanduser()
    if not root.is_dir():
        return []
    return sorted(
        entry.name for entry in root.iterdir() if _NAME.fullmatch(entry.name) and (entry / STATE_FILE).is_file()
    )


def read_state(folder: Path) -> DeploymentState | None:
    """The state file in ``folder``, or None when there is none. Raises ProtocolError when it cannot be understood."""
    try:
        raw = (folder / STATE_FILE).read_bytes()
    except FileNotFoundError:
        return None
    return decode_state(raw)


def write_state(folder: Path, state: DeploymentState) -> None:
    """Replace the state file atomically. Raises OSError."""
    temporary = folder / f".{STATE_FILE}.{os.getpid()}"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, encode_state(state))
    finally:
        os.close(fd)
    os.replace(temporary, folder / STATE_FILE)


def already_up(name: str, holder: str) -> StartError:
    """The error of a second supervisor; ``holder`` is the pid of the first."""
    return StartError(
        f"deployment {name!r} is already up on this host (supervisor pid {holder})",
        remedy=f"stop it with: antiphon down --name {name}; or give this one another name. "
        "Several roles of one deployment are started on a host by one command that names them all: "
        "antiphon up --only prefill --only router",
    )


class DeploymentLock:
    """Held by the one supervisor of a deployment on this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd = -1

    def acquire(self) -> None:
        """Take the lock, or raise StartError naming the supervisor that holds it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(
                f"the state folder {self._folder} cannot be written: {error.strerror}",
                field="supervisor.state_dir",
                remedy="choose a folder that this user can write",
            ) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(fd, 32, 0).decode("ascii", errors="replace").strip() or "unknown"
            os.close(fd)
            raise already_up(self._folder.name, holder) from error
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode("ascii"), 0)
        self._fd = fd

    def release(self) -> None:
        """Give the lock back; nothing happens when it is not held."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def load_previous(folder: Path) -> DeploymentState | None:
    """The state that an earlier supervisor left, or None when there is none or it cannot be understood."""
    try:
        return read_state(folder)
    except ProtocolError:
        return None
