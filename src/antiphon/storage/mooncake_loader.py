"""What a process needs before Mooncake's client can start in it: where its libraries are, and an address with a port.

Mooncake needs ``libibverbs.so.1`` also where it only uses TCP. Where the system has none, the one that NIXL's package
brings serves: it has another file name, so that the loader is shown a link to it. The loader reads its path when a
process starts, which is why this makes an environment for a child.
"""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import os
import socket
import tempfile
from pathlib import Path
from typing import Final

from antiphon.config.hosts import WILDCARDS
from antiphon.core.errors import ConfigError, TierUnavailable

__all__ = ["free_port", "loader_environment"]

_LIBRARY: Final = "libibverbs.so.1"
_BESIDE: Final = ("nixl_cu12", "nixl_cu13")
_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.EINVAL, errno.EAFNOSUPPORT})
"""Why an address cannot be bound that is another machine's, or of a kind that this one has not."""
_PASSING: Final = frozenset({socket.EAI_AGAIN, socket.EAI_MEMORY, socket.EAI_SYSTEM})
"""Why a name cannot be looked up now, which says nothing of the name."""


def loader_environment(environment: dict[str, str]) -> dict[str, str]:
    """``environment``, with a loader path under which Mooncake loads, where one is needed and can be made."""
    if _has_library():
        return environment
    library = _library_of_nixl()
    if library is None:
        return environment
    folder = _link_folder(library)
    path = ":".join(filter(None, (environment.get("LD_LIBRARY_PATH"), str(folder), str(library.parent))))
    return {**environment, "LD_LIBRARY_PATH": path}


def free_port(host: str) -> int:
    """A port of this machine's address ``host`` that nothing listens on. Mooncake cannot be given 0.

    Raises:
        ConfigError: ``host`` is no address of this machine.
        TierUnavailable: that, or a port, cannot be found out now.
    """
    if host in WILDCARDS:
        raise _not_ours(host, "is every address of this machine, and other nodes reach it at none")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
            port: int = probe.getsockname()[1]
            return port
    except OSError as error:
        why = error.strerror or str(error)
        is_name_wrong = isinstance(error, socket.gaierror) and error.errno not in _PASSING
        if not is_name_wrong and (isinstance(error, socket.gaierror) or error.errno not in _NOT_HERE):
            remedy = "try again, or write an address in local_host rather than a name"
            raise TierUnavailable(f"local_host {host!r} cannot be used now: {why}", remedy=remedy) from None
        raise _not_ours(host, f"is no address of this machine: {why}") from None
    except (TypeError, ValueError) as error:
        raise _not_ours(host, f"is none: {error}") from None


def _not_ours(host: str, what: str) -> ConfigError:
    return ConfigError(
        f"local_host {host!r} {what}",
        field="local_host",
        remedy="write in local_host the address of this machine that other nodes of the store reach",
    )


def _has_library() -> bool:
    try:
        ctypes.CDLL(_LIBRARY)
    except OSError:
        return False
    return True


def _library_of_nixl() -> Path | None:
    for name in _BESIDE:
        spec = importlib.util.find_spec(name)
        for location in (spec.submodule_search_locations or ()) if spec is not None else ():
            found = sorted(Path(f"{location}.libs").glob("libibverbs-*.so*"))
            if found:
                return found[0]
    return None


def _link_folder(library: Path) -> Path:
    """A folder of this user with a link to ``library`` under the name that is looked for."""
    folder = Path(tempfile.gettempdir()) / f"antiphon-libraries-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    state = folder.lstat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022 or not folder.is_dir() or folder.is_symlink():
        folder = Path(tempfile.mkdtemp(prefix="antiphon-libraries-"))
    link = folder / _LIBRARY
    if not link.is_symlink() or link.readlink() != library:
        made = Path(tempfile.mktemp(dir=folder))
        made.symlink_to(library)
        made.replace(link)
    return folder
