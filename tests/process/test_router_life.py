"""The router as a process: signals, a port that is taken, flags, and engines that die and come back."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from antiphon.cli.router import router as router_command
from tests.engine.simulated_processes import EngineProcess
from tests.router.served import tenants_file
from tests.router.stack import Answer, RouterProcess, quiet_ports, raw_request, read_answer, text_of, urls, wait_for

pytestmark = pytest.mark.process

Start = Callable[..., RouterProcess]
StartEngine = Callable[..., EngineProcess]
TOKEN_MS = 10
QUICK = ("--health-interval-s", "0.2")


@pytest.fixture
def start_engine(die_with_parent: Callable[[], None]) -> Iterator[StartEngine]:
    running: list[EngineProcess] = []

    def start(**flags: Any) -> EngineProcess:
        running.append(EngineProcess.start(die_with_parent, decode_token_ms=TOKEN_MS, **flags))
        return running[-1]

    yield start
    for each in running:
        each.stop()


@pytest.fixture(scope="module")
def decode(die_with_parent: Callable[[], None]) -> Iterator[EngineProcess]:
    """One decode engine for the tests that do not harm it."""
    engine = EngineProcess.start(die_with_parent, decode_token_ms=TOKEN_MS)
    yield engine
    engine.stop()


@pytest.fixture
def start_router(die_with_parent: Callable[[], None]) -> Iterator[Start]:
    running: list[RouterProcess] = []

    def start(*flags: str) -> RouterProcess:
        running.append(RouterProcess.start(die_with_parent, *flags))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            each.process.kill()
        each.process.wait(10)


class Stream:
    """A streamed completion under way."""

    def __init__(self, port: int, max_tokens: int) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        body = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
        request = raw_request("/v1/completions", body)
        self.connection.connect()
        assert self.connection.sock is not None
        self.connection.sock.sendall(request)
        self.response = http.client.HTTPResponse(self.connection.sock, method="POST")
        self.response.begin()  # the head comes with the first event
        assert self.response.status == 200

    def rest(self) -> Answer:
        answer = read_answer(self.response)
        self.connection.close()
        return answer


def is_refused(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except ConnectionRefusedError:
        return True
    return False


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_lets_live_streams_end(decode: EngineProcess, start_router: Start, number: signal.Signals) -> None:
    router = start_router(*urls([decode], "decode"))
    idle = socket.create_connection(("127.0.0.1", router.port), timeout=5)
    stream = Stream(router.port, 60)
    router.process.send_signal(number)
    wait_for(lambda: is_refused(router.port), "new connections are refused")
    assert idle.recv(1) == b""
    idle.close()
    assert router.process.poll() is None
    answer = stream.rest()
    assert not answer.is_cut
    assert len(answer.events) == 61
    assert text_of(answer.events)
    assert router.process.wait(5) == 0
    assert "stopping: 1 requests in progress" in router.log
    assert "cut" not in router.log


def check_stopped(answer: Answer) -> None:
    """A stream that was cut must not look complete: it ends with an error event, then the end of the stream."""
    *_, last, done = answer.body.decode().strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["message"] == "the router is stopping"
    assert done == "data: [DONE]"
    assert not answer.is_cut


def test_draining_has_an_end(decode: EngineProcess, start_router: Start) -> None:
    router = start_router(*urls([decode], "decode"), "--drain-timeout-s", "0.3")
    stream = Stream(router.port, 1000)
    began = time.monotonic()
    router.process.terminate()
    answer = stream.rest()
    check_stopped(answer)
    assert router.process.wait(5) == 0
    assert time.monotonic() - began < 5.0
    assert "stopped with 1 requests cut" in router.log


def test_second_signal_ends_the_draining(decode: EngineProcess, start_router: Start) -> None:
    router = start_router(*urls([decode], "decode"))
    stream = Stream(router.port, 1000)
    router.process.terminate()
    wait_for(lambda: is_refused(router.port), "it is draining")
    router.process.terminate()
    check_stopped(stream.rest())
    assert router.process.wait(5) == 0


def test_nothing_to_drain(decode: EngineProcess, start_router: Start) -> None:
    router = start_router(*urls([decode], "decode"))
    assert router.complete("x", 1).status == 200
    router.process.terminate()
    assert router.process.wait(5) == 0
    assert "Traceback" not in router.log


# ---- the command line ------------------------------------------------------------------------------------------------


def test_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = [sys.executable, "-m", "antiphon", "router", "--decode", "http://127.0.0.1:9", "--port", str(port)]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert ran.returncode == 1
    said = ran.stderr
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "fix: choose another --port" in said
    assert "Traceback" not in said


def test_port_for_kv_events_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        argv = [sys.executable, "-m", "antiphon", "router", "--decode", "http://127.0.0.1:9", "--port", "0"]
        argv += ["--policy", "kv_aware", "--kv-events-port", str(port)]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert ran.returncode == 1
    assert f"cannot listen for KV events on 127.0.0.1:{port}" in ran.stderr
    assert "fix: choose another --kv-events-port, or stop what listens there" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_what_surprises_is_said_at_the_start(decode: EngineProcess, start_router: Start, tmp_path: Path) -> None:
    path = tenants_file(tmp_path, {"name": "a"})
    flags = ["--policy", "kv_aware", "--host", "0.0.0.0", "--tenants-file", path]
    router = start_router(*urls([decode], "decode"), *flags)
    assert "kv_aware acts as prefix_aware without kv_events_port" in router.log
    assert "without client keys" not in router.log
    assert router.complete("x", 1).status == 401
    answer = router.ask("POST", "/v1/completions", {"prompt": "x"}, headers={"Authorization": "Bearer sk-a"})
    assert answer.status == 200
    assert "sk-a" not in router.log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "no decode engine is given"),
        (["--prefill", "http://127.0.0.1:9"], "no decode engine is given"),
        (["--decode", "127.0.0.1:9"], "write http://HOST:PORT"),
        (["--decode", "http://127.0.0.1"], "has no port"),
        (["--decode", "https://127.0.0.1:9"], "write http://HOST:PORT"),
        (["--decode", "http://127.0.0.1:9", "--port", "70000"], "--port"),
        (["--decode", "http://127.0.0.1:9", "--policy", "sticky_least_loaded"], "--policy"),
        (["--decode", "http://127.0.0.1:9", "--idle-timeout-s", "0"], "--idle-timeout-s"),
        (["--decode", "http://127.0.0.1:9", "--no-such-flag"], "--no-such-flag"),
        (["--decode", "http://127.0.0.1:9", "--admin-key-file", "/nonexistent/key"], "cannot be read"),
        (["--decode", "http://127.0.0.1:9", "--tenants-file", "/nonexistent/tenants"], "router.tenants_file"),
        (
            ["--decode", "http://127.0.0.1:9", "--tenants-file", "/t", "--api-key-file", "/k"],
            "api_key_files of a tenant",
        ),
    ],
)
def test_flags_that_cannot_work(flags: list[str], words: str) -> None:
    ran = CliRunner().invoke(router_command, flags)
    assert ran.exit_code == 2
    assert words in ran.output


@pytest.mark.parametrize("fallback", ["fail", "local"])
def test_a_router_may_start_without_engines(
    start_engine: StartEngine, decode: EngineProcess, start_router: Start, fallback: str
) -> None:
    router = start_router("--allow-empty", "--prefill-fallback", fallback)

    def serves() -> bool:
        return router.complete("x", 1).status == 200

    def add(engine: EngineProcess, role: str) -> None:
        (url,) = urls([engine], role)[1:]
        assert router.ask("POST", "/endpoints", {"role": role, "url": url}).status == 201

    missing = "prefill" if fallback == "fail" else "decode"
    assert router.complete("x", 1).error["code"] == f"no_{missing}_engine"
    add(decode, "decode")
    if fallback == "fail":
        wait_for(lambda: router.ask("GET", "/endpoints").json["endpoints"][0]["state"] == "ready", "decode has come")
        assert router.complete("x", 1).error["code"] == "no_prefill_engine"
        add(start_engine(role="prefill"), "prefill")
    wait_for(serves, "the engines that have come serve")


@pytest.mark.parametrize("has_key", [False, True], ids=["no key", "key"])
def test_public_address_is_warned_of(decode: EngineProcess, start_router: Start, tmp_path: Path, has_key: bool) -> None:
    (tmp_path / "key").write_text("secret")
    flags = ["--admin-key-file", str(tmp_path / "key")] if has_key else []
    router = start_router(*urls([decode], "decode"), "--host", "0.0.0.0", *flags)
    assert "listening on 0.0.0.0 without client keys" in router.log
    assert router.ask("GET", "/receipts", headers={"Host": "router.example"}).status == (401 if has_key else 403)
    assert ("for who shows the admin key" in router.log) is has_key
    assert router.complete("x", 1).status == 200
    assert router.stop() == 0


def test_public_address_with_keys_is_not_warned_of(decode: EngineProcess, start_router: Start, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# who may\nsk-1\n")
    router = start_router(*urls([decode], "decode"), "--host", "0.0.0.0", "--api-key-file", str(tmp_path / "keys"))
    assert "without client keys" not in router.log
    assert router.complete("x", 1).status == 401
    answer = router.ask("POST", "/v1/completions", {"prompt": "x"}, headers={"Authorization": "Bearer sk-1"})
    assert answer.status == 200
    assert "sk-1" not in router.log


def test_loopback_is_not_warned_of(decode: EngineProcess, start_router: Start) -> None:
    router = start_router(*urls([decode], "decode"))
    assert "without client keys" not in router.log
    assert re.search(r"routing 0 prefill and 1 decode engines on http://127.0.0.1:\d+", router.log)


def test_access_log(decode: EngineProcess, start_router: Start) -> None:
    router = start_router(*urls([decode], "decode"), "--access-log")
    receipt = router.complete("x", 1).headers["x-antiphon-receipt"]
    assert router.stop() == 0
    (line,) = router.output.splitlines()  # nothing else is written there
    assert json.loads(line)["id"] == receipt
    assert receipt not in router.log


# ---- engines that die and come back ----------------------------------------------------------------------------------


def again(start_engine: StartEngine, dead: EngineProcess, **flags: Any) -> EngineProcess:
    """Another life of an engine, behind the same address."""
    return start_engine(port=dead.port, **flags)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_engine_that_dies_and_comes_back(start_engine: StartEngine, start_router: Start, role: str) -> None:
    engines = {each: start_engine(role=each, port=quiet_ports(1)) for each in ("prefill", "decode")}
    router = start_router(*urls([engines["prefill"]], "prefill"), *urls([engines["decode"]], "decode"), *QUICK)
    right = router.complete("x", 5).text
    engines[role].kill()
    wait_for(lambda: router.ask("GET", "/readiness").status == 503, "it is known to be down")
    answer = router.complete("x", 5)
    assert (answer.status, answer.error["code"]) == (503, f"no_{role}_engine")
    assert answer.headers["retry-after"]
    again(start_engine, engines[role], role=role)
    wait_for(lambda: router.ask("GET", "/readiness").status == 200, "it serves again", 5.0)
    assert router.complete("x", 5).text == right
    assert f"{role} engine 127.0.0.1:{engines[role].port} is ready" in router.log


def test_engine_that_is_down_at_the_start_and_comes_later(start_engine: StartEngine, start_router: Start) -> None:
    free_port = quiet_ports(1)
    router = start_router(*urls([start_engine()], "decode"), "--prefill", f"http://127.0.0.1:{free_port}", *QUICK)
    readiness = router.ask("GET", "/readiness")
    assert (readiness.status, readiness.json["reason"]) == (503, "no prefill engine is available")
    assert router.ask("GET", "/health").status == 200
    assert router.complete("x", 2).status == 503
    assert router.complete("x", 2, n=2).status == 200  # needs no prefill engine
    start_engine(role="prefill", port=free_port)
    wait_for(lambda: router.complete("x", 2).status == 200, "it serves", 5.0)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_dead_engine_of_two_costs_no_request(start_engine: StartEngine, start_router: Start, role: str) -> None:
    pools = {"prefill": [start_engine(role="prefill")], "decode": [start_engine()]}
    pools[role].append(start_engine(role=role))
    router = start_router(*urls(pools["prefill"], "prefill"), *urls(pools["decode"], "decode"))
    pools[role][0].kill()  # before any connection to it was kept
    answers = [router.complete(f"{number}", 3, stream=bool(number % 2)) for number in range(8)]
    assert [answer.status for answer in answers] == [200] * 8
    assert all(answer.text for answer in answers)
    assert router.ask("GET", "/readiness").json[role] == {"usable": 1, "total": 2}


@pytest.mark.parametrize("after_events", [0, 3])
def test_decode_engine_that_kills_itself_while_it_answers(
    start_engine: StartEngine, start_router: Start, after_events: int
) -> None:
    prefill, decode = start_engine(role="prefill"), start_engine(port=quiet_ports(1))
    router = start_router(*urls([prefill], "prefill"), *urls([decode], "decode"), *QUICK)
    decode.fault("die_mid_stream", after_events=after_events)
    answer = router.complete("x", 50, stream=True)
    if after_events:
        assert not answer.is_cut
        *events, error, done = answer.events
        assert (error["error"]["code"], done) == (502, "[DONE]")
        assert len(events) <= after_events
    else:
        # A fresh prefill was made for it, and by then no decode engine was left.
        assert (answer.status, answer.error["code"]) in ((503, "no_decode_engine"), (502, "decode_lost"))
    assert router.receipt(answer)["outcome"] == "failed"
    assert decode.process.wait(10) == -signal.SIGKILL
    again(start_engine, decode)
    wait_for(lambda: router.complete("x", 3).status == 200, "it serves again", 5.0)


def test_prefill_engine_that_dies_in_the_middle_of_a_prefill(start_engine: StartEngine, start_router: Start) -> None:
    prefill, decode = start_engine(role="prefill", port=quiet_ports(1)), start_engine()
    router = start_router(*urls([prefill], "prefill"), *urls([decode], "decode"), *QUICK)
    prefill.fault("die_mid_stream")
    answer = router.complete("x", 3)
    assert (answer.status, answer.error["code"]) == (502, "prefill_lost")
    assert decode.state()["requests"] == 0
    prefill.process.wait(10)
    again(start_engine, prefill, role="prefill")
    wait_for(lambda: router.complete("x", 3).status == 200, "it serves again", 5.0)


def test_descriptors_up_to_the_hard_limit(decode: EngineProcess, start_router: Start) -> None:
    router = start_router(*urls([decode], "decode"))
    limits = Path(f"/proc/{router.process.pid}/limits").read_text()
    found = re.search(r"Max open files\s+(\S+)\s+(\S+)", limits)
    assert found is not None
    assert found[1] == found[2]
