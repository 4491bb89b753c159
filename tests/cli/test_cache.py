"""``antiphon cache``: what each verb prints and returns against a real server, and what it says where there is none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from antiphon.cli import cache_client
from antiphon.cli.asking import NoAnswer
from antiphon.cli.cache import event_line, follow, leases_lines, status_lines
from antiphon.cli.cache_client import AdminClient, format_bytes
from antiphon.cli.main import main
from antiphon.core.errors import ConfigError
from antiphon.protocol import cache as wire
from tests.cache_server.admin_process import MIB, NAMESPACE, Process, engine_at, keys, started, store
from tests.cache_server.admin_standin import until


@pytest.fixture
def process(tmp_path: Path, die_with_parent: Callable[[], None]) -> Iterator[Process]:
    with started(tmp_path, die_with_parent, "--instance-id", "kv") as process:
        yield process


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["cache", *args])


@contextlib.contextmanager
def answering(text: bytes) -> Iterator[str]:
    """A server that gives every connection the same bytes; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock:
                        if sock.recv(65_536):
                            sock.sendall(text)
                            sock.shutdown(socket.SHUT_WR)
                            while sock.recv(65_536):  # closed with bytes unread, the answer would be lost
                                pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(5)
            assert not thread.is_alive()


# ---- against a real server -------------------------------------------------------------------------------------------


@pytest.mark.process
async def test_the_verbs_against_a_server(process: Process) -> None:
    url = ("--url", process.url)

    async def verb(name: str, *args: str) -> Result:
        return await asyncio.to_thread(run, name, *url, *args)

    empty = await verb("status")
    assert empty.exit_code == 0
    assert "no engine is attached" in empty.output
    assert (await verb("leases")).output == "no lease is held\n"
    await until(lambda: "usable so far" not in run("status", *url).output)
    async with engine_at(process.socket_path, MIB) as engine:
        await store(engine, 1, 2)
        found = await engine.call(wire.Lookup("chat-7", NAMESPACE, "", keys(1)), wire.Found)
        status = await verb("status")
        lines = status.output.splitlines()
        assert status.exit_code == 0
        assert lines[0].startswith("kv (")
        assert lines[0].endswith(": healthy")
        assert "chunks    2 of 256 tokens, lru" in lines
        assert "lookups   256 of 256 tokens found (100.0%)" in lines
        assert "leases    1 (1 held), 1.0 MiB" in lines
        assert ["P", "worker-0", str(os.getpid()), "m", "not_run"] in [line.split() for line in lines]
        leases = (await verb("leases")).output.splitlines()
        assert leases[1].split()[:2] == [str(found.lease), "held"]
        assert leases[1].endswith("chat-7")
        events = (await verb("events", "--once")).output.splitlines()
        assert [line.split()[2:4] for line in events] == [["stored", keys(n).hex()[:16]] for n in (1, 2)]
        assert all(re.fullmatch(r"\d\d:\d\d:\d\d", line.split()[1]) for line in events)
        as_json = [json.loads(line) for line in (await verb("events", "--once", "--json")).output.splitlines()]
        assert [event["key"] for event in as_json] == [keys(1).hex(), keys(2).hex()]
        nobody = await verb("clear", "--tenant", "nobody")
        assert (nobody.exit_code, nobody.stdout) == (1, "")
        assert "nothing here has the tenant 'nobody'" in nobody.stderr
        cleared = await verb("clear")
        wanted = "2 chunks forgotten, 1.0 MiB free at once, 1.0 MiB more when their requests end"
        assert cleared.output == f"{process.url}: {wanted}\n"
        assert json.loads((await verb("clear", "--json")).output) == {
            "num_chunks": 0,
            "freed_bytes": 0,
            "held_bytes": 0,
            "num_unpinned": 0,
            "tiers": [],
            "is_known": True,
            "has_peers": False,
        }


@pytest.mark.process
async def test_events_are_followed_until_ctrl_c(process: Process, die_with_parent: Callable[[], None]) -> None:
    async with engine_at(process.socket_path, 4096) as engine:
        await store(engine, 1)
        with subprocess.Popen(
            [sys.executable, "-m", "antiphon", "cache", "events", "--url", process.url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        ) as child:
            assert child.stdout is not None
            try:
                assert "  stored" in await asyncio.to_thread(child.stdout.readline)
                await store(engine, 2)
                assert "  stored" in await asyncio.to_thread(child.stdout.readline)
                child.send_signal(signal.SIGINT)
                _, errors = await asyncio.to_thread(child.communicate, None, 10)
            finally:
                child.kill()
        assert (child.returncode, errors.strip()) == (0, "")


@pytest.mark.process
def test_several_servers_are_all_meant(tmp_path: Path, die_with_parent: Callable[[], None]) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
    with (
        started(tmp_path / "one", die_with_parent, "--instance-id", "one") as one,
        started(tmp_path / "two", die_with_parent, "--instance-id", "two") as two,
    ):
        urls = ("--url", one.url, "--url", two.url)
        assert [answer["instance"] for answer in json.loads(run("status", *urls, "--json").output)] == ["one", "two"]
        assert run("clear", *urls).output.count("0 chunks forgotten") == 2
        none = "no lease is held"
        assert run("leases", *urls).output.splitlines() == [f"{one.url}:", none, f"{two.url}:", none]
        events = run("events", "--once", *urls)
        assert events.exit_code == 2
        assert f"--url with one of {one.url}, {two.url}" in events.output


def test_the_servers_of_running_deployments_are_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        SimpleNamespace(role="cache_server", state="ready", base_url="http://127.0.0.1:8090"),
        SimpleNamespace(role="cache_server", state="dead", base_url="http://127.0.0.1:8091"),
        SimpleNamespace(role="router", state="ready", base_url="http://127.0.0.1:30000"),
    ]
    monkeypatch.setattr(cache_client, "collect", lambda _folder, _name: [SimpleNamespace(processes=rows)])
    assert [server.url for server in cache_client.targets(())] == ["http://127.0.0.1:8090"]
    assert [server.url for server in cache_client.targets(("h:1",))] == ["h:1"]
    monkeypatch.setattr(cache_client, "collect", lambda _folder, _name: [])
    assert [server.url for server in cache_client.targets(())] == [cache_client.DEFAULT_URL]


# ---- where no server answers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "verb",
    [
        *(["status"], ["leases"], ["clear"], ["events"], ["events", "--once"], ["list"], ["list", "--chunks"]),
        *(["pin", "a" * 64], ["unpin", "--all"], ["quota"], ["quota", "a=1"]),
    ],
)
def test_nobody_listens(verb: list[str], free_port: int) -> None:
    result = run(*verb, "--url", f"http://127.0.0.1:{free_port}")
    assert (result.exit_code, result.stdout) == (1, "")
    assert f"no cache server answers at http://127.0.0.1:{free_port}: Connection refused" in result.stderr
    assert "fix: start one with antiphon cache-server" in result.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n", "is no cache server (BadStatusLine"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\n<html>", "is no cache server (status 200, no JSON)"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]", "no JSON object"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "lacks"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", "7 bytes of its answer are missing"),
        (b'HTTP/1.1 403 x\r\ncontent-length: 30\r\n\r\n{"error": {"message": "go away"}}'[:-3] + b"   ", "no JSON"),
        (b'HTTP/1.1 403 x\r\ncontent-length: 33\r\n\r\n{"error": {"message": "go away"}}', "go away (status 403)"),
    ],
)
@pytest.mark.parametrize(
    "verb", [["status"], ["leases"], ["clear"], ["events", "--once"], ["list"], ["pin", "a" * 64], ["quota"]]
)
def test_something_else_answers(text: bytes, message: str, verb: list[str]) -> None:
    with answering(text) as url:
        result = run(*verb, "--url", url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_server_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_client, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        result = run("status", "--url", f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert result.exit_code == 1
    assert "did not answer within 0.1 s" in result.stderr


@pytest.mark.parametrize(
    "url", ["", "https://h:1", "http://h:99999", "http://h:1/path", "http://", "http://[::1", "x://y"]
)
def test_an_address_that_is_none(url: str) -> None:
    result = run("status", "--url", url)
    assert result.exit_code == 2
    assert "not an address of the form http://HOST:PORT" in result.stderr
    with pytest.raises(ConfigError):
        AdminClient(url)


def test_help_names_every_verb_and_option() -> None:
    text = CliRunner().invoke(main, ["cache", "--help"]).output
    verbs = ("status", "list", "leases", "events", "clear", "pin", "unpin", "quota")
    assert all(verb in text for verb in verbs)
    for verb in verbs:
        text = CliRunner().invoke(main, ["cache", verb, "--help"]).output
        assert "--url" in text
        assert "--json" in text
        assert "http://127.0.0.1:8090" in text


# ---- following -------------------------------------------------------------------------------------------------------


class Scripted(AdminClient):
    """Answers by a script, and remembers what it was asked."""

    def __init__(self, *answers: dict[str, Any] | Exception) -> None:
        super().__init__("http://127.0.0.1:1")
        self.answers = list(answers)
        self.asked: list[dict[str, object]] = []

    def get(self, path: str, *, wait_s: float | None = None, **query: object) -> dict[str, Any]:
        self.asked.append(query | {"wait_s": wait_s})
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def page(incarnation: str, next_sequence: int, *events: int, num_lost: int = 0) -> dict[str, Any]:
    entries = [{"kind": "stored", "sequence": number} for number in events]
    return {"incarnation": incarnation, "next": next_sequence, "num_lost": num_lost, "events": entries}


def test_following_goes_on_across_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    gone = NoAnswer("gone")
    end = RuntimeError("the end of the script")
    client = Scripted(page("a", 3, 1, 2), page("a", 9, 8, num_lost=5), gone, page("b", 2, 1), end)
    events = follow(client, is_once=False)
    seen = [event.get("sequence", event["kind"]) for event in itertools.islice(events, 6)]
    with pytest.raises(RuntimeError, match="end of the script"):
        next(events)
    assert seen == [1, 2, "lost", 8, "restarted", 1]
    assert [query["since"] for query in client.asked] == [1, 3, 9, 9, 2]
    assert [query.get("incarnation") for query in client.asked] == [None, "a", "a", "a", "b"]
    assert slept == [1.0]


def test_once_ends_when_there_is_no_more() -> None:
    client = Scripted(page("a", 1001, *range(1, 1001)), page("a", 1003, 1001, 1002), page("a", 1003))
    assert [event["sequence"] for event in follow(client, is_once=True)] == list(range(1, 1003))
    assert all(query["wait_s"] == 0 for query in client.asked)


# ---- tables ----------------------------------------------------------------------------------------------------------

STATUS: dict[str, Any] = {
    "is_healthy": False,
    "reason": "a loop of the server has ended: ticks",
    "instance": "kv",
    "incarnation": "ab12",
    "version": "9.9",
    "uptime_s": 3700,
    "chunk_size_tokens": 256,
    "eviction_policy": "arc",
    "storage_manager": {
        "l1_manager": {
            "detail": "no memory",
            "total_object_count": 7,
            "memory_used_bytes": 3 << 30,
            "memory_total_bytes": 8 << 30,
            "memory_usable_bytes": 4 << 30,
        }
    },
    "tokens": {"lookup": 1000, "hit": 250, "reported": {"device": 1, "l1": 2, "remote_prefill": 3, "computed": 4}},
    "reports": {"count": 5},
    "leases": {"count": 3, "by_state": {"held": 2, "orphaned": 1}, "leased_bytes": 2048},
    "pins": {"count": 1, "pinned_bytes": 1024, "pinned_bytes_max": 2048},
    "engines": [
        {
            "engine": "prefill-0",
            "model": "m\x1b[2J",
            "processes": [
                {"role": "scheduler", "pid": 11, "gate": "not_run", "detail": ""},
                {"role": "worker-0", "pid": 12, "gate": "failed", "detail": "byte 3 differs"},
            ],
        }
    ],
    "tenants": {
        f"t{number}": {"used_bytes": number, "quota_bytes": None, "tokens": {"hit": 0, "miss": 0}}
        for number in range(22)
    }
    | {"": {"used_bytes": 1 << 20, "quota_bytes": 1 << 21, "tokens": {"hit": 1, "miss": 3}}},
}


def test_status_for_people() -> None:
    lines = status_lines(STATUS)
    assert lines[0] == "kv (ab12), version 9.9, up 1h01m: NOT HEALTHY: a loop of the server has ended: ticks"
    assert "its memory is not complete: no memory" in lines
    assert "memory    3.00 GiB of 8.00 GiB used, 50.0% usable so far" in lines
    assert "lookups   250 of 1000 tokens found (25.0%)" in lines
    assert "prompts   device 1, l1 2, remote_prefill 3, computed 4 tokens, of 5 requests of an engine" in lines
    assert "leases    3 (2 held, 1 orphaned), 2.0 KiB" in lines
    assert "pins      1, 1.0 KiB of at most 2.0 KiB" in lines
    assert "prefill-0 worker-0 reuses nothing: byte 3 differs" in lines
    assert ["(none)", "1.0", "MiB", "2.0", "MiB", "1", "25.0%"] in [line.split() for line in lines]
    assert lines[-1] == "and 3 more tenants (--json shows all)"


def test_names_of_clients_do_not_move_the_cursor() -> None:
    text = "\n".join(status_lines(STATUS))
    assert "\x1b" not in text
    assert "m\\x1b[2J" in text
    lease = {
        "lease": 1,
        "state": "held",
        "age_s": 61.0,
        "num_chunks": 2,
        "num_bytes": 10,
        "engine": "e\r",
        "request": "r\n\x07",
    }
    lines = leases_lines({"leases": [lease], "num_left_out": 4})
    assert lines[1].split() == ["1", "held", "1m01s", "2", "10", "B", "e\\r", "r\\n\\x07"]
    assert lines[2] == "and 4 younger ones"


def test_events_for_people() -> None:
    event = {"sequence": 5, "kind": "removed", "key": "ab" * 32, "num_bytes": 4096, "model": "m", "tenant": "t\x1b"}
    at = time.mktime((2026, 1, 2, 13, 4, 5, 0, 0, -1))
    assert event_line(event | {"reason": "evicted", "at": at}) == (
        "       5  13:04:05  removed  abababababababab     4.0 KiB  m tenant t\\x1b (evicted)"
    )
    assert "3 events are lost" in event_line({"kind": "lost", "num_lost": 3})
    assert "ab12" in event_line({"kind": "restarted", "incarnation": "ab12"})


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.00 GiB"),
        (4 << 40, "4096.00 GiB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"is_member": True, "is_listed": True, "reason": None}, "a member of the cluster at c:1"),
        (
            {"is_member": True, "is_listed": False, "reason": None},
            "a member of the cluster at c:1, which is still told",
        ),
        (
            {"is_member": False, "is_listed": False, "reason": "no\x1b way"},
            "NOT SHARING, no member at c:1: no\\x1b way",
        ),
    ],
)
def test_a_server_says_whether_it_shares(told: dict[str, Any], said: str) -> None:
    lines = status_lines(STATUS | {"peers": told | {"coordinator_url": "c:1"}})
    (line,) = [line for line in lines if line.startswith("peers ")]
    assert line.startswith(f"peers     {said}")
    assert not [line for line in status_lines(STATUS) if line.startswith("peers ")]


@pytest.mark.parametrize(
    ("is_healthy", "reason", "said"),
    [
        (True, None, ""),
        (True, "PUT answers 500", "; REFUSES WHAT IS WRITTEN: PUT answers 500"),
        (False, "no connection", "; OUT OF SERVICE (open): no connection"),
    ],
)
def test_a_tier_says_what_is_wrong_with_it(is_healthy: bool, reason: str | None, said: str) -> None:
    tier = {
        "name": "s3",
        "is_healthy": is_healthy,
        "breaker": "closed" if is_healthy else "open",
        "reason": reason,
        "total_object_count": 2,
        "held_bytes": 1024,
        "fetches": {"hit": 1, "miss": 2, "corrupt": 0},
        "publications": {"published": 2},
        "queue": {"bytes": 0},
    }
    manager = STATUS["storage_manager"] | {"l2_tiers": [tier]}
    (line,) = [line for line in status_lines(STATUS | {"storage_manager": manager}) if line.startswith("tier ")]
    assert line.endswith(f"wait{said}")
