"""Two networks on one machine and a link between them, without root: for processes that must reach each other over a
network that can be cut.

Each has a loopback of its own and one address on the link. What runs in one is started with ``Namespace.popen``, or
with ``Namespace.preexec``; unix sockets are reached from everywhere, TCP ports of a network from the test through
``Namespace.outside``. All processes end with the test's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.process import namespaces

DEVICE = "lan"
"""The link's name in both networks."""
_FLAGS = namespaces.CLONE_NEWNET | namespaces.CLONE_NEWNS
_WAIT = "import sys; sys.stdin.read()"
_RELAY = Path(__file__).with_name("relay.py")
_RUN_TIMEOUT_S = 20.0


class Namespace:
    """One network.

    Args:
        address: of its end of the link.
        holder: a process in it, which keeps it.
        user: an open descriptor of the user namespace that it belongs to.
        adopted: process ids that the leak check leaves alone.
    """

    def __init__(self, address: str, holder: subprocess.Popen[bytes], user: int, adopted: set[int]) -> None:
        self.address = address
        self._holder = holder
        self._user = user
        self._adopted = adopted
        self._relays: list[subprocess.Popen[bytes]] = []
        adopted.add(holder.pid)

    @property
    def pid(self) -> int:
        """Of the process that keeps it."""
        return self._holder.pid

    def preexec(self) -> None:
        """For a child between fork and exec: it runs in this network, and ends with this process."""
        namespaces.enter(self.pid, self._user, ("net", "mnt"))
        namespaces.die_with_parent()

    def popen(self, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Starts a program in this network; ``options`` as of ``subprocess.Popen``. It is the caller's to end."""
        return subprocess.Popen(argv, preexec_fn=self.preexec, **options)

    def ip(self, *words: str) -> str:
        """Runs ``ip`` of iproute2 in this network; returns what it says."""
        program = _ip()
        assert program is not None
        done = subprocess.run(
            [program, *words],
            preexec_fn=self.preexec,
            capture_output=True,
            text=True,
            timeout=_RUN_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    def outside(self, port: int, host: str = "127.0.0.1") -> int:
        """A port of the test's own loopback that leads to a port of this network."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            argv = [sys.executable, "-I", str(_RELAY), str(listener.fileno()), host, str(port)]
            relay = self.popen(argv, pass_fds=[listener.fileno()])
            self._relays.append(relay)
            self._adopted.add(relay.pid)
            return int(listener.getsockname()[1])

    def close(self) -> None:
        """Ends the relays and the holder. The network is gone once nothing else runs in it."""
        for child in (*self._relays, self._holder):
            child.kill()
            child.wait()
            self._adopted.discard(child.pid)
        if self._holder.stdin is not None:
            self._holder.stdin.close()


class TwoNetworks:
    """Two networks, joined.

    Args:
        p, d: the networks, by who usually is in them.
    """

    def __init__(self, p: Namespace, d: Namespace) -> None:
        self.p = p
        self.d = d
        p.ip("link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", str(d.pid))
        for network in (p, d):
            network.ip("address", "add", f"{network.address}/24", "dev", DEVICE)
            for device in ("lo", DEVICE):
                network.ip("link", "set", device, "up")

    def cut(self) -> None:
        """No packet passes. To one side its own end is down, to the other the cable is out."""
        self.p.ip("link", "set", DEVICE, "down")

    def join(self) -> None:
        """Packets pass again."""
        self.p.ip("link", "set", DEVICE, "up")


def _ip() -> str | None:
    """The program, which some systems keep from the search path of users."""
    return shutil.which("ip", path=os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin")))


@contextlib.contextmanager
def two_networks(adopted: set[int]) -> Iterator[TwoNetworks]:
    """The networks, for as long as the context; skips the test where there can be none."""
    if _ip() is None:
        pytest.skip("needs ip, of the Debian package iproute2")
    namespaces.need(_FLAGS, namespaces.mount_sysfs)
    with contextlib.ExitStack() as undo:
        first = _holder(lambda: namespaces.unshare_user(_FLAGS))
        user = os.open(f"/proc/{first.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, user)
        p = Namespace("10.77.0.1", first, user, adopted)
        undo.callback(p.close)

        def begin_second() -> None:
            namespaces.enter(first.pid, user, ())
            namespaces.unshare(_FLAGS)

        d = Namespace("10.77.0.2", _holder(begin_second), user, adopted)
        undo.callback(d.close)
        yield TwoNetworks(p, d)


def _holder(begin: Callable[[], None]) -> subprocess.Popen[bytes]:
    """A process that does nothing, in what ``begin`` makes."""

    def prepare() -> None:
        begin()
        namespaces.mount_sysfs()
        namespaces.die_with_parent()

    return subprocess.Popen([sys.executable, "-I", "-S", "-c", _WAIT], stdin=subprocess.PIPE, preexec_fn=prepare)
