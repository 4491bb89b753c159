"""Prompts that are handed over on Ray with simulated engines, and an engine that says what is right."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine.simulated_processes import EngineProcess

NUM_TOKENS = 600


@pytest.fixture
def engine_alone(die_with_parent: Callable[[], None]) -> Iterator[EngineProcess]:
    """An engine that nothing is handed to."""
    engine = EngineProcess.start(die_with_parent, block_size_tokens=16)  # as the default of those behind Ray
    yield engine
    engine.stop()


def body_of(prompt: list[int]) -> dict[str, Any]:
    return {"model": "m", "prompt": prompt, "max_tokens": 8}


def prompt_of(number: int) -> list[int]:
    """``NUM_TOKENS`` tokens; another number shares no prefix."""
    return list(range(1000 * number, 1000 * number + NUM_TOKENS))


def right_choices(alone: EngineProcess, prompt: list[int]) -> Any:
    """The ``choices`` of the answer that computing alone gives."""
    status, answer = alone.ask("POST", "/v1/completions", body_of(prompt))
    assert status == 200, answer
    return json.loads(answer)["choices"]
