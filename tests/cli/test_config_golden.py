"""Specs and what ``antiphon config check`` says about each, word for word.

In scope: every problem is found, in one run, and names the field and the remedy; nothing takes longer than two seconds.
A golden file's first line may state facts about the host. ``ANTIPHON_REWRITE_GOLDEN=1`` writes the expected texts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from antiphon.cli.main import main
from antiphon.config.compile import Compiled
from antiphon.config.facts import HostFacts, InterpreterFacts, interpreter_key
from antiphon.config.model_facts import ModelFacts
from antiphon.config.problems import Problem
from tests.config.facts_for_tests import GOOD_INTERPRETER, LAPTOP, facts_of

FOLDER = Path(__file__).parents[1] / "config" / "golden"
CASES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
LIMIT_S = 2.0
REAL = [
    name for name in CASES if not name.startswith("good") and "# facts:" not in (FOLDER / f"{name}.yaml").read_text()
]


def stated_facts(name: str) -> Callable[[Compiled], HostFacts]:
    """A stand-in for ``gather_facts`` that states what the first line of the golden file states."""
    first = (FOLDER / f"{name}.yaml").read_text().splitlines()[0]
    stated: dict[str, Any] = json.loads(first.removeprefix("# facts:")) if first.startswith("# facts:") else {}

    def gather(compiled: Compiled) -> HostFacts:
        changes = dict(stated)
        if "model" in changes:
            changes["model"] = ModelFacts(**changes["model"])
        if "ports_in_use" in changes:
            changes["ports_in_use"] = frozenset(changes["ports_in_use"])
        if "key_file_problems" in changes:
            changes["key_file_problems"] = tuple(Problem(*each) for each in changes["key_file_problems"])
        interpreters = changes.get("interpreters", {})
        missing = {"/no/such/python": {"error": "No such file or directory"}}
        changes["interpreters"] = {
            key: InterpreterFacts(**found) if (found := {**missing, **interpreters}.get(key[0])) else GOOD_INTERPRETER
            for key in map(interpreter_key, compiled.engines)
        }
        return facts_of(compiled, **changes)

    return gather


@pytest.mark.parametrize("name", CASES)
def test_check_says_exactly(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(FOLDER)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("antiphon.config.compile.this_machine", lambda: LAPTOP)
    monkeypatch.setattr("antiphon.cli.config.gather_facts", stated_facts(name))
    result = CliRunner().invoke(main, ["config", "check", "--config", f"{name}.yaml"])
    expected = FOLDER / f"{name}.expected"
    if os.environ.get("ANTIPHON_REWRITE_GOLDEN"):
        expected.write_text(result.output)
    assert result.output == expected.read_text()
    assert result.exit_code == (0 if name.startswith("good") else 2), result.output


def test_enough_wrong_specs_and_each_names_field_and_remedy() -> None:
    texts = {name: (FOLDER / f"{name}.expected").read_text() for name in CASES if not name.startswith("good")}
    assert len(texts) >= 20
    for name, text in texts.items():
        lines = [line for line in text.splitlines() if not line.startswith("notice: ")][:-1]
        assert lines, name
        for problem, fix in zip(lines[::2], lines[1::2], strict=True):
            assert ": " in problem, (name, problem)
            assert fix.startswith("  fix: "), (name, fix)
            assert len(fix) > 12, (name, fix)


@pytest.mark.process
@pytest.mark.parametrize("name", REAL)
def test_real_command_refuses_in_two_seconds(name: str, die_with_parent: Callable[[], None]) -> None:
    """The real command, with the real facts of this host, which may add problems but not hide those of the spec."""
    command = [sys.executable, "-m", "antiphon", "config", "check", "--config", f"{name}.yaml"]
    took_s = []
    # The machine is shared: a slow run of three says nothing, three slow runs do.
    for _ in range(3):
        started_s = time.monotonic()
        done = subprocess.run(
            command, cwd=FOLDER, capture_output=True, text=True, timeout=60, preexec_fn=die_with_parent, check=False
        )
        took_s.append(time.monotonic() - started_s)
        if took_s[-1] < LIMIT_S:
            break
    assert done.returncode == 2, done.stdout + done.stderr
    wanted = [line for line in (FOLDER / f"{name}.expected").read_text().splitlines() if line.startswith("  fix: ")]
    if name != "devices":  # names GPUs, of which this host may have none
        assert set(wanted) <= set(done.stdout.splitlines()), done.stdout
    assert min(took_s) < LIMIT_S, took_s
