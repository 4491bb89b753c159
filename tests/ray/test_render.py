"""A spec as a Serve file and back: every knob returns, or is said to be left to Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from antiphon.config.knobs import Knob, knobs
from antiphon.config.load import load_spec
from antiphon.config.problems import SpecError
from antiphon.config.spec import EngineSpec, Spec
from antiphon.ray.mapping import LEFT_TO_RAY, mapped
from antiphon.ray.render import serve_file, spec_file
from antiphon.ray.schema import parse
from antiphon.ray.serve_file import read_serve_file
from tests.ray.configs import GPU_HOST

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
CPU_DEFAULTS = {"enforce_eager": True, "kv_memory_bytes": 400_000_000, "threads": 1}
FIXED: dict[str, Any] = {
    "engine.kv_cache_dtype": "fp8",
    "prefill.kv_transfer_config": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
    "decode.kv_transfer_config": {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"},
    "router.prefill": ["http://a:1"],
    "router.decode": ["http://a:1"],
    "router.cache_servers": ["http://a:1"],
    "cache.quota_bytes": {"a": 2_000_000},
    "cache.host": "127.0.0.2",
    "cache.l2": ["disk:///chunks?capacity_gb=1"],
    "cache.coordinator_url": "http://a:1",
    "handoff.kind": "cache",
    "name": "mine",
}


def is_repeated(path: str) -> bool:
    """Whether decode has the knob as prefill has it, and nothing of its own."""
    return path.startswith("decode.") and path.removeprefix("decode.").split(".")[0] in EngineSpec.model_fields


KNOBS = [knob for knob in knobs(Spec) if not is_repeated(knob.path)]


def again(spec: Spec) -> Spec:
    """``spec`` by way of a Serve file. On a machine with GPUs, so that nothing is filled in."""
    application = yaml.safe_load(serve_file(spec, show_secrets=True).text)["applications"][0]
    return mapped(parse(application["args"]), name=application["name"], machine=GPU_HOST).spec


def dumped(spec: Spec) -> dict[str, Any]:
    """What the spec says; the pools hold what ``engine`` says, and the name of the model is always written."""
    values = spec.model_dump(exclude={"engine": True, "supervisor": {"restart", "state_dir", "log_dir"}})
    values["model"]["served_name"] = spec.model.served
    for section in (values["prefill"], values["decode"]):
        if section["device"] == "cpu":  # what every engine on CPU gets is written in the file
            for name, value in CPU_DEFAULTS.items():
                section[name] = value if section[name] is None else section[name]
    return values


def changed(knob: Knob) -> Any:
    """A value that the knob does not have by default."""
    name = knob.path.partition(".")[2]
    for key in (knob.path, f"engine.{name}"):
        if key in FIXED:
            return FIXED[key]
    if knob.kind == "bool" or isinstance(knob.default, bool):
        return not knob.default
    if knob.kind == "choice":
        return next(choice for choice in knob.choices if choice != knob.default)
    if knob.kind in ("int", "float", "bytes"):
        return next(
            value for value in (1, 0.5, 7, 2_000_000, 64, 4096, 1e8) if value != knob.default and is_valid(knob, value)
        )
    return {"list": ["a"], "mapping": {"a": "b"}}.get(knob.kind, "x")


def is_valid(knob: Knob, value: Any) -> bool:
    try:
        load_spec(None, {"model.path": "org/name", knob.path: value})
    except SpecError:
        return False
    return True


def is_left(path: str) -> bool:
    return any(path == each or path.startswith(f"{each}.") for each in LEFT_TO_RAY) and not path.endswith(".replicas")


@pytest.mark.parametrize("knob", KNOBS, ids=lambda knob: knob.path)
def test_every_knob_returns_or_is_left_to_ray(knob: Knob) -> None:
    value = changed(knob)
    spec = load_spec(None, {"model.path": "org/name", knob.path: value})
    default = load_spec(None, {"model.path": "org/name"})
    assert spec != default, "the knob is changed"
    if is_left(knob.path):
        assert any(knob.path.startswith(notice.field) for notice in serve_file(spec).notices)
        assert dumped(again(spec)) == dumped(again(default))
    else:
        assert dumped(again(spec)) == dumped(spec)
        assert serve_file(spec, show_secrets=True).notices == ()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_return(path: Path) -> None:
    spec = load_spec(path)
    here = spec.model_copy(
        update={pool: spec.pool(pool).model_copy(update={"hosts": ["127.0.0.1"]}) for pool in ("prefill", "decode")}
    )
    left = {notice.field.partition(".")[2] for notice in serve_file(spec).notices}
    assert left <= {"hosts", "devices", "bind"}
    own, returned = dumped(here), dumped(again(spec))
    for pool in ("prefill", "decode"):
        for name in left - {"hosts"}:
            own[pool].pop(name), returned[pool].pop(name)
    assert returned == own


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(
        {"prefill.replicas": st.integers(1, 9), "decode.tensor_parallel_size": st.sampled_from([1, 2, 4])},
        optional={
            "engine.max_num_seqs": st.integers(1, 512),
            "engine.args": st.dictionaries(st.sampled_from(["seed", "no-x", "a-b"]), st.booleans() | st.integers()),
            "decode.env": st.dictionaries(st.sampled_from(["A", "HF_TOKEN", "B.C"]), st.text(max_size=5)),
            "model.served_name": st.text(min_size=1, max_size=5),
            "cache.enabled": st.booleans(),
        },
    )
)
def test_specs_return(sets: dict[str, Any]) -> None:
    # A false bare flag is left out of the command line: as a keyword argument it would say no.
    sets["engine.args"] = {name: value for name, value in sets.get("engine.args", {}).items() if value is not False}
    spec = load_spec(None, {"model.path": "org/name", **sets})
    assert dumped(again(spec)) == dumped(spec)
    assert again(spec).cache.model_fields_set >= {"enabled"} & spec.cache.model_fields_set


def test_the_file_is_one_that_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(serve_file(load_spec(None, {"model.path": "org/name", "name": "mine"})).text)
    found = read_serve_file(path)
    assert (found.name, found.notices) == ("mine", ())


def test_secrets_are_masked_unless_asked_for() -> None:
    spec = load_spec(
        None, {"model.path": "org/name", "decode.env": {"HF_TOKEN": "hf_1"}, "prefill.args": {"api-key": "s"}}
    )
    for file in (serve_file, spec_file):
        hidden = file(spec)
        assert "hf_1" not in hidden.text
        assert "--show-secrets" in hidden.notices[-1].message
        assert "hf_1" in file(spec, show_secrets=True).text


def test_a_spec_file_is_the_spec(tmp_path: Path) -> None:
    sets = {"model.path": "org/name", "name": "mine", "engine.max_num_seqs": 4, "router.port": 1234}
    spec = load_spec(None, sets)
    path = tmp_path / "antiphon.yaml"
    path.write_text(spec_file(spec).text)
    assert load_spec(path).model_dump(exclude={"engine"}) == spec.model_dump(exclude={"engine"})
