"""Runs every check and every test, group by group, and says what failed and what was not run. Standard library only.

The groups of a lane run one after the other, the lanes of a stage beside each other, the stages in turn: tests with
processes mostly wait, and what computes runs meanwhile; real engines have the machine to themselves. A group that fails
does not stop the next one. The last line is ``N passed, N failed`` (and ``, N skipped`` where there are some), summed
over all groups; a check (lint, format, types) counts as one. The exit status is 0 only if nothing failed. A group that
collects nothing, dies or passes its time limit counts as failed: silence is not success.

It needs the environment that ``scripts/install.py --dev`` makes, and no root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
POLL_S = 0.1
KILL_TIMEOUT_S = 30.0  # a process in an uninterruptible wait can outlive SIGKILL
FAILED_FILE = "ANTIPHON_FAILED_FILE"
"""Where the tests write what fails as it fails (``tests/conftest.py``), for a pytest that dies before it tells."""
NOTHING_COLLECTED = 5  # pytest's exit status
SHOWN_LINES_MAX = 200  # of a failed group's output; all of it stays in the log


@dataclass(frozen=True)
class Group:
    """One line of the report: a check (``command``), or the tests that a marker expression selects."""

    name: str
    title: str
    timeout_s: float
    command: tuple[str, ...] = ()
    markers: str = ""
    can_be_empty: bool = False
    paths: tuple[str, ...] = ()
    """Patterns of files or folders; none: all."""
    apart: str = ""
    """The group that has some of its files to itself, where that is run too."""
    is_compiled: bool = False
    """Runs on the compiled modules; where they cannot be made, it is not run, and that is said."""


COMPILE_TIMEOUT_S = 1500.0
COMPILE_MISSING = 3  # exit status of scripts/compile.py

GROUPS = (
    Group("lint", "lint", 120, command=("-m", "ruff", "check", ".")),
    Group("lint", "format", 120, command=("-m", "ruff", "format", "--check", ".")),
    Group("types", "types", 600, command=("-m", "mypy")),
    Group("unit", "unit", 2400, markers="not process and not real_engine"),
    Group(
        "compiled",
        "compiled",
        900,
        markers="not process and not real_engine and not interpreted",
        paths=("tests/router",),
        is_compiled=True,
    ),
    Group("process", "process", 2700, markers="process and not real_engine", apart="ray"),
    Group("ray", "ray", 1800, markers="process and not real_engine", paths=("tests/process/test_ray_*.py",)),
    Group("real", "real engine", 3000, markers="real_engine"),
)


STAGES = ((("lint", "types", "unit", "compiled", "ray"), ("process",)), (("real",),))
"""Names of groups: lanes of a stage, groups of a lane."""


@dataclass
class Outcome:
    """What a group gave."""

    num_passed: int = 0
    num_failed: int = 0
    num_skipped: int = 0
    failures: list[str] = field(default_factory=list)
    skips: Counter[str] = field(default_factory=Counter)
    wall_s: float = 0.0

    def add(self, other: Outcome) -> None:
        self.num_passed += other.num_passed
        self.num_failed += other.num_failed
        self.num_skipped += other.num_skipped
        self.failures += other.failures
        self.skips += other.skips


def read_junit(path: Path) -> Outcome:
    """Counts the test cases of a junit file.

    Raises:
        OSError, ElementTree.ParseError: there is no file, or half of one.
    """
    outcome = Outcome()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = "::".join(filter(None, (case.get("classname"), case.get("name"))))
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.num_failed += 1
            outcome.failures.append(name)
        elif (skip := case.find("skipped")) is not None:
            outcome.num_skipped += 1
            outcome.skips[skip.get("message") or "no reason given"] += 1
        else:
            outcome.num_passed += 1
    return outcome


def judge(group: Group, status: int | None, junit: Path | None) -> Outcome:
    """Turns an exit status (None: the time limit passed) and a junit file into counts. Doubt counts as a failure."""
    if junit is None:
        outcome = Outcome(num_passed=int(status == 0), num_failed=int(status != 0))
        if status != 0:
            outcome.failures.append(f"{group.title}: {describe_end(group, status)}")
        return outcome
    try:
        outcome = read_junit(junit)
    except (OSError, ElementTree.ParseError):
        outcome = Outcome()
    num_cases = outcome.num_passed + outcome.num_failed + outcome.num_skipped
    if status == NOTHING_COLLECTED and num_cases == 0 and group.can_be_empty:
        return outcome
    trouble = ""
    if status == NOTHING_COLLECTED or (status == 0 and num_cases == 0):
        trouble = "no test was collected"
    elif status != 0 and (status != 1 or outcome.num_failed == 0):
        trouble = describe_end(group, status)
    if trouble:
        outcome.num_failed += 1
        outcome.failures.append(f"{group.title}: {trouble}")
    return outcome


def describe_end(group: Group, status: int | None) -> str:
    if status is None:
        return f"did not end within {group.timeout_s:.0f} s"
    if status < 0:
        return f"ended by signal {signal.Signals(-status).name}"
    return f"exit status {status}"


def run_to_end(command: list[str], log_path: Path, timeout_s: float, stop: threading.Event) -> int | None:
    """Runs a command with its output in a log. Returns its exit status, or None where the limit passed or ``stop`` was
    set.

    The command gets a session of its own and the whole of it is ended with it, so that nothing is left behind.
    """
    deadline_s = time.monotonic() + timeout_s
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline_s or stop.is_set():
                    return None
                time.sleep(POLL_S)
            return process.returncode
        finally:
            end_session(process)


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Ends whatever is left of the session that the process leads, in whatever process group."""
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    while left := session_members(process.pid):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        if time.monotonic() > deadline_s:
            print(f"could not end pid {', '.join(map(str, left))}: the kernel holds it")
            return
        time.sleep(POLL_S)
    process.wait()


def session_members(sid: int) -> list[int]:
    """The pids of a session's processes that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name is in parentheses and may itself contain parentheses and blanks.
            state, _, _, session = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(session) == sid and state not in "ZX":
                found.append(int(path.parent.name))
    return found


class Run:
    """One run of groups.

    Args:
        folder: for logs.
        extra: arguments for pytest.
    """

    def __init__(self, folder: Path, extra: list[str]) -> None:
        self._folder = folder
        self._extra = extra
        self._stop = threading.Event()
        self._running: dict[str, float] = {}
        """Titles of groups, and when each began."""
        self._printing = threading.Lock()
        self.groups: list[Group] = []
        self.total = Outcome()

    def stages(self, names: list[str]) -> None:
        """Runs the groups of these names."""
        began_s = time.monotonic()
        self.groups = [group for group in GROUPS if group.name in names]
        for lanes in STAGES:
            groups = [[group for group in self.groups if group.name in lane] for lane in lanes]
            with ThreadPoolExecutor(len(lanes)) as pool:
                ended = [pool.submit(self._lane, lane) for lane in groups]
                try:
                    while not all(each.done() for each in ended):
                        wait(ended, timeout=1.0)
                        self._tick()
                except BaseException:
                    self._stop.set()
                    raise
            for each in ended:
                each.result()
        self.total.wall_s = time.monotonic() - began_s

    def _tick(self) -> None:
        """On a terminal: what runs, and for how long."""
        if sys.stdout.isatty():
            with self._printing:
                now_s = time.monotonic()
                running = ", ".join(f"{title} {now_s - since_s:.0f} s" for title, since_s in self._running.items())
                sys.stdout.write(f"\r\033[K{running}")
                sys.stdout.flush()

    def _lane(self, groups: list[Group]) -> None:
        for group in groups:
            if not self._stop.is_set():
                self._running[group.title] = time.monotonic()
                try:
                    self._group(group)
                finally:
                    del self._running[group.title]

    def _left_out(self, group: Group) -> list[str]:
        """The options by which it leaves files to another group of this run."""
        patterns = [pattern for other in self.groups if other.name == group.apart for pattern in other.paths]
        return [f"--ignore-glob={ROOT / pattern}" for pattern in patterns]

    def _group(self, group: Group) -> None:
        """Runs one group and prints its line, and its output where it failed."""
        log_path = self._folder / f"{group.title.replace(' ', '-')}.log"
        failed_path = log_path.with_suffix(".failed")
        junit = None if group.command else self._folder / f"{group.name}.xml"
        command = [sys.executable, *group.command]
        if junit is not None:
            junit.unlink(missing_ok=True)
            command += ["-m", "pytest", "-q", "-m", group.markers, f"--junitxml={junit}"]
            command += [*self._left_out(group), *(str(path) for path in files_of(group)), *self._extra]
        if group.is_compiled:
            reason = why_not_compiled()
            if reason is not None:
                self._say(
                    Outcome(skips=Counter({f"{group.title}: {reason}": 1})), f"{group.title:<12} not run: {reason}"
                )
                return
            command = ["env", "ANTIPHON_COMPILED=1", *command]
        started_s = time.monotonic()
        command = ["env", f"{FAILED_FILE}={failed_path}", *command]
        status = run_to_end(command, log_path, group.timeout_s, self._stop)
        wall_s = time.monotonic() - started_s
        if self._stop.is_set():
            return
        outcome = judge(group, status, junit)
        shown = []
        if outcome.num_failed:
            lines = log_path.read_text(errors="replace").splitlines()
            if len(lines) > SHOWN_LINES_MAX:
                shown.append(f"[the first {len(lines) - SHOWN_LINES_MAX} lines are in {log_path}]")
            shown += lines[-SHOWN_LINES_MAX:]
            if junit is not None and not junit.exists() and failed_path.exists():
                shown += ["failed before it ended:", *failed_path.read_text(errors="replace").splitlines()]
        mark = "FAILED" if outcome.num_failed else "ok"
        self._say(outcome, *shown, f"{group.title:<12} {mark:<7} {wall_s:7.1f} s   {counts(outcome)}")

    def _say(self, outcome: Outcome, *lines: str) -> None:
        with self._printing:
            self.total.add(outcome)
            if sys.stdout.isatty():
                sys.stdout.write("\r\033[K")
            print("\n".join(lines), flush=True)


def files_of(group: Group) -> list[Path]:
    """The files and folders that it names; none: all.

    Raises:
        SystemExit: a pattern that it names fits nothing.
    """
    found = {pattern: sorted(ROOT.glob(pattern)) for pattern in group.paths}
    if missing := [pattern for pattern, paths in found.items() if not paths]:
        raise SystemExit(f"the group {group.name} names what is not there: {', '.join(missing)}")
    return [path for paths in found.values() for path in paths]


def why_not_compiled() -> str | None:
    """Why the router's modules cannot be compiled on this machine, in one line; None where they can be, or are.

    A compiler that fails is no reason: the group then fails.
    """
    command = [sys.executable, str(ROOT / "scripts" / "compile.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    return " ".join(done.stdout.split()) or "it cannot be compiled here" if done.returncode == COMPILE_MISSING else None


def counts(outcome: Outcome) -> str:
    skipped = f", {outcome.num_skipped} skipped" if outcome.num_skipped else ""
    return f"{outcome.num_passed} passed, {outcome.num_failed} failed{skipped}"


def summarize(total: Outcome, left_out: list[str], logs: Path | None) -> str:
    """The closing lines; the last is the counts alone."""
    lines = [""]
    if total.failures:
        lines.append("failed:")
        lines += [f"  {name}" for name in total.failures]
    not_run = [f"  {number} x {reason}" for reason, number in sorted(total.skips.items())]
    not_run += [f"  {name}: not asked for" for name in left_out]
    if not_run:
        lines.append("not run:")
        lines += not_run
    lines.append(f"{total.wall_s:.0f} s in all" + (f"; logs: {logs}" if logs else ""))
    lines.append(counts(total))
    return "\n".join(lines)


def hear_interrupts() -> None:
    """A shell that starts this in the background has it ignore Ctrl-C, and so would every process of the tests."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main(arguments: list[str]) -> int:
    names = list(dict.fromkeys(group.name for group in GROUPS))
    parser = argparse.ArgumentParser(description="Run every check and every test.")
    parser.add_argument("--only", metavar="NAMES", help=f"comma-separated, of: {', '.join(names)}")
    options, extra = parser.parse_known_args(arguments)
    wanted = options.only.split(",") if options.only else names
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"no such group: {', '.join(unknown)}")
    hear_interrupts()
    folder = Path(tempfile.mkdtemp(prefix="antiphon-test-"))
    run = Run(folder, extra)
    run.stages(wanted)
    total = run.total
    left_out = [name for name in names if name not in {*wanted, *(each.apart for each in run.groups)}]
    print(summarize(total, left_out, folder if total.num_failed else None))
    if total.num_failed:
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
