"""Routers and simulated engines as real processes, and a client of the standard library that knows nothing of ours."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.engine.simulated_processes import EngineProcess

MODEL = "m"
NOTHING_HELD = {"blocks_used": 0, "blocks_reserved": 0, "leases": 0, "running": 0, "waiting": 0, "in_flight": 0}
START_TIMEOUT_S = 20.0
SETTLE_TIMEOUT_S = 6.0

Preexec = Callable[[], None]


def wait_for(holds: Callable[[], object], what: str, timeout_s: float = SETTLE_TIMEOUT_S) -> Any:
    """Ask again and again until the answer is true; returns it."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        answer = holds()
        if answer:
            return answer
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)


@dataclass
class Answer:
    """One whole HTTP response. ``body`` is without the chunks' framing; ``is_cut``: it ended before its framing did."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_cut: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error object, whose shape is checked."""
        assert list(self.json) == ["error"], self.body
        error: dict[str, Any] = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert error["message"]
        assert error["type"]
        return error

    @property
    def events(self) -> list[Any]:
        """The events of a stream: JSON values, and ``"[DONE]"``. Each must be whole."""
        assert self.headers["content-type"].startswith("text/event-stream"), self.headers
        *pieces, rest = self.body.decode().split("\n\n")
        assert not rest, f"the stream ends inside an event: {rest!r}"
        assert all(piece.startswith("data: ") for piece in pieces), pieces
        return [piece[6:] if piece == "data: [DONE]" else json.loads(piece[6:]) for piece in pieces]

    @property
    def text(self) -> str:
        """The text of the first choice, of a completion or a chat, streamed or not."""
        if not self.headers["content-type"].startswith("text/event-stream"):
            choice = self.json["choices"][0]
            text: str = choice["text"] if "text" in choice else choice["message"]["content"]
            return text
        return text_of(self.events)


def text_of(events: list[Any]) -> str:
    """The text of the events of a stream that is complete."""
    assert events[-1] == "[DONE]"
    choices = [event["choices"][0] for event in events[:-1] if event["choices"]]
    assert choices[-1]["finish_reason"] in ("length", "stop")
    return "".join(c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices)


def ask(
    port: int, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 20.0
) -> Answer:
    """One request on its own connection. Bytes go as they are, anything else as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, fields | (headers or {}))
        return read_answer(connection.getresponse())
    finally:
        connection.close()


def read_answer(response: http.client.HTTPResponse) -> Answer:
    """Read a response to its end, whole or cut."""
    is_cut = False
    try:
        data = response.read()
    except http.client.IncompleteRead as error:
        data, is_cut = error.partial, True
    fields = {name.lower(): value for name, value in response.getheaders()}
    return Answer(response.status, fields, data, is_cut)


def raw_request(path: str, body: Any, *extra: str) -> bytes:
    """A POST as bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(data)}"]
    return "\r\n".join([*lines, *extra, "", ""]).encode() + data


@contextlib.contextmanager
def sent(port: int, request: bytes) -> Iterator[socket.socket]:
    """A connection on which ``request`` was sent; leaving the block closes it, as a client that goes away."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        sock.sendall(request)
        yield sock


def metrics_of(port: int) -> dict[str, float]:
    """All samples of /metrics, by ``name{label=value,…}`` with the labels sorted."""
    answer = ask(port, "GET", "/metrics")
    assert answer.status == 200
    found = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def total(samples: dict[str, float], name: str, *labels: str) -> float:
    """The sum of the router's samples called ``name`` that carry all ``labels`` (``role=decode``)."""
    prefix = f"antiphon_router_{name}{{"
    found = [(key, value) for key, value in samples.items() if key.startswith(prefix)]
    return sum(v for k, v in found if set(labels) <= set(k.removeprefix(prefix).removesuffix("}").split(",")))


class RouterProcess:
    """One running router."""

    def __init__(self, process: subprocess.Popen[bytes], log: int, output: int) -> None:
        self.process = process
        self.port = 0
        self._log = log
        self._output = output

    @classmethod
    def start(cls, preexec: Preexec, *flags: str) -> RouterProcess:
        """Start a router on a free port with the command line of vllm-router and ``flags``; wait until it listens."""
        argv = [sys.executable, "-m", "antiphon", "router", "--policy", "round_robin", "--vllm-pd-disaggregation"]
        log = os.memfd_create("router-log")  # readable after the end of the process, and gone with the test process
        output = os.memfd_create("router-output")
        process = subprocess.Popen([*argv, "--port", "0", *flags], stdout=output, stderr=log, preexec_fn=preexec)
        router = cls(process, log, output)

        def listens() -> int:
            found = re.search(r"engines on http://\S+:(\d+)", router.log)
            assert router.process.poll() is None, router.log
            return int(found[1]) if found else 0

        router.port = wait_for(listens, "the router listens", START_TIMEOUT_S)
        return router

    @property
    def log(self) -> str:
        """What it wrote to stderr so far."""
        return os.pread(self._log, os.fstat(self._log).st_size, 0).decode()

    @property
    def output(self) -> str:
        """What it wrote to stdout so far."""
        return os.pread(self._output, os.fstat(self._output).st_size, 0).decode()

    def ask(self, method: str, path: str, body: Any = None, **rest: Any) -> Answer:
        return ask(self.port, method, path, body, **rest)

    def complete(self, prompt: Any, max_tokens: int = 8, **fields: Any) -> Answer:
        """POST /v1/completions."""
        return self.ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": max_tokens} | fields)

    def receipt(self, answer: Answer) -> dict[str, Any]:
        """The receipt that an answer names, once the request is over."""
        return self.closed_receipt(answer.headers["x-antiphon-receipt"])

    def closed_receipt(self, receipt_id: str) -> dict[str, Any]:
        """One receipt, once its request is over."""

        def closed() -> Any:
            receipt = self.ask("GET", f"/receipts/{receipt_id}").json
            return receipt if receipt["outcome"] else None

        found: dict[str, Any] = wait_for(closed, "the receipt is closed")
        return found

    def latest(self) -> dict[str, Any]:
        """The newest receipt, once its request is over."""
        newest = self.ask("GET", "/receipts").json["receipts"][0]["id"]
        return self.closed_receipt(newest)

    def metrics(self) -> dict[str, float]:
        return metrics_of(self.port)

    def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(10)


@dataclass
class Stack:
    """Engines and a router in front of them."""

    prefill: list[EngineProcess]
    decode: list[EngineProcess]
    router: RouterProcess
    quick: RouterProcess
    """A second router over the same engines, whose deadlines are short."""
    by_address: dict[str, EngineProcess] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.by_address = {address_of(engine): engine for engine in self.engines}

    @property
    def engines(self) -> list[EngineProcess]:
        return [*self.prefill, *self.decode]

    def pool(self, role: str) -> list[EngineProcess]:
        return self.prefill if role == "prefill" else self.decode

    def fault(self, role: str, kind: str, **fields: Any) -> None:
        """Arm a fault for every request to a pool, until it is cleared."""
        for engine in self.pool(role):
            engine.fault(kind, **{"count": None} | fields)

    def clear(self) -> None:
        """Disarm everything, and wait until no engine holds anything."""
        for engine in self.engines:
            engine.fault("clear")
        self.release_stranded()
        self.settle()

    def release_stranded(self) -> None:
        """Let the decode engines pull what they were asked for last and never saw, which would be held for a lease."""
        if any(engine.state()["leases"] for engine in self.prefill):
            for engine in self.decode:
                _, body = self.last(address_of(engine))
                if b'"do_remote_prefill":true' in body:
                    engine.ask("POST", "/v1/completions", body)

    def settle(self, timeout_s: float = SETTLE_TIMEOUT_S) -> None:
        """Wait until no engine holds a block, a lease or a request."""
        for engine in self.engines:
            engine.wait_state(timeout_s, **NOTHING_HELD)

    def requests(self) -> dict[str, int]:
        """Inference requests that each engine has seen."""
        return {address_of(engine): engine.state()["requests"] for engine in self.engines}

    def last(self, address: str) -> tuple[dict[str, str], bytes]:
        """Header and body of the last inference request to an engine."""
        last = self.by_address[address].json("GET", "/simulated/last")
        return dict(last["headers"]), base64.b64decode(last["body"])


def quiet_ports(count: int) -> int:
    """The first of ``count`` free loopback ports in a row, none of which the kernel gives to outgoing connections.

    A server that is to come back needs one: any client's connection may take another while nobody listens there, and
    keeps it for a minute after its end.
    """
    with open("/proc/sys/net/ipv4/ip_local_port_range") as limits:
        end = min(int(limits.read().split()[0]), 65536)
    for _ in range(200):
        first = random.randrange(10_000, max(end, 12_000) - count)
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first
    raise AssertionError(f"no {count} free ports in a row")


def leases_of(stack: Stack) -> Counter[str]:
    """Leases that the prefill engines have ``granted``, and those of them that have ``expired``."""
    states = [engine.state() for engine in stack.prefill]
    return Counter(
        granted=sum(state["num_leases"] for state in states),
        expired=sum(state["num_leases_expired"] for state in states),
    )


def address_of(engine: EngineProcess) -> str:
    return f"127.0.0.1:{engine.port}"


def urls(engines: list[EngineProcess], role: str) -> list[str]:
    """The router's flags for a pool."""
    return [part for engine in engines for part in (f"--{role}", f"http://{address_of(engine)}")]
