"""Options derived from models, and the command that holds the verbs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from antiphon.cli.flags import given_values, model_from_flags, spec_options
from antiphon.cli.main import VERBS, dashes, main
from antiphon.config.compile import router_argv
from antiphon.config.knobs import knobs
from antiphon.config.load import load_spec
from antiphon.config.router_spec import RouterSpec
from antiphon.config.simulated_spec import SimulatedSpec
from antiphon.config.spec import Spec

CONTEXT: dict[str, Any] = {"token_normalize_func": dashes}


def run(model: type[Any], *args: str, skip: tuple[str, ...] = ()) -> tuple[Result, dict[str, Any]]:
    given: dict[str, Any] = {}

    @click.command(context_settings=CONTEXT)
    @spec_options(model, skip=skip)
    def command(**params: Any) -> None:
        given.update(given_values(params))

    return CliRunner().invoke(command, list(args)), given


def router(*args: str) -> tuple[Result, RouterSpec | None]:
    made: list[RouterSpec] = []

    @click.command(context_settings=CONTEXT)
    @spec_options(RouterSpec)
    def command(**params: Any) -> None:
        made.append(model_from_flags(RouterSpec, params))

    return CliRunner().invoke(command, list(args)), made[0] if made else None


def test_the_command_line_of_vllm_router() -> None:
    result, spec = router(
        *("--policy", "round_robin", "--vllm-pd-disaggregation"),
        *("--prefill", "http://10.0.0.1:8001", "--prefill", "http://10.0.0.2:8001"),
        *("--decode", "http://10.0.0.3:8002", "--host", "0.0.0.0", "--port", "30000"),
    )
    assert result.exit_code == 0, result.output
    assert spec == RouterSpec(
        host="0.0.0.0", prefill=["http://10.0.0.1:8001", "http://10.0.0.2:8001"], decode=["http://10.0.0.3:8002"]
    )


def test_what_the_compiler_writes_is_read_back_as_the_same_spec() -> None:
    spec = RouterSpec(
        prefill=["http://a:1"],
        decode=["http://b:2"],
        cache_servers=["http://c:3", "http://d:4"],
        vllm_pd_disaggregation=False,
        request_id_tag=False,
        access_log=True,
        idle_timeout_s=0.5,
        admin_key_file="/a b",
        receipts_max=0,
        log_level="debug",
    )
    argv = list(router_argv(spec))
    result, found = router(*argv[argv.index("router") + 1 :])
    assert result.exit_code == 0, result.output
    assert found == spec


def test_an_option_that_is_spelled_in_another_way_than_its_field_has_both() -> None:
    result, spec = router("--cache-server", "http://c:1", "--cache-servers", "http://d:2")
    assert result.exit_code == 0, result.output
    assert spec is not None
    assert spec.cache_servers == ["http://c:1", "http://d:2"]


def test_every_wrong_option_is_named() -> None:
    result, spec = router("--port", "-1", "--prefill", "nonsense", "--idle-timeout-s", "-1")
    assert (result.exit_code, spec) == (2, None)
    for words in ("--port: -1 is out of range", "--prefill[0]: 'nonsense' is not the URL", "--idle-timeout-s: -1.0"):
        assert words in result.output


def test_only_what_is_given_is_returned_and_typed() -> None:
    assert run(SimulatedSpec)[1] == {}
    result, given = run(SimulatedSpec, "--decode-token-ms", "2", "--kv_blocks", "7")
    assert result.exit_code == 0, result.output
    assert given == {"decode_token_ms": 2.0, "kv_blocks": 7}
    assert run(SimulatedSpec, "--kv-blocks", "x")[0].exit_code == 2


def test_dotted_options_of_a_whole_spec_load() -> None:
    result, given = run(
        Spec,
        *("--model.path", "org/tiny", "--prefill.replicas", "2", "--router.port", "4000", "--name", "x"),
        *("--prefill.hosts", "10.0.0.1", "--prefill.hosts", "10.0.0.2", "--engine.kv-memory-bytes", "400MB"),
        *("--engine.enforce-eager", "--decode.no-dev-mode", "--engine.args", "{seed: 1}", "--decode.devices", "3"),
        skip=("router.prefill", "router.decode"),
    )
    assert result.exit_code == 0, result.output
    spec = load_spec(None, given)
    assert (spec.model.path, spec.prefill.replicas, spec.router.port, spec.name) == ("org/tiny", 2, 4000, "x")
    assert spec.prefill.hosts == ["10.0.0.1", "10.0.0.2"]
    assert (spec.engine.kv_memory_bytes, spec.engine.enforce_eager) == (400_000_000, True)
    assert (spec.decode.dev_mode, spec.prefill.args, spec.decode.devices) == (False, {"seed": 1}, ["3"])


def test_skipped_fields_have_no_option() -> None:
    result, _ = run(Spec, "--router.prefill", "http://a:1", skip=("router.prefill",))
    assert (result.exit_code, "No such option" in result.output) == (2, True)
    assert run(Spec, "--supervisor.restart.window-s", "1", skip=("supervisor",))[0].exit_code == 2


def test_every_knob_is_an_option_with_its_description() -> None:
    result, _ = run(Spec, "--help")
    text = " ".join(result.output.split())
    for knob in knobs(Spec):
        assert f"--{knob.flag}" in text.replace("- ", "-"), knob.path
    assert "Prompt tokens computed a second" in text


def test_version_and_help_list_every_verb_without_importing_one() -> None:
    assert CliRunner().invoke(main, ["--version"]).output.startswith("antiphon, version ")
    output = CliRunner().invoke(main, ["--help"]).output
    assert all(f"\n  {verb} " in output for verb in VERBS)


@pytest.mark.parametrize(("typed", "words"), [("confg", "Did you mean 'config'?"), ("qqq", "The verbs are demo, ")])
def test_an_unknown_verb(typed: str, words: str) -> None:
    result = CliRunner().invoke(main, [typed])
    assert result.exit_code == 2
    assert words in result.output


def test_every_verb_can_be_used() -> None:
    for verb in VERBS:
        result = CliRunner().invoke(main, [verb, "--help"])
        assert result.exit_code == 0, (verb, result.output, result.exception)
        assert result.output.startswith("Usage: "), verb


def imported_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after ``code``."""
    tail = "; import sys; print(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.process
def test_the_command_and_the_router_spec_import_little() -> None:
    modules = imported_by("import antiphon.cli.main")
    assert not {"pydantic", "yaml", "rich", "asyncio", "antiphon.cli.config"} & modules
    modules = imported_by("import antiphon.config.router_spec, antiphon.cli.flags")
    assert not {"yaml", "antiphon.config.spec", "antiphon.config.compile"} & modules


@pytest.mark.parametrize(
    ("args", "flag", "bare", "off"),
    [
        (["up", "--tracing.enabled", "true"], "--tracing.enabled", "--tracing.enabled", "--tracing.no-enabled"),
        (["up", "--router.port", "1", "--cache.no-shared", "0"], "--cache.no-shared", "--cache.shared", "--cache.no-"),
        (["router", "--access_log", "yes"], "--access_log", "--access-log", "--no-access-log"),
        (["coordinator", "--enable-tracing", "false"], "--enable-tracing", "--enable-tracing", "--no-enable-tracing"),
    ],
)
def test_a_value_behind_a_flag_that_takes_none(args: list[str], flag: str, bare: str, off: str) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert f"Got unexpected extra argument ({args[-1]}). {flag} takes no value: write {bare} for true" in result.output
    assert f", or {off}" in result.output


def test_another_extra_argument_names_no_flag() -> None:
    result = CliRunner().invoke(main, ["up", "--router.port", "1", "true"])
    assert "Got unexpected extra argument (true)\n" in result.output
    assert "takes no value" not in result.output
