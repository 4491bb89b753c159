"""The supervisor with real processes: order, failures, restarts, stops and deaths; nothing is ever left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from antiphon.config.plan import ProcessPlan
from antiphon.config.supervisor_spec import RestartSpec, SupervisorSpec
from antiphon.core.errors import StartError
from antiphon.protocol.state import ProcessState
from antiphon.supervisor import procfs, store
from antiphon.supervisor.events import SupervisorEvent
from antiphon.supervisor.report import DeploymentReport, judge, running_ports, with_load
from antiphon.supervisor.supervisor import StartCancelled, Supervisor

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
DEADLINE_S = 10.0
CACHE = """
import http.server, json, sys
L1 = {"total_object_count": 3, "memory_used_bytes": 300, "memory_total_bytes": 1000}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"storage_manager": {"l1_manager": L1}}).encode()
        self.send_response(200 if self.path in ("/status", "/readiness") else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

pytestmark = pytest.mark.process


def marked_pids(deployment: str) -> list[int]:
    """Every running process that carries the deployment's marker, found without the code under test's bookkeeping."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        pid = int(path.parent.name)
        try:
            is_marked = f"{procfs.MARKER_VARIABLE}={deployment}/".encode() in path.read_bytes()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if is_marked and state not in "ZX":
            found.append(pid)
    return found


def read(path: str) -> str:
    return Path(path).read_text()


async def wait_until(holds: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.02)


class Bench:
    """Makes plans of fake engines and supervisors for them, and keeps their events."""

    def __init__(self, folder: Path, free_port: Callable[[int], list[int]]) -> None:
        self.folder = folder
        self.name = f"t{os.getpid()}-{folder.name[-12:].replace('_', '-')}"
        self._free_ports = free_port
        self.events: list[SupervisorEvent] = []
        self.supervisors: list[Supervisor] = []

    def plan(self, name: str, *extra: str) -> ProcessPlan:
        role = name.split("-")[0]
        (port,) = self._free_ports(1)
        return ProcessPlan(
            name=name,
            role=role,  # type: ignore[arg-type]
            kind="router" if role == "router" else "vllm",
            host="127.0.0.1",
            argv=(sys.executable, "-S", str(FAKE_ENGINE), "--port", str(port), *extra),
            ports={"http": port},
            base_url=f"http://127.0.0.1:{port}",
        )

    def cache_plan(self, name: str) -> ProcessPlan:
        """A stand-in for a cache server: it answers /readiness and tells what it holds."""
        (port,) = self._free_ports(1)
        return ProcessPlan(
            name=name,
            role="cache_server",
            kind="cache_server",
            host="127.0.0.1",
            argv=(sys.executable, "-S", "-c", CACHE, str(port)),
            ports={"http": port},
            base_url=f"http://127.0.0.1:{port}",
            ready_path="/readiness",
        )

    def spec(self, **changes: object) -> SupervisorSpec:
        restart = RestartSpec(backoff_first_s=0.2, backoff_max_s=1.0, max_in_window=3, window_s=60.0)
        values: dict[str, object] = {"start_timeout_s": 20.0, "stop_grace_s": 2.0, "restart": restart}
        return SupervisorSpec(**(values | {"state_dir": str(self.folder / "state")} | changes))  # type: ignore[arg-type]

    def supervisor(self, *plans: ProcessPlan, **changes: object) -> Supervisor:
        made = Supervisor(plans, self.spec(**changes), self.name, on_event=self.events.append)
        self.supervisors.append(made)
        return made

    def report(self) -> DeploymentReport:
        state = store.read_state(self.folder / "state" / self.name)
        assert state is not None
        return judge(state)

    def kinds(self, process: str) -> list[str]:
        return [event.kind for event in self.events if event.process == process and event.kind != "phase"]


def record(supervisor: Supervisor, name: str) -> ProcessState:
    return next(each for each in supervisor.records() if each.name == name)


@pytest.fixture
async def bench(tmp_path: Path, free_ports: Callable[[int], list[int]]) -> AsyncIterator[Bench]:
    made = Bench(tmp_path, free_ports)
    yield made
    for supervisor in made.supervisors:
        await supervisor.stop()
    left = marked_pids(made.name)
    assert not left, f"processes left behind: {left}"


@pytest.fixture(autouse=True)
def _restore_subreaper() -> Iterator[None]:
    yield
    # The supervisor makes its process a child subreaper and undoes it: nothing is left to collect here.
    try:
        pid, _ = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return
    assert pid == 0, f"an ended process was left unreaped: {pid}"


# --- start -----------------------------------------------------------------------------------------------------------


async def test_engines_start_at_once_and_the_router_when_they_are_ready(bench: Bench) -> None:
    plans = [bench.plan("router"), bench.plan("prefill-0", "--chatter", "3"), bench.plan("decode-0")]
    async with bench.supervisor(*plans) as supervisor:
        order = [(event.process, event.kind) for event in bench.events if event.kind in ("starting", "ready")]
        assert {process for process, _ in order[:2]} == {"prefill-0", "decode-0"}
        assert [kind for _, kind in order[:2]] == ["starting", "starting"]
        assert order[4:] == [("router", "starting"), ("router", "ready")]
        report = await with_load(bench.report())
        assert report.is_all_ready
        assert [(row.name, row.num_running, row.num_waiting) for row in report.processes] == [
            ("router", None, None),
            ("prefill-0", 2, 1),
            ("decode-0", 2, 1),
        ]
        assert supervisor.statistics()["num_ready"] == 3
        log = record(supervisor, "prefill-0").log_path
        assert "chatter 2" in read(log)
        assert stat.S_IMODE(os.stat(log).st_mode) == 0o600
        assert stat.S_IMODE(os.stat(supervisor.folder / store.STATE_FILE).st_mode) == 0o600
        # Each child leads its own session.
        pids = [each.pid for each in supervisor.records()]
        assert [os.getsid(pid or 0) for pid in pids] == pids
    assert [row.state for row in bench.report().processes] == ["stopped"] * 3
    assert not bench.report().is_up


async def test_incarnation_is_filled_in_and_environment_is_as_planned(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan("prefill-0", "--say", "engine-@INCARNATION@", "--say-when", str(tmp_path / "go"))
    (tmp_path / "go").touch()
    changed = ProcessPlan(
        **{**vars(plan), "env": {"VLLM_X": "id-@INCARNATION@"}, "unset_env": ("HOME",)}  # type: ignore[arg-type]
    )
    async with bench.supervisor(changed) as supervisor:
        own = record(supervisor, "prefill-0")
        environ = read(f"/proc/{own.pid}/environ").split("\0")
        assert f"VLLM_X=id-{own.incarnation}" in environ
        assert not any(item.startswith("HOME=") for item in environ)
        assert os.readlink(f"/proc/{own.pid}/fd/0") == "/dev/null"
        await wait_until(lambda: f"engine-{own.incarnation}" in read(own.log_path), "the said line")


async def test_keys_are_read_from_their_files_at_each_start(bench: Bench, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("# one\nsk-1\n")
    plan = ProcessPlan(**{**vars(bench.plan("prefill-0")), "env_files": {"VLLM_API_KEY": str(key)}})
    async with bench.supervisor(plan) as supervisor:
        own = record(supervisor, "prefill-0")
        assert "VLLM_API_KEY=sk-1" in read(f"/proc/{own.pid}/environ").split("\0")
        assert "sk-1" not in read(own.log_path)
    key.write_text("")
    with pytest.raises(StartError, match=r"prefill-0 could not be started: .* is empty"):
        await bench.supervisor(plan).start()


async def test_the_banner_of_a_log_holds_no_secret(bench: Bench, tmp_path: Path) -> None:
    plan = bench.plan("prefill-0", "--say", "up", "--say-when", str(tmp_path / "never"))
    script = "import runpy, sys; del sys.argv[0:3]; runpy.run_path(sys.argv[0], run_name='__main__')"
    argv = (sys.executable, "-S", "-c", script, "--api-key", "sk-1", *plan.argv[2:])
    async with bench.supervisor(ProcessPlan(**{**vars(plan), "argv": argv})) as supervisor:
        own = record(supervisor, "prefill-0")
        log = read(own.log_path)
        assert "--api-key '***'" in log
        assert "sk-1" not in log
        assert b"sk-1" in Path(f"/proc/{own.pid}/cmdline").read_bytes()


async def test_failure_at_start_names_the_process_and_shows_the_useful_lines(bench: Bench) -> None:
    plans = [
        bench.plan("prefill-0", "--never-ready"),
        bench.plan("decode-0", "--chatter", "50", "--fail", "no such KV"),
    ]
    started = time.monotonic()
    with pytest.raises(StartError) as caught:
        await bench.supervisor(*plans).start()
    assert time.monotonic() - started < 8.0
    assert caught.value.message.startswith("decode-0 ended with exit code 1")
    assert "RuntimeError: no such KV" in caught.value.message
    assert "chatter" not in caught.value.message
    assert marked_pids(bench.name) == []
    assert not bench.report().is_up


async def test_program_that_does_not_exist(bench: Bench) -> None:
    plan = ProcessPlan(**{**vars(bench.plan("prefill-0")), "argv": ("/does/not/exist",)})
    with pytest.raises(StartError, match="cannot execute /does/not/exist: No such file"):
        await bench.supervisor(plan).start()


async def test_deadline_passed(bench: Bench) -> None:
    with pytest.raises(StartError, match=r"not ready within 1 s") as caught:
        await bench.supervisor(
            bench.plan("prefill-0", "--never-ready", "--grandchildren", "1"), start_timeout_s=1.0
        ).start()
    assert caught.value.remedy is not None
    assert "start_timeout_s" in caught.value.remedy


async def test_fatal_log_line_ends_the_wait_although_the_process_lives(bench: Bench, tmp_path: Path) -> None:
    line = "(EngineCore pid=1) ERROR 01-01 00:00:00 [core.py:1] EngineCore failed to start."
    (tmp_path / "go").touch()
    script = (
        "import sys,time\nprint(sys.argv[1])\n"
        "print('Traceback (most recent call last):'); print('  File \"x\", line 1, in f')\n"
        "print('ValueError: too small', flush=True); time.sleep(600)"
    )
    plan = ProcessPlan(**{**vars(bench.plan("decode-0")), "argv": (sys.executable, "-S", "-c", script, line)})
    with pytest.raises(StartError, match="the engine core failed to start") as caught:
        await bench.supervisor(plan).start()
    assert "ValueError: too small" in caught.value.message


async def test_port_in_use_is_refused_before_the_start(bench: Bench) -> None:
    plan = bench.plan("prefill-0")
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", plan.ports["http"], reuse_port=True)
    try:
        with pytest.raises(StartError, match=rf"port {plan.ports['http']} \(http\) is in use"):
            await bench.supervisor(plan).start()
    finally:
        server.close()
        await server.wait_closed()


async def test_second_supervisor_of_one_name_is_refused_and_harms_nothing(bench: Bench) -> None:
    async with bench.supervisor(bench.plan("prefill-0")) as first:
        with pytest.raises(StartError, match=rf"already up on this host \(supervisor pid {os.getpid()}\)"):
            await bench.supervisor(bench.plan("decode-0")).start()
        assert record(first, "prefill-0").state == "ready"
        assert bench.report().is_all_ready


async def test_stop_requested_while_starting(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.plan("prefill-0", "--never-ready"))
    start = asyncio.create_task(supervisor.start())
    await wait_until(lambda: "starting" in bench.kinds("prefill-0"), "the start")
    supervisor.request_stop()
    with pytest.raises(StartCancelled):
        await start
    assert marked_pids(bench.name) == []


# --- restart ---------------------------------------------------------------------------------------------------------


async def test_killed_child_is_restarted_on_its_port_with_a_new_incarnation(bench: Bench) -> None:
    plans = [bench.plan("prefill-0", "--grandchildren", "2"), bench.plan("router")]
    async with bench.supervisor(*plans) as supervisor:
        before = record(supervisor, "prefill-0")
        old_pid, old_incarnation = before.pid, before.incarnation
        old_session = [each for each in marked_pids(bench.name) if os.getsid(each) == old_pid]
        router_pid = record(supervisor, "router").pid
        assert len(old_session) == 3
        assert old_pid is not None
        os.kill(old_pid, signal.SIGKILL)
        await wait_until(lambda: bench.report().processes[0].state in ("dead", "restarting"), "the death to be told")
        await wait_until(lambda: "restarting" in bench.kinds("prefill-0"), "the restart")
        assert not set(old_session) & set(marked_pids(bench.name)), "grandchildren outlived their leader"
        await wait_until(lambda: record(supervisor, "prefill-0").state == "ready", "readiness")
        after = record(supervisor, "prefill-0")
        assert after.pid != old_pid
        assert after.incarnation != old_incarnation
        assert after.restarts == 1
        assert after.last_exit is not None
        assert after.last_exit == "was killed by SIGKILL (by the kernel for lack of memory, or by a person)"
        (told,) = [event.text for event in bench.events if event.kind == "exited"]
        assert told == f"{after.last_exit}\n    log: {after.log_path}", "its log cannot say who killed it"
        assert record(supervisor, "router").pid == router_pid
        assert bench.report().is_all_ready


async def test_router_death_restarts_the_router_only(bench: Bench) -> None:
    async with bench.supervisor(bench.plan("prefill-0"), bench.plan("router")) as supervisor:
        engine_pid, router_pid = (record(supervisor, name).pid for name in ("prefill-0", "router"))
        assert router_pid is not None
        os.kill(router_pid, signal.SIGKILL)
        await wait_until(lambda: record(supervisor, "router").restarts == 1, "the restart")
        await wait_until(lambda: record(supervisor, "router").state == "ready", "readiness")
        assert record(supervisor, "prefill-0").pid == engine_pid


async def test_backoff_grows_and_the_limit_leaves_the_rest_running(bench: Bench, tmp_path: Path) -> None:
    flag = tmp_path / "works"
    flag.touch()
    bad = bench.plan("decode-0", "--fail", "broken", "--fail-unless", str(flag))
    async with bench.supervisor(bad, bench.plan("prefill-0")) as supervisor:
        flag.unlink()
        os.kill(record(supervisor, "decode-0").pid or 0, signal.SIGKILL)
        await wait_until(lambda: record(supervisor, "decode-0").state == "failed", "giving up")
        waits = [event.text for event in bench.events if event.kind == "restarting"]
        assert waits == ["restarting in 0.2 s", "restarting in 0.4 s", "restarting in 0.8 s"]
        told = next(event.text for event in bench.events if event.kind == "failed")
        assert "no decode process is left" in told
        assert record(supervisor, "prefill-0").state == "ready"
        report = bench.report()
        assert [row.state for row in report.processes] == ["failed", "ready"]
        assert report.is_up
        assert not report.is_all_ready
        assert "Its log says:" in next(e.text for e in reversed(bench.events) if e.kind == "exited")
        assert "RuntimeError: broken" in next(e.text for e in reversed(bench.events) if e.kind == "exited")
        assert "Its log says" not in (record(supervisor, "decode-0").last_exit or "")


async def test_everything_failed_ends_the_run(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.plan("decode-0"), restart=RestartSpec(enabled=False))
    await supervisor.start()
    run = asyncio.create_task(supervisor.run_until_stopped())
    os.kill(record(supervisor, "decode-0").pid or 0, signal.SIGKILL)
    with pytest.raises(StartError, match="every process has failed"):
        await asyncio.wait_for(run, DEADLINE_S)
    assert bench.report().processes[0].state == "failed"


async def test_fatal_line_of_a_ready_engine_restarts_it(bench: Bench, tmp_path: Path) -> None:
    line = "(EngineCore pid=7) ERROR 01-01 00:00:00 [core.py:1] EngineCore encountered a fatal error."
    go = tmp_path / "go"
    async with bench.supervisor(bench.plan("decode-0", "--say", line, "--say-when", str(go))) as supervisor:
        go.touch()
        await wait_until(lambda: record(supervisor, "decode-0").last_exit is not None, "the failure")
        go.unlink()
        assert "the engine core failed" in (record(supervisor, "decode-0").last_exit or "")
        await wait_until(lambda: record(supervisor, "decode-0").state == "ready", "the restart")


async def test_prompt_in_a_log_record_does_not_restart_anything(bench: Bench, tmp_path: Path) -> None:
    line = "INFO 01-01 00:00:00 [logger.py:1] Received request: EngineCore encountered a fatal error. EngineDeadError"
    go = tmp_path / "go"
    async with bench.supervisor(bench.plan("decode-0", "--say", line, "--say-when", str(go))) as supervisor:
        go.touch()
        log = record(supervisor, "decode-0").log_path
        await wait_until(lambda: "Received request" in read(log), "the line")
        await asyncio.sleep(0.5)
        assert record(supervisor, "decode-0").state == "ready"
        assert record(supervisor, "decode-0").restarts == 0


# --- cache servers ---------------------------------------------------------------------------------------------------


async def test_cache_servers_start_with_the_engines_and_stop_after_them(bench: Bench) -> None:
    plans = [bench.plan("router"), bench.plan("prefill-0", "--chatter", "1"), bench.cache_plan("cache-prefill")]
    async with bench.supervisor(*plans) as supervisor:
        order = [(event.process, event.kind) for event in bench.events if event.kind in ("starting", "ready")]
        assert set(order[:2]) == {("cache-prefill", "starting"), ("prefill-0", "starting")}
        assert order[-2:] == [("router", "starting"), ("router", "ready")]
        report = await with_load(bench.report())
        held = {row.name: (row.num_objects, row.used_bytes, row.total_bytes) for row in report.processes}
        assert held == {"router": (None,) * 3, "prefill-0": (None,) * 3, "cache-prefill": (3, 300, 1000)}
        own = running_ports(str(bench.folder / "state"), bench.name)
        assert own == {plan.name: frozenset(plan.ports.values()) for plan in plans}
        assert record(supervisor, "cache-prefill").role == "cache_server"
    assert [event.process for event in bench.events if event.kind == "stopped"][:3] == [
        "router",
        "prefill-0",
        "cache-prefill",
    ]
    assert running_ports(str(bench.folder / "state"), bench.name) == {}


async def test_a_killed_cache_server_is_back_at_once_and_nothing_else_is_restarted(bench: Bench) -> None:
    plans = [bench.plan("router"), bench.plan("prefill-0"), bench.cache_plan("cache")]
    restart = RestartSpec(backoff_first_s=20.0, backoff_max_s=30.0, max_in_window=3, window_s=60.0)
    async with bench.supervisor(*plans, restart=restart) as supervisor:
        before = {name: record(supervisor, name).pid for name in ("router", "prefill-0", "cache")}
        killed_s = time.monotonic()
        os.kill(before["cache"] or 0, signal.SIGKILL)
        await wait_until(lambda: record(supervisor, "cache").restarts == 1, "the restart")
        await wait_until(lambda: record(supervisor, "cache").state == "ready", "readiness")
        assert time.monotonic() - killed_s < 5.0
        assert [event.text for event in bench.events if event.kind == "restarting"] == ["restarting in 0.2 s"]
        assert {name: record(supervisor, name).pid for name in ("router", "prefill-0")} == {
            name: before[name] for name in ("router", "prefill-0")
        }
        # The second time in a window it waits as everything else does.
        os.kill(record(supervisor, "cache").pid or 0, signal.SIGKILL)
        await wait_until(lambda: len(bench.kinds("cache")) > 0 and bench.kinds("cache")[-1] == "restarting", "the wait")
        assert [event.text for event in bench.events if event.kind == "restarting"][-1] == "restarting in 20 s"


async def test_cache_servers_alone_do_not_keep_a_deployment_up(bench: Bench) -> None:
    supervisor = bench.supervisor(
        bench.plan("decode-0"), bench.cache_plan("cache-decode"), restart=RestartSpec(enabled=False)
    )
    await supervisor.start()
    run = asyncio.create_task(supervisor.run_until_stopped())
    os.kill(record(supervisor, "decode-0").pid or 0, signal.SIGKILL)
    with pytest.raises(StartError, match="every process has failed"):
        await asyncio.wait_for(run, DEADLINE_S)


# --- stop -------------------------------------------------------------------------------------------------------------


async def test_stop_takes_the_router_first_and_kills_what_ignores_sigterm(bench: Bench) -> None:
    plans = [
        bench.plan("prefill-0", "--ignore-term", "--grandchildren", "2", "--escape"),
        bench.plan("decode-0"),
        bench.plan("router"),
    ]
    supervisor = bench.supervisor(*plans, stop_grace_s=1.0)
    await supervisor.start()
    assert len(marked_pids(bench.name)) == 6
    await supervisor.stop()
    assert marked_pids(bench.name) == []
    stopped = [event.process for event in bench.events if event.kind == "stopped"]
    assert stopped[0] == "router"
    last_exit = record(supervisor, "prefill-0").last_exit
    assert re.fullmatch(r"killed after 1(\.\d+)? s", last_exit or "")
    texts = {event.process: event.text for event in bench.events if event.kind == "stopped"}
    assert (texts["prefill-0"], texts["decode-0"]) == (f"stopped: {last_exit}", "stopped")
    assert record(supervisor, "decode-0").last_exit == "was killed by SIGTERM"


async def test_second_request_to_stop_kills_at_once(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.plan("prefill-0", "--ignore-term"), stop_grace_s=60.0)
    await supervisor.start()
    run = asyncio.create_task(supervisor.run_until_stopped())
    supervisor.request_stop()
    await asyncio.sleep(0.3)
    assert not run.done()
    supervisor.request_stop()
    await asyncio.wait_for(run, 5.0)
    assert marked_pids(bench.name) == []


async def test_stopped_child_is_ended_as_well(bench: Bench) -> None:
    supervisor = bench.supervisor(bench.plan("prefill-0"), stop_grace_s=5.0)
    await supervisor.start()
    os.kill(record(supervisor, "prefill-0").pid or 0, signal.SIGSTOP)
    started = time.monotonic()
    await supervisor.stop()
    assert time.monotonic() - started < 4.0


async def test_status_does_not_take_a_silent_engine_for_dead(bench: Bench) -> None:
    async with bench.supervisor(bench.plan("prefill-0", "--metrics-delay-s", "2")):
        report = await with_load(bench.report(), timeout_s=0.2)
        assert report.processes[0].state == "ready"
        assert report.processes[0].is_load_unknown


async def test_dead_watchdog_is_replaced_and_knows_the_sessions(bench: Bench) -> None:
    async with bench.supervisor(bench.plan("prefill-0")) as supervisor:
        first = supervisor.statistics()["watchdog_pid"]
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: supervisor.statistics()["watchdog_pid"] not in (0, first), "another watchdog")
        assert record(supervisor, "prefill-0").state == "ready"
