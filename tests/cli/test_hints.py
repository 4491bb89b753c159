"""What the commands say to somebody who has typed nearly the right thing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from antiphon.cli.main import main
from antiphon.config.compile import compile_all
from antiphon.config.load import load_spec
from antiphon.protocol.state import DeploymentState, ProcessState
from antiphon.supervisor import procfs, store
from tests.config.facts_for_tests import LAPTOP, compiled_from, gatherer


def run(*args: str) -> Result:
    return CliRunner().invoke(main, list(args))


@pytest.mark.parametrize("verb", [("up",), ("config", "check"), ("config", "render")])
def test_no_spec_in_the_folder(verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run(*verb)
    assert result.exit_code == 2
    assert "no antiphon.yaml in this folder" in result.output
    assert "name one with --config, or start from examples/" in result.output
    result = run(*verb, "--set", "prefil.replicas=2")
    assert ("no antiphon.yaml" in result.output, "did you mean prefill?" in result.output) == (True, True)
    (tmp_path / "antiphon.yaml").write_text("prefill: {replicas: 2}\n")
    result = run(*verb)
    assert ("no antiphon.yaml" in result.output, "model.path: is required" in result.output) == (False, True)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        (["--cache.chunk-size-tokens", "100"], "Write --set cache.chunk_size_tokens=100\n"),
        (["--cache.chunk_size_tokens=100"], "Write --set cache.chunk_size_tokens=100\n"),
        (["--router.cache-server", "http://a:1"], "Write --set router.cache_servers=http://a:1\n"),
        (["--model.path", "--live"], "Write --set model.path=VALUE\n"),
        (["--name"], "Write --set name=VALUE\n"),
        (["--formt", "json"], "--format"),
    ],
)
def test_a_field_as_an_option_of_config(typed: list[str], hint: str) -> None:
    for verb in ("check", "render"):
        result = run("config", verb, *typed)
        assert result.exit_code == 2
        assert "No such option" in result.output
        assert hint in result.output


@pytest.mark.parametrize("verb", ["down", "status"])
def test_a_name_without_its_option(verb: str) -> None:
    result = run(verb, "other")
    assert result.exit_code == 2
    assert "Name a deployment with --name other" in result.output


def test_cache_server_refuses_two_uses_of_one_port_before_it_starts() -> None:
    result = run("cache-server", "--port", "6555", "--http-port", "6555", "--l1-size-gb", "1")
    assert result.exit_code == 2
    assert "two uses of one port, 6555" in result.output
    result = run("cache-server", "--port", "1", "--http-port", "1", "--http-host", "localhost", "--l1-size-gb", "1")
    assert "two uses of one port, 1" in result.output


def test_a_missing_flag_is_named_as_a_flag() -> None:
    result = run("cache-server")
    assert result.exit_code == 2
    assert "--l1-size-gb: is required\n  fix: add --l1-size-gb NUMBER" in result.output


@pytest.mark.parametrize(("typed", "policy"), [("ARC", "arc"), ("Lru", "lru"), ("arc", "arc")])
def test_a_policy_in_any_case(typed: str, policy: str) -> None:
    assert load_spec(None, ["model.path=x", f"cache.eviction_policy={typed}"]).cache.eviction_policy == policy
    result = run("cache-server", "--eviction-policy", typed)
    assert "--l1-size-gb: is required" in result.output, "the policy was taken"


def test_servers_that_nobody_uses_are_pointed_out() -> None:
    child = {"kv_connector": "AntiphonConnector", "kv_connector_extra_config": {"antiphon.port": 6555}}
    connectors = {"connectors": [{"kv_connector": "NixlConnector"}, child]}
    both = {"kv_connector": "MultiConnector", "kv_connector_extra_config": connectors}
    sets = {"engine.device": "cpu", "prefill.kv_transfer_config": both, "decode.kv_transfer_config": both}

    def said(port: int, *, is_shared: bool) -> list[str]:
        compiled = compiled_from(sets | {"cache.port": port, "cache.shared": is_shared}, LAPTOP)
        assert compiled == compile_all(compiled.spec, LAPTOP)
        return [notice.message for notice in compiled.notices if "no engine uses" in notice.message]

    assert said(6555, is_shared=True) == []
    assert "no engine uses cache-decode:" in said(6555, is_shared=False)[0]
    assert "no engine uses cache-prefill or cache-decode:" in said(7000, is_shared=False)[0]


def written_state(folder: Path, *, supervisor_pid: int, supervisor_ticks: int) -> None:
    folder.mkdir(parents=True)
    process = ProcessState(
        name="prefill-0", role="prefill", kind="simulated", state="ready", pid=os.getpid(), start_ticks=1
    )
    state = DeploymentState(
        name=folder.name,
        boot_id=procfs.boot_id(),
        supervisor_pid=supervisor_pid,
        supervisor_start_ticks=supervisor_ticks,
        started_at=1.0,
        stop_grace_s=2.0,
        processes=[process],
    )
    store.write_state(folder, state)


def test_what_a_dead_supervisor_left_in_the_state_folder_is_put_away(tmp_path: Path) -> None:
    written_state(tmp_path / "demo", supervisor_pid=os.getpid(), supervisor_ticks=1)
    place = ("--state-dir", str(tmp_path))
    result = run("status", *place)
    assert result.exit_code == 3
    assert "nothing of it runs any more; antiphon down --name demo puts it away" in result.output
    # A supervisor that is being started holds the folder: its state is left alone.
    lock = store.DeploymentLock(tmp_path / "demo")
    lock.acquire()
    assert run("down", *place, "--name", "demo").exit_code == 0
    assert "puts it away" in run("status", *place).output
    lock.release()
    assert run("down", *place, "--name", "demo").exit_code == 0
    assert "nothing is up" in run("status", *place).output
    assert "demo: stopped" in run("status", *place, "--name", "demo").output


def test_check_of_a_deployment_that_is_up_says_what_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = procfs.start_ticks_of(os.getpid())
    assert ticks is not None
    written_state(tmp_path / "demo", supervisor_pid=os.getpid(), supervisor_ticks=ticks)
    sets = ["model.path=x", "name=demo", "engine.device=cpu", f"supervisor.state_dir={tmp_path}"]
    flags = [part for each in sets for part in ("--set", each)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("antiphon.cli.config.gather_facts", gatherer(mem_total_bytes=3 * 10**9))
    result = run("config", "check", *flags)
    assert "the ports and the memory that demo holds were not counted, since it is up" in result.output
    assert "is all that this host has" in result.output
    assert result.exit_code == 2
