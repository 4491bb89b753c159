"""The vLLM plug-in without vLLM: in force only where the environment asks for it, and loud when it cannot be."""

from __future__ import annotations

import importlib
import logging
import sys
import time
from importlib.metadata import entry_points
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from antiphon.connector import nixl_progress, plugin, waiting


class FakeBindings:
    """Stands for NIXL's native module."""

    other = "kept"

    def __init__(self) -> None:
        self.made: list[tuple[str, Any]] = []

    def nixlAgent(self, name: str, config: Any) -> str:  # noqa: N802 - the name that NIXL's own module uses
        self.made.append((name, config))
        return f"agent {name}"


@pytest.fixture
def nixl_api(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    api = ModuleType("nixl._api")
    vars(api).update(
        nixlBind=FakeBindings(),
        nixl_thread_sync_t=SimpleNamespace(NIXL_THREAD_SYNC_STRICT=SimpleNamespace(value="strict")),
    )
    monkeypatch.setitem(sys.modules, "nixl", ModuleType("nixl"))
    monkeypatch.setitem(sys.modules, "nixl._api", api)
    return api


@pytest.fixture
def vllm_modules(monkeypatch: pytest.MonkeyPatch) -> list[ModuleType]:
    names = ("vllm", "vllm.distributed", "vllm.distributed.device_communicators")
    found = [ModuleType(f"{names[1]}.utils"), ModuleType(f"{names[2]}.shm_broadcast")]
    for module in [*map(ModuleType, names), *found]:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for module in found:
        vars(module)["sched_yield"] = time.sleep
    return found


def test_vllm_finds_the_plugin() -> None:
    (found,) = [point for point in entry_points(group="vllm.general_plugins") if point.name == "antiphon"]
    assert found.load() is plugin.install


def test_nothing_is_touched_unless_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, nixl_api: ModuleType, vllm_modules: list[ModuleType]
) -> None:
    bindings = vars(nixl_api)["nixlBind"]
    for value in (None, "1"):
        for variable in (nixl_progress.VARIABLE, waiting.VARIABLE):
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, value)
        plugin.install()
        assert vars(nixl_api)["nixlBind"] is bindings
        assert [vars(module)["sched_yield"] for module in vllm_modules] == [time.sleep, time.sleep]


def test_agents_get_no_progress_thread(monkeypatch: pytest.MonkeyPatch, nixl_api: ModuleType) -> None:
    monkeypatch.setenv(nixl_progress.VARIABLE, "0")
    real = vars(nixl_api)["nixlBind"]
    nixl_progress.install()
    nixl_progress.install()
    bindings = vars(nixl_api)["nixlBind"]
    config = SimpleNamespace(useProgThread=True, syncMode="none", listenPort=7)
    assert bindings.nixlAgent("a", config) == "agent a"
    assert real.made == [("a", config)]
    assert (config.useProgThread, config.syncMode, config.listenPort) == (False, "strict", 7)
    assert bindings.other == "kept"


def test_the_installed_nixl_is_one_that_the_plugin_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    api: Any = importlib.import_module("nixl._api")
    monkeypatch.setattr(api, "nixlBind", api.nixlBind)  # put back after the test
    monkeypatch.setenv(nixl_progress.VARIABLE, "0")
    nixl_progress.install()
    agent = api.nixl_agent("alone", api.nixl_agent_config(backends=[]))
    assert agent.name == "alone"
    config = api.nixlBind.nixlAgentConfig()
    api.nixlBind.nixlAgent("config", config)
    assert config.useProgThread is False


def test_processes_rest_instead_of_yielding(monkeypatch: pytest.MonkeyPatch, vllm_modules: list[ModuleType]) -> None:
    monkeypatch.setenv(waiting.VARIABLE, "0")
    waiting.install()
    naps: list[float] = []
    monkeypatch.setattr(waiting.time, "sleep", naps.append)
    for module in vllm_modules:
        vars(module)["sched_yield"]()
    assert naps == [waiting.REST_S, waiting.REST_S]


@pytest.mark.parametrize("part", [nixl_progress, waiting])
def test_what_it_does_not_know_is_left_alone_and_said(
    part: Any,
    monkeypatch: pytest.MonkeyPatch,
    nixl_api: ModuleType,
    vllm_modules: list[ModuleType],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(part.VARIABLE, "0")
    del vars(nixl_api)["nixlBind"]
    for module in vllm_modules:
        del vars(module)["sched_yield"]
    with caplog.at_level(logging.WARNING):
        part.install()
    assert caplog.records
    assert not any(hasattr(module, "sched_yield") for module in vllm_modules)
