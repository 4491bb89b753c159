"""What listens where: the TCP listeners of the processes of an application, and of Ray, on this node.

``python -m antiphon.ray.listeners [APPLICATION]`` prints them, and ends with 1 if one of the application is reached
from other machines, with 2 if it has none on this node. Read from ``/proc``; other users' processes are not seen.
Nothing is changed; Ray is not imported.
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
from antiphon.supervisor.procfs import marker_of, read_stat

_REPLICA = re.compile(r"^ray::ServeReplica:(?P<app>[^:]*):(?P<deployment>[^:.]*)")
_OF_RAY = re.compile(r"^ray::|/ray/core/src/ray/|ray/dashboard|ray/_private|^python\S* -u \S*/ray/")
_CACHE_ACTOR = "ray::CacheActor"
USAGE = "usage: python -m antiphon.ray.listeners [APPLICATION]      (default: default)"


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
    holders = _holders(app)
    for pid in _pids():
        owner = _owner(pid, app, holders)
        if owner is None:
            continue
        found += [Listener(*owner, pid, *sockets[inode]) for inode in socket_inodes(pid) if inode in sockets]
    return sorted(set(found))


def _holders(app: str) -> frozenset[int]:
    """The processes that have started one of the application's."""
    prefix = f"{spec_name(app)}/"
    stats = [read_stat(pid) for pid in _pids() if (marker_of(pid) or "").startswith(prefix)]
    return frozenset(stat.ppid for stat in stats if stat is not None)


def _owner(pid: int, app: str, holders: frozenset[int]) -> tuple[str, str] | None:
    """Whose the process is, and its name."""
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        match = _REPLICA.match(words)
        if match is not None:
            return ("replica", match["deployment"]) if match["app"] == app else None
        if words.startswith(_CACHE_ACTOR):
            return ("replica", "cache") if pid in holders else None
        deployment, _, process = (marker_of(pid) or "").partition("/")
        if process and deployment == spec_name(app):
            return "process", process.partition("/")[0]
        if _OF_RAY.search(words):
            return "ray", _short(words)
    return None


def _short(words: str) -> str:
    """What a command line of Ray's runs: the module, script or program, without its folder."""
    if words.startswith("ray::"):
        return words
    pieces = words.split()
    program = Path(pieces[0]).name
    if not program.startswith("python"):
        return program
    named = [each for each in pieces[1:] if not each.startswith("-")]
    return Path(named[0]).name if named else program


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def main(args: list[str]) -> int:
    """Print the table; 1 if a listener of the application is reached from other machines, 2 if it has none here."""
    if len(args) > 1 or any(each.startswith("-") for each in args):
        sys.stdout.write(f"{USAGE}\n")
        return 0 if args in (["-h"], ["--help"]) else 2
    app = args[0] if args else "default"
    found = app_listeners(app)
    lines = [f"{'':1} {'owner':8} {'name':28} {'pid':>8}  address"]
    for each in found:
        mark = " " if each.is_loopback else "!"
        lines.append(f"{mark} {each.owner:8} {each.name[:28]:28} {each.pid:>8}  {each.address} port {each.port}")
    own = [each for each in found if each.owner != "ray"]
    num_public = sum(not each.is_loopback for each in found)
    num_own_public = sum(not each.is_loopback for each in own)
    lines.append(
        f"{len(found)} listeners, {num_public} reached from other machines (!), {num_own_public} of the application"
    )
    if not own:
        lines.append(f"nothing of the application {app!r} listens on this node: `serve status` has the names")
    sys.stdout.write("\n".join(lines) + "\n")
    return 1 if num_own_public else 0 if own else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
