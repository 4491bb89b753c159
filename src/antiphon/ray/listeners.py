"""What listens where: the TCP listeners of the processes of an application, and of Ray, on this node.

``python -m antiphon.ray.listeners [APPLICATION]`` prints them, and ends with 1 if one of the application is reached
from other machines. Read from ``/proc``; other users' processes are not seen. Nothing is changed; Ray is not imported.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from antiphon.ray.plans import spec_name
from antiphon.supervisor.listening import listening_sockets, socket_inodes
from antiphon.supervisor.procfs import MARKER_VARIABLE

_REPLICA = re.compile(r"^ray::ServeReplica:(?P<app>[^:]*):(?P<deployment>[^:.]*)")
_OF_RAY = re.compile(r"^ray::|/ray/core/src/ray/|ray/dashboard|ray/_private|^python\S* -u \S*/ray/")
_CACHE_ACTOR = "ray::CacheActor"


@dataclass(frozen=True, order=True)
class Listener:
    """One socket that listens."""

    owner: str
    """``replica`` and ``process`` are the application's, ``ray`` is Ray's own."""
    name: str
    pid: int
    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether it is reached from this machine only."""
        return ipaddress.ip_address(self.address).is_loopback


def app_listeners(app: str) -> list[Listener]:
    """Those of the application's replicas, of what they have started, and of Ray's own processes."""
    sockets = dict(listening_sockets())
    found: list[Listener] = []
    for pid in _pids():
        owner = _owner(pid, app)
        if owner is None:
            continue
        found += [Listener(*owner, pid, *sockets[inode]) for inode in socket_inodes(pid) if inode in sockets]
    return sorted(set(found))


def _owner(pid: int, app: str) -> tuple[str, str] | None:
    """Whose the process is, and its name."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        match = _REPLICA.match(words)
        if match is not None:
            return ("replica", match["deployment"]) if match["app"] == app else None
        if words.startswith(_CACHE_ACTOR):
            return "replica", "cache"
        marker = f"{MARKER_VARIABLE}={spec_name(app)}/".encode()
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(marker):
                return "process", variable[len(marker) :].decode(errors="replace").partition("/")[0]
        if _OF_RAY.search(words):
            return "ray", words[:60]
    return None


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def main(args: list[str]) -> int:
    """Print the table; 1 if a listener of the application is reached from other machines."""
    found = app_listeners(args[0] if args else "default")
    lines = [f"{'':1} {'owner':8} {'name':28} {'pid':>8}  address"]
    for each in found:
        mark = " " if each.is_loopback else "!"
        lines.append(f"{mark} {each.owner:8} {each.name[:28]:28} {each.pid:>8}  {each.address} port {each.port}")
    public = [each for each in found if not each.is_loopback]
    own = [each for each in public if each.owner != "ray"]
    lines.append(
        f"{len(found)} listeners, {len(public)} reached from other machines (!), {len(own)} of the application"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if own else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
