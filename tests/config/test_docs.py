"""What is made from the spec, or shows it: the reference page and the examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from antiphon.config.checks import run_checks
from antiphon.config.compile import compile_all
from antiphon.config.knobs import knobs
from antiphon.config.load import load_spec
from antiphon.config.reference import reference
from antiphon.config.spec import Spec
from antiphon.config.tenant_files import read_tenants
from tests.config.facts_for_tests import GPU_HOST, LAPTOP, facts_of

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SHAPES: dict[str, tuple[Any, list[str]]] = {
    "aware": (GPU_HOST, ["127.0.0.1"] * 5),
    "laptop-cpu": (LAPTOP, ["127.0.0.1"] * 5),
    "one-node-two-gpus": (GPU_HOST, ["127.0.0.1"] * 3),
    "shared-cache": (LAPTOP, ["127.0.0.1"] * 4),
    "two-hosts": (GPU_HOST, ["192.0.2.10", "192.0.2.20", "192.0.2.10"]),
}


def test_reference_is_in_step_with_the_spec() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == reference(), "run: python -m antiphon.config.reference > docs/configuration.md"


def test_every_knob_is_described_and_numbers_state_their_range() -> None:
    for knob in knobs(Spec):
        assert len(knob.description) > 20, knob.path
        assert knob.description.endswith("."), knob.path
        if knob.kind in ("int", "float", "bytes"):
            assert " to " in knob.description, f"{knob.path} states no range"
            units = {"_s": "econds", "_ms": "illiseconds", "_bytes": "bytes", "_tokens": "okens"}
            for suffix, unit in units.items():
                if knob.path.endswith(suffix) and not knob.path.endswith("per_s"):
                    assert unit in knob.description, f"{knob.path} states no unit"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_work(path: Path) -> None:
    machine, hosts = SHAPES[path.stem]
    compiled = compile_all(load_spec(path), machine)
    assert [plan.host for plan in compiled.plans] == hosts
    report = run_checks(compiled, facts_of(compiled, num_cuda_devices=4))
    assert report.problems == ()


def test_tenants_of_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    keys = tmp_path / ".config" / "antiphon" / "keys"
    keys.mkdir(parents=True)
    for name in ("search", "batch"):
        (keys / name).write_text(f"key-of-{name}\n")
    named = load_spec(ROOT / "examples" / "aware.yaml").router.tenants_file
    assert named is not None
    table = read_tenants(named)
    assert [entry.spec.name for entry in table.tenants] == ["search", "batch"]


def test_every_example_is_known_here() -> None:
    assert {path.stem for path in EXAMPLES} == SHAPES.keys()
    text = (ROOT / "examples" / "README.md").read_text()
    assert all(path.name in text for path in EXAMPLES)
