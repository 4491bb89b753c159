"""Configs for the tests of the Ray room: small, valid, to be changed by each test."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from antiphon.config.problems import SpecError
from antiphon.config.resolve import Machine
from antiphon.ray.mapping import Mapped, mapped
from antiphon.ray.schema import parse

DATA = Path(__file__).parent / "data"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
LAPTOP, GPU_HOST = Machine(cores=4, has_cuda=False), Machine(cores=64, has_cuda=True)
Change = tuple[str, Any]


def pd_config(*changes: Change) -> dict[str, Any]:
    """A ``pd_config`` with nothing but the model, then ``changes``: dotted paths and values; both. is both configs."""
    config = {"model_loading_config": {"model_id": MODEL}}
    values: dict[str, Any] = {"prefill_config": config, "decode_config": copy.deepcopy(config)}
    for path, value in changes:
        names = ("prefill_config", "decode_config") if path.startswith("both.") else (None,)
        for name in names:
            *parents, last = (path if name is None else path.replace("both", name, 1)).split(".")
            place = values
            for part in parents:
                place = place.setdefault(part, {})
            place[last] = copy.deepcopy(value)
    return values


def mapped_from(*changes: Change, machine: Machine = LAPTOP, **around: Any) -> Mapped:
    return mapped(parse(pd_config(*changes)), machine=machine, **around)


def refused(*changes: Change, machine: Machine = LAPTOP, **around: Any) -> dict[str, str]:
    """What is refused, each field with its message and remedy."""
    with pytest.raises(SpecError) as caught:
        mapped_from(*changes, machine=machine, **around)
    return {problem.field: f"{problem.message} -> {problem.fix}" for problem in caught.value.problems}


def said(found: Mapped) -> dict[str, str]:
    return {notice.field: notice.message for notice in found.notices}
