"""A whole deployment on simulated engines by ``antiphon up``, and a load of clients that judge every answer."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from antiphon.cli.status import status
from antiphon.supervisor import listening, procfs
from tests.router.stack import Answer, ask, quiet_ports, text_of, wait_for

READY_TIMEOUT_S = 30.0
LEASE_S = 6
REQUEST_BOUND_S = 10.0
"""Longest that any request may take while processes are killed; an undisturbed one takes a fifth of a second."""

SPEC = """
name: {name}
model: {{path: simulated, served_name: m}}
engine:
  kind: simulated
  simulated: {{prefill_overhead_ms: 4, decode_token_ms: 4}}
prefill: {{replicas: 2, port: {p}, side_channel_port: {p_side}, kv_replay_port: {p_replay}}}
decode: {{replicas: 2, port: {d}, side_channel_port: {d_side}, kv_replay_port: {d_replay}}}
handoff: {{lease_s: {lease_s}}}
router: {{port: {router}, health_interval_s: 0.2, health_timeout_s: 1.0, {knobs}}}
supervisor:
  state_dir: {state_dir}
  stop_grace_s: 5
  restart: {{backoff_first_s: 0.2, max_in_window: 50}}
"""


def reached_from_outside(deployment: str) -> list[tuple[int, str, int]]:
    """Pid, address and port of every TCP listener of the deployment that is not on loopback."""
    sockets = dict(listening.listening_sockets())
    found = [
        (pid, *sockets[inode])
        for pid in marked_pids(deployment)
        for inode in listening.socket_inodes(pid)
        if inode in sockets
    ]
    assert found, "a deployment listens somewhere"
    return [each for each in found if not ipaddress.ip_address(each[1]).is_loopback]


def marked_pids(deployment: str) -> list[int]:
    """The living processes whose environment says that they belong to a deployment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            is_marked = f"{procfs.MARKER_VARIABLE}={deployment}/".encode() in path.read_bytes()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if is_marked and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def watchdog_pids(deployment: str) -> list[int]:
    """The watchdogs of a deployment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"antiphon.supervisor.watchdog" in words and deployment.encode() in words:
                found.append(int(path.parent.name))
    return found


class Deployment:
    """One ``antiphon up``: two prefill engines, two decode engines, a router.

    Args:
        folder: for the spec, the state and the output.
        preexec: runs in the child before the program.
        sections: further sections of the spec, as YAML.
        knobs: further ones of the router, as in a flow mapping of YAML.
    """

    def __init__(self, folder: Path, preexec: Callable[[], None], sections: str = "", knobs: str = "") -> None:
        self.name = f"k{os.getpid()}-{random.randrange(10**6)}"
        self.state_dir = folder / "state"
        self.router_port = quiet_ports(1)
        ports = {"p": quiet_ports(2), "d": quiet_ports(2), "router": self.router_port}
        sides = {name: quiet_ports(2) for name in ("p_side", "d_side", "p_replay", "d_replay")}
        self.spec = folder / "antiphon.yaml"
        text = SPEC.format(name=self.name, state_dir=self.state_dir, lease_s=LEASE_S, knobs=knobs, **ports, **sides)
        self.spec.write_text(text + sections)
        argv = [sys.executable, "-m", "antiphon", "up", "--config", str(self.spec), "--quiet-logs"]
        self.output = folder / "up.log"
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                argv, stdout=output, stderr=subprocess.STDOUT, preexec_fn=preexec, start_new_session=True
            )

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            said = self.output.read_text()
            assert self.process.poll() is None, said
            return "Ready." in said

        wait_for(is_ready, "the deployment is up", READY_TIMEOUT_S)

    def status(self) -> tuple[int, dict[str, Any]]:
        """Exit code and report of ``antiphon status --format json``."""
        argv = ["--state-dir", str(self.state_dir), "--name", self.name, "--format", "json"]
        ran = CliRunner().invoke(status, argv)
        (report,) = json.loads(ran.output)["deployments"]
        return ran.exit_code, report

    def rows(self) -> dict[str, dict[str, Any]]:
        """The rows of ``antiphon status`` by process."""
        return {row["name"]: row for row in self.status()[1]["processes"]}

    def ask(self, method: str, path: str, body: Any = None) -> Answer:
        return ask(self.router_port, method, path, body)

    def stop(self) -> int:
        """Ctrl-C and the exit code; nothing may be left."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(20)
        finally:
            self.process.kill()
            self.process.wait(5)
            self.check_gone()

    def check_gone(self) -> None:
        """Nothing of it runs any more."""
        wait_for(lambda: not marked_pids(self.name) and not watchdog_pids(self.name), "a clean host", 20.0)


# ---- load ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How one request ended: ``answer``, ``error``, ``error_event``, ``connection`` or ``wrong``."""

    kind: str
    began_s: float
    ended_s: float
    detail: str


class Load:
    """Clients that send one request after the other until they are stopped; use it as a context manager."""

    bound_s = REQUEST_BOUND_S
    """Of a request: longer, and it hangs."""

    def __init__(self, port: int, num_clients: int = 16) -> None:
        self._port = port
        self._stopping = threading.Event()
        self._right: dict[str, str] = {}
        self.ended: list[Ended] = []
        self._clients = [threading.Thread(target=self._run, args=(number,)) for number in range(num_clients)]

    def __enter__(self) -> Load:
        for body in map(self._body, range(12)):
            self._right[body["prompt"]] = ask(self._port, "POST", self._path(body), body).text
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for client in self._clients:
            client.join(3 * self.bound_s)
            assert not client.is_alive(), "a request hangs"

    @staticmethod
    def _body(number: int) -> dict[str, Any]:
        body: dict[str, Any] = {"prompt": f"{number % 12}: " + "what is said about this? " * (number % 12)}
        body |= {"messages": [{"role": "user", "content": body["prompt"]}]} if number % 4 == 3 else {}
        return body | {"max_tokens": 12, "stream": number % 2 == 0} | ({"n": 2} if number % 12 == 5 else {})

    @staticmethod
    def _path(body: dict[str, Any]) -> str:
        return "/v1/chat/completions" if "messages" in body else "/v1/completions"

    def _run(self, number: int) -> None:
        while not self._stopping.is_set():
            body = self._body(number)
            number += 5
            began = time.monotonic()
            kind, detail = self._one(body)
            self.ended.append(Ended(kind, began, time.monotonic(), detail))
            if kind != "answer":
                self._stopping.wait(0.02)

    def _one(self, body: dict[str, Any]) -> tuple[str, str]:
        try:
            answer = ask(self._port, "POST", self._path(body), body, timeout_s=2 * self.bound_s)
        except TimeoutError:
            return "wrong", "hangs"
        except (ConnectionError, http.client.HTTPException) as error:
            return "connection", repr(error)
        if answer.is_cut:
            return "connection", "cut"
        try:
            return self._judge(body, answer)
        except (AssertionError, ValueError, KeyError, IndexError) as error:
            return "wrong", f"{error!r}: {answer.status} {answer.body[-400:]!r}"

    def _judge(self, body: dict[str, Any], answer: Answer) -> tuple[str, str]:
        right = self._right[body["prompt"]]
        if answer.status != 200:
            assert answer.status in (500, 502, 503, 504), answer.status
            assert b"127.0.0.1" not in answer.body
            return "error", f"{answer.status} {answer.error['code']}"
        if not body["stream"]:
            assert answer.text == right, "another text"
            return "answer", ""
        events = answer.events
        assert events[-1] == "[DONE]", "a stream that just ends"
        if "error" in events[-2]:
            assert events[-2]["error"]["code"] in (500, 502, 504)
            return "error_event", str(events[-2]["error"]["code"])
        assert text_of(events) == right, "another text"
        return "answer", ""

    def counts(self, since_s: float = 0.0) -> Counter[str]:
        """How many requests that began after a time ended in which way."""
        return Counter(each.kind for each in self.ended if each.began_s >= since_s)

    def wait_answers(self, num: int, since_s: float) -> None:
        """Wait until ``num`` requests that began after a time were answered."""
        wait_for(lambda: self.counts(since_s)["answer"] >= num, f"{num} answers", 20.0)

    def check(self, *, may_lose_connection: bool) -> Counter[str]:
        """Every request ended in time and truthfully; returns the counts."""
        wrong = [each.detail for each in self.ended if each.kind == "wrong"]
        assert not wrong, wrong[:5]
        longest = max(self.ended, key=lambda each: each.ended_s - each.began_s)
        assert longest.ended_s - longest.began_s < self.bound_s, longest
        lost = [each.detail for each in self.ended if each.kind == "connection"]
        assert may_lose_connection or not lost, lost[:5]
        return self.counts()
