"""Every flag of vllm-router's P/D mode is taken, ignored or refused, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click
import pytest

from antiphon.cli.main import main
from antiphon.cli.router import router
from antiphon.cli.vllm_router_flags import FLAGS, POLICIES, SAME_POLICIES, Flag, flag_table, translate
from antiphon.config.router_spec import Policy, RouterSpec
from tests.cli.test_config_flags import router as parsed

DOCUMENT = Path(__file__).parents[2] / "docs" / "routing.md"
NUMBER = "7"

KNOWN_HERE = {
    "--host",
    "--port",
    "--policy",
    "--prefill-policy",
    "--decode-policy",
    "--prefill",
    "--decode",
    "--vllm-pd-disaggregation",
    "--log-level",
}
"""Flags of vllm-router that are flags of ours, with the same meaning."""

REPLACED: dict[str, dict[str, float]] = {
    "--max-payload-size": {"body_max_bytes": 4096},
    "--request-timeout-secs": {"prefill_timeout_s": 7.0, "first_token_timeout_s": 7.0},
    "--health-failure-threshold": {"health_failures_max": 7},
    "--health-check-timeout-secs": {"health_timeout_s": 7.0},
    "--health-check-interval-secs": {"health_interval_s": 7.0},
    "--cb-failure-threshold": {"request_failures_max": 7},
    "--cb-timeout-duration-secs": {"probe_wait_max_s": 7.0},
    "--disable-retries": {"retry_share": 0.0, "retry_floor": 0.0},
    "--max-concurrent-requests": {"connections_max": 7},
}


def words(flag: Flag) -> list[str]:
    """The flag with as many values as it takes."""
    value = "4096" if flag.name == "--max-payload-size" else NUMBER
    return [flag.name, *{"none": [], "one": [value], "many": ["a=b", "c=d"]}[flag.values]]


def of(fate: str) -> list[Flag]:
    return [flag for flag in FLAGS if flag.fate == fate]


def names(flags: list[Flag]) -> list[str]:
    return [flag.name for flag in flags]


def test_no_flag_stands_twice_or_hides_one_of_ours() -> None:
    assert len({flag.name for flag in FLAGS}) == len(FLAGS)
    ours = {name for option in router.params for name in [*option.opts, *option.secondary_opts]}
    assert ours & {flag.name for flag in FLAGS} == set()
    assert ours >= KNOWN_HERE
    assert {name for flag in of("replaced") for name in flag.ours if name.startswith("--")} <= ours


@pytest.mark.parametrize("flag", of("replaced"), ids=names(of("replaced")))
def test_replaced_flag_sets_the_knob(flag: Flag) -> None:
    done = translate(["--decode", "http://h:1", *words(flag), "--port", "1"])
    assert done.args[:2] + done.args[-2:] == ["--decode", "http://h:1", "--port", "1"]
    _, spec = parsed(*done.args)
    assert spec is not None
    assert {name: getattr(spec, name) for name in REPLACED[flag.name]} == REPLACED[flag.name]
    default = RouterSpec()
    assert all(getattr(default, name) != value for name, value in REPLACED[flag.name].items())
    (notice,) = done.notices
    assert notice.startswith(f"{' '.join(words(flag))} became --")


def test_every_replaced_flag_has_its_knobs_here() -> None:
    assert REPLACED.keys() == {flag.name for flag in of("replaced")}


@pytest.mark.parametrize("flag", of("ignored"), ids=names(of("ignored")))
def test_ignored_flag_is_left_out_and_says_why(flag: Flag) -> None:
    done = translate(["--port", "1", *words(flag), "--host", "h"])
    assert done.args == ["--port", "1", "--host", "h"]
    assert done.notices == [f"{' '.join(words(flag))} is ignored: {flag.note}"]
    assert len(flag.note) > 20


@pytest.mark.parametrize("flag", of("refused"), ids=names(of("refused")))
def test_refused_flag_names_what_to_use(flag: Flag) -> None:
    for given in (words(flag), [f"{flag.name}={NUMBER}"]):
        with pytest.raises(click.UsageError) as caught:
            translate(["--port", "1", *given])
        assert str(caught.value) == f"{flag.name} of vllm-router is not taken here: {flag.note}"
    assert len(flag.note) > 20


@pytest.mark.parametrize(
    ("given", "args", "notice"),
    [
        (["--kv-connector", "nixl"], [], "--kv-connector nixl is so anyway"),
        (["--health-check-endpoint=/health"], [], "--health-check-endpoint /health is so anyway"),
        (["--intra-node-data-parallel-size", "1"], [], "--intra-node-data-parallel-size 1 is so anyway"),
        (
            ["--retry-max-retries", "0"],
            ["--retry-share", "0", "--retry-floor", "0"],
            "--retry-max-retries 0 became --retry-share 0 --retry-floor 0",
        ),
        (["--cb_failure_threshold=7"], ["--request-failures-max", "7"], "--cb-failure-threshold 7 became --request-"),
        (["--prefill", "http://h:1", "none"], ["--prefill", "http://h:1"], "--prefill URL none: the bootstrap port"),
        (["--prefill", "http://h:1", "8998"], ["--prefill", "http://h:1"], "--prefill URL 8998: the bootstrap port"),
    ],
)
def test_special_values(given: list[str], args: list[str], notice: str) -> None:
    done = translate(given)
    assert done.args == args
    (said,) = done.notices
    assert said.startswith(notice)
    special = {flag.name for flag in FLAGS if flag.special}
    assert special == {
        "--kv-connector",
        "--health-check-endpoint",
        "--intra-node-data-parallel-size",
        "--retry-max-retries",
    }


def test_own_command_line_is_left_as_it_is() -> None:
    args = ["--policy", "round_robin", "--vllm-pd-disaggregation", "--prefill", "http://h:1", "--prefill=http://h:2"]
    args += ["--decode", "http://h:3", "--host", "0.0.0.0", "--port", "30000", "--no-request-id-tag"]
    assert translate(args) == type(translate([]))(args, [])


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_of_vllm_router_names_the_nearest(policy: str) -> None:
    for args in (["--policy", policy], [f"--prefill-policy={policy}"], ["--decode_policy", policy.replace("_", "-")]):
        with pytest.raises(click.UsageError, match="is not one of ours: "):
            translate(args)
    assert policy not in get_args(Policy)
    assert any(name in POLICIES[policy] for name in get_args(Policy))


@pytest.mark.parametrize("policy", SAME_POLICIES)
def test_policy_of_vllm_router_for_which_one_of_ours_stands(policy: str) -> None:
    ours, how = SAME_POLICIES[policy]
    assert policy not in get_args(Policy)
    for args in (["--policy", policy], [f"--prefill-policy={policy}"], ["--decode_policy", policy.replace("_", "-")]):
        done = translate([*args, "--port", "1"])
        flag = args[0].partition("=")[0].replace("_", "-")
        assert done.args == [flag, ours, "--port", "1"]
        assert done.notices == [f"{flag} {policy} became {flag} {ours}: {how}"]
        _, spec = parsed("--decode", "http://h:1", *done.args)
        assert spec is not None
        assert getattr(spec, flag.removeprefix("--").replace("-", "_")) == ours


def test_kv_aware_is_the_same_word() -> None:
    done = translate(["--policy", "kv_aware", "--kv-event-source", "tcp://h:5557"])
    assert done.args == ["--policy", "kv_aware"]
    assert "--kv-events-port" in done.notices[0]
    assert "docs/kv-routing.md" in done.notices[0]


def test_a_policy_that_is_missing() -> None:
    assert translate(["--policy"]).args == ["--policy"]  # for the parser to refuse


def test_a_value_that_is_missing() -> None:
    with pytest.raises(click.UsageError, match="'--queue-size' requires an argument"):
        translate(["--queue-size"])


def test_command_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["router", "--decode", "http://h:1", "--service-discovery"])
    assert caught.value.code == 2
    assert "POST /endpoints" in capsys.readouterr().err


def test_every_stage_deadline_is_a_flag() -> None:
    stages = ("connect", "prefill", "first-token", "idle", "handover", "health", "warm", "drain", "body-read")
    flags = [f"--{stage}-timeout-s" for stage in stages] + ["--abort-grace-s", "--health-interval-s"]
    _, spec = parsed(*(word for flag in flags for word in (flag, "3.5")))
    assert spec is not None
    found = {flag: getattr(spec, flag.removeprefix("--").replace("-", "_")) for flag in flags}
    assert found == dict.fromkeys(flags, 3.5)
    text = (DOCUMENT.parent / "configuration.md").read_text()
    assert [flag for flag in flags if f"`router.{flag.removeprefix('--').replace('-', '_')}`" not in text] == []


def test_document_shows_the_table() -> None:
    text = DOCUMENT.read_text()
    begin, end = "<!-- flags: begin -->", "<!-- flags: end -->"
    shown = text[text.index(begin) + len(begin) : text.index(end)]
    assert shown.strip() == flag_table().strip(), (
        "replace what stands between the marks by the output of: "
        'python -c "from antiphon.cli.vllm_router_flags import flag_table; print(flag_table())"'
    )
