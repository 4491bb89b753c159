"""``antiphon config render``: the text, run by a real shell, gives each process exactly what the plan says."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from antiphon.cli.main import main

SPEC = """
model: {path: /models/it's a "model", served_name: $HOME `x`}
engine: {device: cpu, threads: 1, env: {ODD: "a b'c$d\\\\e"}, args: {override-generation-config: {a: "b c"}}}
prefill: {replicas: 2, hosts: [127.0.0.1, 192.0.2.9]}
decode: {hosts: [192.0.2.9]}
"""


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "antiphon.yaml").write_text(SPEC)
    return tmp_path


def invoke(*args: str) -> Result:
    return CliRunner().invoke(main, ["config", "render", *args])


def processes(*args: str) -> list[dict[str, Any]]:
    result = invoke("--format", "json", *args)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["processes"]
    return found


def names(*args: str) -> list[str]:
    return [process["name"] for process in processes(*args)]


@pytest.mark.process
def test_a_shell_gives_each_process_what_the_plan_says(in_folder: Path, die_with_parent: Callable[[], None]) -> None:
    tell = in_folder / "tell"
    tell.write_text('#!/bin/sh\nenv -0 > "$OUT.env"; printf "%s\\0" "$@" > "$OUT.argv"\n')
    tell.chmod(tell.stat().st_mode | stat.S_IXUSR)
    (in_folder / "worker key").write_text("# of the engines\n  sk-'w\"1  \n")
    key_file = in_folder / "worker key"
    sets = ["--set", f"engine.python={tell}", "--only", "prefill-0", "--set", f"router.worker_api_key_file={key_file}"]
    (plan,) = processes(*sets)
    text = invoke(*sets).stdout
    base = {"PATH": "/usr/bin:/bin", "OUT": str(in_folder / "out"), "VLLM_CPU_KVCACHE_SPACE": "4"}
    subprocess.run(["sh", "-c", text], env=base, check=True, timeout=30, preexec_fn=die_with_parent)

    def without_incarnation(argv: list[str]) -> list[str]:
        return [re.sub(r"prefill-0-[0-9a-f]{12}", "prefill-0-X", arg) for arg in argv]

    argv = (in_folder / "out.argv").read_text().split("\0")[:-1]
    assert without_incarnation(argv) == without_incarnation(plan["argv"][1:])
    env = dict(line.split("=", 1) for line in (in_folder / "out.env").read_text().split("\0") if "=" in line)
    assert plan["env"].items() <= env.items()
    assert env["ODD"] == "a b'c$d\\e"
    assert "VLLM_CPU_KVCACHE_SPACE" not in env
    assert (plan["env_files"], env["VLLM_API_KEY"]) == ({"VLLM_API_KEY": str(key_file)}, "sk-'w\"1")
    assert "sk-" not in text


def test_each_process_is_headed_by_where_it_runs() -> None:
    heads = [line for line in invoke().stdout.splitlines() if line.startswith("#")]
    assert [line.split(" (")[0] for line in heads] == [
        "# cache-prefill-0 runs on 127.0.0.1",
        "# cache-prefill-1 runs on 192.0.2.9",
        "# cache-decode runs on 192.0.2.9",
        "# prefill-0 runs on 127.0.0.1",
        "# prefill-1 runs on 192.0.2.9",
        "# decode-0 runs on 192.0.2.9",
        "# router runs on 127.0.0.1",
    ]


def test_incarnations_are_fresh() -> None:
    ids = re.findall(r'"engine_id":"([a-z]+-\d)-([0-9a-f]{12})"', invoke().stdout + invoke().stdout)
    assert [name for name, _ in ids] == ["prefill-0", "prefill-1", "decode-0"] * 2
    assert len({incarnation for _, incarnation in ids}) == 6


def test_selection() -> None:
    caches = ["cache-prefill-0", "cache-prefill-1", "cache-decode"]
    assert names() == [*caches, "prefill-0", "prefill-1", "decode-0", "router"]
    assert names("--host", "192.0.2.9") == [*caches[1:], "prefill-1", "decode-0"]
    assert names("--only", "cache_server") == caches
    assert names("--only", "prefill") == ["prefill-0", "prefill-1"]
    assert names("--only", "prefill", "--host", "127.0.0.1") == ["prefill-0"]
    assert names("--only", "router") == ["router"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--host", "10.0.0.1"), "the hosts are 127.0.0.1, 192.0.2.9"),
        (("--only", "prefil"), "did you mean 'prefill'?"),
        (("--only", "x"), "there are cache_server, prefill, decode, router, cache-prefill-0"),
        (("--config", "absent.yaml"), "cannot be read"),
        (("--set", "router.prot=1"), "did you mean router.port?"),
        (("--set", "decode.kv_transfer_config.kv_connector=LMCacheMPConnector"), "beside a NixlConnector"),
    ],
)
def test_what_cannot_be_rendered_is_refused(args: tuple[str, ...], words: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_notices_do_not_disturb_what_is_pasted() -> None:
    result = invoke("--set", "engine.threads=null")
    assert "notice: engine.threads" in result.stderr
    assert "notice" not in result.stdout


@pytest.mark.parametrize("form", ["shell", "json"])
def test_secrets_are_shown_only_when_asked_for(form: str) -> None:
    args = ["--format", form, "--set", "engine.args.api-key=sk-1", "--set", "prefill.env.HF_TOKEN=hf_2"]
    result = invoke(*args)
    assert "--api-key" in result.stdout
    assert "***" in result.stdout
    assert not {"sk-1", "hf_2"} & set(re.findall(r"[\w-]+", result.stdout))
    assert "--show-secrets prints them" in result.stderr
    result = invoke(*args, "--show-secrets")
    assert {"sk-1", "hf_2"} <= set(re.findall(r"[\w-]+", result.stdout))
    assert "***" not in result.stdout + result.stderr
    assert "--show-secrets" not in invoke().stderr, "nothing was masked"


def test_live_table(monkeypatch: pytest.MonkeyPatch, free_ports: Callable[[int], list[int]]) -> None:
    sets = dict(zip(("prefill.port", "prefill.side_channel_port", "router.port"), free_ports(3), strict=True))
    args = [f"--set={name}={port}" for name, port in sets.items()]
    Path("live.yaml").write_text("model: {path: org/tiny}\nengine: {kind: simulated}\n")
    result = CliRunner().invoke(main, ["config", "check", "--config", "live.yaml", "--live", *args])
    assert result.exit_code == 1
    assert re.search(r"^no +router +http port 127\.0\.0\.1:\d+ +refused: nothing listens$", result.stdout, re.MULTILINE)
    assert "fix: start router on 127.0.0.1" in result.stdout
    result = CliRunner().invoke(main, ["config", "check", "--config", "live.yaml", "--live", "--format", "json", *args])
    assert json.loads(result.stdout)["ok"] is False


def test_check_as_json() -> None:
    args = ["config", "check", "--format", "json", "--set", "engine.kind=simulated", "--set", "decode.port=5600"]
    sets = ["--set", "prefill.hosts=127.0.0.1", "--set", "decode.hosts=127.0.0.1"]
    result = CliRunner().invoke(main, [*args, *sets])
    answer = json.loads(result.stdout)
    assert result.exit_code == 2
    assert answer["ok"] is False
    assert {"field", "message", "fix"} == answer["problems"][0].keys()
    assert answer["processes"] == ["prefill-0", "prefill-1", "decode-0", "router"]
