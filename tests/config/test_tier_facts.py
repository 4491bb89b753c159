"""What ``config check`` and ``up`` find out about the tiers of this host's cache servers before anything is started.

Real child processes ask, as for the interpreters of engines. Out of scope: the tiers themselves (tests/storage).
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from antiphon.config import tier_facts
from antiphon.config.checks import run_checks
from antiphon.config.compile import Compiled
from antiphon.config.problems import Problem
from antiphon.config.tier_facts import tier_faults
from antiphon.core.extras import install_remedy
from tests.config.facts_for_tests import compiled_from, facts_of

LOCAL = frozenset({"127.0.0.1"})


def compiled_with(*tiers: str, **more: Any) -> Compiled:
    sets = {"engine.device": "cpu", "cache.l1_size_bytes": "1GB", "cache.shared": True, "cache.l2": list(tiers)}
    return compiled_from(sets | more)


def problems(compiled: Compiled, **changes: Any) -> list[Problem]:
    facts = facts_of(compiled, tier_faults=tier_faults(compiled, LOCAL), **changes)
    return [each for each in run_checks(compiled, facts).problems if each.field.startswith("cache.l2")]


def test_a_folder_that_can_be_made_is_no_problem_and_is_not_made(tmp_path: Path) -> None:
    assert problems(compiled_with(f"disk://{tmp_path}/a/b?capacity_gb=1")) == []
    assert list(tmp_path.iterdir()) == []
    there = tmp_path / "kv" / "antiphon-shared"
    there.mkdir(parents=True)
    assert problems(compiled_with(f"disk://{tmp_path}/kv?capacity_gb=1")) == []
    assert list(there.iterdir()) == []


@pytest.mark.parametrize("where", ["/proc/kv", "FILE/kv"])
def test_a_folder_that_cannot_be_made(where: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    path = where.replace("FILE", str(file))
    (found,) = problems(compiled_with(f"disk://{path}?capacity_gb=1"))
    assert found.field == "cache.l2[0]"
    assert found.message.startswith(f"the tier disk: {path}/antiphon-shared: ")
    assert found.fix == "name a folder that this user can make and write"


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "antiphon-shared").mkdir()
    (tmp_path / "antiphon-shared" / "letters").touch()
    (found,) = problems(compiled_with(f"disk://{tmp_path}?capacity_gb=1"))
    assert "'letters' and is not that of a tier" in found.message


@pytest.mark.parametrize(
    ("package", "tier", "extra"),
    [
        ("redis", "redis://127.0.0.1:1/0", "redis"),
        ("obstore", "s3://bucket/prefix", "s3"),
        ("mooncake", "mooncake://127.0.0.1:1", "mooncake"),
    ],
)
def test_the_package_of_a_tier_is_missing(
    package: str, tier: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The child refuses to import the package, as where it is not installed.
    hook = f"import sys\nsys.modules[{package!r}] = None\n"
    (tmp_path / "sitecustomize.py").write_text(hook)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = problems(compiled_with(tier))
    assert "is not installed" in found.message
    assert install_remedy(extra) in found.fix
    assert f"pip install '.[{extra}]'" in found.fix
    assert 'make install WITH="tiers"' in found.fix


def test_nothing_is_asked_over_the_network_and_no_secret_is_needed_twice(tmp_path: Path) -> None:
    missing = tmp_path / "password"
    (found,) = problems(compiled_with(f"redis://127.0.0.1:1/0?password_file={missing}", "s3://bucket/x?name=cold"))
    assert found.field == "cache.l2[0]"
    assert "cannot be read" in found.message


def test_servers_of_other_hosts_and_those_that_run_are_not_looked_at(tmp_path: Path) -> None:
    tier = "disk:///proc/kv?capacity_gb=1"
    elsewhere = compiled_with(tier, **{"prefill.hosts": ["10.0.0.1"], "decode.hosts": ["10.0.0.1"]})
    assert tier_faults(elsewhere, LOCAL) == {}
    here = compiled_with(tier)
    assert problems(here, running={"cache": frozenset({6555})}) == []
    assert len(problems(here)) == 1


def test_servers_are_tried_at_once_and_told_in_the_order_of_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_with("disk:///x?capacity_gb=1", **{"cache.shared": False})
    is_decode_tried = threading.Event()

    def asked(_: Any, __: str, tiers: list[str], **___: Any) -> subprocess.CompletedProcess[str]:
        # Prefill, which is tried first, has its answer after decode.
        if "decode" in tiers[0]:
            is_decode_tried.set()
        assert is_decode_tried.wait(10), "one after the other"
        return subprocess.CompletedProcess([], 1, "", "no such thing")

    monkeypatch.setattr(tier_facts, "run_python", asked)
    found = tier_faults(compiled, LOCAL)
    assert list(found) == ["cache-prefill", "cache-decode"]
    assert {fault.message.rpartition(": ")[2] for faults in found.values() for fault in faults} == {"no such thing"}


def test_so_many_servers_at_a_time_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_with("disk:///x?capacity_gb=1", **{"cache.shared": False})
    monkeypatch.setattr(tier_facts, "AT_ONCE", 1)
    threads = set()

    def asked(*_: Any, **__: Any) -> subprocess.CompletedProcess[str]:
        threads.add(threading.get_ident())
        return subprocess.CompletedProcess([], 1, "", "no such thing")

    monkeypatch.setattr(tier_facts, "run_python", asked)
    assert len(tier_faults(compiled, LOCAL)) == 2
    assert len(threads) == 1
