"""The leak checks and the port fixtures of ``tests/conftest.py``: each is seen to catch what it is for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import conftest
from tests.house.tree import ROOT

SUITE = {
    "child": """
        import subprocess
        def test_leaks():
            subprocess.Popen(["sleep", "600"])
            assert 1 + 1 == 2
    """,
    "task": """
        import asyncio
        async def test_leaks():
            loop = asyncio.get_running_loop()
            loop.kept = loop.create_task(asyncio.sleep(600))
            assert 1 + 1 == 2
    """,
    "task_of_a_fixture": """
        import asyncio, pytest
        @pytest.fixture
        async def server():
            task = asyncio.create_task(asyncio.sleep(600))
            yield
            task.cancel()
        async def test_fine(server):
            assert 1 + 1 == 2
    """,
    "child_that_ends": """
        import subprocess
        def test_fine():
            assert subprocess.run(["true"]).returncode == 0
            subprocess.Popen(["sleep", "0.2"])
    """,
    "child_of_a_module": """
        import subprocess, pytest
        @pytest.fixture(scope="module")
        def child():
            process = subprocess.Popen(["sleep", "600"])
            yield process
            process.kill()
            process.wait()
        def test_fine(child):
            assert child.poll() is None
        def test_fine_again(child):
            assert child.poll() is None
    """,
}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("child", "left processes behind (killed here): "),
        ("task", "left tasks pending: "),
        ("task_of_a_fixture", ""),
        ("child_that_ends", ""),
        ("child_of_a_module", ""),
    ],
)
def test_leak_is_caught(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    (tmp_path / f"test_{name}.py").write_text(textwrap.dedent(SUITE[name]))
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), f"--rootdir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    assert message in done.stdout, done.stdout
    assert done.returncode == (1 if message else 0), done.stdout + done.stderr


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_skip_is_a_failure_where_nothing_may_be_left_out(is_allowed: bool, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    text = """
        import pytest
        @pytest.fixture
        def absent():
            pytest.skip("needs a fixture")
        @pytest.mark.skipif(True, reason="needs a mark")
        def test_marked():
            assert False
        def test_inside():
            pytest.skip("needs a call")
        def test_fixture(absent):
            assert False
        @pytest.mark.xfail
        def test_expected():
            assert 1 + 1 == 3
        def test_fine():
            assert 1 + 1 == 2
    """
    (tmp_path / "test_skips.py").write_text(textwrap.dedent(text))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), f"--rootdir={tmp_path}"]
    environment = {name: value for name, value in os.environ.items() if name != conftest.NO_SKIPS}
    environment |= {} if is_allowed else {conftest.NO_SKIPS: "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == int(not is_allowed), done.stdout + done.stderr
    for need in ("needs a fixture", "needs a mark", "needs a call"):
        assert (need in done.stdout) is not is_allowed, done.stdout
    counts = "1 passed, 3 skipped, 1 xfailed" if is_allowed else "1 failed, 1 passed, 1 xfailed, 2 errors"
    assert counts in done.stdout


def test_a_skip_for_what_the_machine_forbids_stays_one(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((ROOT / "tests" / "conftest.py").read_text())
    text = f"""
        import pytest
        reason = "{conftest.FORBIDDEN}network namespaces"
        @pytest.mark.skipif(True, reason=reason)
        def test_marked():
            assert False
        def test_inside():
            pytest.skip(reason)
        def test_absent():
            pytest.skip("needs ip, but not " + reason)
    """
    (tmp_path / "test_skips.py").write_text(textwrap.dedent(text))
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path), f"--rootdir={tmp_path}"]
    environment = os.environ | {conftest.NO_SKIPS: "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 skipped" in done.stdout


def test_ci_lets_nothing_be_left_out() -> None:
    assert f"export {conftest.NO_SKIPS}=1\n" in (ROOT / ".ci" / "run").read_text()


def test_ports_differ_and_are_free(free_ports: Callable[[int], list[int]], free_port: int) -> None:
    ports = [free_port, *free_ports(5)]
    assert len(set(ports)) == 6
    for port in ports:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", port))


def test_child_dies_with_its_parent(die_with_parent: Callable[[], None]) -> None:
    # The fixture runs in the middle process here; its child must not outlive it.
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        os.close(read_end)
        child = subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent, pass_fds=(write_end,))
        os.write(write_end, b"%d" % child.pid)
        os.close(write_end)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write_end)
    os.waitpid(middle, 0)
    with os.fdopen(read_end, "rb") as pipe:
        assert int(pipe.read()) > 0  # end of file comes only when the child, which holds the pipe, has ended


def test_stat_line_with_a_hostile_name() -> None:
    text = "42 (a) b (c)) S 7 " + " ".join(str(number) for number in range(3, 30))
    pid, state, parent, start = conftest.parse_stat(text)
    assert (pid, state, parent, start) == (42, "S", 7, 20)


def test_child_is_seen_while_it_runs() -> None:
    before = conftest.living_children(os.getpid())
    with subprocess.Popen(["sleep", "600"]) as child:
        assert {pid for pid, _ in conftest.living_children(os.getpid()) - before} == {child.pid}
        assert conftest.wait_children_gone(before, grace_s=0.1)
        child.kill()
        child.wait()
    assert conftest.wait_children_gone(before) == set()
