"""A cache server as a process, and a small blocking client that speaks the protocol and nothing else of ours."""

from __future__ import annotations

import hashlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from antiphon.protocol import cache as wire
from antiphon.storage.arena import ArenaMapping
from tests.transport.blocking_frames import recv_frame, recv_frame_with_fd

START_TIMEOUT_S = 20.0
SLAB_BYTES = 65_536
READY = re.compile(
    r"ready: instance=(?P<instance>\S+) incarnation=(?P<incarnation>\S+) port=(?P<port>\d+) "
    r"http_port=(?P<http_port>\d+) socket=(?P<socket>\S+)"
)

A = TypeVar("A", bound=wire.AnswerBody)


def wait_for(holds: Callable[[], Any], what: str, timeout_s: float = 5.0) -> Any:
    """Asks until the answer is true; returns it."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        if answer := holds():
            return answer
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.02)


def namespace_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def keys_of(name: str, num_keys: int) -> list[bytes]:
    """A chain of keys, as a prompt of that name would have."""
    keys = []
    last = namespace_of(name)
    for _ in range(num_keys):
        last = hashlib.sha256(last).digest()
        keys.append(last)
    return keys


class Refusal(AssertionError):
    """An answer was a ``Failure``."""

    def __init__(self, failure: wire.Failure) -> None:
        super().__init__(f"{failure.code}: {failure.message}")
        self.failure = failure


class Client:
    """One connection, over the unix socket or over TCP."""

    def __init__(self, address: str | int, timeout_s: float = 10.0) -> None:
        is_unix = isinstance(address, str)
        self.sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        self.sock.settimeout(timeout_s)
        self._connect(address if is_unix else ("127.0.0.1", address), timeout_s)
        self._ids = itertools.count(1)
        self.arena: ArenaMapping | None = None
        self.welcome: wire.Welcome | None = None

    def _connect(self, address: Any, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self.sock.connect(address)
            except BlockingIOError:  # a unix socket whose backlog is full says so at once, whatever the timeout
                if time.monotonic() > deadline_s:
                    self.sock.close()
                    raise
                time.sleep(0.01)
            except OSError:
                self.sock.close()
                raise
            else:
                return

    def send(self, body: wire.Body) -> int:
        """Sends a call; returns its id."""
        call_id = next(self._ids)
        self.sock.sendall(wire.frame(wire.Call(call_id, body)))
        return call_id

    def receive(self) -> wire.Answer:
        return wire.decode_answer(recv_frame(self.sock))

    def ask(self, body: wire.Body) -> wire.Answered:
        """A call and its answer, a failure too."""
        call_id = self.send(body)
        answer = self.receive()
        assert answer.id == call_id
        return answer.body

    def call(self, body: wire.Body, kind: type[A]) -> A:
        """A call whose answer must be a ``kind``."""
        answer = self.ask(body)
        if isinstance(answer, wire.Failure):
            raise Refusal(answer)
        assert isinstance(answer, kind), answer
        return answer

    def hello(self) -> Client:
        """Says hello; maps the arena where its descriptor comes."""
        self.send(wire.Hello(wire.PROTOCOL_VERSION, "tests"))
        payload, descriptor = recv_frame_with_fd(self.sock)
        answer = wire.decode_answer(payload)
        assert isinstance(answer.body, wire.Welcome), answer
        self.welcome = answer.body
        assert (descriptor is not None) == (self.sock.family == socket.AF_UNIX)
        if descriptor is not None:
            self.arena = ArenaMapping.open(descriptor, answer.body.instance, answer.body.incarnation)
            os.close(descriptor)
        return self

    def attach(self, engine: str = "e", incarnation: str = "i", **changes: Any) -> Client:
        """Registers, with one slab unless said otherwise."""
        values: dict[str, Any] = {
            "role": "worker-0",
            "pid": os.getpid(),
            "model": "m",
            "chunk_size_tokens": 256,
            "num_slabs": 1,
            "slab_bytes": SLAB_BYTES,
            "fingerprint": None,
            "slabs": (0,),
        }
        self.call(wire.Attach(engine, incarnation, **(values | changes)), wire.Attached)
        return self

    def reserve(self, name: str, keys: Sequence[bytes], tenant: str = "t") -> wire.Reserved:
        body = wire.Reserve(namespace_of(name), tenant, None, b"".join(keys))
        return self.call(body, wire.Reserved)

    def store(self, name: str, keys: Sequence[bytes], tenant: str = "t") -> tuple[str, ...]:
        """Reserves, writes the first bytes of each key into its region, and commits. Returns the verdicts."""
        reserved = self.reserve(name, keys, tenant)
        for grant in reserved.grants:
            self.write(grant.region, keys[grant.index])
        if reserved.grants:
            regions = tuple(grant.region for grant in reserved.grants)
            outcomes = self.call(wire.Commit(regions), wire.Committed).outcomes
            assert set(outcomes) == {"readable"}, outcomes
        return reserved.verdicts

    def lookup(self, name: str, keys: Sequence[bytes], request: str = "r", tenant: str = "t") -> wire.Found:
        return self.call(wire.Lookup(request, namespace_of(name), tenant, b"".join(keys)), wire.Found)

    def ask_together(self, *bodies: wire.Body) -> list[wire.Answered]:
        """Calls in one write, so that the server takes them up one after the other, and their answers."""
        calls = [wire.Call(next(self._ids), body) for body in bodies]
        self.sock.sendall(b"".join(map(wire.frame, calls)))
        answers = [self.receive() for _ in calls]
        assert [answer.id for answer in answers] == [call.id for call in calls]
        return [answer.body for answer in answers]

    def release(self, found: wire.Found, request: str = "r") -> None:
        if found.lease is not None:
            self.call(wire.Release(request, found.lease), wire.LeaseNoted)

    def write(self, region: wire.Region, data: bytes) -> None:
        assert self.arena is not None
        with self.arena.view(region.offset, len(data)) as view:
            view[:] = data

    def read(self, region: wire.Region, num_bytes: int = 32) -> bytes:
        assert self.arena is not None
        with self.arena.view(region.offset, num_bytes) as view:
            return bytes(view)

    def at_end(self) -> bytes:
        """What comes until the server ends the stream."""
        parts = []
        while part := self.sock.recv(65_536):
            parts.append(part)
        return b"".join(parts)

    def close(self) -> None:
        self.sock.close()
        if self.arena is not None and not self.arena.is_closed:
            self.arena.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def command(
    folder: Path, *flags: str, size_gb: float = 0.032, program: tuple[str, ...] = ("-m", "antiphon")
) -> list[str]:
    """The command line of a server on free ports."""
    own = ["--port", "0", "--http-port", "0", "--runtime-dir", str(folder), "--l1-size-gb", str(size_gb)]
    return [sys.executable, *program, "cache-server", *own, *flags]


class ServerProcess:
    """``antiphon cache-server``, listening. ``changes``: as of ``command``."""

    def __init__(self, folder: Path, preexec: Callable[[], None], *flags: str, **changes: Any) -> None:
        self.log = folder / f"log-{len(list(folder.glob('log-*')))}"
        with self.log.open("wb") as log:
            argv = command(folder, *flags, **changes)
            self.process = subprocess.Popen(argv, stderr=log, stdout=log, preexec_fn=preexec)
        try:
            found = wait_for(self._is_ready, "the cache server is ready", START_TIMEOUT_S)
        except BaseException:
            self.kill()
            raise
        self.instance, self.incarnation, self.socket_path = found["instance"], found["incarnation"], found["socket"]
        self.port, self.http_port = int(found["port"]), int(found["http_port"])

    def _is_ready(self) -> re.Match[str] | None:
        assert self.process.poll() is None, self.log.read_text()
        return READY.search(self.log.read_text())

    def connect(self) -> Client:
        """A client over the unix socket that has said hello."""
        return Client(self.socket_path).hello()

    def get(self, path: str) -> Any:
        """What an admin route answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=10)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read()
            assert response.status == 200, (response.status, body)
            return json.loads(body)
        finally:
            connection.close()

    def wait_populated(self) -> ServerProcess:
        wait_for(lambda: "the arena is populated" in self.log.read_text(), "the arena is populated")
        return self

    def stop(self) -> int:
        """SIGTERM and the exit code; it takes a tenth of a second on a machine with nothing else to do."""
        self.process.terminate()
        try:
            return self.process.wait(4)
        finally:
            self.kill()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(5)

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def mapped_arenas(pid: int | str = "self") -> list[str]:
    """The arenas that a process maps."""
    text = Path(f"/proc/{pid}/maps").read_text()
    return re.findall(r"/memfd:(antiphon:\S+)", text)


def resident_bytes(pid: int) -> int:
    """Anonymous memory of a process: what it allocated itself."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
