"""How much memory is left, by the machine and by control groups of both versions, on made-up file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from antiphon.config.resolve import this_machine
from antiphon.core.memory import available_memory_bytes
from antiphon.core.memory import available_memory_bytes as measure

KIB = 1024
MACHINE_BYTES = 8_000_000 * KIB


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\nHugePages_Total: 0\n")
    return folder


def group(folder: Path, files: tuple[str, str], limit: str, usage: int, cache: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{cache}\n")


V2 = ("memory.max", "memory.current")
V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory_bytes() < 1 << 50


def test_without_control_groups_the_machine_decides(proc: Path, tmp_path: Path) -> None:
    assert measure(proc, tmp_path / "none") == MACHINE_BYTES
    (proc / "self" / "cgroup").write_text("0::/\n")
    assert measure(proc, tmp_path / "none") == MACHINE_BYTES


def test_the_tightest_group_of_version_2_decides(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/slice/pod\n")
    group(groups / "slice" / "pod", V2, "max", 900, "inactive_file 0")
    assert measure(proc, groups) == MACHINE_BYTES, "the word max is no limit"
    group(groups / "slice", V2, "5000", 1500, "inactive_file 500")
    assert measure(proc, groups) == 5000 - 1500 + 500, "a group above limits too, less what it can drop"
    group(groups / "slice" / "pod", V2, "2000", 900, "inactive_file 0")
    assert measure(proc, groups) == 1100
    group(groups / "slice" / "pod", V2, "2000", 2100, "inactive_file 0")
    assert measure(proc, groups) == 0


def test_a_path_of_the_host_falls_back_to_the_root(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/kubepods/pod1\n")
    group(groups, V2, "3000", 1000, "inactive_file 1")
    assert measure(proc, groups) == 2001


def test_version_1(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/box\n4:cpuset:/box\n0::/\n")
    group(groups / "memory" / "box", V1, "9223372036854771712", 900, "total_inactive_file 0")
    assert measure(proc, groups) == MACHINE_BYTES
    group(groups / "memory" / "box", V1, "4000", 1000, "total_inactive_file 10")
    assert measure(proc, groups) == 3010


def test_what_a_group_can_drop_is_free(proc: Path, tmp_path: Path) -> None:
    groups = tmp_path / "cgroup"
    (proc / "self" / "cgroup").write_text("0::/\n")
    group(groups, V2, "4000", 3000, "active_file 7\ninactive_file 2400\nslab_reclaimable 100")
    assert measure(proc, groups) == 3500
    group(groups, V2, "4000", 3000, "inactive_file 3100")
    assert measure(proc, groups) == 4000, "never more than its limit"
    (groups / "memory.current").unlink()
    assert measure(proc, groups) == MACHINE_BYTES


def test_the_defaults_ask_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.config.resolve.available_memory_bytes", lambda: 4711)
    assert this_machine().mem_available_bytes == 4711
