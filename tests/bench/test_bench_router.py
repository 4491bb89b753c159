"""``antiphon bench router``: what its clients count, what it does not call a result, and a short run of the command."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from antiphon.bench import router_fleet
from antiphon.bench.figures import BenchResult, Row
from antiphon.bench.processes import BenchProcess
from antiphon.bench.router_fleet import Listener, generate_load
from antiphon.bench.router_load import LoadPlan, LoadResult, generate
from antiphon.cli.bench import bench
from antiphon.core.errors import StartError, UpstreamGarbage
from tests.router.scripted import DONE, EVENT, Seen, Wire, engine

Script = Callable[[Seen, Wire], Awaitable[None]]


# ---- the clients -----------------------------------------------------------------------------------------------------


async def load_of(script: Script, num_clients: int = 2, *, is_stream: bool = False) -> tuple[LoadResult, list[Seen]]:
    """A short load on an engine with this script, and what that has seen."""
    async with engine(script) as each:
        plan = LoadPlan(each.port, num_clients, 0.2, num_tokens=3, is_stream=is_stream)
        return await generate(plan), each.seen


async def test_whole_answers_are_counted_and_timed() -> None:
    async def slow(_: Seen, wire: Wire) -> None:
        await asyncio.sleep(0.02)
        wire.whole(b'{"choices":[]}')

    result, seen = await load_of(slow)
    assert (result.num_failed, result.num_events, result.failure) == (0, 0, "")
    assert result.num_answered == len(seen) >= 2
    assert 20 <= result.p50_ms <= result.p99_ms
    bodies = [json.loads(each.body) for each in seen]
    assert len({body["prompt"] for body in bodies}) == len(bodies), "no two requests are the same"
    assert {(body["max_tokens"], body["stream"]) for body in bodies} == {(3, False)}
    assert {each.path for each in seen} == {"/v1/completions"}


async def test_events_are_counted_however_they_are_cut() -> None:
    async def bits(_: Seen, wire: Wire) -> None:
        wire.begin()
        for start in range(0, len(EVENT), 7):
            wire.piece(EVENT[start : start + 7])
            await wire.writer.drain()
        wire.piece(EVENT + EVENT)
        wire.piece(DONE)
        wire.end()

    result, seen = await load_of(bits, is_stream=True)
    assert result.num_failed == 0
    assert result.num_answered == len(seen)
    assert result.num_events == 4 * len(seen)


async def refuses(_: Seen, wire: Wire) -> None:
    wire.whole(b'{"error":"no"}', status=503)


async def cuts(_: Seen, wire: Wire) -> None:
    wire.begin()
    wire.piece(EVENT)
    await wire.writer.drain()
    wire.cut()


@pytest.mark.parametrize(
    ("script", "words", "is_stream"),
    [(refuses, "HTTP/1.1 503", False), (refuses, "HTTP/1.1 503", True), (cuts, "the connection ended", True)],
)
async def test_what_is_no_whole_answer_has_failed(script: Script, words: str, is_stream: bool) -> None:
    result, seen = await load_of(script, is_stream=is_stream)
    assert (result.num_answered, result.num_failed) == (0, 2)
    assert words in result.failure
    assert len(seen) == 2, "a client whose request failed ends"


async def test_answers_that_do_not_come_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(_: Seen, wire: Wire) -> None:
        await wire.until_closed()

    monkeypatch.setattr("antiphon.bench.router_load._GRACE_S", 0.1)
    result, _ = await load_of(hangs)
    assert (result.num_answered, result.num_failed) == (0, 2)
    assert "no whole answer" in result.failure


@pytest.mark.process
async def test_a_load_with_a_failure_is_no_measurement() -> None:
    async with engine(refuses) as each:
        plan = LoadPlan(each.port, 1, 0.2)
        with pytest.raises(UpstreamGarbage, match=r"1 requests failed, 0 did not: HTTP/1\.1 503"):
            await asyncio.to_thread(generate_load, plan)


@pytest.mark.process
def test_clients_of_nothing_do_not_run(free_port: int) -> None:
    with pytest.raises(StartError, match="Connection refused"):
        generate_load(LoadPlan(free_port, 1, 0.2))


# ---- the processes ---------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_process_that_ends_says_why(tmp_path: Path) -> None:
    listener = Listener(["router", "--no-such-flag"], router_fleet._ROUTER_LISTENS, tmp_path / "router.log")
    try:
        with pytest.raises(StartError, match=r"router ended with code 2:(.|\n)*no-such-flag"):
            listener.wait()
        with pytest.raises(StartError, match="ended with code 2"):
            listener.process.memory_bytes()
    finally:
        listener.process.stop()


@pytest.mark.process
def test_a_process_that_does_not_listen_in_time(tmp_path: Path) -> None:
    flags = ["sim-engine", "--start-delay-s", "600"]
    listener = Listener(flags, router_fleet._ROUTER_LISTENS, tmp_path / "engine.log")
    try:
        with pytest.raises(StartError, match=r"engine does not listen after 0\.1 s"):
            listener.wait(0.1)
    finally:
        listener.process.stop()


@pytest.mark.process
def test_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = BenchProcess(["/bin/sleep", "600"], log)
    try:
        now, most = process.memory_bytes()
        assert 0 < now <= most < 100e6
    finally:
        process.stop()


# ---- the command -----------------------------------------------------------------------------------------------------


def test_wrong_options_are_refused() -> None:
    for seconds in ("0", "-1", "1e9", "x"):
        assert CliRunner().invoke(bench, ["router", "--seconds", seconds]).exit_code == 2


def test_what_cannot_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(options: object, say: object) -> BenchResult:
        raise UpstreamGarbage("3 requests failed")

    monkeypatch.setattr("antiphon.cli.bench.run_router_bench", fails)
    result = CliRunner().invoke(bench, ["router"])
    assert result.exit_code == 1
    assert "error: 3 requests failed" in result.output


def test_the_seconds_reach_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def run(options: object, say: object) -> BenchResult:
        seen.append(options.seconds)  # type: ignore[attr-defined]
        return BenchResult([Row("r", 2, "us")], 2, "x86_64", "3.11", "0")

    monkeypatch.setattr("antiphon.cli.bench.run_router_bench", run)
    assert "| r " in CliRunner().invoke(bench, ["router", "--seconds", "7.5"]).output
    assert CliRunner().invoke(bench, ["router"]).exit_code == 0
    assert seen == [7.5, 5.0]


@pytest.mark.process
@pytest.mark.timeout(300)  # it starts some twenty processes
def test_a_short_run_measures_everything(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(bench, ["router", "--seconds", "0.3", "--json", str(path)])
    assert result.exit_code == 0, result.output
    values = {row["name"]: row["value"] for row in json.loads(path.read_text())["rows"]}
    for name in (
        "memory, idle",
        "memory, the most under this load",
        "request straight to one engine, p50",
        "request straight to one engine, p99",
        "request through the router, p50",
        "request through the router, p99",
        "processor time of a request, 1 connection",
        "processor time of a request, 64 connections",
        "processor time of a streamed event, 32 streams",
    ):
        assert values[name] > 0, name
    for percent in ("p50", "p99"):
        straight, routed = (
            values[f"request {way}, {percent}"] for way in ("straight to one engine", "through the router")
        )
        assert values[f"latency added, {percent}"] == pytest.approx(routed - straight)
    assert values["memory, idle"] <= values["memory, the most under this load"]
    for name in values:
        assert f"| {name} " in result.output
    assert "32 streams at once" in result.output  # progress
