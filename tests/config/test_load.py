"""Loading: precedence, flags typed by their field, and every problem at once.

In scope: ``load_spec``. Out of scope: what is checked against the host (tests/config/test_checks.py, golden files).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from antiphon.config.load import FILE_MAX_BYTES, load_spec, read_mapping
from antiphon.config.problems import SpecError
from antiphon.config.units import format_bytes, parse_bytes

SETS = {"model.path": "org/tiny"}


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "antiphon.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def fields_of(sets: Any) -> list[str]:
    with pytest.raises(SpecError) as caught:
        load_spec(None, sets)
    return [problem.field for problem in caught.value.problems]


def test_defaults_then_file_then_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: org/a, dtype: float32}\nrouter: {port: 4000}\nprefill: {replicas: 2}\n")
    spec = load_spec(path, ["prefill.replicas=3", ("decode.replicas", 4), "model.path=org/b", "prefill.replicas=5"])
    assert (spec.model.path, spec.model.dtype, spec.router.port) == ("org/b", "float32", 4000)
    assert (spec.prefill.replicas, spec.decode.replicas) == (5, 4)
    assert (spec.prefill.port, spec.decode.port) == (8001, 8101)


def test_a_tenants_file_of_a_spec_is_beside_it_and_that_of_a_flag_is_not(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: org/tiny}\nrouter: {tenants_file: who/tenants.yaml}\n")
    assert load_spec(path).router.tenants_file == str(tmp_path / "who" / "tenants.yaml")
    assert load_spec(path, ["router.tenants_file=mine.yaml"]).router.tenants_file == "mine.yaml"
    for named in ("/etc/tenants.yaml", "~/tenants.yaml"):
        path = write(tmp_path, f"model: {{path: org/tiny}}\nrouter: {{tenants_file: {named}}}\n")
        assert load_spec(path).router.tenants_file == named


@pytest.mark.parametrize("router", ["", "text", "{tenants_file: }", "{tenants_file: 7}", "{tenants_file: [a]}"])
def test_what_is_no_tenants_file_is_left_for_the_checks(tmp_path: Path, router: str) -> None:
    path = write(tmp_path, f"model: {{path: org/tiny}}\nrouter: {router}\n")
    if router in ("", "text", "{tenants_file: 7}", "{tenants_file: [a]}"):
        with pytest.raises(SpecError):
            load_spec(path)
    else:
        assert load_spec(path).router.tenants_file is None


def test_pools_take_from_engine_what_they_do_not_set() -> None:
    spec = load_spec(
        None,
        SETS
        | {
            "engine.max_num_seqs": 8,
            "engine.kv_memory_bytes": "100MB",
            "engine.args": {"seed": 1, "swap_space": 2},
            "engine.simulated.decode_token_ms": 7,
            "decode.max_num_seqs": 64,
            "decode.args": {"--seed": 3},
            "decode.simulated.kv_blocks": 99,
        },
    )
    assert (spec.prefill.max_num_seqs, spec.decode.max_num_seqs) == (8, 64)
    assert spec.prefill.kv_memory_bytes == spec.decode.kv_memory_bytes == 100_000_000
    assert spec.prefill.args == {"seed": 1, "swap-space": 2}
    assert spec.decode.args == {"seed": 3, "swap-space": 2}
    assert (spec.decode.simulated.decode_token_ms, spec.decode.simulated.kv_blocks) == (7, 99)
    assert (spec.prefill.simulated.decode_token_ms, spec.prefill.simulated.kv_blocks) == (7, 4096)


def test_a_spec_does_not_share_its_pools_with_another() -> None:
    first = load_spec(None, SETS | {"engine.max_num_seqs": 8})
    second = load_spec(None, SETS)
    assert (first.prefill.max_num_seqs, second.prefill.max_num_seqs) == (8, None)


@pytest.mark.parametrize(
    ("dotted", "text", "value"),
    [
        ("name", "123", "123"),
        ("model.served_name", "null", None),
        ("prefill.replicas", "3", 3),
        ("engine.enforce_eager", "false", False),
        ("engine.kv_memory_bytes", "2GiB", 2**31),
        ("prefill.hosts", "10.0.0.1,10.0.0.2", ["10.0.0.1", "10.0.0.2"]),
        ("prefill.hosts", "[10.0.0.1]", ["10.0.0.1"]),
        ("prefill.devices", "0,1", [0, 1]),
        ("prefill.devices", "GPU-ab12", ["GPU-ab12"]),
        ("engine.env", "{OMP_WAIT_POLICY: passive, N: 1}", {"OMP_WAIT_POLICY": "passive", "N": "1"}),
        ("router.admin_key_file", "true", "true"),
        ("router.idle_timeout_s", "1.5", 1.5),
    ],
)
def test_flag_text_is_read_as_the_field_wants_it(dotted: str, text: str, value: object) -> None:
    found: Any = load_spec(None, [*SETS.items(), f"{dotted}={text}"])
    for part in dotted.split("."):
        found = getattr(found, part)
    assert found == value


def test_flags_reach_into_mappings() -> None:
    spec = load_spec(
        None, [*SETS.items(), "engine.args.seed=7", "engine.env.A=1", "engine.args.trust-remote-code=true"]
    )
    assert spec.engine.args == {"seed": 7, "trust-remote-code": True}
    assert spec.engine.env == {"A": "1"}


def test_every_problem_is_reported_at_once() -> None:
    fields = fields_of({"prefill.replicas": 0, "router.port": "x", "nonsense": 1, "engine.env": {"A": True}})
    assert fields == ["model.path", "engine.env.A", "prefill.replicas", "router.port", "nonsense"]


def test_a_flag_that_is_no_pair_or_no_place_is_a_problem() -> None:
    assert fields_of(["prefill.replicas", "=3"]) == ["--set prefill.replicas", "--set =3"]
    assert fields_of(["name=x", "name.inner=1"]) == ["name.inner"]
    assert fields_of(["prefill.replicas=[1"]) == ["prefill.replicas"]


def test_a_frozen_spec_cannot_be_changed() -> None:
    spec = load_spec(None, SETS)
    with pytest.raises(ValueError, match="frozen"):
        spec.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"- a\n- b\n", "not a mapping"),
        (b"a: 1\na: 2\n", "line 2, column 1: 'a' is written twice"),
        (b"a: [1\nb: 2\n", "line 2, column 2"),
        (b"a: !!python/object/apply:os.system [ls]\n", "line 1, column 4"),
        (b"a: " + b"x" * FILE_MAX_BYTES, "bytes long"),
    ],
)
def test_a_file_that_is_no_spec(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_mapping(write(tmp_path, content))
    assert words in str(caught.value)


def test_a_missing_file_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="No such file"):
        read_mapping(tmp_path / "absent.yaml")
    assert read_mapping(write(tmp_path, "# nothing\n")) == {}


def test_relative_and_home_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    assert load_spec(None, {"model.path": "./m"}).model.path == str(tmp_path / "m")
    assert load_spec(None, {"model.path": "~/m"}).model.path == "/home/somebody/m"
    assert load_spec(None, {"model.path": "org/m"}).model.path == "org/m"
    assert load_spec(None, {"model.path": "/a/b/"}).model.served == "b"


@given(st.integers(min_value=0, max_value=10**15))
def test_bytes_as_people_write_them(number: int) -> None:
    assert parse_bytes(str(number)) == number
    assert parse_bytes(f"{number % 1000}KiB") == number % 1000 * 1024
    shown = parse_bytes(format_bytes(number))
    assert isinstance(shown, int)
    assert abs(shown - number) <= max(1, number // 1000)


@pytest.mark.parametrize("text", ["", "MB", "1.5.2GB", "-1", "10 parsecs", "1e9"])
def test_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)
