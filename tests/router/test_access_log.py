"""The access log: one JSON object for each request, in order, whoever reads it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from antiphon.observe.receipt import Receipt
from antiphon.router import access_log
from antiphon.router.access_log import FIELDS, LINES_MAX, AccessLog, entry
from tests.router.scripted import ask, connected, engine, prefills, routing, streams


@dataclass
class Pipe:
    """What a log writes to, and how it is read."""

    read_fd: int
    write_fd: int

    def lines(self) -> list[dict[str, Any]]:
        """What was written, once nobody writes any more."""
        os.close(self.write_fd)
        self.write_fd = -1
        with os.fdopen(os.dup(self.read_fd), "rb") as file:
            return [json.loads(line) for line in file.read().splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe(*os.pipe())
    yield made
    for fd in (made.read_fd, made.write_fd):
        if fd >= 0:
            os.close(fd)


@pytest.fixture
def standard_output(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> Pipe:
    """What routers of this test take for standard output."""
    monkeypatch.setattr(access_log.AccessLog.__init__, "__defaults__", (pipe.write_fd,))
    return pipe


async def test_a_line_for_each_request(standard_output: Pipe, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1")
    async with engine(prefills) as p, engine(streams) as d:
        knobs = {"access_log": True, "api_key_file": str(keys)}
        async with routing([p], [d], **knobs) as router, connected(router) as client:
            head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: sk-1\r\nx-request-id: mine\r\n"
            trace = b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01\r\n"
            body = b'{"prompt":"secret","stream":true}'
            client.writer.write(head + trace + b"content-length: %d\r\n\r\n" % len(body) + body)
            receipt = (await client.reply()).headers["x-antiphon-receipt"]
            client.writer.write(head + b"content-length: 1\r\n\r\n{")
            assert (await client.reply()).status == 400
            assert (await ask(router)).status == 401
        lines = standard_output.lines()
    assert all(list(line) == list(FIELDS) for line in lines)
    assert [(line["status"], line["outcome"]) for line in lines] == [
        (200, "completed"),
        (400, "failed"),
        (401, "failed"),
    ]
    first, _, refused = lines
    assert (first["id"], first["client_request_id"]) == (receipt, "mine")
    assert first["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (first["route"], first["path"], first["reason"]) == ("/v1/completions", "pd", "default")
    assert (first["prefill"], first["decode"], first["stream"], first["error"]) == (p.address, d.address, True, None)
    assert (first["prompt_tokens"], first["num_events"]) == (3, 4)
    assert 0 < first["prefill_ms"] <= first["first_token_ms"] <= first["total_ms"]
    assert first["time"].endswith("Z")
    assert (refused["id"], refused["error"]) == ("", "an API key is needed: send Authorization: Bearer KEY")
    assert "secret" not in json.dumps(lines)
    assert "sk-1" not in json.dumps(lines)


async def test_without_the_knob_nothing_is_written(standard_output: Pipe) -> None:
    async with engine(streams) as d, routing([], [d]) as router:
        assert router.inference.access_log is None
        assert (await ask(router)).status == 200
    assert standard_output.lines() == []


async def test_nobody_waits_for_a_reader_that_does_not_read(standard_output: Pipe) -> None:
    async with engine(streams) as d, routing([], [d], access_log=True) as router:
        written = router.inference.access_log
        assert written is not None
        receipt = Receipt("x" * 1000, "/v1/completions", 0.0)
        for _ in range(LINES_MAX + 1000):  # far more than a pipe takes
            written.write(receipt)
        async with asyncio.timeout(5):
            assert (await ask(router)).status == 200
        assert written.num_dropped > 0
        lines = await asyncio.gather(asyncio.to_thread(_drain, standard_output.read_fd, 1000))
    assert lines[0] >= 1000


def _drain(fd: int, num_lines: int) -> int:
    """Read until that many lines were there."""
    found = 0
    while found < num_lines:
        found += os.read(fd, 1 << 20).count(b"\n")
    return found


def test_a_log_that_cannot_be_written_ends_and_says_so(pipe: Pipe, caplog: pytest.LogCaptureFixture) -> None:
    os.close(pipe.read_fd)
    pipe.read_fd = -1
    written = AccessLog(pipe.write_fd)
    written.write(Receipt("1", "/v1/completions", 0.0))
    written._thread.join(5)
    assert "cannot be written: Broken pipe" in caplog.text
    written.write(Receipt("2", "/v1/completions", 0.0))
    assert written.num_dropped == 1
    written.close()
    assert "were not written" in caplog.text


def test_what_is_left_is_written_at_the_end(pipe: Pipe) -> None:
    written = AccessLog(pipe.write_fd)
    for number in range(100):  # as much as a pipe holds
        written.write(Receipt(str(number), "/v1/completions", 0.0))
    written.close()
    assert [line["id"] for line in pipe.lines()] == [str(number) for number in range(100)]


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-more", "4bf92f3577b34da6a3ce929d0e0e4736"),
        ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", None),
        ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
        ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", None),
        ("nonsense", None),
        (None, None),
    ],
)
def test_the_trace_that_a_receipt_names(traceparent: str | None, trace_id: str | None) -> None:
    receipt = Receipt("1", "/v1/completions", 0.0)
    receipt.traceparent = traceparent
    assert entry(receipt)["trace_id"] == receipt.as_dict()["trace_id"] == trace_id
