"""``config check --live`` asks the coordinator that a spec names: does one answer, and does it take the secret?

Real coordinators on loopback. Out of scope: the proof itself (tests/cache_server), the other rows (tests/config).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from antiphon.cli import live_coordinator
from antiphon.cli.live_coordinator import ask_coordinator
from antiphon.cli.main import main
from antiphon.config.live import LiveRow
from antiphon.coordinator.directory import DirectoryOptions
from antiphon.coordinator.server import Coordinator
from antiphon.core.errors import PeerError
from antiphon.core.quiet_log import QuietLog
from antiphon.protocol import peers as wire
from antiphon.protocol.cluster_proof import Answerer
from antiphon.transport.listening import listen_tcp
from antiphon.transport.peer_tcp import PeerListener, PeerStream
from tests.config.facts_for_tests import compiled_from
from tests.router.kv_engines import until

SECRET = b"0123456789abcdef0123456789abcdef"
SHARING = {"engine.kind": "simulated", "cache.enabled": True, "cache.peers": True}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    path.chmod(0o600)
    return path


@asynccontextmanager
async def coordinator(secret: bytes = SECRET) -> AsyncIterator[Coordinator]:
    running = Coordinator(secret, DirectoryOptions())
    running.listen(listen_tcp("127.0.0.1", 0))
    try:
        yield running
        await until(lambda: running.num_connections == 0, "all connections have ended")
    finally:
        await running.close()


def sets_of(port: int, **more: Any) -> dict[str, Any]:
    return SHARING | {"cache.coordinator_url": f"127.0.0.1:{port}"} | more


async def ask(port: int, **more: Any) -> list[LiveRow]:
    rows = await asyncio.to_thread(ask_coordinator, compiled_from(sets_of(port, **more)))
    assert all(row.process == "coordinator" and (row.is_ok or row.fix) for row in rows)
    return rows


async def test_it_answers_and_takes_the_secret(secret: Path) -> None:
    async with coordinator() as running:
        port, proof = await ask(running.port, **{"cache.cluster_secret_file": str(secret)})
        assert (port.target, port.is_ok) == (f"calls port 127.0.0.1:{running.port}", True)
        assert (proof.target, proof.is_ok, proof.result) == ("cluster secret", True, f"accepted ({secret})")
        assert running.counts["joins"] == running.counts["refused"] == 0, "it has not joined, and was not refused"


async def test_it_has_another_secret(secret: Path) -> None:
    async with coordinator(b"another" * 8) as running:
        _, proof = await ask(running.port, **{"cache.cluster_secret_file": str(secret)})
    assert (proof.is_ok, proof.result) == (False, "coordinator has another cluster secret")
    assert "the same --cluster-secret-file" in proof.fix
    assert proof.fix.endswith(f"the secret of this host is in {secret}")


async def test_nothing_listens(free_port: int, secret: Path) -> None:
    (port,) = await ask(free_port, **{"cache.cluster_secret_file": str(secret)})
    assert (port.is_ok, port.result) == (False, "refused: nothing listens")
    assert port.fix == "start antiphon coordinator on 127.0.0.1, or correct cache.coordinator_url"


async def test_it_is_the_port_for_people(secret: Path) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        _, proof = await ask(server.sockets[0].getsockname()[1], **{"cache.cluster_secret_file": str(secret)})
    assert not proof.is_ok
    assert "names the --port of antiphon coordinator (6655 by default), not its --http-port" in proof.fix


async def test_it_is_a_cache_server(secret: Path) -> None:
    async def serve(stream: PeerStream) -> None:
        try:
            with suppress(PeerError):
                await stream.prove(Answerer(SECRET, wire.PEER, "kv", "1"))
        finally:
            stream.close()

    listener = PeerListener(serve, 8, Counter(), QuietLog(logging.getLogger("test")))
    sock = listen_tcp("127.0.0.1", 0)
    listener.listen(sock)
    try:
        _, proof = await ask(sock.getsockname()[1], **{"cache.cluster_secret_file": str(secret)})
    finally:
        await listener.close()
    assert (proof.is_ok, proof.result) == (False, "this is a peer, not a coordinator")
    assert proof.fix.startswith("give each its own address and port")


async def test_it_is_silent(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_coordinator, "HTTP_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # the system accepts, from the backlog
        _, proof = await ask(silent.getsockname()[1], **{"cache.cluster_secret_file": str(secret)})
    assert (proof.is_ok, proof.result) == (False, "the peer did not answer in time")


async def test_the_secret_that_is_made_on_loopback_is_read_and_never_made(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    async with coordinator() as running:
        _, proof = await ask(running.port, **{"cache.runtime_dir": str(folder)})
        assert (proof.is_ok, proof.result) == (False, f"{folder}/cluster.secret is not there")
        assert f"--runtime-dir {folder}" in proof.fix
        assert not folder.exists()
        folder.mkdir()
        (folder / "cluster.secret").write_bytes(SECRET)
        (folder / "cluster.secret").chmod(0o644)
        _, proof = await ask(running.port, **{"cache.runtime_dir": str(folder)})
        assert (proof.is_ok, proof.result) == (False, f"{folder}/cluster.secret is not this user's alone")
        (folder / "cluster.secret").chmod(0o600)
        _, proof = await ask(running.port, **{"cache.runtime_dir": str(folder)})
        assert proof.is_ok


async def test_a_host_without_a_cache_server_needs_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    hosts = {"prefill.hosts": ["192.0.2.1"], "decode.hosts": ["203.0.113.1"]}
    hosts |= {"cache.cluster_secret_file": str(tmp_path / "secret")}
    assert await ask(free_port, **hosts) == [], "the loopback of other hosts is not this one's"
    async with coordinator() as running:
        monkeypatch.setattr(live_coordinator, "is_loopback", lambda host: False)  # an address that all hosts reach
        port, proof = await ask(running.port, **hosts)
        secret = tmp_path / "secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        _, with_secret = await ask(running.port, **hosts)
    assert with_secret.result == f"accepted ({secret})"
    assert (port.is_ok, proof.is_ok) == (True, True)
    assert proof.result.startswith("not tried: ")
    assert "no cache server of this deployment runs on this host" in proof.result


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"cache.coordinator_url": None}, id="up starts it"),
        pytest.param({"cache.peers": False}, id="nothing is shared"),
        pytest.param({"cache.enabled": False, "cache.peers": False}, id="no cache server"),
    ],
)
def test_where_there_is_nobody_to_ask(changes: dict[str, Any]) -> None:
    sets = {name: value for name, value in (sets_of(1) | changes).items() if value is not None}
    assert ask_coordinator(compiled_from(sets)) == []


async def test_the_command_shows_it(secret: Path, tmp_path: Path, free_ports: Callable[[int], list[int]]) -> None:
    names = ("prefill.port", "prefill.side_channel_port", "decode.port", "decode.side_channel_port", "router.port")
    names += ("cache.port", "cache.http_port", "cache.peer_port")
    sets = dict(zip(names, free_ports(len(names)), strict=True)) | {"model.path": "/m", "cache.shared": True}
    sets |= {"cache.cluster_secret_file": str(secret), "supervisor.state_dir": str(tmp_path)}
    async with coordinator(b"another" * 8) as running:
        given = [f"--set={name}={value}" for name, value in sets_of(running.port, **sets).items()]
        ran = await asyncio.to_thread(CliRunner().invoke, main, ["config", "check", "--live", *given])
    assert ran.exit_code == 1, ran.output
    rows = [" ".join(line.split()) for line in ran.output.splitlines()]
    assert "no coordinator cluster secret coordinator has another cluster secret" in rows
    assert "fix: give all cache servers and their coordinator the same --cluster-secret-file" in ran.output
