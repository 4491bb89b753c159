"""Start, death and restart of a cache server and of its clients: nothing is left behind, and what cannot work says why.

In scope: signals, sockets, memory, exit codes and their messages. Out of scope: calls (``test_cache_server``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.core.errors import CacheUnavailable
from antiphon.core.memory import available_memory_bytes
from antiphon.protocol import cache as wire
from tests.cache_server.world import Client, Refusal, ServerProcess, command, keys_of, mapped_arenas, wait_for

pytestmark = pytest.mark.process

Preexec = Callable[[], None]


def run(argv: list[str], preexec: Preexec) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, capture_output=True, text=True, timeout=20, preexec_fn=preexec, check=False)


def holder_of(server: ServerProcess, preexec: Preexec) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "tests.cache_server.holder", server.socket_path]
    holder = subprocess.Popen(
        argv, preexec_fn=preexec, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=1
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "holding\n"
    return holder


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_an_engine_that_ends_leaves_nothing(tmp_path: Path, die_with_parent: Preexec, signum: signal.Signals) -> None:
    with (
        ServerProcess(tmp_path, die_with_parent).wait_populated() as server,
        holder_of(server, die_with_parent) as holder,
    ):
        assert [lease["engine"] for lease in server.get("/leases")["leases"]] == ["holder"]
        holder.send_signal(signum)
        assert holder.wait(5) == -signum
        began_s = time.monotonic()
        wait_for(lambda: not server.get("/leases")["leases"], "no lease is left", 5.0)
        wait_for(lambda: not server.get("/status")["engines"], "no registration is left", 5.0)
        assert time.monotonic() - began_s > 0.5, "the quarantine was kept"
        with server.connect().attach("next") as client:
            # What it had reserved can be written by another at once, and what it had stored is still there.
            assert set(client.store("held", keys_of("reserved", 2))) == {"write"}
            assert client.lookup("held", keys_of("held", 3)).num_tokens == 768


def test_sigterm_ends_everything(tmp_path: Path, die_with_parent: Preexec) -> None:
    with ServerProcess(tmp_path, die_with_parent).wait_populated() as server:
        client = server.connect().attach()
        client.store("n", keys_of("n", 2))
        far = Client(server.port).hello()
        assert server.stop() == 0
        assert "stopping" in server.log.read_text()
        for left in (client, far):
            assert left.at_end() == b""
        assert list(tmp_path.glob("*.sock")) == []
        assert mapped_arenas() == [f"antiphon:{server.instance}:{server.incarnation}"]
        client.close()
        assert mapped_arenas() == []
        far.close()


def test_sigterm_while_the_arena_is_populated(tmp_path: Path, die_with_parent: Preexec) -> None:
    with ServerProcess(tmp_path, die_with_parent, size_gb=2.0) as server:
        assert server.get("/status")["storage_manager"]["l1_manager"]["memory_usable_bytes"] < 2 * 10**9
        assert server.stop() == 0


def test_a_killed_server_leaves_nothing_after_its_next_start(tmp_path: Path, die_with_parent: Preexec) -> None:
    flags = ("--instance-id", "a-node")
    with ServerProcess(tmp_path, die_with_parent, *flags).wait_populated() as first:
        client = first.connect().attach()
        keys = keys_of("n", 2)
        client.store("n", keys)
        found = client.lookup("n", keys)
        first.kill()
        with pytest.raises((CacheUnavailable, ConnectionError)):
            client.ask(wire.Ping())
        assert client.read(found.regions[1]) == keys[1], "what was promised outlives the server"
        assert Path(first.socket_path).exists()
        other = tmp_path / "cache-a-node-too-0123456789ab.sock"
        other.touch()
        with ServerProcess(tmp_path, die_with_parent, *flags) as second:
            sockets = {path.name for path in tmp_path.glob("*.sock")}
            assert sockets == {Path(second.socket_path).name, other.name}, "only the dead socket of this instance goes"
            assert second.incarnation != first.incarnation
            client.close()
            assert mapped_arenas() == []
            with second.connect().attach() as again:
                assert again.lookup("n", keys).num_tokens == 0
                assert found.lease is not None
                for stale in (wire.Release("r", found.lease), wire.Commit(found.regions), wire.Abort(found.regions)):
                    with pytest.raises(Refusal, match=r"lease_unknown|stale_handle"):
                        again.call(stale, wire.AnswerBody)
            assert second.stop() == 0


def test_the_arena_is_usable_as_it_grows(tmp_path: Path, die_with_parent: Preexec) -> None:
    with ServerProcess(tmp_path, die_with_parent, size_gb=0.6) as server, server.connect().attach() as client:

        def usable_bytes() -> int:
            usable: int = server.get("/status")["storage_manager"]["l1_manager"]["memory_usable_bytes"]
            return usable

        wait_for(usable_bytes, "the first piece")
        assert set(client.store("n", keys_of("n", 8))) == {"write"}
        wait_for(lambda: usable_bytes() >= 600_000_000, "all of it", 20.0)


@pytest.mark.parametrize("verb", ["cache-server", "server"])
def test_the_command_line_of_the_field_is_taken(tmp_path: Path, die_with_parent: Preexec, verb: str) -> None:
    argv = [sys.executable, "-m", "antiphon", verb, "--port", "6555", "--http-port", "8090", "--l1-size-gb", "9999"]
    argv += ["--eviction-policy", "LRU", "--chunk-size", "256", "--instance-id", "prefiller"]
    ran = run([*argv, "--runtime-dir", str(tmp_path)], die_with_parent)
    assert ran.returncode in (1, 2), ran.stderr
    assert "GB of memory are free" in ran.stderr or "cannot listen on" in ran.stderr


def test_more_memory_than_is_free_is_refused_before_the_start(tmp_path: Path, die_with_parent: Preexec) -> None:
    ran = run(command(tmp_path, size_gb=2 * available_memory_bytes() / 10**9), die_with_parent)
    assert ran.returncode == 2
    assert "--l1-size-gb: " in ran.stderr
    assert "GB of memory are free" in ran.stderr
    assert "fix: give at most --l1-size-gb " in ran.stderr
    assert not list(tmp_path.iterdir()), "nothing was made"


@pytest.mark.parametrize(("flag", "other"), [("--port", "--http-port"), ("--http-port", "--port")])
def test_a_taken_port_is_named(tmp_path: Path, die_with_parent: Preexec, flag: str, other: str) -> None:
    with ServerProcess(tmp_path, die_with_parent) as server:
        port = server.port if flag == "--port" else server.http_port
        argv = [word for word in command(tmp_path / "second") if word not in ("--port", "--http-port", "0")]
        ran = run([*argv, flag, str(port), other, "0"], die_with_parent)
        assert ran.returncode == 1
        assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in ran.stderr
        assert f"fix: choose another {flag}" in ran.stderr
        assert not list((tmp_path / "second").glob("*.sock"))


def test_two_servers_of_one_name(tmp_path: Path, die_with_parent: Preexec) -> None:
    flags = ("--instance-id", "a-node")
    with ServerProcess(tmp_path, die_with_parent, *flags) as server, server.connect() as client:
        ran = run(command(tmp_path, *flags), die_with_parent)
        assert ran.returncode == 1
        assert "a cache server named a-node runs already" in ran.stderr
        assert "fix: choose another --instance-id" in ran.stderr
        assert isinstance(client.ask(wire.Ping()), wire.Noted)
        with server.connect() as later:
            assert isinstance(later.ask(wire.Ping()), wire.Noted), "its socket is still there"
        with ServerProcess(tmp_path, die_with_parent, "--instance-id", "b-node") as another:
            assert another.stop() == 0


def test_a_folder_that_others_may_change_is_refused(tmp_path: Path, die_with_parent: Preexec) -> None:
    shared = tmp_path / "open"
    shared.mkdir()
    os.chmod(shared, 0o777)
    ran = run(command(shared), die_with_parent)
    assert ran.returncode == 2
    assert "--runtime-dir: others can change what is in" in ran.stderr
    ran = run(command(tmp_path / ("x" * 100)), die_with_parent)
    assert ran.returncode == 2
    assert "longer than 107 bytes" in ran.stderr


def test_only_loopback_in_this_version(tmp_path: Path, die_with_parent: Preexec) -> None:
    ran = run(command(tmp_path, "--host", "0.0.0.0"), die_with_parent)
    assert ran.returncode == 2
    assert "--host" in ran.stderr
    assert "not a loopback address" in ran.stderr


WITH_A_BUG = """
from antiphon.cache.machine import Cache
from antiphon.cache.events import Lookup
from antiphon.cli.main import main

step = Cache.step

def wrong(self, event, now_s):
    assert not isinstance(event, Lookup), "the books are wrong"
    return step(self, event, now_s)

Cache.step = wrong
main()
"""


def test_a_bug_ends_the_server_rather_than_serving_on(tmp_path: Path, die_with_parent: Preexec) -> None:
    with ServerProcess(tmp_path, die_with_parent, program=("-c", WITH_A_BUG)) as server:
        with server.connect().attach() as client, pytest.raises((CacheUnavailable, ConnectionError)):
            client.lookup("n", keys_of("n", 1))
        assert server.process.wait(5) == 1
        assert "the books are wrong" in server.log.read_text()
        assert list(tmp_path.glob("*.sock")) == []
