"""Compiles the router's hot modules with mypyc, for the environment whose Python runs this.

The modules are listed in ``pyproject.toml`` (``[tool.antiphon.compiled]``). The result is a folder in the environment;
``antiphon router`` uses it while it fits the source (``cli/compiled.py``). Needs a C compiler and Python's headers,
and says so where they are missing: the router then runs the same modules as Python, which takes more CPU a request.

Invariant: the folder is whole or absent; an interrupted run leaves what was there before.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from antiphon.cli.compiled import MANIFEST, digest_of, folder  # noqa: E402

OPTIONS = {"opt_level": "2", "debug_level": "0", "group_name": "antiphon_compiled"}
COMPILE_TIMEOUT_S = 1200.0

_SETUP = """
from mypyc.build import mypycify
from setuptools import setup

setup(
    name="antiphon-compiled",
    ext_modules=mypycify(["--config-file", {config!r}, *{paths!r}], **{options!r}),
    script_args=["build_ext", "--inplace", "--parallel", "2"],
)
"""


def listed(root: Path) -> list[str]:
    """The sources to compile, relative to ``src``."""
    with (root / "pyproject.toml").open("rb") as file:
        globs = tomllib.load(file)["tool"]["antiphon"]["compiled"]
    src = root / "src" / "antiphon"
    paths = {path for pattern in globs["modules"] for path in src.glob(pattern) if path.name != "__init__.py"}
    left_out = {src / path for path in globs["interpreted"]}
    return sorted(str(path.relative_to(root / "src")) for path in paths - left_out)


def missing() -> str | None:
    """What is needed and not here."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return f"there is no C compiler ({compiler}; on Debian or Ubuntu: apt-get install gcc)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        version = "{}.{}".format(*sys.version_info[:2])
        return f"Python's headers are not here (on Debian or Ubuntu: apt-get install python{version}-dev)"
    return None


def is_current(paths: list[str]) -> bool:
    """Whether the folder was made from these sources."""
    try:
        manifest = json.loads((folder() / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return bool(manifest == _manifest(paths))


def _manifest(paths: list[str]) -> dict[str, object]:
    sources = {path: digest_of(ROOT / "src" / path) for path in paths}
    return {"python": sys.implementation.cache_tag, "sources": sources}


def build(paths: list[str]) -> None:
    """Compile, and put the result in place.

    Raises:
        subprocess.SubprocessError: the compiler failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="antiphon-compile-", dir=folder().parent) as name:
        work = Path(name)
        shutil.copytree(ROOT / "src" / "antiphon", work / "antiphon", ignore=shutil.ignore_patterns("__pycache__"))
        manifest = _manifest(paths)
        script = _SETUP.format(paths=paths, options=OPTIONS, config=str(ROOT / "pyproject.toml"))
        command = [sys.executable, "-c", script]
        subprocess.run(command, cwd=work, check=True, timeout=COMPILE_TIMEOUT_S, capture_output=True, text=True)
        done = work / "done"
        for library in list(work.glob("**/*.so")):
            if "build" not in library.relative_to(work).parts:
                target = done / library.relative_to(work)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(library, target)
        (done / MANIFEST).write_text(json.dumps(manifest, indent=1))
        shutil.rmtree(folder(), ignore_errors=True)
        done.rename(folder())


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the router's hot modules.")
    parser.add_argument("--if-possible", action="store_true", help="exit with 0 where a compiler is missing")
    options = parser.parse_args()
    paths = listed(ROOT)
    if is_current(paths):
        return 0
    lack = missing()
    if lack is not None:
        print(f"the router is not compiled, and takes about a third more CPU a request: {lack}")
        return 0 if options.if_possible else 1
    try:
        build(paths)
    except subprocess.CalledProcessError as error:
        print(f"{error.stdout}{error.stderr}\nthe router could not be compiled", file=sys.stderr)
        return 1
    print(f"{len(paths)} modules of the router are compiled", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
