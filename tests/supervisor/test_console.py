"""The console never blocks its callers, counts what it drops, and survives its reader."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from antiphon.supervisor.console import Console


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        try:
            os.close(fd)
        except OSError:
            continue


def read_all(fd: int) -> str:
    raw = b""
    while part := os.read(fd, 65536):
        raw += part
    return raw.decode()


def test_prefixes_and_order(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    console = Console(writer, is_coloured=False)
    console.say("one\ntwo")
    console.log_line("prefill-0", "three \x1b[31mred\x1b[0m \x07bell")
    console.plain("four\n\nfive")
    console.close()
    os.close(writer)
    text = read_all(reader)
    assert text == "[antiphon] one\n[antiphon] two\n[prefill-0] three [31mred[0m bell\nfour\n\nfive\n"


def test_colours_and_quiet_logs(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    console = Console(writer, is_coloured=True, has_logs=False)
    console.log_line("prefill-0", "not shown")
    console.say("shown")
    console.close()
    os.close(writer)
    assert read_all(reader) == "\x1b[1m[antiphon]\x1b[0m shown\n"


def test_nobody_reads(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    console = Console(writer, is_coloured=False, queue_lines_max=100)
    started = time.monotonic()
    num_lines = 20_000
    for index in range(num_lines):
        console.log_line("decode-0", f"line {index} " + "x" * 100)
    assert time.monotonic() - started < 10.0
    # The writer may have taken a last batch to the pipe: it blocks there, and the queue fills up behind it.
    deadline = time.monotonic() + 10
    while (before := console.statistics())["num_queued"] < 100:
        assert time.monotonic() < deadline
        console.log_line("decode-0", "x" * 100)
    assert before["num_queued"] == 100
    assert before["num_dropped"] > 10_000
    started = time.monotonic()
    console.close(timeout_s=0.2)
    assert time.monotonic() - started < 2.0
    os.close(reader)


def test_drops_are_told_when_there_is_room(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    console = Console(writer, is_coloured=False, queue_lines_max=10)
    for _ in range(5000):
        console.log_line("decode-0", "x" * 100)
    dropped = console.statistics()["num_dropped"]
    assert dropped > 0
    raw = b""
    told = 0
    deadline = time.monotonic() + 10
    # The console may have had room in between, so that there are several notices, and may drop further lines here.
    while told < dropped:
        assert time.monotonic() < deadline, (told, dropped)
        raw += os.read(reader, 65536)
        console.say("more")
        told = sum(int(number) for number in re.findall(rb"\[antiphon\] (\d+) lines were not shown", raw))
    assert told <= console.statistics()["num_dropped"]
    os.close(reader)
    console.close()


def test_gone_reader(pipe: tuple[int, int]) -> None:
    reader, writer = pipe
    os.close(reader)
    console = Console(writer)
    console.say("into the void")
    started = time.monotonic()
    console.close(timeout_s=5.0)
    assert time.monotonic() - started < 4.0
    console.say("still nothing")
    assert console.statistics()["num_queued"] == 0
