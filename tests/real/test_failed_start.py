"""A real engine that cannot start: the reason is found in vLLM's log and shown at once, and nothing is left running."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real.deployment import Deployment


@pytest.mark.real_engine
@pytest.mark.timeout(400)
def test_too_little_kv_memory_is_said_with_its_remedy(
    tmp_path: Path, model: Path, free_ports: Callable[[int], list[int]], die_with_parent: Callable[[], None]
) -> None:
    deployment = Deployment(tmp_path, model, free_ports(Deployment.NUM_PORTS), die_with_parent)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "antiphon", "up", "--config", str(deployment.spec_path), "--quiet-logs"),
            *("--only", "prefill", "--set", "engine.kv_memory_bytes=12MB"),
        ],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
        preexec_fn=die_with_parent,
    )
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "prefill-0 failed" in text
    assert "To serve at least one request with the model's max seq len (4096)" in text
    assert "fix: give the pool more KV memory" in text
    assert "everything is stopped" in text
    assert "Traceback" not in text
