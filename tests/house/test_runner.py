"""``scripts/test.py``: silence, death and delay of a group count as failures, and the last line is the counts."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.house.scripts import load_script

runner = load_script("test")
Group = runner.Group

JUNIT = """<?xml version="1.0"?><testsuites><testsuite tests="5">
<testcase classname="tests.a" name="test_good"/>
<testcase classname="tests.a" name="test_bad"><failure message="x">y</failure></testcase>
<testcase classname="tests.a" name="test_broken"><error message="x">y</error></testcase>
<testcase classname="tests.a" name="test_out"><skipped message="needs chromium">y</skipped></testcase>
<testcase classname="tests.b" name="test_good"/>
</testsuite></testsuites>"""
JUNIT_GOOD = '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'
JUNIT_EMPTY = "<testsuites><testsuite/></testsuites>"

TESTS = Group("unit", "unit", 5.0, markers="x")
CHECK = Group("lint", "lint", 5.0, command=("-c", ""))


def junit(folder: Path, text: str) -> Path:
    path = folder / "junit.xml"
    path.write_text(text)
    return path


def test_junit_is_counted(tmp_path: Path) -> None:
    outcome = runner.read_junit(junit(tmp_path, JUNIT))
    assert (outcome.num_passed, outcome.num_failed, outcome.num_skipped) == (2, 2, 1)
    assert outcome.failures == ["tests.a::test_bad", "tests.a::test_broken"]
    assert outcome.skips == {"needs chromium": 1}


@pytest.mark.parametrize(
    ("status", "text", "num_failed", "told"),
    [
        (0, JUNIT_GOOD, 0, ""),
        (1, JUNIT, 2, ""),
        (0, JUNIT_EMPTY, 1, "no test was collected"),
        (5, JUNIT_EMPTY, 1, "no test was collected"),
        (1, JUNIT_GOOD, 1, "exit status 1"),
        (2, JUNIT_GOOD, 1, "exit status 2"),
        (-9, JUNIT_GOOD, 1, "SIGKILL"),
        (0, "<half", 1, "no test was collected"),
        (3, "<half", 1, "exit status 3"),
        (None, "<half", 1, "did not end within 5 s"),
        (None, JUNIT, 3, "did not end within 5 s"),
    ],
)
def test_doubt_is_failure(status: int | None, text: str, num_failed: int, told: str, tmp_path: Path) -> None:
    outcome = runner.judge(TESTS, status, junit(tmp_path, text))
    assert outcome.num_failed == num_failed
    assert told in "\n".join(outcome.failures)


def test_missing_junit_is_failure(tmp_path: Path) -> None:
    assert runner.judge(TESTS, 0, tmp_path / "absent.xml").num_failed == 1


def test_group_may_be_declared_empty(tmp_path: Path) -> None:
    group = Group("unit", "unit", 5.0, markers="x", can_be_empty=True)
    assert runner.judge(group, 5, junit(tmp_path, JUNIT_EMPTY)).num_failed == 0
    assert runner.judge(group, 4, junit(tmp_path, JUNIT_EMPTY)).num_failed == 1


@pytest.mark.parametrize(("status", "num_failed"), [(0, 0), (1, 1), (-6, 1), (None, 1)])
def test_check_counts_as_one(status: int | None, num_failed: int) -> None:
    outcome = runner.judge(CHECK, status, None)
    assert (outcome.num_passed, outcome.num_failed) == (1 - num_failed, num_failed)


def test_time_limit_ends_the_whole_session(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    command = ["sh", "-c", f"sleep 600 & echo $! > {pid_file}.part; mv {pid_file}.part {pid_file}; wait"]
    assert runner.run_to_end(command, tmp_path / "log", 1.0, threading.Event()) is None
    pid = int(pid_file.read_text())
    deadline_s = time.monotonic() + 5
    while is_running(pid):
        assert time.monotonic() < deadline_s, "the grandchild outlived its session"
        time.sleep(0.02)


def test_every_process_group_of_the_session_is_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = (
        "import os, sys, time\nread, write = os.pipe()\npid = os.fork()\nif pid == 0:\n    os.setpgid(0, 0)\n"
        "    os.write(write, b'x')\n    time.sleep(600)\nos.read(read, 1)\nopen(sys.argv[1], 'w').write(str(pid))"
    )
    # The leader ends by itself; what it left is in another process group of the same session.
    command = [sys.executable, "-S", "-c", script, str(pid_file)]
    assert runner.run_to_end(command, tmp_path / "log", 30.0, threading.Event()) == 0
    assert not is_running(int(pid_file.read_text()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_status_and_output_are_kept(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('hello'); raise SystemExit(7)"]
    assert runner.run_to_end(command, tmp_path / "log", 30.0, threading.Event()) == 7
    assert (tmp_path / "log").read_text() == "hello\n"


GOOD_GROUP = Group("good", "good", 30.0, command=("-c", "pass"))
BAD_GROUP = Group("bad", "bad", 30.0, command=("-c", "raise SystemExit('the reason')"))


@pytest.mark.parametrize(
    ("groups", "arguments", "status", "last"),
    [
        ((GOOD_GROUP,), [], 0, "1 passed, 0 failed"),
        ((BAD_GROUP, GOOD_GROUP), [], 1, "1 passed, 1 failed"),
        ((BAD_GROUP, GOOD_GROUP), ["--only", "good"], 0, "1 passed, 0 failed"),
    ],
)
def test_run_ends_with_the_counts(
    groups: tuple[object, ...],
    arguments: list[str],
    status: int,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(runner, "GROUPS", groups)
    monkeypatch.setattr(runner, "STAGES", ((("bad", "good"),),))
    assert runner.main(arguments) == status
    lines = capsys.readouterr().out.rstrip("\n").splitlines()
    assert lines[-1] == last
    assert any(line.startswith("good ") for line in lines), "the good group did not run"
    if status:
        assert "the reason" in lines
        assert "  bad: exit status 1" in lines
    elif arguments:
        assert "  bad: not asked for" in lines


def test_every_group_has_its_place() -> None:
    names = [name for lanes in runner.STAGES for lane in lanes for name in lane]
    assert sorted(names) == sorted({group.name for group in runner.GROUPS})


def meets(name: str, folder: Path, *others: str) -> object:
    """A group that ends when the others have begun."""
    script = (
        f"import pathlib, time\npathlib.Path({str(folder)!r}, {name!r}).touch()\n"
        f"while not all(pathlib.Path({str(folder)!r}, other).exists() for other in {others!r}): time.sleep(0.01)"
    )
    return Group(name, name, 20.0, command=("-S", "-c", script))


def test_lanes_run_beside_each_other_and_stages_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    check = f"import pathlib; assert len(list(pathlib.Path({str(tmp_path)!r}).iterdir())) == 3"
    groups = [meets("a", tmp_path), meets("b", tmp_path, "c"), meets("c", tmp_path, "a", "b")]
    groups.append(Group("alone", "alone", 20.0, command=("-S", "-c", check)))
    monkeypatch.setattr(runner, "GROUPS", groups)
    monkeypatch.setattr(runner, "STAGES", ((("a", "b"), ("c",)), (("alone",),)))
    assert runner.main([]) == 0
    assert capsys.readouterr().out.endswith("4 passed, 0 failed\n")


def test_an_interrupt_ends_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)"
    groups = [Group(name, name, 60.0, command=("-S", "-c", script)) for name in ("a", "b")]
    monkeypatch.setattr(runner, "GROUPS", groups)
    monkeypatch.setattr(runner, "STAGES", ((("a", "b"),),))
    run = runner.Run(tmp_path, [])

    def interrupt(*_: object, **__: object) -> None:
        if (tmp_path / "begun").exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(runner, "wait", interrupt)
    began_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run.stages(["a", "b"])
    assert time.monotonic() - began_s < 30
    assert (run.total.num_passed, run.total.num_failed) == (0, 0)
    assert not (tmp_path / "b.log").exists(), "the next group has begun"


def test_skips_are_named_in_the_end() -> None:
    total = runner.Outcome(num_passed=3, num_skipped=2)
    total.skips["needs chromium"] = 2
    text = runner.summarize(total, [], None)
    assert "  2 x needs chromium" in text
    assert re.fullmatch(r"\d+ passed, \d+ failed(, \d+ skipped)?", text.splitlines()[-1])


def test_unknown_group_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        runner.main(["--only", "unti"])
    assert "no such group: unti" in capsys.readouterr().err


def test_a_real_pytest_run_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_a(): assert 1 + 1 == 2\ndef test_b(): assert 1 + 1 == 3\n"
        "def test_c(): pytest.skip('needs x')\n"
        "@pytest.fixture\ndef f():\n    yield\n    raise OSError\ndef test_d(f): assert f is None\n"
    )
    path = tmp_path / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={path}", str(tmp_path)]
    done = subprocess.run(
        [*command, f"--rootdir={tmp_path}", "-c", "/dev/null"],
        capture_output=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    outcome = runner.judge(TESTS, done.returncode, path)
    assert outcome.num_skipped == 1
    assert outcome.num_failed == 2, done.stdout


def test_what_a_group_has_to_itself_is_run_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = runner.Run(tmp_path, [])
    process, ray = (next(group for group in runner.GROUPS if group.name == name) for name in ("process", "ray"))
    own = {str(path) for path in runner.files_of(ray)}
    assert str(Path(__file__).parents[1] / "process" / "test_ray_app.py") in own

    run.groups = [process, ray]
    (option,) = run._left_out(process)
    assert {str(path) for path in Path("/").glob(option.removeprefix("--ignore-glob=/"))} == own
    assert run._left_out(ray) == []

    run.groups = [process]
    assert run._left_out(process) == [], "nobody else runs them"


def test_a_pytest_that_dies_has_told_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "conftest.py").write_text((Path(__file__).parents[1] / "conftest.py").read_text())
    (tmp_path / "test_x.py").write_text(
        "import os\ndef test_a(): assert 1 + 1 == 3, 'so it says'\ndef test_b(): os._exit(1)\n"
    )
    options = ("-c", "/dev/null", f"--rootdir={tmp_path}", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto")
    monkeypatch.setattr(runner, "GROUPS", [Group("unit", "unit", 60.0, markers="not process")])
    monkeypatch.setattr(runner, "STAGES", ((("unit",),),))
    monkeypatch.setattr(runner.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    assert runner.main(["--only", "unit", *options, str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "failed before it ended:" in said
    assert "test_x.py::test_a (call)" in said
    assert "so it says" in said
