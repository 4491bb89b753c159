"""Compiles the router's hot modules with mypyc, for the environment whose Python runs this.

The modules are listed in ``pyproject.toml`` (``[tool.antiphon.compiled]``). The result is a folder in the environment;
``antiphon router`` uses it while it fits the source (``cli/compiled.py``). Needs a C compiler, Python's headers and
``requirements/compile.lock``, and says so where one is missing: the router then runs the same modules as Python, which
takes more CPU a request.

Exit status: 0, the modules are compiled; 1, the compiler failed (its output is in ``antiphon-compile.log`` of the
environment); 3, something that is needed is not here; 4 (``--check`` only), they are to be compiled.

Invariants: the folder is whole or absent; an interrupted run leaves what was there before, and a temporary folder at
most, which the next run removes; two runs at once wait for each other. What mypy sees is the source and nothing else
that is installed, so that it may run while pip installs.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from antiphon.cli.compiled import MANIFEST, digest_of, folder  # noqa: E402

OPTIONS = {"opt_level": "3", "debug_level": "0", "group_name": "antiphon_compiled", "multi_file": True}
"""One library of a C file each module: they are compiled at the same time. ``-O1`` takes two thirds of the time, and a
request then takes about a twentieth more."""

COMPILE_TIMEOUT_S = 1200.0
LOG_NAME = "antiphon-compile.log"
FAILED_NAME = "antiphon-compile-failed.json"
WORK_PREFIX = "antiphon-compile-work-"
SHOWN_LINES = 15

FAILED, MISSING, STALE = 1, 3, 4

_WARNING = re.compile(r"^\S+\.py:\d+: (?:warning|note): .*", re.MULTILINE)
HARMLESS = ("Treating generator comprehension as list",)
"""Warnings of mypyc that change no result. Any other ends the build, above all "Unsupported default attribute value":
the compiled class would lack the attribute."""


class BuildError(Exception):
    """Why there are no compiled modules, for people."""


@dataclass(frozen=True)
class Place:
    """What is compiled, and for whom.

    Args:
        root: the folder of ``pyproject.toml`` and ``src``.
        environment: the folder that gets the result.
    """

    root: Path = ROOT
    environment: Path = folder().parent

    @property
    def compiled(self) -> Path:
        """The folder of the compiled modules."""
        return self.environment / folder().name

    @property
    def log(self) -> Path:
        """What the compilers said last."""
        return self.environment / LOG_NAME

    @property
    def failed(self) -> Path:
        """The manifest of sources that could not be compiled."""
        return self.environment / FAILED_NAME


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


def manifest_of(paths: list[str], src: Path) -> dict[str, object]:
    """What the compiled modules are made from: their Python, how, and the digest of each source."""
    sources = {path: digest_of(src / path) for path in paths}
    return {"python": sys.implementation.cache_tag, "options": OPTIONS, "sources": sources}


def _says(path: Path, manifest: dict[str, object]) -> bool:
    try:
        return bool(json.loads(path.read_text()) == manifest)
    except (OSError, ValueError):
        return False


def is_current(place: Place, paths: list[str]) -> bool:
    """Whether the folder was made from these sources, in this way."""
    return _says(place.compiled / MANIFEST, manifest_of(paths, place.root / "src"))


def has_failed(place: Place, paths: list[str]) -> bool:
    """Whether these sources were tried, and could not be compiled."""
    return _says(place.failed, manifest_of(paths, place.root / "src"))


@contextlib.contextmanager
def only_one(environment: Path) -> Iterator[None]:
    """Waits for another run on the same environment."""
    descriptor = os.open(environment, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def die_with_parent() -> None:
    """Runs in the child: the kernel ends it when this script ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def mypy_config(paths: list[str]) -> str:
    """Errors count in the modules to compile; every package but the standard library and this one is unknown."""
    names = ",".join(path.removesuffix(".py").replace("/", ".") for path in paths)
    version = "{}.{}".format(*sys.version_info[:2])
    return (
        f"[mypy]\npython_version = {version}\nno_site_packages = true\nignore_missing_imports = true\n"
        f"ignore_errors = true\n[mypy-{names}]\nignore_errors = false\n"
    )


def build(place: Place, paths: list[str]) -> None:
    """Compile, and put the result in place.

    Raises:
        BuildError: mypyc or the C compiler failed, took too long or gave a warning that matters.
    """
    for left in place.environment.glob(f"{WORK_PREFIX}*"):  # of a run that was killed: no other runs
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=place.environment) as name:
        work = Path(name)
        shutil.copytree(
            place.root / "src" / "antiphon", work / "antiphon", ignore=shutil.ignore_patterns("__pycache__")
        )
        manifest = manifest_of(paths, work)
        try:
            run_mypyc(place, paths, work)
        except BuildError:
            place.failed.write_text(json.dumps(manifest))
            raise
        done = collect(work)
        (done / MANIFEST).write_text(json.dumps(manifest, indent=1))
        if place.compiled.exists():
            place.compiled.rename(work / "replaced")
        done.rename(place.compiled)
        place.failed.unlink(missing_ok=True)


def run_mypyc(place: Place, paths: list[str], work: Path) -> None:
    """Leave the extension modules beside the sources in ``work``.

    Raises:
        BuildError: as ``build``.
    """
    (work / "mypy.ini").write_text(mypy_config(paths))
    # -P: no file of scripts/ stands in for a module of the same name.
    command = [sys.executable, "-P", str(Path(__file__).resolve()), "--root", str(place.root), "--in-folder", str(work)]
    try:
        with place.log.open("w") as log:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=work,
                check=False,
                timeout=COMPILE_TIMEOUT_S,
                preexec_fn=die_with_parent,
            )
    except subprocess.TimeoutExpired:
        raise BuildError(f"it took longer than {COMPILE_TIMEOUT_S:.0f} s") from None
    output = place.log.read_text(errors="replace")
    if done.returncode != 0:
        raise BuildError("\n".join(output.splitlines()[-SHOWN_LINES:]))
    if found := warnings_that_matter(output):
        raise BuildError("mypyc warns, and what it made would differ from the source:\n" + "\n".join(found))


def warnings_that_matter(output: str) -> list[str]:
    """The lines of mypyc's output that say that the compiled form differs from the source."""
    return [line for line in _WARNING.findall(output) if not any(text in line for text in HARMLESS)]


def collect(work: Path) -> Path:
    """Moves the extension modules into a folder of their own, and returns it."""
    done = work / "done"
    for library in list(work.glob("**/*.so")):
        if "build" not in library.relative_to(work).parts:
            target = done / library.relative_to(work)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(library, target)
    return done


def compile_here(paths: list[str], num_jobs: int) -> None:
    """Runs mypyc in the current folder, which holds a copy of the sources: in a process of its own."""
    from concurrent.futures import ThreadPoolExecutor

    from mypyc.build import mypycify
    from setuptools import setup
    from setuptools.command.build_ext import build_ext

    class ParallelBuild(build_ext):
        """Compiles the C files of one extension at the same time, which setuptools does one after the other."""

        def build_extensions(self) -> None:
            compiler = self.compiler
            compile_in_turn = compiler.compile
            with ThreadPoolExecutor(num_jobs) as pool:

                def compile_all(sources: list[str], **options: object) -> list[str]:
                    largest_first = sorted(sources, key=os.path.getsize, reverse=True)
                    jobs = [pool.submit(compile_in_turn, [source], **options) for source in largest_first]
                    return [name for job in jobs for name in job.result()]

                compiler.compile = compile_all
                super().build_extensions()

    extensions = mypycify(["--config-file", "mypy.ini", *paths], **OPTIONS)
    setup(
        name="antiphon-compiled",
        ext_modules=extensions,
        cmdclass={"build_ext": ParallelBuild},
        script_args=["-q", "build_ext", "--inplace", "--parallel", str(num_jobs)],
    )


def check(place: Place, paths: list[str]) -> int:
    """Whether there is something to do, and the reason where nothing can be done."""
    if is_current(place, paths):
        return 0
    lack = missing()
    if lack is not None:
        print(f"the router is not compiled, and takes about twice the CPU a request: {lack}")
        return MISSING
    if has_failed(place, paths):
        print(f"the router could not be compiled and runs as Python: {place.log}")
        return FAILED
    return STALE


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Compile the router's hot modules.")
    parser.add_argument("--check", action="store_true", help="only say whether there is something to compile")
    parser.add_argument("--root", type=Path, default=Place.root, help="folder of pyproject.toml and src [this one's]")
    parser.add_argument(
        "--environment", type=Path, default=Place.environment, help="folder that gets the result [of this Python]"
    )
    parser.add_argument("--in-folder", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    place = Place(options.root.resolve(), options.environment.resolve())
    paths = listed(place.root)
    if options.in_folder:
        compile_here(paths, len(os.sched_getaffinity(0)))
        return 0
    if options.check:
        return check(place, paths)
    with only_one(place.environment):
        if is_current(place, paths):
            return 0
        if missing() is not None:
            return check(place, paths)
        if importlib.util.find_spec("mypyc") is None:
            print("the router is not compiled: requirements/compile.lock is not installed (make install does)")
            return MISSING
        try:
            build(place, paths)
        except BuildError as error:
            print(f"{error}\nthe router could not be compiled and runs as Python: {place.log}")
            return FAILED
    print(f"{len(paths)} modules of the router are compiled", flush=True)
    return 0


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
