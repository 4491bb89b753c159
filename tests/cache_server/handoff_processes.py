"""Cache servers and a coordinator as processes on free ports of loopback, each ended with its test."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class ServerProcess:
    """``antiphon cache-server`` or ``antiphon coordinator``. Its ports are read from its line ``ready:``."""

    def __init__(self, verb: str, flags: dict[str, object], die_with_parent: Callable[[], None]) -> None:
        given = (f"--{name}" if value is True else f"--{name}={value}" for name, value in flags.items())
        program = [sys.executable, "-m", "antiphon", verb, *given]
        self.child = subprocess.Popen(program, preexec_fn=die_with_parent, stderr=subprocess.PIPE, text=True)
        assert self.child.stderr is not None
        line = next(line for line in self.child.stderr if "ready:" in line)
        self.ports = {name: int(port) for name, port in re.findall(r"(\w*port)=(\d+)", line)}
        self.socket_path = "".join(re.findall(r" socket=(\S+)", line))

    @property
    def port(self) -> int:
        return self.ports["port"]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.ports['http_port']}"

    def get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports["http_port"], timeout=5)
        with contextlib.closing(connection):
            connection.request("GET", path)
            return json.load(connection.getresponse())

    @property
    def num_chunks(self) -> int:
        return int(self.get("/status")["storage_manager"]["l1_manager"]["total_object_count"])

    @property
    def num_leases(self) -> int:
        return len(self.get("/leases")["leases"])

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
        self.child.wait(10)
        if self.child.stderr is not None:
            self.child.stderr.close()


class Servers:
    """Starts them, and ends all.

    Args:
        folder: for sockets and secrets.
        die_with_parent: runs in each child before the program.
    """

    def __init__(self, folder: Path, die_with_parent: Callable[[], None]) -> None:
        self._folder = folder
        self._die_with_parent = die_with_parent
        self._made: list[ServerProcess] = []

    def start(self, verb: str, **flags: object) -> ServerProcess:
        """One of ours; underscores in flags are dashes."""
        given = {"port": 0, "http-port": 0, "runtime-dir": self._folder} | {
            name.replace("_", "-"): value for name, value in flags.items()
        }
        self._made.append(ServerProcess(verb, given, self._die_with_parent))
        return self._made[-1]

    def one(self, name: str, **flags: object) -> ServerProcess:
        """A cache server of 10 MB."""
        return self.start("cache-server", l1_size_gb=0.01, instance_id=name, **flags)

    def peers(self, **flags: object) -> tuple[ServerProcess, ServerProcess]:
        """Two that share, and their coordinator."""
        url = f"127.0.0.1:{self.start('coordinator').port}"
        peers = {"coordinator_url": url, "p2p_advertise_url": "127.0.0.1:0", "p2p_transport": "tcp"}
        return self.one("p", **peers, **flags), self.one("d", **peers, **flags)


@contextlib.contextmanager
def servers(folder: Path, die_with_parent: Callable[[], None]) -> Iterator[Servers]:
    """Starts none yet; ends all."""
    made = Servers(folder, die_with_parent)
    try:
        yield made
    finally:
        for process in made._made:
            process.end()
