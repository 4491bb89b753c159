"""Shared memory that a killed engine leaves: what is its own is removed, anything else stays.

Named segments live outside every process, so each test removes what it made itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from antiphon.config.plan import ProcessPlan
from antiphon.config.supervisor_spec import RestartSpec, SupervisorSpec
from antiphon.supervisor import procfs
from antiphon.supervisor.shared_memory import mapped_segments, remove_unused
from antiphon.supervisor.supervisor import Supervisor

pytestmark = pytest.mark.process

HOLDER = """
import ctypes, http.server, mmap, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
held = []
for path in sys.argv[2].split(","):
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(fd, 65536)
    held.append(mmap.mmap(fd, 65536))
    held[-1][:] = b"x" * 65536
    os.close(fd)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print("ready", flush=True)
server.serve_forever()
"""


def shm(name: str) -> str:
    return f"/dev/shm/{name}"


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Paths of two segments as Python names them, and of one that a person might have put there."""
    made = [shm(f"psm_{os.urandom(4).hex()}"), shm(f"psm_{os.urandom(4).hex()}"), shm(f"model-{os.getpid()}.bin")]
    yield made
    for path in made:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


def hold(port: int, *paths: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDER, str(port), ",".join(paths)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def session_of(process: subprocess.Popen[str]) -> procfs.Session:
    ticks = procfs.start_ticks_of(process.pid)
    assert ticks is not None
    return procfs.Session(process.pid, ticks, "none")


def end(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_only_unused_segments_with_a_made_up_name_are_removed(
    names: list[str], free_ports: Callable[[int], list[int]]
) -> None:
    own, shared, persons = names
    began_s = time.time()
    engine, other = (hold(port, *paths) for port, paths in zip(free_ports(2), (names, [shared]), strict=True))
    try:
        segments = mapped_segments(session_of(engine), began_s)
        assert {segment.path for segment in segments} == {own, shared}, "a file that a person named is not taken"
        assert {segment.num_bytes for segment in segments} == {65536}
        assert remove_unused(segments) == [], "the engine lives"
        end(engine)
        assert [segment.path for segment in remove_unused(segments)] == [own], "another process has the second mapped"
        assert (Path(own).exists(), Path(shared).exists(), Path(persons).exists()) == (False, True, True)
    finally:
        end(engine, other)
    assert [segment.path for segment in remove_unused(segments)] == [shared]
    assert remove_unused(segments) == []


def test_a_segment_that_is_older_or_another_file_stays(
    names: list[str], free_ports: Callable[[int], list[int]]
) -> None:
    path = names[0]
    engine = hold(free_ports(1)[0], path)
    try:
        assert mapped_segments(session_of(engine), time.time() + 60.0) == frozenset(), "made before this life"
        segments = mapped_segments(session_of(engine), 0.0)
    finally:
        end(engine)
    os.rename(path, names[1])  # so that the kernel cannot give the same inode again
    Path(path).write_bytes(b"made anew")
    assert remove_unused(segments) == []
    assert Path(path).read_bytes() == b"made anew"


async def test_a_killed_engine_leaves_none(
    names: list[str], tmp_path: Path, free_ports: Callable[[int], list[int]]
) -> None:
    (port,) = free_ports(1)
    plan = ProcessPlan(
        name="decode-0",
        role="decode",
        kind="vllm",
        host="127.0.0.1",
        argv=(sys.executable, "-S", "-c", HOLDER, str(port), ",".join(names)),
        ports={"http": port},
        base_url=f"http://127.0.0.1:{port}",
    )
    events = []
    spec = SupervisorSpec(state_dir=str(tmp_path), start_timeout_s=20.0, restart=RestartSpec(enabled=False))
    supervisor = Supervisor([plan], spec, f"m{os.getpid()}", on_event=events.append)
    async with supervisor:
        assert all(Path(path).exists() for path in names)
        os.kill(supervisor.records()[0].pid or 0, signal.SIGKILL)
        deadline = time.monotonic() + 10.0
        while supervisor.records()[0].state != "failed":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
    assert [Path(path).exists() for path in names] == [False, False, True]
    assert [event.text for event in events if event.kind == "notice"] == [
        "removed 2 segments of shared memory that it had left, 131.1 KB"
    ]
