"""Fixtures of the connector's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from tests.connector.harness import Harness
from tests.connector.stub_vllm import connector_module


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
