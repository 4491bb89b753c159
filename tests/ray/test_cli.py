"""``antiphon config render`` with ``--ray`` and ``--from-ray``, and that neither needs Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from antiphon.cli.main import main
from antiphon.config.load import load_spec
from antiphon.ray.reference import MARK, reference
from tests.ray.configs import DATA, LAPTOP, MODEL

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def on_a_laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for module in ("antiphon.ray.mapping", "antiphon.config.compile"):
        monkeypatch.setattr(f"{module}.this_machine", lambda: LAPTOP)


def render(*args: str) -> Result:
    return CliRunner().invoke(main, ["config", "render", *args])


def test_from_ray_prints_a_spec_that_can_be_checked() -> None:
    result = render("--from-ray", str(DATA / "nixl.yaml"))
    assert result.exit_code == 0, result.output
    assert "notice: decode_config.engine_kwargs.enforce_eager: true on CPU" in result.stderr
    assert "notice: prefill_config: max_replicas, targets: only Ray knows these" in result.stderr
    Path("spec.yaml").write_text(result.stdout)
    spec = load_spec("spec.yaml")
    assert (spec.model.path, spec.prefill.replicas, spec.decode.replicas) == (MODEL, 2, 6)


def test_there_and_back(tmp_path: Path) -> None:
    sets = ["--set", f"model.path={MODEL}", "--set", "engine.device=cpu", "--set", "decode.replicas=2"]
    result = render("--ray", *sets)
    assert result.exit_code == 0, result.output
    assert "import_path: antiphon.ray:build_pd_openai_app" in result.stdout
    Path("serve.yaml").write_text(result.stdout)
    back = render("--from-ray", "serve.yaml")
    assert "replicas: 2" in back.stdout
    assert "device: cpu" in back.stdout


def test_secrets() -> None:
    args = ["--ray", "--set", "model.path=m", "--set", "decode.env.HF_TOKEN=hf_1"]
    assert "hf_1" not in render(*args).output
    assert "hf_1" in render(*args, "--show-secrets").stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--from-ray", "absent.yaml"), "cannot be read"),
        (("--from-ray", "x", "--ray"), "leave out --ray"),
        (("--from-ray", "x", "--set", "a=b"), "leave out --set"),
        (("--from-ray", "x", "--only", "router"), "leave out --only"),
        (("--ray", "--set", "model.path=m", "--only", "router"), "leave out --host, --only"),
        (("--ray",), "no antiphon.yaml in this folder"),
        (("--ray", "--set", "model.path=m", "--set", "prefill.kv_transfer_config={}"), "names no connector"),
    ],
)
def test_what_is_refused(args: tuple[str, ...], words: str) -> None:
    result = render(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert words in result.stderr


@pytest.mark.process
def test_nothing_of_it_imports_ray() -> None:
    modules = "antiphon.cli.config, antiphon.ray.reference"
    code = f"import sys; sys.modules['ray'] = None; import {modules}; print('ok')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "ok\n"


def test_the_page_is_in_step_with_the_tables() -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    assert page.partition(MARK)[2] == f"\n\n{reference()}", "run: python -m antiphon.ray.reference docs/ray.md"


def test_the_file_on_the_page_is_read() -> None:
    text = reference().partition("```yaml\n")[2].partition("```")[0]
    Path("serve.yaml").write_text(text)
    result = render("--from-ray", "serve.yaml")
    assert result.exit_code == 0, result.output
    assert "policy: least_load" in result.stdout
