"""The bench of the tiers runs, compares like with like, and notices a tier that loses or changes what it stored.

Out of scope: how fast anything is.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from antiphon.bench import tiers
from antiphon.bench.tiers import TiersBenchOptions, run_tiers_bench
from antiphon.cli.main import main
from antiphon.config.tier_spec import TierSpec, parse_tier
from antiphon.core.errors import TierCorrupt, TierError
from antiphon.core.units import KIB, MIB
from antiphon.storage.memory_tier import MemoryTier


def options(*specs: TierSpec) -> TiersBenchOptions:
    return TiersBenchOptions(specs, chunk_bytes=256 * KIB, num_chunks=3, num_threads=2, num_rounds=2)


def test_a_disk_beside_plain_files(tmp_path: Path) -> None:
    said: list[str] = []
    spec = parse_tier(f"disk://{tmp_path}/kv?capacity_gb=0.1&timeout_s=30")
    result = run_tiers_bench(options(spec), said.append)
    names = [row.name for row in result.rows]
    assert names == [
        *("disk: store", "disk: store, plain calls", "disk: store, of plain calls"),
        *("disk: read", "disk: read, plain calls", "disk: read, of plain calls"),
    ]
    assert all(row.value > 0 for row in result.rows)
    assert said == ["disk: 3 chunks of 0.3 MB"]
    assert not (tmp_path / "kv.plain").exists()
    assert not [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and path.name != "antiphon-tier"]


def test_a_kind_without_plain_calls() -> None:
    result = run_tiers_bench(options(parse_tier("memory://?capacity_gb=0.1")), lambda line: None)
    assert [row.name for row in result.rows] == ["memory: store", "memory: read"]
    assert result.missed == []


def test_a_tier_that_loses_chunks_is_said() -> None:
    small = parse_tier("memory://?capacity_gb=0.0006")
    assert small.capacity_bytes < MIB
    with pytest.raises(TierError, match="large enough"):
        run_tiers_bench(options(small), lambda line: None)


def test_a_tier_that_damages_chunks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryTier("fake", MIB)
    store.faults.flip_bit = 80_000
    monkeypatch.setattr(tiers, "open_tier", lambda spec: store)
    with pytest.raises(TierCorrupt):
        run_tiers_bench(options(parse_tier("memory://?capacity_gb=0.1")), lambda line: None)


def test_the_verb_makes_a_disk_tier_and_removes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    done = CliRunner().invoke(main, ["bench", "tiers", "--quick"])
    assert done.exit_code == 0, done.output
    assert "disk: store, of plain calls" in done.output
    assert list(tmp_path.iterdir()) == []
    refused = CliRunner().invoke(main, ["bench", "tiers", "--l2", "nfs://x"])
    assert refused.exit_code == 2
    assert "nfs:// is no tier" in refused.output
