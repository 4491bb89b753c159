"""Differences between vLLM's versions, without vLLM."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from antiphon.connector import compat
from tests.connector.fake_vllm import adapter, image, request


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1+cu130", "0.30.0", "0.32.0", "0.32.1rc1.dev5+g1234"])
def test_versions_that_are_known(version: str) -> None:
    assert compat.supported_version(version) is None


@pytest.mark.parametrize("version", ["0.25.9", "0.33.0", "1.0.0", "dev", "", "0"])
def test_versions_that_are_not_known(version: str) -> None:
    reason = compat.supported_version(version)
    assert reason is not None
    assert "0.26 to 0.32" in reason


class Factory:
    """As ``KVConnectorFactory``."""

    _registry: dict[str, tuple[str, str]]

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        assert name not in cls._registry
        cls._registry[name] = (module_path, class_name)


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Puts modules in place of vLLM's; ``__`` in a name stands for a dot. Others of vLLM cannot be imported."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for name, content in modules.items():
        dotted = name.replace("__", ".")
        for end in range(1, dotted.count(".") + 1):
            package = ".".join(dotted.split(".")[: end + 1])
            monkeypatch.setitem(sys.modules, package, ModuleType(package))
        vars(sys.modules[dotted]).update(content)


def test_a_connector_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    Factory._registry = {}
    install(monkeypatch, vllm__distributed__kv_transfer__kv_connector__factory={"KVConnectorFactory": Factory})
    assert compat.register_connector_once("A", "m", "A") is True
    assert compat.register_connector_once("A", "m", "A") is False
    assert Factory._registry == {"A": ("m", "A")}


def test_without_a_factory_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    install(monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert compat.register_connector_once("A", "m", "A") is False
    assert "module path" in caplog.text


def test_hits_come_from_host_memory_where_there_are_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, vllm__v1__metrics__cache_hit_source={"CacheHitSource": SimpleNamespace(HOST="host")})
    assert compat.host_hit_source() == "host"
    install(monkeypatch)
    assert compat.host_hit_source() is None


def test_packing_is_what_vllm_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def choose(*facts: Any) -> str:
        asked.append(facts)
        return "amx"

    install(monkeypatch, vllm__v1__attention__backends__cpu_attn={"_get_attn_isa": choose})
    assert compat.attention_isa("bf16", 128, 64, "auto") == "amx"
    assert asked == [("bf16", 128, 64, "auto")]
    install(monkeypatch)
    assert compat.attention_isa("bf16", 128, 64, "auto") == "by-flags"


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 sse amx_tile avx512f avx2\nbugs : x\n", ["amx_tile", "avx2", "avx512f"]),
        ("Features : fp asimd i8mm bf16 sve2\n", ["asimd", "bf16", "i8mm", "sve2"]),
        ("nothing\n", []),
    ],
)
def test_flags_of_a_machine(tmp_path: Path, text: str, flags: list[str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    found = compat.cpu_flags(tmp_path / "cpuinfo").split("+")
    assert found[1:] == flags
    assert compat.cpu_flags(tmp_path / "missing") == found[0]


def test_packing_in_use() -> None:
    layers = {"a": SimpleNamespace(isa="amx"), "b": SimpleNamespace(), "c": SimpleNamespace(isa="vec")}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    assert compat.isas_in_use(config, ["a", "b", "missing"]) == {"amx"}
    assert compat.isas_in_use(SimpleNamespace(compilation_config=SimpleNamespace()), ["a"]) == frozenset()


def test_names_of_types() -> None:
    assert compat.dtype_name("bfloat16") == "bfloat16"
    assert compat.dtype_name("torch.bfloat16") == "bfloat16"


# ---- requests --------------------------------------------------------------------------------------------------------


def in_place(path: Path) -> Any:
    found = adapter(path)
    found.load_inplace = True
    return found


def test_an_ordinary_request_is_not_bypassed() -> None:
    assert compat.bypass_reason(request()) is None
    assert compat.bypass_reason(request(cache_salt="a", mm_features=[image("cat")])) is None
    assert compat.bypass_reason(request(lora_request=adapter(Path("x")))) is None


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"sampling_params": SimpleNamespace(prompt_logprobs=0)}, "prompt_logprobs"),
        ({"prompt_embeds": object()}, "embeddings"),
        ({"pooling_params": object()}, "pooling"),
        ({"sampling_params": None}, "pooling"),
        ({"skip_reading_prefix_cache": True}, "no cached prefix"),
        ({"resumable": True}, "streaming session"),
        ({"lora_request": in_place(Path("x"))}, "in place"),
        ({"mm_features": [image("")]}, "no hash"),
    ],
)
def test_requests_that_need_real_computation_are_bypassed(values: dict[str, Any], reason: str) -> None:
    found = compat.bypass_reason(request(**values))
    assert found is not None
    assert reason in found


def test_what_nixl_will_load() -> None:
    assert compat.is_remote_prefill(request(kv_transfer_params={"do_remote_prefill": True}))
    for params in (None, {}, {"do_remote_prefill": False}, {"do_remote_decode": True}):
        assert not compat.is_remote_prefill(request(kv_transfer_params=params))


def test_how_a_request_ended() -> None:
    ended = {
        name: compat.has_ended_early(request(status=SimpleNamespace(name=name)))
        for name in ("FINISHED_ABORTED", "FINISHED_ERROR", "FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "RUNNING")
    }
    assert ended == {
        "FINISHED_ABORTED": True,
        "FINISHED_ERROR": True,
        "FINISHED_STOPPED": False,
        "FINISHED_LENGTH_CAPPED": False,
        "RUNNING": False,
    }


# ---- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_is_read() -> None:
    output = SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id="new", block_ids=([1, 2],), num_computed_tokens=128)],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["same", "more", "back"],
            resumed_req_ids={"back"},
            new_block_ids=[None, ([7],), ([3, 4],)],
            num_computed_tokens=[10, 20, 30],
        ),
        num_scheduled_tokens={"new": 100, "same": 1, "more": 2, "back": 50},
        preempted_req_ids={"gone"},
    )
    step = compat.read_step(output)
    assert step.requests == (
        compat.ScheduledRequest("new", [1, 2], [], 128, 100),
        compat.ScheduledRequest("same", None, [], 10, 1),
        compat.ScheduledRequest("more", None, [7], 20, 2),
        compat.ScheduledRequest("back", [3, 4], [], 30, 50),
    )
    assert step.preempted == {"gone"}
    output.preempted_req_ids = None
    assert compat.read_step(output).preempted == frozenset()
    step.requests[0].table.append(9)  # type: ignore[union-attr]
    assert output.scheduled_new_reqs[0].block_ids == ([1, 2],)
