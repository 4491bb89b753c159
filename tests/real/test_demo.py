"""``antiphon demo`` itself: what a newcomer types first must work, say what it does, and leave nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from antiphon.engine import demo_model

DEMO_TIMEOUT_S = 600


@pytest.mark.real_engine
@pytest.mark.timeout(DEMO_TIMEOUT_S + 30)
def test_demo_answers_shows_reuse_and_leaves_nothing(
    tmp_path: Path, model: Path, die_with_parent: Callable[[], None]
) -> None:
    assert model.parent == demo_model.cache_folder()
    env = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "antiphon", "demo"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
        env=env,
        preexec_fn=die_with_parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = done.stdout
    assert len(re.findall(r"^Question \d", text, re.MULTILINE)) == 3
    assert len(re.findall(r"receipt  path pd \(default\), prefill on [\d.:]+, decode on [\d.:]+", text)) == 5
    assert "Spain" in text
    assert re.search(r"ok +routing: 5 of 5", text)
    assert re.search(r"ok +NIXL: 6 transfers on the decode engine for 6 requests", text)
    assert re.search(r"ok +offload: total_object_count of cache-prefill went from 0 to 4 chunks", text)
    assert re.search(r"ok +external prefix cache hit rate: \d+% of the tokens that prefill-0 lacked: 1024 of", text)
    assert re.search(r"ok +same answers: 5 of 5", text)
    sources = re.findall(r"(\d+) prompt tokens: (\d+) from the cache server, (\d+) computed", text)
    first, again = ([int(number) for number in found] for found in sources[-2:])
    assert first == [again[0], 0, again[0]]
    assert again[1:] == [1024, again[0] - 1024]
    found = re.search(r"First answer (\d+) s after", text)
    assert found is not None
    assert int(found.group(1)) <= 300
    assert "everything is stopped" in text
    spec = tmp_path / "antiphon" / "demo" / "antiphon.yaml"
    check = subprocess.run(
        [sys.executable, "-m", "antiphon", "config", "check", "--config", str(spec)],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    assert check.returncode == 0, check.stdout + check.stderr
