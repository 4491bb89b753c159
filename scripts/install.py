"""Makes the virtual environment ``.venv`` and brings it to the versions in the lock files. Standard library only.

Owns ``.venv``. It is built from ``requirements/cpu.lock`` (what serving on a CPU needs), with ``--with NAME`` from the
lock of that part (``ray``, ``tiers``), and with ``--dev`` from all of them and ``requirements/dev.lock`` (what the
tests need); Antiphon itself is installed from this folder, editable. Where there is a C compiler,
``requirements/compile.lock`` comes first and ``scripts/compile.py`` runs while pip fetches the rest; no install fails
because of it.

Invariants: a lock file is installed again only when its text changed; an interrupted install is finished by running it
again; two runs at once wait for each other. A package that a lock file no longer names stays installed. It does not
write outside the repository and needs no root.

It runs under any Python 3 to be able to say what is wrong with it; the environment needs Python 3.11 or newer.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PYTHON_MIN = (3, 11)
PYTHON_TESTED = (3, 11)
DISK_FREE_MIN_BYTES = 3_500_000_000  # the environment is 2.6 GB and pip unpacks the largest wheels beside it
INSTALL_TIMEOUT_S = 3600.0  # 3 GB over a slow line; pip's own time limits end a dead connection long before
LOCK_TIMEOUT_S = 3600.0  # another run of this script at work: as long as an install may take
COMPILE_WANTED = 4  # exit status of scripts/compile.py --check
POLL_S = 0.25
COMPILE_NICE = 19  # pip goes first where they share a processor
COMPILE_END_TIMEOUT_S = 10.0  # to remove its temporary folder when it is told to stop
QUIET_LINE_EVERY_S = 5.0  # how often progress is printed where the output is a file, not a terminal
PIP_TAIL_LINES = 15


class InstallError(Exception):
    """What stops the install, in words for the person who typed ``make``."""


# ---- what is to be installed -----------------------------------------------------------------------------------------


def canonical(name: str) -> str:
    """A distribution name in the one form in which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_lock(path: Path) -> dict[str, str]:
    """The pins of a lock file: canonical name -> version.

    Raises:
        InstallError: a line is not ``name==version``.
    """
    pins: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        name, separator, version = text.partition("==")
        if not separator or not version:
            raise InstallError(f"{path.name}:{number}: expected name==version, found {text!r}")
        pins[canonical(name)] = version
    return pins


def digest(*paths: Path) -> str:
    """One digest over the text of some files."""
    state = hashlib.sha256()
    for path in paths:
        state.update(path.read_bytes())
        state.update(b"\0")
    return state.hexdigest()[:16]


# ---- the machine -----------------------------------------------------------------------------------------------------


def choose_python() -> str:
    """The interpreter that the environment is made with: this one, or a python3.11 on the path where this is another.

    Raises:
        InstallError: no Python 3.11 or newer, or one without venv and ensurepip.
    """
    python = sys.executable
    version = sys.version_info[:2]
    if version != PYTHON_TESTED:
        found = shutil.which("python{}.{}".format(*PYTHON_TESTED))
        if found:
            python, version = found, PYTHON_TESTED
    if version < PYTHON_MIN:
        raise InstallError(
            "Python {}.{} or newer is needed; `{}` is {}.{}.\n".format(*PYTHON_MIN, sys.executable, *version)
            + "On Debian 12 or newer: apt-get install python3 python3-venv\n"
            "If another interpreter is installed, name it: make demo PYTHON=/path/to/python3.11"
        )
    probe = subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, text=True, check=False)
    if probe.returncode != 0:
        raise InstallError(
            f"{python} has no venv or no ensurepip module (Debian ships them apart).\n"
            + "On Debian or Ubuntu: apt-get install python{}.{}-venv".format(*version)
        )
    if version != PYTHON_TESTED:
        print("note: the lock is tested with Python {}.{}, this is {}.{}".format(*PYTHON_TESTED, *version))
    return python


def check_machine(root: Path) -> None:
    """Refuses a machine on which vLLM's CPU build cannot run, before anything is downloaded.

    Raises:
        InstallError: wrong system, a processor without AVX2, or too little disk.
    """
    if platform.system() != "Linux":
        raise InstallError(f"Linux is needed (NIXL and vLLM's CPU build); this is {platform.system()}")
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() == "x86_64" and cpuinfo.exists() and " avx2 " not in cpuinfo.read_text().replace("\n", " "):
        raise InstallError("this processor has no AVX2, which vLLM's CPU build needs")
    free = shutil.disk_usage(root).free
    if free < DISK_FREE_MIN_BYTES:
        raise InstallError(
            f"{free / 1e9:.1f} GB are free in {root}; the environment needs {DISK_FREE_MIN_BYTES / 1e9:.1f} GB"
        )


# ---- progress --------------------------------------------------------------------------------------------------------


class Progress:
    """One line that is rewritten on a terminal, and a line every few seconds elsewhere."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.is_terminal = is_terminal
        self._last_text = ""
        self._last_printed_s = float("-inf")

    def show(self, text: str) -> None:
        if text == self._last_text:
            return
        self._last_text = text
        if self.is_terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write("\r\033[K" + text[:width])
            sys.stdout.flush()
            return
        if time.monotonic() - self._last_printed_s >= QUIET_LINE_EVERY_S:
            self._last_printed_s = time.monotonic()
            print(text, flush=True)

    def close(self) -> None:
        if self.is_terminal and self._last_text:
            sys.stdout.write("\r\033[K")
            sys.stdout.flush()


class PipReader:
    """Turns pip's output into ``fetching 57/139  numpy 2.3.5``. Fed by the line; holds the last ones for a failure."""

    _ITEM = re.compile(r"^(?:Collecting ([A-Za-z0-9._-]+)|Processing \S*?/([^/\s]+)-[^-/\s]+(?:-[^-/\s]+){3,4}\.whl)")
    _SATISFIED = re.compile(r"^Requirement already satisfied: ([A-Za-z0-9._-]+)")
    _SIZE = re.compile(r"^\s+Downloading (\S+) \(([\d.]+ [kMG]?B)\)")

    def __init__(self, pins: dict[str, str]) -> None:
        self.pins = pins
        self.num_seen = 0
        self.is_installing = False
        self.tail: list[str] = []
        self._current = ""

    def feed(self, line: str) -> str | None:
        """The text to show for one line of output, or None where it says nothing new."""
        line = line.rstrip()
        if line and not line.startswith("WARNING: Location"):
            self.tail = [*self.tail[1 - PIP_TAIL_LINES :], line]
        item = self._ITEM.match(line) or self._SATISFIED.match(line)
        if item:
            name = canonical(next(group for group in item.groups() if group))
            self.num_seen += 1
            self._current = f"fetching {self.num_seen}/{len(self.pins)}  {name} {self.pins.get(name, '')}".rstrip()
            return self._current
        size = self._SIZE.match(line)
        if size and self._current:
            return f"{self._current}  ({size.group(2)})"
        if line.startswith("Installing collected packages"):
            self.is_installing = True
        return None


def installed(site: Path) -> set[str]:
    """Canonical names of the distributions that are installed whole."""
    names = set()
    for info in site.glob("*.dist-info"):
        # pip writes INSTALLER after the files of a distribution, so a folder without it is half an install.
        if (info / "INSTALLER").exists():
            names.add(canonical(info.name.split("-", 1)[0]))
    return names


def remove_half_installed(site: Path) -> list[str]:
    """Removes the records of distributions whose install was interrupted, so that pip installs them again."""
    removed = []
    for info in site.glob("*.dist-info"):
        if not (info / "INSTALLER").exists():
            shutil.rmtree(info)
            removed.append(info.name)
    return removed


def die_with_parent() -> None:
    """Runs in the child: the kernel ends it when this script ends, however that happens."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def in_the_background() -> None:
    """Runs in the child: as ``die_with_parent``, in a way that lets it clean up, and at a low priority."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)
    os.nice(COMPILE_NICE)


# ---- the environment -------------------------------------------------------------------------------------------------


class Environment:
    """The virtual environment and its stamp (which lock texts it holds)."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = root
        self.folder = folder
        self.python = folder / "bin" / "python"
        self.stamp_path = folder / "antiphon-install.json"
        self.log_path = folder / "antiphon-install.log"

    def stamp(self) -> dict[str, str]:
        """What the folder holds, by our own record; empty where there is none."""
        try:
            stamp = json.loads(self.stamp_path.read_text())
        except (OSError, ValueError):
            return {}
        return stamp if isinstance(stamp, dict) else {}

    def record(self, **entries: str) -> None:
        text = json.dumps({**self.stamp(), **entries}, indent=1)
        partial = self.stamp_path.with_suffix(".part")
        partial.write_text(text)
        partial.replace(self.stamp_path)

    def site(self) -> Path:
        found = sorted(self.folder.glob("lib/python3*/site-packages"))
        if not found:
            raise InstallError(f"{self.folder} is not a virtual environment: remove it and try again")
        return found[0]

    def create(self) -> None:
        """Makes the environment. One of ours that was moved, or whose interpreter is gone, is made anew.

        Raises:
            InstallError: the folder is someone else's, or the environment could not be made.
        """
        stamp = self.stamp()
        if stamp.get("created") == str(self.folder) and self.python.exists():
            return
        if not stamp and self.folder.exists() and any(self.folder.iterdir()):
            raise InstallError(f"{self.folder} was not made by this script: move it away and try again")
        python = choose_python()
        check_machine(self.root)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folder.mkdir()
        self.record(created="")  # from here on the folder is ours, however far the next step comes
        print(f"creating {self.folder.name} with {python}", flush=True)
        made = subprocess.run([python, "-m", "venv", str(self.folder)], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            raise InstallError("could not create the environment:\n" + (made.stdout + made.stderr).strip())
        self.record(created=str(self.folder))

    def pip(self, arguments: list[str], pins: dict[str, str], *, with_dependencies: bool = False) -> None:
        """Runs pip with progress.

        Raises:
            InstallError: pip failed or passed its time limit; holds its last lines.
        """
        command = [str(self.python), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
        command += ["--progress-bar", "off", *([] if with_dependencies else ["--no-deps"]), *arguments]
        reader, progress = PipReader(pins), Progress(is_terminal=sys.stdout.isatty())
        deadline_s = time.monotonic() + INSTALL_TIMEOUT_S
        with self.log_path.open("w", buffering=1) as log, self.log_path.open() as lines:
            # A session of its own, so that pip and its children end together on Ctrl-C or at the deadline.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.root,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            try:
                self._follow(process, lines, reader, progress, deadline_s)
            finally:
                progress.close()
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if process.returncode != 0:
            raise InstallError(explain_pip_failure(reader.tail, self.log_path))

    def _follow(
        self,
        process: subprocess.Popen[bytes],
        lines: IO[str],
        reader: PipReader,
        progress: Progress,
        deadline_s: float,
    ) -> None:
        seen = installed(self.site())
        while True:
            has_ended = process.poll() is not None
            for line in lines:
                text = reader.feed(line)
                if text:
                    progress.show(text)
            if reader.is_installing:
                here = installed(self.site())
                for name in sorted((here - seen) & set(reader.pins))[-1:]:
                    num_here = len(here & set(reader.pins))
                    progress.show(f"installing {num_here}/{len(reader.pins)}  {name} {reader.pins[name]}")
                seen = here
            if has_ended:
                return
            if time.monotonic() > deadline_s:
                raise InstallError(f"pip did not end within {INSTALL_TIMEOUT_S:.0f} s; its output: {self.log_path}")
            time.sleep(POLL_S)

    def install_lock(self, name: str) -> bool:
        """Installs ``requirements/<name>.lock`` unless that text is installed already. True if it did something."""
        path = self.root / "requirements" / f"{name}.lock"
        wanted = digest(path)
        if self.stamp().get(name) == wanted:
            return False
        pins = read_lock(path)
        site = self.site()
        for half in remove_half_installed(site):
            print(f"repairing {half[: -len('.dist-info')]} (its install was interrupted)")
        print(f"installing {len(pins)} packages from requirements/{path.name}", flush=True)
        self.pip(["-r", str(path)], pins)
        if "torch" in pins and is_cuda_torch(site):
            print("the package index has no CPU build of PyTorch: adding what its CUDA build needs (some 3 GB more)")
            self.pip(["-c", str(path), f"torch=={pins['torch']}"], pins, with_dependencies=True)
        self.record(**{name: wanted})
        return True

    def install_self(self) -> bool:
        """Installs Antiphon from this folder, editable, when its metadata changed."""
        wanted = digest(self.root / "pyproject.toml")
        if self.stamp().get("project") == wanted:
            return False
        self.pip(["--no-build-isolation", "-e", str(self.root)], {})
        self.record(project=wanted)
        return True

    def wants_compile(self) -> bool:
        """Whether the router's modules are to be compiled, and can be. Says once why they cannot."""
        command = [str(self.python), str(self.root / "scripts" / "compile.py"), "--check"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == COMPILE_WANTED:
            return True
        # The words once, not each time somebody types make.
        if done.returncode != 0 and self.stamp().get("not_compiled") != done.stdout:
            print((done.stdout or done.stderr).strip(), flush=True)
        if done.stdout != self.stamp().get("not_compiled", ""):
            self.record(not_compiled=done.stdout)
        return False

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Compiles the router's modules beside the body, and waits for the end of it after the body. Never raises by
        itself: where it fails, the router runs as Python, and that is said.
        """
        with tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                [str(self.python), str(self.root / "scripts" / "compile.py")],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                cwd=self.root,
                start_new_session=True,
                preexec_fn=in_the_background,
            )
            try:
                yield
                self._follow_compile(process)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
                    try:
                        process.wait(COMPILE_END_TIMEOUT_S)
                    except subprocess.TimeoutExpired:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()
            said.seek(0)
            print(said.read().strip(), flush=True)

    def _follow_compile(self, process: subprocess.Popen[bytes]) -> None:
        progress = Progress(is_terminal=sys.stdout.isatty())
        started_s = time.monotonic()
        try:
            while process.poll() is None:  # it has a time limit of its own
                progress.show(f"compiling the router's modules  {time.monotonic() - started_s:.0f} s")
                time.sleep(POLL_S)
        finally:
            progress.close()

    def provide_libnuma(self) -> None:
        """Gives vLLM a libnuma where the system has none: the copy that NIXL brings, under the name that vLLM asks for.

        The folder is put on the library path by the Makefile. Without it a bare Debian would need root for one library.
        """
        folder = self.folder / "native"
        with contextlib.suppress(OSError):
            ctypes.CDLL("libnuma.so.1")
            return
        copies = sorted(self.site().glob("nixl_cu*.libs/libnuma-*.so*"))
        if not copies:
            raise InstallError("vLLM needs libnuma.so.1\nOn Debian or Ubuntu: apt-get install libnuma1")
        folder.mkdir(exist_ok=True)
        link = folder / "libnuma.so.1"
        if link.exists() and link.samefile(copies[0]):
            return
        link.unlink(missing_ok=True)
        link.symlink_to(copies[0])


def is_cuda_torch(site: Path) -> bool:
    """Whether PyTorch is there in its CUDA build, as an index without the CPU build offers it. It runs on a CPU as
    well, but does not import without its GPU libraries, which the lock leaves out.
    """
    version_file = site / "torch" / "version.py"
    is_cuda = re.compile(r"^cuda\b[^=]*=\s*['\"]", re.MULTILINE)
    return version_file.exists() and is_cuda.search(version_file.read_text()) is not None


def explain_pip_failure(tail: list[str], log_path: Path) -> str:
    """pip's last lines, and what to do where the cause is plain."""
    text = "\n".join(tail)
    hint = "Try again: what was installed is kept."
    if "No space left" in text:
        hint = "The disk is full."
    elif re.search(r"Temporary failure|Name or service|Connection|timed out|Max retries", text):
        hint = "The package index could not be reached; check the network or pip's configuration, then try again."
    elif "No matching distribution" in text:
        hint = "The package index has no such version for this Python and processor (pip's configuration names it)."
    return f"pip failed. Its last lines (all of them: {log_path}):\n\n{text}\n\n{hint}"


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Waits for another run of this script on the same folder to end.

    Raises:
        InstallError: the other run did not end in time.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    deadline_s = time.monotonic() + LOCK_TIMEOUT_S
    has_told = False
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise InstallError("another install has been running for too long; end it and try again") from None
                if not has_told:
                    print("waiting for another install in this folder", flush=True)
                    has_told = True
                time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


def tree_size_bytes(folder: Path) -> int:
    """Bytes on disk of a folder, each file once."""
    total, seen = 0, set()
    for parent, _, files in os.walk(folder):
        for name in files:
            status = os.lstat(os.path.join(parent, name))
            if (status.st_dev, status.st_ino) not in seen:
                seen.add((status.st_dev, status.st_ino))
                total += status.st_blocks * 512
    return total


EXTRAS = ("ray", "tiers")
"""Parts that not everybody needs; each has a lock file of its own name."""


def install(root: Path, folder: Path, *, dev: bool, compiled: bool = True, extras: Sequence[str] = ()) -> None:
    """Brings the environment up to date; silent where it is so already.

    Args:
        dev: whether what the tests need is installed: every extra is part of it.
        compiled: whether the router's modules may be compiled.
        extras: of ``EXTRAS``.
    """
    started_s = time.monotonic()
    environment = Environment(root, folder)
    with only_one(root / "requirements"):
        environment.create()
        wants_compile = compiled and environment.wants_compile()
        changed = (wants_compile or dev) and environment.install_lock("compile")
        with environment.compiling() if wants_compile else contextlib.nullcontext():
            changed = environment.install_lock("cpu") or changed
            for name in (*EXTRAS, "dev") if dev else extras:
                changed = environment.install_lock(name) or changed
            environment.provide_libnuma()
            changed = environment.install_self() or changed
    if changed:
        size = tree_size_bytes(folder) / 1e9
        print(f"installed: {size:.2f} GB in {folder.name}, {time.monotonic() - started_s:.0f} s", flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Make or update the virtual environment.")
    parser.add_argument("--dev", action="store_true", help="install what the tests need, too")
    parser.add_argument(
        "--with", dest="extras", action="append", choices=EXTRAS, default=[], help="install this part, too"
    )
    parser.add_argument("--no-compile", action="store_true", help="leave the router's modules as they are")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        install(ROOT, ROOT / ".venv", dev=options.dev, compiled=not options.no_compile, extras=options.extras)
    except InstallError as error:
        print(f"\ninstall: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninstall: interrupted; the same command continues it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
