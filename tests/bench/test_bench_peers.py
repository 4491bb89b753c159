"""The bench of peers runs, and its figures are those that it promises."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
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


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="needs nixl")
def test_nixl_writes_nothing_between_the_figures() -> None:
    program = (
        "from antiphon.bench.peers_raw import new_agent\nfrom antiphon.bench.rig import Buffer\n"
        "agent = new_agent(Buffer(65536))\nprint('made', bool(agent.get_agent_metadata()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "made True\n"), done.stderr
