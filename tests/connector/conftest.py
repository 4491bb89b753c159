"""Fixtures of the connector's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from antiphon.connector import weights_digests
from tests.connector.harness import Harness
from tests.connector.stub_vllm import connector_module


@pytest.fixture(autouse=True)
def weights_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests of weights are kept: not with those of the user."""
    folder = tmp_path / "kept-digests"
    monkeypatch.setattr(weights_digests, "cache_folder", lambda: folder)
    return folder


@pytest.fixture(scope="module")
def stubbed_connector() -> Iterator[ModuleType]:
    """``vllm_connector`` on stubs of vLLM."""
    with connector_module() as module:
        yield module


@pytest.fixture
def new_harness(stubbed_connector: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Harness]]:
    """Makes harnesses, and closes them."""
    made: list[Harness] = []

    def make(*arguments: Any, **options: Any) -> Harness:
        harness = Harness(stubbed_connector, monkeypatch, *arguments, **options)
        made.append(harness)
        return harness

    yield make
    for harness in made:
        harness.close()
