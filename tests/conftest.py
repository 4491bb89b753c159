"""What every room's tests share: ports, children that die with the tests, and the two leak checks.

The leak checks are on for every test: a test fails if a child process that it started is alive when the test and its
fixtures have ended, or if an asyncio task that it started in the test's event loop is still pending then. Processes and
tasks that belong to a wider fixture (module, session) existed before the test and are left to that fixture.

With ``ANTIPHON_NO_SKIPS`` set, a test that would be skipped fails: so where everything that tests need is installed, as
on the machine of ``.ci/run``, nothing goes untested in silence. What no package can mend is still left out, by a reason
that begins with ``FORBIDDEN``: what the kernel or the container refuses.

With ``ANTIPHON_COMPILED=1`` the tests run on the compiled modules, or not at all: they are switched on here, before any
test imports one.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import inspect
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from antiphon.cli.compiled import SWITCH, use_compiled

if os.environ.get(SWITCH) == "1":
    use_compiled()

NO_SKIPS = "ANTIPHON_NO_SKIPS"
FAILED_FILE = "ANTIPHON_FAILED_FILE"
FORBIDDEN = "needs a machine that allows "
_failed_path = os.environ.pop(FAILED_FILE, None)  # not for what tests start
LEAK_GRACE_S = 2.0  # how long a process or a task that is already ending gets to end
PR_SET_PDEATHSIG = 1

# The machine is shared, so that a slow example says nothing; a failing one prints how to replay it.
settings.register_profile("house", deadline=None, print_blob=True)
settings.load_profile("house")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Where nothing may be left out, a skip is a failure."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get(NO_SKIPS):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        if str(reason).removeprefix("Skipped: ").startswith(FORBIDDEN):
            return report
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was left out, and {NO_SKIPS} is set. {reason}"
    return report


@pytest.hookimpl
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Where a file is named for it, what fails is written there at once."""
    if report.failed and _failed_path is not None:
        with open(_failed_path, "a") as file:
            file.write(f"{report.nodeid} ({report.when})\n{report.longreprtext[-2_000:]}\n")


# ---- ports -----------------------------------------------------------------------------------------------------------


class Ports:
    """Hands out free loopback ports, each once in a test session."""

    def __init__(self) -> None:
        self._given: set[int] = set()

    def take(self, num_ports: int = 1) -> list[int]:
        """``num_ports`` different ports on which nothing listens. The kernel chooses them, all held at the same time.

        Another process may take one between this call and the bind: where a server can be given port 0 and asked what
        it got, do that instead.
        """
        with contextlib.ExitStack() as held:
            found: list[int] = []
            for _ in range(num_ports + len(self._given) + 1):
                if len(found) == num_ports:
                    break
                probe = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
                if port not in self._given:
                    found.append(port)
            assert len(found) == num_ports, "the kernel has no more ports"
            self._given.update(found)
            return found


@pytest.fixture(scope="session")
def _ports() -> Ports:
    return Ports()


@pytest.fixture
def free_ports(_ports: Ports) -> Callable[[int], list[int]]:
    """``free_ports(3)``: three different free loopback ports."""
    return _ports.take


@pytest.fixture
def free_port(_ports: Ports) -> int:
    """One free loopback port."""
    return _ports.take()[0]


# ---- child processes -------------------------------------------------------------------------------------------------


_adopted: set[int] = set()


@pytest.fixture(scope="session")
def adopted() -> set[int]:
    """Process ids that a test started for a wider fixture, which ends them: the leak check leaves them alone."""
    return _adopted


@pytest.fixture(scope="session")
def die_with_parent() -> Callable[[], None]:
    """A ``preexec_fn``: the kernel kills the child when the test process ends, however it ends."""
    libc = ctypes.CDLL(None)

    def arrange() -> None:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return arrange


def parse_stat(text: str) -> tuple[int, str, int, int]:
    """Process id, state, parent's id and start time of one ``/proc/<pid>/stat``."""
    head, _, tail = text.rpartition(")")
    fields = tail.split()
    return int(head.split(" ", 1)[0]), fields[0], int(fields[1]), int(fields[19])


def living_children(parent: int) -> set[tuple[int, int]]:
    """The running children of a process, as (process id, start time). One that ended, not yet waited for, is none."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            pid, state, its_parent, start = parse_stat(path.read_text())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended while the folder was read
        if its_parent == parent and state not in "ZX" and pid not in _adopted and not is_helper_of_python(pid):
            found.add((pid, start))
    return found


def is_helper_of_python(pid: int) -> bool:
    """True for the resource tracker that ``multiprocessing`` keeps for the life of the process."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def describe(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return f"{pid} (ended since)"
    return f"{pid} {command[:200]}"


def wait_children_gone(before: set[tuple[int, int]], grace_s: float = LEAK_GRACE_S) -> set[tuple[int, int]]:
    """The children beyond ``before`` that are alive after the grace period; empty as soon as there are none."""
    deadline_s = time.monotonic() + grace_s
    while left := living_children(os.getpid()) - before:
        if time.monotonic() > deadline_s:
            return left
        time.sleep(0.02)
    return set()


@pytest.fixture(autouse=True)
def _no_child_left() -> Iterator[None]:
    before = living_children(os.getpid())
    yield
    left = wait_children_gone(before)
    names = [describe(pid) for pid, _ in sorted(left)]
    for pid, _ in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "the test left processes behind (killed here): " + "; ".join(names)


# ---- tasks -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def _no_task_left_in_loop() -> AsyncIterator[None]:
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    if left:
        _, left = await asyncio.wait(left, timeout=LEAK_GRACE_S)
    names = sorted(repr(task.get_coro()) for task in left)
    for task in left:
        task.cancel()
    assert not left, "the test left tasks pending: " + "; ".join(names)


@pytest.fixture(autouse=True)
def _no_task_left(request: pytest.FixtureRequest) -> None:
    if inspect.iscoroutinefunction(getattr(request.node, "obj", None)):
        request.getfixturevalue("_no_task_left_in_loop")
