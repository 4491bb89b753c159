"""``scripts/compile.py``: what it compiles, its exit statuses, and what it leaves behind.

A tiny package is compiled for an environment of its own; that the router itself can be compiled, and works so, is what
the group ``compiled`` shows.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.house.scripts import load_script
from tests.house.tree import ROOT

script = load_script("compile")

GOOD = "def twice(number: int) -> int:\n    return 2 * number\n"
WRONG = "def twice(number: int) -> int:\n    return str(number)\n"
WARNED = "def three() -> int:\n    return 3\n\n\nclass Thing:\n    number: int = three()\n"
"""mypyc says that the compiled class lacks the attribute's default."""


class Project:
    """A package ``antiphon`` with one hot module, and an environment that is to have it compiled."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        self.environment = folder / "environment"
        self.environment.mkdir(parents=True)
        self.package = self.root / "src" / "antiphon"
        (self.package / "hot").mkdir(parents=True)
        for name, text in {"__init__.py": "", "hot/__init__.py": "", "hot/twice.py": GOOD, "cold.py": WRONG}.items():
            (self.package / name).write_text(text)
        self.list("hot/*.py")

    def list(self, *globs: str, interpreted: tuple[str, ...] = ()) -> None:
        """Declare what is compiled."""
        text = f"[tool.antiphon.compiled]\nmodules = {json.dumps(globs)}\ninterpreted = {json.dumps(interpreted)}\n"
        (self.root / "pyproject.toml").write_text(text)

    def write(self, text: str) -> None:
        """Another hot module."""
        (self.package / "hot" / "twice.py").write_text(text)

    def run(self, *flags: str) -> int:
        """The exit status of the script."""
        status: int = script.main(["--root", str(self.root), "--environment", str(self.environment), *flags])
        return status

    @property
    def left(self) -> set[str]:
        """What the environment holds."""
        return {path.name for path in self.environment.iterdir()}

    @property
    def compiled(self) -> Path:
        return self.environment / "antiphon-compiled"

    def state(self) -> dict[str, tuple[int, float]]:
        """Every file of the compiled form, with what shows that it was written again."""
        files = [path for path in self.compiled.rglob("*") if path.is_file()]
        return {str(path): (path.stat().st_ino, path.stat().st_mtime) for path in files}


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


# ---- the list --------------------------------------------------------------------------------------------------------


def test_the_list_is_that_of_pyproject(project: Project) -> None:
    (project.package / "hot" / "other.py").write_text(GOOD)
    assert script.listed(project.root) == ["antiphon/hot/other.py", "antiphon/hot/twice.py"]
    project.list("hot/*.py", "cold.py", interpreted=("hot/other.py",))
    assert script.listed(project.root) == ["antiphon/cold.py", "antiphon/hot/twice.py"]


def test_the_list_of_this_project_names_files_that_exist_and_are_hot() -> None:
    paths = script.listed(ROOT)
    assert {"antiphon/router/flight.py", "antiphon/routing/life.py", "antiphon/transport/http/server.py"} <= set(paths)
    assert all((ROOT / "src" / path).is_file() and not path.endswith("__init__.py") for path in paths)
    assert not [path for path in paths if path.startswith("antiphon/cli/")], "they choose the form"


def test_errors_count_in_what_is_compiled_alone() -> None:
    text = script.mypy_config(["antiphon/hot/twice.py", "antiphon/cold.py"])
    assert text.endswith("ignore_errors = true\n[mypy-antiphon.hot.twice,antiphon.cold]\nignore_errors = false\n")


def test_warnings_that_change_no_result_are_none() -> None:
    harmless = "a.py:3: note: Treating generator comprehension as list\n"
    fatal = "a.py:4: warning: Unsupported default attribute value\n"
    assert script.warnings_that_matter(harmless) == []
    assert script.warnings_that_matter("cc: a.c:4: warning: unused\n" + harmless + fatal) == [fatal.strip()]


# ---- what is missing -------------------------------------------------------------------------------------------------


def lose_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(script.sysconfig, "get_config_var", lambda name: "gcc -pthread")


def lose_headers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    monkeypatch.setattr(script.shutil, "which", lambda name: f"/bin/{name}")


def lose_mypyc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "missing", lambda: None)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("lose", "words", "is_seen_by_check"),
    [
        (lose_compiler, "apt-get install gcc", True),
        (lose_headers, "apt-get install python3", True),
        (lose_mypyc, "requirements/compile.lock", False),  # the install is about to bring it
    ],
)
def test_3_something_is_missing(
    lose: Callable[[pytest.MonkeyPatch], None],
    words: str,
    is_seen_by_check: bool,
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lose(monkeypatch)
    assert project.run() == 3
    assert words in capsys.readouterr().out
    assert project.run("--check") == (3 if is_seen_by_check else 4)
    assert project.left == set()


# ---- builds ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def needs_compiler() -> None:
    lack = script.missing() or (None if script.importlib.util.find_spec("mypyc") else "mypyc is not installed")
    if lack is not None:
        pytest.skip(f"needs what compiles: {lack}")


@pytest.mark.process
@pytest.mark.usefixtures("needs_compiler")
def test_0_it_is_compiled_and_then_current(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert project.run("--check") == 4
    assert project.left == set()
    assert project.run() == 0
    assert capsys.readouterr().out == "1 modules of the router are compiled\n"
    assert project.left == {"antiphon-compiled", "antiphon-compile.log"}
    suffixes = {path.relative_to(project.compiled).parts[0]: path.suffix for path in project.compiled.rglob("*.*")}
    assert suffixes.pop("manifest.json") == ".json"
    assert set(suffixes.values()) == {".so"}

    ask = f"import sys; sys.path.insert(0, {str(project.compiled)!r}); from antiphon.hot import twice as t; "
    command = [sys.executable, "-I", "-S", "-c", ask + "print(t.__file__, t.twice(21))"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.startswith(str(project.compiled / "antiphon" / "hot" / "twice."))
    assert done.stdout.endswith(".so 42\n")

    before = project.state()
    assert (project.run("--check"), project.run()) == (0, 0)
    assert capsys.readouterr().out == ""
    assert project.state() == before, "what is current is left alone"


@pytest.mark.process
@pytest.mark.usefixtures("needs_compiler")
def test_1_what_cannot_be_compiled_leaves_what_there_was(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    project.compiled.mkdir()
    (project.compiled / script.MANIFEST).write_text("{}")
    before = project.state()
    project.write(WRONG)
    assert project.run("--check") == 4
    assert project.run() == 1
    said = capsys.readouterr().out
    assert 'Incompatible return value type (got "str", expected "int")' in said
    assert str(project.environment / "antiphon-compile.log") in said
    assert project.state() == before
    assert project.left == {"antiphon-compiled", "antiphon-compile.log", "antiphon-compile-failed.json"}
    assert project.run("--check") == 1, "an install does not try again"
    project.write(GOOD)
    assert project.run("--check") == 4


def test_a_run_replaces_everything_that_others_left(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(place: object, paths: list[str], work: Path) -> None:
        (work / "antiphon" / "hot" / "twice.so").write_text("new")
        (work / "build" / "x").mkdir(parents=True)
        (work / "build" / "x" / "twice.so").write_text("of the C compiler")

    monkeypatch.setattr(script, "missing", lambda: None)
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: True)
    monkeypatch.setattr(script, "run_mypyc", make)
    (project.environment / "antiphon-compile-work-killed" / "antiphon").mkdir(parents=True)
    (project.environment / "antiphon-compile-failed.json").write_text("{}")
    (project.compiled / "antiphon" / "gone").mkdir(parents=True)
    (project.compiled / "antiphon" / "gone" / "old.so").write_text("old")
    assert project.run() == 0
    assert project.left == {"antiphon-compiled"}
    files = {str(path.relative_to(project.compiled)) for path in project.compiled.rglob("*") if path.is_file()}
    assert files == {"manifest.json", "antiphon/hot/twice.so"}


@pytest.mark.process
@pytest.mark.usefixtures("needs_compiler")
def test_1_a_warning_fails_the_build_and_leaves_nothing_half_built(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write(WARNED)
    assert project.run() == 1
    said = capsys.readouterr().out
    assert "mypyc warns, and what it made would differ from the source" in said
    assert "Unsupported default attribute value" in said
    assert project.left == {"antiphon-compile.log", "antiphon-compile-failed.json"}


@pytest.mark.process
def test_1_a_compiler_that_hangs_is_ended(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "missing", lambda: None)
    monkeypatch.setattr(script, "COMPILE_TIMEOUT_S", 0.05)
    assert project.run() == 1
    assert "it took longer than 0 s" in capsys.readouterr().out
    assert project.left == {"antiphon-compile.log", "antiphon-compile-failed.json"}


@pytest.mark.process
def test_two_runs_wait_for_each_other(project: Project) -> None:
    held = os.open(project.environment, os.O_RDONLY)
    try:
        script.fcntl.flock(held, script.fcntl.LOCK_EX)
        command = [sys.executable, str(ROOT / "scripts" / "compile.py")]
        command += ["--root", str(project.root), "--environment", str(project.environment)]
        with pytest.raises(subprocess.TimeoutExpired):
            subprocess.run(command, timeout=1.0, capture_output=True, check=False)
    finally:
        os.close(held)
    assert project.left == set()
