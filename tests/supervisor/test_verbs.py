"""``up``, ``status`` and ``down`` as functions: what is selected, shown and returned."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from antiphon.cli import status as status_module
from antiphon.cli.down import down
from antiphon.cli.status import exit_code_of, format_uptime, table_lines
from antiphon.cli.up import closing_lines, prepare, select_plans, sets_of, up
from antiphon.config.plan import ProcessPlan
from antiphon.core.errors import ConfigError
from antiphon.supervisor.report import DeploymentReport, ProcessRow
from tests.config.facts_for_tests import gatherer

PLANS = [
    ProcessPlan(name=name, role=role, kind=kind, host=host, argv=("x",), base_url=f"http://{host}:1")  # type: ignore[arg-type]
    for name, role, kind, host in [
        ("prefill-0", "prefill", "vllm", "127.0.0.1"),
        ("prefill-1", "prefill", "vllm", "10.0.0.2"),
        ("decode-0", "decode", "vllm", "127.0.0.1"),
        ("router", "router", "router", "127.0.0.1"),
    ]
]
LOCAL = frozenset({"127.0.0.1"})


@pytest.mark.parametrize(
    ("only", "started", "elsewhere"),
    [
        ((), ["prefill-0", "decode-0", "router"], ["prefill-1"]),
        (("prefill",), ["prefill-0"], ["prefill-1"]),
        (("decode-0", "router"), ["decode-0", "router"], []),
        (("prefill-1",), [], ["prefill-1"]),
    ],
)
def test_selection(only: tuple[str, ...], started: list[str], elsewhere: list[str]) -> None:
    selection = select_plans(PLANS, only, LOCAL)
    assert [plan.name for plan in selection.started] == started
    assert [plan.name for plan in selection.elsewhere] == elsewhere


def test_unknown_only_names_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"--only prefil.*decode-0, prefill, prefill-0"):
        select_plans(PLANS, ("prefil",), LOCAL)


def test_an_engine_without_its_cache_server_is_pointed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.cli.up.gather_facts", gatherer())
    sets = ["model.path=x", "engine.kind=simulated", "cache.enabled=true", "cache.l1_size_bytes=1MB"]
    said = "cache-prefill, the cache server of prefill-0, is not started by this command"
    assert prepare(None, sets, ["prefill"])[2] == [said]
    assert prepare(None, sets, ["prefill", "cache-prefill"])[2] == []
    assert prepare(None, sets, ["router"])[2] == []
    assert prepare(None, sets, [])[2] == []


def test_closing_block_has_a_command_that_can_be_copied() -> None:
    text = "\n".join(closing_lines(select_plans(PLANS, (), LOCAL), "smollm2", [("router", "/l/router.log")]))
    assert (
        'curl -s http://127.0.0.1:1/v1/completions -H "Content-Type: application/json" -d '
        '\'{"model":"smollm2","prompt":"The capital of France is","max_tokens":16,"temperature":0}\''
    ) in text
    assert "/l/router.log" in text
    assert "curl" not in "\n".join(closing_lines(select_plans(PLANS, ("decode",), LOCAL), "m", []))


def test_options_win_over_set() -> None:
    params = {"prefill__replicas": 2, "model__path": "m", "router__port": None, "handoff__backends": ("UCX", "POSIX")}
    assert sets_of(["prefill.replicas=1"], params) == [
        "prefill.replicas=1",
        "prefill.replicas=2",
        "model.path=m",
        'handoff.backends=["UCX", "POSIX"]',
    ]


def test_up_refuses_with_exit_code_2_and_starts_nothing(tmp_path: Path) -> None:
    spec = tmp_path / "antiphon.yaml"
    spec.write_text(f"model: {{path: {tmp_path}/missing}}\nsupervisor: {{state_dir: {tmp_path}/state}}\n")
    ran = CliRunner().invoke(up, ["--config", str(spec)])
    assert ran.exit_code == 2
    assert "model.path" in ran.output
    ran = CliRunner().invoke(up, ["--config", str(spec), "--set", "prefil.replicas=2"])
    assert ran.exit_code == 2
    assert "prefil" in ran.output
    assert not (tmp_path / "state").exists()


def row(**changes: object) -> ProcessRow:
    values: dict[str, object] = {
        "name": "prefill-0",
        "role": "prefill",
        "state": "ready",
        "pid": 12,
        "port": 8001,
        "base_url": "http://127.0.0.1:8001",
        "kind": "vllm",
        "uptime_s": 75.0,
        "restarts": 0,
        "last_exit": None,
        "log_path": "/l/prefill-0.log",
    }
    return ProcessRow(**(values | changes))  # type: ignore[arg-type]


def report(*rows: ProcessRow, is_alive: bool = True, orphans: tuple[int, ...] = ()) -> DeploymentReport:
    return DeploymentReport("demo", 7, is_alive, False, rows, orphans)


def test_table() -> None:
    shown = table_lines(
        report(
            row(num_running=3, num_waiting=0),
            row(name="decode-0", role="decode", is_load_unknown=True),
            row(name="router", role="router", kind="router", state="restarting", pid=None, last_exit="was killed"),
        )
    )
    assert shown == [
        "demo: supervisor pid 7",
        "process    role     pid  state       port  uptime  running  waiting  restarts",
        "prefill-0  prefill  12   ready       8001  1m15s   3        0        0",
        "decode-0   decode   12   ready       8001  1m15s   ?        ?        0",
        "router     router   -    restarting  8001  1m15s   -        -        0",
        "router was killed (log: /l/prefill-0.log)",
    ]
    gone = table_lines(report(row(state="dead", pid=None), is_alive=False, orphans=(5, 6)))
    assert gone[0] == "demo: supervisor gone (was pid 7)"
    assert "pid 5, 6; antiphon down --name demo" in gone[-1]


def test_table_tells_what_a_cache_server_holds() -> None:
    cache = {"role": "cache_server", "kind": "cache_server", "port": 8090, "base_url": "http://127.0.0.1:8090"}
    shown = table_lines(
        report(
            row(name="cache-prefill", num_objects=1, used_bytes=11_796_480, total_bytes=10**9, **cache),
            row(name="cache-decode", is_load_unknown=True, lacks=("shares nothing\x1b",), **cache),
            row(name="cache-x", state="restarting", pid=None, **cache),
        )
    )
    assert shown[2:] == [
        "cache-prefill  cache_server  12   ready       8090  1m15s   -        -        0",
        "cache-decode   cache_server  12   ready       8090  1m15s   -        -        0",
        "cache-x        cache_server  -    restarting  8090  1m15s   -        -        0",
        "cache-prefill holds 1 object, 11.8 MB of 1 GB",
        "cache-decode did not tell what it holds in time (http://127.0.0.1:8090/status)",
        "cache-decode shares nothing\\x1b",
    ]


def test_exit_codes() -> None:
    ready, failed, stopped = report(row()), report(row(state="failed")), report(row(state="stopped"), is_alive=False)
    assert exit_code_of([ready]) == 0
    assert exit_code_of([ready, failed]) == 1
    assert exit_code_of([report(row(state="dead"), is_alive=False, orphans=(5,))]) == 1
    assert exit_code_of([report(row(state="dead"), is_alive=False)]) == 3
    assert exit_code_of([stopped]) == 3
    assert exit_code_of([]) == 3


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (0.4, "0s"), (59.9, "59s"), (75, "1m15s"), (3700, "1h01m"), (90000, "1d01h"), (-5, "0s")],
)
def test_uptime(seconds: float | None, text: str) -> None:
    assert format_uptime(seconds) == text


def test_nothing_is_up(tmp_path: Path) -> None:
    ran = CliRunner().invoke(status_module.status, ["--state-dir", str(tmp_path)])
    assert (ran.exit_code, "nothing is up" in ran.output) == (3, True)
    ran = CliRunner().invoke(down, ["--state-dir", str(tmp_path)])
    assert (ran.exit_code, "nothing is up" in ran.output) == (0, True)
    ran = CliRunner().invoke(down, ["--state-dir", str(tmp_path), "--name", "../x"])
    assert ran.exit_code == 2
