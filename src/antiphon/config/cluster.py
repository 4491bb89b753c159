"""What cache servers and their coordinator share: how their addresses are written, and the secret of the cluster.

Always true: an address that other hosts reach is used only with a secret that the operator gave; on loopback a secret
is made where none was given, readable by this user only, so that no other user of the machine is a member.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator

from antiphon.config.hosts import is_loopback
from antiphon.config.key_files import read_key
from antiphon.core.errors import ConfigError

SECRET_CHARS_MIN: Final = 32
SECRET_FILE: Final = "cluster.secret"


def host_port_of(url: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``[V6]:PORT``, or the same after ``http://`` or ``tcp://``.

    Raises:
        ValueError: it has another form.
    """
    scheme, _, rest = url.rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    is_number = port.isascii() and port.isdigit() and int(port) < 65_536
    if scheme not in ("", "http", "tcp") or not host or not is_number or set(host) & set("/@ "):
        raise ValueError(f"{url!r} is no address: write HOST:PORT, or http://HOST:PORT")
    return host, int(port)


def host_port_text(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _address(url: str) -> str:
    if host_port_of(url)[1] == 0:
        raise ValueError(f"{url!r} names no port: write HOST:PORT")
    return url


def _listen_address(url: str) -> str:
    host_port_of(url)
    return url


Address = Annotated[str, AfterValidator(_address)]
ListenAddress = Annotated[str, AfterValidator(_listen_address)]


def cluster_secret(path: str | None, runtime_dir: str, hosts: list[str]) -> bytes:
    """The secret of the cluster.

    Args:
        path: of its file; None takes, or makes, the one in ``runtime_dir``.
        hosts: every address that is listened on, told to others or connected to.

    Raises:
        ConfigError: there is none and a host is not loopback; its file cannot be read, is short, or others can read it.
    """
    if path is not None:
        secret = read_key(path, "cluster_secret_file")
        if len(secret) < SECRET_CHARS_MIN:
            raise ConfigError(
                f"the secret in {path} has {len(secret)} characters; {SECRET_CHARS_MIN} are the least",
                field="cluster_secret_file",
                remedy="write one with: openssl rand -hex 32",
            )
        return secret
    remote = [host for host in hosts if not is_loopback(host)]
    if remote:
        raise ConfigError(
            f"{remote[0]} is not a loopback address, and there is no secret: who reached it could read and change KV",
            field="cluster_secret_file",
            remedy="write a secret with: openssl rand -hex 32 > FILE, copy it to every host of the cluster, and give "
            "--cluster-secret-file FILE",
        )
    return _own_secret(Path(runtime_dir))


def _own_secret(folder: Path) -> bytes:
    path = folder / SECRET_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _make_secret(path)
        found = path.stat(follow_symlinks=False)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be made or read: {error.strerror}",
            field="cluster_secret_file",
            remedy="give --cluster-secret-file, or choose another --runtime-dir",
        ) from error
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{path} is not this user's alone", field="cluster_secret_file", remedy=f"remove {path}: it is made anew"
        )
    return read_key(str(path), "cluster_secret_file")


def _make_secret(path: Path) -> None:
    """Makes the file at once with its content, so that nobody reads half of it; leaves one that is there."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.write(descriptor, secrets.token_hex(32).encode() + b"\n")
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # another process was faster
    finally:
        draft.unlink()
