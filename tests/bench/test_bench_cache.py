"""``antiphon bench cache``: what its figures mean, and a quick run of the command against a real server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from antiphon.bench import cache as bench_cache
from antiphon.bench.cache import CacheBenchOptions
from antiphon.bench.cache_calls import measure_hashing, times_hashed
from antiphon.bench.cache_contention import _add_rows, _Lookups
from antiphon.bench.figures import BenchResult, Row, Rows, percentile
from antiphon.bench.processes import OwnServer
from antiphon.bench.rig import Buffer, CacheMiss, Prompt, Shape, Target, attached, layout_of, retrieve, store
from antiphon.cli.bench import bench, table_lines
from antiphon.core import chunks
from antiphon.core.errors import CacheError, CacheUnavailable, StartError


def ignore(_: str) -> None:
    """Takes progress."""


# ---- arithmetic ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "percent", "expected"),
    [([5.0], 50, 5.0), ([1, 2, 3, 4], 50, 2), ([4, 3, 2, 1], 99, 4), (range(1, 1001), 99, 990), ([1, 2], 0, 1)],
)
def test_percentile(values: list[float], percent: float, expected: float) -> None:
    assert percentile(values, percent) == expected


def test_goals_are_judged() -> None:
    rows = Rows()
    rows.add("plain", 1, "ms")
    rows.at_least("ratio", 0.8, "x", 0.8)
    rows.at_least("low", 0.79, "x", 0.8)
    rows.at_most("fast", 1.0, "ms", 1.0)
    rows.at_most("slow", 1.01, "ms", 1.0)
    assert [row.is_met for row in rows.rows] == [None, True, False, True, False]
    result = BenchResult(rows.rows, 2, "x86_64", "3.11", "0")
    assert [row.name for row in result.missed] == ["low", "slow"]
    lines = table_lines(result)
    assert "MISSED" in lines[-1]
    assert "MISSED" not in "".join(table_lines(result, is_judged=False))
    assert len({len(line) for line in lines[2:]}) == 1, "the table has straight columns"


def test_each_token_is_hashed_once_and_counted() -> None:
    prompt = Prompt.new(2048, 256)
    assert times_hashed(prompt, 256) == 1.0
    assert chunks.hashlib.sha256(b"").digest_size == 32, "the digest is the library's again"


def test_a_token_hashed_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The counter is not blind: a chain that feeds its tokens twice shows."""
    original = chunks.pack_tokens

    def spoiled(self: chunks.ChunkChain, tokens: chunks.Tokens) -> list[chunks.ChunkKey]:
        chunks.hashlib.sha256(b"").update(original(tokens))
        return extend(self, tokens)

    extend = chunks.ChunkChain.extend
    prompt = Prompt.new(2048, 256)
    monkeypatch.setattr(chunks.ChunkChain, "extend", spoiled)
    assert times_hashed(prompt, 256) == 2.0


def test_hashing_rows() -> None:
    rows = Rows()
    measure_hashing(2048, 256, rows, ignore)
    assert [(row.unit, row.is_met) for row in rows.rows] == [("ns", None), ("ns", None), ("x", True)]
    assert all(row.value > 0 for row in rows.rows)


def test_buffers_differ_from_place_to_place() -> None:
    one, other = Buffer(3 << 20), Buffer(3 << 20)
    one.fill_random()
    assert not one.equals(other)
    with memoryview(one._map) as data:
        assert data[: 1 << 20] != data[1 << 20 : 2 << 20]
    one.clear()
    other.clear()
    assert one.equals(other)
    one.close()
    other.close()


def test_too_little_memory_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cache, "available_memory_bytes", lambda: 1 << 20)
    result = CliRunner().invoke(bench, ["cache"])
    assert result.exit_code == 1
    assert "needs" in result.output
    assert "--quick" in result.output


@pytest.mark.parametrize(
    "arguments",
    [["--server", "nowhere"], ["--server", "h:0"], ["--server", ":1"], ["--server", "h:x"], ["--chunk-size", "128"]],
)
def test_wrong_options_are_refused(arguments: list[str]) -> None:
    assert CliRunner().invoke(bench, ["cache", *arguments]).exit_code == 2


def test_a_missed_target_fails_the_check_only(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = BenchResult([Row("r", 2, "x", "<= 1", False)], 2, "x86_64", "3.11", "0")
    monkeypatch.setattr("antiphon.cli.bench.run_cache_bench", lambda options, say: missed)
    assert CliRunner().invoke(bench, ["cache"]).exit_code == 0
    result = CliRunner().invoke(bench, ["cache", "--check"])
    assert result.exit_code == 1
    assert "1 targets missed" in result.output


@pytest.mark.parametrize(
    ("server_cpu_s", "share_us", "ratio", "is_met"),
    [(0.030, 100.0, 1.0, True), (0.040, 200.0, 1.5, True), (0.050, 300.0, 2.0, False), (0.015, -50.0, 0.25, False)],
)
def test_noise_does_not_flatter_the_share_beside_writers(
    server_cpu_s: float, share_us: float, ratio: float, is_met: bool
) -> None:
    """What is left for the lookups is shown as it is; where it is nothing or less, nothing was measured."""
    alone = _Lookups([0.001] * 100, client_cpu_s=0.01, server_cpu_s=0.01, num_writer_calls=0)
    beside = _Lookups([0.001] * 100, client_cpu_s=0.01, server_cpu_s=server_cpu_s, num_writer_calls=20)
    rows = Rows()
    _add_rows(rows, alone, beside, writer_call_s=0.001)
    found = {row.name: row for row in rows.rows}
    share = found["processor time of a lookup and its release, server, beside 3 writers"]
    assert share.value == pytest.approx(share_us)
    judged = found["processor time of a lookup beside 3 writers over alone"]
    assert judged.value == pytest.approx(ratio)
    assert judged.is_met is is_met
    assert ("noise" in judged.note) is (share_us <= 0)


# ---- against a server ------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_quick_run_measures_everything(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = CliRunner().invoke(bench, ["cache", "--quick", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = json.loads(path.read_text())
    values = {row["name"]: row["value"] for row in figures["rows"]}
    assert values["times that a token is hashed"] == 1
    assert values["lookups that hit right after a store"] == 100
    for name in ("copy, by chunk, 8 x 0.3 MB", "store, 8 x 0.3 MB", "retrieve, 8 x 0.3 MB", "empty call, p50"):
        assert values[name] > 0, name
    assert values["lookup of 8192 tokens, p50"] >= values["lookup of 8192 tokens, keys given, p50"] > 0
    assert values["processor time of a lookup beside 3 writers over alone"] > 0
    assert values["processor time of a lookup and its release, server, alone"] > 0
    for name in values:
        assert f"| {name} " in result.output
    assert "lookups beside them" in result.output  # progress


@pytest.mark.process
def test_a_running_server_can_be_measured() -> None:
    with OwnServer(0.1) as server:
        address = f"{server.host}:{server.port}"
        result = CliRunner().invoke(bench, ["cache", "--quick", "--server", address])
        assert result.exit_code == 0, result.output
        assert "server, alone" not in result.output  # another's processor time is not ours to read
        assert server.process.exit_code is None
        assert server.process.cpu_s() > 0
        # It leaves nothing behind: the arena has room for half of itself again.
        shape = Shape(8, 4_000_000)
        with attached(Target(server.host, server.port, 256), layout_of(shape), "after") as session:
            source = Buffer(shape.num_bytes)
            prompt = Prompt.new(8 * 256, 256)
            store(session, prompt, source.address, shape.chunk_bytes)
            with pytest.raises(CacheMiss, match="0 of 8"):
                retrieve(session, Prompt.new(8 * 256, 256), "r", source.address, shape.chunk_bytes)
            with pytest.raises(CacheError, match="0 of 8 chunks may be written: resident"):
                store(session, prompt, source.address, shape.chunk_bytes)
            source.close()


@pytest.mark.process
def test_a_server_that_cannot_start_says_why() -> None:
    with pytest.raises(StartError, match="ended with code"), OwnServer(16_000):
        pass


def test_no_server_is_said(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.bench.rig.CONNECT_TIMEOUT_S", 0.2)
    with (
        pytest.raises(CacheUnavailable, match="no session"),
        attached(Target("127.0.0.1", free_port, 256), layout_of(Shape(1, 4096)), "absent"),
    ):
        pass


def test_quick_is_smaller() -> None:
    assert CacheBenchOptions.quick().memory_bytes < CacheBenchOptions().memory_bytes
    assert CacheBenchOptions.quick(("h", 1), 128).server == ("h", 1)
