"""``config check --live`` against real sockets: what is open, refused, silent, unhealthy or of another version."""

from __future__ import annotations

import contextlib
import json
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from antiphon.config import live
from antiphon.config.compile import Compiled
from tests.config.facts_for_tests import compiled_from


@contextlib.contextmanager
def http_server(port: int, answers: dict[str, tuple[int, bytes]]) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, b""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def engine(version: str, health: int = 200) -> dict[str, tuple[int, bytes]]:
    return {"/health": (health, b""), "/version": (200, json.dumps({"version": version}).encode())}


@pytest.fixture
def deployment(free_ports: Callable[[int], list[int]], tmp_path: Path) -> tuple[Compiled, list[int]]:
    """One engine a pool and the router on free ports, with an interpreter that has vLLM 1.2.3 and a NIXL to import."""
    site = tmp_path / "site"
    for name, version in (("vllm", "1.2.3"), ("nixl", "4.5.6")):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (site / "nixl").mkdir()
    (site / "nixl" / "__init__.py").write_text("")
    (site / "nixl" / "_api.py").write_text("")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    ports = free_ports(5)
    sets = dict(
        zip(
            ("prefill.port", "prefill.side_channel_port", "decode.port", "decode.side_channel_port", "router.port"),
            ports,
            strict=True,
        )
    )
    sets |= {"cache.enabled": False}
    sets |= {"engine.device": "cpu", "engine.python": str(python), "engine.env": {"PYTHONPATH": str(site)}}
    return compiled_from(sets), ports


def failed(rows: list[live.LiveRow]) -> dict[tuple[str, str], str]:
    assert all(row.is_ok or row.fix for row in rows), "a failure without a remedy"
    return {(row.process, row.target.split(" ")[0]): row.result for row in rows if not row.is_ok}


def test_all_is_well(deployment: tuple[Compiled, list[int]]) -> None:
    compiled, ports = deployment
    with contextlib.ExitStack() as stack:
        stack.enter_context(http_server(ports[0], engine("1.2.3+cpu")))
        stack.enter_context(socket.create_server(("127.0.0.1", ports[1])))
        stack.enter_context(http_server(ports[2], engine("1.2.3+cpu")))
        stack.enter_context(socket.create_server(("127.0.0.1", ports[3])))
        stack.enter_context(http_server(ports[4], {"/health": (200, b"ok")}))
        rows = live.check_live(compiled)
    assert failed(rows) == {}
    targets = [(row.process, row.target.split(" ")[0]) for row in rows]
    assert targets[:4] == [("prefill-0", "http"), ("prefill-0", "side"), ("prefill-0", "GET"), ("prefill-0", "GET")]
    assert [row.target for row in rows[-3:]] == ["same vLLM version", "vLLM here as in the engines", "import nixl"]


def test_what_is_not_started_unhealthy_or_other(deployment: tuple[Compiled, list[int]]) -> None:
    compiled, ports = deployment
    with contextlib.ExitStack() as stack:
        stack.enter_context(http_server(ports[0], engine("1.2.3")))
        stack.enter_context(http_server(ports[2], engine("1.3.0", health=503)))
        stack.enter_context(socket.create_server(("127.0.0.1", ports[3])))
        rows = live.check_live(compiled)
    found = failed(rows)
    assert found.pop(("prefill-0", "side")) == "refused: nothing listens"
    assert found.pop(("decode-0", "GET")) == "503"
    assert found.pop(("router", "http")) == "refused: nothing listens"
    assert found.pop(("engines", "same")) == "prefill-0 1.2.3, decode-0 1.3.0"
    assert found.pop((compiled.engines[0].spec.python, "vLLM")) == "1.2.3"
    assert found == {}
    fix = next(row.fix for row in rows if row.process == "router")
    assert "start router on 127.0.0.1" in fix


def test_a_cache_server_is_tried_by_its_own_probe(free_ports: Callable[[int], list[int]]) -> None:
    ports = free_ports(2)
    sets = {"engine.kind": "simulated", "cache.enabled": True, "cache.shared": True}
    compiled = compiled_from(sets | {"cache.port": ports[0], "cache.http_port": ports[1]})
    with http_server(ports[1], {"/healthz": (503, b"")}), socket.create_server(("127.0.0.1", ports[0])):
        rows = [row for row in live.check_live(compiled) if row.process == "cache"]
    assert [(row.target, row.is_ok, row.result) for row in rows] == [
        (f"http port 127.0.0.1:{ports[1]}", True, "open"),
        (f"calls port 127.0.0.1:{ports[0]}", True, "open"),
        (f"GET http://127.0.0.1:{ports[1]}/healthz", False, "503"),
    ]
    elsewhere = compiled_from(sets | {"prefill.hosts": ["192.0.2.1"], "decode.hosts": ["192.0.2.1"]})
    assert [plan.name for plan in live.tried(elsewhere)] == ["prefill-0", "decode-0", "router"]


def test_a_program_that_is_no_engine(deployment: tuple[Compiled, list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, ports = deployment
    monkeypatch.setattr(live, "HTTP_TIMEOUT_S", 0.2)
    with contextlib.ExitStack() as stack:
        for port in ports[1:]:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        stack.enter_context(http_server(ports[0], {"/health": (200, b""), "/version": (200, b"<html>")}))
        # The others accept and never answer: the system does, from their backlog.
        rows = live.check_live(compiled)
    found = failed(rows)
    assert found[("prefill-0", "GET")] == "is not a version"
    assert found[("decode-0", "GET")] == "no answer in 0.2 s"
    assert found[("router", "GET")] == "no answer in 0.2 s"
    assert not any(row.target == "same vLLM version" for row in rows)


def test_a_silent_host_costs_the_timeout_and_names_the_firewall(
    deployment: tuple[Compiled, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, ports = deployment

    def silent(address: tuple[str, int], timeout: float) -> socket.socket:
        raise TimeoutError

    monkeypatch.setattr(live.socket, "create_connection", silent)
    rows = [row for row in live.check_live(compiled) if row.process == "prefill-0"]
    assert [row.result for row in rows] == ["no answer in 2 s"] * 2
    assert f"let TCP {ports[1]} of 127.0.0.1 through the firewall" in rows[1].fix


def test_a_name_that_does_not_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(address: tuple[str, int], timeout: float) -> socket.socket:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(live.socket, "create_connection", unknown)
    compiled = compiled_from({"engine.kind": "simulated", "prefill.hosts": ["nowhere"]})
    row = live.check_live(compiled)[0]
    assert (row.is_ok, row.result) == (False, "Name or service not known")
    assert "correct the host name nowhere" in row.fix


def test_nixl_that_cannot_be_imported(deployment: tuple[Compiled, list[int]], tmp_path: Path) -> None:
    compiled, _ = deployment
    (tmp_path / "site" / "nixl" / "_api.py").write_text("raise ImportError('libucp.so: cannot open')\n")
    row = live.check_live(compiled)[-1]
    assert (row.target, row.is_ok, row.result) == ("import nixl", False, "ImportError: libucp.so: cannot open")
