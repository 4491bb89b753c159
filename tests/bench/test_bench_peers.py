"""The bench of peers runs, and its figures are those that it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from antiphon.bench.peers import PeersBenchOptions, run_peers_bench


@pytest.mark.process
def test_a_quick_run_over_tcp() -> None:
    said: list[str] = []
    result = run_peers_bench(replace(PeersBenchOptions.quick(), transports=("tcp",)), said.append)
    assert [row.name for row in result.rows] == ["pull, 8 x 0.3 MB, tcp", "pull just stored, 8 x 0.3 MB, tcp"]
    assert all(row.value > 0 for row in result.rows)
    assert len([line for line in said if "round" in line]) == 2
