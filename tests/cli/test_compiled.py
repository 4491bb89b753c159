"""When the compiled form of the router's modules is used, and why not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from antiphon.cli import compiled

SOURCE = "antiphon/routing/budget.py"
ASK = """
import sys
from antiphon.cli import compiled
from pathlib import Path
{before}
print(compiled._use(Path(sys.argv[1])))
from antiphon.routing import budget
print(budget.__file__)
"""


def made(folder: Path, **changes: object) -> Path:
    """A folder as ``scripts/compile.py`` makes it, with a Python module in the place of an extension."""
    digest = compiled.digest_of(compiled.source_root() / SOURCE)
    manifest: dict[str, object] = {"python": sys.implementation.cache_tag, "sources": {SOURCE: digest}}
    module = folder / SOURCE
    module.parent.mkdir(parents=True)
    module.write_text("")
    (folder / compiled.MANIFEST).write_text(json.dumps(manifest | changes))
    return folder


def ask(folder: Path, before: str = "") -> tuple[str, str]:
    """The reason, and which file was imported, in a process of its own."""
    command = [sys.executable, "-c", ASK.format(before=before), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    reason, file = done.stdout.splitlines()
    return reason, file


@pytest.mark.process
def test_modules_of_this_source_are_used(tmp_path: Path) -> None:
    reason, file = ask(made(tmp_path / "c"))
    assert reason == "None"
    assert Path(file) == tmp_path / "c" / SOURCE


@pytest.mark.process
def test_a_source_that_has_changed_runs_as_python(tmp_path: Path) -> None:
    reason, file = ask(made(tmp_path / "c", sources={SOURCE: "0" * 64}))
    assert reason == f"{SOURCE} has changed since it was compiled: run scripts/compile.py"
    assert Path(file) == compiled.source_root() / SOURCE


@pytest.mark.process
def test_modules_that_are_imported_already_stay_as_they_are(tmp_path: Path) -> None:
    reason, file = ask(made(tmp_path / "c"), before="from antiphon.routing import budget")
    assert reason == "antiphon.routing.budget was imported before its compiled form could be used"
    assert Path(file) == compiled.source_root() / SOURCE


def test_without_a_folder_it_is_python(tmp_path: Path) -> None:
    assert compiled._use(tmp_path) == "there are no compiled modules: scripts/compile.py makes them"


def test_modules_of_another_python_are_not_used(tmp_path: Path) -> None:
    assert compiled._use(made(tmp_path / "c", python="cpython-10")) == (
        "the compiled modules are for cpython-10: run scripts/compile.py"
    )


def test_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "folder", lambda: tmp_path)
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert compiled.use_compiled() == "ANTIPHON_COMPILED is 0"
    monkeypatch.setenv(compiled.SWITCH, "1")
    with pytest.raises(RuntimeError, match="ANTIPHON_COMPILED is 1, but there are no compiled modules"):
        compiled.use_compiled()
