"""The eviction measurement: its replay counts right, and its own policies keep their books."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.core.chunks import ChunkKey
from tests.house.scripts import load_script
from tests.house.tree import ROOT

measure = load_script("measure_eviction")
POLICIES = ["lru", "arc", "slru", "s3fifo"]


def request(text: str, num_tokens: int | None = None) -> tuple[tuple[ChunkKey, ...], int]:
    keys = tuple(ChunkKey(letter.encode() * 32) for letter in text)
    return keys, len(text) * measure.BLOCK_TOKENS if num_tokens is None else num_tokens


@pytest.mark.parametrize("policy", POLICIES)
def test_hits_are_weighted_by_tokens(policy: str) -> None:
    cache = measure.new_cache(policy, 100)
    rate = measure.replay(cache, [request("ab"), request("abcd"), request("x", num_tokens=1024)])
    assert rate == 2 * 512 / (2 * 512 + 4 * 512 + 1024)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_keep_their_books_in_a_small_cache(policy: str) -> None:
    cache = measure.new_cache(policy, 5)
    letters = "abcdefghijklmnop"
    for number in range(200):
        prompt = "".join(letters[(number * step) % 16] + letters[step] for step in (1, 3, 7))
        assert 0.0 <= measure.replay(cache, [request("".join(dict.fromkeys(prompt[: 1 + number % 6])))]) <= 1.0
        cache.validate()
    assert cache.statistics().counters.num_evicted > 100


def test_scans_come_between_and_do_not_count() -> None:
    requests = list(measure.with_scans([request("a")] * 4, every=2, num_blocks=3))
    assert [num_tokens for _, num_tokens in requests] == [512, 512, 0, 512, 512, 0]
    scans = [keys for keys, num_tokens in requests if num_tokens == 0]
    assert len(set(scans[0]) | set(scans[1])) == 6


def test_command_prints_a_table(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    items = [{"timestamp": 0, "input_length": 1100, "output_length": 1, "hash_ids": [0, 1, 2]}] * 2
    trace.write_text("".join(json.dumps(item) + "\n" for item in items))
    command = [sys.executable, str(ROOT / "scripts" / "measure_eviction.py"), str(trace), "--shares", "1"]
    done = subprocess.run(command, capture_output=True, check=True, text=True, timeout=60)
    assert "trace.jsonl: 2 requests, 2 different full blocks" in done.stdout
    assert f"| 2 | 100.0% | {' | '.join(['46.55%'] * 4)} |" in done.stdout
