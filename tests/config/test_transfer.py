"""``kv_transfer_config``: whatever users paste, the engines get what works, or the user hears why not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from antiphon.config.compile import Compiled
from antiphon.config.transfer import KNOWN
from tests.config.facts_for_tests import compiled_from

NIXL = {"kv_connector": "NixlConnector"}


def compiled(prefill: Any, **sets: Any) -> Compiled:
    dotted = {name.replace("__", "."): value for name, value in sets.items()}
    return compiled_from({"engine.device": "cpu", "prefill.kv_transfer_config": prefill, **dotted})


def written(result: Compiled) -> dict[str, Any]:
    """What the first prefill engine is given."""
    argv = next(plan.argv for plan in result.plans if plan.name == "prefill-0")
    config: dict[str, Any] = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    return config


def multi(*children: dict[str, Any], **top: Any) -> dict[str, Any]:
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": list(children)}, **top}


def test_a_nested_policy_is_hoisted_and_said() -> None:
    result = compiled(multi({**NIXL, "kv_role": "kv_producer", "kv_load_failure_policy": "recompute"}))
    config = written(result)
    (child,) = config["kv_connector_extra_config"]["connectors"]
    assert config["kv_load_failure_policy"] == "recompute"
    assert "kv_load_failure_policy" not in child
    assert child["kv_connector_extra_config"]["kv_lease_duration"] == 30
    assert (config["kv_role"], child["kv_role"]) == ("kv_producer", "kv_producer")
    assert "engine_id" in config
    assert "engine_id" not in child
    assert any("no effect in vLLM" in notice.message for notice in result.notices)
    assert result.problems == ()


def test_a_policy_at_the_top_wins_over_a_nested_one() -> None:
    child = {**NIXL, "kv_load_failure_policy": "recompute"}
    result = compiled(multi(child, kv_load_failure_policy="fail"))
    assert written(result)["kv_load_failure_policy"] == "fail"
    assert any("'fail' is set at the top level" in notice.message for notice in result.notices)


def test_default_policy_is_fail_and_handoff_decides_it() -> None:
    assert written(compiled(NIXL))["kv_load_failure_policy"] == "fail"
    result = compiled(NIXL, handoff__kv_load_failure_policy="recompute")
    assert written(result)["kv_load_failure_policy"] == "recompute"
    result = compiled({**NIXL, "kv_load_failure_policy": "fail"}, handoff__kv_load_failure_policy="recompute")
    assert written(result)["kv_load_failure_policy"] == "fail"


def test_json_text_as_pasted_from_a_command_line() -> None:
    text = json.dumps({**NIXL, "kv_role": "kv_producer", "kv_connector_extra_config": {"num_threads": 2}})
    extra = written(compiled(text))["kv_connector_extra_config"]
    assert extra == {"num_threads": 2, "backends": ["UCX"], "kv_lease_duration": 30}


def test_the_lease_of_the_user_bounds_the_hand_over() -> None:
    result = compiled({**NIXL, "kv_connector_extra_config": {"kv_lease_duration": 12}})
    argv = result.plans[-1].argv
    assert argv[argv.index("--handover-timeout-s") + 1] == "7.0"


@pytest.mark.parametrize("role", ["kv_both", None])
def test_a_role_that_suits_is_made_precise(role: str | None) -> None:
    raw = NIXL if role is None else {**NIXL, "kv_role": role}
    result = compiled(raw)
    assert written(result)["kv_role"] == "kv_producer"
    assert [n.field for n in result.notices if n.field.endswith("kv_role")] == (
        ["prefill.kv_transfer_config.kv_role"] if role else []
    )


@pytest.mark.parametrize("name", ["LMCacheMPConnector", "LMCacheConnectorV1", "AntiphonConnector"])
def test_a_cache_connector_alone_hands_nothing_over(name: str) -> None:
    (problem,) = compiled({"kv_connector": name, "kv_role": "kv_both"}).problems
    assert f"{name} alone" in problem.message
    assert "beside a NixlConnector in a MultiConnector" in problem.fix


@pytest.mark.parametrize(
    ("raw", "field", "words"),
    [
        ({}, "", "names no connector"),
        ({"kv_connector": "X"}, "", "not a connector of this version"),
        ({**NIXL, "kv_role": "kv_consumer"}, "kv_role", "in the prefill pool"),
        ({**NIXL, "kv_load_failure_policy": "ignore"}, "", "'ignore' does not exist"),
        ({**NIXL, "colour": 1}, "colour", "not a key"),
        ({**NIXL, "kv_connector_module_path": "x.y"}, "kv_connector_module_path", "not a key"),
        ({**NIXL, "kv_connector_extra_config": []}, "", ""),
        ({**NIXL, "kv_connector_extra_config": 3}, "kv_connector_extra_config", "not a mapping"),
        ({**NIXL, "kv_connector_extra_config": {"kv_lease_duration": 2}}, "kv_lease_duration", "not a lease"),
        ({**NIXL, "kv_buffer_device": "cuda"}, "kv_buffer_device", "runs on cpu"),
        (multi(), "connectors", "holds 0 NixlConnectors"),
        (multi(NIXL, NIXL), "connectors", "holds 2 NixlConnectors"),
        (multi(NIXL, multi(NIXL)), "connectors", "inside a MultiConnector"),
        (multi(NIXL, {"kv_connector": "MooncakeStoreConnector"}), "connectors[1]", "not part of this version"),
        ({"kv_connector": "MultiConnector"}, "connectors", "not a list"),
    ],
)
def test_what_cannot_work_is_a_problem(raw: dict[str, Any], field: str, words: str) -> None:
    problems = compiled(raw).problems
    if not words:
        assert problems == ()
        return
    assert len(problems) == 1, problems
    assert field in problems[0].field
    assert words in problems[0].message
    assert problems[0].fix


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["NixlConnector", "kv_both"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KNOWN, "connectors", "x"]), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(sorted(KNOWN)), JSON), st.booleans())
@example({"kv_connector_extra_config": {"connectors": "NixlConnector"}}, False)
@example({"kv_connector_extra_config": {"connectors": None}}, False)
def test_anything_gives_a_problem_or_a_configuration_that_keeps_the_rules(raw: dict[str, Any], as_multi: bool) -> None:
    raw["kv_connector"] = "MultiConnector" if as_multi else raw.get("kv_connector", "NixlConnector")
    result = compiled(raw)
    if result.problems:
        return
    config = written(result)
    assert config["kv_connector"] in ("NixlConnector", "MultiConnector")
    for child in config["kv_connector_extra_config"].get("connectors", []):
        assert child["kv_role"] == ("kv_both" if child["kv_connector"] == "AntiphonConnector" else "kv_producer")
    assert config["kv_role"] == "kv_producer"
    assert config["kv_load_failure_policy"] in ("fail", "recompute")
    assert config["engine_id"].startswith("prefill-0-")
