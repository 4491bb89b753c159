"""A Serve config file: which application is ours, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from antiphon.config.problems import SpecError
from antiphon.ray.mapping import mapped
from antiphon.ray.serve_file import IMPORT_PATH, RAY_IMPORT_PATH, ServeApplication, read_serve_file
from tests.ray.configs import LAPTOP, pd_config


def application(**changes: Any) -> dict[str, Any]:
    return {"import_path": IMPORT_PATH, "name": "pd", "route_prefix": "/", "args": pd_config(), **changes}


def read(folder: Path, *applications: Any, **others: Any) -> ServeApplication:
    path = folder / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": list(applications), **others}))
    return read_serve_file(path)


def test_ours_is_found_among_others(tmp_path: Path) -> None:
    other = {"import_path": "shop:app", "name": "shop"}
    options = {"http_options": {"port": 8000}, "proxy_location": "EveryNode"}
    found = read(tmp_path, other, application(), **options)
    assert (found.name, found.folder, found.notices) == ("pd", tmp_path, ())


def test_the_builder_of_ray_is_read_with_a_notice(tmp_path: Path) -> None:
    (notice,) = read(tmp_path, application(import_path=RAY_IMPORT_PATH)).notices
    assert IMPORT_PATH in notice.message


def test_a_name_that_no_spec_can_have_stays_with_serve(tmp_path: Path) -> None:
    found = read(tmp_path, application(name="a" * 33))
    assert found.name is None
    assert "1 to 32" in found.notices[0].message


def test_the_environment_of_the_application_reaches_both_pools(tmp_path: Path) -> None:
    args = pd_config(("decode_config.runtime_env.env_vars", {"A": "own"}))
    found = read(tmp_path, application(args=args, runtime_env={"env_vars": {"A": "shared", "B": "shared"}}))
    spec = mapped(found.args, machine=LAPTOP).spec
    assert spec.prefill.env == {"A": "shared", "B": "shared"}
    assert spec.decode.env == {"A": "own", "B": "shared"}


@pytest.mark.parametrize(
    ("applications", "others", "field", "words"),
    [
        ([], {}, "applications", "import_path"),
        (["x"], {}, "applications", "not a list of applications"),
        ([application(import_path="shop:app")], {}, "applications[0].import_path", IMPORT_PATH),
        ([application(), application()], {}, "applications", "keep one"),
        ([application()], {"http_option": {}}, "http_option", "did you mean http_options?"),
        (
            [application(rout_prefix="/")],
            {},
            "applications[0].rout_prefix",
            "did you mean applications[0].route_prefix?",
        ),
        ([application(deployments=[{"name": "x"}])], {}, "applications[0].deployments", "deployment_config"),
        ([application(args=[1])], {}, "applications[0].args", "not a mapping"),
        ([application(args={"prefil_config": {}})], {}, "applications[0].args.prefil_config", "prefill_config?"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, applications: list[Any], others: Any, field: str, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, *applications, **others)
    found = {problem.field: f"{problem.message} {problem.fix}" for problem in caught.value.problems}
    assert words in found[field]


def test_a_file_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="name an existing file with --from-ray FILE"):
        read_serve_file(tmp_path / "absent.yaml")
